"""One connection on which a client makes calls; the faces of clients share it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias, cast

import pyarrow as pa

from aqueduct._speedups.calls.batch_sender import InFlightWindow, SharedWindow
from aqueduct._speedups.loop.waiter import Waiter
from aqueduct.address import Address
from aqueduct.arguments import Duration, read_arguments
from aqueduct.arrow.compression import codec_of
from aqueduct.arrow.encode import Encoded
from aqueduct.carriers.certificates import ClientTls
from aqueduct.client.call import Batches, ClientCall
from aqueduct.client.opening_call import NO_COLUMNS, OpeningCall, opens_slowly
from aqueduct.client.options import CallOptions, UnaryOptions, token_bytes
from aqueduct.client.stream import Start, Stream
from aqueduct.client.unary import (
    PendingCall,
    UnaryCaller,
    UnaryCallers,
    UnaryResult,
    trace_headers,
)
from aqueduct.config import Config
from aqueduct.endpoint import Connection, Message, connect_for_calls
from aqueduct.errors import AqueductError, ConfigError, DeadlineExceeded
from aqueduct.rpc.deadline import ProgressTimer
from aqueduct.rpc.keys import ALIVE, Headers
from aqueduct.rpc.request import CallHead, Kind
from aqueduct.rpc.threads import apart, provide
from aqueduct.rpc.tracing import CallObservation, CallObserver, Unobserved, observed, reported

__all__ = [
    "ClientConnection",
    "ConnectionHeaders",
    "connection_headers",
    "everything",
    "outline",
    "plain",
]

ConnectionHeaders: TypeAlias = (
    Mapping[str, str] | Sequence[tuple[str, str]] | Sequence[tuple[bytes, bytes]]
)


class ClientConnection:
    """One connection to a service, with any number of calls at once, on one event loop."""

    def __init__(
        self,
        connection: Connection,
        *,
        address: str = "",
        token: str | bytes | None = None,
        compression: str = "",
        telemetry: CallObserver | None = None,
    ) -> None:
        """Raises ConfigError for a connection of the control-stream draft without headers."""
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
        """The observer of every call."""
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
    async def connect(
        cls,
        address: Address,
        *,
        name: str,
        config: Config,
        tls: ClientTls | None,
        headers: tuple[tuple[bytes, bytes], ...],
        token: str | bytes | None,
        keep_alive: bool,
        telemetry: CallObserver | None = None,
    ) -> ClientConnection:
        """Connects to ``address``, which is ``name`` for people; see ``Client.connect``."""
        connection = await connect_for_calls(address, headers=headers, config=config, tls=tls)
        if keep_alive:
            connection.hold()
        compression = codec_of(address.options.get("compression", "none"))
        return cls(
            connection, address=name, token=token, compression=compression, telemetry=telemetry
        )

    @property
    def closed(self) -> bool:
        """Whether the connection is over."""
        return self.connection.core.error is not None

    @property
    def load(self) -> int:
        """Bytes that all calls have sent and that have no answer; for any thread."""
        return self.under_way.used + self._watches.asking_bytes

    @property
    def busy(self) -> bool:
        """Whether a call is open."""
        return bool(self._calls) or self._watches.asking > 0

    async def ping(self, timeout: Duration | None) -> float:
        """The seconds of a round trip; see ``Client.ping``."""
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
        """Closes the connection; see ``Client.close``."""
        await self.connection.close()
        # A timer would keep the connection in memory until it is due.
        self._watches.close()
        if self._beat is not None:
            self._beat.cancel()
            self._beat = None

    def __repr__(self) -> str:
        return f"<the connection to {self.address}>"

    # Calls

    def stream(self, kind: Kind, handler: str, batches: Any, options: CallOptions) -> Stream:
        """Makes a call; see ``Client.exchange``. Raises LocalProtocolError and ConnectionLost."""
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
        seen: CallObservation | None = None,
    ) -> tuple[Batches | None, Start]:
        source, head, window = outline(self, kind, handler, batches, options, seen)
        return source, lambda on_change: self.begin(head, window, on_change)

    async def answer(
        self,
        handler: str,
        batch: pa.RecordBatch,
        options: UnaryOptions,
        attempt: Unobserved | None = None,
    ) -> tuple[pa.Schema, Sequence[pa.RecordBatch]]:
        """A call of one batch: the schema and the batches of its answer; see ``Client.call``.

        ``attempt``: the trace of a call that is observed elsewhere.
        """
        self.connection.check_here()
        seen = attempt or observed(self.telemetry, handler, "exchange", self.address)
        if seen is None:  # the usual way, with a step less
            return await self._answer(handler, batch, options, None)
        return await reported(seen, self._answer(handler, batch, options, seen))

    async def _answer(
        self,
        handler: str,
        batch: pa.RecordBatch,
        options: UnaryOptions,
        seen: CallObservation | None,
    ) -> tuple[pa.Schema, Sequence[pa.RecordBatch]]:
        caller = self._callers.find(handler, batch, options, seen)
        if caller.slow(batch):
            encoded = await caller.encode_apart(batch)
        else:
            encoded = caller.encode(batch)
        if not caller.fits(encoded):
            given = CallOptions(**read_arguments("call", **options), schema=batch.schema)
            prepared = self._prepare("exchange", handler, (batch,), given, seen)
            return await everything(Stream(*prepared, self.sizes))
        answered = await self.ask(caller, encoded, trace_headers(caller, seen))
        if answered.follow is None:
            assert answered.schema is not None
            return answered.schema, answered.batches
        head = caller.following(answered)
        return await everything(
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


async def everything(stream: Stream) -> tuple[pa.Schema, list[pa.RecordBatch]]:
    """What a call gives that did not fit one message."""
    async with stream:
        batches = [batch async for batch in stream]
        assert stream.schema is not None
        return stream.schema, batches


def outline(
    link: ClientConnection,
    kind: Kind,
    handler: str,
    batches: Any,
    options: CallOptions,
    seen: CallObservation | None = None,
) -> tuple[Batches | None, CallHead, InFlightWindow | None]:
    """A call before it is made: its input, what it says of itself, and its window.

    ``seen``: how the call is observed, if that is known. Raises LocalProtocolError and ConfigError
    for what cannot be.
    """
    token, compression, config = link.token, link.compression, link.config
    if kind == "source":
        seen = seen or observed(link.telemetry, handler, kind, link.address)
        return None, options.head(kind, handler, None, token, compression, seen), None
    limit = config.calls.batch_limit
    source = Batches(batches, options.schema, handler=handler, peer=link.address, limit=limit)
    window = options.window(config, sink=kind == "sink")
    seen = seen or observed(link.telemetry, handler, kind, link.address)
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
