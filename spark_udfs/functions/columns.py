"""What is done to batches on their way to a service and back, as generators over each other.

::

    rows -> merged -> kept (the columns that travel) -> cast -> the service
    rows <- joined <- with nulls for failures <- rows counted <- cast <- the service

A row that waits for its answer stays in the executor as it came, without a copy; what waits is
bounded by what may be in flight. Nothing of this page runs for an ``exchange`` without options.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

import pyarrow as pa

from aqueduct.arrow.schema import shorten
from aqueduct.arrow.sizes import batch_bytes
from aqueduct.config import DEFAULT
from aqueduct.errors import BadCall, ConfigError
from aqueduct.escaping import logger_of
from aqueduct.rpc.request import ONE_TO_ONE
from spark_udfs.calls.partition import BatchAnswer
from spark_udfs.functions.casts import Cast, Casting

__all__ = ["MERGE_BYTES", "PLAIN", "ColumnShape", "Mode", "Shaper", "joined_schema", "merged"]

Mode: TypeAlias = Literal["append", "replace"]
"""Where a service's columns go: behind the row's, or into the places of those of the same name."""
Call: TypeAlias = Callable[[Iterator[pa.RecordBatch], pa.Schema], Generator[BatchAnswer]]
"""Sends batches of a schema and gives the answers."""

MERGE_BYTES: Final = 8 << 20
"""Up to how many bytes batches are merged where only ``merge_rows`` is given."""
_REASON: Final = 1000
_TOLD: Final = 10
_log = logger_of("spark_udfs.functions.exchange")


@dataclass(frozen=True)
class ColumnShape:
    """What is done beside calling. ``exchange`` has the meaning of each."""

    columns: tuple[str, ...] = ()
    mode: Mode = "append"
    on_error: Literal["fail", "null", "skip"] = "fail"
    error_column: str = ""
    check_rows: bool = False
    merge_rows: int | None = None
    merge_bytes: int | None = None
    cast: Cast = False
    """Whether what is sent and answered is cast; ``round``: also to the nearest values."""
    schema: pa.Schema | None = None
    """What answers are cast to; only with ``cast``."""

    @functools.cached_property
    def plain(self) -> bool:
        """Whether there is nothing to do."""
        return self == PLAIN

    @property
    def rounding(self) -> bool:
        """Whether casts may round."""
        return self.cast == "round"

    @property
    def by_batch(self) -> str:
        """Which option needs the answer to each batch by itself; empty: none does."""
        if self.columns:
            return "columns=[...]"
        if self.on_error != "fail":
            return f"on_error={self.on_error!r}"
        return "check_rows=True" if self.check_rows else ""

    def check(self, schema: pa.Schema | None) -> None:
        """Raises ConfigError for what cannot go together; ``schema``: of the answers, declared."""
        if self.error_column and self.on_error != "null":
            raise ConfigError(
                f"error_column={self.error_column!r} needs on_error='null', and it is "
                f"{self.on_error!r}: no other keeps the rows that failed"
            )
        if self.on_error == "null" and schema is not None:
            for field in schema:
                if not field.nullable:
                    raise ConfigError(
                        f"on_error='null' writes nulls where a batch failed, and schema declares "
                        f"column {field.name!r} as {field.type} not null; declare it nullable, or "
                        "take on_error='skip'"
                    )
        twice = [name for name in self.columns if self.columns.count(name) > 1]
        if twice:
            raise ConfigError(f"columns names {twice[0]!r} twice")


PLAIN: Final = ColumnShape()
"""Nothing beside calling."""


class Shaper:
    """One partition's way through a ``ColumnShape``; ``run`` is to be called once."""

    def __init__(
        self,
        shape: ColumnShape,
        schema: pa.Schema,
        *,
        handler: str,
        limit: int = DEFAULT.calls.batch_limit,
    ) -> None:
        """``schema``: of the rows; ``limit``: for casts, in bytes.

        Raises ConfigError for columns that the rows do not have.
        """
        self.shape = shape
        self.schema = schema
        self.handler = handler
        self._limit = limit
        self._places = _places_of(shape.columns, schema) if shape.columns else []
        self.sent: pa.Schema = (
            pa.schema([schema.field(place) for place in self._places]) if self._places else schema
        )
        """Of what travels, before it is cast."""
        self._waiting: dict[int, tuple[int, pa.RecordBatch | None]] = {}
        self._bytes = 0
        self._failed = 0
        self._in_turn = False
        """Whether answers are counted, because the handler is no function of one batch."""
        self._turn = 0
        self._answer: pa.Schema | None = None
        self._output: pa.Schema | None = None
        self._answer_cast: Casting | None = None

    @property
    def output(self) -> pa.Schema:
        """Of the rows that come out; known from ``opened`` on."""
        assert self._output is not None
        return self._output

    def held(self) -> int:
        """The bytes of the rows that wait for their answers."""
        return self._bytes

    def opened(self, schema: pa.Schema, capabilities: frozenset[str]) -> None:
        """The service accepted the call and will answer with batches of ``schema``.

        ``capabilities``: what the handler is. Raises ConfigError or SchemaMismatch for what
        cannot be joined or cast.
        """
        shape = self.shape
        self._in_turn = ONE_TO_ONE not in capabilities
        if self._in_turn and (shape.columns or shape.on_error != "fail"):
            raise ConfigError(
                f"{shape.by_batch} needs one answer for each batch, and handler {self.handler!r} "
                "is no function of one batch: a generator may answer when it likes. Write it as a "
                "function of one batch, or call it without"
            )
        if shape.schema is not None:
            where = f"the output of handler {self.handler!r}"
            self._answer_cast = self._casting(shape.schema, schema, where)
            schema = self._answer_cast.schema
        self._answer = schema
        self._output = joined_schema(shape, self.schema, schema)

    def run(
        self, batches: Iterable[pa.RecordBatch], call: Call, *, wanted: pa.Schema | None = None
    ) -> Generator[pa.RecordBatch]:
        """Calls with ``batches`` and gives the rows that come of it.

        ``wanted``: what to cast to what is sent; None leaves it as it is.
        """
        shape = self.shape
        if shape.merge_rows is not None or shape.merge_bytes is not None:
            batches = merged(batches, rows=shape.merge_rows, size=shape.merge_bytes)
        sending, schema = self._kept(batches), self.sent
        if wanted is not None:
            casting = self._casting(wanted, schema, f"the input of handler {self.handler!r}")
            sending, schema = casting.all(sending), casting.schema
        answers = call(sending, schema)
        try:
            for answer in answers:
                yield from self._rows(answer)
            self._check_end()
        finally:
            answers.close()
            if self._failed:
                _log.warning(
                    "batches that handler %r failed on: %d; %s",
                    self.handler,
                    self._failed,
                    "their rows are left out" if shape.on_error == "skip" else "nulls instead",
                )

    def _casting(self, wanted: pa.Schema, got: pa.Schema, where: str) -> Casting:
        rounding = self.shape.rounding
        return Casting(wanted, got, where=where, rounding=rounding, limit=self._limit)

    def _kept(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Remembers each batch, and gives what of it travels."""
        places, by_batch = self._places, self.shape.by_batch
        for number, batch in enumerate(batches):
            keep = batch if places else None
            if keep is not None:
                self._bytes += batch_bytes(keep)
            if by_batch:
                self._waiting[number] = batch.num_rows, keep
            yield batch.select(places) if places else batch

    def _rows(self, answer: BatchAnswer) -> Iterator[pa.RecordBatch]:
        shape = self.shape
        if answer.error is not None:
            self._tell(answer)
            if shape.on_error == "skip":
                self._settle(answer.number)
            else:
                yield self._null(answer)
            return
        batch = answer.batch
        assert batch is not None
        if self._answer_cast is not None:
            batch = self._answer_cast.one(batch, answer.number)
        if not shape.by_batch:
            yield batch
            return
        number = answer.number
        if self._in_turn:  # whose numbers say only what was taken before
            number, self._turn = self._turn, self._turn + 1
        rows, original = self._settle(number)
        one_each = shape.columns or shape.check_rows
        if one_each and rows != batch.num_rows:
            raise self._mismatch(number, rows, batch.num_rows)
        yield self._joined(original, batch.columns, None, batch.num_rows)

    def _null(self, answer: BatchAnswer) -> pa.RecordBatch:
        """The rows of a batch that failed, with nulls for an answer."""
        rows, original = self._settle(answer.number)
        assert self._answer is not None  # the service tells it before it answers
        columns = [pa.nulls(rows, field.type) for field in self._answer]
        error = answer.error
        reason = shorten(f"{type(error).__name__}: {error}", _REASON)
        return self._joined(original, columns, reason, rows)

    def _joined(
        self,
        original: pa.RecordBatch | None,
        columns: list[pa.Array],
        reason: str | None,
        rows: int,
    ) -> pa.RecordBatch:
        shape, output = self.shape, self._output
        assert output is not None and self._answer is not None
        found = columns
        if shape.columns:
            assert original is not None
            found = list(original.columns)
            for name, column in zip(self._answer.names, columns, strict=True):
                place = self.schema.get_field_index(name) if shape.mode == "replace" else -1
                if place < 0:
                    found.append(column)
                else:
                    found[place] = column
        if shape.error_column:
            found = [*found, pa.array([reason] * rows, pa.string())]
        return pa.RecordBatch.from_arrays(found, schema=output)

    def _settle(self, number: int) -> tuple[int, pa.RecordBatch | None]:
        """What waited for answer ``number``."""
        if number not in self._waiting:
            raise BadCall(
                f"handler {self.handler!r} gave {number + 1} answers to {number} batches; "
                f"{self.shape.by_batch} needs one answer for each"
            )
        rows, original = self._waiting.pop(number)
        if original is not None:
            self._bytes -= batch_bytes(original)
        return rows, original

    def _mismatch(self, number: int, rows: int, got: int) -> BadCall:
        why = "columns=[...] joins" if self.shape.columns else "check_rows=True wants"
        return BadCall(
            f"handler {self.handler!r} answered batch {number} of {rows} rows with {got} rows; "
            f"{why} one row of the answer for each row of the batch, in their order"
        )

    def _check_end(self) -> None:
        if self._waiting:
            number = min(self._waiting)
            raise BadCall(
                f"the service ended the call of handler {self.handler!r} and gave no answer to "
                f"{len(self._waiting)} of its batches, the first of them batch {number} of "
                f"{self._waiting[number][0]} rows"
            )

    def _tell(self, answer: BatchAnswer) -> None:
        self._failed += 1
        if self._failed <= _TOLD:
            action = "left out" if self.shape.on_error == "skip" else "kept with nulls"
            _log.warning("the rows of batch %d are %s: %s", answer.number, action, answer.error)


def _places_of(columns: Iterable[str], schema: pa.Schema) -> list[int]:
    """Where ``columns`` are in ``schema``. Raises ConfigError that names the near miss."""
    found = []
    for name in columns:
        places = schema.get_all_field_indices(name)
        if len(places) > 1:
            raise ConfigError(
                f"columns names {name!r}, and the rows have {len(places)} columns of that name; "
                "rename all but one of them"
            )
        if not places:
            raise _unknown_column(name, schema)
        found += places
    return found


def joined_schema(shape: ColumnShape, rows: pa.Schema, answer: pa.Schema) -> pa.Schema:
    """Of what comes out: rows of ``rows``, answered with ``answer``.

    Raises ConfigError for two columns of one name.
    """
    if shape.on_error == "null":
        answer = pa.schema([field.with_nullable(True) for field in answer])
    fields = list(answer)
    if shape.columns:
        fields = list(rows)
        own = {field.name.lower(): field.name for field in rows}
        for field in answer:
            same = own.get(field.name.lower())
            place = rows.get_field_index(field.name)
            if same is None:
                fields.append(field)
            elif shape.mode == "replace" and place >= 0:
                fields[place] = field
            else:
                raise _collision(shape, field.name, same, rows)
    if shape.error_column:
        if shape.error_column.lower() in {field.name.lower() for field in fields}:
            raise ConfigError(
                f"error_column={shape.error_column!r} is the name of a column already: "
                f"{_named(pa.schema(fields))}; take another name"
            )
        fields.append(pa.field(shape.error_column, pa.string()))
    return pa.schema(fields)


def merged(
    batches: Iterable[pa.RecordBatch], *, rows: int | None = None, size: int | None = None
) -> Iterator[pa.RecordBatch]:
    """Batches put together up to ``rows`` rows and ``size`` bytes, in their order.

    What is as large by itself passes as it is, without a copy. A batch waits until the next one
    has come or the input has ended; an input that pauses holds it for as long.
    """
    most = rows if rows is not None else 1 << 62
    limit = size if size is not None else MERGE_BYTES if rows is not None else 1 << 62
    held: list[pa.RecordBatch] = []
    held_rows = held_bytes = 0
    for batch in batches:
        more = batch_bytes(batch)
        if held and (held_rows + batch.num_rows > most or held_bytes + more > limit):
            yield from _together(held)
            held, held_rows, held_bytes = [], 0, 0
        held.append(batch)
        held_rows += batch.num_rows
        held_bytes += more
        if held_rows >= most or held_bytes >= limit or not batch.num_columns:
            yield from _together(held)
            held, held_rows, held_bytes = [], 0, 0
    if held:
        yield from _together(held)


def _together(batches: list[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    if len(batches) == 1:
        yield batches[0]
        return
    found = pa.Table.from_batches(batches).combine_chunks().to_batches()
    yield from found or batches[:1]  # a table without rows has no batches


def _unknown_column(name: str, schema: pa.Schema) -> ConfigError:
    outer, dot, inner = name.partition(".")
    place = schema.get_field_index(outer)
    if dot and place >= 0 and pa.types.is_nested(schema.field(place).type):
        return ConfigError(
            f"columns names {name!r}, a field inside the column {outer!r}; whole columns travel: "
            f"name {outer!r}, or make a column of it first: .withColumn({inner!r}, col({name!r}))"
        )
    lower = {each.lower(): each for each in schema.names}
    near = difflib.get_close_matches(name.lower(), lower, n=1, cutoff=0.6)
    guess = f"did you mean {lower[near[0]]!r}? " if near else ""
    return ConfigError(
        f"columns names {name!r}, which the rows do not have; {guess}they have {_named(schema)}"
    )


def _collision(shape: ColumnShape, name: str, same: str, rows: pa.Schema) -> ConfigError:
    called = repr(name) if name == same else f"{name!r} (in the rows: {same!r})"
    remedy = (
        "columns_mode='replace' puts the answer in its place; or drop or rename the row's column"
        if shape.mode == "append" and name == same
        else "rename the row's column, or the answer's"
    )
    return ConfigError(
        f"the answer's column {called} has the name of a column of the rows; {remedy}. "
        f"The rows have {_named(rows)}"
    )


def _named(schema: pa.Schema) -> str:
    return shorten(", ".join(map(repr, schema.names))) or "none"
