"""The receiver half of a channel: numbers, acks and its ends (section 3.4).

Whether a message may come is decided by ``admission``; it waits in a ReceiveQueue. How frames look
is for a FrameWriter.
"""

from __future__ import annotations

from typing import Any, Final, cast

from aqueduct._speedups.channels.frames import ONESHOT
from aqueduct._speedups.channels.receiver import EMPTY, Received, ReceiveQueue
from aqueduct._speedups.channels.sender import SendStream
from aqueduct._speedups.channels.tracker import ReceivedNumbers, UnreliableReceived
from aqueduct.errors import (
    Cancelled,
    Finished,
    LostInTransit,
    MessageLost,
    ReceiverClosed,
    SequenceError,
)
from aqueduct.protocol.common.context import ConnectionContext, HalfError
from aqueduct.protocol.common.events import Readable
from aqueduct.protocol.common.frame_writer import FrameWriter
from aqueduct.protocol.common.sender import RESET_LOST
from aqueduct.protocol.common.state import RECEIVER, ReceiverInput, ReceiverState

__all__ = ["Received", "ReceiverHalf"]

# In place of what an idle channel does not need; it cannot be changed.
NO_STREAMS: Final = cast("dict[Any, None]", EMPTY)


class ReceiverHalf:
    """One receiver half. Made by the connection; its user takes messages, or closes."""

    is_sender: Final = False

    __slots__ = (
        "__weakref__",
        "_declared",
        "_receipt",
        "_shared",
        "_writer",
        "ack_scheduled",
        "channel",
        "control",
        "error",
        "given",
        "handle",
        "nacked",
        "numbers",
        "oneshot",
        "patient",
        "queue",
        "state",
        "streams",
        "streams_in",
        "unreliable",
    )

    def __init__(
        self,
        shared: ConnectionContext,
        writer: FrameWriter,
        channel: int,
        *,
        given: bool,
        assured: bool,
    ) -> None:
        self._shared = shared
        self._writer = writer
        self.channel = channel
        self.queue = ReceiveQueue(shared, assured)
        self.state = ReceiverState.OPEN
        self.error: HalfError | None = None
        """What a read raises once the queue is empty; None while it lives."""
        self.given = given
        """Whether the application got the handle, or will with the message that carries it."""
        self.handle: Any = None
        self.numbers = ReceivedNumbers(shared.config.limits.received_ranges)
        self.unreliable: UnreliableReceived | None = None
        """Most channels never need it."""
        self.nacked = 0
        """Unreliable messages that did not come in time."""
        self.oneshot = bool(channel & ONESHOT)
        self.streams = NO_STREAMS
        """The peer's streams that are routed here, in order."""
        self.streams_in = 0
        self.patient = False
        """Whether its close may leave with what is sent next, within the delay of acks,
        instead of causing a packet of its own (AQ-R33), once all has come."""
        self.ack_scheduled = False
        self.control: SendStream | None = None
        self._declared = -1  # how many messages the sender sent, once its finish told it
        self._receipt: list[Any] | None = None
        """The last entry of ``ConnectionContext.receipt_due`` for this half, while it is there."""

    def describe(self) -> str:
        """The channel for people."""
        return self._writer.describe(self.channel)

    def routed(self, stream: Any) -> None:
        """One of the peer's streams is about this channel."""
        stream.queue = self.queue
        if self.streams is NO_STREAMS:
            self.streams = {}
        self.streams[stream] = None

    def left_by(self, stream: Any) -> None:
        """One of the peer's streams says no more here: what it holds returns."""
        if stream in self.streams:
            del self.streams[stream]
            self.streams = self.streams or NO_STREAMS
        self._shared.admission.left(self.queue, stream)

    # What the peer sends

    def check_number(self, number: int) -> None:
        """A number must be new, and within what the finish declared (AQ-R13, AQ-R18)."""
        if number == 2**64 - 1:
            raise SequenceError(f"a message has the number 2^64-1 on {self.describe()} (AQ-R13)")
        if 0 <= self._declared <= number:
            raise SequenceError(
                f"message {number} came on {self.describe()}, whose sender finished with "
                f"{self._declared} messages (AQ-R18)"
            )
        if self.oneshot and self.unreliable is not None and self.unreliable.announced:
            raise SequenceError("a oneshot channel carries its message twice (AQ-R28)")
        if number in self.numbers:
            raise SequenceError(f"message {number} arrived twice on {self.describe()} (AQ-R13)")

    def message(self, received: Received) -> None:
        """A whole message, admitted before, in the order of its stream (AQ-R34)."""
        self.numbers.add(received.number)
        self._deliver(received)
        if self.oneshot or (self._declared >= 0 and self._all_arrived):
            self._complete()
        else:
            self.schedule_ack()

    def wants_datagram(self, number: int, size: int, evicted: list[Received]) -> bool:
        """Whether an unreliable message is new and finds room; charges it if so.

        A full queue loses its oldest undelivered unreliable message (AQ-R31). What finds no
        room even so counts as lost on the way. What gave way is added to ``evicted``.
        """
        admission, queue = self._shared.admission, self.queue
        if self.unreliable is None:
            self.unreliable = UnreliableReceived(self._shared.config.limits.received_ranges)
        if number == 2**64 - 1 or (self.oneshot and number):
            raise SequenceError(
                f"unreliable message {number} on {self.describe()} (AQ-R13, AQ-R28)"
            )
        if self.oneshot and self._declared > 0:
            raise SequenceError("a oneshot channel carries its message twice (AQ-R28)")
        if number < self.unreliable.settled or number in self.unreliable:
            return False  # networks may duplicate; what was nacked stays so (AQ-39, AQ-R13)
        if queue.waiting and not queue.evict(evicted):
            return False  # a reliable message waits for this room
        while not admission.admit(queue, size):
            if not queue.evict(evicted):
                return False
        if self.unreliable.add(number):
            return True
        admission.give_up(queue, size)
        return False

    def datagram(self, received: Received) -> None:
        """An unreliable message that ``wants_datagram`` accepted."""
        self._deliver(received)
        if self.oneshot:
            self._complete()

    def announced(self, count: int) -> None:
        """The peer sent so many datagrams: now their receipt deadline runs (AQ-37)."""
        if self.state is ReceiverState.FINISHING:
            raise SequenceError(
                f"datagrams were announced on {self.describe()} after its sender finished (AQ-R18)"
            )
        if self.unreliable is None:
            self.unreliable = UnreliableReceived(self._shared.config.limits.received_ranges)
        upto = self.unreliable.announce(count)
        if self.oneshot and upto > 1:
            raise SequenceError(f"{upto} messages announced on a oneshot channel (AQ-R28)")
        if count:
            self._wait_for_datagrams(upto)

    def receipt_due(self, upto: int) -> None:
        """The deadline of these unreliable numbers has passed: ack or nack them (AQ-38)."""
        if self.state is ReceiverState.CLOSED or self.unreliable is None:
            return
        if self._receipt is not None and self._receipt[2] <= upto:
            self._receipt = None
        varints = self.unreliable.take_ack_nack(upto)
        if not varints:
            return
        missed = sum(varints[1::2])
        self.nacked += missed
        self._shared.datagrams_missed += missed
        self._writer.ack_nacks(self, varints)
        if self.oneshot:
            self._step(ReceiverInput.COMPLETE)
            self._close_with(MessageLost("the one message of this channel was lost on the way"))
        elif self._all_arrived:
            self._complete()

    def finish(self, count: int) -> None:
        """The sender has sent ``count`` messages by stream, and sends no more (AQ-45)."""
        announced = self.unreliable.announced if self.unreliable is not None else 0
        if self.oneshot and count + announced > 1:
            raise SequenceError(
                f"a finish counts {count} messages on a oneshot channel, beside {announced} "
                "announced unreliably (AQ-R28)"
            )
        if self.oneshot and not count and not announced:
            # Nothing was announced: the sender ended unused (AQ-R28).
            self._step(ReceiverInput.CANCEL)
            self._close_with(Cancelled("the sender finished without sending its one message"))
            return
        if count <= self.numbers.highest:
            raise SequenceError(
                f"a finish counts {count} messages on {self.describe()}, but "
                f"number {self.numbers.highest} was received (AQ-R21)"
            )
        self._step(ReceiverInput.FINISH)
        self._declared = count
        if self._all_arrived:
            self._complete()

    def cancel(self, what: ReceiverInput) -> list[Received]:
        """The sender cancelled: returns the undelivered messages that are dropped (AQ-R20).

        When that is done, ``cancelled`` closes. ``what``: CANCEL or RESET.
        """
        self._step(what)
        dropped = self.queue.drop()
        for received in dropped:
            if received.reliable:
                self.numbers.withdraw(received.number)  # unacked, thus nacked by the close
            elif self.unreliable is not None:
                self.unreliable.withdraw(received.number)
        return dropped

    def cancelled(self) -> None:
        """Everything that the cancel dropped was released: the receiver closes (AQ-44)."""
        if self.error is None:
            self._close_with(Cancelled("the peer cancelled the channel"))

    def lost(self) -> list[Received]:
        """The channel is lost: returns what is dropped (AQ-R23)."""
        self._step(ReceiverInput.LOST)
        dropped = self.queue.drop()
        self._writer.end_receiver(self, RESET_LOST)
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
        dropped = self.queue.drop()
        if self.state is ReceiverState.CLOSED:
            return dropped
        self._step(ReceiverInput.CLOSE)
        self._close_with(error or ReceiverClosed("the receiver was closed here"))
        return dropped

    def ack_due(self) -> None:
        """Sends the acks that are owed, or what opens an implicit channel (AQ-R25)."""
        self.ack_scheduled = False
        if self.state is ReceiverState.CLOSED or not self._writer.can_say(self):
            return
        ranges = self.numbers.take_ack()
        if ranges:
            self._writer.acks(self, ranges)
        elif self.control is None and not self.given:
            self._writer.open(self)

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
                f"a {what.name.lower()} came on {self.describe()}, whose sender has finished "
                "(AQ-R18)"
            )
        self.state = following

    @property
    def _all_arrived(self) -> bool:
        """Whether what the finish counts is in, and every datagram settled (AQ-45)."""
        return self.numbers.count == self._declared and (
            self.unreliable is None or self.unreliable.all_settled
        )

    def _deliver(self, received: Received) -> None:
        if self.queue.push(received) and self.given:
            self._shared.events.append(Readable(self))

    def schedule_ack(self) -> None:
        """An ack is owed, within the delay of acks."""
        if not self.ack_scheduled:
            self.ack_scheduled = True
            due = self._shared.now + self._shared.config.timing.ack_delay
            self._shared.ack_due.append((due, self))

    def _complete(self) -> None:
        self._step(ReceiverInput.COMPLETE)
        end = Finished("the sender finished and everything was delivered")
        if not self.patient:
            self._close_with(end)
            return
        shared = self._shared
        if not shared.closing:
            shared.close_due.append((shared.now + shared.config.timing.ack_delay, self))
        shared.closing[self] = None
        self._end(end)

    def _close_with(self, error: HalfError) -> None:
        self._writer.close(self)
        self._end(error)

    def _end(self, error: HalfError) -> None:
        if self.error is None:
            self.error = error
        self.queue.end()
        events, readable = self._shared.events, Readable(self)
        if self.given and (not events or events[-1] != readable):
            events.append(readable)
