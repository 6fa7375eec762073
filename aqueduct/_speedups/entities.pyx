"""Entities of bpmux/rel, what waits to be sent on them, and the two paths that every byte takes.

What a chunk means and who is next is decided by ``aqueduct.protocol.bpmux``. Here is the common
case of each direction: a payload for an entity that is known, with credit, in no special mode.
"""

from collections import deque

cimport cython
from cpython.bytes cimport PyBytes_FromStringAndSize
from libc.stdint cimport uint8_t, uint64_t

from aqueduct._speedups.bpmux cimport (
    DONE,
    HEAD,
    HEAD_MAX,
    PAYLOAD_FLAG,
    PIECE,
    ChunkDecoder,
    head_store,
)
from aqueduct._speedups.buffers cimport Scatter, count_copied
from aqueduct._speedups.varu64 cimport varu64_store

__all__ = ["Entity", "Item", "Outlet", "Reading", "send_run"]

cdef enum:
    # Places, which are the types of own chunks as well.
    SINK_OUT = 2
    STREAM_OUT = 4
    # Types of received chunks.
    OUT_SINK = 2
    IN_SINK = 3

PLACES = ("req_out", "req_in", "sink_out", "sink_in", "stream_out", "stream_in")
cdef object UNLIMITED = 1 << 62


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
        self.scatter = Scatter()
        self.whole = whole
        self.total = self.missing = total
        self.is_end = is_end
        self.is_response = is_response
        self.urgent = urgent


@cython.final
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
        self.joined = bytearray()

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
cdef class Outlet:
    """The buffers of one take on the way: small ones are joined, large ones stay as they are."""

    def __cinit__(self):
        self.buffers = []
        self.written = []
        self._run = []

    def add(self, buffer):
        """Appends bytes, or a memoryview of bytes."""
        self.put(buffer, len(buffer))

    def close(self):
        """The last small buffers are joined; call it before ``buffers`` is read."""
        cdef Py_ssize_t count = len(self._run)
        if count == 0:
            return
        if count == 1 and type(self._run[0]) is bytes:
            self.buffers.append(self._run[0])
        else:
            self.buffers.append(b"".join(self._run))
            count_copied(self._run_size)
        self._run.clear()
        self._run_size = 0

    cdef int put(self, object buffer, Py_ssize_t size) except -1:
        self.size += size
        if size < COALESCE_BELOW:
            self._run.append(buffer)
            self._run_size += size
        else:
            self.close()
            self.buffers.append(buffer)
        return 0


def send_run(Entity entity, Py_ssize_t room, Outlet out):
    """One chunk of a run of bytes: 1; 0 without credit; -1 if it is not this plain.

    Plain is: the entity is open, and the run comes first and has nothing behind it, or more bytes
    than may leave now.
    """
    cdef Item item
    cdef uint8_t[HEAD_MAX] head
    cdef uint8_t *end
    cdef uint64_t credit
    cdef Py_ssize_t size
    cdef int type
    cdef object items = entity.items, buffer
    if not entity.opened or entity.end_out or entity.end_in or not items:
        return -1
    item = items[0]
    if item.whole or item.total or item.is_end or item.urgent:
        return -1
    if entity.credit_out <= entity.keep:
        return 0
    credit = entity.credit_out - entity.keep
    size = min(item.scatter.nbytes, room)
    if <uint64_t> size > credit:
        size = <Py_ssize_t> credit
    if size == item.scatter.nbytes and len(items) > 1:
        return -1
    # The top-level is In-Sink 0 (BP-R3).
    type = entity.place + (entity.identifier == 0 and entity.place == SINK_OUT)
    end = head_store(head, type, PAYLOAD_FLAG, entity.identifier, 0)
    end = varu64_store(end, <uint64_t> size)
    out.put(PyBytes_FromStringAndSize(<char *> head, end - head), end - head)
    for buffer in item.scatter.take(size, UNLIMITED):
        out.put(buffer, len(buffer))
    entity.credit_out -= <uint64_t> size
    out.written.append((entity, size))
    if item.scatter.nbytes == 0:
        items.popleft()
    return 1


@cython.auto_pickle(False)
cdef class Reading:
    """The chunk under way on the receiving side; the base of what gives chunks their meaning.

    ``entity`` is whom it is for, ``purse`` who its payload is charged to, ``opening`` whether it
    opens, ``last`` whether its payload ends what the application gets as one.
    """

    def __init__(
        self, Entity top, list reported not None, tuple maps not None, int kind, bint whole
    ):
        self.decoder = ChunkDecoder()
        self.entity = self.purse = top
        self._reported = reported
        self._top_out = maps[STREAM_OUT]
        self._in = maps[5]
        self._kind = kind
        self._whole = whole

    def run_plain(self):
        """Reads on, reports plain payloads, and returns the first step that is not of such.

        A plain payload is a whole one for a known stream, with credit, in a chunk with no more.
        """
        cdef ChunkDecoder decoder = self.decoder
        cdef Entity entity
        cdef int step
        cdef object found
        while True:
            step = decoder.step()
            if step == PIECE and self._plain:
                self._reported.append((
                    self._kind, self.entity, decoder.data, decoder.missing == 0, self.entity,
                    len(decoder.data),
                ))
            elif step == DONE and self._plain:
                self._plain = False
            elif step == HEAD:
                if (
                    self._whole or decoder.flags != PAYLOAD_FLAG or decoder.total
                    or not decoder.payload
                ):
                    return step
                if decoder.type == OUT_SINK:
                    found = self._in.get(decoder.identifier)
                elif decoder.type == IN_SINK:
                    found = self._top_out.get(decoder.identifier)
                else:
                    return step
                if found is None:
                    return step
                entity = found
                if entity.end_in or entity.partial or decoder.payload > entity.credit_in:
                    return step
                entity.credit_in -= decoder.payload
                self.entity = self.purse = entity
                self.opening = False
                self.last = True
                self._plain = True
            else:
                return step
