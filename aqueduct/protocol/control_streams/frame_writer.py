"""What halves say in the control-stream draft: all but messages goes by their control streams.

A half whose control stream is not attached yet says nothing: what it owes follows in ``attached``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from aqueduct._speedups.control_streams import control_encoder as encoder
from aqueduct.errors import LocalProtocolError
from aqueduct.protocol.common.events import Headers
from aqueduct.protocol.common.receiver import ReceiverHalf
from aqueduct.protocol.common.send_streams import SendStreams
from aqueduct.protocol.common.sender import RESET_CANCELLED, SenderHalf
from aqueduct.protocol.common.state import ReceiverState, SenderState
from aqueduct.protocol.control_streams import ids
from aqueduct.protocol.control_streams.bidi_streams import BidiStreams

__all__ = ["ControlFrameWriter"]


class ControlFrameWriter:
    """See FrameWriter."""

    __slots__ = ("_bidi", "_outgoing")

    def __init__(
        self, outgoing: SendStreams, bidi: BidiStreams, *, header_blocks: bool = False
    ) -> None:
        """``header_blocks``: see ControlConnection."""
        self._outgoing = outgoing
        outgoing.frames = encoder.encode_control_message if header_blocks else _without_headers
        self._bidi = bidi

    def describe(self, channel: int) -> str:
        """A channel for people."""
        return ids.describe(channel)

    def can_say(self, half: SenderHalf | ReceiverHalf) -> bool:
        """Whether its control stream is attached."""
        return half.control is not None

    def open(self, half: SenderHalf | ReceiverHalf) -> None:
        """Opens the control stream of a half that the peer has created (AQ0-25)."""
        if half.control is None:
            half.control = self._bidi.open([encoder.encode_channel_control(half.channel)], half)
            if isinstance(half, SenderHalf):
                half.control.speaker = half

    def attached(self, half: SenderHalf | ReceiverHalf) -> None:
        """The control stream is there: what the half owes is said."""
        if isinstance(half, ReceiverHalf):
            if half.state is ReceiverState.CLOSED:
                self.close(half)
            else:
                half.ack_due()
            return
        assert half.control is not None
        half.control.speaker = half
        if half.state is SenderState.CANCELLED:
            self._bidi.reset(half.control, RESET_CANCELLED)
            return
        half.announce()
        if half.state is SenderState.ENDED:  # its connection closes, and waits for this
            count = half.unreliable.take_announcement() if half.unreliable is not None else 0
            if count:
                self.announce(half, count)
        if half.state is not SenderState.OPEN:
            self._say_finish(half)

    # Of a sender

    def message(
        self,
        half: SenderHalf,
        number: int,
        payload: Any,
        headers: Headers,
        attachments: Sequence[tuple[int, Headers]],
    ) -> list[Any]:
        """The buffers of one message. LocalProtocolError for headers, which the draft has not.

        Those of a message have their place in front of its payload if the calls above agree on it.
        """
        if any(each for _, each in attachments):
            raise LocalProtocolError(
                "attachments of the control-stream draft have no headers; put them in the payload "
                "of the message, or connect without dialect=control-streams"
            )
        channels = [channel for channel, _ in attachments]
        frames = self._outgoing.frames
        assert frames is not None
        return frames(half.channel, number, payload, channels, headers)

    def begin(self, half: SenderHalf) -> list[Any]:
        """Nothing: each message names its channel."""
        return []

    def oneshot(self, half: SenderHalf, message: list[Any]) -> list[Any]:
        """The message; the control stream says that there is no other."""
        self._say_finish(half)
        return message

    def announce(self, half: SenderHalf, count: int) -> None:
        """SentUnreliable (AQ0-22)."""
        self._say(half, [encoder.encode_control_sent_unreliable(count)])

    def finish(self, half: SenderHalf) -> None:
        """FinishSender, and the end of the stream of messages (AQ0-27)."""
        stream = half.message_stream
        if stream is not None and not stream.dead:
            self._outgoing.write(stream, [], fin=True)
        self._say_finish(half)

    def stream_opened(self, half: SenderHalf) -> None:
        """Nothing waits for that: FinishSender counts what was sent, in whatever order it comes."""

    def cancel(self, half: SenderHalf) -> None:
        """Resets the control stream (AQ0-31)."""
        if half.control is not None:
            self._bidi.reset(half.control, RESET_CANCELLED)

    def end_sender(self, half: SenderHalf, code: int) -> None:
        """Finishes this direction after the peer's close (AQ0-R4), or resets it as lost."""
        self._end(half, code)

    # Of a receiver

    def acks(self, half: ReceiverHalf, ranges: tuple[int, ...]) -> None:
        """AckReliable: its ranges begin at the lowest number that no ack has told (AQ0-15)."""
        at, spans = 0, []
        for gap, length in zip(ranges[::2], ranges[1::2], strict=True):
            spans.append((at + gap, at + gap + length))
            at += gap + length
        start, stop = half.numbers.ranges.first() or (0, 0)
        hole = 0 if start else stop
        self._say(half, [encoder.encode_control_acks(_alternating(spans, min(spans[0][0], hole)))])

    def ack_nacks(self, half: ReceiverHalf, ranges: tuple[int, ...]) -> None:
        """AckNackUnreliable."""
        self._say(half, [encoder.encode_control_ack_nacks(ranges)])

    def close(self, half: ReceiverHalf) -> None:
        """The last acks, and CloseReceiver, which repeats all that were acked (AQ0-29, AQ0-R1)."""
        if half.control is None:
            return
        frames: list[Any] = []
        if half.unreliable is not None:
            varints = half.unreliable.take_last_acks()
            if varints:
                frames.append(encoder.encode_control_ack_nacks(varints))
        frames.append(encoder.encode_control_close(_alternating(half.numbers.kept(), 0)))
        self._bidi.write(half.control, frames, fin=True)

    def end_receiver(self, half: ReceiverHalf, code: int) -> None:
        """Resets this direction (AQ0-33)."""
        self._end(half, code)

    # Within

    def _say(self, half: SenderHalf | ReceiverHalf, frames: list[Any]) -> None:
        assert half.control is not None
        self._bidi.write(half.control, frames)

    def _say_finish(self, half: SenderHalf) -> None:
        if half.control is not None:
            frame = encoder.encode_control_finish(half.numbers.next)
            self._bidi.write(half.control, [frame], fin=True)

    def _end(self, half: SenderHalf | ReceiverHalf, code: int) -> None:
        if half.control is None:
            return
        if code == RESET_CANCELLED:
            self._bidi.write(half.control, [], fin=True)
        else:
            self._bidi.reset(half.control, code)


def _without_headers(
    channel: int, number: int, payload: Any, attachments: Sequence[int], headers: Headers
) -> list[Any]:
    if headers:
        raise LocalProtocolError(
            "messages of the control-stream draft have no headers; put them in the payload, or "
            "connect without dialect=control-streams"
        )
    return encoder.encode_control_message(channel, number, payload, attachments)


def _alternating(spans: Iterable[tuple[int, int]], start: int) -> list[int]:
    """Spans of numbers, positive, as ranges from ``start``: positive, negative, positive ..."""
    found: list[int] = []
    at = start
    for first, stop in spans:
        if first > at:
            found += [first - at] if found else [0, first - at]
        found.append(stop - first)
        at = stop
    return found
