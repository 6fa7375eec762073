"""A question and its answer on the cores: a message carries the sender of a oneshot channel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from aqueduct._speedups import channels as codec
from aqueduct._speedups.channels.recv_streams import SMALL
from aqueduct.config import DEFAULT, Limits
from aqueduct.errors import Finished, LocalProtocolError
from aqueduct.protocol.common.receiver import ReceiverHalf
from aqueduct.protocol.common.registry import Attach
from aqueduct.protocol.common.sender import SenderHalf
from aqueduct.protocol.common.state import ReceiverState, SenderState
from tests.protocol.channels.peer import CLOSE, Peer, message, route
from tests.protocol.channels.test_receiver_wire import ONESHOT, attached, finish
from tests.protocol.channels.test_sender_wire import opened
from tests.support.pair import Pair, Side

requirement = pytest.mark.requirement
BACK, ELSE = 6, 14  # the client creates them, the server sends; oneshot
LASTING, FORTH = 2, 4  # one that is no oneshot, and one on which the client sends
LARGE = (4 << 20) + (64 << 10)
HEADERS = ((b"key-000000", b"value"),)
TAKEN = codec.encode_ack_reliable((0, 1)) + codec.CLOSE_RECEIVER


def question(number: int, *channels: int, payload: bytes = b"?") -> bytes:
    return message(number, payload, HEADERS, [(channel, ()) for channel in channels or (BACK,)])


def ask(side: Side, half: SenderHalf, payload: Any, now: float) -> ReceiverHalf:
    attach = Attach(keep_sender=False, is_oneshot=True)
    side.core.send(half, payload, now, headers=HEADERS, attachments=(attach,))
    assert isinstance(attach.half, ReceiverHalf)
    return attach.half


# What comes on the entrypoint in pieces, and the channels that came with it; None: it is refused.
QUESTIONS: list[tuple[list[bytes], list[int] | None]] = [
    ([question(1)], [BACK]),
    ([question(1) + question(2, ELSE)], [BACK, ELSE]),
    ([question(1), question(2, ELSE), message(3)], [BACK, ELSE]),
    ([message(1) + question(2) + message(3)], [BACK]),
    ([question(1)[:9], question(1)[9:]], [BACK]),
    ([question(1) + question(2, ELSE)[:9], question(2, ELSE)[9:]], [BACK, ELSE]),
    ([b"", question(1)], [BACK]),
    ([question(1, payload=bytes(SMALL))], [BACK]),
    ([question(1, payload=bytes(SMALL + 1))], [BACK]),
    ([question(1, BACK, ELSE)], [BACK, ELSE]),
    ([question(1, LASTING)], [LASTING]),
    ([question(1, FORTH)], [FORTH]),
    ([question(1) + finish(2)], [BACK]),
    ([question(1, BACK + 1)], None),  # one that the server itself would have created
    ([question(1), question(2)], None),  # attached twice (AQ-R4)
    ([question(1), question(1, ELSE)], None),  # a number twice (AQ-R13)
    ([question(0)], None),
    ([question(1) + b"\xff"], None),
]


@requirement("AQ-42")
@requirement("AQ-R4")
@requirement("AQ-R13")
@pytest.mark.parametrize(("pieces", "channels"), QUESTIONS)
def test_questions_come_with_the_channels_of_their_answers(
    pieces: list[bytes], channels: list[int] | None
) -> None:
    peer = Peer()
    stream = peer.say(route(0), message(0), fin=False)
    for piece in pieces:
        peer.more(stream, piece)
    halves = [
        half for taken in peer.other.take_all(peer.pair.receiver) for half, _ in taken.attachments
    ]
    if channels is None:
        assert peer.core.error is not None
        return
    assert peer.core.error is None
    assert [half.channel for half in halves] == channels
    assert all(half.given and half.error is None for half in halves)


@pytest.mark.parametrize("early", [True, False])
@requirement("AQ-R25")
@requirement("AQ-R26")
def test_the_sequence_of_an_answer_may_overtake_its_question(early: bool) -> None:
    peer = Peer()
    stream = peer.say(route(0), message(0), fin=False)
    peer.say(route(BACK), *([codec.CLOSE_RECEIVER] if early else []), fin=early)
    peer.more(stream, question(1))
    *_, last = peer.other.take_all(peer.pair.receiver)
    ((half, _),) = last.attachments
    assert (half.channel, half.given) == (BACK, True)
    assert (half.state is SenderState.ENDED) is early


@requirement("AQ-R28")
@pytest.mark.parametrize("debug", [True, False])
def test_a_call_is_a_sequence_for_its_answer_and_one_for_its_end(debug: bool) -> None:
    pair = Pair(replace(DEFAULT, debug=debug))
    pair.advance(1)
    client, server = pair.client, pair.server
    for number in range(5):
        half = ask(client, pair.sender, [b"ask", bytes(number)], pair.now)
        half.patient = number % 2 == 0
        client.flush()
        pair.run()
        (asked,) = server.take_all(pair.receiver)
        assert (asked.number, bytes(asked.payload)) == (number, b"ask" + bytes(number))
        ((back, _),) = asked.attachments
        assert isinstance(back, SenderHalf)
        before = len(client.raw)
        server.core.send(back, [b"answer", bytes(number)], pair.now, headers=HEADERS)
        server.flush()
        pair.run()
        *_, said = client.raw.values()  # what came there
        assert len(client.raw) == before + 1
        frame = codec.encode_message(0, [b"answer", bytes(number)], HEADERS)
        assert bytes(said) == b"".join([route(half.channel), *frame, finish(1)])
        (answer,) = client.take_all(half)
        assert (answer.headers, bytes(answer.payload)) == (HEADERS, b"answer" + bytes(number))
        assert (half.state, type(half.error)) == (ReceiverState.CLOSED, Finished)
        pair.advance(0.03)
        assert (back.state, back.error, not back.unsettled) == (SenderState.ENDED, None, True)
        *_, said = server.raw.values()
        assert bytes(said) == route(half.channel) + TAKEN
    pair.advance(1)
    assert client.core.channels == server.core.channels == 1
    assert client.core.pending_channels() == set()


def refused(make: Callable[[], Any]) -> str:
    with pytest.raises(LocalProtocolError) as caught:
        make()
    return str(caught.value)


def test_what_cannot_be_asked_or_answered_is_refused_and_changes_nothing() -> None:
    pair = Pair(replace(DEFAULT, limits=Limits(frame_bytes=LARGE, channels=3)))
    pair.advance(1)
    client, server = pair.client, pair.server

    def asked(payload: bytes = b"") -> ReceiverHalf:
        return ask(client, pair.sender, payload, pair.now)

    asked()
    assert "Limits.frame_bytes" in refused(lambda: asked(bytes(LARGE)))
    asked()
    # Two wait for their answers, and the entrypoint is the third.
    assert "Limits.channels is 3" in refused(asked)
    client.flush()
    pair.run()
    first, _ = [m.attachments[0][0] for m in server.take_all(pair.receiver)]
    assert isinstance(first, SenderHalf)

    def answer(payload: bytes) -> None:
        server.core.send(first, payload, pair.now)

    assert "Limits.frame_bytes" in refused(lambda: answer(bytes(LARGE)))
    answer(b"once")
    assert "already finished" in refused(lambda: answer(b"twice"))
    client.core.finish(pair.sender, pair.now)
    assert "already finished" in refused(asked)
    assert client.core.channels == 3


@requirement("AQ-R24")
@requirement("AQ-40")
def test_a_close_that_waits_goes_before_what_forgets_its_channel() -> None:
    peer = Peer("server")
    half = ask(peer.other, peer.pair.sender, b"", peer.pair.now)
    peer.other.flush()
    half.patient = True
    peer.say(route(half.channel), message(0), finish(1))
    peer.say(route(half.channel))  # a ghost, before the close has left
    assert peer.told(half.channel) == [[("ACK_RELIABLE", (0, 1)), CLOSE]]
    peer.pair.advance(1.1)
    assert peer.told(half.channel)[1:] == [[("FORGET_CHANNEL",)]]


# The sequence of an answer, whatever is in it


def answers(peer: Peer, half: ReceiverHalf) -> list[bytes]:
    return [bytes(taken.payload) for taken in peer.other.take_all(half)]


@requirement("AQ-R28")
@requirement("AQ-45")
@requirement("AQ-R24")
@pytest.mark.parametrize("patient", [True, False])
@pytest.mark.parametrize("size", [0, 6, SMALL, SMALL + 1])
@pytest.mark.parametrize("behind", [finish(1), b"", b"\xff"])
def test_an_answer_ends_its_channel_whatever_is_behind_it(
    patient: bool, size: int, behind: bytes
) -> None:
    peer, half = attached(ONESHOT)
    half.patient = patient
    peer.say(route(ONESHOT) + message(0, bytes(size), HEADERS) + behind)
    assert peer.core.error is None
    assert isinstance(half.error, Finished) and half.streams_in == 0
    peer.say(route(ONESHOT) + message(0, b"again") + finish(1))  # a ghost
    peer.pair.advance(0.1)
    assert peer.told(ONESHOT) == [[("ACK_RELIABLE", (0, 1)), CLOSE]]
    assert answers(peer, half) == [bytes(size)]
    assert peer.core.snapshot()["budget_used_bytes"] == 0


@requirement("AQ-R28")
@pytest.mark.parametrize("frames", [[message(1)], [message(0)[:-1]], [b"\xff"], [route(8)]])
def test_an_answer_that_is_none_breaks_the_protocol(frames: list[bytes]) -> None:
    peer, half = attached(ONESHOT)
    peer.say(route(ONESHOT), *frames)
    assert peer.core.error is not None and half.error is peer.core.error


@requirement("AQ-R19")
@requirement("AQ-36")
def test_the_receiver_of_an_answer_says_that_it_has_it() -> None:
    """What it says in whatever pieces ends the channel; its message counts once it is acked."""
    for frames, settled in (([TAKEN], True), ([codec.CLOSE_RECEIVER], False)):
        peer, half = opened(is_oneshot=True)
        peer.other.send(half, b"x")
        peer.pair.run()
        peer.say(route(half.channel), *frames)
        assert peer.core.error is None
        assert (half.state, not half.unsettled) == (SenderState.ENDED, settled)
        assert (half.error is None) is settled
    for wrong in ((0, 2), (1, 1)):  # more than was sent (AQ-R16)
        peer, half = opened(is_oneshot=True)
        peer.other.send(half, b"x")
        peer.pair.run()
        peer.say(route(half.channel), codec.encode_ack_reliable(wrong), codec.CLOSE_RECEIVER)
        assert peer.core.error is not None


@requirement("AQ-R28")
def test_an_answer_waits_for_room() -> None:
    peer, half = attached(ONESHOT, receive_budget=2 * SMALL)
    half.queue.charged = peer.core._shared.budget_used = 1
    peer.say(route(ONESHOT) + message(0, b"x") + finish(1))
    assert answers(peer, half) == [b"x"]
