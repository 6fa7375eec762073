"""The calls behind one partition: batches go out, answers come with their number."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Generator, Iterable, Iterator
from queue import SimpleQueue

import pyarrow as pa

from aqueduct.arrow.encode import Encoded
from aqueduct.client.balancer import Balancer
from aqueduct.client.retry import with_note
from aqueduct.client.sync_stream import SyncStream
from aqueduct.client.task_client import TaskClient
from aqueduct.client.thread_balancer import balance
from aqueduct.client.thread_call import News
from aqueduct.client.unary_stub import StubCall, UnaryStub
from aqueduct.errors import AqueductError, ConnectFailed
from aqueduct.rpc.request import ONE_TO_ONE
from spark_udfs.calls.connector import TaskConnector
from spark_udfs.calls.pool import CachedAccepted, PoolLease, process_pool
from spark_udfs.calls.spec import BatchAnswer, CallSpec, OnError, Opened
from spark_udfs.worker.executor_socket import input_look
from spark_udfs.worker.metrics import TaskMetrics
from spark_udfs.worker.task import TaskContext, locate

__all__ = ["BatchAnswer", "CallSpec", "OnError", "leased", "reach", "run"]


def run(
    calling: CallSpec,
    batches: Iterable[pa.RecordBatch],
    *,
    schema: pa.Schema,
    place: TaskContext,
    numbers: TaskMetrics,
    opened: Opened | None = None,
    held: Callable[[], int] | None = None,
) -> Generator[BatchAnswer]:
    """Sends ``batches``, all of ``schema``, as there is room, and gives the answers.

    - ``opened`` is told the schema of the answers and what the handler is (``ONE_TO_ONE``,
      ``IDEMPOTENT``), once, before any data flows; what it raises ends the call.
    - ``held`` says how many bytes the caller keeps of batches without an answer: they count
      against ``in_flight_bytes`` as what is sent does.

    Closing the generator cancels what is under way. Raises the errors of ``aqueduct.errors``.
    """
    if calling.is_plain:
        return _one_call(calling, batches, schema, place, numbers, opened, held)
    news: News = SimpleQueue()
    balancer = Balancer(
        calling,
        connector=TaskConnector(calling, schema=schema, place=place),
        news=news,
        numbers=numbers,
        logger="spark_udfs",
        opened=opened,
        held=held,
    )
    return balance(balancer, batches, news)


@contextlib.contextmanager
def leased(
    calling: CallSpec, *, place: TaskContext, numbers: TaskMetrics, skip: int = 0
) -> Generator[TaskClient]:
    """The connection for one call of another kind than ``run`` makes.

    It is to the partition's address, or ``skip`` further, or to the next one that is there. What
    the call raises leaves with its place in the text, as what ``run`` raises does in ``exchange``.
    """
    where, well = calling.places, False
    lease: PoolLease | None = None
    try:
        lease = reach(calling, (place.partition or 0) + skip, task=place.task)
        where = lease.peer.bare
        numbers.reconnects += lease.reconnected
        yield lease.client
        well = True
    except AqueductError as error:
        raise locate(
            error, peer=where, handler=calling.handler, place=place, numbers=numbers
        ) from error.__cause__
    finally:
        if lease is not None:
            numbers.resumes += lease.take_resumes()
            # A Python worker ends with a task that failed: let the service hear.
            lease.release(close=not well and place.task is not None)


def reach(calling: CallSpec, first: int = 0, *, task: int | None) -> PoolLease:
    """A lease on the address of that number, or on the next one that is there.

    Nothing has been said yet, so that is no retry. Raises ConnectFailed if there is none.
    """
    peers = calling.peers
    failed: ConnectFailed | None = None
    for place in range(len(peers)):
        try:
            return process_pool().lease(peers[(first + place) % len(peers)], task=task)
        except ConnectFailed as error:
            failed = failed or error
    assert failed is not None
    if len(peers) == 1:
        raise failed
    text = f"and no other of {len(peers)} addresses answers: {calling.places}"
    raise with_note(failed, text) from failed.__cause__


def _one_call(
    calling: CallSpec,
    batches: Iterable[pa.RecordBatch],
    schema: pa.Schema,
    place: TaskContext,
    numbers: TaskMetrics,
    opened: Opened | None,
    held: Callable[[], int] | None,
) -> Generator[BatchAnswer]:
    """The usual: one call on one address, put in order by the service. Nothing is kept here."""
    try:
        lease = process_pool().lease(calling.peer_of(place), task=place.task)
    except ConnectFailed as error:
        raise with_note(error, "tried once (retries=0)") from error.__cause__
    numbers.reconnects += lease.reconnected
    well = False
    try:
        # What this connection has heard of an earlier task is not waited for again.
        known = lease.accepted(calling.handler, schema, calling.schema, calling.deadline)
        look = None if place.task is None else input_look()
        call: StubCall | None = None
        rows = 0
        if known is not None:
            if opened is not None:
                _tell(opened, known)
            if known.prepared is not None and look is not None and calling.compression is None:
                encoded, rows, batches = _alone(known.prepared, batches, look)
                if encoded is not None:
                    call = known.prepared.call(encoded, **calling.own(place))
        if call is not None:
            yield from _answered(lease, call, rows, numbers)
        else:
            ends = known, opened, held, look
            yield from _exchanged(lease, calling, batches, schema, place, numbers, *ends)
        well = True
    finally:
        numbers.resumes += lease.take_resumes()
        # A Python worker ends with a task that failed or was left early: let the service hear.
        lease.release(close=not well and place.task is not None)


def _tell(opened: Opened | None, known: CachedAccepted) -> None:
    if opened is not None and known.answers is not None:
        opened(known.answers, known.capabilities)


def _exchanged(
    lease: PoolLease,
    calling: CallSpec,
    batches: Iterable[pa.RecordBatch],
    schema: pa.Schema,
    place: TaskContext,
    numbers: TaskMetrics,
    known: CachedAccepted | None,
    opened: Opened | None,
    held: Callable[[], int] | None,
    look: Callable[[], bool] | None,
) -> Generator[BatchAnswer]:
    """Batches and answers flow at the same time."""
    stream = lease.client.exchange_later(
        calling.handler,
        numbers.counted(batches),
        schema=schema,
        output_schema=calling.schema,
        in_flight=calling.in_flight,
        in_flight_bytes=calling.in_flight_bytes,
        deadline=calling.deadline,
        compression=calling.compression,
        held=held,
        ready=look,
        **calling.own(place),
    )
    lease.on_end(stream.close)
    try:
        with stream:
            if known is None:  # the service compares the schemas; only then does data flow
                known = _acceptance(lease, stream, calling, schema)
                lease.remember(known)
                _tell(opened, known)
            yield from _received(stream, numbers)
    finally:
        numbers.bytes_sent += stream.bytes_sent
        numbers.waiting_seconds += stream.waited


def _acceptance(
    lease: PoolLease, stream: SyncStream, calling: CallSpec, schema: pa.Schema
) -> CachedAccepted:
    """What the service says of the call, waited for."""
    handler, expected, deadline = calling.handler, calling.schema, calling.deadline
    answers, capabilities = stream.opened(), stream.capabilities
    prepared = None
    if ONE_TO_ONE in capabilities:
        prepared = lease.client.prepare(handler, schema, output_schema=expected, deadline=deadline)
    return CachedAccepted(handler, schema, expected, deadline, answers, capabilities, prepared)


def _alone(
    prepared: UnaryStub, batches: Iterable[pa.RecordBatch], look: Callable[[], bool]
) -> tuple[Encoded | None, int, Iterator[pa.RecordBatch]]:
    """The only batch of the input and its rows, if that is known and it is small; else the input.

    Nothing is waited for: Spark has sent the end when a small task has its first batch in hand.
    """
    source = iter(batches)
    first = next(source, None)
    if first is None:
        return None, 0, source
    encoded = prepared.encode(first)
    if encoded is None or not look():
        return None, 0, itertools.chain((first,), source)
    second = next(source, None)
    if second is None:
        return encoded, first.num_rows, source
    return None, 0, itertools.chain((first, second), source)


def _answered(
    lease: PoolLease, call: StubCall, rows: int, numbers: TaskMetrics
) -> Generator[BatchAnswer]:
    """A single batch goes with its call, and the answer comes with the status."""
    lease.on_end(call.close)
    numbers.batches_sent += 1
    numbers.rows_sent += rows
    numbers.bytes_sent += call.encoded.size
    try:
        answered = call.result()
    finally:
        numbers.waiting_seconds += call.waited
    if answered.follow is not None:
        stream = call.follow(answered)
        lease.on_end(stream.close)
        try:
            with stream:
                yield from _received(stream, numbers)
        finally:
            numbers.waiting_seconds += stream.waited
        return
    numbers.bytes_received += answered.size
    for batch in answered.batches:
        numbers.batches_received += 1
        numbers.rows_received += batch.num_rows
        yield BatchAnswer(0, batch)


def _received(stream: SyncStream, numbers: TaskMetrics) -> Generator[BatchAnswer]:
    try:
        for batch in stream:
            numbers.batches_received += 1
            numbers.rows_received += batch.num_rows
            yield BatchAnswer(stream.number, batch)
    finally:
        numbers.bytes_received += stream.bytes_received
