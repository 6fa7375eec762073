"""What the handler of one call makes, on its way to the client."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

import pyarrow as pa

from aqueduct._speedups.calls.batch_outputs import OutputSender
from aqueduct._speedups.calls.batch_receiver import InputReceiver
from aqueduct.arrow.capsules import fitted
from aqueduct.arrow.compression import compress
from aqueduct.arrow.encode import Encoded
from aqueduct.arrow.sizes import batch_bytes
from aqueduct.endpoint.accounts import LARGE, Reservation
from aqueduct.errors import AqueductError, BatchTooLarge
from aqueduct.escaping import logger_of
from aqueduct.rpc.deadline import ThreadWakeup
from aqueduct.rpc.fragments import batch_headers, fragments
from aqueduct.rpc.keys import ALIVE, BATCH, Headers
from aqueduct.rpc.unary import ANSWERS_LIMIT
from aqueduct.service.call_connection import AnswerSender, CallConnection
from aqueduct.service.context import Call, no_memory
from aqueduct.service.handlers import answer_batch

__all__ = ["AnswerBuffer", "CallOutput"]

log = logger_of(__name__)


class AnswerBuffer:
    """Answers that are to leave in one message, with the status of their call."""

    __slots__ = ("answers", "prefix", "room", "size")

    def __init__(self, room: int) -> None:
        self.answers: list[Encoded] = []
        self.room: Final = room
        """Bytes that fit the message."""
        self.size = 0
        self.prefix = b""

    def begin(self, prefix: bytes) -> None:
        """The message begins with ``prefix``."""
        self.prefix, self.size = prefix, len(prefix)

    def add(self, encoded: Encoded) -> bool:
        """Keeps an answer; False if it does not fit."""
        size = self.size + encoded.size
        if size > self.room or len(self.answers) >= ANSWERS_LIMIT:
            return False
        self.answers.append(encoded)
        self.size = size
        return True


class CallOutput:
    """Sends answers by a channel, or keeps them in a buffer while they fit one message.

    A runner sends batches by ``batches.give``, and what that leaves by ``encode`` and ``send``.
    """

    def __init__(
        self,
        call: Call,
        connection: CallConnection,
        inputs: InputReceiver,
        sizes: dict[str, int],
        sender: AnswerSender | None,
    ) -> None:
        """``sizes``: bytes of large answers, by handler."""
        self.sender = sender
        """Where answers go; None while they are kept in a buffer."""
        self._inputs = inputs
        self.batches = OutputSender(inputs)
        """Sends and counts what leaves as nearly every answer does."""
        self.encoder: Any
        """An Encoder, or another object with its methods."""
        self.compression = ""
        """What was agreed with the client."""
        self.as_completed = False
        """Whether the answers go as they are made: the client asks for it and the handler can."""
        self.failures = False
        """Whether a failed batch is answered, and the call goes on."""
        self.concluded = False
        """Whether the status was sent."""
        self._call = call
        self._connection = connection
        self._sizes = sizes
        self.credit: Callable[[], int] | None = None
        """How many answers may have been made in all, for any thread; None: there is no bound."""
        self.patient: Callable[[], bool] | None = None
        """Whether the call may stand still now, for as long as it likes; None: never."""
        self.expected = 0
        """Bytes of an answer of the handler's last call, if those were large; else 0."""
        self._buffer: AnswerBuffer | None = None
        self._spill: Callable[[], None] | None = None
        self._limit = connection.config.calls.batch_limit
        self.fragment_bytes = connection.config.calls.fragment_bytes
        """Larger answers leave in several messages."""
        self._on_change: Callable[[], None] | None = None
        self._rooms: list[Reservation] = []  # that was asked for answers
        self._room: tuple[Reservation, ThreadWakeup] | None = None

    def keep(self, buffer: AnswerBuffer, spill: Callable[[], None]) -> None:
        """Answers are kept in ``buffer``; once they do not fit, ``spill`` calls ``use``."""
        self._buffer, self._spill = buffer, spill

    def start(self, payload: Any, headers: Headers) -> None:
        """Sends the accept message; answers follow it."""
        assert self.sender is not None
        self.sender.post(payload, headers)
        self.use(self.sender)

    def use(self, sender: AnswerSender) -> None:
        """Answers go there from now on."""
        self.sender = sender
        sender.on_change = self._on_change
        if not self.compression:
            most = min(self.fragment_bytes, self._limit)
            self.batches.leave_by(sender.row, BATCH, most, self._connection.pump.flush_soon)

    # Room

    @property
    def writable(self) -> bool:
        """Whether there is room for an answer."""
        return self.sender is None or self.sender.writable

    @property
    def queued(self) -> int:
        """Bytes that have not left."""
        return 0 if self.sender is None else self.sender.queued

    @property
    def error(self) -> Exception | None:
        """How the channel ended; None while it lives."""
        return None if self.sender is None else self.sender.error

    async def wait_writable(self) -> None:
        """Returns once there is ample room, or the channel has ended."""
        if self.sender is not None:
            await self.sender.wait_writable(ample=True)

    def notify_writable(self) -> None:
        """Asks for one call of what ``tell`` was given once there is ample room."""
        if self.sender is not None:
            self.sender.notify_writable(ample=True)

    def tell(self, changed: Callable[[], None]) -> None:
        """``changed`` is called on the loop when there is room, or the channel has ended."""
        self._on_change = changed
        if self.sender is not None:
            self.sender.on_change = changed

    @property
    def expects(self) -> int:
        """Bytes of the next answer, if it is likely to be a large one; else 0."""
        largest = self.batches.largest_out
        return largest if largest >= LARGE else self.expected

    def room(
        self, wake: Callable[[], object], ready: Callable[[], bool] = lambda: True
    ) -> Reservation:
        """Room for answers before they are made; see Reservation for the arguments."""
        connection = self._connection
        found = connection.sending.reservation(
            connection.core.outgoing, lambda: self.queued, wake, ready
        )
        self._rooms.append(found)
        return found

    @property
    def lacks_room(self) -> bool:
        """Whether the next answer waits for room in the budgets of sent bytes."""
        return any(room.waits for room in self._rooms)

    async def wait_room(
        self, tell: Callable[[Callable[[], None] | None], None], *, again: bool = False
    ) -> None:
        """Returns once there is room for the next answer, for a handler on the event loop.

        ``tell``: of its input. ``again``: it has answered before.
        """
        if self._room is None:
            signal, inputs = ThreadWakeup(), self._inputs
            self._room = self.room(signal.set_threadsafe, lambda: not inputs.quiet), signal
        room, signal = self._room
        if room.ask(self.expects, again=again):
            return
        tell(signal.set)
        try:
            while room.waits:
                await signal.wait()
                room.retry()
        finally:
            tell(None)

    def answered(self) -> None:
        """The answer for which ``wait_room`` was called is queued."""
        if self._room is not None:
            self._room[0].release()

    # Sending

    def encode(self, batch: Any) -> Encoded:
        """What the handler made. Of one thread at a time, in order; raises CallErrors."""
        call = self._call
        if not isinstance(batch, pa.RecordBatch):
            batch = self._batch_of(batch)
        try:
            encoded = self.encoder.encode(batch)
            if encoded.size > self._limit:
                raise BatchTooLarge(
                    f"the output of handler {call.handler!r}: a batch of {encoded.size} bytes is "
                    f"above the limit of {self._limit} (Calls.batch_limit); yield fewer rows at a "
                    "time",
                    peer=call.peer,
                    handler=call.handler,
                )
            self.batches.rows_out += batch.num_rows
            return compress(encoded, self.compression) if self.compression else encoded
        except MemoryError as error:
            raise no_memory(call, error, f"an answer of {batch_bytes(batch)} bytes") from None

    def _batch_of(self, made: Any) -> pa.RecordBatch:
        """Another library's table as one batch."""
        batch = answer_batch(made, self._call.handler)
        wanted = getattr(self.encoder, "schema", None)
        return fitted(batch, wanted) if isinstance(wanted, pa.Schema) else batch

    def slow(self, batch: Any) -> bool:
        """Whether ``encode`` may take milliseconds: it then belongs in a thread."""
        return bool(self.encoder.slow(batch, self.compression))

    def send(self, encoded: Encoded, number: int) -> None:
        """Sends an answer to input batch ``number``, whether or not there is room."""
        size = encoded.size
        if self.sender is None:
            assert self._buffer is not None and self._spill is not None
            if not self._buffer.add(encoded):
                self._spill()
                for answer in self._buffer.answers:
                    self._post(answer, 0)
                self._post(encoded, number)
        else:
            self._post(encoded, number)
        self.batches.count(number, size)
        if size >= LARGE:
            self._sizes[self._call.handler] = max(size, self._sizes.get(self._call.handler, 0))

    def _post(self, encoded: Encoded, number: int) -> None:
        sender = self.sender
        assert sender is not None
        if encoded.size <= self.fragment_bytes:
            sender.post(encoded.buffers, ((BATCH, b"%d" % number),))
            return
        for headers, payload in fragments(encoded, number, self.fragment_bytes):
            sender.post(payload, headers)
        if (row := sender.row) is not None:
            row.end_batch()

    def post(self, payload: Any, headers: Headers) -> None:
        """Sends a message that is no answer, if there is a channel for it."""
        if self.sender is not None:
            self.sender.post(payload, headers)

    def tell_alive(self) -> None:
        """Tells the client that its call waits for its turn, and is not stuck."""
        if self.concluded:
            return
        buffer, spill = self._buffer, self._spill
        with suppress(AqueductError):  # the client has gone in this very moment
            if self.sender is None and spill is not None and buffer is not None:
                if buffer.answers:
                    return
                spill()  # one message alone cannot say it
            if self.writable:
                self.post(b"", ((ALIVE, b"1"),))

    def mark(self, number: int) -> None:
        """Tells the client that the input is settled up to batch ``number``."""
        self.post(b"", batch_headers(number))

    # The end

    def finish(self) -> None:
        """No answer follows."""
        if self.sender is not None and self.sender.error is None:
            self.sender.finish()

    async def linger(self, progress: float) -> None:
        """Returns once the client has read most of what was sent.

        Or when it has read nothing of it for ``progress`` seconds.
        """
        sender = self.sender
        assert sender is not None
        queued = sender.queued
        while queued:
            try:
                async with asyncio.timeout(progress):
                    await sender.wait_closed()
                    return
            except TimeoutError:
                if sender.queued == queued:
                    log.info("%r: the client does not read what was answered; gave up", self._call)
                    sender.cancel()
                    return
                queued = sender.queued
            except (AqueductError, asyncio.CancelledError):
                return

    def let_go(self) -> None:
        """The handler has ended, and waits for no room."""
        for room in self._rooms:
            room.end()
        self._rooms.clear()
        self._spill = self._on_change = None  # which know the call
        handler, batches = self._call.handler, self.batches
        if batches.largest_out >= LARGE:
            self._sizes[handler] = batches.largest_out
        elif self.expected and batches.batches_out:
            self._sizes.pop(handler, None)
        if self.sender is not None:
            self.sender.on_change = None
