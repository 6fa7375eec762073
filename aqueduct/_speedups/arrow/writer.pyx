"""Record batches of common types into payloads, without copying their columns.

The batch gives its buffers by Arrow's C data interface. It is kept until the last BufferSlice of
them is
gone. Slices are sent as Arrow's own writer sends them: cut to their rows, offsets counted from
zero, bits moved to the beginning of a byte.
"""

cimport cython
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from libc.stdint cimport INT64_MAX, int32_t, int64_t, uint8_t, uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy, memset

from aqueduct._speedups.arrow.columns cimport (
    BITS,
    BODY_AT,
    FIXED,
    FIXED_LIST,
    LARGE_BYTES,
    LARGE_LIST,
    NODES_AT,
    NULLS,
    ROWS_AT,
    STRUCT,
    VALUES_LIMIT,
    ArrowArray,
    Columns,
    Step,
    count_bits,
)
from aqueduct._speedups.arrow.nulls cimport NotNull
from aqueduct._speedups.base.buffers cimport count_copied, new_piece

__all__ = ["BatchEncoder", "BatchWriter", "Encoded"]

cdef enum:
    # Bodies below so many bytes are copied: that costs less than to keep their parts apart.
    SMALL_BODY = 1 << 10
    # To make more than so many bytes anew, for a slice, takes milliseconds.
    QUICK = 4 << 20

cdef enum Outcome:
    DONE
    UNCOMMON        # not for this writer
    NO_MEMORY
    LENGTHY         # it takes long

cdef struct Walk:
    const Step *steps
    int place               # the next step
    Part *part              # the next part
    uint8_t *nodes          # where the next node goes
    uint8_t *buffers        # where the next buffer goes
    int64_t body            # bytes of the body so far
    bint doubtful           # there are nulls where there must be none, perhaps out of sight

cdef uint64_t ZERO = 0
cdef tuple PADS = tuple(bytes(size) for size in range(8))


@cython.final
@cython.freelist(32)
@cython.auto_pickle(False)
cdef class Encoded:
    """One batch, ready to leave: ``buffers`` joined are its payload of ``size`` bytes.

    The buffers are the batch's own memory; they must not change until they have left.
    """

    def __init__(self, list buffers not None, Py_ssize_t size):
        self.buffers = buffers
        self.size = size


@cython.auto_pickle(False)
cdef class BatchEncoder:
    """Makes payloads of the batches of one schema as far as that is plain; the base of Encoder.

    ``broken``: why it is of no use any more. ``lengthy``: the last batch takes milliseconds: much
    of it has to be made anew, because it is a slice. Then ``plain`` leaves it alone, if ``quick``.
    """

    def __init__(self, schema, BatchWriter writer, type kind not None, type refusal not None):
        """``kind``: the class of batches. ``refusal``: what Arrow raises; its own writer says why.
        """
        self.schema = schema
        self._fast = writer
        self._kind = kind
        self._refusal = refusal

    cpdef Encoded plain(self, object batch, bint quick=True):
        """The payload of a batch; None if it is not plain, or not right, or ``lengthy``."""
        cdef object schema
        self.lengthy = False
        if self._fast is None or self.broken is not None or type(batch) is not self._kind:
            return None
        schema = batch.schema
        if schema is not self.schema and not schema.equals(self.schema):
            return None
        try:
            return self._fast.encode(batch, quick, &self.lengthy)
        except self._refusal:
            return None


@cython.final
@cython.auto_pickle(False)
cdef class BatchWriter:
    """Writes the batches of one layout; where it cannot, Arrow's own writer has to."""

    def __cinit__(self, Columns columns not None, NotNull nulls=None):
        """``nulls`` looks at batches with nulls in arrays that must not have any.

        Without it such batches are left to Arrow's own writer.
        """
        self._columns = columns
        self._nulls = nulls

    def write(self, batch):
        """The payload of a ``pyarrow.RecordBatch`` as (buffers, size), or None.

        None says that the batch is not of the layout, has nulls where it must not, or more rows
        than a batch may have. The columns are in the buffers themselves, but for small ones: they
        must not change until these are gone.
        """
        cdef bint lengthy = False
        cdef Encoded encoded = self.encode(batch, False, &lengthy)
        return None if encoded is None else (encoded.buffers, encoded.size)

    cdef Encoded encode(self, object batch, bint quick, bint *lengthy):
        """None, too, with ``lengthy`` set: it is to be ``quick``, and would take long."""
        cdef ArrowArray exported
        exported.release = NULL
        batch._export_to_c(<uintptr_t> &exported)
        try:
            return self._encode(batch, &exported, quick, lengthy)
        finally:
            # Now, while it is at hand: the batch keeps its columns, and it is immutable.
            if exported.release != NULL:
                exported.release(&exported)

    cdef Encoded _encode(
        self, object batch, const ArrowArray *exported, bint quick, bint *lengthy
    ):
        cdef Source source
        cdef Columns columns = self._columns
        cdef Encoded encoded
        cdef Part *parts
        cdef Walk walk
        cdef Outcome outcome
        if exported.n_children != columns.columns or exported.length > VALUES_LIMIT:
            return None
        source = Source.__new__(Source)
        source.batch = batch
        source.room = QUICK if quick else INT64_MAX
        parts = <Part *> malloc(columns.buffers * sizeof(Part) + columns.head_size)
        if parts == NULL:
            raise MemoryError
        try:
            walk.nodes = <uint8_t *> (parts + columns.buffers)
            memcpy(walk.nodes, columns.head, columns.head_size)
            store64(walk.nodes + ROWS_AT, exported.length)
            walk.nodes += NODES_AT
            walk.buffers = walk.nodes + 16 * columns.nodes + 8
            walk.steps = columns.steps
            walk.place = 0
            walk.part = parts
            walk.body = 0
            walk.doubtful = False
            if quick:
                outcome = gather_columns(&walk, source, exported)
            else:
                with nogil:
                    outcome = gather_columns(&walk, source, exported)
            if outcome == NO_MEMORY:
                raise MemoryError
            lengthy[0] = outcome == LENGTHY
            if outcome != DONE:
                return None
            if walk.doubtful and (self._nulls is None or not self._nulls.accepts(exported)):
                return None
            store64(<uint8_t *> (parts + columns.buffers) + BODY_AT, walk.body)
            encoded = Encoded.__new__(Encoded)
            encoded.buffers = assemble(source, columns, parts, walk.body)
            encoded.size = columns.head_size + walk.body
            return encoded
        finally:
            free(parts)


@cython.final
@cython.freelist(64)
@cython.no_gc
@cython.auto_pickle(False)
cdef class Source:
    """The batch behind the buffers of a payload, and what was made for it; kept by each of them."""

    def __dealloc__(self):
        cdef Made *made = self.made
        while made != NULL:
            self.made = made.next
            free(made)
            made = self.made

    cdef uint8_t *make(self, int64_t size) noexcept nogil:
        """Memory that lives as long as this; NULL: none, or no ``room`` if that is below zero."""
        cdef Made *made
        self.room -= size
        if self.room < 0:
            return NULL
        made = <Made *> malloc(<size_t> size + sizeof(Made))
        if made == NULL:
            return NULL
        made.next = self.made
        self.made = made
        return <uint8_t *> (made + 1)


cdef Outcome gather_columns(Walk *walk, Source source, const ArrowArray *batch) noexcept nogil:
    """``gather`` of each; what fails is an Outcome, nothing can raise."""
    cdef int64_t column
    cdef Outcome outcome
    for column in range(batch.n_children):
        if batch.children[column].length < batch.offset + batch.length:
            return UNCOMMON
        outcome = gather(walk, source, batch.children[column], batch.offset, batch.length)
        if outcome != DONE:
            return outcome
    return DONE


cdef Outcome gather(
    Walk *walk, Source source, const ArrowArray *array, int64_t first, int64_t length
) noexcept nogil:
    """Node and buffers of ``length`` values of an array, from number ``first``, then its children.

    The caller has compared both with the array's own length.
    """
    cdef const Step *step = &walk.steps[walk.place]
    cdef int64_t start = array.offset + first, nulls = array.null_count
    cdef int64_t inner = start, values = length
    cdef int child
    cdef Outcome outcome
    walk.place += 1
    if (
        array.n_buffers != step.buffers or array.n_children != step.children
        or array.dictionary != NULL
    ):
        return UNCOMMON
    if step.kind == NULLS:
        nulls = length
    elif array.buffers[0] == NULL or length == 0:
        nulls = 0
    elif nulls < 0 or (nulls and length != array.length):
        nulls = length - count_bits(<const uint8_t *> array.buffers[0], start, length)
    if step.strict and nulls:
        walk.doubtful = True
    store64(walk.nodes, length)
    store64(walk.nodes + 8, nulls)
    walk.nodes += 16
    if step.buffers:
        if nulls:
            outcome = add_bits(walk, source, <const uint8_t *> array.buffers[0], start, length)
        else:
            outcome = add(walk, NULL, 0)
        if outcome != DONE:
            return outcome
    if step.kind == FIXED:
        if step.width == 0:
            return add(walk, NULL, 0)
        return add(
            walk, <const uint8_t *> array.buffers[1] + start * step.width, length * step.width
        )
    if step.kind == BITS:
        return add_bits(walk, source, <const uint8_t *> array.buffers[1], start, length)
    if step.kind == NULLS:
        return DONE
    if step.kind == FIXED_LIST:
        if start + length > VALUES_LIMIT / (step.width + 1):
            return UNCOMMON
        inner *= step.width
        values *= step.width
    elif step.kind != STRUCT:
        outcome = add_offsets(walk, source, step, array, start, length, &inner, &values)
        if outcome != DONE:
            return outcome
        if step.children == 0:
            if array.buffers[2] == NULL and values:
                return UNCOMMON
            return add(walk, <const uint8_t *> array.buffers[2] + inner, values)
    for child in range(step.children):
        if array.children[child].length < inner + values:
            return UNCOMMON
        outcome = gather(walk, source, array.children[child], inner, values)
        if outcome != DONE:
            return outcome
    return DONE


cdef Outcome add(Walk *walk, const uint8_t *data, int64_t size) noexcept nogil:
    """The next buffer, at the next multiple of 8."""
    if data == NULL and size:
        return UNCOMMON
    store64(walk.buffers, walk.body)
    store64(walk.buffers + 8, size)
    walk.buffers += 16
    walk.part.data = data
    walk.part.size = size
    walk.part += 1
    walk.body += size + 7 & ~7
    return DONE


cdef Outcome add_bits(
    Walk *walk, Source source, const uint8_t *bits, int64_t start, int64_t length
) noexcept nogil:
    """``length`` bits from number ``start``; moved if these do not begin a byte."""
    cdef int64_t size = length + 7 >> 3, last = (start & 7) + length - 1 >> 3, place
    cdef int shift = start & 7
    cdef uint8_t *made
    if bits == NULL and length:
        return UNCOMMON
    if length == 0:
        return add(walk, NULL, 0)
    bits += start >> 3
    if not shift:
        return add(walk, bits, size)
    made = source.make(size)
    if made == NULL:
        return LENGTHY if source.room < 0 else NO_MEMORY
    for place in range(last):
        made[place] = bits[place] >> shift | bits[place + 1] << (8 - shift)
    if last < size:
        made[last] = bits[last] >> shift
    return add(walk, made, size)


cdef Outcome add_offsets(
    Walk *walk,
    Source source,
    const Step *step,
    const ArrowArray *array,
    int64_t start,
    int64_t length,
    int64_t *inner,
    int64_t *values,
) noexcept nogil:
    """The offsets of some values, counted from zero, and where what they point to is."""
    cdef bint large = step.kind == LARGE_BYTES or step.kind == LARGE_LIST
    cdef int64_t place, first, last
    cdef const int32_t *short32 = NULL
    cdef const int64_t *long64 = NULL
    cdef uint8_t *made
    if length == 0:
        inner[0] = values[0] = 0
        return add(walk, <const uint8_t *> &ZERO, 8 if large else 4)
    if array.buffers[1] == NULL:
        return UNCOMMON
    if large:
        long64 = <const int64_t *> array.buffers[1] + start
        first, last = long64[0], long64[length]
    else:
        short32 = <const int32_t *> array.buffers[1] + start
        first, last = short32[0], short32[length]
    if first < 0 or last < first:
        return UNCOMMON
    inner[0] = first
    values[0] = last - first
    if first == 0:
        if large:
            return add(walk, <const uint8_t *> long64, 8 * (length + 1))
        return add(walk, <const uint8_t *> short32, 4 * (length + 1))
    made = source.make((8 if large else 4) * (length + 1))
    if made == NULL:
        return LENGTHY if source.room < 0 else NO_MEMORY
    if large:
        for place in range(length + 1):
            (<uint64_t *> made)[place] = <uint64_t> long64[place] - <uint64_t> first
        return add(walk, made, 8 * (length + 1))
    for place in range(length + 1):
        (<uint32_t *> made)[place] = <uint32_t> short32[place] - <uint32_t> first
    return add(walk, made, 4 * (length + 1))


cdef list assemble(Source source, Columns columns, const Part *parts, int64_t body):
    """Head and parts as a list of buffers; as one of bytes, if they are small."""
    cdef const uint8_t *head = <const uint8_t *> (parts + columns.buffers)
    cdef Py_ssize_t room = columns.head_size + (body if body < SMALL_BODY else 0)
    cdef bytes first = PyBytes_FromStringAndSize(NULL, room)
    cdef uint8_t *out = <uint8_t *> PyBytes_AS_STRING(first)
    cdef list buffers = [first]
    cdef int place
    cdef Py_ssize_t size
    memcpy(out, head, columns.head_size)
    out += columns.head_size
    for place in range(columns.buffers):
        size = parts[place].size
        if size == 0:
            continue
        if body < SMALL_BODY:
            memcpy(out, parts[place].data, size)
            memset(out + size, 0, -size & 7)
            out += size + (-size & 7)
            continue
        buffers.append(new_piece(source, parts[place].data, size))
        if size & 7:
            buffers.append(PADS[-size & 7])
    if body < SMALL_BODY:
        count_copied(body)
    return buffers


cdef inline void store64(uint8_t *out, int64_t number) noexcept nogil:
    memcpy(out, &number, 8)
