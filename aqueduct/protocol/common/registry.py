"""Which channels have state, and how state comes and goes: what is the same in both dialects."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from heapq import nsmallest
from typing import TypeAlias

from aqueduct.errors import ConnectionLost, LimitExceeded, LostInTransit, SequenceError
from aqueduct.protocol.common.context import ConnectionContext
from aqueduct.protocol.common.events import Headers
from aqueduct.protocol.common.frame_writer import FrameWriter
from aqueduct.protocol.common.receiver import Received, ReceiverHalf
from aqueduct.protocol.common.sender import SenderHalf
from aqueduct.protocol.common.tombstones import Tombstones

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


class Registry(ABC):
    """All channels of one side of one connection."""

    entrypoint: Half
    """The client's one sender, the server's one receiver at the start."""

    def __init__(self, shared: ConnectionContext, writer: FrameWriter) -> None:
        self._shared = shared
        self._writer = writer
        self._live: dict[int, Half] = {}
        shared.outgoing.live = self._live
        self._ended_early: dict[int, Half] = {}
        """Ended before the message that carries them came; delivered in that state (AQ-R26)."""
        self._pending_tables: dict[int, SenderHalf] = {}
        """Senders that ended while pending: their tables still decide (AQ-R27.7)."""
        self._destroyed = Tombstones(shared.config.limits.destroyed_ranges)
        self._attached = Tombstones(shared.config.limits.destroyed_ranges)

    def __len__(self) -> int:
        return len(self._live) + len(self._ended_early)

    # What a dialect says

    @abstractmethod
    def create(self, *, keep_sender: bool, is_oneshot: bool) -> Half:
        """A channel of ours, for an attachment that goes out now (AQ-R24: index at sending)."""

    @abstractmethod
    def created_here(self, channel: int) -> bool:
        """Whether the channel is of local creation."""

    def creator(self, channel: int) -> int:
        """Who created a channel: 0 the client, 1 the server."""
        side = self._shared.side
        return side if self.created_here(channel) else 1 - side

    @abstractmethod
    def _sends(self, channel: int) -> bool:
        """Whether this side has the sender half of a channel."""

    @abstractmethod
    def tell_lost(self, channel: int, half: Half | None) -> None:
        """The peer is told that a channel is lost; ``half``: here, if it had not ended before."""

    @abstractmethod
    def check_headers(self, attachments: Sequence[Attach]) -> None:
        """Raises LocalProtocolError if the headers of attachments cannot go."""

    def rtt_measured(self, rtt: float) -> None:  # noqa: B027 - most do not care
        """The smoothed round trip, seconds."""

    def kept_until(self) -> float | None:
        """When ``work_due`` has something to do; None: never."""
        return None

    def work_due(self, now: float) -> None:  # noqa: B027 - most have nothing
        """Does what is due, beside what halves owe."""

    @property
    def unsaid(self) -> bool:
        """Whether something waits that a close lets out first."""
        return self._shared.outgoing.waiting > 0

    @abstractmethod
    def write_closes(self) -> None:
        """What patient receivers owe leaves now."""

    # Creation

    def live(self, channel: int) -> Half | None:
        """The half of a channel, while it lives."""
        return self._live.get(channel)

    def discard(self, half: Half | None) -> None:
        """A channel of ours whose message never went out: its index stays a hole (AQ-R24)."""
        if half is not None:
            self._live.pop(half.channel, None)

    def attached(
        self, attachments: Sequence[tuple[int, bytes | Headers]]
    ) -> tuple[tuple[Half, bytes | Headers], ...]:
        """The halves of a received message's attachments (AQ-42)."""
        self._shared.work += len(attachments)
        halves: list[tuple[Half, bytes | Headers]] = []
        for channel, headers in attachments:
            if channel in self._attached:
                raise SequenceError(f"{self._writer.describe(channel)} was attached twice (AQ-R4)")
            self._attached.add(channel)
            half = self._live.get(channel) or self._ended_early.pop(channel, None)
            if half is None:
                if channel in self._destroyed:
                    half = self._make_lost(channel)
                else:
                    self._check_limit()
                    half = self._make_remote(channel, given=True)
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
        """It has closed, and said so, or will."""
        self._remove(half)

    def sender_closed(self, half: SenderHalf) -> None:
        """Its receiver has closed."""
        self._remove(half)
        if not half.accessible and half.links is not None and half.links.acked:
            self._pending_tables[half.channel] = half

    def lose(self, half: Half, *, tell_peer: bool) -> tuple[list[int], list[Received]]:
        """Lost in transit or forgotten. Returns (channels lost with it, messages dropped)."""
        alive = self._live.pop(half.channel, None)
        self._pending_tables.pop(half.channel, None)
        if not self.created_here(half.channel):
            self._destroyed.add(half.channel)
        if tell_peer:
            self.tell_lost(half.channel, alive)
        if isinstance(half, SenderHalf):
            return half.lost(), []
        return [], half.lost()

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
        if not self.created_here(half.channel):
            self._destroyed.add(half.channel)
            if not half.given:
                self._ended_early[half.channel] = half

    def _make(self, channel: int, *, accessible: bool, given: bool, assured: bool = False) -> Half:
        half: Half
        if self._sends(channel):
            half = SenderHalf(
                self._shared, self._writer, channel, accessible=accessible, given=given
            )
        else:
            half = ReceiverHalf(self._shared, self._writer, channel, given=given, assured=assured)
        self._live[channel] = half
        return half

    def _make_remote(self, channel: int, *, given: bool) -> Half:
        """A half of a channel that the peer has created."""
        return self._make(channel, accessible=True, given=given)

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
