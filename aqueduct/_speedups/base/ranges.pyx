"""A set of uint64 numbers, kept as ranges in a balanced tree.

An AVL tree over a pool of nodes: its height is below 1.45 log2(ranges + 2) whatever a peer sends,
which a tree balanced by chance would not promise. Touching ranges are joined at once.
"""

cimport cython
from libc.stdint cimport uint32_t, uint64_t
from libc.stdlib cimport free, malloc, realloc
from libc.string cimport memcpy, memset

from aqueduct._speedups.base.varint cimport to_uint64

__all__ = ["RangeSet"]

cdef enum:
    # Node 0 and one range: most sets never hold more.
    FIRST_ROOM = 2

# What a set without memory of its own has for node 0, which is read and never written.
cdef Node NOBODY

cdef uint64_t HIGHEST = 0xFFFFFFFFFFFFFFFF
cdef object TWO_64 = 1 << 64


@cython.final
@cython.auto_pickle(False)
cdef class RangeSet:
    """Half-open ranges [start, stop) of numbers below 2^64.

    Every change and question costs O(log n) for n ranges, plus the ranges that it joins, removes
    or returns. Arguments outside 0 <= start < stop <= 2^64 raise ValueError.
    """

    def __cinit__(self, ranges=()):
        self.nodes = &NOBODY
        self._used = 1
        for start, stop in ranges:
            self.add(start, stop)

    def __dealloc__(self):
        if self._room:
            free(self.nodes)

    # Changes.

    def add(self, start, stop):
        """Covers [start, stop); returns how many numbers are new."""
        cdef uint64_t first = 0, last = 0, added = 0
        cdef bint was_empty = self.spans == 0
        to_span(start, stop, &first, &last)
        self.add_span(first, last, &added)
        # All 2^64 numbers at once are 0 in the arithmetic of 64 bits.
        return TWO_64 if added == 0 and was_empty else added

    def remove(self, start, stop):
        """Uncovers [start, stop); returns how many numbers that were."""
        cdef uint64_t first = 0, last = 0, removed = 0
        cdef bint was_all = self.covered == 0 and self.spans > 0
        to_span(start, stop, &first, &last)
        self.remove_span(first, last, &removed)
        return TWO_64 if removed == 0 and was_all else removed

    def pop_first(self):
        """Removes and returns the lowest range, None if there is none."""
        cdef uint32_t node = self.leftmost()
        cdef tuple pair
        cdef uint64_t removed = 0
        if node == 0:
            return None
        pair = span_pair(self.nodes[node].first, self.nodes[node].last)
        self.remove_span(self.nodes[node].first, self.nodes[node].last, &removed)
        return pair

    def clear(self):
        """Uncovers everything and gives the memory back, but for that of one range."""
        self._root = self._free = self.spans = 0
        self._used = 1
        self.covered = 0
        if self._room > FIRST_ROOM:
            free(self.nodes)
            self.nodes = &NOBODY
            self._room = 0

    # Questions.

    def __contains__(self, number):
        cdef uint64_t value
        cdef uint32_t node
        try:
            value = to_uint64(number)
        except OverflowError:
            return False
        node = self.at_or_below(value)
        return node != 0 and value <= self.nodes[node].last

    def __len__(self):
        """The number of ranges."""
        return self.spans

    @property
    def count(self):
        """How many numbers are covered."""
        return TWO_64 if self.covered == 0 and self.spans else self.covered

    def covers(self, start, stop):
        """Whether all of [start, stop) is covered."""
        cdef uint64_t first = 0, last = 0
        cdef uint32_t node
        to_span(start, stop, &first, &last)
        node = self.at_or_below(first)
        return node != 0 and last <= self.nodes[node].last

    def missing(self, start, stop):
        """The parts of [start, stop) that are not covered, as (start, stop) pairs, ascending."""
        cdef uint64_t first = 0, last = 0
        to_span(start, stop, &first, &last)
        return self.missing_spans(first, last)

    def first(self):
        """The lowest range, None if there is none."""
        return self.pair_of(self.leftmost())

    def last(self):
        """The highest range, None if there is none."""
        return self.pair_of(self.rightmost())

    def __iter__(self):
        """The (start, stop) pairs, ascending. Changes made meanwhile are seen if still ahead."""
        cdef uint32_t node = self.leftmost()
        cdef uint64_t last
        while node:
            last = self.nodes[node].last
            yield span_pair(self.nodes[node].first, last)
            node = self.above(last)

    def copy(self):
        """A set of its own with the same ranges."""
        cdef RangeSet other = RangeSet.__new__(RangeSet)
        cdef Node *nodes
        if self._room == 0:
            return other
        nodes = <Node *> malloc(self._room * sizeof(Node))
        if nodes == NULL:
            raise MemoryError()
        memcpy(nodes, self.nodes, self._room * sizeof(Node))
        other.nodes = nodes
        other._room = self._room
        other._used = self._used
        other._free = self._free
        other._root = self._root
        other.spans = self.spans
        other.covered = self.covered
        return other

    def __eq__(self, other):
        if type(other) is not RangeSet:
            return NotImplemented
        if self.spans != (<RangeSet> other).spans or self.covered != (<RangeSet> other).covered:
            return False
        return list(self) == list(other)

    __hash__ = None

    def __repr__(self):
        shown = [f"[{start}, {stop})" for _, (start, stop) in zip(range(8), self)]
        more = f", ... {self.spans - 8} more" if self.spans > 8 else ""
        return f"<RangeSet {', '.join(shown)}{more}>" if shown else "<RangeSet, empty>"

    @property
    def _height(self):
        """The height of the tree, for tests."""
        return self.nodes[self._root].height

    @property
    def _visits(self):
        """Nodes looked at since the set was made, for tests."""
        return self._looked

    # Spans: both ends included.

    cdef int add_span(self, uint64_t first, uint64_t last, uint64_t *added) except -1:
        cdef Node *node
        cdef uint32_t each, keep = 0
        cdef uint64_t low = first, high = last, known = 0, cursor = first
        self._reserve()
        each = self.at_or_below(first)
        if each:
            node = &self.nodes[each]
            if node.last >= last:
                added[0] = 0
                return 0
            if node.last >= first or node.last + 1 == first:
                # It reaches into the new range, or up to it: this node grows.
                keep = each
                low = node.first
                known = node.last - node.first + 1
        # What starts inside the new range or right behind it is joined; the first one of it may
        # be the node that grows, for its place in the order stays.
        while True:
            each = self.above(cursor)
            if each == 0:
                break
            node = &self.nodes[each]
            if high != HIGHEST and node.first > high + 1:
                break
            known += node.last - node.first + 1
            high = max(high, node.last)
            if keep:
                self._delete(node.first)
            else:
                keep = each
                cursor = node.first
        if keep:
            self.nodes[keep].first = low
            self.nodes[keep].last = high
        else:
            self._insert(low, high)
        added[0] = high - low + 1 - known
        self.covered += added[0]
        return 0

    cdef int remove_span(self, uint64_t first, uint64_t last, uint64_t *removed) except -1:
        cdef Node *node
        cdef uint32_t each
        cdef uint64_t gone = 0, end
        self._reserve()
        each = self.at_or_below(first)
        if each and self.nodes[each].last >= first:
            node = &self.nodes[each]
            end = node.last
            gone = min(end, last) - first + 1
            if node.first < first:
                node.last = first - 1
                if end > last:
                    self._insert(last + 1, end)
            elif end > last:
                node.first = last + 1
            else:
                self._delete(first)
        while True:
            each = self.above(first)
            if each == 0 or self.nodes[each].first > last:
                break
            node = &self.nodes[each]
            if node.last > last:
                gone += last - node.first + 1
                node.first = last + 1
                break
            gone += node.last - node.first + 1
            self._delete(node.first)
        removed[0] = gone
        self.covered -= gone
        return 0

    cdef list missing_spans(self, uint64_t first, uint64_t last):
        cdef list missing = []
        cdef uint32_t each = self.at_or_below(first)
        cdef uint64_t cursor = first
        if each and self.nodes[each].last >= first:
            if self.nodes[each].last >= last:
                return missing
            cursor = self.nodes[each].last + 1
        while True:
            each = self.above(cursor)
            if each == 0 or self.nodes[each].first > last:
                missing.append(span_pair(cursor, last))
                return missing
            missing.append(span_pair(cursor, self.nodes[each].first - 1))
            if self.nodes[each].last >= last:
                return missing
            cursor = self.nodes[each].last + 1

    cdef uint32_t at_or_below(self, uint64_t number) noexcept nogil:
        cdef uint32_t at = self._root, best = 0
        while at:
            self._looked += 1
            if self.nodes[at].first <= number:
                best = at
                at = self.nodes[at].right
            else:
                at = self.nodes[at].left
        return best

    cdef uint32_t above(self, uint64_t number) noexcept nogil:
        cdef uint32_t at = self._root, best = 0
        while at:
            self._looked += 1
            if self.nodes[at].first > number:
                best = at
                at = self.nodes[at].left
            else:
                at = self.nodes[at].right
        return best

    cdef uint32_t leftmost(self) noexcept nogil:
        cdef uint32_t at = self._root
        while self.nodes[at].left:
            at = self.nodes[at].left
        return at

    cdef uint32_t rightmost(self) noexcept nogil:
        cdef uint32_t at = self._root
        while self.nodes[at].right:
            at = self.nodes[at].right
        return at

    cdef tuple pair_of(self, uint32_t node):
        """The range of a node as Python's pair; None for nobody."""
        if node == 0:
            return None
        return span_pair(self.nodes[node].first, self.nodes[node].last)

    # The tree. Nodes are spliced, never copied, so their indexes stay valid.

    cdef int _reserve(self) except -1:
        """Makes sure that one node can be had, before anything is changed."""
        cdef Node *nodes
        cdef uint32_t room = FIRST_ROOM
        if self._free or self._used < self._room:
            return 0
        if self._room > 0x7FFFFFFF:
            raise MemoryError("a RangeSet of more than 2^32 ranges")
        if self._room:
            room = 2 * self._room
        nodes = <Node *> realloc(self.nodes if self._room else NULL, room * sizeof(Node))
        if nodes == NULL:
            raise MemoryError()
        if self._room == 0:
            memset(nodes, 0, sizeof(Node))
        self.nodes = nodes
        self._room = room
        return 0

    cdef void _insert(self, uint64_t first, uint64_t last) noexcept nogil:
        """A new range at least two above and below its neighbours; a node is reserved."""
        cdef uint32_t node = self._free
        if node:
            self._free = self.nodes[node].left
        else:
            node = self._used
            self._used += 1
        self.nodes[node].first = first
        self.nodes[node].last = last
        self.nodes[node].left = self.nodes[node].right = 0
        self.nodes[node].height = 1
        self._root = self._insert_under(self._root, node)
        self.spans += 1

    cdef void _delete(self, uint64_t first) noexcept nogil:
        """Removes the node that begins with ``first``; there is one."""
        self._root = self._delete_under(self._root, first)
        self.spans -= 1

    cdef uint32_t _insert_under(self, uint32_t at, uint32_t node) noexcept nogil:
        if at == 0:
            return node
        self._looked += 1
        if self.nodes[node].first < self.nodes[at].first:
            self.nodes[at].left = self._insert_under(self.nodes[at].left, node)
        else:
            self.nodes[at].right = self._insert_under(self.nodes[at].right, node)
        return self._balance(at)

    cdef uint32_t _delete_under(self, uint32_t at, uint64_t first) noexcept nogil:
        cdef uint32_t heir, right
        if at == 0:
            return 0
        self._looked += 1
        if first < self.nodes[at].first:
            self.nodes[at].left = self._delete_under(self.nodes[at].left, first)
            return self._balance(at)
        if first > self.nodes[at].first:
            self.nodes[at].right = self._delete_under(self.nodes[at].right, first)
            return self._balance(at)
        if self.nodes[at].right == 0:
            heir = self.nodes[at].left
        else:
            heir = 0
            right = self._take_leftmost(self.nodes[at].right, &heir)
            self.nodes[heir].left = self.nodes[at].left
            self.nodes[heir].right = right
            heir = self._balance(heir)
        self.nodes[at].left = self._free
        self._free = at
        return heir

    cdef uint32_t _take_leftmost(self, uint32_t at, uint32_t *taken) noexcept nogil:
        self._looked += 1
        if self.nodes[at].left == 0:
            taken[0] = at
            return self.nodes[at].right
        self.nodes[at].left = self._take_leftmost(self.nodes[at].left, taken)
        return self._balance(at)

    cdef uint32_t _balance(self, uint32_t at) noexcept nogil:
        """Restores the AVL rule at one node: its children differ in height by at most one."""
        cdef Node *node = &self.nodes[at]
        cdef Node *left = &self.nodes[node.left]
        cdef Node *right = &self.nodes[node.right]
        if left.height > right.height + 1:
            if self.nodes[left.left].height < self.nodes[left.right].height:
                node.left = self._turn_left(node.left)
            return self._turn_right(at)
        if right.height > left.height + 1:
            if self.nodes[right.right].height < self.nodes[right.left].height:
                node.right = self._turn_right(node.right)
            return self._turn_left(at)
        self._measure(at)
        return at

    cdef void _measure(self, uint32_t at) noexcept nogil:
        cdef Node *node = &self.nodes[at]
        node.height = 1 + max(self.nodes[node.left].height, self.nodes[node.right].height)

    cdef uint32_t _turn_left(self, uint32_t at) noexcept nogil:
        cdef uint32_t top = self.nodes[at].right
        self.nodes[at].right = self.nodes[top].left
        self.nodes[top].left = at
        self._measure(at)
        self._measure(top)
        return top

    cdef uint32_t _turn_right(self, uint32_t at) noexcept nogil:
        cdef uint32_t top = self.nodes[at].left
        self.nodes[at].left = self.nodes[top].right
        self.nodes[top].right = at
        self._measure(at)
        self._measure(top)
        return top


cdef int to_span(object start, object stop, uint64_t *first, uint64_t *last) except -1:
    try:
        first[0] = to_uint64(start)
        last[0] = to_uint64(stop - 1)
    except OverflowError:
        raise ValueError(f"[{start}, {stop}) is not a range within [0, 2^64)") from None
    if first[0] > last[0]:
        raise ValueError(f"[{start}, {stop}) is empty")
    return 0


cdef tuple span_pair(uint64_t first, uint64_t last):
    if last == HIGHEST:
        return (first, TWO_64)
    return (first, last + 1)
