"""The channels of this side: what they send, and what the peer acknowledges."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

from aqueduct._speedups.base.buffers import size_of
from aqueduct._speedups.relink import packets
from aqueduct.config import Relink as Settings
from aqueduct.errors import LocalProtocolError, SequenceError
from aqueduct.protocol.relink import events
from aqueduct.protocol.relink.cost import message_cost
from aqueduct.protocol.relink.outbox import Outbox, OutMessage
from aqueduct.protocol.relink.sending import SEQUENCE_MASK, Buffers, SendChannel, SentMessage
from aqueduct.protocol.relink.state import ChannelState, SendingInput

__all__ = ["Outgoing"]

_REMEMBERED: Final = 1024
"""Identifiers of channels that were closed of late."""


class Outgoing:
    """All channels of this side. ``flowing``: the link is up, so what is said may leave now.

    **The window** counts what all channels have sent and the peer has not consumed or answered. A
    channel of which the peer has nothing to do may send its next message above it, up to two
    windows. So a reader of one channel gets on, whatever lies on the others, and a receiver with
    room for two windows and a message never stops to read.

    **Undecided messages** of all transactions fit one window, as no receiver can do anything with
    them. The transaction that is open for longest has a window for itself: two that wait for each
    other's room would wait for ever.
    """

    def __init__(
        self,
        settings: Settings,
        id_size: int,
        *,
        transactional: bool,
        reported: list[events.Event],
        outbox: Outbox,
        start: int,
    ) -> None:
        self.channels: dict[int, SendChannel] = {}
        self.flowing = False
        self._settings = settings
        self._id_size = id_size
        self._transactional = transactional
        self._events = reported
        self._outbox = outbox
        self._start = start
        self.outstanding = 0
        """What messages cost that fill the window, of all channels."""
        self._undecided: dict[int, None] = {}
        """Channels with messages that are neither committed nor rolled back, the longest first."""
        self._undecided_cost = 0
        """Of all those messages."""
        self._closing = 0
        """Channels whose close is not answered."""
        self._waiting: dict[int, int] = {}
        """Channels that were refused room, and what for."""
        self._room_changed = False
        """Whether some of those may have it now."""
        self._named: set[int] = set()
        self._closed: OrderedDict[int, None] = OrderedDict()

    # What the application does

    def writable(self, channel: int, cost: int) -> bool:
        """Whether the window has room for a message of a channel; if not, WRITABLE follows."""
        room = self._has_room(channel, cost)
        if not room:
            self._waiting[channel] = cost
        return room

    def tell_writable(self) -> None:
        """Says WRITABLE of channels that have the room now that they were refused."""
        if not self._room_changed:
            return
        self._room_changed = False
        found = [each for each, cost in self._waiting.items() if self._has_room(each, cost)]
        for channel in found:
            del self._waiting[channel]
            self._events.append((events.WRITABLE, channel))

    def send(self, targets: Sequence[int], parts: Buffers) -> list[int]:
        """As ``Link.send``."""
        size = size_of(list(parts))
        cost = message_cost(size, len(parts))
        for target in targets:
            self._require_room(target, cost, len(targets))
        sent = []
        for target in targets:
            found = self.channels.get(target) or self._open(target)
            # Each has its own: one may receive it, or roll it back, before the others.
            message = SentMessage(parts, size)
            sent.append((found, found.add(message)))
            self.outstanding += cost
            if self._transactional:
                self._undecided[target] = None
                self._undecided_cost += cost
        if self.flowing and sent:
            one = message if len(sent) == 1 else SentMessage(parts, size)
            self._outbox.queue.append(OutMessage(one, sent))
        return [number for _, number in sent]

    def keep(self, channel: int, parts: Buffers, size: int) -> None:
        """A message of one part leaves by somebody else, who has asked whether it may."""
        found = self.channels.get(channel) or self._open(channel)
        message = SentMessage(parts, size, one_part=True)
        found.sent = found.add(message) + 1
        self.outstanding += message.cost
        self._outbox.unacknowledged += 1

    def decide(self, channel: int, last: int | None, *, commit: bool) -> None:
        """As ``Link.commit`` and ``Link.rollback``."""
        name = "commit" if commit else "rollback"
        if not self._transactional:
            raise LocalProtocolError(f"{name}: the channels of this side have no transactions")
        found = self.channels.get(channel)
        if found is None or not found.change(SendingInput.SEND):
            raise LocalProtocolError(f"{name}: channel {channel} is not open")
        last = found.next - 1 if last is None else last
        if last >= found.next:
            raise LocalProtocolError(
                f"{name} of message {last} on channel {channel}, where {found.next} were sent"
            )
        if last >= found.decided:
            self._decide(found, last, commit=commit)

    def close(self, channel: int) -> None:
        """As ``Link.close``."""
        found = self.channels.get(channel)
        if found is None or not found.change(SendingInput.CLOSE):
            return
        self._closing += 1
        self._drop_undecided(found)
        self._settle(found)

    def drop_undecided(self) -> None:
        """Rolls back what is neither committed nor rolled back."""
        for channel in self.channels.values():
            self._drop_undecided(channel)

    # What the peer and the connection do

    def stop(self) -> None:
        """The connection is gone."""
        self.flowing = False
        self._named.clear()

    def flow(self) -> None:
        """Messages may leave: those that are not received, then decisions about them."""
        self.flowing = True
        queue = self._outbox.queue
        for channel in self.channels.values():
            if channel.state is ChannelState.CLOSE_SENT:
                self._send_close(channel)
                continue
            for number, message in channel.rewind():
                queue.append(OutMessage(message, [(channel, number)]))
            for last, commit in channel.decisions():
                queue.append(self._decision(channel, last, commit=commit))

    def take_resume(self) -> None:
        """The peer has acknowledged all that it has (RL-R11). ``flow`` is to follow."""
        self._outbox.unacknowledged = 0
        for channel in tuple(self.channels.values()):
            channel.sent = channel.received  # the rest leaves again
            if channel.identifier in self._named:
                continue
            if channel.state is ChannelState.CLOSE_SENT:
                self._close_done(channel)  # the peer has dropped it (RL-R15)
            elif channel.acknowledged:
                raise SequenceError(
                    f"{channel!r}: the peer's resume says nothing of it, and has acknowledged "
                    f"{channel.received} messages before (RL-R11)"
                )

    def take_acknowledgement(self, identifier: int, kind: int, sequence: int | None) -> None:
        """A packet of the peer about a channel of this side."""
        channel = self.channels.get(identifier)
        if channel is None:
            if identifier not in self._closed:
                raise SequenceError(
                    f"an acknowledgement for channel {identifier}, which is not open (RL-R15)"
                )
            return
        if not self.flowing:
            self._named.add(identifier)
        if kind == packets.CLOSED:
            if channel.state is not ChannelState.CLOSE_SENT:
                raise SequenceError(f"{channel!r}: closed, and no close was sent (RL-18)")
            self._close_done(channel)
            return
        unreceived = max(channel.sent - channel.received, 0)
        outstanding, filling = channel.outstanding_cost, channel.filling
        if kind == packets.RECEIVED:
            if not channel.on_received(sequence) and not self.flowing:
                _check_backwards(channel, sequence)
        elif kind == packets.CONSUMED:
            channel.on_consumed(sequence)
        else:
            numbers = channel.on_result(sequence)
            if numbers is not None:
                committed = kind == packets.COMMITTED
                self._events.append((events.RESULT, identifier, numbers, committed))
        self._outbox.unacknowledged -= unreceived - max(channel.sent - channel.received, 0)
        self.outstanding += channel.outstanding_cost - outstanding
        self._room_changed = self._room_changed or channel.filling < filling
        self._settle(channel)

    # Questions

    @property
    def drained(self) -> bool:
        """Whether a shutdown may be sent: all channels are closed (RL-R16).

        With ids of no bytes the one channel is not closed: it has nothing outstanding.
        """
        if self._id_size:
            return not self.channels
        return all(channel.finished for channel in self.channels.values())

    @property
    def waits(self) -> bool:
        """Whether the peer has still to consume, to answer or to close something."""
        return self.outstanding > self._undecided_cost or self._closing > 0

    # Within

    def _has_room(self, channel: int, cost: int) -> bool:
        window, found = self._settings.window_bytes, self.channels.get(channel)
        if found is not None and found.filling >= self._settings.window_messages:
            return False
        outstanding, undecided = 0, 0
        if found is not None:
            outstanding, undecided = found.outstanding_cost, found.undecided_cost
        if self._undecided_cost and self._undecided_cost + cost > window:
            longest = next(iter(self._undecided))
            if channel != longest or undecided + cost > window:
                return False
        if self.outstanding + cost <= window:
            return True
        idle = outstanding == undecided  # the peer has nothing to do of this channel
        return idle and (self.outstanding <= window or self.outstanding + cost <= 2 * window)

    def _open(self, channel: int) -> SendChannel:
        found = SendChannel(channel, transactional=self._transactional, start=self._start)
        self.channels[channel] = found
        self._closed.pop(channel, None)
        return found

    def _require_room(self, channel: int, cost: int, targets: int) -> None:
        if not 0 <= channel < 1 << 8 * self._id_size:
            raise LocalProtocolError(
                f"channel {channel} does not fit an id of {self._id_size} bytes"
            )
        found = self.channels.get(channel)
        if found is None:
            if len(self.channels) >= self._settings.channels:
                raise LocalProtocolError(
                    f"{len(self.channels)} channels are open; Relink.channels is the limit"
                )
        elif not found.change(SendingInput.SEND):
            raise LocalProtocolError(f"channel {channel} is closing: wait until it is closed")
        if not self.writable(channel, cost * targets):
            raise LocalProtocolError(
                f"channel {channel} has no room for a message that counts for {cost} bytes: wait "
                "until it is writable (Relink.window_bytes, Relink.window_messages)"
            )

    def _decide(self, channel: SendChannel, last: int, *, commit: bool) -> None:
        outstanding, undecided = channel.outstanding_cost, channel.undecided_cost
        channel.decide(last, commit=commit)
        self.outstanding += channel.outstanding_cost - outstanding
        self._undecided_cost += channel.undecided_cost - undecided
        if not channel.undecided_cost:
            del self._undecided[channel.identifier]
        if self.flowing:
            self._outbox.queue.append(self._decision(channel, last, commit=commit))
        self._room_changed = True
        self.tell_writable()

    def _drop_undecided(self, channel: SendChannel) -> None:
        if channel.transactional and channel.decided < channel.next:
            self._decide(channel, channel.next - 1, commit=False)

    def _decision(self, channel: SendChannel, last: int, *, commit: bool) -> bytes:
        return packets.encode_packet(
            packets.SEQUENCE_OP,
            packets.COMMIT if commit else packets.ROLLBACK,
            (channel.identifier,),
            self._id_size,
            sequence=last & SEQUENCE_MASK,
        )

    def _settle(self, channel: SendChannel) -> None:
        """Sends the close of a channel that may have it now."""
        if channel.state is ChannelState.CLOSING and channel.settled:
            channel.change(SendingInput.SETTLED)
            if self.flowing:
                self._send_close(channel)

    def _send_close(self, channel: SendChannel) -> None:
        self._outbox.queue.append(
            packets.encode_packet(
                packets.CHANNEL_OP, packets.CLOSE, (channel.identifier,), self._id_size
            )
        )

    def _close_done(self, channel: SendChannel) -> None:
        channel.change(SendingInput.CLOSED)
        del self.channels[channel.identifier]
        self.outstanding -= channel.outstanding_cost
        self._closing -= 1
        self._room_changed = True
        self._closed[channel.identifier] = None
        if len(self._closed) > _REMEMBERED:
            self._closed.popitem(last=False)
        self._events.append((events.CLOSED, channel.identifier))


def _check_backwards(channel: SendChannel, sequence: int | None) -> None:
    """A resume may not take back what was acknowledged: those messages are gone here (RL-R18)."""
    last = (channel.received - 1) & SEQUENCE_MASK
    if sequence is not None and sequence != last:
        raise SequenceError(
            f"{channel!r}: the peer's resume has received message {sequence}, and it has "
            f"acknowledged {last} before (RL-R18)"
        )
