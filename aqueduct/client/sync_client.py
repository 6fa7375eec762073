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
from collections.abc import Callable, Sequence
from typing import Any, Final, Self, TypeAlias, Unpack
from weakref import WeakValueDictionary

import pyarrow as pa

from aqueduct.address import Address
from aqueduct.arguments import Duration, checked, read_arguments
from aqueduct.arrow.capsules import as_batch, has_batch
from aqueduct.carriers.binding import holds_up
from aqueduct.carriers.certificates import ClientTls
from aqueduct.client.client import (
    Client,
    ConnectionHeaders,
    OneBatch,
    SyncBatches,
    connection_headers,
    outline,
    plain,
)
from aqueduct.client.loop_thread import LoopThread
from aqueduct.client.options import (
    CallOptions,
    ExchangeOptions,
    SinkOptions,
    SourceOptions,
    UnaryOptions,
    takes,
)
from aqueduct.client.sync_stream import SyncStream
from aqueduct.client.thread_call import News, ThreadCall
from aqueduct.client.unary import UnaryCallers, one_batch, trace_headers
from aqueduct.client.unary_stub import StubCall
from aqueduct.config import DEFAULT, Config
from aqueduct.errors import ConnectionLost, LocalProtocolError
from aqueduct.rpc.describe import DESCRIBE, DESCRIBE_SCHEMA, Description
from aqueduct.rpc.request import Kind
from aqueduct.rpc.tracing import CallObservation, CallObserver, observed

__all__ = ["OnEnd", "SyncClient"]

OnEnd: TypeAlias = Callable[[int, int, float], object]
"""Called with the cost of a call: bytes of encoded batches sent and received, and the seconds of
waiting for the service."""

_AT_EXIT: Final = 2.0
"""Seconds that all clients together have to close as the interpreter ends."""
_clients: Final[WeakValueDictionary[int, SyncClient]] = WeakValueDictionary()
"""Those that are open, and some that are closed."""


class SyncClient:
    """One connection to a service, for threads. Any thread may call, several at once.

    It connects at once, within Timing.connect_timeout; see ``Client.connect`` for the arguments
    and the errors. A process that forks must connect after the fork.
    """

    @checked(headers="connection_headers", telemetry="call_observer")
    def __init__(
        self,
        address: str | Address,
        *,
        config: Config = DEFAULT,
        tls: ClientTls | None = None,
        headers: ConnectionHeaders = (),
        token: str | bytes | None = None,
        keep_alive: bool = True,
        telemetry: CallObserver | None = None,
    ) -> None:
        connection_headers(headers)  # errors belong here rather than into the other thread
        self.address = plain(address)
        """The service's address, without options."""
        self._address = address if isinstance(address, Address) else Address.parse(address)
        self.config = config
        self._lock = threading.Lock()
        self._check_caller()
        self._own = threading.local()
        """What each thread has for itself."""
        self._thread = LoopThread("aqueduct-sync-client")
        try:
            self._client = self._thread.run(
                Client.connect(
                    address,
                    config=config,
                    tls=tls,
                    headers=headers,
                    token=token,
                    keep_alive=keep_alive,
                    telemetry=telemetry,
                )
            )
        except BaseException:
            self._thread.stop()
            raise
        self._thread.check_caller = self._check_caller
        _clients[id(self)] = self

    @property
    def closed(self) -> bool:
        """Whether the connection is over, or was left behind by a fork."""
        return not self._thread.alive or self._client.connection.core.error is not None

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

    def describe(self) -> Description:
        """What the service says of itself."""
        stream = self.source(DESCRIBE, output_schema=DESCRIBE_SCHEMA)
        return Description.from_batches(list(stream), peer=self.address)

    @checked()
    def ping(self, *, timeout: Duration | None = None) -> float:
        """The seconds of a round trip; see ``Client.ping``."""
        return self._thread.run(self._client.ping(timeout=timeout))

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
                self._thread.run(self._client.close(), timeout=limit)
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
        if holds_up(self._address):
            raise LocalProtocolError(
                f"{self.address} is served by the event loop of this thread, and a SyncClient "
                "would hold it up while it waits for the answer; use aqueduct.Client, or make the "
                "call in another thread, as by asyncio.to_thread"
            )

    def _ask(
        self,
        handler: str,
        batch: Any,
        options: UnaryOptions,
        on_end: OnEnd | None = None,
    ) -> tuple[pa.Schema, Sequence[pa.RecordBatch]]:
        callers: UnaryCallers | None = getattr(self._own, "callers", None)
        if callers is None:
            client = self._client
            callers = UnaryCallers(client.connection, client.address, client.token)
            self._own.callers = callers
        if not isinstance(batch, pa.RecordBatch) and has_batch(batch):
            batch = as_batch(batch, where=f"the input of handler {handler!r}")
        seen = observed(self._client.telemetry, handler, "exchange", self.address)
        call: StubCall | None = None
        failed: BaseException | None = None
        stream: SyncStream | None = None
        received = 0
        try:
            caller = callers.find(handler, batch, options, seen)
            encoded = caller.encode(batch)
            if caller.fits(encoded):
                own = trace_headers(caller, seen)
                call = StubCall(self._thread, self._client, caller, encoded, own)
                answered = call.result()
                received = answered.size
                if answered.follow is None:
                    assert answered.schema is not None
                    return answered.schema, answered.batches
                stream = call.follow(answered)
            else:
                given = CallOptions(**read_arguments("call", **options), schema=batch.schema)
                made = self._make("exchange", handler, (batch,), given, seen=seen)
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

    def _stream(self, kind: Kind, handler: str, batches: Any, options: CallOptions) -> SyncStream:
        call = self._make(kind, handler, batches, options)
        call.wake()
        return SyncStream(call)

    def _make(
        self,
        kind: Kind,
        handler: str,
        batches: Any,
        options: CallOptions,
        *,
        news: News | None = None,
        tag: Any = None,
        seen: CallObservation | None = None,
    ) -> ThreadCall:
        """A call that the loop has not heard of yet; see ThreadCall."""
        self._thread.check()
        if self._client.closed:
            raise self._client.connection.error or ConnectionLost(f"{self!r} is closed")
        if hasattr(batches, "__aiter__"):
            raise LocalProtocolError(
                "a SyncClient reads plain iterables; async iterables are for aqueduct.Client"
            )
        source, head, window = outline(self._client, kind, handler, batches, options, seen)
        head.encode()  # errors belong here rather than into the other thread
        return ThreadCall(self._thread, self._client, head, window, source, news=news, tag=tag)


def _close_all() -> None:
    """Closes all clients, as the interpreter ends: after this, its daemon threads do nothing."""
    until = time.monotonic() + _AT_EXIT
    for reference in _clients.valuerefs():
        client = reference()
        if client is not None:
            client._close(max(until - time.monotonic(), 0.1))


atexit.register(_close_all)
