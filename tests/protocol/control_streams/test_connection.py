"""How a connection of the control-stream draft begins: headers, gate, versions, datagrams."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from aqueduct._speedups.channels.encoder import VERSION
from aqueduct._speedups.channels.frames import FinishSender, Version
from aqueduct._speedups.control_streams import control_encoder as encoder
from aqueduct._speedups.control_streams import control_frames as codec
from aqueduct.config import DEFAULT
from aqueduct.errors import ConnectionLost, Finished, LocalProtocolError
from aqueduct.protocol.common import effects
from aqueduct.protocol.common.events import Closed, HeadersReceived
from aqueduct.protocol.common.sender import Mode
from aqueduct.protocol.common.state import SenderState
from tests.protocol.control_streams.lone import GREETING, Lone, message, mine, peers
from tests.protocol.control_streams.pair import Pair, Side, attach


@pytest.mark.requirement("AQ0-1")
@pytest.mark.parametrize("side", ["client", "server"])
def test_without_datagrams_there_is_no_connection(side: str) -> None:
    lone = Lone(side, datagrams=0, greet=False)
    assert lone.code == 7
    assert [effect[0] for effect in lone.applied] == [effects.CLOSE]


@pytest.mark.requirement("AQ0-19")
@pytest.mark.requirement("AQ0-R8")
def test_both_say_version_and_headers_on_the_stream_that_the_client_opened() -> None:
    pair = Pair()
    for side, other in ((pair.client, b"b"), (pair.server, b"a")):
        first = side.applied[0]
        assert first[:2] == (effects.WRITE, mine(0) if side is pair.client else peers(0))
        assert b"".join(first[2]).startswith(VERSION + b"\x01") and not first[3]
        (event,) = [e for e in side.events if isinstance(e, HeadersReceived)]
        assert event.headers[0][0] == other
        assert side.core.ready


@pytest.mark.requirement("AQ0-19")
@pytest.mark.parametrize("side", ["client", "server"])
@pytest.mark.parametrize("how", ["fin", "reset"])
def test_the_connection_control_stream_neither_finishes_nor_is_reset(side: str, how: str) -> None:
    lone = Lone(side)
    number = mine(0) if side == "client" else peers(0)
    if how == "fin":
        lone.on(number, fin=True)
    else:
        lone.reset(number, 0)
    assert lone.code == 2


@pytest.mark.requirement("AQ0-19")
@pytest.mark.parametrize("side", ["client", "server"])
def test_a_side_says_its_headers_once_and_on_that_stream(side: str) -> None:
    again = Lone(side)
    again.open(GREETING)
    assert again.code == 2
    twice = Lone(side)
    twice.on(mine(0) if side == "client" else peers(0), encoder.encode_connection_control(()))
    assert twice.code == 2
    on_one_way = Lone(side)
    on_one_way.say(GREETING)
    assert on_one_way.code == 2


@pytest.mark.requirement("AQ0-20")
def test_a_server_says_nothing_before_it_has_the_headers() -> None:
    lone = Lone("server", greet=False)
    lone.say(VERSION, message(0, 0, b"early", [8]), fin=False)
    lone.open(VERSION, encoder.encode_channel_control(2))
    lone.datagram(VERSION, message(0, 0, b"loose"))
    assert not [effect for effect in lone.applied if effect[0] != effects.CREDIT]
    assert lone.core.receive(lone.receiver, 0.0) is None


@pytest.mark.requirement("AQ0-20")
@pytest.mark.requirement("AQ0-21")
@pytest.mark.requirement("AQ0-R13")
def test_what_came_before_the_headers_is_read_after_them() -> None:
    lone = Lone("server", greet=False)
    lone.say(VERSION, message(0, 0, b"early"))
    lone.datagram(VERSION, message(0, 0, b"loose"))
    lone.greet()
    got = [lone.take(lone.receiver), lone.take(lone.receiver)]
    assert sorted(bytes(each.payload) for each in got if each) == [b"early", b"loose"]
    # The entrypoint's control stream follows the headers at once.
    assert lone.applied[0][1] == peers(0)
    assert lone.applied[1][:2] == (effects.WRITE, mine(0))
    assert lone.frames(mine(0))[0] == codec.ChannelControl(0)


@pytest.mark.requirement("AQ0-20")
def test_nothing_is_read_before_the_headers_are_accepted() -> None:
    lone = Lone("server", accept=False)
    lone.say(VERSION, message(0, 0, b"early"))
    assert lone.take(lone.receiver) is None
    lone.core.accept_headers((), 0.0)
    lone.apply()
    assert lone.take(lone.receiver) is not None


@pytest.mark.requirement("AQ0-R10")
def test_a_client_holds_back_what_overtakes_the_headers() -> None:
    lone = Lone(greet=False)
    half = lone.create(keep_sender=False)
    number = lone.control(half.channel)
    lone.say(message(half.channel, 0, b"early"))
    lone.datagram(message(half.channel, 0, b"loose"))
    assert lone.take(half) is None
    assert lone.frames(number) == []
    lone.greet()
    got = [lone.take(half), lone.take(half)]
    assert sorted(bytes(each.payload) for each in got if each) == [b"early", b"loose"]
    lone.close(half)
    assert lone.frames(number) == [codec.ControlAckNacks((1,)), codec.ControlClose((1,))]


@pytest.mark.requirement("AQ0-35")
def test_a_violation_behind_the_gate_stops_what_opened_it() -> None:
    lone = Lone(greet=False)
    lone.say(message(2, 0))  # the client never created this channel
    headers = encoder.encode_connection_control([(b"k", bytes(40 << 10))])
    lone.on(mine(0), VERSION, headers)
    assert lone.code == 2
    # No credit is given for the headers, and nothing else is said.
    assert lone.applied[-1][0] == effects.CLOSE


@pytest.mark.requirement("AQ0-R10")
def test_control_streams_that_wait_keep_no_slots_of_messages_back() -> None:
    lone = Lone(greet=False)
    half = lone.create(keep_sender=False)
    lone.control(half.channel, encoder.encode_control_finish(1), fin=True)
    assert lone.core.incoming.extra == lone.core.held_streams == 0
    lone.say(message(half.channel, 0))
    assert lone.core.held_streams == 1
    lone.greet()
    assert lone.core.held_streams == 0


@pytest.mark.requirement("AQ0-R10")
@pytest.mark.requirement("AQ0-R5")
def test_a_cancel_that_overtakes_the_headers_is_not_missed() -> None:
    lone = Lone(greet=False)
    half = lone.create(keep_sender=False)
    lone.reset(lone.control(half.channel), 1)
    assert half.error is None
    lone.greet()
    assert "cancelled" in str(half.error)
    assert lone.core.channels == 1


@pytest.mark.requirement("AQ0-20")
def test_a_client_begins_everything_with_version_until_it_has_the_headers() -> None:
    lone = Lone(greet=False)
    lone.send(lone.sender, b"one")
    lone.send(lone.sender, b"two", mode=Mode.UNORDERED)
    lone.lossy(lone.sender, b"three")
    for number in (0, 1):
        assert type(lone.frames(number)[0]) is Version
    (datagram,) = [effect[1] for effect in lone.applied if effect[0] == effects.DATAGRAM]
    assert datagram.startswith(VERSION)
    lone.greet()
    lone.send(lone.sender, b"four", mode=Mode.UNORDERED)
    assert len(lone.frames(2)) == 1
    lone.lossy(lone.sender, b"five")
    assert not lone.applied[-1][1].startswith(VERSION)


@pytest.mark.requirement("AQ0-20")
@pytest.mark.parametrize("what", ["uni", "bidi", "datagram"])
def test_a_server_refuses_what_begins_otherwise(what: str) -> None:
    lone = Lone("server", greet=False)
    if what == "uni":
        lone.say(message(0), fin=False)
    elif what == "bidi":
        lone.open(encoder.encode_channel_control(2))
    else:
        lone.datagram(message(0))
    assert lone.code == 2


@pytest.mark.requirement("AQ0-8")
@pytest.mark.requirement("AQ0-R9")
def test_version_may_begin_any_stream_later_too() -> None:
    lone = Lone()
    half = lone.create(keep_sender=True)
    lone.controls[lone.open(VERSION, encoder.encode_channel_control(half.channel))] = half.channel
    lone.on(mine(0))
    assert lone.code is None and half.control is not None
    server = Lone("server")
    server.say(VERSION, message(0, 0, b"x"))
    server.say(VERSION)
    assert server.code is None and server.take(server.receiver) is not None


@pytest.mark.requirement("AQ0-8")
@pytest.mark.requirement("AQ0-35")
@pytest.mark.parametrize(
    ("sequence", "code"),
    [
        (b"", 1),
        (b"\x63", 1),
        (message(0, 0, b"whole")[:-1], 1),
        (VERSION[:5] + b"x" + VERSION[6:], 3),
    ],
)
def test_what_does_not_decode_ends_the_connection(sequence: bytes, code: int) -> None:
    lone = Lone("server")
    lone.say(sequence)
    assert lone.code == code
    assert lone.core.channels == 0
    assert "peer" in str(lone.receiver.error)
    if code == 1:
        datagram = Lone("server")
        datagram.datagram(sequence)
        assert datagram.code == code


@pytest.mark.requirement("AQ0-8")
def test_a_reset_drops_what_is_in_part() -> None:
    lone = Lone("server")
    number = lone.say(message(0, 0, bytes(100))[:50], fin=False)
    lone.reset(number, 0)
    assert lone.code is None
    assert lone.core.snapshot()["streams_in"] == 1  # the connection's own
    assert lone.core.snapshot()["budget_used_bytes"] == 0


@pytest.mark.requirement("AQ0-9")
def test_streams_are_read_in_any_order_and_their_frames_in_theirs() -> None:
    lone = Lone("server")
    whole = message(0, 1, b"b") + message(0, 0, b"a")
    first = lone.say(whole[:9], fin=False)
    lone.say(message(0, 2, b"c"))
    lone.on(first, whole[9:], fin=True)
    got = []
    while (each := lone.take(lone.receiver)) is not None:
        got.append(bytes(each.payload))
    assert got.index(b"b") < got.index(b"a") and set(got) == {b"a", b"b", b"c"}


@pytest.mark.requirement("AQ0-19")
@pytest.mark.requirement("AQ0-R16")
def test_a_refusal_closes_with_its_code() -> None:
    lone = Lone("server", accept=False)
    lone.core.reject_headers("not you")
    lone.apply()
    assert lone.code == 4


@pytest.mark.requirement("AQ0-35")
@pytest.mark.requirement("AQ0-R16")
def test_the_end_of_the_connection_ends_everything() -> None:
    pair = Pair()
    kept, given = attach(keep_sender=True), attach(keep_sender=False)
    pair.client.send(pair.sender, b"", kept, given)
    pair.run()
    pair.client.core.close_receiver(given.half, pair.now)  # type: ignore[arg-type]
    pair.client.core.close(0, "bye", pair.now)
    pair.client.flush()
    assert pair.client.closed == (0, "bye")
    assert pair.client.core.channels == 0
    assert "closed here" in str(kept.half.error)  # type: ignore[union-attr]


@pytest.mark.requirement("AQ0-35")
def test_nothing_is_said_or_heard_after_an_error() -> None:
    lone = Lone()
    half = lone.create(keep_sender=False)
    lone.say(b"\x63")
    said = len(lone.applied)
    lone.control(half.channel)
    lone.reset(mine(0), 1)
    lone.datagram(b"")
    lone.wait(5)
    assert len(lone.applied) == said


@pytest.mark.requirement("AQ0-R13")
def test_an_entrypoint_closed_before_the_headers_says_so_after_them() -> None:
    lone = Lone("server", accept=False)
    lone.close(lone.receiver)
    lone.core.accept_headers((), 0.0)
    lone.apply()
    assert lone.frames(mine(0)) == [codec.ChannelControl(0), codec.ControlClose(())]
    assert lone.end(mine(0)) == "fin"


@pytest.mark.requirement("AQ0-13")
def test_messages_have_no_headers() -> None:
    lone = Lone()
    with pytest.raises(LocalProtocolError, match="no headers"):
        lone.send(lone.sender, b"", headers=((b"k", b"v"),))
    with pytest.raises(LocalProtocolError, match="no headers"):
        lone.send(lone.sender, b"", headers=((b"k", b"v"),), mode=Mode.UNRELIABLE)
    assert lone.send(lone.sender, b"") == 0


# ------------------------------------------------------------ a close lets out what was sent


def close(side: Side) -> None:
    side.core.close(0, "bye", side.pair.now)
    side.flush()


@pytest.mark.requirement("AQ0-27")
@pytest.mark.requirement("AQ0-R16")
@pytest.mark.parametrize("mode", [Mode.ORDERED, Mode.UNRELIABLE])
def test_a_close_says_a_finish_that_waits_for_its_control_stream(mode: Mode) -> None:
    pair = Pair()
    made = attach(keep_sender=True)
    pair.client.send(pair.sender, b"", made)
    pair.client.send(made.half, b"first", mode=mode)
    pair.client.finish(made.half)
    close(pair.client)
    # For its own user the connection is over at once.
    assert isinstance(pair.client.ended, ConnectionLost) and pair.client.closed is None
    pair.run()
    assert pair.client.closed == (0, "bye")
    (carrier,) = pair.server.take_all(pair.receiver)
    half: Any = carrier.attachments[0][0]
    assert [bytes(each.payload) for each in pair.server.take_all(half)] == [b"first"]
    pair.advance(2)  # datagrams are settled in time
    assert isinstance(half.error, Finished)
    assert pair.client.core.channels == 0


@pytest.mark.requirement("AQ0-27")
@pytest.mark.requirement("AQ0-R13")
def test_a_close_before_the_headers_are_answered_finishes_the_entrypoint() -> None:
    pair = Pair(connect=False)
    pair.client.send(pair.sender, b"only")
    pair.client.finish(pair.sender)
    close(pair.client)
    pair.run()
    assert [bytes(each.payload) for each in pair.server.take_all(pair.receiver)] == [b"only"]
    assert isinstance(pair.receiver.error, Finished)
    assert pair.client.closed == (0, "bye")
    assert isinstance(pair.client.events[-1], Closed)


@pytest.mark.requirement("AQ0-29")
def test_a_close_says_the_end_of_a_receiver_that_waits_for_its_control_stream() -> None:
    pair = Pair()
    made = attach(keep_sender=False, is_oneshot=True)
    pair.held.add(mine(1))  # the server's control stream of the channel
    pair.client.send(pair.sender, b"", made)
    pair.run()
    (carrier,) = pair.server.take_all(pair.receiver)
    sender: Any = carrier.attachments[0][0]
    pair.server.send(sender, b"answer")
    pair.run()
    assert [bytes(each.payload) for each in pair.client.take_all(made.half)] == [b"answer"]
    close(pair.client)
    pair.run()
    assert sender.error is None and pair.client.closed is None
    pair.held.clear()
    pair.run()
    assert sender.state is SenderState.ENDED and sender.error is None
    assert pair.client.closed == (0, "bye")


@pytest.mark.requirement("AQ0-27")
def test_a_close_waits_for_slots_of_control_streams() -> None:
    lone = Lone("server", bidi_slots=1)
    lone.say(message(0, 0, b"", [1]))
    got = lone.take(lone.receiver)
    assert got is not None
    sender: Any = got.attachments[0][0]
    lone.send(sender, b"x")
    lone.finish(sender)
    lone.core.close(0, "bye", 0.0)
    lone.apply()
    assert lone.code is None
    lone.core.bidi_openable_changed(1, 0.0)
    lone.apply()
    assert lone.frames(mine(1)) == [codec.ChannelControl(1), FinishSender(1)]
    assert lone.code == 0 and lone.core.next_deadline() is None


@pytest.mark.requirement("AQ0-27")
@pytest.mark.parametrize("how", ["waits", "breaks a rule", "is lost"])
def test_a_close_ends_in_time_whatever_the_peer_does(how: str) -> None:
    lone = Lone()
    made = lone.create(keep_sender=True)
    control = lone.control(0)
    lone.finish(made)
    other = lone.create(keep_sender=False)
    lone.core.close(0, "bye", 0.0)
    lone.apply()
    # A half that ended with the connection is not lost, so its control stream is not reset.
    assert lone.end(lone.control(other.channel)) is None
    assert lone.code is None and lone.core.next_deadline() == DEFAULT.timing.close_linger
    if how == "waits":
        lone.say(message(made.channel ^ 3, 0))  # messages are read no more
        lone.wait(DEFAULT.timing.close_linger)
    elif how == "breaks a rule":
        lone.on(control, b"\xff")
    else:
        lone.core.connection_lost(ConnectionLost("the network is gone"))
    assert lone.code == (None if how == "is lost" else 0)
    assert lone.core.channels == 0 and lone.core.next_deadline() is None


@pytest.mark.requirement("AQ0-R3")
def test_streams_that_wait_for_a_slot_are_counted_and_open_in_turns() -> None:
    lone = Lone("server", replace(DEFAULT, flow=replace(DEFAULT.flow, wake_up=100)), bidi_slots=1)
    for number in range(1000):
        lone.say(message(0, number, b"", [1 | number << 3]))
    while lone.core.goes_on:
        lone.core.handle_deadline(0.0)
    assert lone.core.snapshot()["streams_waiting"] == 1000
    assert lone.core.view(0).streams_waiting == 1000
    lone.applied.clear()
    lone.core.bidi_openable_changed(1 << 20, 0.0)
    steps = []
    while True:
        steps.append(sum(e[0] == effects.WRITE for e in lone.core.effects_to_apply()))
        if not lone.core.goes_on:
            break
        lone.core.handle_deadline(0.0)
    assert max(steps) <= 100 and sum(steps) == 1000
    assert lone.core.snapshot()["streams_waiting"] == 0
