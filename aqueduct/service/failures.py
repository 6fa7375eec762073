"""What a handler raised, as its client is to see it."""

from __future__ import annotations

import os
import traceback
from typing import Final

from aqueduct.errors import HandlerFailed

__all__ = ["handler_failed"]

_PACKAGE: Final = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


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
