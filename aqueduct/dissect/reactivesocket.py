"""ReactiveSocket's frames, in the vocabulary of the test vectors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from aqueduct._speedups.reactivesocket import reactive_frames as codec
from aqueduct._speedups.reactivesocket.reactive_frames import ReactiveFrameDecoder
from aqueduct.dissect.values import Fields, WireError, hex_bytes, kind_of, number, one_of
from aqueduct.errors import AqueductError
from aqueduct.protocol.reactivesocket.demand import check_initial, check_more

__all__ = ["FramesContext", "contexts"]

PREVIEW: Final = 32
"""Bytes of data that are shown to people."""
UNKNOWN: Final = "UNKNOWN"
_CODES: Final = {name: code for code, name in codec.TYPE_NAMES.items()}
_PLAIN: Final = ("SETUP", "REQUEST_RESPONSE", "REQUEST_FNF")
"""Types that may not be ignored: they have no flag for that."""
_INITIAL: Final = ("REQUEST_STREAM", "REQUEST_SUB")
_FLAGS: Final = {"begin": codec.BEGIN, "end": codec.END, "complete": codec.COMPLETE}
_HIGHEST_TYPE: Final = 0xFFFF


def contexts(given: Any) -> list[FramesContext]:
    """The context: frames with their length (``tcp``, the default), or one frame (``message``)."""
    if not isinstance(given, Mapping):
        raise WireError(f"context must be an object, not {kind_of(given)}")
    framing = one_of(given.get("framing", "tcp"), ("tcp", "message"), "context.framing")
    return [FramesContext(framed=framing == "tcp")]


@dataclass(frozen=True)
class FramesContext:
    """The frames of one side; both sides have the same."""

    framed: bool
    single: ClassVar[bool] = False

    def decode(self, data: bytes) -> Iterator[tuple[int, dict[str, Any]]]:
        """Frames with the offset each begins at. Raises WireError behind the last good one."""
        decoder = ReactiveFrameDecoder(framed=self.framed)
        offset = 0
        try:
            decoder.feed(data)
            while decoder.next():
                yield offset, _frame_to_json(decoder)
                offset = decoder.consumed
            decoder.end()
        except AqueductError as error:
            raise WireError.of(error, offset) from error

    def encode(self, value: list[Any]) -> bytes:
        """The bytes of ``value``. Raises WireError."""
        if not self.framed and len(value) != 1:
            raise WireError(f"a message is one frame, not {len(value)} (RS-1)")
        return b"".join(self._frame(Fields(given, f"frame {k}")) for k, given in enumerate(value))

    def _frame(self, given: Fields) -> bytes:
        name = one_of(given.take("type"), (*_CODES, UNKNOWN), f"{given.where}: type")
        given.where += f" ({name})"
        try:
            data = self._write(name, given)
        except AqueductError as error:
            raise WireError(f"{given.where}: {error}") from error
        given.end()
        return data

    def _write(self, name: str, given: Fields) -> bytes:
        ignore = name not in _PLAIN and _flag(given, "ignore")
        if name == "EXT":
            extended_type = given.number("extended_type")
            data = _data(given)
            head = codec.encode_extension_head(
                extended_type, len(data), ignore=ignore, framed=self.framed
            )
            return head + data
        code = _CODES.get(name, 0)
        if name == UNKNOWN:
            code = number(given.take("code"), f"{given.where}: code", _HIGHEST_TYPE)
            if code in codec.TYPE_NAMES:
                raise WireError(f"{given.where}: code {code:#x} is {codec.TYPE_NAMES[code]}")
        flags = codec.IGNORE if ignore else 0
        if name == "RESPONSE":
            flags |= sum(flag for field, flag in _FLAGS.items() if _flag(given, field))
        stream = given.number("stream")
        items = None
        if name in _INITIAL:
            items = check_initial(given.number("n"))
        elif name == "REQUEST_N":
            items = check_more(given.number("n"))
        data = b"" if name in ("REQUEST_N", "CANCEL") else _data(given)
        head = codec.encode_head(code, stream, len(data), flags=flags, n=items, framed=self.framed)
        return head + data

    def meaning(self, frames: list[dict[str, Any]]) -> Any:
        """No frame acknowledges."""
        return None

    def describe(self, frame: dict[str, Any]) -> list[str]:
        """The fields in one line, and the data in another."""
        shown = []
        for name, value in frame.items():
            if isinstance(value, bool):
                shown += [name] * value
            elif name not in ("type", "data"):
                shown.append(f"{name} {value}")
        lines = [f"{frame['type']}  {', '.join(shown)}".rstrip()]
        data = bytes.fromhex(frame.get("data", ""))
        if data:
            more = f" ... ({len(data)} bytes)" if len(data) > PREVIEW else ""
            lines.append(f"data {data[:PREVIEW].hex()}{more}")
        return lines


def _frame_to_json(decoder: ReactiveFrameDecoder) -> dict[str, Any]:
    name = codec.TYPE_NAMES.get(decoder.type, UNKNOWN)
    result: dict[str, Any] = {"type": name}
    if name == UNKNOWN:
        result["code"] = decoder.type
    if name not in _PLAIN:
        result["ignore"] = decoder.flags & codec.IGNORE > 0
    if name == "EXT":
        result["extended_type"] = decoder.extended_type
    else:
        result["stream"] = decoder.stream
    if name in _INITIAL:
        result["n"] = check_initial(decoder.n)
    elif name == "REQUEST_N":
        result["n"] = check_more(decoder.n)
    elif name == "RESPONSE":
        for field, flag in _FLAGS.items():
            result[field] = decoder.flags & flag > 0
    if name not in ("REQUEST_N", "CANCEL"):
        result["data"] = bytes(decoder.data).hex()
    return result


def _data(given: Fields) -> bytes:
    return hex_bytes(given.take("data"), f"{given.where}: data")


def _flag(given: Fields, name: str) -> bool:
    value = given.take(name, False)
    if not isinstance(value, bool):
        raise WireError(f"{given.where}: {name} must be true or false, not {kind_of(value)}")
    return value
