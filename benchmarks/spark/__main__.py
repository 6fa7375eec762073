"""Aqueduct in Spark jobs beside Flight, and beside functions that call nobody, in one run.

    python -m benchmarks.spark [--repeat N] [--quick] [--json FILE] [--only TEXT] [--list]

In each repeat of a case every contestant runs one job, one after the other, and every other repeat
goes through them backwards; ratios and differences are taken within a repeat. The exit status is 1
if a measurement failed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import closing
from typing import Any

from benchmarks import processes, results
from benchmarks.runner import Benchmark, Progress, run_command
from benchmarks.spark import cases as bench_cases
from benchmarks.spark.cases import Case
from benchmarks.spark.jobs import Jobs
from benchmarks.spark.publish import tables


def run(cases: list[Case], repeats: int, quick: bool) -> Iterator[dict[str, Any]]:
    """Measures ``cases`` and yields rows; what failed has ``error`` instead of numbers."""
    from pyspark.errors import PySparkException

    total = sum(min(repeats, case.repeat) * len(case.contestants) for case in cases)
    progress = Progress(total)
    with closing(Jobs()) as jobs:
        for case in cases:
            size = case.size // bench_cases.QUICK if quick else case.size
            for repeat in range(min(repeats, case.repeat)):
                for contestant in case.contestants[:: 1 if repeat % 2 == 0 else -1]:
                    row = {"case": case.name, "contestant": contestant.name, "repeat": repeat}
                    try:
                        row.update(jobs.measure(case, contestant, size))
                    except (processes.Failed, PySparkException, OSError) as error:
                        row["error"] = str(error)
                    progress.done += 1
                    progress.show(f"{case.name} {contestant.name}: {_brief(row)}")
                    yield row
    progress.end()


def _brief(row: dict[str, Any]) -> str:
    if "error" in row:
        return f"FAILED: {row['error']}"
    return ", ".join(
        f"{results.number(row[metric])} {results.UNITS[metric]}"
        for metric in row
        if metric in results.UNITS
    )


def main(arguments: list[str] | None = None) -> int:
    benchmark = Benchmark(bench_cases.select, run, tables, bench_cases.QUICK)
    return run_command(
        benchmark, arguments, summary=__doc__ or "", only="cases with one of these, a,b,c", repeat=7
    )


if __name__ == "__main__":
    sys.exit(main())
