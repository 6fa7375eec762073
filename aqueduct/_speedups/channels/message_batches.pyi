from typing import Any, TypeAlias, final

from aqueduct._speedups.channels.decoder import FrameDecoder
from aqueduct._speedups.channels.frames import (
    AckNackUnreliable,
    AckReliable,
    AckVersion,
    CancelSender,
    CloseReceiver,
    ConnectionHeaders,
    FinishSender,
    ForgetChannel,
    MessageFrame,
    MessageHead,
    RouteTo,
    SentUnreliable,
    Version,
)
from aqueduct._speedups.channels.tracker import ReceivedNumbers

__all__ = ["DirectRead", "MessageBatch", "Received"]

@final
class Received:
    payload: Any
    dropped: bool
    @property
    def number(self) -> int: ...
    @property
    def headers(self) -> tuple[tuple[bytes, bytes], ...]: ...
    @property
    def raw(self) -> bytes | tuple[tuple[bytes, bytes], ...]: ...
    @property
    def attachments(self) -> tuple[tuple[Any, bytes | tuple[tuple[bytes, bytes], ...]], ...]: ...
    @property
    def charge(self) -> int: ...
    @property
    def reliable(self) -> bool: ...
    def __init__(
        self,
        number: int,
        headers: tuple[tuple[bytes, bytes], ...],
        attachments: tuple[tuple[Any, bytes | tuple[tuple[bytes, bytes], ...]], ...],
        payload: Any,
        charge: int,
        *,
        reliable: bool = True,
    ) -> None: ...
    @staticmethod
    def of(
        message: MessageFrame,
        attachments: tuple[tuple[Any, bytes | tuple[tuple[bytes, bytes], ...]], ...],
        charge: int,
        *,
        reliable: bool = True,
    ) -> Received: ...

_Follows: TypeAlias = (
    Version
    | AckVersion
    | ConnectionHeaders
    | RouteTo
    | MessageFrame
    | MessageHead
    | SentUnreliable
    | FinishSender
    | CancelSender
    | AckReliable
    | AckNackUnreliable
    | CloseReceiver
    | ForgetChannel
    | None
)

@final
class MessageBatch:
    @property
    def messages(self) -> list[Received]: ...
    @property
    def charge(self) -> int: ...
    @property
    def pending(self) -> int: ...
    @property
    def largest(self) -> int: ...
    @property
    def admitted(self) -> int: ...
    @property
    def follows(self) -> _Follows: ...
    @property
    def full(self) -> bool: ...
    def __new__(cls) -> MessageBatch: ...
    def read(
        self,
        decoder: FrameDecoder,
        numbers: ReceivedNumbers,
        overhead: int,
        room: int,
        pending: int = -1,
        asked: bytes | None = None,
    ) -> _Follows: ...

@final
class DirectRead:
    @property
    def decoder(self) -> FrameDecoder: ...
    @property
    def run(self) -> MessageBatch | None: ...
    @property
    def stopped(self) -> bool: ...
    @property
    def size(self) -> int: ...
    @property
    def idle(self) -> bool: ...
    def __new__(
        cls, decoder: FrameDecoder, overhead: int, numbers: ReceivedNumbers, window: int
    ) -> DirectRead: ...
    def open(self, room: int, pending: int, asked: bytes | None) -> None: ...
    def close(self) -> MessageBatch | None: ...
    def room(self, most: int) -> memoryview | None: ...
    def landed(self, size: int) -> None: ...
    def feed(self, data: bytes | bytearray | memoryview) -> None: ...
