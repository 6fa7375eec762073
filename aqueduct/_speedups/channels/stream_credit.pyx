"""What the peer may send on each of its streams, in bytes from the stream's start (design: Flow).

A stream begins with Flow.initial_window. One of large messages earns read-ahead beyond that, which
is charged to the budget of what has come until the stream ends.
"""

cimport cython
from libc.stdint cimport int64_t

from aqueduct._speedups.channels.events cimport CREDIT_EFFECT

__all__ = ["CreditedStream", "StreamCredit"]

cdef enum:
    # Messages from this size on earn their stream read-ahead (see ``read_ahead``).
    READ_AHEAD_FROM = 32768


@cython.auto_pickle(False)
cdef class CreditedStream:
    """One stream of the peer. ``limit``: what the peer may send, from the start of the stream.

    ``granted``: read-ahead beyond the initial window. ``fin``: the peer sends no more on it.
    """

    def __init__(self, int64_t number, int64_t limit):
        self.number = number
        self.limit = limit


@cython.final
@cython.auto_pickle(False)
cdef class StreamCredit:
    """The credit of all streams of the peer on one connection."""

    def __init__(self, ReceiveBudget shared not None):
        self._budget = shared
        self._ledger = shared.outgoing
        self._effects = shared.effects
        self._initial = shared.config.flow.initial_window
        self._read_ahead = shared.read_ahead
        self._read_ahead_both = shared.read_ahead_both

    cpdef object renew(self, CreditedStream stream, int64_t taken):
        """Lets the peer send what the stream should have now, beyond the ``taken`` bytes."""
        cdef int64_t reach, due
        if stream.fin:
            return
        reach = taken + self._initial
        # Half a window at a time: a credit costs a frame.
        due = reach + stream.granted - stream.limit
        if due >= self._initial >> 1 and due >= stream.granted >> 1:
            if stream.granted:
                self._grow(stream, due, stream.limit - reach)
                if reach + stream.granted <= stream.limit:
                    return
            stream.limit = reach + stream.granted
            self._effects.append((CREDIT_EFFECT, stream.number, stream.limit))

    cpdef object read_ahead(self, CreditedStream stream, int64_t size):
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

    cpdef object leave(self, CreditedStream stream):
        """The stream has ended: its read-ahead returns to the budget."""
        if stream.granted:
            self._budget.spend(-stream.granted)
            stream.granted = 0

    cdef int _grow(self, CreditedStream stream, int64_t due, int64_t ahead) except -1:
        """Doubles the read-ahead of a stream that uses it: several messages are under way then.

        Up to a quarter of the budget goes this way, so that others can still begin theirs. While
        this side sends as much as it receives it may be less (see ``Flow.loopback_read_ahead``).
        ``due``: bytes since the last credit; ``ahead``: those that the peer may still send.
        """
        cdef int64_t sent = <int64_t> self._ledger.charged
        cdef bint both = 2 * (sent - self._sent) >= due
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
