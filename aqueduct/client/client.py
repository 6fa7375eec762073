"""``Client``: calls to a service from asyncio.

::

    async with await aqueduct.Client.connect("aqueduct://scores.example") as client:
        async with client.exchange("score", batches, schema=schema) as answers:
            async for batch in answers:
                ...
        counters = await client.sink("store", batches, schema=schema)
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias, Unpack, cast

import pyarrow as pa

from aqueduct._speedups.calls.batch_sender import InFlightWindow, SharedWindow
from aqueduct._speedups.loop.waiter import Waiter
from aqueduct.address import Address
from aqueduct.arguments import Duration, checked, read_arguments
from aqueduct.arrow.capsules import ArrowArrayTable, ArrowStreamTable, has_batch
from aqueduct.arrow.compression import codec_of
from aqueduct.arrow.encode import LONG_BYTES, Encoded
from aqueduct.carriers.certificates import ClientTls
from aqueduct.client.call import Batches, ClientCall
from aqueduct.client.opening_call import NO_COLUMNS, OpeningCall, opens_slowly
from aqueduct.client.options import (
    CallOptions,
    ExchangeOptions,
    SinkOptions,
    SourceOptions,
    UnaryOptions,
    takes,
    token_bytes,
)
from aqueduct.client.stream import Start, Stream
from aqueduct.client.stream_input import batch_apart
from aqueduct.client.unary import (
    PendingCall,
    UnaryCaller,
    UnaryCallers,
    UnaryResult,
    one_batch,
    trace_headers,
)
from aqueduct.closing import AsyncClosing
from aqueduct.config import DEFAULT, Config
from aqueduct.endpoint import Connection, Message, connect_for_calls
from aqueduct.errors import AqueductError, ConfigError, DeadlineExceeded
from aqueduct.rpc.deadline import ProgressTimer
from aqueduct.rpc.describe import DESCRIBE, DESCRIBE_SCHEMA, Description
from aqueduct.rpc.keys import ALIVE, Headers
from aqueduct.rpc.request import CallHead, Kind
from aqueduct.rpc.threads import apart, check_patches, provide
from aqueduct.rpc.tracing import CallObservation, CallObserver, observed

__all__ = [
    "Client",
    "ClientTls",
    "ConnectionHeaders",
    "OneBatch",
    "SyncBatches",
    "connection_headers",
    "outline",
    "plain",
]

ConnectionHeaders: TypeAlias = (
    Mapping[str, str] | Sequence[tuple[str, str]] | Sequence[tuple[bytes, bytes]]
)
OneBatch: TypeAlias = "pa.RecordBatch | ArrowStreamTable | ArrowArrayTable"
"""A batch, or what becomes one: a table of pyarrow, Polars, DuckDB, pandas or nanoarrow."""
SyncBatches: TypeAlias = "Iterable[OneBatch] | ArrowStreamTable | ArrowArrayTable"
Seen: TypeAlias = "CallObservation | None"
ManyBatches: TypeAlias = "AsyncIterable[OneBatch] | SyncBatches"


class Client(AsyncClosing):
    """One connection to a service; any number of calls at once. Made by ``connect``.

    It belongs to the event loop and the process that it was made on: elsewhere calls raise
    LocalProtocolError.
    """

    @checked(address="client_address", telemetry="call_observer")
    def __init__(
        self,
        connection: Connection,
        *,
        address: str = "",
        token: str | bytes | None = None,
        compression: str = "",
        telemetry: CallObserver | None = None,
    ) -> None:
        """``connection`` is a client's; it belongs to the Client, which closes it.

        Raises ConfigError for one of the control-stream draft that ``aqueduct.connect`` made.
        """
        if not connection.takes_calls:
            raise ConfigError(
                f"the connection to {connection.peer} has plain channels of the control-stream "
                "draft, whose messages have no headers; use Client.connect with the address"
            )
        self.connection = connection
        self.address = address or connection.peer
        """The service's address, without options."""
        self.config = connection.config
        provide(self.config.calls.threads_at_work)
        self.token = token_bytes(token)
        """Shown with every call that is given no other."""
        self.compression = compression
        """What every call asks for that is given no other; "" for none."""
        self.telemetry = telemetry
        """Who is told of every call."""
        self._agreed: set[str] = set()
        self.sizes: dict[str, int] = {}
        """Bytes that the next batch for each handler is expected to have; 0 if it is small."""
        flow = self.config.flow
        least = min(flow.receive_budget, flow.process_receive_bytes, flow.process_send_bytes)
        self.under_way = SharedWindow(least // 2)
        """What all calls have under way. The service is expected to have budgets like these."""
        self._calls: set[ClientCall] = set()
        self._loop = asyncio.get_running_loop()
        self._beat: asyncio.TimerHandle | None = None
        self._watches = ProgressTimer(self._loop, self.config.timing.progress_deadline)
        self._callers = UnaryCallers(connection, self.address, self.token)

    @classmethod
    @checked(headers="connection_headers", telemetry="call_observer")
    async def connect(
        cls,
        address: str | Address,
        *,
        config: Config = DEFAULT,
        tls: ClientTls | None = None,
        headers: ConnectionHeaders = (),
        token: str | bytes | None = None,
        keep_alive: bool = True,
        telemetry: CallObserver | None = None,
    ) -> Client:
        """Connects within Timing.connect_timeout.

        - ``tls``: what to demand of the certificate, beyond the address's options.
        - ``headers``: of the connection, for the handlers' ``call.connection_headers``.
        - ``token``: shown with every call that is given no other.
        - ``keep_alive``: pings (Timing.ping_interval) keep the connection through pauses between
          calls; False lets it end when no call was open for Timing.idle_timeout.
        - ``telemetry``: who is told of calls, such as ``aqueduct.OpenTelemetry()``. Without it a
          call tells the service of the current span of OpenTelemetry, if there is one.

        Raises ConfigError for arguments that cannot work, ConnectFailed when the service cannot
        be reached, and ConnectionLost when it refuses the headers.
        """
        check_patches()
        parsed = address if isinstance(address, Address) else Address.parse(address)
        connection = await connect_for_calls(
            parsed, headers=connection_headers(headers), config=config, tls=tls
        )
        if keep_alive:
            connection.hold()
        compression = codec_of(parsed.options.get("compression", "none"))
        return cls(
            connection,
            address=plain(address),
            token=token,
            compression=compression,
            telemetry=telemetry,
        )

    @property
    def closed(self) -> bool:
        """Whether the connection is over."""
        return self.connection.closed

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

        ``batch`` may be a table of another library; its batches are joined.
        The quickest way to ask something small: one message there and one back, where an exchange
        opens channels. A handler that answers with several batches has them put together
        (``call_table`` does not copy them); one without any gives a batch without rows. Batches,
        and answers in sum, above Calls.unary_bytes travel as an exchange does.

        The arguments are those of ``exchange``. A call whose task is cancelled is abandoned: the
        handler is told to stop. Raises how the call failed.
        """
        schema, batches = await self._ask(handler, batch, options)
        if len(batches) > 1 and sum(each.nbytes for each in batches) >= LONG_BYTES:
            return await apart(one_batch, schema, batches)
        return one_batch(schema, batches)

    @takes(UnaryOptions)
    async def call_table(
        self, handler: str, batch: OneBatch, **options: Unpack[UnaryOptions]
    ) -> pa.Table:
        """``call`` with all answers as a Table: each batch as it came, none or many."""
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

    async def describe(self) -> Description:
        """What the service says of itself: its name, version, handlers and their schemas."""
        stream = self.source(DESCRIBE, output_schema=DESCRIBE_SCHEMA)
        batches = [batch async for batch in stream]
        return await apart(Description.from_batches, batches, peer=self.address)

    @checked()
    async def ping(self, *, timeout: Duration | None = None) -> float:
        """The seconds of a round trip.

        Raises ConnectionLost, or DeadlineExceeded after ``timeout`` seconds (by default
        Timing.idle_timeout).
        """
        self.connection.check_here()
        given = self.config.timing.idle_timeout if timeout is None else timeout
        seconds = cast("float", given)  # as ``checked`` read it
        try:
            async with asyncio.timeout(seconds):
                return await self.connection.ping()
        except TimeoutError:
            text = f"{self.address} did not answer a ping within {seconds:g} s"
            raise DeadlineExceeded(text, peer=self.address) from None

    async def close(self) -> None:
        """Closes the connection. Calls that are open fail with ConnectionLost.

        In a forked child it returns at once, and the parent's connection goes on.
        """
        await self.connection.close()
        # A timer would keep the connection in memory until it is due.
        self._watches.close()
        if self._beat is not None:
            self._beat.cancel()
            self._beat = None

    def __repr__(self) -> str:
        return f"<Client of {self.address}{' closed' if self.closed else ''}>"

    # Within

    def _stream(self, kind: Kind, handler: str, batches: Any, options: CallOptions) -> Stream:
        self.connection.check_here()
        prepare = partial(self._prepare, kind, handler)
        if opens_slowly(batches, options.schema):
            # What is wrong with the arguments is said at once.
            options.head(kind, handler, NO_COLUMNS, self.token, self.compression).encode()
            late = OpeningCall(batches, options, prepare, peer=self.address, handler=handler)
            return Stream(None, None, self.sizes, late=late)
        return Stream(*prepare(batches, options), self.sizes)

    def _prepare(
        self,
        kind: Kind,
        handler: str,
        batches: Any,
        options: CallOptions,
        seen: Seen = None,
    ) -> tuple[Batches | None, Start]:
        source, head, window = outline(self, kind, handler, batches, options, seen)
        return source, lambda on_change: self.begin(head, window, on_change)

    async def _ask(
        self, handler: str, batch: Any, options: UnaryOptions
    ) -> tuple[pa.Schema, Sequence[pa.RecordBatch]]:
        self.connection.check_here()
        if not isinstance(batch, pa.RecordBatch) and has_batch(batch):
            batch = await batch_apart(batch, where=f"the input of handler {handler!r}")
        seen = observed(self.telemetry, handler, "exchange", self.address)
        if seen is None:
            return await self._ask_observed(handler, batch, options, None)
        try:
            found = await self._ask_observed(handler, batch, options, seen)
        except BaseException as error:
            seen.ended(error)
            raise
        seen.ended(None)
        return found

    async def _ask_observed(
        self, handler: str, batch: pa.RecordBatch, options: UnaryOptions, seen: Seen
    ) -> tuple[pa.Schema, Sequence[pa.RecordBatch]]:
        caller = self._callers.find(handler, batch, options, seen)
        if caller.slow(batch):
            encoded = await caller.encode_apart(batch)
        else:
            encoded = caller.encode(batch)
        if not caller.fits(encoded):
            given = CallOptions(**read_arguments("call", **options), schema=batch.schema)
            prepared = self._prepare("exchange", handler, (batch,), given, seen)
            return await _everything(Stream(*prepared, self.sizes))
        answered = await self.ask(caller, encoded, trace_headers(caller, seen))
        if answered.follow is None:
            assert answered.schema is not None
            return answered.schema, answered.batches
        head = caller.following(answered)
        return await _everything(
            Stream(None, lambda on_change: self.begin(head, None, on_change, answered.follow))
        )

    def begin(
        self,
        head: CallHead,
        window: InFlightWindow | None,
        on_change: Callable[[], None],
        answered: Message | None = None,
    ) -> ClientCall:
        """Makes one call; all public methods use it."""
        if window is not None:
            window.share(self.under_way, on_change)
        try:
            return self._begin(head, window, on_change, answered)
        except BaseException as error:
            if head.observed is not None:
                head.observed.ended(error)
            raise

    def _begin(
        self,
        head: CallHead,
        window: InFlightWindow | None,
        on_change: Callable[[], None],
        answered: Message | None,
    ) -> ClientCall:
        call = ClientCall(
            self.connection,
            head,
            peer=self.address,
            window=window,
            on_change=on_change,
            calls=self._calls,
            watches=self._watches,
            answered=answered,
            compression=self.agreed(head),
            agree=self._agreed.add,
        )
        if self._beat is None:
            self._schedule_beat()
        return call

    async def ask(
        self, caller: UnaryCaller, encoded: Encoded, headers: Headers = ()
    ) -> UnaryResult:
        """One call of one batch. Raises how it failed."""
        waiter = Waiter(self._loop)
        call = self.unary_call(caller, encoded, waiter.step, headers)
        call.begin()
        try:
            await waiter
        finally:
            call.end()
        if call.slow:
            await apart(call.read)
        else:
            call.read()
        return call.result()

    def unary_call(
        self,
        caller: UnaryCaller,
        encoded: Encoded,
        over: Callable[[], object],
        headers: Headers = (),
    ) -> PendingCall:
        """One call of one batch, to be begun on the loop; see PendingCall."""
        return PendingCall(caller, encoded, self._watches, over, headers)

    def agreed(self, head: CallHead) -> str:
        """What a call's batches may be compressed by from the first; "" for nothing.

        A service that has agreed once on this connection agrees again, and need not say so first.
        """
        for name in head.compressions:
            if name in self._agreed:
                return name
        return ""

    def _schedule_beat(self) -> None:
        interval = self.config.timing.progress_deadline / 3
        self._beat = self._loop.call_later(interval, self._tell_alive)

    def _tell_alive(self) -> None:
        """Tells the service that it is our application that takes its time (it need not fear)."""
        self._beat = None
        if not self._calls or self.connection.closed:
            return
        if any(call.supplying or not call.waiting or call.lacks_room for call in self._calls):
            try:
                self.connection.entrypoint.send_nowait(b"", headers=((ALIVE, b"1"),))
            except AqueductError:
                return
        self._schedule_beat()


async def _everything(stream: Stream) -> tuple[pa.Schema, list[pa.RecordBatch]]:
    """What a call gives that did not fit one message."""
    async with stream:
        batches = [batch async for batch in stream]
        assert stream.schema is not None
        return stream.schema, batches


def outline(
    client: Client,
    kind: Kind,
    handler: str,
    batches: Any,
    options: CallOptions,
    seen: Seen = None,
) -> tuple[Batches | None, CallHead, InFlightWindow | None]:
    """A call before it is made: its input, what it says of itself, and its window.

    ``seen``: how the call is observed, if that is known. Raises LocalProtocolError and ConfigError
    for what cannot be.
    """
    token, compression, config = client.token, client.compression, client.config
    if kind == "source":
        seen = seen or observed(client.telemetry, handler, kind, client.address)
        return None, options.head(kind, handler, None, token, compression, seen), None
    limit = config.calls.batch_limit
    source = Batches(batches, options.schema, handler=handler, peer=client.address, limit=limit)
    window = options.window(config, sink=kind == "sink")
    seen = seen or observed(client.telemetry, handler, kind, client.address)
    return source, options.head(kind, handler, source.schema, token, compression, seen), window


def connection_headers(headers: ConnectionHeaders) -> tuple[tuple[bytes, bytes], ...]:
    """Text or bytes as the headers of a connection."""
    pairs = headers.items() if isinstance(headers, Mapping) else headers
    return tuple((_bytes(key), _bytes(value)) for key, value in pairs)


def plain(address: str | Address) -> str:
    """An address without its options, as it was written. Raises ConfigError if it is none."""
    if isinstance(address, str):
        Address.parse(address)
    return str(address).partition("?")[0]


def _bytes(text: str | bytes) -> bytes:
    return text.encode() if isinstance(text, str) else bytes(text)
