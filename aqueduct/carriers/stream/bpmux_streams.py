"""How the streams of a carrier are carried by bpmux.

| carrier | bpmux |
|---|---|
| my stream | my sink; the first bytes travel with its opening chunk |
| the peer's stream | its sink, a stream to me |
| a bidirectional stream | a duplex; its opener writes to the sink, the other side to the stream |
| ``credit`` | credit; the first window is granted by who accepts, less the opening payload |
| end | end without a payload |
| ``reset`` | end, payload VarU64(code); 9 bytes of credit are kept for it |
| ``stop`` | end of the stream half, payload VarU64(code); the opener has granted 9 bytes for it |
| datagram | a message of the top-level: the byte 0, then the datagram |
| ``extra_streams`` | a message of the top-level: the byte 1, then VarU64, all streams allowed |
| slots with bidirectional streams | the byte 2, the same, and VarU64, all of these allowed |
| ``close`` | the end of the top-level, payload VarU64(code) and the reason |

Identifiers count up from 1, of sinks and duplexes together. Each side's first message of the
top-level says how many streams it allows. A client that wants bidirectional streams begins with the
byte 2, and so does a listener that allows them; a client that wants none ignores that part.

Opening payloads and messages of the top-level are charged to its credit (BP-R5). The receiver gives
an opening payload back at once as far as it lies within the window of its stream, the rest as
``credit`` covers it: so a peer has at most the windows of all streams and the top-level's credit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final, Protocol

from aqueduct._speedups.bpmux.chunks import decode_varu64, encode_varu64
from aqueduct._speedups.channels.receiver import DirectRead
from aqueduct.carriers.contract import BIDI, Buffer, CarrierUser
from aqueduct.config import Config
from aqueduct.errors import FrameError, LimitExceeded, LocalProtocolError, SequenceError
from aqueduct.protocol.bpmux import events
from aqueduct.protocol.bpmux.connection import Mux
from aqueduct.protocol.bpmux.state import SINK_IN, SINK_OUT, STREAM_IN, STREAM_OUT, Entity

__all__ = ["DATAGRAM", "STREAMS", "BpmuxStreams", "StreamsOwner", "close_payload", "read_close"]

DATAGRAM: Final = b"\0"
STREAMS: Final = b"\1"
BIDI_STREAMS: Final = b"\2"
_DATAGRAM_LIMIT: Final = 16_000
_DATAGRAM_QUEUE: Final = 64  # datagrams; it waits for credit and for the socket
_CODE_SIZE: Final = 9  # the longest VarU64
_RESERVE: Final = 1024  # of the top-level's credit, for its close and for limits of streams
_REASON_LIMIT: Final = 256  # bytes of UTF-8
_STOPPED_KEPT: Final = 4096
_MESSAGE_LIMIT: Final = 64 << 10  # bytes of one message of the top-level
_MEASURE_EVERY: Final = 5.0  # seconds between two measurements of the round trip, at least


_READ: Final = (STREAM_IN, STREAM_OUT)
_WRITTEN: Final = (SINK_OUT, SINK_IN)
"""Places of what the peer writes, and of what this side does."""


class StreamsOwner(Protocol):
    """The connection that the streams belong to."""

    def established(self) -> None:
        """Both sides have said how many streams they allow."""

    def closed_by_peer(self, last: bytes) -> None:
        """The peer has ended the top-level, with this payload."""


class _Incoming:
    """One stream of the peer's, or its direction of a bidirectional one."""

    __slots__ = ("entity", "excess", "limit", "opening", "stopped", "waiting")

    def __init__(self, entity: Entity, limit: int) -> None:
        self.entity = entity
        self.limit = limit
        """Bytes that it may have, from its start."""
        self.opening = 0
        """Bytes of its opening payload so far."""
        self.waiting = True
        """Its opening payload is not complete."""
        self.excess = 0
        """Bytes of it above the limit: the top-level gets them back later."""
        self.stopped = 0
        """The code of a stop."""


class BpmuxStreams:
    """The streams of one carrier, their bpmux core, and the user that hears of them.

    Commands of the carrier queue into the core ``mux``. ``take_events`` reports what it found.
    """

    def __init__(
        self,
        owner: StreamsOwner,
        config: Config,
        time: Callable[[], float],
        *,
        is_client: bool,
        bidi: bool,
    ) -> None:
        """``bidi``: with bidirectional streams; of a server: if the client wants them."""
        flow = config.flow
        self._owner = owner
        self._time = time
        self._window = flow.initial_window
        self._slots = flow.streams
        self._top_credit = config.byte_stream.top_credit
        self._client = is_client
        most = max(config.bpmux.entities - flow.streams, 1)
        self._bidi_slots = min(config.limits.channels + 1, most) if bidi else 0
        self.bidi = False
        """Whether both sides have bidirectional streams."""
        self.mux = Mux(replace(config.bpmux, opening=min(config.bpmux.opening, self._window)))
        self.mux.top_sink.keep = _RESERVE
        self._turns = self.mux.turns
        """Asked and told directly, where it is often."""
        self.user: CarrierUser | None = None
        # The life of the connection.
        self.established = False
        """Each side has said how many streams it allows."""
        self.begun = False
        """The user has been told of the connection."""
        self.closing = False
        """Commands are without effect; what is queued leaves still."""
        self.over = False
        """Nothing is reported any more."""
        self._early: list[events.Event] = []
        """What came before the user was there."""
        # What a burst left to do.
        self.dirty = True
        """Something that ``collect`` looks at has changed."""
        self.reported = False
        """The user was told of something, and has not answered."""
        self.room_grew = False
        """There is room for datagrams again."""
        self.sent = 0
        """Bytes of streams that have left."""
        self.received = 0
        """Bytes of streams that have come."""
        # My streams.
        self._opened = 0
        self._allowed = 0
        """Streams that the peer lets this side open in all."""
        self._short = False
        """Whether the peer allows more streams than the core has room for."""
        self._senders: dict[int, Entity] = {}
        self._stopped: dict[int, None] = {}
        """Of mine, by the peer: writes that cross it are dropped."""
        self._bidi_opened = 0
        self._bidi_allowed = 0
        # The peer's.
        self._incoming: dict[int, _Incoming] = {}
        self._peer_opened = 0
        self._peer_ended = 0
        self._announced = 0
        self._extra = 0
        self._bidi_peer_opened = 0
        self._bidi_peer_ended = 0
        self._bidi_announced = 0
        self._half_over: set[int] = set()
        """Bidirectional streams with one direction that has ended."""
        self._give_back = 0
        """Of the top-level's credit, consumed and not granted again."""
        self._message = bytearray()
        self._datagrams: deque[bytes] = deque()
        # The round trip.
        self.rtt = 0.0
        self._measure_at = 0.0
        self._delayed = 0
        """Pings under way that have crossed a cut."""
        self._pings: deque[bool] = deque()
        """Of those on the way, in order: whether the user has asked for it."""

    # what the contract promises

    @property
    def openable(self) -> int:
        """How many more streams may be opened now."""
        if self.over:
            return 0
        wanted = self._allowed - self._opened
        room = self.mux.room_for_sinks
        self._short = room < wanted
        return min(wanted, room)

    @property
    def bidi_openable(self) -> int:
        """How many more bidirectional streams may be opened now."""
        if self.over or not self.bidi:
            return 0
        mux = self.mux
        room = min(mux.room_for_sinks, mux.settings.entities - mux.count(STREAM_OUT))
        return max(min(self._bidi_allowed - self._bidi_opened, room), 0)

    @property
    def datagram_limit(self) -> int:
        """The largest payload of ``send_datagram``, bytes."""
        return _DATAGRAM_LIMIT

    @property
    def datagram_room(self) -> int:
        """How many datagrams the queue takes now."""
        return _DATAGRAM_QUEUE - len(self._datagrams)

    def write(self, stream: int, buffers: Sequence[Buffer], fin: bool) -> None:
        """Queues bytes on my stream; see the contract."""
        if self.over or self.closing:
            return
        entity = self._senders.get(stream)
        if entity is None:
            if stream >= BIDI:
                self._open_bidi(stream, buffers, fin)
            elif self._may_open(stream):
                entity = self._senders[stream] = self.mux.open_sink(
                    buffers or None,
                    credit=_CODE_SIZE,
                    keep=_CODE_SIZE,
                    identifier=stream + self._bidi_opened + 1,
                    ended=fin,
                )
                entity.number = stream
                self._opened += 1
            return
        if entity.ending:
            raise LocalProtocolError(f"stream {stream} ended; nothing can be written to it")
        if buffers and not self._turns.write_run(entity, buffers):
            self.mux.write(entity, buffers)
        if fin:
            self.mux.end(entity)

    def reset(self, stream: int, code: int) -> None:
        """Gives up my stream."""
        if self.over or self.closing:
            return
        if not (0 <= stream < self._opened or self._has_bidi(stream)):
            raise LocalProtocolError(f"stream {stream} was never opened")
        self._stopped.pop(stream, None)
        entity = self._senders.pop(stream, None)
        if entity is None or entity.end_out:
            return
        self.mux.end(entity, encode_varu64(code), drop=True)

    def stop(self, stream: int, code: int) -> None:
        """Asks the peer to send no more on its stream."""
        state = self._reading(stream)
        if state is not None and not state.entity.ending:
            state.stopped = code
            self.mux.end(state.entity, encode_varu64(code))

    def credit(self, stream: int, limit: int) -> None:
        """Lets the peer send on its stream up to ``limit`` bytes in all."""
        state = self._incoming.get(stream) or self._reading(stream)
        if state is None or limit <= state.limit or self.closing:
            return
        more = limit - state.limit
        state.limit = limit
        if state.waiting:
            return  # granted when the opening payload is there, less its size
        if state.excess:
            covered = min(state.excess, more)
            state.excess -= covered
            self._give_back += covered
            self.dirty = True
            more -= covered
        self._turns.give_back(state.entity, more)  # ``Mux.consumed``

    def extra_streams(self, count: int) -> None:
        """Gives the peer more stream slots, or keeps some back."""
        if count != self._extra:
            self._extra = count
            self.dirty = True

    def send_datagram(self, data: bytes) -> bool:
        """Queues a datagram; False if it was dropped."""
        if (
            self.over
            or self.closing
            or len(data) > _DATAGRAM_LIMIT
            or len(self._datagrams) >= _DATAGRAM_QUEUE
        ):
            return False
        self._datagrams.append(data)
        self.dirty = True
        return True

    # what is sent

    def greet(self) -> None:
        """The credit without which the peer can send nothing."""
        self.mux.credit(self.mux.top_stream, self._top_credit)

    def collect(self) -> None:
        """Puts into the core what waits here: credit, slots, datagrams."""
        mux = self.mux
        self.dirty = bool(self._datagrams)
        if self._give_back * 4 >= self._top_credit:
            mux.consumed(mux.top_stream, self._give_back)
            self._give_back = 0
        limit = self._slots + self._peer_ended + self._extra
        if limit > self._announced and 2 * (self._announced - self._peer_opened) < self._slots:
            # Half of them are left at least: a few at a time would cost a message each.
            self._announced = limit
            self._announce()
        if self.bidi:
            limit = self._bidi_slots + self._bidi_peer_ended
            left = self._bidi_announced - self._bidi_peer_opened
            if limit > self._bidi_announced and 2 * left < self._bidi_slots:
                self._announce()
        queue, top = self._datagrams, mux.top_sink
        if queue and not top.items:
            size = 0
            while queue and top.credit_out - top.keep - size > len(queue[0]):
                data = DATAGRAM + queue.popleft()
                size += len(data)
                mux.message(data)
                self.room_grew = True
            self.dirty = bool(queue)

    @property
    def unsent(self) -> bool:
        """Whether anything queued waits still, be it for the peer's credit."""
        if not self.mux.idle:
            return True
        if self._datagrams or self.mux.top_sink.items:
            return True
        return any(entity.items or not entity.opened for entity in self._senders.values())

    def _announce(self) -> None:
        """Says how many streams the peer may open in all."""
        message = STREAMS + encode_varu64(self._announced)
        if self._bidi_slots:
            self._bidi_announced = self._bidi_slots + self._bidi_peer_ended
            message = BIDI_STREAMS + message[1:] + encode_varu64(self._bidi_announced)
        self.mux.message(message, urgent=True)

    def _may_open(self, stream: int) -> bool:
        if stream < self._opened:
            if stream in self._stopped:
                return False
            raise LocalProtocolError(f"stream {stream} ended; nothing can be written to it")
        if stream > self._opened:
            raise LocalProtocolError(f"stream {stream}: the next one to open is {self._opened}")
        if self._allowed <= self._opened:
            raise LocalProtocolError(f"stream {stream}: the peer allows no more streams now")
        return True

    def _open_bidi(self, stream: int, buffers: Sequence[Buffer], fin: bool) -> None:
        """Opens a bidirectional stream, unless it was stopped. Raises LocalProtocolError."""
        if not self.bidi:
            raise LocalProtocolError(f"stream {stream}: there are no bidirectional streams here")
        following = BIDI | self._bidi_opened << 1
        if self._has_bidi(stream):
            if stream in self._stopped:
                return
            raise LocalProtocolError(f"stream {stream} ended; nothing can be written to it")
        if stream & 1:
            raise LocalProtocolError(f"the peer never opened its stream {stream}")
        if stream > following:
            raise LocalProtocolError(f"stream {stream}: the next one to open is {following}")
        if not self.bidi_openable:
            raise LocalProtocolError(f"stream {stream}: the peer allows no more streams now")
        mux = self.mux
        identifier = self._opened + self._bidi_opened + 1
        sink, reader = mux.open_duplex(
            None, credit=self._window + _CODE_SIZE, identifier=identifier
        )
        sink.number = reader.number = stream
        sink.keep = _CODE_SIZE
        state = reader.user = _Incoming(reader, self._window)
        state.waiting = False
        self._senders[stream] = sink
        self._incoming[stream] = state
        self._bidi_opened += 1
        mux.consumed(sink, _CODE_SIZE)  # for a stop
        if buffers:
            mux.write(sink, buffers)
        if fin:
            mux.end(sink)

    def _has_bidi(self, stream: int) -> bool:
        """Whether this is a bidirectional stream that was opened."""
        opened = self._bidi_peer_opened if stream & 1 else self._bidi_opened
        return stream >= BIDI and (stream ^ BIDI) >> 1 < opened

    def _reading(self, stream: int) -> _Incoming | None:
        if self.over or self.closing:
            return None
        if not (0 <= stream < self._peer_opened or self._has_bidi(stream)):
            raise LocalProtocolError(f"the peer never opened its stream {stream}")
        return self._incoming.get(stream)

    # what has left

    def written(self, written: list[tuple[Entity, int]], emptied: bool) -> None:
        """These entities' bytes have left; whether nothing else waits for the socket."""
        user = self.user
        if self.over or not self.begun or user is None:
            return
        for entity, size in written:
            if entity.identifier:
                self.sent += size
                if user.written(entity.number, size):
                    self.reported = True
        if self.room_grew and emptied:
            self.room_grew = False
            self.reported = True
            user.datagram_room_changed()

    def kept(self, size: int) -> bool:
        """A link keeps so many more bytes that have left; whether the user was there to hear it."""
        user = self.user
        if self.over or not self.begun or user is None:
            return False
        user.kept(size)
        return True

    # what has arrived

    def take_events(self) -> None:
        """Reports what the core has found. Raises RemoteProtocolError."""
        found = self.mux.events_received()
        if not self.begun:
            self._early += found
            self._before_begin()
        elif found:
            self._dispatch(found)

    def report_early(self) -> None:
        """The user is there, and hears of what came before. Raises RemoteProtocolError."""
        early, self._early = self._early, []
        self._dispatch(early)

    def _before_begin(self) -> None:
        """Looks for what each side says first; all else waits for the user."""
        if self.established:
            return
        rest: list[events.Event] = []
        for event in self._early:
            kind = event[0]
            if kind == events.FAILED:
                raise event[1]
            top = event[1] is self.mux.top_stream
            if kind == events.PAYLOAD and top and not self._allowed:
                self._first_limit(event[2], event[3])
            elif kind == events.ENDED and top:
                self._owner.closed_by_peer(event[2])
                return
            elif kind != events.CREDIT:
                rest.append(event)
        self._early = rest
        if not self._announced and self.mux.top_sink.credit_out:
            self.collect()  # what this side allows
        if self._allowed and self._announced:
            self.established = True
            self._owner.established()

    def _first_limit(self, data: Any, whole: bool) -> None:
        self._message += data
        if whole:
            data = bytes(self._message)
            self._message.clear()
            self._give_back += len(data)
            if data[:1] not in (STREAMS, BIDI_STREAMS) or not self._allow(data):
                raise FrameError("its first message does not say how many streams it allows")
            self._agree(data[:1] == BIDI_STREAMS)

    def _agree(self, bidi: bool) -> None:
        """Both sides have bidirectional streams, or none. ``bidi``: the peer begins with them."""
        wanted = self._bidi_slots > 0
        if bidi and not wanted and not self._client:
            raise SequenceError("it asks for bidirectional streams, which this listener lacks")
        if wanted and not bidi and self._client:
            raise SequenceError("it has no bidirectional streams, which this client asks for")
        self.bidi = bidi and wanted
        if not self.bidi:
            self._bidi_slots = self._bidi_announced = self._bidi_allowed = 0

    def inlet_of(self, entity: Entity) -> DirectRead | None:
        """Where the next bytes of a stream of the peer's go; None: they are reported."""
        state = entity.user
        if self.over or state is None or state.waiting or self.user is None:
            return None  # of an opening payload the bytes are counted elsewhere
        number = entity.number
        return None if number >= BIDI else self.user.inlet(number)

    def inlet_closed(self, entity: Entity, size: int, idle: bool) -> None:
        """``size`` bytes came by the inlet; ``idle``: the user need not look at them yet."""
        if self.over or self.user is None:
            return
        self.received += size
        if not idle:  # most of a large message comes without a report
            self.reported = True
            self.user.inlet_done(entity.number)

    def _dispatch(self, found: list[events.Event]) -> None:
        """Reports events of the core. Raises RemoteProtocolError for what breaks the mapping."""
        user = self.user
        assert user is not None
        top = self.mux.top_stream
        joined: Entity | None = None
        for place, event in enumerate(found, 1):
            if self.over:
                return
            kind = event[0]
            if kind == events.PAYLOAD:
                entity, data, whole = event[1], event[2], event[3]
                if entity is top:
                    self._top_message(data, whole, user)
                    continue
                state = entity.user
                last = bool(data) and _is_last(entity, found, place)
                if state.waiting:
                    state.opening += len(data)
                    if whole and not last:
                        self._opening_complete(state)
                if data:
                    self.received += len(data)
                    self.reported = True
                    # The last bytes and the end are one report, as everywhere: or the user would
                    # stop a stream of which nothing more comes.
                    if last:
                        joined = state.entity
                    user.stream_data(entity.number, data, last)
            elif kind == events.CREDIT:
                pass  # the core sends what may leave now
            elif kind == events.OPENED:
                self._peer_opens(event[1])
            elif kind == events.ENDED:
                self.reported = True
                entity = event[1]
                if event[4] and event[3] is top and entity is not top:
                    self._give_back += event[4]  # it came with the opening chunk
                self._peer_ends(entity, event[2], user, told=entity is joined)
            elif kind == events.ACKNOWLEDGED:
                entity = event[1]
                if entity.place in _READ:
                    number = entity.number
                    state = self._incoming.pop(number)
                    self._forget(number, state)
                    self.reported = True
                    user.stream_reset(number, state.stopped)
                else:
                    self._senders.pop(entity.number, None)
                    if entity.number >= BIDI:
                        self._half_ended(entity.number)
                    if self._short:  # the core has room for another stream
                        self.reported = True
                        user.openable_changed()
            elif kind == events.PONG:
                self._ponged(event[2], user)
            elif kind == events.FAILED:
                raise event[1]

    def _top_message(self, data: Any, whole: bool, user: CarrierUser) -> None:
        """A message of the top-level, or a piece of one."""
        message = self._message
        if message or not whole:
            message += data
            if len(message) > _MESSAGE_LIMIT:
                raise LimitExceeded(f"a message of the top-level is above {_MESSAGE_LIMIT} bytes")
            if not whole:
                return
            data = bytes(message)
            message.clear()
        self._give_back += len(data)
        self.dirty = True
        kind = data[:1]
        if kind == DATAGRAM:
            self.received += len(data) - 1
            self.reported = True
            user.datagram_received(bytes(data[1:]))
        elif kind == (BIDI_STREAMS if self.bidi else STREAMS):
            if self._allow(data):
                self.reported = True
                user.openable_changed()
        else:
            raise SequenceError(f"a message of the top-level begins with {bytes(kind)!r}")

    def _allow(self, data: Any) -> bool:
        """The message that lets this side open more streams; whether there are more now."""
        bidi = self._bidi_allowed
        try:
            limit, end = decode_varu64(data, 1)
            if data[:1] == BIDI_STREAMS:
                bidi, end = decode_varu64(data, end)
        except FrameError as error:
            raise FrameError(f"the number of streams allowed: {error}") from error
        if end != len(data):
            raise FrameError("bytes after the number of streams allowed")
        if limit <= self._allowed and bidi <= self._bidi_allowed:
            return False
        self._allowed = max(limit, self._allowed)
        self._bidi_allowed = max(bidi, self._bidi_allowed)
        return True

    def _peer_opens(self, entity: Entity) -> None:
        number = self._peer_opened
        if entity.place != STREAM_IN or entity.identifier != number + self._bidi_peer_opened + 1:
            self._peer_opens_bidi(entity)
            return
        if number >= self._announced:
            raise LimitExceeded(
                f"the peer opens stream {number}; {self._announced} are allowed so far"
            )
        entity.number = number
        self._incoming[number] = entity.user = _Incoming(entity, self._window)
        self._peer_opened += 1
        self.dirty = True

    def _peer_opens_bidi(self, entity: Entity) -> None:
        count, reader = self._bidi_peer_opened, entity.twin
        following = self._peer_opened + count + 1
        if not self.bidi or reader is None or entity.identifier != following:
            raise SequenceError(f"the peer opens {entity!r}; its next stream is sink {following}")
        if count >= self._bidi_announced:
            raise LimitExceeded(
                f"the peer opens bidirectional stream {count}; {self._bidi_announced} are allowed "
                "so far (Limits.channels)"
            )
        number = entity.number = reader.number = BIDI | count << 1 | 1
        self._incoming[number] = entity.user = reader.user = _Incoming(reader, self._window)
        self._senders[number] = entity
        self._bidi_peer_opened += 1
        self.dirty = True
        entity.keep = _CODE_SIZE
        self.mux.consumed(entity, _CODE_SIZE)  # for a stop

    def _opening_complete(self, state: _Incoming) -> None:
        """Grants the window, less what has come already, and what an end needs."""
        state.waiting = False
        size, limit = state.opening, state.limit
        state.excess = max(size - limit, 0)
        self._give_back += size - state.excess
        self.dirty = True
        self.mux.consumed(state.entity, max(limit - size, 0) + _CODE_SIZE)

    def _peer_ends(self, entity: Entity, data: bytes, user: CarrierUser, *, told: bool) -> None:
        stream = entity.number
        if entity is self.mux.top_stream:
            self._owner.closed_by_peer(data)
        elif entity.place in _READ:
            state = self._incoming.pop(stream)
            self._forget(stream, state)
            if data:
                user.stream_reset(stream, _code(data, f"the reset of stream {stream}"))
            elif not told:
                user.stream_data(stream, b"", True)
        elif entity.place in _WRITTEN and entity is not self.mux.top_sink:
            if stream >= BIDI:
                self._half_ended(stream)
            if self._senders.pop(stream, None) is None:
                return
            if not entity.end_out:  # more may be written to it until the user knows
                self._stopped[stream] = None
                if len(self._stopped) > _STOPPED_KEPT:
                    del self._stopped[next(iter(self._stopped))]
            # If its end has left: a peer that had read all of it would have acknowledged the end.
            user.stream_stopped(stream, _code(data, f"the stop of stream {stream}"))

    def _forget(self, stream: int, state: _Incoming) -> None:
        """The slot of a stream that ended, and what its opening payload still holds."""
        if stream < BIDI:
            self._peer_ended += 1
        else:
            self._half_ended(stream)
        self.dirty = True
        self._give_back += state.opening if state.waiting else state.excess

    def _half_ended(self, stream: int) -> None:
        """A direction of a bidirectional stream is over; with both, the peer's slot returns."""
        if stream in self._half_over:
            self._half_over.remove(stream)
            self._bidi_peer_ended += 1
            self.dirty = True
        elif stream & 1:
            self._half_over.add(stream)

    # the round trip

    def measure(self, now: float) -> None:
        """Measures the round trip, if that was not done of late."""
        if self.begun and now >= self._measure_at:
            self.ping(asked=False)

    def ping(self, *, asked: bool = True) -> None:
        """Makes the peer's transport answer; ``asked``: the user is told."""
        if not (self.over or self.closing):
            now = self._time()
            self._measure_at = now + _MEASURE_EVERY
            self._pings.append(asked)
            self.mux.ping(self.mux.top_stream, now)

    def connection_cut(self) -> None:
        """Pings under way are delayed until another connection: they measure no round trip."""
        self._delayed = len(self._pings)

    def _ponged(self, asked: float, user: CarrierUser) -> None:
        if self._delayed:
            self._delayed -= 1
        else:
            self._measured(max(self._time() - asked, 1e-6))
        if self._pings and self._pings.popleft():
            self.reported = True
            user.ponged()

    def _measured(self, sample: float) -> None:
        self.rtt = sample if not self.rtt else self.rtt + (sample - self.rtt) / 8

    # the end

    def end(self) -> None:
        """The connection is over: nothing is reported any more, and nothing is kept."""
        self.over = True
        self._senders.clear()
        self._incoming.clear()
        self._datagrams.clear()
        self._early.clear()
        self.mux.drop()

    def snapshot(self) -> dict[str, object]:
        """Counters and windows."""
        return {
            "sent": self.sent,
            "received": self.received,
            "queued": sum(entity.queued for entity in self._senders.values()),
            "datagrams_queued": len(self._datagrams),
            "opened": self._opened,
            "open": len(self._senders),
            "openable": self.openable,
            "peer_opened": self._peer_opened,
            "peer_open": len(self._incoming),
            "bidi_openable": self.bidi_openable,
            "top_credit": self.mux.top_sink.credit_out,
        }


def close_payload(code: int, reason: str) -> bytes:
    """What the end of the top-level says."""
    text = reason.encode()[:_REASON_LIMIT].decode(errors="ignore")
    return encode_varu64(code) + text.encode()


def read_close(data: bytes) -> tuple[int | None, str]:
    """Code and reason of the end of the top-level."""
    if not data:
        return None, ""
    code, end = decode_varu64(data)
    return code, data[end:].decode(errors="replace")


def _is_last(entity: Entity, found: list[events.Event], place: int) -> bool:
    """Whether the next event, but for credit, is the end of this stream of the peer's."""
    for event in found[place : place + 2]:
        if event[0] == events.ENDED:
            ended = event[1]
            same = ended is entity or ended is entity.twin  # a duplex is opened by its other half
            return same and event[1].place in _READ and not event[2]
        if event[0] != events.CREDIT:
            break
    return False


def _code(data: bytes, what: str) -> int:
    if not data:
        return 0
    code, end = decode_varu64(data)
    if end != len(data):
        raise FrameError(f"bytes after the code in {what}")
    return code
