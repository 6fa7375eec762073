from collections.abc import Callable, Iterable
from typing import final

from _typeshed import ReadableBuffer, WriteableBuffer

__all__ = ["Records", "use"]

def use(read: int, write: int, error: int, take: int, feed: int, data: int) -> None: ...

@final
class Records:
    def __new__(
        cls,
        owner: object,
        ssl: int,
        incoming: int,
        outgoing: int,
        fd: int,
        failure: Callable[[], Exception],
        scratch: memoryview,
    ) -> Records: ...
    def recv_into(self, target: WriteableBuffer) -> int: ...
    def seal(self, buffers: Iterable[ReadableBuffer]) -> list[bytes]: ...
