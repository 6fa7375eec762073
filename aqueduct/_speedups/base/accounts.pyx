"""The bytes that all connections of a process hold: counted here, for each message.

``aqueduct.endpoint.accounts`` and the connections decide what goes on above a budget, and who
waits.
"""

cimport cython
from libc.stdint cimport int64_t

__all__ = ["Account"]


@cython.auto_pickle(False)
cdef class Account:
    """Bytes of one direction that all connections of a process hold.

    - ``used``: bytes that are charged now; ``returned``: bytes that were, and are no more.
    - ``waiting``: who waits for room, in order.
    - ``pulling``: who else waits before it takes memory: calls of clients that pull a batch (see
      ``aqueduct.endpoint.pulling``), or compressed batches.
    - ``place``: who goes on above the budget, or None.
    - ``alive``: bytes of received buffers that handlers and readers have.
    - ``lent``: those of them that are still charged. The difference is ``kept``.
    """

    def __cinit__(self):
        self.waiting = {}
        self.pulling = {}

    @property
    def kept(self):
        """Bytes of batches that are alive although their handler or reader has asked for more."""
        return max(0, self.alive - self.lent)

    def charge(self, int64_t size):
        """Charges ``size`` bytes. Below zero they return, and those who wait are told."""
        self.spend(size)

    cdef int spend(self, int64_t size) except -1:
        self.used += size
        if size < 0:
            self.returned -= size
            if self.waiting or self.pulling:
                self.notify()
        return 0

    def join(self, member):
        """A connection begins to count here. Subclasses say what that means."""

    def press(self):
        """A connection begins to wait. Subclasses say what that means."""

    def notify(self):
        """There may be room for those who wait: each of them is woken."""
        for waiting in tuple(self.waiting):
            if waiting.wake is not None:
                waiting.wake()
