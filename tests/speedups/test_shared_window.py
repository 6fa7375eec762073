"""What all calls of a connection have under way, beside what each of them has."""

from __future__ import annotations

from aqueduct._speedups.calls.batch_sender import InFlightWindow, SharedWindow


def window(shared: SharedWindow, woken: list[str] | None, name: str = "") -> InFlightWindow:
    """A window of eight batches; None: of somebody who looks again when an answer came."""
    found = InFlightWindow(8, 1 << 20)
    found.share(shared, None if woken is None else lambda: woken.append(name))
    return found


def test_while_it_is_full_a_call_sends_one_batch_once_it_is_waited_for() -> None:
    shared, woken = SharedWindow(100), list[str]()
    busy, idle = window(shared, woken, "busy"), window(shared, woken, "idle")
    assert busy.open and idle.open
    busy.send(100)
    assert shared.used == 100
    assert not busy.open and not idle.open
    busy.want(True)
    assert not busy.open  # it has one under way
    woken.clear()
    idle.want(True)
    assert woken == ["idle"]
    assert idle.open
    idle.send(50)
    assert not idle.open
    idle.settle(0)
    assert idle.open
    idle.answering = True  # the rest of that answer is to come first
    assert not idle.open
    idle.answering = False
    idle.want(False)
    assert not idle.open


def test_a_waiting_call_is_woken_once_there_is_ample_room() -> None:
    shared, woken = SharedWindow(100), list[str]()
    busy = window(shared, [])
    for _ in range(4):
        busy.send(25)
    waiting = [window(shared, woken, name) for name in ("one", "other")]
    assert not any(each.open for each in waiting)
    busy.settle(0)
    assert not woken  # each of them would be woken for each batch
    busy.settle(1)
    assert woken == ["one", "other"]
    assert all(each.open for each in waiting)


def test_a_batch_counts_until_it_is_answered_or_the_next_one_is_taken() -> None:
    shared = SharedWindow(100)
    call = window(shared, None)
    for size in (10, 20, 30, 40):
        call.send(size)
    call.settle(1, False)
    assert call.settled == 2 and shared.used == 90
    call.settle(0, True)  # an earlier one is answered: its handler may still hold the last
    assert shared.used == 90
    call.settle(1, True)
    assert shared.used == 70
    call.settle(2, False)
    call.settle(2, False)
    assert call.settled == 3 and shared.used == 70
    call.settle(3, True)
    assert call.settled == 4 and shared.used == 0


def test_answers_in_any_order_give_back_what_they_had() -> None:
    shared = SharedWindow(100)
    call = window(shared, None)
    for size in (10, 20, 30):
        call.send(size)
    assert call.settle_one(1) and not call.settle_one(1)
    assert shared.used == 40
    assert call.settle_one(0) and call.settle_one(2)
    assert shared.used == 0


def test_whatever_ends_a_call_gives_back_what_it_had() -> None:
    shared, woken = SharedWindow(100), list[str]()
    ended, dropped = window(shared, []), window(shared, None)
    ended.send(60)
    ended.send(20)
    dropped.send(20)
    ended.settle(0, False)
    waiting = window(shared, woken, "waiting")
    assert not waiting.open
    del dropped
    assert shared.used == 80
    ended.end()
    ended.end()
    assert shared.used == 0 and woken == ["waiting"]
    ended.send(1000)  # a thread may not have heard of the end
    assert shared.used == 0 and ended.open


def test_what_was_sent_before_counts_and_who_has_ended_is_not_woken() -> None:
    shared, woken = SharedWindow(100), list[str]()
    early = InFlightWindow(8, 1 << 20)
    early.send(100)
    early.want(True)
    assert early.open
    early.share(shared, lambda: woken.append("early"))
    early.share(SharedWindow(1), None)
    assert shared.used == 100 and not early.open
    other = window(shared, woken, "other")
    assert not other.open
    other.end()
    early.settle(0)
    assert woken == ["early"]
