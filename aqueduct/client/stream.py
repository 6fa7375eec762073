"""``Stream``: the asyncio face of one call, and the task that feeds it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final, Protocol, TypeAlias

import pyarrow as pa

from aqueduct._speedups.calls.batch_sender import BatchSender, SendWaker
from aqueduct.arrow.capsules import to_pandas, to_polars
from aqueduct.arrow.decode import Decoder
from aqueduct.client.call import END, Batches, ClientCall, FailedBatch, abandoned
from aqueduct.client.stream_text import stream_text
from aqueduct.endpoint.pulling import PULLING
from aqueduct.errors import AqueductError, Cancelled, LocalProtocolError
from aqueduct.rpc.threads import apart
from aqueduct.rpc.unpacking import decode_later

__all__ = ["LateCall", "Start", "Stream"]

Start: TypeAlias = Callable[[Callable[[], None]], ClientCall]
"""Makes a call, given what is to be called on a change."""

_SPINS: Final = 32


class LateCall(Protocol):
    """A call that is made when its input is open, which may take long."""

    async def open(self) -> tuple[Batches | None, Start]:
        """Opens the input. Raises why there is no call."""

    def abandoned(self) -> Cancelled:
        """What the stream raises that was closed before."""

    async def close(self) -> None:
        """Releases the input."""


class Stream:
    """The answers of one call: an async iterator of record batches, to be closed if left early.

    ``async with`` closes it. One task at a time may read from it. What reading raises is the end
    of the call, unless failures are reported: one raised while the stream is not ``over`` is of
    the batch ``number`` alone, and the next answer may be asked for.
    """

    def __init__(
        self,
        source: Batches | None,
        start: Start | None,
        sizes: dict[str, int] | None = None,
        *,
        late: LateCall | None = None,
    ) -> None:
        """``start`` makes the call; ``sizes``: the client's.

        ``late``: of a call that is made later, instead of ``source`` and ``start``.
        """
        self._source = source
        self._sizes = {} if sizes is None else sizes
        self._decoder: Decoder | None = None
        self._feeder: asyncio.Task[None] | None = None
        self._feeding = SendWaker()
        self._peeked: Any = None
        self._spins = 0
        self._call: ClientCall | None = None
        self._late = late
        self._error: BaseException | None = None  # why no call was made
        self._opening: asyncio.Task[None] | None = None
        if late is not None:
            self._opening = asyncio.get_running_loop().create_task(self._open(late))
        elif start is not None:
            self._begin(source, start)

    @property
    def schema(self) -> pa.Schema | None:
        """Of the answers; None before the service has accepted the call (see ``opened``)."""
        return None if self._call is None else self._call.output_schema

    @property
    def counters(self) -> Mapping[str, int]:
        """What the service counted; empty before the end."""
        return {} if self._call is None else self._call.counters

    @property
    def number(self) -> int:
        """Of the input batch that the last answer, or failure, belongs to; -1 before the first."""
        return -1 if self._call is None else self._call.answers.number

    @property
    def capabilities(self) -> frozenset[str]:
        """What the handler is, of ``one-to-one`` and ``idempotent``; empty before ``opened``.

        And which of those asked for the service grants: ``as-completed`` (``ordered=False``) and
        ``failures`` (``report_failures=True``).
        """
        return frozenset() if self._call is None else self._call.capabilities

    @property
    def over(self) -> bool:
        """Whether nothing more comes: the call has ended, or failed as a whole."""
        return self._error is not None if self._call is None else self._call.over

    async def opened(self) -> pa.Schema | None:
        """Waits until the service has accepted the call; returns ``schema``.

        Raises how the call failed. An answer that came meanwhile is not lost.
        """
        call = self._call or await self._started()
        while not call.accepted:
            self._peeked = await self._take(call)
            if not call.accepted:
                await self._wait(call)
        return self.schema

    async def read_all(self) -> pa.Table:
        """All answers that are still to come, as a Table: each batch as it came, none or many.

        Raises how the call failed. A reader that leaves it early closes the stream.
        """
        batches = [batch async for batch in self]
        schema = await self.opened()
        if schema is None:
            raise LocalProtocolError("a sink answers with counters and no batches: Client.sink")
        return pa.Table.from_batches(batches, schema)

    async def to_table(self) -> pa.Table:
        """``read_all``, by the name that data frames have for it."""
        return await self.read_all()

    async def to_pandas(self, **options: Any) -> Any:
        """``read_all`` as a DataFrame of pandas, the extra ``pandas``.

        ``options``: those of ``pyarrow.Table.to_pandas``. Raises ConfigError without pandas.
        """
        return await apart(to_pandas, await self.read_all(), options)

    async def to_polars(self) -> Any:
        """``read_all`` as a DataFrame of Polars, the extra ``polars``.

        Raises ConfigError without Polars.
        """
        return await apart(to_polars, await self.read_all())

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        """Raises LocalProtocolError: what reads a stream of Arrow cannot await answers."""
        raise LocalProtocolError(
            "an aqueduct.Stream is awaited, and a library that takes Arrow streams cannot do that: "
            "give it the Table of `await stream.read_all()`, or the stream of a SyncClient"
        )

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> pa.RecordBatch:
        if self._spins >= _SPINS:  # let others have the loop, whatever comes in
            self._spins = 0
            await asyncio.sleep(0)
        # From here to the end nothing is awaited with a payload in hand: a reader that is
        # cancelled loses none.
        call = self._call or await self._started()
        answers, feeding = call.answers, self._feeding
        if call.decoding is not None:
            return await self._decoded(call, call.decoding)
        while True:
            if self._peeked is None:
                batch = answers.next_batch()
                feeding.wake()
                if batch is not None:
                    self._spins += 1
                    return batch
            payload, self._peeked = self._peeked, None
            if payload is None and (
                call.over
                or (not answers.quiet and (answers.holds_payload or call.readable.readable))
            ):
                payload = await self._take(call)
            if payload is not None:
                break
            if call.opening is not None:
                await self._wait(call)
                continue
            if (waiter := call.wait_answer()) is not None:  # as in _wait, without a coroutine more
                try:
                    await waiter
                finally:
                    call.set_waiting(False)
            self._spins = 0
        if payload is END:
            self._give_back(call)
            await self._stop_feeding()
            raise StopAsyncIteration
        self._spins += 1
        if type(payload) is FailedBatch:
            raise payload.error
        if self._decoder is None:
            self._decoder = call.decoder()
            call.answers.read_by(self._decoder.reader)
        if self._decoder.unpacks or self._decoder.slow(payload):
            call.decoding = decode_later(
                self._decoder,
                payload,
                answers.lease,
                partial(self._decoder.decode, payload),
                call.config.timing.stall_deadline,
                id(asyncio.current_task()),
            )
            return await self._decoded(call, call.decoding)
        try:
            return self._decoder.decode(payload)
        except AqueductError as error:
            call.fail(error)
            await self._stop_feeding()
            raise

    async def _decoded(
        self, call: ClientCall, decoding: asyncio.Task[pa.RecordBatch]
    ) -> pa.RecordBatch:
        """The answer that is being decoded. A reader that is cancelled finds it the next time."""
        await asyncio.wait((decoding,))
        call.decoding = None
        try:
            if call.error is not None:  # it failed meanwhile, or was closed
                raise call.error
            batch = decoding.result()
        except BaseException as error:
            call.fail(error)
            await self._stop_feeding()
            raise
        return batch

    async def aclose(self) -> None:
        """Abandons the call, unless it is over: the handler is told to stop."""
        call, late = self._call, self._late
        if call is not None:
            call.fail(abandoned(call.peer, call.head.handler))
            self._give_back(call)
            await self._stop_feeding()
        elif late is not None and self._opening is not None and not self._opening.done():
            self._error = late.abandoned()
            self._opening.cancel()
            await asyncio.wait((self._opening,))

    def __repr__(self) -> str:
        call = self._call
        if call is None:  # it is being made, or never was
            return stream_text(self, "", "", self._error)
        return stream_text(self, call.head.handler, call.peer, call.error)

    async def __aenter__(self) -> Stream:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

    def __del__(self) -> None:
        call = getattr(self, "_call", None)
        if call is None or call.over:
            return
        try:
            call.loop.call_soon_threadsafe(_drop, call, self._feeder)
        except RuntimeError:  # the loop is closed, and the connection with it
            if call.pull is not None:
                call.pull.end()

    # Within

    async def _started(self) -> ClientCall:
        """The call, when it is made. Raises why it is not."""
        if self._call is None:
            opening = self._opening
            assert opening is not None
            await asyncio.wait((opening,))  # which a reader that is cancelled does not cancel
            if self._call is None:
                assert self._error is not None
                raise self._error
        return self._call

    async def _open(self, late: LateCall) -> None:
        """Makes a late call."""
        try:
            self._begin(*await late.open())
        except BaseException as error:
            self._error = self._error or error
            await late.close()
            if not isinstance(error, Exception):
                raise

    def _give_back(self, call: ClientCall) -> None:
        """The reader is done with its last batch, and asks for no other."""
        lease = call.answers.lease
        if lease is not None:
            lease.give_back()

    async def _take(self, call: ClientCall) -> Any:
        try:
            found = call.take()
        except BaseException:
            await self._stop_feeding()
            raise
        self._feeding.wake()
        return found

    async def _wait(self, call: ClientCall) -> None:
        if call.opening is not None:
            await call.opening.settled()
            return
        waiter = call.wait_answer()
        if waiter is not None:
            try:
                await waiter
            finally:
                call.set_waiting(False)

    def _begin(self, source: Batches | None, start: Start) -> None:
        """Makes the call, sends what can be sent without waiting, and leaves the rest to a task."""
        self._source = source
        call = self._call = start(self._feeding.wake)
        if source is None:
            return
        call.wait_for_room(self._sizes)
        batches = source.batches
        try:
            if not hasattr(batches, "__aiter__"):
                batches = iter(batches)
                if call.sender.feed(source, batches, _SPINS):
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


def _drop(call: ClientCall, feeder: asyncio.Task[None] | None) -> None:
    """A Stream was dropped before its end."""
    call.fail(abandoned(call.peer, call.head.handler))
    if feeder is not None:
        feeder.cancel()


async def _feed(call: ClientCall, source: Batches, batches: Any, feeding: SendWaker) -> None:
    """Sends batches as there is room. What the iterable raises becomes the error of the call."""
    sender = call.sender
    try:
        await _give_slow(sender, source)
        if hasattr(batches, "__aiter__"):
            iterator = aiter(batches)
            try:
                while True:
                    while not sender.may_send:
                        await feeding.wait(sender, call.loop, call.connection.pump)
                    if call.over:
                        return
                    call.supplying = True
                    if call.pull is not None:
                        PULLING.set(call.pull)
                    try:
                        batch = await anext(iterator)
                    except StopAsyncIteration:
                        break
                    finally:
                        call.supplying = False
                    sender.give(source, batch)
                    del batch  # while the next one waits for room
                    await _give_slow(sender, source)
                    call.expect_answer()
            finally:
                if hasattr(iterator, "aclose"):
                    await iterator.aclose()
            call.finish()
            return
        while True:
            while not sender.may_send:
                await feeding.wait(sender, call.loop, call.connection.pump)
            if call.over:
                return
            done = sender.feed(source, batches, _SPINS)
            await _give_slow(sender, source)
            if done is False and not call.over:  # whatever comes from here on wakes it
                waiter = feeding.wait(sender, call.loop, call.connection.pump)
                call.expect_answer()
                await waiter
                continue
            call.expect_answer()
            if done:
                return
            await asyncio.sleep(0)
    except asyncio.CancelledError:
        raise
    except BaseException as error:  # noqa: BLE001  an iterable may raise anything
        call.fail(error)


async def _give_slow(sender: BatchSender, source: Batches) -> None:
    """Sends the batch that takes long to encode, if there is one."""
    batch, sender.slow = sender.slow, None
    if batch is not None:
        encoded = await apart(source.encode, batch)
        sender.give_encoded(encoded)
