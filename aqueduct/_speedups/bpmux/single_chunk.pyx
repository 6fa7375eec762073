"""Streams of bpmux/rel that come and go in one chunk: opened, with all of their payload, and ended.

A call is two of them, and its close a third. What is done here is what the general way does in
``aqueduct.protocol.bpmux``, step by step; whatever is not this plain is left to it, untouched.
"""

from collections import OrderedDict, deque

cimport cython
from libc.stdint cimport uint8_t, uint64_t

from aqueduct._speedups.bpmux.chunks cimport (
    ACK_END_FLAG,
    CREDIT_FLAG,
    DONE,
    DUPLEX_TYPE,
    END_FLAG,
    HEAD,
    HEAD_MAX,
    NOTHING,
    PAYLOAD_FLAG,
    ChunkDecoder,
    head_store,
)
from aqueduct._speedups.bpmux.entities cimport Entity, Item, EntityReader
from aqueduct._speedups.io.gather cimport IovecWriter
from aqueduct._speedups.bpmux.scheduler cimport SchedulerBase
from aqueduct._speedups.bpmux.varu64 cimport VARU64_MAX, varu64_store

__all__ = ["SingleChunkReader", "SingleChunkScheduler"]

cdef enum:
    # Places; the first is the type of the chunks as well.
    SINK_OUT = 2
    STREAM_OUT = 4
    STREAM_IN = 5
    # So many acknowledgements of ends may wait for company.
    PATIENT = 16

# The place that a received type names (BP-6).
cdef int[6] MIRROR = [1, 0, 5, 4, 3, 2]
# What is reported; the numbers are those of ``aqueduct.protocol.bpmux.events``.
cdef int OPENED = 0
cdef int PAYLOAD = 1
cdef int CREDIT = 2
cdef int ENDED = 6
cdef int ACKNOWLEDGED = 7
cdef int ARRIVED = 10


@cython.auto_pickle(False)
cdef class SingleChunkReader(EntityReader):
    """Reading that knows what is brief; ``urgent`` are those who have something to say at once.

    ``wake(entity)`` is called where one has credit and something to send.

    ``brief``: what opens, is whole and ends is reported as one ARRIVED. ``entities``: so many the
    peer may have of a kind.
    """

    def __init__(
        self,
        Entity top,
        list reported not None,
        tuple maps not None,
        bint whole,
        *,
        urgent,
        wake,
        Py_ssize_t entities,
        bint brief,
    ):
        super().__init__(top, reported, maps, PAYLOAD, whole)
        self._maps = maps
        self._urgent = urgent
        self._wake = wake
        self._entities = entities
        self._brief = brief

    def run(self, int step=NOTHING):
        """As ``run_plain``, and on over brief streams and their acknowledgements.

        ``step`` is the decoder's first one, if it was taken already.
        """
        while True:
            if step == NOTHING:
                step = self.run_plain()
            if step != HEAD or self.allowance == 0 or not self.at_once():
                return step
            self.allowance -= self.allowance > 0
            step = NOTHING

    def tell(self, arrival, piece, acknowledgement):
        """These are called from now on, where nothing waits to be reported before.

        ``arrival(entity, data)`` instead of ARRIVED, ``piece(entity, data)`` instead of PAYLOAD
        behind which no end has come yet, ``acknowledgement(entity)`` instead of
        ACKNOWLEDGED for a sink. The first two return whether they took it: or it is reported. They
        raise nothing. None, for all three: nobody is called any more.
        """
        self._on_arrival = arrival
        self._on_piece = piece
        self._on_acknowledgement = acknowledgement

    cdef bint told(self) except -1:
        cdef ChunkDecoder decoder = self.decoder
        cdef int flags
        if self._on_piece is None or self._reported:
            return False
        if decoder._pos != decoder._end and decoder._pos[0] >> 5 == decoder.type:
            flags = decoder._pos[0] & (PAYLOAD_FLAG | END_FLAG)
            if flags == END_FLAG:
                return False  # perhaps of the same stream: both are one report then
        return self._on_piece(self.entity, decoder.data)

    cdef bint at_once(self) except -1:
        cdef int flags = self.decoder.flags
        if self.decoder.total or self._whole:
            return False
        if flags == ACK_END_FLAG:
            return self._acknowledged()
        if flags | CREDIT_FLAG == PAYLOAD_FLAG | CREDIT_FLAG | END_FLAG:
            return self._arrived()
        return False

    cdef bint _acknowledged(self) except -1:
        """The peer has seen an end of ours (BP-13)."""
        cdef ChunkDecoder decoder = self.decoder
        cdef Entity entity
        cdef object found
        if decoder.type >= DUPLEX_TYPE:
            return False
        found = (<dict> self._maps[MIRROR[decoder.type]]).get(decoder.identifier)
        if found is None:
            return False
        entity = found
        if entity.end_in or not entity.end_out or decoder.step() != DONE:
            return False
        self.entity = entity
        self.opening = False
        if self._on_acknowledgement is None or self._reported or entity.place != SINK_OUT:
            self._reported.append((ACKNOWLEDGED, entity))
        else:
            self._on_acknowledgement(entity)
        remove(entity, self._maps)
        return True

    cdef bint _arrived(self) except -1:
        """A stream of the peer, with all of its payload and an end without one (BP-R5, BP-12)."""
        cdef ChunkDecoder decoder = self.decoder
        cdef Entity entity, top
        cdef object data
        cdef Py_ssize_t size
        if decoder.type != SINK_OUT or not decoder.identifier:
            return False
        if decoder.identifier in self._in or len(self._in) >= self._entities:
            return False
        top = (<dict> self._maps[STREAM_OUT])[0]
        if top.gone or top.end_in or decoder.payload > top.credit_in:
            return False
        data = decoder.take_whole()
        if data is None:
            return False
        size = len(data)
        top.credit_in -= <uint64_t> size
        entity = Entity(STREAM_IN, decoder.identifier)
        entity.credit_out = decoder.credit
        entity.end_in = entity.in_urgent = True
        self._in[decoder.identifier] = entity
        self._urgent.append(entity)  # it is acknowledged
        self.entity = entity
        self.purse = top
        self.opening = self.last = True
        if self._brief:
            if self._on_arrival is None or self._reported or not self._on_arrival(entity, data):
                self._reported.append((ARRIVED, entity, data, top, size))
            return True
        self._reported.append((OPENED, entity))
        self._reported.append((PAYLOAD, entity, data, True, top, size))
        if entity.credit_out:
            self._reported.append((CREDIT, entity))
        self._reported.append((ENDED, entity, b"", top, 0))
        return True


@cython.auto_pickle(False)
cdef class SingleChunkScheduler(SchedulerBase):
    """Turns that know what is brief; the base of the scheduler.

    ``top`` is the sink of the top-level, whose credit opening chunks use, and ``most`` so many
    bytes may leave with one. ``entities``: so many we may have of a kind. ``_waiting`` are those
    whose opening payload waits for that credit, in order; the first one is tried.
    """

    def __init__(
        self,
        Py_ssize_t chunk,
        Entity top not None,
        tuple maps not None,
        *,
        Py_ssize_t most,
        Py_ssize_t entities,
    ):
        super().__init__(chunk)
        self._top = top
        self._maps = maps
        self._sinks = maps[SINK_OUT]
        self._most = most
        self._entities = entities
        self._waiting = OrderedDict()

    @property
    def only_acks(self):
        """Whether all that can leave acknowledges ends, a few of them: nobody waits for that."""
        cdef Entity entity
        cdef Py_ssize_t count = len(self.urgent)
        if not 0 < count <= PATIENT or self.fresh or self.bulky:
            return False
        for entity in self.urgent:
            if not entity.end_in:
                return False
        return True

    def open_ended(self, uint64_t identifier, buffers, uint64_t credit, uint64_t keep):
        """A sink that is to be opened with these bytes and ended behind them.

        None, with nothing done, if the identifier is in use or there is no room for one more.
        """
        cdef Entity entity
        cdef Item run, end
        cdef dict sinks = self._sinks
        if not identifier or identifier in sinks or len(sinks) >= self._entities:
            return None
        entity = Entity(SINK_OUT, identifier)
        run = Item.__new__(Item)
        end = Item.__new__(Item)
        run.scatter.extend(buffers)
        end.whole = end.is_end = True
        entity.opened = False
        entity.ending = True
        entity.grant = credit
        entity.keep = keep
        entity.items = deque((run, end) if run.scatter.nbytes else (end,))
        sinks[identifier] = entity
        self.freshen(entity)
        return entity

    cdef int hurried(self, Entity entity, IovecWriter out) except -1:
        if entity.end_in:
            if not entity.gone:
                self._acknowledge(entity, out)
        elif (
            entity.grant and entity.opened and entity.identifier and not entity.items
            and not (entity.pings or entity.pongs or entity.end_out or entity.gone)
        ):
            self._grant(entity, out)
        else:
            self._send_urgent(entity, out)
        return 0

    cdef int _grant(self, Entity entity, IovecWriter out) except -1:
        """A chunk of credit, which is nearly all that is urgent."""
        cdef uint8_t[1 + 2 * VARU64_MAX] head
        cdef uint8_t *at
        at = head_store(head, entity.place, CREDIT_FLAG, entity.identifier, 0)
        at = varu64_store(at, entity.grant)
        out.put_head(head, at - head)
        entity.credit_in += entity.grant
        entity.grant = 0
        return 0

    cdef int _acknowledge(self, Entity entity, IovecWriter out) except -1:
        """The acknowledgement of the peer's end: with it the entity is over (BP-R8)."""
        cdef uint8_t[1 + VARU64_MAX] head
        cdef uint8_t *at
        cdef int type = entity.place
        # The top-level is In-Sink 0 and In-Stream 0 from both sides (BP-R3).
        if not entity.identifier and (type == SINK_OUT or type == STREAM_OUT):
            type += 1
        at = head_store(head, type, ACK_END_FLAG, entity.identifier, 0)
        out.put_head(head, at - head)
        return remove(entity, self._maps)

    cdef bint opening(self, Entity entity, Py_ssize_t room, IovecWriter out) except -1:
        """The chunk that opens a sink, with all that waits and the end behind it."""
        cdef Item item, end
        cdef Entity top = self._top
        cdef uint8_t[HEAD_MAX] head
        cdef uint8_t *at
        cdef Py_ssize_t size
        cdef int flags = PAYLOAD_FLAG | END_FLAG
        cdef object items = entity.items
        if entity.open_type != SINK_OUT or entity.pings or entity.twin is not None:
            return False
        if top.gone or top.end_in or top.end_out or len(items) != 2:
            return False
        item = items[0]
        end = items[1]
        if item.whole or item.total or item.is_end or item.urgent:
            return False
        if not end.is_end or not end.whole or end.scatter.nbytes:
            return False
        size = item.scatter.nbytes
        if size > room or size > self._most or <uint64_t> size + top.keep > top.credit_out:
            return False
        if entity.grant:
            flags |= CREDIT_FLAG
        at = varu64_store(head_store(head, SINK_OUT, flags, entity.identifier, 0), <uint64_t> size)
        out.put_head(head, at - head)
        if size:
            out.put_run(item.scatter, size)
            out.written.append((entity, size))
        at = head
        if entity.grant:
            at = varu64_store(at, entity.grant)
        at = varu64_store(at, 0)
        out.put_head(head, at - head)
        top.credit_out -= <uint64_t> size
        entity.credit_in += entity.grant
        entity.opened = entity.end_out = True
        entity.items = ()
        entity.grant = entity.pongs = 0
        if self._waiting:
            self._wait_no_more(entity)
        return True


cdef int remove(Entity entity, tuple maps) except -1:
    """As ``State.remove``."""
    entity.gone = True
    entity.twin = None
    entity.items = ()
    entity.joined = b""
    entity.grant = entity.pings = entity.pongs = 0
    if entity.awaited:
        entity.forget_pings()
    del (<dict> maps[entity.place])[entity.identifier]
    return 0
