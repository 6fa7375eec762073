"""The peer's streams: one frame sequence each, what they hold, and their credit.

Messages that need no look at each land and count here. All other frames are given to handlers, by
tag: what they mean is for the dispatcher to say. A large batch has its caches emptied by its own
bytes, so each of these steps would cost several times what a step of Python costs elsewhere.
"""

cimport cython
from libc.stdint cimport int64_t

from aqueduct._speedups.channels.decoder cimport FrameDecoder
from aqueduct._speedups.channels.events cimport STOP_EFFECT
from aqueduct._speedups.channels.frames cimport MessageFrame, MessageHead, Version
from aqueduct._speedups.channels.receiver cimport DirectRead, MessageBatch, ReceiveQueue
from aqueduct._speedups.channels.sender cimport SenderBase
from aqueduct._speedups.channels.stream_credit cimport CreditedStream, StreamCredit
from aqueduct._speedups.channels.tracker cimport ReceivedNumbers

from aqueduct._speedups.channels.events import Readable
from aqueduct.errors import LimitExceeded, SequenceError

__all__ = ["HALF_ENDED", "PAUSED", "POSTPONED", "SMALL", "RecvStream", "RecvStreams"]

# How ``read`` may end, if not with all that has come.
POSTPONED, PAUSED, HALF_ENDED = 1, 2, 3
# Payloads up to this are admitted without asking while there is room for many of them.
SMALL = SMALL_PAYLOAD

cdef enum:
    # Fewer bytes are not read straight to their place: a call for them costs more than their copy.
    LANDING_FROM = 4096
    SMALL_PAYLOAD = 16384
    # Of a sender: the stream of ORDERED messages, and that of SENT_UNRELIABLE. Of a receiver: acks.
    LASTING_STREAMS = 2


@cython.final
@cython.auto_pickle(False)
cdef class RecvStream(CreditedStream):
    """One stream of the peer.

    ``handlers``: what each frame does, by tag; they change with FINISH_SENDER (AQ-R18). ``half``:
    what ROUTE_TO named, while it has state. ``queue``: of a receiver's half, for its messages.
    ``begun``: the first frame was seen and checked (AQ-28, AQ-R7). ``ignoring``: the rest is
    dropped, as the channel has no state or the stream was stopped (AQ-R24). ``postponed``: the rest
    is read in a later turn. ``head``: of a message that waits for admission. ``held``: it ended,
    and its bytes still wait here. ``gathered``: bytes of headers and attachments that are not
    admitted yet.
    ``partial``: payload bytes of the admitted message that is still landing; -1: none.
    """

    def __init__(self, int64_t number, int64_t limit, handlers, FrameDecoder decoder not None):
        self.number = number
        self.limit = limit
        self.handlers = handlers
        self.decoder = decoder
        self.partial = -1

    @property
    def inside_message(self):
        """Whether a message has begun here and is not whole."""
        return self.head is not None or self.partial >= 0


@cython.final
@cython.auto_pickle(False)
cdef class RecvStreams:
    """All of the peer's streams, by number, and the effects that concern them.

    ``plain``: the ``handlers`` of a stream on which more messages may come. ``held``: streams that
    ended and whose bytes still wait here. ``lasting``: streams that may last as long as their
    channel, the first two of each. ``extra``: stream slots that the peer is due beside its budget;
    below zero: to be kept back. ``version_checked``: whether ACK_VERSION was sent, so that
    sequences may begin without VERSION (AQ-28).
    """

    def __init__(self, ReceiveBudget shared not None, *, open, ended):
        """``open``: the state of a half that takes messages; ``ended``: of one that sends no
        more."""
        cdef object flow = shared.config.flow
        self.streams = {}
        self._budget = shared
        self._config = shared.config
        self.granting = StreamCredit(shared)
        self._effects = shared.effects
        self._events = shared.events
        self._open = open
        self._ended = ended
        self._small = SMALL_PAYLOAD
        self._overhead = flow.message_overhead
        self._initial = flow.initial_window
        self._admitted = flow.admitted_window
        self._from_server = shared.side == 0
        self._step = max(1, flow.streams // 32)
        self._most_lasting = flow.channel_streams
        self.most = flow.wake_up
        self._nothing = self.decoder()

    def opened(self, int64_t number, handlers):
        """A stream that was not there before."""
        cdef RecvStream stream = RecvStream(number, self._initial, handlers, self.decoder())
        self.streams[number] = stream
        return stream

    def outside(self, handlers):
        """One that is in no table."""
        return RecvStream(-1, self._initial, handlers, self.decoder())

    def decoder(self):
        """One for a sequence of the peer's."""
        limits = self._config.limits
        return FrameDecoder(
            from_server=self._from_server,
            frame_limit=limits.frame_bytes,
            header_limit=limits.header_bytes,
            attachment_limit=limits.attachments,
            block_limit=limits.block_bytes,
        )

    def read(self, RecvStream stream not None, frame=None):
        """Reads what has come; ``frame`` is the first of it, if it was read already.

        Returns 0; or POSTPONED where enough was worked on in this turn (``most``), PAUSED where
        ROUTE_TO waits for the connection headers, HALF_ENDED where the stream is to be abandoned.
        """
        cdef FrameDecoder decoder = stream.decoder
        cdef object half
        while not stream.ignoring:
            half = stream.half
            if frame is None:
                if self._budget.work >= self.most:
                    stream.postponed = True
                    self.hold(stream)
                    return 1
                if half is None:
                    frame = decoder.next()
                elif stream.queue is not None:
                    frame = self._next_for(stream)
                elif (<SenderBase?> half).state is self._ended:
                    return 3
                else:
                    frame = decoder.next()
                if frame is None:
                    if stream.queue is not None and stream.partial < 0 and decoder.buffer.missing:
                        self.charge_small(stream)
                    break
            if not stream.begun:
                self._check_begin(frame)
                stream.begun = True
            if type(frame) is not MessageFrame and type(frame) is not MessageHead:
                self._budget.work += 1  # messages count by their bytes and attachments
            stream.handlers[frame.TAG](stream, frame)
            frame = None
            if stream.head is not None:
                break
        if stream.ignoring:
            if stream.fin:
                self.streams.pop(stream.number, None)
            return 0
        if decoder.paused:
            if not stream.begun:
                self._check_begin(None)
            self.hold(stream)
            return 2
        if stream.head is not None:
            self.hold(stream)
        elif stream.fin:
            decoder.end()
            self.streams.pop(stream.number, None)
            self.leave(stream)
            return 0
        self.credit(stream)
        return 0

    cdef int _check_begin(self, object frame) except -1:
        if not self.version_checked and type(frame) is not Version:
            raise SequenceError("a sequence began without VERSION (AQ-28)")
        return 0

    cdef object _next_for(self, RecvStream stream):
        """The next frame for a receiver, or None; the plain messages before it are delivered."""
        cdef MessageBatch run
        while stream.handlers is self.plain:
            run = self.read_plain(stream)
            if run is None:
                break
            if not run.full:
                return run.follows
        stream.decoder.auto_admit = -1
        if stream.queue.placement is None and stream.queue.left() >= 2 * self._small:
            stream.decoder.auto_admit = self._small
        return stream.decoder.next()

    # What streams hold

    def route(self, RecvStream stream not None, half not None):
        """Its ROUTE_TO named a channel that has state."""
        stream.half = half
        half.streams_in += 1
        if half.streams_in <= LASTING_STREAMS:
            self._count(1, 0)

    cpdef object hold(self, RecvStream stream):
        """Its bytes wait; if it has ended, so does its slot."""
        if stream.fin and not stream.held:
            stream.held = True
            self._count(0, 1)

    def unhold(self, RecvStream stream not None):
        """Its bytes wait no more."""
        if stream.held:
            stream.held = False
            self._count(0, -1)

    cpdef object leave(self, RecvStream stream):
        """A stream ended, was reset, or is ignored from here on: return what it holds."""
        cdef object half = stream.half
        if stream.held:
            stream.held = False
            self._count(0, -1)
        self._gathered -= stream.gathered
        stream.gathered = 0
        if half is not None:
            half.streams_in -= 1
            if half.streams_in < LASTING_STREAMS:
                self._count(-1, 0)
            if stream.queue is not None:
                half.left_by(stream)
                stream.queue = None
        self.granting.leave(stream)
        stream.half = None

    def ignore(self, RecvStream stream not None):
        """The rest of the sequence does not matter (AQ-R24)."""
        self.leave(stream)
        if stream.ignoring:
            return
        stream.ignoring = True
        stream.decoder = self._nothing  # what it had buffered may go
        if stream.fin:
            self.streams.pop(stream.number, None)
        else:
            self._effects.append((STOP_EFFECT, stream.number, 0))

    def clear(self):
        """The connection is over."""
        self.streams.clear()
        self.held = self.lasting = self.extra = 0

    cdef int _count(self, Py_ssize_t lasting, Py_ssize_t held) except -1:
        """What lasts does not count against the budget of slots.

        Or the streams of idle channels would keep all others from ever having one, acks among
        them. In steps: each change costs a frame.
        """
        cdef Py_ssize_t few
        self.lasting += lasting
        self.held += held
        few = min(self.lasting, self._most_lasting)
        self.extra = few - few % self._step - self.held
        return 0

    cdef int _weigh(self, RecvStream stream, int64_t gathered) except -1:
        """Blocks are not admitted: in sum they are bounded like what is."""
        cdef int64_t bound = self._config.flow.receive_budget + self._config.limits.frame_bytes
        self._gathered += gathered - stream.gathered
        stream.gathered = gathered
        if self._gathered > bound:
            raise LimitExceeded(
                f"{self._gathered} bytes of headers and attachments wait for the rest of their "
                "messages, or for room; "
                f"Flow.receive_budget and Limits.frame_bytes allow {bound}"
            )
        return 0

    # Messages that need no look at each

    def inlet(self, number):
        """Opens the inlet of a stream: for plain messages, or for the payload that is landing.

        None: its bytes are to be fed to whoever reads it.
        """
        cdef RecvStream stream = self.streams.get(number)
        cdef DirectRead inlet
        cdef int64_t room
        if (
            stream is None or stream.ignoring or stream.head is not None or not stream.begun
            or stream.postponed
            or stream.queue is None or stream.decoder.buffer.take_up()
        ):
            return None
        room = self._room(stream)
        if room < 0 or stream.handlers is not self.plain:
            room = -1
            if stream.decoder.buffer.missing < LANDING_FROM:
                return None
        inlet = stream._inlet
        if inlet is None:
            inlet = stream._inlet = DirectRead(
                stream.decoder, self._overhead, stream.half.numbers, self._admitted
            )
        if room >= 0:
            stream.decoder.auto_admit = self._small if stream.queue.placement is None else -1
        inlet.open(room, stream.partial, stream.queue.placement_key)
        return inlet

    def inlet_done(self, number):
        """Takes what came by the inlet of a stream.

        None: that is all. Otherwise (stream, what follows), which is to be read in the general way.
        """
        cdef RecvStream stream = self.streams[number]
        cdef bint stopped = stream._inlet.stopped
        cdef object follows = None
        cdef MessageBatch run = stream._inlet.close()
        if run is not None:
            self.take_run(stream, run)
            follows = run.follows
        if stopped:
            return stream, follows
        if stream.partial < 0 and stream.decoder.buffer.missing:
            self.charge_small(stream)
        self.credit(stream)
        return None

    cdef MessageBatch read_plain(self, RecvStream stream):
        """Takes the plain messages that come next in a stream, while there is room for many.

        Returns the run. None: there is no such room, or each message needs a look.
        """
        cdef int64_t room = self._room(stream)
        cdef ReceiveQueue queue = stream.queue
        cdef MessageBatch run
        if room < 0:
            return None
        run = MessageBatch.__new__(MessageBatch)
        run.pending = stream.partial
        stream.decoder.auto_admit = self._small if queue.placement is None else -1
        try:
            run.take(
                stream.decoder, <ReceivedNumbers?> stream.half.numbers, self._overhead, room,
                queue.placement_key,
            )
        finally:
            self.take_run(stream, run)
        return run

    cpdef object take_run(self, RecvStream stream, MessageBatch run):
        """Plain messages were read: they are charged, queued and soon acknowledged.

        Large ones earn their stream read-ahead.
        """
        cdef object half = stream.half
        stream.partial = run.pending
        if stream.queue.add(run) and half.given:
            self._events.append(Readable(half))
        if run.messages and not half.ack_scheduled:
            half.schedule_ack()
        self.granting.read_ahead(stream, run.largest)

    cpdef object charge_small(self, RecvStream stream):
        """Part of a message that was admitted without asking has come: others are to count it.

        Its size is not known here; it is put right when the message is whole.
        """
        stream.queue.count(self._small + self._overhead)
        stream.queue.outstanding += 1
        stream.partial = self._small

    cdef int64_t _room(self, RecvStream stream) except? -1:
        """Bytes of messages that need no look at each; below zero: each needs one.

        Of an open channel none can be the last, or one too many.
        """
        if stream.half.state is not self._open or stream.half.oneshot:
            return -1
        return stream.queue.left() - 2 * self._small

    # Credit

    cpdef object credit(self, RecvStream stream):
        """Lets the peer send what the stream should have now."""
        cdef int64_t gathered = stream.decoder.buffer.gathered
        if stream.head is not None:
            gathered += (<MessageHead?> stream.head).overhead
        if gathered != stream.gathered:
            self._weigh(stream, gathered)
        if stream.fin:
            return
        self.granting.renew(stream, <int64_t> stream.decoder.buffer.reach(self._admitted))
