"""One call in the service: accepted or refused, worked on by a driver, ended by a status.

Whatever happens, the order of the end is the same: the channel of the answers is finished, then
the status is sent. The client reads the answers to their end before it believes the status.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from aqueduct._speedups.calls.batch_outputs import OutputSender
from aqueduct._speedups.channels.receiver import MemoryLease
from aqueduct.arrow.compression import compress
from aqueduct.arrow.decode import Decoder
from aqueduct.arrow.encode import Encoded, Encoder
from aqueduct.arrow.ipc import is_wide
from aqueduct.arrow.schema import check, check_expected
from aqueduct.endpoint import Connection, Receiver, Responder, Sender
from aqueduct.endpoint.accounts import LARGE, Reservation
from aqueduct.errors import (
    AqueductError,
    BadCall,
    BatchTooLarge,
    Busy,
    CallError,
    Cancelled,
    ChannelError,
    ConnectionLost,
    DeadlineExceeded,
    Finished,
    HandlerFailed,
    Refused,
)
from aqueduct.escaping import logger_of
from aqueduct.rpc.deadline import Wakeup
from aqueduct.rpc.fragments import Assembler, batch_headers, pieces
from aqueduct.rpc.keys import BATCH, PIECE, Headers
from aqueduct.rpc.request import (
    AS_COMPLETED,
    FAILURES,
    IDEMPOTENT,
    ONE_TO_ONE,
    Accepted,
    CallHead,
)
from aqueduct.rpc.status import CANCELLED, OK, Status
from aqueduct.rpc.threads import apart
from aqueduct.service.context import Call
from aqueduct.service.handlers import Handler, handler_failed

if TYPE_CHECKING:
    from aqueduct.service.server import RunningService
    from aqueduct.service.telemetry import Observation

__all__ = ["COUNTED", "ServerCall"]

log = logger_of(__name__)

COUNTED: Final = ("batches_in", "rows_in", "bytes_in", "batches_out", "rows_out", "bytes_out")
"""What a call counts, and a service sums up."""

_LINGER_FROM: Final = 64 << 10
_SMALL: Final = 16 << 10
_MARK_BATCHES: Final = 32
_MARK_BYTES: Final = 4 << 20


class ServerCall(OutputSender):
    """One call, from its message to its status. Lives on the service's event loop.

    A driver takes batches by ``next_batch``, and payloads by ``take``, which has those that
    ``next_batch`` leaves to it, and their end. It sends batches by ``give``, or what that leaves to
    it by ``send``; see ``drivers`` and ``bridge`` for the two families.
    """

    # What a call begins with: most never change most of it.
    accepted = False
    """Whether the hello was sent."""
    waits_for_client = False
    """Whether the handler can do nothing: it wants a batch, or room for one."""
    concluded = False
    as_completed = False
    """Whether the answers go as they are made: the client wishes it and the handler can."""
    failures = False
    """Whether a failed batch is answered, and the call goes on."""
    observation: Observation | None = None
    """What the service's telemetry keeps of the call, once it is accepted."""
    _fault: AqueductError | None = None  # of the input, whatever the handler makes of it
    _handler: Handler | None = None
    compression = ""
    """What was agreed with the client."""
    _waited = (0, 0)  # batches and bytes that had come when the handler waited last
    _marking = False  # whether it is looked at soon if a mark is due
    _timer: asyncio.TimerHandle | None = None  # of the client's deadline
    _assembler: Assembler | None = None
    expects = 0
    """Bytes of the next answer, if it is likely to be a large one; else 0."""
    _room: tuple[Reservation, Wakeup] | None = None
    _is_over = False
    _since = 0.0  # when it moved last, as far as was noticed
    _seen: tuple[int, ...] = (0, 0, 0, 0, 0, False, 0)  # what ``_progress`` said then

    def __init__(
        self,
        serving: RunningService,
        connection: Connection,
        head: CallHead,
        receiver: Receiver | None,
        output: Sender,
        status: Sender | Responder,
        number: int,
    ) -> None:
        self.serving = serving
        self.connection = connection
        self.config = connection.config
        self._cut = connection.config.calls.cut
        self.head = head
        self.receiver = receiver
        """The client's batches; None for a source."""
        self.output = output
        """The hello and the handler's batches; for a sink, the hello and marks."""
        self.decoder: Decoder
        self.encoder: Encoder
        self.hello: tuple[Headers, list[bytes]]
        self.call = Call(connection, head, number)
        self.rooms: list[Reservation] = []
        """Room that was asked for answers."""
        self.input_over = receiver is None
        self.stop: Callable[[], None] | None = None
        """How the driver ends the handler; None: by cancelling the task."""
        self._status: Any = status
        if receiver is not None and status.__class__ is not Responder:  # or its one batch is here
            self._assemble(receiver)
        status.on_change = self._status_changed
        self.task: asyncio.Task[None]

    def _assemble(self, receiver: Receiver) -> None:
        self._assembler = Assembler(
            self.config.calls.batch_limit,
            where=f"the input of handler {self.head.handler!r}",
            peer=self.connection.peer,
            handler=self.head.handler,
        )
        receiver.placement, receiver.placement_key = self._assembler.place, PIECE
        receiver.announce = self._assembler.announce
        assert receiver.inbox is not None
        receiver.inbox.keeps = receiver.inbox.told = True
        self.connection.patient(
            receiver.inbox
        )  # the end of the call often follows that of its input
        limit = self.config.calls.batch_limit
        self.arrive_by(receiver.inbox, self.connection.room_came, BATCH, limit)

    # What drivers use

    @property
    def handler(self) -> Handler:
        """The handler, once the service has found it."""
        assert self._handler is not None
        return self._handler

    @property
    def has_handler(self) -> bool:
        """Whether it was found, and so holds one of its places."""
        return self._handler is not None

    def take(self) -> tuple[int, Any] | None:
        """The next batch's number and payload; None if there is none now, or ``input_over``.

        Raises BadCall, and what ended the channel if not its finish.
        """
        payload = self.take_whole()  # and ``lease`` what it is charged
        if payload is not None:
            return self.batches_in - 1, payload
        receiver, assembler = self.receiver, self._assembler
        assert receiver is not None and assembler is not None
        while True:
            try:
                message = receiver.receive_nowait()
            except Finished as end:
                end.__traceback__ = None  # its frames would keep batches until a collection
                self.input_over = True
                if self.partial:
                    text = f"the input ended in the middle of batch {self.batches_in}"
                    raise self._bad(text) from None
                return None
            except AqueductError as error:
                self.input_over = True
                self._note(error)
                raise
            except MemoryError as error:
                self.input_over = True
                raise self._no_input_memory(error, self.batches_in) from None
            if message is None:
                return None
            self.moved += 1
            try:
                found = assembler.add(message.headers, message.payload)
            except CallError as error:
                self._note(error)
                raise
            except MemoryError as error:
                raise self._no_input_memory(error, self.batches_in) from None
            self.partial = found is None
            if found is None:
                continue
            number, payload = found
            if number != self.batches_in or not len(payload):
                due = self.batches_in
                text = f"batch {number} of {len(payload)} bytes came where {due} was due"
                raise self._bad(text)
            self.batches_in += 1
            self.bytes_in += len(payload)
            if receiver.inbox is not None:
                self.lease = receiver.inbox.lease(payload)
            return found

    def grew(self, size: int) -> None:
        """Notes the largest answer so far: the next one waits for as much room."""
        if size >= LARGE:
            self.expects = size
            sizes = self.serving.sizes
            sizes[self.head.handler] = max(size, sizes.get(self.head.handler, 0))

    def room(self, wake: Callable[[], None]) -> Reservation:
        """Room for answers before they are made; ``wake`` is called in any thread."""
        connection = self.connection
        found = connection.sending.reservation(
            connection.core.outgoing, lambda: int(self.output.queued), wake
        )
        self.rooms.append(found)
        return found

    @property
    def at_end(self) -> bool:
        """Whether the input has ended, although the handler has not noticed yet."""
        inbox = None if self.receiver is None else self.receiver.inbox
        return (
            inbox is not None
            and inbox.error is not None
            and not inbox.queue
            and not self.holds_payload
        )

    async def wait_room(self, *, again: bool = False) -> None:
        """Returns once there is room for the next answer, for a handler on the event loop.

        ``again``: it has answered before.
        """
        if self._room is None:
            signal, loop = Wakeup(), asyncio.get_running_loop()

            def wake() -> None:
                try:
                    loop.call_soon_threadsafe(signal.set)
                except RuntimeError:  # the loop is closed
                    pass

            self._room = self.room(wake), signal
        room, signal = self._room
        if room.ask(self.expects, again=again):
            return
        while room.waits:
            await signal.wait()

    def answered(self) -> None:
        """The answer for which ``wait_room`` was called is queued."""
        if self._room is not None:
            self._room[0].release()

    def want(self, wanted: bool, reader: object = None) -> None:
        """Whether the handler waits for its next batch, in the thread or task ``reader``."""
        if self.receiver is not None and self.receiver.inbox is not None:
            self.receiver.inbox.want(wanted, reader)

    def pass_on(self) -> None:
        """The handler has answered, and the client does not read that yet."""
        if self.receiver is not None and self.receiver.inbox is not None:
            self.receiver.inbox.pass_on()

    def take_lease(self) -> MemoryLease | None:
        """The lease of the batch that was just taken. The caller gives it back."""
        lease, self.lease = self.lease, None
        return lease

    def decode(self, number: int, payload: Any, lease: MemoryLease | None = None) -> pa.RecordBatch:
        """The batch of a payload. Of one thread at a time, in order. Raises CallErrors.

        ``lease`` is what the payload is charged; what it unpacks to is charged there too.
        """
        grow = None if lease is None else lease.grow
        try:
            batch = self.decoder.decode(payload, number=number, grow=grow)
        except CallError as error:
            self._note(error)
            raise
        except MemoryError as error:
            raise self._no_input_memory(error, number) from None
        self.rows_in += batch.num_rows
        return batch

    def encode(self, batch: Any) -> Encoded:
        """What the handler made. Of one thread at a time, in order; raises CallErrors."""
        if not isinstance(batch, pa.RecordBatch):
            name = type(batch).__name__
            detail = f"a pyarrow.RecordBatch is wanted, got {name}" + (
                "; a Table gives its batches by to_batches()" if name == "Table" else ""
            )
            text = f"the output of handler {self.call.handler!r}: {detail}"
            raise HandlerFailed(text, kind="TypeError", detail=detail)
        try:
            return self._encoded(batch)
        except MemoryError as error:
            raise self._no_memory(error, f"an answer of {batch.nbytes} bytes") from None

    def _encoded(self, batch: pa.RecordBatch) -> Encoded:
        encoded = self.encoder.encode(batch)
        limit = self.config.calls.batch_limit
        if encoded.size > limit:
            raise BatchTooLarge(
                f"the output of handler {self.call.handler!r}: a batch of {encoded.size} bytes is "
                f"above the limit of {limit} (Calls.batch_limit); yield fewer rows at a time",
                peer=self.call.peer,
                handler=self.call.handler,
            )
        self.rows_out += batch.num_rows
        if self.compression:
            return compress(encoded, self.compression)
        return encoded

    def slow_to_decode(self, payload: Any) -> bool:
        """Whether ``decode`` may take milliseconds: it then belongs in a thread."""
        return self.decoder.slow(payload)

    def slow_to_encode(self, batch: Any) -> bool:
        """Whether ``encode`` may take milliseconds: it then belongs in a thread."""
        encoder = self.encoder
        return encoder is not None and encoder.slow(batch, self.compression)

    def send(self, encoded: Encoded, number: int) -> None:
        """Sends an answer to input batch ``number``, whether or not there is room."""
        output = self.output
        if encoded.size <= self._cut:
            output.post(encoded.buffers, ((BATCH, b"%d" % number),))
        else:
            for headers, payload in pieces(encoded, number, self._cut):
                output.post(payload, headers)
            if (row := output.row) is not None:
                row.end_batch()
        self.count(number, encoded.size)

    def report(self, error: BaseException, number: int) -> bool:
        """Answers input batch ``number`` with a failure, if the client wishes; else False.

        And if it is that batch alone that failed.
        """
        if not self.failures or self.call.cancelled:
            return False
        status = self._failure(error, number)
        if status.code == CANCELLED:
            return False
        log.info("%r: batch %d failed: %s", self.call, number, status.message)
        (said,), payload = status.encode()
        self.output.post(b"".join(payload), (*batch_headers(number), said))
        self.moved += 1
        return True

    def mark(self) -> None:
        """Tells the client what the handler took without answering, so that it may go on."""
        taken = self.taken  # a thread may take the next one meanwhile
        if taken > self._settled and self.receiver is not None:
            self._settled, self._settled_bytes = taken, self.bytes_in
            self.output.post(b"", batch_headers(taken - 1))

    def mark_soon(self) -> None:
        """``mark`` unless more comes at once: a handler that is kept busy tells of many together.

        To be called when the handler waits for its input, or now and then while it does not.
        """
        if (
            self.taken - self._settled >= _MARK_BATCHES
            or self.bytes_in - self._settled_bytes >= _MARK_BYTES
        ):
            self.mark()
        elif self.waits_for_client and self.taken > self._settled and not self._marking:
            if self.receiver is None or self.receiver.arriving:
                return  # there will be more to take, and another wait
            self._marking = True
            # The loop reads what has come between the first turn and the second.
            loop = asyncio.get_running_loop()
            loop.call_soon(loop.call_soon, self._mark_idle, self.taken)

    def expect_batch(self) -> None:
        """To be called when the handler waits for its input.

        If that is one small batch after the other, each answered, the next one often comes at once.
        """
        (taken, size), self._waited = self._waited, (self.taken, self.bytes_in)
        if (
            self.taken - taken == 1
            and self._settled == self.taken
            and self.bytes_in - size <= _SMALL
        ):
            self.connection.await_answer()

    def _mark_idle(self, taken: int) -> None:
        self._marking = False
        receiver = self.receiver
        if receiver is None or not self.waits_for_client or self.concluded:
            return
        if self.taken != taken:
            self.mark_soon()
        elif not receiver.arriving:  # or the client does not wait for it: it is sending
            self.mark()

    @property
    def answering(self) -> int:
        """The number of the input batch that an answer made now belongs to."""
        return self.taken - 1 if self.taken else 0

    @property
    def input_fault(self) -> AqueductError | None:
        """The error in the client's batches, or None."""
        return self._fault

    # From outside

    def abort(self, reason: AqueductError) -> None:
        """Ends the call: the handler is stopped and the client, if it is there, learns why."""
        if self._is_over:
            return
        self.call._cancel(reason)
        self.conclude(reason)
        if self.stop is not None:
            self.stop()
        else:
            self.task.cancel()

    def counters(self) -> dict[str, int]:
        """What was moved so far."""
        return {name: getattr(self, name) for name in COUNTED}

    def add_counters(self, counted: Counter[str]) -> None:
        """Adds what was moved; most calls move one way, or little."""
        if self.batches_in:
            counted["batches_in"] += self.batches_in
            counted["rows_in"] += self.rows_in
            counted["bytes_in"] += self.bytes_in
        if self.batches_out:
            counted["batches_out"] += self.batches_out
            counted["bytes_out"] += self.bytes_out
        if self.rows_out:
            counted["rows_out"] += self.rows_out

    def cancel_handler(self, error: BaseException) -> None:
        """The call failed while a handler is still at work in some thread: it is told."""
        if not isinstance(error, AqueductError):
            error = Cancelled("the call failed elsewhere")
        self.call._cancel(error)

    def catch_up(self) -> None:
        """Looks for what happened before the call began: its client may have gone."""
        self._status_changed()

    def alive(self) -> None:
        """The client's application is at work: a call that waits for it is not stuck."""
        if self.waits_for_client:
            self.moved += 1

    # The life of a call

    async def run(self) -> None:
        """The call from its acceptance to its status; started once, by a Starter."""
        error: BaseException | None = None
        counters: Mapping[str, int] | None = None
        try:
            drive = await self._open()
            counters = await drive(self)
        except asyncio.CancelledError as caught:
            error = self.call.reason
            if error is None and self.task.cancelling():
                text = f"the service {self.serving.service.name!r} is ending"
                names = {"peer": self.call.peer, "handler": self.call.handler}
                error = Refused(text, draining=True, **names)
            error = error or caught  # some task of the handler's own was cancelled
        except BaseException as caught:  # noqa: BLE001  a handler may raise anything
            error = caught
        if not self.concluded:
            self.conclude(self._fault or error, counters)
            if self.output.queued > _LINGER_FROM:
                await self._linger()

    async def _open(self) -> Callable[[ServerCall], Awaitable[Mapping[str, int] | None]]:
        """Everything that may refuse the call, then the hello. Returns the driver's work."""
        call, head, serving = self.call, self.head, self.serving
        watches, deadline = serving.watches, head.deadline
        if deadline is None:
            self._since = watches.time()
            watches.add(self)
        else:
            self._timer = watches.loop.call_later(deadline, self._expired, deadline)
        if serving.service.authorize is not None:
            await serving.authorize(call)
        handler = self._handler = serving.handler(head, self.connection.carrier.peer)
        if serving.sizes:
            self.expects = serving.sizes.get(head.handler, 0)
        if is_wide(head.schema) or is_wide(head.expected):
            await apart(self._check_input, handler)
            self._ask_output(handler)
            await apart(self._check_output, handler)
        else:
            self._check_input(handler)
            self._ask_output(handler)
            self._check_output(handler)
        self._make_codecs(handler)
        self.hello = self._make_hello()
        self._accept()
        self.accepted = True
        return serving.driver_of(self, handler)

    def _check_input(self, handler: Handler) -> None:
        call, head = self.call, self.head
        if handler.input is not None and head.schema is not None:
            where = f"the input of handler {handler.name!r}"
            check(handler.input, head.schema, where=where, peer=call.peer, handler=handler.name)
            call.schema = handler.input

    def _ask_output(self, handler: Handler) -> None:
        """Runs code of the handler's author, so on the loop."""
        call, head = self.call, self.head
        call.output_schema = head.expected  # for an output= that follows the client's wish
        try:
            call.output_schema = handler.output_schema(call)
        except CallError:
            raise
        except Exception as error:
            raise handler_failed(error, "could not tell its output schema:") from error

    def _check_output(self, handler: Handler) -> None:
        call, head = self.call, self.head
        if head.expected is not None and call.output_schema is not None:
            names = {"peer": call.peer, "handler": handler.name}
            check_expected(head.expected, call.output_schema, **names)

    def _make_codecs(self, handler: Handler) -> None:
        call, head = self.call, self.head
        where = f"handler {handler.name!r}"
        names: dict[str, Any] = {"peer": call.peer, "handler": handler.name}
        known = self.config.calls.compressions
        self.compression = next((name for name in head.compressions if name in known), "")
        if call.schema is not None:
            self.decoder = Decoder(
                call.schema,
                dictionary_limit=self.config.calls.batch_limit,
                compressions=(self.compression,) if self.compression else (),
                where=f"the input of {where}",
                **names,
            )
            self.read_by(self.decoder.reader)
        if call.output_schema is not None:
            self.encoder = Encoder(
                call.output_schema, where=f"the output of {where}", fault=handler.fault, **names
            )

    def _accept(self) -> None:
        """Tells the client what batches will come."""
        headers, payload = self.hello
        self.output.post(payload, headers)
        if not self.compression:
            most = min(self._cut, self.config.calls.batch_limit)
            self.leave_by(self.output.row, BATCH, most, self.connection.pump.flush_soon)

    def _make_hello(self) -> tuple[Headers, list[bytes]]:
        """The hello, which says what the handler is; the wishes are granted."""
        handler, traits = self.handler, set()
        if handler.idempotent:
            traits.add(IDEMPOTENT)
        if handler.one_to_one:
            granted = self.head.wishes & {AS_COMPLETED, FAILURES}
            self.as_completed = AS_COMPLETED in granted
            self.failures = FAILURES in granted
            traits |= {ONE_TO_ONE, *granted}
        return Accepted(self.call.output_schema, self.compression, frozenset(traits)).encode()

    def conclude(
        self, error: BaseException | None, counters: Mapping[str, int] | None = None
    ) -> None:
        """Finishes the answers and sends the status, once; nothing is sent after it."""
        if self.concluded:
            return
        self.concluded = True
        self._status.on_change = None
        if self._timer is None:
            self.serving.watches.discard(self)
        else:
            self._timer.cancel()
        status = self._status_of(error, counters)
        if status.code != OK or self.observation is not None:
            self.serving.count_end(self, status, error)
        if self.connection.core.error is not None:
            return
        try:
            self._tell(status)
        except AqueductError as caught:  # the client went away in this very moment
            log.debug("%r: the status could not be sent: %s", self.call, caught)

    def _tell(self, status: Status) -> None:
        """The end as the client sees it: the answers first, then the status."""
        if self.receiver is not None and not self.input_over:
            self.receiver.close()
        if self.output.error is None:
            self.output.finish()
        if self._status.error is None:
            headers, payload = status.encode()
            self._status.send_nowait(payload, headers=headers, force=True)
            if len(self.serving.calls) == 1:  # nobody else has something to say now
                self.connection.flush()

    async def _linger(self) -> None:
        """The call holds its place until the client has read most of what the handler made."""
        progress = self.config.timing.progress_deadline
        queued = self.output.queued
        while queued:
            try:
                async with asyncio.timeout(progress):
                    await self.output.wait_closed()
                    return
            except TimeoutError:
                if self.output.queued == queued:
                    log.info("%r: the client does not read what was answered; gave up", self.call)
                    self.output.cancel()
                    return
                queued = self.output.queued
            except (AqueductError, asyncio.CancelledError):
                return

    def ended(self) -> None:
        """``run`` is over: the call gives its place back."""
        self._is_over = True
        if not self.concluded:  # cancelled before its first step
            self.conclude(self.call.reason or Cancelled("the call was cancelled"))
        self.call._forget_callbacks()
        self.stop = None
        for room in self.rooms:
            room.end()
        self.rooms.clear()
        if self.largest_out >= LARGE:
            self.serving.sizes[self.head.handler] = self.largest_out
        elif self.expects and self.batches_out:
            self.serving.sizes.pop(self.head.handler, None)
        if self.lease is not None:
            self.lease.give_back()
            self.lease = None
        if self.receiver is not None:
            self.receiver.placement = self.receiver.on_change = None
            if self.receiver.inbox is not None:
                self.receiver.announce = None
                self.receiver.inbox.let_go()
        self.output.on_change = None
        self.serving.call_ended(self)

    # How it ends

    def _status_of(self, error: BaseException | None, counters: Mapping[str, int] | None) -> Status:
        if error is None:
            return Status(OK, counters={**self.counters(), **(counters or {})})
        return self._failure(error, self.taken - 1 if self.taken else None)

    def _failure(self, error: BaseException, batch: int | None) -> Status:
        known = (self.call.reason, self.connection.error)
        if isinstance(error, CallError) or any(error is reason for reason in known):
            return Status.from_exception(error, batch=batch)
        if isinstance(error, ChannelError) and error is (
            self.output.error or (self.receiver is not None and self.receiver.error)
        ):
            return Status.from_exception(error, batch=batch)  # the client gave up a channel
        return Status.from_exception(handler_failed(error), batch=batch)

    def _bad(self, text: str) -> BadCall:
        error = BadCall(text, peer=self.call.peer, handler=self.call.handler)
        self._note(error)
        return error

    def _no_input_memory(self, error: MemoryError, number: int) -> Busy:
        """The library itself found no memory for input batch ``number``."""
        busy = self._no_memory(error, f"batch {number} of the input")
        self._note(busy)
        return busy

    def _no_memory(self, error: MemoryError, what: str) -> Busy:
        reason = str(error) or "no memory"
        text = (
            f"the service could not take memory for {what} of handler {self.call.handler!r} "
            f"({reason}); try again later or elsewhere, with fewer rows in a batch"
        )
        log.warning("%r: %s", self.call, text)
        return Busy(text, peer=self.call.peer, handler=self.call.handler)

    def _note(self, error: AqueductError) -> None:
        """The input is at fault, whatever the handler makes of that."""
        if self._fault is None:
            self._fault = error

    def _status_changed(self) -> None:
        ended = self._status.error
        if ended is None or self.concluded:
            return
        if isinstance(ended, ConnectionLost):
            self.abort(ended)
        else:
            self.abort(Cancelled("the client abandoned the call"))

    def look(self, now: float, progress: float) -> None:
        """What Watches calls now and then: a call that stands still has an end."""
        moved = self._progress()
        if moved != self._seen:
            if self._seen[:-1] == moved[:-1]:
                self.tell_alive()  # it has only come nearer to its turn
            self._seen, self._since = moved, now
        elif now - self._since >= progress / 2 and self._lacks_room(progress / 2):
            self.serving.watches.discard(self)  # before the client gives up, without a reason
            self._expired(progress / 2)
        elif now - self._since >= progress:
            self.serving.watches.discard(self)
            self._expired(progress)

    def _progress(self) -> tuple[int, ...]:
        return (
            self.moved,
            self.taken,
            self.rows_out,
            self.batches_out,
            self.output.queued,
            self.waits_for_client,
            # As long as others give back what they hold, its turn for room will come.
            self._turnover,
        )

    @property
    def _turnover(self) -> int:
        """Bytes that others gave back to the account where the call waits for room; 0: no wait."""
        if any(room.waits for room in self.rooms):
            return self.connection.sending.returned
        return self.connection.core.budget.process.returned if self._lacks_room(0) else 0

    def tell_alive(self) -> None:
        """Tells the client that the call still waits for room in this process."""
        if self.receiver is None:
            self.output.post(b"", batch_headers(0))
        elif self.taken:
            self.output.post(b"", batch_headers(self.taken - 1))

    def _expired(self, seconds: float) -> None:
        call = self.call
        if self.head.deadline is not None:
            text = f"handler {call.handler!r} did not end within the deadline of {seconds:g} s"
        elif self.waits_for_client:
            wanted = "more batches" if self.output.writable else "room for its answers"
            text = (
                f"handler {call.handler!r} waited {seconds:g} s for {wanted} and the client was "
                "silent (Timing.progress_deadline)"
            )
        else:
            text = (
                f"handler {call.handler!r} neither took nor yielded a batch for {seconds:g} s "
                "(Timing.progress_deadline); give the call a deadline if it may take longer"
            )
        busy = self._lacks_room(seconds)
        if busy and self.head.deadline is None:
            log.info("%r: %s", call, busy)
            self.abort(Busy(busy, peer=call.peer, handler=call.handler))
            return
        log.info("%r: %s", call, text)
        self.abort(DeadlineExceeded(text, peer=call.peer, handler=call.handler))

    def _lacks_room(self, seconds: float) -> str:
        """The budget that the call has waited for, and why it is full; "" if it waits for none."""
        flow, handler = self.config.flow, self.call.handler
        inbox = None if self.receiver is None else self.receiver.inbox
        if any(room.waits for room in self.rooms):
            return (
                f"handler {handler!r} waited {seconds:g} s for room for its next answer: earlier "
                "answers have not left, as their clients do not read; the process's budget is "
                f"{flow.process_send_bytes} bytes (Flow.process_send_budget)"
            )
        if inbox is not None and inbox.wanted and inbox.waiting:
            return (
                f"handler {handler!r} waited {seconds:g} s for room for its next batch: other "
                f"handlers hold batches; the budgets are {flow.receive_budget} bytes of a "
                f"connection (Flow.receive_budget) and {flow.process_receive_bytes} of the process "
                "(Flow.process_receive_budget)"
            )
        return ""
