from collections.abc import Callable, Mapping
from typing import Any, final

from typing_extensions import disjoint_base

from aqueduct._speedups.channels.decoder import Decoder
from aqueduct._speedups.channels.frames import MessageHead
from aqueduct._speedups.channels.message_batches import Inlet, Run
from aqueduct._speedups.channels.receiver import Budget, Inbox

__all__ = ["InStream", "Streams"]

@final
class InStream:
    @property
    def number(self) -> int: ...
    decoder: Decoder
    handlers: Mapping[int, Callable[[InStream, Any], None]]
    half: Any
    begun: bool
    fin: bool
    ignoring: bool
    head: MessageHead | None
    held: bool
    limit: int
    granted: int
    gathered: int
    partial: int
    def __init__(
        self,
        number: int,
        limit: int,
        handlers: Mapping[int, Callable[[InStream, Any], None]],
        decoder: Decoder,
    ) -> None: ...
    @property
    def inside_message(self) -> bool: ...

@disjoint_base
class Streams:
    @property
    def streams(self) -> dict[int, InStream]: ...
    plain: Mapping[int, Callable[[InStream, Any], None]]
    def __init__(self, shared: Budget, *, open: Any, small: int) -> None: ...
    def inlet(self, number: int) -> Inlet | None: ...
    def inlet_done(self, number: int) -> tuple[InStream, Any] | None: ...
    def read_plain(self, stream: InStream, half: Inbox) -> Run | None: ...
    def take_run(self, stream: InStream, half: Inbox, run: Run) -> None: ...
    def charge_small(self, stream: InStream) -> None: ...
    def credit(self, stream: InStream) -> None: ...
    def grant_read_ahead(self, stream: InStream, size: int) -> None: ...
