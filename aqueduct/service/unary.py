"""A call of one batch in the service: it came with its batch and leaves with answers and status.

To the drivers it looks like any exchange: ``take`` gives the one batch, ``send`` gathers answers.
When they no longer fit one message the call becomes an exchange from there on: the hello goes out
in place of the answers, and carries the channels on which they follow.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from aqueduct._speedups.channels.receiver import MemoryLease
from aqueduct.arrow.encode import Encoded
from aqueduct.endpoint import Connection, Responder, channel
from aqueduct.errors import AqueductError, BatchTooLarge
from aqueduct.rpc.keys import Headers
from aqueduct.rpc.request import Accepted, CallHead
from aqueduct.rpc.status import OK, Status
from aqueduct.rpc.threads import apart
from aqueduct.rpc.unary import ANSWERS_LIMIT, encode_answer, schema_prefix
from aqueduct.service.call import ServerCall

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from aqueduct.endpoint import Sender
    from aqueduct.service.server import RunningService

__all__ = ["UnaryCall", "drive_coroutine"]

_WELL: Final = Status(OK)


class UnaryCall(ServerCall):
    """One call of one batch. The client reads one message, or is told where to read on."""

    def __init__(
        self,
        serving: RunningService,
        connection: Connection,
        head: CallHead,
        payload: memoryview,
        status: Responder,
        number: int,
    ) -> None:
        self._payload: memoryview | None = payload
        self.brought: MemoryLease | None = None
        """What the batch is charged, until the handler takes it."""
        self._answers: list[Encoded] = []
        self._size = 0
        gathered: Any = _Gathered()
        self._gathered: _Gathered = gathered
        super().__init__(serving, connection, head, _BROUGHT, gathered, status, number)

    def take(self) -> tuple[int, Any] | None:
        """The one batch, once."""
        payload, self._payload = self._payload, None
        self.lease, self.brought = self.brought, None
        self.input_over = True
        if payload is None:
            return None
        limit = self.config.calls.batch_limit
        if len(payload) > limit:
            error = BatchTooLarge(
                f"the input of handler {self.call.handler!r}: batch 0 has {len(payload)} bytes, "
                f"above the limit of {limit} (Calls.batch_limit); send fewer rows at a time",
                peer=self.call.peer,
                handler=self.call.handler,
            )
            self._note(error)
            raise error
        self.moved += 1
        self.batches_in = 1
        self.bytes_in = len(payload)
        return 0, payload

    def send(self, encoded: Encoded, number: int) -> None:
        """Keeps an answer for the one message, or sends it if that is too full."""
        if self._gathered.sender is None:
            answers = self._answers
            size = (self._size or len(self.hello[1][0])) + encoded.size
            if size <= self.serving.room and len(answers) < ANSWERS_LIMIT:
                answers.append(encoded)
                self._size = size
                self.batches_out += 1
                self.bytes_out += encoded.size
                return
            self._spill()
        super().send(encoded, number)

    def ended(self) -> None:
        """As that of other calls."""
        if self.brought is not None:
            self.brought.give_back()
        super().ended()

    def tell_alive(self) -> None:
        """As an exchange, once it is one."""
        if self._gathered.sender is not None:
            super().tell_alive()

    def mark(self) -> None:
        """The client sends no other batch, so it need not know."""

    def _make_hello(self) -> tuple[Headers, list[bytes]]:
        """Their schema, which leaves with them."""
        schema = self.call.output_schema
        assert schema is not None
        return (), [schema_prefix(schema)]

    def _accept(self) -> None:
        """The answer says so, if it comes."""

    def _status_of(self, error: BaseException | None, counters: Mapping[str, int] | None) -> Status:
        if error is None and self._gathered.sender is None:
            return _WELL
        return super()._status_of(error, counters)

    def _tell(self, status: Status) -> None:
        if self._gathered.sender is not None:
            super()._tell(status)
        elif self._status.half.error is None:
            answers, self._answers = self._answers, []
            if status is _WELL:
                headers, payload = encode_answer(self.hello[1][0], answers)
            else:
                headers, payload = status.encode()  # type: ignore[assignment]
            # What is left to do here can be done while the client reads it.
            alone = len(self.serving.calls) == 1
            self.connection.reply(self._status, payload, headers, now=alone)

    def _spill(self) -> None:
        """From here on it is an exchange: what was gathered goes first."""
        output, to_client = channel()
        status, last = channel(oneshot=True)
        headers, payload = Accepted(self.call.output_schema).encode()
        oneshot = self.connection.sender(self._status)
        self._status = status
        status.on_change = self._status_changed
        self._gathered.use(output)
        if oneshot.error is None:
            try:
                oneshot.send_nowait(
                    payload, headers=headers, attachments=[to_client, last], force=True
                )
            except AqueductError:
                self._status_lost(oneshot)
                raise
        else:
            self._status_lost(oneshot)
        answers, self._answers = self._answers, []
        self.batches_out = self.bytes_out = 0
        for answer in answers:
            super().send(answer, 0)

    def _status_lost(self, oneshot: Sender) -> None:
        """The client has gone already: what would end the call has to end it now."""
        self._status = oneshot
        self._status_changed()


class _Brought:
    """In place of a Receiver: the batch was brought with the call, and nothing else will come.

    It never changes, so one is enough, and nobody is told.
    """

    arriving: Final = False
    readable: Final = True
    error: Final = None
    inbox: Final = None

    __slots__ = ()

    @property
    def on_change(self) -> None:
        """What would be called."""

    @on_change.setter
    def on_change(self, callback: object) -> None:
        pass

    placement = on_change

    def close(self) -> None:
        """There is nothing to close."""


_BROUGHT: Final[Any] = _Brought()  # as much of a Receiver as drivers use


class _Gathered:
    """In place of a Sender: always with room, until a real one takes its place."""

    sender: Sender | None = None
    _on_change: Callable[[], None] | None = None

    def use(self, sender: Sender) -> None:
        """The answers go there from now on."""
        self.sender = sender
        sender.on_change = self._on_change

    @property
    def on_change(self) -> Callable[[], None] | None:
        """As that of a Sender."""
        return self._on_change

    @on_change.setter
    def on_change(self, callback: Callable[[], None] | None) -> None:
        self._on_change = callback
        if self.sender is not None:
            self.sender.on_change = callback

    @property
    def writable(self) -> bool:
        """As that of a Sender."""
        return self.sender is None or self.sender.writable

    @property
    def queued(self) -> int:
        """As that of a Sender."""
        return 0 if self.sender is None else self.sender.queued

    @property
    def error(self) -> Exception | None:
        """As that of a Sender."""
        return None if self.sender is None else self.sender.error

    def __getattr__(self, name: str) -> Any:
        return getattr(self.sender, name)  # what is used of a sender with something queued

    def notify_writable(self, *, ample: bool = False) -> None:
        """As that of a Sender."""
        if self.sender is not None:
            self.sender.notify_writable(ample=ample)


async def drive_coroutine(running: ServerCall) -> None:
    """A coroutine function of one batch, for the one batch of its call."""
    found = running.take()
    assert found is not None
    number, payload = found
    batch = running.read(payload)
    if batch is None:
        if running.slow_to_decode(payload):
            batch = await apart(running.decode, number, payload)
        else:
            batch = running.decode(number, payload)
    else:
        running.rows_in = batch.num_rows
    running.taken = 1
    call, handler = running.call, running.handler
    answer = await (
        handler.function(batch, call) if handler.takes_call else handler.function(batch)
    )
    call.check()  # a handler may have swallowed its cancellation
    encoded = running.write(answer, running.config.calls.batch_limit)
    if encoded is None:
        if running.slow_to_encode(answer):
            encoded = await apart(running.encode, answer)
        else:
            encoded = running.encode(answer)
    running.send(encoded, number)
