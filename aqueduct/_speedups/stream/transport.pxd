"""A byte stream's carrier at work."""

from aqueduct._speedups.bpmux.entities cimport Entity
from aqueduct._speedups.stream.socket_reader cimport SocketReader
from aqueduct._speedups.io.gather cimport IovecWriter
from aqueduct._speedups.io.tls_records cimport Records
from aqueduct._speedups.channels.message_batches cimport DirectRead
from aqueduct._speedups.bpmux.scheduler cimport SchedulerBase

cdef class TransportBase:
    cdef public object _user
    cdef public object _mux
    cdef public object _loop
    cdef public bint _over
    cdef public bint _closing
    cdef public bint _established
    cdef public bint _begun
    cdef public bint _parting
    cdef public bint _released
    # Reading.
    cdef public SocketReader _intake
    cdef public bint _reading
    cdef public bint _processing
    cdef public bint _reported
    cdef public Py_ssize_t _received
    cdef DirectRead _inlet
    cdef Entity _inlet_of
    # Writing.
    cdef public SchedulerBase _turns
    cdef public IovecWriter _out
    cdef public Records _records
    cdef public int _fd
    cdef public bint _secure
    cdef public bint _dirty
    cdef public bint _room_grew
    cdef public bint _writing
    cdef public bint _transmitting
    cdef public Py_ssize_t _sent
    cdef public Py_ssize_t _turn
    cdef public int _chunks
    cdef bint _again                 # reading goes on in the loop's next turn
    cdef public Py_ssize_t _take
    cdef public Py_ssize_t _offered
