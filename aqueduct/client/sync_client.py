"""``SyncClient``: calls to a service from code without an event loop.

::

    with aqueduct.SyncClient("aqueduct://scores.example") as client:
        for batch in client.exchange("score", batches, schema=schema):
            ...

The connection lives on an event loop in a daemon thread of its own. The thread that iterates over
the answers also reads the input and encodes it; it waits for whichever comes first, an answer or
room to send, so that no handler can deadlock it: not one that answers a hundredfold, and not one
that answers at the end.
"""

from __future__ import annotations

import atexit
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from queue import SimpleQueue
from typing import Any, Final, Self, TypeAlias, Unpack, cast
from weakref import WeakKeyDictionary, WeakValueDictionary

import pyarrow as pa

from aqueduct._speedups.calls.batch_sender import InFlightWindow
from aqueduct.arguments import Duration, Size, checked, read_arguments
from aqueduct.arrow.capsules import as_batch, has_batch
from aqueduct.carriers.binding import holds_up
from aqueduct.client.balanced_stream import SyncBalancedStream
from aqueduct.client.balancer import Balancer
from aqueduct.client.call import Batches
from aqueduct.client.call_metrics import CallMetrics
from aqueduct.client.client import Client, failed_before
from aqueduct.client.client_connection import (
    ClientConnection,
    outline,
)
from aqueduct.client.client_connector import ClientConnector, spec_of
from aqueduct.client.connection_options import ClientOptions, ConnectionOptions
from aqueduct.client.endpoint_set import (
    ClientAddress,
    EndpointSet,
    EndpointState,
    addresses_of,
)
from aqueduct.client.loop_thread import thread_for
from aqueduct.client.options import (
    CallOptions,
    ExchangeOptions,
    OneBatch,
    SinkOptions,
    SourceOptions,
    SyncBatches,
    UnaryOptions,
    joined,
    takes,
)
from aqueduct.client.sync_stream import SyncStream
from aqueduct.client.sync_writer import SyncWriter
from aqueduct.client.thread_balancer import ThreadBalancer
from aqueduct.client.thread_call import News, ThreadCall
from aqueduct.client.unary import UnaryCallers, in_schema, one_batch, trace_headers
from aqueduct.client.unary_stub import StubCall
from aqueduct.client.write_segments import Ack
from aqueduct.client.writer import Token
from aqueduct.errors import AqueductError, ConnectionLost, LocalProtocolError
from aqueduct.rpc.describe import DESCRIBE, DESCRIBE_SCHEMA, Description
from aqueduct.rpc.request import CallHead, Kind
from aqueduct.rpc.tracing import CallObservation, Unobserved, observed

__all__ = ["OnEnd", "SyncClient"]

OnEnd: TypeAlias = Callable[[int, int, float], object]
"""Called with the cost of a call: bytes of encoded batches sent and received, and the seconds of
waiting for the service."""

_AT_EXIT: Final = 2.0
"""Seconds that all clients together have to close as the interpreter ends."""
_clients: Final[WeakValueDictionary[int, SyncClient]] = WeakValueDictionary()
"""Those that are open, and some that are closed."""


class SyncClient:
    """A service, at one address or at several, for threads. Any thread may call, several at once.

    It connects at once, within Timing.connect_timeout; see ``Client.connect`` for the arguments
    and the errors. A process that forks must connect after the fork.
    """

    reconnects = True
    """Whether a connection that is lost is made again for the next call."""

    @checked(address="client_address", headers="connection_headers", telemetry="call_observer")
    @takes(ClientOptions, ConnectionOptions)
    def __init__(
        self,
        address: ClientAddress,
        **options: Unpack[ClientOptions],
    ) -> None:
        self._addresses = addresses_of(address)
        given = ConnectionOptions(**options)
        self._policy = given.policy()
        self._endpoints = EndpointSet(self._addresses, given, reconnects=self.reconnects)
        self.address = self._endpoints.places
        """The service's address, without options; several with commas."""
        self.config = given.config
        self._lock = threading.Lock()
        self._check_caller()
        self._own = threading.local()
        """What each thread has for itself."""
        self._thread = thread_for(self._addresses[0])
        try:
            self._thread.run(self._endpoints.open())
        except BaseException:
            self._thread.stop()
            raise
        self._thread.check_caller = self._check_caller
        _clients[id(self)] = self

    @property
    def closed(self) -> bool:
        """Whether it was closed, no connection is up, or a fork has left it behind.

        Unless it was closed, the next call connects again.
        """
        return not self._thread.alive or self._endpoints.closed or not self._endpoints.alive

    @property
    def endpoints(self) -> tuple[EndpointState, ...]:
        """Each address at this moment; see ``Client.endpoints``."""
        return self._endpoints.states

    @checked()
    @takes(ExchangeOptions)
    def exchange(
        self, handler: str, batches: SyncBatches, **options: Unpack[ExchangeOptions]
    ) -> SyncStream:
        """Calls an exchange handler; the arguments are those of ``Client.exchange``.

        ``batches`` is read by the thread that iterates over the answers, as there is room.
        """
        return self._stream("exchange", handler, batches, CallOptions(**options))

    @takes(UnaryOptions)
    def call(
        self, handler: str, batch: OneBatch, **options: Unpack[UnaryOptions]
    ) -> pa.RecordBatch:
        """Calls an exchange handler with one batch, for one; see ``Client.call``."""
        schema, batches = self._ask(handler, batch, options)
        return one_batch(schema, batches)

    @takes(UnaryOptions)
    def call_table(
        self, handler: str, batch: OneBatch, **options: Unpack[UnaryOptions]
    ) -> pa.Table:
        """``call`` with all answers as a Table; see ``Client.call_table``."""
        schema, batches = self._ask(handler, batch, options)
        return pa.Table.from_batches(batches, schema)

    @checked()
    @takes(SourceOptions)
    def source(self, handler: str, **options: Unpack[SourceOptions]) -> SyncStream:
        """Calls a source handler; see ``Client.source``."""
        return self._stream("source", handler, (), CallOptions(**options))

    @checked()
    @takes(SinkOptions)
    def sink(
        self, handler: str, batches: SyncBatches, **options: Unpack[SinkOptions]
    ) -> dict[str, int]:
        """Calls a sink handler with ``batches`` and returns its counters; see ``Client.sink``."""
        with self._stream("sink", handler, batches, CallOptions(**options)) as stream:
            for _ in stream:
                pass
        return dict(stream.counters)

    @checked(sink="handler", key="write_key", deadline="time_to_live", token="fresh_token")
    def writer(
        self,
        sink: str,
        *,
        key: str,
        schema: pa.Schema | None = None,
        in_flight_bytes: Size | None = None,
        deadline: Duration | None = None,
        ack_within: Duration | None = None,
        on_ack: Callable[[Ack], object] | None = None,
        headers: Mapping[str, str] | None = None,
        token: Token = None,
        compression: str | None = None,
    ) -> SyncWriter:
        """A writer into a sink of the service; see ``Client.writer``.

        ``on_ack`` is called in the thread of this client's event loop, so it must not wait.
        """
        self._thread.check()
        writer = Client.over(self._endpoints, self._policy).writer(
            sink,
            key=key,
            schema=schema,
            in_flight_bytes=in_flight_bytes,
            deadline=deadline,
            ack_within=ack_within,
            on_ack=on_ack,
            headers=headers,
            token=token,
            compression=compression,
        )
        return SyncWriter(writer, self._thread)

    def describe(self) -> Description:
        """What the service says of itself."""
        stream = self.source(DESCRIBE, output_schema=DESCRIBE_SCHEMA)
        return Description.from_batches(list(stream), peer=self.address)

    @checked()
    def ping(self, *, timeout: Duration | None = None) -> float:
        """The seconds of a round trip; see ``Client.ping``."""
        self._thread.check()
        link = self._direct(0) or self._thread.run(self._endpoints.open())
        return self._thread.run(link.ping(timeout))

    def close(self) -> None:
        """Closes the connection and ends its thread. Open calls fail with ConnectionLost.

        Clients that are open as the interpreter ends are closed then. In a forked child this is
        without effect, and the parent's connection goes on.
        """
        timing = self.config.timing
        self._close(timing.close_linger + timing.connect_timeout)

    def _close(self, limit: float) -> None:
        """``close``, with ``limit`` seconds to tell the peer."""
        if not self._thread.alive or sys.is_finalizing():
            return
        with self._lock:
            if not self._thread.alive:
                return
            try:
                self._thread.run(self._endpoints.close(), timeout=limit)
            except (TimeoutError, LocalProtocolError):
                pass  # the peer sees the end of the socket
            finally:
                self._thread.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<SyncClient of {self.address}{' closed' if self.closed else ''}>"

    # Within

    def _check_caller(self) -> None:
        """Raises LocalProtocolError if a waiting caller would block the loop that serves it."""
        if any(map(holds_up, self._addresses)):
            raise LocalProtocolError(
                f"{self.address} is served by the event loop of this thread, and a SyncClient "
                "would hold it up while it waits for the answer; use aqueduct.Client, or make the "
                "call in another thread, as by asyncio.to_thread"
            )

    @property
    def _client(self) -> ClientConnection:
        """The connection that is up, or that was; one of several."""
        found = self._endpoints.last
        if found is None:
            raise ConnectionLost(f"{self!r} is closed")
        return found

    def _direct(
        self, retries: int | None, deadline: Any = None, batch_deadline: Any = None
    ) -> ClientConnection | None:
        """The only connection, made again if it is lost; None where more than that is wanted."""
        endpoints = self._endpoints
        single = endpoints.single
        if single is None or batch_deadline is not None:
            return None
        if self._policy.retries if retries is None else retries:
            return None
        if single.link is not None and single.alive:
            return single.link
        self._thread.check()
        if endpoints.reconnects:
            if deadline is not None:
                return None  # which holds for the new connection, too
            return self._thread.run(endpoints.lease(single))
        raise self._client.connection.error or ConnectionLost(f"{self!r} is closed")

    def _ask(
        self,
        handler: str,
        batch: Any,
        options: UnaryOptions,
        on_end: OnEnd | None = None,
    ) -> tuple[pa.Schema, Sequence[pa.RecordBatch]]:
        if "schema" in options or not isinstance(batch, pa.RecordBatch):
            foreign = not isinstance(batch, pa.RecordBatch) and has_batch(batch)
            if foreign:
                batch = as_batch(batch, where=f"the input of handler {handler!r}")
            schema = options.pop("schema", None)
            batch = in_schema(batch, schema, foreign=foreign, handler=handler)
        single = self._endpoints.single
        link = None if single is None else single.link
        # It is made often, so the usual way has few steps.
        plain = not self._policy.retries and "retries" not in options
        if not plain or link is None or link.connection.core.error is not None:
            link = self._direct(options.get("retries"), options.get("deadline"))
        if link is not None:
            return self._ask_at(link, handler, batch, options, on_end)
        self._thread.check()
        seen = observed(self._endpoints.telemetry, handler, "exchange", self.address)
        if seen is None:
            return self._ask_any(handler, batch, options, on_end, None)
        try:
            found = self._ask_any(handler, batch, options, on_end, seen)
        except BaseException as error:
            seen.ended(error)
            raise
        seen.ended(None)
        return found

    def _ask_any(
        self,
        handler: str,
        batch: pa.RecordBatch,
        options: UnaryOptions,
        on_end: OnEnd | None,
        seen: CallObservation | None,
    ) -> tuple[pa.Schema, Sequence[pa.RecordBatch]]:
        """A call of one batch at whichever address has the fewest outstanding bytes."""
        endpoints, began = self._endpoints, time.monotonic()
        if endpoints.stale:
            self._thread.call(endpoints.tend)
        endpoint = endpoints.best()
        before: Callable[[Balancer], object] | None = None
        if endpoint is not None and endpoint.link is not None:
            attempt = None if seen is None else Unobserved(seen.headers)
            try:
                return self._ask_at(endpoint.link, handler, batch, options, on_end, attempt)
            except AqueductError as error:
                before = failed_before(error, endpoint)
        given = CallOptions(**read_arguments("call", **options), schema=batch.schema)
        if given.deadline is not None:
            left = cast("float", given.deadline) - (time.monotonic() - began)
            given = replace(given, deadline=max(left, 0.001))
        with self._balanced("exchange", handler, (batch,), given, before, seen) as stream:
            batches = list(stream)
            assert stream.schema is not None
            return stream.schema, batches

    def _ask_at(
        self,
        link: ClientConnection,
        handler: str,
        batch: pa.RecordBatch,
        options: UnaryOptions,
        on_end: OnEnd | None,
        attempt: Unobserved | None = None,
    ) -> tuple[pa.Schema, Sequence[pa.RecordBatch]]:
        """A call of one batch. ``attempt``: the trace of a call that is observed elsewhere."""
        own = self._own
        callers = own.callers if getattr(own, "link", None) is link else self._callers(link)
        seen = attempt or observed(link.telemetry, handler, "exchange", link.address)
        failed: BaseException | None = None
        call: StubCall | None = None
        stream: SyncStream | None = None
        received = 0
        try:
            caller = callers.find(handler, batch, options, seen)
            encoded = caller.encode(batch)
            if caller.fits(encoded):
                own_headers = trace_headers(caller, seen)
                call = StubCall(self._thread, link, caller, encoded, own_headers)
                answered = call.result()
                received = answered.size
                if answered.follow is None:
                    assert answered.schema is not None
                    return answered.schema, answered.batches
                stream = call.follow(answered)
            else:
                given = CallOptions(**read_arguments("call", **options), schema=batch.schema)
                made = self._make("exchange", handler, (batch,), given, link, seen=seen)
                made.wake()
                stream = SyncStream(made)
            with stream:
                batches = list(stream)
                assert stream.schema is not None
                return stream.schema, batches
        except BaseException as error:
            failed = error
            raise
        finally:
            if seen is not None:
                seen.ended(failed)
            failed = None  # a traceback and its frame are no cycle
            if on_end is not None:
                sent, waited = (0, 0.0) if call is None else (call.encoded.size, call.waited)
                if stream is not None:
                    sent += stream.bytes_sent
                    received += stream.bytes_received
                    waited += stream.waited
                on_end(sent, received, waited)

    def _callers(self, link: ClientConnection) -> UnaryCallers:
        """What this thread has ready for calls of one batch on a connection."""
        own = self._own
        kept: WeakKeyDictionary[ClientConnection, UnaryCallers] | None
        kept = getattr(own, "kept", None)
        if kept is None:
            kept = own.kept = WeakKeyDictionary()
        callers = kept.get(link)
        if callers is None:
            callers = kept[link] = UnaryCallers(link.connection, link.address, link.token)
        own.link, own.callers = link, callers
        return callers

    def _stream(self, kind: Kind, handler: str, batches: Any, options: CallOptions) -> SyncStream:
        link = self._direct(options.retries, options.deadline, options.batch_deadline)
        if link is None:
            return self._balanced(kind, handler, batches, options)
        call = self._make(kind, handler, batches, options, link)
        call.wake()
        return SyncStream(call)

    def _balanced(
        self,
        kind: Kind,
        handler: str,
        batches: Any,
        options: CallOptions,
        before: Callable[[Balancer], object] | None = None,
        seen: CallObservation | None = None,
    ) -> SyncBalancedStream:
        """A call that goes where there is a connection. ``before`` says what was tried already.

        ``seen``: how the call is observed, if that is known.
        """
        self._thread.check()
        self._check_plain(batches)
        source: Batches | None = None
        if kind != "source":
            limit = self.config.calls.batch_limit
            source = Batches(
                batches, options.schema, handler=handler, peer=self.address, limit=limit
            )
        seen = seen or observed(self._endpoints.telemetry, handler, kind, self.address)
        if seen is None:
            return self._begin(kind, handler, source, options, before, None)
        options = replace(options, headers=joined(seen, options.headers))
        try:
            return self._begin(kind, handler, source, options, before, seen)
        except BaseException as error:
            seen.ended(error)
            raise

    def _begin(
        self,
        kind: Kind,
        handler: str,
        source: Batches | None,
        options: CallOptions,
        before: Callable[[Balancer], object] | None,
        seen: CallObservation | None,
    ) -> SyncBalancedStream:
        if not self._endpoints.targets:
            self._thread.run(self._endpoints.prepare())
        spec = spec_of(kind, handler, options, self._policy)
        connector = ClientConnector(
            self._endpoints,
            spec,
            options,
            schema=None if source is None else source.schema,
            call_soon=self._thread.call,
            make=self._make_call,
        )
        news: News = SimpleQueue()
        self._endpoints.queues.add(news)
        numbers = CallMetrics()
        balancer = Balancer(spec, connector=connector, news=news, numbers=numbers)
        if before is not None:
            before(balancer)
        if source is None:
            work = ThreadBalancer(balancer, (), news)
        else:
            batches = map(source.read, source.batches)
            work = ThreadBalancer(balancer, batches, news, release=source.close)
        return SyncBalancedStream(
            work,
            numbers,
            check=self._thread.check_process,
            handler=handler,
            places=self.address,
            seen=seen,
        )

    def _make_call(
        self,
        link: ClientConnection,
        head: CallHead,
        window: InFlightWindow | None,
        source: Batches | None,
        news: News,
        tag: Any,
    ) -> ThreadCall:
        call = ThreadCall(self._thread, link, head, window, source, news=news, tag=tag)
        if window is None:
            call.finish()
        call.wake()
        return call

    def _check_plain(self, batches: Any) -> None:
        if hasattr(batches, "__aiter__"):
            raise LocalProtocolError(
                "a SyncClient reads plain iterables; async iterables are for aqueduct.Client"
            )

    def _make(
        self,
        kind: Kind,
        handler: str,
        batches: Any,
        options: CallOptions,
        link: ClientConnection | None = None,
        *,
        news: News | None = None,
        tag: Any = None,
        seen: CallObservation | None = None,
    ) -> ThreadCall:
        """A call that the loop has not heard of yet; see ThreadCall."""
        self._thread.check()
        found = self._client if link is None else link
        if found.closed:
            raise found.connection.error or ConnectionLost(f"{self!r} is closed")
        self._check_plain(batches)
        source, head, window = outline(found, kind, handler, batches, options, seen)
        head.encode()  # errors belong here rather than into the other thread
        return ThreadCall(self._thread, found, head, window, source, news=news, tag=tag)


def _close_all() -> None:
    """Closes all clients, as the interpreter ends: after this, its daemon threads do nothing."""
    until = time.monotonic() + _AT_EXIT
    for reference in _clients.valuerefs():
        client = reference()
        if client is not None:
            client._close(max(until - time.monotonic(), 0.1))


atexit.register(_close_all)
