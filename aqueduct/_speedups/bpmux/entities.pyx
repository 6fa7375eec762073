"""Entities of bpmux/rel, what waits to be sent on them, and the numbers of places and events."""

from collections import deque

cimport cython
from libc.stdint cimport uint64_t

from aqueduct._speedups.base.buffers cimport GatherList
from aqueduct._speedups.bpmux.chunks cimport DUPLEX_TYPE

__all__ = [
    "ABANDONED",
    "ACKNOWLEDGED",
    "CREDIT",
    "DUPLEX",
    "ENDED",
    "FAILED",
    "OPENED",
    "PAYLOAD",
    "PING",
    "PLACES",
    "PONG",
    "PONG_MISSING",
    "REQ_IN",
    "REQ_OUT",
    "SINK_IN",
    "SINK_OUT",
    "STREAM_IN",
    "STREAM_OUT",
    "Entity",
    "Item",
    "State",
    "type_for",
]

REQ_OUT = REQ_OUT_PLACE
REQ_IN = REQ_IN_PLACE
SINK_OUT = SINK_OUT_PLACE
SINK_IN = SINK_IN_PLACE
STREAM_OUT = STREAM_OUT_PLACE
STREAM_IN = STREAM_IN_PLACE
DUPLEX = DUPLEX_TYPE

OPENED = OPENED_EVENT
PAYLOAD = PAYLOAD_EVENT
CREDIT = CREDIT_EVENT
PING = PING_EVENT
PONG = PONG_EVENT
PONG_MISSING = PONG_MISSING_EVENT
ENDED = ENDED_EVENT
ACKNOWLEDGED = ACKNOWLEDGED_EVENT
ABANDONED = ABANDONED_EVENT
FAILED = FAILED_EVENT

PLACES = ("req_out", "req_in", "sink_out", "sink_in", "stream_out", "stream_in")


@cython.final
@cython.freelist(64)
@cython.auto_pickle(False)
cdef class Item:
    """Something that waits to be sent on an entity: a payload, a run of bytes, or the end.

    ``whole``: one payload in one chunk. ``total`` above zero: a payload in Partial mode, of which
    so many bytes have not left, and ``missing`` of them were not given yet; ``begun``: the peer has
    its size and takes nothing else; ``opening``: all pieces are charged to the top-level (BP-R10).
    Neither: a run of bytes, which may be cut anywhere.
    """

    def __cinit__(
        self,
        *,
        bint whole=False,
        uint64_t total=0,
        bint is_end=False,
        bint is_response=False,
        bint urgent=False,
    ):
        self.scatter = GatherList()
        self.whole = whole
        self.total = self.missing = total
        self.is_end = is_end
        self.is_response = is_response
        self.urgent = urgent


@cython.final
@cython.freelist(256)
@cython.auto_pickle(False)
cdef class Entity:
    """One half of a conversation. What is here may be read; commands of Mux change it.

    ``user`` and ``number`` are the owner's; ``twin`` the other half of a Duplex. Of the protocol
    (BP-5): ``credit_out``, bytes that we may send; ``credit_in``, that the peer may; ``end_out``,
    our end has left and nothing else does (BP-R8); ``end_in``, the peer's is here and not
    acknowledged; ``partial``, bytes missing of a payload in Partial mode. ``opened``: the peer
    knows it, or will. ``ending``: our end is queued or has left. ``gone``: in no map any more.
    ``keep``: bytes of credit_out that only ends and urgent messages use. ``items`` wait to be sent,
    as do ``grant`` (credit), ``pings`` and ``pongs``. ``awaited``: pings without an answer.
    """

    def __init__(self, int place, uint64_t identifier):
        self.place = place
        self.identifier = identifier
        self.open_type = place
        self.opened = True
        # An empty deque takes more than all the rest, and most entities of a peer never need one.
        self.items = self.awaited = ()
        self.joined = b""

    def add(self, Item item not None, Py_ssize_t place=-1):
        """Something waits to be sent: behind all that does, or with ``place`` items before it."""
        if not self.items:
            self.items = deque()
        if place < 0:
            self.items.append(item)
        else:
            self.items.insert(place, item)

    def drop(self):
        """Nothing waits to be sent any more."""
        self.items = ()

    def join(self, data):
        """A piece of a payload that is put together; ``joined`` is what there is of it."""
        if not self.joined:
            self.joined = bytearray()
        self.joined += data

    def forget_pings(self):
        """Nobody waits for their pongs any more."""
        for ping in self.awaited:
            ping[1] = None
        self.awaited = ()

    def wait_for_pong(self, list ping not None):
        """A ping was asked for: [deadline, entity, asked]."""
        if not self.awaited:
            self.awaited = deque()
        self.awaited.append(ping)

    @property
    def queued(self):
        """Bytes that wait to be sent."""
        return sum([item.scatter.nbytes for item in self.items])

    def __repr__(self):
        return f"<{PLACES[self.place]} {self.identifier}>"


@cython.final
@cython.auto_pickle(False)
cdef class State:
    """The six maps (BP-5), and the two entities that a connection begins with.

    ``top_sink`` is what we send on the top-level, and what our opening payloads are charged to.
    ``top_stream`` is what the peer sends on it, and its opening payloads.
    """

    def __cinit__(self):
        self.maps = tuple([{} for _ in PLACES])
        self.top_sink = self.add(SINK_OUT_PLACE, 0)
        self.top_stream = self.add(STREAM_OUT_PLACE, 0)

    cpdef Entity add(self, int place, uint64_t identifier):
        """A new entity in its map."""
        cdef Entity entity = Entity(place, identifier)
        self.maps[place][identifier] = entity
        return entity

    @cython.nonecheck(True)
    cpdef object remove(self, Entity entity):
        """Takes it from its map; its identifier may be used again (BP-R8)."""
        entity.gone = True
        entity.twin = None
        entity.drop()
        entity.joined = b""
        entity.grant = entity.pings = entity.pongs = 0
        entity.forget_pings()
        del self.maps[entity.place][entity.identifier]


cdef int type_of(Entity entity) noexcept:
    """The type of the chunks that we send for an entity. Looks at fields alone: it cannot raise.

    The top-level is In-Sink 0 and In-Stream 0 from both sides (BP-R3): plain mirroring would name
    maps that never hold it.
    """
    if entity.identifier == 0 and entity.place in (SINK_OUT_PLACE, STREAM_OUT_PLACE):
        return entity.place + 1
    return entity.place


def type_for(Entity entity not None):
    """The type of the chunks that we send for an entity."""
    return type_of(entity)
