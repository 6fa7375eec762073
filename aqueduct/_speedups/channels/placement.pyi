from typing_extensions import disjoint_base

from aqueduct._speedups.channels.receive_buffer import ReceiveBuffer

__all__ = ["PlacementBuffer"]

@disjoint_base
class PlacementBuffer(ReceiveBuffer):
    def reach(self, most: int) -> int: ...
    def take_up(self) -> int: ...
