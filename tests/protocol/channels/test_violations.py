"""A peer that breaks a rule is closed with the code of AQ-R30 and a reason that names the rule."""

from __future__ import annotations

import pytest

from aqueduct._speedups import channels as codec
from aqueduct.protocol.common.registry import Attach
from tests.protocol.channels.test_lifecycle import open_channel
from tests.support.pair import Pair


def violate(pair: Pair, *frames: bytes, fin: bool = True, from_server: bool = False) -> None:
    """Lets one side say something that its core would never say."""
    (pair.server if from_server else pair.client).inject(*frames, fin=fin)
    pair.run()


def message(number: int, payload: bytes = b"") -> bytes:
    return b"".join(bytes(part) for part in codec.encode_message(number, payload))


ENTRY = codec.encode_route_to(0)
requirement = pytest.mark.requirement


@pytest.mark.parametrize(
    ("frames", "code", "names"),
    [
        pytest.param([b"\x00"], 1, "tag", id="unknown tag", marks=requirement("AQ-9")),
        pytest.param([ENTRY, b"\x04"], 1, "", id="cut in a frame", marks=requirement("AQ-R7")),
        pytest.param(
            [ENTRY, codec.ACK_VERSION],
            2,
            "",
            id="prelude after ROUTE_TO",
            marks=requirement("AQ-9"),
        ),
        pytest.param(
            [ENTRY, codec.CLOSE_RECEIVER],
            2,
            "",
            id="close by the sender's side",
            marks=requirement("AQ-24"),
        ),
        pytest.param(
            [codec.encode_connection_headers(())],
            2,
            "twice",
            id="headers twice",
            marks=requirement("AQ-R10"),
        ),
        pytest.param(
            [codec.encode_route_to(1), message(0)],
            2,
            "AQ-R4",
            id="a channel never created",
            marks=requirement("AQ-R4"),
        ),
        pytest.param(
            [ENTRY, message(0), message(0)],
            2,
            "AQ-R13",
            id="a number twice",
            marks=requirement("AQ-R13"),
        ),
        pytest.param(
            [ENTRY, message(3), codec.encode_finish_sender(2)],
            2,
            "AQ-R21",
            id="finish too low",
            marks=requirement("AQ-R21"),
        ),
        pytest.param(
            [ENTRY, codec.encode_finish_sender(1), message(0)],
            2,
            "AQ-R18",
            id="after finish",
            marks=requirement("AQ-R18"),
        ),
        pytest.param(
            [ENTRY, codec.encode_finish_sender(0), message(0)],
            2,
            "AQ-R18",
            id="after the end",
            marks=requirement("AQ-R18"),
        ),
        pytest.param(
            [ENTRY, codec.encode_finish_sender(9), message(0, bytes(99_999))],
            2,
            "AQ-R18",
            id="a large message after finish",
            marks=requirement("AQ-R18"),
        ),
        pytest.param(
            [ENTRY, message(0), codec.encode_finish_sender(1), codec.encode_finish_sender(1)],
            2,
            "AQ-R18",
            id="finish twice",
            marks=requirement("AQ-R18"),
        ),
        pytest.param(
            [ENTRY, codec.encode_finish_sender(0), codec.CANCEL_SENDER],
            2,
            "AQ-R18",
            id="cancel after finish",
            marks=requirement("AQ-R18"),
        ),
        pytest.param(
            [ENTRY, codec.encode_finish_sender(0), codec.encode_sent_unreliable(1)],
            2,
            "AQ-R18",
            id="announcement after finish",
            marks=requirement("AQ-R18"),
        ),
        pytest.param(
            [codec.encode_route_to(4), codec.encode_sent_unreliable(1), message(0)],
            2,
            "AQ-R28",
            id="a oneshot with a message in each space",
            marks=requirement("AQ-R28"),
        ),
        pytest.param(
            [
                codec.encode_route_to(4),
                codec.encode_sent_unreliable(1),
                codec.encode_finish_sender(1),
            ],
            2,
            "AQ-R28",
            id="a oneshot that counts a message in each space",
            marks=requirement("AQ-R28"),
        ),
        pytest.param(
            [ENTRY, codec.encode_sent_unreliable(2**64 - 1), codec.encode_sent_unreliable(1)],
            2,
            "AQ-R17",
            id="announced above 2^64-1",
            marks=requirement("AQ-R17"),
        ),
    ],
)
@pytest.mark.requirement("AQ-R30")
def test_violations_close_with_their_code(frames: list[bytes], code: int, names: str) -> None:
    pair = Pair()
    violate(pair, *frames)
    assert pair.server.close_code == code
    error = pair.client.ended
    assert error is not None and error.code == code and error.remote
    assert names in error.reason
    assert pair.receiver.error is not None


@pytest.mark.requirement("AQ-R18")
@pytest.mark.parametrize(
    "frame",
    [codec.encode_finish_sender(5), codec.CANCEL_SENDER, codec.encode_sent_unreliable(1)],
    ids=["finish", "cancel", "announcement"],
)
def test_what_follows_a_finish_on_another_stream(frame: bytes) -> None:
    pair = Pair()
    violate(pair, ENTRY, codec.encode_finish_sender(5))
    assert pair.server.core.error is None
    violate(pair, ENTRY, frame)
    assert pair.server.close_code == 2
    assert "AQ-R18" in pair.server.ended.reason  # type: ignore[union-attr]


@pytest.mark.requirement("AQ-R18")
@pytest.mark.requirement("AQ-R23")
def test_forget_may_follow_a_finish() -> None:
    pair = Pair()
    violate(pair, ENTRY, codec.encode_finish_sender(0), codec.FORGET_CHANNEL)
    assert pair.server.core.error is None
    assert type(pair.receiver.error).__name__ == "Finished"
    assert pair.server.core.snapshot()["streams_in"] <= 1


@pytest.mark.requirement("AQ-R23")
@pytest.mark.parametrize("frame", [codec.CANCEL_SENDER, message(0)], ids=["cancel", "message"])
def test_what_follows_a_forget_breaks_no_rule(frame: bytes) -> None:
    """After a FINISH_SENDER these are errors, but nothing behind FORGET_CHANNEL matters."""
    pair = Pair()
    violate(pair, ENTRY, codec.encode_finish_sender(0), codec.FORGET_CHANNEL, frame)
    assert pair.server.core.error is None
    assert pair.server.core.snapshot()["streams_in"] <= 1


@pytest.mark.requirement("AQ-28")
def test_a_sequence_without_version_at_the_start() -> None:
    pair = Pair(connect=False)
    pair.client.mute = True
    pair.link.client.write(0, [codec.encode_connection_headers(())], True)
    pair.link.client.flush()
    pair.link.run()
    assert pair.server.close_code == 2


@pytest.mark.requirement("AQ-28")
def test_a_route_without_version_at_the_start() -> None:
    pair = Pair(connect=False)
    pair.client.mute = True
    pair.link.client.write(0, [ENTRY, message(0)], True)
    pair.link.client.flush()
    pair.link.run()
    assert pair.server.close_code == 2
    assert pair.receiver.error is not None


@pytest.mark.requirement("AQ-R5")
def test_another_version_closes_with_version_error() -> None:
    pair = Pair(connect=False)
    pair.client.mute = True
    other = codec.VERSION.replace(b"0.0.0-AFTER", b"9.9.9-AFTER")
    pair.link.client.write(0, [other], True)
    pair.link.client.flush()
    pair.link.run()
    assert pair.server.close_code == 3


@pytest.mark.requirement("AQ-R7")
@pytest.mark.requirement("AQ-11")
def test_empty_sequences_and_cut_ones_that_are_reset_are_no_error() -> None:
    pair = Pair()
    violate(pair)
    stream = pair.client.inject(ENTRY, b"\x04\x00", fin=False)
    pair.run()
    pair.client.core._shared.outgoing.reset(stream, 0)
    pair.run()
    assert pair.server.core.error is None
    pair.client.send(pair.sender, b"fine")
    pair.run()
    assert len(pair.server.take_all(pair.receiver)) == 1


@pytest.mark.requirement("AQ-11")
def test_a_reset_in_the_middle_of_a_payload_returns_its_budget() -> None:
    pair = Pair()
    stream = pair.client.inject(ENTRY, message(0, bytes(1 << 20))[: 1 << 19], fin=False)
    pair.run()
    assert pair.server.core.snapshot()["budget_used_bytes"] > 1 << 20
    pair.client.core._shared.outgoing.reset(stream, 0)
    pair.run()
    assert pair.server.core.snapshot()["budget_used_bytes"] == 0


@pytest.mark.requirement("AQ-R4")
def test_one_channel_attached_twice() -> None:
    pair = Pair()
    attached = b"".join(
        bytes(part) for part in codec.encode_message(0, b"", (), [(8, ())])
    ) + b"".join(bytes(part) for part in codec.encode_message(1, b"", (), [(8, ())]))
    violate(pair, ENTRY, attached)
    assert pair.server.close_code == 2
    assert "attached twice" in pair.server.ended.reason  # type: ignore[union-attr]


@pytest.mark.requirement("AQ-R16")
def test_an_ack_for_what_was_never_sent() -> None:
    pair = Pair()
    violate(pair, ENTRY, codec.encode_ack_reliable((0, 1)), from_server=True)
    assert pair.client.close_code == 2


@pytest.mark.requirement("AQ-R15")
def test_acks_of_datagrams_never_sent() -> None:
    pair = Pair()
    violate(pair, ENTRY, codec.encode_ack_nack_unreliable(0, (1,)), from_server=True)
    assert pair.client.close_code == 2


@pytest.mark.requirement("AQ-R13")
def test_two_halves_that_hide_one_number_in_two_streams() -> None:
    pair = Pair()
    whole = message(0, bytes(100_000))
    streams = [pair.client.inject(ENTRY, whole[:50_000], fin=False) for _ in range(2)]
    pair.run()
    for stream in streams:
        pair.client.core._shared.outgoing.write(stream, [whole[50_000:]], fin=True)
    pair.run()
    assert pair.server.close_code == 2
    assert "AQ-R13" in pair.server.ended.reason  # type: ignore[union-attr]


@pytest.mark.requirement("AQ-R31")
def test_declared_lengths_cost_nothing_before_they_are_admitted() -> None:
    """A thousand lies of 16 MiB: memory is taken by admission, never by declaration."""
    pair = Pair()
    sender, _ = open_channel(pair, keep_sender=True)
    head = codec.encode_route_to(sender.channel)
    lie = message(0, b"")[:-1] + b"\x80\x80\xf0\x07"  # a payload of just under 16 MiB
    for index in range(700):
        body = lie if not index else lie.replace(b"\x04\x00", bytes([4]) + _varint(index), 1)
        pair.client.inject(head, body, bytes(1000), fin=False)
    pair.run()
    assert pair.server.core.error is None
    flow = pair.server.core.config.flow
    snapshot = pair.server.core.snapshot()
    assert snapshot["budget_used_bytes"] <= flow.channel_receive_bytes + flow.read_ahead
    assert snapshot["streams_in"] == 701


def test_attachments_of_a_violating_peer_end_in_connection_lost() -> None:
    pair = Pair()
    attach = Attach(keep_sender=False, is_oneshot=False)
    pair.client.send(pair.sender, b"", attach)
    pair.run()
    violate(pair, b"\x00")
    assert attach.half is not None and attach.half.error is not None
    assert type(attach.half.error).__name__ == "ConnectionLost"


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)
