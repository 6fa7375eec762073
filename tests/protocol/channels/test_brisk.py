"""The steps of a call that are taken at once do what the general way does, byte by byte."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from aqueduct._speedups.channels import codec
from aqueduct.config import DEFAULT, Config, Limits
from aqueduct.errors import LocalProtocolError
from aqueduct.protocol.channels.oneshot import Oneshots
from aqueduct.protocol.channels.receiver import ReceiverHalf
from aqueduct.protocol.channels.recv_streams import SMALL
from aqueduct.protocol.channels.registry import Attach, Registry
from aqueduct.protocol.channels.sender import SenderHalf
from tests.protocol.channels.peer import Peer, message, route
from tests.support.pair import Pair

requirement = pytest.mark.requirement
BACK, ELSE = 6, 14  # the client creates them, the server sends; oneshot
LARGE = (4 << 20) + (64 << 10)
LASTING, FORTH = 2, 4  # one that is no oneshot, and one on which the client sends
HEADERS = ((b"key-000000", b"value"),)


def question(number: int, *channels: int, payload: bytes = b"?") -> bytes:
    return message(number, payload, HEADERS, [(channel, ()) for channel in channels or (BACK,)])


def generally(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is taken at once from here on."""

    def unread(self: Oneshots, half: ReceiverHalf, decoder: codec.FrameDecoder, data: Any) -> None:
        if len(data):
            decoder.feed(data)

    monkeypatch.setattr(Oneshots, "questions", unread)
    monkeypatch.setattr(Oneshots, "read", lambda self, data: False)
    monkeypatch.setattr(Oneshots, "ask", lambda self, half, payload, headers: None)
    monkeypatch.setattr(Oneshots, "answer", lambda self, half, payload, headers: False)


@pytest.fixture
def looked_at(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The attachments that went the general way."""
    found: list[Any] = []
    original = Registry.attached

    def counted(registry: Registry, attachments: Any) -> Any:
        found.append(attachments)
        return original(registry, attachments)

    monkeypatch.setattr(Registry, "attached", counted)
    return found


def state(peer: Peer) -> tuple[Any, ...]:
    """All that can be told of a side that is asked."""
    core, half = peer.core, peer.pair.receiver
    taken = peer.other.take_all(half)
    peer.pair.advance(0.1)
    return (
        core.snapshot(),
        None if core.error is None else str(core.error),
        core.pending_channels(),
        [type(event).__name__ for event in peer.other.events],
        peer.told(),
        (half.state, str(half.error), half.numbers.count, half.charged),
        [(m.number, m.headers, bytes(m.payload), m.charge) for m in taken],
        [
            [(each.channel, each.state, each.given, each.is_sender) for each, _ in m.attachments]
            for m in taken
        ],
        [headers for m in taken for _, headers in m.attachments],
    )


# Bytes on the entrypoint, and whether they are taken at once; None: refused before that.
QUESTIONS: list[tuple[list[bytes], bool | None]] = [
    ([question(1)], True),
    ([question(1) + question(2, ELSE)], True),
    ([question(1), question(2, ELSE), message(3)], True),
    ([message(1), question(2), message(3)], True),
    ([message(1) + question(2) + message(3)], False),
    ([question(1) + message(2)], True),
    ([question(1)[:9], question(1)[9:]], True),
    ([question(1) + question(2, ELSE)[:9], question(2, ELSE)[9:]], True),
    ([b"", question(1)], True),
    ([question(1, payload=bytes(SMALL))], True),
    ([question(1, payload=bytes(SMALL + 1))], False),
    ([question(1, BACK, ELSE)], False),
    ([question(1, LASTING)], False),
    ([question(1, FORTH)], False),
    ([question(1, BACK + 1)], None),  # one that the server itself would have created
    ([question(1), question(2)], False),  # attached twice (AQ-R4)
    ([question(1), question(1, ELSE)], None),  # a number twice (AQ-R13)
    ([question(0)], None),
    ([question(1) + b"\xff"], True),
    ([message(1) + b"\xff"], True),
    ([question(1) + codec.encode_finish_sender(2)], True),
    ([message(1) + codec.encode_finish_sender(2)], True),
]


@requirement("AQ-42")
@requirement("AQ-R4")
@requirement("AQ-R13")
@pytest.mark.parametrize(("pieces", "short"), QUESTIONS)
def test_questions_arrive_as_any_message_does(
    pieces: list[bytes],
    short: bool | None,
    looked_at: list[Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = []
    for at_once in (True, False):
        peer = Peer()
        stream = peer.say(route(0), message(0), fin=False)
        looked_at.clear()
        if not at_once:
            generally(monkeypatch)
        for piece in pieces:
            peer.more(stream, piece)
        if at_once and short is not None:
            assert bool(looked_at) is not short, "the way it was meant to take"
        found.append(state(peer))
    assert found[0] == found[1]


@pytest.mark.parametrize("early", [True, False])
def test_a_channel_that_is_known_already_is_looked_at(
    early: bool, looked_at: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own sequence overtook the message that carries it (AQ-R25, AQ-R26)."""
    found = []
    for at_once in (True, False):
        peer = Peer()
        stream = peer.say(route(0), message(0), fin=False)
        if not at_once:
            generally(monkeypatch)
        peer.say(route(BACK), *([codec.CLOSE_RECEIVER] if early else []), fin=early)
        looked_at.clear()
        peer.more(stream, question(1))
        assert len(looked_at) == 1
        found.append(state(peer))
    assert found[0] == found[1]


def conversation(config: Config, calls: int) -> tuple[Any, ...]:
    """Some calls, and all that left either side for them."""
    pair = Pair(config)
    pair.advance(1)
    client, server = pair.client, pair.server
    said: list[tuple[Any, ...]] = []
    for number in range(calls):
        half = client.core.ask(pair.sender, [b"ask", bytes(number)], HEADERS, pair.now)
        half.patient = number % 2 == 0
        client.flush()
        pair.run()
        (asked,) = server.take_all(pair.receiver)
        ((back, _),) = asked.attachments
        assert isinstance(back, SenderHalf)
        server.core.answer(back, [b"answer", bytes(number)], HEADERS, pair.now)
        server.flush()
        pair.run()
        said += [(m.number, m.headers, bytes(m.payload)) for m in client.take_all(half)]
        said.append((half.channel, half.state, str(half.error)))
        pair.advance(0.03)
        said.append((back.state, str(back.error), back.settled))
    pair.advance(1)
    return (
        said,
        [bytes(data) for data in client.raw.values()],
        [bytes(data) for data in server.raw.values()],
        [type(event).__name__ for event in (*client.events, *server.events)],
        client.core.snapshot(),
        server.core.snapshot(),
        client.core.pending_channels(),
    )


@requirement("AQ-R28")
@pytest.mark.parametrize("debug", [True, False])
def test_a_call_says_what_the_general_way_would(
    debug: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(DEFAULT, debug=debug)
    found = conversation(config, 5)
    generally(monkeypatch)
    assert found == conversation(config, 5)


def refused(make: Callable[[], Any]) -> str:
    with pytest.raises(LocalProtocolError) as caught:
        make()
    return str(caught.value)


def test_what_cannot_be_asked_or_answered_is_refused_in_the_same_words(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = replace(DEFAULT, limits=Limits(frame_bytes=LARGE, channels=3))
    found = []
    for at_once in (True, False):
        if not at_once:
            generally(monkeypatch)
        pair = Pair(config)
        pair.advance(1)
        core, server = pair.client.core, pair.server

        def ask(payload: bytes = b"") -> Any:
            return core.ask(pair.sender, payload, (), pair.now)  # noqa: B023

        ask()
        texts = [refused(lambda: ask(bytes(LARGE)))]
        ask()
        texts.append(refused(ask))  # two wait for their answers, and the entrypoint is the third
        pair.client.flush()
        pair.run()
        attach = [m.attachments[0][0] for m in server.take_all(pair.receiver)]
        first = attach[0]
        assert isinstance(first, SenderHalf)
        texts.append(refused(lambda: server.core.answer(first, bytes(LARGE), (), pair.now)))  # noqa: B023
        server.core.answer(first, b"once", (), pair.now)
        texts.append(refused(lambda: server.core.answer(first, b"twice", (), pair.now)))  # noqa: B023
        core.finish(pair.sender, pair.now)
        texts.append(refused(ask))
        found.append(texts)
    assert found[0] == found[1]


@requirement("AQ-R24")
@requirement("AQ-40")
def test_a_close_that_waits_goes_before_what_forgets_its_channel() -> None:
    peer = Peer("server")
    attach = Attach(keep_sender=False, is_oneshot=True)
    peer.other.send(peer.pair.sender, b"", attach)
    half = attach.half
    assert isinstance(half, ReceiverHalf)
    half.patient = True
    peer.say(route(half.channel), message(0), codec.encode_finish_sender(1))
    peer.say(route(half.channel))  # a ghost, before the close has left
    assert peer.told(half.channel) == [[("ACK_RELIABLE", (0, 1)), ("CLOSE_RECEIVER",)]]
    peer.pair.advance(1.1)
    assert peer.told(half.channel)[1:] == [[("FORGET_CHANNEL",)]]
