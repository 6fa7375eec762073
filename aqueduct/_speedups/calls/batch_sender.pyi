from asyncio import AbstractEventLoop
from collections.abc import Callable, Iterator
from typing import Any, final

from typing_extensions import disjoint_base

from aqueduct._speedups.arrow.writer import Encoded
from aqueduct._speedups.channels.sender import SenderBase
from aqueduct._speedups.loop.waiter import Waiter

__all__ = ["BatchSender", "InFlightWindow", "SendWaker"]

@final
class InFlightWindow:
    held: int
    @property
    def sent(self) -> int: ...
    @property
    def settled(self) -> int: ...
    @property
    def open(self) -> bool: ...
    @property
    def sent_bytes(self) -> int: ...
    def __init__(
        self, batches: int, size: int, small_batches: int = 0, small_bytes: int = 0
    ) -> None: ...
    def is_one_below(self, size: int) -> bool: ...
    def send(self, size: int) -> int: ...
    def settle(self, number: int) -> None: ...
    def settle_one(self, number: int) -> bool: ...

@disjoint_base
class BatchSender:
    @property
    def window(self) -> InFlightWindow | None: ...
    row: SenderBase | None
    compression: str
    over: bool
    moved: int
    slow: Any
    expects: int
    def __init__(
        self,
        window: InFlightWindow | None,
        key: bytes,
        most: int,
        flush: Callable[[], object],
        large: int,
    ) -> None: ...
    @property
    def may_send(self) -> bool: ...
    def feed(self, source: Any, batches: Iterator[Any], count: int) -> bool | None: ...
    def give(self, source: Any, batch: Any) -> None: ...
    def give_encoded(self, encoded: Encoded) -> None: ...

@final
class SendWaker:
    def wake(self) -> None: ...
    def wait(self, call: BatchSender, loop: AbstractEventLoop, stepper: Any) -> Waiter: ...
