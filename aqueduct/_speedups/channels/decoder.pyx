"""The bytes of one frame sequence to frames, whatever pieces they come in.

The order of calls of a FrameDecoder: ``feed`` what came, then ``next`` until it says None; a
``MessageHead`` asks for ``admit``; ``end`` when the peer has finished the sequence.
"""

cimport cython
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from libc.stdint cimport int64_t, uint8_t, uint64_t

from aqueduct._speedups.base.buffers cimport count_copied
from aqueduct._speedups.channels.frames cimport (
    ACK_NACK_UNRELIABLE_TAG,
    ACK_RELIABLE_TAG,
    ACK_VERSION_TAG,
    CANCEL_SENDER_TAG,
    CLOSE_RECEIVER_TAG,
    CONNECTION_HEADERS_TAG,
    CREATOR_BIT,
    FINISH_SENDER_TAG,
    FORGET_CHANNEL_TAG,
    MESSAGE_TAG,
    ONESHOT_BIT,
    ROUTE_TO_TAG,
    SENDER_BIT,
    SENT_UNRELIABLE_TAG,
    VERSION_TAG,
    AckNackUnreliable,
    AckReliable,
    AckVersion,
    CancelSender,
    CloseReceiver,
    ConnectionHeaders,
    FinishSender,
    ForgetChannel,
    MessageFrame,
    MessageHead,
    RouteTo,
    SentUnreliable,
    Version,
    attached_channels,
    check_attachments,
    check_ranges,
    header_block,
    header_pairs,
)
from aqueduct._speedups.channels.receive_buffer cimport (
    SMALL,
    ReceiveBuffer,
    check_length,
    read_varint,
)

from aqueduct._speedups.channels.encoder import VERSION
from aqueduct._speedups.channels.frames import FRAME_NAMES
from aqueduct.errors import FrameError, LocalProtocolError, SequenceError, VersionError

__all__ = ["FrameDecoder"]

cdef enum:
    # Larger blocks of attachments stay bytes until asked for: tuples take many times that.
    LARGE_BLOCK = 64
    # At most so many bytes of a peer's version are read (AQ-R5).
    VERSION_TEXT_LIMIT = 255

cdef uint64_t HIGHEST = 0xFFFFFFFFFFFFFFFF
# Magic, human text; the version's text follows as varbytes (AQ-12).
cdef bytes MAGIC = VERSION[:16]
cdef bytes VERSION_TEXT = VERSION[17:]

# Frames without fields are made once.
cdef Version THE_VERSION = Version(VERSION_TEXT.decode())
cdef AckVersion THE_ACK_VERSION = AckVersion()
cdef CancelSender THE_CANCEL_SENDER = CancelSender()
cdef CloseReceiver THE_CLOSE_RECEIVER = CloseReceiver()
cdef ForgetChannel THE_FORGET_CHANNEL = ForgetChannel()


@cython.final
@cython.auto_pickle(False)
cdef class FrameDecoder:
    """Decodes one frame sequence: a unidirectional stream, or (``datagram``) a datagram.

    ``from_server`` is the side that sends it. The limits are those of ``config.Limits``, in
    bytes and attachments; above one, LimitExceeded names it before memory is taken.
    ``block_limit`` is for ATTACHMENTS and RANGES, which are held whole before they are parsed,
    and before any admission.

    The grammar (AQ-9), the context of each frame (AQ-24) and what datagrams may carry (AQ-R11)
    are checked here. FrameError: the bytes do not decode. SequenceError: they do, and are not
    allowed. VersionError: AQ-R5. After an error every method raises it again.

    Not for two threads at once: that raises RuntimeError.
    """

    def __cinit__(
        self,
        *,
        bint from_server,
        bint datagram=False,
        int64_t frame_limit=0x7FFFFFFFFFFFFFFF,
        int64_t header_limit=0x7FFFFFFFFFFFFFFF,
        int64_t attachment_limit=0x7FFFFFFFFFFFFFFF,
        int64_t block_limit=0x7FFFFFFFFFFFFFFF,
    ):
        if min(frame_limit, header_limit, attachment_limit, block_limit) < 0:
            raise ValueError("a limit must not be negative")
        self.from_server = from_server
        self.datagram = datagram
        self._frame_limit = <uint64_t> frame_limit
        self._header_limit = <uint64_t> header_limit
        self._attachment_limit = <uint64_t> attachment_limit
        self._block_limit = <uint64_t> block_limit
        self.auto_admit = 0x7FFFFFFFFFFFFFFF
        self.buffer = ReceiveBuffer.__new__(ReceiveBuffer)

    # What came.

    def feed(self, data):
        """Takes the next bytes, by reference: they must not change until they are consumed."""
        self._enter()
        if self.ended:
            raise LocalProtocolError("feed after end: the sequence was finished")
        self.buffer.push(data)

    cpdef object next(self):
        """The next frame; a MessageHead if its payload waits for ``admit``; None otherwise.

        None means: more bytes are needed (all that were fed are consumed), or ``waiting``, or
        ``paused``.
        """
        self._enter()
        self._busy = True
        try:
            return self._parse()
        except BaseException as error:
            # Memory for a payload may be there the next time; nothing else can be repeated.
            if self.state != AT_PAYLOAD or self.buffer.payload is not None:
                self._fail(error)
            raise
        finally:
            self._busy = False

    def end(self):
        """The peer has finished the sequence: FrameError (``truncated``) inside a frame.

        What was fed and not consumed still comes from ``next``, which raises that error when it
        gets to the cut.
        """
        self._enter()
        self.ended = True
        if self.state == AT_ADMISSION:
            if <uint64_t> self.length > self.buffer.left():
                self._fail(truncation())
        elif self.buffer.left() == 0 and self.state != AT_TAG:
            if self.state != AT_PAYLOAD or self.buffer.missing:
                self._fail(truncation())

    # Payloads.

    def admit(self, target=None):
        """Lets the payload of the MessageHead land, in ``target`` or in fresh memory.

        ``target`` is a writable contiguous buffer of exactly its size. Raises LocalProtocolError
        if nothing waits or the target does not fit, MemoryError if there is none to be had; the
        head waits on.
        """
        self._enter()
        if self.state != AT_ADMISSION:
            raise LocalProtocolError("admit: no message waits for it")
        self.buffer.prepare(self.length, target)
        self.state = AT_PAYLOAD

    def receive_buffer(self, Py_ssize_t hint):
        """Where the next bytes of an admitted payload go: at most ``hint`` of them, if above 0.

        None if there is no such memory now (no large payload, or fed bytes are not consumed).
        Write there, then call ``received``.
        """
        self._enter()
        return self.buffer.room(hint)

    def received(self, Py_ssize_t size):
        """``size`` bytes were written to the memory of ``receive_buffer``."""
        self._enter()
        if self.ended and size:
            raise LocalProtocolError("received after end: the sequence was finished")
        self.buffer.landed(size)

    # Where it stands.

    @property
    def consumed(self):
        """Bytes of the sequence that were parsed, gathered or landed."""
        return self.buffer.taken()

    @property
    def buffered(self):
        """Bytes that were fed and are not consumed."""
        return self.buffer.left()

    @property
    def gathered(self):
        """Consumed bytes of a block that is not whole yet, held in memory."""
        return self.buffer.gathered

    @property
    def waiting(self):
        """A MessageHead was given and not admitted."""
        return self.state == AT_ADMISSION

    @property
    def remaining(self):
        """Bytes of the admitted payload that did not land yet."""
        return self.buffer.missing

    @property
    def route(self):
        """The channel of ROUTE_TO, -1 before it."""
        return self._route if self._routed else -1

    @property
    def between_frames(self):
        """Whether the consumed bytes end with a whole frame."""
        return self.state == AT_TAG

    @property
    def finished(self):
        """The peer has finished the sequence and every frame of it was given."""
        return (
            self.ended and self.state == AT_TAG and self.buffer.left() == 0 and self._error is None
        )

    @property
    def error(self):
        """What the sequence failed with, or None."""
        return self._error

    # Parsing.

    cdef int _enter(self) except -1:
        if self._error is not None:
            # Without the traceback of the last time, which would grow.
            raise self._error.with_traceback(None)
        if self._busy:
            raise RuntimeError("a FrameDecoder is used by two threads at once")
        return 0

    cdef object _parse(self):
        cdef ReceiveBuffer buffer = self.buffer
        cdef const uint8_t *block
        cdef object frame
        while True:
            if self.state == AT_TAG:
                if buffer.pos == buffer.end and not buffer.refill():
                    return None
                if self.pause and buffer.pos[0] == ROUTE_TO_TAG and not self._routed:
                    self.paused = True
                    return None
                self.paused = False
                self._frame_start = buffer.taken()
                self._tag = buffer.pos[0]
                buffer.pos += 1
                self._begin()
                if self.state == AT_TAG:
                    return self._short_frame()

            elif self.state == AT_NUM:
                if not self._varint():
                    return self._starved()
                if self._value and self._route & ONESHOT_BIT:
                    raise SequenceError(
                        f"number {self._value} on a oneshot channel, which has one message"
                    )
                self._num = self._value
                self._headers = ()
                self._attachments = ()
                self._overhead = 0
                self.state = AT_HEADERS_LENGTH

            elif self.state == AT_HEADERS_LENGTH:
                if not self._varint():
                    return self._starved()
                self._length(self._header_limit, "Limits.header_bytes")
                self.state = AT_HEADERS if self.length else AT_ATTACHMENTS_LENGTH

            elif self.state == AT_HEADERS:
                block = buffer.block(self.length)
                if block == NULL:
                    return self._starved()
                self._headers = header_block(block, self.length)
                self._overhead = self.length
                buffer.release_block()
                self.state = AT_ATTACHMENTS_LENGTH

            elif self.state == AT_ATTACHMENTS_LENGTH:
                if not self._varint():
                    return self._starved()
                self._length(self._block_limit, "Limits.block_bytes")
                self.state = AT_ATTACHMENTS if self.length else AT_PAYLOAD_LENGTH

            elif self.state == AT_ATTACHMENTS:
                block = buffer.block(self.length)
                if block == NULL:
                    return self._starved()
                if self.length > LARGE_BLOCK:
                    self._attachments = block[:self.length]
                    block = <const uint8_t *> PyBytes_AS_STRING(self._attachments)
                    check_attachments(
                        block, block + self.length, self.from_server,
                        self._header_limit, self._attachment_limit,
                    )
                else:
                    self._attachments = attached_channels(
                        block, block + self.length, self.from_server,
                        self._header_limit, self._attachment_limit,
                    )
                self._overhead += self.length
                buffer.release_block()
                self.state = AT_PAYLOAD_LENGTH

            elif self.state == AT_PAYLOAD_LENGTH:
                if not self._varint():
                    return self._starved()
                self._length(HIGHEST, "")
                if self.length > self.auto_admit:
                    self.state = AT_ADMISSION
                    if self.ended and <uint64_t> self.length > buffer.left():
                        raise truncation()
                    return self._head_frame()
                if self.length < SMALL and buffer.end - buffer.pos >= self.length:
                    frame = PyBytes_FromStringAndSize(<const char *> buffer.pos, self.length)
                    count_copied(self.length)
                    buffer.pos += self.length
                    return self._message(frame)
                self.state = AT_PAYLOAD
                buffer.missing = self.length

            elif self.state == AT_PAYLOAD:
                if buffer.payload is None:
                    buffer.prepare(self.length, None)
                if not buffer.land():
                    return self._starved()
                return self._message(buffer.payload)

            elif self.state == AT_ADMISSION:
                return None

            elif self.state == AT_FIELD:
                if not self._varint():
                    return self._starved()
                return self._short_frame()

            elif self.state == AT_ACKED_CHANNEL:
                if not self._varint():
                    return self._starved()
                if self._value != self._route:
                    raise SequenceError(f"its CHANNEL is {self._value} (AQ-R14)")
                self.state = AT_RANGES_LENGTH

            elif self.state == AT_RANGES_LENGTH:
                if not self._varint():
                    return self._starved()
                self._length(self._block_limit, "Limits.block_bytes")
                self.state = AT_RANGES

            elif self.state == AT_RANGES:
                block = buffer.block(self.length)
                if block == NULL:
                    return self._starved()
                return self._acks(block)

            elif self.state == AT_CONNECTION_HEADERS_LENGTH:
                if not self._varint():
                    return self._starved()
                self._length(self._header_limit, "Limits.header_bytes")
                self.state = AT_CONNECTION_HEADERS

            elif self.state == AT_CONNECTION_HEADERS:
                block = buffer.block(self.length)
                if block == NULL:
                    return self._starved()
                frame = ConnectionHeaders(header_pairs(block, block + self.length))
                self._frame_done()
                return frame

            elif self.state == AT_MAGIC:
                if not match_magic(buffer, &self._matched):
                    return self._starved()
                self.state = AT_VERSION_LENGTH

            elif self.state == AT_VERSION_LENGTH:
                if not self._varint():
                    return self._starved()
                check_version_length(self._value)
                self._length(HIGHEST, "")
                self.state = AT_VERSION_TEXT

            else:  # AT_VERSION_TEXT
                block = buffer.block(self.length)
                if block == NULL:
                    return self._starved()
                frame = read_version(block, self.length)
                self._frame_done()
                return frame

    cdef object _starved(self):
        """None, or the error if no more bytes can come."""
        if self.ended:
            raise truncation()
        return None

    cdef int _begin(self) except -1:
        """A tag was read: may this frame stand here, and what comes next?"""
        cdef int tag = self._tag
        cdef uint64_t ours = self.from_server
        if tag == MESSAGE_TAG:
            self.state = AT_NUM
        elif tag == ROUTE_TO_TAG or tag == SENT_UNRELIABLE_TAG or tag == FINISH_SENDER_TAG:
            self.state = AT_FIELD
        elif tag == ACK_RELIABLE_TAG:
            self.state = AT_RANGES_LENGTH
        elif tag == ACK_NACK_UNRELIABLE_TAG:
            self.state = AT_ACKED_CHANNEL
        elif tag == CONNECTION_HEADERS_TAG:
            self.state = AT_CONNECTION_HEADERS_LENGTH
        elif tag == VERSION_TAG:
            self.state = AT_MAGIC
            self._matched = 1
        elif not (tag == ACK_VERSION_TAG or CANCEL_SENDER_TAG <= tag <= FORGET_CHANNEL_TAG):
            raise FrameError(f"no frame has the tag {tag}")

        if tag < ROUTE_TO_TAG or tag == VERSION_TAG:
            if self._routed:
                raise SequenceError("it stands after ROUTE_TO (AQ-9)")
        elif tag == ROUTE_TO_TAG:
            if self._routed:
                raise SequenceError(f"a second ROUTE_TO after the one to {self._route} (AQ-9)")
        elif not self._routed:
            raise SequenceError("it stands before ROUTE_TO (AQ-9)")
        elif tag <= CANCEL_SENDER_TAG:
            if (self._route & SENDER_BIT != 0) != ours:
                raise SequenceError("it comes from the receiver of the channel (AQ-24)")
        elif tag <= CLOSE_RECEIVER_TAG:
            if (self._route & SENDER_BIT != 0) == ours:
                raise SequenceError("it comes from the sender of the channel (AQ-24)")
        elif self._route & CREATOR_BIT != ours:
            raise SequenceError("it comes from the side that did not create the channel (AQ-23)")
        if self.datagram and not (
            tag == MESSAGE_TAG or tag == ROUTE_TO_TAG or tag == VERSION_TAG
        ):
            raise SequenceError("it may not travel in a datagram (AQ-R11)")
        return 0

    cdef int _varint(self) except -1:
        """Reads on in a varint, wherever it was cut: 1 and ``_value``, or 0 for more bytes."""
        return read_varint(self.buffer, &self._value, &self._shift)

    cdef int _length(self, uint64_t limit, str name) except -1:
        """Takes the varint as the length of what follows, if the limits allow it."""
        check_length(
            self._value, self.buffer.taken() - self._frame_start, self._frame_limit, limit, name
        )
        self.length = <Py_ssize_t> self._value
        return 0

    cdef object _short_frame(self):
        """A frame without fields, or with the varint that was just read."""
        cdef int tag = self._tag
        cdef RouteTo route
        cdef SentUnreliable sent
        cdef FinishSender finish
        if tag == ROUTE_TO_TAG:
            self._route = self._value
            self._routed = True
            self._frame_done()
            route = RouteTo.__new__(RouteTo)
            route.channel = self._value
            return route
        if tag == SENT_UNRELIABLE_TAG or tag == FINISH_SENDER_TAG:
            if self._value > 1 and self._route & ONESHOT_BIT:
                raise SequenceError(
                    f"{self._value} messages on a oneshot channel, which has one (AQ-R28)"
                )
            self._frame_done()
            if tag == SENT_UNRELIABLE_TAG:
                sent = SentUnreliable.__new__(SentUnreliable)
                sent.count = self._value
                return sent
            finish = FinishSender.__new__(FinishSender)
            finish.sent_reliable = self._value
            return finish
        self._frame_done()
        if tag == ACK_VERSION_TAG:
            return THE_ACK_VERSION
        if tag == CANCEL_SENDER_TAG:
            return THE_CANCEL_SENDER
        if tag == CLOSE_RECEIVER_TAG:
            return THE_CLOSE_RECEIVER
        return THE_FORGET_CHANNEL

    cdef object _acks(self, const uint8_t *block):
        cdef AckReliable reliable
        cdef AckNackUnreliable unreliable
        cdef bint paired = self._tag == ACK_RELIABLE_TAG
        # A copy first: the peer may be able to write to the memory of the bytes.
        cdef bytes ranges = block[:self.length]
        block = <const uint8_t *> PyBytes_AS_STRING(ranges)
        check_ranges(block, block + self.length, paired)
        self._frame_done()
        if paired:
            reliable = AckReliable.__new__(AckReliable)
            reliable.block = ranges
            return reliable
        unreliable = AckNackUnreliable.__new__(AckNackUnreliable)
        unreliable.channel = self._route
        unreliable.block = ranges
        return unreliable

    cdef object _head_frame(self):
        cdef MessageHead head = MessageHead.__new__(MessageHead)
        head.num = self._num
        head.raw_headers = self._headers
        head.raw_attachments = self._attachments
        head.overhead = self._overhead
        head.size = <uint64_t> self.length
        return head

    cdef object _message(self, object payload):
        cdef MessageFrame message = MessageFrame.__new__(MessageFrame)
        message.num = self._num
        message.raw_headers = self._headers
        message.raw_attachments = self._attachments
        message.overhead = self._overhead
        message.payload = payload
        message.size = self.length
        self.buffer.leave()
        self._frame_done()
        return message

    cdef void _frame_done(self) noexcept:
        self.state = AT_TAG
        self.frames += 1
        if self.buffer.gathered:
            self.buffer.release_block()

    cdef int _fail(self, object error) except -1:
        """Makes ``error`` final, with the place added to its text, and lets all memory go."""
        cdef str name = FRAME_NAMES.get(self._tag, "a frame")
        cdef str channel = f" of a sequence for channel {self._route}" if self._routed else ""
        if error.args and isinstance(error.args[0], str):
            error.args = (f"{error.args[0]} [{name} at byte {self._frame_start}{channel}]",)
        self._error = error
        self.buffer.drop()
        self._headers = self._attachments = ()
        self.buffer.leave()
        self.state = AT_TAG
        raise error


cdef object truncation():
    return FrameError("the sequence ends inside a frame", truncated=True)


# VERSION, which the other revision of Aqueduct has as well.


cdef int match_magic(ReceiveBuffer buffer, Py_ssize_t *matched) except -1:
    cdef const char *magic = MAGIC
    while matched[0] < len(MAGIC):
        if buffer.pos == buffer.end and not buffer.refill():
            return 0
        if buffer.pos[0] != <uint8_t> magic[matched[0]]:
            raise VersionError(
                f"byte {matched[0]} of VERSION is {buffer.pos[0]:#04x}: the peer does not "
                "speak Aqueduct (AQ-R5)"
            )
        matched[0] += 1
        buffer.pos += 1
    return 1


cdef int check_version_length(uint64_t size) except -1:
    if size > VERSION_TEXT_LIMIT:
        raise VersionError(f"the peer's version has {size} bytes (AQ-R5)")
    return 0


cdef Version read_version(const uint8_t *text, Py_ssize_t size):
    cdef bytes version = text[:size]
    if version != VERSION_TEXT:
        raise VersionError(f"the peer speaks version {version!r}, not {VERSION_TEXT!r}")
    return THE_VERSION
