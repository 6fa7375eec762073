from typing_extensions import disjoint_base

__all__ = ["ReceiveBuffer"]

@disjoint_base
class ReceiveBuffer: ...
