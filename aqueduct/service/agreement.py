"""What client and handler agree on before the first batch: schemas and compression."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aqueduct.arrow.schema import check, check_expected
from aqueduct.errors import CallError
from aqueduct.service.handlers import Handler, handler_failed

if TYPE_CHECKING:
    from aqueduct.config import Calls
    from aqueduct.rpc.request import CallHead
    from aqueduct.service.context import Call

__all__ = ["ask_output", "check_input", "check_output", "compression_of"]


def check_input(call: Call, head: CallHead, handler: Handler) -> None:
    """The handler takes what the client will send. Raises SchemaMismatch."""
    if handler.input is not None and head.schema is not None:
        where = f"the input of handler {handler.name!r}"
        check(handler.input, head.schema, where=where, peer=call.peer, handler=handler.name)
        call.schema = handler.input


def ask_output(call: Call, head: CallHead, handler: Handler) -> None:
    """Runs code of the handler's author, so on the loop. Raises HandlerFailed."""
    call.output_schema = head.expected  # for an output= that follows what the client expects
    try:
        call.output_schema = handler.output_schema(call)
    except CallError:
        raise
    except Exception as error:
        raise handler_failed(error, "could not tell its output schema:") from error


def check_output(call: Call, head: CallHead, handler: Handler) -> None:
    """The client takes what the handler will send. Raises SchemaMismatch."""
    if head.expected is not None and call.output_schema is not None:
        check_expected(head.expected, call.output_schema, peer=call.peer, handler=handler.name)


def compression_of(head: CallHead, calls: Calls) -> str:
    """The first of the client's compressions that the service knows; "" if there is none."""
    return next((name for name in head.compressions if name in calls.compressions), "")
