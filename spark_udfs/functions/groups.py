"""Groups of rows to a service: for ``applyInArrow``, and for many small groups at once.

::

    fit = exchange_grouped("aqueduct://models.example", "fit")
    frame.groupBy("city").applyInArrow(fit, "city string, slope double")

    fit = exchange_by_key("aqueduct://models.example", "fit", ["city"])
    fit.apply(frame)

Spark gives a function for ``applyInArrow`` one group after the other and waits for what becomes of
each. So each group is a call; a small one is a single message and its answer. ``exchange_by_key``
has the rows of a partition sorted by their key, and sends its groups as the batches of one call,
several in flight: that is the way for thousands of groups of a few rows.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol

import pyarrow as pa
import pyarrow.compute as pc

from aqueduct.arrow.sizes import batch_bytes
from aqueduct.errors import BatchTooLarge, ConfigError
from spark_udfs.calls.partition import leased
from spark_udfs.calls.telemetry import working
from spark_udfs.functions.discovery import refusal
from spark_udfs.functions.exchange import Exchange, exchange
from spark_udfs.options import argument
from spark_udfs.schemas import AnySchema, large_types
from spark_udfs.spark_schemas import spark_schema
from spark_udfs.worker.metrics import Tally, TaskMetrics, Total
from spark_udfs.worker.pickling import PickledFunction
from spark_udfs.worker.summary import TaskSummary
from spark_udfs.worker.task import here

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = ["KEY", "GroupFunction", "KeyedExchange", "exchange_by_key", "exchange_grouped"]

KEY: Final = "group-key"
"""The header of a call that has the group's key, as a list in JSON."""
MiB: Final = 1 << 20
_SMALL: Final = 1 * MiB
"""Bytes of a group that is sent as one message, with the call."""


class GroupFunction(Protocol):
    """What ``exchange_grouped`` returns: a function for groups, with the numbers of its tasks."""

    tally: Tally

    def __call__(self, *given: Any) -> Any:
        """Calls the handler with a group, and returns its answer."""

    def summary(self) -> TaskSummary:
        """The numbers in a few lines for people; each group counts as a task."""


def exchange_grouped(
    address: str | Sequence[str],
    handler: str,
    *,
    form: Literal["table", "key_table", "batches", "key_batches"] = "table",
    **options: Any,
) -> GroupFunction:
    """A function for ``groupBy(...).applyInArrow``: each group is one call of an exchange handler.

    The handler gets the group's rows, a small group as one batch, and its answers are what becomes
    of the group. ``options`` are those of ``exchange``.

    - ``form``: what Spark hands over: the group as a ``table``, or as ``batches``, an iterator, for
      groups that need not fit into memory. ``key_table`` and ``key_batches`` have its key too,
      which then goes with the call as the header ``group-key``: a list in JSON.

    Over ReactiveSocket a group is one request: its ``form`` has a table, and a group above
    ``ReactiveSocket.frame_bytes`` raises BatchTooLarge.

    The columns of the answers must be those of the schema that ``applyInArrow`` is given. What is
    returned has ``summary()`` and ``tally`` too; each group counts as a task.
    """
    form = argument("form", form)
    call = replace(
        _of_groups(exchange(address, handler, **options)), exact=True, large=large_types()
    )
    if call.calling.is_reactive and form in ("batches", "key_batches"):
        raise call.calling.not_carried(f"form={form!r}, a group of several batches,")

    def of_table(table: pa.Table) -> pa.Table:
        return _whole(call, table)

    def of_key_and_table(key: tuple[pa.Scalar, ...], table: pa.Table) -> pa.Table:
        return _whole(_keyed(call, key), table)

    def of_batches(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return call(batches)

    def of_key_and_batches(
        key: tuple[pa.Scalar, ...], batches: Iterator[pa.RecordBatch]
    ) -> Iterator[pa.RecordBatch]:
        return _keyed(call, key)(batches)

    forms: dict[str, Callable[..., Any]] = {
        "table": of_table,
        "key_table": of_key_and_table,
        "batches": of_batches,
        "key_batches": of_key_and_batches,
    }
    function: Any = forms[form]
    function.__name__ = f"exchange_{handler}"  # Spark shows it in plans
    # Spark looks at the arguments of a function, so it is one, with what an Exchange has beside.
    function.tally, function.summary = call.tally, call.summary
    made: GroupFunction = function
    return made


def _of_groups(call: Exchange) -> Exchange:
    """The exchange, none of whose batches is split: a part of a group would be another group."""
    return replace(call, calling=replace(call.calling, splits=False))


def _keyed(call: Exchange, key: tuple[pa.Scalar, ...]) -> Exchange:
    text = json.dumps([scalar.as_py() for scalar in key], default=str)
    headers = (*call.calling.headers, (KEY, text))
    return replace(call, calling=replace(call.calling, headers=headers))


def _whole(call: Exchange, table: pa.Table) -> pa.Table:
    """What a handler makes of a group that is in memory."""
    batches = table.combine_chunks().to_batches()
    plain = call.shape.plain and call.input_schema is None and call.calling.is_plain
    if plain and len(batches) == 1 and batch_bytes(batches[0]) <= _SMALL:
        return _small(call, batches[0])
    answers = list(call(iter(batches)))
    if answers:
        return pa.Table.from_batches(answers)
    return pa.schema([]).empty_table() if call.schema is None else call.schema.empty_table()


def _small(call: Exchange, batch: pa.RecordBatch) -> pa.Table:
    """The same as one message: the least that a call can cost."""
    place, numbers = here(), TaskMetrics()
    with (
        working(
            call.calling, tally=call.tally, trace=call.trace, place=place, numbers=numbers
        ) as calling,
        leased(calling, place=place, numbers=numbers) as client,
    ):
        numbers.batches_sent, numbers.rows_sent = 1, batch.num_rows
        answer = client.call_table(
            calling.handler,
            batch,
            output_schema=calling.schema,
            on_end=numbers.moved,
            **calling.head(place),
        )
        batches = answer.to_batches()
        numbers.batches_received, numbers.rows_received = len(batches), answer.num_rows
        if not call.fits(place):
            return answer
        fitting = call.fitting(answer.schema)
        made = [fitting.one(each, number) for number, each in enumerate(batches)]
        return pa.Table.from_batches(made, fitting.schema)


def exchange_by_key(
    address: str | Sequence[str],
    handler: str,
    keys: Sequence[str],
    *,
    group_bytes: int | str = 64 * MiB,
    **options: Any,
) -> KeyedExchange:
    """Sends each group of rows as one batch, many of them in one call, several in flight.

    The handler is a function of one batch: it gets all rows of a group, and what it answers is what
    becomes of the group. ``options`` are those of ``exchange``, but for the merging of batches.

    - ``keys``: the columns that make a group.
    - ``group_bytes`` (64m): of the largest group; a larger one raises BatchTooLarge. So does one
      above ``ReactiveSocket.frame_bytes`` at an address of ReactiveSocket.

    ``apply`` of what is returned sorts a frame and maps it; as a function for ``mapInArrow`` it
    needs rows whose keys are together: ``frame.repartition(*keys).sortWithinPartitions(*keys)``.
    """
    keys = argument("keys", keys)
    for name in ("merge_rows", "merge_bytes"):
        if options.get(name) is not None:
            raise ConfigError(f"{name} has no place here: a batch is one group")
    limit = argument("group_bytes", group_bytes)
    call = _of_groups(exchange(address, handler, **options))
    # A setting of the session that merges batches would put groups together.
    shape = replace(call.shape, merge_rows=None, merge_bytes=None)
    return KeyedExchange(replace(call, shape=shape), tuple(keys), limit)


@dataclass(frozen=True)
class KeyedExchange(PickledFunction):
    """What ``exchange_by_key`` returns: call it with batches in which equal keys are together."""

    call: Exchange
    keys: tuple[str, ...]
    group_bytes: int

    @property
    def __name__(self) -> str:  # Spark shows it in plans
        return f"exchange_by_key_{self.call.handler}"

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Generator[pa.RecordBatch]:
        """The handler's answers, group by group."""
        with contextlib.closing(self.call(self._groups(batches))) as answers:
            yield from answers

    def apply(self, frame: DataFrame, schema: AnySchema | None = None) -> DataFrame:
        """``frame`` with its groups together, through the service.

        ``schema``: of the answers; None asks the service (see ``Exchange.output_schema``).
        """
        declared: Any = self.call.output_schema(frame) if schema is None else schema
        if isinstance(declared, pa.Schema):
            declared = spark_schema(declared, refusal("schema"))
        told = replace(self, call=self.call.told(frame, declared))
        together = frame.repartition(*self.keys).sortWithinPartitions(*self.keys)
        return together.mapInArrow(told, declared)

    @property
    def numbers(self) -> Total:
        """What the tasks counted that ended well so far; to be read on the driver."""
        return self.call.numbers

    def summary(self) -> TaskSummary:
        """``numbers`` in a few lines for people; a batch is a group."""
        return self.call.summary()

    def _groups(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        kept: list[pa.RecordBatch] = []  # the beginning of a group whose end has not come
        size = 0
        for batch in batches:
            if not batch.num_rows:
                continue
            begins = self._begins(kept[-1] if kept else None, batch)
            bounds = [0, *sorted(begins - {0}), batch.num_rows]
            for begin, end in itertools.pairwise(bounds):
                if kept and begin in begins:
                    yield _joined(kept)
                    kept, size = [], 0
                kept.append(batch.slice(begin, end - begin))
                size += batch_bytes(kept[-1])
                if size > self.group_bytes:
                    raise self._too_large(kept[-1])
        if kept:
            yield _joined(kept)

    def _begins(self, before: pa.RecordBatch | None, batch: pa.RecordBatch) -> set[int]:
        """The rows of ``batch`` that begin a group; the first does if ``before`` ends another."""
        changed = None
        for name in self.keys:
            if name not in batch.schema.names:
                raise ConfigError(
                    f"keys has {name!r}; the rows have the columns {', '.join(batch.schema.names)}"
                )
            column = batch.column(name)
            if before is not None:
                last = before.column(name).slice(before.num_rows - 1)
                column = pa.concat_arrays([last, column])
            differs = _differs(column[:-1], column[1:], name)
            changed = differs if changed is None else pc.or_(changed, differs)
        assert changed is not None
        rows = pc.indices_nonzero(changed).to_pylist()
        return set(rows) if before is not None else {0, *(row + 1 for row in rows)}

    def _too_large(self, piece: pa.RecordBatch) -> BatchTooLarge:
        key = {name: piece.column(name)[0].as_py() for name in self.keys}
        return BatchTooLarge(
            f"the group {key} has more than {self.group_bytes} bytes (group_bytes); raise it, or "
            "use groupBy and exchange_grouped(..., form='batches')"
        )


def _differs(before: pa.Array, after: pa.Array, name: str) -> pa.Array:
    """Row by row, as Spark groups: nulls are equal, and so are values that are not a number."""
    try:
        differs = pc.fill_null(pc.not_equal(before, after), False)
    except pa.ArrowNotImplementedError as error:
        raise ConfigError(
            f"keys has {name!r}, of type {before.type}, whose values Arrow does not compare"
        ) from error
    if pa.types.is_floating(before.type):
        numbers = (pc.fill_null(pc.is_nan(each), False) for each in (before, after))
        differs = pc.and_not(differs, pc.and_(*numbers))
    return pc.or_(differs, pc.xor(pc.is_null(before), pc.is_null(after)))


def _joined(pieces: list[pa.RecordBatch]) -> pa.RecordBatch:
    if len(pieces) == 1:
        return pieces[0]
    (batch,) = pa.Table.from_batches(pieces).combine_chunks().to_batches()
    return batch
