"""What tasks wait for."""

cdef class WaiterSlot

cpdef bint nests(loop) except -1

cdef class Waiter:
    cdef public bint _asyncio_future_blocking
    cdef public bint woken      # set it before a step that the caller does not make itself
    cdef readonly object _loop
    cdef readonly object _callback  # what steps the task; None: it does not wait
    cdef object _context
    cdef object _cancelled
    cdef WaiterSlot _among         # of those that wait for the same; None: it is alone

    cdef int _call_soon(self) except -1

cdef class WaiterSlot:
    cdef readonly list waiters
    cdef public object loop
