"""JSON documents that calls carry: one object with a version, the one text of a batch.

What comes is doubted: its size is looked at before it is copied out of the batch, and before it is
read.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from aqueduct.arrow.ipc import deserialize_schema
from aqueduct.errors import BadCall

__all__ = ["answer_of", "check_size", "object_of", "schema_of", "text_of"]


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
        document = json.loads(text, parse_constant=_no_constant)
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
