"""The JSON of a benchmark run: how it is read, summed up with its spread, and compared.

A run is ``{"format": FORMAT, "environment": {...}, "settings": {...}, "rows": [...]}``. A row is
one measurement: ``case``, ``contestant`` (peer/variant), ``repeat``, and its numbers or ``error``.
What pytest-benchmark writes is read as the same: its tests are cases of the contestant "pytest".
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

FORMAT: Final = "aqueduct-benchmark-1"
UNITS: Final = {
    "mib_s": "MiB/s",
    "cpu_gib": "CPU s/GiB, both sides",
    "client_cpu_gib": "CPU s/GiB, client",
    "server_cpu_gib": "CPU s/GiB, server",
    "client_memory_mib": "peak MiB, client",
    "server_memory_mib": "peak MiB, server",
    "growth_mib": "MiB grown, the side that grew more",
    "client_growth_mib": "MiB grown, client",
    "server_growth_mib": "MiB grown, server",
    "p50_us": "us, p50",
    "p99_us": "us, p99",
    "encoded_s": "encoded/s",
    "decoded_s": "decoded/s",
    "encoded_headers_s": "encoded/s with a header",
    "decoded_headers_s": "decoded/s with a header",
    "ops_s": "runs/s of a pytest-benchmark",
    "messages_s": "messages/s",
    "messages_cpu_s": "messages/CPU s",
    "send_us": "CPU us each, sender",
    "take_us": "CPU us each, receiver",
    "copied": "% of the bytes copied",
    "channels_s": "channels/s",
    "first_us": "CPU us each, first tenth",
    "last_us": "CPU us each, last tenth",
    "last_over_first": "last/first",
    "left_bytes": "bytes left by each",
    "side_bytes": "allocated, costlier side",
    "traced_bytes": "by Python alone",
    "resident_bytes": "resident, both sides and carrier",
    "exchange_s": "s",
    "opened_s": "s to open all",
    "client_cpu_s": "CPU s, clients",
    "server_cpu_s": "CPU s, server",
    "server_rest_mib": "MiB grown at rest, server",
    "connection_kib": "KiB a connection at the peak",
    "channel_us": "us a channel",
    "channel_cpu_us": "CPU us a channel",
    "channel_core_us": "without the collector",
    "job_s": "s, the whole job",
    "requests_s": "requests/s",
    "rows_s": "rows/s",
    "request_cpu_us": "CPU us a request, both sides",
    "item_us": "us an item",
    "item_cpu_us": "CPU us an item, both sides",
    "stream_kib": "KiB a stream, both sides",
    "ahead_mib": "MiB given and not read",
    "redial_ms": "ms from the redial to the next batch",
    "redial_trips": "round trips from the redial to the next batch",
    "up_s": "s until all links are up",
    "handshakes_worker": "hand-shakes for each worker process",
    "settled_mib": "MiB between least and most, server, after the first GiB",
}
"""The metrics a row may have."""
MORE_IS_BETTER: Final = frozenset(
    {
        "mib_s", "encoded_s", "decoded_s", "encoded_headers_s", "decoded_headers_s", "ops_s",
        "messages_s", "messages_cpu_s", "channels_s", "requests_s", "rows_s",
    }
)  # fmt: skip


class BadRun(Exception):
    """A file that is not a benchmark run; the text says what is wrong with it."""


@dataclass(frozen=True)
class Spread:
    """The median of some measurements and their lowest and highest."""

    median: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """Raises ValueError if there are none."""
        some = sorted(values)
        if not some:
            raise ValueError("no measurements")
        return cls(statistics.median(some), some[0], some[-1], len(some))

    def __str__(self) -> str:
        return f"{number(self.median)} ({number(self.low)}-{number(self.high)})"

    def overlaps(self, other: Spread) -> bool:
        return self.low <= other.high and other.low <= self.high


class Run:
    """One run, with its rows by case and contestant."""

    def __init__(self, document: Any, source: str = "the run") -> None:
        if isinstance(document, dict) and "machine_info" in document:
            document = _from_pytest_benchmark(document, source)
        if not isinstance(document, dict) or document.get("format") != FORMAT:
            raise BadRun(
                f'{source} is neither a run of loopback.py ("format" must be "{FORMAT}") '
                "nor one of pytest-benchmark"
            )
        rows = document.get("rows")
        if not isinstance(rows, list) or not all(
            isinstance(row, dict) and {"case", "contestant", "repeat"} <= row.keys() for row in rows
        ):
            raise BadRun(f'{source}: "rows" must be objects with case, contestant and repeat')
        self.document: dict[str, Any] = document
        self.rows: list[dict[str, Any]] = rows
        self.source = source

    @classmethod
    def load(cls, path: Path | str) -> Run:
        """Reads a run. Raises BadRun if the file cannot be read or is something else."""
        try:
            document = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise BadRun(f"{path}: {error}") from error
        return cls(document, str(path))

    @classmethod
    def load_all(cls, paths: Iterable[Path]) -> Run:
        """Several runs as one. Raises BadRun like ``load``, and for a measurement that is twice."""
        runs = [cls.load(path) for path in paths]
        merged = cls({**runs[0].document, "rows": [row for run in runs for row in run.rows]})
        names = [(row["case"], row["contestant"], row["repeat"]) for row in merged.rows]
        if twice := {name for name in names if names.count(name) > 1}:
            raise BadRun(f"{min(twice)} is in more than one run, or twice in one")
        return merged

    def cases(self) -> list[str]:
        return list(dict.fromkeys(row["case"] for row in self.rows))

    def contestants(self, case: str) -> list[str]:
        return list(dict.fromkeys(r["contestant"] for r in self.rows if r["case"] == case))

    def errors(self, case: str, contestant: str) -> list[str]:
        """What went wrong in the measurements that failed."""
        return [str(row["error"]) for row in self._of(case, contestant) if "error" in row]

    def values(self, case: str, contestant: str, metric: str) -> dict[int, float]:
        """The metric of each repeat that has it."""
        return {
            row["repeat"]: float(row[metric]) for row in self._of(case, contestant) if metric in row
        }

    def ratios(self, case: str, contestant: str, against: str, metric: str) -> list[float]:
        """Contestant over ``against``, each repeat with its own neighbour in time."""
        ours, theirs = (self.values(case, name, metric) for name in (contestant, against))
        return [ours[k] / theirs[k] for k in ours if theirs.get(k)]

    def differences(self, case: str, contestant: str, against: str, metric: str) -> list[float]:
        """Contestant minus ``against``, each repeat with its own neighbour in time."""
        ours, theirs = (self.values(case, name, metric) for name in (contestant, against))
        return [ours[k] - theirs[k] for k in ours if k in theirs]

    def _of(self, case: str, contestant: str) -> list[dict[str, Any]]:
        return [r for r in self.rows if r["case"] == case and r["contestant"] == contestant]


def _from_pytest_benchmark(document: dict[str, Any], source: str) -> dict[str, Any]:
    try:
        rows = [
            {
                "case": test["name"],
                "contestant": "pytest",
                "repeat": 0,
                "ops_s": 1 / test["stats"]["median"],
            }
            for test in document["benchmarks"]
        ]
    except (KeyError, TypeError, ZeroDivisionError) as error:
        raise BadRun(f"{source}: not what pytest-benchmark writes: {error!r}") from error
    return {"format": FORMAT, "environment": {}, "settings": {}, "rows": rows}


def number(value: float) -> str:
    """Three significant digits, and no fewer before the point."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def table(header: list[str], lines: list[list[str]]) -> str:
    """A Markdown table, padded so that it also reads well in a terminal."""
    widths = [max(len(line[k]) for line in [header, *lines]) for k in range(len(header))]

    def row(cells: list[str]) -> str:
        return "| " + " | ".join(c.ljust(w) for c, w in zip(cells, widths, strict=True)) + " |"

    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return "\n".join([row(header), rule, *(row(line) for line in lines)])
