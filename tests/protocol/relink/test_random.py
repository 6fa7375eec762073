"""Two links under random commands, pieces and cuts: each message is handed over once."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import dataclass, field

import pytest

from aqueduct.config import Relink as Settings
from aqueduct.protocol.relink import events
from aqueduct.protocol.relink.cost import CHANNEL_COST
from aqueduct.protocol.relink.handshake import Opening
from aqueduct.protocol.relink.link import Link
from aqueduct.protocol.relink.state import ChannelState
from tests.protocol.relink.pair import LinkPair, Side, plain_parts

SETTINGS = Settings(window_messages=8, window_bytes=30_000, ack_bytes=3000, ack_delay=0.05)
STEPS = 120
CHANNELS = 3

Parts = tuple[bytes, ...]


@dataclass
class Outflow:
    """A channel at its sender, from its opening to its close."""

    sent: list[Parts] = field(default_factory=list)
    commits: list[bool] = field(default_factory=list)
    """Of each message that is decided, whether it was committed."""
    results: dict[int, bool] = field(default_factory=dict)
    closing: bool = False
    closed: bool = False


@dataclass
class Inflow:
    """The same at its receiver."""

    got: dict[int, Parts] = field(default_factory=dict)
    committed: list[int] = field(default_factory=list)
    """Committed and not answered."""
    rolled_back: set[int] = field(default_factory=set)
    answers: dict[int, bool] = field(default_factory=dict)
    consumed: int = -1
    ended: bool = False


class Application:
    """What the application of one side does, and what it was told."""

    def __init__(self, side: Side, chance: random.Random) -> None:
        self.side, self.link = side, side.link
        self.chance = chance
        self.transactional = side.link.transactional  # the peer's are alike
        self.out: dict[int, list[Outflow]] = defaultdict(list)
        self.into: dict[int, list[Inflow]] = defaultdict(list)
        self._heard = 0

    def act(self) -> None:
        """One command, or none."""
        chance = self.chance
        channel, what = chance.randrange(CHANNELS), chance.random()
        if what < 0.5:
            self._send(channel)
        elif what < 0.7 and self.transactional:
            self._decide(channel)
        elif what < 0.95:
            self.work(0.7)
        else:
            self._close(channel)

    def _open(self, channel: int) -> Outflow | None:
        """The channel as it is, if it is open and not closing."""
        flows = self.out[channel]
        return flows[-1] if flows and not flows[-1].closing else None

    def _send(self, channel: int) -> None:
        chance, flows = self.chance, self.out[channel]
        if flows and flows[-1].closing and not flows[-1].closed:
            return
        sizes = [chance.choice((0, 1, 7, 8, 300, 5000)) for _ in range(chance.randrange(4))]
        if not self.link.writable(channel, sum(sizes), len(sizes)):
            return
        if not flows or flows[-1].closed:
            flows.append(Outflow())
        parts = tuple(chance.randbytes(size) for size in sizes)
        assert self.link.send(channel, parts) == [len(flows[-1].sent)]
        flows[-1].sent.append(parts)

    def _decide(self, channel: int) -> None:
        flow = self._open(channel)
        if flow is None or len(flow.commits) == len(flow.sent):
            return
        last = self.chance.randrange(len(flow.commits), len(flow.sent))
        commit = self.chance.random() < 0.6
        (self.link.commit if commit else self.link.rollback)(channel, last)
        flow.commits += [commit] * (last + 1 - len(flow.commits))

    def _close(self, channel: int) -> None:
        flow = self._open(channel)
        if flow is not None:
            flow.closing = True
            self.link.close(channel)
            if self.transactional:
                flow.commits += [False] * (len(flow.sent) - len(flow.commits))

    def work(self, share: float) -> None:
        """What a receiver does with some of what came, or with all."""
        for channel, flows in self.into.items():
            flow = flows[-1]
            while flow.committed and self.chance.random() < share:
                number = flow.committed.pop(0)
                flow.answers[number] = self.chance.random() < 0.8
                self.link.complete(channel, number, committed=flow.answers[number])
            if self.transactional or not flow.got or self.chance.random() > share:
                continue
            last = max(flow.got)
            if flow.ended and flow.consumed == last:
                continue  # the channel is gone, or is another one by now
            number = last if share == 1 else self.chance.randint(0, last)
            self.link.consume(channel, number)
            flow.consumed = max(flow.consumed, number)

    def hear(self) -> None:
        """Takes the events since the last time."""
        self.side.drain()
        check_sums(self.link)
        new, self._heard = self.side.events[self._heard :], len(self.side.events)
        for kind, *rest in new:
            if kind == events.RESULT:
                channel, numbers, committed = rest
                flow = self.out[channel][-1]
                assert not flow.results.keys() & set(numbers)
                flow.results.update(dict.fromkeys(numbers, committed))
            elif kind == events.CLOSED:
                self.out[rest[0]][-1].closed = True
            elif kind in (events.MESSAGE, events.COMMIT, events.ROLLBACK, events.CLOSE):
                self._receive(kind, *rest)

    def _receive(self, kind: str, channel: int, *rest: object) -> None:
        flows = self.into[channel]
        if not flows or (flows[-1].ended and kind != events.CLOSE):
            flows.append(Inflow())
        flow = flows[-1]
        if kind == events.CLOSE:
            flow.ended = True
        elif kind == events.MESSAGE:
            number, parts = rest
            assert isinstance(number, int)
            assert number not in flow.got
            assert number not in flow.rolled_back
            flow.got[number] = plain_parts(parts)
        else:
            first, last = rest
            assert isinstance(first, int)
            assert isinstance(last, int)
            numbers = range(first, last + 1)
            if kind == events.COMMIT:
                flow.committed += numbers
            else:
                flow.rolled_back.update(numbers)


def play(chance: random.Random, *, transactional: bool, steps: int = STEPS) -> None:
    """Lets two links live for so many steps, and compares what both sides know in the end."""
    opening = Opening(
        "random", connector_transactions=transactional, listener_transactions=transactional
    )
    pair = LinkPair(opening, SETTINGS)
    applications = [Application(side, chance) for side in pair.sides]
    for _ in range(steps):
        what = chance.random()
        if what < 0.5:
            chance.choice(applications).act()
        elif what < 0.9:
            pair.move(chance.randrange(2), chance.choice((1, 7, 8, 50, 1000, 100_000)))
        elif what < 0.95:
            pair.now += chance.random() / 10
            for side in pair.sides:
                side.link.handle_deadline(pair.now)
        elif what < 0.98:
            pair.cut()
            if chance.random() < 0.5:
                chance.choice(applications).act()
            pair.connect()
        for application in applications:
            application.hear()
    for _ in range(5):
        pair.settle()
        for application in applications:
            application.hear()
            application.work(1)
    for sender, receiver in (applications, applications[::-1]):
        for channel, flows in sender.out.items():
            assert len(flows) == len(receiver.into[channel])
            for out, into in zip(flows, receiver.into[channel], strict=True):
                check(out, into)
        assert not sender.link.unacknowledged
        if not transactional:
            link = sender.link
            channels = len(link._incoming.channels) + len(link.outgoing.channels)
            assert link.held_bytes == CHANNEL_COST * channels


def check_sums(link: Link) -> None:
    """What is kept for a whole link is in step with its channels."""
    incoming, outgoing = link._incoming, link.outgoing
    came, sent = incoming.channels.values(), outgoing.channels.values()
    assert incoming.held == sum(channel.held for channel in came)
    assert incoming.undecided == sum(channel.undecided for channel in came)
    assert incoming.drained == all(channel.settled for channel in came)
    assert outgoing.outstanding == sum(channel.outstanding_cost for channel in sent)
    undecided = {channel.identifier: channel.undecided_cost for channel in sent}
    assert set(outgoing._undecided) == {each for each, cost in undecided.items() if cost}
    assert outgoing._undecided_cost == sum(undecided.values())
    assert outgoing._closing == sum(channel.state is not ChannelState.OPEN for channel in sent)
    assert all(channel.finished == (not channel.outstanding()) for channel in sent)


def check(out: Outflow, into: Inflow) -> None:
    """What was sent came once, in order and as it was, but for what was rolled back."""
    dropped = {number for number, commit in enumerate(out.commits) if not commit}
    assert list(into.got) == sorted(into.got)
    assert set(range(len(out.sent))) - dropped <= into.got.keys()
    for number, parts in into.got.items():
        assert parts == out.sent[number] or (number in dropped and parts == ())
    assert into.rolled_back == dropped
    assert out.results.keys() == {number for number, commit in enumerate(out.commits) if commit}
    assert out.results == into.answers
    assert out.closed == out.closing == into.ended


@pytest.mark.requirement("RL-17")
@pytest.mark.requirement("RL-R7")
@pytest.mark.requirement("RL-R9")
@pytest.mark.requirement("RL-R11")
@pytest.mark.requirement("RL-R12")
@pytest.mark.requirement("RL-R13")
@pytest.mark.requirement("RL-R14")
@pytest.mark.parametrize("transactional", [False, True], ids=["plain", "transactions"])
def test_random_commands_and_cuts(transactional: bool) -> None:
    for seed in range(150):
        play(random.Random(seed), transactional=transactional)


@pytest.mark.long
@pytest.mark.parametrize("transactional", [False, True], ids=["plain", "transactions"])
def test_random_commands_and_cuts_with_many_seeds(transactional: bool) -> None:
    for seed in range(50_000):
        play(random.Random(seed), transactional=transactional)
