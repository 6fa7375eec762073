"""What a service remembers of the attempts at writing into one of its sinks.

All of it is of this process alone and may be lost: a write is committed by the receipts that come
with the commit. What is remembered serves to throw away what nobody will commit.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from aqueduct.errors import BadCall, Busy, Refused
from aqueduct.rpc.sink_commit import Attempt, PreparedAttempt, WriteKey, number_of

__all__ = ["Attempts", "KeyedLock", "Known"]

_COMMITTED: Final = "its write is committed without it"
_ENDED_LIMIT: Final = 4096
"""Executions that are known to be over; a late attempt of an older one waits for its time to live.
"""
_CLAIMS_LIMIT: Final = 4096
"""Keys of writers whose last claim is known; of an older one the first commit counts."""


@dataclass(slots=True, eq=False)
class Known:
    """One attempt. ``open`` until it is prepared."""

    attempt: Attempt
    open: bool = True
    receipt: Any = None
    over: str = ""
    """Why it shall write no more; "" while it may."""

    def check(self) -> None:
        """Raises Refused once its write was aborted."""
        if self.over:
            raise Refused(f"{self.attempt} writes no more: {self.over}")


@dataclass(slots=True, eq=False)
class _KnownWrite:
    write_key: WriteKey
    heard: float
    """When anything was heard of it last (monotonic)."""
    attempts: dict[str, Known] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _LastClaim:
    number: int
    """Of the first commit that it is for."""
    execution: str
    why: str
    """What others are told."""


class Attempts:
    """The attempts at one sink that are open, or prepared and not settled. Thread-safe."""

    def __init__(self, sink: str, limit: int) -> None:
        self._sink = sink
        self.limit = limit
        self._writes: dict[str, _KnownWrite] = {}
        self._count = 0
        self._ended: OrderedDict[tuple[str, str], str] = OrderedDict()
        self._claims: OrderedDict[str, _LastClaim] = OrderedDict()
        self._lock = threading.Lock()

    def begin(self, attempt: Attempt) -> Known:
        """A new attempt is open.

        Raises Busy above the limit, BadCall for one that is known, and Refused for one whose
        execution is over: Spark may start a task while it gives up the others of its job, and
        another writer may have claimed the key.
        """
        with self._lock:
            why = self._ended.get((attempt.write_key.key, attempt.execution))
            why = why or self._lost(attempt.write_key, attempt.execution)
            if why:
                raise Refused(f"{attempt} comes too late: {why}")
            if self._count >= self.limit:
                raise Busy(
                    f"the sink {self._sink!r} has {self._count} attempts that are open, or "
                    "prepared and not committed, which is the limit (Sinks.attempts)"
                )
            known = Known(attempt)
            if not self._add(known, 0.0):
                raise BadCall(f"{attempt} writes into the sink {self._sink!r} already, or did")
            return known

    def recall(self, prepared: PreparedAttempt, seconds: float) -> None:
        """An attempt that a former process left behind, ``seconds`` ago."""
        known = Known(prepared.attempt, open=False, receipt=prepared.receipt)
        with self._lock:
            self._add(known, seconds)

    def prepared(self, known: Known, receipt: Any) -> None:
        """It has its receipt."""
        with self._lock:
            known.open, known.receipt = False, receipt
            self._hear(known.attempt.write_key)

    def forget(self, known: Known) -> None:
        """It was aborted."""
        with self._lock:
            self._remove(known)

    def committed(
        self, write_key: WriteKey, prepared: Sequence[PreparedAttempt]
    ) -> list[PreparedAttempt]:
        """The write is committed with these; gives its others that are prepared, and forgets them.

        What is open in the same execution has lost, and is told. Other executions may write on:
        their commit will have nothing to do.
        """
        ids = {each.attempt.id for each in prepared}
        executions = {each.attempt.execution for each in prepared}
        others = []
        with self._lock:
            for known in self._of(write_key):
                if known.open:
                    if known.attempt.execution in executions:
                        known.over = _COMMITTED
                    continue
                self._remove(known)
                if known.attempt.id not in ids:
                    others.append(PreparedAttempt(known.attempt, known.receipt))
            for execution in executions:
                self._end(write_key, execution, _COMMITTED)
        return others

    def aborted(
        self, write_key: WriteKey, execution: str | None, why: str
    ) -> list[PreparedAttempt]:
        """The write, or an execution of it, is aborted: gives the prepared ones, and forgets them.

        Those that are open are told.
        """
        ended = []
        with self._lock:
            for known in self._of(write_key):
                if execution not in (None, known.attempt.execution):
                    continue
                if known.open:
                    known.over = why
                else:
                    self._remove(known)
                    ended.append(PreparedAttempt(known.attempt, known.receipt))
            if execution is not None:
                self._end(write_key, execution, why)
        return ended

    def claimed(self, write_key: WriteKey, execution: str, why: str) -> list[PreparedAttempt]:
        """Only ``execution`` goes on with the write: gives what others prepared, and forgets it.

        What others have open is told, and later attempts of theirs are refused, at this commit of
        the writer's key and at those after it.
        """
        others = []
        numbered = number_of(write_key)
        with self._lock:
            if numbered is not None:
                key, number = numbered
                self._claims[key] = _LastClaim(number, execution, why)
                self._claims.move_to_end(key)
                if len(self._claims) > _CLAIMS_LIMIT:
                    self._claims.popitem(last=False)
            for known in self._of(write_key):
                if known.attempt.execution == execution:
                    continue
                if known.open:
                    known.over = why
                else:
                    self._remove(known)
                    others.append(PreparedAttempt(known.attempt, known.receipt))
                self._end(write_key, known.attempt.execution, why)
        return others

    def lost(self, write_key: WriteKey, execution: str) -> str:
        """Why this execution may not commit the write; "" while it may."""
        with self._lock:
            return self._lost(write_key, execution)

    def expired(self, seconds: float) -> list[WriteKey]:
        """The writes of which nothing was heard for so long, and that have no attempt open."""
        now = time.monotonic()
        with self._lock:
            return [
                entry.write_key
                for entry in self._writes.values()
                if now - entry.heard >= seconds
                and not any(known.open for known in entry.attempts.values())
            ]

    def counts(self) -> tuple[int, int]:
        """How many are open, and prepared."""
        with self._lock:
            known = [each for entry in self._writes.values() for each in entry.attempts.values()]
        opened = sum(each.open for each in known)
        return opened, len(known) - opened

    # Under the lock

    def _of(self, write_key: WriteKey) -> list[Known]:
        entry = self._writes.get(write_key.key)
        return [] if entry is None else list(entry.attempts.values())

    def _lost(self, write_key: WriteKey, execution: str) -> str:
        numbered = number_of(write_key)
        if numbered is None:
            return ""
        last = self._claims.get(numbered[0])
        if last is None or last.execution == execution or numbered[1] < last.number:
            return ""
        return last.why

    def _add(self, known: Known, seconds: float) -> bool:
        write_key, heard = known.attempt.write_key, time.monotonic() - seconds
        entry = self._writes.setdefault(write_key.key, _KnownWrite(write_key, heard))
        entry.heard = max(entry.heard, heard)
        if known.attempt.id in entry.attempts:
            return False
        entry.attempts[known.attempt.id] = known
        self._count += 1
        return True

    def _remove(self, known: Known) -> None:
        entry = self._writes.get(known.attempt.write_key.key)
        if entry is None or entry.attempts.get(known.attempt.id) is not known:
            return
        del entry.attempts[known.attempt.id]
        self._count -= 1
        if not entry.attempts:
            del self._writes[known.attempt.write_key.key]
        else:
            self._hear(known.attempt.write_key)

    def _end(self, write_key: WriteKey, execution: str, why: str) -> None:
        if execution:  # else executions cannot be told apart
            self._ended[write_key.key, execution] = why
            while len(self._ended) > _ENDED_LIMIT:
                self._ended.popitem(last=False)

    def _hear(self, write_key: WriteKey) -> None:
        entry = self._writes.get(write_key.key)
        if entry is not None:
            entry.heard = time.monotonic()


class KeyedLock:
    """One at a time for each key, in the order of asking; over threads and their event loops."""

    def __init__(self) -> None:
        self._waiting: dict[str, deque[Future[None]]] = {}
        self._lock = threading.Lock()

    @asynccontextmanager
    async def turn(self, key: str) -> AsyncIterator[None]:
        """Waits for the turn, and has it for as long as the block runs."""
        turn: Future[None] = Future()
        with self._lock:
            queue = self._waiting.setdefault(key, deque())
            queue.append(turn)
            if queue[0] is turn:
                turn.set_result(None)
        try:
            await asyncio.wrap_future(turn)
            yield
        finally:
            with self._lock:
                first = queue[0] is turn
                queue.remove(turn)
                if not queue:
                    del self._waiting[key]
                elif first:
                    _give(queue)


def _give(queue: deque[Future[None]]) -> None:
    """Whoever is first has the turn; one that was cancelled meanwhile leaves by itself."""
    if queue[0].set_running_or_notify_cancel():
        queue[0].set_result(None)
