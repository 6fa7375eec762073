"""Messages that were admitted and not taken yet, and what they are charged."""

from libc.stdint cimport int64_t, uint64_t

from aqueduct._speedups.base.accounts cimport Account
from aqueduct._speedups.base.buffers cimport Keeper
from aqueduct._speedups.channels.message_batches cimport Received, MessageBatch
from aqueduct._speedups.channels.tracker cimport ReceivedNumbers

cdef class ReceiveBudget:
    cdef public int64_t budget_used
    cdef public bint freed
    cdef public int64_t budget
    cdef public int64_t channel_budget
    cdef public dict relieved
    cdef public object starved    # an OrderedDict
    cdef public Account process
    cdef public Account shown     # the same, also when the connection is over
    cdef public int64_t process_budget
    cdef public object place      # an ReceiverBase, or None
    cdef public object wake       # callable from any thread, or None

    cdef bint is_awaited(self) except -1
    cdef int spend(self, int64_t size) except -1
    cdef int64_t free(self) except? -1
    cdef int64_t free_in_process(self) except? -1
    cdef int tell(self) except -1

cdef class ReceiverBase:
    cdef ReceiveBudget _budget
    cdef public object queue      # a deque, or () while there is none
    cdef public int64_t charged
    cdef public object waiting
    cdef public Py_ssize_t _outstanding
    cdef public Py_ssize_t _dropped
    cdef public object _unreliable_queue
    cdef public object streams
    cdef public Py_ssize_t streams_in
    cdef public bint given
    cdef public bint assured
    cdef public bint patient
    cdef public object placement
    cdef public object placement_key
    cdef public object announce   # a Placement's companion, or None
    cdef public object evicted
    cdef public Py_ssize_t evictions
    cdef public uint64_t nacked
    cdef public object _unreliable
    cdef public object _control
    cdef public object _receipt
    cdef public bint _ack_scheduled
    cdef public object _declared
    cdef public object state
    cdef public object error
    cdef public bint _oneshot
    cdef public ReceivedNumbers numbers
    cdef public bint keeps
    cdef public bint told
    cdef readonly bint wanted
    cdef readonly object reader
    cdef public int64_t pledged
    cdef readonly int64_t held
    cdef int64_t _owed
    cdef Py_ssize_t _owed_messages
    cdef int64_t _held_alive
    cdef DirectReading _reading

    cdef int64_t left(self) except? -1
    cdef int count(self, int64_t size) except -1
    cdef Received pop(self)
    cdef MemoryLease lease_of(self, object payload)
    cdef int settle_owed(self) except -1
    cdef int release(self, Py_ssize_t messages) except -1
    cdef int quit_place(self) except -1

cdef class DirectReading:
    """What the leases of one reader share; ``inbox`` is None once that reader is done."""

    cdef ReceiverBase inbox

cdef class MemoryLease(Keeper):
    cdef DirectReading _reading         # None: it has returned
    cdef Account _account
    cdef int64_t _charge
    cdef int64_t _size            # of a buffer that is alive; 0: none is watched
    cdef bint _unpacked           # the batch does not point into that buffer

    cdef int _change(self, int64_t by) except -1

    cpdef object give_back(self)
