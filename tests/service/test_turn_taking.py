"""Whose turn it is, without a service: lines of calls, places, and a queue."""

from __future__ import annotations

from collections import Counter

import hypothesis.strategies as st
from hypothesis import given

from aqueduct.service.turns import Fit, Line, Turns


def line(peer: str, concurrency: int = 1) -> Line[str]:
    return Line(peer, concurrency)


def served(turns: Turns[str], count: int) -> str:
    """What has its turn, one after the other."""
    found = []
    for _ in range(count):
        run = turns.take(0.0)
        found += [item for _, item in run]
        turns.done([each for each, _ in run], 0.0)
    return " ".join(found)


def test_peers_take_turns_and_so_do_their_calls() -> None:
    turns: Turns[str] = Turns(1, 10)
    flood = [line("a") for _ in range(4)]
    for number, each in enumerate(flood):
        for batch in range(2):
            turns.add(each, f"a{number}.{batch}", 0.0)
    turns.add(line("b"), "b", 0.0)
    turns.add(line("c"), "c", 0.0)
    assert served(turns, 10) == "a0.0 b c a1.0 a2.0 a3.0 a0.1 a1.1 a2.1 a3.1"
    assert turns.take(0.0) == []


def test_no_more_than_the_places_run() -> None:
    turns: Turns[str] = Turns(2, 10)
    lines = [line("a") for _ in range(3)]
    for each in lines:
        turns.add(each, "x", 0.0)
    runs = [turns.take(0.0) for _ in range(3)]
    assert [len(run) for run in runs] == [1, 1, 0]
    assert turns.running == 2
    turns.done([lines[0]], 0.0)
    assert [each for each, _ in turns.take(0.0)] == [lines[2]]


def test_a_call_has_no_more_at_once_than_its_concurrency() -> None:
    turns: Turns[str] = Turns(5, 10)
    one, two = line("a"), line("a", concurrency=2)
    for each in (one, two):
        for name in "xyz":
            turns.add(each, name, 0.0)
    taken = [turns.take(0.0) for _ in range(4)]
    assert [run[0][0] if run else None for run in taken] == [one, two, two, None]
    turns.done([two], 0.0)
    assert turns.take(0.0) == [(two, "z")]


def test_the_queue_is_full_when_places_are_taken_and_as_many_wait() -> None:
    turns: Turns[str] = Turns(1, 2)
    first = line("a")
    turns.add(first, "x", 0.0)
    turns.add(first, "y", 0.0)
    assert not turns.full
    turns.take(0.0)
    assert (turns.newcomers, turns.full) == (0, False)
    for _ in range(2):
        turns.add(line("a"), "x", 0.0)
    assert (turns.newcomers, turns.full) == (2, True)
    turns.done([first], 0.0)  # it has begun: what it has waiting takes no room of the queue
    assert (turns.newcomers, len(turns.waiting), turns.full) == (2, 3, False)


def test_a_queue_of_none_lets_in_what_finds_a_place() -> None:
    turns: Turns[str] = Turns(1, 0)
    assert not turns.full
    turns.add(line("a"), "x", 0.0)
    turns.take(0.0)
    assert turns.full and turns.displaced("b") is None


def test_a_call_of_another_peer_gets_the_room_of_one_that_floods() -> None:
    turns: Turns[str] = Turns(1, 4)
    lines = [line("flood") for _ in range(3)]
    for each in (*lines, line("b")):
        turns.add(each, "x", 0.0)
    assert turns.displaced("flood") is None
    assert turns.displaced("c") is turns.displaced("b") is lines[2]
    turns.leave(lines[2])
    assert (turns.newcomers, turns.displaced("b")) == (3, None)
    assert turns.displaced("c") is lines[1]


def test_who_leaves_gives_up_its_place_in_the_queue_at_once() -> None:
    turns: Turns[str] = Turns(1, 2)
    running, waiting = line("a"), line("a")
    for each in (running, waiting):
        turns.add(each, "x", 0.0)
    turns.take(0.0)
    turns.leave(waiting)
    turns.leave(waiting)
    assert (turns.newcomers, dict(turns.waiting)) == (0, {})
    turns.leave(running)  # it runs until it has ended
    assert turns.running == 1
    turns.done([running], 0.0)
    assert (turns.running, turns.take(0.0)) == (0, [])


def test_a_wait_counts_from_when_nothing_of_the_call_runs() -> None:
    turns: Turns[str] = Turns(1, 2)
    each = line("a")
    turns.add(each, "x", 1.0)
    turns.add(each, "y", 2.0)
    assert each.since == 1.0
    turns.take(3.0)
    assert each.since is None
    turns.done([each], 4.0)
    assert each.since == 4.0


def choosing(most: int, unlike: str = "-"):
    taken: list[str] = []

    def choose(item: str) -> Fit:
        if item[0] == unlike:
            return Fit.PASSED
        if len(taken) >= most:
            return Fit.FULL
        taken.append(item)
        return Fit.TAKEN

    return choose


def test_a_run_takes_of_all_in_turn_and_passes_over_what_does_not_fit() -> None:
    turns: Turns[str] = Turns(1, 10)
    lines = {name: line(name[0]) for name in ("a1", "a2", "b1", "c1")}
    for name, each in lines.items():
        for item in "xy" if name != "b1" else "-y":
            turns.add(each, f"{item}{name}" if item != "-" else "-", 0.0)
    run = turns.take(0.0, choosing(4))
    assert [item for _, item in run] == ["xa1", "xc1", "xa2", "yc1"]
    assert {each for each, _ in run} == {lines["a1"], lines["a2"], lines["c1"]}
    assert [each.active for each in lines.values()] == [1, 1, 0, 1]
    turns.done(list(dict.fromkeys(each for each, _ in run)), 0.0)
    # What was passed over has its turn first, and a peer no more of them than before.
    assert served(turns, 4) == "- ya1 yb1 ya2"


def test_what_a_run_has_of_a_call_counts_once() -> None:
    turns: Turns[str] = Turns(2, 10)
    each = line("a")
    for name in "xyz":
        turns.add(each, name, 0.0)
    assert len(turns.take(0.0, choosing(2))) == 2
    assert each.active == 1
    assert turns.take(0.0, choosing(2)) == []  # its concurrency is 1
    turns.done([each], 0.0)
    assert turns.take(0.0, choosing(2)) == [(each, "z")]


@given(
    places=st.integers(1, 3),
    steps=st.lists(st.tuples(st.sampled_from("atdlm"), st.integers(0, 5)), max_size=60),
)
def test_the_counts_are_those_of_a_plain_model(places: int, steps: list[tuple[str, int]]) -> None:
    turns: Turns[str] = Turns(places, 100)
    lines = [line("ab"[number % 2], 1 + number // 4) for number in range(6)]
    runs: list[list[Line[str]]] = []
    for what, which in steps:
        each = lines[which]
        if what == "a" and not each.gone:
            turns.add(each, "x", 0.0)
        elif what in "tm":
            run = turns.take(0.0, choosing(3) if what == "m" else None)
            if run:
                runs.append(list(dict.fromkeys(each for each, _ in run)))
            else:
                able = [each for each in lines if each.items and each.active < each.concurrency]
                assert not able or turns.running == places
        elif what == "d" and runs:
            turns.done(runs.pop(which % len(runs)), 0.0)
        elif what == "l":
            turns.leave(each)
        assert turns.running == len(runs) <= places
        active = Counter(each for run in runs for each in run)
        assert [each.active for each in lines] == [active[each] for each in lines]
        waiting = {each for each in lines if each.items and not each.active}
        assert set(turns.waiting) == waiting
        assert turns.newcomers == sum(not each.begun for each in waiting)
        assert all(
            each.queued == (bool(each.items) and each.active < each.concurrency) for each in lines
        )
