"""One piece of work over several calls: after one another when they break, or side by side.

Every batch that was sent and has no answer is kept, in its order; they are bounded by the window.
When a call breaks, those of it go into another call, on the same address or the next. So with a
function of one batch that is declared idempotent nothing is lost, nothing comes twice, and nothing
that was answered is asked again.

The Balancer decides and does not wait. Its driver, a thread or a task, gives it the news of its
calls and the batches of its input, and waits for it; see ``thread_balancer`` and ``loop_balancer``.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from enum import Enum, auto
from heapq import heappop, heappush
from typing import Any, Final

import pyarrow as pa

from aqueduct.client.balanced_spec import BalancedSpec, BatchAnswer, Opened
from aqueduct.client.call import END, FailedBatch
from aqueduct.client.call_metrics import CallMetrics
from aqueduct.client.endpoints import (
    CallQueue,
    Connector,
    Endpoint,
    OpenCall,
    OpenCalls,
    UnansweredBatch,
)
from aqueduct.client.options import CallOptions
from aqueduct.client.retry import may_pass, renumbered, with_note
from aqueduct.client.thread_call import NEWS, Failed
from aqueduct.errors import (
    AqueductError,
    BadCall,
    ConfigError,
    ConnectFailed,
    ConnectionLost,
    DeadlineExceeded,
    LocalProtocolError,
)
from aqueduct.escaping import logger_of
from aqueduct.rpc.request import AS_COMPLETED, FAILURES

__all__ = ["Balancer", "NextStep"]

_GLANCE: Final = 5.0
"""Seconds after which a driver that waits looks whether any connection can still answer."""


class NextStep(Enum):
    """What the driver of a Balancer is to do."""

    STEP = auto()
    """Something was done: deliver what there is, and ask again."""
    GIVE = auto()
    """There is room for the next batch of the input: ``give`` it, or None at its end."""
    WAIT = auto()
    """Wait for news, within ``begin_wait`` and ``end_wait``."""


class Balancer:
    """One piece of work, as decisions.

    Deliver ``next_answer`` until it is None. Then, unless the work is ``over``, ``read`` the news
    that are in the queue, or else do what ``step`` says. Whatever raises ends the work; ``close``
    it then, as at its end.
    """

    def __init__(
        self,
        spec: BalancedSpec,
        *,
        connector: Connector,
        news: CallQueue,
        numbers: CallMetrics,
        logger: str = "aqueduct",
        opened: Opened | None = None,
        held: Callable[[], int] | None = None,
        began: float | None = None,
    ) -> None:
        """``held``: bytes that the caller keeps of batches without an answer.

        ``began``: since when the deadline runs, by ``time.monotonic()``; by default from now on.
        """
        self._spec = spec
        self._log = logger_of(logger)
        self._numbers = numbers
        self._opened = opened
        self._held = held
        self._calls = OpenCalls(spec, connector=connector, numbers=numbers, news=news)
        began = time.monotonic() if began is None else began
        self._end = None if spec.deadline is None else began + spec.deadline
        self._single: OpenCall | None = None
        """The one call of a handler that is no function of one batch."""
        self._spreads = False
        """Whether the handler is known to be a function of one batch."""
        self._input_over = spec.kind == "source"
        self.fetching = False
        """Whether the next batch of the input is on its way: none is asked for meanwhile."""
        self._taken = 0
        """Of the input."""
        self._again: list[tuple[int, UnansweredBatch]] = []
        """A heap of those to be sent, or sent again."""
        most = spec.in_flight or spec.config.calls.in_flight_batches
        options = CallOptions(in_flight=most, in_flight_bytes=spec.in_flight_bytes)
        self._window = options.window(spec.config)
        """The batches that are sent and not delivered, by their number in the input. Not more
        of small ones: what is sent is shared out, and a slow service is not to have nearly all."""
        self._ready: dict[int, BatchAnswer] = {}
        """In order: of which earlier ones are missing."""
        self._next = 0
        self._line: deque[BatchAnswer] = deque()
        """To be delivered."""
        self._due: deque[tuple[float, OpenCall, int, int]] = deque()
        """When which batch is late: its call, its number there, and in the input."""
        self._failures = 0
        """Since the last answer."""
        self._failed: set[Endpoint] = set()
        """Addresses that failed since the last answer, or since a failure was counted."""
        self._lost: AqueductError | None = None
        """Why a batch that was sent before all of this may have been worked on."""
        self._received = False
        """Whether a handler that is no function of one batch has answered."""
        self._over = False
        self.schema: pa.Schema | None = None
        """Of the answers, once a call is accepted."""
        self.capabilities: frozenset[str] = frozenset()
        """The handler's, once a call is accepted."""
        self.accepted = False
        """Whether any call was."""
        self.counters: Mapping[str, int] = {}
        """What the service counted, once a call that is no function of one batch has ended."""

    @property
    def open_calls(self) -> tuple[OpenCall, ...]:
        """The calls that are open now."""
        return tuple(self._calls.calls)

    def next_answer(self) -> BatchAnswer | None:
        """The next answer to deliver, as they come or in order."""
        if not self._line:
            return None
        answer, numbers = self._line.popleft(), self._numbers
        numbers.batches_received += 1
        if answer.batch is None:
            numbers.failed_batches += 1
        else:
            numbers.rows_received += answer.batch.num_rows
        return answer

    def is_over(self) -> bool:
        """Whether all is done, once ``next_answer`` has nothing left."""
        if not self._spreads or not self._input_over:
            return self._over
        if self._again or self._window.sent != self._window.settled:
            return False
        # A call that is not accepted, or holds an abandoned batch, is given up.
        for call in tuple(self._calls.calls):
            if call.waiting or not call.accepted:
                self._calls.drop(call)
            else:
                call.finish()
        return not self._calls.calls

    def step(self, now: float) -> NextStep:
        """The next thing that can be sent, or is too late; to be asked when there are no news."""
        if self._calls.over:
            places = ", ".join(self._calls.places)
            raise ConnectionLost(f"the client of {places} is closed")
        self._refresh()
        if self._look(now):
            return NextStep.STEP
        return self._send(now)

    def give(self, batch: pa.RecordBatch | None) -> None:
        """The next batch of the input; None: there is none."""
        self.fetching = False
        if batch is None:
            self._input_over = True
            return
        heappush(self._again, (self._taken, UnansweredBatch(self._taken, batch)))
        self._taken += 1
        self._numbers.batches_sent += 1
        self._numbers.rows_sent += batch.num_rows

    def begin_wait(self, now: float) -> float | None:
        """How many seconds to wait for news; None: there is something to do."""
        wants = bool(self._again) or not self._input_over
        calls = self._calls.calls
        for call in calls:
            room = wants and call.accepted and not call.finished and not call.takes
            if call.exchange.expect(room=room, acceptance=not call.accepted):
                if not call.accepted:
                    self._calls.news.put((call, NEWS))
                return None
        for call in calls:
            idle = call.accepted and not call.finished and not call.waiting and self._spreads
            call.exchange.set_waiting(not idle)
        return max(0.0, self._until(now))

    def end_wait(self, began: float, *, in_vain: bool) -> None:
        """The wait is over; ``in_vain``: without news."""
        self._numbers.waiting_seconds += time.monotonic() - began
        for call in tuple(self._calls.calls):
            call.exchange.set_waiting(False)
            if in_vain:
                try:
                    call.exchange.check()
                except LocalProtocolError as error:
                    self._broke(call, ConnectionLost(str(error)))

    def read(self, tag: Any, found: Any) -> tuple[OpenCall, int, Any] | None:
        """One piece of news. If it is an answer to be decoded, that is returned for ``answered``.

        It is a call, the number of the batch in it, and a payload for the call's ``decode``. All
        answers of a call are decoded in their order: later ones may need them.
        """
        if isinstance(tag, Endpoint):
            self._connected(tag, found)
            return None
        call: OpenCall = tag
        if call not in self._calls.calls:
            return None
        found = call.exchange.popped(found)
        if not call.accepted and call.exchange.accepted:
            call.accepted = True
            self._accepted(call)
        if type(found) is tuple:
            number, payload = found
            if type(payload) is not FailedBatch:
                return call, number, payload
            self._failed_batch(call, number, payload.error)
        elif type(found) is Failed:
            self._broke(call, found.error)
        elif found is END:
            self._ended(call)
        return None

    def answered(self, call: OpenCall, number: int, size: int, batch: pa.RecordBatch) -> None:
        """The answer that ``read`` gave, decoded; ``size``: bytes of its payload."""
        self._numbers.bytes_received += size
        waiting = self._settle(call, number)
        if waiting is None:
            self._received = True
            self._line.append(BatchAnswer(number, batch))
        elif waiting.batch is not None:
            self._deliver(BatchAnswer(waiting.number, batch))

    def resume(self, error: AqueductError, target: object, *, lost: bool) -> None:
        """Goes on with work whose first call, of all of the input, failed elsewhere.

        ``lost``: it may have been worked on. Raises ``error`` if there is nothing to be tried.
        """
        if not may_pass(error):
            raise error
        self._lost = error if lost else None
        for service in self._calls.services:
            if service.target is target:
                self._calls.failed(service, unreachable=isinstance(error, ConnectFailed))
                self._count(service, error, lost=lost)
                self._warn(service, error)
                return
        self._count(None, error, lost=lost)

    def close(self, *, well: bool) -> None:
        """Gives up everything that is open."""
        self._calls.close(well=well)

    # What there is to do

    def _refresh(self) -> None:
        """Takes up addresses that are new, and sends nothing more to those that are gone."""
        for gone in self._calls.refresh():
            if gone.call is not None and self._spreads:
                gone.call.finish()  # what it has is answered still

    def _send(self, now: float) -> NextStep:
        """Sends one batch, or what ends them; or asks for one, or for a wait."""
        call = self._choose(now)
        if call is None:
            return NextStep.WAIT
        if self._again:
            self._send_by(call, heappop(self._again)[1], now)
            return NextStep.STEP
        if self._input_over:
            if call.finished:
                return NextStep.WAIT
            call.finish()
            return NextStep.STEP
        if self.fetching or not self._has_room():
            return NextStep.WAIT
        return NextStep.GIVE

    def _send_by(self, call: OpenCall, waiting: UnansweredBatch, now: float) -> None:
        if call.waiting and len(self._calls.services) > 1:
            # It is at work: this batch goes there all the same, and the next may not.
            self._begin(now, urgent=False)
        number, size = call.send(waiting, keep=self._spreads)
        self._numbers.bytes_sent += size
        if self._spreads and waiting.number == self._window.sent:
            self._window.send(size)
        if self._spec.batch_deadline is not None:
            due = now + self._spec.batch_deadline
            self._due.append((due, call, number, waiting.number))

    def _has_room(self) -> bool:
        held = 0 if self._held is None else self._held()
        if not self._spreads:
            if self._single is None:
                return False
            self._single.exchange.hold(held)
            return bool(self._single.exchange.room)
        self._window.held = held
        return self._window.open

    def _choose(self, now: float) -> OpenCall | None:
        """The call for the next batch: that with the fewest bytes that have no answer.

        None: there is no call with room now; one may have been begun.
        """
        if self._single is not None:
            return self._single if self._single.takes else None
        addresses = self._calls
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
        hedge = self._spec.hedge
        if any(not urgent or now - since < hedge for since in self._calls.opening):
            return
        self._calls.slow(now - hedge)
        service = self._calls.free(now)
        if service is not None:
            self._calls.begin(service)

    def _until(self, now: float) -> float:
        """Seconds until the next thing is due."""
        times = [now + _GLANCE]
        if self._end is not None:
            times.append(self._end)
        if self._due:
            times.append(self._due[0][0])
        hedged = (since + self._spec.hedge for since in self._calls.opening)
        times += [due for due in hedged if due > now]
        times += [
            service.backoff.until
            for service in self._calls.services
            if service.call is None and service.connecting is None and service.backoff.until > now
        ]
        return min(times) - now

    def _look(self, now: float) -> bool:
        """Whether a batch, or all of it, was too late."""
        if self._end is not None and now >= self._end:
            raise self._late()
        while self._due and self._due[0][0] <= now:
            _, call, place, number = self._due.popleft()
            if call not in self._calls.calls:
                continue
            if self._spreads:
                waiting = call.waiting.get(place)
                if waiting is None or waiting.batch is None:
                    continue
                self._too_late(call, number)
                waiting.batch = None  # its answer may still come, and is dropped
                if all(each.batch is None for each in call.waiting.values()):
                    self._calls.drop(call)  # what it is at is wanted no more
                return True
            if place >= call.exchange.settled:  # neither answered nor taken
                self._too_late(call, number)
        return False

    def _too_late(self, call: OpenCall, number: int) -> None:
        """A batch has no answer in time: raises that, or delivers it."""
        calling, address = self._spec, call.service.address
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
        if type(found) is Failed:
            self._unable(service, found.error)
        elif service not in self._calls.services:
            found.release()  # its address is there no more
        else:
            try:
                self._calls.call(service, found, deadline=self._left())
            except ConnectionLost as error:
                self._unable(service, error)

    def _accepted(self, call: OpenCall) -> None:
        """The accept message says what the handler is."""
        calling = self._spec
        names = {"peer": call.service.address, "handler": calling.handler}
        where = f"handler {calling.handler!r} at {call.service.address}"
        if self._spreads and not call.one_to_one:
            raise BadCall(
                f"{where} is no function of one batch, and at another address it is; "
                "is the same service behind all addresses?",
                **names,
            )
        reports = calling.on_error == "report" and calling.insists
        if reports and FAILURES not in call.exchange.capabilities:
            raise ConfigError(
                f"{where} is no function of one batch (or its service is older), so its failure "
                "ends the call and cannot be reported for a batch; use on_error='fail'"
            )
        if self._lost is not None and not call.idempotent:
            raise self._final(self._lost, self._nature(call))
        first = not self.accepted
        self.accepted = True
        if call.one_to_one:
            self._spreads = True
        else:
            self._single = call
            if self._spec.kind == "source":
                call.finish()  # it is sent nothing
            for other in tuple(self._calls.calls):
                if other is not call:  # begun because this one took its time
                    self._calls.drop(other)
        self.schema, self.capabilities = call.exchange.schema, call.exchange.capabilities
        if calling.ordered:  # here they are put in order
            self.capabilities -= {AS_COMPLETED}
        if first and self._opened is not None:
            self._opened(call.exchange.schema, self.capabilities)

    def _settle(self, call: OpenCall, number: int) -> UnansweredBatch | None:
        """The batch that is answered; None: this handler's answers are not those of batches."""
        call.service.backoff.succeeded()
        self._failures = 0
        self._failed.clear()
        if not self._spreads:
            return None
        waiting = call.answered(number)
        if waiting is None:
            raise BadCall(
                f"handler {self._spec.handler!r} at {call.service.address} answered batch "
                f"{number} of a call twice, and is a function of one batch",
                peer=call.service.address,
                handler=self._spec.handler,
            )
        return waiting

    def _failed_batch(self, call: OpenCall, number: int, error: AqueductError) -> None:
        waiting = self._settle(call, number)
        if waiting is None:
            self._line.append(BatchAnswer(number, None, error))
        elif waiting.batch is not None:
            error = renumbered(error, waiting.number)
            self._deliver(BatchAnswer(waiting.number, None, error))

    def _deliver(self, answer: BatchAnswer) -> None:
        if not self._spec.ordered:
            self._window.settle_one(answer.number)
            self._line.append(answer)
            return
        self._ready[answer.number] = answer
        while self._next in self._ready:  # those that wait for their turn fill the window, too
            self._window.settle_one(self._next)
            self._line.append(self._ready.pop(self._next))
            self._next += 1

    def _ended(self, call: OpenCall) -> None:
        self._calls.ended(call)
        if call is self._single:
            self._over = True
            self.counters = call.exchange.counters
            return
        unanswered = sum(waiting.batch is not None for waiting in call.waiting.values())
        if unanswered or not call.finished:
            raise BadCall(
                f"handler {self._spec.handler!r} at {call.service.address} ended well with "
                f"{unanswered} batches unanswered, and more to come",
                peer=call.service.address,
                handler=self._spec.handler,
            )

    # What went wrong

    def _left(self) -> float | None:
        """Seconds of the deadline that are left."""
        return None if self._end is None else max(0.001, self._end - time.monotonic())

    def _late(self) -> DeadlineExceeded:
        return self._spec.late(", ".join(self._calls.places))

    def _unable(self, service: Endpoint, error: BaseException) -> None:
        """A call could not be made."""
        if self._calls.over or not may_pass(error):
            raise error
        assert isinstance(error, AqueductError)
        unreachable = isinstance(error, ConnectFailed)
        self._calls.failed(service, unreachable=unreachable)
        self._refresh()
        self._count(service, error, lost=False)
        self._warn(service, error)

    def _broke(self, call: OpenCall, error: BaseException) -> None:
        """A call is over before its end."""
        addresses = self._calls
        addresses.ended(call)
        waiting = [each for each in call.waiting.values() if each.batch is not None]
        if self._spreads and call.finished and not waiting:
            return  # it has done what it was to do
        if self._calls.over or not may_pass(error):
            number = getattr(error, "batch", None)
            if self._spreads and number in call.waiting and isinstance(error, AqueductError):
                raise renumbered(error, call.waiting[number].number) from error.__cause__
            raise error
        assert isinstance(error, AqueductError)
        if call is self._single:
            self._single = None
            begun = self._received if self._spec.kind == "source" else call.sent or call.finished
            if begun:
                raise self._final(error, self._nature(call))
        elif waiting and not call.idempotent:
            raise self._final(error, self._nature(call))
        addresses.failed(call.service, unreachable=False)
        for each in waiting:
            heappush(self._again, (each.number, each))
        self._count(call.service, error, lost=bool(waiting))
        self._warn(call.service, error)

    def _warn(self, service: Endpoint, error: AqueductError) -> None:
        """Tells the log of the user that an address failed."""
        pause = max(0.0, service.backoff.until - time.monotonic())
        self._log.warning(
            "%r at %s: %s: %s; what has no answer is asked again, there not before %.1f s",
            self._spec.handler,
            service.address,
            type(error).__name__,
            error,
            pause,
        )

    def _count(self, service: Endpoint | None, error: AqueductError, *, lost: bool) -> None:
        """Raises ``error`` if that was one too many since the last answer.

        Unless batches were ``lost``, addresses count together: once each of them has failed, and
        no call is at work. An attempt on its way says nothing: a silent address always has one.
        """
        if service is not None:
            self._failed.add(service)
        if not lost:
            if any(each not in self._failed for each in self._calls.services):
                return
            if any(call.accepted and not call.finished for call in self._calls.calls):
                return
        self._failed.clear()
        if self._failures >= self._spec.retries:
            raise self._given_up(error)
        self._failures += 1

    def _given_up(self, error: AqueductError) -> AqueductError:
        tried = self._failures + 1
        places = self._calls.places
        if tried == 1 and len(places) == 1:
            return error
        times = "once" if tried == 1 else f"{tried} times"
        where = " and ".join(places)
        retries = self._spec.retries
        return with_note(error, f"tried {times} without an answer at {where} (retries={retries})")

    def _nature(self, call: OpenCall) -> str:
        """Why what a handler was sent is not sent again."""
        if not call.one_to_one:
            return "is no function of one batch"
        return "is not declared idempotent"

    def _final(self, error: AqueductError, what: str) -> AqueductError:
        """The error of a call that broke with batches under way that must not be sent again."""
        if not self._spec.retries:
            return error
        if self._spec.kind == "source":
            text = "gave batches before, so it is not called again: a source is not resumed"
            return with_note(error, f"handler {self._spec.handler!r} {text}")
        return with_note(
            error,
            f"handler {self._spec.handler!r} {what}, so what was sent is not sent again: only "
            "a function of one batch with idempotent=True is resumed",
        )
