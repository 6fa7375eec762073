"""What the halves of channels say, as frames: each dialect has one object that writes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from aqueduct.protocol.common.events import Headers

__all__ = ["FrameWriter"]


class FrameWriter(Protocol):
    """Writes the frames of all halves of one connection; it keeps no state of a half.

    A half is a SenderHalf or a ReceiverHalf.
    """

    def describe(self, channel: int) -> str:
        """A channel for people."""

    def can_say(self, half: Any) -> bool:
        """Whether a half may say something beside its messages now."""

    def open(self, half: Any) -> None:
        """A half that was made by its first frame, and has said nothing, says that it is there."""

    # Of a sender

    def message(
        self,
        half: Any,
        number: int,
        payload: Any,
        headers: Headers,
        attachments: Sequence[tuple[int, Headers]],
    ) -> list[Any]:
        """The buffers of one message. Raises LocalProtocolError for what cannot be encoded."""

    def begin(self, half: Any) -> list[Any]:
        """What stands before the first message of a stream or datagram."""

    def oneshot(self, half: Any, message: list[Any]) -> list[Any]:
        """The whole stream of a oneshot's message; the sender has finished with it."""

    def announce(self, half: Any, count: int) -> None:
        """So many more datagrams were sent."""

    def finish(self, half: Any) -> None:
        """No more messages; everything sent is counted."""

    def stream_opened(self, half: Any) -> None:
        """A message that waited has its stream, and ``finish_waits``."""

    def cancel(self, half: Any) -> None:
        """The channel is abandoned."""

    def end_sender(self, half: Any, code: int) -> None:
        """The sender is gone; ``code``: for streams that are reset."""

    # Of a receiver

    def acks(self, half: Any, ranges: tuple[int, ...]) -> None:
        """Reliable messages arrived: gap, range, gap, range ... from 0."""

    def ack_nacks(self, half: Any, ranges: tuple[int, ...]) -> None:
        """Unreliable messages arrived or did not: ack, nack, ack ... from where the last ended."""

    def close(self, half: Any) -> None:
        """All that arrived is acknowledged, and the receiver is closed."""

    def end_receiver(self, half: Any, code: int) -> None:
        """The receiver is gone without a close; ``code``: for streams that are reset."""
