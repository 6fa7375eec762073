"""``spark.read.format("aqueduct")``: planned on the driver, read split by split in the tasks.

What Spark 4.3 offers a Python source: filters that are compared with literals, if the session has
``spark.sql.python.filterPushdown.enabled``, and no columns: it asks for all of the schema. So the
columns that are wanted are given by the option ``columns``, or by ``.schema(...)``.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition

from aqueduct.arrow.schema import difference, shorten
from aqueduct.client.retry import may_pass
from aqueduct.errors import AqueductError, BadCall, ConfigError, SchemaMismatch
from aqueduct.escaping import logger_of
from aqueduct.rpc.filters import filters_to_json
from aqueduct.rpc.request import Partition
from aqueduct.rpc.table_scan import READ, READING, ScanPlan, ScanRead, ScanRequest
from spark_udfs.calls.pool import process_pool
from spark_udfs.calls.spec import CallSpec
from spark_udfs.calls.telemetry import working
from spark_udfs.datasource.options import Settings
from spark_udfs.datasource.query import ask, patience, rest, tries
from spark_udfs.datasource.types import arrow_of, check_declared, spark_schema
from spark_udfs.functions.casts import Casting, cast_column
from spark_udfs.functions.fitting import Fitting
from spark_udfs.worker.awake import idle_limit, kept_awake, without_rows
from spark_udfs.worker.metrics import Tally, TaskMetrics
from spark_udfs.worker.task import TaskContext, here, locate

if TYPE_CHECKING:
    from pyspark.sql.datasource import Filter  # of PySpark 4.1
    from pyspark.sql.types import StructType

    from aqueduct.rpc.filters import Filter as Condition

__all__ = [
    "Split",
    "TableReader",
    "Wanted",
    "check_same",
    "given_schema",
    "read_split",
    "schema_of",
    "splits_of",
    "wanted_columns",
    "where",
]

log = logger_of(__name__)


def schema_of(settings: Settings) -> StructType:
    """What Spark calls the columns of the table, or those of the option ``columns``."""
    answer = ask(settings, ScanRequest("schema", columns=settings.more.get("columns")))
    return spark_schema(_schema(settings, answer), where(settings))


@dataclass(frozen=True)
class Split(InputPartition):
    """One task's share."""

    value: Any
    """What the table said of it."""
    number: int
    of: int
    write_key: str
    """The same for all splits of one plan, and for every attempt at them."""

    def __str__(self) -> str:
        return f"split {self.number} of {self.of}, {shorten(json.dumps(self.value))}"


@dataclass(frozen=True)
class Wanted:
    """All that a task needs beside its split."""

    settings: Settings
    given: pa.Schema
    """What the table has promised to give."""
    made: pa.Schema
    """What Spark is to get."""
    filters: tuple[Condition, ...] = ()


class TableReader(DataSourceReader):
    """Reads a table. Made on the driver for each query; its ``read`` runs in tasks."""

    def __init__(self, settings: Settings, schema: StructType) -> None:
        self.settings = settings
        self.columns = wanted_columns(settings, schema)
        # Spark pickles the reader for its tasks before it asks for partitions, so that what tasks
        # are to know must be known by then.
        self.given = given_schema(
            settings, ask(settings, ScanRequest("schema", columns=self.columns), keep=True), schema
        )
        self.made = arrow_of(schema)
        self.alike = not settings.cast or _alike(self.given, self.made)
        """Whether filters mean the same for the table: not where text is read as numbers."""
        self.filters: tuple[Condition, ...] = ()
        self.answer: ScanPlan | None = None

    @property
    def pushFilters(self) -> _Pushing:  # noqa: N802 - Spark's name
        """See ``_Pushing``."""
        return _Pushing(self)

    def push(self, filters: list[Filter]) -> Iterable[Filter]:
        """Offers ``filters`` to the table, and gives back those that Spark has to apply."""
        from spark_udfs.datasource.pushdown import filter_of  # PySpark 4.1 is needed from here on

        if not self.alike:
            self._plan(())
            return filters
        offered: list[tuple[Filter, Condition]] = []
        left: list[Filter] = []
        room = self.settings.config.tables.filter_bytes
        for each in filters:
            condition = filter_of(each)
            size = room + 1
            if condition is not None:
                # What travels with a split is JSON in JSON, whose quotes take two bytes.
                size = len(json.dumps(json.dumps(filters_to_json([condition]))))
            if condition is None or size > room:
                left.append(each)
                continue
            room -= size
            offered.append((each, condition))
        answer = self._plan(tuple(condition for _, condition in offered))
        taken = answer.taken + ("no",) * (len(offered) - len(answer.taken))
        pairs = list(zip(offered, taken, strict=False))
        self.filters = tuple(condition for (_, condition), word in pairs if word != "no")
        return [*left, *(each for (each, _), word in pairs if word != "yes")]

    def partitions(self) -> list[InputPartition]:
        """The splits, as the table gives them."""
        answer = self.answer or self._plan(())
        return splits_of(answer)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The batches of a split."""
        if not isinstance(partition, Split):
            return iter(())  # Spark makes one partition where there are no splits
        return read_split(Wanted(self.settings, self.given, self.made, self.filters), partition)

    def _plan(self, filters: tuple[Condition, ...]) -> ScanPlan:
        question = ScanRequest(
            "plan",
            columns=self.columns,
            filters=filters,
            partitions=self.settings.more.get("partitions"),
        )
        self.answer = answer = ask(self.settings, question)
        check_same(self.settings, answer, self.given)
        return answer


class _Pushing:
    """A reader's ``pushFilters``.

    Spark refuses to plan, while its setting for filters is off, if a reader has a ``pushFilters``
    other than the base class's, and tells by ``__func__``. Those who want no filters pushed should
    be able to read all the same.
    """

    __func__ = staticmethod(getattr(DataSourceReader, "pushFilters", lambda: None))  # 4.0 has none

    def __init__(self, reader: TableReader) -> None:
        self.reader = reader

    def __call__(self, filters: list[Filter]) -> Iterable[Filter]:
        return self.reader.push(filters)


def wanted_columns(settings: Settings, schema: StructType) -> tuple[str, ...]:
    """The columns to ask for. Raises ConfigError if option and schema say different things."""
    names = tuple(schema.names)
    columns = settings.more.get("columns")
    if columns is not None and columns != names:
        raise ConfigError(
            f"{where(settings)}: the option columns is {', '.join(columns)}, and .schema(...) "
            f"has {', '.join(names)}: give one of them"
        )
    return names


def given_schema(settings: Settings, answer: ScanPlan, declared: StructType) -> pa.Schema:
    """What the table gives, which can be read as ``declared``, or SchemaMismatch is raised."""
    found, wanted = _schema(settings, answer), arrow_of(declared)
    if settings.cast and wanted.names == found.names:
        Casting(wanted, found, where=where(settings))
    else:
        check_declared(declared, found, where(settings))
    return found


def check_same(settings: Settings, answer: ScanPlan, given: pa.Schema) -> None:
    """Raises SchemaMismatch if the table gives something else by now."""
    found = difference(given, _schema(settings, answer))
    if found is not None:
        raise found.mismatch(
            f"{where(settings)} has changed since it was looked at: {found.what}; load it again"
        )


def splits_of(answer: ScanPlan) -> list[InputPartition]:
    """Each split with its number."""
    count, write_key = len(answer.splits), uuid.uuid4().hex
    return [Split(value, number, count, write_key) for number, value in enumerate(answer.splits)]


def read_split(wanted: Wanted, split: Split) -> Iterator[pa.RecordBatch]:
    """The batches of a split, of ``wanted.made``.

    A call that broke before its first batch is made again, at the next address. Closing the
    iterator cancels the call. Raises the errors of ``aqueduct.errors``.
    """
    batches, limit = _read_split(wanted, split), idle_limit()
    if limit is None:
        return batches
    return kept_awake(batches, limit, lambda: without_rows(wanted.made))


def _read_split(wanted: Wanted, split: Split) -> Generator[pa.RecordBatch]:
    place, numbers = here(), TaskMetrics()
    settings = wanted.settings
    own = CallSpec(
        addresses=settings.addresses,
        handler=settings.handler,
        schema=wanted.given,
        headers=settings.headers,
    )
    # A source has no accumulator, as it is made where there is no session: its log tells instead.
    with working(
        own, tally=Tally(), trace=settings.trace, place=place, numbers=numbers, verb="read"
    ) as calling:
        yield from _tried(wanted, split, dict(calling.headers), place, numbers)


def _tried(
    wanted: Wanted, split: Split, headers: dict[str, str], place: TaskContext, numbers: TaskMetrics
) -> Iterator[pa.RecordBatch]:
    settings = wanted.settings
    most, backoff = tries(settings), patience(settings)
    for attempt in range(most):
        peer = settings.peer(split.number + attempt)
        try:
            yield from _read(wanted, split, attempt, headers, place, numbers)
        except AqueductError as error:
            again = may_pass(error) and not numbers.batches_received
            if again and attempt + 1 < most:
                numbers.retries += 1
                log.info("%s of %r is read again: %s", split, settings.handler, error)
                rest(backoff)
                continue
            located = locate(
                error,
                peer=peer.bare,
                handler=settings.handler,
                place=place,
                numbers=numbers,
            )
            located.args = (f"{split}: {located}", *located.args[1:])
            raise located from error.__cause__
        return


def _read(
    wanted: Wanted,
    split: Split,
    attempt: int,
    headers: dict[str, str],
    place: TaskContext,
    numbers: TaskMetrics,
) -> Iterator[pa.RecordBatch]:
    settings = wanted.settings
    lease = process_pool().lease(settings.peer(split.number + attempt), task=place.task)
    numbers.reconnects += lease.reconnected
    failed = False
    reading = ScanRead(split.value, wanted.filters).encode()
    try:
        stream = lease.client.source(
            READ + settings.handler,
            output_schema=wanted.given,
            deadline=settings.deadline,
            headers={**headers, READING: reading},
            write_key=f"{split.write_key}/{split.number}",
            attempt=place.attempt_key,
            token=settings.fresh_token(),
            partition=Partition(split.number, split.of),
            compression=settings.compression,
        )
        lease.on_end(stream.close)
        try:
            with stream:
                fitting: Fitting | None = None
                for number, batch in enumerate(_as_declared(wanted, stream)):
                    if fitting is None:  # all batches of a stream have one schema
                        rounding = settings.cast == "round"
                        fitting = Fitting(wanted.made, batch.schema, rounding=rounding)
                    made = fitting.one(batch, number)
                    numbers.batches_received += 1
                    numbers.rows_received += batch.num_rows
                    yield made
        finally:
            numbers.bytes_received += stream.bytes_received
            numbers.waiting_seconds += stream.waited
    except AqueductError:
        failed = True
        raise
    finally:
        numbers.resumes += lease.take_resumes()
        # A Python worker ends with its failed task: let the service hear of it.
        lease.release(close=failed and place.task is not None)


def _as_declared(wanted: Wanted, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """``batches`` of a table, cast to the declared types if the option ``cast`` says so."""
    settings = wanted.settings
    for number, batch in enumerate(batches):
        if not settings.cast or not batch.num_columns:
            yield batch
            continue
        columns = [
            cast_column(
                column,
                field,
                where=f"table {settings.handler!r}",
                rounding=settings.cast == "round",
                batch=f"batch {number}",
                limit=settings.config.calls.batch_limit,
            )
            for column, field in zip(batch.columns, wanted.made, strict=True)
        ]
        yield pa.RecordBatch.from_arrays(columns, schema=wanted.made)


def where(settings: Settings) -> str:
    """The table and its address, for errors."""
    return f"table {settings.handler!r} at {settings.peer().address.partition('?')[0]}"


def _alike(given: pa.Schema, made: pa.Schema) -> bool:
    """Whether a table's columns are read with their own types."""
    try:
        return difference(made, arrow_of(spark_schema(given, ""))) is None
    except SchemaMismatch:
        return False


def _schema(settings: Settings, answer: ScanPlan) -> pa.Schema:
    if answer.schema is None:
        raise BadCall(f"{where(settings)} was asked for its schema and gave none")
    return answer.schema
