"""One call in the service: accepted or refused, worked on by a runner, ended by a status.

Whatever happens, the order of the end is the same: the channel of the answers is finished, then
the status is sent. The client reads the answers to their end before it believes the status.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias

from aqueduct._speedups.calls.batch_receiver import InputReceiver
from aqueduct.arrow.decode import Decoder
from aqueduct.arrow.encode import Encoder
from aqueduct.arrow.ipc import is_wide
from aqueduct.arrow.schema import check, check_expected
from aqueduct.endpoint import Receiver
from aqueduct.errors import (
    AqueductError,
    CallError,
    Cancelled,
    ChannelError,
    ConnectionLost,
    Refused,
    UnknownHandler,
)
from aqueduct.escaping import logger_of
from aqueduct.rpc.deadline import ProgressTimer
from aqueduct.rpc.fragments import batch_headers
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
from aqueduct.service.call_connection import AnswerSender, CallConnection
from aqueduct.service.call_input import CallInput
from aqueduct.service.call_output import CallOutput
from aqueduct.service.call_watch import CallWatch
from aqueduct.service.context import Call, cancel, forget_callbacks
from aqueduct.service.handlers import Handler, handler_failed

if TYPE_CHECKING:
    from aqueduct.service.telemetry import Observation

__all__ = ["CallHost", "Run", "ServerCall"]

log = logger_of(__name__)

_LINGER_FROM: Final = 64 << 10


class CallHost(Protocol):
    """What a call needs of the service that it runs in."""

    name: str
    watches: ProgressTimer
    sizes: dict[str, int]
    """Bytes of the largest answer of the last call of each handler that makes large ones."""
    room: int
    """Bytes of a call's answers that go with its status."""

    async def admit(self, running: ServerCall) -> Handler:
        """The handler, which holds one of its places from here on. Raises CallError."""

    def runner_of(self, running: ServerCall) -> Run:
        """What works on the call, which was accepted."""

    def start_thread(self, work: Callable[[], None]) -> None:
        """A thread for ``work``. Raises Busy when the system has none."""

    def concluded(self, running: ServerCall, status: Status, error: BaseException | None) -> bool:
        """The call has its status. Gives whether no other call is open."""

    def call_ended(self, running: ServerCall) -> None:
        """The call is over, its handler too: its place is free."""


class ServerCall:
    """One call, from its message to its status. Lives on the service's event loop.

    A runner takes batches from ``input``, and sends what the handler makes by ``output``.
    """

    def __init__(
        self,
        host: CallHost,
        connection: CallConnection,
        head: CallHead,
        number: int,
        *,
        status: Any,
        sender: AnswerSender | None = None,
        receiver: Receiver | None = None,
        payload: memoryview | None = None,
    ) -> None:
        """``receiver``: of the client's batches; ``payload``: the one that came with the call.

        ``sender``: of answers, or for a sink of settled marks; None: they go with the status.
        ``status``: what sends that, a Sender or a Responder; see ``_tell``.
        """
        self.host = host
        self.connection = connection
        self.config = connection.config
        self.head = head
        self.call = Call(connection, head, number)
        batches = InputReceiver()
        self.output = CallOutput(self.call, connection, batches, host.sizes, sender)
        self.input = CallInput(self.call, connection, batches, self.output, receiver, payload)
        self.single = payload is not None
        """Whether its one batch came with it."""
        self.unanswered = False
        """Whether nobody is told how it ends."""
        self.accepted = False
        """Whether the client was told so."""
        self.failed = False
        """Whether it ended with an error, after it was accepted."""
        self.begun = time.monotonic()
        """When its message was read."""
        self._resumes = connection.carrier.resumes
        self.observation: Observation | None = None
        """What the service's telemetry keeps of the call, once it is accepted."""
        self.stop: Callable[[], None] | None = None
        """How the runner ends the handler; None: by cancelling the task."""
        self.task: asyncio.Task[None]
        self.handler: Handler
        """Set once the call is admitted."""
        self.admitted = False
        """Whether it holds one of the places of its handler."""
        self._is_over = False
        self._watch = CallWatch(
            host.watches, self.call, connection, self.input, self.output, self.abort
        )
        self._status: Any = status
        status.on_change = self._status_changed

    def report(self, error: BaseException, number: int) -> bool:
        """Answers input batch ``number`` with a failure, if the client asks for it; else False.

        And if it is that batch alone that failed.
        """
        if not self.output.failures or self.call.cancelled:
            return False
        status = self._failure(error, number)
        if status.code == CANCELLED:
            return False
        fields = {"status": status.code}
        text = "%r: batch %d failed: %s"
        log.info(text, self.call, number, status.message, extra={"fields": fields})
        (said,), payload = status.encode()
        self.output.post(b"".join(payload), (*batch_headers(number), said))
        self.input.batches.moved += 1
        return True

    def check_kind(self, handler: Handler) -> None:
        """Raises UnknownHandler if the call is none for this handler."""
        if handler.kind != self.head.kind:
            article = "an" if handler.kind == "exchange" else "a"
            raise UnknownHandler(
                f"handler {handler.name!r} is {article} {handler.kind}, and was called as "
                f"{self.head.kind}: use client.{handler.kind}",
                peer=self.call.peer,
                handler=self.head.handler,
            )

    def pace(self, generator: Any) -> Any:
        """``generator``, an async one, stepped as the client wants."""
        return generator

    # From outside

    def abort(self, reason: AqueductError) -> None:
        """Ends the call: the handler is stopped and the client, if it is there, learns why."""
        if self._is_over:
            return
        cancel(self.call, reason)
        self.conclude(reason)
        if self.stop is not None:
            self.stop()
        else:
            self.task.cancel()

    def counters(self) -> dict[str, int]:
        """What was moved so far."""
        came, left = self.input.batches, self.output.batches
        return {
            "batches_in": came.batches_in,
            "rows_in": came.rows_in,
            "bytes_in": came.bytes_in,
            "batches_out": left.batches_out,
            "rows_out": left.rows_out,
            "bytes_out": left.bytes_out,
        }

    @property
    def resumes(self) -> int:
        """How often its connection was cut and went on meanwhile."""
        return self.connection.carrier.resumes - self._resumes

    def cancel_handler(self, error: BaseException) -> None:
        """The call failed while a handler is still at work in some thread: it is told."""
        if not isinstance(error, AqueductError):
            error = Cancelled("the call failed elsewhere")
        cancel(self.call, error)

    def catch_up(self) -> None:
        """Looks for what happened before the call began: its client may have gone."""
        self._status_changed()

    def alive(self) -> None:
        """The client's application is at work: a call that waits for it is not stuck."""
        if self.input.waits_for_client:
            self.input.batches.moved += 1

    # The life of a call

    async def run(self) -> None:
        """The call from its acceptance to its status; started once, by an EagerTaskFactory."""
        error: BaseException | None = None
        counters: Mapping[str, int] | None = None
        try:
            counters = await (await self._open())(self)
        except asyncio.CancelledError as caught:
            error = self.call.reason
            if error is None and self.task.cancelling():
                text = f"the service {self.host.name!r} is ending"
                call = self.call
                error = Refused(text, peer=call.peer, handler=call.handler, draining=True)
            error = error or caught  # some task of the handler's own was cancelled
        except BaseException as caught:  # noqa: BLE001  a handler may raise anything
            error = caught
        goes_on = not self.output.concluded
        if goes_on:
            self.conclude(self.input.fault or error, counters)
        # Its traceback has this frame, which were a cycle for each of many calls that fail.
        error = None
        if goes_on and self.output.queued > _LINGER_FROM:
            # The call holds its place until the client has read most of what there is.
            await self.output.linger(self.config.timing.progress_deadline)

    async def _open(self) -> Run:
        """Everything that may refuse the call, then the word that it is accepted."""
        head = self.head
        self._watch.start(head.deadline)
        handler = self.handler = await self.host.admit(self)
        self.admitted = True
        self.output.expected = self.host.sizes.get(handler.name, 0)
        if is_wide(head.schema) or is_wide(head.expected):
            await apart(self._check_input, handler)
            self._ask_output(handler)
            await apart(self._check_output, handler)
        else:
            self._check_input(handler)
            self._ask_output(handler)
            self._check_output(handler)
        self._make_codecs(handler)
        self._accept(handler)
        self.accepted = True
        return self.host.runner_of(self)

    def _check_input(self, handler: Handler) -> None:
        call, head = self.call, self.head
        if handler.input is not None and head.schema is not None:
            where = f"the input of handler {handler.name!r}"
            check(handler.input, head.schema, where=where, peer=call.peer, handler=handler.name)
            call.schema = handler.input

    def _ask_output(self, handler: Handler) -> None:
        """Runs code of the handler's author, so on the loop."""
        call = self.call
        call.output_schema = self.head.expected  # for an output= that follows what is expected
        try:
            call.output_schema = handler.output_schema(call)
        except CallError:
            raise
        except Exception as error:
            raise handler_failed(error, "could not tell its output schema:") from error

    def _check_output(self, handler: Handler) -> None:
        call, expected = self.call, self.head.expected
        if expected is not None and call.output_schema is not None:
            check_expected(expected, call.output_schema, peer=call.peer, handler=handler.name)

    def _make_codecs(self, handler: Handler) -> None:
        call, limits, compression = self.call, self.config.calls, ""
        for name in self.head.compressions:
            if name in limits.compressions:
                compression = self.output.compression = name
                break
        where = f"handler {handler.name!r}"
        names: dict[str, Any] = {"peer": call.peer, "handler": handler.name}
        if call.schema is not None:
            decoder = self.input.decoder = Decoder(
                call.schema,
                dictionary_limit=limits.batch_limit,
                compressions=(compression,) if compression else (),
                where=f"the input of {where}",
                **names,
            )
            self.input.batches.read_by(decoder.reader)
        if call.output_schema is not None:
            where = f"the output of {where}"
            encoder = Encoder(call.output_schema, where=where, fault=handler.fault, **names)
            self.output.encoder = self.output.batches.encoder = encoder

    def _accept(self, handler: Handler) -> None:
        """Tells the client what batches will come, and what the handler can."""
        output, capabilities = self.output, set()
        if handler.idempotent:
            capabilities.add(IDEMPOTENT)
        if handler.one_to_one:
            granted = self.head.capabilities & {AS_COMPLETED, FAILURES}
            output.as_completed = AS_COMPLETED in granted
            output.failures = FAILURES in granted
            capabilities |= {ONE_TO_ONE, *granted}
        accepted = Accepted(self.call.output_schema, output.compression, frozenset(capabilities))
        headers, payload = accepted.encode()
        output.start(payload, headers)

    def conclude(
        self, error: BaseException | None, counters: Mapping[str, int] | None = None
    ) -> None:
        """Finishes the answers and sends the status, once; nothing is sent after it."""
        if self.output.concluded:
            return
        self.output.concluded = True
        self._status.on_change = None
        self._watch.stop()
        if error is None:
            status = self._success(counters)
        else:
            taken = self.input.batches.taken
            status = self._failure(error, taken - 1 if taken else None)
        alone = self.host.concluded(self, status, error)
        if self.connection.closed:
            return
        try:
            self._tell(status, alone)
        except AqueductError as caught:  # the client went away in this very moment
            log.debug("%r: the status could not be sent: %s", self.call, caught)

    def _success(self, counters: Mapping[str, int] | None) -> Status:
        return Status(OK, counters={**self.counters(), **(counters or {})})

    def _tell(self, status: Status, alone: bool) -> None:
        """The end as the client sees it: the answers first, then the status."""
        self.input.close()
        self.output.finish()
        if self._status.error is None:
            headers, payload = status.encode()
            self._status.send_nowait(payload, headers=headers, force=True)
            if alone:  # no other call has something to send now
                self.connection.flush()

    def ended(self) -> None:
        """``run`` is over: the call gives its place back."""
        self._is_over = True
        if not self.output.concluded:  # cancelled before its first step
            self.conclude(self.call.reason or Cancelled("the call was cancelled"))
        forget_callbacks(self.call)
        self.stop = None
        self.output.let_go()
        self.input.let_go()
        self.host.call_ended(self)

    # How it ends

    def _failure(self, error: BaseException, batch: int | None) -> Status:
        known = (self.call.reason, self.connection.error)
        if isinstance(error, CallError) or any(error is reason for reason in known):
            return Status.from_exception(error, batch=batch)
        receiver = self.input.receiver
        if isinstance(error, ChannelError) and error is (
            self.output.error or (receiver is not None and receiver.error)
        ):
            return Status.from_exception(error, batch=batch)  # the client gave up a channel
        return Status.from_exception(handler_failed(error), batch=batch)

    def _status_changed(self) -> None:
        ended = self._status.error
        if ended is None or self.output.concluded:
            return
        if isinstance(ended, ConnectionLost):
            self.abort(ended)
        else:
            self.abort(Cancelled("the client abandoned the call"))


Run: TypeAlias = Callable[[ServerCall], Awaitable["Mapping[str, int] | None"]]
"""Works on a call to its end; gives what a sink counted."""
