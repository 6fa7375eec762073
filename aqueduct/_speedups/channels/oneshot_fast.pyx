"""What a call does to its two channels, step by step as the general way does it, but at once.

A question is a message that carries the sender of a oneshot channel, the answer the one message of
that, and then the channel is closed. Each of these five steps is taken here where it is plain. What
is not is left untouched, for the general way of ``aqueduct.protocol.channels``.
"""

from collections import deque

cimport cython
from libc.stdint cimport int64_t, uint32_t, uint64_t


from aqueduct._speedups.channels.decoder cimport AT_TAG, FrameDecoder
from aqueduct._speedups.channels.encoder cimport message_buffers
from aqueduct._speedups.channels.frames cimport MessageFrame
from aqueduct._speedups.channels.receiver cimport ReceiverBase
from aqueduct._speedups.channels.sender cimport SendQueue, SendStream, SenderBase
from aqueduct._speedups.base.ranges cimport RangeSet
from aqueduct._speedups.channels.message_batches cimport Received, MessageBatch
from aqueduct._speedups.channels.tracker cimport ReceivedNumbers

from aqueduct._speedups.channels.oneshot_frames import encode_alone, encode_taken
from aqueduct._speedups.channels.oneshot_frames import is_taken, message_of, route_of
from aqueduct._speedups.channels.events import Readable, SenderEnded, Writable
from aqueduct.errors import Finished, RemoteProtocolError

__all__ = ["Brisk"]

cdef uint64_t HIGHEST = 0xFFFFFFFFFFFFFFFF

cdef enum:
    # Bits of a channel's id (AQ-6).
    CREATOR = 1
    SENDER = 2
    ONESHOT = 4


@cython.auto_pickle(False)
cdef class Brisk:
    """The short way of the channels of one connection. Its time is that of ``shared``.

    ``states`` are those of a sender that may send, has sent all, and has ended; then of a receiver
    that is open, and one that is closed. ``small``: bytes of a payload that is taken without
    asking. ``decoder`` is for nothing else.
    """

    def __init__(
        self,
        shared,
        registry,
        FrameDecoder decoder not None,
        *,
        halves,
        states,
        Py_ssize_t small,
    ):
        flow, limits = shared.config.flow, shared.config.limits
        self._shared = shared
        self._registry = registry
        self._ledger = shared.outgoing
        self._decoder = decoder
        self._forgetting = registry._forgetting
        self._live = registry._live
        self._early = registry._ended_early
        self._destroyed = registry._destroyed._spaces
        self._attached = registry._attached._spaces
        self._next = registry._counters._next
        self._events = shared.events
        self._make_sender, self._make_receiver = halves
        self._may_send, self._all_sent, self._sender_ended, self._open, self._closed = states
        self._side = shared.side
        self._small = small
        self._overhead = flow.message_overhead
        self._channels = limits.channels
        self._attachments = limits.attachments
        self._ranges = limits.destroyed_ranges
        self._hard_limit = flow.channel_hard_limit
        self._unacknowledged = <uint64_t> limits.unacknowledged
        self._ack_delay = shared.config.timing.ack_delay

    # The side that asks

    def ask(self, SenderBase half not None, payload, tuple headers not None):
        """Queues a question on an ORDERED channel; the half where its answer comes.

        None, with nothing done, if this is not plain.
        """
        cdef SendStream stream = half._message_stream
        cdef SendQueue ledger = self._ledger
        cdef uint64_t number = half._numbers._next
        cdef Py_ssize_t size = 0
        cdef uint64_t channel, key
        cdef list buffers
        cdef dict links
        if (
            stream is None or stream.dead or stream.number < 0 or ledger._debug
            or half.error is not None or half.state is not self._may_send
            or half.queued >= self._hard_limit or half._unreliable is not None
            or number - half._numbers._acked._covered >= self._unacknowledged
            or number >= HIGHEST - 1 or self._attachments < 1
            or len(self._live) + len(self._early) >= self._channels
        ):
            return None
        key = self._side | (0 if self._side else SENDER) | ONESHOT
        channel = key | <uint64_t> self._next[key] << 3
        buffers = message_buffers(number, payload, headers, ((channel, ()),), &size)
        if size > ledger._frame:
            return None
        self._next[key] += 1
        answer = self._make_receiver(self._shared, channel, given=True, assured=True)
        self._live[channel] = answer
        half._numbers._next = number + 1
        found = half.links
        if type(found) is dict:
            links = found
        else:
            links = half.links = {}
        links[number] = (channel,)
        ledger.append(stream, buffers, size)
        return answer

    cdef bint _answered(self, ReceiverBase half, uint64_t channel, object data) except -1:
        """The one message of a oneshot channel and its end (AQ-R28), which no stream is made for.

        What is behind the message in its sequence does not matter any more (AQ-R24).
        """
        cdef MessageFrame frame
        cdef Received received
        cdef object attachments
        cdef double now
        if not (
            channel & ONESHOT
            and half.state is self._open
            and half.given
            and half._declared < 0
            and half.placement is None
            and half._unreliable is None
            and not half.streams
        ):
            return False
        if half.left() < 2 * self._small:
            return False
        found = message_of(self._decoder, data, self._small)
        if found is None:
            return False
        frame = found
        attachments = ()
        if frame._attachments:
            attachments = self._registry.attached(frame.attached)
        received = self._received(frame, attachments)
        half.count(received.charge)
        half._outstanding += 1
        half.numbers.add(received.number)
        half.queue = deque((received,))
        self._remove(half, channel)
        if half.patient:
            shared = self._shared
            now = shared.now
            closing = shared.closing
            if not closing:
                shared.close_due.append((now + self._ack_delay, half))
            closing[half] = None
            half.state = self._closed
            half.error = Finished("the sender finished and everything was delivered")
            self._events.append(Readable(half))
            return True  # the close is remembered when it is written, before any FORGET_CHANNEL
        half._complete()
        if channel & CREATOR == self._side:
            self._forgetting.closed(channel, self._shared.now)
        return True

    def write_closes(self):
        """What patient receivers owe: all that came is acknowledged, and CLOSE_RECEIVER."""
        cdef object shared = self._shared
        cdef ReceiverBase half
        cdef SendStream stream
        cdef ReceivedNumbers numbers
        cdef uint64_t channel
        cdef list closing = list(shared.closing)
        shared.closing.clear()
        shared.close_due.clear()
        for each in closing:
            half = each
            channel = half.channel
            numbers = half.numbers
            if numbers.ranges._covered == 1 and half._control is None:
                stream = SendStream(None, True)
                half._control = stream
                self._ledger._write(stream, [encode_taken(channel)], True)
            else:  # it came as a datagram
                half.write_close()
            if channel & CREATOR == self._side:
                self._forgetting.closed(channel, shared.now)

    # The side that answers

    def questions(self, ReceiverBase half not None, FrameDecoder decoder not None, data):
        """Takes the questions that ``data`` of a stream holds, if nothing of it waits.

        True: they were all. Else what comes next, which the general way goes on with: a frame, or
        a MessageBatch that was read and not taken, or None.
        """
        cdef MessageBatch run
        cdef int64_t room
        if len(data):
            decoder.push(data)
        while True:
            room = half.left() - 2 * self._small
            if room < 0 or half.channel & ONESHOT or half.state is not self._open:
                return None
            decoder.auto_admit = self._small
            run = MessageBatch.__new__(MessageBatch)
            try:
                run.take(decoder, half.numbers, self._overhead, room, None)
            except RemoteProtocolError:
                return run  # the decoder raises it again
            if run.admitted or run.full:
                return run
            if type(run.follows) is not MessageFrame or not self._asks(half, run.follows):
                return run.follows
            if decoder._state == AT_TAG and decoder.left() == 0 and decoder._error is None:
                return True

    cdef bint _asks(self, ReceiverBase half, MessageFrame frame) except -1:
        """Whether it is a question, which then was delivered with where its answer goes."""
        cdef ReceivedNumbers numbers = half.numbers
        cdef Received received
        cdef uint64_t channel
        cdef tuple attachments
        cdef object shared, sender
        if not frame._attachments or half._unreliable is not None or half._declared >= 0:
            return False
        attachments = frame.attached
        if len(attachments) != 1:
            return False
        channel = attachments[0][0]
        if (
            not channel & ONESHOT
            or channel & CREATOR == self._side
            or (channel & SENDER) >> 1 != self._side
            or channel in self._live
            or channel in self._early
            or is_in(self._attached, channel)
            or is_in(self._destroyed, channel)
            or len(self._live) + len(self._early) >= self._channels
            or not numbers.take_in(frame.num)
        ):
            return False
        shared = self._shared
        self._add(self._attached, channel)
        sender = self._make_sender(shared, channel, accessible=True, given=True)
        self._live[channel] = sender
        received = self._received(frame, ((sender, attachments[0][1]),))
        half.count(received.charge)
        half._outstanding += 1
        if half.queue:
            half.queue.append(received)
        else:
            half.queue = deque((received,))
            if half.given:
                self._events.append(Readable(half))
        if not half._ack_scheduled:
            half._ack_scheduled = True
            shared.ack_due.append((shared.now + self._ack_delay, half))
        return True

    def answer(self, SenderBase half not None, payload, headers):
        """Queues the one message of a oneshot channel (AQ-R28); False if this is not plain."""
        cdef SendQueue ledger = self._ledger
        cdef SendStream stream
        cdef Py_ssize_t size
        cdef list buffers
        if (
            half.error is not None or half.state is not self._may_send
            or half._numbers._next or half._unreliable is not None or not half.oneshot
        ):
            return False
        buffers, size = encode_alone(half.channel, payload, headers, ())
        if size > ledger._frame:
            return False
        half._numbers._next = 1
        half.state = self._all_sent
        stream = half._message_stream = SendStream(half, False)
        ledger._write(stream, buffers, True)
        return True

    cdef bint _taken(self, SenderBase half, uint64_t channel, object data) except -1:
        """ACK_RELIABLE and CLOSE_RECEIVER of a oneshot channel whose message was sent."""
        cdef uint64_t added = 0
        if not (
            channel & ONESHOT
            and half.state is self._all_sent
            and half._numbers._next == 1
            and half._unreliable is None
            and half._message_stream is not None
            and not half._message_stream.queued
            and not self._shared.blocked
            and half._control is None
            and not half.links
            and not half.acked_links
            and is_taken(data)
        ):
            return False
        half._numbers._acked.add_span(0, 0, &added)
        half.state = self._sender_ended
        self._events.append(Writable(half))
        self._events.append(SenderEnded(half))
        self._remove(half, channel)
        return True

    # Both

    def read(self, data):
        """Reads all of a stream of the peer's. False: nothing has changed.

        Raises RemoteProtocolError for attachments that may not be.
        """
        cdef object channel = route_of(data)
        cdef object half = self._live.get(channel)
        if half is None:
            return False
        if isinstance(half, SenderBase):
            return self._taken(half, channel, data)
        return self._answered(half, channel, data)

    cdef Received _received(self, MessageFrame frame, tuple attachments):
        cdef Received received = Received.__new__(Received)
        received.number = frame.num
        received._headers = frame._headers
        received.attachments = attachments
        received.payload = frame.payload
        received.charge = frame.size + frame.overhead + self._overhead
        received.reliable = True
        return received

    cdef int _remove(self, object half, uint64_t channel) except -1:
        """It has no state any more."""
        self._live.pop(channel, None)
        if channel & CREATOR != self._side:
            self._add(self._destroyed, channel)
            if not half.given:
                self._early[channel] = half
        return 0

    cdef int _add(self, dict spaces, uint64_t channel) except -1:
        """Records a channel; above the limit of ranges the lowest go."""
        cdef uint64_t added = 0
        cdef object found = spaces.get(channel & 7)
        cdef RangeSet indexes
        if found is None:
            found = spaces[channel & 7] = RangeSet.__new__(RangeSet)
        indexes = found
        indexes.add_span(channel >> 3, channel >> 3, &added)
        while indexes._count > self._ranges:
            indexes.pop_first()
        return 0


cdef bint is_in(dict spaces, uint64_t channel) except -1:
    cdef object found = spaces.get(channel & 7)
    cdef uint32_t node
    if found is None:
        return False
    node = (<RangeSet> found).at_or_below(channel >> 3)
    return node != 0 and channel >> 3 <= (<RangeSet> found)._nodes[node].last
