"""What is done alike with the frame sequences of both revisions of Aqueduct."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeAlias

from aqueduct._speedups.base import varint
from aqueduct._speedups.channels.encoder import VERSION
from aqueduct._speedups.channels.frames import MessageHead
from aqueduct.dissect.values import HIGHEST, Fields, WireError
from aqueduct.errors import AqueductError

__all__ = ["Encoders", "decoded", "encoded", "numbered", "version"]

Encoders: TypeAlias = Mapping[str, Callable[[Fields], bytes]]
"""What makes the bytes of a frame from its fields, by the names of frames."""


def decoded(
    decoder: Any, data: bytes, to_json: Callable[[Any], dict[str, Any]]
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Frames with the offset each begins at. Raises WireError behind the last good one."""
    # A payload that cannot be in these bytes gets no memory: its length may be a lie.
    decoder.auto_admit = len(data)
    offset = 0
    try:
        decoder.feed(data)
        while True:
            offset = decoder.consumed
            frame = decoder.next()
            if frame is None or isinstance(frame, MessageHead):
                break
            yield offset, to_json(frame)
        decoder.end()
    except AqueductError as error:
        raise WireError.of(error, offset) from error


def encoded(
    value: list[Any], encoders: Encoders, decode: Callable[[bytes], Iterable[Any]]
) -> bytes:
    """The bytes of ``value``, checked like bytes that came. Raises WireError."""
    data = b"".join(_frame(each, f"frame {k}", encoders) for k, each in enumerate(value))
    try:
        for _ in decode(data):
            pass
    except WireError as error:  # whatever is wrong, it is in the value, not cut off
        raise WireError(str(error)) from error
    return data


def _frame(given: Any, where: str, encoders: Encoders) -> bytes:
    fields = Fields(given, where)
    name = fields.take("type")
    encoder = encoders.get(name) if isinstance(name, str) else None
    if encoder is None:
        raise WireError(f"{where} has the unknown type {name!r}; known: {', '.join(encoders)}")
    fields.where = f"{where} ({name})"
    try:
        data = encoder(fields)
    except AqueductError as error:
        raise WireError(f"{fields.where}: {error}") from error
    fields.end()
    return data


def version(fields: Fields, requirement: str) -> bytes:
    """The version frame, which is the same in both."""
    ours = VERSION[17:].decode()
    given = fields.take("version", ours)
    if given != ours:
        raise WireError(
            f"{fields.where}: version is {given!r}; it must be {ours!r} ({requirement})"
        )
    return VERSION


def numbered(encode: Callable[[int], Iterable[Any]], num: int, start: int) -> bytes:
    """A message with any number, which stands at ``start``.

    The highest number is an endpoint's error, not the format's (AQ-R13), but the encoder is the
    endpoint's: it gets the number below, which is as long, and the number is exchanged.
    """
    below = min(num, HIGHEST - 1)
    data = b"".join(map(bytes, encode(below)))
    return data[:start] + varint.encode(num) + data[start + len(varint.encode(below)) :]
