"""Events of one half."""

cdef class HalfEvent:
    cdef readonly object half

# How effects begin; see aqueduct.protocol.common.effects.
cdef enum:
    WRITE_EFFECT = 0
    RESET_EFFECT = 1
    STOP_EFFECT = 2
    CREDIT_EFFECT = 3
    DATAGRAM_EFFECT = 4
    CLOSE_EFFECT = 5
