"""Which channels have state: ROUTE_TO, and what answers for those that are gone (section 3.5)."""

from __future__ import annotations

from collections.abc import Sequence

from aqueduct._speedups import channels as codec
from aqueduct.errors import LocalProtocolError, SequenceError
from aqueduct.protocol.channels import ids
from aqueduct.protocol.channels.forgetting import Forgetting
from aqueduct.protocol.channels.frame_writer import ChannelFrameWriter
from aqueduct.protocol.common.context import ConnectionContext
from aqueduct.protocol.common.receiver import ReceiverHalf
from aqueduct.protocol.common.registry import Attach, Half, Registry
from aqueduct.protocol.common.send_streams import SendStream

__all__ = ["ChannelRegistry"]


class ChannelRegistry(Registry):
    """All channels of one side of one connection, and its FORGET_CHANNELs."""

    def __init__(self, shared: ConnectionContext, forgetting: Forgetting) -> None:
        super().__init__(shared, ChannelFrameWriter(shared.outgoing))
        self._forgetting = forgetting
        self._counters = ids.Counters(shared.side)
        self.entrypoint = self._make(ids.ENTRYPOINT, accessible=True, given=True, assured=True)

    def create(self, *, keep_sender: bool, is_oneshot: bool) -> Half:
        """A channel of ours, for an attachment that goes out now (AQ-R24: index at sending)."""
        side = self._shared.side
        channel = self._counters.take(side if keep_sender else 1 - side, is_oneshot)
        return self._make(channel, accessible=False, given=True, assured=True)

    def check_headers(self, attachments: Sequence[Attach]) -> None:
        """Raises LocalProtocolError above Limits.block_bytes."""
        # The peer's limits are taken to be ours, as with the size of a frame.
        limit = self._shared.config.limits.block_bytes
        size = sum(9 + len(codec.encode_connection_headers(each.headers)) for each in attachments)
        if size > limit:
            raise LocalProtocolError(
                f"the attachments of a message take up to {size} bytes with their headers; "
                f"Limits.block_bytes is {limit}"
            )

    def created_here(self, channel: int) -> bool:
        """Whether the channel is of local creation."""
        return channel & ids.CREATOR == self._shared.side

    def routed(self, channel: int) -> Half | None:
        """The half that ROUTE_TO names; None when the rest of the sequence is to be ignored."""
        half = self._live.get(channel)
        if half is not None:
            return half
        if ids.creator(channel) == self._shared.side:
            if not self._counters.handed_out(channel):
                raise SequenceError(f"{ids.describe(channel)} was never created here (AQ-R4)")
            self.tell_lost(channel, None)  # AQ-40
            return None
        if channel in self._destroyed:
            return None  # AQ-46
        self._check_limit()
        half = self._make(channel, accessible=True, given=False)
        self._shared.ack_due.append(
            (self._shared.now + self._shared.config.timing.ack_delay, half)  # AQ-R25
        )
        return half

    def receiver_closed(self, half: ReceiverHalf) -> None:
        """CLOSE_RECEIVER was sent for it."""
        super().receiver_closed(half)
        if half.channel & ids.CREATOR == self._shared.side:
            self._forgetting.closed(half.channel, self._shared.now)

    def write_closes(self) -> None:
        """What patient receivers owe leaves now: all that came is acknowledged, and their close."""
        shared = self._shared
        for half in shared.closing:
            self._writer.close(half)
            if half.channel & ids.CREATOR == shared.side:
                self._forgetting.closed(half.channel, shared.now)
        shared.closing.clear()
        shared.close_due.clear()

    def tell_lost(self, channel: int, half: Half | None) -> None:
        """FORGET_CHANNEL goes out, now or when it may (AQ-R23, AQ-R24)."""
        self.write_closes()
        if self._forgetting.ask(channel, self._shared.now):
            self.write_forget(channel)

    def write_forget(self, channel: int) -> None:
        """FORGET_CHANNEL goes out."""
        frames = codec.encode_route_to(channel) + codec.FORGET_CHANNEL
        self._shared.outgoing.write(SendStream(None, control=True), [frames], fin=True)

    def rtt_measured(self, rtt: float) -> None:
        """It decides when FORGET_CHANNEL may follow a close (AQ-R24)."""
        self._forgetting.rtt = rtt

    def kept_until(self) -> float | None:
        """When a FORGET_CHANNEL is due."""
        kept = self._forgetting.kept
        return kept[0][0] if kept else None

    def work_due(self, now: float) -> None:
        """The FORGET_CHANNELs that were kept until now."""
        for channel in self._forgetting.due(now):
            self.write_forget(channel)

    # Within

    def _sends(self, channel: int) -> bool:
        return channel >> 1 & 1 == self._shared.side
