from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, final

from typing_extensions import disjoint_base

from aqueduct._speedups.base.accounts import Account
from aqueduct._speedups.channels.tracker import SentNumbers, UnreliableSent

__all__ = ["SendQueue", "SendStream", "SenderBase"]

@final
class SendStream:
    half: Any
    @property
    def control(self) -> bool: ...
    number: int
    queued: int
    fin: bool
    dead: bool
    waiting: Any
    guard: Any
    speaker: Any
    def __init__(self, half: Any, control: bool) -> None: ...
    @property
    def unopened(self) -> bool: ...

@disjoint_base
class SendQueue:
    _open: dict[int, SendStream]
    _left: dict[int, int]
    live: dict[int, Any]
    _effects: list[Any]
    _control_queued: int
    _control_waiting: OrderedDict[SendStream, None]
    _message_waiting: OrderedDict[SendStream, None]
    _most_openable: int
    connected: bool
    frames: Callable[[int, int, Any, Sequence[int], Any], list[Any]] | None
    version_acknowledged: bool
    queued: int
    process: Account
    process_budget: int
    @property
    def retained(self) -> int: ...
    @property
    def charged(self) -> int: ...
    fell: bool
    @property
    def stalled_control(self) -> int: ...
    def __init__(
        self, effects_out: list[Any], flow: Any, limits: Any, sending: object, guard: Any = None
    ) -> None: ...
    def effects_taken(self) -> None: ...
    def write(self, stream: SendStream, buffers: list[Any], fin: bool = False) -> None: ...
    def append(self, stream: SendStream, buffers: list[Any], size: int) -> int: ...
    def keep(self, size: int) -> None: ...
    def written(self, number: int, size: int) -> Any: ...
    def _watch(self, stream: SendStream, buffers: list[Any]) -> int: ...
    def check_size(self, size: int) -> int: ...
    def _allow(self, count: int) -> int: ...
    def recount(self, held: int, forgotten: bool) -> int: ...
    def _may_open(self, stream: SendStream) -> bool: ...
    def _begin(self, stream: SendStream) -> bool: ...
    def _charge(self, stream: SendStream, size: int) -> int: ...
    def _release(self, stream: SendStream, size: int) -> int: ...

@disjoint_base
class SenderBase:
    def __new__(cls, owner: Any, *arguments: object, **options: object) -> SenderBase: ...
    numbers: SentNumbers
    unreliable: UnreliableSent | None
    message_stream: SendStream | None
    state: Any
    error: Exception | None
    queued: int
    given: bool
    accessible: bool
    oneshot: bool
    streams_in: int
    links: Any
    unordered: Any
    control: SendStream | None
    finish_waits: bool
    @property
    def writable(self) -> bool: ...
    def end_batch(self) -> None: ...
    def post(self, payload: Any, headers: Iterable[Sequence[bytes]]) -> int | None: ...
