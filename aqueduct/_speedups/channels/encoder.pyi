from collections.abc import Iterable, Sequence
from typing import Final, TypeAlias

from _typeshed import ReadableBuffer

from aqueduct._speedups.base.buffers import BufferSlice

__all__ = [
    "ACK_VERSION",
    "CANCEL_SENDER",
    "CLOSE_RECEIVER",
    "COALESCE",
    "FORGET_CHANNEL",
    "VERSION",
    "encode_ack_nack_unreliable",
    "encode_ack_reliable",
    "encode_connection_headers",
    "encode_finish_sender",
    "encode_message",
    "encode_route_to",
    "encode_sent_unreliable",
]

_Pairs: TypeAlias = Iterable[Sequence[bytes]]

COALESCE: Final[int]
VERSION: Final[bytes]
ACK_VERSION: Final[bytes]
CANCEL_SENDER: Final[bytes]
CLOSE_RECEIVER: Final[bytes]
FORGET_CHANNEL: Final[bytes]

def encode_message(
    num: int,
    payload: ReadableBuffer | Iterable[ReadableBuffer] = b"",
    headers: _Pairs = (),
    attachments: Iterable[tuple[int, _Pairs]] = (),
) -> list[bytes | bytearray | memoryview | BufferSlice]: ...
def encode_route_to(channel: int) -> bytes: ...
def encode_connection_headers(headers: _Pairs) -> bytes: ...
def encode_sent_unreliable(count: int) -> bytes: ...
def encode_finish_sender(sent_reliable: int) -> bytes: ...
def encode_ack_reliable(varints: Iterable[int]) -> bytes: ...
def encode_ack_nack_unreliable(channel: int, varints: Iterable[int]) -> bytes: ...
