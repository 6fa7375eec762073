"""Messages that came and were not taken yet, runs of them, and what they are charged."""

from libc.stdint cimport int64_t, uint8_t, uint64_t

from aqueduct._speedups.base.accounts cimport Account
from aqueduct._speedups.base.buffers cimport Keeper
from aqueduct._speedups.channels.decoder cimport FrameDecoder
from aqueduct._speedups.channels.receive_buffer cimport ReceiveBuffer
from aqueduct._speedups.channels.tracker cimport ReceivedNumbers

cdef enum:
    # A message from here on has no memory before those that are whole could be taken.
    ALONE = 262144

cdef class Received:
    cdef readonly uint64_t number
    cdef readonly object raw
    cdef readonly tuple attachments
    cdef public object payload
    cdef readonly Py_ssize_t charge
    cdef readonly bint reliable
    cdef public bint dropped

cdef class MessageBatch:
    cdef readonly list messages
    cdef readonly int64_t charge
    cdef readonly int64_t pending
    cdef readonly int64_t largest
    cdef readonly Py_ssize_t admitted
    cdef readonly object follows
    cdef readonly bint full
    cdef bint _puts_off           # memory of what is large, behind what is whole

    cdef int take(
        self, FrameDecoder decoder, ReceivedNumbers numbers, Py_ssize_t overhead, int64_t room,
        bytes asked
    ) except -1

cdef class DirectRead:
    cdef readonly FrameDecoder decoder     # None: see ``landing``
    cdef ReceiveBuffer buffer
    cdef readonly MessageBatch run         # None: the payload under way lands, and nothing else
    cdef readonly bint stopped
    cdef readonly uint64_t size   # bytes given since it was opened
    cdef bint large               # the last message that was admitted was
    cdef ReceivedNumbers _numbers
    cdef Py_ssize_t _overhead
    cdef Py_ssize_t _window
    cdef int64_t _room
    cdef bytes _asked

    cpdef object open(self, int64_t room, int64_t pending, bytes asked)
    cpdef MessageBatch close(self)
    cdef int take_up(self) except -1
    cdef Py_ssize_t wanted(self) noexcept
    cdef uint8_t *place(self) noexcept
    cdef int fill(self, Py_ssize_t size) except -1
    cdef int push(self, object data) except -1
    cdef int _go_on(self) except -1

cdef class ReceiveBudget:
    cdef public int64_t budget_used
    cdef public bint freed
    cdef public Py_ssize_t work   # frames and attachments that were worked on in this turn
    cdef public int64_t budget
    cdef public int64_t channel_budget
    cdef public dict relieved
    cdef public object starved    # an OrderedDict
    cdef public Account process
    cdef public Account shown     # the same, also when the connection is over
    cdef public int64_t process_budget
    cdef public object place      # a ReceiveQueue, or None
    cdef public object wake       # callable from any thread, or None

    cdef bint is_awaited(self) except -1
    cdef int spend(self, int64_t size) except -1
    cdef int64_t free(self) except? -1
    cdef int64_t free_in_process(self) except? -1
    cdef int tell(self) except -1

cdef class ReceiveQueue:
    cdef readonly ReceiveBudget budget
    cdef object messages          # a deque of Received, or () while there is none
    cdef object _unreliable       # of those the unreliable ones that somebody gets, or ()
    cdef Py_ssize_t _evicted      # messages in it that nobody gets
    cdef public int64_t charged
    cdef readonly Py_ssize_t outstanding
    cdef public object waiting
    cdef readonly bint assured
    cdef public object placement
    cdef public object placement_key
    cdef public object announce
    cdef readonly Py_ssize_t evictions
    cdef readonly bint ended
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
    cpdef object charge(self, int64_t size, Py_ssize_t messages=*)
    cpdef Received take(self)
    cpdef MemoryLease lease(self, object payload)
    cpdef object settle(self)
    cdef int release(self, Py_ssize_t messages) except -1
    cdef bint take_place(self, int64_t size) except -1
    cpdef object leave_place(self)

cdef class DirectReading:
    """What the leases of one reader share; ``queue`` is None once that reader is done."""

    cdef ReceiveQueue queue

cdef class MemoryLease(Keeper):
    cdef DirectReading _reading         # None: it has returned
    cdef Account _account
    cdef int64_t _charge
    cdef int64_t _size            # of a buffer that is alive; 0: none is watched
    cdef bint _unpacked           # the batch does not point into that buffer

    cdef int _change(self, int64_t by) except -1

    cpdef object give_back(self)
