"""What the handles of a connection have in common: the core, and what waits on it."""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from contextlib import suppress
from itertools import islice
from typing import Any, Final, Protocol

from aqueduct.carriers.transports.waiting import raised
from aqueduct.config import Config
from aqueduct.errors import ConnectionLost
from aqueduct.protocol.reactivesocket.connection import ReactiveConnection
from aqueduct.protocol.reactivesocket.outbox import FrameQueue
from aqueduct.reactivesocket.deadlines import RequestDeadlines, WaitDeadline
from aqueduct.reactivesocket.memory import ReactiveMemory

__all__ = ["ReactiveFace", "Responding"]

_TURNS: Final = 16
"""So many that wait for room are told of it at once. Those for whom it is too little come next."""
_IN_A_ROW: Final = 64
"""So many items are taken without a pause; then other tasks have a turn."""


class Responding(Protocol):
    """A request of the peer that waits for room."""

    queue: FrameQueue

    def changed(self) -> None:
        """There may be room."""


class ReactiveFace:
    """The core of a connection, as requests of both sides use it.

    ``advance`` lets leave what may, and is the connection's.
    """

    def __init__(
        self, core: ReactiveConnection, config: Config, advance: Callable[[], None]
    ) -> None:
        self.core = core
        self.config = config
        self.error: ConnectionLost | None = None
        """Why the connection is over, once it is."""
        self.advancing = False
        """Whether ``advance`` is at work: it sends what is added meanwhile."""
        self.closing = False
        """Whether this side closes the connection: then nothing new is requested."""
        self.requested: dict[int, Any] = {}
        """Streams of this side, by what is told of them."""
        self.responding: dict[int, Any] = {}
        """Requests of the peer that have not ended."""
        self.held = False
        """Whether nothing is read, as too much is in use. ``advance`` finds out what was freed."""
        self.unsent = 0
        """Bytes that have left the core and not the process."""
        self.lent = 0
        """Bytes of items that the application has, beside what the core counts. After the end:
        of all that it has, or can take."""
        self.untaken = 0
        """Bytes of items that came and were not taken. The core counts them, too."""
        self.in_hand = 0
        """Bytes of requests of the peer that the application has. The core counts them, too."""
        self.deadlines = RequestDeadlines(config.timing.progress_deadline)
        self._advance_now = advance
        self._counting = threading.Lock()
        """Of whoever settles after the end, in any thread."""
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self.memory = ReactiveMemory(config, self.advance_late)
        self._soon: asyncio.Handle | None = None
        self._late = False
        self._returned: deque[int] = deque()
        """What items cost that were freed. Any thread adds to this, and to those below."""
        self._released: deque[int] = deque()
        """The same of requests of the peer, which the core counts. Below zero: they cost more."""
        self._dropped: deque[Any] = deque()
        """Streams of this side that nobody reads any more."""
        self._blocked: OrderedDict[Responding, None] = OrderedDict()
        """Requests of the peer that wait for room of the connection."""
        self._granted: set[Responding] = set()
        """Those of them whose turn it is to send an item."""
        self._again: OrderedDict[Responding, None] = OrderedDict()
        """Those of these that found no room left: they are told before all others."""
        self._full: set[Responding] = set()
        """Those that have as much to leave as one may."""
        self._senders: OrderedDict[object, asyncio.Future[None]] = OrderedDict()
        """Requests of this side that wait for room. Each keeps its place until it is sent."""
        self._in_a_row = 0

    def usable(self) -> None:
        """Raises why the connection is over, if it is."""
        if self.error is not None:
            raise raised(self.error)

    def deadline(self, timeout: Any, missing: str) -> WaitDeadline:
        """Of one wait, in seconds; None: Timing.progress_deadline."""
        if timeout is not None:
            return WaitDeadline(timeout, missing)
        return WaitDeadline(self.deadlines.seconds, missing, "Timing.progress_deadline")

    def advance_soon(self) -> None:
        """As ``advance``, once the tasks that can run have run: their frames leave together."""
        if self._soon is None and self.error is None and not self.advancing:
            self._soon = self._loop.call_soon(self._advance)

    def advance_late(self) -> None:
        """As ``advance_soon``, from any thread, and after the end."""
        if self.error is not None:
            self.count_over()
            return
        with suppress(RuntimeError):  # of a loop that has ended
            if threading.get_ident() == self._thread:
                self.advance_soon()
            elif not self._late:
                self._late = True
                self._loop.call_soon_threadsafe(self._advance)

    def end(self, error: ConnectionLost) -> None:
        """The connection is over: from now on ``lent`` has it all, and the core does not count."""
        self.lent += self.untaken + self.in_hand
        self.untaken = self.in_hand = 0
        self.error = error

    def stop(self) -> None:
        """The connection is over: nobody waits any more."""
        if self._soon is not None:
            self._soon.cancel()
            self._soon = None
        self.deadlines.stop()
        for sender in self._senders.values():
            _wake(sender)
        blocked = (*self._again, *self._blocked, *self._full)
        self._again.clear()
        self._blocked.clear()
        self._granted.clear()
        self._full.clear()
        for request in blocked:
            request.changed()

    async def give_way(self) -> None:
        """Lets other tasks run after several items without a wait."""
        self._in_a_row += 1
        if self._in_a_row >= _IN_A_ROW:
            self._in_a_row = 0
            await asyncio.sleep(0)

    # What came, in the application's hands

    def lend(self, cost: int) -> None:
        """An item goes to the application: it no longer keeps the connection from reading."""
        if self.error is None:
            self.lent += cost
            self._untake(cost)

    def let_go(self, cost: int) -> None:
        """Nobody takes items that cost this."""
        if self.error is None:
            self._untake(cost)
        else:
            self.give_back(cost)

    def give_back(self, cost: int) -> None:
        """An item of the application is done with. In any thread."""
        if threading.get_ident() == self._thread and self.error is None:
            self.lent -= cost
            self.memory.give_back(cost)
        else:
            self._returned.append(cost)
            self.advance_late()

    def give_back_request(self, cost: int) -> None:
        """The data of a request of the peer are done with. In any thread."""
        self._released.append(cost)
        self.advance_late()

    def charge_request(self, cost: int) -> None:
        """The application has made so much more of the data of a request. In any thread."""
        self.give_back_request(-cost)

    def drop(self, arriving: Any) -> None:
        """Nobody reads this stream of this side any more. In any thread."""
        self._dropped.append(arriving)
        self.advance_late()

    def count_over(self) -> None:
        """The connection is over: what the application has, or can take, is all that counts."""
        again = True
        # Another thread may be at it, or this one, which collects garbage within: it looks again.
        while again and self._counting.acquire(blocking=False):
            try:
                self.settle()
                self.memory.end(self.lent)
            finally:
                self._counting.release()
            again = self.unsettled

    def settle(self) -> None:
        """Does what was left to do by other threads."""
        while self._returned:
            self.lent -= self._returned.popleft()
        while self._released:
            cost = self._released.popleft()
            if self.error is not None:
                self.lent -= cost
                continue
            self.core.release(cost)
            self.in_hand -= cost
        while self._dropped:
            found = self._dropped.popleft()
            found.forget()
            if self.requested.pop(found.stream, None) is not None:
                self.core.cancel(found.stream)

    # Room for what is to leave

    def has_room(self) -> bool:
        """Whether the connection, and the process, have room for more that waits to leave."""
        waiting = self.core.queued_bytes + self.unsent
        return (
            self.core.writable
            and waiting < self.config.flow.connection_high_water
            and self.memory.may_send(waiting)
        )

    def has_room_for(self, request: Responding) -> bool:
        """The same for one request of the peer, which is told if there is none."""
        if request.queue.cost >= self.config.flow.channel_high_water:
            self._full.add(request)
            return False
        granted = request in self._granted
        if not self.has_room():
            (self._again if granted else self._blocked).setdefault(request)
            return False
        if (self._again or self._blocked) and not granted:
            self._blocked.setdefault(request)  # others were before it
            return False
        return True

    def sent(self, request: Responding) -> None:
        """It has sent an item: others that wait have their turn."""
        if request in self._granted:
            self._granted.discard(request)
            self._again.pop(request, None)
        self.advance_soon()

    def forget(self, request: Responding) -> None:
        """It waits no more."""
        self._again.pop(request, None)
        self._blocked.pop(request, None)
        self._full.discard(request)
        self._granted.discard(request)

    @property
    def free(self) -> bool:
        """Whether a request may be sent at once, and nobody waits for that."""
        return not self._senders and self.error is None and self.has_room()

    async def wait_room(self) -> None:
        """Waits until a request may be sent. The caller has a deadline."""
        place = object()
        try:
            while self.error is None and not self._may_send(place):
                self._senders[place] = sender = self._loop.create_future()
                await sender
        finally:
            if self._senders.pop(place, None) is not None:
                self.advance_soon()  # it is the turn of the next, also if this one is given up
        self.usable()

    def tell_room(self) -> bool:
        """Something has left: whoever waits goes on, in turn, as long as there is room.

        True: others wait for what these make of it.
        """
        if self._full:
            most = self.config.flow.channel_high_water
            for request in [each for each in self._full if each.queue.cost < most]:
                self._full.discard(request)
                self._blocked.setdefault(request)
        for _ in range(min(len(self._again) + len(self._blocked), _TURNS)):
            waiting = self._again or self._blocked
            if not waiting or not self.has_room():
                break
            request, _ = waiting.popitem(last=False)
            self._granted.add(request)
            request.changed()
        if self._senders and self.has_room():
            for sender in islice(self._senders.values(), _TURNS):
                _wake(sender)
        return bool(self._again or self._blocked) and self.has_room()

    @property
    def unsettled(self) -> bool:
        """Whether ``settle`` has something to do."""
        return bool(self._returned or self._released or self._dropped)

    @property
    def crowded(self) -> bool:
        """Whether so much waits to leave that nothing more is read: it may add to that.

        Senders that wait for room come to half of this. So two peers do not wait for each other.
        """
        waiting = self.core.queued_bytes + self.unsent
        return waiting > 2 * self.config.flow.connection_high_water

    # Within

    def _untake(self, cost: int) -> None:
        self.core.release(cost)
        self.untaken -= cost
        if self.held:
            self.advance_soon()

    def _may_send(self, place: object) -> bool:
        """Whether it is the turn of who waits at this place, or begins to wait."""
        return next(iter(self._senders), place) is place and self.has_room()

    def _advance(self) -> None:
        self._soon, self._late = None, False
        self._advance_now()


def _wake(sender: asyncio.Future[None]) -> None:
    if not sender.done():
        sender.set_result(None)
