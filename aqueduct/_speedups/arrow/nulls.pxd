"""Nulls where a schema allows none, at any depth, through Arrow's C data interface."""

from libc.stdint cimport int64_t

from aqueduct._speedups.arrow.columns cimport ArrowArray

cdef struct Link:
    int slot                # which child of the array; -1: its dictionary
    int code                # of a union's child: its type code
    int node                # what that child is

cdef struct Node:
    int kind
    bint strict             # it must not have nulls
    int width               # bytes of an index or a run's end; the values of a fixed list
    int owner               # the node that its nulls count for
    int link_at             # where its links are among all links
    int links

cdef class NotNull:
    cdef Node *nodes
    cdef Link *links
    cdef readonly int count         # of the nodes

    cdef int look(self, const ArrowArray *batch, int64_t *nulls) except -2
    cdef bint accepts(self, const ArrowArray *batch) except -1
