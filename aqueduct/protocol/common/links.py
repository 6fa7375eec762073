"""What hangs on the messages of a sender, and the streams on which messages go by themselves."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, TypeAlias

from aqueduct.protocol.common.send_streams import SendStream, SendStreams

__all__ = ["Links", "SentLinks", "UnorderedStreams", "take_links"]

Links: TypeAlias = dict[int, tuple[int, ...]]
"""Message number -> channels attached to that message."""


class SentLinks:
    """Channels attached to the messages of one sender, until their fate is known (AQ-R27.2).

    ``reliable`` and ``unreliable``: by number, of messages that are not settled. ``acked``: of
    messages that were acknowledged while the sender's own channel was pending.
    """

    __slots__ = ("acked", "reliable", "unreliable")

    def __init__(self) -> None:
        self.reliable: Links = {}
        self.unreliable: Links = {}
        self.acked: list[int] = []

    def channels(self) -> list[int]:
        """All of them."""
        tables = (*self.reliable.values(), *self.unreliable.values(), self.acked)
        return [channel for channels in tables for channel in channels]

    def reached(self, channels: list[int], accessible: bool) -> list[int]:
        """Channels of acked messages: accessible now, or once their sender is (AQ-R27.3)."""
        if accessible:
            return channels
        self.acked.extend(channels)
        return []

    def take_unsettled(self) -> list[int]:
        """The channels of messages that are not settled; they hang here no more."""
        taken = [
            channel
            for table in (self.reliable, self.unreliable)
            for channels in table.values()
            for channel in channels
        ]
        self.reliable.clear()
        self.unreliable.clear()
        return taken

    def take_acked(self) -> list[int]:
        """What was acked while the sender was pending: it shares what becomes of it."""
        taken, self.acked = self.acked, []
        return taken


def take_links(links: Links, ranges: Sequence[tuple[int, int]]) -> list[int]:
    """Removes the entries of the numbers in ``ranges`` and returns their channels."""
    taken: list[int] = []
    if not links:
        return taken
    for start, stop in ranges:
        if stop - start < len(links):
            numbers = [number for number in range(start, stop) if number in links]
        else:
            numbers = [number for number in links if start <= number < stop]
        for number in numbers:
            taken.extend(links.pop(number))
    return taken


class UnorderedStreams:
    """The streams of one sender that carry one message each; ``waiting``: for their turn."""

    __slots__ = ("_open", "_outgoing", "waiting")

    def __init__(self, outgoing: SendStreams) -> None:
        self._outgoing = outgoing
        self._open: dict[SendStream, None] = {}  # not a set: effects keep an order
        self.waiting: deque[SendStream] = deque()

    @property
    def unopened(self) -> bool:
        """Whether a message has no stream yet."""
        return bool(self.waiting) or any(stream.unopened for stream in self._open)

    def write(self, stream: SendStream, buffers: list[Any], most: int, *, at_once: bool) -> None:
        """A whole sequence; ``at_once``: before its turn, though ``most`` are under way.

        What carries channels goes before anything that is sent on them, or they could take every
        stream and wait for it for ever.
        """
        if len(self._open) >= most and not at_once:
            self._outgoing.hold_back(stream, buffers)
            self.waiting.append(stream)
            return
        self._open[stream] = None
        self._outgoing.write(stream, buffers, fin=True)

    def left(self, stream: SendStream, most: int) -> None:
        """A stream is through, or dead: the next message may go."""
        if stream in self._open:
            del self._open[stream]
            while self.waiting and len(self._open) < most:
                following = self.waiting.popleft()
                self._open[following] = None
                self._outgoing.let_go(following)

    def reset(self, code: int) -> None:
        """Nothing of them matters any more."""
        waiting, self.waiting = self.waiting, deque()
        for stream in (*waiting, *self._open):
            self._outgoing.reset(stream, code)
