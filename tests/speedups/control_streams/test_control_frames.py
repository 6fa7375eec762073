"""Frames of the control-stream draft: limits, payloads, holding back, and what is refused."""

from __future__ import annotations

import threading
import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aqueduct._speedups.base.buffers import AlignedBuffer, bytes_copied
from aqueduct._speedups.channels.encoder import COALESCE, VERSION
from aqueduct._speedups.channels.frames import (
    FinishSender,
    MessageFrame,
    MessageHead,
    SentUnreliable,
    Version,
)
from aqueduct._speedups.control_streams import control_encoder as encoder
from aqueduct._speedups.control_streams.control_frames import (
    ChannelControl,
    ClosedChannelLost,
    ConnectionControl,
    ControlAckNacks,
    ControlAcks,
    ControlClose,
    ControlFrameDecoder,
)
from aqueduct.errors import (
    FrameError,
    LimitExceeded,
    LocalProtocolError,
    RemoteProtocolError,
    SequenceError,
)
from aqueduct.protocol.control_streams import ids
from tests.reference.codec import Frame, varbytes
from tests.speedups.control_streams.sequences import CARRIERS, read_into
from tests.speedups.strategies import cut, cuts, piece_of

requirement = pytest.mark.requirement
HIGHEST = (1 << 64) - 1
MiB = 1 << 20
HELLO = VERSION + b"\x01\x00"


def client_uni(**options: Any) -> ControlFrameDecoder:
    """Reads a unidirectional stream of a client."""
    return ControlFrameDecoder(from_server=False, carrier="uni", **options)


def message(channel: int, number: int, payload: Any = b"", attachments: Any = ()) -> bytes:
    buffers = encoder.encode_control_message(channel, number, payload, attachments)
    return b"".join(map(bytes, buffers))


def sequence_error(data: bytes, text: str, **options: Any) -> None:
    """The last frame of ``data`` may not stand there; what is before it is given."""
    decoder = ControlFrameDecoder(**options)
    with pytest.raises(SequenceError, match=text):
        read_into([], decoder, [data])


# Channel ids


@requirement("AQ0-7")
def test_the_bits_of_an_id() -> None:
    assert ids.make(0, 0, False, 0) == ids.ENTRYPOINT == 0
    for creator in (0, 1):
        for sender in (0, 1):
            for oneshot in (False, True):
                for number in (0, 1, (1 << 61) - 1):
                    channel = ids.make(creator, sender, oneshot, number)
                    assert channel == sender + 2 * creator + 4 * oneshot + 8 * number
                    assert ids.creator(channel) == creator
                    assert ids.sender(channel) == sender
                    assert ids.oneshot(channel) is oneshot
                    assert ids.index(channel) == number
                    assert ids.space(channel) == channel & 7
    assert (ids.SENDER, ids.CREATOR, ids.ONESHOT) == (1, 2, 4)
    assert ids.describe(0) == ("channel 0 (client-created, client sends, index 0, the entrypoint)")
    assert ids.describe(46) == "channel 46 (server-created, client sends, oneshot, index 5)"
    assert ids.describe(41) == "channel 41 (client-created, server sends, index 5)"


# Values


def test_frames_are_values() -> None:
    made = [
        (ConnectionControl, (((b"k", b"v"),),), "ConnectionControl(headers=((b'k', b'v'),))"),
        (ChannelControl, (8,), "ChannelControl(channel=8)"),
        (ControlAcks, ((0, 2, 1),), "ControlAcks(ranges=(0, 2, 1))"),
        (ControlAckNacks, ((3, 300),), "ControlAckNacks(ranges=(3, 300))"),
        (ControlClose, ((),), "ControlClose(ranges=())"),
        (ClosedChannelLost, (8,), "ClosedChannelLost(channel=8)"),
    ]
    values: list[Any] = [kind(*fields) for kind, fields, _ in made]
    for at, (kind, fields, text) in enumerate(made):
        assert values[at] == kind(*fields)
        assert repr(values[at]) == text
        assert [value for value in values if value == values[at]] == [values[at]]
        with pytest.raises(TypeError, match="unhashable"):
            hash(values[at])
        with pytest.raises(AttributeError):
            values[at].channel = 1
    assert ControlAcks((3, 300)).block == b"\x03\xac\x02"
    assert ControlAcks((1,)) != ControlAcks((2,))
    assert ControlAcks((1,)) != ControlClose((1,))
    kinds: list[Any] = [ControlAcks, ControlAckNacks, ControlClose]
    for kind in [*kinds, ConnectionControl]:
        with pytest.raises(TypeError):
            kind(None)
    for kind in kinds:
        with pytest.raises(OverflowError):
            kind((1 << 64,))


# Frames to bytes


def test_small_payloads_are_copied_and_large_ones_are_not() -> None:
    large, view = b"l" * COALESCE, memoryview(bytearray(COALESCE))
    before = bytes_copied()
    buffers = encoder.encode_control_message(8, 3, [b"a", b"b", large, b"c", view], [4, 12])
    assert bytes_copied() - before == 3
    assert buffers[0] == b"\x03\x08\x03\x02\x04\x0c" + b"\x83\x40" + b"ab"
    assert buffers[1] is large
    assert buffers[2] == b"c"
    assert buffers[3] is view
    assert encoder.encode_control_message(8, 3) == [b"\x03\x08\x03\x00\x00"]
    assert encoder.encode_control_message(8, 3, b"") == [b"\x03\x08\x03\x00\x00"]
    column = piece_of(bytes(2 * COALESCE))
    assert encoder.encode_control_message(8, 3, column)[1] is column
    words = memoryview(bytearray(2 * COALESCE)).cast("Q")
    (_, given) = encoder.encode_control_message(8, 3, words)
    assert (len(given), memoryview(given).obj) == (2 * COALESCE, words.obj)


def test_many_attachments_are_one_block() -> None:
    attached = [channel << 3 for channel in range(1, 4000)]
    data = message(0, 0, b"x", attached)
    decoder = client_uni()
    decoder.feed(data)
    frame = decoder.next()
    assert isinstance(frame, MessageFrame)
    assert [channel for channel, _ in frame.attached] == attached
    # A pair, a number and their places in memory: that is what a peer makes this side hold.
    assert frame.overhead > 100 * len(attached)


@requirement("AQ0-R12")
def test_what_says_nothing_is_not_sent() -> None:
    with pytest.raises(LocalProtocolError, match="count 0 is never sent"):
        encoder.encode_control_sent_unreliable(0)
    for encode in (encoder.encode_control_acks, encoder.encode_control_ack_nacks):
        with pytest.raises(LocalProtocolError, match="without ranges is never sent"):
            encode(())
    assert encoder.encode_control_close(()) == b"\x08\x00"
    assert encoder.encode_control_finish(0) == b"\x07\x00"


@requirement("AQ0-6")
@pytest.mark.parametrize(
    "encode",
    [encoder.encode_control_acks, encoder.encode_control_ack_nacks, encoder.encode_control_close],
)
def test_ranges_that_cannot_be_sent(encode: Any) -> None:
    for ranges in ((1, 0), (0, 1, 0, 1), (0, 0)):
        with pytest.raises(LocalProtocolError, match="only the first may be"):
            encode(ranges)
    with pytest.raises(LocalProtocolError, match="a single zero"):
        encode((0,))
    with pytest.raises(LocalProtocolError, match="above 2"):
        encode((HIGHEST, 1))
    with pytest.raises(LocalProtocolError, match="a length of a range"):
        encode((1 << 64,))
    with pytest.raises(TypeError):
        encode((0.5,))
    assert encode(iter((0, HIGHEST)))[1:] == b"\x0b\x00" + b"\xff" * 9 + b"\x01"


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: encoder.encode_channel_control(-1), "the channel"),
        (lambda: encoder.encode_channel_control(1 << 64), "the channel"),
        (lambda: encoder.encode_closed_channel_lost(-1), "the channel"),
        (lambda: encoder.encode_control_message(-1, 0), "the channel"),
        (lambda: encoder.encode_control_message(0, HIGHEST), "the message number"),
        (lambda: encoder.encode_control_message(0, 0, b"", [0]), "entrypoint cannot be attached"),
        (lambda: encoder.encode_control_message(0, 0, b"", [8, 8]), "attached twice"),
        (lambda: encoder.encode_control_message(0, 0, b"", [8, 10]), "different creators"),
        (lambda: encoder.encode_control_message(0, 0, b"", [1 << 64]), "an attached channel"),
        (lambda: encoder.encode_control_finish(-1), "the count of messages"),
        (lambda: encoder.encode_control_sent_unreliable(1 << 64), "the count"),
        (lambda: encoder.encode_connection_control([(b"", b"")]), "must be ASCII and not empty"),
        (lambda: encoder.encode_connection_control([(b"\xff", b"")]), "must be ASCII"),
        (lambda: encoder.encode_connection_control([(b"k",)]), "must be"),  # type: ignore[list-item]
    ],
)
def test_arguments_that_cannot_be_sent(call: Any, text: str) -> None:
    with pytest.raises(LocalProtocolError, match=text):
        call()


def test_arguments_of_a_wrong_type() -> None:
    for call in (
        lambda: encoder.encode_channel_control(0.5),  # type: ignore[arg-type]
        lambda: encoder.encode_control_message(0, None),  # type: ignore[arg-type]
        lambda: encoder.encode_control_message(0, 0, "text"),  # type: ignore[arg-type]
        lambda: encoder.encode_control_message(0, 0, b"", ["8"]),  # type: ignore[list-item]
        lambda: encoder.encode_connection_control([("k", "v")]),  # type: ignore[list-item]
    ):
        with pytest.raises(TypeError):
            call()


# What a sequence may hold


def test_a_decoder_needs_to_know_what_it_reads() -> None:
    with pytest.raises(ValueError, match="must be one of uni, datagram, opener, answer"):
        ControlFrameDecoder(from_server=True, carrier="bidi")
    with pytest.raises(ValueError, match="only an answer"):
        ControlFrameDecoder(from_server=True, carrier="opener", channel=8)
    with pytest.raises(ValueError, match="channel names one"):
        ControlFrameDecoder(from_server=False, carrier="answer")
    with pytest.raises(ValueError, match="must not be negative"):
        client_uni(frame_limit=-1)
    with pytest.raises(LocalProtocolError, match="the channel"):
        ControlFrameDecoder(from_server=True, carrier="answer", channel=1 << 64)
    with pytest.raises(LocalProtocolError, match="the channel"):
        ControlFrameDecoder(from_server=True, carrier="answer", channel=-2)
    decoder = ControlFrameDecoder(from_server=False, carrier="answer", channel=HIGHEST - 3)
    assert (decoder.carrier, decoder.from_server) == ("answer", False)
    assert decoder.channel == HIGHEST - 3


@requirement("AQ0-10")
@pytest.mark.parametrize("carrier", CARRIERS.values())
def test_a_version_stands_first_on_any_carrier(carrier: str) -> None:
    options = {"from_server": True, "carrier": carrier}
    decoder = ControlFrameDecoder(**options)  # type: ignore[arg-type]
    decoder.feed(VERSION)
    assert decoder.next() == Version("0.0.0-AFTER")
    sequence_error(VERSION + VERSION, "only the first frame", **options)


@requirement("AQ0-11")
@requirement("AQ0-19")
@pytest.mark.parametrize("from_server", [False, True])
@pytest.mark.parametrize("carrier", CARRIERS.values())
def test_one_connection_control_on_its_stream(carrier: str, from_server: bool) -> None:
    options: dict[str, Any] = {"from_server": from_server, "carrier": carrier}
    if carrier == "answer" and not from_server:
        options["channel"] = 0
    if (carrier, from_server) in (("opener", False), ("answer", True)):
        decoder = ControlFrameDecoder(**options)
        found: list[Frame] = []
        read_into(found, decoder, [HELLO])
        assert found[1:] == [("ConnectionControl", ())]
        sequence_error(b"\x01\x00", "no Version before it", **options)
        for more in (b"\x01\x00", b"\x02\x02", b"\x04\x01", VERSION):
            sequence_error(HELLO + more, "follows ConnectionControl", **options)
    else:
        sequence_error(HELLO, "ConnectionControl at byte 28", **options)
    if carrier == "answer":
        options["channel"] = 2 if from_server else 0
        sequence_error(HELLO, "ConnectionControl at byte 28", **options)


@requirement("AQ0-12")
@requirement("AQ0-25")
@requirement("AQ0-R9")
@requirement("AQ0-R11")
@pytest.mark.parametrize("prefix", [b"", VERSION])
def test_who_did_not_create_the_channel_opens_its_control_stream(prefix: bytes) -> None:
    for from_server in (False, True):
        options: dict[str, Any] = {"from_server": from_server, "carrier": "opener"}
        for sender in (0, 1):
            channel = ids.make(1 - from_server, sender, False, 9)
            decoder = ControlFrameDecoder(**options)
            assert decoder.channel == -1
            found: list[Frame] = []
            read_into(found, decoder, [prefix + encoder.encode_channel_control(channel)])
            assert found[-1] == ("ChannelControl", channel)
            assert decoder.channel == channel
            own = ids.make(from_server, sender, False, 9)
            control = encoder.encode_channel_control(own)
            sequence_error(prefix + control, "created by its own side", **options)
        for kind in b"\x04\x05\x06\x07\x08":
            frame = bytes([kind, 0])
            sequence_error(prefix + frame, "control stream of a channel alone", **options)


@requirement("AQ0-13")
def test_messages_come_from_the_sender_and_not_on_bidirectional_streams() -> None:
    for from_server in (False, True):
        channel = ids.make(0, from_server, False, 1)
        for carrier in ("uni", "datagram"):
            options: dict[str, Any] = {"from_server": from_server, "carrier": carrier}
            found: list[Frame] = []
            read_into(found, ControlFrameDecoder(**options), [message(channel, 7, b"x")])
            assert found == [("Message", channel, 7, (), b"x")]
            sequence_error(message(channel ^ 1, 7), "from the receiver", **options)
        for carrier, more in (("opener", {}), ("answer", {"channel": channel})):
            options = {"from_server": from_server, "carrier": carrier, **more}
            sequence_error(message(channel, 7), "may not travel on a bidirectional", **options)


@requirement("AQ0-9")
@requirement("AQ0-13")
def test_a_stream_has_messages_of_several_channels() -> None:
    decoder = client_uni()
    decoder.feed(message(8, 0, b"a") + message(16, 5, b"b") + message(8, 1, b"c"))
    seen = []
    while (frame := decoder.next()) is not None:
        assert isinstance(frame, MessageFrame)
        seen.append((decoder.channel, frame.num, frame.payload))
    assert seen == [(8, 0, b"a"), (16, 5, b"b"), (8, 1, b"c")]


@requirement("AQ0-7")
@requirement("AQ0-24")
@pytest.mark.parametrize(
    ("attached", "text"),
    [
        (b"\x00", "the entrypoint is attached"),
        (b"\x02", "by the side that did not create it"),
        (b"\x08\x0a", "by the side that did not create it"),
        (b"\x08\x10\x08", "attached twice"),
    ],
)
def test_channels_that_may_not_be_attached(attached: bytes, text: str) -> None:
    frame = b"\x03\x00\x00" + varbytes(attached) + b"\x00"
    sequence_error(frame, text, from_server=False, carrier="uni")


def test_attachments_that_are_cut_inside_their_block() -> None:
    decoder = client_uni()
    decoder.feed(b"\x03\x00\x00\x02\x08\x88\x00")
    with pytest.raises(FrameError, match="ends inside a varint") as caught:
        decoder.next()
    assert not caught.value.truncated


@requirement("AQ0-14")
@requirement("AQ0-15")
@requirement("AQ0-16")
@pytest.mark.parametrize("from_server", [False, True])
@pytest.mark.parametrize("carrier", ["opener", "answer"])
def test_each_half_says_what_is_its_own(carrier: str, from_server: bool) -> None:
    """On the control stream of each kind of channel, in both directions."""
    frames = {4: SentUnreliable(1), 7: FinishSender(1)}
    acks = {5: ControlAcks((1,)), 6: ControlAckNacks((1,)), 8: ControlClose((1,))}
    for sender in (0, 1):
        creator = 1 - from_server if carrier == "opener" else from_server
        channel = ids.make(creator, sender, False, 3)
        options: dict[str, Any] = {"from_server": from_server, "carrier": carrier}
        begin = encoder.encode_channel_control(channel)
        if carrier == "answer":
            options["channel"] = channel
            begin = b""
            sequence_error(encoder.encode_channel_control(channel), "only who opens", **options)
        for kind in (*frames, *acks):
            data = bytes([kind, 1]) if kind in frames else bytes([kind, 1, 1])
            if (kind in frames) == (sender == from_server):
                decoder = ControlFrameDecoder(**options)
                decoder.feed(begin + data)
                for _ in range(2 if begin else 1):
                    frame = decoder.next()
                assert frame == (frames | acks)[kind]
                if kind in (7, 8):
                    for more in (data, b"\x04\x01", b"\x05\x00"):
                        sequence_error(begin + data + more, "which nothing may follow", **options)
            else:
                sequence_error(begin + data, "from the (sender|receiver)", **options)


@requirement("AQ0-17")
@requirement("AQ0-R11")
def test_a_lost_channel_is_alone_on_its_stream_and_from_its_creator() -> None:
    for from_server in (False, True):
        options: dict[str, Any] = {"from_server": from_server, "carrier": "uni"}
        for sender in (0, 1):
            lost = encoder.encode_closed_channel_lost(ids.make(from_server, sender, True, 4))
            for prefix in (b"", VERSION):
                decoder = ControlFrameDecoder(**options)
                found: list[Frame] = []
                read_into(found, decoder, [prefix + lost])
                assert found[-1] == ("ClosedChannelLost", ids.make(from_server, sender, True, 4))
                assert decoder.channel == -1
                sequence_error(prefix + lost + lost, "which nothing may follow", **options)
            first = message(ids.make(0, from_server, False, 2), 0)
            sequence_error(first + lost, "not alone", **options)
            sequence_error(lost + first, "which nothing may follow", **options)
            other = encoder.encode_closed_channel_lost(ids.make(1 - from_server, sender, False, 4))
            sequence_error(other, "was not created by the side that sends it", **options)


@requirement("AQ0-R16")
def test_a_oneshot_channel_has_one_message() -> None:
    sequence_error(message(4, 1), "number 1 on a oneshot", from_server=False, carrier="uni")
    for frame in (b"\x04\x02", b"\x07\x02"):
        options: dict[str, Any] = {"from_server": False, "carrier": "answer", "channel": 4}
        sequence_error(frame, "2 messages on a oneshot", **options)
    found: list[Frame] = []
    decoder = ControlFrameDecoder(from_server=False, carrier="answer", channel=4)
    read_into(found, decoder, [b"\x04\x01\x07\x00"])
    assert found == [("SentUnreliable", 1), ("FinishSender", 0)]


@requirement("AQ0-6")
@pytest.mark.parametrize("kind", [5, 6, 8])
def test_ranges(kind: int) -> None:
    def read(block: bytes) -> Any:
        decoder = ControlFrameDecoder(from_server=True, carrier="answer", channel=2)
        decoder.feed(bytes([kind]) + varbytes(block))
        return decoder.next()

    highest = b"\xff" * 9 + b"\x01"
    for block, ranges in ((b"", ()), (b"\x03\x04", (3, 4)), (b"\x00" + highest, (0, HIGHEST))):
        assert read(block).ranges == ranges
        assert read(block).block == block
    for block in (b"\x00", b"\x01\x00", b"\x00\x00", b"\x01\x80", b"\x81\x00", highest + b"\x01"):
        with pytest.raises(FrameError) as caught:
            read(block)
        assert not caught.value.truncated


@requirement("AQ0-4")
@pytest.mark.parametrize("shape", [b"\x80\x00", b"\xff" * 9 + b"\x02", b"\x80" * 10])
def test_varints_that_are_none(shape: bytes) -> None:
    for data in (b"\x09" + shape, b"\x03" + shape, b"\x03\x00" + shape, b"\x03\x00\x00" + shape):
        with pytest.raises(FrameError, match="varint"):
            read_into([], client_uni(), [data])


# The end


@requirement("AQ0-8")
@pytest.mark.parametrize("carrier", ["uni", "datagram", "opener"])
def test_a_sequence_has_a_frame(carrier: str) -> None:
    decoder = ControlFrameDecoder(from_server=False, carrier=carrier)
    assert decoder.between_frames
    with pytest.raises(FrameError, match="without a frame") as caught:
        decoder.end()
    assert not caught.value.truncated
    assert decoder.error is caught.value


@requirement("AQ0-8")
def test_an_answer_may_be_empty() -> None:
    """A sender that was closed before it said anything finishes its direction."""
    decoder = ControlFrameDecoder(from_server=False, carrier="answer", channel=0)
    decoder.end()
    assert decoder.finished
    with pytest.raises(LocalProtocolError, match="feed after end"):
        decoder.feed(b"\x04\x01")
    with pytest.raises(LocalProtocolError, match="received after end"):
        decoder.received(1)


def test_the_end_before_the_last_frames_were_taken() -> None:
    decoder = client_uni()
    decoder.feed(message(8, 0, b"a") + message(8, 1, b"b")[:-1])
    decoder.end()
    assert not decoder.finished
    assert isinstance(decoder.next(), MessageFrame)
    with pytest.raises(FrameError, match="ends inside a frame") as caught:
        decoder.next()
    assert caught.value.truncated


# Limits


@requirement("AQ0-R16")
@pytest.mark.parametrize(
    ("data", "limit", "field"),
    [
        (message(8, 0, b"p" * 40), {"frame_limit": 44}, "frame_bytes"),
        (message(8, 0, b"", range(8, 328, 8)), {"frame_limit": 40}, "frame_bytes"),
        (message(8, 0, b"", range(8, 328, 8)), {"block_limit": 64}, "block_bytes"),
        (message(8, 0, b"", range(8, 328, 8)), {"attachment_limit": 39}, "attachments"),
    ],
)
def test_limits_of_messages(data: bytes, limit: dict[str, int], field: str) -> None:
    decoder = client_uni(**limit)
    with pytest.raises(LimitExceeded, match=rf"Limits\.{field}"):
        read_into([], decoder, [data])
    ((name, most),) = limit.items()
    enough = {name: {44: 45, 40: 200, 64: 65, 39: 40}[most]}
    found: list[Frame] = []
    read_into(found, client_uni(**enough), [data])
    assert len(found) == 1


@requirement("AQ0-R16")
def test_limits_of_headers_and_ranges() -> None:
    headers = encoder.encode_connection_control([(b"key", b"v" * 40)])
    decoder = ControlFrameDecoder(from_server=False, carrier="opener", header_limit=44)
    with pytest.raises(LimitExceeded, match=r"Limits\.header_bytes"):
        read_into([], decoder, [VERSION + headers])
    decoder = ControlFrameDecoder(from_server=False, carrier="opener", header_limit=45)
    found: list[Frame] = []
    read_into(found, decoder, [VERSION + headers])
    assert found[1] == ("ConnectionControl", ((b"key", b"v" * 40),))
    for most in (9, 10):
        decoder = ControlFrameDecoder(
            from_server=True, carrier="answer", channel=2, block_limit=most
        )
        decoder.feed(encoder.encode_control_acks([1] * 10))
        if most == 10:
            assert decoder.next() == ControlAcks((1,) * 10)
        else:
            with pytest.raises(LimitExceeded, match=r"Limits\.block_bytes"):
                decoder.next()


def test_a_declared_length_takes_no_memory() -> None:
    tracemalloc.start()
    try:
        for head in (b"\x03\x08\x00\x00", b"\x03\x08\x00"):
            for limit in ({"frame_limit": MiB}, {"frame_limit": MiB, "block_limit": MiB}):
                decoder = client_uni(**limit)
                decoder.auto_admit = 0
                read = []
                decoder.feed(head + encoder.encode_control_finish(MiB - 30)[1:])
                before, _ = tracemalloc.get_traced_memory()
                read.append(decoder.next())
                assert tracemalloc.get_traced_memory()[0] - before < 10_000
                assert isinstance(read[0], MessageHead) == (len(head) == 4)
    finally:
        tracemalloc.stop()


# Payloads


def test_admission() -> None:
    decoder = client_uni()
    decoder.auto_admit = 10
    data = message(8, 3, b"small") + message(16, 4, b"p" * 5000, [8, 24]) + message(8, 4)
    decoder.feed(data)
    assert decoder.next() == MessageFrame(3, (), (), b"small")
    with pytest.raises(LocalProtocolError, match="no message waits"):
        decoder.admit()
    head = MessageHead(4, (), ((8, ()), (24, ())), 5000)
    assert decoder.next() == head
    assert decoder.waiting
    assert decoder.channel == 16
    assert decoder.next() is None
    with pytest.raises(LocalProtocolError, match="the target has 3 bytes"):
        decoder.admit(bytearray(3))
    assert decoder.waiting
    target = bytearray(5000)
    decoder.admit(target)
    assert not decoder.waiting
    frame = decoder.next()
    assert isinstance(frame, MessageFrame)
    assert frame.payload is target
    assert frame.attachments == head.attachments
    assert target == b"p" * 5000
    assert decoder.next() == MessageFrame(4, (), (), b"")
    assert decoder.channel == 8
    decoder.end()
    assert decoder.finished
    assert decoder.consumed == len(data)


def test_a_large_payload_lands_where_it_is_read_to() -> None:
    payload = bytes(range(256)) * 400
    data = message(8, 0, payload)
    start = len(data) - len(payload)
    before = bytes_copied()
    decoder = client_uni()
    assert decoder.receive_buffer(0) is None
    decoder.feed(data[: start + 100])
    assert decoder.next() is None
    assert decoder.remaining == len(payload) - 100
    assert not decoder.between_frames
    while decoder.remaining:
        room = decoder.receive_buffer(9000)
        assert room is not None
        size = len(room)
        room[:] = data[decoder.consumed : decoder.consumed + size]
        room.release()
        decoder.received(size)
    frame = decoder.next()
    assert isinstance(frame, MessageFrame)
    assert isinstance(frame.payload, AlignedBuffer)
    assert bytes(frame.payload) == payload
    assert bytes_copied() - before == 100


@pytest.mark.parametrize("size", [0, 1, 30, 5000])
@given(cuts)
def test_a_skipped_payload_is_read_and_not_kept(size: int, places: list[int]) -> None:
    data = message(8, 0, b"a") + message(16, 1, b"s" * size, [8]) + message(24, 2, b"b")
    decoder = client_uni()
    decoder.auto_admit = -1
    seen = []
    before = bytes_copied()
    for piece in cut(data, places):
        decoder.feed(piece)
        while (frame := decoder.next()) is not None:
            if not isinstance(frame, MessageHead):
                seen.append((decoder.channel, frame))
            elif frame.num == 1:
                decoder.skip()
                assert not decoder.waiting
                assert decoder.remaining == size
            else:
                decoder.admit()
        assert decoder.buffered == 0
        assert not decoder.gathered
    assert seen == [(8, MessageFrame(0, (), (), b"a")), (24, MessageFrame(2, (), (), b"b"))]
    assert bytes_copied() - before == 2
    assert decoder.remaining == 0
    assert decoder.frames == 3
    decoder.end()
    assert decoder.finished


def test_a_payload_that_is_landing_is_skipped() -> None:
    for how in ("put off", "landing", "large"):
        size = 9000 if how == "large" else 30
        data = message(8, 0, b"s" * size, [16]) + message(8, 1, b"b")
        decoder = client_uni()
        decoder.feed(data[: -size + 1] if how == "put off" else data[:-20])
        decoder.feed(b"")
        assert decoder.next() is None
        assert 0 < decoder.remaining <= size
        decoder.skip()
        assert decoder.receive_buffer(0) is None
        assert decoder.buffer.take_up() == 0  # no memory is taken for it either
        assert decoder.next() is None
        decoder.feed(data[decoder.consumed :])
        assert decoder.next() == MessageFrame(1, (), (), b"b")
        assert decoder.next() is None
        with pytest.raises(LocalProtocolError, match="no payload waits or lands"):
            decoder.skip()


def test_memory_of_a_skipped_payload_is_let_go() -> None:
    target = bytearray(9000)
    decoder = client_uni()
    decoder.auto_admit = 0
    decoder.feed(message(8, 0, b"s" * 9000)[:-10])
    assert isinstance(decoder.next(), MessageHead)
    decoder.admit(target)
    assert decoder.next() is None
    decoder.skip()
    target += b"x"  # nothing holds it any more


def test_the_end_inside_a_skipped_payload() -> None:
    for fed in (b"", b"ss"):
        decoder = client_uni()
        decoder.auto_admit = 0
        decoder.feed(message(8, 0, b"sss")[:-3] + fed)
        assert isinstance(decoder.next(), MessageHead)
        decoder.skip()
        assert decoder.next() is None
        with pytest.raises(FrameError, match="ends inside a frame") as caught:
            decoder.end()
        assert caught.value.truncated
    decoder = client_uni()
    decoder.auto_admit = 0
    decoder.feed(message(8, 0, b"sss"))
    assert isinstance(decoder.next(), MessageHead)
    decoder.skip()
    decoder.end()
    assert decoder.next() is None
    assert decoder.finished


def test_the_end_before_a_payload_is_admitted() -> None:
    decoder = client_uni()
    decoder.auto_admit = 0
    decoder.feed(message(8, 0, b"sss")[:-1])
    assert isinstance(decoder.next(), MessageHead)
    with pytest.raises(FrameError, match="ends inside a frame"):
        decoder.end()
    decoder = client_uni()
    decoder.auto_admit = 0
    decoder.feed(message(8, 0, b"sss"))
    assert isinstance(decoder.next(), MessageHead)
    decoder.end()
    decoder.admit()
    assert decoder.next() == MessageFrame(0, (), (), b"sss")
    assert decoder.finished


# Holding back


def test_a_paused_decoder_gives_what_begins_a_connection() -> None:
    decoder = client_uni()
    decoder.pause = True
    data = VERSION + message(8, 0, b"a") + message(8, 1, b"b")
    decoder.feed(data)
    assert decoder.next() == Version("0.0.0-AFTER")
    assert not decoder.paused
    for _ in range(2):
        assert decoder.next() is None
        assert decoder.paused
        assert decoder.consumed == len(VERSION)
        assert decoder.buffered == len(data) - len(VERSION)
    decoder.end()
    assert not decoder.finished
    decoder.pause = False
    assert decoder.next() == MessageFrame(0, (), (), b"a")
    assert not decoder.paused
    decoder.pause = True
    assert decoder.next() is None
    decoder.pause = False
    assert decoder.next() == MessageFrame(1, (), (), b"b")
    assert decoder.finished


def test_a_paused_decoder_reads_the_connection_control() -> None:
    decoder = ControlFrameDecoder(from_server=True, carrier="answer")
    decoder.pause = True
    decoder.feed(HELLO)
    assert decoder.next() == Version("0.0.0-AFTER")
    assert decoder.next() == ConnectionControl(())
    assert decoder.next() is None
    assert not decoder.paused
    decoder = ControlFrameDecoder(from_server=True, carrier="opener")
    decoder.pause = True
    decoder.feed(b"\x02\x00")
    assert decoder.next() is None
    assert decoder.paused
    decoder.pause = False
    assert decoder.next() == ChannelControl(0)


# The rest


@pytest.mark.parametrize("kind", [0, 10, 11, 127, 128, 238, 240, 255])
def test_types_that_there_are_not(kind: int) -> None:
    decoder = client_uni()
    with pytest.raises(FrameError, match=rf"type {kind} \[a frame at byte 5 of a unidir") as caught:
        read_into([], decoder, [message(8, 0) + bytes([kind])])
    assert not caught.value.truncated
    assert caught.value.code == 1


def test_an_error_says_where() -> None:
    decoder = ControlFrameDecoder(from_server=False, carrier="answer", channel=8)
    with pytest.raises(RemoteProtocolError) as caught:
        read_into([], decoder, [b"\x04\x01\x05\x00"])
    assert str(caught.value) == (
        "it comes from the sender of the channel (AQ0-15) "
        "[AckReliable at byte 2 of the answer on a bidirectional stream, channel 8]"
    )


def test_chunks_that_are_not_contiguous_are_refused() -> None:
    decoder = client_uni()
    with pytest.raises(BufferError, match="not contiguous"):
        decoder.feed(memoryview(b"abcd")[::2])
    with pytest.raises(TypeError):
        decoder.feed("text")  # type: ignore[arg-type]
    decoder.feed(message(8, 0))
    assert isinstance(decoder.next(), MessageFrame)


@pytest.mark.parametrize("attempts", [20])
def test_a_decoder_is_not_for_two_threads(attempts: int) -> None:
    """While one thread copies a large payload without the lock of the interpreter."""
    size = 64 * MiB
    payload = bytes(size)
    for _ in range(attempts):
        decoder = client_uni()
        decoder.feed(message(8, 0, payload[:5000])[:4] + encoder.encode_control_finish(size)[1:])
        assert decoder.next() is None
        decoder.feed(payload)
        thread = threading.Thread(target=decoder.next)
        thread.start()
        try:
            while thread.is_alive():
                decoder.feed(b"")
        except RuntimeError as error:
            assert "two threads" in str(error)  # noqa: PT017 - it need not be raised
            return
        finally:
            thread.join()
    raise AssertionError("two threads were never noticed")


@given(st.binary(max_size=300), cuts, st.booleans(), st.sampled_from([*CARRIERS.values()]))
def test_any_bytes_are_frames_or_an_error(
    data: bytes, places: list[int], from_server: bool, carrier: str
) -> None:
    options: dict[str, Any] = {"from_server": from_server, "carrier": carrier}
    if carrier == "answer":
        options["channel"] = 5
    answers = []
    for pieces in ([data], cut(data, places)):
        decoder = ControlFrameDecoder(**options, frame_limit=1 << 16)
        found: list[Frame] = []
        error = None
        try:
            read_into(found, decoder, pieces)
            decoder.end()
        except RemoteProtocolError as raised:
            error = type(raised), str(raised)
        answers.append((found, error))
    assert answers[0] == answers[1]
