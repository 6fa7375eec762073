"""What leaves next on a byte stream."""

from libc.stdint cimport uint8_t, uint64_t

from aqueduct._speedups.bpmux.chunks cimport HEAD_MAX
from aqueduct._speedups.bpmux.entities cimport Entity, Item, State
from aqueduct._speedups.io.gather cimport IovecWriter, iovec

cdef class SendTurns:
    cdef readonly object urgent
    cdef readonly object fresh
    cdef readonly object bulky
    cdef Py_ssize_t chunk
    cdef Py_ssize_t _offered    # bytes of payload of each chunk that was offered to the kernel
    cdef uint8_t[HEAD_MAX] _head            # of each of these
    cdef Py_ssize_t _head_size
    cdef Py_ssize_t _whole      # how many there are of these
    cdef Py_ssize_t _rest       # bytes of payload of one behind them that has less; 0: none is
    cdef uint8_t[HEAD_MAX] _rest_head
    cdef Py_ssize_t _rest_head_size

    cdef bint is_idle(self) except -1
    cdef int drop_gone(self, bint everything) except -1
    cpdef object wake(self, Entity entity)
    cpdef bint goes_first(self, Entity entity) except -1
    cpdef object make_urgent(self, Entity entity)
    cpdef object give_back(self, Entity entity, uint64_t size)
    cdef int freshen(self, Entity entity) except -1
    cdef int move(self, object queue, int to) except -1
    cdef int offer(self, iovec *vector, Py_ssize_t size, Py_ssize_t most) except -1
    cdef int offered_left(self, IovecWriter out, Py_ssize_t sent) except -1

cdef class Scheduler:
    cdef readonly SendTurns turns
    cdef public object budget
    cdef State _state
    cdef list _reported
    cdef Py_ssize_t _opening
    cdef uint64_t _unanswered_pings
    # Whose opening payload is leaving in pieces. Another one would take the credit that it needs to
    # become whole, and neither might.
    cdef Entity _begun
    # Whose opening payload waits for credit of the top-level, in order; the first is tried.
    cdef readonly object waiting
    cdef Py_ssize_t _forgotten  # entities that were taken back and may still stand in a queue
    cdef bint _over

    cdef int credited(self, Entity entity) except -1
    cdef int answer_ping(self, Entity entity) except -1
    cdef int peer_ended(self, Entity entity) except -1
    cdef int _abandon_waiting(self) except -1
    cdef int _abandon(self, Entity entity) except -1
    cdef int _wait(self, Entity entity) except -1
    cdef int _wait_no_more(self, Entity entity) except -1
    cdef int _wake_waiting(self) except -1
    cdef int fill(self, IovecWriter out, Py_ssize_t limit) except -1
    cdef int _run(self, Entity entity, Py_ssize_t room, IovecWriter out) except -2
    cdef int _send_urgent(self, Entity entity, IovecWriter out) except -1
    cdef bint _send(self, Entity entity, Py_ssize_t room, IovecWriter out) except -1
    cdef int _chunk(
        self,
        Entity entity,
        Item item,
        Py_ssize_t size,
        uint64_t total,
        Py_ssize_t available,
        IovecWriter out,
    ) except -1
    cdef int _has_opened(self, Entity entity) except -1
    cdef int _has_ended(self, Entity entity) except -1
