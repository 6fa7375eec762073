"""The calls behind one partition: batches go out, answers come with their number."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterable, Iterator

import pyarrow as pa

from aqueduct.arrow.call import ONE_TO_ONE
from aqueduct.blocking import SyncStream
from aqueduct.errors import AqueductError, ConnectFailed
from aqueduct.sync import SyncClient
from spark_udfs.calling import Answer, Calling, OnError, Opened
from spark_udfs.numbers import Numbers
from spark_udfs.place import Place, locate
from spark_udfs.pool import Lease, process_pool
from spark_udfs.retrying import with_note
from spark_udfs.spreading import Spread
from spark_udfs.vigil import input_look

__all__ = ["Answer", "Calling", "OnError", "leased", "run"]


def run(
    calling: Calling,
    batches: Iterable[pa.RecordBatch],
    *,
    schema: pa.Schema,
    place: Place,
    numbers: Numbers,
    opened: Opened | None = None,
    held: Callable[[], int] | None = None,
) -> Generator[Answer]:
    """Sends ``batches``, all of ``schema``, as there is room, and gives the answers.

    - ``opened`` is told the schema of the answers and what the handler is (``ONE_TO_ONE``,
      ``IDEMPOTENT``), once, before any data flows; what it raises ends the call.
    - ``held`` says how many bytes the caller keeps of batches without an answer: they count
      against ``in_flight_bytes`` as what is sent does.

    Closing the generator cancels what is under way. Raises the errors of ``aqueduct.errors``.
    """
    if calling.is_plain:
        return _one_call(calling, batches, schema, place, numbers, opened, held)
    spread = Spread(
        calling, batches, schema=schema, place=place, numbers=numbers, opened=opened, held=held
    )
    return spread.answers()


@contextlib.contextmanager
def leased(calling: Calling, *, place: Place, numbers: Numbers) -> Generator[SyncClient]:
    """The connection for one call of another kind than ``run`` makes, on the partition's address.

    What the call raises leaves with its place in the text, as what ``run`` raises does in
    ``exchange``.
    """
    peer, well = calling.peer_of(place), False
    lease: Lease | None = None
    try:
        lease = process_pool().lease(peer, task=place.task)
        numbers.reconnects += lease.reconnected
        yield lease.client
        well = True
    except AqueductError as error:
        where = peer.address.partition("?")[0]
        raise locate(
            error, peer=where, handler=calling.handler, place=place, numbers=numbers
        ) from error.__cause__
    finally:
        if lease is not None:
            # A Python worker ends with a task that failed: let the service hear.
            lease.release(close=not well and place.task is not None)


def _one_call(
    calling: Calling,
    batches: Iterable[pa.RecordBatch],
    schema: pa.Schema,
    place: Place,
    numbers: Numbers,
    opened: Opened | None,
    held: Callable[[], int] | None,
) -> Generator[Answer]:
    """The usual: one call on one address, put in order by the service. Nothing is kept here."""
    try:
        lease = process_pool().lease(calling.peer_of(place), task=place.task)
    except ConnectFailed as error:
        raise with_note(error, "tried once (retries=0)") from error.__cause__
    numbers.reconnects += lease.reconnected
    stream: SyncStream | None = None
    well = False
    try:
        stream = lease.client.exchange(
            calling.handler,
            _counted(batches, numbers),
            schema=schema,
            output_schema=calling.schema,
            in_flight=calling.in_flight,
            in_flight_bytes=calling.in_flight_bytes,
            compression=calling.compression,
            held=held,
            together=True,
            ready=None if place.task is None else input_look(),
            **calling.head(place),
        )
        lease.on_end(stream.close)
        with stream:
            # The service compares the schemas; only then does data flow. What this connection has
            # heard of an earlier task is not waited for again: that would be a round trip.
            about = calling.handler, schema, calling.schema
            found, traits = lease.accepted(about, lambda: (stream.opened(), stream.traits))
            if opened is not None and found is not None:
                opened(found, traits)
            if ONE_TO_ONE in traits:
                stream.be_brief()
            for batch in stream:
                numbers.batches_received += 1
                numbers.rows_received += batch.num_rows
                yield Answer(stream.number, batch)
        well = True
    finally:
        if stream is not None:
            numbers.bytes_sent += stream.bytes_sent
            numbers.bytes_received += stream.bytes_received
            numbers.waiting_seconds += stream.waited
        # A Python worker ends with a task that failed or was left early: let the service hear.
        lease.release(close=not well and place.task is not None)


def _counted(batches: Iterable[pa.RecordBatch], numbers: Numbers) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        numbers.batches_sent += 1
        numbers.rows_sent += batch.num_rows
        yield batch
