"""The calls behind one partition: batches go out, answers come with their number."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import pyarrow as pa

from aqueduct.arrow.call import Partition
from aqueduct.carriers.tls import ClientTls
from aqueduct.config import DEFAULT, Config
from aqueduct.errors import AqueductError, CallError, ConfigError
from spark_udfs.numbers import Numbers
from spark_udfs.place import Place
from spark_udfs.pool import Peer, process_pool

__all__ = ["Answer", "Calling", "OnError", "run"]


OnError: TypeAlias = Literal["fail", "report"]
"""What becomes of a batch that its handler fails on: it ends the work, or it is an ``Answer``."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What the service made of one batch: a batch, or an error."""

    number: int
    """Of the input batch that it belongs to, from 0."""
    batch: pa.RecordBatch | None
    error: CallError | None = None
    """Why there is no batch: HandlerFailed, for example. Only with ``on_error="report"``."""


@dataclass(frozen=True)
class Calling:
    """Whom to call, and how. ``spark_udfs.exchange`` has the meaning of each."""

    addresses: tuple[str, ...]
    """Batches for a function of one batch are spread over them; other handlers get one each."""
    handler: str
    schema: pa.Schema | None
    in_flight: int
    in_flight_bytes: int
    ordered: bool = True
    """False: the answers of a function of one batch come as they are made."""
    deadline: float | None = None
    """Seconds for the whole partition, with all that is done again."""
    batch_deadline: float | None = None
    """Seconds from the sending of a batch to its answer."""
    retries: int = 0
    """Calls made again in a row, without an answer between them, before an error is raised."""
    backoff: float = 0.1
    """Seconds of the pause before the first of them; doubles from one to the next, with jitter."""
    backoff_limit: float = 30.0
    """Seconds of the longest pause."""
    on_error: OnError = "fail"
    token: str | Callable[[], str] | None = field(default=None, repr=False)
    """A callable is asked for each call."""
    headers: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    connection_headers: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    tls: ClientTls | None = None
    compression: str | None = None
    config: Config = DEFAULT
    run: str = ""
    """The same for every attempt of the job."""

    def fresh_token(self) -> str | None:
        """What the next call shows. Raises ConfigError for what a callable raises."""
        if not callable(self.token):
            return self.token
        try:
            token = self.token()
        except Exception as error:
            raise ConfigError(
                f"token, which is asked for each call, raised {type(error).__name__}: {error}"
            ) from error
        if not isinstance(token, str):
            raise ConfigError(
                f"token, which is asked for each call, gave a {type(token).__name__}, not text"
            )
        return token


def run(
    calling: Calling,
    batches: Iterable[pa.RecordBatch],
    *,
    schema: pa.Schema,
    place: Place,
    numbers: Numbers,
    opened: Callable[[pa.Schema], None] | None = None,
    held: Callable[[], int] | None = None,
) -> Generator[Answer]:
    """Sends ``batches``, all of ``schema``, as there is room, and gives the answers.

    - ``opened`` is told the schema of the answers once, before any data flows; what it raises
      ends the call.
    - ``held`` says how many bytes the caller keeps of batches without an answer: they count
      against ``in_flight_bytes`` as what is sent does.

    Closing the generator cancels what is under way. Raises the errors of ``aqueduct.errors``.
    """
    _not_yet(calling)
    (address,) = calling.addresses
    peer = Peer(address, calling.tls, calling.connection_headers, calling.config)
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
            token=calling.fresh_token(),
            compression=calling.compression,
            headers=dict(calling.headers),
            run=place.run_key(calling.run),
            attempt=place.attempt_key,
            partition=None if place.partition is None else Partition(place.partition),
        )
        lease.on_end(stream.close)
        with stream:
            found = stream.opened()  # the service has compared the schemas; only now data flows
            if opened is not None and found is not None:
                opened(found)
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


def _not_yet(calling: Calling) -> None:
    plain = {
        "addresses": len(calling.addresses) == 1,
        "ordered": calling.ordered,
        "batch_deadline": calling.batch_deadline is None,
        "retries": not calling.retries,
        "on_error": calling.on_error == "fail",
    }
    for name, usual in plain.items():
        if not usual:
            raise ConfigError(f"{name}={getattr(calling, name)!r} cannot be done yet")


def _counted(batches: Iterable[pa.RecordBatch], numbers: Numbers) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        numbers.batches_sent += 1
        numbers.rows_sent += batch.num_rows
        yield batch
