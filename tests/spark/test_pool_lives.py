"""The pool's connections over restarts of services, forks, kills, and the executor's hang-up."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import Any

import pyarrow as pa
import pytest

from aqueduct.carriers.certificates import ClientTls, dev_certificate
from aqueduct.errors import Cancelled
from spark_udfs.calls import pool as pool_module
from spark_udfs.calls.pool import Peer, Pool
from spark_udfs.worker import executor_socket
from tests.spark.services import NUMBERS, make
from tests.spark.witness import ROOT, Witness

PROMISE = 1.0


@pytest.fixture
def pool():
    pool = Pool()
    yield pool
    pool.close()


@pytest.fixture
def start():
    """Starts services in processes of their own, which end with the test."""
    started = []

    def start(*addresses, **options):
        started.append(Witness(*addresses, **options))
        return started[-1]

    yield start
    for witness in started:
        witness.close()


def calls(client, handler="echo"):
    batch = pa.record_batch({"id": [1, 2]}, schema=NUMBERS)
    answers = client.exchange(handler, [batch], schema=NUMBERS)
    return [answer["id"].to_pylist() for answer in answers]


def used(pool, peer):
    """A task uses the connection and gives it back; whether it was made anew."""
    lease = pool.lease(peer)
    try:
        assert calls(lease.client) == [[1, 2]]
        return lease.reconnected
    finally:
        lease.release()


@pytest.mark.parametrize("scheme", ["tcp", "tls", "quic"])
def test_a_service_that_was_restarted_is_found_again(pool, running, scheme, monkeypatch):
    # A restart can take less time than a used connection is trusted for.
    monkeypatch.setattr(pool_module, "_TRUSTED", 0.0)
    certificate = dev_certificate()
    tls = ClientTls(fingerprint=certificate.fingerprint)
    name = "aqueduct" if scheme == "quic" else f"aqueduct+{scheme}"
    options = {"dev_certificate": False, "tls": certificate}
    with running(make(), f"{name}://127.0.0.1:0", **options) as address:
        address = address.partition("?")[0]
        peer = Peer(address, None if scheme == "tcp" else tls)
        assert not used(pool, peer)
        assert not used(pool, peer)
    with running(make(), address, **options):
        assert used(pool, peer)
        assert not used(pool, peer)
    assert pool.snapshot()["connections"] == 1


@pytest.mark.parametrize("scheme", ["tcp", "unix"])
def test_a_service_that_was_killed_is_found_again(pool, start, tmp_path, scheme):
    path = tmp_path / "socket"
    address = f"aqueduct+unix://{path}" if scheme == "unix" else "aqueduct+tcp://127.0.0.1:0"
    witness = start(address)
    address = witness.addresses[0]
    assert not used(pool, Peer(address))
    witness.kill()
    path.unlink(missing_ok=True)
    start(address)
    assert used(pool, Peer(address))


def test_a_silent_service_is_left_after_a_ping(pool, start, monkeypatch):
    # Over QUIC nothing tells of a service that was killed; the next one knows no such connection.
    monkeypatch.setattr(pool_module, "_CHECK", 0.5)
    monkeypatch.setattr(pool_module, "_TRUSTED", 0.0)
    witness = start("aqueduct://127.0.0.1:0")
    address = witness.addresses[0].partition("?")[0]
    peer = Peer(address, ClientTls(verify=False))
    assert not used(pool, peer)
    witness.kill()
    start(address)
    assert used(pool, peer)


PARENT = """
import os, signal, sys
import pyarrow as pa
from spark_udfs.calls.pool import Peer, process_pool

lease = process_pool().lease(Peer(sys.argv[1]))
batch = pa.record_batch({"id": [1]})
stream = lease.client.exchange("hold", [batch], schema=batch.schema, headers={"hold": "all"})
stream.opened()
child = os.fork()
if child == 0:
    sys.stdin.read()  # ends when the test has seen enough
    os._exit(0)
print(child, flush=True)
for answer in stream:
    pass
"""


@pytest.mark.parametrize("scheme", ["tcp", "unix"])
def test_a_child_keeps_no_connection_of_its_parent_open(start, tmp_path, scheme):
    path = tmp_path / "socket"
    witness = start(f"aqueduct+unix://{path}" if scheme == "unix" else "aqueduct+tcp://127.0.0.1:0")
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, witness.addresses[0]],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=ROOT,
        text=True,
    )
    with parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        witness.wait("holding")
        assert witness.seen("cancelled") == []
        parent.send_signal(signal.SIGKILL)
        killed = time.monotonic()
        (cancelled,) = witness.wait("cancelled")
        os.kill(child, 0)  # it is still there
        assert cancelled["at"] - killed < PROMISE


def test_the_executor_socket_is_seen_to_close():
    ours, theirs = socket.socketpair()
    theirs.sendall(b"not read yet")
    gone = threading.Event()
    with ours:
        assert executor_socket.watch(ours.fileno(), gone.set)
        assert not gone.wait(0.05)
        theirs.close()
        assert gone.wait(30)


def test_there_is_no_executor_here():
    assert executor_socket.executor_socket() is None
    assert executor_socket.input_look() is None


def test_a_look_at_the_input_never_waits():
    """In a function that looks like PySpark's, over a real socket."""
    code = compile("def main(infile, work):\n    return work()\n", "/lib/pyspark/worker.py", "exec")
    names: dict[str, Any] = {}
    exec(code, names)
    ours, theirs = socket.socketpair()
    with ours, theirs, os.fdopen(os.dup(ours.fileno()), "rb", 65536) as infile:

        def work():
            look = executor_socket.input_look()
            assert look is not None
            assert executor_socket.executor_socket() == infile.fileno()
            found = [look()]
            theirs.sendall(b"two")
            found.append(look())
            assert infile.read(1) == b"t"
            found.append(look())  # in the buffer, and no more in the socket
            assert infile.read(2) == b"wo"
            found.append(look())
            assert os.get_blocking(infile.fileno())
            theirs.close()
            return [*found, look()]

        assert names["main"](infile, work) == [False, True, True, False, False]


def test_input_of_another_kind_is_not_looked_at():
    code = compile("def main(infile, work):\n    return work()\n", "/lib/pyspark/worker.py", "exec")
    names: dict[str, Any] = {}
    exec(code, names)
    with open(os.devnull, "rb", buffering=0) as infile:
        assert names["main"](infile, executor_socket.input_look) is None


def test_when_the_executor_has_gone_calls_end_and_none_begins(pool, start):
    witness = start("aqueduct+tcp://127.0.0.1:0")
    peer = Peer(witness.addresses[0])
    lease = pool.lease(peer, task=1)
    batch = pa.record_batch({"id": [1]}, schema=NUMBERS)
    stream = lease.client.exchange("hold", [batch], schema=NUMBERS, headers={"hold": "all"})
    lease.on_end(stream.close)
    raised: list[BaseException] = []

    def work():
        try:
            next(stream)
        except Cancelled as error:
            raised.append(error)
        lease.release(close=True)

    thread = threading.Thread(target=work)
    thread.start()
    witness.wait("holding")
    pool._gone()
    thread.join(30)
    assert not thread.is_alive()
    assert [str(error) for error in raised] == [
        f"the call of handler 'hold' at {peer.address} was closed here"
    ]
    witness.wait("cancelled")
    assert pool.snapshot() == {"leases": 0, "connections": 0, "connected": 0}
    with pytest.raises(Cancelled, match="the executor has left task 2"):
        pool.lease(peer, task=2)
    plain = pool.lease(peer)  # not for a task
    assert calls(plain.client) == [[1, 2]]
