"""Bytes of the control-stream draft to frames (AQ0-4 to AQ0-17); the encoders by the way.

What is behind a header block (AC-95) lands for itself, as the payload of a message of Aqueduct.

The order of calls of a ControlFrameDecoder: ``feed`` what came, then ``next`` until it says None; a
``MessageHead`` asks for ``admit`` or ``skip``; ``end`` when the peer has finished the sequence.
"""

cimport cython
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from libc.stdint cimport int64_t, uint8_t, uint64_t

from aqueduct._speedups.base.buffers cimport ALIGNMENT, count_copied
from aqueduct._speedups.base.varint cimport to_number
from aqueduct._speedups.channels.decoder cimport (
    check_version_length,
    match_magic,
    read_version,
    truncation,
)
from aqueduct._speedups.channels.frames cimport (
    ONESHOT_BIT,
    VERSION_TAG,
    FinishSender,
    FrameValue,
    MessageFrame,
    MessageHead,
    SentUnreliable,
    Version,
    header_block,
    header_pairs,
    inner_varint,
    ranges_block,
    ranges_of,
    sum_ranges,
)
from aqueduct._speedups.channels.receive_buffer cimport (
    SMALL,
    ReceiveBuffer,
    check_length,
    read_varint,
)
from aqueduct._speedups.control_streams.control_encoder cimport (
    CHANNEL_CONTROL,
    CLOSED_CHANNEL_LOST,
    CONNECTION_CONTROL,
    CONTROL_ACK_NACKS,
    CONTROL_ACKS,
    CONTROL_CLOSE,
    CONTROL_CREATOR_BIT,
    CONTROL_FINISH,
    CONTROL_MESSAGE,
    CONTROL_SENDER_BIT,
    CONTROL_SENT_UNRELIABLE,
    aligned,
)

from aqueduct.errors import FrameError, LimitExceeded, LocalProtocolError, SequenceError

__all__ = [
    "CREATOR",
    "FRAME_NAMES",
    "SENDER",
    "ChannelControl",
    "ClosedChannelLost",
    "ConnectionControl",
    "ControlAckNacks",
    "ControlAcks",
    "ControlClose",
    "ControlFrame",
    "ControlFrameDecoder",
]

cdef enum:
    # What an attachment takes in memory, beside the payload: a pair, a number, their places.
    ATTACHMENT_COST = 120

cdef uint64_t HIGHEST = 0xFFFFFFFFFFFFFFFF

# Bits of a channel's id (AQ0-7) that are looked at for every message.
SENDER = CONTROL_SENDER_BIT
CREATOR = CONTROL_CREATOR_BIT

FRAME_NAMES = {
    VERSION_TAG: "Version",
    CONNECTION_CONTROL: "ConnectionControl",
    CHANNEL_CONTROL: "ChannelControl",
    CONTROL_MESSAGE: "Message",
    CONTROL_SENT_UNRELIABLE: "SentUnreliable",
    CONTROL_ACKS: "AckReliable",
    CONTROL_ACK_NACKS: "AckNackUnreliable",
    CONTROL_FINISH: "FinishSender",
    CONTROL_CLOSE: "CloseReceiver",
    CLOSED_CHANNEL_LOST: "ClosedChannelLost",
}

cdef dict CARRIERS = {"uni": UNI, "datagram": DATAGRAM, "opener": OPENER, "answer": ANSWER}


# Values, beside those of the other revision.


@cython.final
@cython.no_gc
@cython.auto_pickle(False)
cdef class ConnectionControl(FrameValue):
    """The headers of the connection (AQ0-11)."""

    _FIELDS = ("headers",)

    def __init__(self, tuple headers not None):
        self.headers = headers


@cython.final
@cython.auto_pickle(False)
cdef class ChannelControl(FrameValue):
    """The bidirectional stream is the control stream of ``channel`` (AQ0-12)."""

    _FIELDS = ("channel",)

    def __init__(self, uint64_t channel):
        self.channel = channel


@cython.no_gc
@cython.auto_pickle(False)
cdef class RangesValue:
    """Ranges of message numbers: positive, negative, positive, ... (AQ0-6).

    ``block`` has them as they are on the wire: as numbers they take many times that.
    """

    def __init__(self, tuple ranges not None):
        self.block = ranges_block(ranges)

    def __eq__(self, other):
        return type(other) is type(self) and (<RangesValue> other).block == self.block

    __hash__ = None

    def __repr__(self):
        return f"{type(self).__name__}(ranges={self.ranges!r})"

    @property
    def ranges(self):
        """The numbers of ``block``."""
        return ranges_of(self.block)


@cython.final
@cython.no_gc
@cython.auto_pickle(False)
cdef class ControlAcks(RangesValue):
    """AckReliable: acked and not acked, from the lowest number that was not acked (AQ0-15)."""


@cython.final
@cython.no_gc
@cython.auto_pickle(False)
cdef class ControlAckNacks(RangesValue):
    """AckNackUnreliable: acked and nacked, from where the last one ended (AQ0-15)."""


@cython.final
@cython.no_gc
@cython.auto_pickle(False)
cdef class ControlClose(RangesValue):
    """CloseReceiver: messages on streams from number 0 on, acked and nacked (AQ0-16)."""


@cython.final
@cython.auto_pickle(False)
cdef class ClosedChannelLost(FrameValue):
    """The message that carried the channel is lost, and its creator has no state (AQ0-17)."""

    _FIELDS = ("channel",)

    def __init__(self, uint64_t channel):
        self.channel = channel


ControlFrame = (
    Version
    | ConnectionControl
    | ChannelControl
    | MessageFrame
    | SentUnreliable
    | FinishSender
    | ControlAcks
    | ControlAckNacks
    | ControlClose
    | ClosedChannelLost
)
"""What ``ControlFrameDecoder.next`` gives beside MessageHead; told apart by type."""


# Bytes to frames.


@cython.final
@cython.auto_pickle(False)
cdef class ControlFrameDecoder:
    """Decodes one frame sequence: a datagram, a unidirectional stream, or one direction of a
    bidirectional one.

    ``from_server`` is the side that sends it. ``carrier`` is "uni", "datagram", "opener" (the
    direction from the side that opened a bidirectional stream) or "answer". ``channel`` is that of
    an answer on a channel control stream; -1 is the connection control stream. The limits are those
    of ``config.Limits``, in bytes and attachments; above one, LimitExceeded names it before memory
    is taken. ``block_limit`` is for attachments and ranges, which are held whole before they are
    parsed, and before any admission.

    ``header_blocks``: the payload of each Message begins with a header block, which becomes its
    headers and is no part of the payload that is given (AC-95). A malformed one breaks its own
    message alone: that has an empty payload, and one header with an empty key, which no peer can
    send, whose value says what is wrong.

    While ``pause`` is set, only Version and ConnectionControl are given, and ``next`` says None
    before any other frame.

    What a sequence may hold (AQ0-10 to AQ0-17) is checked here, with the bits of channel ids. That
    a control stream was finished too early is for its reader to say: it knows whether the channel
    still exists. FrameError: the bytes do not decode. SequenceError: they do, and are not allowed.
    VersionError: AQ-R5. After an error every method raises it again.

    Not for two threads at once: that raises RuntimeError.
    """

    def __cinit__(
        self,
        *,
        bint from_server,
        str carrier not None,
        channel=-1,
        bint header_blocks=False,
        int64_t frame_limit=0x7FFFFFFFFFFFFFFF,
        int64_t header_limit=0x7FFFFFFFFFFFFFFF,
        int64_t attachment_limit=0x7FFFFFFFFFFFFFFF,
        int64_t block_limit=0x7FFFFFFFFFFFFFFF,
    ):
        if min(frame_limit, header_limit, attachment_limit, block_limit) < 0:
            raise ValueError("a limit must not be negative")
        if carrier not in CARRIERS:
            raise ValueError(f"carrier is {carrier!r}; it must be one of {', '.join(CARRIERS)}")
        self.from_server = from_server
        self.carrier = carrier
        self._carrier = CARRIERS[carrier]
        if channel != -1:
            if self._carrier != ANSWER:
                raise ValueError(f"channel is {channel}; only an answer has one from the start")
            to_number(channel, HIGHEST, "the channel", &self._channel)
            self._named = self._controlled = True
        elif self._carrier == ANSWER and not from_server:
            raise ValueError("the client answers on control streams of channels; channel names one")
        self._frame_limit = <uint64_t> frame_limit
        self._header_limit = <uint64_t> header_limit
        self._attachment_limit = <uint64_t> attachment_limit
        self._block_limit = <uint64_t> block_limit
        self.header_blocks = header_blocks
        self._headers = self._attachments = ()
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
        """The peer has finished the sequence: FrameError inside a frame (``truncated``), or if
        there was none at all, except on an answer.

        What was fed and not consumed still comes from ``next``, which raises that error when it
        gets to the cut.
        """
        cdef uint64_t missing = <uint64_t> self.buffer.missing + self._skipping
        self._enter()
        self.ended = True
        if self.state == AT_ADMISSION:
            if <uint64_t> self.length > self.buffer.left():
                self._fail(truncation())
        elif self.buffer.left() == 0:
            if self.state == AT_TYPE:
                # A sender that never spoke finishes its answer after a CloseReceiver.
                if self.frames == 0 and self._carrier != ANSWER:
                    self._fail(FrameError(f"{PLACES[self.carrier]} without a frame (AQ0-8)"))
            elif missing or self.state < AT_PAYLOAD:
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

    def skip(self):
        """Lets the payload of the MessageHead, or one that is landing, be read and not kept.

        No frame comes of it. Raises LocalProtocolError if there is no such payload.
        """
        self._enter()
        if self.state == AT_ADMISSION:
            self._skipping = <uint64_t> self.length
        elif self.state == AT_PAYLOAD:
            self._skipping = <uint64_t> self.buffer.missing
        else:
            raise LocalProtocolError("skip: no payload waits or lands")
        self.buffer.leave()
        self._headers = self._attachments = ()
        self.state = AT_SKIPPED

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
        """Bytes of the sequence that were parsed, gathered, landed or skipped."""
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
        """A MessageHead was given, and neither admitted nor skipped."""
        return self.state == AT_ADMISSION

    @property
    def remaining(self):
        """Bytes of the payload that lands or is skipped that did not come yet."""
        return <uint64_t> self.buffer.missing + self._skipping

    @property
    def channel(self):
        """The channel of the last Message, of ChannelControl or of an answer, -1 before it."""
        return self._channel if self._named else -1

    @property
    def between_frames(self):
        """Whether the consumed bytes end with a whole frame."""
        return self.state == AT_TYPE

    @property
    def finished(self):
        """The peer has finished the sequence and every frame of it was given."""
        return (
            self.ended and self.state == AT_TYPE and self.buffer.left() == 0 and self._error is None
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
            raise RuntimeError("a ControlFrameDecoder is used by two threads at once")
        return 0

    cdef object _parse(self):
        cdef ReceiveBuffer buffer = self.buffer
        cdef const uint8_t *block
        cdef object frame
        cdef bint whole
        while True:
            if self.state == AT_TYPE:
                if buffer.pos == buffer.end and not buffer.refill():
                    return None
                if self.pause and buffer.pos[0] not in (VERSION_TAG, CONNECTION_CONTROL):
                    self.paused = True
                    return None
                self.paused = False
                self._frame_start = buffer.taken()
                self._type = buffer.pos[0]
                buffer.pos += 1
                self._begin()

            elif self.state == AT_CHANNEL:
                if not self._varint():
                    return self._starved()
                if (self._value & CONTROL_SENDER_BIT != 0) != self.from_server:
                    raise SequenceError(
                        f"channel {self._value}: it comes from the receiver of the channel (AQ0-13)"
                    )
                self._channel = self._value
                self._named = True
                self.state = AT_NUMBER

            elif self.state == AT_NUMBER:
                if not self._varint():
                    return self._starved()
                if self._value and self._channel & ONESHOT_BIT:
                    raise SequenceError(
                        f"number {self._value} on a oneshot channel, which has one message"
                    )
                self._num = self._value
                self._headers = self._attachments = ()
                self._overhead = 0
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
                self._attachments = attached_channels(
                    block, block + self.length, self.from_server, self._attachment_limit
                )
                self._overhead = len(self._attachments) * ATTACHMENT_COST
                buffer.release_block()
                self.state = AT_PAYLOAD_LENGTH

            elif self.state == AT_PAYLOAD_LENGTH:
                if not self._varint():
                    return self._starved()
                self._length(HIGHEST, "")
                self.state = AT_SIZED
                if self.header_blocks:
                    self._block_start = buffer.taken()
                    self.state = AT_BLOCK_LENGTH
                    if self.length < ALIGNMENT:
                        self._break_block(
                            f"it has {ALIGNMENT} bytes or more, and the message {self.length}"
                        )

            elif self.state == AT_BLOCK_LENGTH:
                whole = True
                try:
                    whole = self._varint()
                    if whole:
                        self._measure_block()
                except FrameError as error:
                    self._shift = 0
                    self._break_block(str(error))
                if not whole:
                    return self._starved()

            elif self.state == AT_BLOCK:
                block = buffer.block(self._block_room)
                if block == NULL:
                    return self._starved()
                self._read_block(block)

            elif self.state == AT_BROKEN:
                if not self._skip_on():
                    return self._starved()
                self.state = AT_SIZED

            elif self.state == AT_SIZED:
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

            elif self.state == AT_SKIPPED:
                if not self._skip_on():
                    return self._starved()
                self._frame_done()

            elif self.state == AT_ADMISSION:
                return None

            elif self.state == AT_FIELD:
                if not self._varint():
                    return self._starved()
                return self._short_frame()

            elif self.state == AT_RANGES_LENGTH:
                if not self._varint():
                    return self._starved()
                self._length(self._block_limit, "Limits.block_bytes")
                self.state = AT_RANGES

            elif self.state == AT_RANGES:
                block = buffer.block(self.length)
                if block == NULL:
                    return self._starved()
                return self._ranged_frame(block)

            elif self.state == AT_HEADERS_LENGTH:
                if not self._varint():
                    return self._starved()
                self._length(self._header_limit, "Limits.header_bytes")
                self.state = AT_HEADERS

            elif self.state == AT_HEADERS:
                block = buffer.block(self.length)
                if block == NULL:
                    return self._starved()
                frame = ConnectionControl(header_pairs(block, block + self.length))
                self._last = self._type
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
                self._versioned = True
                self._frame_done()
                return frame

    cdef object _starved(self):
        """None, or the error if no more bytes can come."""
        if self.ended:
            raise truncation()
        return None

    cdef int _begin(self) except -1:
        """A type was read: may this frame stand here, and what comes next?"""
        cdef int kind = self._type
        cdef bint bidirectional = self._carrier >= OPENER
        if kind != VERSION_TAG and not CONNECTION_CONTROL <= kind <= CLOSED_CHANNEL_LOST:
            raise FrameError(f"no frame has the type {kind}")
        if self._last:
            raise SequenceError(f"it follows {FRAME_NAMES[self._last]}, which nothing may follow")
        if kind == CONTROL_MESSAGE:
            if bidirectional:
                raise SequenceError("it may not travel on a bidirectional stream (AQ0-13)")
            self.state = AT_CHANNEL
        elif kind == VERSION_TAG:
            if self.frames:
                raise SequenceError("only the first frame is a Version (AQ0-10)")
            self.state = AT_MAGIC
            self._matched = 1
        elif kind == CONNECTION_CONTROL:
            # The client opens the stream, the server answers.
            if not bidirectional or (self._carrier == ANSWER) != self.from_server:
                raise SequenceError("it travels on the connection control stream alone (AQ0-19)")
            if self._controlled:
                raise SequenceError("it stands on the control stream of a channel (AQ0-19)")
            if not self._versioned:
                raise SequenceError("there is no Version before it (AQ0-19)")
            self.state = AT_HEADERS_LENGTH
        elif kind == CHANNEL_CONTROL:
            if self._carrier != OPENER:
                raise SequenceError("only who opens a bidirectional stream sends it (AQ0-12)")
            if self._controlled:
                raise SequenceError("it does not begin the stream (AQ0-12)")
            self.state = AT_FIELD
        elif kind == CLOSED_CHANNEL_LOST:
            if self._carrier != UNI:
                raise SequenceError("it travels on a unidirectional stream alone (AQ0-17)")
            if self.frames != <uint64_t> self._versioned:
                raise SequenceError("it is not alone on its stream (AQ0-17)")
            self.state = AT_FIELD
        else:
            if not self._controlled:
                raise SequenceError("it travels on the control stream of a channel alone (AQ0-14)")
            if kind == CONTROL_SENT_UNRELIABLE or kind == CONTROL_FINISH:
                if (self._channel & CONTROL_SENDER_BIT != 0) != self.from_server:
                    raise SequenceError("it comes from the receiver of the channel (AQ0-14)")
                self.state = AT_FIELD
            else:
                if (self._channel & CONTROL_SENDER_BIT != 0) == self.from_server:
                    raise SequenceError("it comes from the sender of the channel (AQ0-15)")
                self.state = AT_RANGES_LENGTH
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

    cdef int _measure_block(self) except -1:
        """The varint that was just read is the size of a message's headers."""
        cdef uint64_t used = self.buffer.taken() - self._block_start
        cdef uint64_t size = self._value
        if size > self._header_limit:
            return self._break_block(
                f"its headers have {size} bytes, {self._header_limit} are allowed "
                "(Limits.header_bytes)"
            )
        if size > <uint64_t> self.length - used:
            return self._break_block(
                f"its headers have {size} bytes, and the message {self.length - used} behind their "
                "length"
            )
        self._block_size = <Py_ssize_t> size
        self._block_room = aligned(<Py_ssize_t> (used + size)) - <Py_ssize_t> used
        if used + <uint64_t> self._block_room > <uint64_t> self.length:
            return self._break_block("the message ends within the zeros behind its headers")
        self.state = AT_BLOCK
        return 0

    cdef int _read_block(self, const uint8_t *block) except -1:
        """A header block is whole: it becomes the message's headers, or breaks the message."""
        cdef Py_ssize_t index, size
        for index in range(self._block_size, self._block_room):
            if block[index]:
                return self._break_block("what follows its headers is not zeros")
        if self._block_size:
            try:
                self._headers = header_block(block, self._block_size)
            except FrameError as error:
                return self._break_block(str(error))
        self.buffer.release_block()
        size = <Py_ssize_t> (self.buffer.taken() - self._block_start)
        self._overhead += size
        self.length -= size
        self.state = AT_SIZED
        return 0

    cdef int _break_block(self, str text) except -1:
        """The header block of a message is malformed: the rest of the message is read over."""
        self.buffer.release_block()
        text = f"the header block of a message is malformed: {text} (AC-97)"
        self._headers = ((b"", text.encode()),)
        self._skipping = (
            <uint64_t> self.length - (self.buffer.taken() - self._block_start)
        )
        self.length = 0
        self.state = AT_BROKEN
        return 0

    cdef bint _skip_on(self) noexcept:
        """Reads over a payload as far as bytes are there: whether that was all of it."""
        cdef ReceiveBuffer buffer = self.buffer
        cdef uint64_t size
        while self._skipping:
            if buffer.pos == buffer.end and not buffer.refill():
                return False
            size = min(<uint64_t> (buffer.end - buffer.pos), self._skipping)
            buffer.pos += size
            self._skipping -= size
        return True

    cdef object _short_frame(self):
        """A frame of the varint that was just read."""
        cdef uint64_t value = self._value
        cdef ChannelControl control
        cdef ClosedChannelLost lost
        cdef SentUnreliable sent
        cdef FinishSender finish
        if self._type == CHANNEL_CONTROL:
            if (value & CONTROL_CREATOR_BIT != 0) == self.from_server:
                raise SequenceError(f"channel {value} was created by its own side (AQ0-25)")
            self._channel = value
            self._named = self._controlled = True
            self._frame_done()
            control = ChannelControl.__new__(ChannelControl)
            control.channel = value
            return control
        if self._type == CLOSED_CHANNEL_LOST:
            if (value & CONTROL_CREATOR_BIT != 0) != self.from_server:
                raise SequenceError(
                    f"channel {value} was not created by the side that sends it (AQ0-R11)"
                )
            self._last = self._type
            self._frame_done()
            lost = ClosedChannelLost.__new__(ClosedChannelLost)
            lost.channel = value
            return lost
        if value > 1 and self._channel & ONESHOT_BIT:
            raise SequenceError(f"{value} messages on a oneshot channel, which has one (AQ-R28)")
        if self._type == CONTROL_SENT_UNRELIABLE:
            self._frame_done()
            sent = SentUnreliable.__new__(SentUnreliable)
            sent.count = value
            return sent
        self._last = self._type
        self._frame_done()
        finish = FinishSender.__new__(FinishSender)
        finish.sent_reliable = value
        return finish

    cdef object _ranged_frame(self, const uint8_t *block):
        cdef RangesValue frame
        # A copy first: the peer may be able to write to the memory of the bytes.
        cdef bytes ranges = block[:self.length]
        cdef uint64_t total = 0
        block = <const uint8_t *> PyBytes_AS_STRING(ranges)
        if sum_ranges(block, block + self.length, &total) and total == 0:
            raise FrameError("its ranges are a single zero (AQ0-6)")
        if self._type == CONTROL_ACKS:
            frame = ControlAcks.__new__(ControlAcks)
        elif self._type == CONTROL_ACK_NACKS:
            frame = ControlAckNacks.__new__(ControlAckNacks)
        else:
            frame = ControlClose.__new__(ControlClose)
            self._last = self._type
        frame.block = ranges
        self._frame_done()
        return frame

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
        self.state = AT_TYPE
        self.frames += 1
        if self.buffer.gathered:
            self.buffer.release_block()

    cdef int _fail(self, object error) except -1:
        """Makes ``error`` final, with the place added to its text, and lets all memory go."""
        cdef str name = FRAME_NAMES.get(self._type, "a frame")
        cdef str channel = f", channel {self._channel}" if self._named else ""
        if error.args and isinstance(error.args[0], str):
            error.args = (
                f"{error.args[0]} [{name} at byte {self._frame_start} of {PLACES[self.carrier]}"
                f"{channel}]",
            )
        self._error = error
        self.buffer.drop()
        self._headers = self._attachments = ()
        self._skipping = 0
        self.buffer.leave()
        self.state = AT_TYPE
        raise error


cdef dict PLACES = {
    "uni": "a unidirectional stream",
    "datagram": "a datagram",
    "opener": "a bidirectional stream",
    "answer": "the answer on a bidirectional stream",
}


cdef tuple attached_channels(
    const uint8_t *pos, const uint8_t *end, bint from_server, uint64_t attachment_limit
):
    """Attachments as (channel, ()) pairs, as the other revision has them (AQ0-13, AQ0-24)."""
    cdef list attached = []
    cdef set seen = set()
    cdef uint64_t channel = 0
    while pos < end:
        if <uint64_t> len(attached) == attachment_limit:
            raise LimitExceeded(
                f"a message with more than {attachment_limit} attachments (Limits.attachments)"
            )
        inner_varint(&pos, end, &channel)
        if channel == 0:
            raise SequenceError("the entrypoint is attached (AQ0-7)")
        if (channel & CONTROL_CREATOR_BIT != 0) != from_server:
            raise SequenceError(
                f"channel {channel} is attached by the side that did not create it (AQ0-24)"
            )
        if channel in seen:
            raise SequenceError(f"channel {channel} is attached twice (AQ0-24)")
        seen.add(channel)
        attached.append((channel, ()))
    return tuple(attached)
