"""The pool: leases, reaping, idle connections, forks."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pyarrow as pa
import pytest

from aqueduct.config import DEFAULT
from aqueduct.errors import ConnectFailed
from spark_udfs.calls.pool import Peer, Pool, process_pool
from tests.spark.services import NUMBERS
from tests.support.calls import until_seen

HASTY = replace(DEFAULT, timing=replace(DEFAULT.timing, idle_timeout=0.5, ping_interval=0.2))


@pytest.fixture
def peer(service, running):
    with running(service) as address:
        yield Peer(address)


@pytest.fixture
def pool():
    pool = Pool()
    yield pool
    pool.close()


def calls(client):
    batch = pa.record_batch({"id": [1, 2]}, schema=NUMBERS)
    answers = client.exchange("double", [batch], schema=NUMBERS)
    return [answer["id"].to_pylist() for answer in answers]


def sweepers():
    """The threads that close unused connections: one for each pool that has any."""
    return [thread for thread in threading.enumerate() if thread.name == "aqueduct-pool-idle"]


def test_leases_share_a_connection(pool, peer, service):
    first, second = pool.lease(peer, task=7), pool.lease(peer, task=7)
    assert first.client is second.client
    assert pool.snapshot() == {"leases": 2, "connections": 1, "connected": 1}
    first.release()
    first.release()
    assert calls(second.client) == [[2, 4]]
    second.release()
    third = pool.lease(peer, task=8)
    assert third.client is second.client
    assert service.counters()["connections"] == 1


def test_what_connects_while_the_pool_closes_is_closed_as_it_is_released(pool, peer):
    pool.lease(peer).release()
    entry = pool._entries[peer]
    with ThreadPoolExecutor() as threads:
        with entry.connecting:
            late = threads.submit(pool.lease, peer)
            until_seen(lambda: entry.users == 1)
            pool.close()
        lease = late.result(20)
    assert calls(lease.client) == [[2, 4]]
    lease.release()
    assert lease.client.closed
    assert pool.snapshot() == {"leases": 0, "connections": 0, "connected": 0}


def test_a_lease_left_behind_ends_when_another_task_begins(pool, peer):
    ended = []
    left = pool.lease(peer, task=1)
    left.on_end(lambda: ended.append("call"))
    pool.lease(peer, task=1)
    assert ended == []
    lease = pool.lease(peer, task=2)
    assert ended == ["call"]
    assert pool.snapshot()["leases"] == 1
    left.release()
    assert pool.snapshot()["leases"] == 1
    assert calls(lease.client) == [[2, 4]]


def test_leases_without_a_task_end_no_other(pool, peer):
    ended = []
    task, plain = pool.lease(peer, task=1), pool.lease(peer)
    task.on_end(lambda: ended.append("task"))
    plain.on_end(lambda: ended.append("plain"))
    pool.lease(peer)
    pool.lease(peer, task=1)
    assert ended == []


def test_an_unused_connection_closes(peer):
    pool = Pool(idle=0.05)
    lease = pool.lease(peer)
    client = lease.client
    lease.release()
    for sweeper in sweepers():
        sweeper.join(30)
    assert client.closed
    assert pool.snapshot() == {"leases": 0, "connections": 0, "connected": 0}
    again = pool.lease(peer)
    assert calls(again.client) == [[2, 4]]
    again.release()
    pool.close()


def test_a_connection_can_close_with_its_last_lease(pool, peer):
    first, second = pool.lease(peer), pool.lease(peer)
    first.release(close=True)
    assert calls(second.client) == [[2, 4]]
    second.release(close=True)
    assert second.client.closed
    assert pool.snapshot() == {"leases": 0, "connections": 0, "connected": 0}
    assert calls(pool.lease(peer).client) == [[2, 4]]


def test_a_connection_in_use_is_not_swept(peer, monkeypatch):
    pool = Pool(idle=0.05)
    pool.lease(peer).release()
    lease = pool.lease(peer)
    looks = []
    unused_until = lease._entry.unused_until

    def looked(now, idle):
        looks.append(now)
        return unused_until(now, idle)

    monkeypatch.setattr(lease._entry, "unused_until", looked)
    until_seen(lambda: len(looks) >= 3)
    assert calls(lease.client) == [[2, 4]]
    lease.release()
    pool.close()


def test_one_thread_sweeps_however_often_connections_are_used(peer):
    before = len(sweepers())
    pool = Pool()
    for task in range(20):
        lease = pool.lease(peer, task=task)
        lease.release()
    assert len(sweepers()) == before + 1
    sweeper = sweepers()[-1]
    pool.close()
    sweeper.join(30)
    assert not sweeper.is_alive()


def test_the_connection_with_the_shorter_timeout_is_closed_first(service, running):
    pool = Pool()
    with running(service) as address:
        patient, hasty = Peer(address), Peer(address, config=HASTY)
        pool.lease(patient).release()
        lease = pool.lease(hasty)
        client = lease.client
        lease.release()
        until_seen(lambda: client.closed)
        assert pool.snapshot()["connections"] == 1
        pool.close()


def test_a_pool_that_was_closed_is_as_new(pool, peer):
    assert not pool.lease(peer).reconnected
    pool.lease(peer).client.close()
    assert pool.lease(peer).reconnected
    pool.close()
    assert not pool.lease(peer).reconnected


def test_a_connection_that_died_is_made_anew(pool, peer, service):
    lease = pool.lease(peer)
    lease.client.close()
    assert calls(pool.lease(peer).client) == [[2, 4]]
    assert service.counters()["connections"] == 2


def test_a_peer_that_cannot_be_reached_leaves_nothing_behind(pool):
    with pytest.raises(ConnectFailed):
        pool.lease(Peer("aqueduct://127.0.0.1:9"))
    assert pool.snapshot() == {"leases": 0, "connections": 0, "connected": 0}


def test_a_forked_process_makes_its_own_pool(peer):
    lease = process_pool().lease(peer)
    assert process_pool() is process_pool()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            own = process_pool()
            fine = own.pid == os.getpid() and own.snapshot()["leases"] == 0
            mine = own.lease(peer)
            fine = fine and calls(mine.client) == [[2, 4]]
            os.write(writing, b"fine" if fine else b"wrong")
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as said:
        assert said.read() == b"fine"
    os.waitpid(child, 0)
    assert calls(lease.client) == [[2, 4]]
    lease.release()
