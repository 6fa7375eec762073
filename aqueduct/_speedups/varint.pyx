"""The Python face of varints, for tools and tests; the codec uses the inline functions."""

from cpython.bytes cimport PyBytes_FromStringAndSize
from libc.stdint cimport uint8_t, uint64_t

from aqueduct._speedups.varint cimport (
    VARINT_ABOVE_64,
    VARINT_MAX,
    VARINT_MORE,
    to_uint64,
    varint_load,
    varint_store,
)

from aqueduct.errors import FrameError, LocalProtocolError

__all__ = ["decode", "encode"]


def encode(value):
    """The shortest encoding of ``value``, 0 to 2^64 - 1 (AQ-R1).

    Raises LocalProtocolError for any other number.
    """
    cdef uint8_t[VARINT_MAX] out
    cdef uint64_t number = 0
    to_number(value, 0xFFFFFFFFFFFFFFFF, "a varint", &number)
    return PyBytes_FromStringAndSize(<char *> out, varint_store(out, number) - out)


def decode(data, Py_ssize_t offset=0):
    """Reads the varint at ``offset`` of ``data``: its value and the offset behind it.

    Raises FrameError: above 64 bits, not the shortest form, or (``truncated``) cut.
    """
    cdef const uint8_t[::1] view = data
    cdef uint64_t value = 0
    cdef const uint8_t *start
    cdef int size
    if not 0 <= offset <= view.shape[0]:
        raise ValueError(f"offset {offset} is outside the {view.shape[0]} bytes")
    if offset == view.shape[0]:
        raise_varint(VARINT_MORE)
    start = &view[0]
    size = varint_load(start + offset, start + view.shape[0], &value)
    if size <= 0:
        raise_varint(size)
    return value, offset + size


cdef int raise_varint(int code) except -1:
    """Raises what a code of ``varint_load`` stands for."""
    if code == VARINT_MORE:
        raise FrameError("the bytes end inside a varint", truncated=True)
    if code == VARINT_ABOVE_64:
        raise FrameError("a varint has more than 64 bits")
    raise FrameError("a varint is not in its shortest form")


cdef int to_number(object value, uint64_t highest, str what, uint64_t *out) except -1:
    """Converts an argument of this side; LocalProtocolError names it if it does not fit."""
    try:
        out[0] = to_uint64(value)
    except OverflowError:
        raise LocalProtocolError(f"{what} is {value}; it must be 0 to {highest}") from None
    if out[0] > highest:
        raise LocalProtocolError(f"{what} is {value}; it must be 0 to {highest}")
    return 0
