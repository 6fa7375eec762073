"""The socket of a byte-stream connection at work."""

from aqueduct._speedups.bpmux.entities cimport Entity
from aqueduct._speedups.bpmux.scheduler cimport Scheduler, SendTurns
from aqueduct._speedups.channels.receiver cimport DirectRead
from aqueduct._speedups.io.gather cimport IovecWriter
from aqueduct._speedups.io.tls_records cimport Records
from aqueduct._speedups.stream.socket_reader cimport SocketReader
from aqueduct._speedups.stream.tunnel cimport Tunnel

cdef class StreamTransport:
    cdef object _owner               # the StreamCarrier, also once all is closed
    cdef object _streams
    cdef object _sock
    cdef object _loop
    cdef object _time
    cdef int _fd
    cdef Records _records            # for TLS, or a link; None: the socket itself
    cdef Tunnel _tunnel              # the records as what they are; None: there is no link
    # Reading.
    cdef readonly SocketReader reader
    cdef readonly bint reading       # the loop looks for input
    cdef readonly double last_input  # the loop's time when the last bytes came
    cdef public bint processing      # what was read is being reported: nothing is written
    cdef public object expectation   # of input within moments; None: it was never expected
    cdef public Py_ssize_t turn      # bytes read, or written, before it is others' turn
    cdef int _chunks                 # chunks read before it is others' turn
    cdef DirectRead _inlet
    cdef Entity _inlet_of
    cdef bint _again                 # reading goes on in the loop's next turn
    # Writing.
    cdef Scheduler _scheduler
    cdef SendTurns _turns
    cdef readonly IovecWriter out    # what was taken and the kernel has not taken
    cdef public bint secure          # chunks may be sent
    cdef readonly bint writing       # the kernel takes no more now
    cdef readonly Py_ssize_t take    # bytes taken at once
    cdef object _take_of
    cdef Py_ssize_t _offered
    cdef bint _watching              # the loop looks for room in the socket
    cdef bint _transmitting
    cdef object _acks                # the timer of delayed acknowledgements
    # Memory that is shared with the peer.
    cdef public double share_after   # bytes of streams
    cdef public object offer_memory
    # The end.
    cdef readonly bint parting       # the last bytes are queued
    cdef readonly bint released      # the socket is closed
    cdef object _farewell            # the timer of the close

    cdef Py_ssize_t _read_some(self, Py_ssize_t budget) except -1
    cdef Py_ssize_t _read(self, Py_ssize_t budget) except -1
    cdef int _discard(self) except -1
    cdef bint _room_came(self) except -1
    cdef bint _has_output(self) except -1
    cdef int _write_out(self) except -1
    cdef bint _acks_wait(self) except -1
    cdef int _wait_writable(self) except -1
