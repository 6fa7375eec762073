"""The Balancer as a state machine: it says what to do, and waits for nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

import pyarrow as pa
import pytest

from aqueduct.client.balanced_spec import BalancedSpec
from aqueduct.client.balancer import Balancer, NextStep
from aqueduct.client.call import END
from aqueduct.client.call_metrics import CallMetrics
from aqueduct.client.thread_call import NEWS, Failed
from aqueduct.errors import ConnectFailed, ConnectionLost, DeadlineExceeded
from aqueduct.rpc.request import IDEMPOTENT, ONE_TO_ONE
from tests.support.calls import NUMBERS, numbers


@dataclass(eq=False)
class Place:
    """An address."""

    bare: str


@dataclass(eq=False)
class Connected:
    """The use of a connection."""

    place: Place
    reconnected: bool = False
    released: int = 0

    def on_end(self, cancel: Any) -> None: ...

    def take_resumes(self) -> int:
        return 0

    def release(self, *, close: bool = False) -> None:
        self.released += 1


@dataclass(eq=False)
class Scripted:
    """A call that does what the test says."""

    accepted: bool = False
    schema: pa.Schema | None = NUMBERS
    capabilities: frozenset[str] = frozenset({ONE_TO_ONE, IDEMPOTENT})
    counters: Mapping[str, int] = field(default_factory=dict)
    room: bool = True
    settled: int = 0
    sent_bytes: int = 0
    sent: list[int] = field(default_factory=list)
    over: str = ""

    def hold(self, size: int) -> None: ...

    def push(self, batch: pa.RecordBatch) -> int:
        self.sent.append(batch["id"][0].as_py())
        self.sent_bytes += 8
        return len(self.sent) - 1

    def finish(self) -> None:
        self.over = "finished"

    def popped(self, found: Any) -> Any:
        return found

    def expect(self, *, room: bool = False, acceptance: bool = False) -> bool:
        return (room and self.room) or (acceptance and self.accepted)

    def set_waiting(self, waiting: bool) -> None: ...

    def check(self) -> None: ...

    def abandon(self) -> None:
        self.over = "abandoned"


class Script:
    """The addresses of the work; connections come when the test gives them."""

    ends_badly = False
    over = False

    def __init__(self, *names: str) -> None:
        self.places: tuple[Place, ...] = tuple(map(Place, names))
        self.wanted: list[tuple[Place, Any]] = []
        self.calls: list[tuple[Any, Scripted]] = []

    def targets(self) -> tuple[Place, ...]:
        return self.places

    def in_trouble(self, target: Place, now: float) -> bool:
        return False

    def note(self, target: Place, *, trouble: bool) -> None: ...

    def connect(self, target: Place, *, wanted: Any, done: Any, at_once: bool) -> None:
        self.wanted.append((target, done))

    def open_call(
        self, lease: Any, news: Any, tag: Any, *, deadline: float | None, repeated: int
    ) -> Any:
        call = Scripted()
        self.calls.append((tag, call))
        return call


class Work:
    """A Balancer and all around it. ``now`` is the test's."""

    def __init__(self, *names: str, opened: Any = None, **options: Any) -> None:
        self.script = Script(*names)
        self.news: SimpleQueue[tuple[Any, Any]] = SimpleQueue()
        spec = BalancedSpec(handler="echo", **{"backoff": 1000.0, "hedge": 1.0, **options})
        self.balancer = Balancer(
            spec, connector=self.script, news=self.news, numbers=CallMetrics(), opened=opened
        )
        self.now = 1e9  # any pause of a Backoff is over by then

    def step(self) -> NextStep:
        return self.balancer.step(self.now)

    def read(self) -> None:
        """All news; answers are those of ``numbers``."""
        while not self.news.empty():
            answered = self.balancer.read(*self.news.get())
            if answered is not None:
                call, number, payload = answered
                self.balancer.answered(call, number, len(payload), numbers(*payload))

    def connect(self, found: Any = None) -> Connected:
        """The oldest attempt to connect succeeds, or fails by ``found``."""
        place, done = self.script.wanted.pop(0)
        lease = Connected(place)
        done(lease if found is None else Failed(found))
        self.read()
        return lease

    def accept(self, place: int = -1) -> tuple[Any, Scripted]:
        tag, call = self.script.calls[place]
        call.accepted = True
        self.news.put((tag, NEWS))
        self.read()
        return tag, call

    def answer(self, tag: Any, number: int, *values: int) -> None:
        self.news.put((tag, (number, bytes(values))))
        self.read()

    def answers(self) -> list[int]:
        found = []
        while (answer := self.balancer.next_answer()) is not None:
            assert answer.batch is not None
            found.append(answer.batch["id"][0].as_py())
        return found

    def give(self, *values: int) -> None:
        for value in values:
            assert self.step() is NextStep.GIVE
            self.balancer.give(numbers(value))
            assert self.step() is NextStep.STEP


def test_nothing_is_sent_before_a_call_is_accepted():
    work = Work("a")
    assert work.step() is NextStep.WAIT and len(work.script.wanted) == 1
    assert work.step() is NextStep.WAIT and len(work.script.wanted) == 1  # one is on its way
    lease = work.connect()
    assert work.step() is NextStep.WAIT
    tag, call = work.accept()
    work.give(1)
    assert call.sent == [1] and not work.balancer.is_over()
    work.answer(tag, 0, 1)
    assert work.answers() == [1]
    assert work.step() is NextStep.GIVE
    work.balancer.give(None)
    assert work.balancer.is_over() is False and call.over == "finished"
    work.news.put((tag, END))
    work.read()
    assert work.balancer.is_over() and lease.released == 1


def test_an_acceptance_need_not_say_the_schema_of_answers():
    """As one over ReactiveSocket, where a service may have no description."""
    heard: list[Any] = []
    work = Work("a", opened=lambda schema, capabilities: heard.append((schema, capabilities)))
    work.step()
    work.connect()
    work.script.calls[0][1].schema = None
    work.accept()
    assert heard == [(None, frozenset({ONE_TO_ONE, IDEMPOTENT}))]


def test_input_on_its_way_is_not_asked_for_again():
    work = Work("a")
    work.step()
    work.connect()
    work.accept()
    assert work.step() is NextStep.GIVE
    work.balancer.fetching = True
    assert work.step() is NextStep.WAIT
    work.balancer.give(numbers(1))
    assert work.step() is NextStep.STEP


def test_the_window_bounds_what_is_asked_for():
    work = Work("a", in_flight=2)
    work.step()
    work.connect()
    tag, call = work.accept()
    work.give(1, 2)
    assert work.step() is NextStep.WAIT
    work.answer(tag, 1, 2)  # it waits for its turn, and fills the window
    assert work.step() is NextStep.WAIT and work.answers() == []
    work.answer(tag, 0, 1)
    assert work.answers() == [1, 2] and work.step() is NextStep.GIVE
    assert call.sent == [1, 2]


def test_what_has_no_answer_goes_into_the_next_call():
    work = Work("a", "b", retries=1)
    work.step()
    work.connect()
    tag, first = work.accept()
    work.give(1, 2, 3)
    assert first.sent == [1, 2, 3]
    assert [place.bare for place, _ in work.script.wanted] == ["b"]  # for the second batch
    work.answer(tag, 1, 2)
    work.news.put((tag, Failed(ConnectionLost("cut"))))
    work.read()
    work.connect()
    other, second = work.accept()
    assert [work.step() for _ in range(2)] == [NextStep.STEP] * 2
    assert second.sent == [1, 3]
    work.answer(tag, 2, 3)  # of a call that is over: not wanted
    work.answer(other, 0, 1)
    work.answer(other, 1, 3)
    assert work.answers() == [1, 2, 3]
    work.balancer.close(well=False)
    assert second.over == "abandoned"


def test_without_retries_a_batch_that_is_lost_ends_the_work():
    work = Work("a", "b")
    work.step()
    work.connect()
    tag, _ = work.accept()
    work.give(1)
    work.news.put((tag, Failed(ConnectionLost("cut"))))
    with pytest.raises(ConnectionLost, match=r"tried once .* at a and b \(retries=0\)"):
        work.read()


def test_addresses_that_come_and_go():
    work = Work("a", "b")
    work.step()
    work.connect()
    _, call = work.accept()
    work.script.places = (Place("c"),)
    assert work.step() is NextStep.WAIT
    assert call.over == "finished"
    assert [place.bare for place, _ in work.script.wanted] == ["c"]


def test_a_connection_to_an_address_that_is_gone_is_given_back():
    work = Work("a")
    work.step()
    work.script.places = (Place("b"),)
    work.step()
    assert work.connect().released == 1 and work.script.calls == []


def test_a_call_that_says_nothing_is_hedged():
    work = Work("a", "b")
    now = work.balancer._calls  # the time of the attempts is the real one
    work.step()
    began = next(iter(now.opening))
    work.now = began + 0.5
    assert work.step() is NextStep.WAIT and len(work.script.wanted) == 1
    assert 0.4 < (work.balancer.begin_wait(work.now) or 0) < 0.6
    work.now = began + 1.5
    work.step()
    assert [place.bare for place, _ in work.script.wanted] == ["a", "b"]


def test_the_deadline_and_a_closed_client_end_the_work():
    work = Work("a", deadline=5.0)
    with pytest.raises(DeadlineExceeded, match="the call was not done within its deadline of 5 s"):
        work.step()
    work = Work("a")
    work.script.over = True
    with pytest.raises(ConnectionLost, match="the client of a is closed"):
        work.step()


def test_an_address_that_cannot_be_reached_counts_once_no_other_is_left():
    work = Work("a", "b")
    work.now = 0.0  # no pause is over by then
    work.step()
    work.connect(ConnectFailed("refused"))
    work.now = 1e9
    work.script.wanted.clear()
    service = work.balancer._calls.services[1]
    work.balancer._calls.begin(service)
    with pytest.raises(ConnectFailed, match=r"tried once .* at a and b \(retries=0\)"):
        work.connect(ConnectFailed("refused"))


def silent_pair(**options: Any) -> Work:
    """Two addresses that say nothing: an attempt is always on its way somewhere."""
    work = Work("a", "b", **options)
    work.step()
    work.now = 2e9  # above the limit for hedging
    work.step()
    assert [place.bare for place, _ in work.script.wanted] == ["a", "b"]
    return work


@pytest.mark.parametrize("retries", [0, 2])
def test_addresses_that_say_nothing_count_once_each_has_failed(retries):
    work = silent_pair(retries=retries)
    silent = ConnectFailed("nobody answers")
    for _ in range(2 * retries + 1):
        work.connect(silent)
        assert work.step() is NextStep.WAIT  # it is tried again, beside the other one
        assert len(work.script.wanted) == 2
    with pytest.raises(ConnectFailed, match=rf"without an answer at a and b \(retries={retries}"):
        work.connect(silent)


def test_an_address_that_is_gone_is_not_waited_for():
    work = silent_pair()
    work.connect(ConnectFailed("nobody answers"))
    work.script.places = work.script.places[:1]
    with pytest.raises(ConnectFailed, match="nobody answers"):
        work.step()
        work.script.wanted.pop(0)  # of b
        work.connect(ConnectFailed("nobody answers"))


def test_an_answer_begins_the_count_anew():
    work = silent_pair()
    work.connect(ConnectFailed("nobody answers"))
    work.connect()
    tag, _ = work.accept()
    work.give(1)
    work.step()
    work.answer(tag, 0, 1)
    work.news.put((tag, Failed(ConnectionLost("cut"))))
    work.read()  # b has failed since, and a has not
    assert work.answers() == [1]


def test_untried_addresses_come_before_those_that_failed():
    work = Work("a", "b", "c")
    work.step()
    work.connect(ConnectFailed("nobody answers"))
    work.step()
    work.now = 2e9
    work.step()
    assert [place.bare for place, _ in work.script.wanted] == ["b", "c"]
