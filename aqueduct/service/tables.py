"""Tables: what a service offers to clients that read it in parts, such as Spark.

::

    @service.table("airports", schema=AIRPORTS)         # one split
    def airports():
        yield from load()

    @service.table("trips", schema=TRIPS, splits=lambda: sorted(FOLDER), filters="applied")
    def trips(split, request):                          # one call for each split
        file = pq.ParquetFile(FOLDER / split)
        for batch in file.iter_batches(columns=list(request.columns)):
            yield batch

Only the columns that are wanted travel: what is yielded may have more, which are left out. With
``filters="applied"`` the rows that nobody wants are left out too. The same as a class, which may
choose its filters and be read as a stream::

    class Log:
        schema = ENTRIES

        def splits(self, request): ...                  # JSON values; default: one, None
        def read(self, split, request): ...             # yields the batches of a split
        def takes(self, filter): ...                    # True, "partly" or False
        def initial(self): ...                          # an offset: a dict of JSON values
        def latest(self, start, limit): ...             # an offset, not beyond limit
        def between(self, start, end, request): ...     # splits
        def commit(self, end): ...                      # nothing before end is asked for again

    service.table("log", Log())

``request`` (a ``Request``) may be left out of every signature. All methods but ``read`` are either
plain functions, which run in threads, or all coroutine functions; ``read`` is a generator of its
own kind. Splits, offsets and filters come back over the network: look at them before use.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias, get_args

import pyarrow as pa
import pyarrow.compute as pc

from aqueduct.arrow.schema import shorten
from aqueduct.arrow.taking import rows_where
from aqueduct.config import Tables
from aqueduct.errors import BadCall, ConfigError, SchemaMismatch
from aqueduct.escaping import near_miss
from aqueduct.rpc.filters import Filter, all_of
from aqueduct.rpc.table_scan import (
    ANSWER,
    NAME_LIMIT,
    PLAN,
    QUESTION,
    READ,
    READING,
    ROWS,
    Limit,
    Offset,
    ScanPlan,
    ScanRead,
    ScanRequest,
    Taken,
    offset_text,
    split_text,
)
from aqueduct.rpc.threads import apart
from aqueduct.service.context import Call
from aqueduct.service.handlers import (
    EXCHANGE,
    SOURCE,
    Handler,
    HandlerShape,
    make_handler,
    shape_of,
    takes_last,
)

__all__ = ["APPLIED", "Filters", "Limit", "Request", "Table", "TableSchema", "make_table"]

APPLIED: Final = "applied"
"""Filters are taken as far as Arrow can tell them, and applied to what is yielded."""
TableSchema: TypeAlias = "pa.Schema | Callable[[Call], pa.Schema]"
Filters: TypeAlias = "str | Callable[[Filter], bool | str | None] | None"

_STREAM: Final = ("initial", "latest", "between")
_CALLED_WITH: Final = {
    "splits": "(request)",
    "initial": "(request)",
    "latest": "(start, limit, request)",
    "between": "(start, end, request)",
    "commit": "(end, request)",
    "takes": "(filter, request)",
    "read": "(split, request)",
}
_Steps: TypeAlias = "Generator[Callable[[], Any], Any, ScanPlan]"


@dataclass(frozen=True)
class Request:
    """What is wanted of a table."""

    table: str
    schema: pa.Schema
    """Of the columns below. Batches may have more than these: the others are left out."""
    filters: tuple[Filter, ...] = ()
    """Those that the table takes, wholly or partly: all of them hold for the rows wanted."""
    partitions: int | None = None
    """About how many splits would do: a hint, for ``splits`` and ``between`` alone."""
    call: Call = field(kw_only=True, repr=False)
    """Who asks, with ``headers``, ``token``, ``cancelled`` and so on."""

    @property
    def columns(self) -> tuple[str, ...]:
        """What is wanted, and what filters that are applied look at."""
        return tuple(self.schema.names)

    @functools.cached_property
    def expression(self) -> pc.Expression | None:
        """``filters`` for Arrow, as in ``dataset.scanner(filter=...)``; None if there is none.

        Raises ConfigError for filters that Arrow cannot tell. Needs the columns of the filters
        among ``columns``, as they are with ``filters="applied"``.
        """
        return all_of(self.filters, self.schema)


@dataclass
class Table:
    """One registered table. Its limits alone may change, before it is served."""

    name: str
    schema: TableSchema
    methods: Mapping[str, Callable[..., Any]]
    """``read``, and those of ``splits``, ``takes`` and the offsets that it has, each called with
    all its arguments."""
    fixed: tuple[Any, ...]
    """Its splits, if it has no method for them."""
    applied: bool
    """Whether filters are applied to what it yields."""
    limits: Tables
    description: str

    @property
    def streams(self) -> bool:
        """Whether it has offsets."""
        return "initial" in self.methods

    def whole_schema(self, call: Call) -> pa.Schema:
        """The schema of all its columns. Raises TypeError and BadCall for what is none."""
        schema = self.schema if isinstance(self.schema, pa.Schema) else self.schema(call)
        if not isinstance(schema, pa.Schema):
            raise TypeError(f"schema of table {self.name!r} gave a {type(schema).__name__}")
        _check_columns(f"table {self.name!r}", schema)
        return schema

    # Planning

    def steps(self, question: ScanRequest, call: Call) -> _Steps:
        """Answers a question; what it yields is to be called, and the result sent back."""
        where = f"table {self.name!r}"
        ask = question.ask
        whole = self.whole_schema(call)
        schema = whole
        if question.columns is not None:
            schema = _project(whole, question.columns)
            _check_known(where, whole, question.columns)
        if ask == "schema":
            return ScanPlan(schema=schema, streams=self.streams)
        if ask == "plan":
            if self.applied:
                taken = yield functools.partial(_told, question.filters, whole)
            else:
                taken = []
                for each in question.filters:
                    what = yield from self._taken(each, whole, call)
                    taken.append(what)
            kept = tuple(
                each for each, word in zip(question.filters, taken, strict=True) if word != "no"
            )
            request = self._request(whole, schema, kept, question.partitions, call)
            splits = yield from self._splits(request)
            return ScanPlan(schema, self.streams, tuple(taken), splits)
        if not self.streams:
            raise BadCall(f"{where} is no stream: it has no offsets, and was asked {ask!r}")
        request = self._request(whole, schema, (), question.partitions, call)
        if ask == "initial":
            return ScanPlan(offset=(yield from self._offset("initial", request)))
        if ask == "latest":
            start = _needed(question.start, "start", ask)
            return ScanPlan(
                offset=(yield from self._offset("latest", start, question.limit, request))
            )
        end = _needed(question.end, "end", ask)
        if ask == "commit":
            if "commit" in self.methods:
                yield functools.partial(self.methods["commit"], end, request)
            return ScanPlan()
        start = _needed(question.start, "start", ask)
        splits = yield functools.partial(self.methods["between"], start, end, request)
        return ScanPlan(schema, True, splits=self._checked(splits, "between"))

    def _taken(
        self, filter: Filter, schema: pa.Schema, call: Call
    ) -> Generator[Callable[[], Any], Any, Taken]:
        if "takes" not in self.methods:
            return "no"
        request = Request(self.name, schema, call=call)
        found = yield functools.partial(self.methods["takes"], filter, request)
        if found is None or isinstance(found, bool):
            return "yes" if found else "no"
        if found not in get_args(Taken):
            raise TypeError(
                f"takes of table {self.name!r} gave {found!r} for {filter}; it must be True, "
                "'partly' or False"
            )
        word: Taken = found
        return word

    def _splits(self, request: Request) -> Generator[Callable[[], Any], Any, tuple[Any, ...]]:
        if "splits" in self.methods:
            found = yield functools.partial(self.methods["splits"], request)
            return self._checked(found, "splits")
        if not self.streams or self.fixed != (None,):
            return self.fixed
        start = yield from self._offset("initial", request)
        end = yield from self._offset("latest", start, Limit(), request)
        found = yield functools.partial(self.methods["between"], start, end, request)
        return self._checked(found, "between")

    def _offset(self, method: str, *arguments: Any) -> Generator[Callable[[], Any], Any, Offset]:
        found = yield functools.partial(self.methods[method], *arguments)
        offset_text(found, self.limits, f"the offset of {method} of table {self.name!r}")
        offset: Offset = found
        return offset

    def _checked(self, splits: Any, method: str) -> tuple[Any, ...]:
        return _checked_splits(splits, self.limits, f"{method} of table {self.name!r}")

    # Reading

    def output(self, call: Call) -> pa.Schema:
        """What the reading of a split yields: the columns that the client expects."""
        whole = self.whole_schema(call)
        expected = call.output_schema
        return whole if expected is None else _project(whole, expected.names)

    def reading(
        self, whole: pa.Schema, call: Call
    ) -> tuple[Any, Request, Callable[[Any], list[Any]]]:
        """The split, the request, and what makes of a yielded batch those that leave.

        ``whole``: the schema of all columns.
        """
        reading = ScanRead.decode(call.headers.get(READING), self.limits)
        output = call.output_schema
        assert output is not None
        request = self._request(whole, output, reading.filters, None, call)
        try:
            kept = request.expression if self.applied else None
        except ConfigError as error:
            raise BadCall(str(error)) from error
        leaving = functools.partial(_leaving, self.name, output, kept, _columns_of(request.filters))
        return reading.split, request, leaving

    def whole(self, call: Call) -> tuple[Request, Callable[[Any], list[Any]]]:
        """The request for all rows, and what makes of a yielded batch those that leave."""
        output = call.output_schema
        assert output is not None
        request = self._request(self.whole_schema(call), output, (), None, call)
        return request, functools.partial(_leaving, self.name, output, None, frozenset())

    def _request(
        self,
        whole: pa.Schema,
        schema: pa.Schema,
        filters: tuple[Filter, ...],
        partitions: int | None,
        call: Call,
    ) -> Request:
        if self.applied:
            looked_at = _columns_of(filters)
            more = [field for field in whole if field.name in looked_at - set(schema.names)]
            schema = pa.schema([*schema, *more])
        return Request(self.name, schema, filters, partitions, call=call)


def make_table(
    name: str,
    declared: Any,
    *,
    schema: Any,
    splits: Any,
    filters: Any,
    limits: Tables,
    max_calls: int | None,
    max_concurrency: int | None,
    queue: int | None,
    description: str,
) -> tuple[Table, tuple[Handler, ...]]:
    """Checks what a user registers, and makes its handlers. Raises ConfigError.

    ``declared`` is a generator function, or an object with the methods of a table.
    """
    if (
        not isinstance(name, str)
        or not name
        or not name.isprintable()
        or len(name.encode()) > NAME_LIMIT
    ):
        raise ConfigError(
            f"a table's name is {name!r}; it must be printable text of 1 to {NAME_LIMIT} bytes"
        )
    where = f"table {name!r}"
    given = _methods(where, declared)
    if schema is None:
        schema = getattr(declared, "schema", None)
    if isinstance(schema, pa.Schema):
        _check_columns(where, schema)
    elif not callable(schema):
        raise ConfigError(
            f"{where}: schema must be a pyarrow.Schema or a function of the Call that makes one, "
            f"not {type(schema).__name__}"
        )
    if callable(splits):
        given["splits"] = splits
        splits = None
    applied = filters == APPLIED
    if callable(filters):
        given["takes"] = filters
    elif filters is not None and not applied:
        raise ConfigError(
            f"{where}: filters is {filters!r}; it must be {APPLIED!r} or a function of one filter "
            "that gives True, 'partly' or False"
        )
    fixed = _fixed_splits(where, splits, limits)
    alone = given.get("read") is declared and "splits" not in given and splits is None
    _check_methods(where, given)
    table = Table(
        name=name,
        schema=schema,
        methods={key: _called(where, key, method, alone=alone) for key, method in given.items()},
        fixed=fixed,
        applied=applied,
        limits=limits,
        description=description or _described(declared),
    )
    asked = {key: method for key, method in given.items() if key != "read"}
    loop = any(shape_of(method) is HandlerShape.COROUTINE for method in asked.values())
    common: dict[str, Any] = {"idempotent": True, "max_calls": max_calls, "concurrency": 1}
    reading = {**common, "max_concurrency": max_concurrency, "queue": queue}
    plan = make_handler(
        functools.partial(_plan_on_loop if loop else _plan, table),
        name=PLAN + name,
        kind=EXCHANGE,
        input=QUESTION,
        output=ANSWER,
        description=f"Plans the reading of {where}.",
        **common,
    )
    on_loop = shape_of(given["read"]) is HandlerShape.ASYNC_GENERATOR
    read = make_handler(
        functools.partial(_read_on_loop if on_loop else _read, table),
        name=READ + name,
        kind=SOURCE,
        input=None,
        output=table.output,
        description=f"Reads a split of {where}.",
        **reading,
    )
    rows = make_handler(
        functools.partial(_rows_on_loop if loop or on_loop else _rows, table),
        name=ROWS + name,
        kind=SOURCE,
        input=None,
        output=table.output,
        description=f"Reads all splits of {where}.",
        **reading,
    )
    return table, (plan, read, rows)


def _told(filters: Sequence[Filter], schema: pa.Schema) -> list[Taken]:
    """Of each filter, whether Arrow can tell it."""
    taken: list[Taken] = []
    for each in filters:
        try:
            each.expression(schema)
        except ConfigError:
            taken.append("no")
        else:
            taken.append("yes")
    return taken


# What the handlers are


def _plan(table: Table, batch: pa.RecordBatch, call: Call) -> pa.RecordBatch:
    question = ScanRequest.decode(batch, table.limits)
    return _planned(table.steps(question, call)).encode(table.limits)


async def _plan_on_loop(table: Table, batch: pa.RecordBatch, call: Call) -> pa.RecordBatch:
    question = await apart(ScanRequest.decode, batch, table.limits)
    plan = await _planned_on_loop(table.steps(question, call))
    return await apart(plan.encode, table.limits)


def _planned(steps: _Steps) -> ScanPlan:
    """The plan that the steps lead to."""
    found = None
    while True:
        try:
            step = steps.send(found)
        except StopIteration as end:
            plan: ScanPlan = end.value
            return plan
        found = step()


async def _planned_on_loop(steps: _Steps) -> ScanPlan:
    """The same on the event loop. Plain methods of the table run in threads: they may block."""
    found = None
    while True:
        try:
            step = steps.send(found)
        except StopIteration as end:
            plan: ScanPlan = end.value
            return plan
        found = await apart(step)
        if inspect.isawaitable(found):
            found = await found


def _read(table: Table, call: Call) -> Iterator[pa.RecordBatch]:
    split, request, leaving = table.reading(table.whole_schema(call), call)
    for batch in table.methods["read"](split, request):
        yield from leaving(batch)


async def _read_on_loop(table: Table, call: Call) -> AsyncIterator[pa.RecordBatch]:
    split, request, leaving = await apart(table.reading, table.whole_schema(call), call)
    batches = table.methods["read"](split, request)
    try:
        async for batch in batches:
            for each in leaving(batch):
                yield each
    finally:
        await batches.aclose()


def _columns_of(filters: tuple[Filter, ...]) -> frozenset[str]:
    """The columns that the filters look at."""
    return frozenset().union(*(each.columns() for each in filters))


def _leaving(
    name: str,
    output: pa.Schema,
    kept: pc.Expression | None,
    looked_at: frozenset[str],
    batch: Any,
) -> list[pa.RecordBatch]:
    """What leaves of a batch: the rows that are kept, and the columns that are wanted."""
    if not isinstance(batch, pa.RecordBatch):
        raise TypeError(
            f"read of table {name!r} yielded a {type(batch).__name__}, not a pyarrow.RecordBatch"
        )
    batches = [batch]
    if kept is not None:
        batches = rows_where(batch, kept, looked_at)
    names = output.names
    if batch.schema.names == names or not set(names) <= set(batch.schema.names):
        return batches  # in the second case the error says which column is missing
    return [each.select(names) for each in batches]


def _rows(table: Table, call: Call) -> Iterator[pa.RecordBatch]:
    plan = _planned(table.steps(ScanRequest("plan"), call))
    request, leaving = table.whole(call)
    for split in plan.splits:
        for batch in table.methods["read"](split, request):
            yield from leaving(batch)


async def _rows_on_loop(table: Table, call: Call) -> AsyncIterator[pa.RecordBatch]:
    plan = await _planned_on_loop(table.steps(ScanRequest("plan"), call))
    request, leaving = table.whole(call)
    for split in plan.splits:
        batches = table.methods["read"](split, request)
        if hasattr(batches, "__anext__"):
            try:
                async for batch in batches:
                    for each in leaving(batch):
                        yield each
            finally:
                await batches.aclose()
        else:
            while (batch := await apart(next, batches, None)) is not None:
                for each in leaving(batch):
                    yield each


# What is looked at when a table is registered


def _methods(where: str, declared: Any) -> dict[str, Callable[..., Any]]:
    if isinstance(declared, type):
        raise ConfigError(f"{where}: give an object, {declared.__name__}(...), not its class")
    found = {key: getattr(declared, key, None) for key in _CALLED_WITH}
    given = {key: method for key, method in found.items() if method is not None}
    return {"read": declared} if callable(declared) and not given else given


def _check_columns(where: str, schema: pa.Schema) -> None:
    for name in schema.names:
        if not name or schema.names.count(name) > 1:
            raise ConfigError(f"{where}: the column {name!r} has no name of its own")


def _fixed_splits(where: str, splits: Any, limits: Tables) -> tuple[Any, ...]:
    if splits is None:
        return (None,)
    try:
        return _checked_splits(splits, limits, f"{where}: splits")
    except (BadCall, TypeError) as error:
        raise ConfigError(str(error)) from error


def _checked_splits(splits: Any, limits: Tables, what: str) -> tuple[Any, ...]:
    if not isinstance(splits, Sequence | Iterator) or isinstance(splits, str | bytes):
        raise TypeError(f"{what} gave a {type(splits).__name__}; splits are a list of JSON values")
    found = []
    for number, split in enumerate(splits):
        if number >= limits.splits:
            raise BadCall(f"{what}: more splits than the limit of {limits.splits} (Tables.splits)")
        split_text(split, limits, f"{what}: split {number}")
        found.append(split)
    return tuple(found)


def _check_methods(where: str, given: Mapping[str, Callable[..., Any]]) -> None:
    for key, method in given.items():
        if not callable(method):
            raise ConfigError(f"{where}: {key} must be a function, not {type(method).__name__}")
    if "read" not in given:
        raise ConfigError(f"{where}: it has no method read, a generator of the batches of a split")
    shape = shape_of(given["read"])
    if shape not in (HandlerShape.GENERATOR, HandlerShape.ASYNC_GENERATOR):
        raise ConfigError(
            f"{where}: read must be written as generator or async generator, not as {shape.value}"
        )
    lacking = [key for key in _STREAM if key not in given]
    if lacking and (len(lacking) < len(_STREAM) or "commit" in given):
        raise ConfigError(f"{where}: a stream has {', '.join(_STREAM)}; {lacking[0]} is missing")
    asked = {key: shape_of(method) for key, method in given.items() if key != "read"}
    if len({shape is HandlerShape.COROUTINE for shape in asked.values()}) > 1:
        written = ", ".join(f"{key} is a {shape.value}" for key, shape in asked.items())
        raise ConfigError(
            f"{where}: all of its methods but read are coroutine functions, or none: {written}"
        )


def _called(where: str, key: str, method: Callable[..., Any], *, alone: bool) -> Callable[..., Any]:
    """``method`` as it is called: with all arguments, of which it takes those that it has."""
    called_with = _CALLED_WITH[key]
    dropped = key == "read" and alone  # it has but one split
    if dropped:
        called_with = "(request)"
    takes_request = takes_last(f"{where}: {key}", method, called_with, last="request")
    count = called_with.count(",") + takes_request
    if dropped:
        return lambda split, request: method(*(request,)[:count])
    return lambda *arguments: method(*arguments[:count])


def _described(declared: Any) -> str:
    return (inspect.getdoc(declared) or "").partition("\n\n")[0].strip()


def _project(whole: pa.Schema, names: Sequence[str]) -> pa.Schema:
    """The columns ``names``, as far as there are such."""
    known = set(whole.names)
    return pa.schema([whole.field(name) for name in names if name in known])


def _check_known(where: str, whole: pa.Schema, names: Sequence[str]) -> None:
    """Raises SchemaMismatch for a name that is no column's, or that occurs twice."""
    known, wanted = set(whole.names), set[str]()
    for name in names:
        if name not in known:
            alike = near_miss(name, known)
            guess = f"did you mean {alike!r}? " if alike else ""
            columns = shorten(", ".join(map(repr, whole.names)))
            raise SchemaMismatch(
                f"{where} has no column {name!r}; {guess}its columns are {columns}", column=name
            )
        if name in wanted:
            raise SchemaMismatch(f"column {name!r} of {where} is wanted twice", column=name)
        wanted.add(name)


def _needed(offset: Offset | None, name: str, ask: str) -> Offset:
    if offset is None:
        raise BadCall(f"a table that is asked {ask!r} needs {name!r}, an offset")
    return offset
