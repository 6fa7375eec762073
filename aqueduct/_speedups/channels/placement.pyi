from typing_extensions import disjoint_base

from aqueduct._speedups.channels.receive_buffer import Input

__all__ = ["Landing"]

@disjoint_base
class Landing(Input):
    def reach(self, most: int) -> int: ...
    def take_up(self) -> int: ...
