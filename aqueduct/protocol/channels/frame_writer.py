"""What halves say in Aqueduct's own frames: each control stream begins with ROUTE_TO."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from aqueduct._speedups import channels as codec
from aqueduct._speedups.channels.sender import SendStream
from aqueduct.protocol.channels import ids
from aqueduct.protocol.common.events import Headers
from aqueduct.protocol.common.receiver import ReceiverHalf
from aqueduct.protocol.common.send_streams import SendStreams
from aqueduct.protocol.common.sender import SenderHalf

__all__ = ["ChannelFrameWriter"]

ONE_SENT: Final = codec.encode_finish_sender(1)


class ChannelFrameWriter:
    """See FrameWriter."""

    __slots__ = ("_outgoing",)

    def __init__(self, outgoing: SendStreams) -> None:
        self._outgoing = outgoing

    def describe(self, channel: int) -> str:
        """A channel for people."""
        return ids.describe(channel)

    def can_say(self, half: SenderHalf | ReceiverHalf) -> bool:
        """Always: a control stream opens when it is first needed."""
        return True

    def open(self, half: SenderHalf | ReceiverHalf) -> None:
        """ROUTE_TO alone (AQ-R25)."""
        self._write(half, [])

    # Of a sender

    def message(
        self,
        half: SenderHalf,
        number: int,
        payload: Any,
        headers: Headers,
        attachments: Sequence[tuple[int, Headers]],
    ) -> list[Any]:
        """The buffers of one message."""
        return codec.encode_message(number, payload, headers, attachments)

    def begin(self, half: SenderHalf) -> list[Any]:
        """ROUTE_TO stands before the messages of a stream."""
        return [codec.encode_route_to(half.channel)]

    def oneshot(self, half: SenderHalf, message: list[Any]) -> list[Any]:
        """The whole life of the channel in one sequence (AQ-R28)."""
        return [codec.encode_route_to(half.channel), *message, ONE_SENT]

    def announce(self, half: SenderHalf, count: int) -> None:
        """SENT_UNRELIABLE (AQ-33)."""
        self._write(half, [codec.encode_sent_unreliable(count)])

    def finish(self, half: SenderHalf) -> None:
        """FINISH_SENDER, once every message has its stream (AQ-34)."""
        half.finish_waits = True
        self.stream_opened(half)

    def stream_opened(self, half: SenderHalf) -> None:
        """A message that waited has its stream: FINISH_SENDER may be due."""
        if half.unordered is not None and half.unordered.unopened:
            return
        stream = half.message_stream
        if half.control is not None and stream is not None and stream.unopened:
            return  # FINISH_SENDER would go by another stream
        half.finish_waits = False
        frame = codec.encode_finish_sender(half.numbers.next)
        if stream is not None and not stream.dead and half.control is None:
            self._outgoing.write(stream, [frame], fin=True)  # AQ-R18
            return
        if stream is not None and not stream.dead:
            self._outgoing.write(stream, [], fin=True)
        self._write(half, [frame], fin=True)

    def cancel(self, half: SenderHalf) -> None:
        """CANCEL_SENDER on the control stream (AQ-35)."""
        self._write(half, [codec.CANCEL_SENDER], fin=True)

    def end_sender(self, half: SenderHalf, code: int) -> None:
        """Its control stream is reset."""
        if half.control is not None:
            self._outgoing.reset(half.control, code)

    # Of a receiver

    def acks(self, half: ReceiverHalf, ranges: tuple[int, ...]) -> None:
        """ACK_RELIABLE."""
        self._write(half, [codec.encode_ack_reliable(ranges)])

    def ack_nacks(self, half: ReceiverHalf, ranges: tuple[int, ...]) -> None:
        """ACK_NACK_UNRELIABLE."""
        self._write(half, [codec.encode_ack_nack_unreliable(half.channel, ranges)])

    def close(self, half: ReceiverHalf) -> None:
        """Everything received is acked, and CLOSE_RECEIVER ends the stream."""
        frames: list[Any] = []
        ranges = half.numbers.take_ack()  # before CLOSE_RECEIVER, on the same stream (AQ-R22)
        if ranges:
            frames.append(codec.encode_ack_reliable(ranges))
        if half.unreliable is not None:
            varints = half.unreliable.take_last_acks()
            if varints:
                frames.append(codec.encode_ack_nack_unreliable(half.channel, varints))
        frames.append(codec.CLOSE_RECEIVER)
        self._write(half, frames, fin=True)

    def end_receiver(self, half: ReceiverHalf, code: int) -> None:
        """Its control stream is reset."""
        if half.control is not None:
            self._outgoing.reset(half.control, code)

    # Within

    def _write(
        self, half: SenderHalf | ReceiverHalf, frames: list[Any], *, fin: bool = False
    ) -> None:
        if half.control is None:
            half.control = SendStream(None, control=True)
            if isinstance(half, SenderHalf):
                half.control.speaker = half  # the channel ends if the peer stops it
            frames = [codec.encode_route_to(half.channel), *frames]
        self._outgoing.write(half.control, frames, fin=fin)
