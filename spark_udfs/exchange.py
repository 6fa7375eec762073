"""A function for ``mapInArrow``: batches go to a service, answers come back.

::

    score = exchange("aqueduct://scores.example:4433", "score")
    frame.mapInArrow(score, "id long, points double")

What ``exchange`` returns is a plain function from iterator to iterator; it runs without Spark, on
a list of batches, just as well. It holds no connection: it is pickled to the executors, and each
Python worker process connects once (``pool.py``).
"""

from __future__ import annotations

import contextlib
import itertools
import uuid
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass, field, fields

import pyarrow as pa

from aqueduct.address import Address
from aqueduct.arrow.compression import codec_of
from aqueduct.arrow.schema import check
from aqueduct.carriers.tls import ClientTls
from aqueduct.config import DEFAULT, Config
from aqueduct.errors import AqueductError, ConfigError
from spark_udfs.engine import Calling, run
from spark_udfs.numbers import Numbers, Tally, Total
from spark_udfs.place import here, locate
from spark_udfs.schemas import AnySchema, arrow_schema

__all__ = ["Exchange", "exchange"]

MiB = 1 << 20


def exchange(
    address: str,
    handler: str,
    *,
    schema: AnySchema | None = None,
    input_schema: AnySchema | None = None,
    in_flight: int = 8,
    in_flight_bytes: int = 32 * MiB,
    deadline: float | None = None,
    token: str | None = None,
    headers: Mapping[str, str] | None = None,
    connection_headers: Mapping[str, str] | None = None,
    tls: ClientTls | None = None,
    compression: str | None = None,
    config: Config = DEFAULT,
) -> Exchange:
    """A function for ``DataFrame.mapInArrow`` that calls an exchange handler for each partition.

    - ``address``: the service, as seen from the executors, for example ``aqueduct://host:4433``.
    - ``handler``: the name of a handler of kind ``exchange``.
    - ``schema``: what the handler must answer with. Given, it is compared with the handler's
      before any data flows.
    - ``input_schema``: what the partitions contain. Given, batches are compared with it before
      anything is sent, and an empty partition calls the handler too; otherwise an empty partition
      has no schema to send and yields nothing.
    - ``in_flight``, ``in_flight_bytes``: how many batches, and bytes of them, may be sent and not
      yet answered. One batch is always sent.
    - ``deadline``: seconds for the call of one partition; None leaves the deadline on progress.
    - ``token``: goes with each call, and is checked by the service's ``authorize``.
    - ``headers``: user metadata of the call; ``connection_headers``: of the connection.
    - ``tls``: certificates, beyond what the address's options say.
    - ``compression``: ``lz4`` or ``zstd`` for the batches both ways, if the service agrees to it,
      or ``none``; by default what the address says.

    Raises ConfigError at once, on the driver, for arguments that cannot work. The function raises
    the errors of ``aqueduct.errors``; their text names peer, handler, partition, batch and column.
    """
    return Exchange(
        address=address,
        handler=handler,
        schema=None if schema is None else arrow_schema(schema, "schema"),
        input_schema=None if input_schema is None else arrow_schema(input_schema, "input_schema"),
        in_flight=in_flight,
        in_flight_bytes=in_flight_bytes,
        deadline=deadline,
        token=token,
        headers=tuple((headers or {}).items()),
        connection_headers=tuple((connection_headers or {}).items()),
        tls=tls,
        compression=compression,
        config=config,
    )


@dataclass(frozen=True)
class Exchange:
    """What ``exchange`` returns: call it with an iterator of record batches."""

    address: str
    handler: str
    schema: pa.Schema | None = None
    input_schema: pa.Schema | None = None
    in_flight: int = 8
    in_flight_bytes: int = 32 * MiB
    deadline: float | None = None
    token: str | None = field(default=None, repr=False)
    headers: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    connection_headers: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    tls: ClientTls | None = None
    compression: str | None = None
    config: Config = DEFAULT
    run: str = field(default_factory=lambda: uuid.uuid4().hex)
    """Made once, on the driver: with stage and partition it names a unit of work."""
    tally: Tally = field(default_factory=Tally, repr=False, compare=False)
    """What the tasks of this function count; see ``summary``."""

    def __post_init__(self) -> None:
        Address.parse(self.address)
        if not self.handler or not isinstance(self.handler, str):
            raise ConfigError(f"handler is {self.handler!r}; it must be the name of a handler")
        for name in ("in_flight", "in_flight_bytes"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name} is {value!r}; it must be a whole number above zero")
        if self.compression is not None:
            codec_of(self.compression)
        if self.deadline is not None and not self.deadline > 0:
            raise ConfigError(f"deadline is {self.deadline!r}; it must be seconds above zero")
        for name in ("headers", "connection_headers"):
            for key, text in getattr(self, name):
                if not (isinstance(key, str) and isinstance(text, str)):
                    raise ConfigError(f"{name} has {key!r}: {text!r}; both must be text")

    @property
    def __name__(self) -> str:  # Spark shows it in plans
        return f"exchange_{self.handler}"

    @property
    def numbers(self) -> Total:
        """What the tasks counted that ended well so far; to be read on the driver."""
        return self.tally.value

    def summary(self) -> str:
        """``numbers`` in a few lines for people."""
        return f"{self.handler!r} at {self.peer}: {self.tally.summary()}"

    @property
    def peer(self) -> str:
        """The address without its options, for errors."""
        return self.address.partition("?")[0]

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Generator[pa.RecordBatch]:
        """The handler's answers in the order of ``batches``, which is read as there is room.

        Closing the iterator early cancels the call.
        """
        source = iter(batches)
        first = next(source, None)
        if first is not None:
            source = itertools.chain((first,), source)
            schema = first.schema
        elif self.input_schema is not None:
            schema = self.input_schema
        else:
            return  # an empty partition, of which not even the columns are known
        del first
        place, numbers = here(), Numbers()
        try:
            if self.input_schema is not None:
                check(self.input_schema, schema, where="the batches of the partition")
            answers = run(self.calling, source, schema=schema, place=place, numbers=numbers)
            with contextlib.closing(answers):
                for answer in answers:
                    assert answer.batch is not None  # a failed batch ends the call
                    yield answer.batch
        except AqueductError as error:
            raise locate(
                error, peer=self.peer, handler=self.handler, place=place, numbers=numbers
            ) from error.__cause__  # what is raised is a copy of ``error`` itself
        finally:
            self.tally.add(numbers)

    @property
    def calling(self) -> Calling:
        """What the engine is to know."""
        own = {field.name for field in fields(self)}
        shared = [field.name for field in fields(Calling) if field.name in own]
        return Calling(addresses=(self.address,), **{name: getattr(self, name) for name in shared})
