from typing_extensions import disjoint_base

__all__ = ["Input"]

@disjoint_base
class Input: ...
