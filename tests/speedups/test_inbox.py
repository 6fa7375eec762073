"""What waits to be taken: in its order, and its charge returns when it goes."""

from __future__ import annotations

from collections import OrderedDict, deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aqueduct._speedups.inbox import Budget, Inbox
from aqueduct._speedups.runs import Received, Run
from aqueduct._speedups.tracker import ReceivedNumbers
from tests.speedups.strategies import client_decoder, message


def filled(charges: list[tuple[int, bool, bool]]) -> tuple[Budget, Inbox, list[Received]]:
    """An inbox of messages: what each is charged, whether it is reliable, whether dropped."""
    budget = Budget()
    inbox = Inbox(budget)
    messages = []
    for number, (charge, reliable, dropped) in enumerate(charges):
        received = Received(number, (), (), b"", charge, reliable=reliable)
        received.dropped = dropped
        messages.append(received)
        if dropped:
            inbox._dropped += 1
            continue
        inbox._charge(charge)
        inbox._outstanding += 1
        if not reliable:
            inbox._unreliable_queue = deque([*inbox._unreliable_queue, received])
    if messages:
        inbox.queue = deque(messages)
    return budget, inbox, messages


@given(st.lists(st.tuples(st.integers(0, 1 << 40), st.booleans(), st.booleans()), max_size=12))
def test_messages_go_in_their_order_and_return_their_charge(
    charges: list[tuple[int, bool, bool]],
) -> None:
    budget, inbox, messages = filled(charges)
    live = [received for received in messages if not received.dropped]
    sum_of_charges = sum(received.charge for received in live)
    assert budget.budget_used == inbox.charged == sum_of_charges
    assert not budget.freed
    for place, expected in enumerate(live):
        assert inbox.take() is expected
        sum_of_charges -= expected.charge
        assert budget.budget_used == inbox.charged == sum_of_charges
        assert budget.freed == any(received.charge for received in live[: place + 1])
        assert inbox._outstanding == len(live) - place - 1
        unreliable = [received for received in live[place + 1 :] if not received.reliable]
        assert list(inbox._unreliable_queue) == unreliable
    assert inbox.take() is None
    assert inbox._dropped == 0
    assert inbox.queue == inbox._unreliable_queue == ()


def test_who_waits_is_told_of_room_of_its_own() -> None:
    budget, inbox, _ = filled([(10, True, False), (20, True, False)])
    inbox.take()
    assert not budget.relieved
    inbox.waiting = OrderedDict({"a stream": None})
    inbox.take()
    assert list(budget.relieved) == [inbox]
    budget.relieved.clear()
    inbox._charge(5)
    assert not budget.relieved


def test_runs_are_queued_and_charged() -> None:
    decoder, numbers = client_decoder(), ReceivedNumbers()
    decoder.auto_admit = 1000
    budget = Budget()
    inbox = Inbox(budget)
    pieces = [message(0, b"ab"), message(1, bytes(5000))[:100], message(1, bytes(5000))[100:]]
    pending, seen = -1, []
    for piece in pieces:
        decoder.feed(piece)
        run = Run()
        run.read(decoder, numbers, 7, 1 << 20, pending)
        pending = run.pending
        seen.append((inbox.add(run), len(inbox.queue), inbox._outstanding, inbox.charged))
        assert budget.budget_used == inbox.charged
    assert seen == [(True, 1, 1, 9), (False, 1, 2, 5016), (False, 2, 2, 5016)]
    assert [inbox.take().number for _ in range(2)] == [0, 1]  # type: ignore[union-attr]
    assert (inbox.charged, inbox._outstanding) == (0, 0)
    assert inbox.add(Run()) is False
    assert inbox.queue == ()


def test_a_run_may_return_what_was_charged_too_much() -> None:
    decoder, numbers = client_decoder(), ReceivedNumbers()
    decoder.auto_admit = 1000
    budget = Budget()
    inbox = Inbox(budget)
    inbox._charge(1007)
    inbox._outstanding = 1
    decoder.feed(message(0, b"ab"))
    run = Run()
    run.read(decoder, numbers, 7, 1 << 20, 1000)
    assert run.charge == -998
    assert inbox.add(run) is True
    assert (inbox.charged, inbox._outstanding, budget.budget_used) == (9, 1, 9)
    assert budget.freed


def test_two_inboxes_share_a_budget() -> None:
    budget = Budget()
    first, second = Inbox(budget), Inbox(budget)
    first._charge(5)
    second._charge(7)
    second._charge(-3)
    assert (first.charged, second.charged, budget.budget_used) == (5, 4, 9)


def test_an_inbox_has_a_budget_and_messages() -> None:
    with pytest.raises(TypeError):
        Inbox(None)  # type: ignore[arg-type]
    inbox = Inbox(Budget())
    inbox.queue = deque(["no message"])  # type: ignore[list-item]
    with pytest.raises(TypeError):
        inbox.take()
