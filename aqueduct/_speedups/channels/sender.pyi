from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from typing import Any, final

from typing_extensions import disjoint_base

from aqueduct._speedups.base.accounts import Account
from aqueduct._speedups.channels.tracker import SentNumbers, UnreliableSent

__all__ = ["Ledger", "OutStream", "Posting"]

@final
class OutStream:
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
class Ledger:
    _open: dict[int, OutStream]
    _effects: list[Any]
    _debug: bool
    _control_queued: int
    _control_waiting: OrderedDict[OutStream, None]
    _message_waiting: OrderedDict[OutStream, None]
    _openable: int
    _most_openable: int
    _opened_since: int
    connected: bool
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
        self, effects_out: list[Any], flow: Any, limits: Any, sending: object, debug: bool
    ) -> None: ...
    def effects_taken(self) -> None: ...
    def write(self, stream: OutStream, buffers: list[Any], fin: bool = False) -> None: ...
    def append(self, stream: OutStream, buffers: list[Any], size: int) -> int: ...
    def written(self, number: int, size: int) -> Any: ...
    def _may_open(self, stream: OutStream) -> bool: ...
    def _begin(self, stream: OutStream) -> bool: ...
    def _charge(self, stream: OutStream, size: int) -> int: ...
    def _release(self, stream: OutStream, size: int) -> int: ...

@disjoint_base
class Posting:
    _ledger: Ledger
    _numbers: SentNumbers
    _unreliable: UnreliableSent | None
    _message_stream: OutStream | None
    state: Any
    error: Exception | None
    queued: int
    given: bool
    accessible: bool
    waits_for_ample: bool
    oneshot: bool
    nacked: int
    streams_in: int
    links: dict[int, tuple[int, ...]]
    unreliable_links: dict[int, tuple[int, ...]]
    acked_links: list[int]
    _control: OutStream | None
    _unordered_open: dict[OutStream, None]
    _unordered_waiting: deque[OutStream]
    _finish_waits: bool
    @property
    def writable(self) -> bool: ...
    def end_batch(self) -> None: ...
    def post(self, payload: Any, headers: Iterable[Sequence[bytes]]) -> int: ...
