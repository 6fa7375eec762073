"""Inputs to begin with: every vector and a conversation of each kind, so that a fuzzer need not
find the 28 bytes of VERSION by chance.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Final

from aqueduct._speedups import channels as codec
from aqueduct._speedups.arrow.writer import BatchWriter
from aqueduct.arrow.layout import common_columns
from tests.arrow.strategies import make_batch
from tests.arrow.test_hostile import mutated
from tests.fuzz import arrow, wire
from tests.reference import bpmux as bpmux_model
from tests.reference import codec as model
from tests.reference import control_streams as control_model
from tests.reference import reactivesocket as reactive_model
from tests.reference import relink as relink_model
from tests.speedups.control_streams.sequences import CARRIERS as CONTROL_CARRIERS
from tests.speedups.control_streams.sequences import VECTORS as CONTROL_VECTORS
from tests.speedups.control_streams.sequences import vector_options
from tests.speedups.reactivesocket.test_frames import VECTORS as REACTIVE_VECTORS
from tests.speedups.reactivesocket.test_frames import is_framed
from tests.speedups.relink.test_packets import VECTORS as RELINK_VECTORS
from tests.speedups.relink.test_packets import id_sizes
from tests.speedups.strategies import VECTORS
from tests.speedups.test_bpmux import VECTORS as BPMUX_VECTORS

__all__ = ["SEEDS"]


def step(name: str, *values: int | bytes) -> bytes:
    """One step of the `wire` target: its name, and what it reads."""
    parts = (value if isinstance(value, bytes) else bytes([value & 255]) for value in values)
    return bytes([wire.STEPS.index(name)]) + b"".join(parts)


def routed(channel: int, *frames: bytes, slot: int = 1, fin: bool = False) -> bytes:
    """A stream that begins with ROUTE_TO, and a frame in each further step."""
    begun = step("say_route_and_frames", slot | (fin and not frames) << 6, channel)
    last = len(frames) - 1
    said = (step("say_frame", slot | (fin and at == last) << 6, f) for at, f in enumerate(frames))
    return begun + b"".join(said)


def datagram(channel: int, *frames: bytes) -> bytes:
    """VERSION, ROUTE_TO and frames in a datagram."""
    return step("datagram", 3 | len(frames) << 2, channel, *frames)


def message(number: int, size: int = 5) -> bytes:
    return bytes([wire.FRAMES.index("MESSAGE"), number, size])


def carrying(number: int, *channels: int, size: int = 1) -> bytes:
    """A message with channels; its payload has 40 times ``size`` bytes."""
    attached = b"".join(bytes([channel, 0]) for channel in channels)
    kind = wire.FRAMES.index("MESSAGE with all")
    return bytes([kind, number, len(channels)]) + attached + bytes([size, 4])


def frame(name: str, *values: int) -> bytes:
    return bytes([wire.FRAMES.index(name), *(values or (0,))])


def acks(*lengths: int) -> bytes:
    return frame("ACK_RELIABLE", 0, len(lengths) - 1, *lengths)


def settles(channel: int, *lengths: int) -> bytes:
    return frame("ACK_NACK_UNRELIABLE", channel, len(lengths) - 1, *lengths)


def wait(kind: int) -> bytes:
    """Time, by ``wire.WAITS``, and then everything moves."""
    return step("wait", kind | 64)


RUN, ACK_TIME, LONG = wait(0), wait(2), wait(4)
TAKES = b"".join(step("take", half) for half in (0, 1, 2, 3, 0, 1))

# The client's channels: 8 and 16 it sends on, 12 and 20 once, 2 and 10 it reads, 6 once.
SERVER_TALKS: Final = (
    routed(0, message(0), message(1), frame("FINISH_SENDER", 2), fin=True) + ACK_TIME + TAKES,
    routed(0, carrying(0, 8, 2, 12)) + RUN + TAKES + routed(8, message(0), message(1), slot=2),
    # Messages before the one that carries their channel, and its loss.
    routed(8, message(0), slot=2) + ACK_TIME + routed(0, carrying(0, 8)) + RUN + TAKES,
    routed(8, message(0), frame("FORGET_CHANNEL"), slot=2) + routed(0, carrying(0, 8)) + TAKES,
    routed(8, frame("CANCEL_SENDER"), slot=2) + RUN + routed(8, frame("FORGET_CHANNEL"), slot=3),
    routed(12, message(0), slot=2) + RUN + routed(12, frame("FORGET_CHANNEL"), slot=3) + LONG,
    # Datagrams: in time, announced, late, twice, evicted.
    datagram(8, message(0), message(1)) + routed(8, frame("SENT_UNRELIABLE", 4)) + LONG + TAKES,
    datagram(0, message(0), message(0)) + datagram(0, message(2, 200)) + TAKES + LONG,
    b"".join(datagram(0, message(n, 250), message(n + 1, 250)) for n in range(0, 20, 2)) + TAKES,
    datagram(0, carrying(0, 8, size=20)) + datagram(0, carrying(1, 16, size=20)) + RUN + TAKES,
    routed(12, frame("SENT_UNRELIABLE", 1), frame("FINISH_SENDER", 0), fin=True) + LONG + LONG,
    datagram(12, message(0)) + routed(12, frame("SENT_UNRELIABLE", 1)) + LONG + TAKES,
    # Ends.
    routed(0, carrying(0, 8)) + TAKES + routed(8, message(0), carrying(1, 16), message(2), slot=2)
    + RUN + routed(8, frame("CANCEL_SENDER"), slot=3) + ACK_TIME + TAKES,
    routed(0, message(3), frame("FINISH_SENDER", 4), fin=True) + RUN + routed(0, message(1), slot=2)
    + routed(0, message(0), slot=3) + routed(0, message(2), slot=4) + TAKES + ACK_TIME,
    routed(0, carrying(0, 8, 2)) + RUN + step("end_half", 0) + routed(0, message(1), slot=2) + LONG,
    # What we send on channels of theirs.
    routed(0, carrying(0, 2, 6)) + RUN + TAKES + step("send", 0, 8, 9) + step("send", 1, 8, 9)
    + routed(2, acks(0, 1), frame("CLOSE_RECEIVER"), slot=3, fin=True) + ACK_TIME,
    routed(0, carrying(0, 2)) + RUN + TAKES + step("send", 32, 9, 9) + step("send", 32, 9, 9) + LONG
    + routed(2, settles(2, 1, 1), slot=3) + LONG + routed(2, acks(0, 1), slot=4) + LONG,
    # What is not allowed.
    routed(0, message(0), message(0)),
    routed(0, message(3), frame("FINISH_SENDER", 2)),
    routed(0, frame("FINISH_SENDER", 5)) + routed(0, frame("SENT_UNRELIABLE", 1), slot=2),
    routed(0, frame("FINISH_SENDER", 5)) + routed(0, message(7), slot=2),
    routed(0, carrying(0, 8), carrying(1, 8)),
    routed(0, carrying(0, 2), frame("SENT_UNRELIABLE", 255), frame("SENT_UNRELIABLE", 1)),
    routed(1, message(0)),
    routed(12, frame("FINISH_SENDER", 0), fin=True) + LONG,
    routed(12, frame("SENT_UNRELIABLE", 1), message(0)),
    datagram(12, message(1)),
    # Ended channels, none beside another.
    b"".join(routed(n, frame("CANCEL_SENDER"), slot=2, fin=True) for n in range(8, 140, 16)) + LONG,
    # A block of headers that comes in pieces, and does not come.
    routed(0) + step("say_bytes", 1 | 8 << 3, b"\x04\x00\x20\x01k\x1daa") + RUN
    + step("say_bytes", 1 | 3 << 3, b"aaa") + RUN + step("hostile_control", 64 | 1) + LONG,
    # Messages that find no room, until they do.
    b"".join(routed(0, carrying(n, size=30), slot=1 + n) for n in range(5)) + RUN + TAKES + TAKES,
    routed(0, carrying(0, 8, 16), slot=0) + TAKES
    + b"".join(routed(8 << n % 2, carrying(n, size=30), slot=1 + n) for n in range(6))
    + RUN + TAKES + step("hostile_control", 64 | 3) + TAKES + TAKES,
    step("placement", 64) + routed(0, frame("a head", 0, 230, 0, 3)) + RUN
    + step("say_bytes", 1 | 30 << 3, bytes(30)) + RUN + step("hostile_control", 64 | 1) + LONG,
    routed(0, frame("a head", 0, 230, 0, 0x90)) + RUN + step("say_bytes", 1 | 30 << 3, bytes(30))
    + RUN + step("hostile_control", 64 | 1) + LONG,
    b"".join(step("placement", how) + routed(0, carrying(n, size=60), slot=n)
             for n, how in enumerate((64, 128, 192, 0))) + RUN + TAKES,
    routed(8, carrying(0, size=44), slot=2) + routed(16, carrying(0, size=44), slot=3) + RUN
    + routed(0, carrying(0, 8), carrying(1, 16)) + TAKES + RUN + TAKES + LONG,
)  # fmt: skip
"""What a hostile client says; our side is the server."""

GATE_TALKS: Final = tuple(
    b"".join(said) + greeting + step("whole_connection", 0) + RUN + TAKES
    for greeting in (
        step("say_frame", 2, frame("VERSION"))
        + step("say_frame", 2 | 64, frame("CONNECTION_HEADERS", 0, 5)),
        step("say_route_and_frames", 2 | 128, 0)
        + step("say_frame", 3 | 64, frame("CONNECTION_HEADERS", 0, 5)),
    )
    for said in (
        [datagram(0, message(n)) for n in range(4)],
        [step("say_route_and_frames", n | 128 | 64 | 8, 0, message(n)) for n in range(3, 6)],
        [step("say_route_and_frames", 4 | 128, 0), step("hostile_control", 64 | 4)],
        [step("say_route_and_frames", 4 | 8, 0, message(0))],
    )
)
"""What a client says before its headers, while the server has not answered."""

# Ours: 0 and 8 we send on, 4 once, 2 and 10 we read.
CLIENT_TALKS: Final = (
    step("send", 0, 16 | 32 | 1, 9) + RUN + routed(0, acks(0, 1)) + RUN + LONG,
    step("send", 0, 17, 9) + step("send", 1, 0, 9) + routed(0, frame("CLOSE_RECEIVER")) + LONG,
    step("send", 32, 17, 9) + step("send", 32, 17, 9) + LONG + routed(0, settles(0, 1, 1)) + LONG,
    step("send", 32, 17, 9) + LONG + routed(0, settles(0, 0, 1)) + LONG,
    step("send", 0, 17, 9) + step("send", 1, 17, 9) + step("send", 2, 17, 9) + RUN
    + routed(8, acks(0, 1), slot=2) + routed(0, frame("CLOSE_RECEIVER"), slot=3) + LONG + LONG,
    step("send", 0, 17, 9) + RUN + routed(8, frame("CLOSE_RECEIVER"), slot=2) + LONG
    + routed(8, message(0), slot=3) + routed(8, acks(0, 1), slot=4) + LONG + LONG,
    step("send", 0, 1, 9) + RUN + routed(2, message(0), carrying(1, 3, 9, 1), slot=2) + TAKES
    + routed(9, message(0), slot=3) + routed(9, frame("FORGET_CHANNEL"), slot=4) + TAKES + LONG,
    step("send", 0, 1, 9) + RUN + routed(2, frame("FINISH_SENDER", 0), slot=2, fin=True) + LONG
    + routed(2, frame("CANCEL_SENDER"), slot=2) + LONG + LONG,
    step("send", 0, 4 | 1, 9) + step("send", 0, 4 | 17, 9) + step("send", 1, 0, 3) + RUN
    + routed(0, acks(0, 2)) + routed(4, acks(0, 1), frame("CLOSE_RECEIVER"), slot=2) + LONG,
    step("hostile_control", 128) + step("send", 0, 0, 200) * 5 + step("send", 16, 0, 200) * 4
    + step("send", 128, 0, 200) + step("hostile_control", 129) + RUN + step("hostile_control", 0)
    + step("end_half", 64) + RUN + routed(0, acks(0, 9), slot=2) + LONG,
    step("send", 16, 0, 40) * 6 + step("end_half", 0) + RUN + step("hostile_control", 2) + LONG,
    step("send", 16, 0, 40) * 6 + step("end_half", 64) + RUN + LONG
    + routed(0, acks(0, 6), frame("CLOSE_RECEIVER"), slot=2, fin=True) + LONG,
    step("send", 0, 0, 250) * 4 + step("whole_connection", 64) + RUN + wait(5),
    step("send", 32, 1, 9) + step("whole_connection", 77) + TAKES,
)  # fmt: skip
"""What a hostile server answers; our side is the client and speaks first."""

RANDOM_SEEDS: Final = 300
WHOLE, BYTE_BY_BYTE = b"\x00", b"\x14" + bytes(20)


def codec_seeds() -> Iterator[bytes]:
    """The vectors, valid and not, whole and byte by byte, under each set of limits."""
    for vector in (*VECTORS["valid"], *VECTORS["invalid"]):
        sequence = bytes.fromhex(vector["hex"])
        side = vector["context"]["from"] == "server"
        datagram = vector["context"]["carrier"] == "datagram"
        for settings in (0, 4, 8, 16, 48, 64):
            for plan in (WHOLE, BYTE_BY_BYTE):
                yield bytes([settings | side | datagram << 1]) + plan + sequence
    large = b"".join(codec.encode_message(0, bytes(400), [(b"key", bytes(60))], [(8, ())]))
    for how in range(0, 256, 5):
        yield b"\x30\x1e" + bytes([how]) * 30 + model.encode([("ROUTE_TO", 0)]) + large


def random_seeds(length: int) -> Callable[[], Iterator[bytes]]:
    """Steps at random: the operations of an input are chosen by its bytes alone."""

    def seeds() -> Iterator[bytes]:
        for seed in range(RANDOM_SEEDS):
            rng = random.Random(seed)
            # Small bytes are small numbers, and those name what exists.
            yield bytes(rng.choice((rng.randrange(256), rng.randrange(16))) for _ in range(length))

    return seeds


def wire_seeds() -> Iterator[bytes]:
    """The vectors as bytes of a stream, in a connection that greeted and in one that did not; and
    conversations, each alone and several after one another.
    """
    for vector in (*VECTORS["valid"], *VECTORS["invalid"]):
        sequence = bytes.fromhex(vector["hex"])
        side = vector["context"]["from"] == "server"  # then we are the client
        for settings in (0, 128):
            for prelude in (b"", codec.VERSION):
                whole = prelude + sequence
                parts = [whole[at : at + 31] for at in range(0, len(whole), 31)][:12]
                said = b"".join(step("say_bytes", 1 | len(part) << 3, part) for part in parts)
                yield bytes([settings | (not side)]) + said + step("say_end", 1)
    talks = [bytes([1]) + talk for talk in SERVER_TALKS] + [bytes([0]) + t for t in CLIENT_TALKS]
    for talk in GATE_TALKS:
        yield bytes([1 | 128]) + talk
        yield bytes([1 | 128 | 1 << 1]) + talk
    for config in range(4):
        for chunk in range(4):
            for talk in talks:
                yield bytes([talk[0] | config << 1 | chunk << 3]) + talk[1:]
    rng = random.Random(1)
    for _ in range(4 * RANDOM_SEEDS):
        side = rng.randrange(2)
        mixed = [rng.choice((CLIENT_TALKS, SERVER_TALKS)[side]) for _ in range(rng.randrange(2, 6))]
        settings = side | rng.randrange(4) << 1 | rng.randrange(4) << 3
        yield (bytes([settings]) + b"".join(mixed))[:480]
    yield from random_seeds(120)()


def bpmux_seeds() -> Iterator[bytes]:
    """The vectors, alone and behind one another, in several pieces; sensible chunks at random."""
    plans = (b"\x00", b"\x14" + bytes(20), b"\x14" + b"\xc5" * 20, b"\x0a" + b"\x43\x42" * 5)
    known = [
        bytes.fromhex(vector["hex"])
        for vector in (*BPMUX_VECTORS["valid"], *BPMUX_VECTORS["invalid"])
        if len(vector["hex"]) < 300
    ]
    known += [
        b"".join(bytes.fromhex(text) for what, text in case["steps"] if what == "recv")
        for case in (*BPMUX_VECTORS["sessions"], *BPMUX_VECTORS["bad_sessions"])
    ]
    for plan in plans:
        for data in known:
            yield b"\x00" + plan + data
    rng = random.Random(2)
    for _ in range(RANDOM_SEEDS):
        data = b"".join(model_chunk(rng) for _ in range(rng.randrange(1, 12)))
        yield b"\x00" + rng.choice(plans) + data[:300]
    yield from (b"\x01" + seed for seed in random_seeds(90)())


def model_chunk(rng: random.Random) -> bytes:
    """A chunk for one of those that the target opens, or a new one."""
    kind = rng.choice(bpmux_model.TYPES)
    number = rng.randrange(6)
    size = rng.randrange(6)
    what = rng.randrange(8)
    return bpmux_model.encode(
        bpmux_model.Chunk(
            kind,
            number,
            bytes(size) if what < 5 else None,
            rng.randrange(300) if what in (0, 5) else None,
            what == 6,
            bytes(size) if what in (4, 7) and kind != "In-Request" else None,
            total=rng.choice([0, 0, size + 3]) if what in (1, 2) else 0,
        )
    )


def relink_seeds() -> Iterator[bytes]:
    """The vectors, alone and behind one another, in several pieces; sensible packets at random."""
    plans = (b"\x00", b"\x14" + bytes(20), b"\x14" + b"\xc5" * 20, b"\x0a" + b"\x43\x42" * 5)
    known = [
        (id_sizes(vector["context"]), bytes.fromhex(vector["hex"]))
        for vector in (*RELINK_VECTORS["valid"], *RELINK_VECTORS["invalid"])
        if vector["context"]["what"] == "packets" and len(vector["hex"]) < 500
    ]
    for plan in plans:
        for limits in range(2):
            for (sender, receiver), data in known:
                yield bytes([limits << 2, sender | receiver << 4]) + plan + data
    rng = random.Random(3)
    for _ in range(RANDOM_SEEDS):
        sender, receiver = rng.randrange(9), rng.randrange(9)
        data = b"".join(relink_packet(rng, sender, receiver) for _ in range(rng.randrange(1, 8)))
        start = bytes([rng.randrange(4) << 2, sender | receiver << 4])
        yield start + rng.choice(plans) + data[:300]
    yield from (bytes([1 | rng.choice([0, 0xEC])]) + seed for seed in random_seeds(60)())
    for _ in range(3 * RANDOM_SEEDS):
        how = rng.randrange(16)
        data = b"".join(relink_packet(rng, 1, 1) for _ in range(rng.randrange(1, 12)))
        resume = bytes.fromhex("6000000000000000") if how & 4 and rng.random() < 0.7 else b""
        yield bytes([2 | how << 2]) + rng.choice(plans) + (known_acks(rng) + resume + data)[:390]
    yield from (bytes([3 | rng.randrange(2) << 2]) + seed for seed in random_seeds(380)())


def known_acks(rng: random.Random) -> bytes:
    """Acknowledgements of messages that the target has sent, as a peer has them for a resume."""
    said = [
        relink_model.Packet("sequence-ack", kind, False, (channel,), rng.randint(0, last))
        for channel, last in ((1, 2), (2, 0), (3, 0))
        for kind in rng.sample(relink_model.TYPES["sequence-ack"][:3], rng.randrange(3))
    ]
    return b"".join(relink_model.encode(packet, 1) for packet in said)


def relink_packet(rng: random.Random, sender: int, receiver: int) -> bytes:
    """A packet of small numbers."""
    name = rng.choice((*relink_model.FORMATS, "message", "message", "general"))
    kind = "" if name == "message" else rng.choice(relink_model.TYPES[name])
    multicast = rng.random() < 0.3 and name != "general"
    id_size = receiver if name.endswith("-ack") else sender
    channel = rng.randrange(6) if id_size else 0
    channels = (channel,) * (rng.randrange(4) if multicast else name != "general")
    packet = relink_model.Packet(
        name,
        kind,
        multicast,
        channels,
        rng.randrange(9) if name.startswith("sequence") else -1,
        tuple(bytes(rng.randrange(20)) for _ in range(rng.randrange(4))),
        rng.random() < 0.3,
        rng.random() < 0.3,
    )
    return relink_model.encode(packet, id_size)


def reactivesocket_seeds() -> Iterator[bytes]:
    """The vectors to the codec and to a core, in several pieces; frames at random; two peers."""
    plans = (b"\x00", b"\x14" + bytes(20), b"\x14" + b"\x85" * 20, b"\x0a" + b"\x43\xc2" * 5)
    known = [
        (is_framed(vector), bytes.fromhex(vector["hex"]))
        for vector in (*REACTIVE_VECTORS["valid"], *REACTIVE_VECTORS["invalid"])
    ]
    known += [(True, response_frames(case["frames"])) for case in REACTIVE_VECTORS["responses"]]
    for plan in plans:
        for framed, data in known:
            for limit in range(2):
                yield bytes([(framed | limit << 1) << 2]) + plan + data
            if framed:
                for role in (2, 7, 6):
                    yield bytes([2 | role << 2]) + plan + data
    rng = random.Random(4)
    for _ in range(3 * RANDOM_SEEDS):
        data = b"".join(reactive_frame(rng) for _ in range(rng.randrange(1, 9)))
        yield bytes([2 | rng.randrange(8) << 2]) + rng.choice(plans) + data[:300]
    for what, seed in enumerate(random_seeds(60)()):
        how = 1 | (what & 1) << 2 if what & 2 else 2 | (8 | what >> 2 & 7) << 2
        yield bytes([how]) + rng.choice(plans) + seed
    yield from (b"\x03" + seed for seed in random_seeds(160)())


def response_frames(cases: list[tuple[bool, bool, bool, str]]) -> bytes:
    """The frames of a scenario, on the second stream that the target requests."""
    return b"".join(
        reactive_model.encode(
            reactive_model.Frame(
                0x20, 3, begin << 6 | end << 5 | complete << 4, data=bytes.fromhex(data)
            )
        )
        for begin, end, complete, data in cases
    )


def reactive_frame(rng: random.Random) -> bytes:
    """A frame for one of the streams that the target opens, or a new one."""
    kind = rng.choice((*reactive_model.TYPES, 0x20, 0x20, 0x20, 0x30))
    stream = 0 if kind == 1 else rng.choice((1, 2, 3, 4, 5, 6, 9, 11))
    flags = rng.choice((0x60, 0x40, 0x20, 0, 0x30, 0x70)) if kind == 0x20 else 0x80
    size = 0 if kind in (0x15, 0x16) else rng.randrange(9)
    frame = reactive_model.Frame(kind, stream, flags, rng.randrange(5), 7, bytes(size))
    return reactive_model.encode(frame)


def control_seeds() -> Iterator[bytes]:
    """The vectors with each limit, in several pieces and held back; long lists of frames."""
    carriers = list(CONTROL_CARRIERS.values())
    plans = (b"\x00", b"\x14" + bytes(20), b"\x14" + b"\x85" * 20, b"\x0a" + b"\x43\xc2" * 5)
    for vector in (*CONTROL_VECTORS["valid"], *CONTROL_VECTORS["invalid"]):
        options = vector_options(vector)
        place = options["from_server"] | carriers.index(options["carrier"]) << 1
        channel = bytes([min(options["channel"] + 1, 255)])
        for plan, more in zip(plans, (0, 0x20, 0xC0, 0x68), strict=True):
            yield bytes([place | more]) + channel + plan + bytes.fromhex(vector["hex"])
    rng = random.Random(5)
    for _ in range(RANDOM_SEEDS):
        frames = [control_frame(rng) for _ in range(rng.randrange(1, 6))]
        start = bytes([rng.randrange(256), rng.randrange(8)])
        yield start + rng.choice(plans) + control_model.encode(frames)


def control_frame(rng: random.Random) -> model.Frame:
    """Any frame, about one of a few channels."""
    name = rng.choice([*control_model.NAMES.values(), "Message", "Message"])
    channel, ranges = rng.randrange(16), tuple(rng.randrange(1, 5) for _ in range(rng.randrange(4)))
    match name:
        case "Version":
            return name, model.TEXT.decode()
        case "ConnectionControl":
            return name, ((b"key", b"value"),) * rng.randrange(3)
        case "Message":
            attached = tuple(rng.sample(range(16), rng.randrange(3)))
            payload = bytes(rng.choice((0, 5, 40)))
            if rng.randrange(2):
                payload = control_model.header_block(((b"key", b"value"),)) + payload
            return name, channel, rng.randrange(3), attached, payload
        case "ChannelControl" | "ClosedChannelLost":
            return name, channel
        case "SentUnreliable" | "FinishSender":
            return name, rng.randrange(3)
    return name, ranges


def arrow_seeds() -> Iterator[bytes]:
    """Sound batches of every schema, as both writers write them, then with a fault or two."""
    chance = random.Random(1)
    for number, schema in enumerate(arrow.SCHEMAS):
        columns = common_columns(schema)
        assert columns is not None
        write = BatchWriter(columns).write
        for size in (0, 1, 3, 9):
            batch = make_batch(schema, size, chance)
            for part in (batch, batch.slice(size // 2)):
                made = write(part)
                assert made is not None
                for payload in (b"".join(made[0]), part.serialize().to_pybytes()):
                    for inside in (0, 1):
                        yield bytes([number << 1 | inside]) + payload
                        yield bytes([number << 1 | inside]) + mutated(payload, chance)


SEEDS: Final[dict[str, Callable[[], Iterator[bytes]]]] = {
    "arrow": arrow_seeds,
    "bpmux": bpmux_seeds,
    "codec": codec_seeds,
    "control-streams": control_seeds,
    "operations": random_seeds(90),
    "reactivesocket": reactivesocket_seeds,
    "relink": relink_seeds,
    "wire": wire_seeds,
}
"""For each target."""
