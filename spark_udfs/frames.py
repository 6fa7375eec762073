"""``exchange`` for data frames of pandas: a function for ``mapInPandas``."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from aqueduct.errors import SchemaMismatch
from spark_udfs.exchange import Exchange, exchange
from spark_udfs.numbers import Total

__all__ = ["PandasExchange", "exchange_pandas"]


def exchange_pandas(address: str, handler: str, **options: Any) -> PandasExchange:
    """The same for ``DataFrame.mapInPandas``; the options are those of ``exchange``.

    Frames go through Arrow with ``input_schema``, or without it with the types of the partition's
    first frame. Give it when a column may be all null in the first frame, or holds nested values.
    """
    return PandasExchange(exchange(address, handler, **options))


@dataclass(frozen=True)
class PandasExchange:
    """What ``exchange_pandas`` returns: call it with an iterator of data frames."""

    arrow: Exchange

    @property
    def __name__(self) -> str:
        return self.arrow.__name__

    @property
    def numbers(self) -> Total:
        """What the tasks counted that ended well so far; to be read on the driver."""
        return self.arrow.numbers

    def summary(self) -> str:
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
        return pa.Array.from_pandas(series, type=wanted)
    except (pa.ArrowException, TypeError, ValueError, AttributeError) as error:
        raise SchemaMismatch(
            f"{where}: the frame's {series.dtype} values do not fit {wanted or 'any type'}: "
            f"{error}; name the column's type in input_schema",
            column=name,
            wanted=str(wanted or ""),
            got=str(series.dtype),
        ) from error
