"""The end of a call that takes too long: by its deadline, or because nothing moves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from aqueduct.endpoint import accounts
from aqueduct.errors import AqueductError, Busy, DeadlineExceeded
from aqueduct.escaping import logger_of
from aqueduct.rpc.deadline import ProgressTimer
from aqueduct.service.call_connection import CallConnection

if TYPE_CHECKING:
    from aqueduct.service.call_input import CallInput
    from aqueduct.service.call_output import CallOutput
    from aqueduct.service.context import Call

__all__ = ["CallWatch"]

log = logger_of(__name__)


class CallWatch:
    """Watches one call. ``abort`` ends it.

    With a deadline of the client's only that counts, and room that does not come; without one, each
    half must move.
    """

    __slots__ = (
        "_abort",
        "_call",
        "_connection",
        "_input",
        "_output",
        "_seen",
        "_since",
        "_timer",
        "_watches",
    )

    def __init__(
        self,
        watches: ProgressTimer,
        call: Call,
        connection: CallConnection,
        input: CallInput,
        output: CallOutput,
        abort: Callable[[AqueductError], None],
    ) -> None:
        self._watches = watches
        self._call = call
        self._connection = connection
        self._input = input
        self._output = output
        self._abort: Callable[[AqueductError], None] | None = abort
        self._timer: asyncio.TimerHandle | None = None
        self._since = 0.0  # when it moved last, as far as was noticed
        self._seen: tuple[int, ...] = (0, 0, 0, 0, 0, False, 0)  # what ``_progress`` said then

    def start(self, deadline: float | None) -> None:
        """Watches from now on."""
        self._since = self._watches.time()
        self._watches.add(self)
        if deadline is not None:
            self._timer = self._watches.loop.call_later(deadline, self._too_late, deadline)

    def stop(self) -> None:
        """Watches no more."""
        self._abort = None
        self._watches.discard(self)
        if self._timer is not None:
            self._timer.cancel()

    def look(self, now: float, progress: float) -> None:
        """What ProgressTimer calls now and then: a call that stands still has an end."""
        patient = self._output.patient
        if self._connection.carrier.suspended or (patient is not None and patient()):
            self._since = now
            return
        ticket = self._input.ticket
        if ticket is not None and ticket.waits:  # whose end is Calls.queue_deadline
            self._since = now
            self._output.tell_alive()
            return
        moved = self._progress()
        if moved != self._seen:
            nearer = self._seen[:-1] == moved[:-1]  # to its turn, and nothing else
            if nearer and (self._input.receiver is None or self._input.batches.taken):
                self._output.mark(self._input.answering)  # the client is to know that it waits
            self._seen, self._since = moved, now
        elif now - self._since >= progress / 2 and self._lacks_room(progress / 2):
            self._watches.discard(self)  # before the client gives up, without a reason
            self._stands_still(progress / 2)
        elif self._timer is None and now - self._since >= progress:
            self._watches.discard(self)
            self._stands_still(progress)

    def _progress(self) -> tuple[int, ...]:
        came, left = self._input.batches, self._output.batches
        return (
            came.moved,
            came.taken,
            left.rows_out,
            left.batches_out,
            self._output.queued,
            self._input.waits_for_client,
            # As long as others give back what they hold, its turn for room will come.
            self._turnover,
        )

    @property
    def _turnover(self) -> int:
        """Bytes that others gave back to the account where the call waits for room; 0: no wait."""
        if self._output.lacks_room:
            return self._connection.sending.returned
        return accounts.process().receiving.returned if self._input.lacks_room else 0

    def _too_late(self, seconds: float) -> None:
        name = self._call.handler
        self._expired(f"handler {name!r} did not end within the deadline of {seconds:g} s")

    def _stands_still(self, seconds: float) -> None:
        call = self._call
        if busy := self._lacks_room(seconds):
            self._end(Busy(busy, peer=call.peer, handler=call.handler))
        elif self._input.waits_for_client:
            wanted = "more batches" if self._output.writable else "room for its answers"
            self._expired(
                f"handler {call.handler!r} waited {seconds:g} s for {wanted} and the client was "
                "silent (Timing.progress_deadline)"
            )
        else:
            self._expired(
                f"handler {call.handler!r} neither took nor yielded a batch for {seconds:g} s "
                "(Timing.progress_deadline); give the call a deadline if it may take longer"
            )

    def _expired(self, text: str) -> None:
        self._end(DeadlineExceeded(text, peer=self._call.peer, handler=self._call.handler))

    def _end(self, error: AqueductError) -> None:
        log.info("%r: %s", self._call, error)
        if self._abort is not None:
            self._abort(error)

    def _lacks_room(self, seconds: float) -> str:
        """The budget that the call has waited for, and why it is full; "" if it waits for none."""
        flow, handler = self._connection.config.flow, self._call.handler
        if self._output.lacks_room:
            return (
                f"handler {handler!r} waited {seconds:g} s for room for its next answer: earlier "
                "answers have not left, as their clients do not read; the process's budget is "
                f"{flow.process_send_bytes} bytes (Flow.process_send_budget)"
            )
        if self._input.lacks_room:
            return (
                f"handler {handler!r} waited {seconds:g} s for room for its next batch: other "
                f"handlers hold batches; the budgets are {flow.receive_budget} bytes of a "
                f"connection (Flow.receive_budget) and {flow.process_receive_bytes} of the process "
                "(Flow.process_receive_budget)"
            )
        return ""
