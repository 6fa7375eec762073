"""What may be registered with a Service, looked at once: its shape, its schemas, its arguments.

| kind | shapes | is called with |
|---|---|---|
| ``exchange`` | async generator, generator | ``(batches, call)`` |
| ``exchange`` | function or coroutine function of one batch | ``(batch, call)`` |
| ``source`` | async generator, generator | ``(call)`` |
| ``sink`` | function or coroutine function | ``(batches, call)`` |

``call`` may be left out of the signature. Functions and generators without ``async`` run in
threads.
"""

from __future__ import annotations

import functools
import inspect
import os
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import pyarrow as pa

from aqueduct import forks
from aqueduct.arguments import signature_of
from aqueduct.arrow.capsules import as_batch, has_batch
from aqueduct.errors import AqueductError, ConfigError, HandlerFailed
from aqueduct.rpc.describe import RESERVED_PREFIX
from aqueduct.rpc.request import Kind
from aqueduct.service.batching import Batching

if TYPE_CHECKING:
    from aqueduct.service.context import Call

__all__ = [
    "EXCHANGE",
    "SINK",
    "SOURCE",
    "Handler",
    "HandlerShape",
    "OutputSchema",
    "answer_batch",
    "handler_failed",
    "make_handler",
    "object_of",
    "shape_of",
    "takes_last",
]

_PACKAGE: Final = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep

EXCHANGE: Final[Kind] = "exchange"
SOURCE: Final[Kind] = "source"
SINK: Final[Kind] = "sink"

OutputSchema: TypeAlias = "pa.Schema | Callable[[Any], pa.Schema] | None"
"""A schema, or what makes it of the input's schema (for a source: of the Call). None: the input's.
"""


class HandlerShape(Enum):
    """How a handler is written."""

    ASYNC_GENERATOR = "async generator"
    GENERATOR = "generator"
    COROUTINE = "coroutine function"
    FUNCTION = "function"


_FOLLOWED: Final[dict[HandlerShape, Callable[[Any], Any]]] = {
    HandlerShape.GENERATOR: forks.iterate,
    HandlerShape.COROUTINE: forks.steps,
    HandlerShape.ASYNC_GENERATOR: forks.AsyncSteps,
}
"""How handlers that go on after their call are watched for a fork."""


_SHAPES: Final = {
    EXCHANGE: frozenset(HandlerShape),
    SOURCE: frozenset({HandlerShape.ASYNC_GENERATOR, HandlerShape.GENERATOR}),
    SINK: frozenset({HandlerShape.COROUTINE, HandlerShape.FUNCTION}),
}
_CALLED_WITH: Final = {
    EXCHANGE: {
        HandlerShape.ASYNC_GENERATOR: "(batches, call)",
        HandlerShape.GENERATOR: "(batches, call)",
        HandlerShape.COROUTINE: "(batch, call)",
        HandlerShape.FUNCTION: "(batch, call)",
    },
    SOURCE: dict.fromkeys(HandlerShape, "(call)"),
    SINK: dict.fromkeys(HandlerShape, "(batches, call)"),
}


@dataclass(frozen=True, slots=True)
class Handler:
    """One registered handler."""

    name: str
    kind: Kind
    """"exchange", "source" or "sink"."""
    function: Callable[..., Any]
    shape: HandlerShape
    takes_call: bool
    """Whether the signature has a place for the Call."""
    input: pa.Schema | None
    """What it accepts; None: anything."""
    output: OutputSchema
    concurrency: int
    """Batches of one call worked on at once."""
    idempotent: bool
    """Whether a batch may be handed to it again, for example after a lost connection."""
    max_calls: int | None
    """Calls open at once; None leaves it to the service's limits."""
    max_concurrency: int | None
    """Calls that run at once, for a function of one batch: batches of all calls; with ``batching``:
    runs. None: there is no waiting room."""
    queue: int | None
    """Calls that wait for that at most; None: Calls.queue."""
    batching: Batching | None
    """How batches of different calls are put together; None: they are not."""
    description: str
    one_to_one: bool
    """Whether it is a function of one batch, so that each batch has one answer."""
    fault: str
    """What is wrong where it answers with another schema; the remedy follows this text."""

    def invoke(self, *arguments: Any) -> Any:
        """Calls the function; the Call is the last of ``arguments``."""
        result = forks.call(self.function, arguments if self.takes_call else arguments[:-1])
        follow = _FOLLOWED.get(self.shape)
        return result if follow is None else follow(result)

    def output_schema(self, call: Call) -> pa.Schema | None:
        """What the handler yields in this call; None for a sink.

        Raises what a callable ``output`` raises, and TypeError if it gives no schema.
        """
        if self.kind == SINK:
            return None
        if isinstance(self.output, pa.Schema):
            return self.output
        if self.output is None:
            return call.schema
        schema = self.output(call if self.kind == SOURCE else call.schema)
        if not isinstance(schema, pa.Schema):
            raise TypeError(
                f"output of handler {self.name!r} gave a {type(schema).__name__}, not a "
                "pyarrow.Schema"
            )
        return schema


def make_handler(
    function: Callable[..., Any],
    *,
    name: str,
    kind: Kind,
    input: pa.Schema | None,
    output: OutputSchema,
    concurrency: int,
    idempotent: bool,
    max_calls: int | None,
    description: str,
    max_concurrency: int | None = None,
    queue: int | None = None,
    batch: Batching | None = None,
    numpy: Any = False,
) -> Handler:
    """Checks what a user registers. Raises ConfigError that says what would do."""
    where = f"handler {name!r}"
    if not isinstance(name, str) or not name or len(name.encode()) > 256:
        raise ConfigError(f"a handler's name is {name!r}; it must be text of 1 to 256 bytes")
    if not isinstance(kind, str) or kind not in _SHAPES:
        known = ", ".join(repr(known) for known in _SHAPES)
        raise ConfigError(f"{where}: kind is {kind!r}; known kinds: {known}")
    if not callable(function):
        raise ConfigError(f"{where}: a function is wanted, got {type(function).__name__}")
    shape = shape_of(function)
    if shape not in _SHAPES[kind]:
        wanted = " or ".join(sorted(f"{fit.value}" for fit in _SHAPES[kind]))
        raise ConfigError(f"{where}: a {kind} must be written as {wanted}, not as {shape.value}")
    if batch is not None and not isinstance(batch, Batching):
        raise ConfigError(
            f"{where}: batch is {batch!r:.80}; it must be an aqueduct.Batching, such as "
            "aqueduct.Batching(rows=4096)"
        )
    called_with, last = _CALLED_WITH[kind][shape], "call"
    if batch is not None and called_with == "(batch, call)":
        called_with, last = "(batch, calls)", "calls"
    takes_call = takes_last(f"{where}: it", function, called_with, last=last)
    if input is not None and not isinstance(input, pa.Schema):
        raise ConfigError(f"{where}: input must be a pyarrow.Schema, not {type(input).__name__}")
    if output is not None and not isinstance(output, pa.Schema) and not callable(output):
        raise ConfigError(
            f"{where}: output must be a pyarrow.Schema or a callable that makes one, "
            f"not {type(output).__name__}"
        )
    if kind == SOURCE and input is not None:
        raise ConfigError(f"{where}: a source takes no batches, so it has no input schema")
    if kind == SOURCE and output is None:
        raise ConfigError(f"{where}: a source needs output=, the schema of what it yields")
    if kind == SINK and output is not None:
        raise ConfigError(f"{where}: a sink yields no batches, so it has no output schema")
    if isinstance(concurrency, bool) or not isinstance(concurrency, int) or concurrency < 1:
        raise ConfigError(f"{where}: concurrency is {concurrency!r}; it must be 1 or more")
    one_to_one = kind == EXCHANGE and shape in (HandlerShape.FUNCTION, HandlerShape.COROUTINE)
    if concurrency > 1 and not one_to_one:
        raise ConfigError(
            f"{where}: concurrency={concurrency} needs a function of one batch; {shape.value} "
            "handlers see their batches one after another"
        )
    if max_calls is not None and (
        isinstance(max_calls, bool) or not isinstance(max_calls, int) or max_calls < 1
    ):
        raise ConfigError(f"{where}: max_calls is {max_calls!r}; it must be 1 or more, or None")
    if batch is not None and not one_to_one:
        raise ConfigError(
            f"{where}: batch= needs an exchange that is a function of one batch, not "
            f"{'a ' + kind if kind != EXCHANGE else shape.value}"
        )
    if max_concurrency is None and batch is not None:
        max_concurrency = 1
    if not _is_count(max_concurrency, 1):
        raise ConfigError(
            f"{where}: max_concurrency is {max_concurrency!r}; it must be 1 or more, or None"
        )
    if not _is_count(queue, 0):
        raise ConfigError(f"{where}: queue is {queue!r}; it must be 0 or more, or None")
    if queue is not None and max_concurrency is None:
        raise ConfigError(
            f"{where}: queue={queue} needs max_concurrency= or batch=; without them no call waits"
        )
    if numpy not in (True, False, "nan"):
        raise ConfigError(f"{where}: numpy is {numpy!r:.80}; it must be True, False or 'nan'")
    if numpy and not one_to_one:
        raise ConfigError(
            f"{where}: numpy={numpy!r} needs an exchange that is a function of one batch, not "
            f"{'a ' + kind if kind != EXCHANGE else shape.value}"
        )
    if not description:
        description = (inspect.getdoc(function) or "").partition("\n\n")[0].strip()
    if numpy:
        function = _on_arrays(function, where, shape, takes_call, input, output, numpy == "nan")
        takes_call = True
    return Handler(
        name=name,
        kind=kind,
        function=function,
        shape=shape,
        takes_call=takes_call,
        input=input,
        output=output,
        concurrency=concurrency,
        idempotent=idempotent,
        max_calls=max_calls,
        max_concurrency=max_concurrency,
        queue=queue,
        batching=batch,
        description=description,
        one_to_one=one_to_one,
        fault=_fault_of(name, output),
    )


def _is_count(given: object, least: int) -> bool:
    """Whether it is a whole number of at least so much, or None."""
    return given is None or (
        isinstance(given, int) and not isinstance(given, bool) and given >= least
    )


def _on_arrays(
    function: Callable[..., Any],
    where: str,
    shape: HandlerShape,
    takes_call: bool,
    input: pa.Schema | None,
    output: OutputSchema,
    nan: bool,
) -> Callable[..., Any]:
    try:
        from aqueduct.service.numpy_handler import on_arrays
    except ImportError as error:
        raise ConfigError(
            f"{where}: numpy=True needs numpy ({error}); pip install numpy"
        ) from error
    return on_arrays(
        function,
        where=where,
        is_async=shape is HandlerShape.COROUTINE,
        takes_call=takes_call,
        input=input,
        output=output,
        nan=nan,
    )


def _fault_of(name: str, output: OutputSchema) -> str:
    if name.startswith(RESERVED_PREFIX):
        return "what is yielded is not what its schema declares; where it is made: "
    if output is None:
        return (
            "the handler declares no output=, so its answers must have the schema of its "
            "input; declare output=, or in the handler: "
        )
    return "the handler answers otherwise than its output= declares; in the handler: "


def shape_of(function: Callable[..., Any]) -> HandlerShape:
    """How a function is written, seen through ``functools.partial`` and callable objects."""
    while isinstance(function, functools.partial):
        function = function.func
    candidates = [function]
    if not inspect.isroutine(function):
        candidates.append(type(function).__call__)  # an object that can be called
    for candidate in candidates:
        if inspect.isasyncgenfunction(candidate):
            return HandlerShape.ASYNC_GENERATOR
        if inspect.isgeneratorfunction(candidate):
            return HandlerShape.GENERATOR
        if inspect.iscoroutinefunction(candidate):
            return HandlerShape.COROUTINE
    return HandlerShape.FUNCTION


def takes_last(
    what: str, function: Callable[..., Any], called_with: str, *, last: str = "call"
) -> bool:
    """Whether the signature has the last place of ``called_with``, which may be left out.

    Raises ConfigError that begins with ``what``.
    """
    wanted = called_with.count(",") + 1
    try:
        signature = signature_of(function)
    except (TypeError, ValueError):  # some builtins have none
        return False
    for count in (wanted, wanted - 1):
        try:
            signature.bind(*range(count))
        except TypeError:
            continue
        # A default in that place is meant for something else.
        places = list(signature.parameters.values())
        if count == wanted and len(places) >= count:
            place = places[count - 1]
            if place.default is not inspect.Parameter.empty and place.name != last:
                continue
        return count == wanted
    raise ConfigError(
        f"{what} is called with {called_with}, where {last} may be left out; "
        f"its signature is {signature}"
    )


def object_of(declared: type) -> Any:
    """An object of a class, made without arguments. Raises ConfigError if it needs some."""
    name = declared.__name__
    try:
        signature_of(declared).bind()
    except TypeError as error:
        raise ConfigError(
            f"{name}() needs arguments ({error}): give an object, {name}(...), instead of the class"
        ) from None
    except ValueError:
        pass  # some have no signature
    return declared()


def answer_batch(made: Any, handler: str) -> pa.RecordBatch:
    """What a handler made as one batch, in the layout that it has. Raises HandlerFailed."""
    where = f"the output of handler {handler!r}"
    if not has_batch(made):
        detail = f"a pyarrow.RecordBatch is wanted, got {type(made).__name__}"
        raise HandlerFailed(f"{where}: {detail}", kind="TypeError", detail=detail)
    try:
        return as_batch(made, where=where)
    except AqueductError as error:
        raise HandlerFailed(f"{error}", kind="TypeError", detail=f"{error}") from error


def handler_failed(error: BaseException, what: str = "raised") -> HandlerFailed:
    """``error`` with its traceback, from which this library's own frames are left out."""
    frame = error.__traceback__
    while frame is not None and frame.tb_frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.tb_next
    error = error.with_traceback(frame or error.__traceback__)
    kind = type(error).__qualname__
    if type(error).__module__ not in ("builtins", "__main__"):
        kind = f"{type(error).__module__}.{kind}"
    try:
        detail = str(error)
    except Exception as second:  # noqa: BLE001  an exception's own __str__ may fail
        detail = f"(its text cannot be had: {type(second).__name__})"
    return HandlerFailed(
        f"{what} {kind}: {detail}" if detail else f"{what} {kind}",
        kind=kind,
        detail=detail,
        remote_traceback="".join(traceback.format_exception(error)),
    )
