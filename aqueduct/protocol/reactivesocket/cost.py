"""What frames, items and streams cost beside their bytes, and how long frames are."""

from __future__ import annotations

from typing import Any, Final

__all__ = ["FRAME_COST", "HEADER_BYTES", "STREAM_COST", "length_of"]

FRAME_COST: Final = 256
"""Of a frame that waits to leave, a request, or a fragment: about what its objects take."""
STREAM_COST: Final = 1024
"""Of a stream that has not ended."""
HEADER_BYTES: Final = 12
"""Of a frame without its length."""


def length_of(data: Any) -> int:
    """The bytes of a buffer."""
    return len(data) if type(data) is bytes else memoryview(data).nbytes
