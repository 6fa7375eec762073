"""Which channels have state in the control-stream draft, and how control streams find them."""

from __future__ import annotations

from collections.abc import Sequence

from aqueduct._speedups.channels.sender import SendStream
from aqueduct._speedups.control_streams import control_encoder as encoder
from aqueduct.errors import ConnectionLost, LocalProtocolError, SequenceError
from aqueduct.protocol.common.context import ConnectionContext
from aqueduct.protocol.common.receiver import ReceiverHalf
from aqueduct.protocol.common.registry import Attach, Half, Registry
from aqueduct.protocol.common.state import SenderState
from aqueduct.protocol.control_streams import ids
from aqueduct.protocol.control_streams.frame_writer import ControlFrameWriter

__all__ = ["ControlRegistry"]


class ControlRegistry(Registry):
    """All channels of one side of one connection."""

    def __init__(self, shared: ConnectionContext, writer: ControlFrameWriter) -> None:
        super().__init__(shared, writer)
        self._frames = writer
        self._next = dict.fromkeys(range(8), 0)
        self._next[ids.ENTRYPOINT] = 1  # index 0 is the entrypoint
        self._unattached: dict[int, Half] = {}
        """Halves that ended before the peer opened their control stream, and owe their last frame:
        receivers of ours (AQ0-29), and while a close waits, senders that had finished (AQ0-27)."""
        self._attached.add(ids.ENTRYPOINT)
        self.entrypoint = self._make(ids.ENTRYPOINT, accessible=True, given=True, assured=True)

    def __len__(self) -> int:
        return super().__len__() + len(self._unattached)

    def create(self, *, keep_sender: bool, is_oneshot: bool) -> Half:
        """A channel of ours, for an attachment that goes out now."""
        side = self._shared.side
        space = ids.make(side, side if keep_sender else 1 - side, is_oneshot, 0)
        number = self._next[space]
        self._next[space] = number + 1
        return self._make(space | number << 3, accessible=False, given=True, assured=True)

    def created_here(self, channel: int) -> bool:
        """Whether the channel is of local creation."""
        return ids.creator(channel) == self._shared.side

    def check_headers(self, attachments: Sequence[Attach]) -> None:
        """LocalProtocolError: the draft has no headers on attachments."""
        raise LocalProtocolError(
            "attachments of the control-stream draft have no headers; put them in the payload, or "
            "connect without dialect=control-streams"
        )

    def received(self, channel: int) -> ReceiverHalf | None:
        """The receiver of a message; None: it is to be discarded (AQ0-23, AQ0-R14)."""
        half = self._live.get(channel)
        if half is None:
            if self.created_here(channel):
                self._check_handed_out(channel)
                return None
            if channel in self._destroyed:
                return None
            self._check_limit()
            half = self._make_remote(channel, given=False)
        if not isinstance(half, ReceiverHalf):
            raise SequenceError(f"a message came on {ids.describe(channel)}, which is sent here")
        return half

    def open_entrypoint(self) -> None:
        """A server has said its headers: the entrypoint's control stream follows (AQ0-R13)."""
        self._frames.open(self.entrypoint)
        self._frames.attached(self.entrypoint)  # which may be closed by now

    def attach(self, channel: int, stream: SendStream) -> Half | None:
        """The half that a control stream of the peer is for; None: it is lost (AQ0-25).

        ``stream`` is this side's direction.
        """
        self._check_handed_out(channel)
        half = self._live.get(channel) or self._unattached.pop(channel, None)
        if half is None or half.control is not None:
            return None
        half.control = stream
        self._frames.attached(half)
        return half

    def closed_lost(self, channel: int) -> None:
        """ClosedChannelLost for a channel without state here: no message of it counts any more."""
        if self.created_here(channel):
            raise SequenceError(
                f"ClosedChannelLost for {ids.describe(channel)}, which was created here (AQ0-R11)"
            )
        self._destroyed.add(channel)

    def receiver_closed(self, half: ReceiverHalf) -> None:
        """It has said so, or will once its control stream is attached."""
        super().receiver_closed(half)
        if half.control is None and self.created_here(half.channel):
            self._unattached[half.channel] = half

    def clear(self) -> None:
        """What halves that have ended still owe is owed no more."""
        self._unattached.clear()

    def owes(self, channel: int) -> bool:
        """Whether a half that has ended waits for its control stream."""
        return channel in self._unattached

    @property
    def unsaid(self) -> bool:
        """Whether streams wait, or a half owes its last frame until its control stream is there."""
        waits = super().unsaid or bool(self._unattached)
        return waits or any(map(_owes_finish, self._live.values()))

    def disconnect(self, error: ConnectionLost, *, draining: bool) -> None:
        """Every handle reads ``error``; if it drains, what is ``unsaid`` still goes out."""
        finished = {half.channel: half for half in self._live.values() if _owes_finish(half)}
        super().disconnect(error, draining=draining)
        if draining:
            self._unattached.update(finished)
        else:
            self._unattached.clear()

    def tell_lost(self, channel: int, half: Half | None) -> None:
        """ClosedChannelLost, for a half that has ceased (AQ0-33); others reset their stream.

        So does a sender that has finished or reset its direction, which says no more. A half that
        was never attached says so when the peer opens its control stream. Of channels of the peer
        there is nothing to be told so (AQ0-R11).
        """
        if not self.created_here(channel):
            return
        control = None if half is None else half.control
        silent = half is None or (control is not None and (control.fin or control.dead))
        if self._unattached.pop(channel, None) is None and silent:
            self._say_lost(channel)

    def write_closes(self) -> None:
        """What patient receivers owe leaves now."""
        shared = self._shared
        for half in shared.closing:
            self._writer.close(half)
        shared.closing.clear()
        shared.close_due.clear()

    # Within

    def _say_lost(self, channel: int) -> None:
        frame = encoder.encode_closed_channel_lost(channel)
        self._shared.outgoing.write(SendStream(None, control=True), [frame], fin=True)

    def _sends(self, channel: int) -> bool:
        return ids.sender(channel) == self._shared.side

    def _make_remote(self, channel: int, *, given: bool) -> Half:
        half = super()._make_remote(channel, given=given)
        self._frames.open(half)
        return half

    def _check_handed_out(self, channel: int) -> None:
        if ids.index(channel) >= self._next[ids.space(channel)]:
            raise SequenceError(f"{ids.describe(channel)} was never created here (AQ0-R14)")


def _owes_finish(half: Half) -> bool:
    return half.control is None and half.state is SenderState.FINISHED
