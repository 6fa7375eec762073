from typing import final

from _typeshed import ReadableBuffer, WriteableBuffer

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
from aqueduct._speedups.channels.placement import PlacementBuffer

__all__ = ["FrameDecoder"]

@final
class FrameDecoder(PlacementBuffer):
    auto_admit: int
    pause_at_route: bool
    @property
    def paused(self) -> bool: ...
    @property
    def ended(self) -> bool: ...
    @property
    def frames(self) -> int: ...
    @property
    def from_server(self) -> bool: ...
    @property
    def datagram(self) -> bool: ...
    @property
    def consumed(self) -> int: ...
    @property
    def buffered(self) -> int: ...
    @property
    def gathered(self) -> int: ...
    @property
    def waiting(self) -> bool: ...
    @property
    def remaining(self) -> int: ...
    @property
    def route(self) -> int: ...
    @property
    def between_frames(self) -> bool: ...
    @property
    def finished(self) -> bool: ...
    @property
    def error(self) -> BaseException | None: ...
    def __new__(
        cls,
        *,
        from_server: bool,
        datagram: bool = False,
        frame_limit: int = ...,
        header_limit: int = ...,
        attachment_limit: int = ...,
        block_limit: int = ...,
    ) -> FrameDecoder: ...
    def feed(self, data: ReadableBuffer) -> None: ...
    def next(
        self,
    ) -> (
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
    ): ...
    def end(self) -> None: ...
    def admit(self, target: WriteableBuffer | None = None) -> None: ...
    def receive_buffer(self, hint: int) -> memoryview | None: ...
    def received(self, size: int) -> None: ...
