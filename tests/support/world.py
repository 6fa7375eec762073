"""Two applications on a virtual network, moved step by step, and what they remember.

``World`` does what it is told: each method is one step and takes numbers alone, so that a random
driver (``tests/support/simulate.py``) and hypothesis (``protocol/channels/test_machines.py``) can
both drive it. After each step it checks what must hold always (``tests/support/claims.py``).
Applications are
driven by events, as the endpoint's are: a message that arrives without a Readable, or room
without a Writable, is never noticed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Final, TypeVar

import pytest

from aqueduct.config import DEFAULT, Config, Flow, Limits, Timing
from aqueduct.errors import AqueductError
from aqueduct.protocol.channels import ids
from aqueduct.protocol.common.events import (
    Headers,
    HeadersReceived,
    Readable,
    SenderEnded,
    Writable,
)
from aqueduct.protocol.common.receiver import Received, ReceiverHalf
from aqueduct.protocol.common.registry import Attach, Half
from aqueduct.protocol.common.sender import Mode, SenderHalf
from aqueduct.protocol.common.state import ReceiverState, SenderState
from tests.support import claims
from tests.support.network import CLEAR, NetworkCarrier, Weather
from tests.support.pair import NetworkPair, Side

__all__ = ["CHOICES", "WEATHERS", "Channel", "Message", "Settings", "World", "is_open", "picked"]

MOST_CHANNELS: Final = 60
"""Live at once; above, messages carry none."""

DATAGRAM_OVERHEAD: Final = 100
"""More than a datagram has beside payload and headers of one message without attachments."""
MOST_WINDOWS: Final = 40
"""Windows that the bytes of one step may fill; more would only make more of the same packets."""

T = TypeVar("T")

WEATHERS: Final = (
    CLEAR,
    Weather(delay=0.01, jitter=0.002),
    Weather(delay=0.05, jitter=0.1, piece=1200),
    Weather(delay=0.02, jitter=0.01, loss=0.2, duplication=0.1, piece=1200),
    Weather(delay=0.002, loss=0.5, duplication=0.3, piece=16_000, in_flight=30_000),
    Weather(delay=0.1, jitter=0.3, loss=0.3, duplication=0.2, piece=9, in_flight=4_000),
    Weather(loss=1.0, duplication=0.1),
)
"""From good to bad."""

CHOICES: Final[dict[str, tuple[int, ...]]] = {
    "receive_budget": (64 << 20, 100_000, 20_000),
    "channel_receive_bytes": (16 << 20, 50_000, 5_000),
    "initial_window": (65_536, 4096, 300),
    "admitted_window": (8 << 20, 16_384, 500),
    "read_ahead": (2 << 20, 1000),
    "channel_high_water": (8 << 20, 3_000),
    "connection_high_water": (64 << 20, 20_000),
    "streams": (1024, 64, 16),
    "unordered_streams": (32, 3, 1),
    "datagram_limit": (1200, 300, 1200, 0),
    "datagram_queue": (256, 4),
    "unacknowledged": (1 << 20, 200, 5),
    "ack_delay": (25, 0, 1000),
    "late_headers": (0, 1),
    "debug": (0, 1),
}
"""What settings are made of, the default first."""

BIDI_CHOICES: Final = (1000, 20, 2)
"""Bidirectional streams that a side of the control-stream draft lets its peer have open."""


@dataclasses.dataclass(frozen=True, slots=True)
class Settings:
    """How narrow it is for both sides; fields of ``Flow``, and some more."""

    receive_budget: int = CHOICES["receive_budget"][0]
    channel_receive_bytes: int = CHOICES["channel_receive_bytes"][0]
    initial_window: int = CHOICES["initial_window"][0]
    admitted_window: int = CHOICES["admitted_window"][0]
    read_ahead: int = CHOICES["read_ahead"][0]
    channel_high_water: int = CHOICES["channel_high_water"][0]
    connection_high_water: int = CHOICES["connection_high_water"][0]
    streams: int = CHOICES["streams"][0]
    unordered_streams: int = CHOICES["unordered_streams"][0]
    datagram_limit: int = CHOICES["datagram_limit"][0]
    datagram_queue: int = CHOICES["datagram_queue"][0]
    unacknowledged: int = CHOICES["unacknowledged"][0]
    ack_delay: int = CHOICES["ack_delay"][0]
    """Milliseconds."""
    late_headers: int = 0
    """Whether the server thinks before it answers the connection headers."""
    debug: int = 0
    early_bytes: int = DEFAULT.limits.early_bytes

    @property
    def config(self) -> Config:
        values = dataclasses.asdict(self)
        flow = {field.name for field in dataclasses.fields(Flow)}
        return dataclasses.replace(
            DEFAULT,
            flow=Flow(**{name: value for name, value in values.items() if name in flow}),
            limits=Limits(unacknowledged=self.unacknowledged, early_bytes=self.early_bytes),
            # The network may be as slow as it likes.
            timing=Timing(ack_delay=self.ack_delay / 1000, stall_deadline=1e9),
            debug=bool(self.debug),
        )


@dataclasses.dataclass(slots=True, eq=False)
class Message:
    """One that was sent."""

    channel: Channel
    number: int
    mode: Mode
    reliable: bool
    """Whether it went by a stream."""
    payload: bytes
    headers: Headers
    attached: list[Channel]
    datagram: tuple[NetworkCarrier, int] | None
    """Where its fate stands; None if it went by a stream, or was dropped before it left."""
    taken: bool = False

    @property
    def copies(self) -> int:
        """How often the datagram arrives."""
        if self.datagram is None:
            return 0
        carrier, index = self.datagram
        return carrier.copies[index]


class Channel:
    """What happened on one channel, as the two applications know it."""

    def __init__(self, channel: int, home: Side, far: Side, parent: Message | None) -> None:
        self.id = channel
        self.sender_side = home
        self.receiver_side = far
        self.parent = parent
        """The message that carries it; None for the entrypoint."""
        self.headers: Headers = ()
        self.sender: SenderHalf | None = None
        """Once the application has it."""
        self.receiver: ReceiverHalf | None = None
        self.sent: dict[tuple[bool, int], Message] = {}
        """By reliability and number."""
        self.ordered: list[Message] = []
        self.ordered_taken = 0
        self.finished = False
        """By the application, as are the next two."""
        self.cancelled = False
        self.closed = False

    @property
    def taken(self) -> bool:
        """Whether both applications got their half."""
        return self.sender is not None and self.receiver is not None

    @property
    def ended(self) -> bool:
        return (self.sender is None or self.sender.state is SenderState.ENDED) and (
            self.receiver is None or self.receiver.state is ReceiverState.CLOSED
        )


class World:
    """One run."""

    def __init__(
        self,
        settings: Settings,
        server: Settings | None,
        seed: int,
        weather: Weather,
        bidi: tuple[int, int] | None = None,
        early: str = "",
    ) -> None:
        """``server``: its settings, if they are not the client's. Datagrams are as the client's.

        ``bidi``, ``early``: see NetworkPair; with ``bidi``, they speak the control-stream draft.
        """
        self.bidi = bidi
        self.settings = settings, server or settings
        self.pair = NetworkPair(
            settings.config,
            server_config=self.settings[1].config,
            seed=seed,
            weather=weather,
            datagram_limit=settings.datagram_limit,
            datagram_queue=settings.datagram_queue,
            bidi=bidi,
            early=early,
        )
        self.sides = self.pair.sides
        self.trace: list[str] = []
        """One line for each step."""
        self.failed = False
        """Whether a step has begun and not ended: what it found wrong has been raised."""
        self.messages = 0
        self.channels: dict[int, Channel] = {}
        self.readable: dict[ReceiverHalf, Channel] = {}
        """Receivers that may have something: a message, or their end."""
        self.read_out: set[ReceiverHalf] = set()
        """Receivers whose end was read."""
        self.blocked: dict[SenderHalf, Mode] = {}
        """Senders that wait for room for a mode."""
        self.reported: set[SenderHalf] = set()
        """Senders whose end was reported."""
        self.errors: dict[Half, Exception] = {}
        """How handles ended: for good."""
        self.accept_at = 0.0
        """When the server answers the connection headers; 0: it has, or has not seen any."""
        self.over = ""
        """How the connection was ended, if it was."""
        self.closer: Side | None = None
        self.before_close: set[Message] = set()
        """What the closer had sent when it closed, if both had said their headers by then."""
        entry = self.channels[0] = Channel(0, *self.sides, None)
        entry.sender, entry.receiver = self.pair.sender, self.pair.receiver
        if self.settings[1].late_headers:
            self.pair.server.answer_headers = None

    # Steps

    def send(
        self,
        pick: float,
        count: int = 1,
        size: int = 0,
        mode: Mode = Mode.ORDERED,
        attach: Sequence[tuple[bool, bool]] = (),
        header: int = -1,
        patient: bool = True,
    ) -> None:
        """Messages on one channel; ``attach``: (keep the sender, is oneshot) for each channel.

        The attachments go with the first. ``patient``: only while there is room.
        """
        found = [channel for channel in self.channels.values() if self._can_send(channel)]
        channel = picked(found, pick)
        self._log("send", pick, count, size, mode.name, list(attach), header, patient)
        window = min(settings.admitted_window for settings in self.settings)
        size = min(size, MOST_WINDOWS * window // count)
        for _ in range(count):
            if channel is None or not self._can_send(channel):
                break
            half = channel.sender
            assert half is not None
            if patient and not half.has_room(mode):
                channel.sender_side.core.wait_writable(half, mode)
                self.blocked[half] = mode
                break
            self._send_one(channel, half, size, mode, attach, header)
            attach = ()
        self._noticed()

    def take(self, pick: float, count: int = 1, unwanted: int = 0) -> None:
        """Messages of one channel; ``unwanted``: which attachments are dropped, as bits."""
        self._log("take", pick, count, unwanted)
        half = picked(list(self.readable), pick)
        if half is not None:
            self._take(half, count, unwanted)
        self._noticed()

    def finish(self, pick: float) -> None:
        self._log("finish", pick)
        channel = picked([c for c in self._to_end(pick) if is_open(c.sender)], pick)
        if channel is not None:
            channel.finished = True
            channel.sender_side.finish(channel.sender)
        self._noticed()

    def cancel(self, pick: float, full: bool = False) -> None:
        """``full``: rather one with messages that were not read yet."""
        self._log("cancel", pick, full)
        found = [c for c in self._to_end(pick) if is_open(c.sender)]
        channel = picked(with_unread(found, full), pick)
        if channel is not None:
            channel.cancelled = True
            channel.sender_side.cancel(channel.sender)
        self._noticed()

    def close(self, pick: float, full: bool = False) -> None:
        """Closes a receiver, whatever its state; ``full``: rather one that has messages."""
        self._log("close", pick, full)
        found = [c for c in self._to_end(pick) if c.receiver]
        channel = picked(with_unread(found, full), pick)
        if channel is not None:
            channel.closed = True
            channel.receiver_side.close_receiver(channel.receiver)
        self._noticed()

    def abandon(self, pick: float) -> None:
        """Drops a handle, as a program does that forgot it."""
        self._log("abandon", pick)
        live = [c for c in self.channels.values() if c.id and not c.ended]
        channel = picked(live, pick)
        if channel is not None:
            half = channel.sender if channel.sender is not None else channel.receiver
            assert half is not None
            side = channel.sender_side if half.is_sender else channel.receiver_side
            self._drop(channel, side, half)
            side.flush()
        self._noticed()

    def place(self, pick: float, fails: bool) -> None:
        """The application says where payloads land from now on, or its hook fails."""
        self._log("place", pick, fails)
        channel = picked([c for c in self.channels.values() if c.receiver], pick)
        if channel is not None and channel.receiver is not None:

            def hook(headers: Headers, size: int) -> bytearray:
                if fails:
                    channel.closed = True
                    raise MemoryError("nowhere to put it")
                return bytearray(size)

            channel.receiver.queue.placement = hook
        self._noticed()

    def misuse(self, pick: float) -> None:
        """What a program may not do is refused, and changes nothing."""
        self._log("misuse", pick)
        channel = picked([c for c in self.channels.values() if c.sender], pick)
        if channel is not None and channel.sender is not None:
            half, core, now = channel.sender, channel.sender_side.core, self.pair.now
            before = half.state, half.error, half.sent, half.queued, core.channels
            attach = Attach(keep_sender=True, is_oneshot=False)
            with pytest.raises((AqueductError, TypeError)):
                core.send(half, None, now, attachments=[attach])
            if not is_open(half):
                with pytest.raises(AqueductError):
                    core.finish(half, now)
                with pytest.raises(AqueductError):
                    half.check_sendable()
            assert before == (half.state, half.error, half.sent, half.queued, core.channels)
            channel.sender_side.flush()
        self._noticed()

    def wait(self, seconds: float) -> None:
        self._log("wait", seconds)
        self._advance(seconds)
        self._noticed()

    def weather(self, which: int) -> None:
        self._log("weather", which)
        self.pair.network.weather = WEATHERS[which]
        self._noticed()

    def calm(self) -> None:
        """Good weather, and everything is read until nothing moves: what is left is in use."""
        self._log("calm")
        self.pair.network.weather = CLEAR
        self._settle()
        if not self.over:
            claims.check_rest(self)

    def cut(self, client_after: float, server_after: float, swallow: bool) -> None:
        """The network is gone."""
        self._log("cut", client_after, server_after, swallow)
        if not self.over:
            self.over = "cut"
            self.pair.network.cut(client_after, server_after, swallow=swallow)
        self._noticed()

    def close_connection(self, by_server: bool) -> None:
        """One application closes the connection with NO_ERROR (AQ-R32)."""
        self._log("close_connection", by_server)
        if not self.over:
            self.over = "closed"
            self.closer = side = self.sides[by_server]
            if all(side.core.ready for side in self.sides):
                self.before_close = {
                    message
                    for channel in self.channels.values()
                    if channel.sender_side is side
                    for message in channel.sent.values()
                }
            side.core.close(0, "done", self.pair.now)
            side.flush()
        self._noticed()

    def end(self) -> None:
        """Both applications finish and read whatever they have, then everything is checked."""
        self._log("end")
        self.pair.network.weather = CLEAR
        self._settle()
        # Without control streams no ack comes, so a sender may wait until others have ended.
        if self.bidi is None or min(self.bidi) >= BIDI_CHOICES[0]:
            assert not any(is_open(half) for half in self.blocked), "waits for room for ever"
        self._finish_all()
        if self.bidi is not None and not self.over:
            # What waits for a control stream may keep what those that have one wait for.
            for side in self.sides:
                self.pair.carrier(side).allow_bidi(BIDI_CHOICES[0])
            self._settle()
            self._finish_all()
        claims.check_end(self)

    # Within

    def _finish_all(self) -> None:
        # Channels of messages that nobody had taken come to light meanwhile.
        while not self.over and (found := [c for c in self.channels.values() if is_open(c.sender)]):
            for channel in found:
                if is_open(channel.sender):
                    channel.finished = True
                    channel.sender_side.finish(channel.sender)
            self._settle()

    def _log(self, name: str, *arguments: object) -> None:
        self.failed = True
        self.trace.append(f"{self.pair.now:.4f} {name}({', '.join(map(str, arguments))})")

    def _to_end(self, pick: float) -> list[Channel]:
        """What may be ended: the entrypoint seldom, as everything else begins there."""
        return [channel for channel in self.channels.values() if channel.id or pick > 0.95]

    def _can_send(self, channel: Channel) -> bool:
        half = channel.sender
        return is_open(half) and not (ids.oneshot(channel.id) and half is not None and half.sent)

    def _send_one(
        self,
        channel: Channel,
        half: SenderHalf,
        size: int,
        mode: Mode,
        attach: Sequence[tuple[bool, bool]],
        header: int,
    ) -> None:
        live = sum(not channel.ended for channel in self.channels.values())
        if live + len(attach) > MOST_CHANNELS:
            attach = ()
        side = channel.sender_side
        mark = self.messages.to_bytes(4, "little")
        if self.bidi is not None:
            header = -1  # the draft has none
        attaches = [
            Attach(
                keep_sender=keep,
                is_oneshot=shot,
                headers=((b"c", mark + bytes([index])),) if self.bidi is None else (),
            )
            for index, (keep, shot) in enumerate(attach)
        ]
        self.messages += 1
        payload = (mark * (size // 4 + 1))[:size]
        headers = ((b"k", mark + bytes(header)),) if header >= 0 else ()
        carrier = self.pair.carrier(side)
        datagrams, dropped = len(carrier.copies), side.core._shared.datagrams_dropped
        reliable_before = half.numbers.next
        number = side.send(half, payload, *attaches, headers=headers, mode=mode)
        reliable = half.numbers.next > reliable_before
        left = len(carrier.copies) > datagrams
        small = size + header + DATAGRAM_OVERHEAD <= side.core._shared.datagram_limit
        assert mode is Mode.UNRELIABLE or reliable
        assert not (mode is Mode.UNRELIABLE and small and not attach) or not reliable
        assert reliable + left + side.core._shared.datagrams_dropped - dropped == 1
        message = Message(
            channel=channel,
            number=number,
            mode=mode,
            reliable=reliable,
            payload=payload,
            headers=headers,
            attached=[],
            datagram=(carrier, datagrams) if left else None,
        )
        assert (reliable, number) not in channel.sent, "a number was given twice"
        channel.sent[reliable, number] = message
        if mode is Mode.ORDERED:
            channel.ordered.append(message)
        if ids.oneshot(channel.id):
            channel.finished = True
        far = self.sides[side is self.sides[0]]
        for attached in attaches:
            half_here = attached.half
            assert half_here is not None
            ends = (side, far) if attached.keep_sender else (far, side)
            made = self.channels[half_here.channel] = Channel(half_here.channel, *ends, message)
            made.headers = attached.headers
            self._got(made, half_here)
            message.attached.append(made)

    def _got(self, channel: Channel, half: Half) -> None:
        if isinstance(half, SenderHalf):
            assert channel.sender is None
            channel.sender = half
        else:
            assert channel.receiver is None
            channel.receiver = half
            self.readable[half] = channel

    def _take(self, half: ReceiverHalf, count: int, unwanted: int) -> None:
        channel = self.readable[half]
        for _ in range(count):
            received = channel.receiver_side.take(half)
            if received is None:
                del self.readable[half]
                if half.error is not None:
                    self.read_out.add(half)
                break
            self._took(channel, received, unwanted)

    def _took(self, channel: Channel, received: Received, unwanted: int) -> None:
        message = channel.sent.get((received.reliable, received.number))
        assert message is not None, "never sent on this channel"
        assert not message.taken, "delivered twice"
        message.taken = True
        assert bytes(received.payload) == message.payload
        assert received.headers == message.headers
        assert message.reliable or message.copies, "a lost datagram came through"
        if message.mode is Mode.ORDERED:
            assert channel.ordered[channel.ordered_taken] is message, "out of order, or a gap"
            channel.ordered_taken += 1
        side = channel.receiver_side
        for made, (half, headers) in zip(message.attached, received.attachments, strict=True):
            assert half.channel == made.id
            assert headers == made.headers
            self._got(made, half)
            if unwanted & 1:
                self._drop(made, side, half)
            unwanted >>= 1
        side.flush()

    def _drop(self, channel: Channel, side: Side, half: Half) -> None:
        if isinstance(half, SenderHalf):
            channel.cancelled |= is_open(half)
        else:
            channel.closed = True
        side.core.drop_attachment(half, self.pair.now)

    def _settle(self) -> None:
        while True:
            self._noticed()
            while self.readable:
                self._take(next(iter(self.readable)), 1000, 0)
                self._noticed()
            if self.pair.next_event is None and not self.accept_at:
                break
            self._advance(0.5)

    def _advance(self, seconds: float) -> None:
        self.pair.advance(seconds)
        if 0 < self.accept_at <= self.pair.now:
            self.accept_at = 0.0
            self.pair.server.core.accept_headers((), self.pair.now)
            self.pair.server.flush()

    def _noticed(self) -> None:
        """What the cores reported meanwhile; then what must hold after every step."""
        for side in self.sides:
            side.flush()
            side._take_events()  # those of the flush itself
            events, side.events = side.events, []
            for event in events:
                if isinstance(event, Readable):
                    channel = self.channels[event.half.channel]
                    receiver = channel.receiver
                    if receiver is not None and event.half is receiver:
                        self.readable[receiver] = channel
                elif isinstance(event, Writable):
                    self.blocked.pop(event.half, None)
                elif isinstance(event, SenderEnded):
                    assert event.half not in self.reported, "it ended twice"
                    self.reported.add(event.half)
                elif isinstance(event, HeadersReceived) and side.answer_headers is None:
                    self.accept_at = self.pair.now + 0.7
        claims.check_step(self)
        self.failed = False


def picked(found: Sequence[T], pick: float) -> T | None:
    """One of them; recent ones more often, or most would never see anything."""
    return found[-1 - int(pick * pick * len(found))] if found else None


def with_unread(found: list[Channel], wanted: bool) -> list[Channel]:
    """Those whose receiver has messages, if ``wanted`` and there are any."""
    unread = [channel for channel in found if channel.receiver and channel.receiver.queue]
    return unread if wanted and unread else found


def is_open(half: Half | None) -> bool:
    """Whether it is a sender that may send, finish or cancel."""
    return isinstance(half, SenderHalf) and half.state is SenderState.OPEN
