"""The task that drives one piece of work over several calls, on the event loop of its client."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty
from typing import Any, Final

import pyarrow as pa

from aqueduct.arrow.sizes import batch_bytes
from aqueduct.client.balanced_spec import BalancedSpec, BatchAnswer
from aqueduct.client.balancer import Balancer, NextStep
from aqueduct.client.endpoint_set import EndpointSet
from aqueduct.client.opening_call import OpeningCall
from aqueduct.errors import ConnectionLost
from aqueduct.rpc.deadline import Wakeup
from aqueduct.rpc.tracing import CallObservation

__all__ = ["LoopBalancer", "LoopNews", "PreparedWork"]

_AHEAD: Final = 16
_AHEAD_BYTES: Final = 8 << 20
"""Answers that wait for their reader, and bytes of them; one may always."""
_SPINS: Final = 32


class LoopNews:
    """What calls and connections have for the task, each with its tag. For one event loop."""

    def __init__(self) -> None:
        self._found: deque[tuple[Any, Any]] = deque()
        self._wakeup = Wakeup()

    def put(self, found: tuple[Any, Any]) -> None:
        """Adds a pair of a tag and what is new of it."""
        self._found.append(found)
        self._wakeup.set()

    def get_nowait(self) -> tuple[Any, Any]:
        """The oldest pair. Raises queue.Empty."""
        if not self._found:
            raise Empty
        return self._found.popleft()

    async def get(self, seconds: float) -> tuple[Any, Any] | None:
        """The oldest pair, waited for; None after so many seconds without one."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not self._found:
                    await self._wakeup.wait()
        return self._found.popleft() if self._found else None


@dataclass(frozen=True, slots=True)
class PreparedWork:
    """One piece of work whose input is open."""

    spec: BalancedSpec
    """What the calls are asked for."""
    make: Callable[[LoopNews, float], Balancer]
    """The Balancer, given its queue and since when its deadline runs, once the addresses are
    known."""
    batches: Any
    """The input, an iterable or an async one."""
    read: Callable[[Any], pa.RecordBatch] | None = None
    """Makes a batch of each thing in the input; None: the work has no input."""
    seen: CallObservation | None = None
    """The observer of its end."""


class LoopBalancer:
    """One piece of work in a task of its own; ``next_answer`` is for its reader."""

    def __init__(
        self,
        endpoints: EndpointSet,
        work: PreparedWork | OpeningCall[PreparedWork],
    ) -> None:
        """``work``: prepared, or to be prepared once its input is open."""
        self._endpoints = endpoints
        self._began = time.monotonic()
        self._late: OpeningCall[PreparedWork] | None = None
        self._work: PreparedWork | None = None
        if isinstance(work, PreparedWork):
            self._work = work
        else:
            self._late = work
        self._news = LoopNews()
        self._iterator: Any = None
        self._fetching: asyncio.Future[Any] | None = None
        self._line: deque[BatchAnswer] = deque()
        self._size = 0
        self._arrived, self._taken, self._accepted = Wakeup(), Wakeup(), Wakeup()
        self._reading = False
        self.balancer: Balancer | None = None
        self.error: BaseException | None = None
        """Why it failed, once it has."""
        self.ended = False
        """Whether nothing more comes but what waits for its reader."""
        self.task = endpoints.spawn(self._run())
        self.task.add_done_callback(self._done)

    @property
    def over(self) -> bool:
        """Whether nothing more comes at all."""
        return self.ended and not self._line

    async def next_answer(self) -> BatchAnswer | None:
        """The next answer; None after the last. Raises how the work failed."""
        while not self._line:
            if self.error is not None:
                raise self.error
            if self.ended:
                return None
            await self._wait(self._arrived)
        answer = self._line.popleft()
        self._size -= _size_of(answer)
        self._taken.set()
        return answer

    async def opened(self) -> None:
        """Waits until a call is accepted. Raises how the work failed."""
        while self.balancer is None or not self.balancer.accepted:
            if self.error is not None:
                raise self.error
            if self.ended:
                return
            await self._wait(self._accepted)

    def stop(self, error: BaseException) -> None:
        """Gives up all calls; reading raises ``error`` from now on."""
        if not self.ended:
            self.error = error
            self._line.clear()
            self.task.cancel()

    async def stopped(self) -> None:
        """Waits until all calls were given up."""
        if not self.task.done():
            await asyncio.wait((self.task,))

    # Within

    async def _wait(self, wakeup: Wakeup) -> None:
        self._set_reading(True)
        try:
            await wakeup.wait()
        finally:
            self._set_reading(False)

    def _set_reading(self, reading: bool) -> None:
        self._reading = reading
        if self.balancer is not None:
            for call in self.balancer.open_calls:
                call.exchange.set_reading(reading)

    async def _run(self) -> None:
        well = False
        try:
            if self._late is not None:
                self._work = await self._late.open()  # which has taken its time off the deadline
                self._began = time.monotonic()
            assert self._work is not None
            await self._prepare(self._work.spec)
            self.balancer = self._work.make(self._news, self._began)
            await self._drive(self.balancer)
            well = True
        except Exception as error:  # noqa: BLE001  it belongs to the reader
            self.error = self.error or error
        finally:
            if self.balancer is not None:
                self.balancer.close(well=well)
            self._end(well=well)
            await self._close_input()

    async def _prepare(self, spec: BalancedSpec) -> None:
        """Has names resolved within the deadline. Raises DeadlineExceeded and ConnectFailed."""
        limit = asyncio.timeout(spec.deadline)
        try:
            async with limit:
                await self._endpoints.prepare()
        except TimeoutError:
            raise spec.late(self._endpoints.places) from None

    def _done(self, task: asyncio.Task[None]) -> None:
        """A task that is cancelled before it began runs no line of its own."""
        if not self.ended:
            self._end(well=False)

    def _end(self, *, well: bool) -> None:
        if not well and self.error is None:  # cancelled, as the client is closed
            self.error = ConnectionLost(f"the client of {self._endpoints.places} is closed")
        self.ended = True
        try:
            if self._work is not None and self._work.seen is not None:
                self._work.seen.ended(self.error)
        finally:
            self._arrived.set()
            self._accepted.set()

    async def _drive(self, balancer: Balancer) -> None:
        spins = 0
        while True:
            while (answer := balancer.next_answer()) is not None:
                self._line.append(answer)
                self._size += _size_of(answer)
                self._arrived.set()
            if balancer.accepted:
                self._accepted.set()
            if balancer.is_over():
                return
            while self._line and (len(self._line) >= _AHEAD or self._size >= _AHEAD_BYTES):
                await self._taken.wait()
            spins += 1
            if spins >= _SPINS:  # let others have the loop, whatever comes in
                spins = 0
                await asyncio.sleep(0)
            found = await self._next(balancer)
            if found is None:
                continue
            tag, what = found
            if tag is self:
                balancer.give(self._fetched(what))
                continue
            answered = balancer.read(tag, what)
            if answered is not None:
                call, number, payload = answered
                size = len(payload)
                batch = call.exchange.decode(payload)
                if isinstance(batch, asyncio.Future):
                    batch = await batch
                balancer.answered(call, number, size, batch)

    async def _next(self, balancer: Balancer) -> tuple[Any, Any] | None:
        """The next news; None: look again."""
        with suppress(Empty):
            return self._news.get_nowait()
        now = time.monotonic()
        step = balancer.step(now)
        if step is NextStep.GIVE:
            self._fetch(balancer)
        if step is not NextStep.WAIT:
            return None
        seconds = balancer.begin_wait(now)
        if seconds is None:
            return None
        for call in balancer.open_calls:
            call.exchange.set_reading(self._reading)
        found: tuple[Any, Any] | None = None
        try:
            found = await self._news.get(seconds)
        finally:
            balancer.end_wait(now, in_vain=found is None)
        return found

    # The input

    def _fetch(self, balancer: Balancer) -> None:
        """Gives the next batch of the input, or has it come."""
        if self._iterator is None:
            assert self._work is not None
            batches = self._work.batches
            self._iterator = aiter(batches) if hasattr(batches, "__aiter__") else iter(batches)
        if not hasattr(self._iterator, "__anext__"):
            balancer.give(self._read(next(self._iterator, None)))
            return
        balancer.fetching = True
        self._fetching = asyncio.ensure_future(_anext(self._iterator))
        self._fetching.add_done_callback(lambda done: self._news.put((self, done)))

    def _fetched(self, done: asyncio.Future[Any]) -> pa.RecordBatch | None:
        self._fetching = None
        return self._read(done.result())

    def _read(self, found: Any) -> pa.RecordBatch | None:
        if found is None or self._work is None or self._work.read is None:
            return None
        return self._work.read(found)

    async def _close_input(self) -> None:
        fetching, self._fetching = self._fetching, None
        if fetching is not None and not fetching.done():
            fetching.cancel()
            await asyncio.wait((fetching,))
        iterator, self._iterator = self._iterator, None
        close = getattr(iterator, "aclose", None)
        if close is not None:
            with suppress(Exception):  # the call has ended, and says why
                await close()
        if self._late is not None:
            with suppress(Exception):
                await self._late.close()


async def _anext(iterator: Any) -> Any:
    try:
        return await anext(iterator)
    except StopAsyncIteration:
        return None


def _size_of(answer: BatchAnswer) -> int:
    return 0 if answer.batch is None else batch_bytes(answer.batch)
