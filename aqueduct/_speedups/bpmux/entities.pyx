"""Entities of bpmux/rel, what waits to be sent on them, and the path of every byte that comes.

What a chunk means is decided by ``aqueduct.protocol.bpmux``. Here is the common case: a payload for
an entity that is known, with credit, in no special mode.
"""

from collections import deque

cimport cython
from libc.stdint cimport uint64_t

from aqueduct._speedups.bpmux.chunks cimport (
    CREDIT_FLAG,
    DONE,
    HEAD,
    PAYLOAD_FLAG,
    PIECE,
    ChunkDecoder,
)
from aqueduct._speedups.base.buffers cimport GatherList

__all__ = ["Entity", "Item", "EntityReader"]

cdef enum:
    # A place, which is the type of own chunks as well.
    SINK_OUT = 2
    STREAM_OUT = 4
    # Types of received chunks.
    OUT_SINK = 2
    IN_SINK = 3
    IN_STREAM = 5

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

    ``user`` is the owner's; ``twin`` the other half of a Duplex. Of the protocol (BP-5):
    ``credit_out``, bytes that we may send; ``credit_in``, that the peer may; ``end_out``, our end
    has left and nothing else does (BP-R8); ``end_in``, the peer's is here and not acknowledged;
    ``partial``, bytes missing of a payload in Partial mode. ``opened``: the peer knows it, or will.
    ``ending``: our end is queued or has left. ``gone``: in no map any more. ``keep``: bytes of
    credit_out that only ends and urgent messages use. ``items`` wait to be sent, as do ``grant``
    (credit), ``pings`` and ``pongs``. ``awaited``: pings without an answer.
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


@cython.auto_pickle(False)
cdef class EntityReader:
    """The chunk under way on the receiving side; the base of what gives chunks their meaning.

    ``entity`` is whom it is for, ``purse`` who its payload is charged to, ``opening`` whether it
    opens, ``last`` whether its payload ends what the application gets as one. ``allowance``: so
    many chunks are taken before others have their turn; below zero: any number. Once it is used up
    a HEAD is returned that nobody has looked at: who stops there says that it is ``unread``.
    """

    def __cinit__(self, *arguments, **options):
        self.decoder = ChunkDecoder()
        self.allowance = -1

    def __init__(
        self,
        Entity top not None,
        list reported not None,
        tuple maps not None,
        int kind,
        bint whole,
    ):
        self.entity = self.purse = top
        self._reported = reported
        self._top_out = maps[STREAM_OUT]
        self._in = maps[5]
        self._sinks = maps[SINK_OUT]
        self._kind = kind
        self._whole = whole

    def run_plain(self):
        """Reads on, reports plain payloads, and returns the first step that is not of such.

        A plain payload is a whole one for a known stream, with credit, in a chunk with no more.
        """
        cdef ChunkDecoder decoder = self.decoder
        cdef int step
        while True:
            step = decoder.step()
            if step == PIECE and self._plain:
                self._reported.append((
                    self._kind, self.entity, decoder.data, decoder.missing == 0, self.entity,
                    len(decoder.data),
                ))
            elif step == DONE and self._plain:
                self._plain = False
            elif step != HEAD or self.allowance == 0 or not self.plain_head():
                return step
            else:
                self.allowance -= self.allowance > 0

    cdef bint plain_head(self) except -1:
        """Whether the chunk that begins is plain, and if so takes its credit."""
        cdef ChunkDecoder decoder = self.decoder
        cdef Entity entity
        cdef object found
        if (
            self._whole or decoder.flags != PAYLOAD_FLAG or decoder.total or not decoder.payload
        ):
            return False
        if decoder.type == OUT_SINK:
            found = self._in.get(decoder.identifier)
        elif decoder.type == IN_SINK:
            found = self._top_out.get(decoder.identifier)
        else:
            return False
        if found is None:
            return False
        entity = found
        if entity.end_in or entity.partial or decoder.payload > entity.credit_in:
            return False
        entity.credit_in -= decoder.payload
        self.entity = self.purse = entity
        self.opening = False
        self.last = True
        self._plain = True
        return True

    cdef bint credit_head(self) except -1:
        """Whether the chunk that begins is credit for a sink that we write to, and no more."""
        cdef ChunkDecoder decoder = self.decoder
        cdef object found
        if decoder.flags != CREDIT_FLAG or decoder.type != IN_STREAM or not decoder.identifier:
            return False
        found = self._sinks.get(decoder.identifier)
        if found is None or (<Entity> found).end_in:
            return False
        self.entity = found
        self.opening = False
        return True

    cdef bint credit(self) except -1:
        """At the rest of a chunk: whether it was such credit, which has been taken now.

        It is not reported: what may leave now does. Too much of it is left to who says so.
        """
        cdef ChunkDecoder decoder = self.decoder
        cdef Entity entity = self.entity
        if (
            decoder.flags != CREDIT_FLAG or entity.place != SINK_OUT or not entity.identifier
            or decoder.credit > <uint64_t> 0xFFFFFFFFFFFFFFFF - entity.credit_out
        ):
            return False
        entity.credit_out += decoder.credit
        if entity.items or not entity.opened:
            self._wake(entity)
        return True

    cdef bint at_once(self) except -1:
        """Whether the chunk that begins is one that was taken as a whole."""
        return False

    cdef bint told(self) except -1:
        """Whether the piece of a plain payload has been told of, and needs no report."""
        return False
