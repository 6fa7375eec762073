"""A peer that misbehaves, to a core that a test watches.

It is bounded as any peer is by the carrier below: by the windows of its streams and by the stream
slots that it was given. What it does within them is its own.
"""

from __future__ import annotations

from typing import Any

from aqueduct._speedups import channels as codec
from aqueduct.config import DEFAULT, Config
from aqueduct.protocol.channels.connection import ChannelConnection
from aqueduct.protocol.common import effects
from aqueduct.protocol.common.events import HeadersReceived
from aqueduct.protocol.common.receiver import ReceiverHalf
from aqueduct.protocol.common.sender import SenderHalf

__all__ = ["ENTRY", "Attacker", "frames", "message"]

ENTRY = codec.encode_route_to(0)


def message(number: int, payload: Any = b"", headers: Any = (), attached: Any = ()) -> bytes:
    """A MESSAGE as bytes; ``attached`` are ids."""
    parts = codec.encode_message(number, payload, headers, [(c, ()) for c in attached])
    return b"".join(map(bytes, parts))


def frames(*parts: bytes) -> bytes:
    return b"".join(parts)


class Attacker:
    """Speaks for a client to the core of a server, or (``to="client"``) the reverse."""

    def __init__(
        self,
        config: Config = DEFAULT,
        *,
        to: str = "server",
        accept: bool = True,
        streams: int = 1 << 20,
        greet: bool = True,
    ) -> None:
        self.now = 0.0
        self.config = config
        self.core = ChannelConnection(is_client=to == "client", config=config)
        self.accept = accept
        self.reads = True
        """Whether it lets leave what the core writes."""
        self.opened = 0
        self.ended = 0
        self.limits: dict[int, int] = {}
        self.sent: dict[int, int] = {}
        self.stopped: set[int] = set()
        self.applied = 0
        """Effects of the core so far."""
        self.answered = 0
        """Bytes that it wrote."""
        self.close_code: int | None = None
        self.core.start(0.0, 1200)
        self.core.openable_changed(streams, 0.0)
        self._apply()
        if greet:
            self.say(codec.VERSION, codec.ACK_VERSION, codec.encode_connection_headers(()))

    # What it does

    @property
    def slots(self) -> int:
        """Streams that it may open now."""
        given: int = self.config.flow.streams + self.core.incoming.extra
        return given - (self.opened - self.ended)

    def say(self, *parts: bytes, fin: bool = True) -> int:
        """Opens a stream with these bytes, as far as its window goes."""
        assert self.slots > 0, "the carrier has no slot for this stream"
        stream = self.opened
        self.opened += 1
        self.limits[stream] = self.config.flow.initial_window
        self.sent[stream] = 0
        self.more(stream, b"".join(parts), fin=fin)
        self.turn()
        return stream

    def turn(self) -> None:
        """Others have their turn: the core goes on with what it has postponed."""
        while self.core.goes_on:
            self.core.handle_deadline(self.now)
            self._apply()

    def more(self, stream: int, data: bytes, *, fin: bool = False) -> int:
        """The next bytes of a stream, as far as its window goes; how many went."""
        if stream in self.stopped:
            return 0
        room = self.limits[stream] - self.sent[stream]
        piece = data[:room]
        self.sent[stream] += len(piece)
        whole = fin and len(piece) == len(data)
        self.core.receive_stream(stream, piece, whole, self.now)
        if whole:
            self._end(stream)
        self._apply()
        return len(piece)

    def pour(self, stream: int, data: bytes, *, fin: bool = False) -> int:
        """All of it, as long as the core gives credit; how many bytes went."""
        went = 0
        while went < len(data) and self.core.error is None:
            step = self.more(stream, data[went : went + 65536])
            if not step:
                return went
            went += step
        if fin:
            self.more(stream, b"", fin=True)
        return went

    def reset(self, stream: int) -> None:
        self.core.receive_reset(stream, 0, self.now)
        self._end(stream)
        self._apply()

    def datagram(self, *parts: bytes) -> None:
        self.core.receive_datagram(b"".join(parts), self.now)
        self._apply()

    def wait(self, seconds: float) -> None:
        """Time passes, deadline by deadline."""
        until = self.now + seconds
        while (due := self.core.next_deadline()) is not None and due <= until:
            self.now = max(self.now, due)
            self.core.handle_deadline(self.now)
            self._apply()
        self.now = until

    # What the application of the core does

    def send(self, payload: bytes = b"", **options: Any) -> int:
        half = self.core.entrypoint
        assert isinstance(half, SenderHalf)
        number = self.core.send(half, payload, self.now, **options)
        self._apply()
        return number

    @property
    def receiver(self) -> ReceiverHalf:
        half = self.core.entrypoint
        assert isinstance(half, ReceiverHalf)
        return half

    def take_all(self, half: Any = None) -> list[Any]:
        taken = []
        while (got := self.core.receive(half or self.receiver, self.now)) is not None:
            taken.append(got)
            self._apply()
        return taken

    # Within

    def _end(self, stream: int) -> None:
        self.ended += 1
        del self.limits[stream], self.sent[stream]

    def _apply(self) -> None:
        for event in self.core.events_received():
            if isinstance(event, HeadersReceived) and not self.core.is_client and self.accept:
                self.core.accept_headers((), self.now)
        for effect in self.core.effects_to_apply():
            self.applied += 1
            kind = effect[0]
            if kind == effects.WRITE:
                size = sum(map(len, effect[2]))
                self.answered += size
                if self.reads:
                    self.core.written(effect[1], size)
            elif kind == effects.CREDIT and effect[1] in self.limits:
                self.limits[effect[1]] = effect[2]
            elif kind == effects.STOP:
                if effect[1] in self.limits:
                    self._end(effect[1])
                self.stopped.add(effect[1])
            elif kind == effects.CLOSE and self.close_code is None:
                self.close_code = effect[1]
