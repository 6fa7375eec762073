"""What a core tells most: that something changed for a half, and effects, by kind."""

cimport cython

__all__ = [
    "CLOSE",
    "CREDIT",
    "DATAGRAM",
    "RESET",
    "STOP",
    "WRITE",
    "Readable",
    "SenderEnded",
    "Writable",
]

WRITE = WRITE_EFFECT
RESET = RESET_EFFECT
STOP = STOP_EFFECT
CREDIT = CREDIT_EFFECT
DATAGRAM = DATAGRAM_EFFECT
CLOSE = CLOSE_EFFECT


@cython.freelist(64)
@cython.auto_pickle(False)
cdef class HalfEvent:
    """An event of one half."""

    def __init__(self, half):
        self.half = half

    def __eq__(self, other):
        return type(self) is type(other) and self.half is (<HalfEvent> other).half

    def __hash__(self):
        return hash((type(self), id(self.half)))

    def __repr__(self):
        return f"{type(self).__name__}(half={self.half!r})"


@cython.final
@cython.auto_pickle(False)
cdef class Readable(HalfEvent):
    """A receiver that had nothing now has a message, or reached its end."""


@cython.final
@cython.auto_pickle(False)
cdef class Writable(HalfEvent):
    """A sender that was above a high-water mark is below it again, or reached its end."""


@cython.final
@cython.auto_pickle(False)
cdef class SenderEnded(HalfEvent):
    """A sender reached its final state; ``half.error`` says how, None is success."""
