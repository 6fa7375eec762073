from typing import ClassVar, Final, TypeAlias, final

from _typeshed import ReadableBuffer

__all__ = [
    "CREATOR",
    "FRAME_NAMES",
    "ONESHOT",
    "AckNackUnreliable",
    "AckReliable",
    "AckVersion",
    "CancelSender",
    "CloseReceiver",
    "ConnectionHeaders",
    "FinishSender",
    "ForgetChannel",
    "Frame",
    "MessageFrame",
    "MessageHead",
    "RouteTo",
    "SentUnreliable",
    "Version",
    "decode_headers",
]

_Headers: TypeAlias = tuple[tuple[bytes, bytes], ...]
_Attachments: TypeAlias = tuple[tuple[int, _Headers], ...]

CREATOR: int
ONESHOT: int
FRAME_NAMES: Final[dict[int, str]]

def decode_headers(headers: bytes | _Headers) -> _Headers: ...

class _FrameValue:
    def __eq__(self, other: object, /) -> bool: ...
    __hash__: ClassVar[None]  # type: ignore[assignment]

@final
class Version(_FrameValue):
    TAG: ClassVar[int]
    @property
    def version(self) -> str: ...
    def __init__(self, version: str) -> None: ...

@final
class AckVersion(_FrameValue):
    TAG: ClassVar[int]

@final
class ConnectionHeaders(_FrameValue):
    TAG: ClassVar[int]
    @property
    def headers(self) -> _Headers: ...
    def __init__(self, headers: _Headers) -> None: ...

@final
class RouteTo(_FrameValue):
    TAG: ClassVar[int]
    @property
    def channel(self) -> int: ...
    def __init__(self, channel: int) -> None: ...

@final
class MessageFrame:
    TAG: ClassVar[int]
    @property
    def num(self) -> int: ...
    @property
    def headers(self) -> _Headers: ...
    @property
    def attachments(self) -> _Attachments: ...
    @property
    def attached(self) -> tuple[tuple[int, bytes | _Headers], ...]: ...
    @property
    def payload(self) -> ReadableBuffer: ...
    @property
    def size(self) -> int: ...
    @property
    def overhead(self) -> int: ...
    def __init__(
        self, num: int, headers: _Headers, attachments: _Attachments, payload: ReadableBuffer
    ) -> None: ...
    def __eq__(self, other: object, /) -> bool: ...
    __hash__: ClassVar[None]  # type: ignore[assignment]

@final
class MessageHead(_FrameValue):
    TAG: ClassVar[int]
    @property
    def num(self) -> int: ...
    @property
    def headers(self) -> _Headers: ...
    @property
    def attachments(self) -> _Attachments: ...
    @property
    def size(self) -> int: ...
    @property
    def overhead(self) -> int: ...
    def __init__(
        self, num: int, headers: _Headers, attachments: _Attachments, size: int
    ) -> None: ...

@final
class SentUnreliable(_FrameValue):
    TAG: ClassVar[int]
    @property
    def count(self) -> int: ...
    def __init__(self, count: int) -> None: ...

@final
class FinishSender(_FrameValue):
    TAG: ClassVar[int]
    @property
    def sent_reliable(self) -> int: ...
    def __init__(self, sent_reliable: int) -> None: ...

@final
class CancelSender(_FrameValue):
    TAG: ClassVar[int]

@final
class AckReliable(_FrameValue):
    TAG: ClassVar[int]
    @property
    def block(self) -> bytes: ...
    @property
    def ranges(self) -> tuple[int, ...]: ...
    def __init__(self, ranges: tuple[int, ...]) -> None: ...

@final
class AckNackUnreliable(_FrameValue):
    TAG: ClassVar[int]
    @property
    def channel(self) -> int: ...
    @property
    def block(self) -> bytes: ...
    @property
    def ranges(self) -> tuple[int, ...]: ...
    def __init__(self, channel: int, ranges: tuple[int, ...]) -> None: ...

@final
class CloseReceiver(_FrameValue):
    TAG: ClassVar[int]

@final
class ForgetChannel(_FrameValue):
    TAG: ClassVar[int]

Frame: TypeAlias = (
    Version
    | AckVersion
    | ConnectionHeaders
    | RouteTo
    | MessageFrame
    | SentUnreliable
    | FinishSender
    | CancelSender
    | AckReliable
    | AckNackUnreliable
    | CloseReceiver
    | ForgetChannel
)
