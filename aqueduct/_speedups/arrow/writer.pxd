"""Record batches of common types into payloads, through Arrow's C data interface."""

from libc.stdint cimport int64_t, uint8_t

from aqueduct._speedups.arrow.columns cimport ArrowArray, Columns
from aqueduct._speedups.arrow.nulls cimport NotNull

# A buffer of the body, in the order of the wire.
cdef struct Part:
    const uint8_t *data
    int64_t size

# Memory that was made here: what a slice needs moved by bits or counted anew.
cdef struct Made:
    Made *next

cdef class Source:
    cdef object batch               # keeps the columns alive
    cdef Made *made
    cdef int64_t room               # bytes that may still be made

    cdef uint8_t *make(self, int64_t size) noexcept nogil

cdef class Encoded:
    cdef readonly list buffers
    cdef readonly Py_ssize_t size

cdef class BatchWriter:
    cdef Columns _columns
    cdef NotNull _nulls

    cdef Encoded encode(self, object batch, bint quick, bint *lengthy)
    cdef Encoded _encode(
        self, object batch, const ArrowArray *exported, bint quick, bint *lengthy
    )

cdef class BatchEncoder:
    cdef readonly object schema
    cdef readonly bint lengthy
    cdef public object broken
    cdef public BatchWriter _fast
    cdef object _kind
    cdef object _refusal

    cpdef Encoded plain(self, object batch, bint quick=*)
