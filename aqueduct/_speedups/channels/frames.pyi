from typing import ClassVar, Final, TypeAlias, final

from _typeshed import ReadableBuffer

__all__ = [
    "FRAME_NAMES",
    "AckNackUnreliable",
    "AckReliable",
    "AckVersion",
    "CancelSender",
    "CloseReceiver",
    "ConnectionHeaders",
    "FinishSender",
    "ForgetChannel",
    "MessageFrame",
    "MessageHead",
    "RouteTo",
    "SentUnreliable",
    "Version",
    "decode_headers",
]

_Headers: TypeAlias = tuple[tuple[bytes, bytes], ...]
_Attachments: TypeAlias = tuple[tuple[int, _Headers], ...]

FRAME_NAMES: Final[dict[int, str]]

def decode_headers(headers: bytes | _Headers) -> _Headers: ...

@final
class Version:
    TAG: ClassVar[int]
    @property
    def version(self) -> str: ...
    def __init__(self, version: str) -> None: ...
    def __eq__(self, other: object, /) -> bool: ...
    __hash__: ClassVar[None]  # type: ignore[assignment]

@final
class AckVersion:
    TAG: ClassVar[int]
    def __eq__(self, other: object, /) -> bool: ...
    __hash__: ClassVar[None]  # type: ignore[assignment]

@final
class ConnectionHeaders:
    TAG: ClassVar[int]
    @property
    def headers(self) -> _Headers: ...
    def __init__(self, headers: _Headers) -> None: ...
    def __eq__(self, other: object, /) -> bool: ...
    __hash__: ClassVar[None]  # type: ignore[assignment]

@final
class RouteTo:
    TAG: ClassVar[int]
    @property
    def channel(self) -> int: ...
    def __init__(self, channel: int) -> None: ...
    def __eq__(self, other: object, /) -> bool: ...
    __hash__: ClassVar[None]  # type: ignore[assignment]

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
class MessageHead:
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
    def __eq__(self, other: object, /) -> bool: ...
    __hash__: ClassVar[None]  # type: ignore[assignment]

@final
class SentUnreliable:
    TAG: ClassVar[int]
    @property
    def count(self) -> int: ...
    def __init__(self, count: int) -> None: ...
    def __eq__(self, other: object, /) -> bool: ...
    __hash__: ClassVar[None]  # type: ignore[assignment]

@final
class FinishSender:
    TAG: ClassVar[int]
    @property
    def sent_reliable(self) -> int: ...
    def __init__(self, sent_reliable: int) -> None: ...
    def __eq__(self, other: object, /) -> bool: ...
    __hash__: ClassVar[None]  # type: ignore[assignment]

@final
class CancelSender:
    TAG: ClassVar[int]
    def __eq__(self, other: object, /) -> bool: ...
    __hash__: ClassVar[None]  # type: ignore[assignment]

@final
class AckReliable:
    TAG: ClassVar[int]
    @property
    def block(self) -> bytes: ...
    @property
    def ranges(self) -> tuple[int, ...]: ...
    def __init__(self, ranges: tuple[int, ...]) -> None: ...
    def __eq__(self, other: object, /) -> bool: ...
    __hash__: ClassVar[None]  # type: ignore[assignment]

@final
class AckNackUnreliable:
    TAG: ClassVar[int]
    @property
    def channel(self) -> int: ...
    @property
    def block(self) -> bytes: ...
    @property
    def ranges(self) -> tuple[int, ...]: ...
    def __init__(self, channel: int, ranges: tuple[int, ...]) -> None: ...
    def __eq__(self, other: object, /) -> bool: ...
    __hash__: ClassVar[None]  # type: ignore[assignment]

@final
class CloseReceiver:
    TAG: ClassVar[int]
    def __eq__(self, other: object, /) -> bool: ...
    __hash__: ClassVar[None]  # type: ignore[assignment]

@final
class ForgetChannel:
    TAG: ClassVar[int]
    def __eq__(self, other: object, /) -> bool: ...
    __hash__: ClassVar[None]  # type: ignore[assignment]
