"""Runners of handlers that need no thread of their own for the whole call.

Async generators and coroutines run in the task of their call. Functions of one batch run in
threads, coroutine functions of one batch in tasks, several at once if they may, and their answers
are put in order unless the client takes them as they are made. Handlers that are plain generators
have ``thread_runner``.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from contextvars import copy_context
from functools import partial
from typing import Any, Final, TypeAlias

import pyarrow as pa

from aqueduct._speedups.channels.receiver import MemoryLease
from aqueduct.arrow.encode import Encoded
from aqueduct.endpoint.accounts import LARGE, Reservation
from aqueduct.errors import AqueductError, Busy
from aqueduct.rpc.deadline import ThreadWakeup, Wakeup
from aqueduct.rpc.threads import Job, apart
from aqueduct.service.batching import QueuedBatch
from aqueduct.service.call import ServerCall
from aqueduct.service.call_output import CallOutput
from aqueduct.service.handlers import SOURCE, Handler, HandlerShape

__all__ = [
    "AsyncBatches",
    "MapRunner",
    "drive_async_generator",
    "drive_coroutine",
    "drive_coroutine_sink",
    "run_steps",
    "sink_counters",
]

_Input: TypeAlias = "tuple[int, pa.RecordBatch, MemoryLease | None]"
"""A batch's number, the batch, and what it is charged until the handler has worked on it."""
_Outcome: TypeAlias = "tuple[int, Any, BaseException | None]"
"""A batch's number, and its answer or what the handler raised."""

_SPINS: Final = 32
_AHEAD: Final = 16
_AHEAD_BYTES: Final = 1 << 20


async def drive_async_generator(running: ServerCall) -> None:
    """An exchange or source written as an async generator."""
    handler, input, output = running.handler, running.input, running.output
    give, exchange = output.batches.give, handler.kind != SOURCE
    arguments = (AsyncBatches(running), running.call) if exchange else (running.call,)
    generator = running.pace(handler.invoke(*arguments))
    came, spins, made = input.batches, 0, 0
    try:
        if output.expected:
            await output.wait_room(input.tell)
        async for batch in generator:
            running.call.check()  # a handler may have swallowed its cancellation
            number = max(came.taken - 1, 0) if exchange else made
            if not give(batch, number):
                encoded = await _encoded(output, batch)
                if not output.writable:
                    input.waits_for_client = True
                    input.pass_on()
                    await output.wait_writable()
                    input.waits_for_client = False
                    spins = 0
                output.send(encoded, number)
                del encoded
            if output.expected or output.batches.largest_out >= LARGE:
                del batch  # or it would be kept while the next one has no room
                output.answered()
                await output.wait_room(input.tell, again=True)
            made += 1
            spins += 1
            if spins >= _SPINS:  # nothing else would run while there is always room
                spins = 0
                await asyncio.sleep(0)
    except BaseException:  # one that has come to its end is closed
        await generator.aclose()
        raise


async def drive_coroutine(running: ServerCall) -> None:
    """A coroutine function of one batch, for a call of one batch."""
    batch = await anext(AsyncBatches(running))
    answer = await running.handler.invoke(batch, running.call)
    running.call.check()  # a handler may have swallowed its cancellation
    running.output.send(await _encoded(running.output, answer), 0)


async def _encoded(output: CallOutput, batch: Any) -> Encoded:
    """The payload of an answer. One that takes long is made in a thread."""
    return await apart(output.encode, batch) if output.slow(batch) else output.encode(batch)


async def drive_coroutine_sink(running: ServerCall) -> Mapping[str, int] | None:
    """A sink written as a coroutine function."""
    result = await running.handler.invoke(AsyncBatches(running), running.call)
    return sink_counters(running.handler, result)


def sink_counters(handler: Handler, result: Any) -> Mapping[str, int] | None:
    """What a sink returned. Raises TypeError if it is not counters."""
    if result is None:
        return None
    if not isinstance(result, Mapping) or not all(
        isinstance(name, str) and isinstance(count, int) for name, count in result.items()
    ):
        raise TypeError(
            f"a sink returns None or a dict of names and whole numbers; handler {handler.name!r} "
            f"returned {result!r:.200}"
        )
    return {name: int(count) for name, count in result.items()}


class AsyncBatches:
    """The batches of a call, for a handler on the event loop: an async iterator."""

    __slots__ = ("_decoding", "_input", "_spins")

    def __init__(self, running: ServerCall) -> None:
        self._input = running.input
        self._spins = 0
        self._decoding: asyncio.Task[pa.RecordBatch] | None = None
        """What decodes a batch that takes long, whether or not somebody waits for it."""

    def __aiter__(self) -> AsyncBatches:
        return self

    async def __anext__(self) -> pa.RecordBatch:
        input = self._input
        if self._spins >= _SPINS:  # before a batch is in hand: a cancelled handler loses none
            self._spins = 0
            input.mark_soon()
            await asyncio.sleep(0)
        self._spins += 1
        if self._decoding is not None:
            return await self._decoded(self._decoding)
        while (batch := input.batches.next_batch()) is None:
            if input.over:
                raise StopAsyncIteration
            if input.readable:
                found = input.take()
                if found is not None:
                    number, payload = found
                    input.batches.taken = number + 1
                    if not input.slow(payload):
                        return input.decode(number, payload)
                    self._decoding = input.decode_later(
                        number, payload, input.batches.lease, id(asyncio.current_task())
                    )
                    return await self._decoded(self._decoding)
                if input.over:
                    raise StopAsyncIteration
            input.waits_for_client = True
            input.want(True, id(asyncio.current_task()))
            input.mark_soon()
            input.expect_batch()
            try:
                await input.wait_change()  # what that has sent may have brought something about
            finally:
                input.waits_for_client = False
                input.want(False)
            self._spins = 1
        return batch

    async def _decoded(self, decoding: asyncio.Task[pa.RecordBatch]) -> pa.RecordBatch:
        """The batch that is being decoded. A handler that is cancelled finds it the next time."""
        await asyncio.wait((decoding,))
        self._decoding = None
        return decoding.result()


async def run_steps(
    running: ServerCall,
    signal: Wakeup,
    step: Callable[[], bool],
    stop: Callable[[], None],
    settle: Callable[[], Awaitable[None]],
) -> None:
    """Calls ``step`` until it gives True, each time that ``signal`` is set.

    If the call fails, ``stop`` tells the handler, and ``settle`` waits until it has ended.
    """
    running.stop = stop
    running.input.tell(signal.set)
    running.output.tell(signal.set)
    try:
        while not step():
            await signal.wait()
            running.call.check()
    except asyncio.CancelledError:
        stop()  # the loop is ending: wait for no thread
        raise
    except BaseException as error:
        running.conclude(error)  # the client need not wait for what other threads are at
        running.cancel_handler(error)
        stop()
        await settle()
        raise


class MapRunner:
    """Drives a function of one batch, in threads or, if it is a coroutine function, in tasks.

    Up to ``Handler.concurrency`` batches are worked on at once, and as many again may wait, taken
    or answered: so one slow batch does not stop the others at once. Of small batches more wait, so
    that a thread finds the next one without asking the event loop. If the handler has a waiting
    room, the batches have their turn there.
    """

    def __init__(self, running: ServerCall) -> None:
        self._running = running
        self._loop = asyncio.get_running_loop()
        self._signal = ThreadWakeup()
        self._lock = threading.Lock()
        # Under the lock: work for threads, and how many threads there are.
        self._jobs: deque[_Input] = deque()
        self._active = 0
        self._stopped = False
        # What threads append and the loop takes.
        self._finished: deque[_Outcome] = deque()
        # Of the loop alone.
        self._answers: dict[int, tuple[Any, BaseException | None]] = {}
        self._sizes: dict[int, int] = {}
        self._outstanding_bytes = 0
        self._done = 0  # batches that were answered
        # A batch that takes long to decode, with its number, size and lease, and an answer that
        # takes long to encode. Later ones wait.
        self._decoding: tuple[asyncio.Task[pa.RecordBatch], int, int, MemoryLease | None] | None = (
            None
        )
        self._encoding: tuple[Job[Encoded], int] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._rooms: dict[int, Reservation] = {}  # for the answers of batches at work
        self._room: Reservation | None = None  # for that of the next one
        self._ticket = running.input.ticket
        if self._ticket is not None:
            self._ticket.deliver = self._came_back
            self._ticket.context = copy_context()

    async def drive(self) -> None:
        """Works on the call to its end. The last thread has come back when it returns."""
        await run_steps(self._running, self._signal, self._step, self._stop, self._settle)
        self._stop()
        await self._settle()

    def _step(self) -> bool:
        """Sends answers and hands out work as far as that goes now. True: all is done."""
        running = self._running
        while self._finished:
            number, batch, error = self._finished.popleft()
            self._answers[number] = (batch, error)
        blocked = self._send_answers()
        while self._decoded() and self._wants_more() and (self._has_room() or running.input.at_end):
            found = running.input.take()
            if found is None:
                break
            if self._room is not None:
                self._rooms[found[0]], self._room = self._room, None
            self._hand_out(*found)
        if self._room is not None and self._room.granted:
            self._room.release()  # there is no batch for it yet
        answered = running.input.batches.batches_in == self._done and self._encoding is None
        if running.input.over and answered:
            return True
        if blocked:
            running.output.notify_writable()
            running.input.pass_on()
        lacks_room = self._room is not None and self._room.waits
        running.input.waits_for_client = blocked or (answered and not lacks_room)
        # While the handler works on a batch, it does not wait for the next one.
        running.input.want(running.input.batches.batches_in == self._done, id(self))
        return False

    def _send_answers(self) -> bool:
        """Sends what is next, in order if so asked. True: it is there and has no room."""
        running = self._running
        while self._encoded() and self._answers:
            number = next(iter(self._answers)) if running.output.as_completed else self._done
            if number not in self._answers:
                return False
            if not running.output.writable:
                return True
            batch, error = self._answers.pop(number)
            running.input.batches.taken = number + 1
            self._outstanding_bytes -= self._sizes.pop(number)
            self._done += 1
            if error is not None:
                if not running.report(error, number):
                    try:
                        raise error
                    finally:
                        error = None  # a traceback and its frame are no cycle
            elif not running.output.batches.give(batch, number):
                self._send(batch, number)
            if self._encoding is None:
                self._leave_room(number)
        return False

    def _leave_room(self, number: int) -> None:
        """An answer is queued, and counts there."""
        room = self._rooms.pop(number, None)
        if room is not None:
            room.release()
            if self._room is None:
                self._room = room

    def _send(self, batch: Any, number: int) -> None:
        running = self._running
        if running.output.slow(batch):
            self._encoding = Job(partial(running.output.encode, batch), self._signal.set), number
            return
        self._send_encoded(partial(running.output.encode, batch), number)

    def _encoded(self) -> bool:
        """Whether no answer is being encoded. Sends an answer that is ready."""
        if self._encoding is None:
            return True
        job, number = self._encoding
        if not job.done:
            return False
        self._encoding = None
        self._send_encoded(job.result, number)
        self._leave_room(number)
        return True

    def _send_encoded(self, encode: Callable[[], Encoded], number: int) -> None:
        running = self._running
        try:
            encoded = encode()
        except Busy:  # that the service lacks memory is no fault of this batch
            raise
        except AqueductError as error:  # the handler made what cannot be sent
            # With dictionaries, later answers may need what does not leave now.
            if not (running.output.encoder.independent and running.report(error, number)):
                raise
        else:
            running.output.send(encoded, number)

    def _wants_more(self) -> bool:
        running = self._running
        if running.input.over:
            return False
        outstanding = running.input.batches.batches_in - self._done
        concurrency = running.handler.concurrency
        if outstanding < 2 * concurrency:
            return True
        return outstanding < concurrency + _AHEAD and self._outstanding_bytes < _AHEAD_BYTES

    def _has_room(self) -> bool:
        """Whether there is room for one more answer, if they are large; else the loop is woken."""
        running = self._running
        size, came = running.output.expects, running.input.batches
        if not size and came.batches_in:
            size = came.bytes_in // came.batches_in  # the answer may be as large
        if size < LARGE:
            return True
        if self._room is None:
            self._room = running.output.room(self._signal.set_threadsafe)
        return self._room.granted or (not self._room.waits and self._room.ask(size))

    def _hand_out(self, number: int, payload: Any) -> None:
        running = self._running
        lease = running.input.take_lease()
        if running.input.slow(payload):
            decoding = running.input.decode_later(number, payload, lease, id(self))
            decoding.add_done_callback(lambda _: self._signal.set())
            self._decoding = decoding, number, len(payload), lease
            return
        self._begin(number, running.input.decode(number, payload), len(payload), lease)

    def _decoded(self) -> bool:
        """Whether no batch is being decoded. Hands out a batch that is ready."""
        if self._decoding is None:
            return True
        decoding, number, size, lease = self._decoding
        if not decoding.done():
            return False
        self._decoding = None
        self._begin(number, decoding.result(), size, lease)
        return True

    def _begin(
        self, number: int, batch: pa.RecordBatch, size: int, lease: MemoryLease | None
    ) -> None:
        running = self._running
        self._sizes[number] = size
        self._outstanding_bytes += size
        if self._ticket is not None:
            self._ticket.add(QueuedBatch(number, batch, lease))
            return
        with self._lock:
            self._jobs.append((number, batch, lease))
            if self._active >= running.handler.concurrency:
                return
            self._active += 1
        try:
            if running.handler.shape is HandlerShape.FUNCTION:
                running.host.start_thread(self._work)
            else:
                task = self._loop.create_task(self._work_async())
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
        except BaseException:
            with self._lock:
                self._active -= 1
            raise

    def _came_back(self, number: int, answer: Any, error: BaseException | None) -> None:
        """What became of a batch that had its turn."""
        self._finished.append((number, answer, error))
        self._signal.set()

    def _trade(self, outcome: _Outcome | None) -> _Input | None:
        """Hands in what became of one batch, for the next one; None: go home.

        All under one lock, so that one wake tells the loop of both.
        """
        with self._lock:
            if outcome is not None:
                self._finished.append(outcome)
            if self._jobs and not self._stopped:
                return self._jobs.popleft()
            self._active -= 1
            return None

    def _work(self) -> None:
        """In a thread: batch after batch, as long as there are any."""
        handler, call = self._running.handler, self._running.call
        outcome: _Outcome | None = None
        while (job := self._trade(outcome)) is not None:
            if outcome is not None:
                self._signal.set_threadsafe()
            try:
                outcome = (job[0], handler.invoke(job[1], call), None)
            except BaseException as error:  # noqa: BLE001  a handler may raise anything
                outcome = (job[0], None, error)
            if job[2] is not None:
                job[2].give_back()
        outcome = None  # see ``_send_answers``
        self._signal.set_threadsafe()

    async def _work_async(self) -> None:
        handler, call = self._running.handler, self._running.call
        outcome: _Outcome | None = None
        while (job := self._trade(outcome)) is not None:
            self._signal.set()
            try:
                outcome = (job[0], await handler.invoke(job[1], call), None)
            except BaseException as error:  # noqa: BLE001
                outcome = (job[0], None, error)
            if job[2] is not None:
                job[2].give_back()
        outcome = None  # see ``_send_answers``
        self._signal.set()

    def _stop(self) -> None:
        """The call was aborted. Threads end with the batch that they are at."""
        with self._lock:
            self._stopped = True
        if self._ticket is not None:
            self._ticket.leave()
        for task in self._tasks:
            task.cancel()
        self._signal.set()

    async def _settle(self) -> None:
        if self._ticket is not None:
            while self._ticket.line.active:
                await self._signal.wait()
        elif self._running.handler.shape is HandlerShape.COROUTINE:
            while self._tasks:  # one that was cancelled before its first step counts nothing down
                await asyncio.wait(tuple(self._tasks))
        else:
            while self._active:
                await self._signal.wait()
