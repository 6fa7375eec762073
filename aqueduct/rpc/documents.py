"""JSON documents that calls carry: one object with a version, the one text of a batch.

What comes is doubted: its size is looked at before it is copied out of the batch, and before it is
read. A long one is for a thread, and read in pieces: Python lets no other thread run while it reads
one text of JSON.
"""

from __future__ import annotations

import base64
import json
import re
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from aqueduct.arrow.ipc import deserialize_schema
from aqueduct.errors import BadCall

__all__ = ["answer_of", "check_size", "object_of", "schema_of", "text_of"]

_LONG: Final = 64 << 10  # characters, which take about a millisecond
_PIECE: Final = 4096
"""Characters of an array or object that is read in one go. What is longer is taken apart."""
_SMALL: Final = 256
"""The same for those that stand deep in others: all that enclose them were tried as well."""
_DEEP: Final = 4
_DEEPEST: Final = 100
_PAUSE_EVERY: Final = 8192  # characters
_PAUSE: Final = 1e-5  # seconds; the pause releases Python's lock
_SPACE: Final = re.compile(r"[ \t\n\r]*").match
_one_long = threading.Lock()
"""Long texts are read one after the other: each thread at work is one more to wait for."""


@contextmanager
def answer_of(peer: str, handler: str) -> Iterator[None]:
    """While an answer is read: a BadCall names the service that gave it, and the handler."""
    try:
        yield
    except BadCall as error:
        if error.peer:
            raise
        raise BadCall(str(error), peer=peer, handler=handler) from error.__cause__


def text_of(batches: Sequence[pa.RecordBatch], where: str, *, limit: int, name: str = "") -> str:
    """The one text of the batches, of at most ``limit`` bytes; ``name``: of that limit.

    Raises BadCall, whose text begins with ``where``; so do the others.
    """
    rows = sum(batch.num_rows for batch in batches)
    if rows != 1:
        raise BadCall(f"{where} is one text, and {rows} came")
    (batch,) = (batch for batch in batches if batch.num_rows)
    if batch.num_columns != 1 or not pa.types.is_string(batch.schema.types[0]):
        raise BadCall(f"{where} is one text, and ({', '.join(map(str, batch.schema.types))}) came")
    size = pc.binary_length(batch.column(0))[0].as_py()
    if size is None:
        raise BadCall(f"{where} is one text, and null came")
    check_size(size, where, limit=limit, name=name)
    try:
        return str(batch.column(0)[0].as_py())
    except UnicodeDecodeError as error:
        raise BadCall(f"{where} is not UTF-8: {error}") from error


def check_size(size: int, where: str, *, limit: int, name: str = "") -> None:
    """Raises BadCall above ``limit`` bytes."""
    if size > limit:
        suffix = f" ({name})" if name else ""
        raise BadCall(f"{where} has {size} bytes, above the limit of {limit}{suffix}")


def object_of(text: str, where: str, *, version: int) -> dict[str, Any]:
    """The JSON object in ``text``, which is of this version of its kind."""
    try:
        document = _loads(text)
    except (ValueError, RecursionError) as error:
        raise BadCall(f"{where} is no JSON: {error!s:.200}") from error
    if not isinstance(document, dict):
        raise BadCall(f"{where} is a {type(document).__name__}, not an object")
    found = document.get("version")
    if type(found) is not int:
        raise BadCall(f"{where} has no 'version' of the type int")
    if found != version:
        raise BadCall(
            f"{where} is of version {found!r:.40}, and this side knows {version}: give both sides "
            "the same aqueduct-arrow"
        )
    return document


def schema_of(text: str, where: str) -> pa.Schema:
    """The schema whose IPC message is ``text`` in base64."""
    try:
        ipc = base64.b64decode(text, validate=True)
    except ValueError as error:
        raise BadCall(f"{where} is not base64") from error
    return deserialize_schema(ipc, where=where)


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


# JSON in pieces: other threads may run between two of them.

_DECODER: Final = json.JSONDecoder(parse_constant=_no_constant)


def _loads(text: str) -> Any:
    """As ``json.loads``, without numbers that JSON has not. Raises ValueError, RecursionError."""
    if len(text) <= _LONG:
        return _DECODER.decode(text)
    with _one_long:
        value, end = _value(text, _after(text, 0), 0)
    end = _after(text, end)
    if end != len(text):
        raise json.JSONDecodeError("Extra data", text, end)
    return value


def _after(text: str, at: int) -> int:
    """Where the space that begins at ``at`` ends."""
    space = _SPACE(text, at)
    assert space is not None
    return space.end()


def _value(text: str, at: int, depth: int) -> tuple[Any, int]:
    """The value that begins at ``at``, and where it ends."""
    size = _PIECE if depth < _DEEP else _SMALL
    if text[at : at + 1] not in ("{", "["):
        return _DECODER.raw_decode(text, at)
    try:
        value, end = _DECODER.raw_decode(text[at : at + size])
    except ValueError:  # it is longer, or no JSON
        return _members(text, at, depth)
    return value, at + end


def _members(text: str, at: int, depth: int) -> tuple[Any, int]:
    """The array or object that begins at ``at``, one member after the other."""
    if depth >= _DEEPEST:
        raise ValueError(f"lists and objects of a long text are nested at most {_DEEPEST} deep")
    named, close = text[at] == "{", "}" if text[at] == "{" else "]"
    array: list[Any] = []
    found: dict[str, Any] = {}
    at = paused = _after(text, at + 1)
    if text[at : at + 1] == close:
        return found if named else array, at + 1
    while True:
        if at - paused > _PAUSE_EVERY:
            # Python takes 5 ms to hand its lock over, and an event loop waits for it again and
            # again in one step: whenever it has read from a socket.
            paused = at
            time.sleep(_PAUSE)
        if named:
            if text[at : at + 1] != '"':
                raise json.JSONDecodeError("Expecting a name in double quotes", text, at)
            name, at = _DECODER.raw_decode(text, at)
            at = _after(text, at)
            if text[at : at + 1] != ":":
                raise json.JSONDecodeError("Expecting ':' delimiter", text, at)
            found[name], at = _value(text, _after(text, at + 1), depth + 1)
        else:
            value, at = _value(text, at, depth + 1)
            array.append(value)
        at = _after(text, at)
        end, at = text[at : at + 1], at + 1
        if end == close:
            return found if named else array, at
        if end != ",":
            raise json.JSONDecodeError("Expecting ',' delimiter", text, at - 1)
        at = _after(text, at)
