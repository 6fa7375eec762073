"""Decisions read from bytes: what a fuzzer changes in the bytes changes one decision."""

from __future__ import annotations

from typing import Final

__all__ = ["Source"]

EDGES: Final = (127, 128, 16_383, 1 << 32, (1 << 63) - 1, 1 << 63, (1 << 64) - 2, (1 << 64) - 1)
"""Numbers at which something changes: the length of a varint, a sign, the end of the range."""


class Source:
    """A cursor over bytes. Behind their end every decision is 0: a short input is a short run."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def empty(self) -> bool:
        """Whether every byte was used."""
        return self._at >= len(self._data)

    def byte(self) -> int:
        """0 to 255."""
        if self.empty:
            return 0
        self._at += 1
        return self._data[self._at - 1]

    def below(self, count: int) -> int:
        """0 to ``count`` - 1, for counts up to 256."""
        return self.byte() % count

    def flag(self) -> bool:
        """One of two."""
        return bool(self.byte() & 1)

    def number(self) -> int:
        """0 to 2^64 - 1: most often small."""
        kind = self.byte()
        if kind < 224:
            return kind
        if kind < 248:
            return int.from_bytes(self.take(2), "little")
        return EDGES[kind - 248]

    def take(self, size: int) -> bytes:
        """The next bytes, fewer at the end."""
        taken = self._data[self._at : self._at + size]
        self._at += len(taken)
        return taken

    def rest(self) -> bytes:
        """All that is left."""
        return self.take(len(self._data))
