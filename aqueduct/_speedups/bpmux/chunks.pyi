from typing import Final, final

from _typeshed import ReadableBuffer

__all__ = [
    "ACK_END",
    "CREDIT",
    "END",
    "PAYLOAD",
    "PING",
    "TYPE_NAMES",
    "ChunkDecoder",
    "ChunkStep",
    "decode_varu64",
    "encode_head",
    "encode_rest",
    "encode_varu64",
]

TYPE_NAMES: Final[tuple[str, ...]]
PAYLOAD: Final = 16
CREDIT: Final = 8
PING: Final = 4
END: Final = 2
ACK_END: Final = 1

class ChunkStep:
    NOTHING: Final = 0
    HEAD: Final = 1
    PIECE: Final = 2
    REST: Final = 3
    END_PIECE: Final = 4
    DONE: Final = 5

def encode_varu64(value: int) -> bytes: ...
def decode_varu64(data: ReadableBuffer, offset: int = 0) -> tuple[int, int]: ...
def encode_head(
    type: int, flags: int, identifier: int, payload: int = 0, total: int = 0
) -> bytes: ...
def encode_rest(flags: int, credit: int = 0, end: int = 0) -> bytes: ...

@final
class ChunkDecoder:
    @property
    def type(self) -> int: ...
    @property
    def flags(self) -> int: ...
    @property
    def identifier(self) -> int: ...
    @property
    def total(self) -> int: ...
    @property
    def payload(self) -> int: ...
    @property
    def credit(self) -> int: ...
    @property
    def end_payload(self) -> int: ...
    @property
    def chunks(self) -> int: ...
    @property
    def missing(self) -> int: ...
    @property
    def data(self) -> bytes | memoryview | None: ...
    @property
    def consumed(self) -> int: ...
    @property
    def in_payload(self) -> bool: ...
    def __new__(cls) -> ChunkDecoder: ...
    def feed(self, data: ReadableBuffer) -> None: ...
    def next(self) -> int: ...
    def landed_outside(self, size: int) -> None: ...
    def end(self) -> None: ...
