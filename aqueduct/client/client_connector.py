"""Where the calls of a client get their connections from, for a Balancer; in a task or a thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final, TypeAlias, cast

import pyarrow as pa

from aqueduct._speedups.calls.batch_sender import InFlightWindow
from aqueduct.client.balanced_spec import BalancedSpec
from aqueduct.client.call import Batches
from aqueduct.client.client_connection import ClientConnection, outline
from aqueduct.client.endpoint_set import ClientEndpoint, EndpointSet
from aqueduct.client.endpoints import ExchangeCall, OpenCall
from aqueduct.client.options import CallOptions
from aqueduct.client.thread_call import Failed
from aqueduct.errors import ConnectionLost
from aqueduct.rpc.request import CallHead, Kind
from aqueduct.rpc.sink_commit import WRITE
from aqueduct.rpc.tracing import Unobserved

__all__ = ["ClientConnector", "ClientLease", "MakeCall", "spec_of"]

MakeCall: TypeAlias = Callable[
    [ClientConnection, CallHead, InFlightWindow | None, Batches | None, Any, Any], ExchangeCall
]
"""Makes a call on a connection, whose news go into a queue with a tag."""

_ATTEMPT: Final = Unobserved({})
"""The whole call is observed, and its headers have the trace."""


class ClientLease:
    """The use of a client's connection by one call."""

    __slots__ = ("_resumes", "link", "reconnected", "target")

    def __init__(
        self, link: ClientConnection, target: ClientEndpoint, *, reconnected: bool
    ) -> None:
        self.link = link
        self.target = target
        self.reconnected = reconnected
        self._resumes = link.connection.carrier.resumes

    def on_end(self, cancel: Callable[[], object]) -> None:
        """Without effect: a client leaves no call behind."""

    def take_resumes(self) -> int:
        """How often the connection was cut and went on, since this was asked last."""
        before, self._resumes = self._resumes, self.link.connection.carrier.resumes
        return self._resumes - before

    def release(self, *, close: bool = False) -> None:
        """Without effect: the client keeps its connections."""


class ClientConnector:
    """The addresses of a client, for one piece of work."""

    ends_badly = False
    """Connections are the client's, however a call ends."""

    def __init__(
        self,
        endpoints: EndpointSet,
        spec: BalancedSpec,
        options: CallOptions,
        *,
        schema: pa.Schema | None,
        call_soon: Callable[[Callable[[], object]], object],
        make: MakeCall,
    ) -> None:
        """``schema``: of what is sent; ``call_soon`` has the client's loop call something."""
        self._endpoints = endpoints
        self._spec = spec
        self._options = replace(options, schema=schema)
        self._call_soon = call_soon
        self._make = make
        self._known: tuple[ClientEndpoint, ...] = ()
        self._order: Sequence[ClientEndpoint] = ()
        self._bound: Sequence[ClientEndpoint] | None = None
        """Where a call was begun that no other address may be given."""

    @property
    def over(self) -> bool:
        """Whether the client is closed."""
        return self._endpoints.closed

    def targets(self) -> Sequence[ClientEndpoint]:
        """Those with the fewest outstanding bytes first."""
        endpoints = self._endpoints
        if self._bound is not None:
            return self._bound
        if endpoints.stale:
            self._soon(endpoints.tend)
        if endpoints.targets is not self._known:
            self._known = endpoints.targets
            self._order = endpoints.in_order()
        return self._order

    def in_trouble(self, target: ClientEndpoint, now: float) -> bool:
        """Whether it is not connected, or other calls had trouble with it a short time ago."""
        return target.in_trouble(now) or not target.alive

    def note(self, target: ClientEndpoint, *, trouble: bool) -> None:
        """Whether it answers, for calls that come later."""
        target.note(trouble=trouble)

    def connect(
        self,
        target: ClientEndpoint,
        *,
        wanted: Callable[[], bool],
        done: Callable[[ClientLease | Failed], object],
        at_once: bool,
    ) -> None:
        """Takes the connection that is there, or has the loop make it."""
        if target.link is not None and target.alive:
            done(ClientLease(target.link, target, reconnected=False))
            return
        endpoints = self._endpoints

        async def lease() -> None:
            found: ClientLease | Failed
            before = target.connections
            try:
                link = await endpoints.lease(target)
                again = before > 0 and target.connections > before
                found = ClientLease(link, target, reconnected=again)
            except BaseException as error:
                found = Failed(error)
                if not isinstance(error, Exception):
                    done(Failed(ConnectionLost(f"the client of {endpoints.places} is closed")))
                    raise
            done(found)

        def begin() -> None:
            if endpoints.closed:
                done(Failed(ConnectionLost(f"the client of {endpoints.places} is closed")))
            elif wanted():
                endpoints.spawn(lease())

        if not self._soon(begin):
            done(Failed(ConnectionLost(f"the client of {endpoints.places} is closed")))

    def open_call(
        self,
        lease: ClientLease,
        news: Any,
        tag: OpenCall,
        *,
        deadline: float | None,
        repeated: int,
    ) -> ExchangeCall:
        """A call on the connection of ``lease``. Raises ConnectionLost and ConfigError."""
        link, options = lease.link, self._options
        if link.closed:
            raise link.connection.error or ConnectionLost(f"{link!r} is closed")
        if _takes_once(self._spec.handler):
            if self._bound is not None:
                raise ConnectionLost(
                    f"an attempt at the sink {self._spec.handler.removeprefix(WRITE)!r} was begun "
                    "once and is not begun again; make another attempt"
                )
            # The sink aborts what is left of it, so a second one of that name would lose its rows.
            self._bound = (lease.target,)
        attempt = options.attempt
        if repeated:  # or the service could not tell it from the call that broke
            attempt = f"{attempt or '0'}.{repeated}"
        spec = self._spec
        ordered = options.ordered
        if spec.kind == "exchange":
            ordered = spec.keeps_order(len(self._endpoints.targets))
        given = replace(options, deadline=deadline, attempt=attempt, ordered=ordered)
        source, head, window = outline(link, spec.kind, spec.handler, (), given, _ATTEMPT)
        head.encode()  # errors belong here rather than into the loop
        return self._make(link, head, window, source, news, tag)

    def _soon(self, callback: Callable[[], object]) -> bool:
        try:
            self._call_soon(callback)
        except RuntimeError:  # the loop has ended
            return False
        return True


def spec_of(kind: Kind, handler: str, options: CallOptions, base: BalancedSpec) -> BalancedSpec:
    """A call of a client as a piece of work; ``base`` has what the client says of retries."""
    once = _takes_once(handler)
    retries = base.retries if options.retries is None else options.retries
    return replace(
        base,
        kind=kind,
        handler=handler,
        in_flight=options.in_flight,
        in_flight_bytes=cast("int | None", options.in_flight_bytes),
        ordered=options.ordered,
        deadline=cast("float | None", options.deadline),
        batch_deadline=cast("float | None", options.batch_deadline),
        retries=0 if once else retries,
        # A sink that is begun twice may take effect twice, though it was sent nothing.
        hedge=float("inf") if once or kind == "sink" else base.hedge,
        on_error="report" if options.report_failures else "fail",
    )


def _takes_once(handler: str) -> bool:
    """Whether calls are attempts at a sink: each is begun once, at one address."""
    return handler.startswith(WRITE)
