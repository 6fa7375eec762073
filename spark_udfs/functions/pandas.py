"""``exchange`` in other shapes: for data frames of pandas, and for single columns.

::

    frame.mapInPandas(exchange_pandas(ADDRESS, "score"), "id long, points double")

    score = exchange_column(ADDRESS, "score", "double", columns=["points"])
    frame.select("id", score("points"))
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from aqueduct.arrow.cast_ways import obstacle
from aqueduct.arrow.casts import Unfit, cast
from aqueduct.arrow.schema import difference, shorten
from aqueduct.errors import ConfigError, SchemaMismatch
from spark_udfs.functions.casts import Casting
from spark_udfs.functions.discovery import refusal, takes_and_answers
from spark_udfs.functions.exchange import Exchange, exchange
from spark_udfs.functions.fitting import Fitting
from spark_udfs.options import argument
from spark_udfs.schemas import arrow_schema, large_types
from spark_udfs.spark_schemas import spark_schema
from spark_udfs.spark_types import precision_of
from spark_udfs.versions import younger
from spark_udfs.worker.awake import idle_limit, kept_awake, local_property, without_rows
from spark_udfs.worker.metrics import Total
from spark_udfs.worker.pickling import PickledFunction
from spark_udfs.worker.summary import TaskSummary
from spark_udfs.worker.task import here

if TYPE_CHECKING:
    from pyspark.sql.types import DataType

__all__ = ["ColumnExchange", "PandasExchange", "exchange_column", "exchange_pandas"]

_PAIRED: Final = "spark.sql.execution.arrow.pythonUDF.columnarInput.enabled"


def exchange_pandas(address: str, handler: str, **options: Any) -> PandasExchange:
    """The same for ``DataFrame.mapInPandas``; the options are those of ``exchange``.

    Frames go through Arrow with ``input_schema``, or without it with the types of the partition's
    first frame. Give it when a column may be all null in the first frame, or holds nested values.
    A value that would be another one then, such as 1e300 as a float, raises SchemaMismatch.
    """
    return PandasExchange(exchange(address, handler, **options))


def exchange_column(
    address: str | Sequence[str],
    handler: str,
    returns: str | DataType | None = None,
    *,
    columns: Sequence[str] | None = None,
    **options: Any,
) -> Any:
    """A user-defined function of columns: some go to an exchange handler, one comes back.

    It is a scalar iterator ``arrow_udf``: one call for each partition, several batches in flight.

    - ``returns``: Spark's type of what comes back, as DDL or a DataType. The handler's answers must
      have one column; its name does not matter, its type must be this one. None asks the service.
    - ``columns``: how the handler knows the columns that the function is given, in their order. By
      default ``value``; where the service is asked, the columns that the handler says it takes.
    - ``options``: those of ``exchange``; with ``cast`` what comes back is cast to ``returns``, too.
      As many rows must come back as were sent, which is checked; ``on_error="skip"`` and what else
      changes the rows has no place here.

    What is returned has ``summary()`` and ``tally`` beside, as what ``exchange`` returns.

    Needs Spark 4.1 or newer and an active session, as ``arrow_udf`` does. Raises ConfigError.
    """
    arrow_udf = younger("pyspark.sql.functions.arrow_udf", "4.1", "exchange_column")
    if columns is not None:
        columns = argument("columns", columns)
    if returns is not None:
        returns = argument("returns", returns, "returned_type")
    for name in ("columns_mode", "error_column", "schema", "input_schema", "ordered"):
        if options.get(name) is not None:
            raise ConfigError(f"{name} has no place here: a column goes, a column comes")
    if options.get("on_error") in ("skip", "null"):
        raise ConfigError(
            f"on_error={options['on_error']!r} has no place here; it is for exchange(columns=[...])"
        )
    # What settings of the session say of these is for others, and would mix up the rows here.
    fixed = {"check_rows": True, "ordered": True, "on_error": "fail"}
    call = exchange(address, handler, **{**options, **fixed})
    if returns is None:
        takes, returns = _asked(call)
        columns = columns or takes
    columns = columns or ("value",)
    wanted = arrow_schema(_struct_of(returns), "returns").field(0)
    digits = precision_of(wanted.metadata or {}) if pa.types.is_time(wanted.type) else None
    if digits not in (None, 6):
        raise ConfigError(
            f"returns is time({digits}), and Spark takes no such column from a function of "
            "columns; return time(6), and cast the column"
        )
    call = replace(call, exact=True, large=large_types())
    column = ColumnExchange(call, tuple(columns), wanted.type, wanted.metadata)

    def of_one(arrays: Iterator[pa.Array]) -> Iterator[pa.Array]:
        return column((array,) for array in arrays)

    def of_several(arrays: Iterator[tuple[pa.Array, ...]]) -> Iterator[pa.Array]:
        return column(arrays)

    function = of_one if len(columns) == 1 else of_several
    function.__name__ = f"exchange_{handler}"  # Spark shows it in plans, and names the column
    made: Any = arrow_udf(function, returns)
    made.tally, made.summary = call.tally, call.summary
    return made


def _asked(call: Exchange) -> tuple[tuple[str, ...], DataType]:
    """What the handler says it takes, () for anything, and the type of its one column."""
    takes, answers = takes_and_answers(call.calling)
    if len(answers) != 1:
        raise ConfigError(
            f"handler {call.handler!r} at {call.peer} answers with the columns "
            f"{shorten(', '.join(answers.names)) or 'none'}; a function of columns needs one. Use "
            "exchange(columns=[...]), or exchange_table"
        )
    where = f"the answer of {call.handler!r}"
    kind: DataType = spark_schema(answers, refusal(where)).fields[0].dataType
    return () if takes is None else tuple(takes.names), kind


@dataclass(frozen=True)
class ColumnExchange(PickledFunction):
    """What runs inside ``exchange_column``: call it with an iterator of tuples of arrays."""

    call: Exchange
    columns: tuple[str, ...]
    returns: pa.DataType
    metadata: Mapping[bytes, bytes] | None = None
    """Metadata for a type of ``returns`` that Arrow lacks, such as the bounds of an interval."""

    def __call__(self, arrays: Iterator[tuple[pa.Array, ...]]) -> Generator[pa.Array]:
        """The one column of the handler's answers, as many rows as were given."""
        answers, limit = self._answers(arrays), idle_limit()
        if limit is None or _paired():
            return answers
        return kept_awake(answers, limit, self._nothing)

    def _nothing(self) -> list[pa.Array]:
        schema = pa.schema([("value", self.returns)])
        return [batch.column(0) for batch in without_rows(schema)]

    def _answers(self, arrays: Iterator[tuple[pa.Array, ...]]) -> Generator[pa.Array]:
        casting, sent = self.call.shape.cast, self._batches(arrays)
        # A cast begins with what the handler gave: Spark may have no type for that.
        answered = self.call.answers(sent) if casting else self.call.fitted(sent)
        with contextlib.closing(answered) as answers:
            for number, answer in enumerate(answers):
                if casting and answer.num_columns == 1:
                    answer = self._cast(answer, number)
                if answer.num_columns != 1 or not _same(answer.schema.types[0], self.returns):
                    found = ", ".join(f"{field.name} {field.type}" for field in answer.schema)
                    raise SchemaMismatch(
                        f"{self.call.handler!r} at {self.call.peer} answered batch {number} with "
                        f"({found}); a function of columns that returns {self.returns} needs one "
                        "column of that type",
                        wanted=str(self.returns),
                        got=found,
                    )
                yield self._told(answer, number)

    def _told(self, answer: pa.RecordBatch, number: int) -> pa.Array:
        if self.metadata is None:
            return answer.column(0)
        field = answer.schema.field(0).with_metadata(self.metadata)
        where = f"the answer of {self.call.handler!r}"
        return Fitting(pa.schema([field]), answer.schema, where=where).one(answer, number).column(0)

    def _cast(self, answer: pa.RecordBatch, number: int) -> pa.RecordBatch:
        wanted = pa.schema([pa.field(answer.schema.names[0], self.returns)])
        where = f"the output of handler {self.call.handler!r}"
        rounding = self.call.shape.rounding
        made = Casting(wanted, answer.schema, where=where, rounding=rounding).one(answer, number)
        return self.call.fitting(made.schema).one(made, number) if self.call.fits(here()) else made

    def _batches(self, arrays: Iterator[tuple[pa.Array, ...]]) -> Iterator[pa.RecordBatch]:
        for given in arrays:
            if len(given) != len(self.columns):
                raise ConfigError(
                    f"the function was given {len(given)} columns; columns= has "
                    f"{len(self.columns)}: {', '.join(self.columns)}"
                )
            yield pa.RecordBatch.from_arrays(list(given), names=list(self.columns))


def _paired() -> bool:
    """Whether Spark may pair whole batches: an array without rows would be the answer to one.

    It does so by default since 4.2, where the input has columns in the JVM.
    """
    import pyspark

    given = local_property(_PAIRED)
    if given is None:
        return tuple(map(int, pyspark.__version__.split(".")[:2])) >= (4, 2)
    return given.lower() != "false"


def _same(found: pa.DataType, wanted: pa.DataType) -> bool:
    """Whether Spark takes one for the other: of timestamps with zones the zone's name is free."""
    mine, theirs = (pa.schema([("value", kind)]) for kind in (wanted, found))
    return difference(mine, theirs) is None


def _struct_of(returns: str | DataType) -> Any:
    from pyspark.sql.types import StructType

    if isinstance(returns, str):
        return f"value {returns}"
    return StructType().add("value", returns)


@dataclass(frozen=True)
class PandasExchange(PickledFunction):
    """What ``exchange_pandas`` returns: call it with an iterator of data frames."""

    arrow: Exchange

    @property
    def __name__(self) -> str:
        return self.arrow.__name__

    @property
    def numbers(self) -> Total:
        """What the tasks counted that ended well so far; to be read on the driver."""
        return self.arrow.numbers

    def summary(self) -> TaskSummary:
        """``numbers`` in a few lines for people."""
        return self.arrow.summary()

    def __call__(self, frames: Iterator[Any]) -> Generator[Any]:
        """The handler's answers as data frames, in the order of ``frames``."""
        answers = self.arrow(_batches(frames, self.arrow.input_schema))
        try:
            for answer in answers:
                yield answer.to_pandas()
        finally:
            answers.close()


def _batches(frames: Iterator[Any], schema: pa.Schema | None) -> Iterator[pa.RecordBatch]:
    for number, frame in enumerate(frames):
        names = [str(name) for name in frame.columns]
        if schema is not None and names != schema.names:
            raise SchemaMismatch(f"batch {number} has the columns {names}, wanted {schema.names}")
        wanted = [None] * len(names) if schema is None else schema.types
        arrays = [
            _array(frame.iloc[:, place], f"batch {number}, column {name!r}", name, wanted[place])
            for place, name in enumerate(names)
        ]
        if schema is None:  # one schema serves the whole partition
            schema = pa.schema(
                [(name, array.type) for name, array in zip(names, arrays, strict=True)]
            )
        yield pa.RecordBatch.from_arrays(arrays, schema=schema)


def _array(series: Any, where: str, name: str, wanted: pa.DataType | None) -> pa.Array:
    """One column of a frame; ``wanted`` None: of the type it has. Raises SchemaMismatch."""
    try:
        zone = wanted.tz if wanted is not None and pa.types.is_timestamp(wanted) else None
        if zone is not None and series.dt.tz is None:
            # Spark hands frames local times of the session's zone; see pyspark's own converters
            # for what becomes of the hours that a change of the clocks skips or repeats.
            series = series.dt.tz_localize(zone, ambiguous=False, nonexistent="shift_forward")
        made = pa.Array.from_pandas(series, type=wanted)
        return made if wanted is None else _same_values(series, made)
    except Unfit as error:
        row = "" if error.row is None else f"the value {error.value} in row {error.row}: "
        raise SchemaMismatch(
            f"{where}: the frame's {series.dtype} values do not fit {wanted}: {row}{error.why}",
            column=name,
            wanted=str(wanted),
            got=str(series.dtype),
        ) from error
    except (pa.ArrowException, TypeError, ValueError, AttributeError) as error:
        raise SchemaMismatch(
            f"{where}: the frame's {series.dtype} values do not fit {wanted or 'any type'}: "
            f"{error}; name the column's type in input_schema",
            column=name,
            wanted=str(wanted or ""),
            got=str(series.dtype),
        ) from error


def _same_values(series: Any, made: pa.Array) -> pa.Array:
    """``made``, whose type was wanted, with the values of ``series``. Raises Unfit if they differ.

    Arrow alone makes an infinity of 1e300 here, True of 5, and a date of a timestamp at noon. So a
    cast of the library makes the values, where one is known.
    """
    try:
        own = pa.Array.from_pandas(series)
    except (pa.ArrowException, TypeError, ValueError):
        return made  # some objects of Python have no type by themselves
    return made if obstacle(made.type, own.type) is not None else cast(own, made.type)
