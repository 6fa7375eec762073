from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Any, final

from typing_extensions import disjoint_base

from aqueduct._speedups.base.accounts import Account
from aqueduct._speedups.base.buffers import Keeper
from aqueduct._speedups.channels.message_batches import MessageBatch, Received
from aqueduct._speedups.channels.tracker import ReceivedNumbers

__all__ = ["EMPTY", "MemoryLease", "ReceiveBudget", "ReceiverBase"]

EMPTY: MappingProxyType[Any, Any]

@disjoint_base
class ReceiveBudget:
    budget_used: int
    freed: bool
    budget: int
    channel_budget: int
    relieved: dict[Any, None]
    starved: OrderedDict[Any, None]
    process: Account
    shown: Account
    process_budget: int
    place: ReceiverBase | None
    wake: Callable[[], object] | None
    @property
    def free_bytes(self) -> int: ...
    def spent(self, size: int) -> None: ...
    def fits(self, size: int) -> bool: ...
    def fits_process(self, size: int) -> bool: ...
    def detach(self) -> None: ...
    def __new__(cls, *arguments: object, **options: object) -> ReceiveBudget: ...

@disjoint_base
class ReceiverBase:
    queue: deque[Received]
    charged: int
    waiting: OrderedDict[Any, None]
    _outstanding: int
    _dropped: int
    _unreliable_queue: deque[Received]
    streams: dict[Any, None]
    streams_in: int
    given: bool
    assured: bool
    patient: bool
    placement: Any
    placement_key: bytes | None
    announce: Any
    evicted: Sequence[Received]
    evictions: int
    nacked: int
    _unreliable: Any
    _control: Any
    _receipt: list[Any] | None
    _ack_scheduled: bool
    _declared: int
    state: Any
    error: Exception | None
    _oneshot: bool
    numbers: ReceivedNumbers
    keeps: bool
    told: bool
    pledged: int
    @property
    def wanted(self) -> bool: ...
    @property
    def reader(self) -> object: ...
    @property
    def held(self) -> int: ...
    @property
    def owed(self) -> int: ...
    def __new__(
        cls, budget: ReceiveBudget, *arguments: object, **options: object
    ) -> ReceiverBase: ...
    @property
    def room(self) -> int: ...
    def add(self, run: MessageBatch) -> bool: ...
    def take(self) -> Received | None: ...
    def _charge(self, size: int) -> None: ...
    def charge_within(self, size: int) -> bool: ...
    def charge_above(self, size: int) -> bool: ...
    def lease(self, payload: object) -> MemoryLease: ...
    def settle(self) -> None: ...
    def let_go(self) -> None: ...
    def settled(self, messages: int) -> None: ...
    def want(self, wanted: bool, reader: object = None) -> None: ...
    def leave_place(self) -> None: ...
    def pass_on(self) -> None: ...

@final
class DirectReading: ...

@final
class MemoryLease(Keeper):
    @property
    def size(self) -> int: ...
    def grow(self, size: int) -> None: ...
    def give_back(self) -> None: ...
