"""What messages and channels cost, at their sender and at their receiver alike."""

from __future__ import annotations

from typing import Final

__all__ = ["CHANNEL_COST", "EMPTY_COST", "message_cost"]

CHANNEL_COST: Final = 4096
"""Of a channel that is open, whatever it carries: about what its objects take."""
_MESSAGE: Final = 128
_PART: Final = 64
EMPTY_COST: Final = _MESSAGE
"""Of a message without parts; a message that is rolled back costs so much until it is forgotten."""


def message_cost(size: int, parts: int) -> int:
    """The bytes that a message of ``size`` bytes in so many parts counts for: empty ones, too."""
    return size + _MESSAGE + _PART * parts
