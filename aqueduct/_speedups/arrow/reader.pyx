"""Payloads of common types into record batches that point into them.

Payloads come from a peer and may hold anything. What is accepted here is what any writer makes of a
sound batch, and it is looked at completely before Arrow sees it: each number of the metadata, each
buffer's place, each offset inside. All else is left to Arrow's own reader, which knows what is
wrong with it, or that nothing is. No byte outside the payload is read, whatever it says.
"""

cimport cython
from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy

from aqueduct._speedups.arrow.columns cimport (
    BITS,
    FIXED,
    FIXED_LIST,
    LARGE_BYTES,
    LARGE_LIST,
    NULLS,
    STRUCT,
    VALUES_LIMIT,
    ArrowArray,
    Columns,
    Step,
    count_bits,
)

from aqueduct._speedups.arrow.nulls cimport NotNull


cdef extern from *:
    """
    #if PY_VERSION_HEX < 0x030D0000
    #define Py_IsFinalizing _Py_IsFinalizing
    #endif
    """
    bint Py_IsFinalizing() nogil
    bint Py_IsInitialized() nogil

__all__ = ["BatchReader"]

cdef enum:
    # From here on a payload takes long enough to be looked at while other threads run.
    LONG_LOOK = 256 << 10
    VERSION_5 = 4
    RECORD_BATCH = 3

# What an imported batch needs, in one block of memory: this, then its arrays, then the pointers
# to children, then those to buffers.
cdef struct Landed:
    Py_buffer payload

cdef struct Walk:
    const Step *steps
    int place                   # the next step
    bint inside                 # whether offsets are looked at one by one
    bint doubtful               # there are nulls where there must be none, perhaps out of sight
    const uint8_t *nodes        # the next node
    const uint8_t *buffers      # the next buffer
    const uint8_t *body
    int64_t size                # bytes of the body
    ArrowArray *arrays
    ArrowArray **children
    const void **pointers

# A flatbuffer's table, its bounds known to be good.
cdef struct Table:
    const uint8_t *data         # of the flatbuffer
    int64_t size
    int64_t at
    int64_t length
    int64_t fields              # where its vtable has the offsets of fields
    int64_t count               # how many


cdef uint64_t ZERO = 0


@cython.final
@cython.auto_pickle(False)
cdef class BatchReader:
    """Reads the batches of one layout; where it cannot, Arrow's own reader has to.

    ``import_`` is ``pyarrow.RecordBatch._import_from_c``, called with an address and ``schema``,
    which must have the layout. Unless ``inside``, of all offsets only the first and the last are
    looked at, so that a value may lie outside the payload.
    """

    def __cinit__(
        self, Columns columns not None, import_, schema, bint inside=True, NotNull nulls=None
    ):
        """``nulls`` looks at batches with nulls in arrays that must not have any.

        Without it such batches are left to Arrow's own reader.
        """
        self._columns = columns
        self._nulls = nulls
        self._import = import_
        self._schema = schema
        self._inside = inside

    cpdef object read(self, object payload):
        """The ``pyarrow.RecordBatch`` of a payload, whose memory it keeps; None if not for this.

        Raises BufferError if the payload is not contiguous.
        """
        cdef Columns columns = self._columns
        cdef Landed *landed
        cdef ArrowArray batch
        cdef bint good, doubtful = False
        landed = <Landed *> malloc(
            sizeof(Landed)
            + columns.nodes * (sizeof(ArrowArray) + sizeof(ArrowArray *))
            + (columns.buffers + 1) * sizeof(void *)
        )
        if landed == NULL:
            raise MemoryError
        try:
            PyObject_GetBuffer(payload, &landed.payload, PyBUF_SIMPLE)
        except BaseException:
            free(landed)
            raise
        if landed.payload.len >= LONG_LOOK:
            with nogil:
                good = look(columns, landed, &batch, self._inside, &doubtful)
        else:
            good = look(columns, landed, &batch, self._inside, &doubtful)
        try:
            if good and doubtful:
                good = self._nulls is not None and self._nulls.accepts(&batch)
        except BaseException:
            release_landed(landed)
            raise
        if not good:
            release_landed(landed)
            return None
        try:
            return self._import(<uintptr_t> &batch, self._schema)
        finally:
            if batch.release != NULL:  # it did not come to take it over
                release_landed(landed)


cdef void release_landed(Landed *landed) noexcept:
    """Frees C memory and a buffer: nothing can raise."""
    PyBuffer_Release(&landed.payload)
    free(landed)


cdef void release_batch(ArrowArray *batch) noexcept nogil:
    """What Arrow calls when nothing points into the payload any more, in any thread."""
    batch.release = NULL
    if not Py_IsInitialized() or Py_IsFinalizing():
        return  # the process is ending, and its memory with it
    with gil:
        release_landed(<Landed *> batch.private_data)


cdef void release_child(ArrowArray *array) noexcept nogil:
    """Children go with their batch; Arrow does not take them apart."""
    array.release = NULL


cdef bint look(
    Columns columns, Landed *landed, ArrowArray *batch, bint inside, bint *doubtful
) noexcept nogil:
    """Looks at the whole payload and describes its batch; False: it is not for this reader.

    ``doubtful``: there are nulls where there must be none, perhaps out of sight.
    """
    cdef const uint8_t *data = <const uint8_t *> landed.payload.buf
    cdef int64_t size = landed.payload.len, rows, metadata
    cdef int column
    cdef Walk walk
    # Arrow expects its numbers on their own boundaries.
    if <uintptr_t> data & 7 or size < 8 or load32(data) != <uint32_t> 0xFFFFFFFF:
        return False
    metadata = <int32_t> load32(data + 4)
    if metadata < 8 or metadata > size - 8 or metadata & 7:
        return False
    walk.body = data + 8 + metadata
    walk.size = size - 8 - metadata
    rows = read_metadata(data + 8, metadata, columns, &walk)
    if rows < 0:
        return False
    walk.steps = columns.steps
    walk.place = 0
    walk.inside = inside
    walk.doubtful = False
    walk.arrays = <ArrowArray *> (landed + 1)
    walk.children = <ArrowArray **> (walk.arrays + columns.nodes)
    walk.pointers = <const void **> (walk.children + columns.nodes)
    for column in range(columns.columns):
        walk.children[column] = &walk.arrays[walk.place]
        if not look_at(&walk, rows, rows):
            return False
    walk.pointers[columns.buffers] = NULL
    batch.length = rows
    batch.null_count = batch.offset = 0
    batch.n_buffers = 1
    batch.buffers = &walk.pointers[columns.buffers]
    batch.n_children = columns.columns
    batch.children = walk.children
    batch.dictionary = NULL
    batch.release = release_batch
    batch.private_data = landed
    doubtful[0] = walk.doubtful
    return True


cdef int64_t read_metadata(
    const uint8_t *data, int64_t size, Columns columns, Walk *walk
) noexcept nogil:
    """The number of rows, and where nodes and buffers are; -1: not for this reader."""
    cdef Table message, batch
    cdef int64_t at, rows
    message.data = data
    message.size = size
    if not read_table(&message, load32(data)) or message.count > 5:
        return -1
    at = field_at(&message, 0, 2)
    if at <= 0 or load16(data + at) != VERSION_5:
        return -1
    at = field_at(&message, 1, 1)
    if at <= 0 or data[at] != RECORD_BATCH:
        return -1
    at = field_at(&message, 3, 8)
    if at < 0 or (load64(data + at) if at else 0) != walk.size:
        return -1
    if field_at(&message, 4, 4):  # metadata of the message's own
        return -1
    at = field_at(&message, 2, 4)
    batch = message
    if at <= 0 or not read_table(&batch, at + load32(data + at)) or batch.count > 5:
        return -1
    at = field_at(&batch, 0, 8)
    if at < 0:
        return -1
    rows = load64(data + at) if at else 0
    if rows < 0 or rows > VALUES_LIMIT:
        return -1
    if field_at(&batch, 3, 4):  # compression
        return -1
    if vector_at(&batch, 4, 8, 0) < 0:  # variadic buffers: no layout has them
        return -1
    at = vector_at(&batch, 1, 16, columns.nodes)
    if at < 0:
        return -1
    walk.nodes = data + at
    at = vector_at(&batch, 2, 16, columns.buffers)
    if at < 0:
        return -1
    walk.buffers = data + at
    return rows


cdef bint read_table(Table *table, int64_t at) noexcept nogil:
    """Whether a table is at ``at``, inside the flatbuffer with its vtable."""
    cdef int64_t fields, count, length
    if at < 4 or at & 3 or at > table.size - 4:
        return False
    fields = at - <int32_t> load32(table.data + at)
    if fields < 0 or fields & 1 or fields > table.size - 4:
        return False
    count = load16(table.data + fields)
    length = load16(table.data + fields + 2)
    if count < 4 or count & 1 or count > table.size - fields:
        return False
    if length < 4 or length > table.size - at:
        return False
    table.at = at
    table.length = length
    table.fields = fields + 4
    table.count = (count - 4) >> 1
    return True


cdef int64_t field_at(const Table *table, int field, int64_t size) noexcept nogil:
    """Where a field of ``size`` bytes is; 0: it is absent; -1: it is not where it could be."""
    cdef int64_t offset, at
    if field >= table.count:
        return 0
    offset = load16(table.data + table.fields + 2 * field)
    if offset == 0:
        return 0
    at = table.at + offset
    if offset < 4 or offset > table.length - size or at & (size - 1):
        return -1
    return at


cdef int64_t vector_at(
    const Table *table, int field, int64_t width, int64_t count
) noexcept nogil:
    """Where the ``count`` members of a vector are, numbers of 64 bits; -1: nowhere."""
    cdef int64_t at = field_at(table, field, 4), offset
    if at < 0:
        return -1
    if at == 0:
        return 0 if count == 0 else -1
    offset = load32(table.data + at)
    at += offset
    if offset == 0 or at & 3 or at > table.size - 4 or load32(table.data + at) != count:
        return -1
    at += 4
    if count and (at & 7 or count > (table.size - at) / width):
        return -1
    return at


cdef bint look_at(Walk *walk, int64_t least, int64_t most) noexcept nogil:
    """Looks at the next array, of ``least`` to ``most`` values, and at its children."""
    cdef const Step *step = &walk.steps[walk.place]
    cdef ArrowArray *array = &walk.arrays[walk.place]
    cdef const void **pointers = &walk.pointers[step.buffer_at]
    cdef int64_t length = load64(walk.nodes), nulls = load64(walk.nodes + 8), size = 0
    cdef int child
    walk.nodes += 16
    walk.place += 1
    if length < least or length > most or nulls < 0 or nulls > length:
        return False
    if step.strict and nulls:
        walk.doubtful = True
    array.length = length
    array.null_count = nulls
    array.offset = 0
    array.n_buffers = step.buffers
    array.n_children = step.children
    array.buffers = pointers
    array.children = &walk.children[step.child_at]
    array.dictionary = NULL
    array.release = release_child
    array.private_data = NULL
    if step.kind == NULLS:
        return nulls == length
    if not next_buffer(walk, pointers, &size):
        return False
    if nulls == 0:
        pointers[0] = NULL  # as Arrow reads it, whatever the bitmap says
    elif size < length + 7 >> 3:
        return False
    elif length - count_bits(<const uint8_t *> pointers[0], 0, length) != nulls:
        return False
    if step.kind == FIXED:
        return next_buffer(walk, pointers + 1, &size) and (
            step.width == 0 or length <= size / step.width
        )
    if step.kind == BITS:
        return next_buffer(walk, pointers + 1, &size) and length + 7 >> 3 <= size
    if step.kind == STRUCT:
        least = most = length
    elif step.kind == FIXED_LIST:
        if step.width and length > VALUES_LIMIT / step.width:
            return False
        least, most = length * step.width, VALUES_LIMIT
    else:
        if not look_at_offsets(walk, step, pointers, length, &least):
            return False
        if step.children == 0:
            return next_buffer(walk, pointers + 2, &size) and least <= size
        most = VALUES_LIMIT
    for child in range(step.children):
        array.children[child] = &walk.arrays[walk.place]
        if not look_at(walk, least, most):
            return False
    return True


cdef bint next_buffer(Walk *walk, const void **pointer, int64_t *size) noexcept nogil:
    """Where the next buffer is, inside the body."""
    cdef int64_t offset = load64(walk.buffers), length = load64(walk.buffers + 8)
    walk.buffers += 16
    if offset < 0 or offset & 7 or offset > walk.size or not 0 <= length <= walk.size - offset:
        return False
    pointer[0] = walk.body + offset
    size[0] = length
    return True


cdef bint look_at_offsets(
    Walk *walk, const Step *step, const void **pointers, int64_t length, int64_t *last
) noexcept nogil:
    """Whether offsets begin at zero or later and never fall; where the last one is."""
    cdef bint large = step.kind == LARGE_BYTES or step.kind == LARGE_LIST
    cdef int64_t size = 0, place
    cdef const int32_t *short32
    cdef const int64_t *long64
    cdef uint32_t seen32 = 0
    cdef uint64_t seen64 = 0
    if not next_buffer(walk, pointers + 1, &size):
        return False
    last[0] = 0
    if length == 0 and size == 0:
        pointers[1] = &ZERO  # some writers leave the only offset out
        return True
    if size / (8 if large else 4) <= length:
        return False
    # No sign bit is ever seen, in an offset or in the difference of two, if all is well: while the
    # offsets are not below zero, the difference of two does not overflow.
    if large:
        long64 = <const int64_t *> pointers[1]
        last[0] = long64[length]
        if walk.inside:
            for place in range(length):
                seen64 |= <uint64_t> long64[place] | (
                    <uint64_t> long64[place + 1] - <uint64_t> long64[place]
                )
        seen64 |= <uint64_t> long64[0] | (<uint64_t> last[0] - <uint64_t> long64[0])
        return last[0] >= 0 and seen64 >> 63 == 0 and (length or last[0] == 0)
    short32 = <const int32_t *> pointers[1]
    last[0] = short32[length]
    if walk.inside:
        for place in range(length):
            seen32 |= <uint32_t> short32[place] | (
                <uint32_t> short32[place + 1] - <uint32_t> short32[place]
            )
    seen32 |= <uint32_t> short32[0] | (<uint32_t> short32[length] - <uint32_t> short32[0])
    return last[0] >= 0 and seen32 >> 31 == 0 and (length or last[0] == 0)


cdef inline uint16_t load16(const uint8_t *data) noexcept nogil:
    cdef uint16_t number
    memcpy(&number, data, 2)
    return number


cdef inline uint32_t load32(const uint8_t *data) noexcept nogil:
    cdef uint32_t number
    memcpy(&number, data, 4)
    return number


cdef inline int64_t load64(const uint8_t *data) noexcept nogil:
    cdef int64_t number
    memcpy(&number, data, 8)
    return number
