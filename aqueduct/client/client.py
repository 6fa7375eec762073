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
from collections.abc import AsyncIterable, Callable, Coroutine, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias, Unpack, cast

import pyarrow as pa

from aqueduct._speedups.calls.batch_sender import InFlightWindow, SharedWindow
from aqueduct._speedups.loop.waiter import Waiter
from aqueduct.address import Address
from aqueduct.arguments import Duration, Size, checked
from aqueduct.arrow.compression import codec_of
from aqueduct.arrow.encode import LONG_BYTES, Encoded
from aqueduct.carriers.certificates import ClientTls
from aqueduct.client.call import Batches, ClientCall
from aqueduct.client.options import (
    CallOptions,
    ExchangeOptions,
    SinkOptions,
    SourceOptions,
    UnaryOptions,
    takes,
    token_bytes,
)
from aqueduct.client.stream import Stream
from aqueduct.client.unary import PendingCall, UnaryCaller, UnaryCallers, UnaryResult, one_batch
from aqueduct.client.writer import OnAck, Writer
from aqueduct.closing import AsyncClosing
from aqueduct.config import DEFAULT, Config
from aqueduct.endpoint import Connection, Message, connect_for_calls
from aqueduct.errors import AqueductError, ConfigError, DeadlineExceeded
from aqueduct.rpc.deadline import ProgressTimer
from aqueduct.rpc.describe import DESCRIBE, DESCRIBE_SCHEMA, Description
from aqueduct.rpc.keys import ALIVE, Headers
from aqueduct.rpc.request import CallHead, Kind
from aqueduct.rpc.threads import apart, check_patches, provide

__all__ = [
    "Client",
    "ClientTls",
    "ConnectionHeaders",
    "connection_headers",
    "outline",
    "plain",
]

ConnectionHeaders: TypeAlias = (
    Mapping[str, str] | Sequence[tuple[str, str]] | Sequence[tuple[bytes, bytes]]
)
ManyBatches: TypeAlias = "AsyncIterable[pa.RecordBatch] | Iterable[pa.RecordBatch] | pa.Table"


class Client(AsyncClosing):
    """One connection to a service; any number of calls at once. Made by ``connect``.

    It belongs to the event loop and the process that it was made on: elsewhere calls raise
    LocalProtocolError.
    """

    @checked(address="client_address")
    def __init__(
        self,
        connection: Connection,
        *,
        address: str = "",
        token: str | bytes | None = None,
        compression: str = "",
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
        self.reconnect: Callable[[], Coroutine[Any, Any, Client]] | None = None
        """Makes another one like this; None: there is no way, or the program has closed this."""
        self._watches = ProgressTimer(self._loop, self.config.timing.progress_deadline)
        self._callers = UnaryCallers(connection, self.address, self.token)

    @classmethod
    @checked(headers="connection_headers")
    async def connect(
        cls,
        address: str | Address,
        *,
        config: Config = DEFAULT,
        tls: ClientTls | None = None,
        headers: ConnectionHeaders = (),
        token: str | bytes | None = None,
        keep_alive: bool = True,
    ) -> Client:
        """Connects within Timing.connect_timeout.

        - ``tls``: what to demand of the certificate, beyond the address's options.
        - ``headers``: of the connection, for the handlers' ``call.connection_headers``.
        - ``token``: shown with every call that is given no other.
        - ``keep_alive``: pings (Timing.ping_interval) keep the connection through pauses between
          calls; False lets it end when no call was open for Timing.idle_timeout.

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
        made = cls(connection, address=plain(address), token=token, compression=compression)
        made.reconnect = partial(
            cls.connect,
            parsed,
            config=config,
            tls=tls,
            headers=headers,
            token=token,
            keep_alive=keep_alive,
        )
        return made

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

        The call is made at once. ``batches``, any iterable or async iterable, is read as there is
        room: at most ``in_flight`` batches (8; of small ones up to 64, while they are less than
        2 MiB) and ``in_flight_bytes`` (32 MiB) of them are sent and not yet answered, or taken by
        a handler that answers later; one may always be. A plain iterable is read on the event
        loop, so it must not block.

        - ``schema``: of ``batches``; may be left out for a list, Table, RecordBatch or
          RecordBatchReader.
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
        self, handler: str, batch: pa.RecordBatch, **options: Unpack[UnaryOptions]
    ) -> pa.RecordBatch:
        """Calls an exchange handler with one batch and returns its answer, as one batch.

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
        self, handler: str, batch: pa.RecordBatch, **options: Unpack[UnaryOptions]
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

    @checked(sink="handler", key="write_key", deadline="time_to_live")
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
        token: str | bytes | None = None,
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
        self.reconnect = None
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
        source, head, window = outline(self, kind, handler, batches, options)
        return Stream(source, lambda on_change: self.begin(head, window, on_change), self.sizes)

    async def _ask(
        self, handler: str, batch: pa.RecordBatch, options: UnaryOptions
    ) -> tuple[pa.Schema, Sequence[pa.RecordBatch]]:
        self.connection.check_here()
        caller = self._callers.find(handler, batch, options)
        if caller.slow(batch):
            encoded = await caller.encode_apart(batch)
        else:
            encoded = caller.encode(batch)
        if not caller.fits(encoded):
            stream = self.exchange(handler, (batch,), schema=batch.schema, **options)
            return await _everything(stream)
        answered = await self.ask(caller, encoded)
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

    async def ask(self, caller: UnaryCaller, encoded: Encoded) -> UnaryResult:
        """One call of one batch. Raises how it failed."""
        waiter = Waiter(self._loop)
        call = self.unary_call(caller, encoded, waiter.step)
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
    client: Client, kind: Kind, handler: str, batches: Any, options: CallOptions
) -> tuple[Batches | None, CallHead, InFlightWindow | None]:
    """A call before it is made: its input, what it says of itself, and its window.

    Raises LocalProtocolError and ConfigError for what cannot be.
    """
    token, compression, config = client.token, client.compression, client.config
    if kind == "source":
        return None, options.head(kind, handler, None, token, compression), None
    limit = config.calls.batch_limit
    source = Batches(batches, options.schema, handler=handler, peer=client.address, limit=limit)
    window = options.window(config, sink=kind == "sink")
    return source, options.head(kind, handler, source.schema, token, compression), window


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
