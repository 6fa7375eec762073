"""Room for the batches that a process's clients pull from the input of their calls.

A large batch counts in the process's sending account from its pull until its connection has queued
it; from then on the queue counts it. While the account is full, calls wait before they pull.
Nothing here knows event loops: callables wake a call that waits, and have its timer run.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from contextvars import ContextVar
from typing import Final, TypeAlias
from weakref import ref

from aqueduct._speedups.base.accounts import Account
from aqueduct.config import Timing
from aqueduct.escaping import logger_of

__all__ = ["LARGE", "PULLING", "UNKNOWN", "Later", "Pull", "Pulls", "Reader"]

log = logger_of(__name__)

LARGE: Final = 256 << 10
"""Bytes. A smaller batch is made without waiting for room: to wait would cost more than it takes.

It counts once it is queued. Before that a call has one of them where its connection has much to
send. All ``Calls.max_calls_process`` calls together have less than this times their number.
"""

UNKNOWN: Final = 8 << 20
"""Bytes that count for a batch if none was sent to its handler before; at most 1/8 of a budget."""

_HANDLERS: Final = 1024
"""Handlers of one client whose sizes are kept."""

Later: TypeAlias = Callable[[float, Callable[[], object]], object]
"""Has a callable called in so many seconds. It may be used in any thread."""

Reader: TypeAlias = "ref[asyncio.Task[object]] | int | None"
"""The task, or the ident of the thread, that reads the answers of a call."""


class Pull:
    """The large batches of one call, each from its pull until it is queued.

    The call asks before it pulls a batch. It goes on if this is True, or once ``wake`` was called.
    ``pulled`` says how large the batch is, and ``posted`` that it is queued; ``fed`` says both.
    After ``end`` nothing counts. Methods may be called in any thread.
    """

    __slots__ = (
        "_asked",
        "_charged",
        "_ended",
        "_known",
        "_later",
        "_made",
        "_name",
        "_period",
        "_pulls",
        "_queued",
        "_sizes",
        "_ticking",
        "_timing",
        "_wake",
        "budget",
        "granted",
        "handler",
        "reader",
        "size",
        "unwanted",
        "wanted",
    )

    def __init__(
        self,
        pulls: Pulls,
        sizes: dict[str, int],
        handler: str,
        *,
        peer: str,
        budget: int,
        timing: Timing,
        queued: Callable[[], int],
        wake: Callable[[], object],
        later: Later,
    ) -> None:
        """``sizes``: what a batch for each handler is expected to have, of one client.

        ``budget``: the process's, in bytes. ``queued``: bytes of the call that have not left.
        ``wake`` is called, in any thread, once the room that was asked for is granted.
        """
        self._pulls = pulls
        self._sizes = sizes
        self.handler = handler
        self._name = f"the call of handler {handler!r} at {peer}"
        self.budget = budget
        self._timing = timing
        self._period = min(timing.stall_deadline, timing.progress_deadline / 8)
        self._queued = queued
        self._wake = wake
        self._later = later
        self._known = handler in sizes
        self.size = sizes[handler] if self._known else min(UNKNOWN, budget >> 3)
        """Bytes that the next batch is expected to have; 0 if it is small."""
        self.granted = False
        """Whether the call may pull a batch, or is just pulling one."""
        self._charged = 0  # for the batch that is being pulled
        self._made = 0  # bytes of batches that are pulled and not queued yet
        self._asked = 0.0
        self._ticking = False
        self._ended = False
        self.wanted = False
        """Whether the application waits for an answer of this call."""
        self.unwanted = 0.0
        """Since when it does not, by ``time.monotonic``."""
        self.reader: Reader = None

    @property
    def waits(self) -> bool:
        """Whether room was asked for and is not there yet."""
        return self in self._pulls.waiting

    def ask(self) -> bool:
        """Whether the next batch may be pulled now; otherwise ``wake`` is called once it may."""
        if self.granted or self._ended:
            return True
        if self.waits:
            return False
        pulls = self._pulls
        with pulls.lock:
            self._give_way()
            self._asked = time.monotonic()
            first = not pulls.waiting
            pulls.waiting[self] = None
            if pulls.grant(self, first=first, now=self._asked):
                return True
            self._tick_later()
            return False

    def pulled(self, size: int) -> None:
        """The batch has ``size`` bytes: these count until they are ``posted``."""
        with self._pulls.lock:
            self._note(size)
            if not self._ended:
                self._made += size
                self._pulls.account.charge(size)
            self.withdraw()

    def fed(self, size: int) -> None:
        """The batch has ``size`` bytes, and is queued already."""
        if size != self.size:
            self._note(size)
        self.withdraw()

    def posted(self, size: int) -> None:
        """``size`` bytes that were pulled are queued now, and count in the connection's queue."""
        with self._pulls.lock:
            size = min(size, self._made)
            self._made -= size
            self._pulls.give_back(size)

    def withdraw(self) -> None:
        """The call does not pull a batch now."""
        with self._pulls.lock:
            self._pulls.waiting.pop(self, None)
            self.granted = False
            self._rest()

    def rest(self) -> None:
        """The pull goes on and counts no more: it waits for something else, or takes long."""
        with self._pulls.lock:
            self._rest()

    def want(self, reader: Reader) -> None:
        """The task or thread ``reader`` waits for an answer of this call."""
        with self._pulls.lock:
            self.wanted = True
            self.reader = reader
            if self.waits and self._pulls.grant(self, first=False, now=time.monotonic()):
                self._wake()

    def unwant(self) -> None:
        """No task waits for an answer of this call any more."""
        with self._pulls.lock:
            if not self.wanted:
                return
            self.wanted = False
            self.unwanted = time.monotonic()
            if self._pulls.place is self and self._pulls.waiting:
                self._later(0.0, self._pulls.notify)  # its reader may end at once

    def end(self) -> None:
        """The call has ended: it pulls no more batches."""
        with self._pulls.lock:
            if self._ended:
                return
            self.posted(self._made)
            self._ended = True
            self.withdraw()
            if self._pulls.place is self:
                self._pulls.place = None
            # An account or a context that still knows this one must not keep the call alive.
            self._wake, self._queued, self._later = _nothing, _zero, _never
            self._pulls.notify()

    # For Pulls

    @property
    def left(self) -> bool:
        """Whether all batches that were pulled have left the process."""
        return not self._charged and not self._made and not self._queued()

    def go(self, now: float) -> None:
        """The call goes on: from now on its next batch counts."""
        pulls = self._pulls
        del pulls.waiting[self]
        self.granted = True
        self._charged = self.size
        pulls.busy[self] = now
        pulls.account.charge(self.size)

    def wake(self) -> None:
        """Tells the call that it may go on."""
        self._wake()

    def takes_long(self, now: float) -> bool:
        """Whether the pull has taken so long that others do not wait for it any more."""
        return now - self._pulls.busy[self] >= self._timing.stall_deadline

    def keeps_place(self, asking: Pull, now: float) -> bool:
        """Whether ``asking`` has to wait until this call's batch, above the budget, has left.

        Its reader may be what keeps the batch from leaving, as it waits for ``asking`` instead.
        """
        if self is asking or self.left:
            return False
        if self.wanted:
            return True
        reader = self.reader
        if reader is None or reader == asking.reader or _is_done(reader):
            return False
        return now - self.unwanted < self._timing.stall_deadline

    # Within

    def _note(self, size: int) -> None:
        """The next batch is expected to be as large. That shrinks by half at most: sizes vary."""
        expected = max(size, self.size >> 1) if self._known else size
        self._known = True
        self.size = expected if expected >= LARGE else 0
        if len(self._sizes) >= _HANDLERS and self.handler not in self._sizes:
            self._sizes.clear()
        self._sizes[self.handler] = self.size

    def _rest(self) -> None:
        self._pulls.busy.pop(self, None)
        charged, self._charged = self._charged, 0
        self._pulls.give_back(charged)

    def _give_way(self) -> None:
        """If this call is asked for its answers by another one's pull, that pull is idle."""
        outer = PULLING.get()
        if outer is not None and outer is not self:
            outer.rest()

    def _tick_later(self) -> None:
        if not self._ticking:
            self._ticking = True
            self._later(self._period, self._tick)

    def _tick(self) -> None:
        """Sees now and then whether the call may go on, which nobody tells if nothing moves."""
        pulls, now = self._pulls, time.monotonic()
        with pulls.lock:
            self._ticking = False
            pulls.expire(now)
            if not self.waits:
                return
            limit = self._timing.progress_deadline / 2
            if not self.wanted or pulls.still(now, self._asked, self._period) < limit:
                self._tick_later()
                return
            pulls.insisted = now
            self.go(now)
            self._wake()
        log.warning(
            "%s: the input waited, and nothing left this process for %g s; the call goes on above "
            "the process's budget of %d bytes (Flow.process_send_budget)",
            self._name,
            limit,
            self.budget,
        )


PULLING: ContextVar[Pull | None] = ContextVar("aqueduct_pulling", default=None)
"""In the code of an application from which a batch is pulled: of which call."""


class Pulls:
    """Decides which calls of the process's clients may pull a large batch.

    A batch that fits the budget may be pulled, in the order of asking. One call at a time may
    exceed the budget: its application waits for an answer and all of its batches have left. It has
    the ``place`` until its batch has left, too. If its reader turns to another call, that one may
    go on instead: so a thread that merges many calls always gets the answer that it waits for.

    - ``waiting``: calls that wait for room, in the order of asking.
    - ``busy``: calls that pull a batch just now, and since when.
    - ``place``: the call that exceeds the budget, or None.
    - ``insisted``: when a call last went on although nothing moved.
    """

    def __init__(self, account: Account, lock: threading.RLock) -> None:
        """``account`` is notified, and counts what is ``returned``; ``lock`` is its lock."""
        self.account = account
        self.lock = lock
        self.waiting: dict[Pull, None] = account.pulling
        self.busy: dict[Pull, float] = {}
        self.place: Pull | None = None
        self.insisted = 0.0
        self._given_back = self._returned = self._used = 0  # bytes
        self._moved = 0.0

    def notify(self) -> None:
        """There may be room for those who wait."""
        with self.lock:
            now, first = time.monotonic(), True
            for pull in tuple(self.waiting):
                if pull not in self.waiting:
                    continue
                if self.grant(pull, first=first, now=now):
                    pull.wake()
                elif self.place is not None and self.place.wanted and not self.place.left:
                    return  # no call may exceed the budget
                else:
                    first = False  # later ones do not pass, or a large one might wait for ever

    def grant(self, pull: Pull, *, first: bool, now: float) -> bool:
        """Lets a call that waits go on, if it may. ``first``: nobody has asked before it."""
        used = self.account.used
        if not first or (used and used + pull.size > pull.budget):
            if not pull.wanted or not pull.left:
                return False
            if self.place is not None and self.place.keeps_place(pull, now):
                return False
            self.place = pull
        pull.go(now)
        return True

    def give_back(self, size: int) -> None:
        """``size`` bytes do not count here any more. They may count in a queue now."""
        if size:
            self._given_back += size
            self.account.charge(-size)  # it notifies

    def expire(self, now: float) -> None:
        """Pulls that take long count no more. Those who wait go on if there is room now."""
        for pull in tuple(self.busy):
            if not pull.takes_long(now):
                break
            pull.rest()
        self.notify()

    def still(self, now: float, since: float, period: float) -> float:
        """Seconds for which nothing has left the process, as far as the caller has waited.

        ``since``: when it began to wait. It is called every ``period`` seconds. After a call went
        on this way, the next one has to wait for ``period``.
        """
        used, returned = self.account.used, self.account.returned - self._given_back
        if returned != self._returned or used <= self._used - LARGE:
            self._moved = now
        self._returned, self._used = returned, used
        if now - self.insisted < period:
            return 0.0
        return now - max(since, self._moved)


def _is_done(reader: Reader) -> bool:
    """Whether a reader is a task that has ended."""
    if isinstance(reader, int) or reader is None:
        return False
    task = reader()
    return task is None or task.done()


def _nothing() -> None:
    pass


def _zero() -> int:
    return 0


def _never(seconds: float, callback: Callable[[], object]) -> None:
    pass
