"""A peer of the control-stream draft that misbehaves costs bounded memory and work.

Each trick is played in two sizes. Its memory must stay below a bound that does not depend on the
size; its work, counted in calls, may grow no faster than the trick; and it ends with the close code
of AQ-R30, or with none.
"""

from __future__ import annotations

import tracemalloc
from typing import Any

import pytest

from aqueduct._speedups.channels.encoder import VERSION
from aqueduct._speedups.control_streams import control_encoder as encoder
from aqueduct.protocol.common import effects
from aqueduct.protocol.common.registry import Attach
from aqueduct.protocol.common.send_streams import STALLED_ALLOWANCE
from aqueduct.protocol.control_streams.bidi_streams import BIDI
from tests.protocol.control_streams.lone import GREETING, Lone, message, mine, peers
from tests.support.tricks import SMALL, KiB, MiB, Tricks

CHANNEL = 6 * KiB
"""More than a channel with state takes, with its first message and its control stream."""
BASE = 384 * KiB
"""What a few hundred objects and a decoder of every stream take."""


def channels(count: int) -> int:
    return count * CHANNEL


class Attacker(Lone):
    """A peer that keeps to the carrier's rules alone: windows of streams, and their slots."""

    def __init__(self, to: str = "server", **options: Any) -> None:
        self.limits: dict[int, int] = {}
        self.sent: dict[int, int] = {}
        self.code_sent: int | None = None
        self.said = self.answered = 0
        self.ends: dict[int, int] = {}
        super().__init__(to, SMALL, **options)

    def on(self, number: int, *parts: bytes, fin: bool = False) -> None:
        """As far as the window goes."""
        data = b"".join(parts)
        room = self.limits.setdefault(number, SMALL.flow.initial_window)
        sent = self.sent.get(number, 0)
        piece = data[: room - sent]
        self.sent[number] = sent + len(piece)
        whole = fin and len(piece) == len(data)
        super().on(number, piece, fin=whole)
        if whole:
            self.forget(number)
        while self.core.goes_on:
            self.core.handle_deadline(self.now)
            self.apply()

    def forget(self, number: int) -> None:
        """A stream that has ended has no window."""
        self.limits.pop(number, None)
        self.sent.pop(number, None)

    def reset(self, number: int, code: int) -> None:
        super().reset(number, code)
        self.forget(number)

    def pour(self, number: int, data: bytes) -> int:
        """As long as there is credit."""
        went = 0
        while went < len(data) and self.core.error is None:
            before = self.sent.get(number, 0)
            self.on(number, data[went : went + 65536])
            step = self.sent.get(number, 0) - before
            if not step:
                break
            went += step
        return went

    def apply(self) -> None:
        super().apply()
        for effect in self.applied:
            self.said += 1
            kind = effect[0]
            if kind == effects.WRITE:
                self.answered += sum(len(memoryview(buffer)) for buffer in effect[2])
            elif kind == effects.CREDIT:
                self.limits[effect[1]] = effect[2]
            elif kind == effects.RESET:
                self.ends[effect[2]] = self.ends.get(effect[2], 0) + 1
            elif kind == effects.CLOSE and self.code_sent is None:
                self.code_sent = effect[1]
        self.applied.clear()
        self.events.clear()

    @property
    def code(self) -> int | None:
        return self.code_sent


TRICKS = Tricks()
trick = TRICKS.add


# ------------------------------------------------------------ control streams


@trick("opens a control stream for an id of its own", "AQ0-25", size=3, memory=BASE, code=2)
def control_of_its_own(attacker: Attacker, n: int) -> None:
    for index in range(n):
        attacker.open(encoder.encode_channel_control(8 * (index + 1)))


@trick("opens many control streams for one channel", "AQ0-25", to="client", size=300, memory=BASE)
def many_for_one(attacker: Attacker, n: int) -> None:
    half = attacker.create(keep_sender=True)
    attacker.open(encoder.encode_channel_control(half.channel))
    for _ in range(n):
        lost = attacker.open(encoder.encode_channel_control(half.channel))
        attacker.reset(lost, 2)  # its carrier does so when it is told to stop
    assert attacker.ends == {2: n}
    assert attacker.core.snapshot()["streams_in"] == 2
    assert attacker.core.channels == 2


@trick("goes on with control streams that were reset", "AQ0-25", to="client", size=300, memory=BASE)
def goes_on_with_the_lost(attacker: Attacker, n: int) -> None:
    half = attacker.create(keep_sender=True)
    attacker.open(encoder.encode_channel_control(half.channel))
    lost = attacker.open(encoder.encode_channel_control(half.channel))
    for _ in range(n):
        attacker.on(lost, encoder.encode_control_acks((9,)))
    assert attacker.ends == {2: 1}


@trick("opens control streams for what was never created", to="client", size=3, memory=BASE, code=2)
def control_of_the_unborn(attacker: Attacker, n: int) -> None:
    for index in range(n):
        attacker.open(encoder.encode_channel_control(8 * (index + 1)))


@trick(
    "opens no control streams",
    "AQ0-29",
    "AQ0-R16",
    to="client",
    size=600,
    memory=BASE + channels(500),
)
def opens_none(attacker: Attacker, n: int) -> None:
    entry = attacker.open(encoder.encode_channel_control(0))
    for _ in range(n):
        if attacker.core.channels >= SMALL.limits.channels:
            with pytest.raises(Exception, match="Limits"):
                attacker.create(keep_sender=False)
            break
        attacker.close(attacker.create(keep_sender=False))
        attacker.on(entry, encoder.encode_control_acks((1,)))
    assert attacker.core.channels == SMALL.limits.channels


@trick("data behind the end of a control stream", "AQ0-16", to="client", size=300, memory=BASE)
def behind_the_end(attacker: Attacker, n: int) -> None:
    half = attacker.create(keep_sender=True)
    control = attacker.open(
        encoder.encode_channel_control(half.channel), encoder.encode_control_close(()), fin=True
    )
    for _ in range(n):
        attacker.reset(control, 1)
    assert attacker.core.channels == 1


@trick("more frames behind a close", "AQ0-16", to="client", size=2, memory=BASE, code=2)
def frames_behind_the_close(attacker: Attacker, n: int) -> None:
    for _ in range(n):
        attacker.open(
            encoder.encode_channel_control(0),
            encoder.encode_control_close(()),
            encoder.encode_control_close(()),
        )


@trick("streams reset before their first frame", "AQ0-R5", size=500, memory=BASE)
def resets_early(attacker: Attacker, n: int) -> None:
    for _ in range(n):
        attacker.reset(attacker.open(VERSION[:7]), 1)
    assert attacker.core.snapshot()["streams_in"] == 1
    assert attacker.ends == {2: n}


@trick("control streams of one byte", "AQ0-12", "AQ0-8", size=300, memory=BASE + 1 * MiB)
def one_byte(attacker: Attacker, n: int) -> None:
    for _ in range(n):
        attacker.open(b"\x02")
    assert attacker.core.snapshot()["streams_in"] == n + 1


@trick(
    "lets us open no control stream and makes us close",
    "AQ0-29",
    "AQ0-R16",
    size=1500,
    memory=BASE + channels(500) + 5 * (1 * MiB + STALLED_ALLOWANCE),
    code=5,
    options={"bidi_slots": 1},
)
def closes_that_do_not_leave(attacker: Attacker, n: int) -> None:
    stream = attacker.say(fin=False)
    for number in range(n):
        if attacker.core.error is not None:
            break
        attacker.on(stream, _carrier(number))
        while (got := attacker.take(attacker.receiver)) is not None:
            for half, _ in got.attachments:
                attacker.core.drop_attachment(half, attacker.now)
        attacker.apply()


def _carrier(number: int) -> bytes:
    first = number * 4 + 1
    return message(0, number, b"", [(first + k) << 3 for k in range(4)])


# ------------------------------------------------------------ channels


@trick("opens channels by messages", "AQ0-23", size=400, memory=BASE + channels(500), code=5)
def opens(attacker: Attacker, n: int) -> None:
    for index in range(1, n + 1):
        attacker.say(message(index << 3))


@trick("opens channels by datagrams", "AQ0-23", size=400, memory=BASE + channels(500), code=5)
def opens_by_datagrams(attacker: Attacker, n: int) -> None:
    for index in range(1, n + 1):
        attacker.datagram(message(index << 3))


@trick("opens channels and cancels them", "AQ0-31", size=400, memory=BASE + channels(500), code=5)
def opens_and_cancels(attacker: Attacker, n: int) -> None:
    for index in range(1, n + 1):
        attacker.say(message(index << 3))
        attacker.reset(mine(index), 1)


@trick("opens channels and loses them", "AQ0-34", size=400, memory=BASE)
def opens_and_loses(attacker: Attacker, n: int) -> None:
    for index in range(1, n + 1):
        attacker.say(message(index << 4))
        attacker.reset(mine(index), 2)
        if index % 50 == 0:
            attacker.wait(0.03)  # until then it is known that an ack was due
    assert attacker.core.channels == 1
    assert attacker.core._registry._destroyed.ranges <= SMALL.limits.destroyed_ranges


@trick("ClosedChannelLost for anything", "AQ0-17", "AQ0-33", size=400, memory=BASE)
def lost_for_anything(attacker: Attacker, n: int) -> None:
    for index in range(1, n + 1):
        attacker.say(encoder.encode_closed_channel_lost((index * 7 << 3) | index % 2))
    assert attacker.core.channels == 1
    assert attacker.core._registry._destroyed.ranges <= 2 * SMALL.limits.destroyed_ranges


@trick("attaches what it never uses", "AQ0-24", size=40, memory=BASE + channels(600), code=5)
def attachment_bomb(attacker: Attacker, n: int) -> None:
    for number in range(n):
        attacker.say(message(0, number, b"", [(number * 100 + k + 1) << 3 for k in range(100)]))


@trick(
    "messages for receivers of ours that are gone", "AQ0-R14", to="client", size=400, memory=BASE
)
def messages_for_the_dead(attacker: Attacker, n: int) -> None:
    half = attacker.create(keep_sender=False)
    attacker.open(encoder.encode_channel_control(half.channel))
    attacker.close(half)
    before = attacker.answered
    for number in range(n):
        attacker.say(message(half.channel, number, bytes(1000), [3 + 8 * number]))
        attacker.datagram(message(half.channel, number, bytes(1000)))
    attacker.wait(5)
    assert attacker.answered == before and attacker.core.channels == 1


# ------------------------------------------------------------ acks and numbers


@trick("100,000 tiny acks", "AQ0-26", to="client", size=50_000, memory=BASE)
def tiny_acks(attacker: Attacker, n: int) -> None:
    attacker.send(attacker.sender)
    control = attacker.open(encoder.encode_channel_control(0))
    empty = b"\x05\x02\x00\x01"  # not acked: it says nothing
    for _ in range(0, n, 1000):
        attacker.pour(control, empty * 1000)
    assert attacker.sender.numbers.unacked == 1 and attacker.code is None


@trick(
    "acks with all the ranges that fit",
    "AQ0-26",
    to="client",
    size=1,
    memory=BASE + 5 * MiB,
    code=2,
)
def large_ack(attacker: Attacker, n: int) -> None:
    for _ in range(n):
        control = attacker.open(encoder.encode_channel_control(0), b"\x05\x80\x80\x0f")
        attacker.pour(control, b"\x01" * 245_760)


@trick("acks above the limit", "AQ0-R16", to="client", size=1, memory=BASE + 3 * MiB, code=5)
def ack_bomb(attacker: Attacker, n: int) -> None:
    for _ in range(n):
        control = attacker.open(encoder.encode_channel_control(0), b"\x05\x80\xea\x30")
        attacker.pour(control, b"\x81\x01" * 400_000)


@trick("acks what was never sent", "AQ0-26", to="client", size=3, memory=BASE, code=2)
def acks_unsent(attacker: Attacker, n: int) -> None:
    control = attacker.open(encoder.encode_channel_control(0))
    for number in range(n):
        attacker.on(control, encoder.encode_control_acks((number + 1,)))


@trick("leaves holes in the numbers", "AQ0-R16", size=150, memory=BASE + 400 * KiB, code=5)
def holes(attacker: Attacker, n: int) -> None:
    stream = attacker.say(fin=False)
    for number in range(n):
        attacker.on(stream, message(0, 2 * number))
        while attacker.take(attacker.receiver) is not None:
            pass


@trick("announces datagrams one by one", "AQ0-26", "AQ0-22", size=400, memory=BASE)
def announcements(attacker: Attacker, n: int) -> None:
    for _ in range(n):
        attacker.on(mine(0), encoder.encode_control_sent_unreliable(1))
        attacker.now += 0.0001
    attacker.wait(3)


@trick(
    "takes no acks",
    "AQ0-R16",
    size=40_000,
    memory=BASE + 3 * (1 * MiB + STALLED_ALLOWANCE),
    code=5,
)
def takes_no_acks(attacker: Attacker, n: int) -> None:
    attacker.reads = False
    stream = attacker.say(fin=False)
    for number in range(0, n, 100):
        base = 2 * number
        attacker.pour(
            stream,
            b"".join(message(0, base + 2 * k + (1 if k % 2 else 0)) for k in range(100)),
        )
        while attacker.take(attacker.receiver) is not None:
            pass
        attacker.wait(0.03)


# ------------------------------------------------------------ bytes


@trick("declares huge payloads", "AQ0-R3", size=30, memory=BASE + 2 * MiB)
def declares(attacker: Attacker, n: int) -> None:
    for index in range(n):
        head = message((index % 200 + 1) << 3, index, bytes(900_000))[:-900_000]
        attacker.say(head, bytes(10), fin=False)
    assert attacker.core.snapshot()["budget_used_bytes"] <= 5 * MiB


@trick("declares more than a frame may have", "AQ0-R16", size=3, memory=BASE, code=5)
def above_the_frame(attacker: Attacker, n: int) -> None:
    for _ in range(n):
        attacker.say(b"\x03\x00\x00\x00\xff\xff\xff\xff\x7f", fin=False)


@trick("never reads: messages without end", "AQ0-R3", size=4000, memory=BASE + 8 * MiB)
def unread(attacker: Attacker, n: int) -> None:
    stream = attacker.say(fin=False)
    for number in range(n):
        attacker.on(stream, message(0, number, bytes(500)))
        if attacker.sent[stream] >= attacker.limits[stream]:
            break
    assert attacker.core.snapshot()["budget_used_bytes"] <= 4 * MiB


@trick("one byte at a time", "AQ0-8", size=2000, memory=BASE)
def byte_by_byte(attacker: Attacker, n: int) -> None:
    whole = message(0, 0, bytes(n))
    stream = attacker.say(fin=False)
    for place in range(len(whole)):
        attacker.on(stream, whole[place : place + 1])
    assert attacker.take(attacker.receiver) is not None


@trick("datagrams before the headers", size=300, memory=BASE + 128 * KiB, options={"greet": False})
def early_datagrams(attacker: Attacker, n: int) -> None:
    for number in range(n):
        attacker.datagram(VERSION, message(0, number, bytes(1000)))
    early = attacker.core._reader.arrivals._early
    assert len(early) <= SMALL.limits.early_datagrams


@trick(
    "streams before the headers",
    "AQ0-20",
    size=30,
    memory=BASE + 2 * 64 * 16 * KiB,
    options={"greet": False},
)
def early_streams(attacker: Attacker, n: int) -> None:
    for number in range(n):
        attacker.say(VERSION, message(0, number, bytes(16_000)))


@trick("datagrams that nobody reads", "AQ0-R16", size=2000, memory=BASE + 2 * MiB)
def unread_datagrams(attacker: Attacker, n: int) -> None:
    for number in range(n):
        attacker.datagram(message(0, number, bytes(1000)))
    assert attacker.receiver.queue.charged <= SMALL.flow.channel_receive_bytes


@trick("headers again and again", "AQ0-19", size=3, memory=BASE, code=2)
def headers_flood(attacker: Attacker, n: int) -> None:
    for _ in range(n):
        attacker.open(GREETING)


@trick("a Version that never ends", "AQ0-10", size=3, memory=BASE, code=3)
def endless_version(attacker: Attacker, n: int) -> None:
    for _ in range(n):
        attacker.say(VERSION[:16], b"\xff\xff\x7f", bytes(1000), fin=False)


@trick("empty streams", "AQ0-8", size=3, memory=BASE, code=1)
def empty_streams(attacker: Attacker, n: int) -> None:
    for _ in range(n):
        attacker.say()


@trick("headers above the limit", "AQ0-R16", size=1, memory=BASE, code=5, options={"greet": False})
def large_headers(attacker: Attacker, n: int) -> None:
    for _ in range(n):
        attacker.open(VERSION, b"\x01\x81\x80\x01", bytes(1000))


# ------------------------------------------------------------ the bounds


@pytest.mark.requirement("AQ0-35")
@pytest.mark.requirement("AQ0-R16")
@pytest.mark.parametrize("name", TRICKS.cases())
def test_a_trick_costs_little_and_ends_with_its_code(name: str) -> None:
    entry = TRICKS[name]
    attacker = entry.attack(lambda: Attacker(entry.to, **entry.options))
    assert attacker.code == entry.code
    if entry.code is not None:
        core = attacker.core
        assert core.error is not None and core.channels == 0
        assert core._shared.outgoing.queued == core._shared.outgoing.stalled_beside == 0
        before = attacker.said
        attacker.on(peers(10**6), GREETING)
        attacker.on(10**6, message(0))
        attacker.datagram(message(0))
        assert attacker.said == before, "nothing after the close matters"


@pytest.mark.requirement("AQ0-32")
@pytest.mark.requirement("AQ0-29")
def test_ten_thousand_channels_that_stay_detached_cost_little_each() -> None:
    lone = Lone()
    attached = [Attach(keep_sender=k % 2 == 0, is_oneshot=False) for k in range(1000)]
    tracemalloc.start()
    try:
        for _ in range(10):
            lone.send(lone.sender, b"", *attached)
            lone.applied.clear()
        used = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert lone.core.channels == 10_001
    assert used < 10_000 * 2 * KiB
    assert lone.core.next_deadline() is None
    lone.open(encoder.encode_channel_control(0), encoder.encode_control_close(()), fin=True)
    assert lone.core.channels == 0  # all of them were lost with the entrypoint


def test_there_are_tricks_enough() -> None:
    assert len(TRICKS) >= 35
    assert {entry.code for entry in TRICKS.values()} == {None, 1, 2, 3, 5}
    assert BIDI > 10**6
