"""The client's batches of one call, as runners take them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from aqueduct._speedups.calls.batch_receiver import InputReceiver
from aqueduct._speedups.channels.receiver import MemoryLease, ReceiveQueue
from aqueduct.endpoint import Receiver
from aqueduct.errors import (
    AqueductError,
    BadCall,
    BatchTooLarge,
    Busy,
    CallError,
    Finished,
)
from aqueduct.rpc.fragments import Assembler
from aqueduct.rpc.keys import BATCH, FRAGMENT
from aqueduct.rpc.unpacking import await_room, decode_later
from aqueduct.service.call_connection import CallConnection
from aqueduct.service.context import Call, no_memory

if TYPE_CHECKING:
    from aqueduct.service.call_output import CallOutput
    from aqueduct.service.waiting_room import Ticket

__all__ = ["CallInput"]

_SMALL: Final = 16 << 10
_MARK_BATCHES: Final = 32
_MARK_BYTES: Final = 4 << 20


class CallInput:
    """Batches that come by a channel, one batch that came with the call, or none at all.

    A runner takes batches by ``batches.next_batch``, and payloads by ``take``: it has what
    ``next_batch`` leaves to it, and the end. Each batch is answered by what leaves by ``output``;
    a settled mark tells the client of batches without an answer.
    """

    def __init__(
        self,
        call: Call,
        connection: CallConnection,
        batches: InputReceiver,
        output: CallOutput,
        receiver: Receiver | None = None,
        payload: memoryview | None = None,
    ) -> None:
        self.batches = batches
        """Takes, counts and reads what comes as nearly every batch does."""
        self.receiver = receiver
        """Where they come; None if they do not come by a channel."""
        self.over = receiver is None and payload is None
        """Whether nothing more will come."""
        self.fault: AqueductError | None = None
        """The error in the client's batches, whatever the handler makes of it."""
        self.waits_for_client = False
        """Whether the handler can do nothing: it wants a batch, or room for one."""
        self.lease: Any = None
        """What the batch that came with the call is charged: a MemoryLease until it is taken, or
        another object with ``give_back`` until the call ends. None: nothing."""
        self.ticket: Ticket | None = None
        """What the call has in the waiting room of its handler, if that has one."""
        self.decoder: Any
        """A Decoder, or another object with its methods."""
        self._call = call
        self._connection = connection
        self._output = output
        self._payload = payload
        self._limit = connection.config.calls.batch_limit
        self._patience = connection.config.timing.stall_deadline
        self._decoding: asyncio.Task[pa.RecordBatch] | None = None
        self._waited = (0, 0)  # batches and bytes that had come when the handler waited last
        self._marking = False  # whether it is looked at soon if a mark is due
        self._assembler: Assembler | None = None
        self._queue: ReceiveQueue | None = None  # of ``receiver``
        if receiver is not None:
            self._assemble(receiver)

    def _assemble(self, receiver: Receiver) -> None:
        call, connection = self._call, self._connection
        assembler = self._assembler = Assembler(
            self._limit,
            where=f"the input of handler {call.handler!r}",
            peer=call.peer,
            handler=call.handler,
        )
        receiver.placement, receiver.placement_key = assembler.place, FRAGMENT
        receiver.announce = assembler.announce
        queue = self._queue = receiver.queue
        assert queue is not None
        queue.keeps = queue.told = True
        receiver.end_patiently()  # the end of the call often follows that of its input
        self.batches.arrive_by(queue, connection.room_came, BATCH, self._limit)

    # Taking

    @property
    def answering(self) -> int:
        """The number of the input batch that an answer made now belongs to."""
        return max(self.batches.taken - 1, 0)

    @property
    def readable(self) -> bool:
        """Whether ``take`` would give a batch, or notice an end."""
        batches, receiver = self.batches, self.receiver
        if receiver is None:
            return True
        return not batches.quiet and (batches.holds_payload or receiver.readable)

    async def wait_change(self) -> None:
        """Returns once something has come."""
        receiver = self.receiver
        if receiver is not None and (self.batches.quiet or not receiver.readable):
            await receiver.wait_change()

    def take(self) -> tuple[int, Any] | None:
        """The next batch's number and payload; None if there is none now, or ``over``.

        Raises BadCall, and what ended the channel if not its finish.
        """
        batches = self.batches
        payload = batches.take_whole()  # and ``batches.lease`` what it is charged
        if payload is not None:
            return batches.batches_in - 1, payload
        receiver, assembler = self.receiver, self._assembler
        if receiver is None or assembler is None:
            return self._take_only()
        while True:
            try:
                message = receiver.receive_nowait()
            except Finished as end:
                end.__traceback__ = None  # its frames would keep batches until a collection
                self.over = True
                if batches.partial:
                    text = f"the input ended in the middle of batch {batches.batches_in}"
                    raise self._bad(text) from None
                return None
            except AqueductError as error:
                self.over = True
                self._note(error)
                raise
            except MemoryError as error:
                self.over = True
                raise self._no_memory(error, batches.batches_in) from None
            if message is None:
                return None
            batches.moved += 1
            try:
                found = assembler.add(message.headers, message.payload)
            except CallError as error:
                self._note(error)
                raise
            except MemoryError as error:
                raise self._no_memory(error, batches.batches_in) from None
            batches.partial = found is None
            if found is None:
                continue
            number, payload = found
            due = batches.batches_in
            if number != due or not len(payload):
                text = f"batch {number} of {len(payload)} bytes came where {due} was due"
                raise self._bad(text)
            self._count(payload)
            if self._queue is not None:
                batches.lease = self._queue.lease(payload)
            return found

    def _take_only(self) -> tuple[int, Any] | None:
        """The one batch, once."""
        payload, self._payload = self._payload, None
        self.over = True
        if isinstance(self.lease, MemoryLease):
            self.batches.lease, self.lease = self.lease, None
        if payload is None:
            return None
        if len(payload) > self._limit:
            error = BatchTooLarge(
                f"the input of handler {self._call.handler!r}: batch 0 has {len(payload)} bytes, "
                f"above the limit of {self._limit} (Calls.batch_limit); send fewer rows at a time",
                peer=self._call.peer,
                handler=self._call.handler,
            )
            self._note(error)
            raise error
        self.batches.moved += 1
        self._count(payload)
        return 0, payload

    def _count(self, payload: Any) -> None:
        self.batches.batches_in += 1
        self.batches.bytes_in += len(payload)

    def take_lease(self) -> MemoryLease | None:
        """The lease of the batch that was just taken. The caller gives it back."""
        batches = self.batches
        lease, batches.lease = batches.lease, None
        return lease

    def slow(self, payload: Any) -> bool:
        """Whether ``decode`` may take milliseconds, or has to wait for room."""
        return bool(self.decoder.unpacks or self.decoder.slow(payload))

    def await_room(self, payload: Any, lease: MemoryLease | None) -> None:
        """Waits, in a thread, until there is room for what a payload unpacks to."""
        await_room(self.decoder, payload, lease, self._patience)

    def decode_later(
        self, number: int, payload: Any, lease: MemoryLease | None, reader: object
    ) -> asyncio.Task[pa.RecordBatch]:
        """``decode`` for what is ``slow``; ``lease`` is what the payload is charged.

        ``reader``: as for ``want``.
        """
        decode = partial(self.decode, number, payload)
        task = decode_later(self.decoder, payload, lease, decode, self._patience, reader)
        self._decoding = task
        return task

    def decode(self, number: int, payload: Any) -> pa.RecordBatch:
        """The batch of a payload. Of one thread at a time, in order. Raises CallErrors."""
        try:
            batch = self.decoder.decode(payload, number=number)
        except CallError as error:
            self._note(error)
            raise
        except MemoryError as error:
            raise self._no_memory(error, number) from None
        self.batches.rows_in += batch.num_rows
        return batch

    # What the receiver is told of the handler

    @property
    def at_end(self) -> bool:
        """Whether the input has ended, although the handler has not noticed yet."""
        queue = self._queue
        return (
            queue is not None and queue.ended and not len(queue) and not self.batches.holds_payload
        )

    @property
    def lacks_room(self) -> bool:
        """Whether batches wait for room in the budgets of received bytes, and the handler too."""
        queue = self._queue
        return queue is not None and bool(queue.wanted and queue.waiting)

    def want(self, wanted: bool, reader: object = None) -> None:
        """Whether the handler waits for its next batch, in the thread or task ``reader``."""
        if (queue := self._queue) is not None:
            queue.want(wanted, reader)

    def pass_on(self) -> None:
        """The handler has answered, and the client does not read that yet."""
        if (queue := self._queue) is not None:
            queue.pass_on()

    def tell(self, changed: Callable[[], None] | None) -> None:
        """``changed`` is called on the loop when something has come; None: nothing is called."""
        if self.receiver is not None:
            self.receiver.on_change = changed

    # Settled marks

    def mark(self) -> None:
        """Tells the client what the handler took without answering, so that it may go on."""
        taken = self.batches.taken  # a thread may take the next one meanwhile
        sent = self._output.batches
        if taken > sent.settled and self.receiver is not None:
            sent.settled, sent.settled_bytes = taken, self.batches.bytes_in
            self._output.mark(taken - 1)

    def mark_soon(self) -> None:
        """``mark`` unless more comes at once: a handler that is kept busy tells of many together.

        To be called when the handler waits for its input, or now and then while it does not. Then
        the client is asked for more only while others leave room for it: the handler may hold what
        it has until the client reads the answer.
        """
        batches, sent = self.batches, self._output.batches
        if (
            batches.taken - sent.settled >= _MARK_BATCHES
            or batches.bytes_in - sent.settled_bytes >= _MARK_BYTES
        ):
            if self.waits_for_client or self._queue is None or not self._queue.crowded:
                self.mark()
        elif self.waits_for_client and batches.taken > sent.settled and not self._marking:
            if self.receiver is None or self.receiver.arriving:
                return  # there will be more to take, and another wait
            self._marking = True
            # The loop reads what has come between the first turn and the second.
            loop = asyncio.get_running_loop()
            loop.call_soon(loop.call_soon, self._mark_idle, batches.taken)

    def _mark_idle(self, taken: int) -> None:
        self._marking = False
        receiver = self.receiver
        if receiver is None or not self.waits_for_client or self._output.concluded:
            return
        if self.batches.taken != taken:
            self.mark_soon()
        elif not receiver.arriving:  # or the client does not wait for it: it is sending
            self.mark()

    def expect_batch(self) -> None:
        """To be called when the handler waits for its input.

        If that is one small batch after the other, each answered, the next one often comes at once.
        """
        batches = self.batches
        (taken, size), self._waited = self._waited, (batches.taken, batches.bytes_in)
        if (
            batches.taken - taken == 1
            and self._output.batches.settled == batches.taken
            and batches.bytes_in - size <= _SMALL
        ):
            self._connection.await_answer()

    # The end

    def close(self) -> None:
        """Nothing more is wanted."""
        if self.receiver is not None and not self.over:
            self.receiver.close()

    def let_go(self) -> None:
        """The handler has ended: what it was charged is free."""
        for lease in (self.lease, self.batches.lease):
            if lease is not None:
                lease.give_back()
        self.lease = self.batches.lease = None
        if self.ticket is not None:
            self.ticket.forget()
        if self._decoding is not None:
            self._decoding.cancel()
        if self.receiver is not None:
            self.receiver.placement = self.receiver.on_change = self.receiver.announce = None
        if self._queue is not None:
            self._queue.let_go()

    def _bad(self, text: str) -> BadCall:
        error = BadCall(text, peer=self._call.peer, handler=self._call.handler)
        self._note(error)
        return error

    def _no_memory(self, error: MemoryError, number: int) -> Busy:
        """The library itself found no memory for input batch ``number``."""
        busy = no_memory(self._call, error, f"batch {number} of the input")
        self._note(busy)
        return busy

    def _note(self, error: AqueductError) -> None:
        if self.fault is None:
            self.fault = error
