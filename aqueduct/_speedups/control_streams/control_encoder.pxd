"""Frames of the control-stream draft to bytes; their first bytes, and the bits of ids."""

from aqueduct._speedups.base.buffers cimport ALIGNMENT

# The first byte of a frame.
cdef enum:
    CONNECTION_CONTROL = 1
    CHANNEL_CONTROL = 2
    CONTROL_MESSAGE = 3
    CONTROL_SENT_UNRELIABLE = 4
    CONTROL_ACKS = 5
    CONTROL_ACK_NACKS = 6
    CONTROL_FINISH = 7
    CONTROL_CLOSE = 8
    CLOSED_CHANNEL_LOST = 9

cdef enum:
    # Bits of a channel id (AQ0-7); the third is ONESHOT_BIT of the other revision.
    CONTROL_SENDER_BIT = 1
    CONTROL_CREATOR_BIT = 2


cdef inline Py_ssize_t aligned(Py_ssize_t size) noexcept:
    """The next multiple of 64: how long a header block is (AC-95)."""
    return (size + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
