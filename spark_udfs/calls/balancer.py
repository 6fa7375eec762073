"""One partition over several calls: after one another when they break, or side by side.

Every batch that was sent and has no answer is kept, in its order; they are bounded by the window.
When a call breaks, those of it go into another call, on the same address or the next. So with a
function of one batch that is declared idempotent nothing is lost, nothing comes twice, and nothing
that was answered is asked again.

The thread of the task drives all calls. It waits for whichever has news first, and for no longer
than until the next thing is due.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Iterable
from heapq import heappop, heappush
from queue import Empty
from typing import Any, Final

import pyarrow as pa

from aqueduct.client.call import END, FailedBatch
from aqueduct.client.options import CallOptions
from aqueduct.client.thread_call import NEWS, Failed
from aqueduct.errors import (
    AqueductError,
    BadCall,
    CallError,
    ConfigError,
    ConnectFailed,
    ConnectionLost,
    DeadlineExceeded,
    LocalProtocolError,
)
from aqueduct.escaping import logger_of
from aqueduct.rpc.request import FAILURES
from spark_udfs.calls.endpoints import Addresses, Endpoint, OpenCall, UnansweredBatch
from spark_udfs.calls.pool import PoolLease
from spark_udfs.calls.retry import may_pass, renumbered, with_note
from spark_udfs.calls.spec import BatchAnswer, CallSpec, Opened
from spark_udfs.worker.metrics import TaskMetrics
from spark_udfs.worker.task import TaskContext

__all__ = ["Balancer"]

log = logger_of("spark_udfs")

_GLANCE: Final = 5.0
"""Seconds after which a thread that waits looks whether anybody is left to answer."""


class Balancer:
    """The work of one partition; ``answers`` does it, once."""

    def __init__(
        self,
        calling: CallSpec,
        batches: Iterable[pa.RecordBatch],
        *,
        schema: pa.Schema,
        place: TaskContext,
        numbers: TaskMetrics,
        opened: Opened | None,
        held: Callable[[], int] | None,
    ) -> None:
        self._calling = calling
        self._input = iter(batches)
        self._numbers = numbers
        self._opened = opened
        self._held = held
        self._addresses = Addresses(calling, schema=schema, place=place, numbers=numbers)
        self._end = None if calling.deadline is None else time.monotonic() + calling.deadline
        self._single: OpenCall | None = None
        """The one call of a handler that is no function of one batch."""
        self._spreads = False
        """Whether the handler is known to be a function of one batch."""
        self._input_over = False
        self._taken = 0
        """Of the input."""
        self._again: list[tuple[int, UnansweredBatch]] = []
        """A heap of those to be sent again."""
        most = calling.in_flight or calling.config.calls.in_flight_batches
        options = CallOptions(in_flight=most, in_flight_bytes=calling.in_flight_bytes)
        self._window = options.window(calling.config)
        """The batches that are sent and not delivered, by their number in the partition. Not more
        of small ones: what is sent is shared out, and a slow service is not to have nearly all."""
        self._ready: dict[int, BatchAnswer] = {}
        """In order: of which earlier ones are missing."""
        self._next = 0
        self._line: deque[BatchAnswer] = deque()
        """To be delivered."""
        self._due: deque[tuple[float, OpenCall, int, int]] = deque()
        """When which batch is late: its call, its number there, and in the partition."""
        self._failures = 0
        """Since the last answer."""
        self._over = False

    def answers(self) -> Generator[BatchAnswer]:
        """The answers, as they come or in order. Closing it gives up all calls."""
        well, numbers = False, self._numbers
        try:
            while True:
                while self._line:
                    answer = self._line.popleft()
                    numbers.batches_received += 1
                    if answer.batch is None:
                        numbers.failed_batches += 1
                    else:
                        numbers.rows_received += answer.batch.num_rows
                    yield answer
                if self._is_over():
                    break
                self._step()
            well = True
        finally:
            self._addresses.close(well=well)

    # What there is to do

    def _step(self) -> None:
        """The next thing: what has come, what can be sent, what is too late; or a wait."""
        try:
            source, found = self._addresses.news.get_nowait()
        except Empty:
            now = time.monotonic()
            if self._look(now) or self._send(now):
                return
            news = self._wait(now)
            if news is None:
                return
            source, found = news
        if isinstance(source, Endpoint):
            self._connected(source, found)
        elif source in self._addresses.calls:
            self._take(source, source.exchange.popped(found))

    def _is_over(self) -> bool:
        if not self._spreads or not self._input_over:
            return self._over
        if self._again or self._window.sent != self._window.settled:
            return False
        # A call that is not accepted, or holds an abandoned batch, is given up.
        for call in tuple(self._addresses.calls):
            if call.waiting or not call.accepted:
                self._addresses.drop(call)
            else:
                call.finish()
        return not self._addresses.calls

    def _send(self, now: float) -> bool:
        """Sends one batch, or what ends them; False: there is nothing to send, or no room."""
        call = self._choose(now)
        if call is None:
            return False
        if self._again:
            self._send_by(call, heappop(self._again)[1], now)
            return True
        if self._input_over:
            if call.finished:
                return False
            call.finish()
            return True
        if not self._has_room():
            return False
        batch = next(self._input, None)
        if batch is None:
            self._input_over = True
        else:
            self._send_by(call, UnansweredBatch(self._taken, batch), time.monotonic())
            self._taken += 1
            self._numbers.batches_sent += 1
            self._numbers.rows_sent += batch.num_rows
        return True

    def _send_by(self, call: OpenCall, waiting: UnansweredBatch, now: float) -> None:
        if call.waiting and len(self._addresses.services) > 1:
            # It is at work: this batch goes there all the same, and the next may not.
            self._begin(now, urgent=False)
        number, size = call.send(waiting, keep=self._spreads)
        self._numbers.bytes_sent += size
        if self._spreads and waiting.number == self._window.sent:
            self._window.send(size)
        if self._calling.batch_deadline is not None:
            due = now + self._calling.batch_deadline
            self._due.append((due, call, number, waiting.number))

    def _has_room(self) -> bool:
        held = 0 if self._held is None else self._held()
        if not self._spreads:
            if self._single is None:
                return False
            self._single.exchange.hold(held)
            return self._single.exchange.room
        self._window.held = held
        return self._window.open

    def _choose(self, now: float) -> OpenCall | None:
        """The call for the next batch: that with the fewest bytes that have no answer.

        None: there is no call with room now; one may have been begun.
        """
        if self._single is not None:
            return self._single if self._single.takes else None
        addresses = self._addresses
        if self._input_over and not self._again and self._spreads:
            # Calls end as soon as nothing more is to be sent; one more may be needed later.
            open_calls = (call for call in addresses.calls if call.accepted)
            return next((call for call in open_calls if not call.finished), None)
        best: OpenCall | None = None
        for call in addresses.calls:
            if call.takes and (best is None or call.size < best.size):
                best = call
        if best is None:
            self._begin(now, urgent=True)
        return best

    def _begin(self, now: float, *, urgent: bool) -> None:
        """Begins one more call, unless one is on its way that may well do."""
        hedge = self._calling.hedge
        if any(not urgent or now - since < hedge for since in self._addresses.opening):
            return
        self._addresses.slow(now - hedge)
        service = self._addresses.free(now)
        if service is not None:
            self._addresses.begin(service)

    def _wait(self, now: float) -> tuple[Any, Any] | None:
        """What comes next; None: look again."""
        addresses = self._addresses
        wants = bool(self._again) or not self._input_over
        for call in addresses.calls:
            room = wants and call.accepted and not call.finished and not call.takes
            if call.exchange.expect(room=room, acceptance=not call.accepted):
                if not call.accepted:
                    return call, NEWS
                return None
        for call in addresses.calls:
            idle = call.accepted and not call.finished and not call.waiting and self._spreads
            call.exchange.set_waiting(not idle)
        try:
            return addresses.news.get(timeout=max(0.0, self._until(now)))
        except Empty:
            for call in tuple(addresses.calls):
                try:
                    call.exchange.check()
                except LocalProtocolError as error:
                    self._broke(call, ConnectionLost(str(error)))
            return None
        finally:
            self._numbers.waiting_seconds += time.monotonic() - now
            for call in addresses.calls:
                call.exchange.set_waiting(False)

    def _until(self, now: float) -> float:
        """Seconds until the next thing is due."""
        times = [now + _GLANCE]
        if self._end is not None:
            times.append(self._end)
        if self._due:
            times.append(self._due[0][0])
        hedged = (since + self._calling.hedge for since in self._addresses.opening)
        times += [due for due in hedged if due > now]
        times += [
            service.backoff.until
            for service in self._addresses.services
            if service.call is None and service.connecting is None and service.backoff.until > now
        ]
        return min(times) - now

    def _look(self, now: float) -> bool:
        """Whether a batch, or all of it, was too late."""
        if self._end is not None and now >= self._end:
            raise self._late()
        while self._due and self._due[0][0] <= now:
            _, call, place, number = self._due.popleft()
            if call not in self._addresses.calls:
                continue
            if self._spreads:
                waiting = call.waiting.get(place)
                if waiting is None or waiting.batch is None:
                    continue
                self._too_late(call, number)
                waiting.batch = None  # its answer may still come, and is dropped
                if all(each.batch is None for each in call.waiting.values()):
                    self._addresses.drop(call)  # what it is at is wanted no more
                return True
            if place >= call.exchange.settled:  # neither answered nor taken
                self._too_late(call, number)
        return False

    def _too_late(self, call: OpenCall, number: int) -> None:
        """A batch has no answer in time: raises that, or delivers it."""
        calling, address = self._calling, call.service.address
        error = DeadlineExceeded(
            f"handler {calling.handler!r} at {address}, batch {number}: no answer within "
            f"{calling.batch_deadline:g} s (batch_deadline)",
            peer=address,
            handler=calling.handler,
        )
        error.batch = number
        if calling.on_error != "report":
            raise error
        self._deliver(BatchAnswer(number, None, error))

    # What has come

    def _connected(self, service: Endpoint, found: Any) -> None:
        if isinstance(found, PoolLease):
            try:
                self._addresses.call(service, found, deadline=self._left())
            except ConnectionLost as error:
                self._unable(service, error)
        else:
            self._unable(service, found.error)

    def _take(self, call: OpenCall, found: Any) -> None:
        if not call.accepted and call.exchange.accepted:
            call.accepted = True
            self._accepted(call)
        if type(found) is tuple:
            self._answered(call, *found)
        elif type(found) is Failed:
            self._broke(call, found.error)
        elif found is END:
            self._ended(call)

    def _accepted(self, call: OpenCall) -> None:
        """The accept message says what the handler is."""
        calling = self._calling
        names = {"peer": call.service.address, "handler": calling.handler}
        where = f"handler {calling.handler!r} at {call.service.address}"
        if self._spreads and not call.one_to_one:
            raise BadCall(
                f"{where} is no function of one batch, and at another address it is; "
                "is the same service behind all addresses?",
                **names,
            )
        if calling.on_error == "report" and FAILURES not in call.exchange.capabilities:
            raise ConfigError(
                f"{where} is no function of one batch (or its service is older), so its failure "
                "ends the call and cannot be reported for a batch; use on_error='fail'"
            )
        first = not self._spreads and self._single is None
        if call.one_to_one:
            self._spreads = True
        else:
            self._single = call
            for other in tuple(self._addresses.calls):
                if other is not call:  # begun because this one took its time
                    self._addresses.drop(other)
        if first and self._opened is not None:
            self._opened(call.exchange.schema, call.exchange.capabilities)

    def _answered(self, call: OpenCall, number: int, payload: Any) -> None:
        call.service.backoff.succeeded()
        self._failures = 0
        if not self._spreads:
            self._numbers.bytes_received += len(payload)
            self._line.append(BatchAnswer(number, call.exchange.decode(payload)))
            return
        waiting = call.answered(number)
        if waiting is None:
            raise BadCall(
                f"handler {self._calling.handler!r} at {call.service.address} answered batch "
                f"{number} of a call twice, and is a function of one batch",
                peer=call.service.address,
                handler=self._calling.handler,
            )
        if type(payload) is FailedBatch:
            error = renumbered(payload.error, waiting.number)
            assert isinstance(error, CallError)
            answer = BatchAnswer(waiting.number, None, error)
        else:
            # All answers of a call are read in order: later ones may need them.
            self._numbers.bytes_received += len(payload)
            answer = BatchAnswer(waiting.number, call.exchange.decode(payload))
        if waiting.batch is not None:
            self._deliver(answer)

    def _deliver(self, answer: BatchAnswer) -> None:
        if not self._calling.ordered:
            self._window.settle_one(answer.number)
            self._line.append(answer)
            return
        self._ready[answer.number] = answer
        while self._next in self._ready:  # those that wait for their turn fill the window, too
            self._window.settle_one(self._next)
            self._line.append(self._ready.pop(self._next))
            self._next += 1

    def _ended(self, call: OpenCall) -> None:
        self._addresses.ended(call)
        if call is self._single:
            self._over = True
            return
        unanswered = sum(waiting.batch is not None for waiting in call.waiting.values())
        if unanswered or not call.finished:
            raise BadCall(
                f"handler {self._calling.handler!r} at {call.service.address} ended well with "
                f"{unanswered} batches unanswered, and more to come",
                peer=call.service.address,
                handler=self._calling.handler,
            )

    # What went wrong

    def _left(self) -> float | None:
        """Seconds of the deadline that are left."""
        return None if self._end is None else max(0.001, self._end - time.monotonic())

    def _late(self) -> DeadlineExceeded:
        calling = self._calling
        places = ", ".join(service.address for service in self._addresses.services)
        return DeadlineExceeded(
            f"handler {calling.handler!r} at {places}: the partition was not done within its "
            f"deadline of {calling.deadline:g} s",
            peer=places,
            handler=calling.handler,
        )

    def _unable(self, service: Endpoint, error: BaseException) -> None:
        """A call could not be made."""
        if not may_pass(error):
            raise error
        assert isinstance(error, AqueductError)
        unreachable = isinstance(error, ConnectFailed)
        self._addresses.failed(service, unreachable=unreachable)
        self._count(error, lost=False)
        self._warn(service, error)

    def _broke(self, call: OpenCall, error: BaseException) -> None:
        """A call is over before its end."""
        addresses = self._addresses
        addresses.ended(call)
        waiting = [each for each in call.waiting.values() if each.batch is not None]
        if self._spreads and call.finished and not waiting:
            return  # it has done what it was to do
        if not may_pass(error):
            number = getattr(error, "batch", None)
            if self._spreads and number in call.waiting and isinstance(error, AqueductError):
                raise renumbered(error, call.waiting[number].number) from error.__cause__
            raise error
        assert isinstance(error, AqueductError)
        if call is self._single:
            self._single = None
            if call.sent or call.finished:
                raise self._final(error, "is no function of one batch")
        elif waiting and not call.idempotent:
            raise self._final(error, "is not declared idempotent")
        addresses.failed(call.service, unreachable=False)
        for each in waiting:
            heappush(self._again, (each.number, each))
        self._count(error, lost=bool(waiting))
        self._warn(call.service, error)

    def _warn(self, service: Endpoint, error: AqueductError) -> None:
        """Tells the log of the user that an address failed."""
        pause = max(0.0, service.backoff.until - time.monotonic())
        log.warning(
            "%r at %s: %s: %s; what has no answer is asked again, there not before %.1f s",
            self._calling.handler,
            service.address,
            type(error).__name__,
            error,
            pause,
        )

    def _count(self, error: AqueductError, *, lost: bool) -> None:
        """Raises ``error`` if that was one too many since the last answer.

        What fails while another address is left, or at work, counts only if batches were ``lost``.
        """
        addresses, now = self._addresses, time.monotonic()
        others = addresses.free(now) is not None or any(True for _ in addresses.opening)
        others = others or any(call.accepted and not call.finished for call in addresses.calls)
        if others and not lost:
            return
        if self._failures >= self._calling.retries:
            raise self._given_up(error)
        self._failures += 1

    def _given_up(self, error: AqueductError) -> AqueductError:
        tried = self._failures + 1
        places = [service.address for service in self._addresses.services]
        if tried == 1 and len(places) == 1:
            return error
        times = "once" if tried == 1 else f"{tried} times"
        where = " and ".join(places)
        retries = self._calling.retries
        return with_note(error, f"tried {times} without an answer at {where} (retries={retries})")

    def _final(self, error: AqueductError, what: str) -> AqueductError:
        """The error of a call that broke with batches under way that must not be sent again."""
        if not self._calling.retries:
            return error
        return with_note(
            error,
            f"handler {self._calling.handler!r} {what}, so what was sent is not sent again: only "
            "a function of one batch with idempotent=True is resumed",
        )
