"""What this process holds of messages, in bytes: one account for what comes, one for what goes.

Every connection counts there. Above a budget one batch goes on at a time, the oldest of those that
wait; for what comes the connections decide which that is, for what goes ``Sending`` does. Nothing
here knows of event loops: who waits is told by a callable, in any thread.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Final
from weakref import WeakSet

from aqueduct._speedups.accounts import Account
from aqueduct._speedups.inbox import Budget
from aqueduct._speedups.posting import Ledger, Posting

__all__ = ["Process", "Receiving", "Reservation", "Sending", "process"]

FROM: Final = 256 << 10
"""Smaller answers and batches are not waited for before they are made."""


class Reservation:
    """Room for one answer, or batch, before it is made: of ``size`` bytes, as far as one can know.

    Granted, or waiting for ``wake``. It is given back by ``release``.
    """

    __slots__ = ("__weakref__", "_account", "_ledger", "_row", "granted", "size", "wake")

    def __init__(
        self, account: Sending, ledger: Ledger, row: Posting | None, wake: Callable[[], None]
    ) -> None:
        self._account = account
        self._ledger = ledger
        self._row = row
        self.wake = wake
        """Called in any thread once the room is granted."""
        self.size = 0
        self.granted = False

    def ask(self, size: int) -> bool:
        """Whether the next one, of about ``size`` bytes, may be made now; else ``wake`` is called.

        What was granted before returns.
        """
        return self._account._ask(self, size)

    def release(self) -> None:
        """It was made, and is counted where it is queued; or it will not be made."""
        self._account._release(self)

    def end(self) -> None:
        """Nothing more is made by who asked."""
        self._account._end(self)

    @property
    def _left(self) -> bool:
        """Whether what was made in the place above the budget has left."""
        return not self.granted and (self._row is None or self._row.queued == 0)


class Sending(Account):
    """Bytes that all connections have queued, and room for what is about to be made.

    ``waiting``: Reservations that wait, in order. A large answer is made only if it fits the
    process's budget and the connection's high-water mark, or if it is alone above them: then its
    Reservation has the ``place``, here or of the connection's Ledger, until it has left.
    """

    def reservation(
        self, ledger: Ledger, row: Posting | None, wake: Callable[[], None]
    ) -> Reservation:
        """For one call: what it makes leaves by ``row``, of the connection that has ``ledger``."""
        return Reservation(self, ledger, row, wake)

    def notify(self) -> None:
        """Grants what there is room for, in the order of asking."""
        passed: set[Ledger] = set()
        for waiting in tuple(self.waiting):
            if waiting._ledger in passed:
                continue
            if not self._fits_process(waiting):
                return  # or large ones would wait for ever
            if self._grant(waiting):
                self.waiting.pop(waiting, None)
                waiting.wake()
            else:
                passed.add(waiting._ledger)

    # Within

    def _ask(self, asking: Reservation, size: int) -> bool:
        self._release(asking)
        if size < FROM:
            return True
        asking.size = size
        if not self.waiting and self._grant(asking):
            return True
        self.waiting[asking] = None
        self.notify()
        return bool(asking.granted)

    def _release(self, asked: Reservation) -> None:
        self.waiting.pop(asked, None)
        if asked.granted:
            asked.granted = False
            self.charge(-asked.size)

    def _end(self, asked: Reservation) -> None:
        self._release(asked)
        asked._row = None
        if self.place is asked:
            self.place = None
        if asked._ledger.place is asked:
            asked._ledger.place = None
        if self.waiting:
            self.notify()

    def _fits_process(self, asking: Reservation) -> bool:
        budget = asking._ledger.process_budget
        if self.used + asking.size <= budget:
            return True
        return self._is_free(self.place) or self.place is asking

    def _grant(self, asking: Reservation) -> bool:
        ledger, size = asking._ledger, asking.size
        above = self.used + size > ledger.process_budget
        others = any(waiting._ledger is not ledger for waiting in self.waiting)
        if others and not above and ledger.queued + size > ledger.process_budget >> 1:
            above = True  # it would hold more than half of what all have
        if above and not (self._is_free(self.place) or self.place is asking):
            return False
        here = ledger.queued + size > ledger.mark
        if here and not (self._is_free(ledger.place) or ledger.place is asking):
            return False
        if above:
            self.place = asking
        if here:
            ledger.place = asking
        asking.granted = True
        self.charge(size)
        return True

    def _is_free(self, place: Reservation | None) -> bool:
        return place is None or place._left


class Receiving(Account):
    """Bytes that all connections have received and not given back."""

    def __init__(self) -> None:
        self.members: WeakSet[Budget] = WeakSet()
        """The budgets of all connections that are open."""

    def join(self, member: Budget) -> None:
        """A connection begins to count here."""
        self.members.add(member)

    def press(self) -> None:
        """Somebody begins to wait: all connections look whether something comes too slowly."""
        for member in tuple(self.members):
            if member.wake is not None:
                member.wake()


class Process:
    """The accounts of this process, and the number of its ``connections``."""

    __slots__ = ("connections", "receiving", "sending")

    def __init__(self) -> None:
        self.receiving = Receiving()
        self.sending = Sending()
        self.connections = 0


_process = Process()


def process() -> Process:
    """What all connections of this process have in common."""
    return _process


def _renew() -> None:
    """In the child of a fork: the connections of its parent are none of its own."""
    global _process
    _process = Process()


os.register_at_fork(after_in_child=_renew)
