"""How the streams of a carrier are carried by bpmux.

| carrier | bpmux |
|---|---|
| my stream n | my sink, identifier n + 1; the first bytes travel with its opening chunk |
| the peer's stream n | its sink n + 1, a stream to me |
| ``credit`` | credit; the first window is granted by who accepts, less the opening payload |
| end | end without a payload |
| ``reset`` | end, payload VarU64(code); 9 bytes of credit are kept for it |
| ``stop`` | end of the stream half, payload VarU64(code); the opener has granted 9 bytes for it |
| datagram | a message of the top-level: the byte 0, then the datagram |
| ``extra_streams`` | a message of the top-level: the byte 1, then VarU64, all streams allowed |
| ``close`` | the end of the top-level, payload VarU64(code) and the reason |

Opening payloads and messages of the top-level are charged to its credit (BP-R5). The receiver gives
an opening payload back at once as far as it lies within the window of its stream, the rest as
``credit`` covers it: so a peer has at most the windows of all streams and the top-level's credit.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from aqueduct._speedups.bpmux.chunks import decode_varu64, encode_varu64
from aqueduct._speedups.stream.transport import TransportBase
from aqueduct.carriers.contract import Buffer, CarrierUser
from aqueduct.config import Config
from aqueduct.errors import FrameError, LimitExceeded, LocalProtocolError, SequenceError
from aqueduct.protocol.bpmux import events
from aqueduct.protocol.bpmux.connection import Mux
from aqueduct.protocol.bpmux.scheduler import Scheduler
from aqueduct.protocol.bpmux.state import SINK_OUT, STREAM_IN, Entity

__all__ = ["DATAGRAM", "STREAMS", "BpmuxStreams", "close_payload", "read_close"]

DATAGRAM: Final = b"\0"
STREAMS: Final = b"\1"
_DATAGRAM_LIMIT: Final = 16_000
_DATAGRAM_QUEUE: Final = 64  # datagrams; it waits for credit and for the socket
_CODE_SIZE: Final = 9  # the longest VarU64
_RESERVE: Final = 1024  # of the top-level's credit, for its close and for limits of streams
_REASON_LIMIT: Final = 256  # bytes of UTF-8
_STOPPED_KEPT: Final = 4096
_MESSAGE_LIMIT: Final = 64 << 10  # bytes of one message of the top-level


class _Incoming:
    """One stream of the peer's."""

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


class BpmuxStreams(TransportBase, ABC):
    """The part of a carrier that knows both its streams and bpmux; the base of StreamCarrier.

    Commands of the carrier queue into the core; ``_dispatch`` reports what the core tells.
    """

    _user: CarrierUser | None
    _mux: Mux
    _turns: Scheduler

    def __init__(self, config: Config) -> None:
        flow, stream = config.flow, config.byte_stream
        self._window = flow.initial_window
        self._slots = flow.streams
        self._top_credit = stream.top_credit
        self._mux = Mux(
            replace(config.bpmux, opening=min(config.bpmux.opening, self._window)), brief=True
        )
        self._mux.top_sink.keep = _RESERVE
        self._turns = self._mux.turns
        """Asked and told directly, where it is often."""
        # My streams.
        self._opened = 0
        self._allowed = 0
        """Streams that the peer lets this side open in all."""
        self._short = False
        """Whether the peer allows more streams than the core has room for."""
        self._senders: dict[int, Entity] = {}
        self._stopped: dict[int, None] = {}
        """Of mine, by the peer: writes that cross it are dropped."""
        # The peer's.
        self._incoming: dict[int, _Incoming] = {}
        self._peer_opened = 0
        self._peer_ended = 0
        self._announced = 0
        self._extra = 0
        self._give_back = 0
        """Of the top-level's credit, consumed and not granted again."""
        self._message = bytearray()
        self._datagrams: deque[bytes] = deque()
        self._dirty = True
        """Something that ``_collect`` looks at has changed."""
        self._pings: deque[bool] = deque()
        """Of those on the way, in order: whether the user has asked for it."""

    # what the contract promises

    @property
    def openable(self) -> int:
        """How many more streams may be opened now."""
        if self._over:
            return 0
        wanted = self._allowed - self._opened
        room = self._mux.room_for_sinks
        self._short = room < wanted
        return min(wanted, room)

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
        if self._over or self._closing:
            return
        entity = self._senders.get(stream)
        if entity is None:
            if fin and buffers:
                self._open_ended(stream, buffers)
                return
            entity = self._open(stream)
            if entity is None:
                return
        elif entity.ending:
            raise LocalProtocolError(f"stream {stream} ended; nothing can be written to it")
        if buffers and not self._turns.write_run(entity, buffers):
            self._mux.write(entity, buffers)
        if fin:
            self._mux.end(entity)

    def reset(self, stream: int, code: int) -> None:
        """Gives up my stream."""
        if self._over or self._closing:
            return
        if stream >= self._opened:
            raise LocalProtocolError(f"stream {stream} was never opened")
        self._stopped.pop(stream, None)
        entity = self._senders.pop(stream, None)
        if entity is None or entity.end_out:
            return
        self._mux.end(entity, encode_varu64(code), drop=True)

    def stop(self, stream: int, code: int) -> None:
        """Asks the peer to send no more on its stream."""
        state = self._opened_by_peer(stream)
        if state is not None and not state.entity.ending:
            state.stopped = code
            self._mux.end(state.entity, encode_varu64(code))

    def credit(self, stream: int, limit: int) -> None:
        """Lets the peer send on its stream up to ``limit`` bytes in all."""
        state = self._incoming.get(stream) or self._opened_by_peer(stream)
        if state is None or limit <= state.limit or self._closing:
            return
        more = limit - state.limit
        state.limit = limit
        if state.waiting:
            return  # granted when the opening payload is there, less its size
        if state.excess:
            covered = min(state.excess, more)
            state.excess -= covered
            self._give_back += covered
            self._dirty = True
            more -= covered
        self._turns.give_back(state.entity, more)  # ``Mux.consumed``

    def extra_streams(self, count: int) -> None:
        """Gives the peer more stream slots, or keeps some back."""
        if count != self._extra:
            self._extra = count
            self._dirty = True

    def send_datagram(self, data: bytes) -> bool:
        """Queues a datagram; False if it was dropped."""
        if (
            self._over
            or self._closing
            or len(data) > _DATAGRAM_LIMIT
            or len(self._datagrams) >= _DATAGRAM_QUEUE
        ):
            return False
        self._datagrams.append(data)
        self._dirty = True
        return True

    # what is sent

    def _greet(self) -> None:
        """The credit without which the peer can send nothing."""
        self._mux.credit(self._mux.top_stream, self._top_credit)

    def _collect(self) -> None:
        """Puts into the core what waits here: credit, slots, datagrams."""
        mux = self._mux
        self._dirty = bool(self._datagrams)
        if self._give_back * 4 >= self._top_credit:
            mux.consumed(mux.top_stream, self._give_back)
            self._give_back = 0
        limit = self._slots + self._peer_ended + self._extra
        if limit > self._announced and 2 * (self._announced - self._peer_opened) < self._slots:
            # Half of them are left at least: a few at a time would cost a message each.
            self._announced = limit
            mux.message(STREAMS + encode_varu64(limit), urgent=True)
        queue, top = self._datagrams, mux.top_sink
        if queue and not top.items:
            size = 0
            while queue and top.credit_out - top.keep - size > len(queue[0]):
                data = DATAGRAM + queue.popleft()
                size += len(data)
                mux.message(data)
                self._room_grew = True
            self._dirty = bool(queue)

    def _unsent(self) -> bool:
        """Whether anything queued waits still, be it for the peer's credit."""
        if self._datagrams or self._mux.top_sink.items:
            return True
        return any(entity.items or not entity.opened for entity in self._senders.values())

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

    def _open_ended(self, stream: int, buffers: Sequence[Buffer]) -> None:
        if stream == self._opened < self._allowed or self._may_open(stream):
            number = stream + 1
            self._senders[stream] = self._turns.open_ended(
                number, buffers, _CODE_SIZE, _CODE_SIZE
            ) or self._mux.open_ended(
                buffers, credit=_CODE_SIZE, keep=_CODE_SIZE, identifier=number
            )
            self._opened = number

    def _open(self, stream: int) -> Entity | None:
        if not self._may_open(stream):
            return None
        entity = self._mux.open_sink(credit=_CODE_SIZE, keep=_CODE_SIZE, identifier=stream + 1)
        self._opened += 1
        self._senders[stream] = entity
        return entity

    def _opened_by_peer(self, stream: int) -> _Incoming | None:
        if self._over or self._closing:
            return None
        if not 0 <= stream < self._peer_opened:
            raise LocalProtocolError(f"the peer never opened its stream {stream}")
        return self._incoming.get(stream)

    # what has arrived

    def _dispatch(self, found: list[events.Event]) -> None:
        """Reports events of the core. Raises RemoteProtocolError for what breaks the mapping."""
        user = self._user
        assert user is not None
        top = self._mux.top_stream
        joined: Entity | None = None
        for place, event in enumerate(found, 1):
            if self._over:
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
                    self._received += len(data)
                    self._reported = True
                    # The last bytes and the end are one report, as everywhere: or the user would
                    # stop a stream of which nothing more comes.
                    if last:
                        joined = entity
                    user.stream_data(entity.identifier - 1, data, joined is entity)
            elif kind == events.ARRIVED:
                if not self._arrives(event[1], event[2]):
                    self._peer_opens(event[1])  # which says what is wrong
            elif kind == events.CREDIT:
                pass  # the core sends what may leave now
            elif kind == events.OPENED:
                self._peer_opens(event[1])
            elif kind == events.ENDED:
                self._reported = True
                self._peer_ends(event[1], event[2], user, told=event[1] is joined)
            elif kind == events.ACKNOWLEDGED:
                entity = event[1]
                if entity.place == STREAM_IN:
                    state = self._incoming.pop(entity.identifier - 1)
                    self._forget(state)
                    self._reported = True
                    user.stream_reset(entity.identifier - 1, state.stopped)
                else:
                    self._senders.pop(entity.identifier - 1, None)
                    self._room_came_for_streams()
            elif kind == events.PONG:
                self._ponged(event[1], event[2], user)
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
        self._dirty = True
        kind = data[:1]
        if kind == DATAGRAM:
            self._received += len(data) - 1
            self._reported = True
            user.datagram_received(bytes(data[1:]))
        elif kind == STREAMS:
            if self._allow(data):
                self._reported = True
                user.openable_changed()
        else:
            raise SequenceError(f"a message of the top-level begins with {bytes(kind)!r}")

    def _allow(self, data: Any) -> bool:
        """The message that lets this side open more streams; whether there are more now."""
        try:
            limit, end = decode_varu64(data, 1)
        except FrameError as error:
            raise FrameError(f"the number of streams allowed: {error}") from error
        if end != len(data):
            raise FrameError("bytes after the number of streams allowed")
        if limit <= self._allowed:
            return False
        self._allowed = limit
        return True

    def _peer_opens(self, entity: Entity) -> None:
        if entity.place != STREAM_IN or entity.identifier != self._peer_opened + 1:
            raise SequenceError(
                f"the peer opens {entity!r}; its next stream is sink {self._peer_opened + 1}"
            )
        if self._peer_opened >= self._announced:
            raise LimitExceeded(
                f"the peer opens stream {self._peer_opened}; {self._announced} are allowed so far"
            )
        state = entity.user = _Incoming(entity, self._window)
        self._incoming[self._peer_opened] = state
        self._peer_opened += 1
        self._dirty = True

    def _tell_directly(self) -> None:
        """From now on what is plain comes without an event."""
        self._mux.reading.tell(self._arrives, self._piece, self._acknowledged)

    def _piece(self, entity: Entity, data: Any) -> bool:
        """Bytes of a stream of the peer's; False: they are to be an event."""
        state, user = entity.user, self._user
        if state is None or state.waiting or self._over or user is None:
            return False
        self._close_inlet()
        self._received += len(data)
        self._reported = True
        user.stream_data(entity.identifier - 1, data, False)
        return True

    def _acknowledged(self, entity: Entity) -> None:
        """The peer has all of a stream of ours."""
        self._senders.pop(entity.identifier - 1, None)
        self._room_came_for_streams()

    def _room_came_for_streams(self) -> None:
        """The peer has taken the end of a stream, so another one may be opened."""
        if self._short and self._user is not None and not self._over:
            self._reported = True
            self._user.openable_changed()

    def _arrives(self, entity: Entity, data: Any) -> bool:
        """A stream that came and went in one chunk: it has its slot back at once.

        False: it may not, or nobody is there who could be told.
        """
        stream, user = self._peer_opened, self._user
        if entity.identifier != stream + 1 or stream >= self._announced or self._over:
            return False
        if user is None:
            return False
        self._close_inlet()
        self._peer_opened = stream + 1
        self._peer_ended += 1
        self._give_back += len(data)
        if (
            self._give_back * 4 >= self._top_credit
            or 2 * (self._announced - self._peer_opened) < self._slots
        ):
            self._dirty = True  # before that, ``_collect`` has nothing to say of it
        self._received += len(data)
        self._reported = True
        user.stream_data(stream, data, True)
        return True

    def _opening_complete(self, state: _Incoming) -> None:
        """Grants the window, less what has come already, and what an end needs."""
        state.waiting = False
        size, limit = state.opening, state.limit
        state.excess = max(size - limit, 0)
        self._give_back += size - state.excess
        self._dirty = True
        self._mux.consumed(state.entity, max(limit - size, 0) + _CODE_SIZE)

    def _peer_ends(self, entity: Entity, data: bytes, user: CarrierUser, *, told: bool) -> None:
        stream = entity.identifier - 1
        if entity is self._mux.top_stream:
            self._closed_by_peer(data)
        elif entity.place == STREAM_IN:
            state = self._incoming.pop(stream)
            self._forget(state)
            if data:
                user.stream_reset(stream, _code(data, f"the reset of stream {stream}"))
            elif not told:
                user.stream_data(stream, b"", True)
        elif entity.place == SINK_OUT and entity is not self._mux.top_sink:
            if self._senders.pop(stream, None) is None:
                return
            if not entity.end_out:  # more may be written to it until the user knows
                self._stopped[stream] = None
                if len(self._stopped) > _STOPPED_KEPT:
                    del self._stopped[next(iter(self._stopped))]
            # If its end has left: a peer that had read all of it would have acknowledged the end.
            user.stream_stopped(stream, _code(data, f"the stop of stream {stream}"))

    def _forget(self, state: _Incoming) -> None:
        """The slot of a stream that ended, and what its opening payload still holds."""
        self._peer_ended += 1
        self._dirty = True
        self._give_back += state.opening if state.waiting else state.excess

    @abstractmethod
    def _ponged(self, entity: Entity, asked: float, user: CarrierUser) -> None:
        """A ping was answered."""

    @abstractmethod
    def _closed_by_peer(self, data: bytes) -> None:
        """The peer has ended the top-level, with these last words."""


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
            return event[1] is entity and entity.place == STREAM_IN and not event[2]
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
