"""Random applications on a bad network: long runs, each a function of its seed.

    python -m tests.support.simulate --seeds 1000-2000
    python -m tests.support.simulate --seeds 1234 --profile tiny --trace

Prints for each run that failed what failed, its last steps, and the command that replays it.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import sys
import traceback
from typing import Final

from aqueduct.protocol.common.sender import Mode
from tests.support.world import BIDI_CHOICES, CHOICES, WEATHERS, Settings, World

__all__ = ["DIALECTS", "PROFILES", "main", "replay", "run"]

MODES: Final = (Mode.ORDERED, Mode.ORDERED, Mode.UNORDERED, Mode.UNRELIABLE)
LAST_STEPS: Final = 25

DIALECTS: Final = ("channels", "control-streams")

EARLY: Final = ("", "accept", "reject", "reject", "replay")
"""What becomes of early data."""
EARLY_BYTES: Final = (64 << 10, 8_000, 2_000)
"""Of a client; a server allows the first."""
EARLY_STEPS: Final = ("send", "send", "send", "finish", "cancel", "abandon")

PROFILES: Final[dict[str, tuple[int, int]]] = {
    "any": (0, 3),
    "tiny": (1, 3),
    "wide": (0, 1),
}
"""Which of the choices of each setting are taken: tiny has no room, wide no bounds."""

SHARES: Final = {
    "send": 30,
    "take": 20,
    "wait": 25,
    "weather": 3,
    "finish": 3,
    "cancel": 2,
    "close": 2,
    "abandon": 1,
    "place": 2,
    "misuse": 1,
    "calm": 0.3,
}


class Driver:
    """Random steps of one world."""

    def __init__(
        self, seed: int, profile: str, dialect: str, steps: int = 0, early: str = ""
    ) -> None:
        """``steps``: so many; 0: a number of its own. ``early``: of EARLY; "": one is drawn."""
        self.rng = rng = random.Random(seed)
        first, stop = PROFILES[profile]
        control = dialect == "control-streams"
        client = drawn_settings(rng, profile, datagrams=control)
        server = rng.choice((None, drawn_settings(rng, profile, datagrams=control)))
        beside = random.Random(seed)  # so that old seeds stay what they were
        drawn_early = beside.choice(EARLY) if control else ""
        early = early or drawn_early
        client = dataclasses.replace(client, early_bytes=beside.choice(EARLY_BYTES))
        self.world = World(
            client,
            server,
            seed,
            rng.choice(WEATHERS[:4]),
            (rng.choice(BIDI_CHOICES[first:stop]), rng.choice(BIDI_CHOICES[first:stop]))
            if control
            else None,
            early=early,
        )
        self.largest = rng.choice((50, 3_000, 60_000, 200_000))
        self.burst = rng.choice((1, 1, 8, 40))
        self.modes = rng.choice((MODES, MODES, (Mode.ORDERED,), (Mode.UNRELIABLE,)))
        drawn = rng.choice((20, 100, 100, 300))
        self.steps = steps or drawn
        self.ending = rng.choice(("", "", "", "", "", "", "cut", "close"))
        if early:
            self.rng = beside
            for _ in range(beside.choice((0, 2, 6, 20))):
                getattr(self, beside.choice(EARLY_STEPS))()
            self.rng = rng

    def run(self) -> None:
        rng, world = self.rng, self.world
        names, shares = list(SHARES), list(SHARES.values())
        for _ in range(self.steps):
            getattr(self, rng.choices(names, shares)[0])()
        if self.ending == "cut":
            world.cut(rng.random() * 3, rng.random() * 3, rng.random() < 0.5)
        elif self.ending == "close":
            world.close_connection(rng.random() < 0.5)
        if self.ending:
            for _ in range(self.steps // 10):
                getattr(self, rng.choices(names, shares)[0])()
        world.end()

    def send(self) -> None:
        rng = self.rng
        attach = []
        if rng.random() < 0.4:
            attach = [
                (rng.random() < 0.6, rng.random() < 0.3) for _ in range(rng.choice((1, 1, 2, 5)))
            ]
        self.world.send(
            rng.random(),
            rng.randint(1, self.burst),
            int(rng.random() ** 3 * rng.choice((30, self.largest))),
            rng.choice(self.modes),
            attach,
            int(rng.random() ** 4 * 5000) if rng.random() < 0.2 else -1,
            rng.random() < 0.9,
        )

    def take(self) -> None:
        unwanted = self.rng.getrandbits(5) if self.rng.random() < 0.1 else 0
        self.world.take(self.rng.random(), self.rng.choice((1, 1, 5, 100)), unwanted)

    def wait(self) -> None:
        self.world.wait(self.rng.choice((0.0, 0.001, 0.01, 0.03, 0.1, 0.5, 2.5)))

    def weather(self) -> None:
        self.world.weather(self.rng.randrange(len(WEATHERS)))

    def finish(self) -> None:
        self.world.finish(self.rng.random())

    def cancel(self) -> None:
        self.world.cancel(self.rng.random(), self.rng.random() < 0.7)

    def close(self) -> None:
        self.world.close(self.rng.random(), self.rng.random() < 0.7)

    def abandon(self) -> None:
        self.world.abandon(self.rng.random())

    def place(self) -> None:
        self.world.place(self.rng.random(), self.rng.random() < 0.4)

    def misuse(self) -> None:
        self.world.misuse(self.rng.random())

    def calm(self) -> None:
        self.world.calm()


def drawn_settings(rng: random.Random, profile: str, *, datagrams: bool) -> Settings:
    """Of the choices that the profile has; ``datagrams``: only what has them."""
    first, stop = PROFILES[profile]
    drawn = {name: rng.choice(values[first:stop]) for name, values in CHOICES.items()}
    if datagrams:
        drawn["datagram_limit"] = drawn["datagram_limit"] or CHOICES["datagram_limit"][0]
    return Settings(**drawn)


def replay(seed: int, profile: str, dialect: str, steps: int, early: str = "") -> str:
    """The command that runs a seed again."""
    command = f"python -m tests.support.simulate --seeds {seed} --profile {profile}"
    if dialect != DIALECTS[0]:
        command += f" --dialect {dialect}"
    if early:
        command += f" --early {early}"
    return f"{command} --steps {steps}" if steps else command


def run(
    seed: int, profile: str = "any", dialect: str = "channels", steps: int = 0, early: str = ""
) -> World:
    """One run. Raises what failed, with notes: the last steps, and how to replay it."""
    driver = Driver(seed, profile, dialect, steps, early)
    try:
        driver.run()
    except BaseException as error:
        trace = driver.world.trace
        error.add_note(f"{len(trace)} steps; {driver.world.settings}; the last ones:")
        for line in trace[-LAST_STEPS:]:
            error.add_note("  " + line)
        error.add_note(f"replay: {replay(seed, profile, dialect, steps, early)}")
        raise
    return driver.world


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.support.simulate", description=__doc__)
    parser.add_argument("--seeds", default="0-99", help="one, or the first and the last")
    parser.add_argument("--profile", choices=sorted(PROFILES), default="any")
    parser.add_argument("--dialect", choices=DIALECTS, default=DIALECTS[0])
    parser.add_argument(
        "--early", choices=sorted(set(EARLY)), default="", help="of the draft; drawn without it"
    )
    parser.add_argument("--steps", type=int, default=0, help="of each run; 0: it draws a number")
    parser.add_argument("--trace", action="store_true", help="print every step")
    options = parser.parse_args(arguments)
    first, _, last = options.seeds.partition("-")
    failed = 0
    for seed in range(int(first), int(last or first) + 1):
        try:
            world = run(seed, options.profile, options.dialect, options.steps, options.early)
        except Exception:  # noqa: BLE001 - whatever a run fails with is its result
            failed += 1
            traceback.print_exc()
            continue
        if options.trace:
            print("\n".join(world.trace))
    print(f"{failed} of {int(last or first) + 1 - int(first)} runs failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
