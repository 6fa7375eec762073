"""The receiver half of a channel: numbers, queue, admission, acks and its ends (section 3.4).

A message is admitted once its head has passed the limits: its size plus an overhead is charged
to the connection's budget, and to the process's, until the application gives it back. Above a
budget one message goes on at a time, the oldest whose reader waits, so that nothing waits for ever
for room that only its own arrival would make.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any, Final, TypeAlias, cast

from aqueduct._speedups.channels import codec
from aqueduct._speedups.channels.message_batches import Received
from aqueduct._speedups.channels.receiver import EMPTY, ReceiverBase
from aqueduct._speedups.channels.tracker import ReceivedNumbers, UnreliableReceived
from aqueduct.errors import (
    Cancelled,
    Finished,
    LostInTransit,
    MessageLost,
    ReceiverClosed,
    SequenceError,
)
from aqueduct.protocol.channels import ids
from aqueduct.protocol.channels.context import ConnectionContext, HalfError
from aqueduct.protocol.channels.events import Headers, Readable
from aqueduct.protocol.channels.recv_streams import RecvStream
from aqueduct.protocol.channels.send_streams import SendStream
from aqueduct.protocol.channels.state import RECEIVER, ReceiverInput, ReceiverState

__all__ = ["Placement", "Received", "ReceiverHalf"]

# In place of what an idle channel does not need; they cannot be changed.
NO_MESSAGES: Final = cast("deque[Received]", ())
NO_STREAMS: Final = cast("dict[RecvStream, None]", EMPTY)
NOBODY: Final = cast("OrderedDict[RecvStream, None]", EMPTY)

Placement: TypeAlias = Callable[[Headers, int], Any]
"""Given a message's headers and size in bytes: the writable buffer it is to land in, or None."""

Announcement: TypeAlias = Callable[[Headers], tuple[int, int] | None]
"""Given the headers of a message: where it begins in a batch that comes in several messages, and
the bytes of that batch; None if it is not part of one."""


class ReceiverHalf(ReceiverBase):
    """One receiver half. Made by the connection; its user takes messages, or closes."""

    is_sender: Final = False

    __slots__ = (
        "__weakref__",
        "_shared",
        "channel",
        "handle",
    )

    def __init__(
        self, shared: ConnectionContext, channel: int, *, given: bool, assured: bool
    ) -> None:
        self._shared = shared
        self.channel = channel
        self.state = ReceiverState.OPEN
        self.given = given
        """Whether the application got the handle, or will with the message that carries it."""
        self.assured = assured
        """Whether one message finds room whatever the connection's budget: the application has
        the handle, so it can make that room. What only waits for its handle has no such claim."""
        self.handle: Any = None
        self.numbers = ReceivedNumbers(shared.config.limits.received_ranges)
        self._oneshot = bool(channel & ids.ONESHOT)
        # Of ReceiverBase, where they begin empty:
        # error: what a read raises once the queue is empty; None while it lives.
        # waiting: streams whose next message was not admitted, in order.
        # streams: the peer's streams that are routed here, in order.
        # evicted: messages evicted by the last datagram, whose attachments are to be released.
        # nacked: unreliable messages that did not come in time.
        # patient: CLOSE_RECEIVER may leave with what is sent next, within the delay of acks,
        # instead of causing a packet of its own (AQ-R33), once all has come.
        # placement: a Placement; with a placement_key it is asked for messages with a header of
        # this key alone.
        # announce: an Announcement, asked for messages with that header.
        # _unreliable: an UnreliableReceived; most channels never need it.
        # _receipt: the last entry of ``ConnectionContext.receipt_due`` for this half, while it
        # stands there.
        # _declared: SENT_RELIABLE, once FINISH_SENDER told it.

    # Admission

    def admit(self, size: int) -> bool:
        """Charges a message of ``size`` bytes, headers included, if it may come."""
        charge = size + self._shared.config.flow.message_overhead
        if self._outstanding and self._is_full(charge):
            return False
        if not (self.charge_within(charge) or self._goes_on_above(charge)):
            return False
        self._outstanding += 1
        return True

    def admit_head(self, head: codec.MessageHead) -> bool:
        """Charges the message of a head if it may come; with a part of a batch all that follows.

        So a batch that has begun finds room for all of its messages.
        """
        size = head.size + head.overhead
        part = self._part(head)
        if part is None:
            return self.admit(size)
        if 0 < head.size <= self.pledged:
            self.pledged -= head.size
            self._charge(self.cost(size) - head.size)
            self._outstanding += 1
            return True
        offset, total = part
        rest = 0 if self.pledged else max(0, total - offset - head.size)
        if not offset:
            if not self.admit(size + rest):
                return False
        else:  # the batch began before anybody could tell how large it is
            charge = self.cost(size + rest)
            if not (self.charge_within(charge) or self._goes_on_above(charge, begun=True)):
                return False
            self._outstanding += 1
        self.pledged += rest
        return True

    def _part(self, head: codec.MessageHead) -> tuple[int, int] | None:
        """Where in its batch a message begins, and the batch's size; None: it is no part of one."""
        if self.announce is None or self.placement_key not in dict(head.headers):
            return None
        part: tuple[int, int] | None = self.announce(head.headers)
        return part

    def needs(self, head: codec.MessageHead) -> int:
        """What the message of a head will be charged when it is admitted."""
        offset, total = self._part(head) or (0, 0)
        return self.cost(max(head.size, total - offset) + head.overhead)

    @property
    def awaited(self) -> bool:
        """Whether the reader waits for the message whose head waits first."""
        head = next(iter(self.waiting)).head if self.waiting else None
        part = None if head is None else self._part(head)
        return self._is_awaited(begun=part is not None and part[0] > 0)

    def _is_awaited(self, begun: bool) -> bool:
        """Whether the reader waits for the next message, whatever else is unread.

        A reader that does not tell when it waits does so while nothing is there to be read. What
        is there of a batch that has ``begun`` is of no use before the rest has come.
        """
        if not self.assured or (self._outstanding and not begun):
            return False
        return not self.told or (self.wanted and not self.held)

    def _goes_on_above(self, charge: int, begun: bool = False) -> bool:
        """Charges a message that may go on above a budget; whether it may.

        One may at a time. A message that fits what the peer may send unasked takes no more memory
        once it is admitted.
        """
        flow = self._shared.config.flow
        if charge <= flow.initial_window and self.assured and not self._outstanding:
            self._charge(charge)
            return True
        return self._is_awaited(begun) and self.charge_above(charge)

    def admit_small(self, size: int) -> None:
        """Charges a message that was admitted without asking (see ``room``)."""
        self._charge(size + self._shared.config.flow.message_overhead)
        self._outstanding += 1

    def place(self, head: codec.MessageHead) -> Any:
        """Where a message is to land; None: anywhere. Raises what the hook raises."""
        if self.placement is None:
            return None
        if self.placement_key is not None and self.placement_key not in dict(head.headers):
            return None
        return self.placement(head.headers, head.size)

    def wait(self, stream: RecvStream, head: codec.MessageHead) -> None:
        """A message finds no room: its stream is read on when there is some."""
        stream.head = head
        if self.waiting is NOBODY:
            self.waiting = OrderedDict()
        self.waiting[stream] = None
        self.queue_up()

    def queue_up(self) -> None:
        """Takes its place among those who wait for the budget, if that is what it waits for.

        Room of its own is noticed by itself (``ConnectionContext.relieved``).
        """
        starved = self._shared.starved
        first = next(iter(self.waiting), None)
        head = first.head if first is not None else None
        part = None if head is None else self._part(head)
        begun = part is not None and part[0] > 0
        if head is None or (self._outstanding and not begun and self._is_full(self.needs(head))):
            starved.pop(self, None)
        else:
            starved.setdefault(self, None)
            if not self._shared.fits_process(self.needs(head)):
                self._shared.wait_for_process()

    def handed_over(self) -> None:
        """The application has the handle now."""
        self.assured = True
        if self.waiting:
            self._shared.relieved[self] = None

    @property
    def streams_land(self) -> bool:
        """Whether a message that was admitted is not whole yet."""
        return any(stream.partial >= 0 for stream in self.streams)

    def routed(self, stream: RecvStream) -> None:
        """One of the peer's streams is about this channel."""
        if self.streams is NO_STREAMS:
            self.streams = {}
        self.streams[stream] = None

    def left_by(self, stream: RecvStream) -> None:
        """One of the peer's streams says no more here: what it holds returns."""
        if stream in self.streams:
            del self.streams[stream]
            self.streams = self.streams or NO_STREAMS
        if stream.partial >= 0:
            self.give_up(stream.partial)
            stream.partial = -1
        if stream.head is not None:
            stream.head = None
            self.wait_no_more(stream)
            if self.waiting:
                self._shared.relieved[self] = None  # the next in line may need less
            else:
                self._shared.starved.pop(self, None)

    def wait_no_more(self, stream: RecvStream) -> None:
        """Its message is admitted, or will not come."""
        del self.waiting[stream]
        self.waiting = self.waiting or NOBODY

    def give_up(self, size: int) -> None:
        """A message that was admitted will never be whole: its stream was reset."""
        self._charge(-(size + self._shared.config.flow.message_overhead))
        self.settled(1)

    def recharge(self, charged: int, size: int) -> None:
        """A message that was charged with ``charged`` bytes has ``size``."""
        if charged != size:
            self._charge(size - charged)

    def cost(self, size: int) -> int:
        """What a message of this many payload bytes is charged."""
        return size + self._shared.config.flow.message_overhead

    # What the peer sends

    def check_number(self, number: int) -> None:
        """A number must be new, and within what FINISH_SENDER declared (AQ-R13, AQ-R18)."""
        if number == 2**64 - 1:
            raise SequenceError(f"MESSAGE_NUM 2^64-1 on {ids.describe(self.channel)} (AQ-R13)")
        if 0 <= self._declared <= number:
            raise SequenceError(
                f"message {number} on {ids.describe(self.channel)} after a FINISH_SENDER "
                f"that counts {self._declared} (AQ-R18)"
            )
        if self._oneshot and self._unreliable is not None and self._unreliable.announced:
            raise SequenceError("a oneshot channel carries its message twice (AQ-R28)")
        if number in self.numbers:
            raise SequenceError(
                f"message {number} arrived twice on {ids.describe(self.channel)} (AQ-R13)"
            )

    def message(self, received: Received) -> None:
        """A whole message, admitted before, in the order of its stream (AQ-R34)."""
        self.numbers.add(received.number)
        self._deliver(received)
        if self._oneshot or (self._declared >= 0 and self._all_arrived):
            self._complete()
        else:
            self._schedule_ack()

    def wants_datagram(self, number: int, size: int) -> bool:
        """Whether an unreliable message is new and finds room; charges it if so.

        A full queue loses its oldest undelivered unreliable message (AQ-R31). What finds no
        room even so counts as lost on the way.
        """
        if self._unreliable is None:
            self._unreliable = UnreliableReceived(self._shared.config.limits.received_ranges)
        if number == 2**64 - 1 or (self._oneshot and number):
            raise SequenceError(
                f"unreliable message {number} on {ids.describe(self.channel)} (AQ-R13, AQ-R28)"
            )
        if self._oneshot and self._declared > 0:
            raise SequenceError("a oneshot channel carries its message twice (AQ-R28)")
        if number < self._unreliable.settled or number in self._unreliable:
            return False  # networks may duplicate; what was nacked stays so (AQ-39, AQ-R13)
        if self.waiting and not self._evict():
            return False  # a reliable message waits for this room
        while not self.admit(size):
            if not self._evict():
                return False
        if self._unreliable.add(number):
            return True
        self.give_up(size)
        return False

    def datagram(self, received: Received) -> None:
        """An unreliable message that ``wants_datagram`` accepted."""
        if self._unreliable_queue is NO_MESSAGES:
            self._unreliable_queue = deque()
        self._unreliable_queue.append(received)
        self._deliver(received)
        if self._oneshot:
            self._complete()

    def announced(self, count: int) -> None:
        """SENT_UNRELIABLE: from now on their receipt deadline runs (AQ-37)."""
        if self.state is ReceiverState.FINISHING:
            raise SequenceError(
                f"SENT_UNRELIABLE on {ids.describe(self.channel)} after FINISH_SENDER (AQ-R18)"
            )
        if self._unreliable is None:
            self._unreliable = UnreliableReceived(self._shared.config.limits.received_ranges)
        upto = self._unreliable.announce(count)
        if self._oneshot and upto > 1:
            raise SequenceError(f"{upto} messages announced on a oneshot channel (AQ-R28)")
        if count:
            self._wait_for_datagrams(upto)

    def receipt_due(self, upto: int) -> None:
        """The deadline of these unreliable numbers has passed: ack or nack them (AQ-38)."""
        if self.state is ReceiverState.CLOSED or self._unreliable is None:
            return
        if self._receipt is not None and self._receipt[2] <= upto:
            self._receipt = None
        varints = self._unreliable.take_ack_nack(upto)
        if not varints:
            return
        missed = sum(varints[1::2])
        self.nacked += missed
        self._shared.datagrams_missed += missed
        self._write_control([codec.encode_ack_nack_unreliable(self.channel, varints)], fin=False)
        if self._oneshot:
            self._step(ReceiverInput.COMPLETE)
            self._close_now(MessageLost("the one message of this channel was lost on the way"))
        elif self._all_arrived:
            self._complete()

    def finish(self, count: int) -> None:
        """FINISH_SENDER (AQ-45)."""
        announced = self._unreliable.announced if self._unreliable is not None else 0
        if self._oneshot and count + announced > 1:
            raise SequenceError(
                f"FINISH_SENDER counts {count} on a oneshot channel, beside {announced} "
                "announced unreliably (AQ-R28)"
            )
        if self._oneshot and not count and not announced:
            # Nothing was announced: the sender ended unused (AQ-R28).
            self._step(ReceiverInput.CANCEL)
            self._close_now(Cancelled("the sender finished without sending its one message"))
            return
        if count <= self.numbers.highest:
            raise SequenceError(
                f"FINISH_SENDER counts {count} messages on {ids.describe(self.channel)}, but "
                f"number {self.numbers.highest} was received (AQ-R21)"
            )
        self._step(ReceiverInput.FINISH)
        self._declared = count
        if self._all_arrived:
            self._complete()

    def cancel(self) -> list[Received]:
        """CANCEL_SENDER: returns the undelivered messages that are dropped (AQ-R20).

        When that is done, ``cancelled`` closes.
        """
        self._step(ReceiverInput.CANCEL)
        dropped = self._drop_queue()
        for received in dropped:
            if received.reliable:
                self.numbers.withdraw(received.number)  # unacked, thus nacked by the close
            elif self._unreliable is not None:
                self._unreliable.withdraw(received.number)
        return dropped

    def cancelled(self) -> None:
        """Everything that CANCEL_SENDER dropped was released: CLOSE_RECEIVER (AQ-44)."""
        if self.error is None:
            self._close_now(Cancelled("the peer cancelled the channel"))

    def lost(self) -> list[Received]:
        """FORGET_CHANNEL or the cascade: returns what is dropped (AQ-R23)."""
        self._step(ReceiverInput.LOST)
        dropped = self._drop_queue()
        if self._control is not None:
            self._shared.outgoing.reset(self._control, 2)
        self._end(
            LostInTransit("the message that carried this channel was lost, or the peer forgot it")
        )
        return dropped

    def disconnected(self, error: HalfError) -> None:
        """The connection is over; what is queued can still be read."""
        self._step(ReceiverInput.DISCONNECTED)
        self._end(error)

    # What its user asks

    def close(self, error: HalfError | None = None) -> list[Received]:
        """Closes; returns what is dropped undelivered. Everything received is acked (AQ-R22)."""
        dropped = self._drop_queue()
        if self.state is ReceiverState.CLOSED:
            return dropped
        self._step(ReceiverInput.CLOSE)
        self._close_now(error or ReceiverClosed("the receiver was closed here"))
        return dropped

    def ack_due(self) -> None:
        """Sends the acks that are owed, or ROUTE_TO alone for an implicit channel (AQ-R25)."""
        self._ack_scheduled = False
        if self.state is ReceiverState.CLOSED:
            return
        ranges = self.numbers.take_ack()
        if ranges:
            self._write_control([codec.encode_ack_reliable(ranges)], fin=False)
        elif self._control is None and not self.given:
            self._write_control([], fin=False)

    # Within

    def _wait_for_datagrams(self, upto: int) -> None:
        """Sets their receipt deadline (AQ-37).

        Whoever announces one by one may not make us keep a deadline for each: what comes shortly
        behind the last has one together, an ack delay later.
        """
        shared = self._shared
        due = shared.now + max(shared.config.timing.receipt_deadline, 2 * shared.rtt)
        last = self._receipt
        if last is not None and last[0] >= due:
            last[2] = upto
            return
        if last is not None and due - last[0] < shared.config.timing.ack_delay:
            due += shared.config.timing.ack_delay
        self._receipt = [due, self, upto]
        shared.receipt_due.append(self._receipt)

    def _step(self, what: ReceiverInput) -> None:
        following = RECEIVER[self.state, what]
        if following is None:
            raise SequenceError(
                f"{what.name} on {ids.describe(self.channel)} after FINISH_SENDER (AQ-R18)"
            )
        self.state = following

    @property
    def _all_arrived(self) -> bool:
        """Whether what FINISH_SENDER counts is in, and every datagram settled (AQ-45)."""
        return self.numbers.count == self._declared and (
            self._unreliable is None or self._unreliable.all_settled
        )

    def _deliver(self, received: Received) -> None:
        first = self.queue is NO_MESSAGES
        if first:
            self.queue = deque()
        self.queue.append(received)
        if not self.told:
            self.leave_place()  # it is whole: others may go on
        if self.given and first:
            self._shared.events.append(Readable(self))

    def _evict(self) -> bool:
        if not self._unreliable_queue:
            return False
        oldest = self._unreliable_queue.popleft()
        self._unreliable_queue = self._unreliable_queue or NO_MESSAGES
        oldest.dropped = True
        self.evictions += 1
        self._shared.datagrams_evicted += 1
        self._charge(-oldest.charge)
        self.settled(1)
        self.evicted = (*self.evicted, oldest)
        oldest.payload = b""
        self._dropped += 1
        if self._dropped * 2 > len(self.queue):
            live = [received for received in self.queue if not received.dropped]
            self.queue = deque(live) if live else NO_MESSAGES
            self._dropped = 0
        return True

    def _schedule_ack(self) -> None:
        if not self._ack_scheduled:
            self._ack_scheduled = True
            due = self._shared.now + self._shared.config.timing.ack_delay
            self._shared.ack_due.append((due, self))

    def _complete(self) -> None:
        self._step(ReceiverInput.COMPLETE)
        end = Finished("the sender finished and everything was delivered")
        if not self.patient:
            self._close_now(end)
            return
        shared = self._shared
        if not shared.closing:
            shared.close_due.append((shared.now + shared.config.timing.ack_delay, self))
        shared.closing[self] = None
        self._end(end)

    def _close_now(self, error: HalfError) -> None:
        self.write_close()
        self._end(error)

    def write_close(self) -> None:
        """Everything received is acked, and CLOSE_RECEIVER ends the stream."""
        frames: list[Any] = []
        ranges = self.numbers.take_ack()  # before CLOSE_RECEIVER, on the same stream (AQ-R22)
        if ranges:
            frames.append(codec.encode_ack_reliable(ranges))
        if self._unreliable is not None:
            varints = self._unreliable.take_last_acks()
            if varints:
                frames.append(codec.encode_ack_nack_unreliable(self.channel, varints))
        frames.append(codec.CLOSE_RECEIVER)
        self._write_control(frames, fin=True)

    def _write_control(self, frames: list[Any], *, fin: bool) -> None:
        if self._control is None:
            self._control = SendStream(None, control=True)
            frames = [codec.encode_route_to(self.channel), *frames]
        self._shared.outgoing.write(self._control, frames, fin=fin)

    def _drop_queue(self) -> list[Received]:
        dropped = [received for received in self.queue if not received.dropped]
        self.queue = self._unreliable_queue = NO_MESSAGES
        self._dropped = 0
        for received in dropped:
            self._charge(-received.charge)
        if dropped:
            self.settled(len(dropped))
        return dropped

    def _end(self, error: HalfError) -> None:
        if self.error is None:
            self.error = error
        if self.pledged:
            self._charge(-self.pledged)  # the rest of a batch will not come
            self.pledged = 0
        self.settled(0)
        events, readable = self._shared.events, Readable(self)
        if self.given and (not events or events[-1] != readable):
            events.append(readable)

    def _is_full(self, charge: int) -> bool:
        return self.charged + charge > self._shared.config.flow.channel_receive_bytes
