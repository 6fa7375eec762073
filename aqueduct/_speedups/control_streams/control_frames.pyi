from typing import ClassVar, Final, TypeAlias, final

from _typeshed import ReadableBuffer, WriteableBuffer

from aqueduct._speedups.channels.frames import (
    FinishSender,
    MessageFrame,
    MessageHead,
    SentUnreliable,
    Version,
)
from aqueduct._speedups.channels.receive_buffer import ReceiveBuffer

__all__ = [
    "CREATOR",
    "FRAME_NAMES",
    "SENDER",
    "ChannelControl",
    "ClosedChannelLost",
    "ConnectionControl",
    "ControlAckNacks",
    "ControlAcks",
    "ControlClose",
    "ControlFrame",
    "ControlFrameDecoder",
]

_Headers: TypeAlias = tuple[tuple[bytes, bytes], ...]

SENDER: int
CREATOR: int
FRAME_NAMES: Final[dict[int, str]]

class _FrameValue:
    def __eq__(self, other: object, /) -> bool: ...
    __hash__: ClassVar[None]  # type: ignore[assignment]

@final
class ConnectionControl(_FrameValue):
    @property
    def headers(self) -> _Headers: ...
    def __init__(self, headers: _Headers) -> None: ...

@final
class ChannelControl(_FrameValue):
    @property
    def channel(self) -> int: ...
    def __init__(self, channel: int) -> None: ...

@final
class ControlAcks(_FrameValue):
    @property
    def block(self) -> bytes: ...
    @property
    def ranges(self) -> tuple[int, ...]: ...
    def __init__(self, ranges: tuple[int, ...]) -> None: ...

@final
class ControlAckNacks(_FrameValue):
    @property
    def block(self) -> bytes: ...
    @property
    def ranges(self) -> tuple[int, ...]: ...
    def __init__(self, ranges: tuple[int, ...]) -> None: ...

@final
class ControlClose(_FrameValue):
    @property
    def block(self) -> bytes: ...
    @property
    def ranges(self) -> tuple[int, ...]: ...
    def __init__(self, ranges: tuple[int, ...]) -> None: ...

@final
class ClosedChannelLost(_FrameValue):
    @property
    def channel(self) -> int: ...
    def __init__(self, channel: int) -> None: ...

ControlFrame: TypeAlias = (
    Version
    | ConnectionControl
    | ChannelControl
    | MessageFrame
    | SentUnreliable
    | FinishSender
    | ControlAcks
    | ControlAckNacks
    | ControlClose
    | ClosedChannelLost
)

@final
class ControlFrameDecoder:
    @property
    def buffer(self) -> ReceiveBuffer: ...
    auto_admit: int
    pause: bool
    @property
    def paused(self) -> bool: ...
    @property
    def ended(self) -> bool: ...
    @property
    def frames(self) -> int: ...
    @property
    def from_server(self) -> bool: ...
    @property
    def carrier(self) -> str: ...
    @property
    def header_blocks(self) -> bool: ...
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
    def channel(self) -> int: ...
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
        carrier: str,
        channel: int = -1,
        header_blocks: bool = False,
        frame_limit: int = ...,
        header_limit: int = ...,
        attachment_limit: int = ...,
        block_limit: int = ...,
    ) -> ControlFrameDecoder: ...
    def feed(self, data: ReadableBuffer) -> None: ...
    def next(self) -> ControlFrame | MessageHead | None: ...
    def end(self) -> None: ...
    def admit(self, target: WriteableBuffer | None = None) -> None: ...
    def skip(self) -> None: ...
    def receive_buffer(self, hint: int) -> memoryview | None: ...
    def received(self, size: int) -> None: ...
