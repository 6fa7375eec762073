"""Two connections joined, and two applications whose every step is read from the bytes.

Whatever they do, in whatever state: commands raise what is documented, nothing is delivered twice,
ORDERED keeps its order, both sides agree, and in the end no state is left.
"""

from __future__ import annotations

from collections import Counter
from typing import Final

from aqueduct.carriers import memory
from aqueduct.config import Config, Flow
from aqueduct.errors import (
    Cancelled,
    ChannelError,
    ConnectionLost,
    Finished,
    LostInTransit,
    MessageLost,
    ReceiverClosed,
)
from aqueduct.protocol.channels import ids
from aqueduct.protocol.common.receiver import ReceiverHalf
from aqueduct.protocol.common.registry import Attach, Half
from aqueduct.protocol.common.sender import Mode, SenderHalf
from aqueduct.protocol.common.state import ReceiverState, SenderState
from tests.fuzz.endpoint import Clock, Endpoint
from tests.fuzz.source import Source

__all__ = ["Channel", "World", "target"]

TOKEN: Final = 4
CHECK_EVERY: Final = 8
"""Steps between two looks at the sums of a core, which cost more than the steps."""
MOST_CHANNELS: Final = 15
"""A live channel keeps a stream at each side, and the fewest streams below are 48."""
MODES: Final = (Mode.ORDERED, Mode.ORDERED, Mode.UNORDERED, Mode.UNRELIABLE)
WAITS: Final = (0.0, 0.01, 0.03, 0.06, 0.5, 1.2, 3.0)
SIZES: Final = (0, 10, 400, 1300, 4000, 9000, 20_000, 40_000)

FLOWS: Final = (
    Flow(),
    Flow(
        receive_budget=20_000,
        channel_receive_bytes=5_000,
        initial_window=300,
        admitted_window=500,
        read_ahead=1000,
        channel_high_water=3000,
        connection_high_water=20_000,
        streams=48,
        unordered_streams=1,
    ),
    Flow(
        receive_budget=100_000,
        channel_receive_bytes=50_000,
        initial_window=4096,
        admitted_window=16_384,
        read_ahead=60_000,
        channel_high_water=30_000,
        streams=200,
        unordered_streams=3,
    ),
)


class Channel:
    """What happened on one channel, as the two applications know it."""

    def __init__(self, channel: int) -> None:
        self.id = channel
        self.sender: SenderHalf | None = None
        self.receiver: ReceiverHalf | None = None
        self.sent: list[tuple[int, Mode, bool]] = []
        """Token, mode, and whether it went as a datagram."""
        self.taken: list[int] = []
        self.finished = False
        self.cancelled = False
        self.closed = False

    def holds(self, half: Half) -> None:
        if isinstance(half, SenderHalf):
            self.sender = half
        else:
            self.receiver = half


class World:
    """One run."""

    def __init__(self, source: Source) -> None:
        self.source = source
        settings = source.byte()
        flow = FLOWS[(settings & 3) % len(FLOWS)]
        config = Config(flow=flow, debug=bool(settings & 128))
        self.clock = Clock()
        self.link = memory.pair(
            config,
            chunk=(1 << 16, 60, 500, 3000)[settings >> 2 & 3],
            seed=source.byte() if settings & 16 else None,
            datagram_limit=(1200, 300, 0, 1200)[settings >> 5 & 3],
        )
        self.ends = (
            Endpoint(self.link.client, config, self.clock),
            Endpoint(self.link.server, config, self.clock),
        )
        self.over = False
        """Whether somebody closed, or the network was cut."""
        self.tokens = 0
        self.carried: dict[int, tuple[Channel, list[Channel]]] = {}
        """Token of a message -> its channel, and those attached to it."""
        entry = Channel(ids.ENTRYPOINT)
        self.channels = {ids.ENTRYPOINT: entry}
        for end in self.ends:
            entry.holds(end.core.entrypoint)
        if not source.flag():
            self.link.run(10_000)

    def run(self) -> None:
        operations = (
            self.send,
            self.send,
            self.send,
            self.take,
            self.take,
            self.take,
            self.move,
            self.move,
            self.wait,
            self.finish,
            self.cancel,
            self.close_receiver,
            self.loss,
            self.whole_connection,
        )
        steps = 0
        while not self.source.empty:
            operations[self.source.below(len(operations))]()
            steps += 1
            for end in self.ends:
                if not self.over:
                    assert end.core.error is None, end.core.error
                if steps % CHECK_EVERY == 0:
                    end.check()
        for end in self.ends:
            end.lossy = False
        if self.over:
            self.end_of_connection()
        else:
            self.end()

    # What the applications do

    def half(self, end: Endpoint, kind: type[Half]) -> Half | None:
        """One that the application has; recent ones by small numbers."""
        found = [half for half in end.halves if isinstance(half, kind)]
        return found[-1 - self.source.below(len(found))] if found else None

    def end_of(self, how: int) -> Endpoint:
        return self.ends[how & 1]

    def send(self) -> None:
        how = self.source.byte()
        end = self.end_of(how)
        half = self.half(end, SenderHalf)
        if not isinstance(half, SenderHalf):
            return
        if how & 2:
            end.wait_writable(half)
        attaches = []
        if how & 4 and len(self.channels) + 2 <= MOST_CHANNELS:
            shape = self.source.byte()
            attaches = [
                Attach(keep_sender=bool(shape & 2 << index), is_oneshot=bool(shape & 8 << index))
                for index in range(1 + (shape & 1))
            ]
        mode = MODES[how >> 3 & 3]
        headers = ((b"k", bytes(900)),) if how >> 5 == 7 else ()
        payload = self.tokens.to_bytes(TOKEN, "little") + bytes(SIZES[how >> 5])
        before = half.unreliable.next if half.unreliable else 0
        if end.send(half, payload, attaches, mode, headers) is None:
            return
        datagram = (half.unreliable.next if half.unreliable else 0) > before
        channel = self.channels[half.channel]
        channel.sent.append((self.tokens, mode, datagram))
        if ids.oneshot(channel.id):
            channel.finished = True
        inner = []
        for attach in attaches:
            assert attach.half is not None
            made = self.channels[attach.half.channel] = Channel(attach.half.channel)
            made.holds(attach.half)
            inner.append(made)
        self.carried[self.tokens] = channel, inner
        self.tokens += 1

    def take(self) -> None:
        how = self.source.byte()
        end = self.end_of(how)
        half = self.half(end, ReceiverHalf)
        if isinstance(half, ReceiverHalf):
            self.take_from(end, half, drop=bool(how & 128))

    def take_from(self, end: Endpoint, half: ReceiverHalf, *, drop: bool = False) -> bool:
        received = end.take(half)
        if received is None:
            return False
        token = int.from_bytes(bytes(received.payload)[:TOKEN], "little")
        channel, inner = self.carried[token]
        assert channel.id == half.channel, "from another channel"
        assert token not in channel.taken, "delivered twice"
        channel.taken.append(token)
        for (attached, _), made in zip(received.attachments, inner, strict=True):
            assert attached.channel == made.id
            made.holds(attached)
            if drop:
                end.drop(attached)
                if isinstance(attached, ReceiverHalf):
                    made.closed = True
                elif attached.state is SenderState.CANCELLED:
                    made.cancelled = True
        return True

    def move(self) -> None:
        for _ in range(1 + self.source.below(20)):
            self.link.step()

    def wait(self) -> None:
        self.advance(WAITS[self.source.below(len(WAITS))])

    def finish(self) -> None:
        end = self.end_of(self.source.byte())
        half = self.half(end, SenderHalf)
        if isinstance(half, SenderHalf) and end.finish(half):
            self.channels[half.channel].finished = True

    def cancel(self) -> None:
        end = self.end_of(self.source.byte())
        half = self.half(end, SenderHalf)
        if isinstance(half, SenderHalf) and end.cancel(half):
            self.channels[half.channel].cancelled = True

    def close_receiver(self) -> None:
        end = self.end_of(self.source.byte())
        half = self.half(end, ReceiverHalf)
        if isinstance(half, ReceiverHalf):
            self.channels[half.channel].closed = True
            end.close_receiver(half)

    def loss(self) -> None:
        """From now on each side's datagrams vanish, or arrive twice, or neither."""
        how = self.source.byte()
        for side, end in enumerate(self.ends):
            end.lossy, end.doubling = bool(how & 1 << side), bool(how & 4 << side)

    def whole_connection(self) -> None:
        """Rare: what comes after it is a run of its own."""
        how = self.source.byte()
        end = self.end_of(how)
        if how < 32:
            end.answer()  # misuse, but for a server that did not answer yet
        elif how < 48:
            self.over = True
            end.close(how >> 1 & 3)
        elif how < 56:
            self.over = True
            self.link.cut()

    def advance(self, seconds: float) -> None:
        """Lets time pass, waking each core at each of its deadlines."""
        until = self.clock.now + seconds
        while True:
            self.link.run(100_000)
            due = [
                deadline
                for end in self.ends
                if (deadline := end.core.next_deadline()) is not None and deadline <= until
            ]
            if not due:
                break
            self.clock.now = max(self.clock.now, min(due))
            for end in self.ends:
                end.wake()
        self.clock.now = until
        if any(0 < end.core.close_by <= until for end in self.ends):
            self.link.expire_linger()
        self.link.run(100_000)

    # The end

    def settle(self) -> None:
        """Everything is read as it comes, until nothing moves any more."""
        idle = 0
        while idle < 3:
            self.advance(1.1)
            moved = False
            for end in self.ends:
                for half in end.halves:  # grows as it is read
                    while isinstance(half, ReceiverHalf) and self.take_from(end, half):
                        moved = True
                end.check()
            idle = 0 if moved else idle + 1

    def end(self) -> None:
        for _ in range(3):
            self.settle()
            for end in self.ends:
                for half in end.senders:
                    if half.state is SenderState.OPEN:
                        self.channels[half.channel].finished = end.finish(half)
        self.settle()
        for end in self.ends:
            assert end.core.error is None, end.core.error
            assert end.core.ready
            snapshot = end.core.snapshot()
            assert not any(snapshot.values()), snapshot
            assert end.core.held_streams == 0
            registry = end.core._registry
            assert not registry._pending_tables and not registry._ended_early
            assert not end.carrier.snapshot()["queued"]
        for channel in self.channels.values():
            check_order(channel)
            check_end(channel)

    def end_of_connection(self) -> None:
        """Closed or cut: what is here can be read, and then every handle says how it ended."""
        self.settle()
        self.advance(10.0)
        self.settle()
        for end in self.ends:
            assert isinstance(end.core.error, ConnectionLost)
            assert len(end.ends) == 1
            end.check_final()
        for channel in self.channels.values():
            check_order(channel)


def check_order(channel: Channel) -> None:
    """Nothing twice, and ORDERED messages in the order of sending, with nothing between missing."""
    assert max(Counter(channel.taken).values(), default=1) == 1
    order = [token for token, mode, _ in channel.sent if mode is Mode.ORDERED]
    taken = [token for token in channel.taken if token in set(order)]
    assert taken == order[: len(taken)], "out of order"


def check_end(channel: Channel) -> None:
    """Both sides agree on how the channel ended, and on what came through."""
    sender, receiver = channel.sender, channel.receiver
    if sender is not None:
        assert sender.state is SenderState.ENDED
        assert not sender.unsettled or sender.error is not None
        assert isinstance(sender.error, (ChannelError, type(None)))
    if receiver is None:
        return
    assert receiver.state is ReceiverState.CLOSED and not receiver.queue
    error = receiver.error
    reliable = {token for token, _, datagram in channel.sent if not datagram}
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
        assert [datagram for _, _, datagram in channel.sent] == [True]
    else:
        assert isinstance(error, LostInTransit), error
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


def target(data: bytes) -> None:
    """One input."""
    World(Source(data)).run()
