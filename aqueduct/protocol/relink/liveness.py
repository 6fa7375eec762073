"""Whether the peer is still there: pings, their answers, and silence (RL-R17)."""

from __future__ import annotations

import math
from collections import deque

from aqueduct.config import Relink as Settings

__all__ = ["Liveness"]


class Liveness:
    """Of one connection: when bytes came last, and the pings under way.

    ``pongs``: pings of the peer whose answers wait to leave. They are never kept for another
    connection (RL-19). ``silent``: the connection was given up.
    """

    def __init__(self, settings: Settings, now: float) -> None:
        self.last_in = self.moved = now
        self.pongs = 0
        self.silent = False
        self._settings = settings
        # When each ping left, and whether its answer confirms results.
        self._pings: deque[tuple[float, bool]] = deque()
        self._waiting = False
        """Whether messages that have left on this connection are not acknowledged."""
        self._early_pings = 0
        """Of those: they left before ``moved``, so their answers say nothing about messages."""
        self._read_at: float | None = None
        """When it was known that the peer has read messages; None: it is not."""
        self._ignored = False
        """Whether the peer has read messages and does not acknowledge them."""

    def acknowledged(self, now: float, waiting: int) -> None:
        """Messages were acknowledged, or begin to wait for that: so many wait now."""
        self.moved = now
        self._waiting = waiting > 0
        self._early_pings = len(self._pings)
        self._read_at, self._ignored = None, False

    def ping(self, now: float, *, confirms: bool = False) -> None:
        """A ping leaves."""
        self._pings.append((now, confirms))

    def take_pong(self, now: float) -> tuple[float, bool] | None:
        """Seconds since its ping, and whether it confirms results; None: nobody asked."""
        if not self._pings:
            return None
        asked, confirms = self._pings.popleft()
        if self._early_pings:
            self._early_pings -= 1
        elif self._waiting and self._read_at is None:
            self._read_at = now
        elif self._waiting and asked >= self._ask_again():
            self._ignored = True
        return now - asked, confirms

    def next_deadline(self, unanswered: float | None) -> float:
        """When ``judge`` is due.

        ``unanswered``: since when an answer of the peer is missing; None: none is.
        """
        settings = self._settings
        due = self.last_in + (settings.silence if self._pings else settings.ping_interval)
        if unanswered is not None:
            moved = max(self.last_in, unanswered)
            due = min(due, moved + settings.ack_deadline * (1.0 if self._pings else 0.5))
        if self._waiting:
            due = min(due, self._probe_due())
        return due

    def judge(self, now: float, unanswered: float | None) -> str | None:
        """Why the connection is given up; empty: a ping is due; None: neither."""
        settings = self._settings
        if now >= self.last_in + settings.silence:
            self.silent = True
            return f"no byte came for {now - self.last_in:.1f} s"
        if self._waiting and self._ignored:
            self.silent = True
            return f"the peer has read messages and acknowledged none for {now - self.moved:.1f} s"
        if unanswered is not None:
            moved = max(self.last_in, unanswered)
            if now >= moved + settings.ack_deadline:
                self.silent = True
                return f"nothing was acknowledged for {now - moved:.1f} s"
        return "" if not self._pings else None

    # Within

    def _probe_due(self) -> float:
        """When messages have waited so long for an acknowledgement that the peer is asked."""
        if self._ignored:
            return self.moved
        if self._pings:
            return math.inf
        if self._read_at is None:
            return self.moved + self._settings.ack_deadline / 2
        return self._ask_again()

    def _ask_again(self) -> float:
        """When a peer that has read messages must have acknowledged them."""
        assert self._read_at is not None
        deadline = self._settings.ack_deadline
        return max(self.moved + deadline, self._read_at + deadline / 2)
