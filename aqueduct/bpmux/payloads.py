"""Payloads that wait to be received: small ones lie packed, since an object for each costs more."""

from __future__ import annotations

from collections import deque
from typing import Final

__all__ = ["Payloads"]

_SMALL: Final = 64
"""Bytes of a payload that is packed at most; its size takes one byte."""
_PACKED: Final = 4096
"""Payloads in one pack, at most: what was taken of a pack is let go with it."""


class _Pack:
    """Small payloads in a row."""

    __slots__ = ("at", "data", "index", "sizes")

    def __init__(self) -> None:
        self.data = bytearray()
        self.sizes = bytearray()
        self.at = 0
        """Where in ``data`` the next payload begins."""
        self.index = 0
        """How many were taken."""


class Payloads:
    """A queue of payloads, each with the bytes of credit to give back for it."""

    __slots__ = ("_items", "count", "size")

    def __init__(self) -> None:
        self._items: deque[_Pack | tuple[bytes, int]] = deque()
        self.count = 0
        """How many payloads wait."""
        self.size = 0
        """Their bytes in sum."""

    def append(self, payload: bytes, charged: int) -> None:
        """Adds one; ``charged`` bytes of credit are given back when it is taken."""
        size = len(payload)
        self.count += 1
        self.size += size
        if size > _SMALL or charged != size:
            self._items.append((payload, charged))
            return
        last = self._items[-1] if self._items else None
        if not isinstance(last, _Pack) or len(last.sizes) == _PACKED:
            last = _Pack()
            self._items.append(last)
        last.sizes.append(size)
        last.data += payload

    def take(self) -> tuple[bytes, int]:
        """The oldest one and its credit. There must be one."""
        first = self._items[0]
        if isinstance(first, _Pack):
            size = first.sizes[first.index]
            payload = bytes(first.data[first.at : first.at + size])
            charged = size
            first.index += 1
            first.at += size
            if first.index == len(first.sizes):
                self._items.popleft()
        else:
            payload, charged = first
            self._items.popleft()
        self.count -= 1
        self.size -= len(payload)
        return payload, charged

    def clear(self) -> None:
        """Drops all."""
        self._items.clear()
        self.count = self.size = 0
