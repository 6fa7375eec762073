"""What waits to be taken: in its order, and its charge returns when it goes."""

from __future__ import annotations

import threading
from collections import OrderedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aqueduct._speedups.base.accounts import Account
from aqueduct._speedups.base.buffers import AlignedBuffer
from aqueduct._speedups.channels.receiver import (
    MemoryLease,
    MessageBatch,
    ReceiveBudget,
    Received,
    ReceiveQueue,
)
from aqueduct._speedups.channels.tracker import ReceivedNumbers
from tests.speedups.strategies import client_decoder, message


def filled(
    charges: list[tuple[int, bool]],
) -> tuple[ReceiveBudget, ReceiveQueue, list[Received]]:
    """A queue of messages: what each is charged, and whether it is reliable."""
    budget = ReceiveBudget()
    queue = ReceiveQueue(budget)
    messages = []
    for number, (charge, reliable) in enumerate(charges):
        received = Received(number, (), (), b"", charge, reliable=reliable)
        messages.append(received)
        queue.charge(charge, 1)
        assert queue.push(received) is (number == 0)
    return budget, queue, messages


@given(st.lists(st.tuples(st.integers(0, 1 << 40), st.booleans()), max_size=12), st.integers(0, 12))
def test_messages_go_in_their_order_and_return_their_charge(
    charges: list[tuple[int, bool]], evictions: int
) -> None:
    budget, queue, messages = filled(charges)
    unreliable = [received for received in messages if not received.reliable]
    assert not budget.freed
    evicted: list[Received] = []
    for count in range(evictions):
        assert queue.evict(evicted) is (count < len(unreliable))
    assert evicted == unreliable[:evictions]
    assert queue.evictions == len(evicted)
    gone = evicted.copy()
    live = [received for received in messages if received not in evicted]
    for place, expected in enumerate(live):
        assert list(queue) == live[place:]
        assert len(queue) == queue.outstanding == len(live) - place
        assert budget.budget_used == queue.charged == sum(each.charge for each in live[place:])
        assert budget.freed == any(received.charge for received in gone)
        assert queue.take() is expected
        gone.append(expected)
    assert queue.take() is None
    assert not queue and not queue.evict([])
    assert budget.budget_used == queue.charged == queue.outstanding == 0


def test_what_is_dropped_returns_its_charge() -> None:
    budget, queue, messages = filled([(10, True), (20, False), (30, False)])
    queue.evict([])
    assert queue.drop() == [messages[0], messages[2]]
    assert not queue and queue.take() is None and not queue.evict([])
    assert budget.budget_used == queue.charged == queue.outstanding == 0
    assert queue.drop() == []


def test_a_waiting_stream_is_told_of_room_in_its_own_queue() -> None:
    budget, queue, _ = filled([(10, True), (20, True)])
    queue.take()
    assert not budget.relieved
    queue.waiting = OrderedDict({"a stream": None})
    queue.take()
    assert list(budget.relieved) == [queue]
    budget.relieved.clear()
    queue.charge(5)
    assert not budget.relieved


def test_runs_are_queued_and_charged() -> None:
    decoder, numbers = client_decoder(), ReceivedNumbers()
    decoder.auto_admit = 1000
    budget = ReceiveBudget()
    queue = ReceiveQueue(budget)
    pieces = [message(0, b"ab"), message(1, bytes(5000))[:100], message(1, bytes(5000))[100:]]
    pending, seen = -1, []
    for piece in pieces:
        decoder.feed(piece)
        run = MessageBatch()
        run.read(decoder, numbers, 7, 1 << 20, pending)
        pending = run.pending
        seen.append((queue.add(run), len(queue), queue.outstanding, queue.charged))
        assert budget.budget_used == queue.charged
    assert seen == [(True, 1, 1, 9), (False, 1, 2, 5016), (False, 2, 2, 5016)]
    assert [queue.take().number for _ in range(2)] == [0, 1]  # type: ignore[union-attr]
    assert (queue.charged, queue.outstanding) == (0, 0)
    assert queue.add(MessageBatch()) is False
    assert not queue


def test_a_run_may_return_what_was_charged_too_much() -> None:
    decoder, numbers = client_decoder(), ReceivedNumbers()
    decoder.auto_admit = 1000
    budget = ReceiveBudget()
    queue = ReceiveQueue(budget)
    queue.charge(1007, 1)
    decoder.feed(message(0, b"ab"))
    run = MessageBatch()
    run.read(decoder, numbers, 7, 1 << 20, 1000)
    assert run.charge == -998
    assert queue.add(run) is True
    assert (queue.charged, queue.outstanding, budget.budget_used) == (9, 1, 9)
    assert budget.freed


def test_two_queues_share_a_budget() -> None:
    budget = ReceiveBudget()
    first, second = ReceiveQueue(budget), ReceiveQueue(budget)
    first.charge(5)
    second.charge(7)
    second.charge(-3)
    assert (first.charged, second.charged, budget.budget_used) == (5, 4, 9)


def test_a_queue_has_a_budget_and_messages() -> None:
    with pytest.raises(TypeError):
        ReceiveQueue(None)  # type: ignore[arg-type]
    queue = ReceiveQueue(ReceiveBudget())
    with pytest.raises(TypeError):
        queue.push("no message")  # type: ignore[arg-type]


def leased(payload: object, charge: int = 100) -> tuple[ReceiveBudget, ReceiveQueue, MemoryLease]:
    """A budget, a queue that keeps, and the lease of its one message."""
    budget, queue, _ = filled([(charge, True)])
    queue.keeps = True
    assert queue.take() is not None
    assert budget.budget_used == queue.charged == queue.owed == charge
    return budget, queue, queue.lease(payload)


def test_a_lease_has_the_charge_until_it_is_given_back() -> None:
    budget, queue, lease = leased(b"")
    assert (queue.charged, queue.held, lease.size) == (0, 100, 100)
    assert budget.budget_used == budget.process.used == 100
    lease.give_back()
    lease.give_back()  # without effect
    assert (queue.held, lease.size, budget.budget_used, budget.process.used) == (0, 0, 0, 0)


def test_a_lease_ends_with_its_buffer_or_with_itself() -> None:
    buffer = AlignedBuffer(4096)
    budget, queue, lease = leased(buffer)
    account = budget.process
    del lease
    assert (queue.held, account.alive, account.lent, account.kept) == (100, 4096, 4096, 0)
    view = memoryview(buffer)
    del buffer
    assert queue.held == 100
    del view
    assert (queue.held, budget.budget_used, account.alive, account.lent) == (0, 0, 0, 0)
    budget, queue, lease = leased(b"small")
    del lease
    assert (queue.held, budget.budget_used) == (0, 0)


def test_what_is_kept_beyond_the_lease_is_counted_and_charged_no_more() -> None:
    buffer = AlignedBuffer(4096)
    budget, _, lease = leased(buffer)
    lease.give_back()
    assert (budget.budget_used, budget.process.kept) == (0, 4096)
    del buffer, lease
    assert budget.process.kept == 0


def test_letting_go_gives_back_all_leases_and_what_belongs_to_none() -> None:
    budget, queue, lease = leased(AlignedBuffer(4096))
    queue.let_go()
    assert (queue.held, lease.size, budget.budget_used, budget.process.lent) == (0, 0, 0, 0)
    lease.give_back()
    assert budget.budget_used == budget.process.used == 0
    budget, queue, messages = filled([(10, True), (20, True)])
    queue.keeps = True
    queue.take()
    queue.let_go()
    assert budget.budget_used == queue.charged == messages[1].charge


def test_a_connection_that_is_over_counts_for_the_process_no_more() -> None:
    account = Account()
    budget, queue, _ = filled([(100, True)])
    budget.process = budget.shown = account
    account.charge(100)
    budget.detach()
    assert account.used == 0
    assert queue.take() is not None  # what is there can be read
    assert budget.budget_used == account.used == 0


def test_a_budget_that_is_dropped_counts_no_more() -> None:
    account = Account()
    budget = ReceiveBudget()
    budget.process = account
    ReceiveQueue(budget).charge(100)
    assert account.used == 100
    del budget
    assert account.used == 0


def test_while_others_wait_a_connection_may_have_half() -> None:
    account = Account()
    one, other = ReceiveBudget(), ReceiveBudget()
    for budget in (one, other):
        budget.process, budget.process_budget, budget.budget = account, 1000, 1 << 40
    ReceiveQueue(one).charge(400)
    assert one.fits_process(600)
    account.waiting[other] = None
    assert one.fits_process(100) and not one.fits_process(101)
    assert other.fits_process(600) and not other.fits_process(601)


def test_the_place_above_the_budget_passes_on_where_its_reader_waits_elsewhere() -> None:
    budget = ReceiveBudget()
    has, wants = ReceiveQueue(budget), ReceiveQueue(budget)
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
    took: list[ReceiveQueue] = []
    rounds, threads = 2000, 4
    barrier = threading.Barrier(threads, timeout=30)

    def admit() -> None:
        for _ in range(rounds):
            budget = ReceiveBudget()
            budget.process, budget.process_budget, budget.budget = account, 100, 1 << 40
            queue = ReceiveQueue(budget)
            barrier.wait()
            if queue.charge_above(1000):
                took.append(queue)
            barrier.wait()
            queue.leave_place()
            queue.charge(-queue.charged, -queue.outstanding)
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
        queue = ReceiveQueue(budget)
        for _ in range(5000):
            if queue.charge_within(100):
                peaks.append(account.used)
                queue.charge(-100, -1)

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
    first, second = ReceiveQueue(one), ReceiveQueue(other)
    assert first.charge_above(1000) and account.place is first and one.place is first
    assert not second.charge_above(1000)
    assert other.place is None and other.budget_used == 0 and account.used == 1000
    assert not second.charge_within(1)


def test_what_a_batch_unpacks_to_is_charged_until_its_reader_is_done() -> None:
    budget = ReceiveBudget()
    queue = ReceiveQueue(budget)
    payload = AlignedBuffer(100)
    lease = queue.lease(payload)
    assert lease.unpack(10_000)
    assert budget.budget_used == queue.held == 10_000
    del payload  # the batch does not point into it
    held = budget.budget_used
    assert 0 < held <= 10_000
    lease.give_back()
    assert budget.budget_used == queue.held == 0
    assert lease.unpack(10_000)  # its reader is done: nothing counts
    assert budget.budget_used == 0
