"""Compares runs of loopback.py and of pytest-benchmark with the numbers in floors.toml.

    python benchmarks/check.py RUN.json ... [--floors FILE] [--only TEXT]

The exit status is 0 if every floor holds, 1 if one does not (each miss is named), and 2 if a file
cannot be used. A floor whose case is not in the run, or failed in it, is missed.
"""

from __future__ import annotations

import argparse
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import results

FLOORS: Final = Path(__file__).with_name("floors.toml")


class BadFloors(Exception):
    """A floors file that cannot be used; the text says why."""


@dataclass(frozen=True)
class Floor:
    """One demand, as floors.toml describes it. ``against`` may end in ``*``: see ``rival``."""

    case: str
    contestant: str
    metric: str
    against: str = ""
    min: float | None = None
    max: float | None = None

    @classmethod
    def parse(cls, entry: Any, where: str) -> Floor:
        """Raises BadFloors: a floor that demands nothing must not pass for one that holds."""
        if not isinstance(entry, dict):
            raise BadFloors(f"{where} is not a table")
        texts, numbers = {"case", "contestant", "metric", "against"}, {"min", "max"}
        if unknown := entry.keys() - texts - numbers:
            raise BadFloors(f"{where}: unknown {', '.join(sorted(unknown))}")
        if missing := texts - {"against"} - entry.keys():
            raise BadFloors(f"{where}: {', '.join(sorted(missing))} missing")
        if not numbers & entry.keys():
            raise BadFloors(f"{where}: min or max missing")
        if entry["metric"] not in results.UNITS:
            known = ", ".join(results.UNITS)
            raise BadFloors(f"{where}: unknown metric {entry['metric']!r}; known: {known}")
        for name, value in entry.items():
            wanted: type | tuple[type, ...] = str if name in texts else (int, float)
            if not isinstance(value, wanted) or isinstance(value, bool):
                raise BadFloors(f"{where}: {name} is {value!r}")
        return cls(**entry)

    def __str__(self) -> str:
        text = f"{self.case}: {self.contestant}"
        if self.against:
            text += f" over {self.against}"
        return f"{text}, {results.UNITS[self.metric]}"


def load(path: Path) -> list[Floor]:
    """Reads a floors file. Raises BadFloors."""
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadFloors(f"{path}: {error}") from error
    entries = document.get("floor")
    if not isinstance(entries, list) or not entries or document.keys() != {"floor"}:
        raise BadFloors(f"{path} must hold [[floor]] tables and nothing else")
    return [Floor.parse(entry, f"{path}: floor {k}") for k, entry in enumerate(entries, 1)]


def rival(floor: Floor, run: results.Run) -> str:
    """The contestant that the floor is against; of ``name/*`` the best one, by its median.

    Empty if the floor is against none, or if the run has none of that name.
    """
    if not floor.against.endswith("*"):
        return floor.against
    prefix = floor.against[:-1]
    medians = {
        name: results.Spread.of(values.values()).median
        for name in run.contestants(floor.case)
        if name.startswith(prefix) and (values := run.values(floor.case, name, floor.metric))
    }
    best = max if floor.metric in results.MORE_IS_BETTER else min
    return best(medians, key=medians.__getitem__, default="")


def miss(floor: Floor, run: results.Run) -> str:
    """Why the floor is missed; empty if it holds."""
    names = [floor.contestant]
    if floor.against.endswith("*"):  # one that failed might have been the best
        prefix = floor.against[:-1]
        found = [name for name in run.contestants(floor.case) if name.startswith(prefix)]
        names += found or [floor.against]
    elif floor.against:
        names.append(floor.against)
    for name in names:
        errors = run.errors(floor.case, name)
        if errors:
            return f"{name} failed: {errors[0]}"
        if not run.values(floor.case, name, floor.metric):
            return f"the run has no {floor.metric} of {name} in {floor.case}"
    spread = measured(floor, run)
    if spread is None:
        return f"no repeat has both {floor.contestant} and {floor.against}"
    if floor.min is not None and not spread.median >= floor.min:
        return f"{spread} is below {results.number(floor.min)}"
    if floor.max is not None and not spread.median <= floor.max:
        return f"{spread} is above {results.number(floor.max)}"
    return ""


def measured(floor: Floor, run: results.Run) -> results.Spread | None:
    """What the run has for a floor: the metric, or the ratio; None if there is nothing."""
    if floor.against:
        values = run.ratios(floor.case, floor.contestant, rival(floor, run), floor.metric)
    else:
        values = list(run.values(floor.case, floor.contestant, floor.metric).values())
    return results.Spread.of(values) if values else None


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run", type=Path, nargs="+", help="what --json wrote")
    parser.add_argument("--floors", type=Path, default=FLOORS)
    parser.add_argument("--only", default="", help="floors of cases whose names begin with this")
    args = parser.parse_args(arguments)
    try:
        floors, run = load(args.floors), results.Run.load_all(args.run)
        floors = [floor for floor in floors if floor.case.startswith(args.only)]
        if not floors:
            raise BadFloors(f"--only {args.only}: no floor is of such a case")
    except (BadFloors, results.BadRun) as error:
        print(f"check.py: {error}", file=sys.stderr)
        return 2
    missed = 0
    for floor in floors:
        if why := miss(floor, run):
            missed += 1
            print(f"MISSED  {floor}: {why}")
        else:
            print(f"holds   {floor}: {measured(floor, run)}")
    print(f"{len(floors) - missed} of {len(floors)} floors hold")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
