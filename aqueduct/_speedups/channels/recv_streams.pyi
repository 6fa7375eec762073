from collections.abc import Callable, Mapping
from typing import Any, final

from typing_extensions import disjoint_base

from aqueduct._speedups.channels.decoder import FrameDecoder
from aqueduct._speedups.channels.frames import MessageHead
from aqueduct._speedups.channels.message_batches import DirectRead, MessageBatch
from aqueduct._speedups.channels.receiver import ReceiveBudget, ReceiverBase

__all__ = ["RecvStream", "RecvStreamsBase"]

@final
class RecvStream:
    @property
    def number(self) -> int: ...
    decoder: FrameDecoder
    handlers: Mapping[int, Callable[[RecvStream, Any], None]]
    half: Any
    begun: bool
    fin: bool
    ignoring: bool
    head: MessageHead | None
    held: bool
    postponed: bool
    limit: int
    granted: int
    gathered: int
    partial: int
    def __init__(
        self,
        number: int,
        limit: int,
        handlers: Mapping[int, Callable[[RecvStream, Any], None]],
        decoder: FrameDecoder,
    ) -> None: ...
    @property
    def inside_message(self) -> bool: ...

@disjoint_base
class RecvStreamsBase:
    @property
    def streams(self) -> dict[int, RecvStream]: ...
    plain: Mapping[int, Callable[[RecvStream, Any], None]]
    def __init__(self, shared: ReceiveBudget, *, open: Any, small: int) -> None: ...
    def inlet(self, number: int) -> DirectRead | None: ...
    def inlet_done(self, number: int) -> tuple[RecvStream, Any] | None: ...
    def read_plain(self, stream: RecvStream, half: ReceiverBase) -> MessageBatch | None: ...
    def take_run(self, stream: RecvStream, half: ReceiverBase, run: MessageBatch) -> None: ...
    def charge_small(self, stream: RecvStream) -> None: ...
    def credit(self, stream: RecvStream) -> None: ...
    def grant_read_ahead(self, stream: RecvStream, size: int) -> None: ...
