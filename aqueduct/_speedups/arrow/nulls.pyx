"""Nulls where a schema allows none, at any depth, through Arrow's C data interface.

A null counts only where it can be seen. A value inside a null struct or list may be anything. So
may values that no list, union or dictionary index refers to. Arrays whose counts say that they have
no nulls are passed over; bitmaps are read only where a count is above zero.
"""

cimport cython
from libc.stdint cimport (
    INT64_MAX,
    int8_t,
    int16_t,
    int32_t,
    int64_t,
    uint8_t,
    uint16_t,
    uint32_t,
    uintptr_t,
)
from libc.stdlib cimport calloc, free, malloc, qsort

from aqueduct._speedups.arrow.columns cimport ArrowArray, count_bits
from aqueduct.errors import LocalProtocolError

__all__ = ["KINDS", "NotNull"]

cdef enum Kind:
    NULLS               # every value is null
    LEAF                # a validity bitmap, and nothing inside that matters
    STRUCT
    LIST
    LARGE_LIST
    FIXED_LIST
    LIST_VIEW
    LARGE_LIST_VIEW
    SPARSE_UNION
    DENSE_UNION
    DICTIONARY          # signed indices
    DICTIONARY_UNSIGNED
    RUN_ENDS

KINDS = {
    "nulls": NULLS,
    "leaf": LEAF,
    "struct": STRUCT,
    "list": LIST,
    "large_list": LARGE_LIST,
    "fixed_list": FIXED_LIST,
    "list_view": LIST_VIEW,
    "large_list_view": LARGE_LIST_VIEW,
    "sparse_union": SPARSE_UNION,
    "dense_union": DENSE_UNION,
    "dictionary": DICTIONARY,
    "dictionary_unsigned": DICTIONARY_UNSIGNED,
    "run_ends": RUN_ENDS,
}
"""The kinds of arrays: what they are called here, and their numbers."""

cdef enum:
    MOST_DEPTH = 200    # levels; Arrow's own limit for messages is 64

cdef enum Outcome:
    DONE
    OUTSIDE             # an offset, an index or a run points outside its array
    NO_MEMORY

cdef struct Span:
    int64_t start
    int64_t end

cdef struct Walk:
    const Node *nodes
    const Link *links
    int64_t *found      # nulls of each node that must have none


@cython.final
@cython.auto_pickle(False)
cdef class NotNull:
    """Which arrays of a schema's batches must not have nulls.

    ``nodes`` are rows (kind, strict, width, owner, links), a parent before its children. The first
    is the batch itself, a struct. ``kind`` is a key of ``KINDS``. ``strict``: nulls are not
    allowed. ``width``: bytes of an index or of a run's end, or the values of a fixed list.
    ``owner``: the node that its nulls count for, which is itself or before it. ``links`` has the
    children that must be checked, as (slot, code, node). The slot is the number of the child,
    -1 for a dictionary's values. The code is the type code of a union's child. The node is its
    place among ``nodes``.
    Raises LocalProtocolError for nodes that are no tree.
    """

    def __cinit__(self, nodes):
        cdef list rows = list(nodes)
        cdef Node *node
        cdef Link *link
        cdef list depths = [0] * len(rows)
        cdef int place, at = 0
        self.count = len(rows)
        if not rows or rows[0][0] != "struct":
            raise LocalProtocolError("the first node is the batch, a struct")
        self.nodes = <Node *> calloc(self.count, sizeof(Node))
        total = sum([len(inner) for _, _, _, _, inner in rows])
        self.links = <Link *> calloc(total + 1, sizeof(Link))
        if self.nodes == NULL or self.links == NULL:
            raise MemoryError
        for place, (kind, strict, width, owner, inner) in enumerate(rows):
            if not 0 <= owner <= place:
                raise LocalProtocolError(f"{rows[place]} is no node of a schema")
            node = &self.nodes[place]
            node.kind = KINDS[kind]
            node.strict = strict
            node.width = width
            node.owner = owner
            node.link_at = at
            for slot, code, child in inner:
                if not place < child < self.count or slot < -1 or width < 0:
                    raise LocalProtocolError(f"{rows[place]} is no node of a schema")
                depths[child] = depths[place] + 1
                if depths[child] > MOST_DEPTH:
                    raise LocalProtocolError(f"a schema has at most {MOST_DEPTH} levels")
                link = &self.links[at]
                link.slot, link.code, link.node = slot, code, child
                at += 1
            node.links = at - node.link_at

    def __dealloc__(self):
        free(self.nodes)
        free(self.links)

    def find(self, batch):
        """The first node of a ``pyarrow.RecordBatch`` with nulls that it must not have; or None.

        As (node, nulls). Raises ValueError if an offset, an index or a run points outside.
        """
        cdef ArrowArray exported
        cdef int64_t nulls = 0
        cdef int node
        exported.release = NULL
        batch._export_to_c(<uintptr_t> &exported)
        try:
            node = self.look(&exported, &nulls)
        finally:
            if exported.release != NULL:
                exported.release(&exported)
        return None if node < 0 else (node, nulls)

    cdef int look(self, const ArrowArray *batch, int64_t *nulls) except -2:
        """The first node with nulls that it must not have, and how many; -1: there is none.

        Raises ValueError and MemoryError.
        """
        cdef Walk walk
        cdef Outcome outcome
        cdef int place, node = -1
        walk.nodes, walk.links = self.nodes, self.links
        walk.found = <int64_t *> calloc(self.count, sizeof(int64_t))
        if walk.found == NULL:
            raise MemoryError
        with nogil:
            if clean(&walk, 0, batch):
                outcome = DONE
            else:
                outcome = visit(&walk, 0, batch, 0, batch.length)
        for place in range(self.count):
            if walk.found[place]:
                node, nulls[0] = place, walk.found[place]
                break
        free(walk.found)
        if outcome == NO_MEMORY:
            raise MemoryError
        if outcome == OUTSIDE:
            raise ValueError("an offset, an index or a run points outside its array")
        return node

    cdef bint accepts(self, const ArrowArray *batch) except -1:
        """Whether no node has nulls that it must not have; False for a damaged batch, too.

        Raises MemoryError.
        """
        cdef int64_t nulls = 0
        try:
            return self.look(batch, &nulls) < 0
        except ValueError:  # something points outside its array; the general way says what
            return False


cdef inline const uint8_t *validity(int kind, const ArrowArray *array) noexcept nogil:
    """The bitmap of an array that may have nulls; NULL: it has none, or its kind has no bitmap."""
    if kind == NULLS or kind >= SPARSE_UNION and kind != DICTIONARY and kind != DICTIONARY_UNSIGNED:
        return NULL
    if array.null_count == 0 or array.n_buffers < 1:
        return NULL
    return <const uint8_t *> array.buffers[0]


cdef inline const ArrowArray *inside(const ArrowArray *array, int slot) noexcept nogil:
    """A child of an array, or its dictionary; NULL: there is none."""
    if slot < 0:
        return array.dictionary
    return array.children[slot] if slot < array.n_children else NULL


cdef bint clean(const Walk *walk, int place, const ArrowArray *array) noexcept nogil:
    """Whether the counts alone say that no array here has a null that it must not have."""
    cdef const Node *node = &walk.nodes[place]
    cdef const Link *link
    cdef const ArrowArray *child
    cdef int number
    if node.strict:
        if node.kind == NULLS and array.length or validity(node.kind, array) != NULL:
            return False
    for number in range(node.link_at, node.link_at + node.links):
        link = &walk.links[number]
        child = inside(array, link.slot)
        if child == NULL or not clean(walk, link.node, child):
            return False
    return True


cdef Outcome visit(
    Walk *walk, int place, const ArrowArray *array, int64_t start, int64_t length
) noexcept nogil:
    """Counts the nulls among ``length`` values from number ``start``, all of which can be seen."""
    cdef const Node *node = &walk.nodes[place]
    cdef const uint8_t *bits
    cdef int64_t at, end, run
    cdef Outcome outcome
    if length <= 0:
        return DONE
    if start < 0 or start > array.length - length or array.offset < 0:
        return OUTSIDE
    at = array.offset + start
    bits = validity(node.kind, array)
    if node.strict:
        if node.kind == NULLS:
            walk.found[node.owner] += length
        elif bits != NULL:
            walk.found[node.owner] += length - count_bits(bits, at, length)
    if node.links == 0:
        return DONE
    if node.kind == LIST_VIEW or node.kind == LARGE_LIST_VIEW:
        return visit_views(walk, node, array, bits, at, length)
    if node.kind == DICTIONARY or node.kind == DICTIONARY_UNSIGNED or node.kind == DENSE_UNION:
        return visit_referred(walk, node, array, bits, at, length)
    if node.kind == SPARSE_UNION:
        return visit_sparse(walk, node, array, at, length)
    if node.kind == RUN_ENDS:
        return visit_runs(walk, node, array, at, length)
    if bits == NULL:
        return visit_seen(walk, node, array, at, length)
    if all_clean(walk, node, array):
        return DONE
    end = at + length
    while at < end:
        run = run_of(bits, at, end, False)
        at += run
        run = run_of(bits, at, end, True)
        if run:
            outcome = visit_seen(walk, node, array, at, run)
            if outcome != DONE:
                return outcome
        at += run
    return DONE


cdef bint all_clean(const Walk *walk, const Node *node, const ArrowArray *array) noexcept nogil:
    cdef const ArrowArray *child
    cdef int number
    for number in range(node.link_at, node.link_at + node.links):
        child = inside(array, walk.links[number].slot)
        if child == NULL or not clean(walk, walk.links[number].node, child):
            return False
    return True


cdef Outcome visit_seen(
    Walk *walk, const Node *node, const ArrowArray *array, int64_t at, int64_t length
) noexcept nogil:
    """What is inside ``length`` structs or lists that are not null, from number ``at``.

    That one counts from the beginning of the buffers.
    """
    cdef const ArrowArray *child
    cdef const int32_t *short32
    cdef const int64_t *long64
    cdef int64_t first = at, last
    cdef int number
    cdef Outcome outcome
    if node.kind == FIXED_LIST:
        if node.width == 0:
            return DONE
        if at > INT64_MAX / node.width - length:
            return OUTSIDE
        first = at * node.width
        length *= node.width
    elif node.kind != STRUCT:
        if array.n_buffers < 2 or array.buffers[1] == NULL:
            return OUTSIDE
        if node.kind == LARGE_LIST:
            long64 = <const int64_t *> array.buffers[1] + at
            first, last = long64[0], long64[length]
        else:
            short32 = <const int32_t *> array.buffers[1] + at
            first, last = short32[0], short32[length]
        if first < 0 or last < first:
            return OUTSIDE
        length = last - first
    for number in range(node.link_at, node.link_at + node.links):
        child = inside(array, walk.links[number].slot)
        if child == NULL:
            return OUTSIDE
        outcome = visit(walk, walk.links[number].node, child, first, length)
        if outcome != DONE:
            return outcome
    return DONE


cdef Outcome visit_views(
    Walk *walk,
    const Node *node,
    const ArrowArray *array,
    const uint8_t *bits,
    int64_t at,
    int64_t length,
) noexcept nogil:
    """The same for list views, which may overlap: each value inside is looked at once."""
    cdef bint large = node.kind == LARGE_LIST_VIEW
    cdef const ArrowArray *child = inside(array, walk.links[node.link_at].slot)
    cdef int inner = walk.links[node.link_at].node
    cdef Span *spans
    cdef int64_t place, start, size, count = 0, done = 0
    cdef Outcome outcome = DONE
    if child == NULL or array.n_buffers < 3 or array.buffers[1] == NULL or array.buffers[2] == NULL:
        return OUTSIDE
    if clean(walk, inner, child):
        return DONE
    if length > INT64_MAX / <int64_t> sizeof(Span):
        return NO_MEMORY
    spans = <Span *> malloc(length * sizeof(Span))
    if spans == NULL:
        return NO_MEMORY
    for place in range(at, at + length):
        if bits != NULL and not bits[place >> 3] >> (place & 7) & 1:
            continue
        if large:
            start = (<const int64_t *> array.buffers[1])[place]
            size = (<const int64_t *> array.buffers[2])[place]
        else:
            start = (<const int32_t *> array.buffers[1])[place]
            size = (<const int32_t *> array.buffers[2])[place]
        if size == 0:
            continue
        if start < 0 or size < 0 or start > child.length - size:
            free(spans)
            return OUTSIDE
        spans[count].start, spans[count].end = start, start + size
        count += 1
    qsort(spans, <size_t> count, sizeof(Span), compare)
    for place in range(count):
        start = max(spans[place].start, done)
        if start < spans[place].end:
            outcome = visit(walk, inner, child, start, spans[place].end - start)
            if outcome != DONE:
                break
            done = spans[place].end
    free(spans)
    return outcome


cdef int compare(const void *one, const void *other) noexcept nogil:
    cdef int64_t first = (<const Span *> one).start, second = (<const Span *> other).start
    return (first > second) - (first < second)


cdef Outcome visit_referred(
    Walk *walk,
    const Node *node,
    const ArrowArray *array,
    const uint8_t *bits,
    int64_t at,
    int64_t length,
) noexcept nogil:
    """The values of a dense union or a dictionary: each that is referred to is looked at once."""
    cdef const ArrowArray *child
    cdef const Link *link
    cdef uint8_t *used
    cdef int64_t place, value, run, end
    cdef int number
    cdef Outcome outcome = DONE
    for number in range(node.link_at, node.link_at + node.links):
        link = &walk.links[number]
        child = inside(array, link.slot)
        if child == NULL or array.n_buffers < 2 or array.buffers[1] == NULL:
            return OUTSIDE
        if clean(walk, link.node, child):
            continue
        # Pages of it that nothing refers to take no memory.
        used = <uint8_t *> calloc(1, <size_t> (child.length + 7 >> 3) + 1)
        if used == NULL:
            return NO_MEMORY
        for place in range(at, at + length):
            if node.kind == DENSE_UNION:
                if (<const int8_t *> array.buffers[0])[place] != link.code:
                    continue
                value = (<const int32_t *> array.buffers[1])[place]
            else:
                if bits != NULL and not bits[place >> 3] >> (place & 7) & 1:
                    continue
                value = index_at(node, array.buffers[1], place)
            if not 0 <= value < child.length:
                free(used)
                return OUTSIDE
            used[value >> 3] |= <uint8_t> (1 << (value & 7))
        place, end = 0, child.length
        while place < end and outcome == DONE:
            place += run_of(used, place, end, False)
            run = run_of(used, place, end, True)
            outcome = visit(walk, link.node, child, place, run)
            place += run
        free(used)
        if outcome != DONE:
            return outcome
    return DONE


cdef inline int64_t index_at(const Node *node, const void *indices, int64_t place) noexcept nogil:
    """An index of a dictionary. One above the signed numbers of 64 bits is below zero."""
    cdef bint plus = node.kind == DICTIONARY_UNSIGNED
    if node.width == 1:
        return (<const uint8_t *> indices)[place] if plus else (<const int8_t *> indices)[place]
    if node.width == 2:
        return (<const uint16_t *> indices)[place] if plus else (<const int16_t *> indices)[place]
    if node.width == 4:
        return (<const uint32_t *> indices)[place] if plus else (<const int32_t *> indices)[place]
    return (<const int64_t *> indices)[place]


cdef Outcome visit_sparse(
    Walk *walk, const Node *node, const ArrowArray *array, int64_t at, int64_t length
) noexcept nogil:
    """The children of a sparse union, each where it is the one that counts."""
    cdef const ArrowArray *child
    cdef const Link *link
    cdef const int8_t *codes
    cdef int64_t place, first, end = at + length
    cdef int number
    cdef Outcome outcome
    for number in range(node.link_at, node.link_at + node.links):
        link = &walk.links[number]
        child = inside(array, link.slot)
        if child == NULL or array.n_buffers < 1 or array.buffers[0] == NULL:
            return OUTSIDE
        if clean(walk, link.node, child):
            continue
        codes = <const int8_t *> array.buffers[0]
        place = at
        while place < end:
            if codes[place] != link.code:
                place += 1
                continue
            first = place
            while place < end and codes[place] == link.code:
                place += 1
            outcome = visit(walk, link.node, child, first, place - first)
            if outcome != DONE:
                return outcome
    return DONE


cdef Outcome visit_runs(
    Walk *walk, const Node *node, const ArrowArray *array, int64_t at, int64_t length
) noexcept nogil:
    """The values of the runs that ``length`` values from number ``at`` belong to."""
    cdef const ArrowArray *ends = inside(array, 0)
    cdef const ArrowArray *values = inside(array, 1)
    cdef int64_t first, last
    if ends == NULL or values == NULL or ends.n_buffers < 2 or ends.buffers[1] == NULL:
        return OUTSIDE
    first = run_at(node, ends, at)
    last = run_at(node, ends, at + length - 1)
    if last >= ends.length:
        return OUTSIDE
    return visit(walk, walk.links[node.link_at].node, values, first, last - first + 1)


cdef int64_t run_at(const Node *node, const ArrowArray *ends, int64_t place) noexcept nogil:
    """The number of the run with value ``place``."""
    cdef int64_t low = 0, high = ends.length, middle, end
    while low < high:
        middle = low + (high - low >> 1)
        if node.width == 2:
            end = (<const int16_t *> ends.buffers[1])[ends.offset + middle]
        elif node.width == 4:
            end = (<const int32_t *> ends.buffers[1])[ends.offset + middle]
        else:
            end = (<const int64_t *> ends.buffers[1])[ends.offset + middle]
        if end > place:
            high = middle
        else:
            low = middle + 1
    return low


cdef int64_t run_of(const uint8_t *bits, int64_t at, int64_t end, bint wanted) noexcept nogil:
    """How many bits from ``at`` on are as ``wanted``, before ``end``."""
    cdef int64_t start = at
    cdef uint8_t whole = 0xFF if wanted else 0
    while at < end:
        if at & 7 == 0 and end - at >= 8 and bits[at >> 3] == whole:
            at += 8
            continue
        if (bits[at >> 3] >> (at & 7) & 1) != wanted:
            break
        at += 1
    return at - start
