"""Payloads of common types into record batches, through Arrow's C data interface."""

from aqueduct._speedups.arrow_columns cimport Columns

cdef class BatchReader:
    cdef Columns _columns
    cdef object _schema
    cdef object _import
    cdef bint _inside

    cpdef object read(self, object payload)
