"""How a call ended: the one message of its oneshot channel, made of an exception and back."""

from __future__ import annotations

import asyncio
import json
import traceback
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from aqueduct import errors
from aqueduct.errors import (
    BadCall,
    CallError,
    Cancelled,
    HandlerFailed,
    ReceiverClosed,
    Refused,
    SchemaMismatch,
)
from aqueduct.escaping import escape_lines
from aqueduct.rpc import keys
from aqueduct.rpc.keys import Headers, one_each

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

__all__ = ["CANCELLED", "OK", "Status"]

OK: Final = "ok"
CANCELLED: Final = "cancelled"

_TEXT_LIMIT: Final = 8 << 10
_TRACEBACK_LIMIT: Final = 32 << 10
_STATUS_LIMIT: Final = 512 << 10  # JSON may write a character in six bytes
_KEPT: Final = 64
_KEPT_SIZE: Final = 512  # bytes of a status that is remembered
_KEYS: Final = frozenset({keys.STATUS})
_SAID: Final = (
    "message",
    "kind",
    "detail",
    "traceback",
    "batch",
    "column",
    "wanted",
    "got",
    "draining",
    "untouched",
)
"""What the document of a status has beside its counters."""
_JSON: Final = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
_ERRORS: Final[Mapping[str, type[CallError]]] = MappingProxyType(
    {
        kind.status: kind
        for kind in (getattr(errors, name) for name in errors.__all__)
        if issubclass(kind, CallError)
    }
)


@dataclass(frozen=True, slots=True)
class Status:
    """The end of one call. An empty string, or None, is what is not said."""

    code: str
    """``ok``, ``cancelled``, or the ``status`` of an error of ``aqueduct.errors``."""
    message: str = ""
    """What went wrong, for people."""
    kind: str = ""
    """The type of the exception that a handler raised."""
    detail: str = ""
    """Its text."""
    traceback: str = ""
    """Where it was raised; at most 32 KiB, the middle left out."""
    batch: int | None = None
    """The number of the input batch that the handler was at."""
    column: str = ""
    """The column of a schema mismatch."""
    wanted: str = ""
    """What was declared for it."""
    got: str = ""
    """What came instead."""
    draining: bool = False
    """Whether a service refuses because it is ending: another one may take the call."""
    untouched: bool = False
    """Whether a service that is ending has handed nothing of the call to a handler."""
    counters: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    """What was done: numbers of batches, rows, bytes."""

    @classmethod
    def from_exception(cls, error: BaseException, *, batch: int | None = None) -> Status:
        """The status that tells the peer of ``error``.

        Errors of a call keep their code; what else a handler raises is ``handler-failed``, and
        the end of a task or a generator, or a peer that gave up its channels, is ``cancelled``.
        """
        if isinstance(error, (asyncio.CancelledError, GeneratorExit, Cancelled, ReceiverClosed)):
            return cls(CANCELLED, message=_text(error) or "the call was cancelled", batch=batch)
        if isinstance(error, HandlerFailed):
            return cls(
                error.status,
                message=_text(error),
                kind=_cut(error.kind),
                detail=_cut(error.detail),
                traceback=_cut(error.remote_traceback, _TRACEBACK_LIMIT),
                batch=batch,
            )
        if isinstance(error, SchemaMismatch):
            return cls(
                error.status,
                message=_text(error),
                batch=batch,
                column=_cut(error.column),
                wanted=_cut(error.wanted),
                got=_cut(error.got),
            )
        if isinstance(error, CallError):
            refused = error if isinstance(error, Refused) else None
            return cls(
                error.status,
                message=_text(error),
                batch=batch,
                draining=refused is not None and refused.draining,
                untouched=refused is not None and refused.untouched,
            )
        kind = _name(type(error))
        detail = _text(error)
        lines = "".join(traceback.format_exception(error))
        return cls(
            HandlerFailed.status,
            message=f"{kind}: {detail}" if detail else kind,
            kind=kind,
            detail=detail,
            traceback=_cut(lines, _TRACEBACK_LIMIT),
            batch=batch,
        )

    def to_exception(self, *, peer: str = "", handler: str = "") -> errors.AqueductError | None:
        """The error that this status is for the caller; None if all went well.

        A remote traceback is an attribute, and a note, so that Python shows it with the error.
        """
        if self.code == OK:
            return None
        where = " at ".join(filter(None, (f"handler {handler!r}" if handler else "", peer)))
        if self.batch is not None:
            where = f"{where}, batch {self.batch}" if where else f"batch {self.batch}"
        message = self.message or f"the call ended with the status {self.code!r}"
        text = f"{where}: {message}" if where else message
        if self.code == CANCELLED:
            return Cancelled(text)
        error = self._call_error(text, peer, handler)
        error.batch = self.batch
        return error

    def _call_error(self, text: str, peer: str, handler: str) -> CallError:
        kind = _ERRORS.get(self.code)
        said: dict[str, Any] = {"peer": peer, "handler": handler}
        if kind is None:
            return CallError(f"{text} (status {self.code!r})", **said)
        if issubclass(kind, Refused):
            said |= {"draining": self.draining, "untouched": self.untouched}
        elif issubclass(kind, SchemaMismatch):
            said |= {"column": self.column, "wanted": self.wanted, "got": self.got}
        elif issubclass(kind, HandlerFailed):
            lines = escape_lines(self.traceback)
            said |= {"kind": self.kind, "detail": self.detail, "remote_traceback": lines}
            if lines:
                failed = kind(text, **said)
                failed.add_note(f"The handler's own traceback:\n{lines.rstrip()}")
                return failed
        return kind(text, **said)

    def encode(self) -> tuple[Headers, list[bytes]]:
        """The headers and the payload's buffers."""
        # By identity: batch 0 is said.
        said = {
            name: value
            for name in _SAID
            if (value := getattr(self, name)) != "" and value is not None and value is not False
        }
        if self.counters:
            said["counters"] = dict(self.counters)
        text = _JSON.encode(said)
        return ((keys.STATUS, self.code.encode()),), [text.encode("utf-8", "replace")]

    @classmethod
    def decode(
        cls,
        headers: Iterable[tuple[bytes, bytes]],
        payload: ReadableBuffer,
        *,
        peer: str = "",
        handler: str = "",
    ) -> Status:
        """The status of a message. Raises BadCall if the message is not one."""
        try:
            data = bytes(payload)
            if len(data) <= _KEPT_SIZE and isinstance(headers, tuple) and len(headers) == 1:
                return _kept_status(headers, data)
            return _decode(headers, data)
        except BadCall as error:
            raise BadCall(str(error), peer=peer, handler=handler) from error.__cause__


def _decode(headers: Iterable[tuple[bytes, bytes]], payload: bytes) -> Status:
    value = one_each(headers, _KEYS).get(keys.STATUS)
    if value is None:
        raise BadCall(f"not a status: it has no header {keys.STATUS.decode()}")
    return Status(keys.text_of(value, keys.STATUS, limit=64), **_decode_body(payload))


_kept_status: Final = lru_cache(maxsize=_KEPT)(_decode)
"""Calls that are alike often end alike, to the last number."""


def _decode_body(payload: bytes) -> dict[str, Any]:
    if len(payload) > _STATUS_LIMIT:
        raise BadCall(f"the status has {len(payload)} bytes, above the limit of {_STATUS_LIMIT}")
    try:
        body = json.loads(payload)
    except (ValueError, RecursionError) as error:
        raise BadCall(f"the status is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise BadCall(f"the status is a JSON {type(body).__name__}, not an object")
    found: dict[str, Any] = {}
    for name in (*_SAID, "counters"):
        if name not in body:
            continue
        value = body[name]
        if name == "batch":
            good = _is_number(value)
        elif name == "counters":
            good = isinstance(value, dict) and all(map(_is_number, value.values()))
            value = MappingProxyType(value) if good else value
        elif name in ("draining", "untouched"):
            good = isinstance(value, bool)
        else:
            good = isinstance(value, str)
        if not good:
            raise BadCall(f"the status has {value!r:.80} for {name!r}")
        found[name] = value
    return found


def _is_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _name(kind: type[BaseException]) -> str:
    prefix = "" if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}."
    return prefix + kind.__qualname__


def _text(error: BaseException) -> str:
    try:
        return _cut(str(error))
    except Exception as second:  # noqa: BLE001  an exception's own __str__ may fail
        return f"(its text cannot be had: {_name(type(second))})"


def _cut(text: str, limit: int = _TEXT_LIMIT) -> str:
    """``text`` in at most ``limit`` bytes of UTF-8; the end says more than the beginning."""
    data = text.encode("utf-8", "backslashreplace")
    if len(data) <= limit:
        return data.decode()
    first = limit // 4
    last = limit - first - 64
    lost = len(data) - first - last
    head = data[:first].decode("utf-8", "ignore")
    tail = data[-last:].decode("utf-8", "ignore")
    return f"{head}\n... {lost} bytes left out ...\n{tail}"
