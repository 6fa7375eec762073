"""The state of channels for people: plain values, made when somebody looks and not before."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

from aqueduct._speedups.channels.recv_streams import RecvStreams
from aqueduct.config import Flow
from aqueduct.protocol.common.context import ConnectionContext
from aqueduct.protocol.common.receiver import ReceiverHalf
from aqueduct.protocol.common.registry import Registry
from aqueduct.protocol.common.sender import SenderHalf

__all__ = [
    "ChannelView",
    "CoreView",
    "HalfView",
    "ReceiverView",
    "SenderView",
    "core_view",
    "view_of",
]


@dataclass(frozen=True, slots=True)
class HalfView:
    """What both halves of a channel show."""

    id: int
    creator: str
    """"client" or "server", from the id's bits, as the next two."""
    index: int
    oneshot: bool
    half: str
    """"sender" or "receiver"."""
    state: str
    """"open", "finished" or "cancelled"; of a receiver "open" or "finishing"."""
    standing: str
    """"accessible" or "pending" (AQ-R27)."""
    held: bool
    """Whether the application has the handle; the other channels wait for theirs."""


@dataclass(frozen=True, slots=True)
class SenderView(HalfView):
    """A channel that this side sends on."""

    queued_bytes: int
    """Sent and not gone from the carrier."""
    room_bytes: int
    """What may still be queued before sends wait."""
    sent: int
    """Messages, by stream and by datagram."""
    unsettled: int
    """Of those, neither acknowledged nor nacked."""
    nacked: int
    """Of those by datagram, lost on the way."""
    links: int
    """Channels that hang on messages whose fate is open."""
    streams_waiting: int
    """Messages that wait for a stream of their own."""


@dataclass(frozen=True, slots=True)
class ReceiverView(HalfView):
    """A channel that this side receives on."""

    queued_bytes: int
    """Charged to the budget: messages that arrive or wait to be taken, with their overhead."""
    queued_messages: int
    """Messages that wait to be taken."""
    received: int
    """Messages by stream."""
    holes: int
    """Gaps in the numbers of those (Limits.received_ranges)."""
    announced: int
    """Datagrams that the peer has sent, by its own word."""
    nacked: int
    """Of those, not here in time."""
    evicted: int
    """Datagrams that were here and gave way to later ones."""
    streams: int
    """The peer's streams that are routed here."""
    streams_waiting: int
    """Of those, held because their next message finds no room."""
    credit_bytes: int
    """What the peer may still send on them."""


ChannelView: TypeAlias = SenderView | ReceiverView


@dataclass(frozen=True, slots=True)
class CoreView:
    """One side of one connection, without its carrier."""

    channel_count: int
    """Channels with state, in ``channels`` or not."""
    channels: tuple[ChannelView, ...]
    """Sorted by id; the lowest, if there are more than were asked for."""
    streams_in: int
    streams_held: int
    """The peer's streams that ended and whose bytes wait here."""
    streams_out: int
    """Streams of ours with bytes on the way."""
    streams_waiting: int
    """Streams of ours that wait to be opened."""
    queued_bytes: int
    stalled_control_bytes: int
    """Acks, closes and the like that the peer does not let leave, and their streams."""
    receive_budget: int
    receive_budget_used: int
    process_receive_budget: int
    """What all connections of the process may hold of what they received, bytes."""
    process_receive_used: int
    """What they hold: until its handler or reader asks for more, ends, or frees it."""
    process_kept: int
    """Bytes of batches that are alive although their handler or reader has asked for more."""
    process_send_budget: int
    process_send_used: int
    """What all connections hold of what is to be sent, until it has left, bytes."""
    receivers_starved: int
    """Receivers whose next message waits for room in the budget."""
    senders_blocked: int
    """Senders whose user waits for room."""
    datagrams_dropped: int
    """Unreliable messages that found no room here and never left."""
    datagrams_nacked: int
    """Unreliable messages of ours that were lost, those included."""
    datagrams_missed: int
    """Unreliable messages of the peer that did not come in time."""
    datagrams_evicted: int
    """Unreliable messages of the peer that gave way to later ones."""


def core_view(
    shared: ConnectionContext, registry: Registry, incoming: RecvStreams, channels: int
) -> CoreView:
    """The state of a connection, with at most ``channels`` of its channels."""
    halves = registry.lowest(channels) if channels else []
    pending = registry.pending() if halves else set()
    return CoreView(
        channel_count=len(registry),
        channels=tuple(
            view_of(half, registry.creator(half.channel), pending, shared.config.flow)
            for half in halves
        ),
        streams_in=len(incoming.streams),
        streams_held=incoming.held,
        streams_out=shared.outgoing.open,
        streams_waiting=shared.outgoing.waiting,
        queued_bytes=shared.outgoing.queued,
        stalled_control_bytes=shared.outgoing.stalled_control,
        receive_budget=shared.config.flow.receive_budget,
        receive_budget_used=shared.budget_used,
        process_receive_budget=shared.process_budget,
        process_receive_used=shared.process.used,
        process_kept=shared.shown.kept,
        process_send_budget=shared.outgoing.process_budget,
        process_send_used=shared.outgoing.process.used,
        receivers_starved=len(shared.starved),
        senders_blocked=len(shared.blocked),
        datagrams_dropped=shared.datagrams_dropped,
        datagrams_nacked=shared.datagrams_nacked,
        datagrams_missed=shared.datagrams_missed,
        datagrams_evicted=shared.datagrams_evicted,
    )


def view_of(
    half: SenderHalf | ReceiverHalf, creator: int, pending: set[int], flow: Flow
) -> ChannelView:
    """One channel of ``creator``, 0 the client; ``pending`` are those whose fate is open."""
    channel = half.channel
    both: dict[str, Any] = {
        "id": channel,
        "creator": ("client", "server")[creator],
        "index": channel >> 3,
        "oneshot": half.oneshot,
        "half": "sender" if isinstance(half, SenderHalf) else "receiver",
        "state": half.state.name.lower(),
        "standing": "pending" if channel in pending else "accessible",
        "held": half.given,
    }
    if isinstance(half, SenderHalf):
        return SenderView(
            **both,
            queued_bytes=half.queued,
            room_bytes=max(0, flow.channel_high_water - half.queued),
            sent=half.sent,
            unsettled=half.unsettled,
            nacked=half.unreliable.nacked if half.unreliable is not None else 0,
            links=len(half.links.channels()) if half.links is not None else 0,
            streams_waiting=len(half.unordered.waiting) if half.unordered is not None else 0,
        )
    unreliable = half.unreliable
    return ReceiverView(
        **both,
        queued_bytes=half.queue.charged,
        queued_messages=len(half.queue),
        received=half.numbers.count,
        holes=max(0, len(half.numbers.ranges) - 1),
        announced=unreliable.announced if unreliable is not None else 0,
        nacked=half.nacked,
        evicted=half.queue.evictions,
        streams=len(half.streams),
        streams_waiting=len(half.queue.waiting),
        credit_bytes=sum(s.limit - s.decoder.consumed for s in half.streams if not s.fin),
    )
