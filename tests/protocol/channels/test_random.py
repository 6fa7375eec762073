"""Two cores and a random application on each side: whatever they do, nothing is lost or left.

Every run is a function of its seed. Applications are driven by events alone, as the endpoint's
are: a message that arrives without a Readable, or room without a Writable, is never noticed.
"""

from __future__ import annotations

import dataclasses
import random
from collections import Counter

import pytest

from aqueduct.config import DEFAULT, Config, Flow
from aqueduct.errors import (
    Cancelled,
    ChannelError,
    Finished,
    LostInTransit,
    MessageLost,
    ReceiverClosed,
)
from aqueduct.protocol.channels import ids
from aqueduct.protocol.channels.connection import Attach
from aqueduct.protocol.channels.events import Readable, Writable
from aqueduct.protocol.channels.receiving import ReceiverHalf
from aqueduct.protocol.channels.sending import Mode, SenderHalf
from aqueduct.protocol.channels.state import ReceiverState, SenderState
from tests.pair import Pair, Side

TOKEN = 8
MODES = (Mode.ORDERED, Mode.ORDERED, Mode.UNORDERED, Mode.UNRELIABLE)


class Channel:
    """What happened on one channel, as the two applications know it."""

    def __init__(self, channel: int, home: Side, far: Side) -> None:
        self.id = channel
        self.sender_side = home
        self.receiver_side = far
        self.sender: SenderHalf | None = None
        self.receiver: ReceiverHalf | None = None
        self.sent: list[tuple[int, Mode, bool]] = []
        """Token, mode, and whether it went as a datagram."""
        self.taken: list[int] = []
        self.finished = False
        self.cancelled = False
        self.closed = False


class World:
    """One run."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        flow = Flow(
            receive_budget=rng.choice((20_000, 100_000, 64 << 20)),
            channel_receive_bytes=rng.choice((5_000, 50_000, 16 << 20)),
            initial_window=rng.choice((300, 4096, 65_536)),
            admitted_window=rng.choice((500, 16_384, 8 << 20)),
            read_ahead=rng.choice((1000, 2 << 20)),
            channel_high_water=rng.choice((3_000, 8 << 20)),
            connection_high_water=rng.choice((20_000, 64 << 20)),
            streams=rng.choice((48, 200, 1024)),
            unordered_streams=rng.choice((1, 3, 32)),
        )
        config: Config = dataclasses.replace(DEFAULT, flow=flow, debug=rng.random() < 0.2)
        self.pair = Pair(
            config,
            chunk=rng.choice((7, 500, 65_536)),
            seed=seed,
            datagram_limit=rng.choice((0, 300, 1200)),
        )
        self.sides = (self.pair.client, self.pair.server)
        self.loss = rng.choice((0.0, 0.3, 1.0))
        self.largest = rng.choice((50, 3_000, 60_000))
        self.channels: dict[int, Channel] = {}
        self.tokens = 0
        self.carried: dict[int, list[tuple[Channel, bool]]] = {}
        """Token of a message -> its attachments: channel, whether the sender half goes along."""
        self.readable: dict[ReceiverHalf, Channel] = {}
        self.blocked: dict[SenderHalf, Channel] = {}
        entry = self.channels[0] = Channel(0, self.pair.client, self.pair.server)
        entry.sender, entry.receiver = self.pair.sender, self.pair.receiver
        self.ordered_only = rng.random() < 0.3
        self.burst = rng.choice((1, 1, 8))
        # A live channel keeps a stream at each side, so there can be no more than streams.
        self.most_channels = 15 if flow.streams < 100 else 60

    # What the applications do

    def step(self) -> None:
        rng = self.rng
        for side in self.sides:
            side.lose_datagrams = rng.random() < self.loss
        action = rng.choices(
            (self.send, self.take, self.move, self.wait, self.finish, self.cancel, self.close),
            (30, 30, 30, 6, 3, 2, 2),
        )[0]
        action()
        self.notice()

    def one(self, senders: bool) -> Channel | None:
        found = [
            channel
            for channel in self.channels.values()
            if (channel.sender if senders else channel.receiver) is not None
        ]
        # Recent ones more often, or most would never see anything.
        return found[-1 - int(self.rng.random() ** 2 * len(found))] if found else None

    def send(self) -> None:
        channel = self.one(senders=True)
        for _ in range(self.rng.randint(1, self.burst)):
            if channel is not None:
                self.send_on(channel)

    def send_on(self, channel: Channel) -> None:
        half, rng = channel.sender, self.rng
        assert half is not None
        if half.state is not SenderState.OPEN or (ids.oneshot(half.channel) and half.sent):
            return
        if not half.writable and rng.random() < 0.9:
            channel.sender_side.core.wait_writable(half)
            self.blocked[half] = channel
            return
        attaches = []
        if len(self.channels) < self.most_channels and rng.random() < 0.25:
            attaches = [
                Attach(keep_sender=rng.random() < 0.6, is_oneshot=rng.random() < 0.3)
                for _ in range(rng.choice((1, 1, 2)))
            ]
        token = self.tokens
        self.tokens += 1
        payload = token.to_bytes(TOKEN, "little") + bytes(int(rng.random() ** 3 * self.largest))
        mode = Mode.ORDERED if self.ordered_only else rng.choice(MODES)
        before = half._unreliable.next if half._unreliable else 0
        self.carried[token] = carried = []
        side = channel.sender_side
        headers = ((b"k", bytes(int(rng.random() ** 4 * 5000))),) if rng.random() < 0.2 else ()
        side.core.send(
            half, payload, self.pair.now, headers=headers, attachments=attaches, mode=mode
        )
        unreliably = (half._unreliable.next if half._unreliable else 0) > before
        channel.sent.append((token, mode, unreliably))
        if ids.oneshot(half.channel):
            channel.finished = True
        for attach in attaches:
            assert attach.half is not None
            far = self.sides[side is self.sides[0]]
            ends = (side, far) if attach.keep_sender else (far, side)
            made = self.channels[attach.half.channel] = Channel(attach.half.channel, *ends)
            if isinstance(attach.half, SenderHalf):
                made.sender = attach.half
            else:
                made.receiver = attach.half
            carried.append((made, not attach.keep_sender))
        side.flush()

    def take(self) -> None:
        if self.readable:
            self.take_from(self.rng.choice(list(self.readable)))

    def take_from(self, half: ReceiverHalf) -> None:
        channel = self.readable[half]
        received = channel.receiver_side.take(half)
        if received is None:
            del self.readable[half]
            return
        token = int.from_bytes(bytes(received.payload)[:TOKEN], "little")
        assert token not in channel.taken, "delivered twice"
        assert token in [sent[0] for sent in channel.sent], "from another channel"
        channel.taken.append(token)
        for (inner, _), (made, with_sender) in zip(
            received.attachments, self.carried[token], strict=True
        ):
            assert inner.channel == made.id
            if with_sender:
                assert isinstance(inner, SenderHalf)
                made.sender = inner
            else:
                assert isinstance(inner, ReceiverHalf)
                made.receiver = inner
                self.readable[inner] = made
            if self.rng.random() < 0.1:  # nobody wants it
                channel.receiver_side.core.drop_attachment(inner, self.pair.now)
                if with_sender:
                    made.cancelled = made.cancelled or inner.state is SenderState.CANCELLED
                else:
                    made.closed = True
        channel.receiver_side.flush()

    def move(self) -> None:
        for _ in range(self.rng.choice((1, 3, 20))):
            self.pair.link.step()

    def wait(self) -> None:
        self.pair.advance(self.rng.choice((0.0, 0.01, 0.06, 0.5, 1.2)))

    def finish(self) -> None:
        channel = self.one(senders=True)
        if channel and channel.id and channel.sender and channel.sender.state is SenderState.OPEN:
            channel.finished = True
            channel.sender_side.finish(channel.sender)

    def cancel(self) -> None:
        channel = self.one(senders=True)
        if channel and channel.id and channel.sender and channel.sender.state is SenderState.OPEN:
            channel.cancelled = True
            channel.sender_side.cancel(channel.sender)

    def close(self) -> None:
        channel = self.one(senders=False)
        if channel and channel.id and channel.receiver:
            channel.closed = True
            channel.receiver_side.close_receiver(channel.receiver)

    def notice(self) -> None:
        for side in self.sides:
            events, side.events = side.events, []
            for event in events:
                if isinstance(event, Readable):
                    channel = self.channels[event.half.channel]
                    if event.half is channel.receiver:
                        self.readable[event.half] = channel
                elif isinstance(event, Writable):
                    self.blocked.pop(event.half, None)
        self.check()

    # What must hold

    def check(self) -> None:
        for side in self.sides:
            core = side.core
            assert core.error is None, core.error
            shared, streams = core._shared, core._reader.incoming.streams
            halves = {
                half
                for channel in self.channels.values()
                for half in (channel.sender, channel.receiver)
                if half is not None and half._shared is shared
            } | {
                half
                for table in (core._registry._live, core._registry._ended_early)
                for half in table.values()
            }
            # Halves in messages that nobody took yet are in no table once they ended.
            found = list(halves)
            while found:
                half = found.pop()
                for received in half.queue if isinstance(half, ReceiverHalf) else ():
                    for inner, _ in received.attachments:
                        if inner not in halves:
                            halves.add(inner)
                            found.append(inner)
            charged = 0
            queued = shared.outgoing._control_queued
            for half in halves:
                if isinstance(half, SenderHalf):
                    assert half.queued >= 0
                    queued += half.queued
                    continue
                waits = [
                    stream for stream in streams.values() if stream.head and stream.half is half
                ]
                assert set(waits) == set(half.waiting)
                charged += half.charged
                landing = [s for s in half.streams if s.partial >= 0]
                live = [received for received in half.queue if not received.dropped]
                assert half._outstanding == len(landing) + len(live)
                assert half.charged == sum(received.charge for received in live) + sum(
                    half.cost(stream.partial) for stream in landing
                )
                if half.state is ReceiverState.CLOSED:
                    assert not half.streams and not half.waiting
            granted = sum(stream.granted for stream in streams.values())
            assert shared.budget_used == charged + granted
            assert shared.outgoing.queued == queued
            assert core.held_streams == sum(stream.held for stream in streams.values())
            assert core._reader.incoming._gathered == sum(s.gathered for s in streams.values())

    def settle(self) -> None:
        """Everything is read as it comes, until nothing moves any more."""
        idle = 0
        while idle < 4:
            before = self.tokens, sum(len(channel.taken) for channel in self.channels.values())
            self.pair.advance(0.7)
            self.notice()
            while self.readable:
                self.take_from(next(iter(self.readable)))
                self.notice()
            after = self.tokens, sum(len(channel.taken) for channel in self.channels.values())
            idle = idle + 1 if before == after else 0

    def end(self) -> None:
        self.settle()
        for half, channel in self.blocked.items():
            assert half.state is not SenderState.OPEN, f"{channel.id} was not told of its room"
        for _ in range(3):
            for channel in list(self.channels.values()):
                if channel.sender is not None and channel.sender.state is SenderState.OPEN:
                    channel.finished = True
                    channel.sender_side.finish(channel.sender)
            self.settle()
        for side in self.sides:
            snapshot = side.core.snapshot()
            assert not any(snapshot.values()), snapshot
            assert side.core.held_streams == 0
            registry = side.core._registry
            assert not registry._pending_tables and not registry._ended_early
            assert not side.carrier.snapshot()["queued"]
        for channel in self.channels.values():
            self.check_end(channel)

    def check_end(self, channel: Channel) -> None:
        """Both sides agree on how the channel ended, and on what came through."""
        sender, receiver = channel.sender, channel.receiver
        order = [token for token, mode, _ in channel.sent if mode is Mode.ORDERED]
        assert [token for token in channel.taken if token in set(order)] == [
            token for token in order if token in set(channel.taken)
        ], "out of order"
        assert max(Counter(channel.taken).values(), default=1) == 1
        if sender is not None:
            assert sender.state is SenderState.ENDED
            assert sender.settled or sender.error is not None
            assert isinstance(sender.error, (ChannelError, type(None)))
        if receiver is None:
            return
        assert receiver.state is ReceiverState.CLOSED and not receiver.queue
        error = receiver.error
        assert isinstance(error, ChannelError)
        reliable = {token for token, _, unreliably in channel.sent if not unreliably}
        if isinstance(error, Finished):
            assert channel.finished and not channel.cancelled
            if not channel.closed:
                assert reliable <= set(channel.taken), "a reliable message is missing"
        elif isinstance(error, Cancelled):
            oneshot_unused = ids.oneshot(channel.id) and not channel.sent
            never_taken = sender is None  # its message was dropped with it (AQ-R26)
            assert channel.cancelled or oneshot_unused or never_taken
        elif isinstance(error, ReceiverClosed):
            assert channel.closed
        elif isinstance(error, MessageLost):
            assert ids.oneshot(channel.id)
            assert [unreliably for _, _, unreliably in channel.sent] == [True]
        else:
            assert isinstance(error, LostInTransit)
        if sender is None:
            return
        if sender.error is None:
            # Said to be delivered: whoever read to the end got every reliable message.
            assert channel.finished
            if not channel.closed and not isinstance(error, (LostInTransit, Cancelled)):
                assert reliable <= set(channel.taken)
        elif isinstance(sender.error, Cancelled):
            assert channel.cancelled
        elif isinstance(sender.error, ReceiverClosed):
            assert channel.closed or isinstance(error, LostInTransit)


@pytest.mark.parametrize("seed", range(60))
def test_a_random_run_loses_nothing_and_leaves_nothing(seed: int) -> None:
    world = World(seed)
    for _ in range(150):
        world.step()
    world.end()
