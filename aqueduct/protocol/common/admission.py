"""Which messages may come, and which receivers wait for room.

A message is admitted once its head has passed the limits: its size plus an overhead is charged
to the connection's budget, and to the process's, until the application gives it back. Above a
budget one message goes on at a time, the oldest whose reader waits, so that nothing waits for ever
for room that only its own arrival would make.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Final, TypeAlias, cast

from aqueduct._speedups import channels as codec
from aqueduct._speedups.channels.receiver import EMPTY, ReceiveBudget, ReceiveQueue
from aqueduct._speedups.channels.recv_streams import RecvStream
from aqueduct.config import Flow
from aqueduct.protocol.common.events import Headers

__all__ = ["Admission", "Announcement", "Placement"]

# In place of what an idle receiver does not need; it cannot be changed.
NOBODY: Final = cast("OrderedDict[RecvStream, None]", EMPTY)

Placement: TypeAlias = Callable[[Headers, int], Any]
"""Given a message's headers and size in bytes: the writable buffer it is to land in, or None."""

Announcement: TypeAlias = Callable[[Headers], tuple[int, int] | None]
"""Given the headers of a message: where it begins in a batch that comes in several messages, and
the bytes of that batch; None if it is not part of one."""


class Admission:
    """Of the messages of all receivers of one connection."""

    __slots__ = ("_budget", "_channel_bytes", "_overhead", "_window")

    def __init__(self, budget: ReceiveBudget, flow: Flow) -> None:
        self._budget = budget
        self._overhead = flow.message_overhead
        self._window = flow.initial_window
        self._channel_bytes = flow.channel_receive_bytes

    def cost(self, size: int) -> int:
        """What a message of this many bytes, headers included, is charged."""
        return size + self._overhead

    def admit(self, queue: ReceiveQueue, size: int) -> bool:
        """Charges a message of ``size`` bytes, headers included, if it may come."""
        charge = size + self._overhead
        if queue.outstanding and self._is_full(queue, charge):
            return False
        return self._charge(queue, charge, begun=False)

    def admit_head(self, queue: ReceiveQueue, head: codec.MessageHead) -> bool:
        """Charges the message of a head if it may come; with a part of a batch all that follows.

        So a batch that has begun finds room for all of its messages.
        """
        size = head.size + head.overhead
        part = _part(queue, head)
        if part is None:
            return self.admit(queue, size)
        if 0 < head.size <= queue.pledged:
            queue.pledged -= head.size
            queue.charge(self.cost(size) - head.size, 1)
            return True
        offset, total = part
        rest = 0 if queue.pledged else max(0, total - offset - head.size)
        if not offset:
            if not self.admit(queue, size + rest):
                return False
        # Else the batch began before its size was known.
        elif not self._charge(queue, self.cost(size + rest), begun=True):
            return False
        queue.pledged += rest
        return True

    def needs(self, queue: ReceiveQueue, head: codec.MessageHead) -> int:
        """What the message of a head will be charged when it is admitted."""
        offset, total = _part(queue, head) or (0, 0)
        return self.cost(max(head.size, total - offset) + head.overhead)

    def give_up(self, queue: ReceiveQueue, size: int) -> None:
        """A message that was admitted will never be whole: its stream was reset."""
        queue.charge(-(size + self._overhead), -1)

    def left(self, queue: ReceiveQueue, stream: RecvStream) -> None:
        """A stream of the peer says no more to this receiver: what it holds returns."""
        if stream.partial >= 0:
            self.give_up(queue, stream.partial)
            stream.partial = -1
        if stream.head is not None:
            stream.head = None
            self.wait_no_more(queue, stream)
            if queue.waiting:
                self._budget.relieved[queue] = None  # the next in line may need less
            else:
                self._budget.starved.pop(queue, None)

    # Who waits

    def wait(self, queue: ReceiveQueue, stream: RecvStream, head: codec.MessageHead) -> None:
        """A message finds no room: its stream is read on when there is some."""
        stream.head = head
        if queue.waiting is NOBODY:
            queue.waiting = OrderedDict()
        queue.waiting[stream] = None
        self.queue_up(queue)

    def wait_no_more(self, queue: ReceiveQueue, stream: RecvStream) -> None:
        """Its message is admitted, or will not come."""
        del queue.waiting[stream]
        queue.waiting = queue.waiting or NOBODY

    def queue_up(self, queue: ReceiveQueue) -> None:
        """The receiver takes its place among those who wait for the budget, if it does.

        Room of its own is noticed by itself (``ReceiveBudget.relieved``).
        """
        starved = self._budget.starved
        head = _first_head(queue)
        if head is None or (
            queue.outstanding
            and not _has_begun(queue, head)
            and self._is_full(queue, self.needs(queue, head))
        ):
            starved.pop(queue, None)
        else:
            starved.setdefault(queue, None)
            if not self._budget.fits_process(self.needs(queue, head)):
                self._wait_for_process()

    def is_awaited(self, queue: ReceiveQueue) -> bool:
        """Whether the reader waits for the message whose head waits first."""
        head = _first_head(queue)
        return _is_awaited(queue, begun=head is not None and _has_begun(queue, head))

    # Within

    def _wait_for_process(self) -> None:
        """A receiver waits for room in the process's budget: it is told once there may be some."""
        budget, process = self._budget, self._budget.process
        if budget in process.waiting:
            return
        begins = not process.waiting
        process.waiting[budget] = None
        if begins:
            process.press()
        elif budget.wake is not None:
            budget.wake()  # another thread may have made room just before it could tell

    def _is_full(self, queue: ReceiveQueue, charge: int) -> bool:
        return queue.charged + charge > self._channel_bytes

    def _charge(self, queue: ReceiveQueue, charge: int, *, begun: bool) -> bool:
        """Charges a message within the budgets, or above them; whether it may.

        One may be above at a time. A message that fits what the peer may send unasked takes no more
        memory once it is admitted.
        """
        if queue.charge_within(charge):
            return True
        if charge <= self._window and queue.assured and not queue.outstanding:
            queue.charge(charge, 1)
            return True
        return _is_awaited(queue, begun) and queue.charge_above(charge)


def _part(queue: ReceiveQueue, head: codec.MessageHead) -> tuple[int, int] | None:
    """Where in its batch a message begins, and the batch's size; None: it is no part of one."""
    if queue.announce is None or queue.placement_key not in dict(head.headers):
        return None
    part: tuple[int, int] | None = queue.announce(head.headers)
    return part


def _first_head(queue: ReceiveQueue) -> codec.MessageHead | None:
    first = next(iter(queue.waiting), None)
    return None if first is None else first.head


def _has_begun(queue: ReceiveQueue, head: codec.MessageHead) -> bool:
    """Whether a message goes on with a batch that came in part."""
    part = _part(queue, head)
    return part is not None and part[0] > 0


def _is_awaited(queue: ReceiveQueue, begun: bool) -> bool:
    """Whether the reader waits for the next message, whatever else is unread.

    A reader that does not tell when it waits does so while nothing is there to be read. What
    is there of a batch that has ``begun`` is of no use before the rest has come.
    """
    if not queue.assured or (queue.outstanding and not begun):
        return False
    return not queue.told or (queue.wanted and not queue.held)
