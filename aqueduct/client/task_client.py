"""A client for who drives the work of a task: many small calls, or several at once in one thread.

``spark_udfs`` uses it. What it has beyond ``SyncClient`` is for the library alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import cast

import pyarrow as pa

from aqueduct.arguments import Duration, Size, checked
from aqueduct.client.client import capabilities, window
from aqueduct.client.lane import Lane, News
from aqueduct.client.sync_client import SyncClient
from aqueduct.client.sync_stream import SyncStream
from aqueduct.client.thread_call import Mailbox
from aqueduct.client.unary_stub import UnaryStub
from aqueduct.rpc.request import CallHead, Partition

__all__ = ["TaskClient"]


class TaskClient(SyncClient):
    """One connection of a task to a service."""

    @checked()
    def exchange_later(
        self,
        handler: str,
        batches: Iterable[pa.RecordBatch],
        *,
        schema: pa.Schema | None = None,
        output_schema: pa.Schema | None = None,
        in_flight: int | None = None,
        in_flight_bytes: Size | None = None,
        deadline: Duration | None = None,
        headers: Mapping[str, str] | None = None,
        run: str = "",
        attempt: str = "",
        token: str | bytes | None = None,
        partition: Partition | None = None,
        compression: str | None = None,
        ordered: bool = True,
        report_failures: bool = False,
        held: Callable[[], int] | None = None,
        ready: Callable[[], bool] | None = None,
    ) -> SyncStream:
        """``exchange``, sent with its first batch, or when ``opened`` is asked for.

        ``held`` says how many bytes more the caller keeps of batches under way: they count
        against ``in_flight_bytes`` as what is sent does. ``ready`` says whether ``batches`` has its
        next one, or its end, without a wait: those leave with it, too.
        """
        stream = self._stream(
            "exchange",
            handler,
            self._batches(handler, batches, schema),
            window(self.config, in_flight, in_flight_bytes),
            begin=False,
            expected=output_schema,
            deadline=deadline,
            headers=headers,
            run=run,
            attempt=attempt,
            token=token,
            partition=partition,
            compression=compression,
            capabilities=capabilities(ordered, report_failures),
        )
        stream.held, stream.ready = held, ready
        return stream

    @checked()
    def lane(
        self,
        handler: str,
        news: News,
        tag: object,
        *,
        schema: pa.Schema,
        output_schema: pa.Schema | None = None,
        in_flight: int | None = None,
        in_flight_bytes: Size | None = None,
        deadline: Duration | None = None,
        headers: Mapping[str, str] | None = None,
        run: str = "",
        attempt: str = "",
        token: str | bytes | None = None,
        partition: Partition | None = None,
        compression: str | None = None,
        ordered: bool = True,
        report_failures: bool = False,
    ) -> Lane:
        """An exchange for a thread that drives several at once: all put their news into one queue.

        Each piece of news is there a pair of ``tag`` and what ``Lane.taken`` is to be given. The
        other arguments are those of ``exchange``.
        """
        source = self._batches(handler, (), schema)
        crossing = self._crossing(
            "exchange",
            handler,
            source,
            window(self.config, in_flight, in_flight_bytes),
            mailbox=Mailbox(news, tag),
            expected=output_schema,
            deadline=deadline,
            headers=headers,
            run=run,
            attempt=attempt,
            token=token,
            partition=partition,
            compression=compression,
            capabilities=capabilities(ordered, report_failures),
        )
        return Lane(crossing, source)

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
        return UnaryStub(self._thread, self._client, self._client.asker(head))
