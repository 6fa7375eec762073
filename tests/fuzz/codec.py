"""The decoder fed any bytes in any pieces, beside its model; what it decodes encodes to the same.

An input is a byte of settings, a length, that many bytes that say how to cut the rest, the rest.
"""

from __future__ import annotations

import ctypes
from typing import Any, Final

from aqueduct._speedups import channels as codec
from aqueduct.errors import (
    FrameError,
    LimitExceeded,
    LocalProtocolError,
    RemoteProtocolError,
    SequenceError,
    VersionError,
)
from tests.fuzz.source import Source
from tests.reference import codec as model
from tests.speedups.strategies import HIGHEST, as_tuple, encode_frames

__all__ = ["ALLOWED", "target"]

ALLOWED: Final = (FrameError, SequenceError, VersionError, LimitExceeded)
"""What ``feed``, ``next`` and ``end`` may raise for what a peer sent; each is told by its type."""

LIMITS: Final = (
    {"frame_limit": 1 << 16},
    {"frame_limit": 1 << 16, "header_limit": 20, "attachment_limit": 2, "block_limit": 24},
    {"frame_limit": 60},
    {"frame_limit": 1 << 16, "header_limit": 0, "attachment_limit": 0, "block_limit": 300},
)
"""A frame has a limit in each, or a declared length would be taken as memory."""


def target(data: bytes) -> None:
    """One input."""
    source = Source(data)
    settings = source.byte()
    plan = Source(source.take(source.byte()))
    sequence = source.rest()
    options: dict[str, Any] = {
        "from_server": bool(settings & 1),
        "datagram": bool(settings & 2),
        **LIMITS[settings >> 2 & 3],
    }
    expected, fault = model.decode(sequence, **options)

    whole = codec.FrameDecoder(**options)
    frames, error = read(whole, sequence, None)
    compare(frames, error, expected, fault)
    check_state(whole, sequence, error)

    pieces = codec.FrameDecoder(**options)
    pieces.auto_admit = (0x7FFFFFFFFFFFFFFF, 30, 0, -1)[settings >> 4 & 3]
    pieces.pause = bool(settings & 64)
    frames, error = read(pieces, sequence, plan)
    compare(frames, error, expected, fault)
    check_state(pieces, sequence, error)

    if fault is None:
        assert model.encode(expected) == sequence
        assert encode_again(expected) in (sequence, None)


def read(
    decoder: codec.FrameDecoder, sequence: bytes, plan: Source | None
) -> tuple[list[model.Frame], RemoteProtocolError | None]:
    """The frames and the error of a sequence, fed whole or as the plan says."""
    frames: list[model.Frame] = []
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
                buffer, scribble = lend(part, how >> 5 & 3)
                decoder.feed(buffer)
                take(decoder, frames, how)
                if decoder.buffered == 0:
                    scribble()  # it was consumed, so nothing may look at it any more
            assert decoder.gathered <= decoder.consumed <= len(sequence)
            at += len(part)
        decoder.end()
        take(decoder, frames, 0)
    except ALLOWED as error:
        assert_final(decoder, error)
        return frames, error
    return frames, None


def take(decoder: codec.FrameDecoder, frames: list[model.Frame], how: int) -> None:
    """Everything that the decoder can give now."""
    while True:
        frame = decoder.next()
        if isinstance(frame, codec.MessageHead):
            admit(decoder, frame, how)
        elif frame is not None:
            frames.append(as_tuple(frame))
        elif decoder.paused:
            decoder.pause = False
        else:
            break
    assert not decoder.waiting
    assert decoder.buffered == 0  # whatever was fed is consumed, so nothing is read twice


def admit(decoder: codec.FrameDecoder, head: codec.MessageHead, how: int) -> None:
    """Into memory of its own or ours; memory that does not fit is refused, and nothing changes."""
    assert decoder.waiting
    kind = how & 3
    if kind == 1:
        for unfit in (bytearray(head.size + 1), bytes(head.size)):
            try:
                decoder.admit(unfit)
            except LocalProtocolError:
                assert decoder.waiting
            else:
                raise AssertionError(f"admitted into {type(unfit)} of {len(unfit)} bytes")
    decoder.admit(bytearray(head.size) if kind == 2 else None)


def lend(part: bytes, kind: int) -> tuple[Any, Any]:
    """The bytes as one of several buffers, and what spoils it once it was given back."""
    if kind == 1:
        writable = bytearray(part)
        return writable, lambda: writable.__setitem__(slice(None), b"\xaa" * len(writable))
    if kind == 2 and part:
        # Exactly as long as it says: an address sanitizer sees a read behind its end.
        exact = (ctypes.c_ubyte * len(part)).from_buffer_copy(part)
        return memoryview(exact).cast("B"), lambda: ctypes.memset(exact, 0xAA, len(part))
    if kind == 3:
        return memoryview(b"\x04\x00" + part + b"\x04\x00")[2:-2], lambda: None
    return part, lambda: None


def compare(
    frames: list[model.Frame],
    error: RemoteProtocolError | None,
    expected: list[model.Frame],
    fault: RemoteProtocolError | None,
) -> None:
    """The same frames, then the same kind of error; a cut is told from what is malformed."""
    assert frames == expected, (frames, expected)
    assert type(error) is type(fault), (error, fault)
    cut = getattr(fault, "truncated", None)
    assert getattr(error, "truncated", None) == cut, (error, fault)


def check_state(
    decoder: codec.FrameDecoder, sequence: bytes, error: RemoteProtocolError | None
) -> None:
    """What the decoder says of itself in the end."""
    assert decoder.finished == (error is None)
    if error is None:
        assert decoder.consumed == len(sequence)
        assert decoder.between_frames and not decoder.remaining and not decoder.gathered


def assert_final(decoder: codec.FrameDecoder, error: RemoteProtocolError) -> None:
    """After an error every method raises it again, and no memory is held."""
    assert decoder.error is error
    assert not decoder.buffered and not decoder.gathered and not decoder.remaining
    for call in (decoder.next, decoder.end, lambda: decoder.feed(b"\x04"), decoder.admit):
        again = None
        try:
            call()
        except RemoteProtocolError as raised:
            again = raised
        assert again is error


def encode_again(frames: list[model.Frame]) -> bytes | None:
    """The bytes by the compiled encoders; None for frames that may come and are never sent."""
    if ("SENT_UNRELIABLE", 0) in frames:
        return None
    if any(frame[0] == "MESSAGE" and frame[1] == HIGHEST for frame in frames):
        return None  # the core refuses it, since no count could tell of it (AQ-R13)
    return encode_frames(frames)
