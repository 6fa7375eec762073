"""What a run of the Spark benchmark has for each floor, in a section of benchmarks/README.md.

    python -m benchmarks.spark.publish RUN.json [--readme FILE]

It stands between two marks and is replaced as a whole. The exit status is 2 if a file cannot be
used.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Final

from benchmarks import check, publish, results

__all__ = ["main", "section", "tables"]

BEGIN: Final = "<!-- made by benchmarks/spark/publish.py: from here -->"
END: Final = "<!-- to here: Spark -->"
FLOORS: Final = ["case", "what", "median", "demanded"]
HEADER: Final = ["case", "contestant", "job s", "first answer us, p50", "MiB/s"]
RIVALS: Final = ["against", "ratio", "difference s", "demanded"]
OTHERS: Final = ("handshakes_worker", "server_growth_mib", "settled_mib")


def tables(run: results.Run) -> str:
    """What was measured, and each of ours beside its rivals of the same repeat."""
    return "\n\n".join(filter(None, (_measured(run), _compared(run, check.load(check.FLOORS)))))


def section(run: results.Run) -> str:
    """Date and versions, and a line for each floor. Raises BadRun if the run is not of Spark."""
    if not any(case.startswith("spark-") for case in run.cases()):
        raise results.BadRun(f"{run.source} has no case of Spark")
    lines = []
    for floor in check.load(check.FLOORS):
        if floor.case in run.cases() and floor.case.startswith("spark-"):
            spread = check.measured(floor, run)
            value = "-" if spread is None else str(spread)
            lines.append([floor.case, _meant(floor), value, publish.bound(floor)])
    return f"{publish.described(run)}\n\n{results.table(FLOORS, lines)}"


def _meant(floor: check.Floor) -> str:
    metric = results.UNITS[floor.metric].partition(",")[0]
    return f"{metric}, of {floor.against}" if floor.against else metric


def _measured(run: results.Run) -> str:
    lines = []
    for case in run.cases():
        for name in run.contestants(case):
            failed = len(run.errors(case, name))
            cells = [case, name + (f" ({failed} failed)" if failed else "")]
            cells += [_cell(run, case, name, metric) for metric in ("job_s", "p50_us", "mib_s")]
            rest = [
                f"{_cell(run, case, name, metric)} {results.UNITS[metric]}"
                for metric in OTHERS
                if run.values(case, name, metric)
            ]
            lines.append([*cells, "; ".join(rest)])
    return results.table([*HEADER, "besides"], lines)


def _cell(run: results.Run, case: str, name: str, metric: str) -> str:
    values = run.values(case, name, metric).values()
    return str(results.Spread.of(values)) if values else ""


def _compared(run: results.Run, floors: list[check.Floor]) -> str:
    lines = []
    for case in run.cases():
        names = run.contestants(case)
        for ours in (name for name in names if name.startswith("aqueduct/")):
            for rival in (name for name in names if name != ours):
                for metric in ("job_s", "p50_us", "mib_s"):
                    lines += _pair(run, floors, case, ours, rival, metric)
    header = ["case", "ours", *RIVALS]
    return results.table(header, lines) if lines else ""


def _pair(
    run: results.Run, floors: list[check.Floor], case: str, ours: str, rival: str, metric: str
) -> list[list[str]]:
    ratios = run.ratios(case, ours, rival, metric)
    if not ratios:
        return []
    demanded = [
        publish.bound(floor)
        for floor in floors
        if (floor.case, floor.contestant, floor.against, floor.metric)
        == (case, ours, rival, metric)
    ]
    unit = results.UNITS[metric]
    differences = run.differences(case, ours, rival, metric) if metric == "job_s" else []
    difference = str(results.Spread.of(differences)) if differences else ""
    cells = [f"{rival}, {unit}", str(results.Spread.of(ratios)), difference, "".join(demanded)]
    return [[case, ours, *cells]]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run", type=Path, help="what python -m benchmarks.spark --json wrote")
    parser.add_argument("--readme", type=Path, default=publish.FOLDER / "README.md")
    args = parser.parse_args(arguments)
    try:
        text = section(results.Run.load(args.run))
        readme = publish.put(args.readme.read_text(encoding="utf-8"), text, BEGIN, END)
    except (results.BadRun, check.BadFloors, OSError) as error:
        print(f"publish: {error}", file=sys.stderr)
        return 2
    args.readme.write_text(readme, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
