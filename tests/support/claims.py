"""What must hold of two cores and their applications: after each step, at rest, and at the end."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aqueduct._speedups.base.buffers import size_of
from aqueduct.errors import (
    Cancelled,
    ConnectionLost,
    Finished,
    LostInTransit,
    MessageLost,
    ReceiverClosed,
)
from aqueduct.protocol.channels import ids
from aqueduct.protocol.channels.registry import ChannelRegistry
from aqueduct.protocol.common.events import HeadersReceived
from aqueduct.protocol.common.receiver import ReceiverHalf
from aqueduct.protocol.common.registry import Half
from aqueduct.protocol.common.sender import SenderHalf
from aqueduct.protocol.common.state import ReceiverState, SenderState
from aqueduct.protocol.control_streams.bidi_streams import BIDI
from aqueduct.protocol.control_streams.connection import ControlConnection
from aqueduct.protocol.control_streams.dispatch import ControlDispatcher
from aqueduct.protocol.control_streams.registry import ControlRegistry
from tests.support.network import NetworkCarrier
from tests.support.pair import Side

if TYPE_CHECKING:
    from tests.support.world import Channel, World

__all__ = ["check_end", "check_rest", "check_step"]


DROPPING = (Cancelled, LostInTransit, ReceiverClosed)
"""Ends with which a receiver drops what was not read (AQ-R20, AQ-R23)."""


def check_step(world: World) -> None:
    """The books balance: each byte, message and stream is counted once, by both sides."""
    for side in world.sides:
        if not world.over:
            assert side.core.error is None, side.core.error
        if side.core.error is None:
            _check_books(side, world.pair.carrier(side), _halves(world, side))
    for channel in world.channels.values():
        _check_told(world, channel)
    if world.pair.replayed is not None:
        _check_replayed(world.pair.replayed)


def _check_replayed(side: Side) -> None:
    """A server that cannot rule out a replay processes nothing, and says nothing (AQ0-3)."""
    assert not side.applied
    assert not side.events or side.core.error is not None  # its end, which the entrypoint reads
    assert not any(isinstance(event, HeadersReceived) for event in side.events)
    assert not side.core.ready
    assert side.core.peer_headers is None
    assert side.core.channels <= 1
    assert side.core.snapshot()["budget_used_bytes"] == 0
    assert side.core.next_deadline() is None


def check_rest(world: World) -> None:
    """Nothing moves and nothing is unread: there is state for what is in use, and no other."""
    # Until a control stream is there, no acks come, and ends are not told: much stays as it is.
    waits = any(
        isinstance(side.core, ControlConnection) and side.core._bidi._waiting
        for side in world.sides
    )
    for side in () if waits else world.sides:
        core = side.core
        live = {
            half
            for channel in world.channels.values()
            for half in (channel.sender, channel.receiver)
            if half is not None and half._shared is core._shared and not _is_final(half)
        }
        registry = core._registry
        assert set(registry._live.values()) == live, "state of channels that nobody has"
        assert core.channels == len(live)
        assert not registry._ended_early and not registry._pending_tables
        carrier = world.pair.carrier(side)
        mine = {half.control for half in live} | {
            half.message_stream for half in live if isinstance(half, SenderHalf)
        }
        left = set(core._shared.outgoing._open.values()) - mine
        if isinstance(registry, ControlRegistry):
            left -= {core._shared.outgoing._open.get(_connection_stream(side))}
            _check_bidi(side, carrier, live)
        else:
            assert isinstance(registry, ChannelRegistry)
            assert not registry._forgetting.kept and not registry._forgetting._pending
        assert not left, "streams of ended channels"
        snapshot = core.snapshot()
        for name in ("streams_waiting", "queued_bytes", "starved_receivers"):
            assert snapshot[name] == 0, snapshot
        granted = sum(stream.granted for stream in core._reader.incoming.streams.values())
        assert snapshot["budget_used_bytes"] == granted
        assert core.held_streams == 0
        open_streams = set(core._shared.outgoing._open)
        assert set(carrier.sending) <= open_streams
        assert set(core._reader.incoming.streams) == set(carrier.receiving)
        other = world.sides[side is world.sides[0]]
        slots = (
            other.core.config.flow.streams
            + other.core.incoming.extra
            - sum(number < BIDI for number in world.pair.carrier(other).receiving)
        )
        assert carrier.openable >= slots, "slots were not given back"
    for channel in world.channels.values():
        _check_agreement(channel)
        sender, receiver = channel.sender, channel.receiver
        assert waits or sender is None or not sender.unsettled or _is_final(sender), (
            "neither acked nor nacked"
        )
        if sender is not None and receiver is not None and not waits:
            assert _is_final(sender) == _is_final(receiver), "one half outlives the other"


def check_end(world: World) -> None:
    """Every handle has its final state, the two agree, and no state is left."""
    for side in world.sides:
        snapshot = side.core.snapshot()
        if world.bidi is not None and not world.over:
            snapshot["streams_in"] -= 1  # that of the connection
            snapshot["streams_out"] -= 1
        left = [name for name, value in snapshot.items() if value]
        if world.over:
            assert isinstance(side.core.error, ConnectionLost)
            left = [name for name in left if name != "budget_used_bytes"]
        assert not left, snapshot
        assert side.core.held_streams == 0
        assert side.core.next_deadline() is None
        if not world.over and isinstance(side.core, ControlConnection):
            assert not side.core._bidi._waiting
    if not world.over:
        check_rest(world)
    for channel in world.channels.values():
        for half in (channel.sender, channel.receiver):
            if half is not None:
                assert _is_final(half), f"{ids.describe(channel.id)} has no final state"
                assert world.over or not isinstance(half.error, ConnectionLost)
                assert not isinstance(half, ReceiverHalf) or not half.queue
        _check_agreement(channel)
        if not world.over:
            _check_ended(channel)
    if world.closer is not None and world.pair.carrier(world.closer).closed_clean:
        _check_close(world)


def _check_told(world: World, channel: Channel) -> None:
    """Whoever waits was told of what it waits for, and an end stays what it is."""
    sender, receiver = channel.sender, channel.receiver
    for half in (sender, receiver):
        if half is not None and half.error is not None:
            assert world.errors.setdefault(half, half.error) is half.error, "it ended anew"
    if sender is not None:
        assert (sender.state is SenderState.ENDED) == (sender in world.reported)
        if sender.state is SenderState.OPEN and sender in world.blocked:
            # One that was finished meanwhile could not send; it is told of its end.
            assert not sender.has_room(world.blocked[sender]), "not told of its room"
    if receiver is not None and isinstance(receiver.error, DROPPING):
        assert not receiver.queue, "it ended, and what it had is still there"
    if receiver is not None and receiver not in world.readable:
        assert receiver.error is None or receiver in world.read_out, "not told of its end"
        assert all(received.dropped for received in receiver.queue), "not told of a message"


def _check_books(side: Side, carrier: NetworkCarrier, halves: set[Half]) -> None:
    core = side.core
    shared, streams = core._shared, core._reader.incoming.streams
    flow = core.config.flow
    charged = 0
    assured = 0
    queued = shared.outgoing._control_queued
    for half in halves:
        if isinstance(half, SenderHalf):
            assert half.queued >= 0
            queued += half.queued
            continue
        waits = {stream for stream in streams.values() if stream.head and stream.half is half}
        assert waits == set(half.queue.waiting)
        charged += half.queue.charged
        landing = [stream for stream in half.streams if stream.partial >= 0]
        live = [received for received in half.queue if not received.dropped]
        assert half.queue.outstanding == len(landing) + len(live)
        costs = [received.charge for received in live]
        costs += [core._shared.admission.cost(stream.partial) for stream in landing]
        assert half.queue.charged == sum(costs)
        assert len(costs) <= 1 or half.queue.charged <= flow.channel_receive_bytes
        assured += max(costs, default=0) if half.queue.assured else 0
        if half.state is ReceiverState.CLOSED:
            assert not half.streams and not half.queue.waiting
    granted = sum(stream.granted for stream in streams.values())
    assert shared.budget_used == charged + granted
    assert shared.budget_used <= flow.receive_budget + assured
    assert shared.outgoing.queued == queued
    assert core.held_streams == sum(stream.held for stream in streams.values())
    if not isinstance(core, ControlConnection):
        gathered = sum(stream.gathered for stream in streams.values())
        assert core._reader.incoming._gathered == gathered
    early = core._early if isinstance(core, ControlConnection) else None
    if early is not None:
        # Until early data is decided on, all of it is kept.
        for number, stream in shared.outgoing._open.items():
            assert stream.queued == size_of(early._kept[number].buffers)
        return
    # What the core waits for is what the carrier still has.
    for number, stream in shared.outgoing._open.items():
        sending = carrier.sending.get(number)
        assert stream.queued == (sending.unwritten if sending is not None else 0)


def _connection_stream(side: Side) -> int:
    carrier = side.carrier
    assert isinstance(carrier, NetworkCarrier)
    return BIDI | carrier.forgotten[1] << 1 if side.core.is_client else BIDI | 1


def _check_bidi(side: Side, carrier: NetworkCarrier, live: set[Half]) -> None:
    """Control streams are those of channels that live, and nothing waits for others."""
    core = side.core
    assert isinstance(core, ControlConnection)
    registry, bidi = core._registry, core._bidi
    assert isinstance(registry, ControlRegistry)
    assert not bidi._resets, "a reset that never comes"
    assert not registry._unattached, "a receiver that never closes"
    numbers = {half.control.number for half in live if half.control is not None} - {-1}
    assert set(carrier.bidi_ends) == numbers | {_connection_stream(side)}
    assert set(bidi.owners) <= numbers
    reader = core._reader
    assert isinstance(reader, ControlDispatcher)
    assert not reader._paused and not reader._postponed


def _halves(world: World, side: Side) -> set[Half]:
    """Every half of one side that may hold anything."""
    registry = side.core._registry
    found: list[Half] = [
        half
        for channel in world.channels.values()
        for half in (channel.sender, channel.receiver)
        if half is not None and half._shared is side.core._shared
    ]
    found += [*registry._live.values(), *registry._ended_early.values()]
    halves = set(found)
    # Halves in messages that nobody took yet are in no table once they ended.
    while found:
        half = found.pop()
        for received in half.queue if isinstance(half, ReceiverHalf) else ():
            for inner, _ in received.attachments:
                if inner not in halves:
                    halves.add(inner)
                    found.append(inner)
    return halves


def _check_agreement(channel: Channel) -> None:
    """A channel is lost for both or for none (AQ-R27), whatever else became of it."""
    parent = channel.parent
    if parent is None:
        assert not any(
            half is not None and isinstance(half.error, LostInTransit)
            for half in (channel.sender, channel.receiver)
        )
        return
    by_sender = parent.channel.sender_side is channel.sender_side
    creator = channel.sender if by_sender else channel.receiver
    other = channel.receiver if by_sender else channel.sender
    assert creator is not None
    ended_here = channel.cancelled if by_sender else channel.closed
    if other is not None:
        assert not isinstance(creator.error, LostInTransit), "lost, and the peer has it"
        if isinstance(other.error, LostInTransit):
            assert ended_here, "lost, and its creator did not end it"
    elif not parent.reliable and not parent.copies and _is_final(creator):
        # Its messages may all have arrived before, at a half that nobody was given (AQ-R25).
        through = by_sender and channel.finished and creator.error is None
        lost = isinstance(creator.error, (LostInTransit, ConnectionLost))
        assert ended_here or through or lost


def _check_ended(channel: Channel) -> None:
    """Each half says why the channel ended, and what came through fits that."""
    sender, receiver = channel.sender, channel.receiver
    missing = [message for message in channel.sent.values() if not message.taken]
    missing_reliable = [message for message in missing if message.reliable]
    unused = ids.oneshot(channel.id) and not channel.sent
    if receiver is not None:
        error = receiver.error
        if isinstance(error, Finished):
            assert channel.finished and not channel.cancelled
            assert channel.closed or not missing_reliable, "a reliable message is missing"
        elif isinstance(error, Cancelled):
            assert channel.cancelled or (channel.finished and unused) or sender is None
        elif isinstance(error, MessageLost):
            assert ids.oneshot(channel.id)
            assert [message.reliable for message in missing] == [False]
        elif not isinstance(error, LostInTransit):
            assert channel.closed, error
    if sender is not None:
        error = sender.error
        if error is None:
            assert channel.finished and not channel.cancelled and not sender.unsettled
        elif isinstance(error, Cancelled):
            assert channel.cancelled
        elif isinstance(error, ReceiverClosed):
            assert channel.closed or receiver is None
        else:
            assert isinstance(error, LostInTransit)
    if sender is not None and receiver is not None and not (channel.cancelled or channel.closed):
        assert channel.finished
        assert sender.error is None, sender.error
        assert isinstance(receiver.error, (Finished, MessageLost)) or unused, receiver.error
        assert not missing_reliable, "a reliable message is missing"


def _check_close(world: World) -> None:
    """What was sent before a NO_ERROR that came in time has arrived (AQ-R32)."""
    for message in world.before_close:
        channel = message.channel
        if message.reliable and channel.taken and not (channel.cancelled or channel.closed):
            assert message.taken, "sent before the close, and missing"
    for channel in world.channels.values():
        if channel.sender_side is world.closer and channel.finished and channel.taken:
            sent = channel.sent.values()
            control = channel.sender.control if channel.sender is not None else None
            if (
                not channel.closed
                # The draft says the end of a channel on its control stream, once that is there.
                and (world.bidi is None or (control is not None and control.number >= 0))
                and sent
                and all(message in world.before_close and message.reliable for message in sent)
            ):
                assert channel.receiver is not None
                assert isinstance(channel.receiver.error, Finished), channel.receiver.error


def _is_final(half: Half) -> bool:
    return half.state in (SenderState.ENDED, ReceiverState.CLOSED)
