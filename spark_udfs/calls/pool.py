"""The connections of one Python worker process.

Spark forks its Python workers and reuses each for many tasks, one after another. So there is one
pool for each process, made on first use and checked against the process id, and in it one
connection for each ``Peer``: an address with what the connection was made with. A task takes a
lease on it and gives it back; several leases share the connection.

A worker may be killed between two instructions, and a generator that Spark dropped may live on in
some traceback. So nothing here relies on one clean-up alone (in this order):

1. ``exchange`` gives its lease back in a ``finally``;
2. when the executor hangs up on this process (``vigil.py``) every call is cancelled and every
   connection closed, as the process may wait for a service and not notice;
3. a lease that a task left behind is ended when the next task of this process takes one;
4. a connection that nobody used for ``idle`` seconds (or four fifths of its idle timeout, if that
   is less) closes, before Spark evicts its worker (60 s);
5. of a worker that was killed the kernel closes the sockets, and over QUIC it is silent, which its
   service takes for departure after its idle timeout.

A process that is forked from a worker lets go of the connections at once: a socket is closed when
nobody has it any more, and their service shall hear of the worker's end, not of its child's.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any, Final

import pyarrow as pa

from aqueduct.address import Address
from aqueduct.carriers.certificates import ClientTls
from aqueduct.client.reactive_client import ReactiveTaskClient
from aqueduct.client.task_client import TaskClient
from aqueduct.client.unary import same_schema
from aqueduct.client.unary_stub import UnaryStub
from aqueduct.config import DEFAULT, Config
from aqueduct.errors import AqueductError, Cancelled, ConfigError
from aqueduct.rpc.executor_name import EXECUTOR_HEADER
from spark_udfs.worker.executor_socket import executor_socket, watch
from spark_udfs.worker.task import executor_name

__all__ = ["IDLE", "CachedAccepted", "Peer", "Pool", "PoolLease", "process_pool"]

IDLE: Final = 30.0
"""Seconds after which an unused connection closes."""
_TRUSTED: Final = 0.25
_CHECK: Final = 5.0
_KNOWN: Final = 64
"""Acceptances of calls that a connection remembers."""


@dataclass(frozen=True, slots=True)
class Peer:
    """All that makes two connections interchangeable. Tokens travel with the calls instead."""

    address: str
    tls: ClientTls | None = None
    headers: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    config: Config = DEFAULT
    application: tuple[str, str] = field(default=("", ""), compare=False)
    """Id and name of the Spark application, for the service."""

    @property
    def reactive(self) -> bool:
        """Whether calls are requests of ReactiveSocket."""
        return Address.parse(self.address).reactive

    @property
    def bare(self) -> str:
        """The address without its options, for people."""
        return self.address.partition("?")[0]

    def __hash__(self) -> int:
        return hash(self.address)  # there are few; to hash all of a configuration takes longer


@dataclass(slots=True)
class CachedAccepted:
    """A call that a service has accepted, and what it said of it."""

    handler: str
    schema: pa.Schema
    """Of what is sent."""
    expected: pa.Schema | None
    """Of the answers, as the caller wants them."""
    deadline: float | None
    answers: pa.Schema | None
    """Their schema."""
    capabilities: frozenset[str]
    """The handler's."""
    prepared: UnaryStub | None
    """Makes calls of a single batch, where they come to the same."""


class PoolLease:
    """The right to use a connection, until ``release``."""

    def __init__(
        self,
        pool: Pool,
        entry: _Entry,
        task: int | None,
        caller: TaskClient | ReactiveTaskClient,
        reconnected: bool,
    ) -> None:
        self._pool = pool
        self._entry = entry
        self._cancel: Callable[[], object] | None = None
        self.task = task
        self.caller = caller
        """The client, for exchanges of functions of one batch."""
        self.reconnected = reconnected
        """Whether the connection was made for this lease, and is not the first to its peer."""

    @property
    def client(self) -> TaskClient:
        """The client, for calls of every kind. Raises ConfigError where there is only one kind."""
        if isinstance(self.caller, TaskClient):
            return self.caller
        raise ConfigError(
            f"{self.peer.bare} carries functions of one batch alone, by exchange() and its "
            "relatives; an aqueduct:// or aqueduct+tls:// address of the service carries this"
        )

    @property
    def peer(self) -> Peer:
        """Whose connection it is."""
        return self._entry.peer

    def on_end(self, cancel: Callable[[], object]) -> None:
        """What ends the call that runs under this lease, should the task leave it behind."""
        self._cancel = cancel

    def accepted(
        self,
        handler: str,
        schema: pa.Schema,
        expected: pa.Schema | None,
        deadline: float | None,
    ) -> CachedAccepted | None:
        """What the service said of such a call on this connection, if there has been one."""
        for known in self._entry.accepted:
            if (
                known.handler == handler
                and known.deadline == deadline
                and (known.expected is expected or same_schema(known.expected, expected))
                and same_schema(known.schema, schema)
            ):
                return known
        return None

    def remember(self, acceptance: CachedAccepted) -> None:
        """For calls that are alike on this connection."""
        known = self._entry.accepted
        if len(known) >= _KNOWN:
            known.clear()
        known.append(acceptance)

    def take_resumes(self) -> int:
        """How often the connection was cut and went on, since this was asked last.

        Tasks that share a connection count each resume once, whichever asks first.
        """
        with self._pool._lock:
            told, self.caller.told_resumes = self.caller.told_resumes, self.caller.resumes
            return self.caller.told_resumes - told

    def release(self, *, close: bool = False) -> None:
        """Gives the lease back. Repeated calls are without effect.

        ``close``: the connection closes now, unless others use it: the process is about to end,
        as it does after each task that did not end well. Returns when that has been said.
        """
        self._pool._release(self, close)

    def _end(self) -> None:
        if self._cancel is not None:
            with contextlib.suppress(AqueductError):
                self._cancel()
        self.release()


class Pool:
    """Connections by ``Peer``. Thread-safe."""

    def __init__(self, *, idle: float = IDLE) -> None:
        self.pid = os.getpid()
        self.idle = idle
        self._lock = threading.Lock()
        self._entries: dict[Peer, _Entry] = {}
        self._leases: set[PoolLease] = set()
        self._task: int | None = None
        self._frozen = False
        self._connected: set[Peer] = set()  # ever
        self._watching = False
        self._hung_up = False
        self._closing = threading.RLock()  # held while connections close
        self._sweeping = False
        self._next_look = 0.0  # of the thread that sweeps, while it does
        self._look: SimpleQueue[None] = SimpleQueue()  # earlier than that

    def lease(self, peer: Peer, *, task: int | None = None) -> PoolLease:
        """A lease on the connection to ``peer``, made now if there is none.

        ``task`` is Spark's ``taskAttemptId``: leases of other tasks are ended, because one
        process runs one task at a time. None (no task: tests, plain programs) ends nothing.
        Raises what connecting raises (``ConnectFailed``, ``ConfigError``), and Cancelled when the
        executor wants no more of this process.
        """
        if task is not None and not self._watching:
            self._watch()
        with self._lock:
            self._check(task)
            left_behind: tuple[PoolLease, ...] = ()
            if self._leases and task is not None:
                left_behind = tuple(
                    lease for lease in self._leases if lease.task not in (None, task)
                )
            if task is not None and not self._frozen:
                self._frozen = self._task not in (None, task)
                self._task = task
                if self._frozen:
                    _freeze()
        for lease in left_behind:
            lease._end()
        with self._lock:
            entry = self._entries.get(peer)
            if entry is None:
                entry = self._entries[peer] = _Entry(peer)
            entry.users += 1
        try:
            with entry.connecting:
                client, made = entry.open_client(in_task=task is not None)
        except BaseException:
            with self._lock:
                entry.users -= 1
                self._idle_from_now(entry)
            raise
        with self._lock:
            lease = PoolLease(self, entry, task, client, made and peer in self._connected)
            if made:
                self._connected.add(peer)
            self._leases.add(lease)
        try:
            self._check(task)  # the executor may have left meanwhile
        except Cancelled:
            lease.release(close=True)
            raise
        return lease

    def snapshot(self) -> dict[str, Any]:
        """Counters for people and tests."""
        with self._lock:
            return {
                "leases": len(self._leases),
                "connections": sum(e.client is not None for e in self._entries.values()),
                "connected": sum(e.connected for e in self._entries.values()),
            }

    def close(self) -> None:
        """Ends every lease and closes every connection. The pool is as new."""
        with self._closing:
            with self._lock:
                leases = list(self._leases)
            for lease in leases:
                lease._end()
            with self._lock:
                entries = list(self._entries.values())
                self._entries.clear()
                self._connected.clear()  # an address may soon be another service's
            for entry in entries:
                entry.close()
            self._look.put(None)

    def _check(self, task: int | None) -> None:
        if self._hung_up and task is not None:
            raise Cancelled(f"the executor has left task {task}: its rows are not wanted any more")

    def _watch(self) -> None:
        """Has the executor looked after, from the first task on."""
        with self._lock:
            if self._watching:
                return
            self._watching = True
        descriptor = executor_socket()
        if descriptor is not None:
            watch(descriptor, self._gone)

    def _gone(self) -> None:
        """The executor has hung up: the process ends as soon as its task notices."""
        with self._closing:
            with self._lock:
                self._hung_up = True
            self.close()

    def _release(self, lease: PoolLease, close: bool) -> None:
        if close:  # the process ends after this, so it waits until the peers are told
            with self._closing:
                self._give_back(lease, close)
        else:
            self._give_back(lease, close)

    def _give_back(self, lease: PoolLease, close: bool) -> None:
        entry = lease._entry
        with self._lock:
            if lease not in self._leases:
                return
            self._leases.remove(lease)
            entry.users -= 1
            # The pool may have forgotten it, by a close while it was connecting. Then only this
            # thread can close it.
            forgotten = self._entries.get(entry.peer) is not entry
            closing = not entry.users and (close or forgotten)
            if closing:
                self._forget(entry)
            else:
                self._idle_from_now(entry)
        if closing:
            entry.close()

    def _idle_from_now(self, entry: _Entry) -> None:
        entry.used = time.monotonic()
        if entry.users or entry.client is None:
            return
        if not self._sweeping:
            self._sweeping = True
            threading.Thread(target=self._sweep, name="aqueduct-pool-idle", daemon=True).start()
        elif entry.unused_until(entry.used, self.idle) < self._next_look:
            self._look.put(None)

    def _sweep(self) -> None:
        """Closes what was unused for ``idle`` seconds. Ends when there is no connection.

        Between two looks a connection may be leased and released as often as it likes: a clock
        that is set each time would be a thread for each task.
        """
        while True:
            with self._lock:
                now = time.monotonic()
                ends = [
                    (each.unused_until(now, self.idle), each) for each in self._entries.values()
                ]
                due = [entry for end, entry in ends if end <= now]
                for entry in due:
                    self._forget(entry)
                left = [end for end, entry in ends if end > now and entry.client is not None]
                self._next_look = min(left, default=0.0)
                self._sweeping = bool(left)
            for entry in due:
                entry.close()
            if not left:
                return
            with contextlib.suppress(Empty):
                self._look.get(timeout=min(left) - now)

    def _forget(self, entry: _Entry) -> None:
        if self._entries.get(entry.peer) is entry:
            del self._entries[entry.peer]


class _Entry:
    """One peer's connection. ``users`` and ``used`` belong to the pool's lock."""

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self.users = 0
        self.used = 0.0
        """When it was released, or found to lead nowhere; of no account while it is leased."""
        self.connected = 0
        self.client: TaskClient | ReactiveTaskClient | None = None
        self.connecting = threading.Lock()
        self.accepted: list[CachedAccepted] = []

    def open_client(self, *, in_task: bool) -> tuple[TaskClient | ReactiveTaskClient, bool]:
        """The connection, and whether it was made just now. ``in_task``: by a task of Spark."""
        made = False
        if self.client is not None and not self._answers(self.client):
            self.close()
        if self.client is None:
            self.accepted = []
            self.client = self._connect(in_task)
            self.connected += 1
            made = True
        return self.client, made

    def _connect(self, in_task: bool) -> TaskClient | ReactiveTaskClient:
        peer = self.peer
        if peer.reactive:
            return ReactiveTaskClient(peer.address, config=peer.config, tls=peer.tls)
        headers = peer.headers
        if in_task and peer.config.calls.spark_tasks:
            named = executor_name(peer.application).encode().decode()
            headers = (*headers, (EXECUTOR_HEADER.decode(), named))
        # An idle connection is the pool's to close; silence means that the worker is gone.
        return TaskClient(
            peer.address,
            config=peer.config,
            tls=peer.tls,
            headers=headers,
            keep_alive=False,
        )

    def _answers(self, client: TaskClient | ReactiveTaskClient) -> bool:
        """Whether a connection from an earlier task still leads anywhere.

        Its service may have been restarted meanwhile, which an idle connection cannot know.
        """
        if client.closed:
            return False
        if self.users > 1 or time.monotonic() - self.used < _TRUSTED:
            return True
        if isinstance(client, ReactiveTaskClient):
            return True  # it has no ping, and has heard of a connection that was closed
        try:
            client.ping(timeout=_CHECK)
        except AqueductError:
            return False
        return True

    def unused_until(self, now: float, idle: float) -> float:
        """When it will not have been used for too long, if nobody uses it from now on."""
        # A transport gives up a silent connection by itself after its idle timeout: be earlier,
        # so that the service hears a close instead of nothing.
        patience = min(idle, 0.8 * self.peer.config.timing.idle_timeout)
        return (now if self.users else self.used) + patience

    def close(self) -> None:
        client, self.client = self.client, None
        if client is not None:
            with contextlib.suppress(AqueductError):
                client.close()


def _freeze() -> None:
    """Once in a worker of Spark's, as its second task begins: what lives by then stays.

    Spark's daemon has a worker collect garbage after each task, all generations, which walks every
    module: 50 ms, and a small task takes less. The collection after the first task left no garbage.
    """
    main = getattr(sys.modules.get("__main__"), "__spec__", None)
    if main is not None and main.name == "pyspark.daemon":
        gc.freeze()


_pool: Pool | None = None
_pool_lock = threading.Lock()
_inherited: list[Pool] = []


def process_pool() -> Pool:
    """This process's pool, made on the first call."""
    global _pool
    with _pool_lock:
        if _pool is None:
            _pool = Pool()
        return _pool


def _after_fork() -> None:
    global _pool, _pool_lock
    _pool_lock = threading.Lock()  # another thread of the parent may have held it
    if _pool is not None:
        # Its threads stayed with the parent. Its connections have let go of their sockets; the
        # garbage collector need not walk them.
        _inherited.append(_pool)
        _pool = None


os.register_at_fork(after_in_child=_after_fork)
