"""Which calls of a process may pull a large batch, and which one above the budget."""

from __future__ import annotations

import threading
from collections.abc import Callable

from aqueduct.config import Timing
from aqueduct.endpoint.accounts import SendingAccount
from aqueduct.endpoint.pulling import LARGE, PULLING, UNKNOWN, Pull

MiB = 1 << 20


class Calls:
    """Calls of one client on one account; ``queued`` and ``woken`` by name."""

    def __init__(self, budget: int, timing: Timing | None = None) -> None:
        self.account = SendingAccount()
        self.sizes: dict[str, int] = {}
        self.queued: dict[str, int] = {}
        self.woken: list[str] = []
        self.timers: list[Callable[[], object]] = []
        self._budget, self._timing = budget, timing or Timing()

    def make(self, name: str, size: int | None = 2 * MiB) -> Pull:
        """A call of a handler of its own, whose batches are known to have ``size`` bytes."""
        if size is not None:
            self.sizes[name] = size
        return Pull(
            self.account.pulls,
            self.sizes,
            name,
            peer="here",
            budget=self._budget,
            timing=self._timing,
            queued=lambda: self.queued.get(name, 0),
            wake=lambda: self.woken.append(name),
            later=lambda _, callback: self.timers.append(callback),
        )


def test_batches_are_pulled_in_the_order_of_asking_as_far_as_they_fit() -> None:
    calls = Calls(4 * MiB)
    first, second, third, fourth = map(calls.make, "abcd")
    assert first.ask() and second.ask() and calls.account.used == 4 * MiB
    assert not third.ask() and not fourth.ask() and third.waits
    first.fed(2 * MiB)
    assert calls.woken == ["c"] and third.granted and fourth.waits
    second.pulled(MiB)
    assert calls.account.used == 3 * MiB and fourth.waits
    second.posted(MiB)
    assert calls.woken == ["c", "d"] and calls.account.used == 4 * MiB
    for call in (first, second, third, fourth):
        call.end()
    assert calls.account.used == 0 and not calls.account.pulling and not calls.account.pulls.busy


def test_one_call_whose_reader_waits_exceeds_the_budget() -> None:
    calls = Calls(2 * MiB)
    holder, wanted, other = map(calls.make, "abc")
    assert holder.ask()
    assert not wanted.ask() and not other.ask()
    wanted.want(1)
    assert calls.woken == ["b"] and calls.account.pulls.place is wanted
    other.want(2)
    assert calls.woken == ["b"]
    calls.queued["b"] = 2 * MiB
    wanted.fed(2 * MiB)
    wanted.unwant()
    other.want(2)
    assert calls.woken == ["b"], "its reader is another thread, which may come back at once"
    wanted.reader = 2
    other.want(2)
    assert calls.woken == ["b", "c"], "its reader waits for another call instead"


def test_a_pull_that_takes_long_holds_up_no_others() -> None:
    calls = Calls(2 * MiB, Timing(stall_deadline=1e-6))
    idle, other = map(calls.make, "ab")
    assert idle.ask() and not other.ask()
    (tick,) = calls.timers
    tick()
    assert calls.woken == ["b"] and idle.granted and calls.account.used == 2 * MiB
    idle.fed(2 * MiB)
    assert calls.account.used == 2 * MiB  # of the other one


def test_a_pull_that_asks_for_the_answer_of_another_call_makes_room_for_it() -> None:
    calls = Calls(2 * MiB)
    outer, inner = map(calls.make, "ab")
    assert outer.ask()
    token = PULLING.set(outer)
    try:
        assert inner.ask()
    finally:
        PULLING.reset(token)
    assert calls.account.used == 2 * MiB


def test_what_a_batch_is_expected_to_have_follows_the_last_ones() -> None:
    calls = Calls(1 << 40)
    call = calls.make("new", None)
    assert call.size == UNKNOWN
    sizes = []
    for size in (100, 8 * MiB, 100, MiB, 100, 100, 100):
        call.fed(size)
        sizes.append(call.size)
    assert sizes == [0, 8 * MiB, 4 * MiB, 2 * MiB, MiB, MiB // 2, LARGE]
    assert calls.sizes == {"new": LARGE}
    assert Calls(8 * MiB).make("new", None).size == MiB  # 1/8 of a small budget


def test_a_call_that_has_ended_never_waits_and_never_counts() -> None:
    calls = Calls(MiB)
    call = calls.make("a")
    call.pulled(3 * MiB)
    call.end()
    call.end()
    assert call.ask()
    call.pulled(MiB)
    call.posted(MiB)
    assert calls.account.used == 0 and calls.account.pulls.place is None


def test_threads_that_pull_at_once_count_right() -> None:
    calls = Calls(1 << 40)

    def work(name: str) -> None:
        call = calls.make(name)
        for _ in range(2000):
            assert call.ask()
            call.pulled(MiB)
            call.posted(MiB)
        call.end()

    threads = [threading.Thread(target=work, args=(str(number),)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert calls.account.used == 0
