"""``BatchSinkWriter``: writes into a sink of a service, exactly once, from threads.

::

    sink = SinkWriter(client, "shelf")
    prepared = sink.write(Attempt(write_key, partition=0), batches, schema=schema)
    sink.commit(write_key, [prepared])

See ``aqueduct.service.sinks`` for what holds. From Spark: ``df.write.format("aqueduct")``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa

from aqueduct.client.sync_client import SyncClient
from aqueduct.client.sync_stream import SyncStream
from aqueduct.errors import BadCall
from aqueduct.rpc.documents import answer_of
from aqueduct.rpc.request import Partition
from aqueduct.rpc.sink_commit import (
    ABORT,
    ATTEMPT_HEADER,
    COMMIT,
    DOCUMENT_SCHEMA,
    LOOK,
    WRITE,
    Attempt,
    PreparedAttempt,
    Receipt,
    Settlement,
    SinkDescription,
    WriteKey,
    document_of,
    to_batch,
)

__all__ = ["SinkWriter"]


class SinkWriter:
    """A sink of the service that ``client`` is connected to."""

    def __init__(
        self,
        client: SyncClient,
        name: str,
        *,
        token: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """``token`` and ``headers`` go with every call."""
        self.client = client
        self.name = name
        self._token = token
        self._headers = dict(headers or {})
        self._limit = client.config.sinks.document_bytes

    def look(self, *, deadline: float | None = None) -> SinkDescription:
        """What the sink takes. Raises UnknownHandler if there is no such sink."""
        answer = self._ask(LOOK, "{}", "", deadline)
        with answer_of(self.client.address, LOOK + self.name):
            return SinkDescription.from_json([answer], limit=self._limit)

    def write(
        self,
        attempt: Attempt,
        batches: Iterable[pa.RecordBatch],
        *,
        schema: pa.Schema,
        deadline: float | None = None,
        in_flight_bytes: int | None = None,
        compression: str | None = None,
        on_open: Callable[[SyncStream], object] | None = None,
    ) -> PreparedAttempt:
        """Writes ``batches``, all of ``schema``; they can be committed once this has returned.

        - ``in_flight_bytes``: bytes sent and not yet taken by the sink (Calls.in_flight_bytes).
        - ``on_open``: is given the call, which its ``close`` abandons, before anything is sent.

        Raises how the call failed, and what ``batches`` raises; then the service aborts the
        attempt. After ConnectionLost it may be prepared all the same.
        """
        counted = _Counted(batches)
        stream = self.client.exchange(
            WRITE + self.name,
            counted,
            schema=schema,
            output_schema=DOCUMENT_SCHEMA,
            in_flight_bytes=in_flight_bytes,
            deadline=deadline,
            headers={**self._headers, ATTEMPT_HEADER: attempt.to_json()},
            write_key=attempt.write_key.key,
            attempt=attempt.id,
            token=self._token,
            partition=Partition(attempt.partition),
            compression=compression,
        )
        if on_open is not None:
            on_open(stream)
        with stream:
            stream.opened()  # the sink's schema is compared before anything is sent
            receipt = list(stream)
        with answer_of(self.client.address, WRITE + self.name):
            answer = Receipt.from_json(receipt, limit=self._limit)
        if (answer.batches, answer.rows) != (counted.batches, counted.rows):
            raise BadCall(
                f"the sink {self.name!r} was sent {counted.batches} batches of {counted.rows} "
                f"rows, and prepared {answer.batches} of {answer.rows}",
                peer=self.client.address,
                handler=WRITE + self.name,
            )
        return PreparedAttempt(attempt, answer.receipt)

    def commit(
        self,
        write_key: WriteKey,
        prepared: Sequence[PreparedAttempt],
        *,
        deadline: float | None = None,
    ) -> Any:
        """Commits exactly these attempts; returns what the sink's ``commit`` returned.

        May be repeated. After ConnectionLost or DeadlineExceeded it may be committed all the same:
        repeat it. Raises HandlerFailed if the sink could not, and then nothing is committed.
        """
        text = Settlement(write_key, tuple(prepared)).to_json()
        answer = self._ask(COMMIT, text, write_key.key, deadline)
        where = "the answer to a commit"
        with answer_of(self.client.address, COMMIT + self.name):
            return document_of([answer], where, limit=self._limit).get("result")

    def abort(
        self,
        write_key: WriteKey,
        prepared: Sequence[PreparedAttempt] = (),
        *,
        execution: str | None = None,
        deadline: float | None = None,
    ) -> None:
        """Aborts these attempts, and all others of the write that the service knows.

        ``execution``: those of this execution alone. What is committed stays. May be repeated.
        """
        text = Settlement(write_key, tuple(prepared), execution).to_json()
        self._ask(ABORT, text, write_key.key, deadline)

    def _ask(self, what: str, text: str, write_key: str, deadline: float | None) -> pa.RecordBatch:
        return self.client.call(
            what + self.name,
            to_batch(text),
            output_schema=DOCUMENT_SCHEMA,
            deadline=deadline,
            headers=self._headers,
            write_key=write_key,
            token=self._token,
        )


class _Counted:
    """Batches, counted as they are read."""

    def __init__(self, batches: Iterable[pa.RecordBatch]) -> None:
        self._batches = batches
        self.batches = self.rows = 0

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        for batch in self._batches:
            self.batches += 1
            self.rows += batch.num_rows
            yield batch
