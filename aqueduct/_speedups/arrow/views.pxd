"""What Arrow's arrays refer to out of order, measured; and views of text and bytes written anew."""

from libc.stdint cimport int32_t, int64_t, uint8_t

cdef enum:
    VIEW = 16           # bytes of a view
    SHORT = 12          # bytes that it has in itself

# What views use of one buffer, and what becomes of it.
cdef struct Use:
    int64_t size        # of the buffer
    int64_t used        # bytes that views refer to, each as often as one does
    int64_t low         # where the first of them is
    int64_t high        # where the last one ends
    const uint8_t *data
    int32_t index       # which buffer it becomes; -1: its views are packed
    int64_t shift       # bytes that are left out before the first one
