"""Whether the peer is still there: pings, their answers, and silence (RL-R17)."""

from __future__ import annotations

from collections import deque

from aqueduct.config import Relink as Settings

__all__ = ["Liveness"]


class Liveness:
    """Of one connection: when bytes came last, and the pings under way.

    ``pongs``: pings of the peer whose answers wait to leave. They are never kept for another
    connection (RL-19). ``silent``: the connection was given up.
    """

    def __init__(self, settings: Settings, now: float) -> None:
        self.last_in = now
        self.pongs = 0
        self.silent = False
        self._settings = settings
        # When each ping left, and whether its answer confirms results.
        self._pings: deque[tuple[float, bool]] = deque()

    def ping(self, now: float, *, confirms: bool = False) -> None:
        """A ping leaves."""
        self._pings.append((now, confirms))

    def take_pong(self, now: float) -> tuple[float, bool] | None:
        """Seconds since its ping, and whether it confirms results; None: nobody asked."""
        if not self._pings:
            return None
        asked, confirms = self._pings.popleft()
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
        return due

    def judge(self, now: float, unanswered: float | None) -> str | None:
        """Why the connection is given up; empty: a ping is due; None: neither."""
        settings = self._settings
        if now >= self.last_in + settings.silence:
            self.silent = True
            return f"no byte came for {now - self.last_in:.1f} s"
        if unanswered is not None:
            moved = max(self.last_in, unanswered)
            if now >= moved + settings.ack_deadline:
                self.silent = True
                return f"nothing was acknowledged for {now - moved:.1f} s"
        return "" if not self._pings else None
