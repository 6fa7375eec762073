"""Tables on the wire: what is asked before a table is read, and what a split is read by.

A table NAME is two handlers: ``aqueduct.table.plan.NAME``, an exchange of one batch each way whose
one value is a JSON document (``ScanRequest``, ``ScanPlan``), and ``aqueduct.table.read.NAME``, a
source whose call has a ``ScanRead`` among its headers and the schema that is expected.
``docs/protocols/arrow-calls.md`` has it all.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias, cast, get_args

import pyarrow as pa

from aqueduct.arrow.ipc import serialize_schema
from aqueduct.config import Tables
from aqueduct.errors import BadCall, ConfigError
from aqueduct.rpc.documents import object_of, schema_of, text_of
from aqueduct.rpc.filters import Filter, filters_from_json, filters_to_json

__all__ = [
    "ANSWER",
    "NAME_LIMIT",
    "PLAN",
    "QUESTION",
    "READ",
    "READING",
    "ROWS",
    "VERSION",
    "Ask",
    "Limit",
    "Offset",
    "ScanPlan",
    "ScanRead",
    "ScanRequest",
    "Taken",
    "offset_text",
    "split_text",
]

VERSION: Final = 1
PLAN: Final = "aqueduct.table.plan."
"""What the name of the planning handler begins with; the table's name follows."""
READ: Final = "aqueduct.table.read."
"""The same for the handler that reads a split."""
ROWS: Final = "aqueduct.table.rows."
"""The same for the source of all rows, split by split, of which clients of ReactiveSocket ask."""
READING: Final = "aqueduct-read"
"""The key of a ``ScanRead`` in the metadata of the call that reads a split."""
NAME_LIMIT: Final = 200
"""Bytes of a table's name."""
QUESTION: Final = pa.schema([pa.field("question", pa.string(), nullable=False)])
ANSWER: Final = pa.schema([pa.field("answer", pa.string(), nullable=False)])

Ask: TypeAlias = Literal["schema", "plan", "initial", "latest", "between", "commit"]
Taken: TypeAlias = Literal["yes", "partly", "no"]
"""Of a filter: the table gives no row that it does not keep; the table gives fewer of them; it is
ignored."""
Offset: TypeAlias = dict[str, Any]
"""Where a stream is, as a JSON object: what is in it is the table's own affair."""


@dataclass(frozen=True, slots=True)
class Limit:
    """How far a stream may go at once. All None: to the newest row there is."""

    rows: int | None = None
    bytes: int | None = None
    files: int | None = None
    until: Offset | None = None
    """An offset that ``latest`` gave: not beyond it."""


@dataclass(frozen=True, slots=True)
class ScanRequest:
    """What a table is asked."""

    ask: Ask
    """``schema``: of what it gives; ``plan``: that, what becomes of filters, and splits. Of streams
    ``initial`` and ``latest``: an offset; ``between``: splits; ``commit``: nothing more is asked
    for before ``end``."""
    columns: tuple[str, ...] | None = None
    """Those wanted, in order; None: all."""
    filters: tuple[Filter, ...] = ()
    """All of which hold for the rows that are wanted."""
    partitions: int | None = None
    """About how many splits would do; a hint."""
    start: Offset | None = None
    """Of ``latest`` and ``between``: up to where it was read."""
    end: Offset | None = None
    """Of ``between`` and ``commit``."""
    limit: Limit = field(default_factory=Limit)
    """Of ``latest``."""

    def encode(self, limits: Tables) -> pa.RecordBatch:
        """The batch of the call. Raises ConfigError for a value without a form, or too much."""
        document = {
            "version": VERSION,
            "ask": self.ask,
            "columns": None if self.columns is None else list(self.columns),
            "filters": filters_to_json(self.filters),
            "partitions": self.partitions,
            "start": self.start,
            "end": self.end,
            "limit": {
                "rows": self.limit.rows,
                "bytes": self.limit.bytes,
                "files": self.limit.files,
                "until": self.limit.until,
            },
        }
        text = _text(document)
        if len(text) > limits.question_bytes:
            raise ConfigError(
                f"a question to the table has {len(text)} bytes, above the limit of "
                f"{limits.question_bytes} (Tables.question_bytes): ask for fewer columns"
            )
        return pa.RecordBatch.from_arrays([pa.array([text])], schema=QUESTION)

    @classmethod
    def decode(cls, batch: pa.RecordBatch, limits: Tables) -> ScanRequest:
        """Raises BadCall for what is no question."""
        text = _text_of(batch, limits.question_bytes, "question", "Tables.question_bytes")
        parts = text.count("[") + text.count("{")
        if parts > limits.question_parts:
            raise BadCall(
                f"the question has {parts} lists and objects, above the limit of "
                f"{limits.question_parts} (Tables.question_parts)"
            )
        document = object_of(text, "the question", version=VERSION)
        ask = document.get("ask")
        if not isinstance(ask, str) or ask not in get_args(Ask):
            raise BadCall(f"a table cannot be asked {ask!r}; it can be {', '.join(get_args(Ask))}")
        columns = _of(document, "columns", list)
        if columns is not None and not all(isinstance(name, str) for name in columns):
            raise BadCall("columns are names")
        limit = _of(document, "limit", dict) or {}
        return cls(
            ask=cast(Ask, ask),
            columns=None if columns is None else tuple(columns),
            filters=filters_from_json(document.get("filters", []), limits.filters),
            partitions=_count(document, "partitions"),
            start=_offset(document, "start", limits),
            end=_offset(document, "end", limits),
            limit=Limit(
                rows=_count(limit, "rows"),
                bytes=_count(limit, "bytes"),
                files=_count(limit, "files"),
                until=_offset(limit, "until", limits),
            ),
        )


@dataclass(frozen=True, slots=True)
class ScanPlan:
    """What a table says. What was not asked for is None, or empty."""

    schema: pa.Schema | None = None
    """Of the batches, with the columns that were asked for."""
    streams: bool = False
    """Whether it has offsets too."""
    taken: tuple[Taken, ...] = ()
    """What becomes of each filter."""
    splits: tuple[Any, ...] = ()
    """JSON values, which mean something to the table alone."""
    offset: Offset | None = None

    def encode(self, limits: Tables) -> pa.RecordBatch:
        """The batch of the answer. Raises BadCall if it is too much."""
        schema = None
        if self.schema is not None:
            ipc = base64.b64encode(serialize_schema(self.schema)).decode()
            schema = {"ipc": ipc, "text": self.schema.to_string(show_field_metadata=False)}
        document = {
            "version": VERSION,
            "schema": schema,
            "streams": self.streams,
            "taken": list(self.taken),
            "splits": list(self.splits),
            "offset": self.offset,
        }
        text = _text(document)
        if len(text) > limits.answer_bytes:
            raise BadCall(
                f"the answer has {len(text)} bytes, above the limit of "
                f"{limits.answer_bytes} (Tables.answer_bytes): give fewer or smaller splits"
            )
        return pa.RecordBatch.from_arrays([pa.array([text])], schema=ANSWER)

    @classmethod
    def decode(cls, batch: pa.RecordBatch, limits: Tables) -> ScanPlan:
        """Raises BadCall for what is no answer."""
        text = _text_of(batch, limits.answer_bytes, "answer", "Tables.answer_bytes")
        document = object_of(text, "the answer", version=VERSION)
        taken = _of(document, "taken", list) or []
        if not all(word in get_args(Taken) for word in taken):
            raise BadCall(f"what becomes of a filter is one of {', '.join(get_args(Taken))}")
        splits = _of(document, "splits", list) or []
        if len(splits) > limits.splits:
            raise BadCall(
                f"the table has {len(splits)} splits, above the limit of {limits.splits} "
                "(Tables.splits)"
            )
        for number, split in enumerate(splits):
            split_text(split, limits, f"split {number}")
        return cls(
            schema=_schema(document),
            streams=bool(_of(document, "streams", bool)),
            taken=tuple(taken),
            splits=tuple(splits),
            offset=_offset(document, "offset", limits),
        )


@dataclass(frozen=True, slots=True)
class ScanRead:
    """What the reading of a split begins with; the schema that is expected names the columns."""

    split: Any = None
    filters: tuple[Filter, ...] = ()
    """Those that the table takes, wholly or partly."""

    def encode(self) -> str:
        """The value of ``READING``."""
        document = {
            "version": VERSION,
            "split": self.split,
            "filters": filters_to_json(self.filters),
        }
        return _text(document)

    @classmethod
    def decode(cls, text: str | None, limits: Tables) -> ScanRead:
        """Raises BadCall for what is none. The call's headers bound its size."""
        if text is None:
            raise BadCall(f"the call has no {READING!r} in its metadata: which split?")
        document = object_of(text, "the reading of a split", version=VERSION)
        filters = filters_from_json(document.get("filters", []), limits.filters)
        split = document.get("split")
        split_text(split, limits, "the split")
        return cls(split, filters)


def split_text(split: Any, limits: Tables, what: str) -> str:
    """The split as JSON. Raises BadCall that begins with ``what``: no JSON, or too long."""
    return _bounded(split, limits.split_bytes, what, "Tables.split_bytes")


def offset_text(offset: Any, limits: Tables, what: str) -> str:
    """The offset as JSON. Raises BadCall that begins with ``what``: no JSON object, or too long."""
    if not isinstance(offset, dict):
        raise BadCall(f"{what} is a dict, not {type(offset).__name__}")
    return _bounded(offset, limits.offset_bytes, what, "Tables.offset_bytes")


def _bounded(value: Any, limit: int, what: str, name: str) -> str:
    try:
        text = _text(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise BadCall(f"{what} has no form in JSON: {error}") from error
    if len(text) > limit:
        raise BadCall(
            f"{what} has {len(text)} bytes of JSON, above the limit of {limit} "
            f"({name}): say where the rows are, not what they are"
        )
    return text


def _text(document: Any) -> str:
    return json.dumps(document, ensure_ascii=True, separators=(",", ":"), allow_nan=False)


def _text_of(batch: pa.RecordBatch, limit: int, what: str, name: str) -> str:
    return text_of([batch], f"the {what}", limit=limit, name=name)


def _of(document: Mapping[str, Any], name: str, kind: type[Any]) -> Any:
    value = document.get(name)
    if value is not None and type(value) is not kind:
        raise BadCall(f"{name!r} is {kind.__name__} or null, not {type(value).__name__}")
    return value


def _count(document: Mapping[str, Any], name: str) -> int | None:
    value: int | None = _of(document, name, int)
    if value is not None and not 1 <= value < 1 << 63:
        raise BadCall(f"{name!r} is a whole number above zero")
    return value


def _offset(document: Mapping[str, Any], name: str, limits: Tables) -> Offset | None:
    value: Offset | None = _of(document, name, dict)
    if value is not None:
        offset_text(value, limits, repr(name))
    return value


def _schema(document: Mapping[str, Any]) -> pa.Schema | None:
    found = _of(document, "schema", dict)
    if found is None:
        return None
    text = found.get("ipc")
    if not isinstance(text, str):
        raise BadCall("the schema of the answer has no 'ipc'")
    return schema_of(text, "the schema of the answer")
