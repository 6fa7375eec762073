"""Early data over QUIC that comes again, or with a ticket of no use: it is not read twice."""

from __future__ import annotations

import asyncio
import dataclasses
import socket

import pytest

from aqueduct.address import Address
from aqueduct.carriers import quic
from aqueduct.carriers.quic.flow_control import version_of
from aqueduct.carriers.quic.tickets import TicketStore
from aqueduct.config import DEFAULT
from tests.carriers.early import CONNECT, Gate, half_open, scene, settings
from tests.carriers.users import OVER, met, timing


@pytest.fixture(autouse=True)
def store(monkeypatch: pytest.MonkeyPatch) -> TicketStore:
    """A store of this test's own."""
    made = TicketStore()
    monkeypatch.setattr(CONNECT, "STORE", made)
    return made


@pytest.mark.requirement("AQ0-3")
async def test_a_first_flight_that_comes_again_is_not_read_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("aqueduct.carriers.quic.listener._FAREWELL_TIME", 0.0)
    gate = Gate()
    async with scene(relay=gate) as here:
        await here.ticket()
        gate.flight.clear()
        gate.answered = False
        user = await here.client()
        user.send(0, b"m" * 3000, fin=True)
        server = await here.server(2)
        await server.until_ended(0)
        assert len(gate.flight) > 1
        flight = list(gate.flight)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            sock.connect(("127.0.0.1", here.port))
            for data in flight:
                sock.send(data)
            user.send(1, b"next", fin=True)
            await server.until_ended(1)  # all of that was read by then
            user.carrier.close(0, "")
            await server.until(lambda: server.lost)
            await met(lambda: here.door.connections == 0)
            await asyncio.sleep(0)
            for data in flight:
                sock.send(data)
            await met(lambda: here.door.half_open == 1)
            await here.ticket(tls=quic.ClientTls(verify=False))
        assert here.door.half_open == 1  # it has no keys for a handshake
        assert len(here.accepted) == 3
        assert server.data == {0: b"m" * 3000, 1: b"next"}
        assert here.accepted[2].data == {0: b"of a connection before"}


@pytest.mark.requirement("AQ0-3")
async def test_what_was_read_in_a_broken_handshake_is_not_read_in_another() -> None:
    """The client's packets come again after its connection has ended: it is told that it has."""
    gate = Gate()
    short = timing(connect_timeout=0.3)
    async with scene(config=short, relay=gate) as here:
        await here.ticket()
        gate.answered, gate.shut = False, True
        gate.flight.clear()
        user = await here.client(DEFAULT)
        user.send(0, b"message", fin=True)
        server = await here.server(2)
        await server.until_ended(0)
        await server.until(lambda: server.lost)
        assert "did not finish its handshake" in str(server.lost[0])
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            sock.connect(("127.0.0.1", here.port))
            for data in gate.flight:
                sock.send(data)
            gate.shut = False
            await here.ticket(tls=quic.ClientTls(verify=False))
        await user.until(lambda: user.lost)
        assert len(here.accepted) == 3
        assert here.door.connections == 0


async def test_a_client_that_gives_up_leaves_nothing_to_be_read_again() -> None:
    gate = Gate()
    async with scene(relay=gate) as here:
        await here.ticket()
        gate.answered, gate.deaf = False, True
        gate.flight.clear()
        user = await here.client()
        user.send(0, b"message", fin=True)
        server = await here.server(2)
        await server.until_ended(0)
        flight = list(gate.flight)
        user.carrier.abandon(OVER)
        await server.until(lambda: server.lost)
        assert not user.decisions
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            sock.connect(("127.0.0.1", here.port))
            for data in flight:
                sock.send(data)
            gate.deaf = False
            await here.ticket(tls=quic.ClientTls(verify=False))
        assert here.door.connections == 0
        assert len(here.accepted) == 3


@pytest.mark.requirement("AQ0-3")
@pytest.mark.parametrize("ended", [False, True])
async def test_what_was_read_before_the_answer_to_a_retry_is_not_read_with_it(ended: bool) -> None:
    """A copy of the client's first packets comes between the Retry and the client's answer."""
    gate = Gate()
    async with scene(config=settings(half_open=2), relay=gate) as here:
        await here.ticket()
        gate.answered, gate.shut = False, True
        gate.flight.clear()
        with half_open(Address.parse(f"aqueduct://127.0.0.1:{here.port}?verify=off")):
            await met(lambda: here.door.half_open == 1)
            user = await here.client()
            user.send(0, b"message", fin=True)
            await met(lambda: gate.dropped)  # it has the Retry, and its answer is held back
        for silent in list(here.door._half_open):
            silent.lose(OVER)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            sock.connect(("127.0.0.1", here.port))
            for data in gate.flight:
                sock.send(data)
            server = await here.server(2)
            await server.until_ended(0)
            if ended:
                server.carrier.abandon(OVER)
            answers: list[bytes] = []
            gate.heard = lambda way, data: answers.append(data) if way == "up" else None
            gate.shut = False
            await met(lambda: answers)
            here.target = here.target.with_port(here.port)
            await here.ticket(tls=quic.ClientTls(verify=False))  # all of that was read by then
        assert user.decisions == []
        assert len(here.accepted) == 3


@pytest.mark.requirement("AQ0-3")
async def test_early_data_from_another_address_is_not_read() -> None:
    """Whose address it is has not been shown, and users hear of it as that of the client."""
    gate = Gate()
    async with scene(relay=gate) as here:
        await here.ticket()
        gate.answered, gate.cut = False, True
        gate.flight.clear()
        user = await here.client()
        user.send(0, b"message", fin=True)
        await met(lambda: gate.flight)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            sock.bind(("127.0.0.66", 0))
            sock.connect(("127.0.0.1", here.port))
            for data in gate.flight:
                sock.send(data)
            await met(lambda: here.door.half_open == 1)
            here.target = here.target.with_port(here.port)
            await here.ticket(tls=quic.ClientTls(verify=False))
        assert here.door.half_open == 1
        assert len(here.accepted) == 2


@pytest.mark.requirement("AQ0-3")
async def test_a_full_record_forgets_the_oldest_ticket() -> None:
    async with scene(config=settings(tickets=1)) as here:
        await here.ticket(DEFAULT)
        await here.ticket(DEFAULT, quic.ClientTls(server_name="other"))
        user = await here.client(DEFAULT)
        assert user.began_early
        await user.until(lambda: user.decisions == [False])


@pytest.mark.requirement("AQ0-3")
async def test_a_server_takes_no_ticket_that_is_too_old() -> None:
    async with scene(config=settings(ticket_lifetime=0.000_001)) as here:
        await here.ticket(DEFAULT)
        user = await here.client(DEFAULT)
        assert user.began_early
        await user.until(lambda: user.decisions == [False])


async def test_a_client_uses_no_ticket_that_is_too_old() -> None:
    old = settings(ticket_lifetime=0.000_001)
    async with scene() as here:
        await here.ticket(old)
        user = await here.client()
        assert not user.began_early
        await here.server(2)
        assert user.decisions == []


async def test_a_ticket_is_for_the_version_of_quic_that_gave_it(store: TicketStore) -> None:
    """What was sent before a server asks for another version may have been read already."""
    async with scene() as here:
        await asyncio.gather(here.client(), here.client())
        await met(lambda: len(store) == 2)
        await here.server(2)
        versions = here.door.configuration.supported_versions
        assert len(versions) > 1
        here.door.configuration.supported_versions = versions[1:]
        user = await here.client()
        assert user.began_early
        user.send(0, b"message", fin=True)
        await user.until(lambda: user.lost)
        assert "Could not find a common protocol version" in str(user.lost[0])
        assert user.decisions == []
        assert len(store) == 0  # nor is the other one of use
        await here.ticket()  # without a ticket the two agree on the other version
        user = await here.client()
        await user.until(lambda: user.decisions == [True])
        assert version_of(user.carrier._quic) == versions[1]  # type: ignore[attr-defined]


async def test_a_listener_takes_no_ticket_of_another_version(store: TicketStore) -> None:
    async with scene() as here:
        await here.ticket()
        (serial,) = store._tickets
        server, kept, until = store._tickets[serial]
        versions = here.door.configuration.supported_versions
        store._tickets[serial] = server, dataclasses.replace(kept, version=versions[1]), until
        user = await here.client()
        assert user.began_early
        await user.until(lambda: user.decisions == [False])
