"""Whose turn it is to send on a byte stream, and what leaves in it.

What may leave of whom, and what is urgent, is decided by ``aqueduct.protocol.bpmux``. Here is the
path that every byte takes: runs of bytes in turn, and one call of the kernel for many of them.
"""

from collections import deque

cimport cython
from libc.stdint cimport uint8_t, uint64_t

from aqueduct._speedups.bpmux.chunks cimport HEAD_MAX, PAYLOAD_FLAG, head_store
from aqueduct._speedups.base.buffers cimport GatherList, memory_of
from aqueduct._speedups.bpmux.entities cimport Entity, Item
from aqueduct._speedups.io.gather cimport IovecWriter, Part, iovec
from aqueduct._speedups.io.tls_records cimport Records
from aqueduct._speedups.bpmux.varu64 cimport varu64_store

__all__ = ["SchedulerBase", "write_out"]

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
    # An end payload up to this size is urgent if no payload waits before it.
    SMALL_END = 1024
    # Parts of chunks that are offered to the kernel behind a take.
    OFFERED = 256
    # So few bytes behind the last of these are not worth a call of their own.
    BESIDE = 4096


@cython.auto_pickle(False)
cdef class SchedulerBase:
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
        return self.is_idle()

    def gather(self, IovecWriter out not None, Py_ssize_t limit):
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

    cdef bint is_idle(self) except -1:
        return not (self.urgent or self.fresh or self.bulky)

    # What makes an entity ready.

    def wake(self, Entity entity not None):
        """Something of it may be able to leave."""
        if entity.gone or entity.end_in or entity.end_out:
            return
        if entity.opened and self.goes_first(entity):
            self.hurry(entity)
        elif entity.lane == NOWHERE and (entity.items or not entity.opened):
            self.freshen(entity)

    cpdef bint goes_first(self, Entity entity) except -1:
        """Whether what comes next of it, which is open, waits for nobody's turn."""
        cdef Item item
        if not entity.items:
            return False
        item = entity.items[0]
        return item.urgent or (item.is_end and item.scatter.nbytes <= SMALL_END)

    cpdef object hurry(self, Entity entity):
        """A chunk that goes first."""
        if not entity.in_urgent:
            entity.in_urgent = True
            self.urgent.append(entity)

    def give_back(self, Entity entity not None, uint64_t size):
        """Grants credit, if the peer may still use it."""
        if size and not (entity.gone or entity.end_in or entity.end_out):
            entity.grant += size
            self.hurry(entity)

    # Chunks.

    cdef int fill(self, IovecWriter out, Py_ssize_t limit) except -1:
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

    cdef int hurried(self, Entity entity, IovecWriter out) except -1:
        """What one of the urgent has to say."""
        self._send_urgent(entity, out)
        return 0

    cdef bint opening(self, Entity entity, Py_ssize_t room, IovecWriter out) except -1:
        """The chunk that opens an entity; False: it is left to ``_send``."""
        return False

    cdef int _move(self, object lane, int to) except -1:
        cdef Entity entity = lane.popleft()
        entity.lane = to
        if to == BULKY:
            self.bulky.append(entity)
        return 0

    cdef int _run(self, Entity entity, Py_ssize_t room, IovecWriter out) except -2:
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
        self, Entity entity, Item item, Py_ssize_t size, IovecWriter out
    ) except -1:
        """Commits a chunk of a plain run, which has ``size`` bytes and credit for them."""
        cdef uint8_t[HEAD_MAX] head
        out.put_head(head, plain_head(head, entity, size))
        out.put_run(item.scatter, size)
        entity.credit_out -= <uint64_t> size
        out.written.append((entity, size))
        return 0

    cdef int offer(self, iovec *vector, Py_ssize_t size, Py_ssize_t most) except -1:
        """Lists chunks of who is alone in turn, ``most`` of ``size`` bytes; returns how many parts.

        The last one has less, if no more may leave. They stay where they are: those that the kernel
        does not begin with can still be overtaken, dropped or reset.
        """
        cdef Entity entity
        cdef Item item
        cdef GatherList run
        cdef Py_ssize_t available, chunk, missing, part, index, offset, length = 0
        cdef int count = 0, before
        cdef const uint8_t *start
        size = min(size, self._chunk)
        if self.urgent or len(self.fresh) + len(self.bulky) != 1:
            return 0
        entity = (self.fresh or self.bulky)[0]
        item = plain_run(entity)
        if item is None:
            return 0
        run = item.scatter
        available = payable(entity, run.nbytes)
        if available > most * size + BESIDE:
            available = most * size
        if available == run.nbytes and len(entity.items) > 1:
            available -= available % size or size  # its last chunk may say what is behind it
        if available <= 0:
            return 0
        self._offered, self._whole, self._rest = size, 0, 0
        self._head_size = plain_head(self._head, entity, size)
        index, offset = run._head, run._offset
        start = memory_of(run._items[index], &length)
        while available and count < OFFERED:
            before = count
            missing = chunk = min(size, available)
            if chunk < size:
                self._rest_head_size = plain_head(self._rest_head, entity, chunk)
                vector[count].iov_base = <void *> &self._rest_head[0]
                vector[count].iov_len = <size_t> self._rest_head_size
            else:
                vector[count].iov_base = <void *> &self._head[0]
                vector[count].iov_len = <size_t> self._head_size
            count += 1
            available -= chunk
            while missing:
                if count == OFFERED:
                    return before  # whole chunks alone, or it could not be told where one ends
                part = min(length - offset, missing)
                vector[count].iov_base = <void *> (start + offset)
                vector[count].iov_len = <size_t> part
                count += 1
                missing -= part
                offset += part
                if offset == length and missing + available:
                    index, offset = index + 1, 0
                    start = memory_of(run._items[index], &length)
            if chunk == size:
                self._whole += 1
            else:
                self._rest = chunk
        return count

    cdef int offered_left(self, IovecWriter out, Py_ssize_t sent) except -1:
        """The kernel took so many bytes of what was offered.

        The chunk that it began with is in ``out``, and the last in its ``written``.
        """
        cdef object lane = self.fresh or self.bulky
        cdef Entity entity = lane[0]
        cdef Item item = entity.items[0]
        cdef Py_ssize_t chunk = self._head_size + self._offered
        cdef Py_ssize_t whole = min(sent // chunk, self._whole), size = whole * self._offered
        cdef Py_ssize_t begun = self._offered if whole < self._whole else self._rest
        entity.deficit = 0  # it had its turn, and more: who comes now goes first
        sent -= whole * chunk
        if sent and begun == self._rest and sent == self._rest_head_size + begun:
            size += begun
            sent = 0
        if size:
            item.scatter.skip(size)
            entity.credit_out -= <uint64_t> size
            out.written.append((entity, size))
        if sent:
            self._chunk_of(entity, item, begun, out)
            out.leave(sent)
        if item.scatter.nbytes == 0:
            entity.items.popleft()
            self._move(lane, NOWHERE)
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
    SchedulerBase turns not None,
    IovecWriter out not None,
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
    ``left``. With ``records`` each take is encrypted; without, the kernel is offered up to
    ``offered`` chunks more behind a take, within the budget: of those that it does not begin with
    nothing is taken. Returns how many bytes have left. Raises OSError, and what ``records`` raises.
    """
    cdef Py_ssize_t total = 0, sent, own, more
    cdef iovec[OFFERED] vector
    if records is not None:
        offered = 0  # as they are, they would be plain
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
            sent = out.give(fd, vector, turns.offer(vector, limit, more) if more > 0 else 0)
            if sent <= 0:
                return total
            total += sent
            if sent > own:
                turns.offered_left(out, sent - own)
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


cdef int seal(IovecWriter out, Records records) except -1:
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
