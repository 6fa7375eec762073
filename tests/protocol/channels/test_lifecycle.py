"""How channels begin and end: attachments, finish, cancel, close, forget, oneshot."""

from __future__ import annotations

import pytest

from aqueduct._speedups import channels as codec
from aqueduct.config import DEFAULT
from aqueduct.errors import (
    Cancelled,
    ConnectionLost,
    Finished,
    LocalProtocolError,
    LostInTransit,
    ReceiverClosed,
)
from aqueduct.protocol.channels import ids
from aqueduct.protocol.common.receiver import ReceiverHalf
from aqueduct.protocol.common.registry import Attach
from aqueduct.protocol.common.sender import SenderHalf
from aqueduct.protocol.common.state import (
    RECEIVER,
    SENDER,
    ReceiverInput,
    ReceiverState,
    SenderInput,
    SenderState,
)
from tests.support.pair import Pair


def open_channel(
    pair: Pair, *, keep_sender: bool, is_oneshot: bool = False
) -> tuple[SenderHalf, ReceiverHalf]:
    """Attaches a channel to a message on the entrypoint: (sender half, receiver half)."""
    attach = Attach(keep_sender=keep_sender, is_oneshot=is_oneshot, headers=((b"h", b"1"),))
    pair.client.send(pair.sender, b"call", attach)
    pair.run()
    message = pair.server.take(pair.receiver)
    assert message is not None
    ((theirs, headers),) = message.attachments
    assert headers == ((b"h", b"1"),)
    halves = (attach.half, theirs) if keep_sender else (theirs, attach.half)
    assert isinstance(halves[0], SenderHalf) and isinstance(halves[1], ReceiverHalf)
    return halves[0], halves[1]


def test_every_pair_of_state_and_input_is_decided() -> None:
    assert set(SENDER) == {(s, i) for s in SenderState for i in SenderInput}
    assert set(RECEIVER) == {(s, i) for s in ReceiverState for i in ReceiverInput}
    for (state, _), following in SENDER.items():
        if state is SenderState.ENDED:
            assert following in (None, SenderState.ENDED)
    for (closed, _), after in RECEIVER.items():
        if closed is ReceiverState.CLOSED:
            assert after is ReceiverState.CLOSED


@pytest.mark.requirement("AQ-6")
@pytest.mark.requirement("AQ-7")
def test_ids_are_bits_and_count_up_in_their_space() -> None:
    counters = ids.Counters(0)
    assert counters.take(0, False) == 8  # index 0 of this space is the entrypoint
    assert counters.take(1, False) == 2
    assert counters.take(1, False) == 10
    assert counters.take(0, True) == 4
    assert counters.handed_out(0) and counters.handed_out(8) and not counters.handed_out(16)
    assert ids.make(1, 1, True, 2) == 23
    assert (ids.creator(23), ids.sender(23), ids.oneshot(23), ids.index(23)) == (1, 1, True, 2)
    server = ids.Counters(1)
    assert server.take(1, False) == 3 and server.take(0, False) == 1


@pytest.mark.requirement("AQ-6")
@pytest.mark.parametrize(
    ("channel", "fields"),
    [
        (1, (1, 0, False, 0)),
        (2, (0, 1, False, 0)),
        (4, (0, 0, True, 0)),
        (8, (0, 0, False, 1)),
        (2**64 - 8, (0, 0, False, 2**61 - 1)),
        (2**64 - 7, (1, 0, False, 2**61 - 1)),
    ],
)
def test_each_field_of_an_id_has_its_bits(channel: int, fields: tuple[int, int, bool, int]) -> None:
    assert ids.make(*fields) == channel
    read = (ids.creator(channel), ids.sender(channel), ids.oneshot(channel), ids.index(channel))
    assert read == fields


@pytest.mark.requirement("AQ-42")
@pytest.mark.parametrize("keep_sender", [True, False])
def test_attachments_carry_messages_in_both_directions(keep_sender: bool) -> None:
    pair = Pair()
    sender, receiver = open_channel(pair, keep_sender=keep_sender)
    source, sink = (pair.client, pair.server) if keep_sender else (pair.server, pair.client)
    for index in range(5):
        source.send(sender, b"%d" % index)
    pair.run()
    assert [bytes(m.payload) for m in sink.take_all(receiver)] == [b"0", b"1", b"2", b"3", b"4"]


@pytest.mark.requirement("AQ-42")
def test_channels_inside_channels_in_any_depth() -> None:
    pair = Pair()
    sender, receiver = open_channel(pair, keep_sender=True)
    for depth in range(20):
        attach = Attach(keep_sender=True, is_oneshot=False)
        pair.client.send(sender, b"%d" % depth, attach)
        pair.run()
        message = pair.server.take(receiver)
        assert message is not None and bytes(message.payload) == b"%d" % depth
        ((inner, _),) = message.attachments
        assert isinstance(attach.half, SenderHalf) and isinstance(inner, ReceiverHalf)
        sender, receiver = attach.half, inner
    pair.advance(1)
    assert pair.client.core.channels == pair.server.core.channels == 22


@pytest.mark.requirement("AQ-34")
@pytest.mark.requirement("AQ-45")
@pytest.mark.requirement("AQ-R21")
def test_finish_delivers_everything_then_finished_and_no_state_remains() -> None:
    pair = Pair()
    sender, receiver = open_channel(pair, keep_sender=True)
    for index in range(3):
        pair.client.send(sender, b"%d" % index)
    pair.client.finish(sender)
    pair.run()
    # The protocol state is gone at once, the queue outlives it.
    assert pair.server.core.channels == 1
    assert sender.error is None and sender.state is SenderState.ENDED
    assert len(pair.server.take_all(receiver)) == 3
    assert isinstance(receiver.error, Finished)
    assert pair.client.core.channels == 1
    with pytest.raises(LocalProtocolError):
        pair.client.send(sender, b"more")
    with pytest.raises(LocalProtocolError):
        pair.client.finish(sender)


def test_finish_without_a_message() -> None:
    pair = Pair()
    sender, receiver = open_channel(pair, keep_sender=True)
    pair.client.finish(sender)
    pair.run()
    assert isinstance(receiver.error, Finished)
    assert sender.error is None and sender.state is SenderState.ENDED


@pytest.mark.requirement("AQ-R18")
def test_finish_and_cancel_exclude_each_other() -> None:
    pair = Pair()
    first, _ = open_channel(pair, keep_sender=True)
    pair.client.core.finish(first, pair.now)
    with pytest.raises(LocalProtocolError, match="already finished"):
        pair.client.core.cancel(first, pair.now)
    second, _ = open_channel(pair, keep_sender=True)
    pair.client.cancel(second)
    with pytest.raises(Cancelled):
        pair.client.core.finish(second, pair.now)


@pytest.mark.requirement("AQ-35")
@pytest.mark.requirement("AQ-44")
@pytest.mark.requirement("AQ-R20")
def test_cancel_drops_what_was_not_taken() -> None:
    pair = Pair()
    sender, receiver = open_channel(pair, keep_sender=True)
    for index in range(3):
        pair.client.send(sender, b"%d" % index)
    pair.run()
    assert pair.server.take(receiver) is not None
    pair.client.cancel(sender)
    pair.run()
    assert pair.server.take(receiver) is None
    assert isinstance(receiver.error, Cancelled)
    assert isinstance(sender.error, Cancelled)
    assert pair.client.core.channels == pair.server.core.channels == 1
    assert receiver.queue.charged == 0


@pytest.mark.requirement("AQ-43")
@pytest.mark.requirement("AQ-R19")
def test_closing_the_receiver_reaches_the_sender_and_returns_the_budget() -> None:
    pair = Pair()
    sender, receiver = open_channel(pair, keep_sender=True)
    for _ in range(10):
        pair.client.send(sender, bytes(300_000))
    pair.run()
    pair.server.close_receiver(receiver)
    pair.run()
    assert isinstance(sender.error, ReceiverClosed)
    assert isinstance(receiver.error, ReceiverClosed)
    assert sender.queued == 0
    assert pair.server.core.snapshot()["budget_used_bytes"] == 0
    with pytest.raises(ReceiverClosed):
        pair.client.send(sender, b"more")


@pytest.mark.requirement("AQ-R26")
def test_attachments_of_dropped_messages_are_closed_and_cancelled() -> None:
    pair = Pair()
    sender, receiver = open_channel(pair, keep_sender=True)
    kept = Attach(keep_sender=True, is_oneshot=False)
    given = Attach(keep_sender=False, is_oneshot=False)
    pair.client.send(sender, b"", kept, given)
    pair.run()
    pair.server.close_receiver(receiver)
    pair.advance(2)
    assert isinstance(kept.half, SenderHalf) and isinstance(given.half, ReceiverHalf)
    assert isinstance(kept.half.error, ReceiverClosed)
    assert isinstance(given.half.error, Cancelled)
    assert pair.client.core.channels == pair.server.core.channels == 1


@pytest.mark.requirement("AQ-R28")
@pytest.mark.parametrize("keep_sender", [True, False])
def test_oneshot_is_one_message(keep_sender: bool) -> None:
    pair = Pair()
    sender, receiver = open_channel(pair, keep_sender=keep_sender, is_oneshot=True)
    source, sink = (pair.client, pair.server) if keep_sender else (pair.server, pair.client)
    source.send(sender, b"answer")
    pair.run()
    with pytest.raises(LocalProtocolError):
        source.send(sender, b"again")
    assert [bytes(m.payload) for m in sink.take_all(receiver)] == [b"answer"]
    assert isinstance(receiver.error, Finished)
    assert sender.error is None and sender.state is SenderState.ENDED
    assert pair.client.core.channels == pair.server.core.channels == 1


@pytest.mark.requirement("AQ-R28")
def test_an_unused_oneshot_cancels() -> None:
    pair = Pair()
    first, receiver = open_channel(pair, keep_sender=True, is_oneshot=True)
    pair.client.cancel(first)
    second, other = open_channel(pair, keep_sender=True, is_oneshot=True)
    pair.client.finish(second)
    pair.run()
    assert isinstance(receiver.error, Cancelled)
    assert isinstance(other.error, Cancelled)
    assert pair.client.core.channels == pair.server.core.channels == 1


@pytest.mark.requirement("AQ-40")
@pytest.mark.requirement("AQ-R25")
def test_messages_may_overtake_the_message_that_carries_their_channel() -> None:
    pair = Pair()
    big, _ = open_channel(pair, keep_sender=True)
    attach = Attach(keep_sender=True, is_oneshot=False)
    # The attaching message is held back by flow control: nobody takes the ones before it.
    for _ in range(3):
        pair.client.send(big, bytes(8 << 20))
    pair.client.send(big, b"carrier", attach)
    assert isinstance(attach.half, SenderHalf)
    pair.client.send(attach.half, b"early")
    pair.client.finish(attach.half)
    pair.run()
    receiver = pair.server.core._registry.known(big.channel)
    assert isinstance(receiver, ReceiverHalf)
    assert pair.server.core.channels == 3  # it counts until its message comes (AQ-R26)
    carrier = None
    for _ in range(4):
        carrier = pair.server.take(receiver)
        pair.run()
    assert carrier is not None and bytes(carrier.payload) == b"carrier"
    ((inner, _),) = carrier.attachments
    assert [bytes(m.payload) for m in pair.server.take_all(inner)] == [b"early"]
    assert isinstance(inner.error, Finished)
    assert pair.server.core.channels == 2


@pytest.mark.requirement("AQ-40")
@pytest.mark.requirement("AQ-R24")
def test_a_sequence_for_a_channel_of_ours_without_state_is_answered_by_forget() -> None:
    pair = Pair()
    sender, receiver = open_channel(pair, keep_sender=False)
    pair.client.close_receiver(receiver)
    pair.run()
    assert isinstance(sender.error, ReceiverClosed)
    streams = len(pair.server.raw)
    # A late sequence of the server, as a network may deliver it.
    pair.server.inject(codec.encode_route_to(sender.channel), *codec.encode_message(0, b"late"))
    pair.run()
    assert len(pair.server.raw) == streams  # not before 1 s after our CLOSE_RECEIVER
    pair.advance(DEFAULT.timing.destroyed_memory)
    forgets = [raw for raw in pair.server.raw.values() if raw.endswith(codec.FORGET_CHANNEL)]
    assert len(forgets) == 1
    assert pair.server.core.error is None and pair.client.core.error is None


@pytest.mark.requirement("AQ-41")
@pytest.mark.requirement("AQ-23")
def test_forget_channel_destroys_both_kinds_of_halves() -> None:
    for keep_sender in (True, False):
        pair = Pair()
        sender, receiver = open_channel(pair, keep_sender=keep_sender)
        pair.client.inject(codec.encode_route_to(sender.channel), codec.FORGET_CHANNEL)
        pair.run()
        theirs = receiver if keep_sender else sender
        assert isinstance(theirs.error, LostInTransit)
        assert pair.server.core.channels == 1


@pytest.mark.requirement("AQ-46")
def test_what_reaches_a_destroyed_channel_of_the_peer_is_ignored() -> None:
    pair = Pair()
    sender, receiver = open_channel(pair, keep_sender=True)
    pair.server.close_receiver(receiver)
    pair.run()
    late = [codec.encode_route_to(sender.channel), *codec.encode_message(0, bytes(100_000))]
    pair.client.inject(*late)
    pair.advance(3)
    assert pair.server.core.error is None
    assert pair.server.core.channels == 1
    assert pair.server.core.snapshot()["streams_in"] <= 1


@pytest.mark.requirement("AQ-R32")
def test_the_entrypoint_may_end_while_other_channels_live() -> None:
    pair = Pair()
    sender, receiver = open_channel(pair, keep_sender=True)
    pair.client.finish(pair.sender)
    pair.run()
    assert isinstance(pair.receiver.error, Finished)
    pair.client.send(sender, b"still here")
    pair.run()
    assert len(pair.server.take_all(receiver)) == 1


@pytest.mark.requirement("AQ-R27")
def test_a_lost_connection_is_read_by_every_handle() -> None:
    pair = Pair()
    sender, receiver = open_channel(pair, keep_sender=True)
    pair.client.send(sender, b"queued")
    pair.run()
    pair.link.cut()
    assert isinstance(sender.error, ConnectionLost)
    assert isinstance(receiver.error, ConnectionLost)
    assert isinstance(pair.sender.error, ConnectionLost)
    assert len(receiver.queue) == 1  # what was delivered can still be read
    with pytest.raises(ConnectionLost):
        pair.client.send(sender, b"x")


def test_closing_sends_no_error() -> None:
    pair = Pair()
    pair.client.core.close(0, "done")
    pair.client.flush()
    pair.run()
    error = pair.server.ended
    assert error is not None and (error.code, error.reason, error.remote) == (0, "done", True)


@pytest.mark.requirement("AQ-R27")
def test_a_close_loses_the_channels_in_unread_messages() -> None:
    pair = Pair()
    sender, receiver = open_channel(pair, keep_sender=True)
    for _ in range(3):
        pair.client.send(sender, bytes(8 << 20))
    inner = Attach(keep_sender=True, is_oneshot=False)
    pair.client.send(sender, b"never admitted", inner)
    assert isinstance(inner.half, SenderHalf)
    deeper = Attach(keep_sender=False, is_oneshot=False)
    pair.client.send(inner.half, b"deeper", deeper)
    pair.run()
    pair.server.close_receiver(receiver)
    pair.advance(3)
    assert isinstance(inner.half.error, LostInTransit)
    assert isinstance(deeper.half, ReceiverHalf)
    assert isinstance(deeper.half.error, LostInTransit)
    assert pair.client.core.channels == pair.server.core.channels == 1
