from collections.abc import Collection

__all__ = ["look"]

def look(fds: Collection[int], seconds: float, yielded: float) -> int: ...
