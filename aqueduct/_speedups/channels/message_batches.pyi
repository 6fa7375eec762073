from typing import Any, TypeAlias, final

from aqueduct._speedups.channels.decoder import Decoder
from aqueduct._speedups.channels.frames import (
    AckNackUnreliable,
    AckReliable,
    AckVersion,
    CancelSender,
    CloseReceiver,
    ConnectionHeaders,
    FinishSender,
    ForgetChannel,
    Message,
    MessageHead,
    RouteTo,
    SentUnreliable,
    Version,
)
from aqueduct._speedups.channels.tracker import ReceivedNumbers

__all__ = ["Inlet", "Received", "Run"]

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
        message: Message,
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
    | Message
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
class Run:
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
    def __new__(cls) -> Run: ...
    def read(
        self,
        decoder: Decoder,
        numbers: ReceivedNumbers,
        overhead: int,
        room: int,
        pending: int = -1,
        asked: bytes | None = None,
    ) -> _Follows: ...

@final
class Inlet:
    @property
    def decoder(self) -> Decoder: ...
    @property
    def run(self) -> Run | None: ...
    @property
    def stopped(self) -> bool: ...
    @property
    def size(self) -> int: ...
    @property
    def idle(self) -> bool: ...
    def __new__(
        cls, decoder: Decoder, overhead: int, numbers: ReceivedNumbers, window: int
    ) -> Inlet: ...
    def open(self, room: int, pending: int, asked: bytes | None) -> None: ...
    def close(self) -> Run | None: ...
    def room(self, most: int) -> memoryview | None: ...
    def landed(self, size: int) -> None: ...
    def feed(self, data: bytes | bytearray | memoryview) -> None: ...
