from collections.abc import Sequence
from typing import Final, final

from _typeshed import ReadableBuffer

__all__ = [
    "CHANNEL_ACK",
    "CHANNEL_OP",
    "CLOSE",
    "CLOSED",
    "COMMIT",
    "COMMITTED",
    "CONSUMED",
    "FORMAT_NAMES",
    "GENERAL",
    "LARGE",
    "LONG",
    "MESSAGE",
    "NOP",
    "PING",
    "PONG",
    "RECEIVED",
    "RESUME",
    "ROLLBACK",
    "SEQUENCE_ACK",
    "SEQUENCE_OP",
    "SHORT_MAX",
    "SHUTDOWN",
    "SMALL_MAX",
    "TYPE_NAMES",
    "UNCOMMITTED",
    "PacketDecoder",
    "PacketStep",
    "encode_general",
    "encode_message_head",
    "encode_packet",
    "padding_of",
]

CHANNEL_OP: Final = 0
CHANNEL_ACK: Final = 1
SEQUENCE_OP: Final = 2
SEQUENCE_ACK: Final = 3
MESSAGE: Final = 4
GENERAL: Final = 5

NOP: Final = 0
PING: Final = 1
PONG: Final = 2
RESUME: Final = 3
SHUTDOWN: Final = 4

COMMIT: Final = 0
ROLLBACK: Final = 1
CLOSE: Final = 2

RECEIVED: Final = 0
CONSUMED: Final = 1
COMMITTED: Final = 2
UNCOMMITTED: Final = 3
CLOSED: Final = 4

LONG: Final = 1
LARGE: Final = 2
SHORT_MAX: Final = 255
SMALL_MAX: Final = 65535

FORMAT_NAMES: Final[tuple[str, ...]]
TYPE_NAMES: Final[tuple[tuple[str, ...], ...]]

class PacketStep:
    NOTHING: Final = 0
    PACKET: Final = 1
    PIECE: Final = 2
    DONE: Final = 3

def encode_general(type: int) -> bytes: ...
def encode_packet(
    format: int,
    type: int,
    channels: Sequence[int],
    id_size: int,
    *,
    multicast: bool = False,
    sequence: int | None = None,
) -> bytes: ...
def encode_message_head(
    channels: Sequence[int],
    id_size: int,
    sizes: Sequence[int],
    *,
    multicast: bool = False,
    long: bool = False,
    large: bool = False,
) -> bytes: ...
def padding_of(size: int) -> int: ...

@final
class PacketDecoder:
    @property
    def format(self) -> int: ...
    @property
    def type(self) -> int: ...
    @property
    def multicast(self) -> bool: ...
    @property
    def channels(self) -> tuple[int, ...]: ...
    @property
    def sequence(self) -> int: ...
    @property
    def sizes(self) -> tuple[int, ...]: ...
    @property
    def part(self) -> int: ...
    @property
    def missing(self) -> int: ...
    @property
    def packets(self) -> int: ...
    @property
    def data(self) -> bytes | memoryview | None: ...
    @property
    def consumed(self) -> int: ...
    @property
    def in_payload(self) -> bool: ...
    def __new__(
        cls,
        sender_id_size: int,
        receiver_id_size: int,
        *,
        parts: int = 0xFFFFFFFF,
        targets: int = 0xFFFFFFFF,
        message_bytes: int = 0x7FFFFFFFFFFFFFFF,
    ) -> PacketDecoder: ...
    def feed(self, data: ReadableBuffer) -> None: ...
    def next(self) -> int: ...
    def landed_outside(self, size: int) -> None: ...
    def end(self) -> None: ...
