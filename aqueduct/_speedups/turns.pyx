"""What leaves of a byte stream: gathered for the kernel, and whose turn it is.

What may leave of whom, and what is urgent, is decided by ``aqueduct.protocol.bpmux``. Here is the
path that every byte takes: runs of bytes in turn, and one call of the kernel for many of them.
"""

import os
from collections import deque

cimport cython
from cpython.bytes cimport PyBytes_CheckExact, PyBytes_FromStringAndSize
from cpython.exc cimport PyErr_CheckSignals
from libc.errno cimport EAGAIN, EINTR, errno
from libc.stdint cimport uint8_t, uint64_t
from libc.stdlib cimport free, realloc
from libc.string cimport memcpy, memset

from aqueduct._speedups.bpmux cimport HEAD_MAX, PAYLOAD_FLAG, head_store
from aqueduct._speedups.buffers cimport Piece, Scatter, byte_view, count_copied, memory_of
from aqueduct._speedups.entities cimport Entity, Item
from aqueduct._speedups.records cimport Records
from aqueduct._speedups.ring cimport Rings, send_byte
from aqueduct._speedups.varu64 cimport varu64_store


cdef extern from "<sys/socket.h>" nogil:
    struct msghdr:
        iovec *msg_iov
        size_t msg_iovlen
    Py_ssize_t sendmsg(int fd, const msghdr *message, int flags)

__all__ = ["Outlet", "Turns", "write_out"]

cdef enum:
    # Lanes of an entity.
    NOWHERE = 0
    FRESH = 1
    BULKY = 2
    # A chunk is not cut to fewer bytes than this for the sake of the limit of one take.
    CRUMB = 1024
    # What is left of a turn is not worth a chunk if it is this power of two less than the whole.
    LITTLE = 8
    # Places of entities that are written to.
    SINK_OUT = 2
    SINK_IN = 3
    # Parts that one call of the kernel gets; every system takes so many.
    PARTS = 512
    # An arena above this is given back once it is empty.
    ARENA_KEPT = 16384


@cython.final
@cython.auto_pickle(False)
cdef class Outlet:
    """Bytes on their way to the kernel: small buffers are joined, large ones stay as they are.

    ``size`` counts what was added since all of it had left, ``left`` what has not left yet.
    ``written`` says how many bytes of payload are in it, and of whom.
    """

    def __cinit__(self):
        self._owners = []
        self.written = []

    def __dealloc__(self):
        free(self._parts)
        free(self._arena)

    def add(self, buffer):
        """Appends a contiguous buffer."""
        cdef Py_ssize_t size = 0
        cdef const uint8_t *start
        if not PyBytes_CheckExact(buffer) and type(buffer) is not Piece:
            buffer = byte_view(buffer)
        start = memory_of(buffer, &size)
        self.put(buffer, start, size)

    def extend(self, buffers):
        """Appends each of ``buffers``."""
        for buffer in buffers:
            self.add(buffer)

    @property
    def buffers(self):
        """All of it that has not left, as bytes and memoryviews."""
        cdef Py_ssize_t index, whole = 0, offset = self._offset
        cdef Part *part
        cdef list found = []
        cdef object owner
        for index in range(self._first, self._count):
            part = self._parts + index
            owner = self._owners[index]
            if owner is None:
                found.append(
                    PyBytes_FromStringAndSize(
                        <const char *> self._arena + part.place + offset, part.size - offset
                    )
                )
            elif not offset and part.size == len(owner):
                found.append(memoryview(owner) if type(owner) is Piece else owner)
            else:
                offset += part.start - memory_of(owner, &whole)
                found.append(memoryview(owner)[offset:offset + part.size])
            offset = 0
        return found

    def send(self, int fd):
        """Has the kernel take what it takes now; returns how many bytes. Raises OSError."""
        return max(self._send(fd, None, 0, 0), 0)

    def share(self, Rings rings):
        """What follows goes by this memory; None: nothing follows.

        Memory that was made here is passed to the peer with the next byte, and used once the peer
        does.
        """
        self._rings = rings
        if rings is not None:
            rings.gone = self._gone
            if rings.fileno() < 0:
                rings.begin()

    @property
    def shares(self):
        """Bytes go by memory: it is no event of the socket that there is room."""
        return self._rings is not None and self._rings.begun

    @property
    def waits(self):
        """There was no room in memory, and the peer has not yet said that there is some."""
        return self.shares and self._rings.waits

    def clear(self):
        """Drops everything."""
        self.left = 0
        self.size = 0
        self._begin()

    # For the other compiled modules.

    cdef int put(self, object owner, const uint8_t *start, Py_ssize_t size) except -1:
        """Appends bytes of ``owner``."""
        if size < COALESCE_BELOW:
            self.put_head(start, size)
            count_copied(size)
            return 0
        self._grow(0)
        self._parts[self._count] = Part(start, 0, size)
        self._count += 1
        self._owners.append(owner)
        self.size += size
        self.left += size
        return 0

    cdef int put_head(self, const uint8_t *start, Py_ssize_t size) except -1:
        """Appends a copy of bytes that are not payload."""
        if size == 0:
            return 0
        self._grow(size)
        memcpy(self._arena + self._filled, start, <size_t> size)
        if self._count and self._parts[self._count - 1].start == NULL:
            self._parts[self._count - 1].size += size
        else:
            self._parts[self._count] = Part(NULL, self._filled, size)
            self._count += 1
            self._owners.append(None)
        self._filled += size
        self.size += size
        self.left += size
        return 0

    cdef int put_run(self, Scatter scatter, Py_ssize_t size) except -1:
        """Appends the first ``size`` bytes that wait in ``scatter``, which has them."""
        cdef Py_ssize_t length = 0, part
        cdef const uint8_t *start
        cdef object item
        scatter.nbytes -= size
        while size > 0:
            item = scatter._items[scatter._head]
            start = memory_of(item, &length)
            part = min(length - scatter._offset, size)
            self.put(item, start + scatter._offset, part)
            size -= part
            scatter._offset += part
            if scatter._offset == length:
                scatter._items[scatter._head] = None
                scatter._head += 1
                scatter._offset = 0
        scatter.trim()
        return 0

    cdef int _grow(self, Py_ssize_t size) except -1:
        """Room for one part more, and for ``size`` bytes in the arena."""
        cdef void *grown
        cdef Py_ssize_t wanted
        if self._count == self._room:
            wanted = max(2 * self._room, 16)
            grown = realloc(self._parts, <size_t> wanted * sizeof(Part))
            if grown == NULL:
                raise MemoryError(f"no memory for {wanted} buffers on their way out")
            self._parts = <Part *> grown
            self._room = wanted
        if self._filled + size > self._arena_room:
            wanted = max(2 * self._arena_room, self._filled + size, 256)
            grown = realloc(self._arena, <size_t> wanted)
            if grown == NULL:
                raise MemoryError(f"no memory for {wanted} bytes on their way out")
            self._arena = <uint8_t *> grown
            self._arena_room = wanted
        return 0

    cdef int _begin(self) except -1:
        """Empty, for the next bytes."""
        self._count = self._first = self._offset = self._filled = 0
        self._owners.clear()
        if self._arena_room > ARENA_KEPT:
            free(self._arena)
            self._arena = NULL
            self._arena_room = 0
        return 0

    cdef Py_ssize_t _send(
        self, int fd, Turns turns, Py_ssize_t size, Py_ssize_t offered
    ) except -2:
        """One call of the kernel; -1 if it takes nothing now.

        Chunks of ``turns`` are offered behind it: of ``size`` bytes each, ``offered`` at most.
        """
        cdef iovec[PARTS] vector
        cdef msghdr message
        cdef Py_ssize_t sent, index, own
        cdef int count = 0, first = 0, failure
        cdef Part *part
        if self.left == 0:
            return 0
        if self._rings is not None:
            if self._rings.agreed():
                return self._share(fd)
            if self._rings.fileno() >= 0:
                if not self._pass(fd):
                    return -1
                first = 1
                if self.left == 0:
                    return first
        own = self.left
        for index in range(self._first, min(self._count, self._first + PARTS)):
            part = self._parts + index
            if part.start == NULL:
                vector[count].iov_base = <void *> (self._arena + part.place)
            else:
                vector[count].iov_base = <void *> part.start
            vector[count].iov_len = <size_t> part.size
            count += 1
        vector[0].iov_base = <uint8_t *> vector[0].iov_base + self._offset
        vector[0].iov_len -= <size_t> self._offset
        if offered > 0 and count == self._count - self._first:
            count = turns.offer(vector, count, size, offered)
        memset(&message, 0, sizeof(msghdr))
        message.msg_iov = vector
        message.msg_iovlen = <size_t> count
        while True:
            with nogil:
                sent = sendmsg(fd, &message, 0)
                failure = errno
            if sent >= 0:
                break
            if failure == EAGAIN:
                return first or -1
            if failure != EINTR:
                raise OSError(failure, os.strerror(failure))
            PyErr_CheckSignals()
        self._count_gone(min(sent, own))
        if sent > own:
            turns.offered_left(self, sent - own)
        return first + sent

    cdef bint _pass(self, int fd) except -1:
        """Passes the memory with the first byte that has not left; False: there is no room now."""
        cdef Part *part = self._parts + self._first
        cdef const uint8_t *start = part.start if part.start != NULL else self._arena + part.place
        if send_byte(fd, start[self._offset], self._rings.fileno()) < 0:
            return False
        self._rings.passed()
        self._count_gone(1)
        return True

    cdef int _count_gone(self, Py_ssize_t size) except -1:
        """The socket took so many bytes of what is here."""
        self.passed(size)
        return self._left(size)

    cdef int passed(self, Py_ssize_t size) except -1:
        """The socket took so many bytes."""
        self._gone += <uint64_t> size
        if self._rings is not None:
            self._rings.gone = self._gone
        return 0

    cdef Py_ssize_t _share(self, int fd) except -2:
        """Writes to memory; -1 if there is no room. With bytes left, a knock will say when there
        is some."""
        cdef Rings rings = self._rings
        cdef Py_ssize_t total = 0, size
        cdef const uint8_t *start
        cdef Part *part
        rings.begin()
        while self.left:
            part = self._parts + self._first
            start = part.start if part.start != NULL else self._arena + part.place
            size = rings.put(start + self._offset, part.size - self._offset, fd)
            if size:
                total += size
                self._left(size)
            elif rings.full():
                break
        return total or -1

    cdef int _left(self, Py_ssize_t size) except -1:
        """So many bytes have left."""
        self.left -= size
        if self.left == 0:
            self.size = 0
            self._begin()
            return 0
        size += self._offset
        while size >= self._parts[self._first].size:
            size -= self._parts[self._first].size
            self._owners[self._first] = None
            self._first += 1
        self._offset = size
        return 0


@cython.auto_pickle(False)
cdef class Turns:
    """Who has something to send, in the order of their turns; the base of the scheduler.

    ``urgent`` have chunks that go first. ``fresh`` were idle and go before the ``bulky`` once, for
    at most ``chunk`` bytes each; then it is the turn of the next one, by bytes. What is more than a
    run of bytes is left to ``_send_urgent(entity, out)`` and ``_send(entity, room, out)``.
    """

    def __init__(self, Py_ssize_t chunk):
        self.urgent = deque()
        self.fresh = deque()
        self.bulky = deque()
        self._chunk = chunk

    @property
    def idle(self):
        """Nothing can leave now."""
        return not (self.urgent or self.fresh or self.bulky)

    def gather(self, Outlet out not None, Py_ssize_t limit):
        """Commits the next chunks to ``out``, until it has about ``limit`` bytes."""
        self.fill(out, limit)

    def write_run(self, Entity entity not None, buffers not None):
        """Queues bytes behind a run of bytes, or where nothing waits. False: it is not that plain.

        Then nothing was done. ``entity`` is a sink with an identifier of its own.
        """
        cdef object items = entity.items
        cdef Item last = None
        cdef Py_ssize_t count = len(items)
        if (
            entity.gone or entity.end_in or entity.ending or not entity.opened
            or entity.place != SINK_OUT or entity.identifier == 0 or count > 1
        ):
            return False
        if count:
            last = items[0]
            if last.whole or last.total or last.missing or last.is_end or last.urgent:
                return False
            last.scatter.extend(buffers)
        else:
            last = Item()
            last.scatter.extend(buffers)
            if last.scatter.nbytes == 0:
                return True
            entity.add(last)
        if entity.lane == NOWHERE:
            self.freshen(entity)
        return True

    cdef int fill(self, Outlet out, Py_ssize_t limit) except -1:
        cdef object lane
        cdef Entity entity
        cdef Py_ssize_t before, room
        cdef int sent
        while self.urgent and out.size < limit:
            entity = self.urgent.popleft()
            entity.in_urgent = False
            self.hurried(entity, out)
        while out.size < limit:
            lane = self.fresh or self.bulky
            if not lane:
                break
            entity = lane[0]
            if entity.deficit <= self._chunk >> LITTLE:
                entity.deficit = min(entity.deficit, 0) + self._chunk
                self._move(lane, BULKY)
                continue
            before = out.size
            room = min(entity.deficit, max(limit - before, CRUMB))
            if entity.opened:
                sent = self._run(entity, room, out)
            else:
                sent = 1 if self.opening(entity, room, out) else -1
            if sent > 0 or (sent < 0 and not entity.gone and self._send(entity, room, out)):
                entity.deficit -= out.size - before
                if entity.items:
                    continue
            # It stays in turn once more, or its next bytes would overtake the bulky for ever.
            self._move(lane, BULKY if entity.lane == FRESH and self.bulky else NOWHERE)
        return 0

    cdef int freshen(self, Entity entity) except -1:
        """It was idle, and has something to send."""
        entity.lane = FRESH
        entity.deficit = self._chunk
        self.fresh.append(entity)
        return 0

    cdef int hurried(self, Entity entity, Outlet out) except -1:
        """What one of the urgent has to say."""
        self._send_urgent(entity, out)
        return 0

    cdef bint opening(self, Entity entity, Py_ssize_t room, Outlet out) except -1:
        """The chunk that opens an entity; False: it is left to ``_send``."""
        return False

    cdef int _move(self, object lane, int to) except -1:
        cdef Entity entity = lane.popleft()
        entity.lane = to
        if to == BULKY:
            self.bulky.append(entity)
        return 0

    cdef int _run(self, Entity entity, Py_ssize_t room, Outlet out) except -2:
        """One chunk of a run of bytes: 1; 0 without credit; -1 if it is not this plain.

        Plain is: the entity is open, and the run comes first and has nothing behind it, or more
        bytes than may leave now.
        """
        cdef Item item = plain_run(entity)
        cdef Py_ssize_t size
        if item is None:
            return -1
        size = payable(entity, min(item.scatter.nbytes, room))
        if size == 0:
            return 0
        if size == item.scatter.nbytes and len(entity.items) > 1:
            return -1
        self._chunk_of(entity, item, size, out)
        if item.scatter.nbytes == 0:
            entity.items.popleft()
        return 1

    cdef int _chunk_of(
        self, Entity entity, Item item, Py_ssize_t size, Outlet out
    ) except -1:
        """Commits a chunk of a plain run, which has ``size`` bytes and credit for them."""
        cdef uint8_t[HEAD_MAX] head
        out.put_head(head, plain_head(head, entity, size))
        out.put_run(item.scatter, size)
        entity.credit_out -= <uint64_t> size
        out.written.append((entity, size))
        return 0

    cdef int offer(
        self, iovec *vector, int count, Py_ssize_t size, Py_ssize_t most
    ) except -1:
        """Adds chunks of who is alone in turn, ``most`` of ``size`` bytes; the parts in all.

        They stay where they are: those that the kernel does not begin with can still be overtaken,
        dropped or reset.
        """
        cdef Entity entity
        cdef Item item
        cdef Scatter run
        cdef Py_ssize_t available, missing, part, index, offset, length = 0
        cdef int before
        cdef const uint8_t *start
        self._offered = 0
        size = min(size, self._chunk)
        if self.urgent or len(self.fresh) + len(self.bulky) != 1:
            return count
        entity = (self.fresh or self.bulky)[0]
        item = plain_run(entity)
        if item is None:
            return count
        run = item.scatter
        # Something is left in any case: the entity stays in its turn.
        available = payable(entity, min(run.nbytes - 1, most * size))
        if available < size:
            return count
        self._offered = size
        self._head_size = plain_head(self._head, entity, size)
        index, offset = run._head, run._offset
        start = memory_of(run._items[index], &length)
        while available >= size and count < PARTS:
            available -= size
            before = count
            vector[count].iov_base = <void *> &self._head[0]
            vector[count].iov_len = <size_t> self._head_size
            count += 1
            missing = size
            while missing:
                if count == PARTS:
                    return before  # whole chunks alone, or it could not be told where one ends
                part = min(length - offset, missing)
                vector[count].iov_base = <void *> (start + offset)
                vector[count].iov_len = <size_t> part
                count += 1
                missing -= part
                offset += part
                if offset == length:
                    index, offset = index + 1, 0
                    start = memory_of(run._items[index], &length)
        return count

    cdef int offered_left(self, Outlet out, Py_ssize_t sent) except -1:
        """The kernel took so many bytes of what was offered.

        The chunk that it began with is in ``out``, and the last in its ``written``.
        """
        cdef Entity entity = (self.fresh or self.bulky)[0]
        cdef Item item = entity.items[0]
        cdef Py_ssize_t chunk = self._head_size + self._offered
        cdef Py_ssize_t whole = sent // chunk, size = whole * self._offered
        entity.deficit = 0  # it had its turn, and more: who comes now goes first
        if whole:
            item.scatter.skip(size)
            entity.credit_out -= <uint64_t> size
            out.passed(whole * chunk)
            out.written.append((entity, size))
        if sent > whole * chunk:
            self._chunk_of(entity, item, self._offered, out)
            out._count_gone(sent - whole * chunk)
        return 0


cdef Item plain_run(Entity entity):
    """The run of bytes that is next, if that is all there is to it; else None."""
    cdef Item item
    if not entity.opened or entity.end_out or entity.end_in or not entity.items:
        return None
    item = entity.items[0]
    return None if item.whole or item.total or item.is_end or item.urgent else item


cdef Py_ssize_t payable(Entity entity, Py_ssize_t size) noexcept:
    """How much of it there is credit for. Looks at fields alone."""
    if entity.credit_out <= entity.keep:
        return 0
    return <Py_ssize_t> min(<uint64_t> max(size, 0), entity.credit_out - entity.keep)


cdef Py_ssize_t plain_head(uint8_t *head, Entity entity, Py_ssize_t size) noexcept:
    """Writes the head of a chunk of a run; returns its bytes, HEAD_MAX at most. Cannot fail."""
    # The top-level is In-Sink 0 (BP-R3).
    cdef int type = entity.place + (entity.identifier == 0 and entity.place == SINK_OUT)
    cdef uint8_t *end = head_store(head, type, PAYLOAD_FLAG, entity.identifier, 0)
    return varu64_store(end, <uint64_t> size) - head


def write_out(
    Turns turns not None,
    Outlet out not None,
    int fd,
    Py_ssize_t limit,
    Py_ssize_t budget,
    list written not None,
    Records records=None,
    Py_ssize_t offered=0,
):
    """Has the kernel take what is in ``out``, then takes of ``turns``, one after the other.

    A take has about ``limit`` bytes; with ``limit`` 0 there is none. Whole takes that have left are
    told in ``written``: (entity, bytes), in their order. It ends when nothing can leave, when
    ``budget`` bytes have left, or when the kernel takes no more, which is when something is
    ``left``. With ``records`` each take is encrypted. Behind a take the kernel is offered up to
    ``offered`` chunks more, within the budget; of those that it does not begin with nothing is
    taken. Returns how many bytes have left. Raises OSError, and what ``records`` raises.
    """
    cdef Py_ssize_t total = 0, sent, own, more
    while True:
        if out.left == 0:
            if limit <= 0 or total >= budget:
                break
            turns.fill(out, limit)
            if out.left == 0:
                break
            if records is not None:
                seal(out, records)
        while out.left:
            own = out.left
            more = 0 if limit <= 0 else min(offered, (budget - total - own) // limit)
            sent = out._send(fd, turns, limit, more)
            if sent <= 0:
                return total
            total += sent
            # More parts than one call takes are no sign of a kernel that is full.
            if out.left and out._offset:
                if sent > own:
                    begun = out.written.pop()
                    tell(written, out.written)
                    out.written.append(begun)
                return total
        if out.written:
            tell(written, out.written)
    return total


cdef int seal(Outlet out, Records records) except -1:
    """Encrypts what is in ``out``, from where it lies. If that fails, nothing is in it."""
    cdef list sealed = []
    cdef Py_ssize_t index, waiting = 0
    cdef const uint8_t *start
    cdef Part *part
    try:
        for index in range(out._count):
            part = out._parts + index
            start = part.start if part.start != NULL else out._arena + part.place
            waiting = records.encrypt(<const char *> start, part.size, waiting, sealed)
        if waiting:
            sealed.append(records.take())
    finally:
        out.clear()
    out.extend(sealed)
    return 0


cdef int tell(list told, list written) except -1:
    """Appends what was written; what is of one entity in a row is one entry."""
    cdef tuple entry, last
    for entry in written:
        if told:
            last = told[len(told) - 1]
            if last[0] is entry[0]:
                told[len(told) - 1] = (last[0], last[1] + entry[1])
                continue
        told.append(entry)
    written.clear()
    return 0
