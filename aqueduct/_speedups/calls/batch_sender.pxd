"""From the batches of an iterable to messages of a channel, as far as there is room."""

from aqueduct._speedups.arrow.writer cimport Encoded
from aqueduct._speedups.channels.sender cimport SenderBase
from aqueduct._speedups.loop.waiter cimport Waiter

cdef class SharedWindow:
    cdef readonly Py_ssize_t used
    cdef readonly Py_ssize_t limit
    cdef dict _blocked

    cdef int give_back(self, Py_ssize_t size) except -1

cdef class InFlightWindow:
    cdef SharedWindow _shared
    cdef object _wake
    cdef bint _wanted
    cdef Py_ssize_t _taken  # bytes of the last batch that is settled, if no answer came yet
    cdef Py_ssize_t _batches
    cdef Py_ssize_t _bytes
    cdef Py_ssize_t _small_batches
    cdef Py_ssize_t _small_bytes
    cdef Py_ssize_t _sent_bytes
    cdef Py_ssize_t _settled_bytes
    cdef dict _sizes
    cdef public Py_ssize_t held
    cdef public bint answering
    cdef readonly Py_ssize_t sent
    cdef readonly Py_ssize_t settled

    cdef bint is_open(self) except -1
    cdef int _gave_back(self, Py_ssize_t size) except -1
    cpdef Py_ssize_t send(self, Py_ssize_t size) except -1
    cpdef int settle(self, Py_ssize_t number, bint answered=*) except -1

cdef class BatchSender:
    cdef object _call
    cdef readonly InFlightWindow window
    cdef public SenderBase row
    cdef public str compression
    cdef readonly bint over
    cdef public Py_ssize_t moved
    cdef public object slow
    cdef public Py_ssize_t expects
    cdef bytes _key
    cdef Py_ssize_t _most
    cdef Py_ssize_t _large
    cdef object _flush

    cdef bint can_send(self) except -1
    cdef int _check(self) except -1
    cdef bint ready(self) except -1
    cdef bint push(self, object source, object batch) except -1
    cdef bint push_encoded(self, Encoded encoded) except -1

cdef class SendWaker:
    cdef BatchSender _sender
    cdef object _stepper
    cdef Waiter _waiter         # what the task waits for, or has waited for last
