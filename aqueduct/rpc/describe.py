"""What a service tells of itself: the answer to the reserved source ``aqueduct.describe``.

It is a call like any other, of one batch with one row: a JSON document. So it also tells whether a
service answers at all, over every carrier.
"""

from __future__ import annotations

import base64
import difflib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa

from aqueduct.arrow.ipc import serialize_schema
from aqueduct.arrow.schema import shorten
from aqueduct.errors import BadCall, UnknownHandler
from aqueduct.rpc import keys
from aqueduct.rpc.documents import answer_of, schema_of, text_of
from aqueduct.rpc.request import KINDS, Kind

__all__ = [
    "DESCRIBE",
    "DESCRIBE_SCHEMA",
    "RESERVED_PREFIX",
    "Description",
    "HandlerDescription",
    "SinkSummary",
    "TableDescription",
]

RESERVED_PREFIX: Final = "aqueduct."
"""Names of handlers that begin so belong to the library."""
DESCRIBE: Final = "aqueduct.describe"
"""The handler that every service has."""
DESCRIBE_SCHEMA: Final = pa.schema([pa.field("description", pa.string(), nullable=False)])
"""The schema of its one batch."""

_LIMIT: Final = 16 << 20


@dataclass(frozen=True, slots=True)
class HandlerDescription:
    """One handler. A schema of None is not fixed beforehand: it depends on the call."""

    name: str
    kind: Kind
    input: pa.Schema | None = None
    output: pa.Schema | None = None
    concurrency: int = 1
    """Batches of one call that it works on at once."""
    idempotent: bool = False
    """Whether a broken call may be resumed."""
    summary: str = ""
    """The first line of its docstring."""
    max_concurrency: int | None = None
    """Calls that are at work at once, others wait; None: any number. Of a function of one batch it
    counts batches, or runs of several."""


@dataclass(frozen=True, slots=True)
class TableDescription:
    """One table. A schema of None depends on the call."""

    name: str
    schema: pa.Schema | None = None
    streams: bool = False
    """Whether it can be read as a stream."""
    summary: str = ""
    """The first line of its docstring."""


@dataclass(frozen=True, slots=True)
class SinkSummary:
    """One sink that writes exactly once. A schema of None: it takes any rows."""

    name: str
    schema: pa.Schema | None = None
    summary: str = ""
    """The first line of its docstring."""


@dataclass(frozen=True, slots=True)
class Description:
    """A service, its handlers, its tables and its sinks."""

    service: str
    """The service's name."""
    library: str
    """The version of aqueduct-arrow."""
    convention: int = keys.VERSION
    """The version of the Arrow call convention."""
    handlers: tuple[HandlerDescription, ...] = ()
    summary: str = ""
    """What it is for, in a line or two."""
    tables: tuple[TableDescription, ...] = ()
    sinks: tuple[SinkSummary, ...] = ()

    def exchange(self, name: str) -> HandlerDescription:
        """The exchange handler of this name. Raises UnknownHandler that names the near miss."""
        handlers = {each.name: each for each in self.handlers if each.kind == "exchange"}
        if name in handlers:
            return handlers[name]
        near = difflib.get_close_matches(name, handlers, n=1)
        guess = f"did you mean {near[0]!r}? " if near else ""
        raise UnknownHandler(
            f"the service {self.service!r} has no handler {name!r} of the kind exchange; "
            f"{guess}it has {shorten(', '.join(map(repr, handlers))) or 'none'}",
            handler=name,
        )

    def to_json(self) -> str:
        """The document; schemas are there for programs (base64 of IPC) and as text for people."""
        document = {
            "service": self.service,
            "summary": self.summary,
            "library": self.library,
            "convention": self.convention,
            "handlers": [
                {
                    "name": handler.name,
                    "kind": handler.kind,
                    "input": _schema_to_json(handler.input),
                    "output": _schema_to_json(handler.output),
                    "concurrency": handler.concurrency,
                    "idempotent": handler.idempotent,
                    "summary": handler.summary,
                    "max_concurrency": handler.max_concurrency,
                }
                for handler in self.handlers
            ],
            "tables": [
                {
                    "name": table.name,
                    "schema": _schema_to_json(table.schema),
                    "streams": table.streams,
                    "summary": table.summary,
                }
                for table in self.tables
            ],
            "sinks": [
                {"name": sink.name, "schema": _schema_to_json(sink.schema), "summary": sink.summary}
                for sink in self.sinks
            ],
        }
        return json.dumps(document, ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str | bytes, *, peer: str = "") -> Description:
        """The description that a document holds. Raises BadCall if it holds none."""
        try:
            if len(text) > _LIMIT:
                raise BadCall(f"it has {len(text)} bytes, above the limit of {_LIMIT}")
            document = json.loads(text)
            return cls(
                service=_of_type(document, "service", str),
                library=_of_type(document, "library", str),
                convention=_of_type(document, "convention", int),
                handlers=tuple(map(_handler_from_json, _of_type(document, "handlers", list))),
                summary=_of_type({"summary": "", **document}, "summary", str),
                tables=tuple(
                    map(_table_from_json, _of_type({"tables": [], **document}, "tables", list))
                ),
                sinks=tuple(
                    map(_sink_from_json, _of_type({"sinks": [], **document}, "sinks", list))
                ),
            )
        except (ValueError, RecursionError, BadCall) as error:
            text = f"the description of the service cannot be read: {error}"
            raise BadCall(text, peer=peer, handler=DESCRIBE) from error

    def to_batch(self) -> pa.RecordBatch:
        """The one batch of the answer, of ``DESCRIBE_SCHEMA``."""
        return pa.RecordBatch.from_arrays([pa.array([self.to_json()])], schema=DESCRIBE_SCHEMA)

    @classmethod
    def from_batches(cls, batches: Iterable[pa.RecordBatch], *, peer: str = "") -> Description:
        """The description that an answer holds. Raises BadCall if it holds none."""
        came = tuple(batches)
        rows = sum(batch.num_rows for batch in came)
        with answer_of(peer, DESCRIBE):
            if rows != 1:
                raise BadCall(f"the description of the service is one text, and {rows} rows came")
            text = text_of(came, "the description of the service", limit=_LIMIT)
            return cls.from_json(text, peer=peer)


def _schema_to_json(schema: pa.Schema | None) -> dict[str, str] | None:
    if schema is None:
        return None
    ipc = base64.b64encode(serialize_schema(schema)).decode()
    return {"ipc": ipc, "text": schema.to_string(show_field_metadata=False)}


def _schema_from_json(document: Any, name: str) -> pa.Schema | None:
    if document.get(name) is None:
        return None
    return schema_of(_of_type(_of_type(document, name, dict), "ipc", str), f"{name!r}")


def _handler_from_json(document: Any) -> HandlerDescription:
    kind = _of_type(document, "kind", str)
    for known in KINDS:
        if kind == known:
            return HandlerDescription(
                name=_of_type(document, "name", str),
                kind=known,
                input=_schema_from_json(document, "input"),
                output=_schema_from_json(document, "output"),
                concurrency=_of_type(document, "concurrency", int),
                idempotent=_of_type(document, "idempotent", bool),
                summary=_of_type(document, "summary", str),
                max_concurrency=_number_or_none(document, "max_concurrency"),
            )
    raise BadCall(f"{kind!r} is no kind of handler")


def _table_from_json(document: Any) -> TableDescription:
    return TableDescription(
        name=_of_type(document, "name", str),
        schema=_schema_from_json(document, "schema"),
        streams=_of_type(document, "streams", bool),
        summary=_of_type(document, "summary", str),
    )


def _sink_from_json(document: Any) -> SinkSummary:
    return SinkSummary(
        name=_of_type(document, "name", str),
        schema=_schema_from_json(document, "schema"),
        summary=_of_type(document, "summary", str),
    )


def _number_or_none(document: dict[str, Any], name: str) -> int | None:
    return None if document.get(name) is None else _of_type(document, name, int)


def _of_type(document: Any, name: str, kind: type[Any]) -> Any:
    if not isinstance(document, dict) or type(document.get(name)) is not kind:
        raise BadCall(f"it has no {name!r} of the type {kind.__name__}")
    value = document[name]
    if kind is str and not _is_text(value):
        raise BadCall(f"its {name!r} has half a character: {value!a:.80}")
    return value


def _is_text(value: str) -> bool:
    """Whether it can be shown: JSON may hold one half of a pair of surrogates."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True
