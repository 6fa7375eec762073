"""A channel at its receiver: what has come, what was done with it, and what the sender must learn.

Numbers of messages count from 0 without an end, as in ``sending``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Final

from aqueduct.errors import SequenceError
from aqueduct.protocol.relink.cost import EMPTY_COST
from aqueduct.protocol.relink.sending import target_of
from aqueduct.protocol.relink.state import RECEIVING, ChannelState, ReceivingInput

__all__ = ["PartialMessage", "ReceiveChannel"]

_NEVER: Final[deque[Any]] = deque(maxlen=0)
"""Of plain channels: they have no decisions, and a deque takes 760 bytes."""


@dataclass(slots=True)
class PartialMessage:
    """A message that is not whole: the sizes of its parts, and how many bytes were handed over."""

    sizes: tuple[int, ...]
    handed: int = 0


class ReceiveChannel:
    """The cursors of one channel, each the number of the next message that it may pass.

    ``received``, ``consumed``, ``decided`` (commit and rollback together) and ``resulted``
    (committed and uncommitted together). ``held``: what messages cost that are not consumed.
    ``partial``: what has come of the next message; it outlives a connection.
    """

    __slots__ = (
        "_costs",
        "_decisions",
        "_results",
        "_told_results",
        "close_came",
        "confirming",
        "consumed",
        "decided",
        "held",
        "identifier",
        "partial",
        "received",
        "resulted",
        "start",
        "state",
        "told_consumed",
        "told_received",
        "transactional",
        "undecided",
        "untold_bytes",
    )

    def __init__(self, identifier: int, *, transactional: bool, start: int = 0) -> None:
        self.identifier = identifier
        self.transactional = transactional
        self.state = ChannelState.OPEN
        self.received = self.consumed = self.decided = self.resulted = start
        self.start = start
        self.held = 0
        self.undecided = 0
        """Of those, what is neither committed nor rolled back; 0 on plain channels."""
        self.told_received = self.told_consumed = start
        """How far the sender was told on this connection."""
        self.untold_bytes = 0
        """Received bytes since it was told."""
        self.close_came = False
        """Whether the close came on this connection: else it comes again, and is answered then."""
        self.partial: PartialMessage | None = None
        self._costs: deque[int] = deque()
        """Of each message that is received and not consumed."""
        # Runs of decisions: the number behind each, and whether it is a commit. Results follow
        # for the commits, in order.
        self._decisions: deque[tuple[int, bool]] = deque() if transactional else _NEVER
        # Runs of results: the number of the last message of each, and whether it was committed.
        # They are kept until the sender is known to have read them.
        self._results: deque[tuple[int, bool]] = deque() if transactional else _NEVER
        self._told_results = 0  # of those, on this connection
        self.confirming = 0
        """Of the kept results so many were told before the ping that is under way."""

    def __repr__(self) -> str:
        return f"channel {self.identifier}"

    # What the peer does

    def change(self, given: ReceivingInput) -> bool:
        """Goes on by the table; False: the peer may not do that now."""
        after = RECEIVING.get((self.state, given))
        if after is None:
            return False
        self.state = after
        return True

    def take_message(self, cost: int) -> tuple[int, bool]:
        """A message is whole: its number, and whether it was rolled back before it came."""
        number = self.received
        self.received += 1
        self.untold_bytes += cost
        dropped = number < self.decided
        if dropped:
            cost = EMPTY_COST
        elif self.transactional:
            self.undecided += cost
        self._costs.append(cost)
        self.held += cost
        self.partial = None
        self._pass_dropped()
        return number, dropped

    def pass_message(self, size: int) -> None:
        """A message is whole, and consumed."""
        self.received += 1
        self.consumed = self.received
        self.untold_bytes += size
        self.partial = None

    def on_decision(self, sequence: int | None, *, commit: bool) -> tuple[int, int] | None:
        """A decision of the sender: the first and the last number; None: it was stale.

        A rollback may be about messages that have not come: their content is not needed, and the
        sender sends them again without (RL-R13).
        """
        if not self.transactional:
            raise SequenceError(f"{self!r} has no transactions, and the peer sends decisions")
        first = self.decided
        last = first if sequence is None else target_of(sequence, first)
        if last is None:
            return None
        if commit and last >= self.received:
            raise SequenceError(
                f"{self!r}: the peer commits message {last}, and {self.received} came (RL-R8)"
            )
        decisions = self._decisions
        if decisions and decisions[-1][1] == commit:
            decisions.pop()
        decisions.append((last + 1, commit))
        self.decided = last + 1
        for number in range(first, min(self.decided, self.received)):
            at = number - self.consumed
            cost = self._costs[at]
            self.undecided -= cost
            if not commit:
                # The sender counts no more for it, and so its window has room at once.
                self._costs[at] = EMPTY_COST
                self.held -= cost - EMPTY_COST
        self._pass_dropped()
        return first, last

    # What the application does

    def consume(self, end: int) -> None:
        """Everything before ``end`` is consumed."""
        while self.consumed < end:
            self.held -= self._costs.popleft()
            self.consumed += 1

    def add_result(self, last: int, *, committed: bool) -> list[int]:
        """The application has done with commits up to ``last``; returns the numbers.

        Empty: ``last`` is no message that was committed and has no result.
        """
        numbers = list(takewhile(lambda number: number <= last, self.uncompleted()))
        if not numbers or numbers[-1] != last:
            return []
        if (
            len(self._results) > self._told_results
            and self._results
            and self._results[-1][1] == committed
        ):
            self._results.pop()
        self._results.append((last, committed))
        self.resulted = last + 1
        while self._decisions and self._decisions[0][0] <= self.resulted:
            self._decisions.popleft()
        self.consume(last + 1)
        self._pass_dropped()
        return numbers

    def uncompleted(self) -> Iterator[int]:
        """The numbers that are committed and have no result."""
        begin = self.resulted
        for end, commit in self._decisions:
            if commit:
                yield from range(begin, end)
            begin = max(begin, end)

    @property
    def settled(self) -> bool:
        """Whether the application has finished all that came before a close (RL-R15)."""
        if self.transactional:
            return next(self.uncompleted(), None) is None
        return self.consumed == self.received

    # What the sender must learn

    def begin_connection(self) -> None:
        """Nothing was told on this connection."""
        self.close_came = False
        self.told_received = self.told_consumed = self.start
        self._told_results = self.confirming = 0
        self.untold_bytes = 0

    def untold_results(self) -> list[tuple[int, bool]]:
        """The last number of each run of results to tell, and whether it was committed."""
        told = list(self._results)[self._told_results :] if self.has_untold_results else []
        self._told_results = len(self._results)
        return told

    @property
    def has_untold_results(self) -> bool:
        """Whether ``untold_results`` has some."""
        return len(self._results) > self._told_results

    @property
    def kept_results(self) -> int:
        """Runs of results that the sender is not known to have read."""
        return len(self._results)

    def confirm_results(self) -> None:
        """The peer has answered a ping: it has read what was told before that."""
        for _ in range(self.confirming):
            self._results.popleft()
        self._told_results -= self.confirming
        self.confirming = 0

    # Within

    def _pass_dropped(self) -> None:
        """Messages that are rolled back need no room, once nothing before them waits."""
        waits = next(self.uncompleted(), self.decided)
        self.consume(min(self.received, waits))
