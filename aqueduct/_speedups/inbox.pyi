from collections import OrderedDict, deque
from collections.abc import Sequence
from types import MappingProxyType
from typing import Any

from typing_extensions import disjoint_base

from aqueduct._speedups.runs import Received, Run
from aqueduct._speedups.tracker import ReceivedNumbers

__all__ = ["EMPTY", "Budget", "Inbox"]

EMPTY: MappingProxyType[Any, Any]

@disjoint_base
class Budget:
    budget_used: int
    freed: bool
    budget: int
    channel_budget: int
    relieved: dict[Any, None]
    starved: OrderedDict[Any, None]
    def __new__(cls, *arguments: object, **options: object) -> Budget: ...

@disjoint_base
class Inbox:
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
    def __new__(cls, budget: Budget, *arguments: object, **options: object) -> Inbox: ...
    @property
    def room(self) -> int: ...
    def add(self, run: Run) -> bool: ...
    def take(self) -> Received | None: ...
    def _charge(self, size: int) -> None: ...
