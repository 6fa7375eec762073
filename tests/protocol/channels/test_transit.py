"""Channels on their way: accessible, pending, lost; and what is dropped with a message."""

from __future__ import annotations

import dataclasses

import pytest

from aqueduct._speedups import channels as codec
from aqueduct.config import DEFAULT, Limits
from aqueduct.errors import Cancelled, ConnectionLost, Finished, LostInTransit, ReceiverClosed
from aqueduct.protocol.common.receiver import ReceiverHalf
from aqueduct.protocol.common.registry import Attach, Half
from aqueduct.protocol.common.sender import Mode, SenderHalf
from tests.protocol.channels.peer import CLOSE, FORGET, Peer, message, route
from tests.support.pair import Pair

requirement = pytest.mark.requirement
ack = codec.encode_ack_reliable
CLOSED = codec.CLOSE_RECEIVER


def settle(channel: int, *ranges: int) -> bytes:
    return codec.encode_ack_nack_unreliable(channel, ranges)


class Tree:
    """A client under test; the test speaks for the server. Channels are named by letters."""

    def __init__(self) -> None:
        self.peer = Peer("server")
        self.halves: dict[str, Half] = {"entry": self.peer.pair.sender}

    def send(self, on: str, name: str, *, unreliable: bool = False, receiver: bool = False) -> None:
        attach = Attach(keep_sender=not receiver, is_oneshot=False)
        mode = Mode.UNRELIABLE if unreliable else Mode.ORDERED
        self.peer.other.send(self.halves[on], b"", attach, mode=mode)
        assert attach.half is not None
        self.halves[name] = attach.half

    def channel(self, name: str) -> int:
        return self.halves[name].channel

    def hear(self, name: str, *frames: bytes) -> None:
        self.peer.say(route(self.channel(name)), *frames)
        assert self.peer.core.error is None

    def lost(self) -> str:
        """Which handles read "lost in transit"."""
        names = [
            name for name, half in self.halves.items() if isinstance(half.error, LostInTransit)
        ]
        return "".join(names)

    def forgotten(self) -> str:
        """For which the peer was told FORGET_CHANNEL."""
        return "".join(
            name for name, half in self.halves.items() if [FORGET] in self.peer.told(half.channel)
        )

    def accessible(self) -> str:
        names = [
            name
            for name, half in self.halves.items()
            if isinstance(half, SenderHalf) and half.accessible and name != "entry"
        ]
        return "".join(names)


@requirement("AQ-R27")
@requirement("AQ-47")
def test_an_ack_on_an_accessible_channel_makes_its_channels_accessible() -> None:
    tree = Tree()
    tree.send("entry", "A")
    tree.send("A", "B")
    tree.send("B", "C")
    assert tree.accessible() == ""
    # From below: pending until what carries them is accessible.
    tree.hear("B", ack((0, 1)))
    tree.hear("A", ack((0, 1)))
    assert tree.accessible() == ""
    tree.hear("entry", ack((0, 1)))
    assert tree.accessible() == "ABC"
    # That is final: the end of the channel they came by loses none.
    tree.hear("A", CLOSED)
    assert tree.lost() == tree.forgotten() == ""
    tree.send("C", "D")
    tree.hear("C", ack((0, 1)))
    assert tree.accessible() == "ABCD"


@requirement("AQ-R27")
@requirement("AQ-47")
@requirement("AQ-38")
def test_a_nack_loses_a_channel_and_all_that_hangs_on_it() -> None:
    tree = Tree()
    tree.send("entry", "A", unreliable=True)
    tree.send("entry", "X", unreliable=True)
    tree.send("A", "B")
    tree.send("A", "C", receiver=True)
    tree.send("B", "D", unreliable=True)
    tree.send("B", "E")
    tree.hear("B", ack((0, 1)))  # acked all the same: E is lost with B
    tree.hear("entry", settle(0, 0, 1, 1))
    assert tree.lost() == "ABCDE"
    assert tree.forgotten() == "ABCDE"
    assert tree.accessible() == "X"
    assert tree.peer.core.channels == 2
    with pytest.raises(LostInTransit):
        tree.peer.other.send(tree.halves["A"], b"more")
    with pytest.raises(LostInTransit):
        tree.peer.other.finish(tree.halves["B"])


@requirement("AQ-R27")
@requirement("AQ-32")
def test_a_number_is_one_in_its_own_space_alone() -> None:
    tree = Tree()
    tree.send("entry", "A")
    tree.send("entry", "B", unreliable=True)
    tree.send("entry", "C")
    tree.send("entry", "D", unreliable=True)
    tree.hear("entry", settle(0, 0, 1))
    assert (tree.lost(), tree.accessible()) == ("B", "")
    tree.hear("entry", ack((1, 1)))
    assert (tree.lost(), tree.accessible()) == ("B", "C")
    assert tree.forgotten() == "B"


@requirement("AQ-R27")
@requirement("AQ-R29")
def test_the_streams_of_a_lost_channel_are_reset_with_code_2() -> None:
    tree = Tree()
    peer = tree.peer
    tree.send("entry", "A", unreliable=True)
    peer.other.send(tree.halves["A"], b"ordered")
    peer.other.send(tree.halves["A"], b"x", mode=Mode.UNRELIABLE)
    tree.send("entry", "B", unreliable=True, receiver=True)
    peer.say(route(tree.channel("B")), message(0), fin=False)
    peer.pair.advance(0.1)  # with a SENT_UNRELIABLE and an ack
    open_streams = [*peer.streams(tree.channel("A")), *peer.streams(tree.channel("B"))]
    assert [said.reset for said in open_streams] == [None] * 3
    tree.hear("entry", settle(0, 0, 2))
    peer.look()
    assert [said.reset for said in open_streams] == [2] * 3
    assert tree.lost() == tree.forgotten() == "AB"


@requirement("AQ-R27")
@requirement("AQ-R19")
@requirement("AQ-43")
@pytest.mark.parametrize("unreliable", [False, True])
def test_a_close_nacks_what_was_not_acked(unreliable: bool) -> None:
    tree = Tree()
    tree.send("entry", "P")
    for name in "ABC":
        tree.send("P", name, unreliable=unreliable)
    channel = tree.channel("P")
    tree.hear("P", settle(channel, 1, 1) if unreliable else ack((0, 1, 1, 1)), CLOSED)
    assert tree.lost() == tree.forgotten() == ("BC" if unreliable else "B")
    assert isinstance(tree.halves["P"].error, ReceiverClosed)
    # P itself was pending: its tables decide about the others yet.
    assert tree.accessible() == ""
    tree.hear("entry", ack((0, 1)))
    assert tree.accessible() == ("PA" if unreliable else "PAC")


@requirement("AQ-R27")
@pytest.mark.parametrize("end", ["closed", "finished and closed", "cancelled and closed"])
@pytest.mark.parametrize("fate", ["acked", "nacked"])
def test_the_tables_of_a_sender_that_ended_while_pending_stay(end: str, fate: str) -> None:
    tree = Tree()
    tree.send("entry", "A", unreliable=True)
    tree.send("A", "B")
    tree.send("B", "C")
    tree.hear("B", ack((0, 1)))
    if end != "closed":
        getattr(tree.peer.other, {"f": "finish", "c": "cancel"}[end[0]])(tree.halves["A"])
    tree.hear("A", ack((0, 1)), CLOSED)
    assert tree.lost() == tree.forgotten() == tree.accessible() == ""
    if fate == "acked":
        tree.hear("entry", settle(0, 1))
        assert tree.accessible() == "ABC"
        assert tree.lost() == tree.forgotten() == ""
    else:
        tree.hear("entry", settle(0, 0, 1))
        assert tree.lost() == "BC"
        assert tree.forgotten() == "ABC"  # A too, though it had ended
        assert tree.peer.core.channels == 1
    tree.peer.pair.advance(5)
    assert not tree.peer.core._registry._pending_tables


@requirement("AQ-R27")
@requirement("AQ-40")
def test_a_channel_lost_after_its_end_is_still_forgotten() -> None:
    tree = Tree()
    tree.send("entry", "A", unreliable=True)
    tree.hear("A", CLOSED)
    assert tree.peer.core.channels == 1
    tree.hear("entry", settle(0, 0, 1))
    assert tree.forgotten() == "A"


@requirement("AQ-R27")
def test_what_is_sent_on_a_lost_channel_goes_nowhere() -> None:
    tree = Tree()
    tree.send("entry", "A", unreliable=True)
    tree.hear("entry", settle(0, 0, 1))
    attach = Attach(keep_sender=True, is_oneshot=False)
    before = tree.peer.core.channels
    with pytest.raises(LostInTransit):
        tree.peer.other.send(tree.halves["A"], b"", attach)
    assert tree.peer.core.channels == before and attach.half is None


@requirement("AQ-R27")
def test_a_lost_connection_is_not_lost_in_transit() -> None:
    tree = Tree()
    tree.send("entry", "A", unreliable=True)
    tree.send("A", "B")
    tree.send("A", "C", receiver=True)
    tree.peer.pair.link.cut()
    for half in tree.halves.values():
        assert isinstance(half.error, ConnectionLost)


@requirement("AQ-R27")
@requirement("AQ-R20")
def test_a_handle_that_the_application_got_is_never_declared_lost() -> None:
    """Taken, then cancelled before the ack went out: the ack goes first (AQ-R22)."""
    pair = Pair()
    carrier = Attach(keep_sender=True, is_oneshot=False)
    pair.client.send(pair.sender, b"", carrier)
    pair.run()
    taken = pair.server.take(pair.receiver)
    assert taken is not None
    ((receiver, _),) = taken.attachments
    inner = Attach(keep_sender=True, is_oneshot=False)
    pair.client.send(carrier.half, b"", inner)
    pair.run()
    got = pair.server.take(receiver)
    assert got is not None
    pair.client.cancel(carrier.half)
    pair.advance(3)
    assert isinstance(receiver.error, Cancelled)
    assert isinstance(inner.half, SenderHalf) and inner.half.error is None
    pair.client.send(inner.half, b"still here")
    pair.run()
    ((handle, _),) = got.attachments
    assert [bytes(m.payload) for m in pair.server.take_all(handle)] == [b"still here"]


# What is dropped with a message (AQ-R26)

CHILD, BACK, CARRIER, INNER = 8, 2, 16, 24


def carried(*ends: bytes) -> Peer:
    """A message with a receiver and a sender in it, undelivered on a channel of the peer."""
    peer = Peer()
    peer.say(route(0), message(0, b"", (), [(CARRIER, ())]), fin=False)
    assert peer.other.take(peer.pair.receiver) is not None
    peer.say(
        route(CARRIER), message(0, b"", (), [(CHILD, ((b"a", b""),)), (BACK, ())]), *ends, fin=False
    )
    return peer


@requirement("AQ-R26")
@pytest.mark.parametrize("way", ["closed", "cancelled", "evicted", "dropped"])
def test_attachments_of_a_dropped_message_are_closed_and_cancelled(way: str) -> None:
    if way == "evicted":
        flow = dataclasses.replace(DEFAULT.flow, channel_receive_bytes=3000)
        peer = Peer(config=dataclasses.replace(DEFAULT, flow=flow))
        peer.say(route(0), message(0, b"", (), [(CARRIER, ())]), fin=False)
        assert peer.other.take(peer.pair.receiver) is not None
        peer.datagram(route(CARRIER), message(0, b"", (), [(CHILD, ()), (BACK, ())]))
        for number in range(1, 5):
            peer.datagram(route(CARRIER), message(number, bytes(900)))
    else:
        peer = carried(*([codec.CANCEL_SENDER] if way == "cancelled" else []))
    half = peer.core._registry.known(CARRIER)
    if way == "closed":
        assert isinstance(half, ReceiverHalf)
        peer.other.close_receiver(half)
    elif way == "dropped":
        assert isinstance(half, ReceiverHalf)
        taken = peer.other.take(half)
        assert taken is not None
        for attached, _ in taken.attachments:
            peer.core.drop_attachment(attached, peer.pair.now)
        peer.other.flush()
    assert peer.told(CHILD) == [[CLOSE]]
    assert peer.told(BACK) == [[("CANCEL_SENDER",)]]
    # The cancelled sender waits for its CLOSE_RECEIVER, as any does (AQ-R18).
    peer.say(route(BACK), CLOSED)
    peer.pair.advance(3)
    assert [FORGET] not in [*peer.told(CHILD), *peer.told(BACK)]
    assert peer.core.channels == (1 if way in ("closed", "cancelled") else 2)


@requirement("AQ-R26")
@requirement("AQ-R31")
def test_a_channel_that_ended_early_counts_until_its_message_comes() -> None:
    peer = Peer(config=dataclasses.replace(DEFAULT, limits=Limits(channels=3)))
    for channel in (8, 16):
        peer.say(route(channel), message(0, b"%d" % channel), codec.encode_finish_sender(1))
    assert peer.core.channels == 3
    peer.say(route(0), message(0, b"", (), [(8, ())]), fin=False)
    carrier = peer.other.take(peer.pair.receiver)
    assert carrier is not None
    ((half, _),) = carrier.attachments
    assert [bytes(m.payload) for m in peer.other.take_all(half)] == [b"8"]
    assert isinstance(half.error, Finished)
    assert peer.core.channels == 2
    peer.say(route(24), codec.CANCEL_SENDER)
    assert peer.core.channels == 3
    peer.say(route(16), codec.FORGET_CHANNEL)  # or FORGET_CHANNEL
    assert peer.core.channels == 2
    peer.say(route(32), codec.CANCEL_SENDER)
    peer.say(route(40), codec.CANCEL_SENDER)
    assert peer.closed_with == 5


@requirement("AQ-R26")
@requirement("AQ-R23")
def test_a_forget_after_an_early_end_releases_what_was_buffered() -> None:
    peer = Peer()
    peer.say(route(CARRIER), message(0, b"", (), [(CHILD, ()), (BACK, ())]), fin=False)
    peer.say(route(CARRIER), codec.encode_finish_sender(1))
    assert peer.core._registry.ended_early(CARRIER)
    peer.say(route(CARRIER), codec.FORGET_CHANNEL)
    assert peer.told(CHILD) == [[CLOSE]]
    assert peer.told(BACK) == [[("CANCEL_SENDER",)]]
    assert peer.core.snapshot()["budget_used_bytes"] == 0


@requirement("AQ-R27")
@requirement("AQ-R26")
def test_what_a_lost_receiver_had_received_is_released() -> None:
    """A peer may answer on a channel whose carrier it nacks later."""
    tree = Tree()
    tree.send("entry", "r", unreliable=True, receiver=True)
    by_server, to_server = 3, 1  # attached by the server: it sends on one, we on the other
    attached = message(0, b"", (), [(by_server, ()), (to_server, ())])
    tree.hear("r", attached)
    tree.hear("entry", settle(0, 0, 1))
    assert tree.lost() == tree.forgotten() == "r"
    assert tree.peer.told(by_server) == [[CLOSE]]
    assert tree.peer.told(to_server) == [[("CANCEL_SENDER",)]]
    assert tree.peer.core.snapshot()["budget_used_bytes"] == 0


@requirement("AQ-R27")
def test_a_sender_that_ends_while_pending_with_nothing_on_it_leaves_no_table() -> None:
    tree = Tree()
    tree.send("entry", "a", unreliable=True)
    tree.hear("a", CLOSED)
    assert isinstance(tree.halves["a"].error, ReceiverClosed)
    assert tree.peer.core._registry.known(tree.channel("a")) is None


@requirement("AQ-R26")
def test_a_dropped_receiver_releases_what_it_had_received() -> None:
    """Messages in messages: all that hangs on the dropped one ends, not its own channels alone."""
    peer = Peer()
    peer.say(route(CHILD), message(0, b"", (), [(INNER, ()), (BACK, ())]), fin=False)
    peer.say(route(CARRIER), message(0, b"", (), [(CHILD, ())]), codec.CANCEL_SENDER)
    for channel in (CHILD, INNER):
        assert peer.told(channel)[-1][-1] == CLOSE
    assert peer.told(BACK) == [[("CANCEL_SENDER",)]]
    assert peer.core.snapshot()["budget_used_bytes"] == 0
