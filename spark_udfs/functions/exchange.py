"""A function for ``mapInArrow``: batches go to a service, answers come back.

::

    score = exchange("aqueduct://scores.example:4433", "score")
    frame.transform(score.apply)

What ``exchange`` returns is a plain function from iterator to iterator; it runs without Spark, on
a list of batches, just as well. It holds no connection: it is pickled to the executors, and each
Python worker process connects once (``pool.py``).
"""

from __future__ import annotations

import contextlib
import itertools
import uuid
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal

import pyarrow as pa

from aqueduct.arguments import ARGUMENTS
from aqueduct.arrow.schema import check
from aqueduct.carriers.certificates import ClientTls
from aqueduct.config import DEFAULT, Config
from aqueduct.errors import AqueductError, ConfigError, WrongType
from spark_udfs.calls.partition import BatchAnswer, CallSpec, run
from spark_udfs.calls.telemetry import Setup, Trace, working
from spark_udfs.functions.casts import Cast
from spark_udfs.functions.columns import PLAIN, ColumnShape, Mode, Shaper
from spark_udfs.functions.discovery import declared_input, output_schema, refusal
from spark_udfs.functions.fitting import Fitting
from spark_udfs.options import (
    OPTIONS,
    TLS,
    argument,
    convert,
    defaults,
    layered,
    missing_address,
    tls_of,
    unknown,
)
from spark_udfs.schemas import AnySchema, arrow_schema
from spark_udfs.spark_types import (
    check_names,
    nullable_schema,
    retold,
    taken_schema,
    told_schema,
)
from spark_udfs.worker.awake import idle_limit, kept_awake, without_rows
from spark_udfs.worker.metrics import Tally, TaskMetrics, Total
from spark_udfs.worker.pickling import PickledFunction, check_picklable
from spark_udfs.worker.summary import TaskSummary
from spark_udfs.worker.task import TaskContext, here, locate

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import StructType

__all__ = ["Exchange", "exchange"]


def exchange(
    address: str | Sequence[str] | None = None,
    handler: str | None = None,
    *,
    schema: AnySchema | None = None,
    input_schema: AnySchema | None = None,
    in_flight: int | str | None = None,
    in_flight_bytes: int | str | None = None,
    ordered: bool | None = None,
    deadline: float | str | None = None,
    batch_deadline: float | str | None = None,
    retries: int | None = None,
    backoff: float | str | None = None,
    backoff_limit: float | str | None = None,
    columns: Sequence[str] | None = None,
    columns_mode: Mode | None = None,
    check_rows: bool | None = None,
    on_error: Literal["fail", "null", "skip"] | None = None,
    error_column: str | None = None,
    merge_rows: int | None = None,
    merge_bytes: int | str | None = None,
    cast: Cast | None = None,
    token: str | Callable[[], str] | None = None,
    token_file: str | None = None,
    headers: Mapping[str, str] | None = None,
    connection_headers: Mapping[str, str] | None = None,
    tls: ClientTls | None = None,
    compression: str | None = None,
    config: Config = DEFAULT,
    telemetry: Setup | None = None,
    **others: Any,
) -> Exchange:
    """A function for ``DataFrame.mapInArrow`` that calls an exchange handler for each partition.

    What is not given (None) is taken from the setting ``spark.aqueduct.NAME`` of the active Spark
    session, and else from the default in brackets. Sizes may be text (``"32m"``), and so may
    seconds (``"30s"``). docs/cookbook/exchange.md has the table of all options.

    - ``address``: the service, as seen from the executors, for example ``aqueduct://host:4433``;
      several as a list or as text with commas. Batches for a function of one batch are spread
      over them; other handlers get one address each.
    - ``handler``: the name of a handler of kind ``exchange``.
    - ``schema``: what the handler must answer with. Given, it is compared with the handler's
      before any data flows.
    - ``input_schema``: what is sent. Given, batches are compared with it before anything is sent,
      and an empty partition calls the handler too; otherwise an empty partition has no schema to
      send and yields nothing.
    - ``in_flight`` (8) and ``in_flight_bytes`` (32m): how many batches, and bytes of them, may be
      sent and not yet answered. One batch is always sent. Unless you say how many, there may be
      up to 64 small ones, while they are less than 2 MiB, where one call takes a partition: with
      one address, and neither retries nor other care for single batches.
    - ``ordered`` (true): false gives the answers of a function of one batch as they are made.
    - ``deadline``: seconds for the work of one partition; ``batch_deadline``: from the sending of
      a batch to its answer; none leaves the deadline on progress.
    - ``retries`` (0), ``backoff`` (0.1 s): for handlers that are declared idempotent: how often a
      broken call is made again, and the first pause before that, which doubles, up to
      ``backoff_limit`` (30 s).
    - ``columns``: only these columns travel, and the answer is joined to the rows, which stay.
      ``columns_mode``: ``append`` puts the answer's columns behind the row's, ``replace`` puts
      them into the places of those of the same name, and the others behind.
    - ``check_rows`` (false; with ``columns`` always): each batch must be answered with as many
      rows as it has.
    - ``on_error`` (``fail``): what becomes of the rows of a batch that a function of one batch
      failed on. ``null``: they stay, with nulls for the answer; ``skip``: they are left out.
    - ``error_column``: with ``null``, the name of a text column for the reason, null elsewhere.
    - ``merge_rows``, ``merge_bytes``: batches are put together up to this size before they are
      sent. One waits until the next has come or the input has ended.
    - ``cast`` (false): what is sent is cast to what the handler declares (or to ``input_schema``),
      and what it answers to ``schema``, by casts that change no value (docs/cookbook/casts.md);
      ``round``: values may become the nearest ones.
    - ``token``: goes with each call, and is checked by the service's ``authorize``. A function is
      called in the executor, before each call. ``token_file``: a path there, which is read
      before each call instead.
    - ``headers``: user metadata of the call; ``connection_headers``: of the connection.
    - ``tls``: certificates, beyond what the address's options say; or ``ca``, ``certificate``,
      ``key``, ``key_password``, ``fingerprint``, ``server_name`` and ``verify`` one by one. PEM
      bytes, or text that is PEM, travel with the function; a path is read on each executor.
    - ``compression``: ``lz4`` or ``zstd`` for the batches both ways, if the service agrees to it,
      or ``none``; by default what the address says.
    - ``telemetry``: a function that sets OpenTelemetry up, called once in each Python worker; see
      docs/cookbook/numbers.md.

    Raises ConfigError at once, on the driver, for arguments that cannot work. The function raises
    the errors of ``aqueduct.errors``; their text names peer, handler, partition, batch and column.
    """
    for name in others:
        if name not in TLS:
            raise unknown(
                name,
                [
                    *OPTIONS,
                    "headers",
                    "connection_headers",
                    "tls",
                    "config",
                    "telemetry",
                    "schema",
                    "input_schema",
                ],
            )
    own = {
        "headers": headers,
        "connection_headers": connection_headers,
        "tls": tls,
        "telemetry": telemetry,
    }
    for name, value in own.items():
        if value is not None:
            argument(name, value)
    argument("config", config)
    given = convert(
        {
            "address": address,
            "handler": handler,
            "in_flight": in_flight,
            "in_flight_bytes": in_flight_bytes,
            "ordered": ordered,
            "deadline": deadline,
            "batch_deadline": batch_deadline,
            "retries": retries,
            "backoff": backoff,
            "backoff_limit": backoff_limit,
            "columns": columns,
            "columns_mode": columns_mode,
            "check_rows": check_rows,
            "on_error": on_error,
            "error_column": error_column,
            "merge_rows": merge_rows,
            "merge_bytes": merge_bytes,
            "cast": cast,
            "token": token,
            "token_file": token_file,
            "compression": compression,
            **others,
        },
        OPTIONS,
    )
    if tls is not None and any(name in given for name in TLS):
        names = ", ".join(name for name in TLS if name in given)
        raise ConfigError(f"tls and {names} are both given; put all of it into one ClientTls")
    values = defaults()
    if tls is not None or any(name in given for name in TLS):
        tls_of(values)  # certificates are given as a whole, here or in settings
    values = layered(values, given)
    if "address" not in values:
        raise missing_address("exchange(ADDRESS, HANDLER)")
    if "handler" not in values:
        raise ConfigError("no handler: give its name, exchange(ADDRESS, HANDLER)")
    if columns_mode is not None and columns is None:
        raise ConfigError(f"columns_mode={columns_mode!r} needs columns=[...]")
    answer = None if schema is None else arrow_schema(schema, "schema")
    casting = values.get("cast", False)
    shape = ColumnShape(
        columns=values.get("columns", ()),
        mode=values.get("columns_mode", "append"),
        on_error=values.get("on_error", "fail"),
        error_column=values.get("error_column", ""),
        check_rows=values.get("check_rows", False),
        merge_rows=values.get("merge_rows"),
        merge_bytes=values.get("merge_bytes"),
        cast=casting,
        schema=answer if casting else None,
    )
    shape.check(answer)
    calling = CallSpec(
        addresses=values["address"],
        handler=values["handler"],
        schema=None if casting else answer,
        in_flight=values.get("in_flight"),
        in_flight_bytes=values.get("in_flight_bytes"),
        ordered=values.get("ordered", True),
        deadline=values.get("deadline"),
        batch_deadline=values.get("batch_deadline"),
        on_error="fail" if shape.on_error == "fail" else "report",
        token=values.get("token"),
        headers=_headers("headers", headers, values),
        connection_headers=_headers("connection_headers", connection_headers, values),
        tls=tls if tls is not None else tls_of(values),
        compression=values.get("compression"),
        config=config,
        write_key=uuid.uuid4().hex,
        **{
            name: values[name] for name in ("retries", "backoff", "backoff_limit") if name in values
        },
    )
    calling.check_reactive()
    check_picklable(
        {
            **{entry.name: getattr(calling, entry.name) for entry in fields(calling)},
            "telemetry": telemetry,
        },
    )
    return Exchange(
        calling=calling,
        shape=shape,
        schema=answer,
        input_schema=None if input_schema is None else arrow_schema(input_schema, "input_schema"),
        trace=Trace(telemetry),
    )


@dataclass(frozen=True, repr=False)
class Exchange(PickledFunction):
    """What ``exchange`` returns: call it with an iterator of record batches."""

    calling: CallSpec
    """Whom to call, and how."""
    shape: ColumnShape = PLAIN
    """What is done to the batches beside."""
    schema: pa.Schema | None = None
    """Of the answers, if it is declared."""
    input_schema: pa.Schema | None = None
    """Of what is sent, if it is declared."""
    tally: Tally = field(default_factory=Tally, compare=False)
    """What the tasks of this function count; see ``summary``."""
    trace: Trace = field(default_factory=Trace, compare=False)
    """The driver's span, and how OpenTelemetry is set up in workers."""
    rows: pa.Schema | None = None
    """The schema of the rows of ``apply``, with metadata for types that Arrow lacks."""
    declared: pa.Schema | None = None
    """The schema of answers that ``apply`` gave to Spark; None: ``apply`` was not called."""
    exact: bool = False
    """Whether answers must have exactly Spark's types, as all functions but ``mapInArrow`` need."""
    large: bool = False
    """Whether text and bytes then have offsets of 64 bits, by the session's setting."""

    @property
    def __name__(self) -> str:  # Spark shows it in plans
        return f"exchange_{self.handler}"

    def __repr__(self) -> str:  # without what is secret
        return f"<exchange with {self.handler!r} at {self.peer}>"

    @property
    def handler(self) -> str:
        """The name of the handler."""
        return self.calling.handler

    @property
    def write_key(self) -> str:
        """Made once, on the driver: with stage and partition it names a unit of work."""
        return self.calling.write_key

    @property
    def numbers(self) -> Total:
        """What the tasks counted that ended well so far; to be read on the driver."""
        return self.tally.value

    def summary(self) -> TaskSummary:
        """``numbers`` in a few lines for people; a notebook shows a table."""
        return self.tally.summary().titled(f"{self.handler!r} at {self.peer}")

    @property
    def peer(self) -> str:
        """The addresses without their options, for errors."""
        return self.calling.places

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Generator[pa.RecordBatch]:
        """The handler's answers in the order of ``batches``, which is read as there is room.

        In a task of Spark they have the types that Spark takes (docs/cookbook/types.md), and a
        value that would be lost raises SchemaMismatch. Closing the iterator early cancels the call.

        Without Spark, a list of batches, a RecordBatch and a Table do as well. Where Spark ends
        idle workers, batches without rows come while the service is slow (``worker/awake.py``).
        """
        limit = idle_limit()
        if limit is None:
            return self.fitted(batches)
        return self._awake(_source(batches), limit)

    def fitted(self, batches: Iterable[pa.RecordBatch]) -> Generator[pa.RecordBatch]:
        """The answers with the types that Spark takes, and nothing between them."""
        return self._answers(_source(batches), fitted=True)

    def answers(self, batches: Iterable[pa.RecordBatch]) -> Generator[pa.RecordBatch]:
        """The answers with the handler's types, for programs other than Spark."""
        return self._answers(_source(batches), fitted=False)

    def _awake(self, source: Iterator[pa.RecordBatch], limit: float) -> Generator[pa.RecordBatch]:
        """The fitted answers, and batches without rows where they are slow."""
        heard: list[pa.Schema] = []
        sent: pa.Schema | None = None  # of the first batch that Spark got: all must have it

        def nothing() -> list[pa.RecordBatch]:
            nonlocal sent
            if sent is None:
                sent = self.fitting(heard[0]).schema if heard else self.declared
            return [] if sent is None else without_rows(sent)

        answers = self._answers(source, fitted=True, heard=heard.append)
        with contextlib.closing(kept_awake(answers, limit, nothing)) as awake:
            for answer in awake:
                if sent is None:
                    sent = answer.schema
                yield answer if answer.schema.equals(sent) else answer.cast(sent)

    def _answers(
        self,
        source: Iterator[pa.RecordBatch],
        *,
        fitted: bool,
        heard: Callable[[pa.Schema], None] | None = None,
    ) -> Generator[pa.RecordBatch]:
        """``heard`` is told what will be answered, before ``fitted`` is done to it."""
        first = next(source, None)
        if first is not None:
            if not isinstance(first, pa.RecordBatch):
                raise _no_batch(first)
            source = itertools.chain((first,), source)
            schema = first.schema
        elif self.input_schema is not None and not self.shape.columns:
            schema = self.input_schema
        else:
            return  # an empty partition, of which not even the columns are known
        del first
        source, schema = retold(source, schema, self.rows)
        place, numbers = here(), TaskMetrics()
        try:
            with working(
                self.calling, tally=self.tally, trace=self.trace, place=place, numbers=numbers
            ) as calling:
                answers = self._work(calling, source, schema, place, numbers, heard)
                fits = fitted and self.fits(place)
                yield from self._fitted(answers) if fits else answers
        except AqueductError as error:
            raise locate(
                error, peer=self.peer, handler=self.handler, place=place, numbers=numbers
            ) from error.__cause__  # what is raised is a copy of ``error`` itself

    def _work(
        self,
        calling: CallSpec,
        source: Iterator[pa.RecordBatch],
        schema: pa.Schema,
        place: TaskContext,
        numbers: TaskMetrics,
        heard: Callable[[pa.Schema], None] | None,
    ) -> Generator[pa.RecordBatch]:
        if not self.shape.plain:
            yield from self._shaped(calling, source, schema, place, numbers, heard)
            return
        if self.input_schema is not None:
            check(self.input_schema, schema, where="the batches of the partition")

        def opened(answered: pa.Schema, capabilities: frozenset[str]) -> None:
            if heard is not None:
                heard(answered)

        answers = run(calling, source, schema=schema, place=place, numbers=numbers, opened=opened)
        try:
            for answer in answers:
                assert answer.batch is not None  # a failed batch ends the call
                yield answer.batch
        finally:
            answers.close()

    def _shaped(
        self,
        calling: CallSpec,
        source: Iterator[pa.RecordBatch],
        schema: pa.Schema,
        place: TaskContext,
        numbers: TaskMetrics,
        heard: Callable[[pa.Schema], None] | None,
    ) -> Generator[pa.RecordBatch]:
        """The same with all that ``shape`` asks for."""
        limit = calling.config.calls.batch_limit
        shaper = Shaper(self.shape, schema, handler=self.handler, limit=limit)
        wanted = None
        if self.shape.cast:
            wanted = self.input_schema or declared_input(self.calling, task=place.task)
        elif self.input_schema is not None:
            check(self.input_schema, shaper.sent, where="what is sent of the partition")

        def opened(answered: pa.Schema, capabilities: frozenset[str]) -> None:
            shaper.opened(answered, capabilities)
            if heard is not None:
                heard(shaper.output)

        def call(batches: Iterator[pa.RecordBatch], schema: pa.Schema) -> Generator[BatchAnswer]:
            return run(
                calling,
                batches,
                schema=schema,
                place=place,
                numbers=numbers,
                opened=opened,
                held=shaper.held,
            )

        yield from shaper.run(source, call, wanted=wanted)

    def _fitted(self, answers: Generator[pa.RecordBatch]) -> Generator[pa.RecordBatch]:
        """``answers``, converted to the types that Spark takes."""
        got: pa.Schema | None = None
        fitting: Fitting | None = None
        with contextlib.closing(answers):
            for number, answer in enumerate(answers):
                if fitting is None or not answer.schema.equals(got):
                    got = answer.schema
                    fitting = self.fitting(got)
                yield answer if fitting.nothing else fitting.one(answer, number)

    def fits(self, place: TaskContext) -> bool:
        """Whether answers go to Spark, so that they need its types."""
        return place.task is not None or self.declared is not None

    def fitting(self, got: pa.Schema) -> Fitting:
        """Converts answers of schema ``got`` to the types that Spark takes, or ``apply`` declared.

        Raises ConfigError for a type that Spark lacks and for two columns of one name, and
        SchemaMismatch for columns other than those that ``apply`` declared.
        """
        where = f"the answer of {self.handler!r}"
        check_names(got, where)
        wanted = taken_schema(got, refusal(where), loose=not self.exact, large=self.large)
        told = self.schema if self.declared is None else self.declared
        if self.declared is not None:
            # Spark takes columns by position and ignores their names.
            mine, theirs = (taken_schema(each, refusal(where)) for each in (self.declared, got))
            differs = f"{where} differs from what Spark was told by apply()"
            check(nullable_schema(mine), theirs, where=differs)
        wanted = wanted if told is None else told_schema(wanted, told)
        return Fitting(wanted, got, where=where, rounding=self.shape.rounding)

    def output_schema(self, rows: AnySchema | DataFrame) -> StructType:
        """What comes of rows of this schema, to be declared to ``mapInArrow``.

        Asks the service, from here, unless ``schema`` was given: so it also shows on the driver
        what would not fit. ``rows``: a Spark or Arrow schema, DDL, or the data frame itself.
        Raises SchemaMismatch, UnknownHandler, ConnectFailed, ConfigError.
        """
        return output_schema(
            self.calling, self.shape, rows, answer=self.schema, input_schema=self.input_schema
        )

    def apply(self, frame: DataFrame) -> DataFrame:
        """``frame.mapInArrow`` with this function and its ``output_schema``.

        Each task compares its answers with that schema, as Spark takes columns by position and
        ignores their names. ``frame.transform(score.apply)`` does the same.
        """
        schema = self.output_schema(frame)
        return frame.mapInArrow(self.told(frame, schema), schema)

    def told(self, frame: DataFrame, schema: AnySchema) -> Exchange:
        """This function for ``frame``, whose answers are declared to Spark as ``schema``."""
        return replace(
            self,
            rows=arrow_schema(frame.schema, "rows", calendar=True),
            declared=arrow_schema(schema, "schema"),
        )


def _source(batches: Any) -> Iterator[pa.RecordBatch]:
    """Batches in any form that calls take, one after another. Raises ConfigError."""
    ARGUMENTS["batches"].value(batches, "exchange: what is exchanged")
    if isinstance(batches, pa.RecordBatch):
        return iter((batches,))
    if isinstance(batches, pa.Table):
        return iter(batches.to_batches())
    if not isinstance(batches, Iterable):
        raise WrongType("exchange: an asynchronous iterable came; aqueduct.Client takes those")
    return iter(batches)


def _no_batch(given: Any) -> WrongType:
    kind = type(given)
    if kind.__module__.startswith("pandas."):
        advice = "mapInPandas and pandas functions go with exchange_pandas"
    elif isinstance(given, tuple | pa.Array):
        advice = "functions of columns go with exchange_column"
    else:
        advice = "mapInArrow gives batches, and so does a list of them"
    return WrongType(
        f"exchange: a pyarrow.RecordBatch is wanted, got {kind.__qualname__}; {advice}"
    )


def _headers(
    name: str, given: Mapping[str, str] | None, values: dict[str, Any]
) -> tuple[tuple[str, str], ...]:
    """Those of the settings, and over them those given. Raises ConfigError."""
    joined = {**values.get(name, {}), **(given or {})}
    for key, text in joined.items():
        if not (isinstance(key, str) and isinstance(text, str)):
            raise ConfigError(f"{name} has {key!r}: {text!r}; both must be text")
    return tuple(joined.items())
