"""Frames of ReactiveSocket: their heads to bytes, and frames from bytes.

A frame is a header of 12 bytes, what its type adds, and data. Over a stream of bytes its length
comes first (RS-1); a transport that frames carries one frame in each message. The decoder knows the
grammar of frames; which of them may come when is not its affair.
"""

cimport cython
from cpython.buffer cimport PyObject_CheckBuffer
from cpython.bytes cimport (
    PyBytes_AS_STRING,
    PyBytes_CheckExact,
    PyBytes_FromStringAndSize,
    PyBytes_GET_SIZE,
)
from cpython.memoryview cimport PyMemoryView_Check
from libc.stdint cimport uint8_t, uint64_t
from libc.string cimport memcpy

from aqueduct._speedups.base.buffers cimport (
    AlignedBuffer,
    bounds_of,
    byte_view,
    copy_bytes,
    memory_of,
    new_aligned,
    piece_of,
)
from aqueduct._speedups.base.varint cimport to_number

from aqueduct.errors import FrameError, LimitExceeded, LocalProtocolError, VersionError

__all__ = [
    "BEGIN",
    "CANCEL",
    "COMPLETE",
    "END",
    "ERROR",
    "EXT",
    "FRAME_MOST",
    "IGNORE",
    "REQUEST_FNF",
    "REQUEST_N",
    "REQUEST_RESPONSE",
    "REQUEST_STREAM",
    "REQUEST_SUB",
    "RESPONSE",
    "SETUP",
    "TYPE_NAMES",
    "ReactiveFrameDecoder",
    "buffers_of",
    "encode_extension_head",
    "encode_frame",
    "encode_head",
]

# Types (RS-2) and flags (RS-R2, RS-9).
SETUP = SETUP_TYPE
REQUEST_RESPONSE = REQUEST_RESPONSE_TYPE
REQUEST_FNF = REQUEST_FNF_TYPE
REQUEST_STREAM = REQUEST_STREAM_TYPE
REQUEST_SUB = REQUEST_SUB_TYPE
REQUEST_N = REQUEST_N_TYPE
CANCEL = CANCEL_TYPE
RESPONSE = RESPONSE_TYPE
ERROR = ERROR_TYPE
EXT = EXT_TYPE
IGNORE = IGNORE_FLAG
BEGIN = BEGIN_FLAG
END = END_FLAG
COMPLETE = COMPLETE_FLAG
FRAME_MOST = 0x7FFFFFFF

TYPE_NAMES = {
    SETUP: "SETUP",
    REQUEST_RESPONSE: "REQUEST_RESPONSE",
    REQUEST_FNF: "REQUEST_FNF",
    REQUEST_STREAM: "REQUEST_STREAM",
    REQUEST_SUB: "REQUEST_SUB",
    REQUEST_N: "REQUEST_N",
    CANCEL: "CANCEL",
    RESPONSE: "RESPONSE",
    ERROR: "ERROR",
    EXT: "EXT",
}

cdef uint64_t HIGHEST = 0xFFFFFFFFFFFFFFFF
cdef uint64_t HIGHEST_32 = 0xFFFFFFFF
cdef uint64_t LENGTH_MAX = 0x7FFFFFFF
cdef uint8_t EMPTY = 0

cdef enum:
    SETUP_TYPE = 0x0001
    REQUEST_RESPONSE_TYPE = 0x0011
    REQUEST_FNF_TYPE = 0x0012
    REQUEST_STREAM_TYPE = 0x0013
    REQUEST_SUB_TYPE = 0x0014
    REQUEST_N_TYPE = 0x0015
    CANCEL_TYPE = 0x0016
    RESPONSE_TYPE = 0x0020
    ERROR_TYPE = 0x0021
    EXT_TYPE = 0xFFFF

    IGNORE_FLAG = 0x80
    BEGIN_FLAG = 0x40
    END_FLAG = 0x20
    COMPLETE_FLAG = 0x10

    VERSION = 0
    WORD_SIZE = 4         # version, flags and type
    EXT_SIZE = 8          # the head of EXT has no stream id (RS-R4)
    HEADER_SIZE = 12
    NUMBERED_SIZE = 20    # with a number of items
    LENGTH_MIN = 12       # the smallest frame, EXT, with its length (RS-R14)
    LANDING_FROM = 4096   # bytes of a payload from which a carrier may read to its place


def encode_head(int type, stream, size, *, int flags=0, n=None, bint framed=True):
    """The bytes of a frame up to its data of ``size`` bytes, which the caller appends.

    ``n``, of 64 bits, belongs to REQUEST_STREAM, REQUEST_SUB and REQUEST_N. ``framed``: the length
    comes first. A type that is not known needs IGNORE. LocalProtocolError for what has no such
    bytes.
    """
    cdef uint64_t length = 0
    to_number(size, LENGTH_MAX, "the size of the data", &length)
    return head_bytes(type, stream, length, flags, n, framed)


def encode_frame(int type, stream, list parts not None, *, int flags=0, n=None, bint framed=True):
    """A frame with this data: its buffers, the head first, and the bytes of all of them.

    ``parts`` are as ``buffers_of`` gives them. The rest is as in ``encode_head``.
    """
    cdef Py_ssize_t size = 0, part = 0
    cdef object each
    cdef bytes head
    for each in parts:
        if not PyBytes_CheckExact(each) and not PyMemoryView_Check(each):
            raise TypeError("a part is neither bytes nor a memoryview: see buffers_of")
        memory_of(each, &part)
        size += part
    if <uint64_t> size > LENGTH_MAX:
        raise LocalProtocolError(f"a frame of {size} bytes; 2^31 - 1 are the most (RS-1)")
    head = head_bytes(type, stream, <uint64_t> size, flags, n, framed)
    return [head, *parts], PyBytes_GET_SIZE(head) + size


def buffers_of(data):
    """The buffers of what is one, or several: bytes and memoryviews of bytes, no empty ones.

    LocalProtocolError for one that is not contiguous.
    """
    cdef Py_ssize_t size = 0
    cdef list out = []
    cdef object part
    if PyBytes_CheckExact(data):
        return [data] if PyBytes_GET_SIZE(data) else out
    for part in (data,) if PyObject_CheckBuffer(data) else data:
        if not PyBytes_CheckExact(part):
            try:
                part = byte_view(part)
            except BufferError:
                raise LocalProtocolError(
                    "a buffer is not contiguous; make a contiguous copy of it"
                ) from None
        memory_of(part, &size)
        if size:
            out.append(part)
    return out


def encode_extension_head(extended_type, size, *, bint ignore=False, bint framed=True):
    """The bytes of an EXT frame up to its data of ``size`` bytes, which the caller appends."""
    cdef uint64_t number = 0, length = 0
    cdef uint8_t[HEAD_MOST] out
    cdef uint8_t *at = out
    to_number(extended_type, HIGHEST_32, "an extended type", &number)
    to_number(size, LENGTH_MAX, "the size of the data", &length)
    at = head_store(at, EXT_TYPE, IGNORE_FLAG if ignore else 0, EXT_SIZE + length, framed)
    at = network_store(at, number, 4)
    return PyBytes_FromStringAndSize(<char *> out, at - out)


@cython.final
@cython.auto_pickle(False)
cdef class ReactiveFrameDecoder:
    """The frames of one peer, whatever pieces their bytes come in.

    ``framed``: a length comes before each frame. Otherwise what is fed is one frame.
    ``frame_bytes`` bounds a frame, without its length.

    ``feed`` what came, then ``next`` until it says False; only then feed again. True: a frame is
    whole. Until the next call its fields are valid:

    - ``type``, a number of the wire; one that is not in ``TYPE_NAMES`` has IGNORE
    - ``flags``, as they came; those that the type does not name say nothing
    - ``stream``; 0 for EXT, which has none
    - ``n`` of REQUEST_STREAM, REQUEST_SUB and REQUEST_N, with all its 64 bits; else 0
    - ``extended_type`` of EXT; else 0
    - ``data``, one buffer

    Data that was fed as a whole, and is half of what was fed at least, is a view of that. Other
    data is a copy. It lands in memory that is taken when the head is whole; ``room`` and ``landed``
    let a carrier read straight to there. ``missing`` bytes of it are yet to come. ``frames`` counts
    those that were whole.

    Raises FrameError for bytes that are no frame, VersionError for another version, and
    LimitExceeded as soon as a frame is announced as larger than is allowed. After an error every
    method raises it again.
    """

    def __cinit__(self, *, bint framed=True, frame_bytes=0x7FFFFFFF):
        self._pos = self._end = self._start = &EMPTY
        self._framed = framed
        self._setting = "frame_bytes"
        self._need = LENGTH_SIZE
        self.data = b""
        to_number(frame_bytes, LENGTH_MAX, "the limit of a frame", &self._limit)

    def allow(self, frame_bytes, str setting):
        """Bounds the frames that follow, by this setting of ``aqueduct.config.ReactiveSocket``."""
        to_number(frame_bytes, LENGTH_MAX, "the limit of a frame", &self._limit)
        self._setting = setting

    def feed(self, data):
        """Takes the next bytes, by reference: they must not change while views of them live."""
        self.push(data)

    def next(self):
        """Whether there is a frame."""
        return self.step()

    def room(self):
        """Where the next bytes go, of large data; None: feed them."""
        if not self.missing or not isinstance(self._landing, AlignedBuffer):
            return None
        if self._pos != self._end:
            return None
        return memoryview(self._landing)[-<Py_ssize_t> self.missing:]

    def landed(self, size):
        """``size`` bytes were read to ``room``. ``next`` may have a frame now."""
        cdef uint64_t number = 0
        if self._error is not None:
            raise self._error
        to_number(size, HIGHEST, "the size", &number)
        if number > self.missing or not isinstance(self._landing, AlignedBuffer):
            raise LocalProtocolError(
                f"{number} bytes cannot have landed: {self.missing} bytes of data are expected"
            )
        self.missing -= number
        self._place += number

    def end(self):
        """No bytes follow: FrameError (``truncated``) inside a frame."""
        if self._error is not None:
            raise self._error
        if self._held_size or self._pos != self._end or self._landing is not None:
            raise FrameError("the bytes end inside a frame", truncated=True)

    @property
    def consumed(self):
        """How many bytes of what was fed last are consumed."""
        return self._pos - self._start

    @property
    def coming(self):
        """How many bytes of memory are taken for data that is not whole."""
        return 0 if self._landing is None else memoryview(self._landing).nbytes

    # For the other compiled modules.

    cdef int push(self, object data) except -1:
        if self._error is not None:
            raise self._error
        if self._pos != self._end or self._waiting:
            raise LocalProtocolError("feed before what was fed is consumed")
        self._fed = bounds_of(data, &self._start, &self._end)
        self._pos = self._start
        self._waiting = not self._framed
        return 0

    cdef bint step(self) except -1:
        if self._error is not None:
            raise self._error
        if self._landing is None:
            if not self._gather():
                self._fed = None
                return False
        elif not self._land():
            self._fed = None
            return False
        self.frames += 1
        return True

    # Within.

    cdef bint _gather(self) except -1:
        """Reads a head as a whole, and its data if that is here; False: it is not all here."""
        cdef uint64_t here = <uint64_t> (self._end - self._pos)
        cdef uint64_t part
        cdef int size = 0
        if not self._framed:
            if not self._waiting:
                return False
            self._waiting = False
            size = self._load(self._pos, here)
            if size == 0:
                self._fail(FrameError("the message ends inside a frame's head", truncated=True))
            self._pos += size
            return self._begin(here - size)
        if self._held_size == 0 and here:
            size = self._load(self._pos, here)
            self._pos += size
        while size == 0:
            if self._held_size < self._need:
                part = min(self._need - self._held_size, <uint64_t> (self._end - self._pos))
                if part == 0:
                    return False
                memcpy(self._held + self._held_size, self._pos, <size_t> part)
                self._held_size += part
                self._pos += part
            size = self._load(self._held, self._held_size)
        self._held_size = 0
        self._need = LENGTH_SIZE
        return self._begin(self.missing)

    cdef int _load(self, const uint8_t *data, uint64_t size) except -1:
        """The size of the head at ``data``, of which ``size`` bytes are here.

        0: they are not all there, and nothing more is known before ``_need`` of them are.
        """
        cdef int base = 0, type, head, flags
        cdef uint64_t length = size, stream = 0
        if self._framed:
            if size < LENGTH_SIZE:
                self._need = LENGTH_SIZE
                return 0
            base = LENGTH_SIZE
            # The first bit says nothing (RS-R1).
            length = network_load(data, 4) & LENGTH_MAX
            if length < LENGTH_MIN:
                self._fail(FrameError(
                    f"a frame of {length} bytes; with its length it has {<int> LENGTH_MIN} "
                    "at least (RS-R1, RS-R14)"
                ))
        if length - base > self._limit:
            self._fail(LimitExceeded(
                f"a frame of {length - base} bytes is above {self._limit} "
                f"(ReactiveSocket.{self._setting})"
            ))
        if size < <uint64_t> base + WORD_SIZE:
            self._need = base + WORD_SIZE
            return 0
        if data[base] != VERSION:
            self._fail(VersionError(f"a frame of version {data[base]}; 0 is the only one (RS-2)"))
        flags = data[base + 1]
        type = <int> network_load(data + base + 2, 2)
        if type == 0:
            self._fail(FrameError("a frame of type 0, which is reserved (RS-2)"))
        if not flags & IGNORE_FLAG and not is_known(type):
            self._fail(FrameError(
                f"a frame of type {type:#x}, which is not known and may not be ignored (RS-R12)"
            ))
        head = base + head_size(type)
        if self._framed and length < <uint64_t> head:
            self._fail(FrameError(
                f"a {name_of(type)} frame of {length} bytes; its header has {head} (RS-R14)"
            ))
        if size < <uint64_t> head:
            self._need = head
            return 0
        if is_exact(type) and length != <uint64_t> head:
            self._fail(FrameError(
                f"a {name_of(type)} frame of {length} bytes; it has {head} (RS-R14)"
            ))
        if type != EXT_TYPE:
            stream = network_load(data + base + WORD_SIZE, 8)
            if not fits(type, stream):
                self._fail(FrameError(
                    f"a {name_of(type)} frame on stream {stream} (RS-3)"
                ))
        self.type = type
        self.flags = flags
        self.stream = stream
        self.n = 0
        self.extended_type = 0
        if type == EXT_TYPE:
            self.extended_type = network_load(data + base + WORD_SIZE, 4)
        elif head - base == NUMBERED_SIZE:
            self.n = network_load(data + base + HEADER_SIZE, 8)
        if self._framed:
            self.missing = length - head
        return head

    cdef bint _begin(self, uint64_t size) except -1:
        """The head is whole, and ``size`` bytes of data follow; whether they are here."""
        cdef AlignedBuffer buffer
        if size == 0:
            self.data = b""
            return True
        if <uint64_t> (self._end - self._pos) >= size and (
            # A view keeps all that was fed alive, which must not cost much more than the data.
            size < LANDING_FROM or 2 * size >= <uint64_t> (self._end - self._start)
        ):
            self.data = piece_of(self._fed, self._pos - self._start, <Py_ssize_t> size)
            self._pos += size
            self.missing = 0
            return True
        self.data = None
        if size < LANDING_FROM:
            self._landing = PyBytes_FromStringAndSize(NULL, <Py_ssize_t> size)
            self._place = <uint8_t *> PyBytes_AS_STRING(self._landing)
        else:
            buffer = new_aligned(<Py_ssize_t> size)
            self._landing = buffer
            self._place = buffer.data
        return self._land()

    cdef bint _land(self) except -1:
        """Moves what is here of the data to its place; whether the data is whole."""
        cdef uint64_t part = min(self.missing, <uint64_t> (self._end - self._pos))
        copy_bytes(self._place, self._pos, <Py_ssize_t> part)
        self._place += part
        self._pos += part
        self.missing -= part
        if self.missing:
            return False
        self.data = self._landing
        self._landing = None
        return True

    cdef int _fail(self, object error) except -1:
        self._error = error
        self._fed = self._landing = None
        raise error


cdef bytes head_bytes(int type, object stream, uint64_t length, int flags, object n, bint framed):
    """What ``encode_head`` gives, for data of ``length`` bytes."""
    cdef uint64_t identifier = 0, number = 0
    cdef int head = head_size(type)
    cdef uint8_t[HEAD_MOST] out
    cdef uint8_t *at = out
    cdef str name = name_of(type)
    if not 0 < type < EXT_TYPE:
        raise LocalProtocolError(f"a frame of type {type:#x} has no header of this form (RS-2)")
    to_number(stream, HIGHEST, "a stream id", &identifier)
    if not fits(type, identifier):
        raise LocalProtocolError(f"{name} does not belong on stream {identifier} (RS-3)")
    if flags & ~flags_of(type) or not (is_known(type) or flags):
        raise LocalProtocolError(f"flags {flags:#x} do not belong to {name} (RS-R2)")
    if (head == NUMBERED_SIZE) != (n is not None):
        raise LocalProtocolError(f"{name} has {'no' if n is not None else 'a'} number of items")
    if n is not None:
        to_number(n, HIGHEST, "a number of items", &number)
    if is_exact(type) and length:
        raise LocalProtocolError(f"{name} has no data (RS-R14)")
    at = head_store(at, type, flags, head + length, framed)
    at = network_store(at, identifier, 8)
    if head == NUMBERED_SIZE:
        at = network_store(at, number, 8)
    return PyBytes_FromStringAndSize(<char *> out, at - out)


# These compare numbers, which raises nothing: so no caller has to ask for an error.

cdef inline bint is_known(int type) noexcept:
    """Whether the protocol names this type (RS-2)."""
    return (
        type == SETUP_TYPE
        or REQUEST_RESPONSE_TYPE <= type <= CANCEL_TYPE
        or type == RESPONSE_TYPE
        or type == ERROR_TYPE
        or type == EXT_TYPE
    )


cdef inline bint is_exact(int type) noexcept:
    """Whether nothing follows the head (RS-R14)."""
    return type == REQUEST_N_TYPE or type == CANCEL_TYPE


cdef inline bint fits(int type, uint64_t stream) noexcept:
    """Whether the type may stand on that stream; 0 is the connection (RS-3, RS-4)."""
    if type == SETUP_TYPE:
        return stream == 0
    return stream != 0 or type == ERROR_TYPE or not is_known(type)


cdef inline int head_size(int type) noexcept:
    """Bytes of a frame before its data, without the length."""
    if type == EXT_TYPE:
        return EXT_SIZE
    if type == REQUEST_STREAM_TYPE or type == REQUEST_SUB_TYPE or type == REQUEST_N_TYPE:
        return NUMBERED_SIZE
    return HEADER_SIZE


cdef inline int flags_of(int type) noexcept:
    """The flags that a type names. Those that may not be ignored have none (RS-4, RS-5)."""
    if type == SETUP_TYPE or type == REQUEST_RESPONSE_TYPE or type == REQUEST_FNF_TYPE:
        return 0
    if type == RESPONSE_TYPE:
        return IGNORE_FLAG | BEGIN_FLAG | END_FLAG | COMPLETE_FLAG
    return IGNORE_FLAG


cdef str name_of(int type):
    return TYPE_NAMES.get(type, f"type {type:#x}")


cdef uint8_t *head_store(
    uint8_t *out, int type, int flags, uint64_t length, bint framed
) except NULL:
    """Writes what comes before the stream id; ``length`` is without its own bytes."""
    if framed:
        length += LENGTH_SIZE
        if length > LENGTH_MAX:
            raise LocalProtocolError(f"a frame of {length} bytes; 2^31 - 1 are the most (RS-1)")
        out = network_store(out, length, LENGTH_SIZE)
    out[0] = VERSION
    out[1] = <uint8_t> flags
    return network_store(out + 2, <uint64_t> type, 2)
