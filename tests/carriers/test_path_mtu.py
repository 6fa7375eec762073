"""Path MTU discovery: the search by itself, and two connections over a path that drops."""

from __future__ import annotations

import random
from typing import Any

import pytest
from aioquic.quic.packet_builder import QuicDeliveryState

from aqueduct.carriers.quic.path_mtu import BASE, PathMtu
from tests.carriers.wire import Wire, discovering

ACKED, LOST = QuicDeliveryState.ACKED, QuicDeliveryState.LOST
MOST = 16_368
RAISE = 600.0
ROOM = 1 << 20


def large_lost(found: PathMtu, sent_at: float, now: float) -> None:
    """The connection hears at ``now`` that a large packet was lost."""
    found.probes(now, ROOM)
    found.on_large(LOST, sent_at, found.search)


def search(
    found: PathMtu,
    limit: int,
    *,
    loss: float = 0.0,
    seed: int = 1,
    at: float = 0.0,
    path: object = None,
    room: int = ROOM,
) -> int:
    """Runs the search over a path that drops what is above ``limit``; returns the probes sent."""
    rng = random.Random(seed)
    sent = 0
    found.use(path)
    while probes := found.probes(at, room):
        assert probes == sorted(set(probes))
        sent += len(probes)
        assert sent < 200
        for size in probes:
            if size <= limit and rng.random() >= loss:
                found.on_probe(ACKED, size, found.search)
            else:
                found.on_probe(LOST, size, found.search)
    return sent


@pytest.mark.parametrize("limit", [1200, 1232, 1252, 1280, 1452, 1472, 5000, 8972, 16_000, 70_000])
def test_the_search_finds_what_a_path_takes(limit: int) -> None:
    found = PathMtu()
    assert found.size == BASE
    sent = search(found, limit)
    assert min(limit, MOST) - 16 <= found.size <= limit
    assert sent <= 60
    assert found.next_search == RAISE


@pytest.mark.parametrize("seed", range(20))
def test_a_lossy_path_is_not_taken_for_a_small_one(seed: int) -> None:
    found = PathMtu()
    search(found, 1472, loss=0.1, seed=seed)
    assert 1252 <= found.size <= 1472


def test_the_next_search_finds_a_path_that_grew() -> None:
    found = PathMtu()
    search(found, 1252)
    assert found.probes(RAISE - 1, ROOM) == []
    search(found, 9000, at=RAISE)
    assert 8984 <= found.size <= 9000
    assert found.next_search == 2 * RAISE


def test_a_device_that_refuses_a_size_ends_the_search_there() -> None:
    found = PathMtu()
    first = found.probes(0.0, ROOM)
    for size in first:
        if size > 1472:
            found.refused(size)
        else:
            found.on_probe(ACKED, size, found.search)
    assert found.size == 1472
    assert all(
        size < min(each for each in first if each > 1472) for size in found.probes(0.0, ROOM)
    )


def test_a_device_that_refuses_what_it_took_makes_datagrams_small_at_once() -> None:
    found = PathMtu()
    search(found, 9000)
    size = found.size
    found.refused(size)
    assert found.size == BASE
    search(found, 1252)
    assert found.size == 1252


def test_a_black_hole_is_left_after_half_a_second() -> None:
    found = PathMtu()
    search(found, 9000)
    before = found.size
    large_lost(found, 10.0, 10.2)
    large_lost(found, 10.1, 10.3)
    large_lost(found, 10.2, 10.4)
    assert found.size == before  # it may be the network's load
    large_lost(found, 10.3, 10.6)
    assert found.size == BASE
    search(found, 1472)
    assert found.size == 1472


def test_loss_between_packets_that_arrive_is_no_black_hole() -> None:
    found = PathMtu()
    search(found, 9000)
    before = found.size
    for turn in range(100):
        large_lost(found, float(turn), turn + 0.9)
        large_lost(found, float(turn), turn + 0.95)
        found.on_large(ACKED, 0.0, found.search)
    assert found.size == before


def test_nothing_more_is_probed_while_probes_are_under_way() -> None:
    found = PathMtu()
    probes = found.probes(0.0, ROOM)
    assert found.probes(0.0, ROOM) == []
    for size in probes[:-1]:
        found.on_probe(ACKED, size, found.search)
    assert found.probes(0.0, ROOM) == []
    found.on_probe(LOST, probes[-1], found.search)
    assert found.probes(0.0, ROOM) != []


def test_another_path_is_searched_anew() -> None:
    found = PathMtu()
    search(found, 9000, path="first")
    found.use("first")
    assert found.size > BASE
    found.use("second")
    assert found.size == BASE
    assert found.probes(1.0, ROOM) != []


def test_what_an_earlier_search_sent_does_not_count() -> None:
    found = PathMtu()
    search(found, 9000)
    old = found.search
    found.use("first")
    found.use("second")
    probes = found.probes(1.0, ROOM)
    found.on_probe(ACKED, 8972, old)
    assert found.size == BASE
    for _ in range(10):
        found.on_probe(LOST, probes[0], old)
        found.on_large(LOST, 0.0, old)
    assert found.search == old + 1
    assert found.probes(1.0, ROOM) == []  # those of this search are under way
    for size in probes:
        found.on_probe(ACKED, size, found.search)
    assert found.size == MOST


def test_probes_keep_within_the_window_but_for_one() -> None:
    found = PathMtu()
    first = found.probes(0.0, 3000)
    assert first == [1232, 1252]
    for size in first:
        found.on_probe(ACKED, size, found.search)
    assert found.probes(0.0, 0) == [1452]
    small = PathMtu()
    search(small, 16_368, room=3000)
    assert small.size == MOST


# ----------------------------------------------------------------- two connections


def wire(limit: int) -> Wire:
    return Wire(discovering, limit=limit)


def carry(made: Wire, size: int, *, seconds: float = 3.0) -> bool:
    """Whether ``size`` bytes of a new stream reach the server in that time."""
    sender = made.client.open()
    sender.append([bytes(size)], True)
    before = len(made.events["server"])
    end = made.now + seconds
    while made.now < end:
        made.run(0.05)
        arrived = [each for each in made.events["server"][before:] if type(each) is tuple]
        if any(fin and stream == sender.stream_id for stream, _, fin in arrived):
            return True
    return False


def size_of(made: Wire) -> Any:
    return made.client.counters()["datagram_size"]


def test_connections_find_the_size_of_their_path() -> None:
    made = wire(9000)
    made.run(3.0)
    assert 8984 <= size_of(made) <= 9000
    assert made.client.counters()["packets_lost"] == 0  # those lost were probes


def test_a_window_that_was_narrowed_takes_a_larger_datagram_all_the_same() -> None:
    made = wire(1200)
    made.run(3.0)
    control = made.client._loss._cc
    control.ssthresh = control.congestion_window = 5000
    made.limit = 1 << 16
    made.client._path_mtu.size = MOST
    assert carry(made, 60_000)
    assert size_of(made) == MOST
    assert control.congestion_window >= 2 * MOST


def test_a_black_hole_is_left_although_small_packets_arrive() -> None:
    made = wire(9000)
    made.run(3.0)
    made.limit = 1300
    bulk = made.client.open()
    bulk.append([bytes(60_000)], True)
    for _ in range(60):  # small ones all the time
        small = made.client.open()
        small.append([b"small"], True)
        made.run(0.05)
    assert BASE <= size_of(made) <= 1300
    assert bulk.is_finished


def test_a_path_that_carries_only_the_least_size_is_used_with_that() -> None:
    made = wire(1200)
    assert carry(made, 50_000)
    made.run(3.0)
    assert size_of(made) == BASE


def test_a_probe_that_the_device_refuses_takes_no_window() -> None:
    made = wire(1 << 16)
    made.client._path_mtu.use("another path")
    control = made.client._loss._cc
    before, number = control.bytes_in_flight, made.client._packet_number

    class Refusing:
        blocked = False

        def send_run(self, parts: list[bytes], size: int, address: Any) -> bool:
            return False

    made.client._probe_path(made.client._path_mtu, made.now, Refusing())
    assert control.bytes_in_flight == before
    assert made.client._packet_number == number
