"""Early data over QUIC: when it is sent, when it is taken, and what comes of it if it is not."""

from __future__ import annotations

import dataclasses
import errno
import random
import socket
import ssl
from typing import Any

import pytest
from aioquic.asyncio.client import connect
from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.packet import QuicFrameType, QuicPacketType
from aioquic.tls import Epoch

from aqueduct.address import Address
from aqueduct.carriers import quic
from aqueduct.carriers.certificates import certificates_of
from aqueduct.carriers.quic.packets import FastConnection
from aqueduct.carriers.quic.tickets import TicketStore
from aqueduct.config import DEFAULT
from aqueduct.endpoint.server import bind
from aqueduct.errors import ConfigError, LocalProtocolError
from aqueduct.testing.datagram_relay import DatagramRelay
from tests.carriers.early import (
    CONNECT,
    MINE,
    OFF,
    ON,
    THEIRS,
    Again,
    EarlyUser,
    Gate,
    half_open,
    scene,
    settings,
)
from tests.carriers.users import DEADLINE, TLS, met, timing


@pytest.fixture(autouse=True)
def store(monkeypatch: pytest.MonkeyPatch) -> TicketStore:
    """A store of this test's own."""
    made = TicketStore()
    monkeypatch.setattr(CONNECT, "STORE", made)
    return made


# ------------------------------------------------------------------------- accepted


@pytest.mark.requirement("AQ0-3")
async def test_early_data_and_its_answer_need_one_round_trip() -> None:
    """The client's second flight is held back: all comes without it."""
    gate = Gate()
    async with scene(relay=gate) as here:
        await here.ticket()
        gate.answered, gate.shut = False, True
        user = await here.client()
        assert user.began_early
        assert user.carrier.bidi
        assert user.carrier.datagram_limit > 0
        user.carrier.write(MINE, [b"question"], False)
        user.carrier.write(0, [b"message" * 100], True)
        user.carrier.send_datagram(b"datagram")
        user.carrier.flush()
        server = await here.server(2)
        assert not server.carrier.early
        await server.until_ended(0)
        await server.until(lambda: server.data[THEIRS] == b"question" and server.datagrams)
        assert server.data[0] == b"message" * 100
        assert here.door.half_open == 1
        server.send(THEIRS, b"answer")
        server.send(0, b"more", fin=True)
        await user.until_ended(0)
        await user.until(lambda: user.data[MINE] == b"answer")
        assert user.decisions == [True]
        assert here.door.half_open == 1
        gate.shut = False
        user.send(MINE, b" and another")
        await server.until(lambda: server.data[THEIRS] == b"question and another")
        await met(lambda: here.door.half_open == 0)
        await user.until(lambda: user.written_by.get(0) == 700)
        assert len(here.accepted) == 2
        assert not server.decisions


async def test_a_connection_with_a_ticket_has_another_one_for_the_next() -> None:
    async with scene() as here:
        await here.ticket()
        for count in range(2, 5):
            await here.ticket()
            assert len(here.accepted) == count
        assert [user.began_early for user in here.ends] == [False, True, True, True]
        identities = {user.carrier.peer_identity for user in here.ends}
        assert len(identities) == 1
        assert None not in identities


async def test_much_early_data_arrives_whole() -> None:
    """More than the first window of congestion, in both directions."""
    size = 300_000
    async with scene() as here:
        await here.ticket()
        user = await here.client()
        assert user.carrier.early
        for number in range(3):
            user.carrier.write(number, [bytes([number]) * size], True)
        user.carrier.flush()
        server = await here.server(2)
        server.carrier.write(0, [b"x" * size], True)
        server.carrier.flush()
        await server.until_ended(0, 1, 2)
        assert all(server.data[number] == bytes([number]) * size for number in range(3))
        await user.until_ended(0)
        assert user.decisions == [True]


async def test_early_packets_that_are_lost_are_sent_again() -> None:
    gate = Gate()
    async with scene(relay=gate) as here:
        await here.ticket()
        gate.answered = False
        user = await here.client()
        lost = 0

        def heard(way: str, data: bytes) -> None:
            nonlocal lost
            if way == "up" and not gate.answered:
                gate.cut = lost > 0  # all but the first datagram
                lost += 1
            else:
                gate.cut = False

        gate.heard = heard
        user.send(0, b"m" * 9000, fin=True)
        server = await here.server(2)
        await server.until_ended(0)
        assert server.data[0] == b"m" * 9000
        assert lost > 1
        assert user.decisions == [True]


async def test_early_data_survives_a_retry() -> None:
    """A crowded listener first asks whether the client has its address."""
    async with scene(config=settings(half_open=2)) as here:
        await here.ticket()
        address = Address.parse(f"aqueduct://127.0.0.1:{here.port}?verify=off")
        with half_open(address):
            await met(lambda: here.door.half_open == 1)
            user = await here.client()
            assert user.carrier.early
            user.send(MINE, b"question")
            user.send(0, b"m" * 5000, fin=True)
            server = await here.server(2)
            await server.until_ended(0)
            await server.until(lambda: THEIRS in server.data)
            assert server.data == {THEIRS: b"question", 0: b"m" * 5000}
            await user.until(lambda: user.decisions == [True])
            await user.until(lambda: user.written_by == {MINE: 8, 0: 5000})


# ------------------------------------------------------------------------- rejected


@pytest.mark.requirement("AQ0-2")
async def test_a_ticket_that_comes_again_is_refused_and_all_arrives_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(CONNECT, "STORE", Again())
    async with scene() as here:
        await here.ticket()
        first = await here.client()
        first.send(0, b"first", fin=True)
        await (await here.server(2)).until_ended(0)
        user = await here.client()
        assert user.began_early
        limits = user.carrier.openable, user.carrier.bidi_openable
        user.carrier.write(MINE, [b"question"], False)
        for number in range(3):
            user.carrier.write(number, [b"message"], True)
        user.carrier.send_datagram(b"datagram")
        user.carrier.ping()
        user.carrier.flush()
        await user.until(lambda: user.decisions == [False])
        assert (user.carrier.openable, user.carrier.bidi_openable) == limits
        # The streams are gone; nothing that is said of them does any harm.
        for stream in (MINE, 0):
            with pytest.raises(LocalProtocolError, match=f"stream {stream} ended"):
                user.carrier.write(stream, [b"more"], False)
        user.carrier.stop(MINE, 1)
        user.carrier.credit(MINE, 1 << 20)
        user.carrier.reset(MINE, 1)
        user.carrier.reset(0, 1)
        # What the user does then.
        again = MINE | 1 << 1
        user.carrier.write(again, [b"question"], False)
        for number in range(3, 6):
            user.carrier.write(number, [b"message"], True)
        user.carrier.flush()
        server = await here.server(3)
        await server.until_ended(0, 1, 2)
        server.send(THEIRS, b"answer", fin=True)
        await user.until_ended(again)
        user.send(again, b" and end", fin=True)
        await server.until_ended(THEIRS)
        assert server.data == {
            THEIRS: b"question and end",
            **dict.fromkeys(range(3), b"message"),
        }
        assert user.data == {again: b"answer"}
        await user.until(lambda: user.pongs == 1)
        await user.until(lambda: set(user.written_by) == {again, 3, 4, 5})
        assert server.datagrams == []
        assert len(here.accepted) == 3


@pytest.mark.requirement("AQ0-2")
async def test_stops_and_resets_name_the_streams_of_after_the_rejection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(CONNECT, "STORE", Again())
    async with scene() as here:
        await here.ticket()
        await here.client()
        user = await here.client()
        for index in range(2):
            user.carrier.write(MINE | index << 1, [b"early"], False)
        user.send(0, b"early")
        await user.until(lambda: user.decisions == [False])
        late = MINE | 2 << 1
        user.carrier.write(late, [b"late"], False)
        user.send(1, b"late")
        server = await here.server(3)
        await server.until(lambda: {THEIRS, 0} == set(server.data))
        server.carrier.stop(0, 7)
        server.carrier.stop(THEIRS, 8)
        server.carrier.write(THEIRS, [b"part"], False)
        server.carrier.reset(THEIRS, 9)
        server.carrier.flush()
        await user.until(lambda: user.stops == {1: 7, late: 8} and user.resets == {late: 9})


@pytest.mark.requirement("AQ0-2")
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("accepted", [True, False])
async def test_all_arrives_once_where_packets_are_lost(
    accepted: bool, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The user writes what was rejected again, as the core does."""
    if not accepted:
        monkeypatch.setattr(CONNECT, "STORE", Again())
    relay = DatagramRelay(seed=seed, delay=0.002)
    chance = random.Random(seed)
    async with scene(relay=relay) as here:
        await here.ticket()
        if not accepted:
            await (await here.client()).until(lambda: len(here.accepted) == 2)
        count = len(here.accepted) + 1
        relay.drop = relay.reorder = relay.duplicate = 0.1
        user = await here.client()
        assert user.began_early
        early = [chance.randbytes(chance.randrange(1, 4000)) for _ in range(6)]
        late = [chance.randbytes(chance.randrange(1, 4000)) for _ in range(6)]
        for number, data in enumerate(early):
            user.carrier.write(number, [data], True)
        user.carrier.write(MINE, [b"control"], False)
        user.carrier.flush()
        await user.until(lambda: user.decisions == [accepted])
        again = [] if accepted else early
        for number, data in enumerate((*again, *late), len(early)):
            user.carrier.write(number, [data], True)
        control = MINE if accepted else MINE | 1 << 1
        user.carrier.write(control, [b" ended" if accepted else b"control ended"], True)
        user.carrier.flush()
        server = await here.server(count)
        await server.until_ended(*range(12), THEIRS)
        expected = {**dict(enumerate((*early, *late))), THEIRS: b"control ended"}
        assert {number: bytes(data) for number, data in server.data.items()} == expected
        server.carrier.write(THEIRS, [b"answer"], True)
        server.carrier.flush()
        await user.until_ended(control)
        assert len(here.accepted) == count


@pytest.mark.requirement("AQ0-2")
async def test_what_was_rejected_takes_no_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than may be under way at first, so some of it has not left."""
    monkeypatch.setattr(CONNECT, "STORE", Again())
    size = 1 << 20
    async with scene() as here:
        await here.ticket()
        await here.client()
        user = await here.client()
        promised = user.carrier._quic._promised  # type: ignore[attr-defined]
        user.carrier.write(MINE, [b"early"], False)
        user.credit(MINE, 1 << 24)
        for _ in range(50):
            assert user.carrier.send_datagram(b"d" * 1000)
        user.send(0, b"m" * 20_000, fin=True)
        await user.until(lambda: user.decisions == [False])
        before, then = user.windows
        assert then["in_flight"] < 5000
        assert then["queued"] == 0
        assert then["may_send"] == before["may_send"]
        assert user.carrier._quic._promised == promised  # type: ignore[attr-defined]
        late = MINE | 1 << 1
        user.send(late, b"late")
        server = await here.server(3)
        await server.until(lambda: THEIRS in server.data)
        server.send(THEIRS, b"x" * size, fin=True)  # more than the first window
        await user.until_ended(late)
        assert user.total == size
        assert server.datagrams == []
        assert server.data == {THEIRS: b"late"}


# ------------------------------------------------------------------------- off


@pytest.mark.requirement("AQ0-R15")
@pytest.mark.parametrize(("server", "client"), [(OFF, OFF), (ON, OFF), (OFF, ON)])
async def test_it_is_off_if_one_side_has_not_turned_it_on(
    server: str, client: str, store: TicketStore
) -> None:
    async with scene(server) as here:
        asked = Address.parse(f"aqueduct://h?{client}").options.get("early_data", "off")
        for count in range(1, 3):
            user = await here.client(early_data=asked)
            user.send(0, b"message", fin=True)
            await (await here.server(count)).until_ended(0)
            user.carrier.close(0, "")
            await user.until(lambda: user.lost)  # noqa: B023
            assert not user.began_early
            assert user.decisions == []
        assert len(store) == 0


@pytest.mark.requirement("AQ0-R15")
async def test_connections_without_bidirectional_streams_have_no_tickets(
    store: TicketStore,
) -> None:
    async with scene() as here:
        carrier = await quic.connect(here.target, DEFAULT)
        user = EarlyUser(carrier)
        here.ends.append(user)
        user.send(0, b"message", fin=True)
        await (await here.server(1)).until_ended(0)
        assert here.door._tickets is not None
        assert len(here.door._tickets) == 0
        assert len(store) == 0


async def test_tickets_of_clients_without_bidirectional_streams_are_none() -> None:
    """Of another program, which asks for tickets, and shows one of a client that has them."""
    async with scene() as here:
        await here.ticket()
        assert here.door._tickets is not None
        (ticket,) = (one for one, *_ in here.door._tickets._out.values())
        ticket = dataclasses.replace(ticket, server_name="localhost")
        for offered in (None, ticket):
            given: list[Any] = []
            configuration = QuicConfiguration(
                is_client=True,
                alpn_protocols=["aqueduct"],
                verify_mode=ssl.CERT_NONE,
                server_name="localhost",
                session_ticket=offered,
            )
            async with connect(
                "127.0.0.1",
                here.port,
                configuration=configuration,
                session_ticket_handler=given.append,
            ) as client:
                await client.ping()
                await met(lambda: given)  # noqa: B023
                assert not client._quic.tls.session_resumed
            assert len(here.door._tickets) == 1


@pytest.mark.requirement("AQ0-R15")
async def test_several_workers_take_no_early_data() -> None:
    address = Address.parse(f"aqueduct://127.0.0.1:0?{ON}")
    for binding in (quic.bind(address, 2), bind([address], 2)):
        with pytest.raises(ConfigError, match=r"early_data=on.*one process.*here are 2; leave out"):
            await binding
    (one,) = await quic.bind(address, 1)
    one.close()


# ------------------------------------------------------------------------- whom it trusts


async def test_a_ticket_is_for_who_is_trusted_in_the_same_way() -> None:
    async with scene() as here:
        await here.ticket()
        pin = here.target.options["fingerprint"]
        here.target = Address.parse(f"aqueduct://127.0.0.1:{here.port}?{ON}")
        for tls in (
            quic.ClientTls(verify=False),
            quic.ClientTls(fingerprint=pin, server_name="localhost"),
            quic.ClientTls(ca=TLS.certificate),
        ):
            user = await here.client(tls=tls)
            assert not user.began_early
        user = await here.client(tls=quic.ClientTls(fingerprint=pin))
        assert user.began_early


async def test_a_server_with_another_certificate_gets_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At the port of the one that has given the ticket."""
    async with scene() as here:
        await here.ticket()
        target, port = here.target, here.port
    async with scene(port=port, tls=quic.dev_certificate()) as here:
        here.target = target
        came: list[Any] = []
        accept = here.door.accept

        def accepting(*arguments: Any) -> Any:
            came.append(accept(*arguments))
            return came[-1]

        monkeypatch.setattr(here.door, "accept", accepting)
        user = await here.client()
        assert user.began_early
        user.send(0, b"secret", fin=True)
        await user.until(lambda: user.lost)
        assert "the server's certificate is" in str(user.lost[0])
        assert user.decisions == []
        await met(lambda: here.door.connections == 0)
        assert here.accepted == []
        (carrier,) = came
        assert carrier.snapshot()["received"] == 0


async def test_a_server_with_another_certificate_that_is_trusted_has_a_name_of_its_own() -> None:
    trusting = quic.ClientTls(verify=False)
    async with scene() as here:
        here.target = Address.parse(f"aqueduct://127.0.0.1:{here.port}?{ON}")
        await here.ticket(tls=trusting)
        target, port = here.target, here.port
    other = quic.dev_certificate()
    async with scene(port=port, tls=other) as here:
        here.target = target
        user = await here.client(tls=trusting)
        assert user.carrier.peer_certificate_fingerprint == TLS.fingerprint
        await user.until(lambda: user.decisions == [False])
        assert user.carrier.peer_certificate_fingerprint == other.fingerprint


async def test_certificates_of_a_ticket_are_checked_again(
    store: TicketStore,
) -> None:
    async with scene() as here:
        await here.ticket()
        (kept,) = store._tickets.values()
        other = quic.dev_certificate()
        chain = certificates_of(other.certificate, "certificate")
        store.take(kept[0], 0.0)
        store.keep(kept[0], kept[1].ticket, chain, kept[1].version, kept[2], 10)
        user = await here.client()
        assert not user.began_early
        await here.server(2)


# ------------------------------------------------------------------------- failures


async def test_nobody_at_the_port_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first refusal is enough, as in any handshake."""
    monkeypatch.setattr(CONNECT, "_REFUSED", 1000)
    async with scene() as here:
        await here.ticket()
    user = await here.client()
    assert user.began_early
    await user.until(lambda: user.lost)
    assert "no server listens at its UDP port any more" in str(user.lost[0])
    assert user.decisions == []


async def test_a_network_that_fails_ends_an_early_handshake() -> None:
    """As any other handshake."""
    gate = Gate()
    async with scene(relay=gate) as here:
        await here.ticket()
        gate.cut = True
        user = await here.client()
        host: Any = user.carrier._host  # type: ignore[attr-defined]
        host._failed(OSError(errno.ENETUNREACH, "Network is unreachable"))
        await user.until(lambda: user.lost)
        assert user.lost[0].reason == "it cannot be reached (Network is unreachable)"


async def test_a_network_that_fails_for_a_while_ends_no_connection() -> None:
    async with scene() as here:
        await here.ticket()
        user = await here.client()
        await user.until(lambda: user.decisions == [True])
        host: Any = user.carrier._host  # type: ignore[attr-defined]
        host._failed(OSError(errno.ENETUNREACH, "Network is unreachable"))
        user.send(0, b"message", fin=True)
        await (await here.server(2)).until_ended(0)
        assert user.lost == []


async def test_the_addresses_of_a_name_are_tried_in_turn_with_a_ticket(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """There is a ticket of a server that is gone. The last of them is sent early data."""

    async def targets(address: Address, *_: Any) -> list[tuple[int, Any]]:
        return [(socket.AF_INET, (host, address.port)) for host in ("127.0.0.2", "127.0.0.1")]

    monkeypatch.setattr(CONNECT, "targets_of", targets)
    async with scene(host="127.0.0.2") as here:
        await here.ticket()
        target, port = here.target, here.port
    async with scene(port=port) as here:
        here.target = target
        for early in (False, True):
            user = await here.client()
            assert user.carrier.peer == f"127.0.0.1:{port}"
            assert user.began_early is early
            user.send(0, b"message", fin=True)
            await (await here.server(1 + early)).until_ended(0)
            await user.until(lambda: user.written_by)  # noqa: B023  the ticket came before


async def test_the_handshake_of_an_early_connection_has_a_deadline() -> None:
    gate = Gate()
    async with scene(relay=gate) as here:
        await here.ticket()
        gate.cut = True
        user = await here.client(timing(connect_timeout=0.2))
        await user.until(lambda: user.lost)
        assert "nothing answers UDP" in str(user.lost[0])


async def test_a_listener_that_closes_leaves_early_connections_alone() -> None:
    gate = Gate()
    async with scene(relay=gate) as here:
        await here.ticket()
        gate.answered, gate.shut = False, True
        user = await here.client()
        user.send(0, b"message", fin=True)
        server = await here.server(2)
        await server.until_ended(0)
        assert here.door.half_open == 1
        here.door.close()
        gate.shut = False
        user.send(1, b"message", fin=True)
        await server.until_ended(1)


@pytest.mark.parametrize("linger", [0.0, DEADLINE])
async def test_a_close_right_away_brings_its_code_and_what_was_written(linger: float) -> None:
    async with scene() as here:
        await here.ticket()
        user = await here.client()
        assert user.carrier.early
        user.send(0, b"message", fin=True)
        user.carrier.close(5, "enough", linger=linger)
        server = await here.server(2)
        await server.until(lambda: server.lost)
        assert server.data == {0: b"message"}
        assert (server.lost[0].code, server.lost[0].reason) == (5, "enough")


# ------------------------------------------------------------------------- tokens


@pytest.mark.requirement("AQ0-2")
async def test_a_token_is_shown_once_and_a_listener_that_does_not_know_it_goes_on(
    store: TicketStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """aioquic's server sends none: here it is made to."""
    write = FastConnection._write_application
    sent: set[Any] = set()

    def with_token(connection: Any, builder: Any, path: Any, now: float) -> None:
        write(connection, builder, path, now)
        if not connection._is_client and connection._handshake_complete and connection not in sent:
            sent.add(connection)
            builder.start_packet(QuicPacketType.ONE_RTT, connection._cryptos[Epoch.ONE_RTT])
            frame = builder.start_frame(QuicFrameType.NEW_TOKEN, 64)
            frame.push_uint_var(7)
            frame.push_bytes(b"a token")

    monkeypatch.setattr(FastConnection, "_write_application", with_token)
    gate = Gate()
    async with scene(relay=gate) as here:
        await here.ticket()
        await met(lambda: len(store._tokens) == 1)
        gate.flight.clear()
        gate.answered = False
        user = await here.client()
        await user.until(lambda: user.decisions == [True])
        assert b"\x07a token" in gate.flight[0]
        await met(lambda: len(store._tokens) == 1)  # another one
