"""Chunks of bpmux/rel: what stands around payloads, to bytes and from bytes.

A chunk is a tag, an identifier, and what its flags announce: payload, credit, end payload (BP-1,
BP-3). A Partial (BP-16) is read and written as a part of the chunk that it stands before: the two
may not be parted. The decoder knows the grammar of chunks; what they do to whom is not its affair.
"""

cimport cython
from cpython.bytes cimport PyBytes_FromStringAndSize
from libc.stdint cimport uint8_t, uint64_t
from libc.string cimport memcpy

from aqueduct._speedups.base.buffers cimport bounds_of, piece_of
from aqueduct._speedups.base.varint cimport to_number
from aqueduct._speedups.bpmux.varu64 cimport (
    VARU64_MAX,
    VARU64_MORE,
    varu64_load,
    varu64_store,
)

from aqueduct.errors import FrameError, LocalProtocolError

__all__ = [
    "ACK_END",
    "CREDIT",
    "END",
    "PAYLOAD",
    "PING",
    "TYPE_NAMES",
    "ChunkDecoder",
    "ChunkStep",
    "decode_varu64",
    "encode_head",
    "encode_rest",
    "encode_varu64",
]

TYPE_NAMES = (
    "Out-Request", "In-Request", "Out-Sink", "In-Sink", "Out-Stream", "In-Stream", "Duplex",
    "Partial",
)
PAYLOAD = PAYLOAD_FLAG
CREDIT = CREDIT_FLAG
PING = PING_FLAG
END = END_FLAG
ACK_END = ACK_END_FLAG

cdef uint64_t HIGHEST = 0xFFFFFFFFFFFFFFFF
cdef uint8_t EMPTY = 0
cdef str DUPLEX_0 = "a Duplex with identifier 0, which is the top-level's (BP-R13)"

cdef enum:
    # States of the decoder.
    AT_HEAD = 0
    AT_PAYLOAD = 1
    AT_REST = 2
    AT_END = 3
    AT_DONE = 4
    FAILED = 5

    IN_REQUEST_TYPE = 1
    IN_STREAM_TYPE = 5


class ChunkStep:
    """What ``ChunkDecoder.next`` says."""

    NOTHING, HEAD, PIECE, REST, END_PIECE, DONE = range(6)


def encode_varu64(value):
    """The shortest form of ``value``, 0 to 2^64 - 1 (BP-R1); else LocalProtocolError."""
    cdef uint8_t[VARU64_MAX] out
    cdef uint64_t number = 0
    to_number(value, HIGHEST, "a VarU64", &number)
    return PyBytes_FromStringAndSize(<char *> out, varu64_store(out, number) - out)


def decode_varu64(data, Py_ssize_t offset=0):
    """Reads the VarU64 at ``offset`` of ``data``: its value and the offset behind it.

    Raises FrameError: not the shortest form, or (``truncated``) cut.
    """
    cdef const uint8_t[::1] view = data
    cdef uint64_t value = 0
    cdef const uint8_t *start
    cdef int size
    if not 0 <= offset <= view.shape[0]:
        raise ValueError(f"offset {offset} is outside the {view.shape[0]} bytes")
    if offset == view.shape[0]:
        raise cut()
    start = &view[0]
    size = varu64_load(start + offset, start + view.shape[0], &value)
    if size == VARU64_MORE:
        raise cut()
    if size < 0:
        raise padded("a VarU64")
    return value, offset + size


def encode_head(int type, int flags, identifier, payload=0, total=0):
    """The bytes of a chunk up to its payload; those after it are from ``encode_rest``.

    ``payload`` is the length of the payload, if ``flags`` has PAYLOAD. With ``total`` above zero a
    Partial stands before it (BP-16). LocalProtocolError for numbers outside 64 bits, and for a
    Duplex 0 (BP-R13).
    """
    cdef uint8_t[HEAD_MAX] out
    cdef uint8_t *end
    cdef uint64_t number = 0, size = 0, whole = 0
    if not 0 <= type < PARTIAL_TYPE or not 0 <= flags < 32:
        raise LocalProtocolError(f"there is no chunk of type {type} with flags {flags}")
    to_number(identifier, HIGHEST, "the identifier", &number)
    to_number(payload, HIGHEST, "the payload's length", &size)
    to_number(total, HIGHEST, "the total size", &whole)
    if number == 0 and type == DUPLEX_TYPE:
        raise LocalProtocolError(DUPLEX_0)
    end = head_store(out, type, flags, number, whole)
    if flags & PAYLOAD_FLAG:
        end = varu64_store(end, size)
    return PyBytes_FromStringAndSize(<char *> out, end - out)


def encode_rest(int flags, credit=0, end=0):
    """The bytes of a chunk between payload and end payload: the credit and the length ``end``."""
    cdef uint8_t[2 * VARU64_MAX] out
    cdef uint8_t *at = out
    cdef uint64_t number = 0
    if flags & CREDIT_FLAG:
        to_number(credit, HIGHEST, "the credit", &number)
        at = varu64_store(at, number)
    if flags & END_FLAG:
        to_number(end, HIGHEST, "the end payload's length", &number)
        at = varu64_store(at, number)
    return PyBytes_FromStringAndSize(<char *> out, at - out)


@cython.final
@cython.auto_pickle(False)
cdef class ChunkDecoder:
    """The bytes of a connection to steps, whatever pieces they come in.

    ``feed`` what came, then ``next`` until it says NOTHING; only then feed again. ``type``,
    ``flags``, ``identifier``, ``total`` (of a Partial before it, else 0) and ``payload`` (length)
    are of the current chunk from HEAD on; ``credit`` and ``end_payload`` (length) from REST on,
    which comes if one of them is there. Payloads come in pieces, as their bytes come: ``data`` of
    PIECE and END_PIECE, of which ``missing`` bytes are yet to come; an empty one has no piece.
    Large pieces are views of what was fed. DONE ends each chunk. ``chunks`` counts those that have
    begun.

    Raises FrameError for bytes that are no chunk of any state. No memory is taken for what
    is only announced. After an error every method raises it again.
    """

    def __cinit__(self):
        self._pos = self._end = self._start = &EMPTY
        self._state = AT_HEAD

    def feed(self, data):
        """Takes the next bytes, by reference: they must not change while pieces of them live."""
        self.push(data)

    def next(self):
        """The next step, one of ``ChunkStep``."""
        return self.step()

    def landed_outside(self, size):
        """``size`` bytes of the payload reached their place without being fed."""
        cdef uint64_t number = 0
        to_number(size, HIGHEST, "the size", &number)
        self.landed(number)

    def end(self):
        """No bytes follow: FrameError (``truncated``) inside a chunk."""
        if self._error is not None:
            raise self._error
        if self._state != AT_HEAD or self._held_size or self._pos != self._end:
            raise cut()

    @property
    def consumed(self):
        """How many bytes of what was fed last are consumed."""
        return self._pos - self._start

    @property
    def in_payload(self):
        """Whether what was fed is consumed and the next bytes belong to a payload."""
        return self._state == AT_PAYLOAD and self._pos == self._end

    # For the other compiled modules.

    cdef int push(self, object data) except -1:
        if self._error is not None:
            raise self._error
        if self._pos != self._end:
            raise LocalProtocolError("feed before what was fed is consumed")
        self._fed = bounds_of(data, &self._start, &self._end)
        self._pos = self._start
        return 0

    cdef int step(self) except -1:
        cdef int state = self._state
        if state == AT_HEAD:
            if not self._gather(True):
                return NOTHING
            self.chunks += 1
            self.credit = self.end_payload = 0
            self.missing = self.payload
            if self.flags & PAYLOAD_FLAG and self.payload:
                self._state = AT_PAYLOAD
            elif self.flags & (CREDIT_FLAG | END_FLAG):
                self._state = AT_REST
            else:
                self._state = AT_DONE
            return HEAD
        if state == AT_PAYLOAD:
            if self.missing:
                self.data = self._piece()
                return NOTHING if self.data is None else PIECE
            self.data = None
            if not self.flags & (CREDIT_FLAG | END_FLAG):
                self._state = AT_HEAD
                return DONE
            self._state = state = AT_REST
        if state == AT_REST:
            if not self._gather(False):
                return NOTHING
            self.missing = self.end_payload
            self._state = AT_END if self.end_payload else AT_DONE
            return REST
        if state == AT_END:
            if self.missing:
                self.data = self._piece()
                return NOTHING if self.data is None else END_PIECE
            self.data = None
            state = AT_DONE
        if state == AT_DONE:
            self._state = AT_HEAD
            return DONE
        raise self._error

    cdef int landed(self, uint64_t size) except -1:
        if self._error is not None:
            raise self._error
        if self._state != AT_PAYLOAD or self._pos != self._end or size > self.missing:
            raise LocalProtocolError(
                f"{size} bytes cannot have landed: {self.missing if self.in_payload else 0} "
                "bytes of a payload are expected"
            )
        self.missing -= size
        return 0

    # Within.

    cdef bint _gather(self, bint head) except -1:
        """Reads a head (or the rest) as a whole; False: its bytes are not all here, and held."""
        cdef const uint8_t *data
        cdef int size, part, before = self._held_size
        if before == 0:
            data = self._pos
            size = self._load_head(data, self._end) if head else self._load_rest(data, self._end)
            if size:
                self._pos += size
                return True
        part = <int> min(<Py_ssize_t> (HEAD_MAX - before), self._end - self._pos)
        memcpy(self._held + before, self._pos, <size_t> part)
        if before:
            data = self._held
            size = before + part
            size = (
                self._load_head(data, data + size) if head else self._load_rest(data, data + size)
            )
            if size:
                self._pos += size - before
                self._held_size = 0
                return True
        self._held_size = before + part
        self._pos += part
        self._fed = None if self._pos == self._end else self._fed
        return False

    cdef int _load_head(self, const uint8_t *data, const uint8_t *end) except -1:
        """The size of the head at ``data``; 0: it is not whole."""
        cdef const uint8_t *at = data
        cdef uint64_t number = 0
        cdef int size, index
        self.total = 0
        if at == end:
            return 0
        if at[0] >> 5 == PARTIAL_TYPE:
            size = (at[0] & 7) + 1
            if end - at > 1 and at[1] == 0:
                self._fail(
                    "the total size of a Partial is zero or not in the fewest bytes (BP-16)"
                )
            if end - at <= size:
                return 0
            for index in range(1, size + 1):
                number = number << 8 | at[index]
            self.total = number
            at += size + 1
            if at == end:
                return 0
        self.type = at[0] >> 5
        self.flags = at[0] & 31
        self._check()
        at += 1
        size = varu64_load(at, end, &self.identifier)
        if size <= 0:
            return self._short(size, "the identifier")
        if self.identifier == 0 and self.type == DUPLEX_TYPE:
            self._fail(DUPLEX_0)
        at += size
        self.payload = 0
        if self.flags & PAYLOAD_FLAG:
            size = varu64_load(at, end, &self.payload)
            if size <= 0:
                return self._short(size, "the length of a payload")
            at += size
            if self.total:
                if self.payload > self.total:
                    self._fail(
                        f"a payload of {self.payload} bytes is above the total size of "
                        f"{self.total} (BP-16)"
                    )
                if self.flags & END_FLAG and self.payload < self.total:
                    self._fail("an end inside a partial payload (BP-R10)")
        return <int> (at - data)

    cdef int _load_rest(self, const uint8_t *data, const uint8_t *end) except -1:
        """The size of credit and end length at ``data``; 0: they are not whole."""
        cdef const uint8_t *at = data
        cdef int size
        if self.flags & CREDIT_FLAG:
            size = varu64_load(at, end, &self.credit)
            if size <= 0:
                return self._short(size, "the credit")
            at += size
        if self.flags & END_FLAG:
            size = varu64_load(at, end, &self.end_payload)
            if size <= 0:
                return self._short(size, "the length of an end payload")
            at += size
            if self.total and not self.flags & PAYLOAD_FLAG and self.end_payload > self.total:
                self._fail(
                    f"an end payload of {self.end_payload} bytes is above the total size of "
                    f"{self.total} (BP-16)"
                )
        return <int> (at - data)

    cdef int _check(self) except -1:
        """What a tag cannot say, whoever it is for."""
        cdef int type = self.type, flags = self.flags
        if type == PARTIAL_TYPE:
            self._fail("a Partial follows a Partial (BP-R10)")
        if self.total and not flags & (PAYLOAD_FLAG | END_FLAG):
            self._fail("a Partial before a chunk without a payload (BP-R10)")
        if flags & ACK_END_FLAG:
            if flags != ACK_END_FLAG:
                self._fail("ack-end stands alone in its chunk (BP-13)")
            if type == DUPLEX_TYPE:
                self._fail("ack-end in a Duplex, which is never known (BP-9)")
        if type == DUPLEX_TYPE and not flags & PAYLOAD_FLAG:
            self._fail("a Duplex without a payload, which opening needs (BP-8)")
        if flags & PAYLOAD_FLAG:
            if type == IN_STREAM_TYPE:
                self._fail("a payload on In-Stream, which only receives (BP-9, BP-R6)")
            if type == IN_REQUEST_TYPE and flags & END_FLAG:
                self._fail("a response with an end (BP-11)")
        return 0

    cdef int _short(self, int size, str what) except -1:
        """0 if only bytes are missing."""
        if size < 0:
            self._error = padded(what)
            self._state = FAILED
            raise self._error
        return 0

    cdef int _fail(self, str text) except -1:
        self._error = FrameError(text)
        self._state = FAILED
        raise self._error

    cdef object _piece(self):
        """The next bytes of the payload, at least one; None: there are none."""
        cdef Py_ssize_t size = self._end - self._pos
        cdef object data
        if size == 0:
            self._fed = None
            return None
        if <uint64_t> size > self.missing:
            size = <Py_ssize_t> self.missing
        data = piece_of(self._fed, self._pos - self._start, size)
        self._pos += size
        self.missing -= <uint64_t> size
        return data


cdef uint8_t *head_store(
    uint8_t *out, int type, int flags, uint64_t identifier, uint64_t total
) noexcept nogil:
    """Writes a chunk up to its identifier, a Partial before it; needs at most 19 bytes of room."""
    cdef int size = 1, index
    if total:
        while size < 8 and total >> (8 * size):
            size += 1
        out[0] = <uint8_t> (PARTIAL_TYPE << 5 | size - 1)
        for index in range(size, 0, -1):
            out[index] = <uint8_t> total
            total >>= 8
        out += size + 1
    out[0] = <uint8_t> (type << 5 | flags)
    return varu64_store(out + 1, identifier)


cdef str type_name(int type):
    return TYPE_NAMES[type]


cdef object cut():
    return FrameError("the bytes end inside a chunk", truncated=True)


cdef object padded(str what):
    return FrameError(f"{what} is not in its shortest form (BP-R1)")
