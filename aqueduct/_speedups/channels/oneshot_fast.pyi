from collections.abc import Callable
from typing import Any

from typing_extensions import disjoint_base

from aqueduct._speedups.channels.codec import Headers
from aqueduct._speedups.channels.decoder import FrameDecoder
from aqueduct._speedups.channels.receiver import ReceiverBase
from aqueduct._speedups.channels.sender import SenderBase

__all__ = ["Brisk"]

@disjoint_base
class Brisk:
    def __init__(
        self,
        shared: Any,
        registry: Any,
        decoder: FrameDecoder,
        *,
        halves: tuple[Callable[..., Any], Callable[..., Any]],
        states: tuple[object, ...],
        small: int,
    ) -> None: ...
    def ask(self, half: SenderBase, payload: Any, headers: Headers) -> Any: ...
    def write_closes(self) -> None: ...
    def questions(self, half: ReceiverBase, decoder: FrameDecoder, data: Any) -> Any: ...
    def answer(self, half: SenderBase, payload: Any, headers: Headers) -> bool: ...
    def read(self, data: Any) -> bool: ...
