from collections.abc import Iterable
from typing import Any, Final, final

from _typeshed import ReadableBuffer

from aqueduct._speedups.base.buffers import AlignedBuffer

__all__ = [
    "BEGIN",
    "CANCEL",
    "COMPLETE",
    "END",
    "ERROR",
    "EXT",
    "FRAME_MOST",
    "IGNORE",
    "REQUEST_FNF",
    "REQUEST_N",
    "REQUEST_RESPONSE",
    "REQUEST_STREAM",
    "REQUEST_SUB",
    "RESPONSE",
    "SETUP",
    "TYPE_NAMES",
    "ReactiveFrameDecoder",
    "buffers_of",
    "encode_extension_head",
    "encode_frame",
    "encode_head",
]

SETUP: Final = 0x0001
REQUEST_RESPONSE: Final = 0x0011
REQUEST_FNF: Final = 0x0012
REQUEST_STREAM: Final = 0x0013
REQUEST_SUB: Final = 0x0014
REQUEST_N: Final = 0x0015
CANCEL: Final = 0x0016
RESPONSE: Final = 0x0020
ERROR: Final = 0x0021
EXT: Final = 0xFFFF

IGNORE: Final = 0x80
BEGIN: Final = 0x40
END: Final = 0x20
COMPLETE: Final = 0x10

FRAME_MOST: Final = 0x7FFFFFFF

TYPE_NAMES: Final[dict[int, str]]

def encode_head(
    type: int,
    stream: int,
    size: int,
    *,
    flags: int = 0,
    n: int | None = None,
    framed: bool = True,
) -> bytes: ...
def encode_frame(
    type: int,
    stream: int,
    parts: list[Any],
    *,
    flags: int = 0,
    n: int | None = None,
    framed: bool = True,
) -> tuple[list[Any], int]: ...
def buffers_of(data: ReadableBuffer | Iterable[ReadableBuffer]) -> list[Any]: ...
def encode_extension_head(
    extended_type: int, size: int, *, ignore: bool = False, framed: bool = True
) -> bytes: ...

@final
class ReactiveFrameDecoder:
    @property
    def missing(self) -> int: ...
    @property
    def frames(self) -> int: ...
    @property
    def type(self) -> int: ...
    @property
    def flags(self) -> int: ...
    @property
    def stream(self) -> int: ...
    @property
    def n(self) -> int: ...
    @property
    def extended_type(self) -> int: ...
    @property
    def data(self) -> bytes | memoryview | AlignedBuffer: ...
    @property
    def consumed(self) -> int: ...
    @property
    def coming(self) -> int: ...
    def __new__(
        cls, *, framed: bool = True, frame_bytes: int = 0x7FFFFFFF
    ) -> ReactiveFrameDecoder: ...
    def allow(self, frame_bytes: int, setting: str) -> None: ...
    def feed(self, data: ReadableBuffer) -> None: ...
    def next(self) -> bool: ...
    def room(self) -> memoryview | None: ...
    def landed(self, size: int) -> None: ...
    def end(self) -> None: ...
