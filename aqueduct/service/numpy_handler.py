"""Handlers on numpy arrays: functions of a dict of arrays that return one."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pyarrow as pa

from aqueduct.arrow.numpy_arrays import arrays_of, batch_of, check_schema
from aqueduct.errors import BadCall, ConfigError
from aqueduct.service.context import Call

__all__ = ["on_arrays"]


def on_arrays(
    function: Callable[..., Any],
    *,
    where: str,
    is_async: bool,
    takes_call: bool,
    input: pa.Schema | None,
    output: Any,
    nan: bool,
) -> Callable[[pa.RecordBatch, Any], Any]:
    """A function of one batch, ``(batch, call)``, around a ``function`` of a dict of arrays.

    With ``batch=`` the call is a tuple of CallRows, whose rows were put together. ``where`` names
    the handler. ``is_async``: it is a coroutine function. ``nan``: nulls of floats become NaN.
    Raises ConfigError for schemas with columns that have no array.
    """
    if input is not None:
        check_schema(input, f"{where}: input")
    if isinstance(output, pa.Schema):
        check_schema(output, f"{where}: output")

    def given(batch: pa.RecordBatch, call: Any) -> tuple[Any, ...]:
        try:
            if input is None:
                check_schema(batch.schema, "numpy")
            arrays = arrays_of(batch, nan=nan)
        except (ConfigError, ValueError) as error:
            raise BadCall(f"{error} (the handler works on numpy arrays)") from error
        return (arrays, call) if takes_call else (arrays,)

    def made(result: Any, call: Any) -> pa.RecordBatch:
        one: Call = call[0].call if isinstance(call, tuple) else call
        schema = output if isinstance(output, pa.Schema) else one.output_schema
        assert schema is not None  # of an exchange it is known
        return batch_of(result, schema)

    def work(batch: pa.RecordBatch, call: Any) -> pa.RecordBatch:
        return made(function(*given(batch, call)), call)

    async def work_async(batch: pa.RecordBatch, call: Any) -> pa.RecordBatch:
        answer: Awaitable[Any] = function(*given(batch, call))
        return made(await answer, call)

    return work_async if is_async else work
