"""The calls behind one partition: batches go out, answers come with their number."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass, field

import pyarrow as pa

from aqueduct.arrow.call import Partition
from aqueduct.carriers.tls import ClientTls
from aqueduct.config import DEFAULT, Config
from aqueduct.errors import AqueductError
from spark_udfs.numbers import Numbers
from spark_udfs.place import Place
from spark_udfs.pool import Peer, process_pool

__all__ = ["Answer", "Calling", "run"]


@dataclass(frozen=True, slots=True)
class Answer:
    """One batch of the service's."""

    number: int
    """Of the input batch that it belongs to, from 0."""
    batch: pa.RecordBatch


@dataclass(frozen=True)
class Calling:
    """Whom to call, and how. ``spark_udfs.exchange`` has the meaning of each."""

    address: str
    handler: str
    schema: pa.Schema | None
    in_flight: int
    in_flight_bytes: int
    deadline: float | None = None
    token: str | None = field(default=None, repr=False)
    headers: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    connection_headers: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    tls: ClientTls | None = None
    compression: str | None = None
    config: Config = DEFAULT
    run: str = ""
    """The same for every attempt of the job."""


def run(
    calling: Calling,
    batches: Iterable[pa.RecordBatch],
    *,
    schema: pa.Schema,
    place: Place,
    numbers: Numbers,
) -> Generator[Answer]:
    """Sends ``batches``, all of ``schema``, as there is room, and gives the answers.

    Closing the generator cancels what is under way. Raises the errors of ``aqueduct.errors``.
    """
    peer = Peer(calling.address, calling.tls, calling.connection_headers, calling.config)
    lease = process_pool().lease(peer, task=place.task)
    failed = False
    try:
        stream = lease.client.exchange(
            calling.handler,
            _counted(batches, numbers),
            schema=schema,
            output_schema=calling.schema,
            in_flight=calling.in_flight,
            in_flight_bytes=calling.in_flight_bytes,
            deadline=calling.deadline,
            token=calling.token,
            compression=calling.compression,
            headers=dict(calling.headers),
            run=place.run_key(calling.run),
            attempt=place.attempt_key,
            partition=None if place.partition is None else Partition(place.partition),
        )
        lease.on_end(stream.close)
        with stream:
            stream.opened()  # the service has compared the schemas; only now data flows
            for batch in stream:
                number = numbers.batches_received
                numbers.batches_received += 1
                numbers.rows_received += batch.num_rows
                yield Answer(number, batch)
    except AqueductError:
        failed = True
        raise
    finally:
        # A Python worker ends with its failed task: let the service hear of it.
        lease.release(close=failed and place.task is not None)


def _counted(batches: Iterable[pa.RecordBatch], numbers: Numbers) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        numbers.batches_sent += 1
        numbers.rows_sent += batch.num_rows
        yield batch
