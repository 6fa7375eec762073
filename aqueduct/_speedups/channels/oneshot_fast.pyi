from collections.abc import Callable
from typing import Any

from typing_extensions import disjoint_base

from aqueduct._speedups.channels.codec import Headers
from aqueduct._speedups.channels.decoder import Decoder
from aqueduct._speedups.channels.receiver import Inbox
from aqueduct._speedups.channels.sender import Posting

__all__ = ["Brisk"]

@disjoint_base
class Brisk:
    def __init__(
        self,
        shared: Any,
        registry: Any,
        decoder: Decoder,
        *,
        halves: tuple[Callable[..., Any], Callable[..., Any]],
        states: tuple[object, ...],
        small: int,
    ) -> None: ...
    def ask(self, half: Posting, payload: Any, headers: Headers) -> Any: ...
    def write_closes(self) -> None: ...
    def questions(self, half: Inbox, decoder: Decoder, data: Any) -> Any: ...
    def answer(self, half: Posting, payload: Any, headers: Headers) -> bool: ...
    def read(self, data: Any) -> bool: ...
