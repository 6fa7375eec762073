from typing import final

from typing_extensions import disjoint_base

from aqueduct._speedups.channels.receiver import ReceiveBudget

__all__ = ["CreditedStream", "StreamCredit"]

@disjoint_base
class CreditedStream:
    fin: bool
    limit: int
    granted: int
    @property
    def number(self) -> int: ...
    def __init__(self, number: int, limit: int) -> None: ...

@final
class StreamCredit:
    def __init__(self, shared: ReceiveBudget) -> None: ...
    def renew(self, stream: CreditedStream, taken: int) -> None: ...
    def read_ahead(self, stream: CreditedStream, size: int) -> None: ...
    def leave(self, stream: CreditedStream) -> None: ...
