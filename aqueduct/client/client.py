"""``Client``: calls to a service from asyncio.

::

    async with aqueduct.Client("aqueduct://scores.example") as client:
        async with client.exchange("score", batches, schema=schema) as answers:
            async for batch in answers:
                ...
        counters = await client.sink("store", batches, schema=schema)
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterable, Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Self, TypeAlias, Unpack, cast

import pyarrow as pa

from aqueduct._speedups.calls.batch_sender import InFlightWindow
from aqueduct.arguments import Duration, Size, checked, read_arguments
from aqueduct.arrow.capsules import has_batch
from aqueduct.arrow.encode import LONG_BYTES
from aqueduct.arrow.sizes import batch_bytes
from aqueduct.carriers.certificates import ClientTls
from aqueduct.client.balanced_spec import BalancedSpec
from aqueduct.client.balanced_stream import BalancedStream
from aqueduct.client.balancer import Balancer
from aqueduct.client.call import Batches
from aqueduct.client.call_metrics import CallMetrics
from aqueduct.client.client_connection import (
    ClientConnection,
    ConnectionHeaders,
    everything,
)
from aqueduct.client.client_connector import ClientConnector, spec_of
from aqueduct.client.connection_options import ClientOptions, ConnectionOptions
from aqueduct.client.endpoint_set import (
    ClientAddress,
    ClientEndpoint,
    EndpointSet,
    EndpointState,
    addresses_of,
)
from aqueduct.client.loop_balancer import LoopBalancer, LoopNews, PreparedWork
from aqueduct.client.loop_call import LoopCall
from aqueduct.client.opening_call import NO_COLUMNS, OpeningCall, opens_slowly
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
from aqueduct.client.retry import may_pass
from aqueduct.client.stream import Stream
from aqueduct.client.stream_input import batch_apart
from aqueduct.client.unary import in_schema, one_batch
from aqueduct.client.writer import OnAck, Token, Writer
from aqueduct.closing import AsyncClosing
from aqueduct.endpoint import Connection
from aqueduct.errors import AqueductError, Busy, ConnectFailed, ConnectionLost, Refused
from aqueduct.rpc.describe import DESCRIBE, DESCRIBE_SCHEMA, Description
from aqueduct.rpc.request import CallHead, Kind
from aqueduct.rpc.threads import apart, check_patches
from aqueduct.rpc.tracing import CallObservation, Unobserved, observed, reported

__all__ = [
    "Client",
    "ClientTls",
    "ConnectionHeaders",
    "failed_before",
]

ManyBatches: TypeAlias = "AsyncIterable[OneBatch] | SyncBatches"


class Client(AsyncClosing):
    """A service, at one address or at several; any number of calls at once.

    ``async with Client(address) as client:`` connects at its entry, and ``await
    Client.connect(address)`` at once. A connection that is lost is made again for the next call.
    The client belongs to the event loop and the process in which it is first used: elsewhere calls
    raise LocalProtocolError.
    """

    @checked(service="client_service", headers="connection_headers", telemetry="call_observer")
    @takes(ClientOptions, ConnectionOptions)
    def __init__(
        self,
        service: Connection | ClientAddress,
        *,
        address: str = "",
        compression: str = "",
        **options: Unpack[ClientOptions],
    ) -> None:
        """``service``: its address or addresses, with the arguments of ``connect``.

        Or a connection: then it belongs to the Client, which closes it, and it is not made again.
        ``address`` is its name for people, and ``compression`` as in an address. Raises
        ConfigError for one of the control-stream draft that ``aqueduct.connect`` made.
        """
        given = ConnectionOptions(**options)
        self._policy = given.policy()
        if isinstance(service, Connection):
            link = ClientConnection(
                service,
                address=address,
                token=given.token,
                compression=compression,
                telemetry=given.telemetry,
            )
            self._endpoints = EndpointSet.of(link)
            self.config = service.config
        else:
            self._endpoints = EndpointSet(addresses_of(service), given)
            self.config = given.config
        self.address = self._endpoints.places
        """The service's address, without options; several with commas."""

    @classmethod
    @checked(address="client_address", headers="connection_headers", telemetry="call_observer")
    @takes(ClientOptions, ConnectionOptions)
    async def connect(
        cls,
        address: ClientAddress,
        **options: Unpack[ClientOptions],
    ) -> Client:
        """Connects within Timing.connect_timeout.

        - ``address``: one, or a list of addresses of the same service. Batches for a function of
          one batch are spread over them, and other calls go to the one with the fewest outstanding
          bytes. One that answers is enough.
        - ``tls``: what to demand of the certificate, beyond the address's options.
        - ``headers``: of the connection, for the handlers' ``call.connection_headers``.
        - ``token``: shown with every call that is given no other.
        - ``keep_alive``: pings (Timing.ping_interval) keep the connection through pauses between
          calls; False lets it end when no call was open for Timing.idle_timeout.
        - ``retries`` (0), ``backoff`` (0.1 s): how often a broken call is made again without an
          answer between, and the first pause before that, which doubles up to ``backoff_limit``
          (30 s). docs/cookbook/retries.md says what is sent again.
        - ``hedge`` (0.5 s): a call that is not accepted by then is begun at another address, too.
        - ``resolve``: takes all A and AAAA records of a name for addresses of the service, and
          resolves it again so often, such as "30s"; an address may say it: ``?resolve=30s``.
        - ``resolver``: an async function of a name and a port that gives their IP addresses.
        - ``telemetry``: an observer of calls, such as ``aqueduct.OpenTelemetry()``. Without it a
          call tells the service of the current span of OpenTelemetry, if there is one.

        Raises ConfigError for arguments that cannot work, ConnectFailed when the service cannot
        be reached, and ConnectionLost when it refuses the headers.
        """
        client = cls(address, **options)
        return await client._open()

    @classmethod
    def over(cls, endpoints: EndpointSet, policy: BalancedSpec) -> Client:
        """A client of connections that a SyncClient has; for this library."""
        made = cls.__new__(cls)
        made._policy, made._endpoints = policy, endpoints
        made.config, made.address = policy.config, endpoints.places
        return made

    async def __aenter__(self) -> Self:
        return await self._open()

    @property
    def closed(self) -> bool:
        """Whether it was closed, or no connection that it had is up.

        Unless it was closed, the next call connects again.
        """
        endpoints = self._endpoints
        return endpoints.closed or (endpoints.last is not None and not endpoints.alive)

    @property
    def reconnects(self) -> bool:
        """Whether the next call connects again if the connection is lost: not after ``close``."""
        return self._endpoints.reconnects and not self._endpoints.closed

    @property
    def endpoints(self) -> tuple[EndpointState, ...]:
        """Each address at this moment: whether it is connected, and what it has to answer."""
        return self._endpoints.states

    @property
    def connection(self) -> Connection:
        """The connection that is up, or that was; one of several. Raises ConnectionLost."""
        return self.link.connection

    @property
    def link(self) -> ClientConnection:
        """What makes calls on ``connection``; for this library. Raises ConnectionLost."""
        found = self._endpoints.last
        if found is None:
            raise ConnectionLost(f"{self!r} is not connected; use 'async with', or Client.connect")
        return found

    @checked()
    @takes(ExchangeOptions)
    def exchange(
        self, handler: str, batches: ManyBatches, **options: Unpack[ExchangeOptions]
    ) -> Stream:
        """Calls an exchange handler: batches go in, and the Stream gives what comes out, in order.

        ``batches`` is an iterable, an async iterable, or a table of pyarrow, Polars, DuckDB, pandas
        or any other library that shares tables by Arrow's PyCapsule interface. In an iterable each
        table is one batch. A plain iterable is read on the event loop, so it must not block. A
        stream of another library, such as a query of DuckDB, is opened and read in threads.

        The call is made at once, or when the stream is open. Its input is read as there is room: at
        most ``in_flight`` batches (8; of small ones up to 64, while they are less than 2 MiB) and
        ``in_flight_bytes`` (32 MiB) of them are sent and not yet answered, or taken by a handler
        that answers later; one may always be.

        - ``schema``: of ``batches``; may be left out for a list and for a table of any library.
        - ``output_schema``: of what must come back; compared before any batch is worked on.
        - ``deadline``: for the whole call, in seconds or as text such as "500ms". Without it the
          call fails when nothing moves for Timing.progress_deadline while you wait for it.
        - ``headers``: text for the handler's ``call.headers``; ``write_key`` and ``attempt``:
          the same for every attempt at one piece of work, and what tells the attempts apart;
          ``token``: instead of the client's; ``partition``: the share of the work.
        - ``compression``: ``lz4`` or ``zstd`` for the batches both ways, if the service agrees
          to it, or ``none``; by default what the client's address says. The first batches of a
          connection's first such call leave before that is known, as they are.
        - ``ordered=False``: the answers of a function of one batch come as they are made;
          ``Stream.number`` says to which batch each belongs. Other handlers keep the order.
        - ``report_failures``: a batch on which a function of one batch fails does not end the
          call: reading raises its error, and may be gone on with; see Stream.

        Raises LocalProtocolError for arguments that cannot be sent, and ConnectionLost.
        """
        return self._stream("exchange", handler, batches, CallOptions(**options))

    @takes(UnaryOptions)
    async def call(
        self, handler: str, batch: OneBatch, **options: Unpack[UnaryOptions]
    ) -> pa.RecordBatch:
        """Calls an exchange handler with one batch and returns its answer, as one batch.

        ``batch`` may be a table of another library; its batches are joined. Its columns get the
        layout of ``schema``, if that is given.
        The quickest way to ask something small: one message there and one back, where an exchange
        opens channels. A handler that answers with several batches has them put together
        (``call_table`` does not copy them); one without any gives a batch without rows. Batches,
        and answers in sum, above Calls.unary_bytes travel as an exchange does.

        The arguments are those of ``exchange``. A call whose task is cancelled is abandoned: the
        handler is told to stop. Raises how the call failed.
        """
        if "schema" in options or not isinstance(batch, pa.RecordBatch):
            batch = await self._input(handler, batch, options.pop("schema", None))
        schema, batches = await self._ask(handler, batch, options)
        if len(batches) > 1 and sum(map(batch_bytes, batches)) >= LONG_BYTES:
            return await apart(one_batch, schema, batches)
        return one_batch(schema, batches)

    @takes(UnaryOptions)
    async def call_table(
        self, handler: str, batch: OneBatch, **options: Unpack[UnaryOptions]
    ) -> pa.Table:
        """``call`` with all answers as a Table: each batch as it came, none or many."""
        if "schema" in options or not isinstance(batch, pa.RecordBatch):
            batch = await self._input(handler, batch, options.pop("schema", None))
        schema, batches = await self._ask(handler, batch, options)
        return pa.Table.from_batches(batches, schema)

    @checked()
    @takes(SourceOptions)
    def source(self, handler: str, **options: Unpack[SourceOptions]) -> Stream:
        """Calls a source handler: the Stream gives its batches. See ``exchange``."""
        return self._stream("source", handler, None, CallOptions(**options))

    @checked()
    @takes(SinkOptions)
    async def sink(
        self, handler: str, batches: ManyBatches, **options: Unpack[SinkOptions]
    ) -> dict[str, int]:
        """Calls a sink handler with ``batches`` and returns its counters. See ``exchange``.

        A sink answers nothing, so without ``in_flight`` only ``in_flight_bytes`` bounds what is
        sent and not yet taken.
        """
        async with self._stream("sink", handler, batches, CallOptions(**options)) as stream:
            async for _ in stream:
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
        on_ack: OnAck | None = None,
        headers: Mapping[str, str] | None = None,
        token: Token = None,
        compression: str | None = None,
    ) -> Writer:
        """A writer into a sink of the service: rows that are there exactly once, or not at all.

        - ``key``: names what is written, and is the same when the program is started again. At
          most one writer has it: a later one takes it over.
        - ``schema``: of the batches; by default what the sink, or the first batch, says.
        - ``in_flight_bytes``: of batches without an acknowledgement (Sinks.writer_bytes).
        - ``deadline``: seconds for an attempt, for a commit, and to reach a service that is gone
          (Sinks.writer_deadline).
        - ``ack_within``: seconds after which a batch is acknowledged, as far as the sink is quick
          enough. By default that is when half of ``in_flight_bytes`` is written, or somebody waits.
        - ``on_ack``: called with each acknowledgement, in order.
        - ``token``: text or bytes, or a function without arguments that gives them: it is asked on
          the event loop for each call, so that a long writer may show a new one.

        The sink has to have a method ``committed``; see ``aqueduct.service.sinks``.
        """
        given = {"deadline": deadline, "ack_within": ack_within, "in_flight_bytes": in_flight_bytes}
        return Writer(
            self,
            sink,
            key,
            schema=schema,
            on_ack=on_ack,
            headers=headers,
            token=token,
            compression=compression,
            **cast("dict[str, Any]", given),  # as ``checked`` read them
        )

    async def describe(self) -> Description:
        """What the service says of itself: its name, version, handlers and their schemas."""
        stream = self.source(DESCRIBE, output_schema=DESCRIBE_SCHEMA)
        batches = [batch async for batch in stream]
        return await apart(Description.from_batches, batches, peer=self.address)

    @checked()
    async def ping(self, *, timeout: Duration | None = None) -> float:
        """The seconds of a round trip to the service, on one of its connections.

        Raises ConnectionLost, or DeadlineExceeded after ``timeout`` seconds (by default
        Timing.idle_timeout).
        """
        link = self._direct() or await self._endpoints.open()
        return await link.ping(timeout)

    async def close(self) -> None:
        """Closes all connections. Calls that are open fail with ConnectionLost.

        In a forked child it returns at once, and the parent's connections go on.
        """
        await self._endpoints.close()

    def __repr__(self) -> str:
        return f"<Client of {self.address}{' closed' if self.closed else ''}>"

    def check_here(self) -> None:
        """Raises LocalProtocolError on another event loop than its own, and in a forked child."""
        self._endpoints.check_here()

    # Within

    async def _open(self) -> Self:
        check_patches()
        if self._endpoints.reconnects:
            try:
                await self._endpoints.open()
            except BaseException:
                await self._endpoints.give_up()
                raise
        return self

    def _direct(self, options: CallOptions | None = None) -> ClientConnection | None:
        """The only connection, if a call can go there and nothing else is wanted.

        Raises LocalProtocolError on another loop, and ConnectionLost if there will be none.
        """
        endpoints = self._endpoints
        single = endpoints.single
        if single is None or single.link is None:
            endpoints.check_here()
            return None
        link = single.link
        link.connection.check_here()
        if not endpoints.reconnects or endpoints.closed:
            return link  # which says why it is over
        if options is not None:
            retries = self._policy.retries if options.retries is None else options.retries
            if retries or options.batch_deadline is not None:
                return None
        return link if single.alive else None

    def _stream(self, kind: Kind, handler: str, batches: Any, options: CallOptions) -> Stream:
        link = self._direct(options)
        if link is not None:
            return link.stream(kind, handler, batches, options)
        return self._balanced(kind, handler, batches, options)

    def _balanced(
        self,
        kind: Kind,
        handler: str,
        batches: Any,
        options: CallOptions,
        before: Callable[[Balancer], object] | None = None,
        seen: CallObservation | None = None,
    ) -> BalancedStream:
        """A call that goes where there is a connection. ``before`` says what was tried already.

        ``seen``: how the call is observed, if that is known.
        """
        prepare = partial(self._prepare, kind, handler, before=before, seen=seen)
        if kind != "source" and opens_slowly(batches, options.schema):
            # What is wrong with the arguments is said at once.
            options.head(kind, handler, NO_COLUMNS, None).encode()
            late = OpeningCall(batches, options, prepare, peer=self.address, handler=handler)
            work = LoopBalancer(self._endpoints, late)
            return BalancedStream(work, handler=handler, places=self.address)
        prepared = prepare(batches, options)
        try:
            work = LoopBalancer(self._endpoints, prepared)
        except BaseException as error:
            if prepared.seen is not None:
                prepared.seen.ended(error)
            raise
        return BalancedStream(work, handler=handler, places=self.address)

    def _prepare(
        self,
        kind: Kind,
        handler: str,
        batches: Any,
        options: CallOptions,
        *,
        before: Callable[[Balancer], object] | None,
        seen: CallObservation | None,
    ) -> PreparedWork:
        """A call over connections, with all that is said of it. It begins to be observed."""
        endpoints, schema, read = self._endpoints, None, None
        if kind != "source":
            limit = self.config.calls.batch_limit
            given = Batches(
                batches, options.schema, handler=handler, peer=self.address, limit=limit
            )
            batches, schema, read = given.batches, given.schema, given.read
            if not hasattr(batches, "__aiter__"):
                batches = iter(batches)
        seen = seen or observed(endpoints.telemetry, handler, kind, self.address)
        if seen is not None:
            options = replace(options, headers=joined(seen, options.headers))
        spec = spec_of(kind, handler, options, self._policy)

        def make(news: LoopNews, began: float) -> Balancer:
            connector = ClientConnector(
                endpoints,
                spec,
                options,
                schema=schema,
                call_soon=lambda callback: callback(),
                make=_make_call,
            )
            balancer = Balancer(
                spec, connector=connector, news=news, numbers=CallMetrics(), began=began
            )
            if before is not None:
                before(balancer)
            return balancer

        return PreparedWork(spec, make, batches, read, seen)

    async def _input(
        self, handler: str, batch: OneBatch, schema: pa.Schema | None
    ) -> pa.RecordBatch:
        """The batch of a call."""
        foreign = not isinstance(batch, pa.RecordBatch) and has_batch(batch)
        if foreign:
            batch = await batch_apart(batch, where=f"the input of handler {handler!r}")
        return in_schema(batch, schema, foreign=foreign, handler=handler)

    def _ask(
        self, handler: str, batch: pa.RecordBatch, options: UnaryOptions
    ) -> Awaitable[tuple[pa.Schema, Sequence[pa.RecordBatch]]]:
        """A call of one batch. It is made often, so the usual way has few steps."""
        endpoints = self._endpoints
        single = endpoints.single
        if single is None or (link := single.link) is None:
            endpoints.check_here()
            return self._ask_any(handler, batch, options)
        link.connection.check_here()
        if link.connection.core.error is None or not endpoints.reconnects or endpoints.closed:
            if not self._policy.retries and "retries" not in options:
                return link.answer(handler, batch, options)
            retries = options.get("retries")
            if not (self._policy.retries if retries is None else retries):
                return link.answer(handler, batch, options)
        return self._ask_any(handler, batch, options)

    async def _ask_any(
        self, handler: str, batch: pa.RecordBatch, options: UnaryOptions
    ) -> tuple[pa.Schema, Sequence[pa.RecordBatch]]:
        """A call of one batch at whichever address has the fewest outstanding bytes."""
        seen = observed(self._endpoints.telemetry, handler, "exchange", self.address)
        return await reported(seen, self._try_any(handler, batch, options, seen))

    async def _try_any(
        self,
        handler: str,
        batch: pa.RecordBatch,
        options: UnaryOptions,
        seen: CallObservation | None,
    ) -> tuple[pa.Schema, Sequence[pa.RecordBatch]]:
        endpoints = self._endpoints
        began = time.monotonic()
        if endpoints.stale:
            endpoints.tend()
        endpoint = endpoints.best()
        before: Callable[[Balancer], object] | None = None
        if endpoint is not None and endpoint.link is not None:
            attempt = None if seen is None else Unobserved(seen.headers)
            try:
                return await endpoint.link.answer(handler, batch, options, attempt)
            except AqueductError as error:
                before = failed_before(error, endpoint)
        given = CallOptions(**read_arguments("call", **options), schema=batch.schema)
        if before is not None and given.deadline is not None:
            left = cast("float", given.deadline) - (time.monotonic() - began)
            given = replace(given, deadline=max(left, 0.001))
        stream = self._balanced("exchange", handler, (batch,), given, before, seen)
        return await everything(stream)


def _make_call(
    link: ClientConnection,
    head: CallHead,
    window: InFlightWindow | None,
    source: Batches | None,
    news: Any,
    tag: Any,
) -> LoopCall:
    return LoopCall(link, head, window, source, news, tag)


def failed_before(error: AqueductError, endpoint: ClientEndpoint) -> Callable[[Balancer], object]:
    """What tells a Balancer of a call of one batch that failed. Raises ``error`` if it is final."""
    if not may_pass(error):
        raise error
    endpoint.note(trouble=True)
    # A service that is ending also refuses calls whose handler is at work.
    untouched = isinstance(error, Refused) and error.untouched
    lost = not untouched and not isinstance(error, ConnectFailed | Busy)
    return lambda balancer: balancer.resume(error, endpoint, lost=lost)
