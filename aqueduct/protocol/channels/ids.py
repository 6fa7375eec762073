"""Channel ids: the bits of AQ-6, and the counters of AQ-7.

From the lowest bit: CREATOR, SENDER (0 client, 1 server), ONESHOT, then 61 bits of INDEX. The
lowest three bits name one of eight index spaces; each side creates in four of them.
"""

from __future__ import annotations

from typing import Final

from aqueduct._speedups.channels.frames import CREATOR, ONESHOT

__all__ = [
    "CREATOR",
    "ENTRYPOINT",
    "ONESHOT",
    "Counters",
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
    return creator_bit | sender_bit << 1 | is_oneshot << 2 | number << 3


def creator(channel: int) -> int:
    """Who created the channel: 0 the client, 1 the server."""
    return channel & 1


def sender(channel: int) -> int:
    """Who owns the sender half: 0 the client, 1 the server."""
    return channel >> 1 & 1


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
    """The id for people: ``channel 42 (client-created, server sends, oneshot, index 5)``."""
    side = ("client", "server")
    kind = ", oneshot" if oneshot(channel) else ""
    entry = ", the entrypoint" if channel == ENTRYPOINT else ""
    return (
        f"channel {channel} ({side[creator(channel)]}-created, "
        f"{side[sender(channel)]} sends{kind}, index {index(channel)}{entry})"
    )


class Counters:
    """The next index in each of the four spaces that this side creates in (AQ-7)."""

    __slots__ = ("_next", "_side")

    def __init__(self, side: int) -> None:
        self._side = side
        self._next = {
            side | sender_bit << 1 | shot << 2: 0 for sender_bit in (0, 1) for shot in (0, 1)
        }
        if side == 0:
            self._next[0] = 1  # index 0 is the entrypoint

    def take(self, sender_bit: int, is_oneshot: bool) -> int:
        """A channel id never given before."""
        key = self._side | sender_bit << 1 | is_oneshot << 2
        number = self._next[key]
        self._next[key] = number + 1
        return key | number << 3

    def handed_out(self, channel: int) -> bool:
        """Whether this id of local creation was ever given (AQ-R4)."""
        return channel == ENTRYPOINT or index(channel) < self._next[space(channel)]
