"""The services that one piece of work may call, and the calls that it has on them.

Nothing here waits: connections are made elsewhere, and what becomes of them comes into the same
queue as the answers.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from queue import Empty
from typing import Any, Protocol

import pyarrow as pa

from aqueduct.client.balanced_spec import BalancedSpec
from aqueduct.client.call_metrics import CallMetrics
from aqueduct.client.retry import Backoff
from aqueduct.client.thread_call import Failed
from aqueduct.rpc.request import IDEMPOTENT, ONE_TO_ONE

__all__ = [
    "CallQueue",
    "Connector",
    "Endpoint",
    "ExchangeCall",
    "Lease",
    "OpenCall",
    "OpenCalls",
    "Target",
    "UnansweredBatch",
]


class Target(Hashable, Protocol):
    """An address, with all that a connection to it is made with."""

    @property
    def bare(self) -> str:
        """The address without its options, for people."""


class CallQueue(Protocol):
    """What calls and connections have for the driver of the work, each with its tag."""

    def put(self, found: tuple[Any, Any]) -> None:
        """Adds a pair of a tag and what is new of it."""

    def get_nowait(self) -> tuple[Any, Any]:
        """The oldest pair. Raises queue.Empty."""


class Lease(Protocol):
    """The right to use a connection, until ``release``."""

    @property
    def reconnected(self) -> bool:
        """Whether the connection was made for this lease, and is not the first to its target."""

    def on_end(self, cancel: Callable[[], object]) -> None:
        """What ends the call that runs under this lease, should it be left behind."""

    def take_resumes(self) -> int:
        """How often the connection was cut and went on, since this was asked last."""

    def release(self, *, close: bool = False) -> None:
        """Gives the lease back; ``close``: the connection closes, unless others use it."""


class ExchangeCall(Protocol):
    """One call whose news go into a queue; see ThreadCall."""

    @property
    def accepted(self) -> bool:
        """Whether the service has accepted the call."""

    @property
    def schema(self) -> pa.Schema | None:
        """Of the answers; None before the call is accepted."""

    @property
    def capabilities(self) -> frozenset[str]:
        """What the handler is, and what is granted."""

    @property
    def counters(self) -> Mapping[str, int]:
        """What the service counted; empty before the end."""

    @property
    def room(self) -> bool:
        """Whether a batch may be sent."""

    @property
    def settled(self) -> int:
        """Of how many batches the service needs no more."""

    @property
    def sent_bytes(self) -> int:
        """Bytes of the payloads that were sent."""

    def hold(self, size: int) -> None:
        """So many bytes are kept besides: they count against the window."""

    def push(self, batch: pa.RecordBatch) -> int:
        """Sends a batch; returns its number."""

    def finish(self) -> None:
        """No more batches come."""

    def popped(self, found: Any) -> Any:
        """What its news from the queue are."""

    def expect(self, *, room: bool = False, acceptance: bool = False) -> bool:
        """Asks for NEWS of room, or of acceptance. True: there it is already."""

    def set_waiting(self, waiting: bool) -> None:
        """Whether the service is waited for: the deadline on progress runs then."""

    def check(self) -> None:
        """Raises LocalProtocolError if no answer would come any more."""

    def abandon(self) -> object:
        """The handler is told to stop, unless the call is over."""


class Connector(Protocol):
    """Where the work gets its connections from, and how its calls are made."""

    @property
    def ends_badly(self) -> bool:
        """Whether connections close when the work does not end well."""

    @property
    def over(self) -> bool:
        """Whether nobody can be called any more."""

    def targets(self) -> Sequence[Target]:
        """The addresses to call, in this order. The same object as before if nothing changed."""

    def in_trouble(self, target: Any, now: float) -> bool:
        """Whether others had trouble with it a short time ago."""

    def note(self, target: Any, *, trouble: bool) -> None:
        """Notes whether it answers, for later calls."""

    def connect(
        self,
        target: Any,
        *,
        wanted: Callable[[], bool],
        done: Callable[[Any], object],
        at_once: bool,
    ) -> None:
        """Connects; ``done`` is given a Lease, or Failed.

        ``wanted``: whether it is still of use. ``at_once``: there is nothing else to do meanwhile.
        """

    def open_call(
        self, lease: Any, news: Any, tag: OpenCall, *, deadline: float | None, repeated: int
    ) -> ExchangeCall:
        """A call on a connection that is there. Raises ConnectionLost and ConfigError."""


@dataclass(slots=True)
class UnansweredBatch:
    """A batch that has no answer yet."""

    number: int
    """In the whole input."""
    batch: pa.RecordBatch | None
    """None once nobody waits for it any more."""


@dataclass(slots=True, eq=False)
class Endpoint:
    """One address."""

    target: Target
    backoff: Backoff
    connecting: float | None = None
    """Since when a connection is being made."""
    call: OpenCall | None = None
    """That takes batches, or will once it is accepted."""

    @property
    def address(self) -> str:
        """Without its options."""
        return self.target.bare

    def is_free(self, now: float) -> bool:
        """Whether a call may be begun."""
        return self.call is None and self.connecting is None and self.backoff.until <= now


@dataclass(slots=True, eq=False)
class OpenCall:
    """One call of the work; in the queue it is the tag of its news."""

    service: Endpoint
    lease: Lease
    exchange: Any = field(init=False)
    """An ExchangeCall."""
    since: float = field(default_factory=time.monotonic)
    waiting: dict[int, UnansweredBatch] = field(default_factory=dict)
    """By their numbers in this call, the oldest first."""
    size: int = 0
    """Bytes of them, encoded."""
    sizes: dict[int, int] = field(default_factory=dict)
    sent: int = 0
    accepted: bool = False
    """As far as the driver of the work has noticed."""
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
        return self.accepted and not self.finished and bool(self.exchange.room)

    def send(self, waiting: UnansweredBatch, *, keep: bool) -> tuple[int, int]:
        """Sends a batch; its number in this call, and its size. ``keep``: until it is answered."""
        assert waiting.batch is not None
        before = self.exchange.sent_bytes
        number: int = self.exchange.push(waiting.batch)
        size: int = self.exchange.sent_bytes - before
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


class OpenCalls:
    """The endpoints of one piece of work, connections on their way, and calls that are open."""

    def __init__(
        self, spec: BalancedSpec, *, connector: Connector, numbers: CallMetrics, news: CallQueue
    ) -> None:
        """``news``: pairs of an OpenCall and its news, or of an Endpoint and a Lease or Failed."""
        self._spec = spec
        self._connector = connector
        self._numbers = numbers
        self.news = news
        self._targets: Sequence[Target] = ()
        self.services: list[Endpoint] = []
        """In the order in which they are taken."""
        self.calls: list[OpenCall] = []
        """That are open."""
        self.broken = 0
        """Calls that failed and were not made again yet."""
        self._repeated = 0
        self._lock = threading.Lock()
        self._closed = False
        self.refresh()

    def refresh(self) -> list[Endpoint]:
        """Takes up endpoints that are new; returns those that are there no more."""
        targets = self._connector.targets()
        if targets is self._targets:
            return []
        self._targets = targets
        known = {service.target: service for service in self.services}
        first, limit = self._spec.backoff, self._spec.backoff_limit
        self.services = [
            known.pop(target) if target in known else Endpoint(target, Backoff(first, limit))
            for target in targets
        ]
        return list(known.values())

    @property
    def over(self) -> bool:
        """Whether nobody can be called any more."""
        return self._connector.over

    @property
    def places(self) -> list[str]:
        """The addresses without their options, for people."""
        return [service.address for service in self.services]

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
        # Sorted is stable: those that others had no trouble with, then those that failed least
        # here, in their order. Or the first of many silent ones would be tried for ever.
        found.sort(
            key=lambda service: (
                self._connector.in_trouble(service.target, now),
                service.backoff.failures,
            )
        )
        return found[0] if found else None

    def begin(self, service: Endpoint) -> None:
        """Has a connection made, or found; what comes of it is news."""
        service.connecting = time.monotonic()
        if self.broken:
            self.broken -= 1
            self._repeated += 1
            self._numbers.retries += 1
        self._connector.connect(
            service.target,
            wanted=lambda: not self._closed,
            done=lambda found: self._connected(service, found),
            at_once=len(self.services) == 1 and not service.backoff.failures,
        )

    def slow(self, before: float) -> None:
        """Later calls begin elsewhere for a while: these addresses have not answered yet."""
        for service in self.services:
            if service.connecting is not None and service.connecting <= before:
                self._connector.note(service.target, trouble=True)

    def call(self, service: Endpoint, lease: Any, *, deadline: float | None) -> OpenCall:
        """A call on a connection that is there. Raises ConnectionLost and ConfigError."""
        service.connecting = None
        self._connector.note(service.target, trouble=False)
        self._numbers.reconnects += lease.reconnected
        call = OpenCall(service, lease)
        try:
            call.exchange = self._connector.open_call(
                lease, self.news, call, deadline=deadline, repeated=self._repeated
            )
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
            self._connector.note(service.target, trouble=True)

    def close(self, *, well: bool) -> None:
        """Gives up everything that is open. Connections on their way are given back."""
        with self._lock:
            self._closed = True
        close = not well and self._connector.ends_badly
        for call in tuple(self.calls):
            self.drop(call, close=close)
        with contextlib.suppress(Empty):
            while True:
                tag, found = self.news.get_nowait()
                if isinstance(tag, Endpoint) and type(found) is not Failed:
                    found.release(close=close)

    def _connected(self, service: Endpoint, found: Any) -> None:
        with self._lock:
            if not self._closed:
                self.news.put((service, found))
                return
        if type(found) is not Failed:  # the work does not wait for it any more
            found.release()
