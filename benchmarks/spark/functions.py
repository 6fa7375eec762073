"""What runs in the Python workers of Spark: ours, Flight's, and functions that call nobody.

Workers import this module. It imports nothing of ours: who calls nobody, or Flight, has a worker
without it.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

import pyarrow as pa

__all__ = [
    "GENERATED",
    "TIMED",
    "FilesSent",
    "Generated",
    "Timed",
    "flight_answers",
    "flight_pipelined",
    "flight_waiting",
    "identity",
]

Batches = Iterator[pa.RecordBatch]
Function = Callable[[Batches], Batches]

TIMED: Final = pa.schema(
    [("rows", pa.int64()), ("total", pa.int64()), ("worker", pa.int64()), ("seconds", pa.float64())]
)
"""What ``Timed`` answers with: one row for a task."""
GENERATED: Final = pa.schema([("rows", pa.int64()), ("total", pa.int64())])
"""What ``Generated`` yields: one row for a batch that was sent."""


def identity(batches: Batches) -> Batches:
    """The least that a function for ``mapInArrow`` can do."""
    yield from batches


def flight_waiting(location: str, handler: str) -> Function:
    """The loop that everybody writes first: send a batch, wait for its answer."""

    def call(batches: Batches) -> Batches:
        import pyarrow.flight as fl

        with fl.connect(location) as client:
            writer: Any = None
            reader: Any = None
            for batch in batches:
                if writer is None:
                    writer, reader = client.do_exchange(fl.FlightDescriptor.for_path(handler))
                    writer.begin(batch.schema)
                writer.write_batch(batch)
                yield reader.read_chunk().data
            if writer is not None:
                writer.close()

    return call


def flight_pipelined(location: str, handler: str) -> Function:
    """The better loop: a thread sends while the task reads."""

    def call(batches: Batches) -> Batches:
        first = next(batches, None)
        if first is None:
            return
        yield from flight_answers(location, handler, itertools.chain((first,), batches), first)

    return call


def flight_answers(location: str, handler: str, batches: Batches, like: Any) -> Batches:
    """The answers to ``batches``, which have the schema of ``like`` and are sent by a thread."""
    import pyarrow.flight as fl

    with fl.connect(location) as client:
        writer, reader = client.do_exchange(fl.FlightDescriptor.for_path(handler))
        writer.begin(like.schema)

        def send() -> None:
            for batch in batches:
                writer.write_batch(batch)
            writer.done_writing()

        sender = threading.Thread(target=send)
        sender.start()
        for chunk in reader:
            yield chunk.data
        sender.join()
        writer.close()


class Timed:
    """A task that notes how long its first answer took, from having its first batch in hand.

    Whatever ``function`` needs for it (a connection, a call) is in that time. Yields one row:
    the rows and the sum of what was answered, the worker's process id, and the seconds.
    """

    def __init__(self, function: Function) -> None:
        self.function = function

    def __call__(self, batches: Batches) -> Batches:
        first = next(batches, None)
        if first is None:
            return
        began = time.perf_counter()
        answers = self.function(itertools.chain((first,), batches))
        earliest = next(answers)
        seconds = time.perf_counter() - began
        rows, total = 0, 0
        for answer in itertools.chain((earliest,), answers):
            rows += answer.num_rows
            total += int(answer.column(0).to_numpy().sum())
        row = {"rows": [rows], "total": [total], "worker": [os.getpid()], "seconds": [seconds]}
        yield pa.record_batch(row, schema=TIMED)


class Generated:
    """A task that sends ``count`` batches of ``nbytes``, made here, for each row that it gets.

    So the bytes that a service is sent do not come through the JVM. The answers are passed on.
    """

    def __init__(self, address: str, handler: str, nbytes: int, count: int) -> None:
        from spark_udfs import exchange

        self.nbytes, self.count = nbytes, count
        self.function = exchange(address, handler, schema=GENERATED)

    def __call__(self, batches: Batches) -> Batches:
        from benchmarks.peers import common

        rows = sum(batch.num_rows for batch in batches)
        made = common.make_batches(self.nbytes)
        yield from self.function(itertools.islice(itertools.cycle(made), rows * self.count))


class FilesSent:
    """A task that sums up what becomes of its files: row counts, and the sums of ``id``.

    ``peer`` is ``aqueduct``, ``flight``, or ``""`` for reading alone. All read in the same way:
    ours, with batches of the same size; Flight's thread reads as it sends.
    """

    def __init__(self, peer: str, address: str) -> None:
        self.peer, self.address = peer, address

    def __call__(self, batches: Batches) -> Batches:
        from spark_udfs import exchange_files
        from spark_udfs.files.exchange import BATCH_BYTES
        from spark_udfs.files.reader import Part, read

        if self.peer == "aqueduct":
            answers: Batches = exchange_files(self.address, "echo", returns="answers")(batches)
        else:
            parts = [Part(path) for batch in batches for path in batch.column(0).to_pylist()]
            pieces = read(parts, None, BATCH_BYTES)
            answers = (piece.batch for piece in pieces if piece.batch is not None)
            if self.peer == "flight":
                first = next(answers)
                answers = itertools.chain((first,), answers)
                answers = flight_answers(self.address, "echo", answers, first)
        rows, total = 0, 0
        for answer in answers:
            rows += answer.num_rows
            total += int(answer.column(0).to_numpy().sum())
        yield pa.record_batch({"rows": [rows], "total": [total]}, schema=GENERATED)
