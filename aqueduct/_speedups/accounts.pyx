"""The sum of what the connections of a process hold: counted here, for each message.

What may go on above a budget, and who waits for room, is decided by ``aqueduct.accounts`` and by
the connections.
"""

cimport cython
from libc.stdint cimport int64_t

__all__ = ["Account"]


@cython.auto_pickle(False)
cdef class Account:
    """Bytes of one direction that all connections of a process hold.

    ``used``: bytes that are charged; ``returned``: all that were, and are no more. ``waiting``: who
    waits for room, in order; ``place``: who goes on above the budget, or None. ``alive``: bytes of
    received buffers that handlers and readers have, ``lent`` those of them that are still charged:
    the difference is kept beyond need.
    """

    def __cinit__(self):
        self.waiting = {}

    @property
    def kept(self):
        """Bytes of batches that are alive although their handler or reader has asked for more."""
        return max(0, self.alive - self.lent)

    def charge(self, int64_t size):
        """Charges ``size`` bytes; below zero: they return, and who waits is told."""
        self.spend(size)

    cdef int spend(self, int64_t size) except -1:
        self.used += size
        if size < 0:
            self.returned -= size
            if self.waiting:
                self.notify()
        return 0

    def join(self, member):
        """A connection begins to count here. For who builds on this."""

    def press(self):
        """Somebody begins to wait. For who builds on this."""

    def notify(self):
        """There may be room for those who wait: each of them is woken."""
        for waiting in tuple(self.waiting):
            if waiting.wake is not None:
                waiting.wake()
