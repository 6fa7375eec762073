"""Two cores of the control-stream draft, joined by streams that a test may hold back or lose."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from aqueduct.config import DEFAULT, Config
from aqueduct.errors import ConnectionLost
from aqueduct.protocol.common import effects
from aqueduct.protocol.common.effects import BIDI
from aqueduct.protocol.common.events import Closed, Event, Headers, HeadersReceived
from aqueduct.protocol.common.receiver import Received, ReceiverHalf
from aqueduct.protocol.common.registry import Attach
from aqueduct.protocol.common.sender import Mode, SenderHalf
from aqueduct.protocol.control_streams.connection import ControlConnection

__all__ = ["Pair", "Side", "attach"]


@dataclass
class Pipe:
    """One direction of one stream: what was written and did not arrive yet."""

    parts: deque[Any] = field(default_factory=deque)
    """(buffer, fin), or a reset's code."""
    credit: int = 0
    sent: int = 0
    closed: bool = False


class Side:
    """One core, and the streams that it sends on."""

    def __init__(self, pair: Pair, is_client: bool, config: Config) -> None:
        self.pair = pair
        self.core = ControlConnection(is_client=is_client, config=config, headers=((b"a", b"1"),))
        self.name = "client" if is_client else "server"
        self.events: list[Event] = []
        self.applied: list[effects.Effect] = []
        self.pipes: dict[int, Pipe] = {}
        """By this side's numbers."""
        self.stops: deque[tuple[int, int]] = deque()
        """What the peer is still to hear: its number, and the code."""
        self.datagrams: deque[bytes] = deque()
        self.lose_datagrams = False
        self.closed: tuple[int, str] | None = None
        self.answer: Headers | None = ((b"b", b"2"),)
        self.mute = False
        """Its effects are dropped: the test speaks for it."""

    @property
    def other(self) -> Side:
        return self.pair.server if self is self.pair.client else self.pair.client

    # What tests do

    def send(
        self, half: Any, payload: Any = b"", *attachments: Attach, mode: Mode = Mode.ORDERED
    ) -> int:
        number = self.core.send(half, payload, self.pair.now, attachments=attachments, mode=mode)
        self.flush()
        return number

    def finish(self, half: Any) -> None:
        self.core.finish(half, self.pair.now)
        self.flush()

    def cancel(self, half: Any) -> None:
        self.core.cancel(half, self.pair.now)
        self.flush()

    def close_receiver(self, half: Any) -> None:
        self.core.close_receiver(half, self.pair.now)
        self.flush()

    def take(self, half: Any) -> Received | None:
        found = self.core.receive(half, self.pair.now)
        self.flush()
        return found

    def take_all(self, half: Any) -> list[Received]:
        found = []
        while (received := self.take(half)) is not None:
            found.append(received)
        return found

    @property
    def ended(self) -> ConnectionLost | None:
        return next((event.error for event in self.events if isinstance(event, Closed)), None)

    # Effects

    def flush(self) -> None:
        """Takes events, and carries effects out."""
        while True:
            for event in self.core.events_received():
                self.events.append(event)
                if (
                    isinstance(event, HeadersReceived)
                    and not self.core.is_client
                    and self.answer is not None
                ):
                    self.core.accept_headers(self.answer, self.pair.now)
            wanted = self.core.effects_to_apply()
            if not wanted:
                return
            self.applied += wanted
            if not self.mute:
                for effect in wanted:
                    self.apply(effect)

    def apply(self, effect: effects.Effect) -> None:
        kind = effect[0]
        if kind == effects.WRITE:
            self.write(effect[1], effect[2], effect[3])
        elif kind == effects.RESET:
            pipe = self._pipe(effect[1])
            if not pipe.closed:
                pipe.parts.clear()
                pipe.parts.append(effect[2])
                pipe.closed = True
        elif kind == effects.STOP:
            self.stops.append((there(effect[1]), effect[2]))
        elif kind == effects.CREDIT:
            pipe = self.other._pipe(there(effect[1]))
            pipe.credit = max(pipe.credit, effect[2])
        elif kind == effects.DATAGRAM:
            if not self.lose_datagrams:
                self.datagrams.append(effect[1])
        elif kind == effects.CLOSE:
            self.closed = effect[1], effect[2]

    def write(self, number: int, buffers: list[Any], fin: bool) -> None:
        pipe = self._pipe(number)
        assert not pipe.closed, f"{self.name} writes on {number:#x} behind its end"
        data = b"".join(bytes(memoryview(each)) for each in buffers)
        pipe.parts.append((data, fin))
        pipe.closed = fin

    def _pipe(self, number: int) -> Pipe:
        pipe = self.pipes.get(number)
        if pipe is None:
            pipe = self.pipes[number] = Pipe(credit=self.core.config.flow.initial_window)
        return pipe

    # What arrives

    def deliverable(self) -> list[int]:
        """Streams of which something can arrive."""
        found = []
        for number, pipe in self.pipes.items():
            if not pipe.parts:
                continue
            first = pipe.parts[0]
            if isinstance(first, int) or not first[0] or pipe.sent < pipe.credit:
                found.append(number)
        return found

    def deliver(self, number: int, most: int = 1 << 62) -> None:
        """The next bytes of a stream arrive at the other side, and are told as written here."""
        pipe, now = self.pipes[number], self.pair.now
        part = pipe.parts.popleft()
        if isinstance(part, int):
            self.other.core.receive_reset(there(number), part, now)
            return
        data, fin = part
        room = min(len(data), most, pipe.credit - pipe.sent)
        if room < len(data):
            pipe.parts.appendleft((data[room:], fin))
            data, fin = data[:room], False
        pipe.sent += len(data)
        self.other.core.receive_stream(there(number), data, fin, now)
        if data:
            self.core.written(number, len(data))


def there(number: int) -> int:
    """The peer's name for a stream."""
    return number ^ 1 if number >= BIDI else number


class Pair:
    """Both sides, and the time."""

    def __init__(
        self,
        config: Config = DEFAULT,
        *,
        connect: bool = True,
        seed: int | None = None,
        slots: int = 1000,
    ) -> None:
        self.now = 0.0
        self.client = Side(self, True, config)
        self.server = Side(self, False, config)
        self.held: set[int] = set()
        """Streams of which nothing arrives."""
        self._choose = random.Random(seed) if seed is not None else None
        for side in (self.client, self.server):
            side.core.start(0.0, 1200)
            side.core.openable_changed(slots, 0.0)
            side.core.bidi_openable_changed(slots, 0.0)
            side.flush()
        if connect:
            self.run()

    def run(self) -> None:
        """Until nothing moves."""
        for _ in range(100_000):
            if not self.step():
                return
        raise AssertionError("the two keep each other busy for ever")

    def step(self) -> bool:
        """One thing arrives; False: nothing can."""
        choices: list[tuple[Side, Any]] = []
        for side in (self.client, self.server):
            choices += [(side, number) for number in side.deliverable() if number not in self.held]
            if side.stops:
                choices.append((side, "stop"))
            if side.datagrams:
                choices.append((side, "datagram"))
            if side.core.goes_on:
                choices.append((side, "turn"))
        if not choices:
            return False
        side, what = self._choose.choice(choices) if self._choose else choices[0]
        if what == "stop":
            number, code = side.stops.popleft()
            pipe = side.other._pipe(number)
            if not pipe.closed or pipe.parts:
                pipe.parts.clear()
                pipe.closed = True
                side.other.core.receive_stop(number, code, self.now)
        elif what == "datagram":
            side.other.core.receive_datagram(side.datagrams.popleft(), self.now)
        elif what == "turn":
            side.core.handle_deadline(self.now)
        else:
            side.deliver(what, self._choose.choice((1, 3, 1 << 30)) if self._choose else 1 << 62)
        for each in (self.client, self.server):
            each.flush()
        return True

    def advance(self, seconds: float) -> None:
        """Time passes, and what is due is done."""
        until = self.now + seconds
        for _ in range(100_000):
            self.run()
            due = [
                deadline
                for side in (self.client, self.server)
                if (deadline := side.core.next_deadline()) is not None and deadline <= until
            ]
            if not due:
                break
            self.now = max(self.now, min(due))
            for side in (self.client, self.server):
                deadline = side.core.next_deadline()
                if deadline is not None and deadline <= self.now:
                    side.core.handle_deadline(self.now)
                    side.flush()
        self.now = until

    # Shortcuts

    @property
    def sender(self) -> SenderHalf:
        half = self.client.core.entrypoint
        assert isinstance(half, SenderHalf)
        return half

    @property
    def receiver(self) -> ReceiverHalf:
        half = self.server.core.entrypoint
        assert isinstance(half, ReceiverHalf)
        return half


def attach(*, keep_sender: bool, is_oneshot: bool = False) -> Attach:
    """A new channel for a message."""
    return Attach(keep_sender=keep_sender, is_oneshot=is_oneshot)
