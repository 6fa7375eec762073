"""What is told of a half, each time that something changes: the events there are most of."""

cimport cython

__all__ = ["Readable", "SenderEnded", "Writable"]


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
