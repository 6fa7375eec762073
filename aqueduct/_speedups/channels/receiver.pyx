"""What every message does that is taken: it leaves the queue, and what it was charged returns.

Or the charge stays with the taken message for as long as somebody works on it (``MemoryLease``).

The bases of what is Python of a connection and its channels, so that compiled modules need no
step of Python to take the next message.
"""

cimport cython
from libc.stdint cimport int64_t

from aqueduct._speedups.base.accounts cimport Account
from aqueduct._speedups.base.buffers cimport AlignedBuffer, Keeper
from aqueduct._speedups.channels.message_batches cimport Received, MessageBatch

from collections import OrderedDict, deque
from types import MappingProxyType

__all__ = ["EMPTY", "ReceiveBudget", "ReceiverBase", "MemoryLease"]

cdef int64_t UNLIMITED = <int64_t> 1 << 62

cdef enum:
    # Of a budget: a reader that holds as much, or less, lets others go on above it meanwhile. That
    # is what a batch in one message has (Calls.fragment_bytes of Flow.receive_budget).
    PASSED_ON_SHARE = 16

# A connection may have very many channels, of which most are idle: what they do not need now has
# this in its place. It cannot be changed, so a forgotten replacement is an error.
EMPTY = MappingProxyType({})


@cython.no_gc_clear  # its end needs the account
@cython.auto_pickle(False)
cdef class ReceiveBudget:
    """What a connection's receivers share: the bytes they hold, and who waits for them.

    ``budget_used`` counts bytes admitted and not yet given back by the application, and read-ahead
    granted, which may be ``budget``, and ``channel_budget`` of one channel. ``freed`` says whether
    it fell since starved receivers were last looked at.
    ``starved``: receivers whose next message waits for room in the budget, in order; ``relieved``:
    those that got room of their own while messages wait there.
    ``place``: the receiver that goes on above the budget, or None. ``process`` counts what all
    connections hold, which may be ``process_budget``; it has a place of its own.
    ``wake``, if not None, is called, in any thread, when receivers may go on.
    """

    def __cinit__(self):
        self.relieved = {}
        self.starved = OrderedDict()
        self.process = self.shown = Account()
        self.process_budget = UNLIMITED

    def __dealloc__(self):
        self.process.used -= self.budget_used

    @property
    def free_bytes(self):
        """How many bytes fit into both budgets; below zero if they are exceeded."""
        return self.free()

    def spent(self, int64_t size):
        """``size`` bytes more are charged; below zero: they returned."""
        self.spend(size)

    def fits(self, int64_t size):
        """Whether ``size`` bytes fit into the budget of this connection."""
        return self.budget_used + size <= self.budget

    def fits_process(self, int64_t size):
        """Whether ``size`` bytes fit into what the process allows this connection."""
        return size <= self.free_in_process()

    def detach(self):
        """The connection is over: the process counts its bytes no more."""
        cdef Account process = self.process
        cdef Account own
        if self.place is not None:
            (<ReceiverBase?> self.place).quit_place()
        process.waiting.pop(self, None)
        own = Account()
        own.used = self.budget_used
        self.process = own
        process.spend(-self.budget_used)
        if process.waiting:
            process.notify()  # fewer wait

    cdef bint is_awaited(self) except -1:
        """Whether somebody waits for room that may have come back."""
        return len(self.relieved) > 0 or len(<dict> self.starved) > 0

    cdef int spend(self, int64_t size) except -1:
        """Charges ``size`` bytes here and to the process; below zero: they return."""
        self.budget_used += size
        if size < 0:
            self.freed = True
        return self.process.spend(size)

    cdef int64_t free(self) except? -1:
        return min(self.budget - self.budget_used, self.free_in_process())

    cdef int64_t free_in_process(self) except? -1:
        """While other connections wait, one holds no more than half of the process's budget."""
        cdef Account process = self.process
        cdef int64_t free = self.process_budget - process.used
        cdef Py_ssize_t waiting = len(process.waiting)
        if waiting > 1 or (waiting == 1 and self not in process.waiting):
            free = min(free, (self.process_budget >> 1) - self.budget_used)
        return free

    cdef int tell(self) except -1:
        """Room came back outside of what the connection does by itself."""
        if self.wake is not None and self.is_awaited():
            self.wake()
        return 0


@cython.auto_pickle(False)
cdef class ReceiverBase:
    """The messages of one channel that wait to be taken.

    ``queue`` is a deque of Received, or an empty tuple; ``charged`` the bytes admitted here and
    not yet taken, in ``_outstanding`` messages. If something is ``waiting``, there is news for it
    when these fall. ``_dropped`` counts those in the queue that nobody gets, and
    ``_unreliable_queue`` holds the undelivered unreliable ones, oldest first.

    What is taken returns its charge. If the inbox ``keeps``, the charge goes to a ``lease``, or
    returns by ``settle``; ``held`` is the sum of the leases. Where the reader tells when it waits
    (``told``), the inbox is ``wanted`` while it does, by ``reader``.
    ``pledged``: bytes charged for the rest of a batch that comes in several messages.

    All else is for who builds on it, and stands here because most receivers live for one message:
    so it costs nothing to begin with.
    """

    def __cinit__(self, ReceiveBudget budget not None, *arguments, **options):
        self._budget = budget
        self.queue = self._unreliable_queue = self.evicted = ()
        self.waiting = self.streams = EMPTY
        self._declared = -1

    @property
    def owed(self):
        """Bytes of messages that were taken and belong to no lease yet: parts of a batch."""
        return self._owed

    @property
    def room(self):
        """Bytes of messages that can be admitted without asking for each; below zero: none."""
        return self.left()

    cdef int64_t left(self) except? -1:
        """See ``room``."""
        cdef ReceiveBudget budget = self._budget
        if self.waiting or (self.placement is not None and self.placement_key is None):
            return -1  # or they would pass by what waits for ever
        return min(budget.channel_budget - self.charged, budget.free())

    def add(self, MessageBatch run not None):
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
        if not self.told:
            self.quit_place()  # it is whole: others may go on
        return first

    def take(self):
        """The next message, or None if there is none now."""
        return self.pop()

    def _charge(self, int64_t size):
        self.count(size)

    cdef int count(self, int64_t size) except -1:
        """Charges ``size`` bytes, here and in the budget; below zero: they return."""
        cdef ReceiveBudget budget = self._budget
        self.charged += size
        budget.spend(size)
        if size < 0 and self.waiting:
            budget.relieved[self] = None
        return 0

    # Each in one step: connections in other threads charge the same process meanwhile.

    def charge_within(self, int64_t size):
        """Charges ``size`` bytes if they fit into both budgets; whether they do."""
        if size > self._budget.free():
            return False
        self.count(size)
        return True

    def charge_above(self, int64_t size):
        """Charges ``size`` bytes, and takes the place above each budget that has no room for them.

        False, and nothing is changed, if such a place is another's.
        """
        cdef ReceiveBudget budget = self._budget
        cdef Account process = budget.process
        cdef bint here = budget.budget_used + size > budget.budget
        cdef bint everywhere = size > budget.free_in_process()
        if here and budget.place is not None and budget.place is not self:
            return False
        if everywhere and process.place is not None and process.place is not self:
            return False
        if here:
            budget.place = self
        if everywhere:
            process.place = self
        self.count(size)
        return True

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
            if self.keeps:
                self._owed += received.charge
                self._owed_messages += 1
            else:
                self.count(-received.charge)
                self.release(1)
            return received
        return None

    # Charges that are kept beyond the taking

    def lease(self, payload):
        """The charge of what was taken since the last lease, for as long as somebody works on it.

        It returns with the lease, or with the memory of ``payload``, if that is an AlignedBuffer.
        The channel has room again, its connection has not.
        """
        return self.lease_of(payload)

    cdef MemoryLease lease_of(self, object payload):
        cdef MemoryLease lease = MemoryLease.__new__(MemoryLease)
        cdef Account account = self._budget.shown
        cdef AlignedBuffer buffer
        if self._reading is None:
            self._reading = DirectReading.__new__(DirectReading)
            self._reading.inbox = self
        lease._reading = self._reading
        lease._account = account
        lease._charge = self._owed
        self.held += self._owed
        self.charged -= self._owed
        self._outstanding -= self._owed_messages
        self._owed = self._owed_messages = 0
        if self.waiting:
            self._budget.relieved[self] = None
        if type(payload) is AlignedBuffer and (<AlignedBuffer> payload).keeper is None:
            buffer = <AlignedBuffer> payload
            buffer.keeper = lease
            lease._size = buffer.size
            account.alive += buffer.size
            account.lent += buffer.size
            self._held_alive += buffer.size
        return lease

    def settle(self):
        """What was taken since the last lease returns its charge."""
        self.settle_owed()

    cdef int settle_owed(self) except -1:
        cdef Py_ssize_t messages = self._owed_messages
        cdef int64_t owed = self._owed
        if messages:
            self._owed = self._owed_messages = 0
            self.count(-owed)
            self.release(messages)
        return 0

    def let_go(self):
        """Whoever read here is done: what was taken, and not given back, returns its charge."""
        cdef int64_t held = self.held
        self.keeps = self.wanted = False
        self.settle_owed()
        if self._reading is not None:
            self._reading.inbox = None
            self._reading = None
        self._budget.shown.lent -= self._held_alive
        self.held = self._held_alive = 0
        if held:
            self._budget.spend(-held)
        self.quit_place()
        self._budget.tell()

    def settled(self, Py_ssize_t messages):
        """So many messages are charged no more."""
        self.release(messages)

    cdef int release(self, Py_ssize_t messages) except -1:
        self._outstanding -= messages
        if self._outstanding == 0 and self.held == 0:
            self.quit_place()
        return 0

    # Above the budget

    def want(self, bint wanted, reader=None):
        """Whether ``reader``, anything that compares, waits for the next message; in any thread.

        If that reader holds the batch above the budget, it gives it back only after this message.
        So the place becomes free.
        """
        cdef ReceiveBudget budget = self._budget
        cdef object place
        self.wanted = wanted
        if not wanted:
            return
        self.reader = reader
        for place in (budget.place, budget.process.place):
            if (
                place is not None and place is not self and not (<ReceiverBase?> place).wanted
                and (<ReceiverBase> place).told and (<ReceiverBase> place).reader == reader
            ):
                (<ReceiverBase> place).quit_place()
        if self.waiting:
            budget.relieved[self] = None
            budget.tell()

    def leave_place(self):
        """Gives up the place above the budget to others."""
        self.quit_place()

    def pass_on(self):
        """Its reader waits for the peer, and may so for long: others go on above the budget.

        Just these may be what the peer waits for. A reader that holds much stays alone above the
        budget, until it has not given back for ``Timing.stall_deadline``; so does one that is above
        the budget of the process.
        """
        cdef ReceiveBudget budget = self._budget
        if budget.place is not self or self.pledged or self._owed or not self.held:
            return
        if self.held <= budget.budget // PASSED_ON_SHARE:
            budget.place = None
            budget.freed = True
            budget.tell()

    cdef int quit_place(self) except -1:
        cdef ReceiveBudget budget = self._budget
        cdef Account process = budget.process
        if budget.place is self:
            budget.place = None
            budget.freed = True
            budget.tell()
        if process.place is self:
            process.place = None
            if process.waiting:
                process.notify()
        return 0


@cython.final
@cython.auto_pickle(False)
cdef class DirectReading:
    pass


@cython.final
@cython.no_gc  # no way leads back to it from what it refers to, once its reader is done
@cython.auto_pickle(False)
cdef class MemoryLease(Keeper):
    """The charge of a batch that somebody works on; made by ``ReceiverBase.lease``.

    It returns by ``give_back``, in any thread, or once neither the lease nor the buffer exists.
    """

    @property
    def size(self):
        """Bytes that are charged by it."""
        return 0 if self._reading is None or self._reading.inbox is None else self._charge

    def __dealloc__(self):
        self.give_back()

    cpdef object give_back(self):
        """The batch is worked on no more; without effect the second time."""
        cdef DirectReading reading = self._reading
        cdef ReceiverBase inbox
        cdef ReceiveBudget budget
        if reading is None:
            return
        self._reading = None
        inbox = reading.inbox
        if inbox is None:
            return
        budget = inbox._budget
        inbox.held -= self._charge
        inbox._held_alive -= self._size
        self._account.lent -= self._size
        budget.spend(-self._charge)
        inbox.release(0)
        if inbox.waiting:
            budget.relieved[inbox] = None
        elif inbox.held == 0 and inbox.error is not None:
            inbox._reading = None  # nothing more comes: it need not lead back here
        budget.tell()

    def grow(self, int64_t size):
        """The batch takes ``size`` bytes more, as it is unpacked: they are charged with the rest.

        From then on the charge outlives the payload, which is not what the batch points into.
        """
        if self._reading is not None and self._reading.inbox is not None:
            self._unpacked = True
            self._change(size)

    cdef int _change(self, int64_t by) except -1:
        cdef ReceiverBase inbox = self._reading.inbox
        self._charge += by
        inbox.held += by
        inbox._budget.spend(by)
        return 0

    cdef int freed(self) except -1:
        cdef int64_t size = self._size
        cdef ReceiverBase inbox
        if self._unpacked and self._reading is not None and self._reading.inbox is not None:
            inbox = self._reading.inbox
            inbox._held_alive -= size
            self._account.lent -= size
            self._change(-size)
            inbox._budget.tell()
        else:
            self.give_back()
        self._size = 0
        self._account.alive -= size
        return 0
