"""A peer that misbehaves costs bounded memory and work, and is closed where it breaks a rule.

Each trick is played in two sizes. Its memory must stay below a bound that does not depend on the
size (by tracemalloc, and by the core's own account); its work, counted in calls, may grow no
faster than the trick; and it ends with the close code of AQ-R30, or with none.
"""

from __future__ import annotations

import pytest

from aqueduct._speedups import channels as codec
from aqueduct.config import DEFAULT
from aqueduct.protocol.common.registry import Attach
from aqueduct.protocol.common.send_streams import STALLED_ALLOWANCE
from aqueduct.protocol.common.sender import Mode, SenderHalf
from tests.protocol.channels.attacker import ENTRY, Attacker, message
from tests.support.tricks import SMALL, KiB, MiB, Tricks

CHANNEL = 4 * KiB
"""More than a channel with state takes, with its first message and its control stream."""
BASE = 256 * KiB
"""What a few hundred objects and a decoder of every stream take."""


def channels(count: int) -> int:
    return count * CHANNEL


TRICKS = Tricks()
trick = TRICKS.add


# ------------------------------------------------------------ channels


@trick("opens channels", "AQ-R31", size=400, memory=BASE + channels(500), code=5)
def opens(attacker: Attacker, n: int) -> None:
    for index in range(1, n + 1):
        attacker.say(codec.encode_route_to(index << 3))
    attacker.wait(2)


@trick(
    "opens channels and cancels them",
    "AQ-R31",
    "AQ-R26",
    size=400,
    memory=BASE + channels(500),
    code=5,
)
def opens_and_cancels(attacker: Attacker, n: int) -> None:
    for index in range(1, n + 1):
        attacker.say(codec.encode_route_to(index << 3), codec.CANCEL_SENDER)


@trick("ever new ghosts", "AQ-R23", "AQ-R24", size=400, memory=BASE)
def ghosts(attacker: Attacker, n: int) -> None:
    for index in range(1, n + 1):
        # Every other index: what was never used leaves holes in what is destroyed.
        attacker.say(codec.encode_route_to(index << 4), codec.FORGET_CHANNEL)
        if index % 50 == 0:
            attacker.wait(0.03)  # until then it is known that an ack was due
    assert attacker.core._registry._destroyed.ranges <= SMALL.limits.destroyed_ranges


@trick("forgets one channel again and again", "AQ-R23", "AQ-46", size=400, memory=BASE)
def forget_flood(attacker: Attacker, n: int) -> None:
    for _ in range(n):
        attacker.say(codec.encode_route_to(8), codec.FORGET_CHANNEL)


@trick(
    "routes to channels of ours that are gone",
    "AQ-40",
    "AQ-R24",
    size=400,
    memory=BASE,
    options={"to": "client"},
)
def routes_to_the_dead(attacker: Attacker, n: int) -> None:
    wanted = [Attach(keep_sender=True, is_oneshot=False) for _ in range(20)]
    attacker.send(b"", attachments=wanted)
    gone = [attach.half.channel for attach in wanted if attach.half is not None]
    for channel in gone:
        attacker.say(codec.encode_route_to(channel), codec.CLOSE_RECEIVER)
    before = attacker.applied
    for index in range(n):
        attacker.say(codec.encode_route_to(gone[index % 20]), codec.encode_ack_reliable((0, 1)))
    attacker.wait(3)
    # One FORGET_CHANNEL a second for each, however often it is asked for (beside the stops).
    assert attacker.answered < 100 + 20 * 8 * 4
    assert attacker.applied - before <= n + 20 * 4


@trick(
    "routes to what was never created",
    "AQ-R4",
    size=400,
    memory=BASE,
    code=2,
    options={"to": "client"},
)
def routes_to_the_unborn(attacker: Attacker, n: int) -> None:
    for index in range(1, n + 1):
        attacker.say(codec.encode_route_to(index << 3), codec.CLOSE_RECEIVER)


@trick(
    "attaches channels that it never uses", "AQ-R31", size=40, memory=BASE + channels(600), code=5
)
def attachment_bomb(attacker: Attacker, n: int) -> None:
    for number in range(n):
        attached = [(number * 100 + k + 1) << 3 for k in range(100)]
        attacker.say(ENTRY, message(number, b"", (), attached))


@trick("attaches one channel twice", "AQ-R4", size=40, memory=BASE, code=2)
def attached_twice(attacker: Attacker, n: int) -> None:
    for number in range(n):
        attacker.say(ENTRY, message(number, b"", (), [8]))


@trick("attaches more than may be", "AQ-R31", size=2, memory=BASE + channels(600), code=5)
def too_many_attachments(attacker: Attacker, n: int) -> None:
    for number in range(n):
        attacker.say(ENTRY, message(number, b"", (), [k << 3 for k in range(1, 1026)]))


@trick(
    "makes us close channels and reads nothing",
    "AQ-R26",
    "AQ-R30",
    size=4000,
    memory=BASE + channels(500) + 3 * (1 * MiB + STALLED_ALLOWANCE),
    code=5,
    options={"streams": 4},
)
def closes_that_do_not_leave(attacker: Attacker, n: int) -> None:
    for number in range(n):
        first = number * 4 + 1
        attacker.say(ENTRY, message(number, b"", (), [(first + k) << 3 for k in range(4)]))
        for received in attacker.take_all():
            for half, _ in received.attachments:
                attacker.core.drop_attachment(half, attacker.now)
        attacker._apply()


# ------------------------------------------------------------ lengths


@trick("declares huge payloads", "AQ-R31", size=30, memory=BASE + 2 * MiB)
def declares(attacker: Attacker, n: int) -> None:
    head = message(0, bytes(1_000_000))[:-1_000_000]
    for index in range(n):
        route = codec.encode_route_to((index % 200 + 1) << 3)
        stream = attacker.say(route, head, bytes(10), fin=False)
        attacker.more(stream, bytes(10))
    assert attacker.core.snapshot()["budget_used_bytes"] <= SMALL.flow.receive_budget + 1 * MiB


@trick(
    "half-declared messages on every stream",
    "AQ-R31",
    size=30,
    memory=BASE + 4 * MiB + 64 * 32 * KiB,
)
def half_declared(attacker: Attacker, n: int) -> None:
    whole = message(0, bytes(900_000))
    for index in range(n):
        stream = attacker.say(codec.encode_route_to((index + 1) << 3), fin=False)
        attacker.pour(stream, whole[:-1])
    assert attacker.core.snapshot()["budget_used_bytes"] <= SMALL.flow.receive_budget


@trick("declares more than a frame may have", "AQ-R31", size=3, memory=BASE, code=5)
def above_the_frame(attacker: Attacker, n: int) -> None:
    for _ in range(n):
        attacker.say(ENTRY, b"\x04\x00\x00\x00\xff\xff\xff\xff\xff\xff\xff\xff\x7f", fin=False)


@trick("headers above the limit", "AQ-R31", size=3, memory=BASE, code=5)
def above_the_headers(attacker: Attacker, n: int) -> None:
    for _ in range(n):
        attacker.say(ENTRY, b"\x04\x00" + b"\x81\x80\x01", bytes(1000), fin=False)


BOMB = tuple((b"ab", b"") for _ in range(4000))
"""As many headers as fit into Limits.header_bytes: a tuple of three objects for four bytes."""


@trick("messages that are nothing but headers", "AQ-R31", size=300, memory=BASE + 3 * 4 * MiB)
def header_bomb(attacker: Attacker, n: int) -> None:
    for number in range(n):
        stream = attacker.say(codec.encode_route_to((number % 50 + 1) << 3), fin=False)
        attacker.pour(stream, message(number, b"", BOMB), fin=True)
        if attacker.slots < 4:
            break


@trick("headers of messages that nobody admits", "AQ-R31", size=30, memory=BASE + 3 * 4 * MiB)
def waiting_header_bomb(attacker: Attacker, n: int) -> None:
    attacker.pour(attacker.say(ENTRY, fin=False), message(0, bytes(1_000_000)))
    for number in range(1, n + 1):
        stream = attacker.say(ENTRY, fin=False)
        attacker.pour(stream, message(number, bytes(900_000), BOMB))


@trick(
    "blocks of attachments that are never whole",
    "AQ-R31",
    size=30,
    memory=BASE + 2 * (4 * MiB + 1 * MiB),
    code=5,
)
def unfinished_blocks(attacker: Attacker, n: int) -> None:
    for _ in range(n):
        stream = attacker.say(ENTRY, b"\x04\x00\x00\x80\x80\x0f", fin=False)  # 245,760 bytes
        attacker.pour(stream, b"\x09" + b"\x80\x40" + bytes(240_000))


@trick(
    "acks with a million ranges",
    "AQ-R31",
    "AQ-R16",
    size=1,
    memory=BASE + 3 * MiB,
    options={"to": "client"},
    code=5,
)
def ack_bomb(attacker: Attacker, n: int) -> None:
    block = b"\x81\x01" * 400_000
    for _ in range(n):
        stream = attacker.say(ENTRY, b"\x08\x80\xea\x30", fin=False)
        attacker.pour(stream, block)


@trick(
    "acks with all the ranges that fit",
    "AQ-R16",
    size=1,
    memory=BASE + 20 * 256 * KiB,
    options={"to": "client"},
    code=2,
)
def large_ack(attacker: Attacker, n: int) -> None:
    for _ in range(n):
        stream = attacker.say(ENTRY, b"\x08\x80\x80\x0f", fin=False)  # 245,760 bytes
        attacker.pour(stream, b"\x81\x01" * 122_880)


# ------------------------------------------------------------ numbers


@trick("acks what was never sent", "AQ-R16", size=5, memory=BASE, code=2, options={"to": "client"})
def acks_unsent(attacker: Attacker, n: int) -> None:
    for number in range(n):
        attacker.say(ENTRY, codec.encode_ack_reliable((number, 1)))


@trick(
    "acks datagrams that were never sent",
    "AQ-R15",
    size=5,
    memory=BASE,
    code=2,
    options={"to": "client"},
)
def acks_unsent_datagrams(attacker: Attacker, n: int) -> None:
    attacker.send(b"x", mode=Mode.UNRELIABLE)
    for _ in range(n):
        attacker.say(ENTRY, codec.encode_ack_nack_unreliable(0, (2,)))


@trick("acks the same again and again", "AQ-R16", size=400, memory=BASE, options={"to": "client"})
def acks_again(attacker: Attacker, n: int) -> None:
    for _ in range(5):
        attacker.send(b"x")
    stream = attacker.say(ENTRY, fin=False)
    for _ in range(n):
        attacker.more(stream, codec.encode_ack_reliable((0, 5)))


@trick("leaves holes in the numbers", "AQ-R31", size=150, memory=BASE + 400 * KiB, code=5)
def holes(attacker: Attacker, n: int) -> None:
    stream = attacker.say(ENTRY, fin=False)
    for number in range(n):
        attacker.pour(stream, message(2 * number))
        attacker.take_all()


@trick("uses a number twice", "AQ-R13", size=3, memory=BASE, code=2)
def number_twice(attacker: Attacker, n: int) -> None:
    for _ in range(n):
        attacker.say(ENTRY, message(7))


@trick("announces datagrams one by one", "AQ-R17", "AQ-38", size=400, memory=BASE)
def announcements(attacker: Attacker, n: int) -> None:
    first = attacker.say(ENTRY, fin=False)
    second = attacker.say(codec.encode_route_to(8), fin=False)
    for _ in range(n):
        for stream in (first, second):
            attacker.more(stream, codec.encode_sent_unreliable(1))
        attacker.now += 0.0001
    attacker.wait(2)


@trick("announces more than there are numbers", "AQ-R17", size=3, memory=BASE, code=2)
def announced_too_much(attacker: Attacker, n: int) -> None:
    stream = attacker.say(ENTRY, fin=False)
    for _ in range(n):
        attacker.more(stream, codec.encode_sent_unreliable(2**64 - 1))


# ------------------------------------------------------------ streams and bytes


@trick("empty streams", "AQ-R7", size=500, memory=BASE)
def empty_streams(attacker: Attacker, n: int) -> None:
    for _ in range(n):
        attacker.say()
    assert attacker.core.snapshot()["streams_in"] == 0


@trick("streams opened and reset at once", "AQ-11", size=500, memory=BASE)
def resets(attacker: Attacker, n: int) -> None:
    half = message(0, bytes(5000))[:3000]
    for _ in range(n):
        attacker.reset(attacker.say(ENTRY, half, fin=False))
    state = attacker.core.snapshot()
    assert state["streams_in"] == state["budget_used_bytes"] == 0


@trick("one byte at a time", "AQ-10", size=2000, memory=BASE)
def byte_by_byte(attacker: Attacker, n: int) -> None:
    whole = ENTRY + message(0, bytes(n), ((b"key", b"value"),))
    stream = attacker.say(fin=False)
    for byte in whole:
        attacker.more(stream, bytes((byte,)))
    assert len(attacker.take_all()) == 1


@trick("a flood of VERSION and ACK_VERSION", "AQ-R8", size=500, memory=BASE)
def prelude_flood(attacker: Attacker, n: int) -> None:
    stream = attacker.say(fin=False)
    before = attacker.answered
    for _ in range(n):
        attacker.more(stream, codec.VERSION + codec.ACK_VERSION)
    assert attacker.answered == before


@trick("CONNECTION_HEADERS again and again", "AQ-R10", size=5, memory=BASE, code=2)
def headers_flood(attacker: Attacker, n: int) -> None:
    for _ in range(n):
        attacker.say(codec.encode_connection_headers(()))


@trick("a VERSION that never ends", "AQ-R5", size=3, memory=BASE, code=3)
def endless_version(attacker: Attacker, n: int) -> None:
    for _ in range(n):
        attacker.say(codec.VERSION[:16], b"\xff\xff\x7f", bytes(1000), fin=False)


@trick(
    "bytes behind a ROUTE_TO that waits for the headers",
    "AQ-R10",
    size=30,
    memory=BASE + 2 * 64 * 16 * KiB,
    options={"accept": False},
)
def before_the_gate(attacker: Attacker, n: int) -> None:
    for number in range(n):
        attacker.say(ENTRY, message(number, bytes(16_000)))
        if attacker.slots < 2:
            break
    assert attacker.core.snapshot()["streams_in"] <= SMALL.flow.streams


@trick("never reads: messages without end", "AQ-R31", size=4000, memory=BASE + 2 * 4 * MiB)
def unread_messages(attacker: Attacker, n: int) -> None:
    stream = attacker.say(ENTRY, fin=False)
    for number in range(n):
        if not attacker.more(stream, message(number)):
            break
    assert attacker.core.snapshot()["budget_used_bytes"] <= SMALL.flow.receive_budget


@trick("never acknowledges", "AQ-R31", size=600, memory=BASE + 2 * MiB, options={"to": "client"})
def never_acks(attacker: Attacker, n: int) -> None:
    half = attacker.core.entrypoint
    assert isinstance(half, SenderHalf)
    for _ in range(n):
        if not half.writable:
            break  # who sends waits here
        attacker.send(
            b"",
            attachments=[Attach(keep_sender=True, is_oneshot=False)]
            if attacker.core.channels < 100
            else (),
        )
    assert half.sent <= SMALL.limits.unacknowledged


@trick(
    "takes no acks",
    "AQ-R30",
    "AQ-36",
    size=40_000,
    memory=BASE + 3 * (1 * MiB + STALLED_ALLOWANCE),
    code=5,
)
def takes_no_acks(attacker: Attacker, n: int) -> None:
    attacker.reads = False
    stream = attacker.say(ENTRY, fin=False)
    for number in range(0, n, 100):
        base = 2 * number
        attacker.pour(
            stream, b"".join(message(base + 2 * k + (1 if k % 2 else 0)) for k in range(100))
        )
        attacker.take_all()
        attacker.wait(0.03)


# ------------------------------------------------------------ datagrams


@trick(
    "datagrams before the headers",
    "AQ-R10",
    size=300,
    memory=BASE + 64 * 2 * KiB,
    options={"accept": False},
)
def early_datagrams(attacker: Attacker, n: int) -> None:
    for number in range(n):
        attacker.datagram(ENTRY, message(number, bytes(1000)))
    assert len(attacker.core._reader.arrivals._early) <= DEFAULT.limits.early_datagrams


@trick("datagrams that nobody reads", "AQ-R31", "AQ-39", size=2000, memory=BASE + 2 * MiB)
def late_datagrams(attacker: Attacker, n: int) -> None:
    for number in range(n):
        attacker.datagram(ENTRY, message(number, bytes(1000)))
        attacker.datagram(ENTRY, message(number, bytes(1000)))
    assert attacker.receiver.queue.charged <= SMALL.flow.channel_receive_bytes


@trick("datagrams with holes", "AQ-R31", size=600, memory=BASE + 2 * MiB)
def datagram_holes(attacker: Attacker, n: int) -> None:
    for number in range(n):
        attacker.datagram(ENTRY, message(3 * number, b""))
        attacker.take_all()


@trick(
    "datagrams to ever new channels",
    "AQ-R31",
    "AQ-R25",
    size=400,
    memory=BASE + channels(500),
    code=5,
)
def datagrams_to_new_channels(attacker: Attacker, n: int) -> None:
    for index in range(1, n + 1):
        attacker.datagram(codec.encode_route_to(index << 3), message(0, b"x"))


@trick("datagrams of nonsense", "AQ-R11", size=5, memory=BASE, code=2)
def datagram_nonsense(attacker: Attacker, n: int) -> None:
    for _ in range(n):
        attacker.datagram(ENTRY, codec.CANCEL_SENDER)


# ------------------------------------------------------------ the bounds


@pytest.mark.requirement("AQ-R30")
@pytest.mark.parametrize("name", TRICKS.cases())
def test_a_trick_costs_little_and_ends_with_its_code(name: str) -> None:
    entry = TRICKS[name]

    def make() -> Attacker:
        return Attacker(entry.config, **entry.options)

    attacker = entry.attack(make)
    assert attacker.close_code == entry.code
    if entry.code is not None:
        core = attacker.core
        assert core.error is not None
        assert core.channels == 0
        assert core._shared.outgoing.queued == 0
        before = attacker.applied
        core.receive_stream(10**6, ENTRY + message(0), True, attacker.now)
        core.receive_datagram(ENTRY + message(0), attacker.now)
        attacker._apply()
        assert attacker.applied == before, "nothing after the close matters"


def test_there_are_tricks_enough() -> None:
    assert len(TRICKS) >= 35
    assert {entry.code for entry in TRICKS.values()} == {None, 2, 3, 5}
