"""Early data (0-RTT): what a client repeats, what a server holds, and what stays as it was."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from aqueduct._speedups.channels.encoder import VERSION
from aqueduct._speedups.control_streams import control_encoder as encoder
from aqueduct._speedups.loop.pump import Pump
from aqueduct.carriers import memory
from aqueduct.config import DEFAULT, Config, Limits
from aqueduct.errors import ConnectionLost
from aqueduct.protocol.common import effects
from aqueduct.protocol.common.events import HeadersReceived
from aqueduct.protocol.common.receiver import ReceiverHalf
from aqueduct.protocol.common.sender import Mode, SenderHalf
from aqueduct.protocol.control_streams.connection import ControlConnection
from tests.protocol.control_streams.lone import GREETING, Lone, message, mine, peers
from tests.protocol.control_streams.pair import attach
from tests.support import simulate

DIALECT = "control-streams"
ENTRYPOINT = 0


def limited(size: int) -> Config:
    return dataclasses.replace(DEFAULT, limits=Limits(early_bytes=size))


def opened(lone: Lone, since: int = 0) -> list[int]:
    """Streams that the core has written on, in the order of their first bytes."""
    numbers = [e[1] for e in lone.applied[since:] if e[0] == effects.WRITE]
    return list(dict.fromkeys(numbers))


# A client


@pytest.mark.requirement("AQ0-2")
def test_what_was_accepted_is_not_repeated() -> None:
    lone = Lone(early=True)
    lone.send(lone.sender, b"one")
    lone.send(lone.sender, b"two", mode=Mode.UNORDERED)
    before = list(lone.applied)
    lone.decided()
    assert lone.applied == before
    lone.greet()
    assert lone.core.ready
    assert lone.core.outgoing.queued == 0


@pytest.mark.requirement("AQ0-2")
def test_what_was_rejected_is_repeated_on_new_streams() -> None:
    lone = Lone(early=True)
    lone.send(lone.sender, b"one")
    lone.send(lone.sender, b"two", mode=Mode.UNORDERED)
    lone.send(lone.sender, b"three")
    early = {number: lone.written(number) for number in opened(lone)}
    assert list(early) == [mine(0), 0, 1]
    since = len(lone.applied)
    lone.decided(accepted=False)
    assert set(opened(lone, since)) == {mine(1), 2, 3}
    for old, new in ((mine(0), mine(1)), (0, 2), (1, 3)):
        assert lone.written(new) == early[old]
        assert lone.written(new).startswith(VERSION)
        assert lone.written(new).count(VERSION) == 1
        assert lone.end(new) == lone.end(old)
    assert lone.end(3) == "fin"


@pytest.mark.requirement("AQ0-2")
def test_stored_streams_are_replaced() -> None:
    lone = Lone(early=True)
    lone.send(lone.sender, b"one")
    lone.decided(accepted=False)
    lone.on(mine(1), GREETING)  # the answer on the stream of the connection
    assert lone.core.ready
    since = len(lone.applied)
    lone.send(lone.sender, b"two")
    lone.finish(lone.sender)
    assert opened(lone, since) == [1]
    assert lone.written(1).endswith(message(ENTRYPOINT, 0, b"one") + message(ENTRYPOINT, 1, b"two"))
    assert lone.end(1) == "fin"
    lone.reset(mine(1), 0)
    assert lone.code == 2  # that stream is never reset


@pytest.mark.requirement("AQ0-2")
def test_datagrams_are_not_repeated() -> None:
    lone = Lone(early=True)
    lone.lossy(lone.sender, b"lost")
    lone.decided(accepted=False)
    lone.lossy(lone.sender, b"sent")
    sent = [effect[1] for effect in lone.applied if effect[0] == effects.DATAGRAM]
    assert sent == [VERSION + message(ENTRYPOINT, n, p) for n, p in ((0, b"lost"), (1, b"sent"))]


@pytest.mark.requirement("AQ0-2")
def test_a_reset_gives_up_what_was_early() -> None:
    lone = Lone(early=True)
    lone.send(lone.sender, b"one")
    lone.cancel(lone.sender)
    assert lone.end(0) == 1
    lone.decided(accepted=False)
    assert opened(lone) == [mine(0), 0, mine(1)]
    assert lone.core.outgoing.queued == 0


@pytest.mark.requirement("AQ0-2")
def test_only_once_does_not_count_the_repeat() -> None:
    """The server learns the headers and each message from the repeat alone."""
    client, server = Lone(early=True), Lone("server", greet=False)
    client.send(client.sender, b"one", attach(keep_sender=True))
    since = len(client.applied)
    client.decided(accepted=False)
    for effect in client.applied[since:]:
        data = b"".join(bytes(memoryview(each)) for each in effect[2])
        server.on(effect[1] - 1 if effect[1] < mine(0) else peers(0), data, fin=effect[3])
    assert server.core.error is None
    received = server.take(server.receiver)
    assert received is not None
    assert bytes(received.payload) == b"one"


@pytest.mark.requirement("AQ0-2")
def test_early_data_counts_as_queued_until_the_decision() -> None:
    lone = Lone(early=True)
    lone.send(lone.sender, bytes(1000))
    lone.send(lone.sender, bytes(500), mode=Mode.UNORDERED)
    total = sum(len(lone.written(number)) for number in opened(lone))
    assert lone.core.outgoing.queued == lone.core.outgoing.process.used == total
    assert lone.sender.queued > 1500
    lone.reads = False
    lone.decided(accepted=False)
    assert lone.core.outgoing.queued == lone.core.outgoing.process.used == total
    for number in opened(lone)[3:]:
        lone.core.written(number, len(lone.written(number)))
    assert lone.core.outgoing.queued == lone.core.outgoing.process.used == lone.sender.queued == 0


@pytest.mark.requirement("AQ0-2")
@pytest.mark.parametrize("accepted", [True, False])
def test_what_is_above_the_limit_waits_for_the_decision(accepted: bool) -> None:
    lone = Lone(config=limited(3000), early=True)
    lone.send(lone.sender, bytes(1000))
    lone.send(lone.sender, bytes(1000))  # of two streams: above
    lone.send(lone.sender, b"small", mode=Mode.UNORDERED)
    assert opened(lone) == [mine(0), 0]
    assert lone.core.outgoing.queued > 2000
    lone.decided(accepted, slots=999 if accepted else 1000)
    numbers = (0, 1) if accepted else (1, 2)
    assert lone.written(numbers[0]) == VERSION + message(ENTRYPOINT, 0, bytes(1000)) + message(
        ENTRYPOINT, 1, bytes(1000)
    )
    assert lone.written(numbers[1]) == VERSION + message(ENTRYPOINT, 2, b"small")


@pytest.mark.requirement("AQ0-2")
@pytest.mark.parametrize("accepted", [True, False])
def test_streams_that_wait_in_effects_have_no_gap_in_their_numbers(accepted: bool) -> None:
    lone = Lone(early=True)
    lone.core.send(lone.sender, b"one", 0.0)
    lone.core.send(lone.sender, b"two", 0.0, mode=Mode.UNORDERED)
    lone.decided(accepted)
    assert opened(lone) == [mine(0), 0, 1] if accepted else [mine(0), mine(1), 0, 1]
    assert lone.written(0) == VERSION + message(ENTRYPOINT, 0, b"one")


@pytest.mark.requirement("AQ0-2")
def test_a_rejection_may_leave_fewer_streams_and_they_open_in_order() -> None:
    lone = Lone(early=True)
    for payload in (b"0", b"1", b"2"):
        lone.send(lone.sender, payload, mode=Mode.UNORDERED)
    lone.decided(accepted=False, slots=1, bidi_slots=0)
    assert opened(lone) == [mine(0), 0, 1, 2, 3]
    assert lone.written(3).endswith(message(ENTRYPOINT, 0, b"0"))
    lone.send(lone.sender, b"3", mode=Mode.UNORDERED)
    lone.core.openable_changed(100, 0.0)
    lone.core.bidi_openable_changed(1, 0.0)
    lone.apply()
    assert opened(lone)[5:] == [4, 5, 6, mine(1)]
    for number in range(3, 7):
        assert lone.written(number).endswith(b"%d" % (number - 3))


@pytest.mark.requirement("AQ0-2")
@pytest.mark.parametrize("accepted", [True, False])
def test_a_close_waits_for_the_decision(accepted: bool) -> None:
    lone = Lone(early=True)
    lone.send(lone.sender, b"last words")
    lone.core.close(0, "", 0.0)
    lone.apply()
    assert lone.code is None
    if accepted:
        lone.decided()
    else:
        lone.decided(accepted=False, bidi_slots=0)
        assert lone.code is None
        lone.core.bidi_openable_changed(1, 0.0)
        lone.apply()
        assert lone.written(1).endswith(message(ENTRYPOINT, 0, b"last words"))
        assert lone.written(mine(1)).startswith(VERSION)
    assert lone.code == 0
    assert lone.core.outgoing.queued == 0


@pytest.mark.requirement("AQ0-2")
@pytest.mark.parametrize("how", ["deadline", "code", "lost"])
def test_an_end_before_the_decision_keeps_nothing(how: str) -> None:
    lone = Lone(config=limited(2000), early=True)
    lone.send(lone.sender, bytes(5000))
    if how == "lost":
        lone.core.connection_lost(ConnectionLost("gone"))
    else:
        lone.core.close(0 if how == "deadline" else 9, "", 0.0)
        lone.wait(DEFAULT.timing.close_linger)
    lone.apply()
    assert lone.core._early is None
    assert lone.core.outgoing.queued == lone.core.outgoing.process.used == 0
    before = list(lone.applied)
    lone.decided(accepted=False)
    assert lone.applied == before


# A server


@pytest.mark.requirement("AQ0-3")
def test_a_server_processes_early_data_only_when_a_replay_is_ruled_out() -> None:
    lone = Lone("server", early=True)
    lone.open(GREETING)
    lone.say(VERSION + message(ENTRYPOINT, 0, b"one"), fin=False)
    lone.datagram(VERSION + message(ENTRYPOINT, 0, b"two"))
    lone.wait(60)
    assert not lone.applied
    assert not lone.events
    assert lone.core.peer_headers is None
    assert lone.core.snapshot()["budget_used_bytes"] == 0
    lone.decided()
    assert any(isinstance(event, HeadersReceived) for event in lone.events)
    assert lone.written(peers(0)).startswith(VERSION)  # at once: with 0.5-RTT, if it is early
    taken = [lone.take(lone.receiver), lone.take(lone.receiver)]
    assert sorted(bytes(each.payload) for each in taken if each is not None) == [b"one", b"two"]
    lone.on(0, message(ENTRYPOINT, 1, b"three"), fin=True)
    third = lone.take(lone.receiver)
    assert third is not None


@pytest.mark.requirement("AQ0-3")
def test_what_a_server_holds_is_dropped_if_the_handshake_fails() -> None:
    lone = Lone("server", early=True)
    lone.open(GREETING)
    lone.say(VERSION + message(ENTRYPOINT, 0, b"replayed"))
    lone.core.connection_lost(ConnectionLost("no handshake"))
    lone.apply()
    lone.decided()
    assert not any(isinstance(event, HeadersReceived) for event in lone.events)
    assert lone.core.peer_headers is None
    assert not lone.receiver.queue
    assert not lone.applied


@pytest.mark.requirement("AQ0-3")
@pytest.mark.parametrize("where", ["a stream", "the stream of the headers", "a datagram"])
def test_what_does_not_decode_is_no_error_before(where: str) -> None:
    lone = Lone("server", early=True)
    if where == "a datagram":
        lone.datagram(b"nonsense")
    elif where == "a stream":
        lone.say(b"nonsense")
    else:
        lone.open(b"nonsense")
    assert lone.code is None
    lone.decided()
    assert lone.code is not None


@pytest.mark.requirement("AQ0-3")
@pytest.mark.requirement("AQ0-19")
def test_a_reset_of_the_stream_of_the_headers_is_an_error_later() -> None:
    lone = Lone("server", early=True)
    lone.reset(lone.open(GREETING), 1)
    assert lone.code is None
    lone.decided()
    assert lone.code == 2


@pytest.mark.requirement("AQ0-3")
def test_a_reset_meanwhile_is_read_behind_what_it_follows() -> None:
    lone = Lone("server", early=True)
    lone.open(GREETING)
    number = lone.say(VERSION + message(ENTRYPOINT, 0, b"given up"), fin=False)
    lone.reset(number, 1)
    control = lone.open(VERSION)
    lone.reset(control, 1)
    assert not lone.applied
    lone.decided()
    assert lone.core.error is None
    assert lone.take(lone.receiver) is None
    assert lone.end(control) == 2
    assert set(lone.core.incoming.streams) == {peers(0)}


@pytest.mark.requirement("AQ0-3")
@pytest.mark.parametrize("over", [0, 1])
@pytest.mark.parametrize("where", ["bytes", "streams"])
def test_what_a_server_holds_is_bounded(where: str, over: int) -> None:
    lone = Lone("server", limited(4096), early=True)
    if where == "bytes":
        lone.open(VERSION + bytes(4096 - 512 - len(VERSION) - 1))
        lone.on(peers(0), bytes(1 + over))
    else:
        for _ in range(8):
            lone.reset(lone.open(), 1)
        if over:
            lone.open()
    assert (lone.code is not None) == bool(over)
    if over:
        assert lone.code == 5
        assert "Limits.early_bytes (4096)" in str(lone.core.error)


@pytest.mark.requirement("AQ0-3")
def test_a_client_of_the_same_settings_stays_below_that() -> None:
    config = limited(5000)
    client, server = Lone(config=config, early=True), Lone("server", config, early=True)
    for size in range(0, 900, 100):
        client.send(client.sender, bytes(size), mode=Mode.UNORDERED)
    for effect in client.applied:
        data = b"".join(bytes(memoryview(each)) for each in effect[2])
        server.on(effect[1] if effect[1] < mine(0) else peers(0), data, fin=effect[3])
    assert server.code is None
    assert 1 < len(opened(client)) < 10


# Both


@pytest.mark.requirement("AQ0-R15")
@pytest.mark.parametrize("client", [True, False])
def test_without_being_told_no_carrier_is_early(client: bool) -> None:
    link = memory.pair(bidi=True)
    carrier = link.client if client else link.server
    assert not carrier.early
    lone = Lone("client" if client else "server")
    if client:
        lone.send(lone.sender, b"late")
    assert lone.core.outgoing.queued == 0
    lone.decided()  # nothing to decide
    assert lone.core.error is None


@pytest.mark.requirement("AQ0-R15")
@pytest.mark.parametrize("early", ["accept", "reject", "replay"])
@pytest.mark.parametrize("seed", range(6))
def test_random_conversations_begin_early(early: str, seed: int) -> None:
    """Each message arrives once (AQ0-2), and a replay at another server not at all (AQ0-3)."""
    world = simulate.run(seed, "any", DIALECT, early=early)
    client, replayed = world.pair.network.client, world.pair.replayed
    assert (replayed is not None) == (early == "replay")
    if not world.over:  # which may come before the decision
        assert client.early_flight
        assert not client.early
        assert any(client.forgotten) == (early == "reject")
        assert replayed is None or (replayed.core.error is not None and replayed.raw)


@pytest.mark.requirement("AQ0-R15")
async def test_the_pump_tells_the_core() -> None:
    """And the connection headers go before messages, which may be above the limit."""
    link = memory.pair(bidi=True)
    cores: list[ControlConnection] = []
    pumps: list[Pump] = []

    def answer(event: Any) -> None:
        if isinstance(event, HeadersReceived) and not cores[1].ready:
            cores[1].accept_headers((), 0.0)

    for carrier in (link.client, link.server):
        core = ControlConnection(is_client=carrier.is_client, config=limited(1000))
        if isinstance(core.entrypoint, SenderHalf):
            core.send(core.entrypoint, bytes(2000), 0.0)
        carrier.early = True
        pump = Pump(core, carrier, answer, lambda: None)
        carrier.attach(pump)
        cores.append(core)
        pumps.append(pump)
    client, server = cores
    link.run()
    assert list(server.incoming.streams) == [peers(0)]
    assert client._early is not None
    assert server.peer_headers is None
    for carrier, pump in zip((link.client, link.server), pumps, strict=True):
        carrier.early = False
        pump.early_decided(True)
        pump.end_of_input()
    link.run()
    assert client.ready
    assert server.peer_headers == ()
    assert client.outgoing.queued == 0
    assert isinstance(server.entrypoint, ReceiverHalf)
    assert len(server.entrypoint.queue) == 1
    link.cut()


def test_headers_alone_may_be_above_the_limit() -> None:
    config = limited(600)
    lone = Lone(config=config, early=True)
    assert opened(lone) == [mine(0)]
    heavy = ControlConnection(is_client=True, config=config, headers=((b"k", bytes(100)),))
    heavy.start(0.0, 1200, True)
    heavy.bidi_openable_changed(10, 0.0)
    assert heavy.effects_to_apply() == []
    heavy.early_decided(False, 0.0)
    heavy.bidi_openable_changed(10, 0.0)
    (effect,) = heavy.effects_to_apply()
    assert effect[1] == mine(0)
    assert encoder.encode_connection_control(((b"k", bytes(100)),)) in b"".join(
        map(bytes, effect[2])
    )


@pytest.mark.requirement("AQ0-2")
@pytest.mark.parametrize("accepted", [True, False])
@pytest.mark.parametrize("code", [7, None], ids=["closed", "failed"])
def test_a_decision_behind_the_end_changes_nothing(accepted: bool, code: int | None) -> None:
    lone = Lone(early=True)
    lone.send(lone.sender, b"one")
    if code is None:
        lone.core.fail_internal(ValueError("x"))
    else:
        lone.core.close(code, "over", 1.0)
    lone.core.early_decided(accepted, 1.0)
    assert lone.core.outgoing.waiting == 0
    assert [effect[0] for effect in lone.core.effects_to_apply()] == [effects.CLOSE]
    lone.core.early_decided(accepted, 1.0)
    assert lone.core.outgoing.waiting == 0
