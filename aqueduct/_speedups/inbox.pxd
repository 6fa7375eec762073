"""Messages that were admitted and not taken yet, and what they are charged."""

from libc.stdint cimport int64_t, uint64_t

from aqueduct._speedups.runs cimport Received, Run
from aqueduct._speedups.tracker cimport ReceivedNumbers

cdef class Budget:
    cdef public int64_t budget_used
    cdef public bint freed
    cdef public int64_t budget
    cdef public int64_t channel_budget
    cdef public dict relieved
    cdef public object starved    # an OrderedDict

    cdef bint is_awaited(self) except -1

cdef class Inbox:
    cdef Budget _budget
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

    cdef int64_t left(self) except? -1
    cdef int count(self, int64_t size) except -1
    cdef Received pop(self)
