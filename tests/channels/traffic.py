"""Random traffic by a seed, and a model of what it must lead to."""

from __future__ import annotations

import asyncio
import gc
import random
from dataclasses import dataclass, field
from typing import Any

from aqueduct import Message, Mode, Receiver, Sender, channel
from aqueduct.errors import (
    Cancelled,
    ConnectionLost,
    Finished,
    LostInTransit,
    MessageLost,
    ReceiverClosed,
)
from tests.channels.peers import Peers, ending, eventually, within

TOKEN = 4
MODES = (Mode.ORDERED, Mode.ORDERED, Mode.UNORDERED, Mode.UNRELIABLE)


CLOSED = ((ReceiverClosed, ReceiverClosed), (None, ReceiverClosed))
"""How both sides of a closed channel end; the latter if all had come, but not the finish."""


@dataclass
class Line:
    """One channel, as its two applications know it."""

    sender: Sender | None
    """Where it is: the half that was kept, or came with a message; None: nobody holds it."""
    receiver: Receiver | None
    oneshot: bool
    mode: Mode
    carried_by: int = -1
    """The message that takes a half of it to the other side; -1 before, 0 for the first of all."""
    keeps_sender: bool = True
    """Whether its maker sends on it, or reads."""
    sent: list[int] = field(default_factory=list)
    read: list[int] = field(default_factory=list)
    finished: bool = False
    cancelled: bool = False
    closed: bool = False
    dropped: bool = False
    send_end: type[Exception] | None = None
    read_end: type[Exception] | None = None


@dataclass
class Parcel:
    """One message."""

    line: Line
    mode: Mode
    size: int
    lines: list[Line]
    read: bool = False


class Traffic:
    """A script of both applications. See ``run``."""

    def __init__(self, peers: Peers, seed: int, *, lines: int = 40) -> None:
        self.peers = peers
        self.chance = random.Random(seed)
        self.most_lines = lines
        self.parcels: dict[int, Parcel] = {}
        self.tasks: list[asyncio.Task[None]] = []
        entry = Line(peers.client.entrypoint, peers.server.entrypoint, False, Mode.ORDERED, 0)
        self.lines = [entry]
        self._read(entry)

    async def run(self, steps: int) -> None:
        """Does so many random things, ends what is open, and waits for all ends."""
        actions = {
            self.send: 60,
            self.pause: 25,
            self.make: 8,
            self.finish: 3,
            self.cancel: 2,
            self.close: 2,
            self.drop: 1,
        }
        for _ in range(steps):
            await self.chance.choices(list(actions), list(actions.values()))[0]()
        while any(not task.done() for task in self.tasks):
            for line in self.lines:
                await self._end(line)
            await asyncio.sleep(0.01)
        await asyncio.gather(*self.tasks)
        for line in self.lines:
            if line.sender is not None and line.carried_by >= 0:
                line.send_end = _kind(await ending(line.sender))
            if line.receiver is not None and line.read_end is None and line.carried_by >= 0:
                line.read_end = _kind(await ending(line.receiver))

    # What the applications do

    def _open(self) -> Line | None:
        """A channel to do something with: those of late more often."""
        found = [line for line in self.lines if line.sender is not None and not self._over(line)]
        return found[-1 - int(self.chance.random() ** 2 * len(found))] if found else None

    def _over(self, line: Line) -> bool:
        sender = line.sender
        return line.finished or line.cancelled or sender is None or sender.error is not None

    async def make(self) -> None:
        """A pair that stays at home for now; messages on it go out when it does."""
        if len(self.lines) < self.most_lines:
            oneshot, mode = self.chance.random() < 0.2, self.chance.choice(MODES)
            sender, receiver = channel(oneshot=oneshot, mode=mode)
            self.lines.append(Line(sender, receiver, oneshot, mode))

    async def send(self) -> None:
        line = self._open()
        if line is None or line.sender is None or (line.oneshot and line.sent):
            return
        if not line.sender.writable and self.chance.random() < 0.9:
            return
        number = len(self.parcels) + 1
        size = TOKEN + int(self.chance.random() ** 4 * 4_000)
        mode = line.mode if self.chance.random() < 0.8 else self.chance.choice(MODES)
        cargo = []
        if line.carried_by >= 0 and self.chance.random() < 0.4:
            at_home = [other for other in self.lines if other.carried_by < 0]
            cargo = self.chance.sample(at_home, min(len(at_home), self.chance.choice((1, 1, 2))))
        attachments: list[Sender | Receiver] = []
        for other in cargo:
            assert other.sender is not None and other.receiver is not None
            # A sender that has been used cannot be sent; a receiver always can.
            other.keeps_sender = bool(other.sent or other.finished or other.cancelled)
            other.keeps_sender |= self.chance.random() < 0.5
            attachments.append(other.receiver if other.keeps_sender else other.sender)
        self.parcels[number] = Parcel(line, mode, size, cargo)
        line.sent.append(number)
        line.finished |= line.oneshot
        line.sender.send_nowait(
            number.to_bytes(TOKEN, "big") + bytes(size - TOKEN), attachments=attachments, mode=mode
        )
        for other in cargo:
            other.carried_by = number
            if other.keeps_sender:
                other.receiver = None
            else:
                other.sender = None
                self._read(other)

    async def pause(self) -> None:
        await asyncio.sleep(self.chance.choice((0.0, 0.0, 0.002, 0.01)))

    async def finish(self) -> None:
        line = self._open()
        if line is not None and line.sender is not None and line is not self.lines[0]:
            line.finished = True
            line.sender.finish()

    async def cancel(self) -> None:
        line = self._open()
        if line is not None and line.sender is not None and line is not self.lines[0]:
            line.cancelled = True
            line.sender.cancel()

    async def close(self) -> None:
        found = [
            line for line in self.lines[1:] if line.receiver is not None and line.carried_by > 0
        ]
        if found:
            line = self.chance.choice(found)
            assert line.receiver is not None
            line.closed |= line.read_end is None  # it may have ended; what is unread is dropped
            line.receiver.close()

    async def drop(self) -> None:
        """Forgets a handle as code does that lost interest."""
        line = self._open()
        if line is not None and line.carried_by > 0:
            line.dropped = True
            line.sender = None
            gc.collect(0)

    async def _end(self, line: Line) -> None:
        """What is open is finished, so that the script ends."""
        if line.sender is not None and line.carried_by >= 0 and not self._over(line):
            if line.oneshot:
                line.cancelled = True
                line.sender.cancel()
            else:
                line.finished = True
                line.sender.finish()

    # What arrives

    def _read(self, line: Line) -> None:
        self.tasks.append(asyncio.create_task(self._reader(line)))

    async def _reader(self, line: Line) -> None:
        lazy = self.chance.random() < 0.3
        receiver = line.receiver
        assert receiver is not None
        try:
            while True:
                if lazy:
                    await asyncio.sleep(0.005)
                self._took(line, await within(receiver.receive()))
        except (Finished, Cancelled, ReceiverClosed, LostInTransit, MessageLost) as error:
            line.read_end = type(error)

    def _took(self, line: Line, message: Message) -> None:
        number = int.from_bytes(bytes(message.payload[:TOKEN]), "big")
        parcel = self.parcels[number]
        assert parcel.line is line, "a message came on another channel than its own"
        assert not parcel.read, "a message came twice"
        assert message.size == parcel.size
        parcel.read = True
        line.read.append(number)
        assert len(message.attachments) == len(parcel.lines)
        for attachment, other in zip(message.attachments, parcel.lines, strict=True):
            handle: Any = attachment.handle
            if other.keeps_sender:
                other.receiver = handle
                self._read(other)
            else:
                assert other.sender is None
                other.sender = handle

    # What it must have led to

    def check(self) -> None:
        """Compares what was read, and how all ended, with what was sent and done."""
        for line in self.lines:
            if line.carried_by >= 0:
                self._check_messages(line)
                self._check_ends(line)

    def _check_messages(self, line: Line) -> None:
        ordered = [n for n in line.sent if self.parcels[n].mode is Mode.ORDERED]
        read = [n for n in line.read if self.parcels[n].mode is Mode.ORDERED]
        # In order and without a hole.
        assert read == ordered[: len(read)] or line.oneshot, (line, ordered)
        if line.read_end is Finished and not line.closed:
            missing = set(line.sent) - set(line.read)
            assert line.finished, line
            assert all(self.parcels[n].mode is Mode.UNRELIABLE for n in missing), line
            # A datagram cannot hold this much: it went by stream, and reliably.
            limit = self.peers.client.carrier.datagram_limit
            assert all(self.parcels[n].size <= limit for n in missing), line

    def _check_ends(self, line: Line) -> None:
        carried = self.parcels.get(line.carried_by)
        arrived = carried is None or carried.read
        ends = (line.send_end, line.read_end)
        if not arrived:
            # One half is here, the other nowhere: nobody got it.
            gone = (LostInTransit, ReceiverClosed, None) if line.keeps_sender else ()
            allowed = {*gone, LostInTransit, Cancelled}
            if not line.keeps_sender:
                allowed |= {ReceiverClosed}
            mine = line.send_end if line.keeps_sender else line.read_end
            assert line.dropped or mine in allowed, line
            return
        assert LostInTransit not in ends, line
        unused = line.oneshot and not line.sent
        if line.read_end is Cancelled:
            assert line.cancelled or line.dropped or unused, line
        if line.read_end is ReceiverClosed:
            assert line.closed, line
        if line.dropped:
            return
        assert line.read_end is not None
        if unused and line.finished:  # which reads as cancelled (AQ-R28)
            assert ends in ((None, Cancelled), *CLOSED), line
            return
        assert ends in (
            (None, Finished),
            (None, MessageLost),
            *CLOSED,
            (Cancelled, Cancelled),
            (Cancelled, ReceiverClosed),  # both at once
        ), line
        if line.read_end is MessageLost:
            assert line.oneshot and line.sent, line


def _kind(error: Exception | None) -> type[Exception] | None:
    assert not isinstance(error, ConnectionLost), error
    return type(error) if error is not None else None


async def play(peers: Peers, seed: int, steps: int, **options: int) -> Traffic:
    """Runs a script and checks it; nothing of it may be left on the connection."""
    traffic = Traffic(peers, seed, **options)
    await traffic.run(steps)
    traffic.check()
    del traffic.tasks[:]
    await eventually(lambda: all(side.core.channels == 0 for side in peers.sides))
    await peers.forgotten(channels=0)
    return traffic
