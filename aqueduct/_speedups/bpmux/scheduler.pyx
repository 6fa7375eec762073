"""What leaves next on a byte stream: urgent chunks first, then sinks in turn, by bytes.

As in fq_codel, a sink that was idle goes first once (``fresh``), for at most ``Bpmux.chunk`` bytes.
A sink with more to send waits for its turn (``bulky``). So a small message waits only for what was
taken before it, however much is queued elsewhere.
"""

from collections import OrderedDict, deque

cimport cython
from libc.stdint cimport uint8_t, uint64_t

from aqueduct._speedups.base.buffers cimport GatherList, memory_of
from aqueduct._speedups.bpmux.chunks cimport (
    ACK_END_FLAG,
    CREDIT_FLAG,
    DUPLEX_TYPE,
    END_FLAG,
    HEAD_MAX,
    PAYLOAD_FLAG,
    PING_FLAG,
    head_store,
)
from aqueduct._speedups.bpmux.entities cimport (
    ABANDONED_EVENT,
    SINK_OUT_PLACE,
    Entity,
    Item,
    State,
    type_of,
)
from aqueduct._speedups.bpmux.varu64 cimport varu64_store
from aqueduct._speedups.io.gather cimport IovecWriter, iovec
from aqueduct._speedups.io.tls_records cimport Records

from aqueduct.errors import LimitExceeded

__all__ = ["Scheduler", "SendTurns", "write_out"]

cdef Py_ssize_t UNLIMITED = 1 << 62

cdef enum:
    # The queue that an entity stands in.
    NOWHERE = 0
    FRESH = 1
    BULKY = 2
    # A chunk is not cut to fewer bytes than this for the sake of the limit of one take.
    CRUMB = 1024
    # What is left of a turn is not worth a chunk if it is this power of two less than the whole.
    LITTLE = 8
    # An end payload up to this size is urgent if no payload waits before it.
    SMALL_END = 1024
    # So many acknowledgements of ends may wait for a chunk to travel with.
    DELAYED_ACKS = 16
    # Entities that were taken back and may stand in a queue, before somebody looks for them.
    FORGOTTEN = 64
    # Parts of chunks that are offered to the kernel behind a take.
    OFFERED = 256
    # So few bytes behind the last of these are not worth a call of their own.
    BESIDE = 4096


@cython.final
@cython.auto_pickle(False)
cdef class SendTurns:
    """Who has something to send, in the order of their turns.

    ``urgent`` have chunks that go first. ``fresh`` were idle and go before the ``bulky`` once, for
    at most ``chunk`` bytes each; then it is the turn of the next one, by bytes.
    """

    def __cinit__(self, Py_ssize_t chunk):
        self.urgent = deque()
        self.fresh = deque()
        self.bulky = deque()
        self.chunk = chunk

    @property
    def idle(self):
        """Nothing can leave now."""
        return self.is_idle()

    @property
    def only_acks(self):
        """Whether all that can leave acknowledges ends, a few of them: nobody waits for that."""
        if self.fresh or self.bulky or not 0 < len(self.urgent) <= DELAYED_ACKS:
            return False
        return all([entity.end_in for entity in self.urgent])

    cdef int drop_gone(self, bint everything) except -1:
        """Forgets entities that are gone, or all."""
        for queue in (self.urgent, self.fresh, self.bulky):
            left = [] if everything else [entity for entity in queue if not entity.gone]
            queue.clear()
            queue.extend(left)
        return 0

    def write_run(self, Entity entity not None, buffers not None):
        """Queues bytes behind a run of bytes, or where nothing waits. False: it is not that plain.

        Then nothing was done. ``entity`` is a sink with an identifier of its own.
        """
        cdef object items = entity.items
        cdef Item last = None
        cdef Py_ssize_t count = len(items)
        if (
            entity.gone or entity.end_in or entity.ending or not entity.opened
            or entity.place != SINK_OUT_PLACE or entity.identifier == 0 or count > 1
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
        if entity.queue == NOWHERE:
            self.freshen(entity)
        return True

    cdef bint is_idle(self) except -1:
        return not (self.urgent or self.fresh or self.bulky)

    # What makes an entity ready.

    @cython.nonecheck(True)
    cpdef object wake(self, Entity entity):
        """Something of it may be able to leave."""
        if entity.gone or entity.end_in or entity.end_out:
            return
        if entity.opened and self.goes_first(entity):
            self.make_urgent(entity)
        elif entity.queue == NOWHERE and (entity.items or not entity.opened):
            self.freshen(entity)

    @cython.nonecheck(True)
    cpdef bint goes_first(self, Entity entity) except -1:
        """Whether what comes next of it, which is open, waits for nobody's turn."""
        cdef Item item
        if not entity.items:
            return False
        item = entity.items[0]
        return item.urgent or (item.is_end and item.scatter.nbytes <= SMALL_END)

    @cython.nonecheck(True)
    cpdef object make_urgent(self, Entity entity):
        """A chunk that goes first."""
        if not entity.in_urgent:
            entity.in_urgent = True
            self.urgent.append(entity)

    @cython.nonecheck(True)
    cpdef object give_back(self, Entity entity, uint64_t size):
        """Grants credit, if the peer may still use it."""
        if size and not (entity.gone or entity.end_in or entity.end_out):
            entity.grant += size
            self.make_urgent(entity)

    cdef int freshen(self, Entity entity) except -1:
        """It was idle, and has something to send."""
        entity.queue = FRESH
        entity.deficit = self.chunk
        self.fresh.append(entity)
        return 0

    cdef int move(self, object queue, int to) except -1:
        cdef Entity entity = queue.popleft()
        entity.queue = to
        if to == BULKY:
            self.bulky.append(entity)
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
        size = min(size, self.chunk)
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
        index, offset = run.head, run.offset
        start = memory_of(run.items[index], &length)
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
                    start = memory_of(run.items[index], &length)
            if chunk == size:
                self._whole += 1
            else:
                self._rest = chunk
        return count

    cdef int offered_left(self, IovecWriter out, Py_ssize_t sent) except -1:
        """The kernel took so many bytes of what was offered.

        The chunk that it began with is in ``out``, and the last in its ``written``.
        """
        cdef object queue = self.fresh or self.bulky
        cdef Entity entity = queue[0]
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
            run_chunk(entity, item, begun, out)
            out.leave(sent)
        if item.scatter.nbytes == 0:
            entity.items.popleft()
            self.move(queue, NOWHERE)
        return 0


@cython.final
@cython.auto_pickle(False)
cdef class Scheduler:
    """Everything that waits to leave, and the chunks that it leaves in.

    ``turns`` says whose turn it is. ``budget`` is told of entities on which the peer sends no more;
    None: nobody counts.
    """

    def __cinit__(self, State state not None, list reported not None, settings):
        self.turns = SendTurns(settings.chunk)
        self._state = state
        self._reported = reported
        self._opening = settings.opening
        self._unanswered_pings = settings.unanswered_pings
        self.waiting = OrderedDict()

    def take(self, Py_ssize_t limit):
        """Commits and returns the next chunks, about ``limit`` bytes of them.

        (buffers in wire order, their bytes, [(entity, bytes of payload in them)]).
        """
        cdef IovecWriter out = IovecWriter()
        self.fill(out, limit)
        return out.buffers, out.size, out.written

    cdef int credited(self, Entity entity) except -1:
        """The peer gave it credit."""
        self.turns.wake(entity)
        if entity is self._state.top_sink:
            self._wake_waiting()
        return 0

    cdef int answer_ping(self, Entity entity) except -1:
        """The peer has sent a ping (BP-R11)."""
        if entity.end_out:
            return 0
        entity.pongs += 1
        if entity.pongs > self._unanswered_pings:
            raise LimitExceeded(
                f"{entity.pongs} pings for {entity!r} without reading an answer; "
                f"Bpmux.unanswered_pings is {self._unanswered_pings}"
            )
        self.turns.make_urgent(entity)
        return 0

    cdef int peer_ended(self, Entity entity) except -1:
        """The peer's end is here: what waits is dropped, and the end acknowledged (BP-12)."""
        if self.budget is not None:
            self.budget.closed(entity)
        if entity.end_out:
            self._state.remove(entity)
        else:
            entity.end_in = True
            entity.drop()
            entity.grant = entity.pings = entity.pongs = 0
            self.turns.make_urgent(entity)
        if entity is self._state.top_sink:
            self._abandon_waiting()
        self._wait_no_more(entity)
        return 0

    def drop(self):
        """Nothing leaves any more."""
        self._over = True
        self.turns.drop_gone(True)
        self.waiting.clear()
        self._begun = None

    def forget(self, Entity entity not None):
        """Takes an entity back that the peer does not know of."""
        cdef list halves = [entity]
        cdef Entity half
        self._wait_no_more(entity)
        if entity.open_type == DUPLEX_TYPE and entity.twin is not None:
            halves.append(entity.twin)
        for half in halves:
            if self.budget is not None:
                self.budget.closed(half)
            self._state.remove(half)
        self._forgotten += len(halves)
        if self._forgotten > max(FORGOTTEN, (len(self.turns.fresh) + len(self.turns.bulky)) // 2):
            # Nothing is kept of them while the transport takes nothing.
            self._forgotten = 0
            self.turns.drop_gone(False)

    # Openings that wait for credit of the top-level

    cdef int _abandon_waiting(self) except -1:
        """The top-level ended: an opening payload that waits for its credit never leaves."""
        while self.waiting:
            entity, _ = self.waiting.popitem(last=False)
            self._abandon(entity)
        return 0

    cdef int _abandon(self, Entity entity) except -1:
        if entity.gone or entity.end_in:
            return 0
        self._reported.append((ABANDONED_EVENT, entity))
        entity.drop()
        if not entity.opened:
            self.forget(entity)
        return 0

    cdef int _wait(self, Entity entity) except -1:
        """Its opening payload needs more top-level credit than there is."""
        cdef Entity top = self._state.top_sink
        if top.gone or top.end_in or top.end_out:
            self._abandon(entity)
        elif entity not in self.waiting:
            self.waiting[entity] = None
            if entity is self._begun:
                self.waiting.move_to_end(entity, last=False)
        return 0

    cdef int _wait_no_more(self, Entity entity) except -1:
        """It has what it waited for, or needs it no more: the next one is tried."""
        cdef bint waited = False
        if self.waiting and entity in self.waiting:
            del self.waiting[entity]
            waited = True
        if entity is self._begun and not (entity.items and (<Item> entity.items[0]).begun):
            self._begun = None
            waited = True
        if waited:
            self._wake_waiting()
        return 0

    cdef int _wake_waiting(self) except -1:
        if self.waiting:
            self.turns.wake(next(iter(self.waiting)))
        return 0

    # Chunks.

    cdef int fill(self, IovecWriter out, Py_ssize_t limit) except -1:
        """Commits the next chunks to ``out``, until it has about ``limit`` bytes."""
        cdef SendTurns turns = self.turns
        cdef object queue
        cdef Entity entity
        cdef Py_ssize_t before, room
        cdef int sent
        if self._over:
            return 0
        while turns.urgent and out.size < limit:
            entity = turns.urgent.popleft()
            entity.in_urgent = False
            self._send_urgent(entity, out)
        while out.size < limit:
            queue = turns.fresh or turns.bulky
            if not queue:
                break
            entity = queue[0]
            if entity.deficit <= turns.chunk >> LITTLE:
                entity.deficit = min(entity.deficit, 0) + turns.chunk
                turns.move(queue, BULKY)
                continue
            before = out.size
            room = min(entity.deficit, max(limit - before, CRUMB))
            sent = self._run(entity, room, out) if entity.opened else -1
            if sent > 0 or (sent < 0 and not entity.gone and self._send(entity, room, out)):
                entity.deficit -= out.size - before
                if entity.items:
                    continue
            # It stays in turn once more, or its next bytes would overtake the bulky for ever.
            turns.move(queue, BULKY if entity.queue == FRESH and turns.bulky else NOWHERE)
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
        run_chunk(entity, item, size, out)
        if item.scatter.nbytes == 0:
            entity.items.popleft()
        return 1

    cdef int _send_urgent(self, Entity entity, IovecWriter out) except -1:
        """Acknowledgements, credit, pings and pongs, and what else may not wait."""
        cdef int type
        if entity.gone:
            return 0
        type = type_of(entity)
        if entity.end_in:
            # With the acknowledgement the entity is over (BP-R8).
            put_head(out, type, ACK_END_FLAG, entity.identifier, 0, 0)
            self._state.remove(entity)
            return 0
        if entity.end_out or not entity.opened:
            return 0  # credit and pings travel with the opening chunk
        while entity.pongs:
            put_head(out, type, 0, entity.identifier, 0, 0)
            entity.pongs -= 1
        if entity.grant:
            put_head(
                out, type, CREDIT_FLAG | (PING_FLAG if entity.pings else 0), entity.identifier, 0, 0
            )
            put_rest(out, CREDIT_FLAG, entity.grant, 0)
            entity.credit_in += entity.grant
            entity.grant = 0
            entity.pings -= entity.pings > 0
        while entity.pings:
            put_head(out, type, PING_FLAG, entity.identifier, 0, 0)
            entity.pings -= 1
        while entity.items:
            if not self.turns.goes_first(entity):
                self.turns.wake(entity)
                return 0
            if not self._send(entity, UNLIMITED, out):
                return 0
        return 0

    cdef bint _send(self, Entity entity, Py_ssize_t room, IovecWriter out) except -1:
        """One chunk of what waits, of at most ``room`` bytes of payload; False: nothing can go."""
        cdef object items = entity.items
        cdef bint opening = not entity.opened, on_top, enough, lent = False
        cdef Item item = None
        cdef Entity top = self._state.top_sink, payer
        cdef Py_ssize_t available, waiting, size = 0
        cdef uint64_t total = 0
        if opening:
            if entity.twin is not None and entity.open_type != DUPLEX_TYPE:
                return False  # the other half of the Duplex opens both
            lent = borrow_run(entity)
            items = entity.items
        elif not items or entity.end_out or entity.end_in:
            return False
        if items:
            item = items[0]
            if opening and item.is_end:
                item = None
        on_top = opening or (item is not None and item.opening)
        payer = top if on_top else entity
        if on_top and (top.gone or top.end_in or top.end_out):
            available = 0
        elif item is not None and (item.is_end or item.urgent):
            available = <Py_ssize_t> min(payer.credit_out, <uint64_t> UNLIMITED)
        else:
            available = payable(payer, UNLIMITED)
        if item is not None:
            waiting = item.scatter.nbytes
            if item.whole:
                size = waiting
                enough = size <= available
            elif item.total:
                size = min(waiting, room, available)
                enough = size > 0 and not (
                    on_top and self._begun is not None and self._begun is not entity
                )
                total = 0 if item.begun or <uint64_t> size == item.total else item.total
            else:
                size = min(waiting, room, available)
                if opening:
                    size = min(size, self._opening)
                enough = opening or size > 0
            if not enough:
                if on_top and waiting:
                    self._wait(entity)
                return False
        self._chunk(entity, item, size, total, available, out)
        if lent and item.scatter.nbytes:
            entity.twin.add(entity.items.popleft(), 0)
            self.turns.wake(entity.twin)
        return True

    cdef int _chunk(
        self,
        Entity entity,
        Item item,
        Py_ssize_t size,
        uint64_t total,
        Py_ssize_t available,
        IovecWriter out,
    ) except -1:
        """Commits one chunk: ``size`` bytes of ``item``, and the end if it fits behind them."""
        cdef object items = entity.items
        cdef bint opening = not entity.opened
        cdef bint on_top = opening or (item is not None and item.opening)
        cdef Entity payer = self._state.top_sink if on_top else entity
        cdef int flags = PAYLOAD_FLAG, type
        cdef bint done = True
        cdef Item end = None
        cdef Py_ssize_t following = 0, end_size = 0
        cdef uint64_t room
        if item is not None:
            following = 1
            if item.is_end:
                flags = END_FLAG
            if item.total:
                item.total -= <uint64_t> size
                item.begun = True
                item.opening = on_top
                done = not item.total
            elif not item.whole:
                done = size == item.scatter.nbytes
        if done and flags == PAYLOAD_FLAG and len(items) > following:
            end = items[following]
            if payer is entity or opening:
                room = <uint64_t> (available - size)
            else:
                room = entity.credit_out
            if not end.is_end or not end.whole or <uint64_t> end.scatter.nbytes > room:
                end = None
        if end is not None:
            flags |= END_FLAG
            end_size = end.scatter.nbytes
        if opening:
            flags |= (CREDIT_FLAG if entity.grant else 0) | (PING_FLAG if entity.pings else 0)
        type = entity.open_type if on_top else type_of(entity)
        put_head(out, type, flags, entity.identifier, <uint64_t> size, total)
        if not flags & PAYLOAD_FLAG:
            put_rest(out, END_FLAG, 0, <uint64_t> size)
        payer.credit_out -= <uint64_t> size
        if item is not None:
            if size:
                out.put_run(item.scatter, size)
            if not item.is_end and (size or item.whole):
                out.written.append((entity, size))
            if done:
                items.popleft()
        if flags & PAYLOAD_FLAG and flags & (CREDIT_FLAG | END_FLAG):
            put_rest(out, flags, entity.grant, <uint64_t> end_size)
        if end is not None:
            if not opening:
                payer = entity
            payer.credit_out -= <uint64_t> end_size
            if end_size:
                out.put_run(end.scatter, end_size)
        if opening:
            self._has_opened(entity)
        if on_top and not done:
            self._begun = entity
        if on_top:
            self._wait_no_more(entity)
        if end is not None or (done and item is not None and (item.is_end or item.is_response)):
            self._has_ended(entity)
        return 0

    cdef int _has_opened(self, Entity entity) except -1:
        """Its opening chunk was taken, with the credit that waited."""
        cdef Entity twin = entity.twin
        entity.opened = True
        entity.credit_in += entity.grant
        entity.grant = 0
        entity.pings -= entity.pings > 0
        if entity.pings:
            self.turns.make_urgent(entity)
        if entity.open_type == DUPLEX_TYPE and twin is not None:
            twin.opened = True
            if twin.grant or twin.pings:
                self.turns.make_urgent(twin)
            self.turns.wake(twin)
        return 0

    cdef int _has_ended(self, Entity entity) except -1:
        """Our end was taken; nothing else leaves (BP-R8)."""
        entity.end_out = True
        if self.budget is not None:
            self.budget.granted -= entity.grant
        entity.drop()
        entity.grant = entity.pings = entity.pongs = 0
        if entity is self._state.top_sink:
            self._abandon_waiting()
        return 0


cdef Item plain_run(Entity entity):
    """The run of bytes that is next, if that is all there is to it; else None."""
    cdef Item item
    if not entity.opened or entity.end_out or entity.end_in or not entity.items:
        return None
    item = entity.items[0]
    return None if item.whole or item.total or item.is_end or item.urgent else item


cdef bint is_run(object items) except -1:
    """Whether a run of bytes comes first of what waits."""
    cdef Item item
    if not items:
        return False
    item = items[0]
    return not (item.whole or item.total or item.is_end or item.urgent)


cdef bint borrow_run(Entity entity) except -1:
    """Has the opening of a Duplex carry what waits first on its sink, if both are runs of bytes.

    What does not fit goes back to the sink.
    """
    if entity.twin is None or not is_run(entity.items):
        return False
    entity.items.popleft()  # it is empty, and holds the place
    if not is_run(entity.twin.items):
        return False
    entity.add(entity.twin.items.popleft(), 0)
    return True


cdef Py_ssize_t payable(Entity entity, Py_ssize_t size) noexcept:
    """How much of it there is credit for. Looks at fields alone."""
    if entity.credit_out <= entity.keep:
        return 0
    return <Py_ssize_t> min(<uint64_t> max(size, 0), entity.credit_out - entity.keep)


cdef Py_ssize_t plain_head(uint8_t *head, Entity entity, Py_ssize_t size) noexcept:
    """Writes the head of a chunk of a run; returns its bytes, HEAD_MAX at most. Cannot fail."""
    cdef uint8_t *end = head_store(head, type_of(entity), PAYLOAD_FLAG, entity.identifier, 0)
    return varu64_store(end, <uint64_t> size) - head


cdef int run_chunk(Entity entity, Item item, Py_ssize_t size, IovecWriter out) except -1:
    """Commits a chunk of a plain run, which has ``size`` bytes and credit for them."""
    cdef uint8_t[HEAD_MAX] head
    out.put_head(head, plain_head(head, entity, size))
    out.put_run(item.scatter, size)
    entity.credit_out -= <uint64_t> size
    out.written.append((entity, size))
    return 0

cdef int put_head(
    IovecWriter out, int type, int flags, uint64_t identifier, uint64_t size, uint64_t total
) except -1:
    """The bytes of a chunk up to its payload of ``size`` bytes."""
    cdef uint8_t[HEAD_MAX] head
    cdef uint8_t *end = head_store(head, type, flags, identifier, total)
    if flags & PAYLOAD_FLAG:
        end = varu64_store(end, size)
    return out.put_head(head, end - head)


cdef int put_rest(IovecWriter out, int flags, uint64_t credit, uint64_t end_size) except -1:
    """The bytes of a chunk between its payload and its end payload of ``end_size`` bytes."""
    cdef uint8_t[HEAD_MAX] rest
    cdef uint8_t *end = rest
    if flags & CREDIT_FLAG:
        end = varu64_store(end, credit)
    if flags & END_FLAG:
        end = varu64_store(end, end_size)
    return out.put_head(rest, end - rest)


def write_out(
    Scheduler scheduler not None,
    IovecWriter out not None,
    int fd,
    Py_ssize_t limit,
    Py_ssize_t budget,
    list written not None,
    Records records=None,
    Py_ssize_t offered=0,
):
    """Has the kernel take what is in ``out``, then takes of ``scheduler``, one after the other.

    A take has about ``limit`` bytes; with ``limit`` 0 there is none. Whole takes that have left are
    told in ``written``: (entity, bytes), in their order. It ends when nothing can leave, when
    ``budget`` bytes have left, or when the kernel takes no more, which is when something is
    ``left``. With ``records`` each take is encrypted; without, the kernel is offered up to
    ``offered`` chunks more behind a take, within the budget: of those that it does not begin with
    nothing is taken. Returns how many bytes have left. Raises OSError, and what ``records`` raises.
    """
    cdef SendTurns turns = scheduler.turns
    cdef Py_ssize_t total = 0, sent, own, more
    cdef iovec[OFFERED] vector
    if records is not None:
        offered = 0  # as they are, they would be plain
    while True:
        if out.left == 0:
            if limit <= 0 or total >= budget:
                break
            scheduler.fill(out, limit)
            if out.left == 0:
                break
            if records is not None:
                out.seal(records)
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
            if out.left and out.offset:
                if sent > own:
                    begun = out.written.pop()
                    tell(written, out.written)
                    out.written.append(begun)
                return total
        if out.written:
            tell(written, out.written)
    return total


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
