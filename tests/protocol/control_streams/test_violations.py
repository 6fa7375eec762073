"""What a peer may not do in the control-stream draft, each with its close code; what is ignored."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from aqueduct._speedups.channels.encoder import VERSION
from aqueduct._speedups.control_streams import control_encoder as encoder
from aqueduct.config import DEFAULT, Limits
from tests.protocol.control_streams.lone import Lone, message, mine

Play = Callable[[Lone], None]
VIOLATIONS: dict[str, tuple[Play, str, int, tuple[str, ...]]] = {}


def violation(
    name: str, *requirements: str, to: str = "server", code: int = 2
) -> Callable[[Play], Play]:
    def add(play: Play) -> Play:
        VIOLATIONS[name] = (play, to, code, requirements)
        return play

    return add


def inner(lone: Lone, *, sender: bool) -> Any:
    """A half of a channel of the peer, at a server; ``mine(1)`` is its control stream."""
    lone.say(message(0, 0, b"", [1 if sender else 8]))
    got = lone.take(lone.receiver)
    assert got is not None
    return got.attachments[0][0]


# ------------------------------------------------------------ where frames may stand


@violation("a message on a bidirectional stream", "AQ0-13")
def message_on_bidi(lone: Lone) -> None:
    lone.open(message(0))


@violation("a message on a control stream", "AQ0-13")
def message_on_control(lone: Lone) -> None:
    lone.on(mine(0), message(0))


@violation("a ChannelControl on a one-way stream", "AQ0-25", "AQ0-12", to="client")
def control_on_uni(lone: Lone) -> None:
    half = lone.create(keep_sender=True)
    lone.say(encoder.encode_channel_control(half.channel))


@violation("a ChannelControl in an answer", "AQ0-12")
def control_in_answer(lone: Lone) -> None:
    lone.on(mine(0), encoder.encode_channel_control(2))


@violation("a second ChannelControl on a stream", "AQ0-12", to="client")
def control_twice(lone: Lone) -> None:
    half = lone.create(keep_sender=True)
    lone.control(half.channel, encoder.encode_channel_control(half.channel))


@violation("a frame of a channel on a stream without ChannelControl", "AQ0-14")
def no_control(lone: Lone) -> None:
    lone.open(encoder.encode_control_sent_unreliable(1))


@violation("a Version in the middle", "AQ0-10")
def version_in_the_middle(lone: Lone) -> None:
    lone.say(message(0), VERSION)


@violation("FinishSender from the receiver", "AQ0-14", to="client")
def finish_from_receiver(lone: Lone) -> None:
    lone.control(0, encoder.encode_control_finish(0))


@violation("acks from the sender", "AQ0-15")
def acks_from_sender(lone: Lone) -> None:
    lone.on(mine(0), encoder.encode_control_acks((1,)))


@violation("something after FinishSender", "AQ0-14")
def after_finish(lone: Lone) -> None:
    lone.on(mine(0), encoder.encode_control_finish(3), encoder.encode_control_sent_unreliable(1))


@violation("something after CloseReceiver", "AQ0-16", to="client")
def after_close(lone: Lone) -> None:
    lone.control(0, encoder.encode_control_close(()), encoder.encode_control_close(()))


@violation("ClosedChannelLost beside another frame", "AQ0-17")
def lost_not_alone(lone: Lone) -> None:
    lone.say(message(0), encoder.encode_closed_channel_lost(8))


@violation("ClosedChannelLost in a datagram", "AQ0-17")
def lost_in_datagram(lone: Lone) -> None:
    lone.datagram(encoder.encode_closed_channel_lost(8))


@violation("control frames in a datagram", "AQ0-14")
def control_in_datagram(lone: Lone) -> None:
    lone.datagram(encoder.encode_control_finish(0))


@violation("headers of a server on a stream that it opened", "AQ0-19", to="client")
def server_headers_elsewhere(lone: Lone) -> None:
    lone.open(VERSION, encoder.encode_connection_control(()))


@violation("headers in an answer on a control stream", "AQ0-19")
def headers_in_answer(lone: Lone) -> None:
    lone.on(mine(0), VERSION, encoder.encode_connection_control(()))


# ------------------------------------------------------------ ids


@violation("a ChannelControl for an id of one's own", "AQ0-25", "AQ0-R11")
def control_of_own(lone: Lone) -> None:
    lone.open(encoder.encode_channel_control(8))


@violation("a ChannelControl for what was never created", "AQ0-R14", to="client")
def control_of_the_unborn(lone: Lone) -> None:
    lone.control(8)


@violation("a message for what was never created", "AQ0-R14", "AQ0-23", to="client")
def message_for_the_unborn(lone: Lone) -> None:
    lone.say(message(1))


@violation("a datagram for what was never created", "AQ0-R14", to="client")
def datagram_for_the_unborn(lone: Lone) -> None:
    lone.datagram(message(1))


@violation("a message on a channel that is sent here", "AQ0-21")
def message_the_wrong_way(lone: Lone) -> None:
    inner(lone, sender=True)
    lone.say(message(1))


@violation("ClosedChannelLost for a channel of the receiver", "AQ0-R11", to="client")
def lost_of_mine(lone: Lone) -> None:
    half = lone.create(keep_sender=True)
    lone.say(encoder.encode_closed_channel_lost(half.channel))


@violation("an attachment that the receiver created", "AQ0-24", to="client")
def attached_of_mine(lone: Lone) -> None:
    half = lone.create(keep_sender=False)
    lone.say(b"\x03" + bytes([half.channel, 0, 1, 8, 0]))


@violation("a sender attached to two messages", "AQ0-24")
def sender_attached_twice(lone: Lone) -> None:
    inner(lone, sender=True)
    lone.say(message(0, 1, b"", [1]))


@violation("a receiver attached to two messages", "AQ0-24")
def receiver_attached_twice(lone: Lone) -> None:
    inner(lone, sender=False)
    lone.say(message(0, 1, b"", [8]))


@violation("a channel attached again after it ended", "AQ0-24")
def attached_after_the_end(lone: Lone) -> None:
    lone.close(inner(lone, sender=False))
    lone.datagram(message(0, 0, b"", [8]))


@violation("the entrypoint as an attachment", "AQ0-7")
def entrypoint_attached(lone: Lone) -> None:
    lone.say(b"\x03\x00\x00\x01\x00\x00")


# ------------------------------------------------------------ numbers


@violation("one number twice", "AQ0-R16")
def number_twice(lone: Lone) -> None:
    lone.say(message(0, 3), message(0, 3))


@violation("acks of what was never sent", "AQ0-R16", "AQ0-26", to="client")
def ack_unsent(lone: Lone) -> None:
    lone.send(lone.sender)
    lone.control(0, encoder.encode_control_acks((2,)))


@violation("an ack twice", "AQ0-26", to="client")
def ack_twice(lone: Lone) -> None:
    for _ in range(3):
        lone.send(lone.sender)
    lone.control(0, encoder.encode_control_acks((0, 1, 1)), encoder.encode_control_acks((2,)))


@violation("acks of datagrams that were never sent", "AQ0-R16", to="client")
def ack_unsent_datagrams(lone: Lone) -> None:
    lone.lossy(lone.sender)
    lone.control(0, encoder.encode_control_ack_nacks((1, 1)))


@violation("acks of datagrams where none was sent", "AQ0-R16", to="client")
def ack_no_datagrams(lone: Lone) -> None:
    lone.control(0, encoder.encode_control_ack_nacks((1,)))


@violation("a close that acks what was never sent", "AQ0-30", "AQ0-R16", to="client")
def close_unsent(lone: Lone) -> None:
    lone.control(0, encoder.encode_control_close((1,)))


@violation("more announced than there are numbers", "AQ0-14")
def announced_too_much(lone: Lone) -> None:
    for _ in range(2):
        lone.on(mine(0), encoder.encode_control_sent_unreliable(2**64 - 1))


@violation("FinishSender that counts less than came", "AQ0-28")
def finish_too_low(lone: Lone) -> None:
    lone.say(message(0, 4))
    lone.on(mine(0), encoder.encode_control_finish(4))


@violation("a message beyond what FinishSender counts", "AQ0-28", "AQ0-27")
def message_after_finish(lone: Lone) -> None:
    lone.on(mine(0), encoder.encode_control_finish(4))
    lone.say(message(0, 4))


@violation("two messages of a oneshot channel announced", "AQ0-R16")
def oneshot_announced_twice(lone: Lone) -> None:
    lone.say(message(0, 0, b"", [12]))
    lone.on(mine(1), *[encoder.encode_control_sent_unreliable(1)] * 2)


@violation("a oneshot channel with a second number", "AQ0-R16")
def oneshot_number(lone: Lone) -> None:
    lone.say(b"\x03\x0c\x01\x00\x00")


@violation("a oneshot channel that finishes with its datagram and a message", "AQ0-R16")
def oneshot_both(lone: Lone) -> None:
    lone.say(message(0, 0, b"", [12]))
    lone.on(mine(1), encoder.encode_control_sent_unreliable(1), encoder.encode_control_finish(1))


# ------------------------------------------------------------ ends of streams


@violation("a control stream finished without FinishSender", "AQ0-R4")
def fin_without_finish(lone: Lone) -> None:
    lone.on(mine(0), fin=True)


@violation("a control stream finished without CloseReceiver", "AQ0-R4", to="client")
def fin_without_close(lone: Lone) -> None:
    lone.control(0, fin=True)


@violation("the same after a cancel", "AQ0-R4", "AQ0-31", to="client")
def fin_after_cancel(lone: Lone) -> None:
    control = lone.control(0)
    lone.cancel(lone.sender)
    lone.on(control, fin=True)


@violation("a stream that ends within a frame", "AQ0-8", code=1)
def cut(lone: Lone) -> None:
    lone.on(mine(0), b"\x07", fin=True)


@violation("an empty stream", "AQ0-8", code=1)
def empty(lone: Lone) -> None:
    lone.say()


@violation("an empty datagram", "AQ0-8", code=1)
def empty_datagram(lone: Lone) -> None:
    lone.datagram()


@violation("ranges that end with a zero", "AQ0-6", to="client", code=1)
def zero_range(lone: Lone) -> None:
    lone.send(lone.sender)
    lone.control(0, b"\x05\x02\x01\x00")


@violation("a frame that is too large", "AQ0-R16", code=5)
def too_large(lone: Lone) -> None:
    lone.say(b"\x03\x00\x00\x00\xff\xff\xff\xff\x7f", fin=False)


@violation("too many attachments", "AQ0-R16", code=5)
def too_many(lone: Lone) -> None:
    lone.say(message(0, 0, b"", [8 * k for k in range(1, 12)]))


@violation("too many holes", "AQ0-R16", code=5)
def holes(lone: Lone) -> None:
    for number in range(0, 40, 2):
        lone.say(message(0, number))


CASES = [
    pytest.param(name, id=name, marks=[pytest.mark.requirement(r) for r in entry[3]])
    for name, entry in VIOLATIONS.items()
]
LIMITS = Limits(attachments=10, received_ranges=10)


@pytest.mark.requirement("AQ0-35")
@pytest.mark.requirement("AQ0-R16")
@pytest.mark.parametrize("name", CASES)
def test_a_violation_ends_the_connection_with_its_code(name: str) -> None:
    play, to, code, _ = VIOLATIONS[name]
    lone = Lone(to, dataclasses.replace(DEFAULT, limits=LIMITS))
    assert lone.code is None
    play(lone)
    assert lone.code == code
    assert lone.core.channels == 0


# ------------------------------------------------------------ what is ignored


@pytest.mark.requirement("AQ0-R4")
def test_a_fin_at_a_receiver_that_has_ceased_is_ignored() -> None:
    lone = Lone("server")
    lone.close(lone.receiver)
    lone.on(mine(0), fin=True)
    assert lone.code is None


@pytest.mark.requirement("AQ0-R4")
@pytest.mark.requirement("AQ0-34")
def test_what_a_control_stream_says_to_a_half_that_has_ceased_is_ignored() -> None:
    lone = Lone()
    lone.send(lone.sender)
    control = lone.control(0, encoder.encode_control_close((1,)), fin=True)
    assert lone.code is None and lone.end(control) == "fin"
    server = Lone("server")
    server.close(server.receiver)
    server.on(mine(0), encoder.encode_control_finish(99), fin=True)
    server.say(message(0, 1000))
    assert server.code is None


@pytest.mark.requirement("AQ0-R16")
def test_a_datagram_twice_is_ignored() -> None:
    lone = Lone("server")
    for _ in range(3):
        lone.datagram(message(0, 7, b"x"))
    assert lone.take(lone.receiver) is not None
    assert lone.take(lone.receiver) is None
    assert lone.code is None


@pytest.mark.requirement("AQ0-18")
@pytest.mark.parametrize("code", [0, 1, 99])
def test_the_code_of_a_reset_matters_only_if_it_is_that_of_loss(code: int) -> None:
    lone = Lone("server")
    half = inner(lone, sender=True)
    lone.reset(mine(1), code)
    assert "closed the receiver" in str(half.error)
    assert lone.end(mine(1)) == "fin"
    lone = Lone("server")
    lone.reset(mine(0), code)
    assert "cancelled" in str(lone.receiver.error)


@pytest.mark.requirement("AQ0-8")
def test_a_reset_of_a_message_stream_is_no_fault() -> None:
    lone = Lone("server")
    number = lone.say(message(0, 0, bytes(1000))[:500], fin=False)
    lone.reset(number, 1)
    lone.reset(number + 1, 1)  # one that never said anything
    assert lone.code is None and lone.receiver.error is None
