"""``Stream``: the asyncio face of one call, and the task that feeds it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Final

import pyarrow as pa

from aqueduct._speedups.waiting import Waiter
from aqueduct.arrow.decode import Decoder
from aqueduct.errors import AqueductError
from aqueduct.outgoing import END, Batches, Failure, Outgoing, abandoned

__all__ = ["Stream"]

_SPINS: Final = 32


class Stream:
    """The answers of one call: an async iterator of record batches, to be closed if left early.

    ``async with`` closes it. One task at a time may read from it. What reading raises is the end
    of the call, unless failures are reported: one raised while the stream is not ``over`` is of
    the batch ``number`` alone, and the next answer may be asked for.
    """

    def __init__(
        self, source: Batches | None, start: Callable[[Callable[[], None]], Outgoing]
    ) -> None:
        """``start`` makes the call, given what to call on a change."""
        self._source = source
        self._decoder: Decoder | None = None
        self._feeder: asyncio.Task[None] | None = None
        self._feeding = _Feeding()
        self._peeked: Any = None
        self._spins = 0
        self._call = start(self._feeding.wake)
        self._begin()

    @property
    def schema(self) -> pa.Schema | None:
        """Of the answers; None before the service has accepted the call (see ``opened``)."""
        call = self._call
        expected = call.head.expected if call.accepted else None
        return call.schema if expected is None else expected

    @property
    def counters(self) -> Mapping[str, int]:
        """What the service counted; empty before the end."""
        return self._call.counters

    @property
    def number(self) -> int:
        """Of the input batch that the last answer, or failure, belongs to; -1 before the first."""
        return self._call.answers.number

    @property
    def traits(self) -> frozenset[str]:
        """What the handler is, of ``one-to-one`` and ``idempotent``; empty before ``opened``.

        And which wishes the service grants, of ``as-completed`` (``ordered=False``) and
        ``failures`` (``report_failures=True``).
        """
        return self._call.traits

    @property
    def over(self) -> bool:
        """Whether nothing more comes: the call has ended, or failed as a whole."""
        return self._call.over

    async def opened(self) -> pa.Schema | None:
        """Waits until the service has accepted the call; returns ``schema``.

        Raises how the call failed. An answer that came meanwhile is not lost.
        """
        while not self._call.accepted:
            self._peeked = await self._take()
            if not self._call.accepted:
                await self._wait()
        return self.schema

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> pa.RecordBatch:
        if self._spins >= _SPINS:  # let others have the loop, whatever comes in
            self._spins = 0
            await asyncio.sleep(0)
        # From here to the end nothing is awaited with a payload in hand: a reader that is
        # cancelled loses none.
        call, answers, feeding = self._call, self._call.answers, self._feeding
        while True:
            if self._peeked is None:
                batch = answers.next_batch()
                feeding.wake()
                if batch is not None:
                    self._spins += 1
                    return batch
            payload, self._peeked = self._peeked, None
            if payload is None and (answers.holds_payload or call.over or call.readable.readable):
                payload = await self._take()
            if payload is not None:
                break
            await self._wait()
            self._spins = 0
        if payload is END:
            await self._stop_feeding()
            raise StopAsyncIteration
        self._spins += 1
        if type(payload) is Failure:
            raise payload.error
        if self._decoder is None:
            self._decoder = call.decoder()
            call.answers.read_by(self._decoder.reader)
        try:
            return self._decoder.decode(payload)
        except AqueductError as error:
            call.fail(error)
            await self._stop_feeding()
            raise

    async def aclose(self) -> None:
        """Abandons the call, unless it is over: the handler is told to stop."""
        call = self._call
        call.fail(abandoned(call.peer, call.head.handler))
        await self._stop_feeding()

    async def __aenter__(self) -> Stream:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()

    def __del__(self) -> None:
        call = getattr(self, "_call", None)
        if call is None or call.over:
            return
        try:
            call.loop.call_soon_threadsafe(_drop, call, self._feeder)
        except RuntimeError:  # the loop is closed, and the connection with it
            pass

    # Within

    async def _take(self) -> Any:
        try:
            found = self._call.take()
        except BaseException:
            await self._stop_feeding()
            raise
        self._feeding.wake()
        return found

    async def _wait(self) -> None:
        call = self._call
        call.waiting = True
        call.expect_answer()
        try:
            receiver = call.readable
            if not receiver.readable:  # what that has sent may have brought something about
                await receiver.wait_change()
        finally:
            call.waiting = False

    def _begin(self) -> None:
        """Sends what can be sent without waiting, and leaves the rest to a task."""
        source, call = self._source, self._call
        if source is None:
            return
        batches = source.batches
        try:
            if not hasattr(batches, "__aiter__"):
                batches = iter(batches)
                if call.feed(source, batches, _SPINS):
                    return
        except BaseException:
            call.fail(abandoned(call.peer, call.head.handler))
            raise
        self._feeder = asyncio.get_running_loop().create_task(
            _feed(call, source, batches, self._feeding)
        )

    async def _stop_feeding(self) -> None:
        feeder, self._feeder = self._feeder, None
        if feeder is not None and not feeder.done():
            feeder.cancel()
            await asyncio.wait((feeder,))


class _Feeding:
    """What a Stream and its feeder share; so the feeder holds no Stream, and one may be dropped."""

    __slots__ = ("call", "waiter")

    def __init__(self) -> None:
        self.call: Outgoing | None = None
        """The call, once it is fed by a task."""
        self.waiter: Waiter | None = None
        """What the feeder waits for, or has waited for last."""

    def wake(self) -> None:
        """Lets the feeder go on, if it waits and may."""
        waiter = self.waiter
        if waiter is not None and not waiter.woken:
            call = self.call
            assert call is not None
            if call.may_send:
                waiter.woken = True
                call.connection.pump.step(waiter)

    def wait(self, call: Outgoing) -> Waiter:
        """What to await, once, after ``may_send`` of the call was found to be False."""
        self.call = call
        self.waiter = Waiter(call.loop)
        return self.waiter


def _drop(call: Outgoing, feeder: asyncio.Task[None] | None) -> None:
    """A Stream was dropped before its end."""
    call.fail(abandoned(call.peer, call.head.handler))
    if feeder is not None:
        feeder.cancel()


async def _feed(call: Outgoing, source: Batches, batches: Any, feeding: _Feeding) -> None:
    """Sends batches as there is room. What the iterable raises becomes the error of the call."""
    try:
        if hasattr(batches, "__aiter__"):
            iterator = aiter(batches)
            try:
                while True:
                    while not call.may_send:
                        await feeding.wait(call)
                    if call.over:
                        return
                    call.supplying = True
                    try:
                        batch = await anext(iterator)
                    except StopAsyncIteration:
                        break
                    finally:
                        call.supplying = False
                    call.give(source, batch)
                    call.expect_answer()
            finally:
                if hasattr(iterator, "aclose"):
                    await iterator.aclose()
            call.finish()
            return
        while True:
            while not call.may_send:
                await feeding.wait(call)
            if call.over:
                return
            done = call.feed(source, batches, _SPINS)
            call.expect_answer()
            if done:
                return
            if done is None:
                await asyncio.sleep(0)
    except asyncio.CancelledError:
        raise
    except BaseException as error:  # noqa: BLE001  an iterable may raise anything
        call.fail(error)
