"""A client that drives the work of a task: many small calls, or several at once in one thread.

``spark_udfs`` uses it. What it has beyond ``SyncClient`` is for the library alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Unpack, cast

import pyarrow as pa

from aqueduct.arguments import Duration, checked
from aqueduct.client.options import (
    CallOptions,
    ExchangeOptions,
    OneBatch,
    SinkOptions,
    SyncBatches,
    UnaryOptions,
    takes,
)
from aqueduct.client.sync_client import OnEnd, SyncClient
from aqueduct.client.sync_stream import SyncStream
from aqueduct.client.thread_call import News, ThreadCall
from aqueduct.client.unary import UnaryCaller
from aqueduct.client.unary_stub import UnaryStub
from aqueduct.rpc.request import CallHead

__all__ = ["TaskClient"]


class TaskClient(SyncClient):
    """One connection of a task to a service."""

    reconnects = False
    """The pool makes a new client instead."""
    told_resumes = 0
    """Those of ``resumes`` that tasks have counted."""

    @property
    def resumes(self) -> int:
        """How often the connection was cut and went on."""
        return self._client.connection.carrier.resumes

    @checked()
    @takes(ExchangeOptions)
    def exchange_later(
        self,
        handler: str,
        batches: Iterable[pa.RecordBatch],
        *,
        held: Callable[[], int] | None = None,
        ready: Callable[[], bool] | None = None,
        **options: Unpack[ExchangeOptions],
    ) -> SyncStream:
        """``exchange``, sent with its first batch, or when ``opened`` is asked for.

        ``held`` says how many bytes more the caller keeps of batches under way: they count
        against ``in_flight_bytes`` as what is sent does. ``ready`` says whether ``batches`` has its
        next one, or its end, without a wait: those leave with it, too.
        """
        call = self._make("exchange", handler, batches, CallOptions(**options))
        return SyncStream(call, held=held, ready=ready)

    @checked()
    @takes(ExchangeOptions)
    def exchange_call(
        self, handler: str, news: News, tag: object, **options: Unpack[ExchangeOptions]
    ) -> ThreadCall:
        """An exchange for a thread that drives several at once: all put their news into one queue.

        Each piece of news is there a pair of ``tag`` and what ``popped`` is to be given. The other
        arguments are those of ``exchange``.
        """
        call = self._make("exchange", handler, (), CallOptions(**options), news=news, tag=tag)
        call.wake()
        return call

    @takes(UnaryOptions)
    def call_table(
        self,
        handler: str,
        batch: OneBatch,
        *,
        on_end: OnEnd | None = None,
        **options: Unpack[UnaryOptions],
    ) -> pa.Table:
        """As that of SyncClient. ``on_end`` is told what the call has cost, however it ended."""
        schema, batches = self._ask(handler, batch, options, on_end)
        return pa.Table.from_batches(batches, schema)

    @checked()
    @takes(SinkOptions)
    def sink(
        self,
        handler: str,
        batches: SyncBatches,
        *,
        on_end: OnEnd | None = None,
        **options: Unpack[SinkOptions],
    ) -> dict[str, int]:
        """As that of SyncClient. ``on_end`` is told what the call has cost, however it ended."""
        stream = self._stream("sink", handler, batches, CallOptions(**options))
        try:
            with stream:
                for _ in stream:
                    pass
        finally:
            if on_end is not None:
                on_end(stream.bytes_sent, stream.bytes_received, stream.waited)
        return dict(stream.counters)

    @checked()
    def prepare(
        self,
        handler: str,
        schema: pa.Schema,
        *,
        output_schema: pa.Schema | None = None,
        deadline: Duration | None = None,
    ) -> UnaryStub | None:
        """Makes calls of a function of one batch ready, which a thread is to make many of.

        What one is told besides is said as it is made; see ``Client.exchange``. None where batches
        are to be compressed: that is agreed upon as an exchange begins. Raises LocalProtocolError.
        """
        if self._client.compression:
            return None
        head = CallHead(
            handler=handler,
            kind="exchange",
            schema=schema,
            expected=output_schema,
            deadline=cast("float | None", deadline),  # as ``checked`` read it
        )
        client = self._client
        caller = UnaryCaller(client.connection, head, peer=client.address)
        return UnaryStub(self._thread, client, caller)
