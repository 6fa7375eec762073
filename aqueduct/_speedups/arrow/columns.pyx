"""The layout of a schema's record batches, for schemas of the common types.

A layout is a list of steps, one for each array, a parent before its children. That is the order of
Arrow's IPC format, so writer and reader walk a batch and its metadata side by side.
"""

cimport cython
from libc.stdint cimport int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy

from aqueduct.errors import LocalProtocolError

__all__ = ["DEPTH_LIMIT", "KINDS", "NODES_LIMIT", "Columns"]

cdef enum:
    DEEPEST = 32        # writer and reader call themselves for each level
    MOST_NODES = 4096   # more are not common

DEPTH_LIMIT = DEEPEST
"""Levels of arrays that a layout may have."""
NODES_LIMIT = MOST_NODES
"""Arrays that a layout may have."""
KINDS = {
    "nulls": NULLS,
    "bits": BITS,
    "fixed": FIXED,
    "bytes": BYTES,
    "large_bytes": LARGE_BYTES,
    "struct": STRUCT,
    "list": LIST,
    "large_list": LARGE_LIST,
    "fixed_list": FIXED_LIST,
}
"""The kinds of arrays: what they are called here, and their numbers in the compiled modules."""

cdef int *BUFFERS = [0, 2, 2, 3, 3, 1, 2, 2, 1]


@cython.final
@cython.auto_pickle(False)
cdef class Columns:
    """The layout of a schema's batches: for each array one of ``steps``.

    A step is (kind, width, children, strict). ``kind`` is a key of ``KINDS``, ``width`` the bytes
    of a value (or the values of a fixed list), ``children`` how many arrays right inside it
    follow, ``strict`` says that it has no nulls.
    Raises LocalProtocolError for steps that are no layout.
    """

    def __cinit__(self, steps):
        cdef list rows = list(steps)
        cdef Step *step
        cdef int place, end = 0
        self.nodes = len(rows)
        if not 0 < self.nodes <= MOST_NODES:
            raise LocalProtocolError(f"a layout has 1 to {MOST_NODES} arrays, not {self.nodes}")
        self.steps = <Step *> calloc(self.nodes, sizeof(Step))
        if self.steps == NULL:
            raise MemoryError
        for place, (kind, width, children, strict) in enumerate(rows):
            step = &self.steps[place]
            step.kind = KINDS[kind]
            step.width = width
            step.children = children
            step.strict = strict
            step.buffers = BUFFERS[<int> step.kind]
            step.buffer_at = self.buffers
            self.buffers += step.buffers
            if step.kind == STRUCT:
                good = step.children >= 0
            else:
                good = step.children == (step.kind >= LIST)
            if not good or not 0 <= step.width <= VALUES_LIMIT:
                raise LocalProtocolError(f"{rows[place]} is no array of a layout")
        while end < self.nodes:
            end = self._end(end, 0)
            self.columns += 1
        self._place_children()
        self._make_head()

    def __dealloc__(self):
        free(self.steps)
        free(self.head)

    cdef int _end(self, int place, int depth) except -1:
        """Where the arrays inside this one end."""
        cdef int end = place + 1
        if depth >= DEEPEST:
            raise LocalProtocolError(f"a layout has at most {DEEPEST} levels")
        for _ in range(self.steps[place].children):
            if end >= self.nodes:
                raise LocalProtocolError(f"array {place} of a layout lacks children")
            end = self._end(end, depth + 1)
        return end

    cdef void _place_children(self) noexcept:
        """The children of one array lie side by side; those of the batch come first."""
        cdef int place, taken = self.columns
        for place in range(self.nodes):
            self.steps[place].child_at = taken
            taken += self.steps[place].children

    cdef int _make_head(self) except -1:
        """The metadata of these batches: a flatbuffer ``Message`` whose header is a RecordBatch.

        Only the numbers differ from batch to batch. Padded so that the body begins at a multiple
        of 64.
        """
        cdef int nodes = 16 * self.nodes, buffers = 16 * self.buffers
        cdef int size = (NODES_AT + nodes + 8 + buffers + 63) & ~63
        cdef uint8_t *head = <uint8_t *> calloc(1, size)
        if head == NULL:
            raise MemoryError
        self.head = head
        self.head_size = size
        store32(head, <uint32_t> 0xFFFFFFFF)
        store32(head + 4, size - 8)
        head += 8  # offsets below are those of the flatbuffer
        store32(head, 16)  # the root: the table at 16
        # Message: version, type of header, header, body's length. Its vtable is at 4.
        store_table(head + 4, 4, [4, 6, 16, 8])
        store16(head + 20, 4)  # V5
        head[22] = 3  # RecordBatch
        store32(head + 32, 16)  # the table at 48
        # RecordBatch: length, nodes, buffers. Its vtable is at 36.
        store_table(head + 36, 3, [8, 4, 16])
        store32(head + 52, 16)  # the vector at 68
        store32(head + 64, 12 + nodes)  # the vector at 76 + nodes
        store32(head + 68, self.nodes)
        store32(head + 76 + nodes, self.buffers)
        return 0


# These three write to C memory that has room: nothing can raise.

cdef void store_table(uint8_t *out, int count, int *fields) noexcept:
    """A vtable, and 12 bytes after it begins its table, of 20 bytes."""
    cdef int field
    store16(out, 4 + 2 * count)
    store16(out + 2, 20)
    for field in range(count):
        store16(out + 4 + 2 * field, fields[field])
    store32(out + 12, 12)


cdef inline void store16(uint8_t *out, int number) noexcept:
    cdef uint16_t value = <uint16_t> number
    memcpy(out, &value, 2)


cdef inline void store32(uint8_t *out, uint32_t number) noexcept:
    memcpy(out, &number, 4)


cdef int64_t count_bits(const uint8_t *bits, int64_t start, int64_t length) noexcept nogil:
    """How many of ``length`` bits from ``start`` are set. No byte is read that has none of them."""
    cdef int64_t found = 0
    cdef uint64_t word
    bits += start >> 3
    start &= 7
    if start and length > 0:
        word = bits[0] >> start
        if length < 8 - start:
            word &= (<uint64_t> 1 << length) - 1
        found += ones(word)
        length -= 8 - start
        bits += 1
    while length >= 64:
        memcpy(&word, bits, 8)
        found += ones(word)
        bits += 8
        length -= 64
    while length > 0:
        word = bits[0]
        if length < 8:
            word &= (<uint64_t> 1 << length) - 1
        found += ones(word)
        bits += 1
        length -= 8
    return found


cdef inline int64_t ones(uint64_t word) noexcept nogil:
    word -= word >> 1 & <uint64_t> 0x5555555555555555
    word = (word & <uint64_t> 0x3333333333333333) + (word >> 2 & <uint64_t> 0x3333333333333333)
    word = (word + (word >> 4)) & <uint64_t> 0x0F0F0F0F0F0F0F0F
    return <int64_t> (word * <uint64_t> 0x0101010101010101 >> 56)
