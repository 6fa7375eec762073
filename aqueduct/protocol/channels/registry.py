"""Which channels have state, and how state comes and goes (section 3.5, AQ-R24 to AQ-R27)."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import nsmallest
from typing import TypeAlias

from aqueduct._speedups import channels as codec
from aqueduct.errors import ConnectionLost, LimitExceeded, LostInTransit, SequenceError
from aqueduct.protocol.channels import ids
from aqueduct.protocol.channels.context import ConnectionContext
from aqueduct.protocol.channels.events import Headers
from aqueduct.protocol.channels.receiver import Received, ReceiverHalf
from aqueduct.protocol.channels.send_streams import SendStream
from aqueduct.protocol.channels.sender import SenderHalf
from aqueduct.protocol.channels.tombstones import Forgetting, Tombstones

__all__ = ["Attach", "Half", "Registry"]

Half: TypeAlias = "ReceiverHalf | SenderHalf"


class Attach:
    """One attachment to a message to be sent: which half stays here, and its channel headers."""

    __slots__ = ("half", "headers", "is_oneshot", "keep_sender")

    def __init__(self, *, keep_sender: bool, is_oneshot: bool, headers: Headers = ()) -> None:
        self.keep_sender = keep_sender
        """True: the peer gets the receiver and we keep the sender; False: the reverse."""
        self.is_oneshot = is_oneshot
        self.headers = headers
        self.half: Half | None = None
        """The half that stays here, once the message is sent."""


class Registry:
    """All channels of one side of one connection."""

    def __init__(self, shared: ConnectionContext, forgetting: Forgetting) -> None:
        self._shared = shared
        self._forgetting = forgetting
        self._counters = ids.Counters(shared.side)
        self._live: dict[int, Half] = {}
        shared.outgoing.live = self._live
        self._ended_early: dict[int, Half] = {}
        """Ended before the message that carries them came; delivered in that state (AQ-R26)."""
        self._pending_tables: dict[int, SenderHalf] = {}
        """Senders that ended while pending: their tables still decide (AQ-R27.7)."""
        self._destroyed = Tombstones(shared.config.limits.destroyed_ranges)
        self._attached = Tombstones(shared.config.limits.destroyed_ranges)
        self.entrypoint = self._make(ids.ENTRYPOINT, accessible=True, given=True, assured=True)

    def __len__(self) -> int:
        return len(self._live) + len(self._ended_early)

    # Creation

    def create(self, *, keep_sender: bool, is_oneshot: bool) -> Half:
        """A channel of ours, for an attachment that goes out now (AQ-R24: index at sending)."""
        side = self._shared.side
        channel = self._counters.take(side if keep_sender else 1 - side, is_oneshot)
        return self._make(channel, accessible=False, given=True, assured=True)

    def live(self, channel: int) -> Half | None:
        """The half of a channel, while it lives."""
        return self._live.get(channel)

    def discard(self, half: Half | None) -> None:
        """A channel of ours whose message never went out: its index stays a hole (AQ-R24)."""
        if half is not None:
            self._live.pop(half.channel, None)

    def routed(self, channel: int) -> Half | None:
        """The half that ROUTE_TO names; None when the rest of the sequence is to be ignored."""
        half = self._live.get(channel)
        if half is not None:
            return half
        if ids.creator(channel) == self._shared.side:
            if not self._counters.handed_out(channel):
                raise SequenceError(f"{ids.describe(channel)} was never created here (AQ-R4)")
            self.forget(channel)  # AQ-40
            return None
        if channel in self._destroyed:
            return None  # AQ-46
        self._check_limit()
        half = self._make(channel, accessible=True, given=False)
        self._shared.ack_due.append(
            (self._shared.now + self._shared.config.timing.ack_delay, half)  # AQ-R25
        )
        return half

    def attached(
        self, attachments: Sequence[tuple[int, bytes | Headers]]
    ) -> tuple[tuple[Half, bytes | Headers], ...]:
        """The halves of a received message's attachments (AQ-42)."""
        self._shared.work += len(attachments)
        halves: list[tuple[Half, bytes | Headers]] = []
        for channel, headers in attachments:
            if channel in self._attached:
                raise SequenceError(f"{ids.describe(channel)} was attached twice (AQ-R4)")
            self._attached.add(channel)
            half = self._live.get(channel) or self._ended_early.pop(channel, None)
            if half is None:
                if channel in self._destroyed:
                    half = self._make_lost(channel)
                else:
                    self._check_limit()
                    half = self._make(channel, accessible=True, given=True)
            half.given = True
            halves.append((half, headers))
        return tuple(halves)

    # Ends

    def ended_early(self, channel: int) -> bool:
        """Whether the channel ended before the message that carries it came (AQ-R26)."""
        return channel in self._ended_early

    def forget_early_end(self, channel: int) -> list[Received]:
        """That message will never come; returns what was buffered for the channel."""
        half = self._ended_early.pop(channel, None)
        return half.close() if isinstance(half, ReceiverHalf) else []

    def receiver_closed(self, half: ReceiverHalf) -> None:
        """CLOSE_RECEIVER was sent for it."""
        self._remove(half)
        if half.channel & ids.CREATOR == self._shared.side:
            self._forgetting.closed(half.channel, self._shared.now)

    def write_closes(self) -> None:
        """What patient receivers owe leaves now: all that came is acknowledged, and their close."""
        shared = self._shared
        for half in shared.closing:
            half.write_close()
            if half.channel & ids.CREATOR == shared.side:
                self._forgetting.closed(half.channel, shared.now)
        shared.closing.clear()
        shared.close_due.clear()

    def sender_closed(self, half: SenderHalf) -> None:
        """CLOSE_RECEIVER came for it."""
        self._remove(half)
        if not half.accessible and half.links is not None and half.links.acked:
            self._pending_tables[half.channel] = half

    def lose(self, half: Half, *, tell_peer: bool) -> tuple[list[int], list[Received]]:
        """Lost in transit or forgotten. Returns (channels lost with it, messages dropped)."""
        self._live.pop(half.channel, None)
        self._pending_tables.pop(half.channel, None)
        if ids.creator(half.channel) != self._shared.side:
            self._destroyed.add(half.channel)
        if tell_peer:
            self.forget(half.channel)
        if isinstance(half, SenderHalf):
            return half.lost(), []
        return [], half.lost()

    def forget(self, channel: int) -> None:
        """FORGET_CHANNEL goes out, now or when it may (AQ-R23, AQ-R24)."""
        self.write_closes()
        if self._forgetting.ask(channel, self._shared.now):
            self.write_forget(channel)

    def write_forget(self, channel: int) -> None:
        """FORGET_CHANNEL goes out."""
        frames = codec.encode_route_to(channel) + codec.FORGET_CHANNEL
        self._shared.outgoing.write(SendStream(None, control=True), [frames], fin=True)

    def known(self, channel: int) -> Half | None:
        """The half, alive or ended while its tables still matter."""
        return self._live.get(channel) or self._pending_tables.get(channel)

    def reached(self, channels: list[int]) -> None:
        """These became accessible, and what hangs on them (AQ-R27.3)."""
        while channels:
            channel = channels.pop()
            half = self._live.get(channel) or self._pending_tables.pop(channel, None)
            if isinstance(half, SenderHalf) and not half.accessible:
                half.accessible = True
                if half.links is not None:
                    channels.extend(half.links.take_acked())

    def lowest(self, count: int) -> list[Half]:
        """At most ``count`` halves with state, by id."""
        found = nsmallest(count, self._live) if count < len(self._live) else sorted(self._live)
        return [self._live[channel] for channel in found[:count]]

    def pending(self) -> set[int]:
        """Channels of ours that are neither accessible nor lost (AQ-R27.1)."""
        return {
            channel
            for halves in (self._live, self._pending_tables)
            for half in halves.values()
            if isinstance(half, SenderHalf) and half.links is not None
            for channel in half.links.channels()
        }

    def disconnect(self, error: ConnectionLost, *, draining: bool) -> None:
        """Every handle reads ``error`` (AQ-R27.9)."""
        halves = list(self._live.values())
        self._live.clear()
        self._ended_early.clear()
        self._pending_tables.clear()
        for half in halves:
            if isinstance(half, SenderHalf):
                half.disconnected(error, draining=draining)
            else:
                half.disconnected(error)

    # Within

    def _remove(self, half: Half) -> None:
        self._live.pop(half.channel, None)
        if half.channel & ids.CREATOR != self._shared.side:
            self._destroyed.add(half.channel)
            if not half.given:
                self._ended_early[half.channel] = half

    def _make(self, channel: int, *, accessible: bool, given: bool, assured: bool = False) -> Half:
        half: Half
        if channel >> 1 & 1 == self._shared.side:  # SENDER
            half = SenderHalf(self._shared, channel, accessible=accessible, given=given)
        else:
            half = ReceiverHalf(self._shared, channel, given=given, assured=assured)
        self._live[channel] = half
        return half

    def _make_lost(self, channel: int) -> Half:
        half = self._make(channel, accessible=True, given=False)
        del self._live[channel]
        half.lost()
        half.error = LostInTransit("the peer forgot this channel before its message came")
        return half

    def _check_limit(self) -> None:
        limit = self._shared.config.limits.channels
        if len(self) >= limit:
            raise LimitExceeded(f"the peer opened more than {limit} channels (Limits.channels)")
