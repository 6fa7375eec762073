"""The decoder of the control-stream draft fed any bytes in any pieces, beside its model.

An input is two bytes of settings, a length, that many bytes that say how to cut the rest, the rest.
The second byte also says whether messages have header blocks.
"""

from __future__ import annotations

from typing import Any, Final

from aqueduct._speedups.channels.frames import MessageHead
from aqueduct._speedups.control_streams.control_frames import ControlFrameDecoder
from aqueduct.errors import LocalProtocolError, RemoteProtocolError
from tests.fuzz.codec import ALLOWED, LIMITS, lend
from tests.fuzz.source import Source
from tests.reference import control_streams as model
from tests.reference.codec import Frame
from tests.speedups.control_streams.sequences import as_tuple, encode_frames
from tests.speedups.strategies import HIGHEST

__all__ = ["target"]

CARRIERS: Final = ("uni", "datagram", "opener", "answer")
Answer = tuple[list[Frame], RemoteProtocolError | None]


def target(data: bytes) -> None:
    """One input."""
    source = Source(data)
    settings, channel = source.byte(), source.byte()
    plan = Source(source.take(source.byte()))
    sequence = source.rest()
    options: dict[str, Any] = {
        "from_server": bool(settings & 1),
        "carrier": CARRIERS[settings >> 1 & 3],
        **LIMITS[settings >> 3 & 3],
    }
    if options["carrier"] == "answer" and (channel or not options["from_server"]):
        options["channel"] = channel - 1 if channel else 0
    if options["carrier"] in ("uni", "datagram"):
        options["header_blocks"] = bool(channel & 1)
    expected, fault = model.decode(sequence, **options)

    whole = ControlFrameDecoder(**options)
    compare(whole, read(whole, sequence, None, settings), (expected, fault), sequence)

    pieces = ControlFrameDecoder(**options)
    pieces.auto_admit = (0x7FFFFFFFFFFFFFFF, 30, 0, -1)[settings >> 5 & 3]
    pieces.pause = bool(settings & 128)
    compare(pieces, read(pieces, sequence, plan, settings), (expected, fault), sequence)

    if fault is None:
        if all(frame[-1] is not None for frame in expected):  # no header block was malformed
            assert model.encode(expected) == sequence
            assert encode_again(expected) in (sequence, None)
        skip_all(sequence, options, expected)


def read(
    decoder: ControlFrameDecoder, sequence: bytes, plan: Source | None, settings: int
) -> Answer:
    """The frames and the error of a sequence, fed whole or as the plan says."""
    frames: list[Frame] = []
    at = 0
    try:
        while at < len(sequence):
            how = plan.byte() if plan is not None else 0
            size = 1 + (how & 7) * (1 + (how >> 3 & 3) * 20)
            if plan is None or plan.empty:
                size = len(sequence)
            part = sequence[at : at + size]
            room = decoder.receive_buffer(size) if how & 128 else None
            if room is not None:
                part = part[: len(room)]
                room[: len(part)] = part
                room.release()
                decoder.received(len(part))
                take(decoder, frames, how)
            else:
                buffer, spoil = lend(part, how >> 5 & 3)
                decoder.feed(buffer)
                take(decoder, frames, how)
                if decoder.buffered == 0:
                    spoil()  # it was consumed, so nothing may look at it any more
            at += len(part)
        decoder.end()
        take(decoder, frames, settings)
    except ALLOWED as error:
        assert_final(decoder, error)
        return frames, error
    return frames, None


def take(decoder: ControlFrameDecoder, frames: list[Frame], how: int) -> None:
    """Everything that the decoder can give now."""
    while True:
        frame = decoder.next()
        if isinstance(frame, MessageHead):
            admit(decoder, frame, how)
        elif frame is not None:
            frames.append(as_tuple(frame, decoder))
        elif decoder.paused:
            decoder.pause = False
        else:
            break
    assert not decoder.waiting
    assert decoder.buffered == 0  # whatever was fed is consumed, so nothing is read twice


def admit(decoder: ControlFrameDecoder, head: MessageHead, how: int) -> None:
    """Into memory of its own or ours; memory that does not fit is refused, and nothing changes."""
    assert decoder.waiting
    if how & 3 == 1:
        try:
            decoder.admit(bytearray(head.size + 1))
        except LocalProtocolError:
            assert decoder.waiting
        else:
            raise AssertionError("admitted into memory that does not fit")
    decoder.admit(bytearray(head.size) if how & 3 == 2 else None)


def skip_all(sequence: bytes, options: dict[str, Any], expected: list[Frame]) -> None:
    """Every payload is read over: what is left is all that was no message."""
    decoder = ControlFrameDecoder(**options)
    decoder.auto_admit = -1
    left: list[Frame] = []
    for at in range(0, len(sequence), 7):
        decoder.feed(sequence[at : at + 7])
        while (frame := decoder.next()) is not None:
            if isinstance(frame, MessageHead):
                decoder.skip()
            else:
                left.append(as_tuple(frame, decoder))
        assert decoder.buffered == 0
    decoder.end()
    assert left == [frame for frame in expected if frame[0] != "Message"]
    assert decoder.frames == len(expected)


def compare(decoder: ControlFrameDecoder, found: Answer, wanted: Answer, sequence: bytes) -> None:
    """The same frames, then the same kind of error; a cut is told from what is malformed."""
    (frames, error), (expected, fault) = found, wanted
    assert frames == expected, (frames, expected)
    assert type(error) is type(fault), (error, fault)
    cut = getattr(fault, "truncated", None)
    assert getattr(error, "truncated", None) == cut, (error, fault)
    assert decoder.finished == (error is None)
    if error is None:
        assert decoder.consumed == len(sequence)
        assert decoder.between_frames and not decoder.remaining and not decoder.gathered


def assert_final(decoder: ControlFrameDecoder, error: RemoteProtocolError) -> None:
    """After an error every method raises it again, and no memory is held."""
    assert decoder.error is error
    assert not decoder.buffered and not decoder.gathered and not decoder.remaining
    for call in (decoder.next, decoder.end, decoder.skip, decoder.admit):
        again = None
        try:
            call()
        except RemoteProtocolError as raised:
            again = raised
        assert again is error


def encode_again(frames: list[Frame]) -> bytes | None:
    """The bytes by the compiled encoders; None for frames that may come and are never sent."""
    for frame in frames:
        if frame[0] in ("SentUnreliable", "AckReliable", "AckNackUnreliable") and not frame[1]:
            return None
        if frame[0] == "Message" and frame[2] == HIGHEST:
            return None  # the core refuses it, since no count could tell of it (AQ-R13)
    return encode_frames(frames)
