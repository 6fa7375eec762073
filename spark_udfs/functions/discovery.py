"""What a service says of a handler: what it takes, and what comes of rows of some schema."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import pyarrow as pa

from aqueduct.arrow.schema import check
from aqueduct.client.reactive_client import ReactiveTaskClient
from aqueduct.client.sync_client import SyncClient
from aqueduct.errors import ConfigError
from aqueduct.rpc.describe import (
    DESCRIBE,
    DESCRIBE_SCHEMA,
    Description,
    HandlerDescription,
)
from spark_udfs.calls.partition import CallSpec, reach
from spark_udfs.functions.casts import Casting
from spark_udfs.functions.columns import ColumnShape, Shaper, joined_schema
from spark_udfs.schemas import AnySchema, arrow_schema
from spark_udfs.spark_schemas import arrow_of, spark_schema
from spark_udfs.spark_types import Refusal, check_names, shown

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import StructType

__all__ = ["declared_input", "declared_output", "output_schema", "refusal", "takes_and_answers"]

Found = TypeVar("Found")

_inputs: dict[tuple[str, str], pa.Schema | None] = {}
_lock = threading.Lock()


def declared_input(calling: CallSpec, *, task: int | None = None) -> pa.Schema | None:
    """What the handler takes, None if it takes anything. A process asks once for each handler.

    A worker ends with a task that failed, so a service that has changed is asked again.
    """
    key = calling.addresses[0], calling.handler
    with _lock:
        if key not in _inputs:
            _inputs[key] = _described(calling, task).input
        return _inputs[key]


def declared_output(calling: CallSpec) -> pa.Schema:
    """What the handler answers with, whatever it is sent. Raises ConfigError if that depends."""
    return takes_and_answers(calling)[1]


def takes_and_answers(calling: CallSpec) -> tuple[pa.Schema | None, pa.Schema]:
    """What the handler takes, None if it takes anything, and what it answers with.

    The service is asked, from here. Raises ConfigError if the answer depends on what is sent.
    """
    handler = _described(calling, None)
    if handler.output is None:
        raise ConfigError(
            f"what handler {calling.handler!r} at {calling.places} answers with depends on what it "
            "is sent: say what comes back, returns="
        )
    return handler.input, handler.output


def output_schema(
    calling: CallSpec,
    shape: ColumnShape,
    rows: AnySchema | DataFrame,
    *,
    answer: pa.Schema | None,
    input_schema: pa.Schema | None,
) -> StructType:
    """What comes of ``rows``; see ``Exchange.output_schema``. ``answer``: declared, or None."""
    from pyspark.sql.types import StringType, StructField, StructType

    schema: Any = getattr(rows, "schema", rows)
    came = arrow_schema(schema, "rows", calendar=True)
    shaper = Shaper(shape, came, handler=calling.handler)
    if answer is None:
        answer = _answer(calling, shape, shaper.sent, input_schema)
    joined = joined_schema(shape, came, answer)
    check_names(joined, f"the answer of {calling.handler!r}")
    known = schema if isinstance(schema, StructType) else StructType()
    own: list[StructField] = []
    if shape.columns:
        given = schema if isinstance(schema, StructType) else spark_schema(came, refusal("rows"))
        own = list(given.fields)
    replaced = set(answer.names) if shape.mode == "replace" else set()
    found = []
    for place, field in enumerate(joined):
        if place < len(own) and field.name not in replaced:
            found.append(own[place])
        elif shape.error_column and field.name == shape.error_column:
            found.append(StructField(field.name, StringType()))
        else:
            refused = refusal(f"the answer of {calling.handler!r}")
            found += spark_schema(pa.schema([field]), refused, known=[known]).fields
    made = StructType(found)
    arrow_of(made, f"what comes of the rows of {calling.handler!r}")  # Spark is to take all of it
    return made


def refusal(where: str) -> Refusal:
    """The error for a column that Spark has no type for; its text begins with ``where``."""

    def refused(column: str, kind: Any, advice: str) -> ConfigError:
        cast = pa.types.is_decimal(kind)  # of the others nothing else can be made
        return ConfigError(
            f"{where}: column {column!r} is {shown(kind)}, and Spark has no such type; {advice}"
            + (", or name another in schema= and let cast=True make it" if cast else "")
        )

    return refused


def _answer(
    calling: CallSpec, shape: ColumnShape, sent: pa.Schema, input_schema: pa.Schema | None
) -> pa.Schema:
    """What the handler answers with to batches of ``sent``, which are compared with its input."""
    handler = _described(calling, None)
    where = f"the input of handler {calling.handler!r}"
    if shape.cast:
        wanted = input_schema or handler.input
        if wanted is not None:
            sent = Casting(wanted, sent, where=where).schema
    elif handler.input is not None:
        check(handler.input, sent, where=where, handler=calling.handler)
    if handler.output is None and calling.is_reactive:
        raise ConfigError(
            f"what handler {calling.handler!r} answers with depends on what it is sent, and over "
            "ReactiveSocket it cannot be asked without a batch: give schema="
        )
    return handler.output or _ask(calling, None, lambda client: _opened(client, calling, sent))


def _opened(client: SyncClient, calling: CallSpec, sent: pa.Schema) -> pa.Schema:
    """What a call without a batch would be answered with: it depends on what is sent."""
    stream = client.exchange(
        calling.handler,
        (),
        schema=sent,
        deadline=calling.deadline,
        token=calling.fresh_token(),
        headers=dict(calling.headers),
    )
    with stream:
        schema = stream.opened()
    assert schema is not None
    return schema


def _described(calling: CallSpec, task: int | None) -> HandlerDescription:
    """What the service says of the handler. Raises UnknownHandler that names the near miss."""
    return _description(calling, task).exchange(calling.handler)


def _description(calling: CallSpec, task: int | None) -> Description:
    if not calling.is_reactive:
        return _ask(calling, task, lambda client: _describe(client, calling))
    lease = reach(calling, task=task)
    try:
        caller = lease.caller
        if isinstance(caller, ReactiveTaskClient):
            found = caller.describe(token=calling.fresh_token())
        else:  # the first address that is there is none of ReactiveSocket
            found = _describe(caller, calling)
    finally:
        lease.release()
    if found is None:
        raise ConfigError(
            f"{lease.peer.bare} does not say what its handler {calling.handler!r} takes and "
            "answers, as a service of Aqueduct does: give schema=, and input_schema= with cast"
        )
    return found


def _describe(client: SyncClient, calling: CallSpec) -> Description:
    stream = client.source(
        DESCRIBE,
        output_schema=DESCRIBE_SCHEMA,
        token=calling.fresh_token(),
        headers=dict(calling.headers),
    )
    with stream:
        return Description.from_batches(list(stream), peer=client.address)


def _ask(calling: CallSpec, task: int | None, ask: Callable[[SyncClient], Found]) -> Found:
    """Asks the first of the addresses that is there."""
    lease = reach(calling, task=task)
    try:
        return ask(lease.client)
    finally:
        lease.release()
