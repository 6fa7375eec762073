"""Bytes of messages that this process holds: one account for receiving, one for sending.

All connections of the process count in both. Above a budget one batch goes on at a time: the one
that has waited longest. The connections choose it for receiving, and ``SendingAccount`` for
sending. Nothing here knows event loops. A callable tells a waiting call of its room, in any thread.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from functools import partial
from typing import Protocol
from weakref import WeakSet

from aqueduct._speedups.base.accounts import Account
from aqueduct._speedups.channels.receiver import MemoryLease, ReceiveBudget
from aqueduct.endpoint.pulling import LARGE, Pulls

__all__ = [
    "LARGE",
    "ProcessAccounts",
    "ReceivingAccount",
    "Reservation",
    "SendLedger",
    "SendingAccount",
    "process",
]


class SendLedger(Protocol):
    """What waits to leave on one connection."""

    @property
    def queued(self) -> int:
        """Its bytes."""

    @property
    def process_budget(self) -> int:
        """What all connections of the process may have."""


class Reservation:
    """Room for the next answer of one call: ``size`` bytes, which is an estimate.

    The call asks for room, and waits until it is ``granted``. ``made`` and ``posted`` use it up;
    ``release`` gives it back; after ``end`` nothing counts. Methods may be called in any thread.
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
        "ready",
        "size",
        "wake",
    )

    def __init__(
        self,
        account: SendingAccount,
        ledger: SendLedger,
        queued: Callable[[], int],
        wake: Callable[[], object],
        ready: Callable[[], bool],
    ) -> None:
        self._account = account
        self._ledger = ledger
        self._queued = queued
        self._made = 0  # bytes of answers
        self._posted = 0  # those of them that are queued
        self._again = False
        self._ended = False
        self.wake = wake
        """Called, in any thread, once the room that was asked for is granted."""
        self.ready = ready
        """Whether the handler can go on once it has room: what it answers is here."""
        self.size = 0
        self.granted = False

    @property
    def waits(self) -> bool:
        """Whether room was asked for and is not there yet."""
        return self in self._account.waiting

    def ask(self, size: int, *, again: bool = False) -> bool:
        """Whether about ``size`` bytes may be made now; otherwise ``wake`` is called once they may.

        Room that was granted before, and not used, returns. ``again``: the call has answered
        before, so it may be at its end, which it only learns by going on.
        """
        with self._account._lock:
            self._again = again
            return self._ended or self._account._ask(self, size)

    def retry(self) -> None:
        """The call may be ``ready`` now."""
        if self.waits:
            self._account.notify()

    def made(self, size: int) -> None:
        """The answer has ``size`` bytes: these count until they are ``posted``."""
        with self._account._lock:
            if not self._ended:  # a handler may go on after its call has ended
                self._made += size
                self._account.charge(size)
                self.release()

    def posted(self, size: int) -> None:
        """``size`` bytes that were made are queued now, and count in the connection's queue."""
        with self._account._lock:
            if not self._ended:
                self._posted += size
                self._account.charge(-size)

    def release(self) -> None:
        """The room is given back: the answer will not be made, or counts already."""
        self._account._release(self)

    def end(self) -> None:
        """The call has ended: what it makes or posts from now on does not count."""
        with self._account._lock:
            self.posted(self._made - self._posted)
            self._ended = True
            self._account._end(self)

    @property
    def _left(self) -> bool:
        """Whether all answers that were made have left the process."""
        if self.granted or self._made != self._posted:
            return False
        return self._queued() == 0


class SendingAccount(Account):
    """Bytes that all connections have queued, and room for answers that are about to be made.

    ``waiting``: Reservations that wait, in the order of asking. A large answer is made if it fits
    the process's budget. One answer may exceed it: its Reservation has the ``place`` until that
    answer has left. A call that is not ``ready`` does not get the place, and stops no others: its
    client may send nothing before they have answered. A full queue of the connection does not delay
    a call that has nothing queued: the reader may read nothing else before. A call whose answers
    have all left may be at its end, and its reader may wait for that end. So one such call goes on
    at a time, too (``_last``).

    ``pulls`` decides the same for what clients pull from the input of their calls.
    """

    def __init__(self) -> None:
        self._last: Reservation | None = None
        self._lock = threading.RLock()  # handlers ask in threads of their own
        self.pulls = Pulls(self, self._lock)

    def reservation(
        self,
        ledger: SendLedger,
        queued: Callable[[], int],
        wake: Callable[[], object],
        ready: Callable[[], bool] = lambda: True,
    ) -> Reservation:
        """For one call. ``ledger``: its connection's queue; ``queued``: bytes of the call there."""
        return Reservation(self, ledger, queued, wake, ready)

    def keep(self, size: int) -> None:
        """A program keeps ``size`` bytes more of batches that were sent; below zero, less."""
        with self._lock:
            self.charge(size)

    def notify(self) -> None:
        """Grants room to those who wait, in the order of asking, as far as there is some."""
        with self._lock:
            full = False
            for waiting in tuple(self.waiting):
                if waiting not in self.waiting:
                    continue
                if self._grant(waiting, only_last=full):
                    waiting.wake()
                else:  # later ones do not pass, or a large one might wait for ever
                    full = full or waiting.ready()
            if self.pulling:
                self.pulls.notify()

    # Within

    def _ask(self, asking: Reservation, size: int) -> bool:
        with self._lock:
            self._release(asking)
            if size < LARGE:
                return True
            asking.size = size
            full = any(waiting.ready() for waiting in self.waiting)
            self.waiting[asking] = None
            return self._grant(asking, only_last=full)

    def _release(self, asked: Reservation) -> None:
        with self._lock:
            self.waiting.pop(asked, None)
            if asked.granted:
                asked.granted = False
                self.charge(-asked.size)

    def _end(self, asked: Reservation) -> None:
        with self._lock:
            self._release(asked)
            if asked._left:  # otherwise the place is free once all has left
                if self.place is asked:
                    self.place = None
                if self._last is asked:
                    self._last = None
            if self.waiting or self.pulling:
                self.notify()

    def _grant(self, asking: Reservation, *, only_last: bool) -> bool:
        if only_last or self._is_above(asking):
            if not asking.ready():
                return False
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
        """Whether the answer exceeds the process's budget.

        While other connections wait, one connection has half of that budget.
        """
        ledger, size = asking._ledger, asking.size
        if self.used + size > ledger.process_budget:
            return True
        others = any(waiting._ledger is not ledger for waiting in self.waiting)
        return others and ledger.queued + size > ledger.process_budget >> 1


def _is_free(place: Reservation | None, asking: Reservation) -> bool:
    return place is None or place is asking or place._left


class ReceivingAccount(Account):
    """Bytes that all connections have received, and whose batches are still in use."""

    def __init__(self) -> None:
        self.members: WeakSet[ReceiveBudget] = WeakSet()
        """The budgets of all connections that are open."""
        self._lock = threading.RLock()  # their loops are in threads of their own

    def join(self, member: ReceiveBudget) -> None:
        """A connection begins to count here."""
        with self._lock:
            self.members.add(member)

    def ask(
        self, lease: MemoryLease, size: int, reader: object, wake: Callable[[], object]
    ) -> bool:
        """Whether a compressed batch may be unpacked now; else ``wake`` is called once it may.

        ``size``: the bytes that it takes beside its payload, charged by then to ``lease``, that of
        the payload. ``reader``: the thread or task that it is for. ``wake`` may be called in any
        thread.
        """
        take = partial(lease.unpack, size, reader)
        with self._lock:
            # Before it asks: a thread that gives bytes back in between must find it here.
            self.pulling[lease] = take, wake
            if not take():
                return False
            self.pulling.pop(lease, None)
            return True

    def insist(self, lease: MemoryLease) -> None:
        """A batch that asked waits no more: it is charged although there is no room."""
        with self._lock:
            take, _ = self.pulling.pop(lease, (None, None))
            if take is not None:
                take(insist=True)

    def notify(self) -> None:
        """There may be room: connections look by themselves, compressed batches get theirs."""
        super().notify()
        with self._lock:
            for lease, (take, wake) in tuple(self.pulling.items()):
                if lease in self.pulling and take() and self.pulling.pop(lease, None):
                    wake()

    def press(self) -> None:
        """A connection begins to wait: all others look for a batch that comes too slowly."""
        with self._lock:
            members = tuple(self.members)
        for member in members:
            wake = member.wake  # its loop may take it away meanwhile
            if wake is not None:
                wake()


class ProcessAccounts:
    """The accounts of this process, and the number of its ``connections``."""

    __slots__ = ("_lock", "connections", "receiving", "sending")

    def __init__(self) -> None:
        self.receiving = ReceivingAccount()
        self.sending = SendingAccount()
        self.connections = 0
        self._lock = threading.RLock()  # loops are in threads of their own

    def opened(self) -> None:
        """One connection more is open."""
        with self._lock:
            self.connections += 1

    def closed(self) -> None:
        """One connection that was ``opened`` is open no more."""
        with self._lock:
            self.connections -= 1


_process = ProcessAccounts()


def process() -> ProcessAccounts:
    """What all connections of this process have in common."""
    return _process


def _renew() -> None:
    """In a forked child: the connections of its parent do not count."""
    global _process
    _process = ProcessAccounts()


os.register_at_fork(after_in_child=_renew)
