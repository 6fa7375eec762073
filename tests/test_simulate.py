"""Long random runs: each is a function of its seed, and one that fails says how to replay it."""

from __future__ import annotations

import re

import pytest

from aqueduct.protocol.common import sender
from tests.support import simulate
from tests.support.world import World


def story(world: World) -> tuple[object, ...]:
    """Every step, and every effect of both cores but for the buffers."""
    applied = [[effect[:2] for effect in side.applied] for side in world.sides]
    return world.trace, world.pair.network.packets, applied


@pytest.mark.parametrize("profile", sorted(simulate.PROFILES))
def test_a_seed_is_one_run(profile: str) -> None:
    stories = [story(simulate.run(seed, profile)) for seed in range(5)]
    assert stories == [story(simulate.run(seed, profile)) for seed in range(5)]
    assert len({repr(each) for each in stories}) == 5


def test_runs_see_everything_that_can_happen() -> None:
    """Or what they claim would be true of nothing."""
    ends: set[str] = set()
    words: set[str] = set()
    kinds: set[tuple[bool, bool]] = set()
    overs: set[str] = set()
    depth = 0
    for seed in range(40):
        world = simulate.run(seed)
        overs.add(world.over)
        words.update(re.findall(r" (\w+)\(", "\n".join(world.trace)))
        for channel in world.channels.values():
            deep, parent = 0, channel.parent
            while parent is not None:
                deep, parent = deep + 1, parent.channel.parent
            depth = max(depth, deep)
            for half in (channel.sender, channel.receiver):
                if half is not None:
                    ends.add(
                        f"{'sends' if half.is_sender else 'reads'} {type(half.error).__name__}"
                    )
            kinds.update((message.reliable, message.taken) for message in channel.sent.values())
    assert overs == {"", "cut", "closed"}
    assert words == {*simulate.SHARES, "cut", "close_connection", "end"}
    assert kinds == {(True, True), (True, False), (False, True), (False, False)}
    assert depth >= 5
    reasons = {"Cancelled", "ReceiverClosed", "LostInTransit", "ConnectionLost"}
    assert ends >= {f"{half} {reason}" for half in ("sends", "reads") for reason in reasons}
    assert ends >= {"sends NoneType", "reads Finished", "reads MessageLost", "reads MemoryError"}


def test_a_run_that_fails_says_how_to_replay_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sender.SenderHalf, "acked", lambda half, ranges: [])
    assert simulate.main(["--seeds", "0-3", "--profile", "wide"]) == 1
    said = capsys.readouterr()
    command = re.search(r"replay: python -m tests\.support\.simulate (.*)", said.err)
    assert command is not None
    assert "tests/support/claims.py" in said.err
    assert "end()" in said.err  # the last steps
    assert simulate.main(command[1].split()) == 1
    monkeypatch.undo()
    assert simulate.main([*command[1].split(), "--trace"]) == 0
    assert "end()" in capsys.readouterr().out
