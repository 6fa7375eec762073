"""The parts of a message that comes, put together."""

from __future__ import annotations

from typing import Any, Final

from aqueduct._speedups.base.buffers import AlignedBuffer
from aqueduct._speedups.relink.packets import PacketDecoder
from aqueduct.protocol.relink.cost import message_cost

__all__ = ["Assembly"]

_LANDING_FROM: Final = 4096
"""Bytes of a part from which it has memory of its own, where a carrier may read to."""


class Assembly:
    """One message at a time: ``keep`` pieces, or read them to ``room``; ``finish`` gives the parts.

    Large parts are AlignedBuffers, small ones bytes. A part takes memory when its first byte comes.
    """

    def __init__(self) -> None:
        self._parts: list[Any] = []
        self._pieces: list[Any] = []
        self._target: memoryview | None = None
        self._landed = 0
        self._came = 0
        """Bytes that came of the message."""

    @property
    def cost(self) -> int:
        """What it costs so far; 0: nothing came of it."""
        return message_cost(self._came, len(self._parts)) if self._came else 0

    def room(self) -> memoryview | None:
        """Where the next bytes of a large part go; None: there is no such part."""
        return None if self._target is None else self._target[self._landed :]

    def landed(self, size: int) -> None:
        """``size`` bytes were written to ``room``."""
        self._landed += size
        self._came += size

    def keep(self, decoder: PacketDecoder) -> None:
        """Takes the piece that the decoder has."""
        self.reach(decoder)
        data = decoder.data
        assert data is not None
        self._came += len(data)
        if self._target is None:
            self._pieces.append(data)
            return
        self._target[self._landed : self._landed + len(data)] = data
        self._landed += len(data)

    def reach(self, decoder: PacketDecoder) -> None:
        """Memory for the part whose bytes come next, or have come."""
        self._begin_parts(decoder.sizes[: decoder.part + 1])

    def finish(self, sizes: tuple[int, ...]) -> list[Any]:
        """The parts of a message that is whole."""
        self._begin_parts(sizes)
        self._end_part()
        parts, self._parts, self._came = self._parts, [], 0
        return parts

    def _begin_parts(self, sizes: tuple[int, ...]) -> None:
        for size in sizes[len(self._parts) :]:
            self._end_part()
            if size >= _LANDING_FROM:
                buffer = AlignedBuffer(size)
                self._parts.append(buffer)
                self._target, self._landed = memoryview(buffer), 0
            else:
                self._parts.append(b"")

    def _end_part(self) -> None:
        if self._pieces:
            self._parts[-1] = b"".join(self._pieces)
            self._pieces.clear()
        self._target = None
