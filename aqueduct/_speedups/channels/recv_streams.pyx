"""What every message does that comes on a stream of the peer: it lands, counts, and brings credit.

It is for messages that need no look at each; all else is ``aqueduct.protocol.channels``', whose
``RecvStreams`` builds on it. A large batch has its caches emptied by its own bytes, so each of
these steps would cost several times what a step of Python costs elsewhere.
"""

cimport cython
from libc.stdint cimport int64_t

from aqueduct._speedups.channels.decoder cimport FrameDecoder
from aqueduct._speedups.channels.receiver cimport ReceiverBase
from aqueduct._speedups.channels.message_batches cimport DirectRead, MessageBatch

from aqueduct._speedups.channels.events import Readable

__all__ = ["RecvStream", "RecvStreamsBase"]

cdef enum:
    # Fewer bytes are not read straight to their place: a call for them costs more than their copy.
    LANDING_FROM = 4096
    # Messages from this size on earn their stream read-ahead (see ``grant_read_ahead``).
    READ_AHEAD_FROM = 32768
    # Of aqueduct.protocol.channels.effects.
    CREDIT = 3


@cython.final
@cython.auto_pickle(False)
cdef class RecvStream:
    """One stream of the peer.

    ``handlers``: what each frame does, by tag; they change with FINISH_SENDER (AQ-R18). ``half``:
    what ROUTE_TO named, while it has state. ``begun``: the first frame was seen and checked (AQ-28,
    AQ-R7). ``ignoring``: the rest is dropped, as the channel has no state or the stream was stopped
    (AQ-R24). ``postponed``: the rest is read in a later turn. ``head``: of a message that waits for
    admission. ``held``: it ended, and its bytes
    still wait here. ``limit``: what the peer may send, from the start of the stream (design: Flow).
    ``granted``: read-ahead beyond the initial window, charged to the budget until the stream ends.
    ``gathered``: bytes of a block of headers or attachments that is not whole yet. ``partial``:
    payload bytes of the admitted message that is still landing; -1: none.
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


@cython.auto_pickle(False)
cdef class RecvStreamsBase:
    """All of the peer's streams, by number: messages that come plainly, and credit.

    ``plain``: the ``handlers`` of a stream on which more messages may come. What a block of headers
    gathers is weighed by ``_weigh(stream, size)``, of who builds on this.
    """

    def __init__(self, ReceiveBudget shared not None, *, open, int64_t small):
        """``open``: the state of a half that takes messages; those up to ``small`` bytes are
        admitted without asking."""
        cdef object flow = shared.config.flow
        self.streams = {}
        self._budget = shared
        self._ledger = shared.outgoing
        self._effects = shared.effects
        self._events = shared.events
        self._open = open
        self._small = small
        self._read_ahead = shared.read_ahead
        self._read_ahead_both = shared.read_ahead_both
        self._overhead = flow.message_overhead
        self._initial = flow.initial_window
        self._admitted = flow.admitted_window

    # Messages that need no look at each

    def inlet(self, number):
        """Opens the inlet of a stream: for plain messages, or for the payload that is landing.

        None: its bytes are to be fed to whoever reads it.
        """
        cdef RecvStream stream = self.streams.get(number)
        cdef DirectRead inlet
        cdef ReceiverBase half
        cdef int64_t room
        if (
            stream is None or stream.ignoring or stream.head is not None or not stream.begun
            or stream.postponed
            or not isinstance(stream.half, ReceiverBase) or stream.decoder.take_up()
        ):
            return None
        half = <ReceiverBase> stream.half
        room = self._room(half)
        if room < 0 or stream.handlers is not self.plain:
            room = -1
            if stream.decoder.missing < LANDING_FROM:
                return None
        inlet = stream._inlet
        if inlet is None:
            inlet = stream._inlet = DirectRead(
                stream.decoder, self._overhead, half.numbers, self._admitted
            )
        if room >= 0:
            stream.decoder.auto_admit = self._small if half.placement is None else -1
        inlet.open(room, stream.partial, half.placement_key)
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
            self.take_run(stream, <ReceiverBase?> stream.half, run)
            follows = run.follows
        if stopped:
            return stream, follows
        if stream.partial < 0 and stream.decoder.missing:
            self.charge_small(stream)
        self.credit(stream)
        return None

    def read_plain(self, RecvStream stream not None, ReceiverBase half not None):
        """Takes the plain messages that come next in a stream, while there is room for many.

        Returns the run. None: there is no such room, or each message needs a look.
        """
        cdef int64_t room = self._room(half)
        cdef MessageBatch run
        if room < 0:
            return None
        run = MessageBatch.__new__(MessageBatch)
        run.pending = stream.partial
        stream.decoder.auto_admit = self._small if half.placement is None else -1
        try:
            run.take(stream.decoder, half.numbers, self._overhead, room, half.placement_key)
        finally:
            self.take_run(stream, half, run)
        return run

    cpdef object take_run(self, RecvStream stream, ReceiverBase half, MessageBatch run):
        """Plain messages were read: they are charged, queued and soon acknowledged.

        Large ones earn their stream read-ahead.
        """
        stream.partial = run.pending
        if half.add(run) and half.given:
            self._events.append(Readable(half))
        if run.messages and not half._ack_scheduled:
            half._schedule_ack()
        if run.largest >= READ_AHEAD_FROM:
            self.grant_read_ahead(stream, run.largest)

    cpdef object charge_small(self, RecvStream stream):
        """Part of a message that was admitted without asking has come: others are to count it.

        Its size is not known here; it is put right when the message is whole.
        """
        cdef ReceiverBase half = <ReceiverBase?> stream.half
        half.count(self._small + self._overhead)
        half._outstanding += 1
        stream.partial = self._small

    cdef int64_t _room(self, ReceiverBase half) except? -1:
        """Bytes of messages that need no look at each; below zero: each needs one.

        Of an open channel none can be the last, or one too many.
        """
        if half.state is not self._open or half._oneshot:
            return -1
        return half.left() - 2 * self._small

    # Credit

    cpdef object credit(self, RecvStream stream):
        """Lets the peer send what the stream should have now."""
        cdef int64_t reach, due
        if stream.fin:
            return
        if stream.decoder._scratch_size != stream.gathered:
            self._weigh(stream, stream.decoder._scratch_size)
        reach = <int64_t> stream.decoder.reach(self._admitted) + self._initial
        # Half a window at a time: a credit costs a frame.
        due = reach + stream.granted - stream.limit
        if due >= self._initial >> 1 and due >= stream.granted >> 1:
            if stream.granted:
                self._run(stream, due, stream.limit - reach)
                if reach + stream.granted <= stream.limit:
                    return
            stream.limit = reach + stream.granted
            self._effects.append((CREDIT, stream.number, stream.limit))

    cpdef object grant_read_ahead(self, RecvStream stream, int64_t size):
        """Lets a stream of large messages send the next one while this one is worked on.

        Without it each message would wait a round trip for its credit. What is granted is
        charged to the budget and at most half of the budget goes this way, also of the process's.
        """
        cdef int64_t both = self._read_ahead_both
        cdef int64_t wanted = both if size > both >> 1 else 2 * size  # whatever was declared
        cdef ReceiveBudget budget = self._budget
        if (
            size >= READ_AHEAD_FROM
            and wanted > stream.granted
            and budget.budget_used + wanted <= budget.budget >> 1
            and budget.process.used + wanted <= budget.process_budget >> 1
        ):
            budget.spend(wanted - stream.granted)
            stream.granted = wanted

    cdef int _run(self, RecvStream stream, int64_t taken, int64_t ahead) except -1:
        """Doubles the read-ahead of a stream that uses it: several messages are under way then.

        Up to a quarter of the budget goes this way, so that others can still begin theirs. While
        this side sends as much as it receives it may be less (see ``Flow.loopback_read_ahead``).
        ``taken``: bytes since the last credit; ``ahead``: those that the peer may still send.
        """
        cdef int64_t sent = <int64_t> self._ledger.charged
        cdef bint both = 2 * (sent - self._sent) >= taken
        cdef int64_t limit = self._read_ahead_both if both else self._read_ahead
        cdef int64_t more = min(stream.granted, limit - stream.granted)
        self._sent = sent
        cdef ReceiveBudget budget = self._budget
        if more < 0:  # what the peer may send already is not taken back
            more = max(limit, ahead) - stream.granted
        elif (
            budget.budget_used + more > budget.budget >> 2
            or budget.process.used + more > budget.process_budget >> 2
        ):
            return 0
        budget.spend(more)
        stream.granted += more
        return 0
