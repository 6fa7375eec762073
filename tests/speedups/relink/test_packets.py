"""Packets of Relink: every vector, and any packets in any pieces beside a readable model."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aqueduct._speedups.base.buffers import bytes_copied
from aqueduct._speedups.relink import packets as codec
from aqueduct._speedups.relink.packets import PacketDecoder, PacketStep
from aqueduct.errors import FrameError, LimitExceeded, LocalProtocolError
from tests.reference.relink import FORMATS, TYPES, Broken, Limits, Packet, decode, encode

Vector = dict[str, Any]
VECTORS: dict[str, Any] = json.loads(
    (Path(__file__).parents[2] / "vectors" / "relink.json").read_text()
)


def of_packets(kind: str) -> Any:
    vectors = [vector for vector in VECTORS[kind] if vector["context"]["what"] == "packets"]
    return pytest.mark.parametrize("vector", vectors, ids=lambda vector: vector["name"])


def id_sizes(context: dict[str, Any]) -> tuple[int, int]:
    """Of the sender and the receiver."""
    sizes = context["connector_id_size"], context["listener_id_size"]
    return sizes if context["from"] == "connector" else sizes[::-1]


def read_all(decoder: PacketDecoder, pieces: list[bytes]) -> list[Packet]:
    """The packets that are whole after these pieces."""
    read: list[Packet] = []
    read_into(read, decoder, pieces)
    return read


def read_into(read: list[Packet], decoder: PacketDecoder, pieces: list[bytes]) -> None:
    """As ``read_all``; what was read before an error stays in ``read``."""
    parts: list[bytes] = []
    for piece in pieces:
        decoder.feed(piece)
        while (step := decoder.next()) != PacketStep.NOTHING:
            if step == PacketStep.PIECE:
                assert decoder.data is not None
                parts[decoder.part] += decoder.data
                size = decoder.sizes[decoder.part]
                assert len(parts[decoder.part]) + decoder.missing == size
                continue
            name = codec.FORMAT_NAMES[decoder.format]
            if step == PacketStep.DONE:
                assert decoder.part == len(parts)
                assert decoder.missing == 0
                assert tuple(map(len, parts)) == decoder.sizes
            elif name == "message":
                parts = [b""] * len(decoder.sizes)
                continue
            message = name == "message"
            read.append(
                Packet(
                    name,
                    "" if message else codec.TYPE_NAMES[decoder.format][decoder.type],
                    decoder.multicast,
                    decoder.channels,
                    decoder.sequence,
                    tuple(parts) if message else (),
                    message and decoder.type & codec.LONG > 0,
                    message and decoder.type & codec.LARGE > 0,
                )
            )
        assert decoder.consumed == len(piece)


def packet_of(said: Vector) -> Packet:
    """A packet in the words of the vectors."""
    return Packet(
        said["format"],
        said.get("type", ""),
        said.get("multicast", False),
        tuple(said.get("channels", ())),
        said.get("sequence", -1),
        tuple(map(bytes.fromhex, said.get("parts", ()))),
        said.get("long", False),
        said.get("large", False),
    )


def encoded(packet: Packet, id_size: int, **form: bool) -> bytes:
    """What the codec writes for a packet; ``form`` is that of a message, else the shortest."""
    if packet.format == "general":
        return codec.encode_general(TYPES["general"].index(packet.type))
    format_ = FORMATS.index(packet.format)
    if packet.format != "message":
        return codec.encode_packet(
            format_,
            TYPES[packet.format].index(packet.type),
            packet.channels,
            id_size,
            multicast=packet.multicast,
            sequence=packet.sequence if packet.sequence >= 0 else None,
        )
    sizes = [len(part) for part in packet.parts]
    head = codec.encode_message_head(
        packet.channels, id_size, sizes, multicast=packet.multicast, **form
    )
    return head + b"".join(part + bytes(codec.padding_of(len(part))) for part in packet.parts)


# ----------------------------------------------------------------- the vectors


@pytest.mark.requirement("RL-9")
@pytest.mark.requirement("RL-10")
@pytest.mark.requirement("RL-11")
@pytest.mark.requirement("RL-12")
@pytest.mark.requirement("RL-15")
@pytest.mark.requirement("RL-R1")
@of_packets("valid")
def test_valid_packets_are_read(vector: Vector) -> None:
    data, sizes = bytes.fromhex(vector["hex"]), id_sizes(vector["context"])
    wanted = [packet_of(said) for said in vector["decoded"]]
    for pieces in ([data], [data[at : at + 1] for at in range(len(data))]):
        decoder = PacketDecoder(*sizes)
        assert read_all(decoder, pieces) == wanted
        decoder.end()
        assert decoder.packets == len(wanted)
        trailing = read_all(decoder, [bytes.fromhex("4000000000000000")])
        assert trailing == [Packet("general", "pong")]
    assert read_all(PacketDecoder(*sizes), [data + data]) == wanted * 2


@pytest.mark.requirement("RL-1")
@pytest.mark.requirement("RL-9")
@pytest.mark.requirement("RL-R1")
@pytest.mark.requirement("RL-R2")
@of_packets("valid")
def test_valid_packets_are_written(vector: Vector) -> None:
    sender, receiver = id_sizes(vector["context"])
    packets = [packet_of(said) for said in vector["decoded"]]
    out = b""
    for packet in packets:
        id_size = receiver if packet.format.endswith("-ack") else sender
        out += encoded(packet, id_size, long=packet.long, large=packet.large)
    if vector.get("lenient"):
        assert read_all(PacketDecoder(sender, receiver), [out]) == packets
    else:
        assert out.hex() == vector["hex"]


@pytest.mark.requirement("RL-1")
@of_packets("invalid")
def test_invalid_packets_are_told(vector: Vector) -> None:
    data = bytes.fromhex(vector["hex"])
    for pieces in ([data], [data[at : at + 1] for at in range(len(data))]):
        decoder = PacketDecoder(*id_sizes(vector["context"]))
        with pytest.raises(FrameError) as caught:
            read_all(decoder, pieces)
            decoder.end()
        assert caught.value.truncated == (vector["kind"] == "truncated")
        if vector["kind"] == "malformed":
            assert_stays_broken(decoder, caught.value)


def assert_stays_broken(decoder: PacketDecoder, error: Exception) -> None:
    calls: list[Callable[[], object]] = [
        decoder.next,
        decoder.end,
        partial(decoder.feed, bytes(8)),
        partial(decoder.landed_outside, 1),
    ]
    for call in calls:
        with pytest.raises(type(error)) as again:
            call()
        assert again.value is error


# ----------------------------------------------------------------- beside the model

SIZES = st.one_of(
    st.integers(0, 20), st.sampled_from([255, 4095, 4096, 4097, 65_535, 65_536, 70_001])
)


@st.composite
def packets(draw: Any, sender: int, receiver: int) -> Packet:
    name = draw(st.sampled_from(["general", *FORMATS, "message", "message"]))
    if name == "general":
        return Packet(name, draw(st.sampled_from(TYPES[name])))
    id_size = receiver if name.endswith("-ack") else sender
    ids = st.integers(0, (1 << 8 * id_size) - 1)
    multicast = draw(st.booleans())
    least, most = (0, 5) if multicast else (1, 1)
    channels = tuple(draw(st.lists(ids, min_size=least, max_size=most)))
    if name != "message":
        sequence = -1
        if name.startswith("sequence"):
            sequence = draw(st.sampled_from([0, 1, 77, (1 << 31), (1 << 32) - 1]))
        return Packet(name, draw(st.sampled_from(TYPES[name])), multicast, channels, sequence)
    if draw(st.integers(0, 9)) == 0:
        count = draw(st.integers(250, 300))
        parts = tuple(bytes([at % 251]) * (at % 3) for at in range(count))
    else:
        sizes = draw(st.lists(SIZES, max_size=4))
        parts = tuple(bytes([7 * at & 255]) * size for at, size in enumerate(sizes, 1))
    least_form = Packet(name, "", multicast, channels, -1, parts).shortest
    long, large = draw(st.booleans()), draw(st.booleans())
    return Packet(
        name, "", multicast, channels, -1, parts, least_form.long | long, least_form.large | large
    )


@st.composite
def conversations(draw: Any) -> tuple[list[Packet], int, int]:
    """Packets of one peer, with the id sizes of sender and receiver."""
    sender, receiver = draw(st.integers(0, 8)), draw(st.integers(0, 8))
    return draw(st.lists(packets(sender, receiver), max_size=5)), sender, receiver


def cut(draw: Any, data: bytes) -> list[bytes]:
    places = sorted(draw(st.sets(st.integers(0, len(data)), max_size=12)))
    return [data[a:b] for a, b in zip([0, *places], [*places, len(data)], strict=True)]


@pytest.mark.requirement("RL-1")
@pytest.mark.requirement("RL-10")
@pytest.mark.requirement("RL-13")
@pytest.mark.requirement("RL-14")
@pytest.mark.requirement("RL-15")
@pytest.mark.requirement("RL-R2")
@pytest.mark.requirement("RL-R6")
@given(conversations(), st.sampled_from([0, 0xEE]), st.data())
def test_any_packets_in_any_pieces(
    conversation: tuple[list[Packet], int, int], dirt: int, data: st.DataObject
) -> None:
    sent, sender, receiver = conversation
    wire = b"".join(
        encode(packet, receiver if packet.format.endswith("-ack") else sender, dirt)
        for packet in sent
    )
    assert decode(wire, sender, receiver) == sent
    decoder = PacketDecoder(sender, receiver)
    assert read_all(decoder, cut(data.draw, wire)) == sent
    decoder.end()
    assert decoder.packets == len(sent)


@pytest.mark.requirement("RL-R2")
@pytest.mark.requirement("RL-R3")
@given(conversations())
def test_what_is_written_is_what_the_model_writes(
    conversation: tuple[list[Packet], int, int],
) -> None:
    sent, sender, receiver = conversation
    for packet in sent:
        id_size = receiver if packet.format.endswith("-ack") else sender
        short = packet.shortest if packet.format == "message" else packet
        assert encoded(packet, id_size) == encode(short, id_size)
        longer = encoded(packet, id_size, long=packet.long, large=packet.large)
        assert longer == encode(packet, id_size)


@pytest.mark.requirement("RL-1")
@settings(max_examples=300)
@given(conversations(), st.data())
def test_broken_bytes_are_told_as_the_model_tells(
    conversation: tuple[list[Packet], int, int], data: st.DataObject
) -> None:
    """Bytes are changed, cut and put in; limits are low. Both agree on what came before."""
    sent, sender, receiver = conversation
    wire = bytearray()
    for packet in sent:
        wire += encode(packet, receiver if packet.format.endswith("-ack") else sender)
    for _ in range(data.draw(st.integers(0, 3))):
        at = data.draw(st.integers(0, len(wire)))
        wire[at : at + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=9))
    limits = data.draw(
        st.builds(Limits, st.integers(0, 300), st.integers(0, 70_000), st.integers(0, 70_000))
    )
    wanted, kind = [], ""
    try:
        wanted = decode(bytes(wire), sender, receiver, limits)
    except Broken as broken:
        wanted, kind = broken.packets, broken.kind
    decoder = PacketDecoder(
        sender,
        receiver,
        parts=limits.parts,
        targets=limits.targets,
        message_bytes=limits.message_bytes,
    )
    read: list[Packet] = []
    said = ""
    try:
        read_into(read, decoder, cut(data.draw, bytes(wire)))
        decoder.end()
    except FrameError as error:
        said = "truncated" if error.truncated else "malformed"
    except LimitExceeded:
        said = "limit"
    assert (read, said) == (wanted, kind)


# ----------------------------------------------------------------- enumerations


@pytest.mark.requirement("RL-1")
@pytest.mark.requirement("RL-11")
@pytest.mark.requirement("RL-13")
@pytest.mark.requirement("RL-14")
@pytest.mark.parametrize("first", range(256))
def test_every_first_byte(first: int) -> None:
    """A value that is not used is refused at the first byte, with its rule."""
    decoder = PacketDecoder(1, 1)
    decoder.feed(bytes([first]))
    format_, type_ = (first >> 2 & 7, first >> 5) if first & 1 else (codec.GENERAL, first >> 5)
    names = codec.TYPE_NAMES[format_] if format_ < 6 and (not first & 1 or format_ < 5) else None
    if names is None:
        with pytest.raises(FrameError, match=rf"format {format_}.*RL-1, RL-10") as caught:
            decoder.next()
    elif format_ == codec.MESSAGE or type_ < len(names):
        assert decoder.next() == PacketStep.NOTHING
        return
    else:
        rule = {5: "RL-11", 0: "RL-13", 1: "RL-13", 2: "RL-14", 3: "RL-14"}[format_]
        with pytest.raises(FrameError, match=rf"type {type_}.*RL-1, {rule}") as caught:
            decoder.next()
    assert not caught.value.truncated
    assert_stays_broken(decoder, caught.value)


@pytest.mark.requirement("RL-1")
@pytest.mark.requirement("RL-R3")
@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: codec.encode_general(5), "general packet of type 5"),
        (lambda: codec.encode_general(-1), "general packet of type -1"),
        (lambda: codec.encode_packet(0, 3, [1], 1), "format 0 and type 3"),
        (lambda: codec.encode_packet(1, 5, [1], 1), "format 1 and type 5"),
        (lambda: codec.encode_packet(2, 2, [1], 1, sequence=0), "format 2 and type 2"),
        (lambda: codec.encode_packet(3, 4, [1], 1, sequence=0), "format 3 and type 4"),
        (lambda: codec.encode_packet(4, 0, [1], 1), "format 4"),
        (lambda: codec.encode_packet(0, 0, [1], 1, sequence=0), "sequence forms"),
        (lambda: codec.encode_packet(2, 0, [1], 1), "sequence forms"),
        (lambda: codec.encode_packet(2, 0, [1], 1, sequence=1 << 32), "sequence number is"),
        (lambda: codec.encode_packet(0, 0, [256], 1), "channel id of 1 bytes is 256"),
        (lambda: codec.encode_packet(0, 0, [1], 0), "channel id of 0 bytes is 1"),
        (lambda: codec.encode_packet(0, 0, [-1], 8), "channel id of 8 bytes is -1"),
        (lambda: codec.encode_packet(0, 0, [1], 9), "size of a channel id is 9"),
        (lambda: codec.encode_packet(0, 0, [], 1), "one target, not 0"),
        (lambda: codec.encode_message_head([1, 2], 1, []), "one target, not 2"),
        (lambda: codec.encode_message_head([1], 1, [-1]), "size of a part is -1"),
        (lambda: codec.encode_message_head([1], 1, [1 << 62, 1 << 62]), "2\\^63 bytes"),
        (lambda: codec.padding_of(-1), "size of a part is -1"),
        (lambda: PacketDecoder(9, 0), "size of a channel id is 9"),
        (lambda: PacketDecoder(0, -1), "size of a channel id is -1"),
        (lambda: PacketDecoder(1, 1, parts=1 << 32), "limit of parts is"),
        (lambda: PacketDecoder(1, 1, targets=-1), "limit of targets is"),
        (lambda: PacketDecoder(1, 1, message_bytes=1 << 63), "limit of a message is"),
    ],
)
def test_what_has_no_bytes_is_not_written(call: Callable[[], object], text: str) -> None:
    with pytest.raises(LocalProtocolError, match=text):
        call()


@pytest.mark.requirement("RL-15")
def test_the_shortest_form_is_chosen() -> None:
    for count, size, flags in ((255, 65_535, 0), (256, 0, 1), (1, 65_536, 2), (256, 65_536, 3)):
        head = codec.encode_message_head([1], 1, [size] * count)
        decoder = PacketDecoder(1, 1)
        decoder.feed(head)
        assert decoder.next() == PacketStep.PACKET
        assert decoder.type == flags
        assert decoder.sizes == (size,) * count
        assert len(head) % 8 == 0
    assert [codec.padding_of(size) for size in range(9)] == [0, 7, 6, 5, 4, 3, 2, 1, 0]


# ----------------------------------------------------------------- limits and memory


def assert_refused(decoder: PacketDecoder, data: bytes, text: str) -> None:
    """The last byte, and no earlier one, is what is refused."""
    assert read_all(decoder, [data[at : at + 1] for at in range(len(data) - 1)]) == []
    with pytest.raises(LimitExceeded, match=text) as caught:
        read_all(decoder, [data[-1:]])
    assert_stays_broken(decoder, caught.value)


@pytest.mark.requirement("RL-R6")
def test_limits_hold_as_soon_as_something_is_announced() -> None:
    head = bytes.fromhex
    # The number of parts is short, in the header, or long.
    assert_refused(PacketDecoder(1, 1, parts=2), head("11030100"), r"3 parts.*Relink\.parts")
    assert_refused(PacketDecoder(1, 1, parts=2), head("31000100 03000000"), r"Relink\.parts")
    assert_refused(
        PacketDecoder(1, 1, targets=2), head("13000000 03000000"), r"3 targets.*Relink\.targets"
    )
    assert_refused(
        PacketDecoder(1, 1, message_bytes=9), head("11030100 05000500"), r"Relink\.message_bytes"
    )
    # Sizes that are more than 2^64 in all.
    large = head("5102010000000000") + b"\xff" * 7 + b"\x7f" + b"\xff" * 8
    assert_refused(PacketDecoder(1, 1), large, r"Relink\.message_bytes")
    allowed = PacketDecoder(1, 1, parts=3, targets=3, message_bytes=10)
    message = Packet("message", "", True, (1, 2, 3), -1, (b"12345", b"", b"67890"))
    assert read_all(allowed, [encode(message, 1)]) == [message]


@pytest.mark.requirement("RL-12")
def test_targets_without_an_id_are_bounded() -> None:
    """Their count is all that comes for them."""
    most = Packet("channel-op", "close", True, (0,) * 65_536)
    assert read_all(PacketDecoder(0, 0), [encode(most, 0)]) == [most]
    data = bytes.fromhex("47000000 01000100")
    assert_refused(PacketDecoder(0, 0), data, r"65537 targets that have no id.*Relink\.targets")


def test_what_is_only_announced_takes_no_memory() -> None:
    for start in (
        bytes.fromhex("710001 00 ffffffff") + bytes(8),
        bytes.fromhex("0b000000 ffffffff"),
    ):
        decoder = PacketDecoder(1, 1)
        decoder.feed(start)
        tracemalloc.start()
        try:
            assert decoder.next() == PacketStep.NOTHING
            decoder.feed(bytes(1000))
            assert decoder.next() == PacketStep.NOTHING
            assert tracemalloc.get_traced_memory()[1] < 8192
        finally:
            tracemalloc.stop()


def test_a_large_head_that_straddled_is_given_back() -> None:
    message = Packet("message", "", False, (1,), -1, (b"",) * 100_000, True, False)
    data = encode(message, 1)
    decoder = PacketDecoder(1, 1)
    tracemalloc.start()
    try:
        read = read_all(decoder, [data[:150_000], data[150_000:]])
        assert read == [message]
        del read
        read_all(decoder, [bytes(8)])
        assert tracemalloc.get_traced_memory()[0] < 100_000
    finally:
        tracemalloc.stop()


# ----------------------------------------------------------------- pieces


@pytest.mark.requirement("RL-15")
def test_large_pieces_are_views_and_small_ones_copies() -> None:
    head = codec.encode_message_head([1], 1, [5000, 4095, 8])
    data = head + bytes(5000) + bytes(4095 + 1) + b"12345678"
    decoder = PacketDecoder(1, 1)
    before = bytes_copied()
    decoder.feed(data)
    assert decoder.next() == PacketStep.PACKET
    assert (decoder.part, decoder.missing, decoder.data) == (0, 5000, None)
    assert decoder.next() == PacketStep.PIECE
    assert isinstance(decoder.data, memoryview)
    assert decoder.data.obj is data
    assert bytes_copied() == before
    assert decoder.next() == PacketStep.PIECE
    assert isinstance(decoder.data, bytes)
    assert (decoder.part, len(decoder.data)) == (1, 4095)
    assert decoder.next() == PacketStep.PIECE
    assert (decoder.part, decoder.data) == (2, b"12345678")
    assert decoder.next() == PacketStep.DONE
    assert decoder.data is None
    assert bytes_copied() == before + 4095 + 8
    decoder.end()


def test_a_piece_that_is_all_of_what_was_fed_is_that() -> None:
    decoder = PacketDecoder(1, 1)
    read_all(decoder, [codec.encode_message_head([1], 1, [8192])])
    piece = bytes(8192)
    decoder.feed(piece)
    assert decoder.next() == PacketStep.PIECE
    assert decoder.data is piece


def test_bytes_of_a_part_may_land_outside() -> None:
    decoder = PacketDecoder(1, 1)
    assert not decoder.in_payload
    head = codec.encode_message_head([1], 1, [0, 13, 0, 8])
    decoder.feed(head + b"abc")
    assert decoder.next() == PacketStep.PACKET
    assert (decoder.part, decoder.missing, decoder.in_payload) == (1, 13, False)
    with pytest.raises(LocalProtocolError, match="4 bytes cannot have landed: 0 bytes"):
        decoder.landed_outside(4)
    assert decoder.next() == PacketStep.PIECE
    assert decoder.data == b"abc"
    assert decoder.next() == PacketStep.NOTHING
    assert (decoder.part, decoder.missing, decoder.in_payload) == (1, 10, True)
    with pytest.raises(LocalProtocolError, match="11 bytes cannot have landed: 10 bytes"):
        decoder.landed_outside(11)
    decoder.landed_outside(4)
    assert (decoder.missing, decoder.in_payload) == (6, True)
    decoder.landed_outside(6)
    assert (decoder.missing, decoder.in_payload) == (0, False)
    # The padding comes by the other way, and only then the next part.
    assert decoder.next() == PacketStep.NOTHING
    assert (decoder.part, decoder.missing, decoder.in_payload) == (3, 8, False)
    decoder.feed(bytes(2))
    assert decoder.next() == PacketStep.NOTHING
    assert not decoder.in_payload
    decoder.feed(bytes(1))
    assert decoder.next() == PacketStep.NOTHING
    assert (decoder.part, decoder.missing, decoder.in_payload) == (3, 8, True)
    decoder.landed_outside(8)
    with pytest.raises(FrameError, match="inside a packet") as caught:
        decoder.end()
    assert caught.value.truncated
    assert decoder.next() == PacketStep.DONE
    assert read_all(decoder, [codec.encode_general(codec.PING)]) == [Packet("general", "ping")]
    decoder.end()


def test_the_last_padding_belongs_to_the_message() -> None:
    decoder = PacketDecoder(1, 1)
    data = encode(Packet("message", "", False, (1,), -1, (b"x",)), 1)
    assert read_all(decoder, [data[:-1]]) == []
    with pytest.raises(FrameError, match="inside a packet"):
        decoder.end()
    decoder.feed(data[-1:])
    assert decoder.next() == PacketStep.DONE
    decoder.end()


def test_fields_stay_until_the_next_packet() -> None:
    decoder = PacketDecoder(2, 1)
    packet = Packet("sequence-ack", "consumed", True, (1, 2), 7)
    decoder.feed(encode(packet, 1) + encode(Packet("message", "", False, (300,)), 2)[:3])
    assert decoder.next() == PacketStep.PACKET
    assert decoder.next() == PacketStep.NOTHING
    assert (decoder.format, decoder.type) == (codec.SEQUENCE_ACK, codec.CONSUMED)
    assert (decoder.multicast, decoder.channels, decoder.sequence) == (True, (1, 2), 7)
    decoder.feed(encode(Packet("message", "", False, (300,)), 2)[3:])
    assert decoder.next() == PacketStep.PACKET
    assert (decoder.format, decoder.type) == (codec.MESSAGE, 0)
    assert (decoder.multicast, decoder.channels, decoder.sequence) == (False, (300,), -1)
    assert decoder.sizes == ()
    assert decoder.next() == PacketStep.DONE


def test_feeding_too_early_is_refused_and_changes_nothing() -> None:
    decoder = PacketDecoder(1, 1)
    decoder.feed(codec.encode_general(codec.PING))
    with pytest.raises(LocalProtocolError, match="feed before"):
        decoder.feed(b"")
    assert decoder.next() == PacketStep.PACKET
    assert decoder.type == codec.PING


@pytest.mark.parametrize("kind", [bytearray, memoryview])
def test_other_buffers_are_read(kind: Callable[[bytes], Any]) -> None:
    message = Packet("message", "", False, (1,), -1, (bytes(5000), b"x"))
    assert read_all(PacketDecoder(1, 1), [kind(encode(message, 1))]) == [message]
