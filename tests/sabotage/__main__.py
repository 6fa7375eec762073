"""Makes the core wrong in one place at a time: tests that carry the requirement must fail.

Ends with 0 if every change was caught, 1 if one survived, 2 if an entry or the tree as it is
proves nothing.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

from tests.sabotage.changes import LISTS, Change, ChangeError, read_lists
from tests.sabotage.runner import Outcome, Result, RunError, prepare, try_changes
from tests.sabotage.tree import ROOT

__all__ = ["main"]


def main(arguments: list[str] | None = None) -> int:
    """Runs what the command line says; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.sabotage", description=__doc__)
    parser.add_argument("--only", action="append", default=[], metavar="NUMBER/NAME")
    parser.add_argument("-n", dest="jobs", type=int, default=os.cpu_count() or 1, metavar="JOBS")
    parser.add_argument(
        "--changes", action="append", type=Path, metavar="FILE", help="other lists than these"
    )
    options = parser.parse_args(arguments)
    try:
        changes = _chosen(read_lists(options.changes or LISTS)[0], options.only)
        _check_fresh(changes)
        return _summary(_run(changes, options.jobs))
    except (ChangeError, RunError) as error:
        sys.stderr.write(f"{error}\n")
        return 2


def _chosen(changes: list[Change], only: list[str]) -> list[Change]:
    known = {word for change in changes for word in (change.name, *change.requirements)}
    unknown = set(only) - known
    if unknown:
        raise ChangeError(f"no change has the name or number {', '.join(sorted(unknown))}")
    if not only:
        return changes
    return [each for each in changes if {each.name, *each.requirements}.intersection(only)]


def _check_fresh(changes: list[Change]) -> None:
    stale = []
    for change in changes:
        try:
            change.changed((ROOT / change.file).read_text())
        except ChangeError as error:
            stale.append(f"{change.name}: {error}")
    if stale:
        raise ChangeError("\n".join(stale))


def _run(changes: list[Change], jobs: int) -> list[Result]:
    started = time.monotonic()
    numbers = {number for change in changes for number in change.requirements}
    results = []
    with tempfile.TemporaryDirectory(prefix="sabotage-") as name:
        folder = Path(name).resolve()
        tree = prepare(folder / "tree", numbers, jobs)
        print(f"without a change, the tests of {len(numbers)} numbers pass", flush=True)
        for result in try_changes(tree, changes, folder, jobs):
            results.append(result)
            print(result, flush=True)
    print(f"\n{len(changes)} changes in {time.monotonic() - started:.0f} s")
    return results


def _summary(results: list[Result]) -> int:
    for result in results:
        if result.outcome is not Outcome.CAUGHT:
            change = result.change
            print(f"\n{result}\n  {change.file} {change.within}\n  {change.old}\n  {change.new}")
            print(result.output)
    counts = {outcome: sum(each.outcome is outcome for each in results) for outcome in Outcome}
    print(", ".join(f"{count} {outcome.value}" for outcome, count in counts.items()))
    if counts[Outcome.PROBLEM]:
        return 2
    return 1 if counts[Outcome.SURVIVED] else 0


if __name__ == "__main__":
    sys.exit(main())
