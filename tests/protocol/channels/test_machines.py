"""Random applications on a bad network, by hypothesis and by seed (``tests/support/world.py``).

What must hold stands in ``tests/support/claims.py``. Hypothesis finds short examples; the seeds
make
long runs, and each that fails names the command that replays it (``tests/support/simulate.py``).
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from aqueduct.protocol.common.sender import Mode
from tests.support import simulate
from tests.support.world import CHOICES, WEATHERS, Settings, World

PICKS = st.integers(0, 99).map(lambda number: number / 100)
SECONDS = st.sampled_from((0.0, 0.001, 0.02, 0.1, 0.5, 2.5))
SIZES = st.one_of(st.integers(0, 40), st.integers(0, 3000), st.integers(0, 200_000))
ATTACH = st.lists(st.tuples(st.booleans(), st.booleans()), max_size=4)
EXAMPLES = settings(max_examples=60, stateful_step_count=40)
HEADERS = st.one_of(st.just(-1), st.integers(0, 5000))


class Applications(RuleBasedStateMachine):
    """Steps of one world; shrinks towards few steps, wide settings and a good network."""

    choices = CHOICES

    def __init__(self) -> None:
        super().__init__()
        self.world: World | None = None

    @initialize(data=st.data(), seed=st.integers(0, 1 << 16), weather=st.sampled_from(WEATHERS[:4]))
    def begin(self, data: Any, seed: int, weather: Any) -> None:
        chosen = {name: st.sampled_from(values) for name, values in self.choices.items()}
        drawn = st.builds(Settings, **chosen)
        self.world = World(data.draw(drawn), data.draw(st.none() | drawn), seed, weather)

    @property
    def at_work(self) -> World:
        assert self.world is not None
        return self.world

    @rule(
        pick=PICKS,
        count=st.integers(1, 20),
        size=SIZES,
        mode=st.sampled_from(Mode),
        attach=ATTACH,
        header=HEADERS,
        patient=st.booleans(),
    )
    def send(self, **arguments: Any) -> None:
        self.at_work.send(**arguments)

    @rule(pick=PICKS, size=SIZES, mode=st.sampled_from(Mode), attach=ATTACH)
    def send_one(self, **arguments: Any) -> None:
        self.at_work.send(**arguments)

    @rule(pick=PICKS, count=st.integers(1, 20), unwanted=st.integers(0, 7))
    def take(self, **arguments: Any) -> None:
        self.at_work.take(**arguments)

    @rule(pick=PICKS)
    def take_one(self, pick: float) -> None:
        self.at_work.take(pick)

    @rule(seconds=SECONDS)
    def wait(self, seconds: float) -> None:
        self.at_work.wait(seconds)

    @rule(which=st.integers(0, len(WEATHERS) - 1))
    def weather(self, which: int) -> None:
        self.at_work.weather(which)

    @rule(pick=PICKS)
    def finish(self, pick: float) -> None:
        self.at_work.finish(pick)

    @rule(pick=PICKS, full=st.booleans())
    def cancel(self, pick: float, full: bool) -> None:
        self.at_work.cancel(pick, full)

    @rule(pick=PICKS, full=st.booleans())
    def close(self, pick: float, full: bool) -> None:
        self.at_work.close(pick, full)

    @rule(pick=PICKS)
    def abandon(self, pick: float) -> None:
        self.at_work.abandon(pick)

    @rule(pick=PICKS, fails=st.booleans())
    def place(self, pick: float, fails: bool) -> None:
        self.at_work.place(pick, fails)

    @rule(pick=PICKS)
    def misuse(self, pick: float) -> None:
        self.at_work.misuse(pick)

    @rule()
    def calm(self) -> None:
        self.at_work.calm()

    def teardown(self) -> None:
        if self.world is not None and not self.world.failed:
            self.world.end()


class NarrowApplications(Applications):
    """The same where there is room for nothing."""

    choices = {name: values[-1:] for name, values in CHOICES.items()} | {
        "datagram_limit": (300, 1200),
        "debug": (0, 1),
    }


class EndedConnections(Applications):
    """The same, and the connection may end at any moment, with applications that go on."""

    @rule(client_after=SECONDS, server_after=SECONDS, swallow=st.booleans())
    def cut(self, **arguments: Any) -> None:
        self.at_work.cut(**arguments)

    @rule(by_server=st.booleans())
    def close_connection(self, by_server: bool) -> None:
        self.at_work.close_connection(by_server)


TestApplications = Applications.TestCase
TestNarrowApplications = NarrowApplications.TestCase
TestEndedConnections = EndedConnections.TestCase
TestApplications.settings = EXAMPLES
TestNarrowApplications.settings = EXAMPLES
TestEndedConnections.settings = EXAMPLES


@pytest.mark.requirement("AQ-31")
@pytest.mark.requirement("AQ-32")
@pytest.mark.requirement("AQ-36")
@pytest.mark.requirement("AQ-41")
@pytest.mark.requirement("AQ-42")
@pytest.mark.requirement("AQ-43")
@pytest.mark.requirement("AQ-44")
@pytest.mark.requirement("AQ-45")
@pytest.mark.requirement("AQ-46")
@pytest.mark.requirement("AQ-47")
@pytest.mark.requirement("AQ-R13")
@pytest.mark.requirement("AQ-R20")
@pytest.mark.requirement("AQ-R22")
@pytest.mark.requirement("AQ-R24")
@pytest.mark.requirement("AQ-R26")
@pytest.mark.requirement("AQ-R27")
@pytest.mark.requirement("AQ-R32")
@pytest.mark.requirement("AQ-R34")
@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("profile", ["any", "tiny"])
def test_a_run_loses_nothing_and_leaves_nothing(profile: str, seed: int) -> None:
    simulate.run(seed, profile)


@pytest.mark.long
@pytest.mark.parametrize("profile", sorted(simulate.PROFILES))
@pytest.mark.parametrize("block", range(11))
def test_many_runs(block: int, profile: str) -> None:
    for seed in range(200 * block, 200 * block + 200):
        simulate.run(seed, profile)
