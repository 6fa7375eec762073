from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, final

from _typeshed import ReadableBuffer, WriteableBuffer
from typing_extensions import disjoint_base

__all__ = ["OpenSslRecords", "PlainRecords", "Records", "use"]

class _Library(Protocol):
    def recv_into(self, target: memoryview, /) -> int: ...
    def seal(self, buffers: Sequence[memoryview], /) -> list[bytes]: ...

def use(read: int, write: int, error: int, take: int, feed: int, data: int) -> None: ...

@disjoint_base
class Records:
    def recv_into(self, target: WriteableBuffer) -> int: ...
    def seal(self, buffers: Iterable[ReadableBuffer]) -> list[bytes]: ...

@final
class OpenSslRecords(Records):
    def __new__(
        cls,
        owner: object,
        ssl: int,
        incoming: int,
        outgoing: int,
        fd: int,
        failure: Callable[[], Exception],
        scratch: memoryview,
    ) -> OpenSslRecords: ...

@final
class PlainRecords(Records):
    def __new__(cls, library: _Library) -> PlainRecords: ...
