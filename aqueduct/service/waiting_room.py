"""The waiting room of a handler with ``max_concurrency``: its calls wait here for their turn.

A call that finds no place waits. It gets Busy when the queue is full, or when it has waited too
long. Its line ends with the call, so a client that goes leaves its place at once.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Mapping
from contextvars import Context
from typing import Any, Protocol

from aqueduct.carriers.clock import clock_of
from aqueduct.config import Calls
from aqueduct.errors import AqueductError, Busy
from aqueduct.escaping import logger_of
from aqueduct.service.context import Call
from aqueduct.service.handlers import Handler
from aqueduct.service.turns import Line, Turns

__all__ = ["RunSource", "Ticket", "WaitingCall", "WaitingRoom", "WholeCalls", "run_in_turn"]

log = logger_of(__name__)


class WaitingCall(Protocol):
    """A call, for its waiting room."""

    call: Call

    @property
    def connection(self) -> object:
        """What it came on: calls of one connection are those of one peer."""

    def abort(self, reason: AqueductError) -> None:
        """Ends it."""


class RunSource(Protocol):
    """How the work of a handler is done in turns."""

    what: str
    """What has a place, for people: "calls" or "batches"."""

    def added(self, item: Any) -> None:
        """``item`` waits. Under the lock of the room, like the next three."""

    def dropped(self, items: list[Any]) -> None:
        """They wait no more, and will not run."""

    def take(self, turns: Turns[Any], now: float) -> list[tuple[Line[Any], Any]]:
        """What runs next; empty: nothing now. In any thread."""

    def rest(self, turns: Turns[Any], now: float) -> None:
        """Nothing begins now. On the loop."""

    def start(self, run: list[tuple[Line[Any], Any]]) -> None:
        """Has it run. On the loop."""

    def left(self, ticket: Ticket) -> None:
        """A call is over. On the loop."""

    def close(self) -> None:
        """Nothing begins any more."""


class Ticket:
    """What one call has in the waiting room."""

    __slots__ = ("_refused", "call", "context", "deliver", "line", "room")

    def __init__(self, room: WaitingRoom, running: WaitingCall, concurrency: int) -> None:
        self.room = room
        self.line: Line[Any] = Line(running.connection, concurrency, self)
        self.call = running.call
        self.context = Context()
        """In which its handler runs."""
        self.deliver: Callable[[int, Any, BaseException | None], None] | None = None
        """Told on the loop of each batch that has run: its number, and its answer or error."""
        self._refused: Callable[[AqueductError], None] | None = running.abort

    @property
    def waits(self) -> bool:
        """Whether the call has something waiting here, and nothing running."""
        return self.line.since is not None

    def add(self, item: Any) -> None:
        """``item`` waits for its turn. Raises Busy."""
        self.room.add(self, item)

    def leave(self) -> None:
        """The call is over: what has not begun is dropped."""
        self.room.leave(self)

    def refuse(self, text: str) -> None:
        """Ends the call with Busy."""
        if self._refused is not None:
            self._refused(Busy(text, peer=self.call.peer, handler=self.call.handler))

    def forget(self) -> None:
        """The call has ended: it is not known here any more, which were a cycle."""
        self._refused = self.deliver = None


class WaitingRoom:
    """Which calls of one handler run, and which wait. Lives on the service's event loop.

    Threads may ``trade`` and look at what is counted.
    """

    def __init__(
        self, handler: Handler, limits: Calls, source: Callable[[WaitingRoom], RunSource]
    ) -> None:
        """``source``: makes what runs the work."""
        assert handler.max_concurrency is not None
        queue = limits.queue if handler.queue is None else handler.queue
        self.handler = handler
        self.loop = asyncio.get_running_loop()
        self.time = clock_of(self.loop)
        self._turns: Turns[Any] = Turns(handler.max_concurrency, queue)
        self._patience = limits.queue_deadline
        self._lock = threading.Lock()
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False
        self._source = source(self)

    @property
    def running(self) -> int:
        """Places that are taken."""
        return self._turns.running

    @property
    def waiting(self) -> int:
        """Calls that wait."""
        return len(self._turns.waiting)

    def enter(self, running: WaitingCall) -> Ticket:
        """Lets a call in. Raises Busy if it could not even wait.

        It takes nobody's place yet: it may still be refused, or never have anything to run.
        """
        ticket = Ticket(self, running, self.handler.concurrency)
        self._find_room(ticket)
        return ticket

    def add(self, ticket: Ticket, item: Any) -> None:
        """``item`` of a call waits for its turn. Raises Busy."""
        line = ticket.line
        if not line.begun and line.since is None:
            self._make_room(ticket)
        with self._lock:
            self._source.added(item)
            self._turns.add(line, item, self.time())
        if self._timer is None:
            self._timer = self.loop.call_later(self._patience, self._look)
        self.begin()

    def begin(self) -> None:
        """Begins what may run now."""
        while not self._closed:
            with self._lock:
                now = self.time()
                run = self._source.take(self._turns, now)
                if not run:
                    self._source.rest(self._turns, now)
                    return
            self._source.start(run)

    def trade(self, lines: list[Line[Any]]) -> list[tuple[Line[Any], Any]]:
        """A run of ``lines`` has ended; gives the next one, which has its place. In any thread."""
        with self._lock:
            now = self.time()
            self._turns.done(lines, now)
            return [] if self._closed else self._source.take(self._turns, now)

    def done(self, lines: list[Line[Any]]) -> None:
        """A run of ``lines`` has ended; others begin."""
        with self._lock:
            self._turns.done(lines, self.time())
        self.begin()

    def leave(self, ticket: Ticket) -> None:
        """A call is over."""
        with self._lock:
            self._source.dropped(list(ticket.line.items))
            self._turns.leave(ticket.line)
        self._source.left(ticket)

    def close(self) -> None:
        """The service has ended."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._source.close()

    # Within

    def _find_room(self, ticket: Ticket) -> tuple[Line[Any], str] | None:
        """Whose place a call that has not begun would take, and why; None: it needs none.

        Raises Busy if there is neither a place nor room to wait.
        """
        with self._lock:
            turns = self._turns
            if not turns.full:
                return None
            displaced = turns.displaced(ticket.line.peer)
            text = (
                f"handler {self.handler.name!r} has {turns.running} {self._source.what} running, "
                f"which is its limit (max_concurrency), and {turns.newcomers} calls waiting, which "
                "is its limit too (queue); try again later or elsewhere"
            )
        if displaced is None:
            raise Busy(text, peer=ticket.call.peer, handler=ticket.call.handler)
        return displaced, text

    def _make_room(self, ticket: Ticket) -> None:
        """Another call gives its place to this one, if need be. Raises Busy if none can."""
        found = self._find_room(ticket)
        if found is None:
            return
        displaced, text = found
        self.leave(displaced.owner)  # at once: its call may take a moment to end
        displaced.owner.refuse(
            f"{text}; this call gave its place in the queue to another peer, which has fewer there"
        )

    def _look(self) -> None:
        """Ends the calls that have waited too long."""
        self._timer = None
        now = self.time()
        late: list[Line[Any]] = []
        with self._lock:
            turns = self._turns
            due = now + self._patience
            for line in turns.waiting:
                assert line.since is not None
                if line.since + self._patience > now:
                    due = line.since + self._patience
                    break
                late.append(line)
            occupied = turns.running or len(turns.waiting) > len(late)
        if occupied:
            self._timer = self.loop.call_later(due - now, self._look)
        for line in late:
            log.info("%r waited too long for its turn", line.owner.call)
            self.leave(line.owner)
            handler = self.handler
            line.owner.refuse(
                f"the call waited {self._patience:g} s for its turn (Calls.queue_deadline): "
                f"handler {handler.name!r} runs {handler.max_concurrency} {self._source.what} "
                "at once (max_concurrency); try again later or elsewhere"
            )


class WholeCalls:
    """Gives each call a place for as long as its handler runs: generators, sources and sinks."""

    what = "calls"

    def __init__(self, room: WaitingRoom) -> None:
        self._room = room

    def added(self, item: Any) -> None:
        """See RunSource."""

    def dropped(self, items: list[Any]) -> None:
        """See RunSource."""

    def take(self, turns: Turns[Any], now: float) -> list[tuple[Line[Any], Any]]:
        """See RunSource."""
        return turns.take(now)

    def rest(self, turns: Turns[Any], now: float) -> None:
        """See RunSource."""

    def start(self, run: list[tuple[Line[Any], Any]]) -> None:
        """See RunSource."""
        for _, granted in run:
            if not granted.done():  # its call may just be ending
                granted.set_result(None)

    def left(self, ticket: Ticket) -> None:
        """See RunSource."""

    def close(self) -> None:
        """See RunSource."""


async def run_in_turn(
    ticket: Ticket, run: Callable[[], Awaitable[Mapping[str, int] | None]]
) -> Mapping[str, int] | None:
    """Calls ``run`` once the call has a place, which it has until that returns."""
    room, line = ticket.room, ticket.line
    try:
        granted: asyncio.Future[None] = room.loop.create_future()
        ticket.add(granted)
        await granted
        return await run()
    finally:
        ticket.leave()
        if line.active:
            room.done([line])
