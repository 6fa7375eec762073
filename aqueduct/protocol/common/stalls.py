"""Batches that come too slowly while others wait for their room."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from aqueduct._speedups.channels.receiver import ReceiveQueue
from aqueduct.errors import Busy
from aqueduct.protocol.common.context import ConnectionContext
from aqueduct.protocol.common.receiver import ReceiverHalf

__all__ = ["StallWatch"]

SWEEP: Final = 1.0
"""Seconds, at most, between two looks for batches that come too slowly."""


class StallWatch:
    """Looks for such batches now and then, and fails them."""

    def __init__(
        self,
        shared: ConnectionContext,
        incoming: Any,
        close_receiver: Callable[[ReceiverHalf, Any], None],
    ) -> None:
        """``incoming``: has ``streams``, those of the peer by number."""
        self._shared = shared
        self._incoming = incoming
        self._close_receiver = close_receiver
        self._slow: dict[Any, tuple[int, float]] = {}
        """For each slow stream: the bytes it had reached, and its seconds since then."""
        self._swept = 0.0
        self._due: float | None = None
        self._idle_at = -1
        """The bytes in use when a sweep found nothing under way; -1: none has."""
        self._interval = min(SWEEP, shared.config.timing.stall_deadline / 4)
        """Seconds from one sweep to the next."""
        self._idle_places: dict[ReceiveQueue, float] = {}
        """For each batch above a budget: its seconds since it was whole, while it is in use."""

    def deadline(self) -> float | None:
        """When ``sweep`` is due; None: nobody waits for room of batches that come here."""
        shared = self._shared
        if not (shared.starved or shared.process.waiting):
            self._due, self._idle_at = None, -1
        elif self._due is None and shared.budget_used != self._idle_at:
            self._swept = shared.now
            self._slow.clear()
            self._idle_places.clear()
            self._due = shared.now + self._interval
        return self._due

    def sweep(self, now: float) -> None:
        """Fails batches that came too slowly for too long while others wait for their room."""
        flow = self._shared.config.flow
        rate, limit = flow.stall_rate, self._shared.config.timing.stall_deadline
        # A blocked loop did not read meanwhile, so that time does not count against a batch.
        passed = min(now - self._swept, 2 * self._interval)
        self._swept = now
        self._due = now + self._interval
        slow, self._slow = self._slow, {}
        for stream in tuple(self._incoming.streams.values()):
            half = stream.half
            if not isinstance(half, ReceiverHalf) or half.error is not None:
                continue
            queue = half.queue
            if stream.head is not None or not (stream.partial >= 0 or queue.pledged or queue.owed):
                continue  # it waits itself, or nothing is missing
            come = stream.decoder.consumed
            since, waited = slow.get(stream, (come, 0.0))
            waited += passed
            if come - since >= rate * limit:
                since, waited = come, 0.0
            if waited >= limit and self._blocks_others(half):
                self._fail_stalled(half, come - since, waited)
            else:
                self._slow[stream] = since, waited
        idle, self._idle_places = self._idle_places, {}
        for place in (self._shared.place, self._shared.process.place):
            if isinstance(place, ReceiveQueue) and place.budget is self._shared:
                self._pass_on(place, idle.get(place, 0.0) + passed)
        if not (self._slow or self._idle_places):
            self._due, self._idle_at = None, self._shared.budget_used  # until that changes

    def clear(self) -> None:
        """The connection is over."""
        self._slow.clear()
        self._idle_places.clear()

    # Within

    def _pass_on(self, place: ReceiveQueue, idle: float) -> None:
        """A whole batch that is in use for too long loses its place above the budget.

        Its handler may itself wait for one of those that wait for the place.
        """
        if place.growing:
            idle = 0.0
        if idle >= self._shared.config.timing.stall_deadline:
            place.leave_place()
        else:
            self._idle_places[place] = idle

    def _blocks_others(self, half: ReceiverHalf) -> bool:
        shared = self._shared
        here = len(shared.starved) - (half.queue in shared.starved)
        others = len(shared.process.waiting) - (shared in shared.process.waiting)
        return here > 0 or others > 0

    def _fail_stalled(self, half: ReceiverHalf, gained: int, waited: float) -> None:
        flow, timing = self._shared.config.flow, self._shared.config.timing
        shared = self._shared
        if shared.starved:
            budget = f"the connection's budget of {flow.receive_budget} bytes (Flow.receive_budget)"
        else:
            budget = (
                f"the process's budget of {shared.process_budget} bytes "
                "(Flow.process_receive_budget)"
            )
        self._close_receiver(
            half,
            Busy(
                f"a batch gained {gained} bytes in {waited:.1f} s while others wait for room in "
                f"{budget}; at least {flow.stall_rate} bytes a second are wanted for "
                f"{timing.stall_deadline:g} s (Flow.stall_rate, Timing.stall_deadline)"
            ),
        )
