"""The bytes of a multiplexer as messages of one channel of Relink."""

from libc.stdint cimport uint8_t, uint64_t

from aqueduct._speedups.io.gather cimport IovecWriter
from aqueduct._speedups.io.tls_records cimport Records
from aqueduct._speedups.relink.packets cimport PacketDecoder

cdef class Tunnel(Records):
    cdef object _owner
    cdef Records _under         # for TLS; None: the socket itself
    cdef int _fd
    cdef PacketDecoder _decoder
    cdef object _memory         # a memoryview that is read to, and copied from at once
    cdef int _packets           # taken in this turn
    cdef readonly bint hurried  # more is here, and it is others' turn first
    cdef object _piece          # bytes of a message that the reader has not taken; None: none
    cdef Py_ssize_t _taken      # of those
    cdef uint64_t _skip         # bytes of the message that an earlier connection has handed over
    cdef uint64_t _arrived      # bytes of the message on this connection
    cdef object _failure        # why nothing more comes, once what came is taken
    cdef bint _ended            # the peer has closed its side
    cdef bint _short            # the last read left nothing

    cdef Py_ssize_t land(
        self, char *target, Py_ssize_t size, char *ahead, Py_ssize_t more
    ) except -2
    cdef Py_ssize_t _go_on(self, uint8_t *target, Py_ssize_t size) except -1
    cdef Py_ssize_t _take_piece(self, uint8_t *target, Py_ssize_t size) except -1
    cdef Py_ssize_t _read(self, uint8_t *target, Py_ssize_t size) except -2
    cdef Py_ssize_t _receive(self, uint8_t *target, Py_ssize_t size, Py_ssize_t ahead) except -2
    cdef Py_ssize_t _kernel(
        self, uint8_t *target, Py_ssize_t size, char *ahead, Py_ssize_t more
    ) except -2
    cdef char *_place(self) except NULL
    cdef int frame(self, object out) except -1
    cdef bint may_send(self) except -1
    cdef bint waits(self) except -1
    cdef bint fill(self, IovecWriter out) except -1
