"""What is done for each message of a long row, and for each run of bytes that has left.

Which streams there are and what a channel's end means is decided by ``aqueduct.protocol.common``,
whose SendStreams and SenderHalf build on the classes here. Nothing here calls what they add.
"""

from collections import OrderedDict, deque

cimport cython
from libc.stdint cimport int64_t, uint64_t

from aqueduct._speedups.base.accounts cimport Account
from aqueduct._speedups.channels.encoder cimport message_buffers
from aqueduct._speedups.channels.events cimport WRITE_EFFECT
from aqueduct._speedups.channels.tracker cimport SentNumbers

from aqueduct._speedups.base.buffers import size_of
from aqueduct._speedups.channels.encoder import VERSION
from aqueduct.errors import LocalProtocolError

__all__ = ["SendQueue", "SendStream", "SenderBase"]

cdef uint64_t HIGHEST = 0xFFFFFFFFFFFFFFFF

cdef int64_t UNLIMITED = <int64_t> 1 << 62

cdef enum:
    # What a stream that waits above the transport weighs beside its bytes.
    STALLED_STREAM = 512
    # Streams that have left whole, above which those of channels that have ended are forgotten.
    LEFT = 16


@cython.final
@cython.freelist(64)
@cython.auto_pickle(False)
cdef class SendStream:
    """One of my streams, opened or waiting for its turn.

    ``half`` is the sender half that pays for its bytes; None for acks, closes and the prelude
    (``control``), and once all of it has left. ``number`` is -1 before it is open. ``queued``:
    bytes written here and not yet reported as gone. ``dead``: reset by us or stopped by the peer,
    so that later writes vanish. ``waiting``: buffers, while it is not open. ``guard``: only in
    debug. ``speaker``: the sender half whose control stream it is, until all of it has left.
    """

    def __init__(self, half, bint control):
        self.half = half
        self.control = control
        self.number = -1
        self.waiting = ()

    @property
    def unopened(self):
        """Whether it still waits above the transport."""
        return self.number < 0 and not self.dead


@cython.no_gc_clear  # its end needs the account
@cython.auto_pickle(False)
cdef class SendQueue:
    """Bytes that were written and have not left; the base of what has all streams of one side.

    ``queued`` counts them, and ``process`` those of all connections, which may be
    ``process_budget``, with what is ``retained``: bytes that left of batches that have not left
    whole, and what a link keeps. ``charged`` counts all that ever were; ``_control_queued`` those
    that no half pays for.
    ``fell``: whether ``queued`` fell below the connection's mark since somebody looked.
    ``_left`` are the channels of streams that have left whole, of at most ``2 * _left_kept``
    streams. ``live`` has the channels that live.
    ``_openable`` streams may be opened, of which ``_opened_since`` in effects that the carrier has
    not seen yet. Once ``version_acknowledged``, sequences begin without VERSION (AQ-26).
    """

    def __init__(self, list effects_out not None, flow, limits, sending, guard=None):
        """``sending``: the state of a half that may send. ``guard``: makes what watches the
        buffers of a stream, in debug."""
        self.process = Account()
        self.process_budget = UNLIMITED
        self._open = {}
        self._left = {}
        self._left_most = LEFT
        self._left_kept = flow.streams
        self.live = {}
        self._effects = effects_out
        self._make_guard = guard
        self._mark = flow.connection_high_water
        self._channel_mark = flow.channel_high_water
        self._messages = limits.unacknowledged
        self._frame = limits.frame_bytes
        self._sending = sending
        self._control_share = flow.control_share
        self._control_waiting = OrderedDict()
        self._message_waiting = OrderedDict()

    def __dealloc__(self):
        self.process.used -= self.queued + self.retained

    def keep(self, int64_t size):
        """The carrier keeps ``size`` more bytes that have left; below 0: fewer."""
        self.retained += size
        self.process.charge(size)

    def written(self, number, Py_ssize_t size):
        """``size`` bytes of a stream left. Returns the half that paid for them.

        Raises LocalProtocolError in debug when a buffer changed meanwhile.
        """
        cdef object found = self._open.get(number)
        cdef SendStream stream
        cdef object half
        if found is None:
            return None
        stream = found
        half = stream.half
        if stream.guard is not None:
            stream.guard.check(stream, size)
        self._release(stream, size)
        if stream.fin and not stream.queued:
            self._end(stream)
        return half

    cdef int _end(self, SendStream stream) except -1:
        """All of a stream has left, with its end."""
        cdef object half = stream.half
        del self._open[stream.number]
        self._remember(stream)
        stream.speaker = None
        if half is not None:
            stream.half = None  # which may keep it, and nothing is paid for any more
            half.stream_left(stream)
        return 0

    cdef int _remember(self, SendStream stream) except -1:
        """Whose stream has left whole: the peer may stop it until it has read all of it."""
        cdef object half = stream.half if stream.half is not None else stream.speaker
        cdef Py_ssize_t count
        cdef list numbers
        if half is None:
            return 0
        self._left[stream.number] = half.channel
        if <Py_ssize_t> len(self._left) <= self._left_most:
            return 0
        # Most channels end soon: what is left of those that live is looked at again once there is
        # twice as much.
        numbers = [number for number, channel in self._left.items() if channel not in self.live]
        for number in numbers:
            del self._left[number]
        count = <Py_ssize_t> len(self._left)
        if count > self._left_kept:
            for number in list(self._left)[:count - self._left_kept]:
                del self._left[number]
            count = self._left_kept
        self._left_most = max(LEFT, 2 * count)
        return 0

    def effects_taken(self):
        """The carrier sees the effects so far before it counts again."""
        self._opened_since = 0

    cpdef int _allow(self, Py_ssize_t count) except -1:
        """``count`` streams may be opened, of which some are in effects by now."""
        self._openable = count - self._opened_since
        self._most_openable = max(self._most_openable, count)
        return 0

    cpdef int recount(self, Py_ssize_t held, bint forgotten) except -1:
        """``held`` streams more are opened in effects that the carrier has not seen.

        ``forgotten``: they are not, nor is any other. It has forgotten all streams, and nothing is
        opened until it says how many may be.
        """
        if forgotten:
            self._next -= self._opened_since + held
            self._openable = self._most_openable = self._opened_since = 0
        else:
            self._opened_since += held
        return 0

    @property
    def stalled_control(self):
        """Bytes and streams of acks, closes and the like that the peer does not let leave.

        Nobody waits before these are queued, so a peer that lets none of them out while it makes
        us say ever more has to be stopped.
        """
        return self._control_queued + STALLED_STREAM * <Py_ssize_t> len(self._control_waiting)

    def write(self, SendStream stream not None, list buffers not None, bint fin=False):
        """Queues buffers; opens the stream if there is one to be had."""
        self._write(stream, buffers, fin)

    cdef int _write(self, SendStream stream, list buffers, bint fin) except -1:
        cdef Py_ssize_t size
        if stream.dead:
            return 0
        size = size_of(buffers)
        if stream.number < 0:
            if stream.waiting or not self._may_open(stream):
                (self._control_waiting if stream.control else self._message_waiting)[stream] = None
                if not stream.waiting:
                    stream.waiting = []
                (<list> stream.waiting).extend(buffers)
                stream.fin = fin
                return self._charge(stream, size)
            if self._begin(stream):
                buffers = [VERSION, *buffers]  # AQ-26, AQ-R6
                size += len(VERSION)
        stream.fin = fin
        self._charge(stream, size)
        if self._make_guard is not None:
            self._watch(stream, buffers)
        self._emit(stream, buffers, fin)
        if fin and not stream.queued:
            self._end(stream)  # nothing of it is reported any more
        return 0

    cpdef int append(self, SendStream stream, list buffers, Py_ssize_t size) except -1:
        """``write`` without ceremony: one more message of ``size`` bytes on a stream."""
        if stream.number < 0 or stream.dead or self._make_guard is not None:
            self.write(stream, buffers)
            return 0
        self._charge(stream, size)
        return self._emit(stream, buffers, False)

    cpdef int _watch(self, SendStream stream, list buffers) except -1:
        """A buffer belongs to the transport until it has left, so it may not change."""
        if stream.guard is None:
            stream.guard = self._make_guard()
        stream.guard.add(buffers)
        return 0

    cpdef int check_size(self, Py_ssize_t size) except -1:
        """Raises LocalProtocolError for a message of more bytes than a frame may have."""
        if size > self._frame:
            raise LocalProtocolError(
                f"a message of {size} bytes is above Limits.frame_bytes ({self._frame}); "
                "send it in pieces, or raise the limit on both sides"
            )
        return 0

    cpdef bint _may_open(self, SendStream stream) except -1:
        cdef object waiting = self._control_waiting
        cdef Py_ssize_t reserved
        if not self.connected or self._openable <= 0:
            return False
        if not stream.control:
            reserved = <Py_ssize_t> (self._most_openable * self._control_share)
            if waiting or self._openable <= reserved:
                return False
            waiting = self._message_waiting
        return not waiting or stream is next(iter(waiting))

    cpdef bint _begin(self, SendStream stream) except -1:
        """Opens the stream. Returns whether VERSION leads (AQ-26, AQ-R6)."""
        stream.number = self._next
        self._next += 1
        self._openable -= 1
        self._opened_since += 1
        self._open[stream.number] = stream
        return not self.version_acknowledged

    cdef int _emit(self, SendStream stream, list buffers, bint fin) except -1:
        """One WRITE for what goes to a stream at once: each costs a call of the carrier."""
        cdef list effects = self._effects
        cdef Py_ssize_t count = len(effects)
        cdef tuple last
        if count:
            last = effects[count - 1]
            if last[0] == WRITE_EFFECT and last[1] == stream.number:
                (<list> last[2]).extend(buffers)
                if fin:
                    effects[count - 1] = (WRITE_EFFECT, last[1], last[2], True)
                return 0
        effects.append((WRITE_EFFECT, stream.number, buffers, bool(fin)))
        return 0

    cpdef int _charge(self, SendStream stream, Py_ssize_t size) except -1:
        stream.queued += size
        self.queued += size
        self.process.used += size
        self.charged += <uint64_t> size
        if stream.half is not None:
            (<SenderBase?> stream.half).queued += size
        else:
            self._control_queued += size
        return 0

    cpdef int _release(self, SendStream stream, Py_ssize_t size) except -1:
        if size > stream.queued:
            size = stream.queued
        if self.queued >= self._mark > self.queued - size:
            self.fell = True
        stream.queued -= size
        self.queued -= size
        if stream.half is not None:
            (<SenderBase?> stream.half).queued -= size
            if (<SenderBase> stream.half)._ends is not None:
                self._retain(<SenderBase> stream.half, size)
            else:
                self.process.used -= size
        else:
            self._control_queued -= size
            self.process.used -= size
        if (self.process.waiting or self.process.pulling) and (
            stream.half is None or (<SenderBase> stream.half).queued == 0
        ):
            self.process.notify()  # what a channel had is gone
        return 0

    cdef int _retain(self, SenderBase half, Py_ssize_t size) except -1:
        """A large batch keeps its memory until all of it has left: so long it counts."""
        cdef int64_t reached
        half._left += size
        self.retained += size
        reached = half._returned
        while half._ends and <int64_t> half._ends[0] <= half._left:
            reached = half._ends.popleft()
        if not half._ends:
            reached = half._left
        self.retained -= reached - half._returned
        self.process.used -= reached - half._returned
        self.process.returned += reached - half._returned
        half._returned = reached
        return 0


@cython.auto_pickle(False)
cdef class SenderBase:
    """Who sends rows of messages: the base of the sender half.

    ``state`` is of the tables of a channel's life; ``error``: how it ended, None while it lives and
    after success. ``queued``: bytes that have not left the carrier. All else is for who builds on
    it, and stands here because most senders live for one message: so it costs nothing to begin
    with. ``owner.outgoing`` is the SendQueue of the connection.
    """

    def __cinit__(self, owner not None, *arguments, **options):
        self._ledger = owner.outgoing
        self.numbers = SentNumbers.__new__(SentNumbers)

    @property
    def writable(self):
        """Whether a send would stay below the high-water marks (design: Flow).

        Whatever others have queued, one message of each channel may be: who reads it may read
        nothing else before.
        Not while the peer has stopped the stream: what is written vanishes without ever counting
        as queued, so nothing would hold the sender until the receiver closes. Once it has ended
        there is nothing to wait for: a send is refused.
        """
        return self.room()

    cdef bint room(self) except -1:
        cdef SendQueue ledger = self._ledger
        cdef uint64_t unsettled
        unsettled = self.numbers.next - self.numbers.acked.covered
        if self.unreliable is not None:
            unsettled += self.unreliable.next - self.unreliable.settled
        return (
            self.queued < ledger._channel_mark
            and (
                (ledger.queued < ledger._mark and ledger.process.used < ledger.process_budget)
                or self.queued == 0
            )
            and unsettled < <uint64_t> ledger._messages
            and (
                self.message_stream is None
                or not self.message_stream.dead
                or self.state is not ledger._sending
            )
        )

    def end_batch(self):
        """What was posted since the last call is one batch: its bytes count until all have left."""
        if self._ends is None:
            self._ends = deque()
        self._ends.append(self._left + self.queued)

    cpdef object post(self, object payload, object headers):
        """One more ORDERED message without attachments: what is done for each of a long row.

        Returns its number; None, with nothing done, unless the messages before went so, too.
        Raises LocalProtocolError for what cannot be encoded.
        """
        cdef SendStream stream = self.message_stream
        cdef Py_ssize_t size = 0
        cdef list buffers
        cdef uint64_t number
        if stream is None or self.error is not None or self.state is not self._ledger._sending:
            return None
        number = self.numbers.next
        if self._ledger.frames is None:
            buffers = message_buffers(number, payload, headers, (), &size)
        else:
            buffers = self._ledger.frames(self.channel, number, payload, (), headers)
            size = size_of(buffers)
        self._ledger.check_size(size)
        if number == HIGHEST:
            self.numbers.take()  # says so
        self.numbers.next = number + 1
        self._ledger.append(stream, buffers, size)
        return number
