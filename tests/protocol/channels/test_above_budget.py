"""Above a budget one message goes on at a time: the oldest whose reader waits for it."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from aqueduct._speedups.base.accounts import Account
from aqueduct.config import DEFAULT, Config, Flow, Timing
from aqueduct.errors import Busy
from aqueduct.protocol.common.receiver import ReceiverHalf
from aqueduct.protocol.common.sender import SenderHalf
from tests.protocol.channels.test_lifecycle import open_channel
from tests.protocol.channels.test_room import budget_used, partial
from tests.support.pair import Pair

KEY = b"part"


def narrow(**flow: Any) -> Config:
    found = Flow(
        receive_budget=50_000,
        channel_receive_bytes=50_000,
        initial_window=4096,
        message_overhead=100,
        stall_rate=1000,
        **flow,
    )
    return dataclasses.replace(DEFAULT, flow=found, timing=Timing(stall_deadline=4.0))


def announced(headers: Any) -> tuple[int, int] | None:
    """Where a message begins in its batch, and the bytes of that."""
    value = dict(headers).get(KEY)
    if value is None:
        return None
    offset, total = value.split(b"/")
    return int(offset), int(total)


def reader(half: ReceiverHalf) -> ReceiverHalf:
    """Who reads it keeps what it takes, and tells when it waits."""
    half.queue.keeps = half.queue.told = True
    half.queue.placement, half.queue.placement_key = (lambda headers, size: None), KEY
    half.queue.announce = announced
    return half


def waiting(pair: Pair) -> int:
    return pair.server.core.snapshot()["starved_receivers"]


def test_one_at_a_time_goes_on_above_the_budget_until_it_is_whole() -> None:
    pair = Pair(narrow())
    (first, one), (second, other), (third, last) = (
        open_channel(pair, keep_sender=True) for _ in range(3)
    )
    stream = partial(pair.client, first.channel, 0, 60_000)
    pair.run()
    assert pair.server.core.budget.place is one.queue
    pair.client.send(second, bytes(60_000))
    pair.client.send(third, bytes(60_000))
    pair.run()
    assert waiting(pair) == 2 and budget_used(pair) < 62_000
    pair.client.core._shared.outgoing.reset(stream, 0)
    pair.run()
    # Nobody told that its reader does not wait: each goes on once the one before it is whole.
    assert waiting(pair) == 0
    assert len(other.queue) == len(last.queue) == 1


def test_what_nobody_waits_for_does_not_go_on_above_the_budget() -> None:
    pair = Pair(narrow())
    pairs = [open_channel(pair, keep_sender=True) for _ in range(3)]
    for sender, half in pairs:
        reader(half)
        pair.client.send(sender, bytes(60_000))
    pair.run()
    assert waiting(pair) == 3 and pair.server.core.budget.place is None
    last = pairs[2][1]
    last.queue.want(True, "reader")
    pair.server.core.use_room(pair.now)
    pair.run()
    assert [len(half.queue) for _, half in pairs] == [0, 0, 1]
    assert pair.server.core.budget.place is last.queue
    last.queue.want(False)
    pairs[0][1].queue.want(True, "another")
    pair.server.core.use_room(pair.now)
    pair.run()
    assert waiting(pair) == 2  # its reader has not given it back
    pairs[1][1].queue.want(True, "reader")  # it will not, before it has this one
    pair.server.core.use_room(pair.now)
    pair.run()
    assert waiting(pair) == 1


def test_a_batch_that_has_begun_finds_room_for_all_of_its_messages() -> None:
    pair = Pair(narrow())
    (sender, half), (other, theirs) = (open_channel(pair, keep_sender=True) for _ in range(2))
    reader(half)
    pair.client.send(sender, bytes(10_000), headers=((KEY, b"0/40000"),))
    pair.run()
    assert half.queue.pledged == 30_000 and budget_used(pair) > 40_000
    pair.client.send(other, bytes(4000))
    pair.client.send(other, bytes(20_000))
    pair.run()
    assert len(theirs.queue) == 1  # the rest of the batch has its room
    for offset in (10_000, 20_000, 30_000):
        pair.client.send(sender, bytes(10_000), headers=((KEY, b"%d/40000" % offset),))
    pair.run()
    assert half.queue.pledged == 0 and len(half.queue) == 4
    while pair.server.take(half) is not None:
        pass
    half.queue.lease(b"the batch").give_back()
    pair.server.core.use_room(pair.now)
    pair.run()
    assert len(theirs.queue) == 2


@pytest.mark.parametrize("end", ["cancelled", "closed", "lost"])
def test_the_rest_of_a_batch_that_will_not_come_returns(end: str) -> None:
    pair = Pair(narrow())
    sender, half = open_channel(pair, keep_sender=True)
    reader(half)
    account = pair.server.core.budget.process
    pair.client.send(sender, bytes(10_000), headers=((KEY, b"0/40000"),))
    pair.run()
    assert pair.server.take(half) is not None
    assert half.queue.owed > 10_000 and account.used == budget_used(pair) > 40_000
    if end == "cancelled":
        pair.client.cancel(sender)
    elif end == "closed":
        pair.server.close_receiver(half)
    else:
        pair.server.core.close(1, "gone")
    pair.run()
    assert half.queue.pledged == 0
    half.queue.let_go()
    assert account.used == 0
    if end != "lost":
        assert budget_used(pair) == 0


def slow(pair: Pair) -> tuple[SenderHalf, ReceiverHalf]:
    """A channel on which half a message has come, for which there is just room."""
    sender, half = open_channel(pair, keep_sender=True)
    partial(pair.client, sender.channel, 0, 45_000)
    pair.run()
    return sender, half


def test_what_comes_too_slowly_fails_once_others_wait() -> None:
    pair = Pair(narrow())
    _, half = slow(pair)
    pair.advance(60.0)
    assert half.error is None  # nobody waits for its room
    second, other = open_channel(pair, keep_sender=True)
    reader(other)
    pair.client.send(second, bytes(40_000))
    pair.run()
    pair.advance(3.0)
    assert half.error is None
    pair.advance(4.0)
    assert isinstance(half.error, Busy)
    for name in ("Flow.receive_budget", "Flow.stall_rate", "Timing.stall_deadline"):
        assert name in str(half.error)
    assert len(other.queue) == 1
    assert pair.server.core.next_deadline() is None or waiting(pair) == 0


def test_others_of_the_process_that_wait_count_as_those_of_the_connection() -> None:
    class Other:
        wake = None

    pair = Pair(narrow())
    _, half = slow(pair)
    account: Account = pair.server.core.budget.process
    account.waiting[Other()] = None
    pair.advance(10.0)
    assert isinstance(half.error, Busy)
    assert "Flow.process_receive_budget" in str(half.error)


def test_a_whole_batch_that_is_not_given_back_leaves_its_place_in_the_end() -> None:
    pair = Pair(narrow())
    (first, one), (second, other) = (open_channel(pair, keep_sender=True) for _ in range(2))
    reader(one).queue.want(True, "one")
    reader(other)
    pair.client.send(first, bytes(60_000))
    pair.run()
    assert pair.server.take(one) is not None
    lease = one.queue.lease(b"")
    one.queue.want(False)
    assert pair.server.core.budget.place is one.queue
    pair.client.send(second, bytes(60_000))
    other.queue.want(True, "other")
    pair.run()
    pair.advance(3.0)
    assert waiting(pair) == 1
    pair.advance(4.0)
    assert len(other.queue) == 1 and waiting(pair) == 0
    lease.give_back()
