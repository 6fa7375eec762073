"""The documents of a write that is committed as a whole: what clients and sinks tell each other.

A write is a piece of work that is done exactly once or not at all; its key names it. Attempts write
its partitions, each by one call that is answered with a receipt. Then one call commits the write by
the receipts of some of them, or aborts it. All documents are JSON, in a batch of one row and one
column. ``docs/protocols/arrow-calls.md`` has them member by member.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import pyarrow as pa

from aqueduct.arrow.ipc import serialize_schema
from aqueduct.errors import BadCall
from aqueduct.rpc.documents import check_size, object_of, schema_of, text_of

__all__ = [
    "ABORT",
    "ATTEMPT_HEADER",
    "CLAIM",
    "COMMIT",
    "DOCUMENT_SCHEMA",
    "LOOK",
    "VERSION",
    "WRITE",
    "Attempt",
    "Claim",
    "ClaimedKey",
    "PreparedAttempt",
    "Receipt",
    "Settlement",
    "SinkDescription",
    "Source",
    "WriteKey",
    "document_of",
    "number_of",
    "numbered",
    "to_batch",
]

WRITE: Final = "aqueduct.sink.write."
"""With the sink's name behind it: the exchange that is one attempt."""
COMMIT: Final = "aqueduct.sink.commit."
"""With the sink's name behind it: commits a write."""
ABORT: Final = "aqueduct.sink.abort."
"""With the sink's name behind it: aborts a write."""
CLAIM: Final = "aqueduct.sink.claim."
"""With the sink's name behind it: claims a key for a writer, and tells what it has committed."""
LOOK: Final = "aqueduct.sink.look."
"""With the sink's name behind it: what the sink takes."""
ATTEMPT_HEADER: Final = "aqueduct-attempt"
"""In the metadata of a call of ``WRITE``: which attempt it is."""
DOCUMENT_SCHEMA: Final = pa.schema([pa.field("document", pa.string(), nullable=False)])
"""Of every batch that holds a document."""

Source: TypeAlias = str | Sequence[pa.RecordBatch]
"""A document's text, or the batches that carry it."""

VERSION: Final = 1
"""Of the documents."""
_KEY_LIMIT: Final = 256
_ATTEMPT_LIMIT: Final = 4096
_NUMBER_LIMIT: Final = (1 << 63) - 1
_NUMBER_BYTES: Final = len(f"/{_NUMBER_LIMIT}")


@dataclass(frozen=True, slots=True)
class WriteKey:
    """A piece of work that is written exactly once, or not at all."""

    key: str
    """Names it: the same whenever the work is done again, 1 to 256 bytes of printable text."""
    overwrite: bool = False
    """Whether its rows take the place of all that was there, rather than being added."""

    def __post_init__(self) -> None:
        _check_text(self.key, "a write key", least=1)

    @property
    def id(self) -> str:
        """32 characters of [0-9a-f] that stand for ``key``, fit for a file or a table."""
        return _digest(self.key)


@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt at writing one partition of a write."""

    write_key: WriteKey
    execution: str = ""
    """Tells apart the times that it was worked on: one job, one start of a streaming query."""
    stage: int = 0
    partition: int = 0
    task: int = 0
    """Tells the attempts at one partition apart."""

    def __post_init__(self) -> None:
        _check_text(self.execution, "the execution of an attempt")
        for name in ("stage", "partition", "task"):
            value = getattr(self, name)
            if type(value) is not int or not 0 <= value <= _NUMBER_LIMIT:
                raise BadCall(f"the {name} of an attempt is {value!r:.40}; it counts from 0")

    @property
    def id(self) -> str:
        """32 characters of [0-9a-f] that no other attempt has, fit for a file or a table."""
        parts = (self.write_key.key, self.execution, self.stage, self.partition, self.task)
        return _digest(json.dumps(parts))

    def __str__(self) -> str:
        return (
            f"partition {self.partition} of write {self.write_key.key!r} "
            f"(execution {self.execution!r}, stage {self.stage}, task {self.task})"
        )

    def to_json(self) -> str:
        """All of it, in text: for ``ATTEMPT_HEADER``, and for a sink's own notes."""
        key = self.write_key
        head = {"version": VERSION, "run": key.key, "overwrite": key.overwrite}
        return json.dumps({**head, **_attempt_to_json(self)})

    @classmethod
    def from_json(cls, text: str) -> Attempt:
        """The attempt that ``to_json`` wrote down. Raises BadCall."""
        where = "the document of an attempt"
        document = document_of(text, where, limit=_ATTEMPT_LIMIT)
        return _attempt_from_json(_write_key_from_json(document, where), document)


@dataclass(frozen=True, slots=True)
class PreparedAttempt:
    """An attempt that has its receipt: nothing but the commit of its write is left to do."""

    attempt: Attempt
    receipt: Any = None
    """What ``prepare`` returned, after a way through JSON."""


@dataclass(frozen=True, slots=True)
class Settlement:
    """What a commit or an abort asks for."""

    write_key: WriteKey
    prepared: tuple[PreparedAttempt, ...] = ()
    """To be committed: these and no others. To be aborted: these, and all that are known."""
    execution: str | None = None
    """Of an abort: the attempts of this execution alone; None: those of all. Of a writer's commit:
    that of the writer."""
    note: Any = None
    """Of a commit: JSON that the sink keeps with it; None: none."""

    def to_json(self) -> str:
        """The document. Raises BadCall for a receipt or a note that JSON cannot hold."""
        document: dict[str, Any] = {
            "version": VERSION,
            "run": self.write_key.key,
            "overwrite": self.write_key.overwrite,
            "execution": self.execution,
            "attempts": [
                {**_attempt_to_json(each.attempt), "receipt": each.receipt}
                for each in self.prepared
            ],
        }
        if self.note is not None:
            _dumps(self.note, "a note")
            document["note"] = self.note
        return _dumps(document, "a receipt")

    @classmethod
    def from_json(cls, source: Source, *, limit: int) -> Settlement:
        """What a document asks for. Raises BadCall if it is none, or longer than ``limit``."""
        where = "the document of a commit or abort"
        document = document_of(source, where, limit=limit)
        write_key = _write_key_from_json(document, where)
        execution = document.get("execution")
        if execution is not None:
            _check_text(execution, "the execution of a commit or abort")
        prepared, seen = [], set()
        for entry in _member(document, "attempts", list, where):
            attempt = _attempt_from_json(write_key, entry)
            if attempt.partition in seen:
                raise BadCall(
                    f"{where} names partition {attempt.partition} twice; one attempt at each "
                    "partition can count"
                )
            seen.add(attempt.partition)
            if "receipt" not in entry:
                raise BadCall(f"{where} has no receipt for {attempt}")
            prepared.append(PreparedAttempt(attempt, entry["receipt"]))
        return cls(write_key, tuple(prepared), execution, document.get("note"))


@dataclass(frozen=True, slots=True)
class Claim:
    """What a writer asks before its first batch: to be the one that writes under ``key``."""

    key: str
    """Its commits have the write keys ``numbered(key, 0)``, 1, 2 and so on."""
    execution: str
    """That of the writer's attempts: those of others are aborted."""

    def __post_init__(self) -> None:
        numbered(self.key, _NUMBER_LIMIT)
        _check_text(self.execution, "the execution of a claim", least=1)

    def to_json(self) -> str:
        """The document."""
        return json.dumps({"version": VERSION, "key": self.key, "execution": self.execution})

    @classmethod
    def from_json(cls, source: Source, *, limit: int) -> Claim:
        """What a document asks for. Raises BadCall if it is none, or longer than ``limit``."""
        where = "the document of a claim"
        document = document_of(source, where, limit=limit)
        return cls(*(_member(document, name, str, where) for name in ("key", "execution")))


@dataclass(frozen=True, slots=True)
class ClaimedKey:
    """The answer to a claim."""

    description: SinkDescription
    commits: int
    """How many are there: the next one has this number."""
    note: Any = None
    """The note of the last of them."""

    def to_json(self) -> str:
        """The document. Raises BadCall for a note that JSON cannot hold."""
        more = {"commits": self.commits, "note": self.note}
        return _dumps({**json.loads(self.description.to_json()), **more}, "a note")

    @classmethod
    def from_json(cls, source: Source, *, limit: int) -> ClaimedKey:
        """The answer in a document. Raises BadCall."""
        where = "the answer to a claim"
        document = document_of(source, where, limit=limit)
        commits = _member(document, "commits", int, where)
        if not 0 <= commits <= _NUMBER_LIMIT:
            raise BadCall(f"{where}: the number of commits is {commits!r:.40}; it counts from 0")
        return cls(_description_of(document, where), commits, document.get("note"))


@dataclass(frozen=True, slots=True)
class Receipt:
    """The answer to an attempt."""

    receipt: Any
    """What the sink's ``prepare`` returned."""
    batches: int
    """Batches that it was given."""
    rows: int
    """Rows of them: the client compares both with what it sent."""

    def to_json(self, *, limit: int) -> str:
        """The document. Raises BadCall if JSON cannot hold the receipt, or it is too long."""
        text = _dumps(self.receipt, "a receipt")
        if len(text) > limit:
            raise BadCall(
                f"a receipt of {len(text)} bytes is above the limit of {limit} "
                "(Sinks.receipt_bytes); keep what is large with the sink"
            )
        counts = {"version": VERSION, "batches": self.batches, "rows": self.rows}
        return f'{json.dumps(counts)[:-1]}, "receipt": {text}}}'

    @classmethod
    def from_json(cls, source: Source, *, limit: int) -> Receipt:
        """The answer in a document. Raises BadCall."""
        where = "the receipt of an attempt"
        document = document_of(source, where, limit=limit)
        if "receipt" not in document:
            raise BadCall(f"{where} has no member 'receipt'")
        batches, rows = (_member(document, name, int, where) for name in ("batches", "rows"))
        return cls(document["receipt"], batches, rows)


@dataclass(frozen=True, slots=True)
class SinkDescription:
    """What a sink tells of itself."""

    schema: pa.Schema | None
    """Of the batches that it takes; None: of any."""
    time_to_live: float
    """Seconds after which it aborts what was prepared and not committed."""

    def to_json(self) -> str:
        """The document."""
        schema = None
        if self.schema is not None:
            schema = base64.b64encode(serialize_schema(self.schema)).decode()
        return json.dumps({"version": VERSION, "schema": schema, "time_to_live": self.time_to_live})

    @classmethod
    def from_json(cls, source: Source, *, limit: int) -> SinkDescription:
        """The description in a document. Raises BadCall."""
        where = "the description of a sink"
        return _description_of(document_of(source, where, limit=limit), where)


def numbered(key: str, number: int) -> WriteKey:
    """The write key of commit ``number`` of the writer with ``key``. Raises BadCall."""
    _check_text(key, "the key of a writer", least=1, most=_KEY_LIMIT - _NUMBER_BYTES)
    return WriteKey(f"{key}/{number}")


def number_of(write_key: WriteKey) -> tuple[str, int] | None:
    """The key of the writer and the number of the commit; None: the write key is none of these."""
    key, slash, number = write_key.key.rpartition("/")
    found = slash and number.isascii() and number.isdigit() and len(number) < _NUMBER_BYTES
    return (key, int(number)) if found and str(int(number)) == number else None


def to_batch(text: str) -> pa.RecordBatch:
    """The batch that carries a document."""
    return pa.RecordBatch.from_arrays([pa.array([text], pa.string())], schema=DOCUMENT_SCHEMA)


def document_of(source: Source, where: str, *, limit: int) -> Mapping[str, Any]:
    """The JSON object of this version in a text, or in the one batch that carries it.

    Raises BadCall, whose text begins with ``where``.
    """
    if isinstance(source, str):
        check_size(len(source.encode("utf-8", "surrogatepass")), where, limit=limit)
    else:
        source = text_of(source, where, limit=limit)
    return object_of(source, where, version=VERSION)


def _write_key_from_json(document: Mapping[str, Any], where: str) -> WriteKey:
    return WriteKey(
        _member(document, "run", str, where), _member(document, "overwrite", bool, where)
    )


def _attempt_to_json(attempt: Attempt) -> dict[str, Any]:
    return {
        "execution": attempt.execution,
        "stage": attempt.stage,
        "partition": attempt.partition,
        "task": attempt.task,
    }


def _attempt_from_json(write_key: WriteKey, document: Any) -> Attempt:
    where = "an attempt"
    return Attempt(
        write_key,
        execution=_member(document, "execution", str, where),
        stage=_member(document, "stage", int, where),
        partition=_member(document, "partition", int, where),
        task=_member(document, "task", int, where),
    )


def _member(document: Any, name: str, kind: type[Any], where: str) -> Any:
    if not isinstance(document, dict):
        raise BadCall(f"{where} is a {type(document).__name__}, not an object")
    if type(document.get(name)) is not kind:
        raise BadCall(f"{where} has no {name!r} of the type {kind.__name__}")
    return document[name]


def _description_of(document: Mapping[str, Any], where: str) -> SinkDescription:
    schema, seconds = document.get("schema"), document.get("time_to_live")
    if not isinstance(seconds, int | float):
        raise BadCall(f"{where} has no number 'time_to_live'")
    if schema is not None:
        schema = schema_of(_member(document, "schema", str, where), f"{where}: its schema")
    return SinkDescription(schema, float(seconds))


def _check_text(text: Any, what: str, *, least: int = 0, most: int = _KEY_LIMIT) -> None:
    if not isinstance(text, str) or not text.isprintable():
        raise BadCall(f"{what} is {text!r:.100}; it must be printable text")
    if not least <= len(text.encode("utf-8", "surrogatepass")) <= most:
        raise BadCall(f"{what} is {text!r:.100}; it must have {least} to {most} bytes")


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _dumps(value: Any, what: str) -> str:
    try:
        return json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise BadCall(f"{what} cannot be written as JSON: {error}") from error
