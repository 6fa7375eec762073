"""What waits to be taken: in its order, and its charge returns when it goes."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aqueduct._speedups.base.accounts import Account
from aqueduct._speedups.base.buffers import AlignedBuffer
from aqueduct._speedups.channels.message_batches import MessageBatch, Received
from aqueduct._speedups.channels.receiver import MemoryLease, ReceiveBudget, ReceiverBase
from aqueduct._speedups.channels.tracker import ReceivedNumbers
from tests.speedups.strategies import client_decoder, message


def filled(
    charges: list[tuple[int, bool, bool]],
) -> tuple[ReceiveBudget, ReceiverBase, list[Received]]:
    """An inbox of messages: what each is charged, whether it is reliable, whether dropped."""
    budget = ReceiveBudget()
    inbox = ReceiverBase(budget)
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
    budget = ReceiveBudget()
    inbox = ReceiverBase(budget)
    pieces = [message(0, b"ab"), message(1, bytes(5000))[:100], message(1, bytes(5000))[100:]]
    pending, seen = -1, []
    for piece in pieces:
        decoder.feed(piece)
        run = MessageBatch()
        run.read(decoder, numbers, 7, 1 << 20, pending)
        pending = run.pending
        seen.append((inbox.add(run), len(inbox.queue), inbox._outstanding, inbox.charged))
        assert budget.budget_used == inbox.charged
    assert seen == [(True, 1, 1, 9), (False, 1, 2, 5016), (False, 2, 2, 5016)]
    assert [inbox.take().number for _ in range(2)] == [0, 1]  # type: ignore[union-attr]
    assert (inbox.charged, inbox._outstanding) == (0, 0)
    assert inbox.add(MessageBatch()) is False
    assert inbox.queue == ()


def test_a_run_may_return_what_was_charged_too_much() -> None:
    decoder, numbers = client_decoder(), ReceivedNumbers()
    decoder.auto_admit = 1000
    budget = ReceiveBudget()
    inbox = ReceiverBase(budget)
    inbox._charge(1007)
    inbox._outstanding = 1
    decoder.feed(message(0, b"ab"))
    run = MessageBatch()
    run.read(decoder, numbers, 7, 1 << 20, 1000)
    assert run.charge == -998
    assert inbox.add(run) is True
    assert (inbox.charged, inbox._outstanding, budget.budget_used) == (9, 1, 9)
    assert budget.freed


def test_two_inboxes_share_a_budget() -> None:
    budget = ReceiveBudget()
    first, second = ReceiverBase(budget), ReceiverBase(budget)
    first._charge(5)
    second._charge(7)
    second._charge(-3)
    assert (first.charged, second.charged, budget.budget_used) == (5, 4, 9)


def test_an_inbox_has_a_budget_and_messages() -> None:
    with pytest.raises(TypeError):
        ReceiverBase(None)  # type: ignore[arg-type]
    inbox = ReceiverBase(ReceiveBudget())
    inbox.queue = deque(["no message"])  # type: ignore[list-item]
    with pytest.raises(TypeError):
        inbox.take()


def leased(payload: object, charge: int = 100) -> tuple[ReceiveBudget, ReceiverBase, MemoryLease]:
    """A budget, an inbox that keeps, and the lease of its one message."""
    budget, inbox, _ = filled([(charge, True, False)])
    inbox.keeps = True
    assert inbox.take() is not None
    assert budget.budget_used == inbox.charged == inbox.owed == charge
    return budget, inbox, inbox.lease(payload)


def test_a_lease_has_the_charge_until_it_is_given_back() -> None:
    budget, inbox, lease = leased(b"")
    assert (inbox.charged, inbox.held, lease.size) == (0, 100, 100)
    assert budget.budget_used == budget.process.used == 100
    lease.give_back()
    lease.give_back()  # without effect
    assert (inbox.held, lease.size, budget.budget_used, budget.process.used) == (0, 0, 0, 0)


def test_a_lease_ends_with_its_buffer_or_with_itself() -> None:
    buffer = AlignedBuffer(4096)
    budget, inbox, lease = leased(buffer)
    account = budget.process
    del lease
    assert (inbox.held, account.alive, account.lent, account.kept) == (100, 4096, 4096, 0)
    view = memoryview(buffer)
    del buffer
    assert inbox.held == 100
    del view
    assert (inbox.held, budget.budget_used, account.alive, account.lent) == (0, 0, 0, 0)
    budget, inbox, lease = leased(b"small")
    del lease
    assert (inbox.held, budget.budget_used) == (0, 0)


def test_what_is_kept_beyond_the_lease_is_counted_and_charged_no_more() -> None:
    buffer = AlignedBuffer(4096)
    budget, _, lease = leased(buffer)
    lease.give_back()
    assert (budget.budget_used, budget.process.kept) == (0, 4096)
    del buffer, lease
    assert budget.process.kept == 0


def test_letting_go_gives_back_all_leases_and_what_belongs_to_none() -> None:
    budget, inbox, lease = leased(AlignedBuffer(4096))
    inbox.let_go()
    assert (inbox.held, lease.size, budget.budget_used, budget.process.lent) == (0, 0, 0, 0)
    lease.give_back()
    assert budget.budget_used == budget.process.used == 0
    budget, inbox, messages = filled([(10, True, False), (20, True, False)])
    inbox.keeps = True
    inbox.take()
    inbox.let_go()
    assert budget.budget_used == inbox.charged == messages[1].charge


def test_a_connection_that_is_over_counts_for_the_process_no_more() -> None:
    account = Account()
    budget, inbox, _ = filled([(100, True, False)])
    budget.process = budget.shown = account
    account.charge(100)
    budget.detach()
    assert account.used == 0
    assert inbox.take() is not None  # what is there can be read
    assert budget.budget_used == account.used == 0


def test_a_budget_that_is_dropped_counts_no_more() -> None:
    account = Account()
    budget = ReceiveBudget()
    budget.process = account
    budget.spent(100)
    assert account.used == 100
    del budget
    assert account.used == 0


def test_while_others_wait_a_connection_may_have_half() -> None:
    account = Account()
    one, other = ReceiveBudget(), ReceiveBudget()
    for budget in (one, other):
        budget.process, budget.process_budget, budget.budget = account, 1000, 1 << 40
    one.spent(400)
    assert one.fits_process(600)
    account.waiting[other] = None
    assert one.fits_process(100) and not one.fits_process(101)
    assert other.fits_process(600) and not other.fits_process(601)


def test_the_place_above_the_budget_passes_on_where_its_reader_waits_elsewhere() -> None:
    budget = ReceiveBudget()
    has, wants = ReceiverBase(budget), ReceiverBase(budget)
    has.told = wants.told = True
    has.want(True, 1)
    budget.place = has
    wants.want(True, 1)
    assert budget.place is has  # its reader still waits for it, as far as is known
    has.want(False)
    wants.want(True, 2)
    assert budget.place is has  # another reader
    wants.want(True, 1)
    assert budget.place is None
    assert budget.freed


def test_only_one_of_two_threads_takes_the_place_above_the_budget_of_a_process() -> None:
    account = Account()
    took: list[ReceiverBase] = []
    rounds, threads = 2000, 4
    barrier = threading.Barrier(threads, timeout=30)

    def admit() -> None:
        for _ in range(rounds):
            budget = ReceiveBudget()
            budget.process, budget.process_budget, budget.budget = account, 100, 1 << 40
            inbox = ReceiverBase(budget)
            barrier.wait()
            if inbox.charge_above(1000):
                took.append(inbox)
            barrier.wait()
            inbox.leave_place()
            inbox._charge(-inbox.charged)
            barrier.wait()

    workers = [threading.Thread(target=admit) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
        assert not worker.is_alive()
    assert len(took) == rounds
    assert account.used == 0 and account.place is None


def test_threads_that_charge_within_a_budget_never_exceed_it() -> None:
    account = Account()
    peaks: list[int] = []

    def admit() -> None:
        budget = ReceiveBudget()
        budget.process, budget.process_budget, budget.budget = account, 250, 1 << 40
        inbox = ReceiverBase(budget)
        for _ in range(5000):
            if inbox.charge_within(100):
                peaks.append(account.used)
                inbox._charge(-100)

    workers = [threading.Thread(target=admit) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
        assert not worker.is_alive()
    assert max(peaks) <= 200 and account.used == 0


def test_a_refused_place_changes_nothing() -> None:
    account = Account()
    one, other = ReceiveBudget(), ReceiveBudget()
    for budget in (one, other):
        budget.process, budget.process_budget, budget.budget = account, 100, 100
    first, second = ReceiverBase(one), ReceiverBase(other)
    assert first.charge_above(1000) and account.place is first and one.place is first
    assert not second.charge_above(1000)
    assert other.place is None and other.budget_used == 0 and account.used == 1000
    assert not second.charge_within(1)


def test_what_a_batch_unpacks_to_is_charged_until_its_reader_is_done() -> None:
    budget = ReceiveBudget()
    inbox = ReceiverBase(budget)
    payload = AlignedBuffer(100)
    lease = inbox.lease(payload)
    lease.grow(10_000)
    assert budget.budget_used == inbox.held == 10_000
    del payload  # the batch does not point into it
    held = budget.budget_used
    assert 0 < held <= 10_000
    lease.give_back()
    assert budget.budget_used == inbox.held == 0
    lease.grow(10_000)  # its reader is done: nothing counts
    assert budget.budget_used == 0
