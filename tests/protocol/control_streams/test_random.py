"""Random conversations of two cores of the control-stream draft, by seed and by hypothesis.

What is done stands in ``tests/support/world.py``, what must hold in ``tests/support/claims.py``.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize

from tests.protocol.channels.test_machines import Applications, EndedConnections
from tests.support import simulate
from tests.support.selection import mostly_long
from tests.support.world import BIDI_CHOICES, CHOICES, WEATHERS, Settings, World

DIALECT = "control-streams"
SHORT = 15
"""Steps of the many short conversations."""
EXAMPLES = settings(max_examples=20, stateful_step_count=30)
DATAGRAMS = {"datagram_limit": (1200, 300)}


class ControlApplications(Applications):
    """The steps of the first core's test, over control streams."""

    choices = CHOICES | DATAGRAMS

    @initialize(
        data=st.data(),
        seed=st.integers(0, 1 << 16),
        weather=st.sampled_from(WEATHERS[:4]),
        slots=st.tuples(st.sampled_from(BIDI_CHOICES), st.sampled_from(BIDI_CHOICES)),
    )
    def begin(self, data: Any, seed: int, weather: Any, slots: tuple[int, int] = (0, 0)) -> None:
        chosen = {name: st.sampled_from(values) for name, values in self.choices.items()}
        drawn = st.builds(Settings, **chosen)
        self.world = World(data.draw(drawn), data.draw(st.none() | drawn), seed, weather, slots)


class EndedControlConnections(ControlApplications, EndedConnections):
    """The same, and the connection may end at any moment."""


TestControlApplications = ControlApplications.TestCase
TestEndedControlConnections = EndedControlConnections.TestCase
TestControlApplications.settings = EXAMPLES
TestEndedControlConnections.settings = EXAMPLES


@pytest.mark.requirement("AQ0-21")
@pytest.mark.requirement("AQ0-22")
@pytest.mark.requirement("AQ0-23")
@pytest.mark.requirement("AQ0-24")
@pytest.mark.requirement("AQ0-25")
@pytest.mark.requirement("AQ0-26")
@pytest.mark.requirement("AQ0-28")
@pytest.mark.requirement("AQ0-29")
@pytest.mark.requirement("AQ0-31")
@pytest.mark.requirement("AQ0-32")
@pytest.mark.requirement("AQ0-33")
@pytest.mark.requirement("AQ0-34")
@pytest.mark.requirement("AQ0-R5")
@pytest.mark.requirement("AQ0-R6")
@pytest.mark.parametrize("profile", sorted(simulate.PROFILES))
@pytest.mark.parametrize("block", mostly_long(range(6), 0, 1))
def test_a_short_run_loses_nothing_and_leaves_nothing(block: int, profile: str) -> None:
    for seed in range(30 * block, 30 * block + 30):
        simulate.run(seed, profile, DIALECT, SHORT)


@pytest.mark.parametrize("profile", sorted(simulate.PROFILES))
@pytest.mark.parametrize("block", range(1))
def test_a_run_loses_nothing_and_leaves_nothing(block: int, profile: str) -> None:
    for seed in range(10 * block, 10 * block + 10):
        simulate.run(seed, profile, DIALECT)


@pytest.mark.long
@pytest.mark.parametrize("profile", sorted(simulate.PROFILES))
@pytest.mark.parametrize("block", range(1, 101))
def test_many_runs(block: int, profile: str) -> None:
    for seed in range(100 * block, 100 * block + 100):
        simulate.run(seed, profile, DIALECT)
    for seed in range(1000 * block, 1000 * block + 70):
        simulate.run(seed, profile, DIALECT, SHORT)


def test_runs_see_everything_that_can_happen() -> None:
    """Or what they claim would be true of nothing."""
    ends: set[str] = set()
    for seed in range(40):
        world = simulate.run(seed, "any", DIALECT)
        for channel in world.channels.values():
            for half in (channel.sender, channel.receiver):
                if half is not None:
                    kind = "sends" if half.is_sender else "reads"
                    ends.add(f"{kind} {type(half.error).__name__}")
    reasons = {"Cancelled", "ReceiverClosed", "LostInTransit", "ConnectionLost"}
    assert ends >= {f"{half} {reason}" for half in ("sends", "reads") for reason in reasons}
    assert ends >= {"sends NoneType", "reads Finished", "reads MessageLost", "reads MemoryError"}
