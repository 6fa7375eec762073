"""A connection fed any bytes, resets, stops and datagrams, while its application uses it.

The peer is hostile, but its transport is not: it keeps within the credit and the streams that it
was given, as every carrier makes it. The core must end with a code of AQ-R30, hold no more memory
than its settings say, and never raise.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Final

from aqueduct._speedups import channels as codec
from aqueduct.carriers import memory
from aqueduct.carriers.contract import Buffer
from aqueduct.config import Calls, Config, Flow, Limits
from aqueduct.errors import ConnectionLost, LocalProtocolError, RemoteProtocolError
from aqueduct.protocol.common.receiver import ReceiverHalf
from aqueduct.protocol.common.registry import Attach
from aqueduct.protocol.common.sender import Mode, SenderHalf
from tests.fuzz.endpoint import Clock, Endpoint
from tests.fuzz.source import Source
from tests.reference import codec as model

__all__ = ["FRAMES", "STEPS", "WAITS", "Hostile", "World", "target"]

SLOTS: Final = 8
MODES: Final = (Mode.ORDERED, Mode.UNORDERED, Mode.UNRELIABLE)
WAITS: Final = (0.0, 0.01, 0.03, 0.3, 1.1, 3.0, 6.0)
VIOLATIONS: Final = frozenset((1, 2, 3, 5))
"""The codes for what a peer does wrong; 4 is the application's, 6 would be a fault of ours."""

STEPS: Final = (
    "say_frame",
    "say_frame",
    "say_route_and_frames",
    "say_route_and_frames",
    "say_bytes",
    "say_end",
    "hostile_control",
    "datagram",
    "wait",
    "take",
    "take",
    "send",
    "end_half",
    "placement",
    "whole_connection",
)
"""Methods of World: a byte of the input chooses one."""

FRAMES: Final = (
    "VERSION",
    "ACK_VERSION",
    "CONNECTION_HEADERS",
    "ROUTE_TO",
    "MESSAGE",
    "SENT_UNRELIABLE",
    "FINISH_SENDER",
    "CANCEL_SENDER",
    "ACK_RELIABLE",
    "ACK_NACK_UNRELIABLE",
    "CLOSE_RECEIVER",
    "FORGET_CHANNEL",
    "MESSAGE",
    "MESSAGE with all",
    "a head",
    "bytes",
)
"""What a peer may say: a byte chooses one, a number is read for each."""

PLAIN: Final = Config(debug=False)
NARROW: Final = dataclasses.replace(
    PLAIN,
    limits=Limits(
        frame_bytes=2048,
        header_bytes=256,
        attachments=3,
        channels=12,
        unacknowledged=8,
        received_ranges=3,
        destroyed_ranges=2,
        early_datagrams=2,
        early_datagram_bytes=300,
    ),
    flow=Flow(
        receive_budget=4096,
        channel_receive_bytes=1500,
        initial_window=300,
        read_ahead=1000,
        admitted_window=500,
        channel_high_water=700,
        connection_high_water=2000,
        streams=12,
        channel_streams=6,
        unordered_streams=2,
    ),
    calls=Calls(fragment_bytes=1024),
)
MIDDLE: Final = dataclasses.replace(
    NARROW,
    limits=dataclasses.replace(NARROW.limits, frame_bytes=100_000, channels=100),
    flow=dataclasses.replace(
        NARROW.flow, receive_budget=150_000, channel_receive_bytes=60_000, initial_window=40_000
    ),
)
CONFIGS: Final = (PLAIN, NARROW, MIDDLE, dataclasses.replace(NARROW, debug=True))


class Hostile:
    """The other end of the link: says what it is told to."""

    def __init__(self, carrier: memory.MemoryCarrier) -> None:
        self.carrier = carrier
        self.slots: list[int | None] = [None] * SLOTS
        self.opened = 0
        self.generous = True
        """Whether it credits what it reads."""
        self.seen: dict[int, int] = {}
        carrier.attach(self)

    def connected(self) -> None:
        pass

    def early_decided(self, accepted: bool) -> None:
        """There is no early data here."""

    def stream_data(self, stream: int, data: Buffer, fin: bool) -> None:
        self.seen[stream] = self.seen.get(stream, 0) + len(data)
        if self.generous and not fin:
            self.carrier.credit(stream, self.seen[stream] + 4096)

    def inlet(self, stream: int) -> None:
        """Has none to give."""

    def inlet_done(self, stream: int) -> None:
        raise AssertionError("no inlet was opened")

    def stream_reset(self, stream: int, code: int) -> None:
        pass

    def stream_stopped(self, stream: int, code: int) -> None:
        if stream in self.slots:
            self.slots[self.slots.index(stream)] = None

    def datagram_received(self, data: bytes) -> None:
        pass

    def openable_changed(self) -> None:
        pass

    def datagram_room_changed(self) -> None:
        pass

    def written(self, stream: int, size: int) -> bool:
        return False

    def kept(self, size: int) -> None:
        pass

    def ponged(self) -> None:
        pass

    def end_of_input(self) -> None:
        self.carrier.flush()

    def closed(self, error: ConnectionLost) -> None:
        pass

    def say(self, slot: int, data: bytes, fin: bool) -> None:
        """Writes to the stream of a slot, opening one if there is one to be had."""
        stream = self.slots[slot]
        if stream is None:
            if self.carrier.openable < 1:
                return
            stream = self.slots[slot] = self.opened
            self.opened += 1
        self.carrier.write(stream, [data], fin)
        if fin:
            self.slots[slot] = None
        self.carrier.flush()

    def reset(self, slot: int, code: int) -> None:
        stream, self.slots[slot] = self.slots[slot], None
        if stream is not None:
            self.carrier.reset(stream, code)
            self.carrier.flush()

    def stop(self, stream: int, code: int) -> None:
        try:
            self.carrier.stop(stream, code)
        except LocalProtocolError:
            pass  # never opened, or so the carrier says
        self.carrier.flush()


class HookFault(Exception):
    """What an application's placement hook raises here."""


class World:
    """One run."""

    def __init__(self, source: Source) -> None:
        self.source = source
        settings = source.byte()
        self.config = CONFIGS[settings >> 1 & 3]
        self.clock = Clock()
        self.link = memory.pair(
            self.config,
            chunk=(1 << 16, 5, 50, 700)[settings >> 3 & 3],
            datagram_limit=(1200, 0)[settings >> 5 & 1],
        )
        ends = (self.link.client, self.link.server)
        is_client = settings & 1 == 0
        self.endpoint = Endpoint(ends[not is_client], self.config, self.clock)
        self.hostile = Hostile(ends[is_client])
        self.hostile.generous = not settings & 64
        self.ended_by_us = False
        if settings & 128:
            self.endpoint.accepts = False
        else:
            prelude = [("VERSION", "0.0.0-AFTER"), ("ACK_VERSION",), ("CONNECTION_HEADERS", ())]
            self.hostile.say(0, model.encode(prelude), True)
        self.link.run(10_000)

    def run(self) -> None:
        steps = [getattr(self, name) for name in STEPS]
        while not self.source.empty:
            steps[self.source.below(len(steps))]()
            self.endpoint.flush()
            self.link.step()
            self.check()
        self.link.run(100_000)
        self.check()
        self.finish()

    # The peer

    def frame(self) -> bytes:
        """One frame, allowed or not."""
        source = self.source
        kind = source.below(len(FRAMES))
        number = source.number()
        match FRAMES[kind]:
            case "VERSION":
                return codec.VERSION
            case "CONNECTION_HEADERS":
                return model.encode([("CONNECTION_HEADERS", self.headers())])
            case "ROUTE_TO" | "SENT_UNRELIABLE" | "FINISH_SENDER" as name:
                return model.encode([(name, number)])
            case "MESSAGE":
                return model.encode([("MESSAGE", number, (), (), bytes(source.byte()))])
            case "MESSAGE with all":
                attached = tuple((source.number(), self.headers()) for _ in range(source.below(4)))
                payload = bytes(source.byte() * 40)
                return model.encode([("MESSAGE", number, self.headers(), attached, payload)])
            case "a head":  # its payload is left to what follows
                whole = model.encode([("MESSAGE", number, (), (), b"")])
                return whole[:-1] + model.varint(source.number())
            case "ACK_RELIABLE":
                return model.encode([("ACK_RELIABLE", self.ranges())])
            case "ACK_NACK_UNRELIABLE":
                return model.encode([("ACK_NACK_UNRELIABLE", number, self.ranges())])
            case "bytes":
                return source.take(number & 15)
            case name:
                return model.encode([(name,)])

    def headers(self) -> tuple[tuple[bytes, bytes], ...]:
        shape = self.source.byte()
        return tuple((b"k%d" % index, bytes(shape >> 2)) for index in range(shape & 3))

    def ranges(self) -> tuple[int, ...]:
        return tuple(self.source.number() for _ in range(1 + self.source.below(5)))

    def say_frame(self) -> None:
        """Its first byte says where, and whether that is the end of the stream."""
        where = self.source.byte()
        self.hostile.say(where % SLOTS, self.frame(), bool(where & 64))

    def say_route_and_frames(self) -> None:
        """A stream as a sender or receiver would begin it."""
        where = self.source.byte()
        slot = where % SLOTS
        if self.hostile.slots[slot] is not None:
            self.hostile.say(slot, b"", True)
        prelude = codec.VERSION if where & 128 else b""
        route = model.encode([("ROUTE_TO", self.source.number())])
        frames = b"".join(self.frame() for _ in range(where >> 3 & 3))
        self.hostile.say(slot, prelude + route + frames, bool(where & 64))

    def say_bytes(self) -> None:
        where = self.source.byte()
        self.hostile.say(where % SLOTS, self.source.take(where >> 3), False)

    def say_end(self) -> None:
        self.hostile.say(self.source.below(SLOTS), b"", True)

    def hostile_control(self) -> None:
        what = self.source.byte()
        if what & 128:
            self.hostile.generous = bool(what & 1)
        elif what & 64:
            self.hostile.reset(what % SLOTS, what)
        else:
            self.hostile.stop(what, what)

    def datagram(self) -> None:
        how = self.source.byte()
        parts = [codec.VERSION] if how & 1 else []
        if how & 2:
            parts.append(model.encode([("ROUTE_TO", self.source.number())]))
        parts += [self.frame() for _ in range(how >> 2 & 3)]
        self.hostile.carrier.send_datagram(b"".join(parts))
        self.hostile.carrier.flush()

    # The application

    def wait(self) -> None:
        how = self.source.byte()
        self.clock.now += WAITS[how % len(WAITS)]
        if how & 128:
            self.endpoint.core.rtt_measured(WAITS[how >> 3 & 3])
        self.endpoint.wake()
        if how & 64:
            self.link.run(100_000)
        if 0 < self.endpoint.core.close_by <= self.clock.now:
            self.link.expire_linger()

    def take(self) -> None:
        how = self.source.byte()
        receivers = self.endpoint.receivers
        if not receivers:
            return
        received = self.endpoint.take(receivers[how % len(receivers)])
        if received is not None:
            len(bytes(received.payload))  # every byte is there
            if how & 128:
                for inner, _ in received.attachments:
                    self.endpoint.drop(inner)

    def send(self) -> None:
        how = self.source.byte()
        senders = self.endpoint.senders
        if not senders:
            return
        half = senders[(how & 15) % len(senders)]
        shape = self.source.byte()
        attaches = [
            Attach(keep_sender=bool(shape & 16 << index), is_oneshot=bool(shape & 4))
            for index in range(shape & 3)
        ]
        payload = bytes(self.source.byte() * (1 if shape & 8 else 60))
        if how & 128:
            self.endpoint.wait_writable(half)
        self.endpoint.send(half, payload, attaches, MODES[(how >> 4 & 7) % 3])

    def end_half(self) -> None:
        how = self.source.byte()
        halves = self.endpoint.halves
        half = halves[(how & 63) % len(halves)]
        if isinstance(half, ReceiverHalf):
            self.endpoint.close_receiver(half)
        elif how & 64:
            self.endpoint.finish(half)
        else:
            self.endpoint.cancel(half)

    def placement(self) -> None:
        """Where payloads land is up to the application, which may be wrong about it."""
        how = self.source.byte()
        receivers = self.endpoint.receivers
        if not receivers:
            return

        def hook(headers: Any, size: int) -> Any:
            if how & 192 == 0:
                raise HookFault
            return (None, bytearray(size), bytes(size + 1))[(how >> 6) - 1]

        receivers[(how & 63) % len(receivers)].queue.placement = hook

    def whole_connection(self) -> None:
        """Rare: most runs would end here."""
        how = self.source.byte()
        if how < 64:
            self.endpoint.answer()
        elif how < 72:
            self.ended_by_us = self.ended_by_us or self.endpoint.core.error is None
            self.endpoint.close(how % 7)
        elif how < 76 and not self.endpoint.core.is_client:
            self.ended_by_us = self.ended_by_us or self.endpoint.core.error is None
            self.endpoint.core.reject_headers("not you")
            self.endpoint.flush()
        elif how < 80:
            self.link.cut()

    # What must hold

    def check(self) -> None:
        endpoint, core = self.endpoint, self.endpoint.core
        endpoint.check()
        if core.error is not None:
            cause = core.error.__cause__
            if isinstance(cause, RemoteProtocolError) and not self.ended_by_us:
                assert cause.code in VIOLATIONS, cause
                assert endpoint.close_codes in ([cause.code], []), cause
            return
        limits, flow, shared = self.config.limits, self.config.flow, core._shared
        assured = sum(half.queue.assured for half in endpoint.receivers)
        largest = limits.frame_bytes + flow.message_overhead
        assert 0 <= shared.budget_used <= flow.receive_budget + (1 + assured) * largest
        assert core._reader.incoming._gathered <= flow.receive_budget + limits.frame_bytes
        assert core.channels <= limits.channels
        assert len(core._reader.arrivals._early) <= limits.early_datagrams
        assert sum(map(len, core._reader.arrivals._early)) <= limits.early_datagram_bytes
        assert core._registry._destroyed.ranges <= 4 * limits.destroyed_ranges
        assert len(core._reader.incoming.streams) <= flow.streams + flow.channel_streams
        for stream in core._reader.incoming.streams.values():
            ahead = flow.initial_window + flow.admitted_window + stream.granted
            assert stream.decoder.buffered <= ahead

    def finish(self) -> None:
        """The network goes; the application takes what is here; every handle is final."""
        self.link.cut()
        core = self.endpoint.core
        assert core.error is not None
        assert core.next_deadline() is None and not core.effects_to_apply()
        for half in self.endpoint.halves:  # grows as it is read
            while isinstance(half, ReceiverHalf) and self.endpoint.take(half) is not None:
                pass
            if isinstance(half, SenderHalf):
                assert self.endpoint.send(half, b"late", [], Mode.ORDERED) is None
        self.endpoint.check_final()


def target(data: bytes) -> None:
    """One input."""
    World(Source(data)).run()
