"""Two runs of loopback.py, before and after, with their spread.

    python benchmarks/compare.py BEFORE.json AFTER.json [--metric NAME]

A change counts as one only if the two spreads do not overlap; what lies within them is marked
"within spread". A commit that says "faster" carries this output.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Collection
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import results


def compare(before: results.Run, after: results.Run, metrics: list[str]) -> list[list[str]]:
    """One line for each case, contestant and metric that a run has."""
    lines = []
    for case in dict.fromkeys([*before.cases(), *after.cases()]):
        names = dict.fromkeys([*before.contestants(case), *after.contestants(case)])
        for name in names:
            for metric in metrics:
                old = before.values(case, name, metric).values()
                new = after.values(case, name, metric).values()
                if old or new:
                    lines.append([case, name, results.UNITS[metric], *_cells(metric, old, new)])
    return lines


def _cells(metric: str, old: Collection[float], new: Collection[float]) -> list[str]:
    if not old or not new:
        return ["-" if not some else str(results.Spread.of(some)) for some in (old, new)] + [
            "",
            "only after" if not old else "only before",
        ]
    before, after = results.Spread.of(old), results.Spread.of(new)
    change = f"{100 * (after.median / before.median - 1):+.1f}%" if before.median else ""
    if before.overlaps(after):
        verdict = "within spread"
    elif (after.median > before.median) == (metric in results.MORE_IS_BETTER):
        verdict = "better"
    else:
        verdict = "worse"
    return [str(before), str(after), change, verdict]


def differences(before: results.Run, after: results.Run) -> list[str]:
    """What was not the same for both runs, other than the code."""
    found: list[str] = []
    for part in ("environment", "settings"):
        old, new = before.document.get(part, {}), after.document.get(part, {})
        found += [
            f"{name}: {old.get(name)} -> {new.get(name)}"
            for name in sorted(old.keys() | new.keys())
            if old.get(name) != new.get(name)
        ]
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--metric", action="append", choices=results.UNITS, help="repeatable")
    args = parser.parse_args(arguments)
    try:
        before, after = results.Run.load(args.before), results.Run.load(args.after)
    except results.BadRun as error:
        print(f"compare.py: {error}", file=sys.stderr)
        return 2
    for line in differences(before, after):
        print(line)
    header = ["case", "peer", "metric", "before", "after", "change", ""]
    print(results.table(header, compare(before, after, args.metric or list(results.UNITS))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
