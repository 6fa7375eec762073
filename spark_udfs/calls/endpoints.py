"""The services that a partition may call, and the calls that it has on them.

Nothing here waits: connections are made in threads of their own, and what becomes of them comes
into the same queue as the answers.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Final

import pyarrow as pa

from aqueduct.client.reactive_exchange import ReactiveExchange
from aqueduct.client.thread_call import Failed, News, ThreadCall
from aqueduct.rpc.request import IDEMPOTENT, ONE_TO_ONE
from spark_udfs.calls.pool import Peer, PoolLease, process_pool
from spark_udfs.calls.retry import Backoff
from spark_udfs.calls.spec import CallSpec
from spark_udfs.worker.metrics import TaskMetrics
from spark_udfs.worker.task import TaskContext

__all__ = ["Addresses", "Endpoint", "OpenCall", "UnansweredBatch"]

_TROUBLE: Final = 5.0
"""Seconds for which tasks of this process begin elsewhere after an address did not answer."""
_troubled: dict[Peer, float] = {}


@dataclass(slots=True)
class UnansweredBatch:
    """A batch that has no answer yet."""

    number: int
    """In the partition."""
    batch: pa.RecordBatch | None
    """None once nobody waits for it any more."""


@dataclass(slots=True, eq=False)
class Endpoint:
    """One address."""

    peer: Peer
    backoff: Backoff
    connecting: float | None = None
    """Since when a connection is being made."""
    call: OpenCall | None = None
    """That takes batches, or will once it is accepted."""

    @property
    def address(self) -> str:
        """Without its options."""
        return self.peer.bare

    def is_free(self, now: float) -> bool:
        """Whether a call may be begun."""
        return self.call is None and self.connecting is None and self.backoff.until <= now


@dataclass(slots=True, eq=False)
class OpenCall:
    """One call of a partition; in the queue it is the tag of its news."""

    service: Endpoint
    lease: PoolLease
    exchange: ThreadCall | ReactiveExchange = field(init=False)
    since: float = field(default_factory=time.monotonic)
    waiting: dict[int, UnansweredBatch] = field(default_factory=dict)
    """By their numbers in this call, the oldest first."""
    size: int = 0
    """Bytes of them, encoded."""
    sizes: dict[int, int] = field(default_factory=dict)
    sent: int = 0
    accepted: bool = False
    """As far as the thread has noticed."""
    finished: bool = False
    """No more is sent."""

    @property
    def one_to_one(self) -> bool:
        """Whether each batch has one answer, of its own."""
        return ONE_TO_ONE in self.exchange.capabilities

    @property
    def idempotent(self) -> bool:
        """Whether what has no answer may be sent again."""
        return ONE_TO_ONE in self.exchange.capabilities and IDEMPOTENT in self.exchange.capabilities

    @property
    def takes(self) -> bool:
        """Whether a batch may be sent now."""
        return self.accepted and not self.finished and self.exchange.room

    def send(self, waiting: UnansweredBatch, *, keep: bool) -> tuple[int, int]:
        """Sends a batch; its number in this call, and its size. ``keep``: until it is answered."""
        assert waiting.batch is not None
        before = self.exchange.sent_bytes
        number = self.exchange.push(waiting.batch)
        size = self.exchange.sent_bytes - before
        self.sent += 1
        if keep:
            self.waiting[number] = waiting
            self.sizes[number] = size
            self.size += size
        return number, size

    def answered(self, number: int) -> UnansweredBatch | None:
        """The batch of an answer; None if none is due."""
        waiting = self.waiting.pop(number, None)
        if waiting is not None:
            self.size -= self.sizes.pop(number)
        return waiting

    def finish(self) -> None:
        """No more is sent."""
        if not self.finished:
            self.finished = True
            self.exchange.finish()
            if self.service.call is self:
                self.service.call = None


class Addresses:
    """The services of one partition, connections on their way, and calls that are open."""

    def __init__(
        self, calling: CallSpec, *, schema: pa.Schema, place: TaskContext, numbers: TaskMetrics
    ) -> None:
        self._calling = calling
        self._schema = schema
        self._place = place
        self._numbers = numbers
        backoff, limit = calling.backoff, calling.backoff_limit
        services = [
            Endpoint(
                calling.peer(address),
                Backoff(backoff, limit),
            )
            for address in calling.addresses
        ]
        first = (place.partition or 0) % len(services)
        self.services = services[first:] + services[:first]
        """In the order in which they are taken: partitions begin at different ones."""
        self.calls: list[OpenCall] = []
        """That are open."""
        self.news: News = SimpleQueue()
        """Pairs of an OpenCall and its news, or of an Endpoint and a PoolLease or Failed."""
        self.broken = 0
        """Calls that failed and were not made again yet."""
        self._repeated = 0
        self._lock = threading.Lock()
        self._closed = False

    @property
    def opening(self) -> Iterator[float]:
        """Since when each call is on its way that is not accepted yet."""
        for service in self.services:
            if service.connecting is not None:
                yield service.connecting
            elif service.call is not None and not service.call.accepted:
                yield service.call.since

    def free(self, now: float) -> Endpoint | None:
        """The service to call next, if one may be called now."""
        found = [service for service in self.services if service.is_free(now)]
        # Sorted is stable: those that other tasks had no trouble with, in their order.
        found.sort(key=lambda service: _troubled.get(service.peer, 0.0) > now)
        return found[0] if found else None

    def begin(self, service: Endpoint) -> None:
        """Connects, in a thread unless there is nothing else to do; what comes of it is news."""
        service.connecting = time.monotonic()
        if self.broken:
            self.broken -= 1
            self._repeated += 1
            self._numbers.retries += 1
        if len(self.services) == 1 and not service.backoff.failures:
            self._connect(service)
        else:
            name = "aqueduct-connect"
            threading.Thread(target=self._connect, args=(service,), name=name, daemon=True).start()

    def slow(self, before: float) -> None:
        """Other tasks begin elsewhere for a while: who was called before that says nothing yet."""
        for service in self.services:
            if service.connecting is not None and service.connecting <= before:
                _troubled[service.peer] = time.monotonic() + _TROUBLE

    def call(self, service: Endpoint, lease: PoolLease, *, deadline: float | None) -> OpenCall:
        """A call on a connection that is there. Raises ConnectionLost and ConfigError."""
        calling, place = self._calling, self._place
        service.connecting = None
        _troubled.pop(service.peer, None)
        self._numbers.reconnects += lease.reconnected
        call = OpenCall(service, lease)
        try:
            head = {**calling.head(place), "deadline": deadline}
            if self._repeated:
                head["attempt"] = f"{head['attempt'] or '0'}.{self._repeated}"
            call.exchange = lease.caller.exchange_call(
                calling.handler,
                self.news,
                call,
                schema=self._schema,
                output_schema=calling.schema,
                in_flight=calling.in_flight,
                in_flight_bytes=calling.in_flight_bytes,
                compression=calling.compression,
                ordered=calling.keeps_order,
                report_failures=calling.on_error == "report",
                **head,
            )
            if isinstance(call.exchange, ReactiveExchange):
                call.exchange.splits = calling.splits
        except BaseException:
            lease.release()
            raise
        lease.on_end(call.exchange.abandon)
        service.call = call
        self.calls.append(call)
        return call

    def ended(self, call: OpenCall, *, close: bool = False) -> None:
        """Nothing more comes of a call."""
        self.calls.remove(call)
        if call.service.call is call:
            call.service.call = None
        self._numbers.resumes += call.lease.take_resumes()
        call.lease.release(close=close)

    def drop(self, call: OpenCall, *, close: bool = False) -> None:
        """Gives up a call: nothing more of it is wanted."""
        call.exchange.abandon()
        self.ended(call, close=close)

    def failed(self, service: Endpoint, *, unreachable: bool) -> None:
        """A call on it failed, or could not be made: it is left alone for a while."""
        service.connecting = None
        service.backoff.failed()
        self.broken += 1
        if unreachable:
            _troubled[service.peer] = time.monotonic() + _TROUBLE

    def close(self, *, well: bool) -> None:
        """Gives up everything that is open. Connections on their way go to the pool."""
        with self._lock:
            self._closed = True
        # A Python worker ends with a task that failed or was left early: let the services hear.
        close = not well and self._place.task is not None
        for call in tuple(self.calls):
            self.drop(call, close=close)
        with contextlib.suppress(Empty):
            while True:
                found = self.news.get_nowait()[1]
                if isinstance(found, PoolLease):
                    found.release(close=close)

    def _connect(self, service: Endpoint) -> None:
        found: PoolLease | Failed
        if self._closed:
            return  # to lease for a task that is over would end what the next one has
        try:
            found = process_pool().lease(service.peer, task=self._place.task)
        except BaseException as error:  # noqa: BLE001  it belongs to the thread of the task
            found = Failed(error)
        with self._lock:
            if not self._closed:
                self.news.put((service, found))
                return
        if isinstance(found, PoolLease):  # the task does not wait for it any more
            found.release()
