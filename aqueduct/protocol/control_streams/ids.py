"""Channel ids of the control-stream draft: the bits of AQ0-7.

From the lowest bit: the sender's side (0 client, 1 server), the creator's, whether it is a oneshot
channel, then 61 bits of index. The lowest three bits name one of eight index spaces; each side
creates in four of them.
"""

from __future__ import annotations

from typing import Final

from aqueduct._speedups.channels.frames import ONESHOT
from aqueduct._speedups.control_streams.control_frames import CREATOR, SENDER

__all__ = [
    "CREATOR",
    "ENTRYPOINT",
    "ONESHOT",
    "SENDER",
    "creator",
    "describe",
    "index",
    "make",
    "oneshot",
    "sender",
    "space",
]

ENTRYPOINT: Final = 0


def make(creator_bit: int, sender_bit: int, is_oneshot: bool, number: int) -> int:
    """The id of these fields."""
    return sender_bit | creator_bit << 1 | is_oneshot << 2 | number << 3


def creator(channel: int) -> int:
    """Who created the channel: 0 the client, 1 the server."""
    return channel >> 1 & 1


def sender(channel: int) -> int:
    """Who owns the sender half: 0 the client, 1 the server."""
    return channel & 1


def oneshot(channel: int) -> bool:
    """Whether the channel carries one message in total."""
    return bool(channel & 4)


def space(channel: int) -> int:
    """The index space, 0 to 7."""
    return channel & 7


def index(channel: int) -> int:
    """The number within the space."""
    return channel >> 3


def describe(channel: int) -> str:
    """The id for people: ``channel 41 (client-created, server sends, index 5)``."""
    side = ("client", "server")
    kind = ", oneshot" if oneshot(channel) else ""
    entry = ", the entrypoint" if channel == ENTRYPOINT else ""
    return (
        f"channel {channel} ({side[creator(channel)]}-created, "
        f"{side[sender(channel)]} sends{kind}, index {index(channel)}{entry})"
    )
