"""What every message does that is taken: it leaves the queue, and what it was charged returns.

The bases of what is Python of a connection and its channels, so that compiled modules need no
step of Python to take the next message.
"""

cimport cython
from libc.stdint cimport int64_t

from aqueduct._speedups.runs cimport Received, Run

from collections import OrderedDict, deque
from types import MappingProxyType

__all__ = ["EMPTY", "Budget", "Inbox"]

# A connection may have very many channels, of which most are idle: what they do not need now has
# this in its place. It cannot be changed, so a forgotten replacement is an error.
EMPTY = MappingProxyType({})


@cython.auto_pickle(False)
cdef class Budget:
    """What a connection's receivers share: the bytes they hold, and who waits for them.

    ``budget_used`` counts bytes admitted and not yet taken by the application, and read-ahead
    granted, which may be ``budget``, and ``channel_budget`` of one channel. ``freed`` says whether
    it fell since starved receivers were last looked at.
    ``starved``: receivers whose next message waits for room in the budget, in order; ``relieved``:
    those that got room of their own while messages wait there.
    """

    def __cinit__(self):
        self.relieved = {}
        self.starved = OrderedDict()

    cdef bint is_awaited(self) except -1:
        """Whether somebody waits for room that may have come back."""
        return len(self.relieved) > 0 or len(<dict> self.starved) > 0


@cython.auto_pickle(False)
cdef class Inbox:
    """The messages of one channel that wait to be taken.

    ``queue`` is a deque of Received, or an empty tuple; ``charged`` the bytes admitted here and
    not yet taken, in ``_outstanding`` messages. If something is ``waiting``, there is news for it
    when these fall. ``_dropped`` counts those in the queue that nobody gets, and
    ``_unreliable_queue`` holds the undelivered unreliable ones, oldest first. All else is for who
    builds on it, and stands here because most receivers live for one message: so it costs nothing
    to begin with.
    """

    def __cinit__(self, Budget budget not None, *arguments, **options):
        self._budget = budget
        self.queue = self._unreliable_queue = self.evicted = ()
        self.waiting = self.streams = EMPTY
        self._declared = -1

    @property
    def room(self):
        """Bytes of messages that can be admitted without asking for each; below zero: none."""
        return self.left()

    cdef int64_t left(self) except? -1:
        """See ``room``."""
        cdef Budget budget = self._budget
        if self.waiting or (self.placement is not None and self.placement_key is None):
            return -1  # or they would pass by what waits for ever
        return min(budget.channel_budget - self.charged, budget.budget - budget.budget_used)

    def add(self, Run run not None):
        """Queues and charges what was read; whether there was nothing to take before."""
        cdef bint first = not self.queue
        self._outstanding += run.admitted
        if run.charge:
            self.count(run.charge)
        if not run.messages:
            return False
        if first:
            self.queue = deque(run.messages)
        else:
            self.queue.extend(run.messages)
        return first

    def take(self):
        """The next message, or None if there is none now."""
        return self.pop()

    def _charge(self, int64_t size):
        self.count(size)

    cdef int count(self, int64_t size) except -1:
        """Charges ``size`` bytes, here and in the budget; below zero: they return."""
        cdef Budget budget = self._budget
        self.charged += size
        budget.budget_used += size
        if size < 0:
            budget.freed = True
            if self.waiting:
                budget.relieved[self] = None
        return 0

    cdef Received pop(self):
        cdef Received received
        cdef object queue = self.queue
        while queue:
            received = <Received?> queue.popleft()
            if not queue:
                self.queue = ()
            if received.dropped:
                self._dropped -= 1
                continue
            if not received.reliable:
                self._unreliable_queue.popleft()
                self._unreliable_queue = self._unreliable_queue or ()
            self.count(-received.charge)
            self._outstanding -= 1
            return received
        return None
