"""Runs a function of one batch for all calls of its handler, in turn, some batches together.

Functions run in threads, coroutine functions in tasks. A thread that is done with one run takes the
next by itself. What became of a run crosses to the event loop once, for all its calls.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextvars import Context, copy_context
from functools import partial
from typing import Any, Final, Protocol, TypeAlias

import pyarrow as pa

from aqueduct.arrow.capsules import fitted
from aqueduct.arrow.joining import joined
from aqueduct.config import Calls
from aqueduct.endpoint import accounts
from aqueduct.errors import CallError
from aqueduct.escaping import logger_of
from aqueduct.service.batching import BatchFilter, CallRows, QueuedBatch, split, wrong_count
from aqueduct.service.handlers import Handler, HandlerShape, answer_batch, handler_failed
from aqueduct.service.turns import Line, Turns
from aqueduct.service.waiting_room import Ticket, WaitingCall, WaitingRoom, WholeCalls

__all__ = ["SharedRunner", "ThreadHost", "WaitingRooms"]

log = logger_of(__name__)

_Parts: TypeAlias = "list[tuple[Line[QueuedBatch], QueuedBatch]]"
_Outcome: TypeAlias = "tuple[Any, BaseException | None]"
"""An answer, or what the handler raised."""

_CALLS_A_TURN: Final = 8
"""Calls of a run that get their answers in one turn of the event loop."""


class ThreadHost(Protocol):
    """What starts threads for handlers."""

    def start_thread(self, work: Callable[[], None]) -> None:
        """A thread for ``work``. Raises Busy when the system has none."""


class WaitingRooms:
    """The waiting rooms of a service that runs; each is made for the first call of its handler."""

    def __init__(self, host: ThreadHost, limits: Calls) -> None:
        self._host = host
        self._limits = limits
        self._context = copy_context()
        self._rooms: dict[str, WaitingRoom] = {}

    def enter(self, handler: Handler, running: WaitingCall) -> Ticket | None:
        """Lets a call in, if its handler has a waiting room. Raises Busy."""
        if handler.max_concurrency is None:
            return None
        room = self._rooms.get(handler.name)
        if room is None:
            room = self._rooms[handler.name] = WaitingRoom(handler, self._limits, self._source)
        return room.enter(running)

    @property
    def waiting(self) -> int:
        """Calls that wait for their turn. For any thread."""
        return sum(room.waiting for room in tuple(self._rooms.values()))

    def state(self) -> dict[str, dict[str, int]]:
        """What runs and what waits, by handler. For any thread."""
        return {
            name: {"running": room.running, "waiting": room.waiting}
            for name, room in tuple(self._rooms.items())
        }

    def close(self) -> None:
        """The service has ended."""
        for room in self._rooms.values():
            room.close()

    def _source(self, room: WaitingRoom) -> SharedRunner | WholeCalls:
        if room.handler.one_to_one:
            return SharedRunner(room, self._host, self._context)
        return WholeCalls(room)


class _Run:
    """Batches that the handler works on together, and what became of each."""

    __slots__ = ("context", "lines", "outcomes", "parts", "task")

    def __init__(self, parts: _Parts, context: Context) -> None:
        self.parts = parts
        self.lines = list(dict.fromkeys(line for line, _ in parts))
        # A context belongs to one thread at a time, and a call may have several.
        self.context = parts[0][0].owner.context.copy() if len(self.lines) == 1 else context.copy()
        self.outcomes: list[_Outcome | None] = [None] * len(parts)
        self.task: asyncio.Task[None] | None = None

    def fail(self, error: BaseException) -> None:
        """``error`` becomes of whatever has no outcome."""
        for place, outcome in enumerate(self.outcomes):
            if outcome is None:
                self.outcomes[place] = None, error


class SharedRunner:
    """Has the batches of a handler worked on as they have their turn."""

    what = "batches"

    def __init__(self, room: WaitingRoom, host: ThreadHost, context: Context) -> None:
        """``context``: in which runs of several calls are."""
        self._room = room
        self._host = host
        self._context = context
        self._handler = room.handler
        self._batching = room.handler.batching
        if self._batching is not None:
            self.what = "runs"
        self._runs: set[_Run] = set()
        self._timer: asyncio.TimerHandle | None = None
        # Of what waits, under the lock of the room.
        self._rows = 0
        self._bytes = 0
        self._known = 0
        """Calls that took part in the last run, or waited as it began: they may call again."""
        self._ended = 0.0
        """When a run ended."""

    # What the room asks

    def added(self, work: QueuedBatch) -> None:
        """See RunSource."""
        self._rows += work.batch.num_rows
        self._bytes += work.size

    def dropped(self, items: list[QueuedBatch]) -> None:
        """See RunSource."""
        for work in items:
            self._rows -= work.batch.num_rows
            self._bytes -= work.size

    def take(self, turns: Turns[Any], now: float) -> _Parts:
        """See RunSource."""
        if self._batching is None:
            return turns.take(now)
        if self._delay(turns, now) > 0:
            return []
        found = turns.take(now, BatchFilter(self._batching))
        if found:
            self.dropped([work for _, work in found])
            self._known = len({line for line, _ in found}) + len(turns.waiting)
        return found

    def rest(self, turns: Turns[Any], now: float) -> None:
        """See RunSource."""
        if self._timer is None and (delay := self._delay(turns, now)) > 0:
            self._timer = self._room.loop.call_later(delay, self._waited)

    def start(self, run: _Parts) -> None:
        """See RunSource."""
        begun = _Run(run, self._context)
        self._runs.add(begun)
        if self._handler.shape is HandlerShape.COROUTINE:
            work = self._work_async(begun)
            begun.task = self._room.loop.create_task(work, context=begun.context)
            begun.task.add_done_callback(partial(self._done, begun))
            return
        try:
            self._host.start_thread(partial(self._work, begun))
        except Exception as error:  # noqa: BLE001  the calls get it
            begun.fail(error)
            self._room.loop.call_soon(self._done, begun)

    def left(self, ticket: Ticket) -> None:
        """See RunSource."""
        for run in tuple(self._runs):
            if run.task is not None and all(line.gone for line in run.lines):
                run.task.cancel()

    def close(self) -> None:
        """See RunSource."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # When a run begins

    def _delay(self, turns: Turns[Any], now: float) -> float:
        """Seconds that waiting calls should wait for others; 0 or less: none."""
        batching = self._batching
        if batching is None or not batching.wait or not turns.waiting:
            return 0.0
        full = self._rows >= batching.rows or self._bytes >= batching.bytes
        if full or len(turns.waiting) >= self._known or turns.running >= turns.places:
            return 0.0
        first = next(iter(turns.waiting)).since
        assert first is not None
        return min(first, self._ended) + batching.wait - now

    def _waited(self) -> None:
        self._timer = None
        self._room.begin()

    # One run

    def _work(self, run: _Run) -> None:
        """In a thread: run after run, as long as there are any."""
        while True:
            try:
                self._perform(run)
            except BaseException as error:  # noqa: BLE001  such as a MemoryError
                run.fail(error)
            self._give_back(run)
            self._ended = self._room.time()
            parts = self._room.trade(run.lines)
            following = _Run(parts, self._context) if parts else None
            try:
                self._room.loop.call_soon_threadsafe(self._deliver, run, following)
            except RuntimeError:  # the loop is closed: nobody waits
                return
            if following is None:
                return
            run = following
            del following, parts

    def _perform(self, run: _Run) -> None:
        steps = self._steps(run)
        with contextlib.suppress(StopIteration):
            asked = next(steps)
            while True:
                try:
                    outcome: _Outcome = run.context.run(self._handler.invoke, *asked), None
                except BaseException as error:  # noqa: BLE001  a handler may raise anything
                    outcome = None, error
                asked = steps.send(outcome)
                del outcome  # a traceback and its frame are no cycle

    async def _work_async(self, run: _Run) -> None:
        steps = self._steps(run)
        try:
            asked = next(steps)
            while True:
                try:
                    outcome: _Outcome = await self._handler.invoke(*asked), None
                except BaseException as error:
                    if run.task is not None and run.task.cancelling():
                        raise
                    outcome = None, error
                asked = steps.send(outcome)
                del outcome
        except StopIteration:
            pass
        except BaseException as error:  # noqa: BLE001
            run.fail(error)
        finally:
            steps.close()

    def _steps(self, run: _Run) -> Generator[tuple[pa.RecordBatch, Any], _Outcome, None]:
        """Gives what the handler is to be called with, is sent the outcome, and fills those of all.

        Sync and async runs differ in the call alone.
        """
        parts = run.parts
        if len(parts) == 1:
            yield from self._alone(run, 0)
            return
        try:
            batch = joined([work.batch for _, work in parts])
        except pa.ArrowException as error:  # a dictionary cannot number all their values
            log.debug("%s: batches cannot be put together: %s", self._handler.name, error)
            yield from self._each_alone(run)
            return
        counts = [work.batch.num_rows for _, work in parts]
        account, nbytes = accounts.process().receiving, batch.get_total_buffer_size()
        account.charge(nbytes)
        try:
            answer, failed = yield batch, _call_rows(parts, counts)
        finally:
            account.charge(-nbytes)
        if failed is None:
            answers, failed = self._take_apart(answer, parts)
            if failed is None:
                run.outcomes[:] = [(each, None) for each in answers]
                return
        if self._tries_alone(run, failed):
            yield from self._each_alone(run)
        else:
            run.outcomes[:] = [(None, each) for each in _error_for_each(failed, len(parts))]

    def _alone(
        self, run: _Run, place: int
    ) -> Generator[tuple[pa.RecordBatch, Any], _Outcome, None]:
        line, work = run.parts[place]
        call, batch = line.owner.call, work.batch
        if self._batching is None:
            run.outcomes[place] = yield batch, call
            return
        answer, error = yield batch, (CallRows(call, 0, batch.num_rows),)
        if error is None:
            answers, error = self._take_apart(answer, run.parts[place : place + 1])
        run.outcomes[place] = (answers[0], None) if error is None else (None, error)

    def _each_alone(self, run: _Run) -> Generator[tuple[pa.RecordBatch, Any], _Outcome, None]:
        for place, (line, _) in enumerate(run.parts):
            if not line.gone:
                yield from self._alone(run, place)

    def _take_apart(
        self, answer: Any, parts: _Parts
    ) -> tuple[list[pa.RecordBatch], BaseException | None]:
        """The answer to each batch; or what is wrong."""
        name, counts = self._handler.name, [work.batch.num_rows for _, work in parts]
        own = isinstance(answer, pa.RecordBatch)
        if not own:
            try:
                answer = answer_batch(answer, name)
            except Exception as error:  # noqa: BLE001  the other library may raise anything
                return [], error
        asked = sum(counts)
        if answer.num_rows != asked:
            return [], wrong_count(name, asked, len(counts), answer.num_rows)
        schemas = [line.owner.call.output_schema for line, _ in parts]
        if not own and schemas[0] is not None:
            answer = fitted(answer, schemas[0])  # most often it is the same for all
        answers = split(answer, counts) if len(counts) > 1 else [answer]
        if not own:
            answers = [
                each if schema is None else fitted(each, schema)
                for each, schema in zip(answers, schemas, strict=True)
            ]
        return answers, None

    def _tries_alone(self, run: _Run, error: BaseException) -> bool:
        if any(error is line.owner.call.reason for line in run.lines):
            return True  # the handler looked whether one call was cancelled
        assert self._batching is not None
        return self._batching.retry_alone and isinstance(error, Exception)

    # Its end

    def _give_back(self, run: _Run) -> None:
        """The batches are of no use any more."""
        for _, work in run.parts:
            if work.lease is not None:
                work.lease.give_back()

    def _deliver(self, run: _Run, following: _Run | None) -> None:
        """On the loop: the calls learn what became of their batches."""
        self._runs.discard(run)
        if following is not None:
            self._runs.add(following)
        outcomes, run.outcomes = run.outcomes, []
        self._hand_over(deque(zip(run.parts, outcomes, strict=True)))
        self._room.begin()

    def _hand_over(self, ended: deque[tuple[tuple[Line[QueuedBatch], QueuedBatch], Any]]) -> None:
        """Some calls in each turn of the loop: their answers leave while others are encoded."""
        for _ in range(min(_CALLS_A_TURN, len(ended))):
            (line, work), outcome = ended.popleft()
            if line.owner.deliver is not None:
                line.owner.deliver(work.number, *(outcome or (None, asyncio.CancelledError())))
        if ended:
            self._room.loop.call_soon(self._hand_over, ended)

    def _done(self, run: _Run, task: object = None) -> None:
        """A run on the loop has ended."""
        self._give_back(run)
        self._ended = self._room.time()
        self._room.done(run.lines)
        self._deliver(run, None)


def _call_rows(parts: _Parts, counts: Sequence[int]) -> tuple[CallRows, ...]:
    found, start = [], 0
    for (line, _), count in zip(parts, counts, strict=True):
        found.append(CallRows(line.owner.call, start, count))
        start += count
    return tuple(found)


def _error_for_each(error: BaseException, count: int) -> list[BaseException]:
    """The error for each of several calls: they raise it in tasks of their own."""
    if not isinstance(error, CallError):
        error = handler_failed(error)
    try:
        return [copy.copy(error) for _ in range(count)]
    except Exception:  # noqa: BLE001  some cannot be copied
        return [handler_failed(error) for _ in range(count)]
