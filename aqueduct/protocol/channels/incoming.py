"""The peer's streams: one frame sequence each, decoded as far as admission allows."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

from aqueduct._speedups.codec import Decoder, MessageHead
from aqueduct.config import Config

if TYPE_CHECKING:
    from aqueduct.protocol.channels.receiving import ReceiverHalf
    from aqueduct.protocol.channels.sending import SenderHalf

__all__ = ["SMALL", "Handlers", "InStream"]

Handlers: TypeAlias = "dict[int, Callable[[InStream, Any], None]]"

SMALL = 16 << 10
"""Payloads up to this are admitted without asking while there is room for many of them."""


class InStream:
    """One stream of the peer."""

    __slots__ = (
        "begun",
        "decoder",
        "fin",
        "granted",
        "half",
        "handlers",
        "head",
        "held",
        "ignoring",
        "limit",
        "number",
        "partial",
    )

    def __init__(
        self, number: int, config: Config, handlers: Handlers, *, from_server: bool
    ) -> None:
        limits = config.limits
        self.number = number
        self.decoder = Decoder(
            from_server=from_server,
            frame_limit=limits.frame_bytes,
            header_limit=limits.header_bytes,
            attachment_limit=limits.attachments,
        )
        self.handlers = handlers
        """What each frame does, by tag; they change with FINISH_SENDER (AQ-R18)."""
        self.half: ReceiverHalf | SenderHalf | None = None
        """What ROUTE_TO named, while it has state."""
        self.begun = False
        """Whether the first frame was seen and checked (AQ-28, AQ-R7)."""
        self.fin = False
        self.ignoring = False
        """The rest is dropped: the channel has no state, or the stream was stopped (AQ-R24)."""
        self.head: MessageHead | None = None
        """A message that waits for admission."""
        self.held = False
        """Ended, and its bytes still wait here."""
        self.limit = config.flow.initial_window
        """What the peer may send, from the start of the stream (design: Flow)."""
        self.granted = 0
        """Read-ahead beyond the initial window, charged to the budget until the stream ends."""
        self.partial = -1
        """Payload bytes of the admitted message that is still landing; -1: none."""

    def wanted_limit(self, config: Config) -> int:
        """The credit that this stream should have now."""
        flow = config.flow
        decoder = self.decoder
        ahead = min(decoder.remaining, flow.admitted_window)
        limit: int = decoder.consumed + ahead + flow.initial_window + self.granted
        return limit
