from collections.abc import Iterable, Sequence

from _typeshed import ReadableBuffer

from aqueduct._speedups.base.buffers import BufferSlice

__all__ = [
    "encode_channel_control",
    "encode_closed_channel_lost",
    "encode_connection_control",
    "encode_control_ack_nacks",
    "encode_control_acks",
    "encode_control_close",
    "encode_control_finish",
    "encode_control_message",
    "encode_control_sent_unreliable",
]

def encode_connection_control(headers: Iterable[tuple[bytes, bytes]]) -> bytes: ...
def encode_channel_control(channel: int) -> bytes: ...
def encode_control_message(
    channel: int,
    number: int,
    payload: ReadableBuffer | Iterable[ReadableBuffer] = b"",
    attachments: Sequence[int] = (),
    headers: Iterable[tuple[bytes, bytes]] | None = None,
) -> list[bytes | bytearray | memoryview | BufferSlice]: ...
def encode_control_sent_unreliable(count: int) -> bytes: ...
def encode_control_finish(sent_reliable: int) -> bytes: ...
def encode_control_acks(ranges: Iterable[int]) -> bytes: ...
def encode_control_ack_nacks(ranges: Iterable[int]) -> bytes: ...
def encode_control_close(ranges: Iterable[int]) -> bytes: ...
def encode_closed_channel_lost(channel: int) -> bytes: ...
