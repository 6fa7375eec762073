"""Payloads of common types into record batches, through Arrow's C data interface."""

from aqueduct._speedups.arrow.columns cimport Columns
from aqueduct._speedups.arrow.nulls cimport NotNull

cdef class BatchReader:
    cdef Columns _columns
    cdef NotNull _nulls
    cdef object _schema
    cdef object _import
    cdef bint _inside

    cpdef object read(self, object payload)
