"""Tickets: what a listener and a client keep of them, and for how long."""

from __future__ import annotations

import dataclasses
import datetime
import os

from aioquic.tls import CipherSuite, ExtensionType, SessionTicket

from aqueduct.carriers.certificates import certificates_of
from aqueduct.carriers.quic.tickets import TicketRecord, TicketStore
from tests.carriers.users import TLS

PARAMETERS = (ExtensionType.QUIC_TRANSPORT_PARAMETERS, b"parameters")
CHAIN = certificates_of(TLS.certificate, "certificate")
HOST = "192.0.2.1"
NOW = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)


def ticket(name: bytes, **changes: object) -> SessionTicket:
    made = SessionTicket(
        age_add=0,
        cipher_suite=CipherSuite.AES_128_GCM_SHA256,
        not_valid_after=NOW + datetime.timedelta(days=1),
        not_valid_before=NOW,
        resumption_secret=bytes(32),
        server_name="localhost",
        ticket=name,
        max_early_data_size=0xFFFF_FFFF,
        other_extensions=[(99, b"of no use"), PARAMETERS],
    )
    return dataclasses.replace(made, **changes)  # type: ignore[arg-type]


def test_a_listener_takes_each_ticket_back_once() -> None:
    record = TicketRecord(10, 5.0, lambda: 100.0)
    one, two = ticket(b"one"), ticket(b"two")
    record.add(one, HOST)
    record.add(two, HOST)
    assert record.take(b"one", HOST) is one
    assert record.take(b"one", HOST) is None
    assert record.take(b"three", HOST) is None
    assert len(record) == 1


def test_a_listener_takes_a_ticket_back_from_who_has_it_alone() -> None:
    record = TicketRecord(10, 5.0, lambda: 100.0)
    record.add(ticket(b"one"), HOST)
    assert record.take(b"one", "192.0.2.2") is None
    assert len(record) == 0


def test_a_listener_forgets_the_oldest_and_those_that_are_too_old() -> None:
    now = 100.0
    record = TicketRecord(2, 5.0, lambda: now)
    for name in (b"one", b"two", b"three"):
        record.add(ticket(name), HOST)
    assert len(record) == 2
    assert record.take(b"one", HOST) is None
    now = 104.9
    assert record.take(b"two", HOST) is not None
    now = 105.0
    assert record.take(b"three", HOST) is None
    assert len(record) == 0


def test_a_client_uses_the_newest_ticket_of_a_server_and_each_once() -> None:
    store = TicketStore()
    for name in (b"one", b"two"):
        store.keep("server", ticket(name), CHAIN, 1, 10.0, 8)
    store.keep("another", ticket(b"three"), CHAIN, 1, 10.0, 8)
    first, second = store.take("server", 9.0), store.take("server", 9.0)
    assert first is not None
    assert second is not None
    assert (first.ticket.ticket, second.ticket.ticket) == (b"two", b"one")
    assert first.chain == tuple(CHAIN)
    assert first.version == 1
    assert first.ticket.other_extensions == [PARAMETERS]
    assert store.take("server", 9.0) is None
    assert store.take("another", 10.0) is None  # too old
    assert len(store) == 0


def test_a_client_keeps_so_many_for_all_servers() -> None:
    store = TicketStore()
    for number in range(5):
        store.keep(number, ticket(b"%d" % number), CHAIN, 1, 10.0, 3)
        store.keep_token(number, b"%d" % number, 3)
    assert len(store) == 6
    assert [store.take(number, 0.0) is not None for number in range(5)] == [False] * 2 + [True] * 3
    assert [store.take_token(number) for number in range(5)] == [b"", b"", b"2", b"3", b"4"]
    assert len(store) == 0


def left(store: TicketStore, server: object) -> list[bytes]:
    """The tickets of a server, the newest first."""
    found = iter(lambda: store.take(server, 0.0), None)
    return [one.ticket.ticket for one in found if one is not None]


def test_a_client_keeps_so_many_of_one_server() -> None:
    store = TicketStore()
    store.keep("another", ticket(b"one"), CHAIN, 1, 10.0, 20)
    for number in range(10):
        store.keep("server", ticket(b"%d" % number), CHAIN, 1, 10.0, 20)
    assert left(store, "server") == [b"%d" % number for number in range(9, 1, -1)]
    assert left(store, "another") == [b"one"]


def test_a_server_that_gives_many_tickets_takes_no_place_from_others() -> None:
    store = TicketStore()
    store.keep("another", ticket(b"one"), CHAIN, 1, 10.0, 3)
    for number in range(10):
        store.keep("server", ticket(b"%d" % number), CHAIN, 1, 10.0, 3)
    assert left(store, "another") == [b"one"]
    assert left(store, "server") == [b"9", b"8"]


def test_a_connection_with_a_smaller_setting_takes_nothing_from_others() -> None:
    store = TicketStore()
    for number in range(5):
        store.keep(number, ticket(b"%d" % number), CHAIN, 1, 10.0, 10)
        store.keep_token(number, b"%d" % number, 10)
    for name in (b"one", b"two"):
        store.keep("server", ticket(name), CHAIN, 1, 10.0, 1)
        store.keep_token("server", name, 1)
    assert left(store, "server") == [b"two"]
    assert [left(store, number) for number in range(5)] == [[b"%d" % n] for n in range(5)]
    assert [store.take_token(number) for number in range(5)] == [b"%d" % n for n in range(5)]


def test_a_client_keeps_no_ticket_that_is_of_no_use() -> None:
    store = TicketStore()
    for useless in (
        ticket(b"one", max_early_data_size=None),
        ticket(b"one", other_extensions=[]),
        ticket(bytes(1025)),
        ticket(b"one", other_extensions=[(PARAMETERS[0], bytes(1025))]),
    ):
        store.keep("server", useless, CHAIN, 1, 10.0, 8)
    store.keep("server", ticket(b"one"), CHAIN * 100, 1, 10.0, 8)
    store.keep_token("server", b"", 8)
    store.keep_token("server", bytes(1025), 8)
    assert len(store) == 0


def test_a_token_takes_the_place_of_an_older_one_and_is_used_once() -> None:
    store = TicketStore()
    store.keep_token("server", b"one", 8)
    store.keep_token("server", b"two", 8)
    assert store.take_token("another") == b""
    assert store.take_token("server") == b"two"
    assert store.take_token("server") == b""


def test_a_forked_child_has_none_of_its_parents() -> None:
    store = TicketStore()
    store.keep("server", ticket(b"one"), CHAIN, 1, 10.0, 8)
    store.keep_token("server", b"one", 8)
    child = os.fork()
    if not child:
        os._exit(len(store))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert len(store) == 2
