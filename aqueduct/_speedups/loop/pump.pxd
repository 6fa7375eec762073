"""Between a carrier and a connection core."""

from aqueduct._speedups.channels.sender cimport SendQueue

cdef class Pump:
    cdef readonly object core
    cdef readonly object carrier
    cdef readonly double last_input
    cdef readonly bint flushing
    cdef public object on_pong
    cdef readonly object written
    cdef readonly object kept
    cdef object _on_event
    cdef object _on_closed
    cdef object _loop
    cdef object _time
    cdef list _events           # of the core: always the same list
    cdef list _effects          # likewise
    cdef SendQueue _ledger         # its ``outgoing``
    cdef object _incoming       # its ``incoming``
    cdef object _extra_streams
    cdef double _rtt
    cdef object _timer
    cdef double _timer_at
    cdef bint _flush_scheduled
    cdef readonly bint _flush_wanted
    cdef bint _again
    cdef bint _told             # an event was handed out
    cdef readonly bint stepping
    cdef readonly object _woken
    cdef bint _closed

    cpdef object flush(self)
    cpdef object flush_soon(self)
    cdef int _apply(self) except -1
    cdef bint _flush_and_step(self) except -1
    cdef int _dispatch(self) except -1
    cdef int _fault(self, str where, error) except -1
    cdef int _set_timer(self) except -1

cdef int carry_out(
    list wanted, object extra_streams, object core, object carrier, double now
) except -1
