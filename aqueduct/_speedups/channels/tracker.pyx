"""Message numbers of one channel: the reliable and the unreliable space, at both ends (AQ-32).

All is kept in ranges, so that a channel whose messages come in order costs a constant, and one
with n holes O(log n) a message. No class here takes part in garbage collection: they hold range
sets alone, and the collector need not walk those of a hundred thousand channels.
"""

cimport cython
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_GET_SIZE
from libc.stdint cimport uint8_t, uint32_t, uint64_t

from aqueduct._speedups.base.ranges cimport RangeSet
from aqueduct._speedups.base.varint cimport raise_varint, to_number, to_uint64, varint_load

from aqueduct.errors import LimitExceeded, LocalProtocolError, SequenceError

__all__ = ["ReceivedNumbers", "SentNumbers", "UnreliableReceived", "UnreliableSent"]

cdef uint64_t HIGHEST = 0xFFFFFFFFFFFFFFFF


@cython.final
@cython.no_gc
@cython.auto_pickle(False)
cdef class SentNumbers:
    """The reliable numbers of a sender: handed out from 0 upwards, then acknowledged.

    It begins as if ``sent`` messages had been sent. ``next``: the number that ``take`` hands out
    next, so as many were sent.
    """

    def __cinit__(self, uint64_t sent=0):
        self.next = sent
        self.acked = RangeSet.__new__(RangeSet)

    @property
    def unacked(self):
        """How many sent numbers are not acknowledged."""
        return self.next - self.acked.covered

    def take(self):
        """Hands out the next number. LocalProtocolError above 2^64 - 2 (AQ-R13)."""
        cdef uint64_t number = self.next
        if number == HIGHEST:
            raise LocalProtocolError("the channel has used all its message numbers (AQ-R13)")
        self.next += 1
        return number

    def ack(self, bytes ranges not None, bint told=True):
        """Takes the RANGES of an ack, as bytes: gap, range, gap, range, ... (AQ-36).

        Returns what is newly acknowledged, as ascending (start, stop) pairs; numbers acked before
        are passed over. With ``told`` False nobody asks, and no pair is made. Raises
        SequenceError, with nothing changed, for a number that was never sent (AQ-R16), ValueError
        for an odd number of varints.
        """
        cdef list newly = []
        cdef uint64_t at = 0, length = 0, added = 0
        cdef const uint8_t *pos = <const uint8_t *> PyBytes_AS_STRING(ranges)
        cdef const uint8_t *end = pos + PyBytes_GET_SIZE(ranges)
        if check_reach(pos, end, self.next, 0, "an ack", "AQ-R16") % 2:
            raise ValueError("the varints of an ack are pairs of gap and range (AQ-20)")
        while pos < end:
            pos += next_of(pos, end, &length)
            at += length
            pos += next_of(pos, end, &length)
            if length and told:
                newly += self._settle(at, at + length - 1)
            elif length:
                self.acked.add_span(at, at + length - 1, &added)
            at += length
        return newly

    cdef list _settle(self, uint64_t first, uint64_t last):
        cdef list newly = self.acked.missing_spans(first, last)
        cdef uint64_t added = 0
        if newly:
            self.acked.add_span(first, last, &added)
        return newly

    def __repr__(self):
        return f"<SentNumbers: {self.next} sent, {self.unacked} not acknowledged>"


@cython.final
@cython.no_gc
@cython.auto_pickle(False)
cdef class ReceivedNumbers:
    """The reliable numbers of a receiver: seen once each, acknowledged once each.

    ``ranges`` is the RangeSet of the received numbers. It has at most ``range_limit`` ranges,
    that is, holes plus one (AQ-R31).
    """

    def __cinit__(self, uint64_t range_limit=65536):
        self._range_limit = range_limit
        self.ranges = RangeSet.__new__(RangeSet)
        self._pending = RangeSet.__new__(RangeSet)

    def add(self, number):
        """A message with ``number`` came; False if it is a duplicate (AQ-R13).

        Raises SequenceError for 2^64 - 1, LimitExceeded for one hole too many, with nothing
        changed.
        """
        cdef uint64_t value = received_number(number)
        cdef uint64_t added = 0
        self.ranges.add_span(value, value, &added)
        if added == 0:
            return False
        if self.ranges.spans > self._range_limit:
            self.ranges.remove_span(value, value, &added)
            raise LimitExceeded(
                f"the numbers received on a channel have more than {self._range_limit - 1} holes "
                "(Limits.received_ranges)"
            )
        self._pending.add_span(value, value, &added)
        return True

    cdef bint take_in(self, uint64_t number) except -1:
        cdef uint64_t added = 0
        if number == HIGHEST:
            return False
        self.ranges.add_span(number, number, &added)
        if added == 0:
            return False
        if self.ranges.spans > self._range_limit:
            self.ranges.remove_span(number, number, &added)
            return False
        self._pending.add_span(number, number, &added)
        return True

    cdef bint is_new(self, uint64_t number) noexcept:
        cdef uint32_t node = self.ranges.at_or_below(number)
        return number != HIGHEST and (node == 0 or self.ranges.nodes[node].last < number)

    def __contains__(self, number):
        return number in self.ranges

    @property
    def count(self):
        """How many numbers were received."""
        return self.ranges.covered

    @property
    def highest(self):
        """The highest received number, -1 if there is none."""
        return highest_of(self.ranges)

    @property
    def pending(self):
        """How many received numbers are in no ack yet."""
        return self._pending.covered

    def complete(self, total):
        """Whether all of 0 to ``total`` - 1 were received."""
        return total == 0 or self.ranges.covers(0, total)

    def withdraw(self, number):
        """Takes a number out of the next ack, for a message dropped undelivered (AQ-R20).

        False if it is not pending. It still counts as received.
        """
        cdef uint64_t removed = 0, added = 0, value = received_number(number)
        self._pending.remove_span(value, value, &removed)
        if removed:
            if self._withdrawn is None:
                self._withdrawn = RangeSet.__new__(RangeSet)
            self._withdrawn.add_span(value, value, &added)
        return removed != 0

    def kept(self):
        """What was received and not withdrawn, as a RangeSet of its own."""
        cdef RangeSet found = RangeSet.__new__(RangeSet)
        cdef uint64_t changed = 0, last
        cdef uint32_t node = self.ranges.leftmost()
        while node:
            last = self.ranges.nodes[node].last
            found.add_span(self.ranges.nodes[node].first, last, &changed)
            node = self.ranges.above(last)
        node = self._withdrawn.leftmost() if self._withdrawn is not None else 0
        while node:
            last = self._withdrawn.nodes[node].last
            found.remove_span(self._withdrawn.nodes[node].first, last, &changed)
            node = self._withdrawn.above(last)
        return found

    def take_ack(self):
        """The varints of an ack for all that is pending, () if nothing is (AQ-R16)."""
        cdef list varints = []
        cdef RangeSet pending = self._pending
        cdef uint64_t at = 0, last
        cdef uint32_t node = pending.leftmost()
        while node:
            last = pending.nodes[node].last
            varints.append(pending.nodes[node].first - at)
            varints.append(last - pending.nodes[node].first + 1)
            at = last + 1
            node = pending.above(last)
        pending.clear()
        return tuple(varints)

    def __repr__(self):
        return (
            f"<ReceivedNumbers: {self.count} in {len(self.ranges)} ranges, "
            f"{self.pending} to ack>"
        )


@cython.final
@cython.no_gc
@cython.auto_pickle(False)
cdef class UnreliableSent:
    """The unreliable numbers of a sender: announced by count, settled in order.

    It begins as if ``sent`` messages had been sent and announced.
    """

    def __cinit__(self, uint64_t sent=0):
        self.next = self._announced = sent

    @property
    def unannounced(self):
        """Messages sent and not announced yet."""
        return self.next - self._announced

    @property
    def unsettled(self):
        """Messages neither acked nor nacked."""
        return self.next - self.settled

    def take(self):
        """Hands out the next number. LocalProtocolError above 2^64 - 2 (AQ-R13)."""
        cdef uint64_t number = self.next
        if number == HIGHEST:
            raise LocalProtocolError("the channel has used all its message numbers (AQ-R13)")
        self.next += 1
        return number

    def take_announcement(self):
        """How many are to be announced now (AQ-33)."""
        cdef uint64_t count = self.next - self._announced
        self._announced = self.next
        return count

    def ack_nack(self, bytes ranges not None, bint told=True):
        """Takes the RANGES of acks and nacks, as bytes: ack, nack, ack, ... (AQ-38).

        They go on where the last ones ended (AQ-R15). Returns (acked, nacked, lost): lists of
        ascending (start, stop) pairs, and how many messages were nacked. With ``told`` False
        nobody asks for pairs, and none is made. Raises SequenceError, with nothing changed, past
        the last message that was sent.
        """
        cdef list acked = []
        cdef list nacked = []
        cdef uint64_t at = self.settled, length = 0, lost = 0
        cdef const uint8_t *pos = <const uint8_t *> PyBytes_AS_STRING(ranges)
        cdef const uint8_t *end = pos + PyBytes_GET_SIZE(ranges)
        cdef bint is_ack = True
        check_reach(pos, end, self.next, at, "an ack of datagrams", "AQ-R15")
        while pos < end:
            pos += next_of(pos, end, &length)
            if not is_ack:
                lost += length
            if length and told:
                (acked if is_ack else nacked).append((at, at + length))
            at += length
            is_ack = not is_ack
        self.settled = at
        self.nacked += lost
        return acked, nacked, lost

    def __repr__(self):
        return f"<UnreliableSent: {self.next} sent, {self.unsettled} not settled>"


@cython.final
@cython.no_gc
@cython.auto_pickle(False)
cdef class UnreliableReceived:
    """The unreliable numbers of a receiver.

    ``announced``: the peer has sent all numbers below (AQ-37). ``settled``: all numbers below
    were acked or nacked. ``ranges``: the numbers received above that; at most ``range_limit``
    ranges, beyond which a datagram counts as lost and ``refused`` counts it.
    """

    def __cinit__(self, uint64_t range_limit=65536):
        self._range_limit = range_limit
        self.ranges = RangeSet.__new__(RangeSet)

    def announce(self, count):
        """The peer sent ``count`` more; returns ``announced``.

        SequenceError above 2^64 - 1 (AQ-R17).
        """
        cdef uint64_t value = 0
        to_number(count, HIGHEST, "the count of announced messages", &value)
        if value > HIGHEST - self.announced:
            raise SequenceError(
                f"the peer announces {self.announced + count} messages in all, more than "
                "2^64 - 1 (AQ-R17)"
            )
        self.announced += value
        return self.announced

    def add(self, number):
        """A datagram with ``number`` came; True if its message is to be delivered.

        False: seen before, nacked (AQ-39), or refused. SequenceError for 2^64 - 1 (AQ-R13).
        """
        cdef uint64_t value = received_number(number)
        cdef uint64_t added = 0
        if value < self.settled:
            return False
        self.ranges.add_span(value, value, &added)
        if added == 0:
            return False
        if self.ranges.spans > self._range_limit:
            self.ranges.remove_span(value, value, &added)
            self.refused += 1
            return False
        return True

    def withdraw(self, number):
        """Counts a received message as lost again, for one dropped undelivered (AQ-R20).

        False if it is settled or was never received.
        """
        cdef uint64_t removed = 0, value = received_number(number)
        self.ranges.remove_span(value, value, &removed)
        return removed != 0

    def __contains__(self, number):
        """Whether ``number`` was received and is not settled."""
        return number in self.ranges

    @property
    def highest(self):
        """The highest received number that is not settled, -1 if there is none."""
        return highest_of(self.ranges)

    @property
    def all_settled(self):
        """Whether every announced message is acked or nacked."""
        return self.settled >= self.announced

    def take_ack_nack(self, upto=None):
        """Settles all numbers below ``upto`` (``announced``, if None), whose deadline has passed.

        Returns varints: acks for what was received, nacks for the rest (AQ-38); () if nothing was
        left to settle. LocalProtocolError if the peer is not known to have sent that many.
        """
        cdef uint64_t stop = self.announced, at = self.settled, first, last, removed = 0
        cdef uint32_t node
        cdef list varints = []
        if upto is not None:
            to_number(upto, HIGHEST, "upto", &stop)
            if stop > self.announced and upto > self.highest + 1:
                raise LocalProtocolError(
                    f"take_ack_nack({upto}): the peer is known to have sent "
                    f"{max(self.announced, self.highest + 1)} messages"
                )
        if stop <= at:
            return ()
        node = self.ranges.leftmost()
        while node and self.ranges.nodes[node].first < stop:
            first = self.ranges.nodes[node].first
            last = min(self.ranges.nodes[node].last, stop - 1)
            if first > at:
                if not varints:
                    varints.append(0)
                varints.append(first - at)
            varints.append(last - first + 1)
            at = last + 1
            node = self.ranges.above(last)
        if at < stop:
            if not varints:
                varints.append(0)
            varints.append(stop - at)
        self.ranges.remove_span(self.settled, stop - 1, &removed)
        self.settled = stop
        return tuple(varints)

    def take_last_acks(self):
        """``take_ack_nack`` up to the highest received number, for a close (AQ-R22)."""
        return self.take_ack_nack(self.highest + 1)

    def __repr__(self):
        return (
            f"<UnreliableReceived: {self.announced} announced, {self.settled} settled, "
            f"{self.ranges.count} to ack>"
        )


cdef int next_of(const uint8_t *pos, const uint8_t *end, uint64_t *length) except -1:
    """Reads the varint at ``pos``; returns its size."""
    cdef int size = varint_load(pos, end, length)
    if size == 0:
        raise ValueError("RANGES end inside a varint")
    if size < 0:
        raise_varint(size)
    return size


cdef Py_ssize_t check_reach(
    const uint8_t *pos, const uint8_t *end, uint64_t sent, uint64_t at, str frame, str requirement
) except -1:
    """How many varints RANGES from ``at`` have; SequenceError if they reach past ``sent``.

    A range covers at least one number, so what was sent bounds the work that follows.
    """
    cdef uint64_t length = 0
    cdef Py_ssize_t count = 0
    while pos < end:
        pos += next_of(pos, end, &length)
        if length > sent - at:
            raise SequenceError(
                f"{frame} reaches {at + <object> length}, but only {sent} messages were sent "
                f"({requirement})"
            )
        at += length
        count += 1
    return count


cdef uint64_t received_number(object number) except? 0:
    """A message number of the peer; codecs pass 2^64 - 1, endpoints do not (AQ-R13)."""
    cdef uint64_t value = to_uint64(number)
    if value == HIGHEST:
        raise SequenceError("a message has the number 2^64 - 1 (AQ-R13)")
    return value


cdef object highest_of(RangeSet ranges):
    cdef uint32_t node = ranges.rightmost()
    return ranges.nodes[node].last if node else -1
