"""What this process holds of messages, in bytes: one account for what comes, one for what goes.

Every connection counts there. Above a budget one batch goes on at a time, the oldest of those that
wait; for what comes the connections decide which that is, for what goes ``Sending`` does. Nothing
here knows of event loops: who waits is told by a callable, in any thread.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Final
from weakref import WeakSet

from aqueduct._speedups.accounts import Account
from aqueduct._speedups.inbox import Budget
from aqueduct._speedups.posting import Ledger

__all__ = ["FROM", "Process", "Receiving", "Reservation", "Sending", "process"]

FROM: Final = 256 << 10
"""Smaller answers are not waited for before they are made, as waiting would cost more than they do.

They count once they are queued. Before that a call has one of them where its connection has much
to send: all ``Calls.max_calls_process`` together have less than this times their number.
"""


class Reservation:
    """Room for what one call makes next: of ``size`` bytes, as far as one can know before.

    It is asked for, then ``granted`` or waited for, and used up by ``made`` and ``posted``, or
    given back by ``release``. ``end`` is its own end. One thread makes; one queues what was made.
    """

    __slots__ = (
        "_account",
        "_again",
        "_ended",
        "_ledger",
        "_made",
        "_posted",
        "_queued",
        "granted",
        "size",
        "wake",
    )

    def __init__(
        self,
        account: Sending,
        ledger: Ledger,
        queued: Callable[[], int],
        wake: Callable[[], None],
    ) -> None:
        self._account = account
        self._ledger = ledger
        self._queued = queued
        self._made = 0  # bytes, counted by who makes
        self._posted = 0  # and by who queues them
        self._again = False
        self._ended = False
        self.wake = wake
        """Called, in any thread, once the room that was asked for is granted."""
        self.size = 0
        self.granted = False

    @property
    def waits(self) -> bool:
        """Whether room was asked for and is not there yet."""
        return self in self._account.waiting

    def ask(self, size: int, *, again: bool = False) -> bool:
        """Whether about ``size`` bytes may be made now; otherwise ``wake`` is called once they may.

        What was granted before, and not made, returns. ``again``: something was made before, so
        there may be nothing more: who asks finds out by going on.
        """
        self._again = again
        return self._ended or self._account._ask(self, size)

    def made(self, size: int) -> None:
        """What the room was for has ``size`` bytes: these count until they are ``posted``."""
        if not self._ended:  # or a handler makes it that was left alone
            self._made += size
            self._account.charge(size)
            self.release()

    def posted(self, size: int) -> None:
        """So many bytes of what was made are queued, and count there."""
        if not self._ended:
            self._posted += size
            self._account.charge(-size)

    def release(self) -> None:
        """What the room was for will not be made, or counts already."""
        self._account._release(self)

    def end(self) -> None:
        """Nothing more is made, nor posted, that counts."""
        self.posted(self._made - self._posted)
        self._ended = True
        self._account._end(self)

    @property
    def _left(self) -> bool:
        """Whether all that was made has left."""
        if self.granted or self._made != self._posted:
            return False
        return self._queued() == 0


class Sending(Account):
    """Bytes that all connections have queued, and room for what is about to be made.

    ``waiting``: Reservations that wait, in order. A large answer is made only if it fits the
    process's budget, or if it is alone above that: then its Reservation has the ``place`` until it
    has left. A connection's own mark makes no call wait that has nothing queued: its reader may
    read nothing else before. A call whose answers have all left may be at its end, which its
    reader may wait for: one of those goes on at a time, too (``_last``).
    """

    def __init__(self) -> None:
        self._last: Reservation | None = None
        self._lock = threading.RLock()  # handlers ask in threads of their own

    def reservation(
        self, ledger: Ledger, queued: Callable[[], int], wake: Callable[[], None]
    ) -> Reservation:
        """For one call of the connection that has ``ledger``; ``queued``: its bytes there."""
        return Reservation(self, ledger, queued, wake)

    def notify(self) -> None:
        """Grants what there is room for, in the order of asking."""
        with self._lock:
            full = False
            for waiting in tuple(self.waiting):
                if waiting not in self.waiting:
                    continue
                if self._grant(waiting, only_last=full):
                    waiting.wake()
                else:
                    full = True  # what is behind is not to pass by, or large ones would wait long

    # Within

    def _ask(self, asking: Reservation, size: int) -> bool:
        with self._lock:
            self._release(asking)
            if size < FROM:
                return True
            asking.size = size
            self.waiting[asking] = None
            return self._grant(asking, only_last=len(self.waiting) > 1)

    def _release(self, asked: Reservation) -> None:
        with self._lock:
            self.waiting.pop(asked, None)
            if asked.granted:
                asked.granted = False
                self.charge(-asked.size)

    def _end(self, asked: Reservation) -> None:
        with self._lock:
            self._release(asked)
            if asked._left:  # else others wait for that
                if self.place is asked:
                    self.place = None
                if self._last is asked:
                    self._last = None
            if self.waiting:
                self.notify()

    def _grant(self, asking: Reservation, *, only_last: bool) -> bool:
        if only_last or self._is_above(asking):
            if not only_last and _is_free(self.place, asking):
                self.place = asking
            elif asking._again and asking._left and _is_free(self._last, asking):
                self._last = asking
            else:
                return False
        asking.granted = True
        del self.waiting[asking]
        self.charge(asking.size)
        return True

    def _is_above(self, asking: Reservation) -> bool:
        """Whether it would exceed the process's budget, or half of that while others wait."""
        ledger, size = asking._ledger, asking.size
        if self.used + size > ledger.process_budget:
            return True
        others = any(waiting._ledger is not ledger for waiting in self.waiting)
        return others and ledger.queued + size > ledger.process_budget >> 1


def _is_free(place: Reservation | None, asking: Reservation) -> bool:
    return place is None or place is asking or place._left


class Receiving(Account):
    """Bytes that all connections have received and not given back."""

    def __init__(self) -> None:
        self.members: WeakSet[Budget] = WeakSet()
        """The budgets of all connections that are open."""
        self._lock = threading.Lock()  # their loops are in threads of their own

    def join(self, member: Budget) -> None:
        """A connection begins to count here."""
        with self._lock:
            self.members.add(member)

    def press(self) -> None:
        """Somebody begins to wait: all connections look whether something comes too slowly."""
        with self._lock:
            members = tuple(self.members)
        for member in members:
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
