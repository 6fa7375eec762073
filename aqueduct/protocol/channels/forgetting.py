"""When the FORGET_CHANNELs leave that answer for channels that are gone (AQ-40, AQ-46)."""

from __future__ import annotations

from collections import OrderedDict
from heapq import heappop, heappush

__all__ = ["Forgetting"]


class Forgetting:
    """When a FORGET_CHANNEL may go out.

    A second after the last one for the same channel, and not before max(1 s, 2 RTT) after a
    CLOSE_RECEIVER of ours (AQ-R23, AQ-R24).
    """

    __slots__ = ("_before", "_closed", "_memory", "_pending", "_sent", "_turn", "kept", "rtt")

    def __init__(self, memory: float) -> None:
        self._memory = memory
        self.rtt = 0.0
        # Ordered, because the oldest go first: a plain dict walks over all that is gone before.
        self._sent: OrderedDict[int, float] = OrderedDict()
        # Closes are many, one for each call: they go all at once, those of a while together.
        self._closed: dict[int, float] = {}
        self._before: dict[int, float] = {}
        self._turn = 0.0
        self.kept: list[tuple[float, int]] = []
        """A heap of when ``due`` has something, and of what."""
        self._pending: set[int] = set()

    def closed(self, channel: int, now: float) -> None:
        """We sent CLOSE_RECEIVER for a channel of ours, or will shortly and then say so again."""
        if now >= self._turn:
            self._before, self._closed = self._closed, {}
            self._turn = now + self._wait()
        self._closed[channel] = now

    def ask(self, channel: int, now: float) -> bool:
        """Whether to send one now; otherwise it is kept for ``due``."""
        if channel in self._pending:
            return False
        earliest = now
        if (sent := self._sent.get(channel)) is not None:
            earliest = sent + self._memory
        closed = self._closed.get(channel)
        if closed is None:
            closed = self._before.get(channel)
        if closed is not None:
            earliest = max(earliest, closed + self._wait())
        if earliest <= now:
            self.sent(channel, now)
            return True
        self._pending.add(channel)
        heappush(self.kept, (earliest, channel))
        return False

    def sent(self, channel: int, now: float) -> None:
        """One left."""
        self._expire(self._sent, now)
        self._sent[channel] = now
        self._sent.move_to_end(channel)

    def due(self, now: float) -> list[int]:
        """The channels whose FORGET_CHANNEL was kept until now."""
        ready: list[int] = []
        while self.kept and self.kept[0][0] <= now:
            channel = heappop(self.kept)[1]
            self._pending.discard(channel)
            self.sent(channel, now)
            ready.append(channel)
        return ready

    def _wait(self) -> float:
        return max(self._memory, 2 * self.rtt)

    def _expire(self, table: OrderedDict[int, float], now: float) -> None:
        """The order of insertion is the order of time."""
        horizon = now - self._wait()
        while table and table[next(iter(table))] <= horizon:
            table.popitem(last=False)
