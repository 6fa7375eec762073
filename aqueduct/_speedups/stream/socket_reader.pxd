"""What a socket has, to where it belongs."""

from libc.stdint cimport uint8_t, uint64_t

from aqueduct._speedups.bpmux.chunks cimport ChunkDecoder
from aqueduct._speedups.bpmux.entities cimport Entity
from aqueduct._speedups.bpmux.entity_receiver cimport EntityReceiver
from aqueduct._speedups.io.tls_records cimport Records
from aqueduct._speedups.io.shared_ring cimport Rings
from aqueduct._speedups.channels.receiver cimport DirectRead

cdef extern from "<sys/uio.h>" nogil:
    cdef struct iovec:
        void *iov_base
        size_t iov_len

cdef enum:
    # Outcomes.
    DRAINED = 0
    END = 1
    CORE = 2
    TURN = 3
    WHOLE = 4
    LEFT = 5

cdef class SocketReader:
    cdef readonly Entity entity      # whose inlet is open
    cdef readonly DirectRead inlet
    cdef readonly int step           # of the chunk decoder, for the core to go on with
    cdef readonly bint drained       # the last read left nothing
    cdef EntityReceiver _receiver
    cdef ChunkDecoder _chunks
    cdef object _open
    cdef object _close
    cdef Records _records            # for TLS; None: the socket itself
    cdef int _fd
    cdef object _ahead
    cdef uint8_t *_memory
    cdef Py_ssize_t _size
    cdef Py_ssize_t _little
    cdef uint64_t _latest            # identifier of the last entity with an inlet
    cdef int _threshold              # bytes that make the socket readable
    cdef bint _looked                # little was read, for the head of a large payload
    cdef Py_ssize_t _last            # bytes of the last read
    cdef uint64_t _heard             # bytes of the stream that came by the socket
    cdef Rings _rings           # where the peer may go on
    cdef bint _shares                # and has
    cdef bint _ended                 # the peer has closed its side of the socket
    cdef object _failure             # why nothing more comes
    cdef object _accept              # of memory that the peer passes; None: it passes none

    cpdef object use(self, Entity entity, DirectRead inlet)
    cdef int _wake_from(self, int threshold) except -1
    cdef int _read_once(self) except -1
    cdef int _run_on(self) except -1
    cdef int _feed(self, object data, bint alone) except -1
    # These return -1 if nothing is there now, 0 at the end.
    cdef Py_ssize_t _land(self, Py_ssize_t wanted, Py_ssize_t ahead) except -2
    cdef Py_ssize_t _fetch(self, Py_ssize_t size) except -2
    cdef Py_ssize_t _decrypt(self, uint8_t *target, Py_ssize_t size) except -2
    cdef Py_ssize_t _kernel(self, uint8_t *target, Py_ssize_t size, Py_ssize_t ahead) except -2
    cdef Py_ssize_t _receive(self, iovec *parts, size_t count) except -2
    cdef Py_ssize_t _shared(self, uint8_t *target, Py_ssize_t size, Py_ssize_t ahead) except -2
    cdef int _read_wake_bytes(self) except -1
    cdef int _run(self, object data) except -1
