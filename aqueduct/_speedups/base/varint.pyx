"""The Python face of varints, for tools and tests; the codec uses the inline functions."""

from cpython.bytes cimport PyBytes_FromStringAndSize
from libc.stdint cimport uint8_t, uint64_t

from aqueduct._speedups.base.varint cimport (
    VARINT_ABOVE_64,
    VARINT_MAX,
    VARINT_MORE,
    to_uint64,
    varint_load,
    varint_store,
)

from aqueduct.errors import FrameError, LocalProtocolError

__all__ = ["decode", "decode_ranges", "encode", "encode_ranges"]


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


def encode_ranges(lengths):
    """Varranges (AQ-4): the varbytes of ``lengths``, range, gap, range, ... from 0 on.

    No frame uses them (AQ-R2). Raises LocalProtocolError for a zero that is neither the first
    nor the last, or a sum above 2^64 - 1.
    """
    cdef tuple numbers = tuple(lengths)
    cdef bytes block = b"".join([encode(number) for number in numbers])
    if sum(numbers) > 0xFFFFFFFFFFFFFFFF:
        raise LocalProtocolError("the ranges reach above 2^64 - 1 (AQ-R2)")
    if any([number == 0 for number in numbers[1:max(len(numbers) - 1, 1)]]):
        raise LocalProtocolError("only the first and the last varint may be zero (AQ-4)")
    return encode(len(block)) + block


def decode_ranges(data, Py_ssize_t offset=0):
    """Reads varranges: the lengths, range, gap, range, ..., and the offset behind them.

    Raises FrameError (``truncated``: the block is not whole).
    """
    cdef list numbers = []
    size, offset = decode(data, offset)
    block = memoryview(data).cast("B")[offset:]
    if size > len(block):
        raise FrameError("the bytes end inside the ranges", truncated=True)
    block = block[:size]
    offset += size
    at = 0
    while at < size:
        try:
            number, at = decode(block, at)
        except FrameError as error:
            # A cut inside a block that is there in its whole length is malformed.
            raise FrameError(str(error)) from None
        numbers.append(number)
    if any([number == 0 for number in numbers[1:max(len(numbers) - 1, 1)]]):
        raise FrameError("only the first and the last varint may be zero (AQ-4)")
    if sum(numbers) > 0xFFFFFFFFFFFFFFFF:
        raise FrameError("the ranges reach above 2^64 - 1 (AQ-R2)")
    return tuple(numbers), offset


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
