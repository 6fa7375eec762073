"""What a receiver has to tell the sender, and when."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from aqueduct._speedups.relink import packets
from aqueduct.config import Relink as Settings
from aqueduct.errors import LimitExceeded
from aqueduct.protocol.relink.outbox import Outbox
from aqueduct.protocol.relink.receiving import ReceiveChannel
from aqueduct.protocol.relink.sending import SEQUENCE_MASK
from aqueduct.protocol.relink.state import ChannelState

__all__ = ["Acknowledger"]

_CONFIRMED_FROM: Final = 256
"""Runs of results of one channel from which a ping asks whether the sender has read them."""


class Acknowledger:
    """The channels that have something to tell. ``due``: it leaves with what is taken next.

    ``since``: for how long the first of them waits, in seconds of the link's clock; None: nothing
    does. Only sequence packets are sent: a reader with a cursor for each type of packet finds the
    same messages (RL-R7).
    """

    def __init__(self, settings: Settings, id_size: int, outbox: Outbox) -> None:
        """``id_size``: of the peer's channels, bytes."""
        self.due = False
        self.since: float | None = None
        self._settings = settings
        self._id_size = id_size
        self._outbox = outbox
        self._waiting: dict[int, ReceiveChannel] = {}
        self._many_results: dict[int, ReceiveChannel] = {}
        """Channels that keep results for which a ping is worth while."""
        self._confirming: list[ReceiveChannel] = []

    def begin(self, channels: Iterable[ReceiveChannel]) -> None:
        """Another connection, on which nothing was told, or none."""
        self.due, self.since = False, None
        self._waiting.clear()
        self._confirming.clear()
        for channel in channels:
            channel.begin_connection()
            self._note_results(channel)

    def add(self, channel: ReceiveChannel, now: float, *, at_once: bool = False) -> None:
        """A channel has something to tell, at once or within ``Relink.ack_delay``."""
        self._waiting[channel.identifier] = channel
        self._note_results(channel)
        if self.since is None:
            self.since = now
        if (
            at_once
            or not self._settings.ack_delay
            or channel.untold_bytes >= self._settings.ack_bytes
        ):
            self.due = True

    @property
    def ready(self) -> bool:
        """Whether ``tell_all`` has something that is due."""
        return self.due and bool(self._waiting)

    def tell_all(self) -> None:
        """Queues everything that waits."""
        for channel in self._waiting.values():
            self.tell(channel)
        self._waiting.clear()
        self.due, self.since = False, None

    def tell(self, channel: ReceiveChannel) -> None:
        """Queues all that there is to tell of a channel."""
        results = channel.untold_results()
        consumed, received = channel.consumed, channel.received
        implied = consumed  # what the other acknowledgements say was received (RL-R9)
        if channel.transactional:
            implied = results[-1][0] + 1 if results else channel.start
        first = channel.told_received == channel.start < received
        if first or received > max(channel.told_received, implied):
            self._acknowledge(channel, packets.RECEIVED, received - 1)
        if consumed > channel.told_consumed and not channel.transactional:
            self._acknowledge(channel, packets.CONSUMED, consumed - 1)
        for last, committed in results:
            kind = packets.COMMITTED if committed else packets.UNCOMMITTED
            self._acknowledge(channel, kind, last)
        channel.told_received, channel.told_consumed = received, consumed
        channel.untold_bytes = 0

    def tell_closed(self, identifier: int) -> None:
        """Queues the answer to a close. LimitExceeded: the peer reads none of them."""
        self._waiting.pop(identifier, None)
        self._many_results.pop(identifier, None)
        waiting, limit = len(self._outbox.urgent), self._settings.unanswered_pings
        if waiting > limit + self._settings.channels:
            raise LimitExceeded(
                f"{waiting} answers wait to leave; Relink.unanswered_pings and Relink.channels "
                "are the limit"
            )
        self._outbox.urgent.append(
            packets.encode_packet(packets.CHANNEL_ACK, packets.CLOSED, (identifier,), self._id_size)
        )

    def begin_confirming(self) -> bool:
        """Whether a ping is to ask now if the sender has read results. They are told before it."""
        if not self._many_results or self._confirming:
            return False
        self._confirming = list(self._many_results.values())
        self._many_results.clear()
        for channel in self._confirming:
            self.tell(channel)
            channel.confirming = channel.kept_results
        return True

    def confirm(self) -> None:
        """The ping was answered: those results need not be kept."""
        for channel in self._confirming:
            channel.confirm_results()
            self._note_results(channel)
        self._confirming.clear()

    def _note_results(self, channel: ReceiveChannel) -> None:
        if channel.kept_results >= _CONFIRMED_FROM and channel.state is not ChannelState.GONE:
            self._many_results[channel.identifier] = channel

    def _acknowledge(self, channel: ReceiveChannel, kind: int, last: int) -> None:
        self._outbox.urgent.append(
            packets.encode_packet(
                packets.SEQUENCE_ACK,
                kind,
                (channel.identifier,),
                self._id_size,
                sequence=last & SEQUENCE_MASK,
            )
        )
