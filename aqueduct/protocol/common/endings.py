"""How channels end: by their peer's frames, by their user, or lost in transit (AQ-R27)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from aqueduct._speedups.channels.receiver import Received
from aqueduct.protocol.common.context import ConnectionContext
from aqueduct.protocol.common.events import Writable
from aqueduct.protocol.common.receiver import ReceiverHalf
from aqueduct.protocol.common.registry import Half, Registry
from aqueduct.protocol.common.sender import Mode, SenderHalf
from aqueduct.protocol.common.state import ReceiverInput

__all__ = ["Endings"]


class Endings:
    """What the ends of halves lead to, and what acknowledgements do on the way there."""

    def __init__(
        self,
        shared: ConnectionContext,
        registry: Registry,
        abandon: Callable[[Any, ReceiverHalf], None],
        *,
        lose_dropped: bool = False,
    ) -> None:
        """``abandon``: what becomes of a stream of the peer that is about an ended receiver.

        ``lose_dropped``: whether channels in the undelivered messages of a lost one are lost, too
        (AQ0-R6), instead of closed or cancelled.
        """
        self._shared = shared
        self._registry = registry
        self._abandon = abandon
        self._lose_dropped = lose_dropped
        self._ample = shared.config.flow.channel_high_water >> 1

    # The peer's frames

    def finish(self, half: ReceiverHalf, count: int) -> None:
        """The sender has sent so many reliable messages, and sends no more."""
        half.finish(count)
        if half.error is not None:
            self.half_ended(half)

    def cancel(self, half: ReceiverHalf, what: ReceiverInput = ReceiverInput.CANCEL) -> None:
        """The sender is cancelled; ``what``: CANCEL or RESET."""
        # What is dropped first, or its channels would look lost to the peer (AQ-R20, AQ-R26).
        self.drop(half.cancel(what))
        half.cancelled()
        self.half_ended(half)

    def acked(self, half: SenderHalf, block: bytes) -> None:
        """Reliable messages are acknowledged."""
        self._registry.reached(half.acked(block))
        if self._shared.blocked:
            self.unblock([half])

    def ack_nacked(self, half: SenderHalf, block: bytes) -> None:
        """Unreliable messages are acknowledged, or will never be taken."""
        reached, lost = half.ack_nacked(block)
        self._registry.reached(reached)
        self.lose(lost)
        if self._shared.blocked:
            self.unblock([half])

    def receiver_closed(self, half: SenderHalf) -> None:
        """The receiver is closed: what it did not acknowledge is lost."""
        lost = half.receiver_closed()
        self._registry.sender_closed(half)
        self._shared.blocked.pop(half, None)
        self.lose(lost)

    def forgotten(self, half: Half) -> None:
        """The peer says that the channel is lost."""
        links, dropped = self._registry.lose(half, tell_peer=False)
        self.abandon_streams(half)
        if isinstance(half, SenderHalf):
            self._shared.blocked.pop(half, None)
        self.lose(links + self._lost_with(dropped))

    # What the application does

    def close_receiver(self, half: ReceiverHalf, error: Any = None) -> None:
        """The application reads no more of this channel (AQ-43)."""
        self.drop(self._close(half, error))

    def release(self, half: Half) -> None:
        """A half without a user: its receiver is closed, its sender cancelled (AQ-R26)."""
        self.drop(self._release(half))

    # What follows

    def half_ended(self, half: ReceiverHalf) -> None:
        """A receiver closed by itself: it leaves the tables, its sequences are ignored."""
        self._registry.receiver_closed(half)
        self.abandon_streams(half)

    def lose(self, channels: list[int]) -> None:
        """Works the cascade with an explicit list (AQ-R27.8)."""
        while channels:
            channel = channels.pop()
            half = self._registry.known(channel)
            if half is None:
                self._registry.tell_lost(channel, None)  # its own half ended before (AQ-R27.6)
                continue
            links, dropped = self._registry.lose(half, tell_peer=True)
            self.abandon_streams(half)
            if isinstance(half, SenderHalf):
                self._shared.blocked.pop(half, None)
            channels.extend(links)
            channels.extend(self._lost_with(dropped))

    def drop(self, dropped: Sequence[Received]) -> None:
        """Undelivered messages: their attachments are closed or cancelled (AQ-R26)."""
        work = list(dropped)
        while work:
            for half, _ in work.pop().attachments:
                work.extend(self._release(half))

    def drop_lost(self, dropped: Sequence[Received]) -> None:
        """Undelivered messages of a channel that is lost."""
        self.lose(self._lost_with(dropped))

    def _lost_with(self, dropped: Sequence[Received]) -> list[int]:
        """Drops the undelivered messages of a lost channel; returns what is lost with them."""
        if not self._lose_dropped:
            self.drop(dropped)
            return []
        channels: list[int] = []
        work = list(dropped)
        while work:
            for half, _ in work.pop().attachments:
                channel = half.channel
                if self._registry.live(channel) is half:
                    channels.append(channel)
                elif isinstance(half, ReceiverHalf):
                    work.extend(half.close())
        return channels

    def _release(self, half: Half) -> list[Received]:
        if isinstance(half, SenderHalf):
            if half.error is None and half.state.name == "OPEN":
                half.cancel()
            return []
        return self._close(half)

    def _close(self, half: ReceiverHalf, error: Any = None) -> list[Received]:
        alive = half.error is None
        dropped = half.close(error)
        if alive:
            self.half_ended(half)
        return dropped

    def abandon_streams(self, half: Half) -> None:
        """Its receiver has ended: the peer's streams that are about it are of no use."""
        if isinstance(half, ReceiverHalf):
            for stream in tuple(half.streams):
                self._abandon(stream, half)

    # Senders that wait for room

    def block(self, half: SenderHalf, mode: Mode, ample: bool) -> bool:
        """Whether ``half`` has to wait for room; then ``unblock`` tells it.

        Who sends without end waits for ``ample`` room: woken for each little of it, it would be
        woken for each message.
        """
        blocked = self._shared.blocked
        before = blocked.get(half)
        ample = ample and (before is None or before[1])
        if half.error is not None or half.has_room(mode):
            return False
        blocked[half] = mode, ample
        return True

    def unblock(self, halves: Sequence[SenderHalf | None]) -> None:
        """Tells those of ``halves`` that wait for room and now have it."""
        blocked = self._shared.blocked
        for half in halves:
            if half is None or half not in blocked:
                continue
            mode, ample = blocked[half]
            # Ample: so far below its own mark that several messages have room.
            if half.has_room(mode) and (not ample or half.queued <= self._ample):
                del blocked[half]
                self._shared.events.append(Writable(half))
