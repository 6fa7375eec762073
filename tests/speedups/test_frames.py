"""The layout of every frame, byte for byte, where it may stand and who may send it."""

from __future__ import annotations

from typing import Any

import pytest

from aqueduct._speedups import channels as codec
from aqueduct.errors import (
    FrameError,
    LocalProtocolError,
    RemoteProtocolError,
    SequenceError,
    VersionError,
)
from tests.reference.codec import Frame, varint
from tests.speedups.strategies import as_tuple, client_decoder, encode_one, message, read_all

requirement = pytest.mark.requirement
HIGHEST = (1 << 64) - 1
VERSION = bytes.fromhex("ef505fa6600f408e") + b"AQUEDUCT" + b"\x0b0.0.0-AFTER"

# Channels by who sends on them; the client created both.
BY_CLIENT, BY_SERVER = 8, 2


def decode(data: bytes, *, from_server: bool = False, datagram: bool = False) -> list[Frame]:
    """A whole sequence."""
    decoder = codec.FrameDecoder(from_server=from_server, datagram=datagram)
    frames = [as_tuple(frame) for frame in read_all(decoder, [data])]
    decoder.end()
    return frames


def decode_error(data: bytes, **options: bool) -> RemoteProtocolError:
    with pytest.raises(RemoteProtocolError) as caught:
        decode(data, **options)
    return caught.value


LAYOUTS: list[tuple[str, str, Frame]] = [
    ("AQ-12", VERSION.hex(), ("VERSION", "0.0.0-AFTER")),
    ("AQ-13", "01", ("ACK_VERSION",)),
    ("AQ-14", "0200", ("CONNECTION_HEADERS", ())),
    ("AQ-14", "0206 016b 03 76ff00", ("CONNECTION_HEADERS", ((b"k", b"v\xff\0"),))),
    ("AQ-15", "0308", ("ROUTE_TO", 8)),
    ("AQ-15", "038a01", ("ROUTE_TO", 138)),
    ("AQ-16", "04 00 00 00 00", ("MESSAGE", 0, (), (), b"")),
    (
        "AQ-16",
        "04 ac02 04 016b0176 08 0800 1204016a0177 026869",
        ("MESSAGE", 300, ((b"k", b"v"),), ((8, ()), (18, ((b"j", b"w"),))), b"hi"),
    ),
    ("AQ-17", "0507", ("SENT_UNRELIABLE", 7)),
    ("AQ-18", "0603", ("FINISH_SENDER", 3)),
    ("AQ-19", "07", ("CANCEL_SENDER",)),
    ("AQ-20", "08 02 0001", ("ACK_RELIABLE", (0, 1))),
    ("AQ-20", "08 05 05ac020107", ("ACK_RELIABLE", (5, 300, 1, 7))),
    ("AQ-21", "09 02 01 05", ("ACK_NACK_UNRELIABLE", BY_SERVER, (5,))),
    ("AQ-21", "09 02 03 000407", ("ACK_NACK_UNRELIABLE", BY_SERVER, (0, 4, 7))),
    ("AQ-22", "0a", ("CLOSE_RECEIVER",)),
    ("AQ-23", "0b", ("FORGET_CHANNEL",)),
]
BY_RECEIVER = ("ACK_RELIABLE", "ACK_NACK_UNRELIABLE", "CLOSE_RECEIVER")
PRELUDE = ("VERSION", "ACK_VERSION", "CONNECTION_HEADERS")


@pytest.mark.parametrize(
    ("text", "frame"),
    [
        pytest.param(text, frame, marks=requirement(number), id=f"{frame[0]}-{text[:8]}")
        for number, text, frame in LAYOUTS
    ],
)
def test_the_layout_of_a_frame(text: str, frame: Frame) -> None:
    data = bytes.fromhex(text)
    assert encode_one(frame) == data
    before = (
        b""
        if frame[0] in (*PRELUDE, "ROUTE_TO")
        else codec.encode_route_to(BY_SERVER if frame[0] in BY_RECEIVER else BY_CLIENT)
    )
    assert decode(before + data)[-1] == frame


@requirement("AQ-1")
def test_fixed_values_are_single_bytes() -> None:
    """A tag of one byte, then varints and byte strings alone: nothing has an order of bytes."""
    assert sorted(codec.FRAME_NAMES) == [*range(1, 12), 239]
    for _, text, frame in LAYOUTS:
        assert codec.FRAME_NAMES[bytes.fromhex(text)[0]] == frame[0]
    for name in ("SENT_UNRELIABLE", "FINISH_SENDER", "ROUTE_TO"):
        assert [len(encode_one((name, 1 << 7 * size - 1))) for size in range(1, 10)] == [
            *range(2, 11)
        ]


@requirement("AQ-2")
@pytest.mark.parametrize(
    ("text", "value"),
    [("00", 0), ("7f", 127), ("8001", 128), ("ac02", 300), ("ffffffffffffffffff01", HIGHEST)],
)
def test_varints_of_frames_are_lowest_bits_first(text: str, value: int) -> None:
    assert decode(b"\x03\x00\x06" + bytes.fromhex(text))[-1] == ("FINISH_SENDER", value)
    assert codec.encode_finish_sender(value).hex() == "06" + text


@requirement("AQ-3")
@pytest.mark.parametrize(("size", "length"), [(0, "00"), (127, "7f"), (128, "8001"), (300, "ac02")])
def test_byte_strings_have_their_length_before_them(size: int, length: str) -> None:
    payload = bytes(number * 7 % 256 for number in range(size))
    data = bytes.fromhex("04000000" + length) + payload
    assert message(0, payload) == data
    assert decode(b"\x03\x00" + data + b"\x06\x01")[1:] == [
        ("MESSAGE", 0, (), (), payload),
        ("FINISH_SENDER", 1),
    ]
    pair = b"\x01k" + bytes.fromhex(length) + payload
    block = varint(len(pair)) + pair
    assert codec.encode_connection_headers(((b"k", payload),)) == b"\x02" + block
    assert decode(b"\x02" + block) == [("CONNECTION_HEADERS", ((b"k", payload),))]


@requirement("AQ-R1")
@pytest.mark.parametrize("text", ["8000", "ff00", "ffffffffffffffffff02", "80808080808080808082"])
@pytest.mark.parametrize("before", ["03", "0300 05", "0300 06", "0300 04", "0300 04 00"])
def test_varints_of_frames_are_short_and_have_64_bits(before: str, text: str) -> None:
    error = decode_error(bytes.fromhex(before + text))
    assert type(error) is FrameError and not error.truncated
    assert "shortest" in str(error) or "64 bits" in str(error)


# Headers


@requirement("AQ-5")
def test_headers_keep_their_order_and_repeats() -> None:
    pairs = ((b"b", b"1"), (b"a", b"2"), (b"b", b"1"), (b"b", b"0"), (b"A", b""))
    block = bytes.fromhex("0162 0131  0161 0132  0162 0131  0162 0130  0141 00")
    data = b"\x02" + bytes([len(block)]) + block
    assert codec.encode_connection_headers(pairs) == data
    assert decode(data) == [("CONNECTION_HEADERS", pairs)]
    assert decode(b"\x03\x00" + message(0, b"", pairs, ((8, pairs),)))[1] == (
        "MESSAGE",
        0,
        pairs,
        ((8, pairs),),
        b"",
    )


@requirement("AQ-5")
@pytest.mark.parametrize(
    "data",
    ["0202016b", "03000402016b0000", "0300040004 08 02016b 00"],
    ids=["connection", "message", "channel"],
)
def test_a_key_without_a_value_is_malformed(data: str) -> None:
    assert type(decode_error(bytes.fromhex(data))) is FrameError


@requirement("AQ-R3")
@pytest.mark.parametrize("key", [b"", b"caf\xc3\xa9", b"\x80", b"k\xff"])
def test_keys_are_ascii_and_not_empty(key: bytes) -> None:
    field = bytes([len(key)]) + key + b"\x00"
    block = bytes([len(field)]) + field
    for data in (
        b"\x02" + block,
        b"\x03\x00\x04\x00" + block + b"\x00\x00",
        b"\x03\x00\x04\x00\x00" + bytes([len(block) + 1]) + b"\x08" + block + b"\x00",
    ):
        assert type(decode_error(data)) is FrameError
    with pytest.raises(LocalProtocolError, match="must be ASCII"):
        codec.encode_connection_headers(((key, b""),))
    with pytest.raises(LocalProtocolError, match="must be ASCII"):
        message(0, b"", ((key, b""),))


@requirement("AQ-R3")
def test_keys_of_any_ascii_and_values_of_any_bytes() -> None:
    pairs = ((bytes(range(128)), bytes(range(256))), (b" ", b""), (b"\0", b"\xff"))
    assert decode(codec.encode_connection_headers(pairs)) == [("CONNECTION_HEADERS", pairs)]


# Ranges


@requirement("AQ-20")
@requirement("AQ-R2")
@pytest.mark.parametrize(
    ("ranges", "good"),
    [
        ("", False),
        ("00", False),
        ("01", False),
        ("0000", False),  # varranges would allow the last to be zero
        ("0100", False),
        ("00010001", False),
        ("00010100", False),
        ("0001 01", False),
        ("0001", True),
        ("00010101", True),
        ("0101", True),
        ("ffffffffffffffffff0101", False),
        ("ffffffffffffffffff0102", False),  # wraps round to a sum that is not zero
        ("feffffffffffffffff0101", True),
    ],
)
def test_the_ranges_of_ack_reliable(ranges: str, good: bool) -> None:
    check_ranges(b"\x08", ranges, good)


@requirement("AQ-21")
@requirement("AQ-R2")
@pytest.mark.parametrize(
    ("ranges", "good"),
    [
        ("", False),
        ("00", False),
        ("0100", False),
        ("000100", False),
        ("01 00 01", False),
        ("01", True),
        ("0001", True),
        ("0101", True),
        ("010101", True),
        ("ffffffffffffffffff0101", False),
        ("ffffffffffffffffff0102", False),
        ("feffffffffffffffff0101", True),
    ],
)
def test_the_ranges_of_ack_nack_unreliable(ranges: str, good: bool) -> None:
    check_ranges(b"\x09\x02", ranges, good)


def check_ranges(start: bytes, text: str, good: bool) -> None:
    block = bytes.fromhex(text)
    data = codec.encode_route_to(BY_SERVER) + start + bytes([len(block)]) + block
    if good:
        assert decode(data)[-1][-1]
    else:
        assert type(decode_error(data)) is FrameError


@requirement("AQ-21")
@requirement("AQ-R14")
def test_ack_nack_unreliable_names_the_channel_of_route_to() -> None:
    assert codec.encode_ack_nack_unreliable(BY_SERVER, (1,)) == b"\x09\x02\x01\x01"
    for other in (0x0A, 0x04, 0x03, 0x00):
        error = decode_error(bytes([0x03, BY_SERVER, 0x09, other, 0x01, 0x01]))
        assert type(error) is SequenceError
        assert "AQ-R14" in str(error)


# Where a frame may stand

FRAMES = {frame[0]: (bytes.fromhex(text), number) for number, text, frame in LAYOUTS}


@requirement("AQ-9")
@pytest.mark.parametrize("name", [name for name in FRAMES if name not in (*PRELUDE, "ROUTE_TO")])
def test_frames_of_a_channel_stand_behind_route_to(name: str) -> None:
    data, _ = FRAMES[name]
    assert type(decode_error(data)) is SequenceError
    assert type(decode_error(VERSION + b"\x01" + data)) is SequenceError


@requirement("AQ-9")
@pytest.mark.parametrize("name", [*PRELUDE, "ROUTE_TO"])
@pytest.mark.parametrize("between", [b"", message(0)], ids=["at once", "after a message"])
def test_the_prelude_and_one_route_to_stand_before(name: str, between: bytes) -> None:
    data, _ = FRAMES[name]
    assert type(decode_error(b"\x03\x08" + between + data)) is SequenceError


@requirement("AQ-9")
@requirement("AQ-R9")
@pytest.mark.parametrize(
    "order",
    [
        "",
        "V",
        "VVV",
        "VAH",
        "VHA",
        "AVH",
        "HVA",
        "HAV",
        "AHVVA",
        "AAHH",  # whether headers may come twice is no matter of the sequence
    ],
)
@pytest.mark.parametrize("routed", [False, True])
def test_the_prelude_in_any_order_and_number(order: str, routed: bool) -> None:
    names = {"V": "VERSION", "A": "ACK_VERSION", "H": "CONNECTION_HEADERS"}
    data = b"".join(FRAMES[names[letter]][0] for letter in order)
    frames = decode(data + (b"\x03\x08" + message(0) + message(1)) * routed)
    assert [frame[0] for frame in frames] == [
        *(names[letter] for letter in order),
        *(["ROUTE_TO", "MESSAGE", "MESSAGE"] * routed),
    ]


@requirement("AQ-9")
@pytest.mark.parametrize("tag", [0, 12, 13, 127, 128, 238, 240, 255])
def test_there_are_no_other_frames(tag: int) -> None:
    assert type(decode_error(bytes([tag]) * 3)) is FrameError
    assert type(decode_error(b"\x03\x08" + bytes([tag]) * 3)) is FrameError


@requirement("AQ-12")
@requirement("AQ-R5")
@pytest.mark.parametrize("place", range(1, len(VERSION)))
def test_every_byte_of_version_counts(place: int) -> None:
    data = bytearray(VERSION)
    data[place] ^= 1
    decoder = codec.FrameDecoder(from_server=False)
    decoder.feed(bytes(data) + bytes(20))
    with pytest.raises(VersionError):
        decoder.next()


# Who may send it


@pytest.mark.parametrize("from_server", [False, True], ids=["client", "server"])
@pytest.mark.parametrize(
    ("name", "by_sender"),
    [
        pytest.param(name, name not in BY_RECEIVER, marks=requirement(FRAMES[name][1]), id=name)
        for name in FRAMES
        if name not in (*PRELUDE, "ROUTE_TO", "FORGET_CHANNEL")
    ],
)
@requirement("AQ-24")
def test_frames_come_from_the_right_half(name: str, by_sender: bool, from_server: bool) -> None:
    for creator in (0, 1):
        for sender in (0, 1):
            channel = creator | sender << 1 | 8
            data = codec.encode_route_to(channel) + _frame(name, channel)
            if (sender == from_server) is by_sender:
                assert decode(data, from_server=from_server)[-1][0] == name
            else:
                error = decode_error(data, from_server=from_server)
                assert type(error) is SequenceError and "AQ-24" in str(error)


def _frame(name: str, channel: int) -> bytes:
    frames: dict[str, Any] = {
        "MESSAGE": message(0),
        "ACK_NACK_UNRELIABLE": codec.encode_ack_nack_unreliable(channel, (1,)),
    }
    data: bytes = frames.get(name) or FRAMES[name][0]
    return data


@requirement("AQ-23")
@requirement("AQ-24")
@pytest.mark.parametrize("channel", range(8, 16))
@pytest.mark.parametrize("from_server", [False, True], ids=["client", "server"])
def test_forget_channel_comes_from_the_creator(channel: int, from_server: bool) -> None:
    data = codec.encode_route_to(channel) + codec.FORGET_CHANNEL
    if channel & 1 == from_server:
        assert decode(data, from_server=from_server)[-1] == ("FORGET_CHANNEL",)
    else:
        assert type(decode_error(data, from_server=from_server)) is SequenceError


@requirement("AQ-16")
@requirement("AQ-24")
@pytest.mark.parametrize("attached", range(8, 16))
@pytest.mark.parametrize("from_server", [False, True], ids=["client", "server"])
def test_attachments_are_created_by_the_sender_of_the_frame(
    attached: int, from_server: bool
) -> None:
    route = codec.encode_route_to(2 if from_server else 0)
    data = route + b"\x04\x00\x00\x02" + bytes([attached]) + b"\x00\x00"
    if attached & 1 == from_server:
        assert decode(data, from_server=from_server)[-1][3] == ((attached, ()),)
    else:
        assert type(decode_error(data, from_server=from_server)) is SequenceError


@requirement("AQ-R4")
@pytest.mark.parametrize("attached", ["0000", "08000000", "08000800"])
def test_the_entrypoint_and_one_channel_twice_are_not_attached(attached: str) -> None:
    block = bytes.fromhex(attached)
    data = b"\x03\x00\x04\x00\x00" + bytes([len(block)]) + block + b"\x00"
    assert type(decode_error(data)) is SequenceError


@requirement("AQ-R11")
@pytest.mark.parametrize("name", sorted(FRAMES))
def test_frames_in_datagrams(name: str) -> None:
    receivers = name in BY_RECEIVER
    before = b"" if name in (*PRELUDE, "ROUTE_TO") else bytes([3, 2 if receivers else 8])
    data = before + FRAMES[name][0]
    assert decode(data)[-1][0] == name
    if name in ("VERSION", "ROUTE_TO", "MESSAGE"):
        assert decode(data, datagram=True)[-1][0] == name
    else:
        error = decode_error(data, datagram=True)
        assert type(error) is SequenceError and "AQ-R11" in str(error)


@requirement("AQ-6")
@pytest.mark.parametrize("channel", [(1 << 64) - 1, (1 << 64) - 8, 23])
def test_a_channel_id_has_64_bits(channel: int) -> None:
    from_server = bool(channel & 2)
    data = codec.encode_route_to(channel)
    assert decode(data, from_server=from_server) == [("ROUTE_TO", channel)]


@requirement("AQ-R13")
def test_codecs_pass_every_message_number() -> None:
    decoder = client_decoder()
    (frame,) = read_all(decoder, [b"\x04" + b"\xff" * 9 + b"\x01\x00\x00\x00"])
    assert frame.num == HIGHEST
