"""The table and the plot of a run of loopback.py, in benchmarks/README.md and beside it.

    python -m benchmarks.publish RUN.json [--readme FILE] [--plot FILE]

The table stands between two marks in the README and is replaced as a whole. The exit status is 2
if a file cannot be used. The plot needs matplotlib (the extra ``bench``).
"""

from __future__ import annotations

import argparse
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import check, cpu_topology, results
from benchmarks.cases import CARRIERS, STREAM_BULK

FOLDER: Final = Path(__file__).parent
BEGIN: Final = "<!-- made by benchmarks/publish.py: from here -->"
END: Final = "<!-- to here -->"
WIDTH: Final = 110
BULK: Final = tuple(f"{mode}-{size}" for mode, size, _ in STREAM_BULK)
TRIPS: Final = ("request", "sync-request", "open-request")
COLOURS: Final = {"aqueduct": "#1f6f8b", "flight": "#d98e32", "sockets": "#9a9a9a"}
PEERS: Final = {"aqueduct": "Aqueduct", "flight": "Flight", "sockets": "plain sockets"}


class BadRun(results.BadRun):
    """A run with nothing to show, or a README without a place for it."""


@dataclass(frozen=True)
class Bar:
    """What one peer reached in one case."""

    contestant: str
    spread: results.Spread


def bar_of(run: results.Run, case: str, peer: str, metric: str) -> Bar | None:
    """The best contestant of a peer, by its median; None if the run has none."""
    floor = check.Floor(case, "", metric, against=f"{peer}/*")
    if not (name := check.rival(floor, run)):
        return None
    return Bar(name, results.Spread.of(run.values(case, name, metric).values()))


# ----------------------------------------------------------------- the table


def section(run: results.Run, floors: list[check.Floor]) -> str:
    """Date, versions and the two tables. Raises BadRun if the run has no byte streams."""
    bulk, trips = [], []
    for carrier in CARRIERS:
        bulk += [_bulk(run, floors, f"{carrier}-{name}", carrier) for name in BULK]
        trips += [_trip(run, floors, f"{carrier}-{name}", carrier) for name in TRIPS]
    bulk, trips = ([line for line in lines if line] for lines in (bulk, trips))
    if not bulk and not trips:
        raise BadRun(f"{run.source} has no case over a byte stream")
    parts = [described(run)]
    if bulk:
        header = ["case", "MiB/s", "of Flight", "demanded", "of sockets", "CPU"]
        parts.append(results.table(header, bulk))
    if trips:
        parts.append(results.table(["200 bytes, p50", "us", "of Flight", "demanded"], trips))
    return "\n\n".join(parts)


def described(run: results.Run) -> str:
    """When, where and with what."""
    found, settings = run.document.get("environment", {}), run.document.get("settings", {})
    packages = found.get("packages", {})
    versions = [f"CPython {found.get('python', '?')}"]
    versions += [f"{name} {packages.get(name, '?')}" for name in ("pyarrow", "aqueduct-arrow")]
    paced = f"TCP by {found['congestion']}, " if "congestion" in found else ""
    text = (
        f"{found.get('date', '?')[:10]}, revision {found.get('revision', '?')} "
        f"({found.get('built', '?')}), {', '.join(versions)}, {found.get('kernel', '?')}, "
        f"{paced}{found.get('cores', '?')} cores of "
        f"{found.get('processor', '?')}, load {found.get('load', 0):.1f} at the start; medians of "
        f"{settings.get('repeat', '?')} interleaved repeats with (lowest-highest)."
    )
    if settings.get("quick"):
        text += " A quick run: an eighth of the bytes."
    return textwrap.fill(f"{text} {cpu_topology.summary(run.rows)}".rstrip(), WIDTH)


def _ours(run: results.Run, case: str, metric: str) -> str:
    bar = bar_of(run, case, "aqueduct", metric)
    return "-" if bar is None else str(bar.spread)


def _ratio(run: results.Run, case: str, carrier: str, peer: str, metric: str) -> str:
    floor = check.Floor(case, f"aqueduct/{carrier}", metric, against=f"{peer}/*")
    spread = check.measured(floor, run)
    return "-" if spread is None else results.number(spread.median)


def _demanded(floors: list[check.Floor], case: str, carrier: str, metric: str) -> str:
    for floor in floors:
        if (floor.case, floor.metric, floor.against) == (case, metric, f"flight/{carrier}"):
            return bound(floor)
    return ""


def bound(floor: check.Floor) -> str:
    """What the floor demands."""
    return f"≥ {floor.min:g}" if floor.min is not None else f"≤ {floor.max:g}"


def _bulk(run: results.Run, floors: list[check.Floor], case: str, carrier: str) -> list[str]:
    if case not in run.cases():
        return []
    return [
        case,
        _ours(run, case, "mib_s"),
        _ratio(run, case, carrier, "flight", "mib_s"),
        _demanded(floors, case, carrier, "mib_s"),
        _ratio(run, case, carrier, "sockets", "mib_s"),
        _ratio(run, case, carrier, "flight", "cpu_gib"),
    ]


def _trip(run: results.Run, floors: list[check.Floor], case: str, carrier: str) -> list[str]:
    if case not in run.cases():
        return []
    return [
        case,
        _ours(run, case, "p50_us"),
        _ratio(run, case, carrier, "flight", "p50_us"),
        _demanded(floors, case, carrier, "p50_us"),
    ]


def put(readme: str, text: str, opening: str = BEGIN, closing: str = END) -> str:
    """The README with ``text`` between its marks. Raises BadRun if it does not have them."""
    before, begin, rest = readme.partition(opening)
    _, end, after = rest.partition(closing)
    if not begin or not end or opening in after:
        raise BadRun(f"the README must have {opening!r} and {closing!r}, once and in this order")
    return f"{before}{opening}\n\n{text}\n\n{closing}{after}"


# ----------------------------------------------------------------- the plot


def draw(run: results.Run, path: Path) -> None:
    """A PNG: a panel for each carrier, and one for the round trips."""
    from matplotlib.figure import Figure  # only here: nothing else needs it

    figure = Figure(figsize=(11, 7.5), dpi=110, layout="constrained")
    panels = figure.subplots(2, 2).flat
    for carrier, axes in zip(CARRIERS, panels, strict=False):
        _bars(axes, run, [(f"{carrier}-{name}", name) for name in BULK], "mib_s")
        axes.set_title(f"{carrier}: batches of 1 MiB and 64 KiB, MiB/s")
    axes = panels[len(CARRIERS)]
    cases = [
        (f"{carrier}-{name}", f"{carrier}\n" + name.replace("-", "-\n"))
        for name in TRIPS
        for carrier in CARRIERS
    ]
    _bars(axes, run, cases, "p50_us")
    axes.set_title("200 bytes there and back, p50 us")
    axes.legend(fontsize=8)
    found = run.document.get("environment", {})
    packages = found.get("packages", {})
    figure.suptitle(
        f"Batches between two processes, {found.get('date', '?')[:10]}, "
        f"pyarrow {packages.get('pyarrow', '?')}, CPython {found.get('python', '?')}, "
        f"{found.get('cores', '?')} cores; median, lowest to highest",
        fontsize=10,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png", metadata={"Software": None})


def _bars(axes: Any, run: results.Run, cases: list[tuple[str, str]], metric: str) -> None:
    width = 0.8 / len(PEERS)
    for nth, (peer, label) in enumerate(PEERS.items()):
        places, heights, below, above = [], [], [], []
        for place, (case, _) in enumerate(cases):
            if bar := bar_of(run, case, peer, metric):
                spread = bar.spread
                places.append(place + (nth - 1) * width)
                heights.append(spread.median)
                below.append(spread.median - spread.low)
                above.append(spread.high - spread.median)
        if places:
            axes.bar(places, heights, width, label=label, color=COLOURS[peer])
            axes.errorbar(places, heights, [below, above], fmt="none", ecolor="#333", lw=0.8)
    axes.set_xticks(range(len(cases)), [label for _, label in cases], fontsize=8)
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run", type=Path, help="what loopback.py --json wrote")
    parser.add_argument("--readme", type=Path, default=FOLDER / "README.md")
    parser.add_argument("--plot", type=Path, default=FOLDER / "plots" / "loopback.png")
    args = parser.parse_args(arguments)
    try:
        run = results.Run.load(args.run)
        text = section(run, check.load(check.FLOORS))
        readme = put(args.readme.read_text(encoding="utf-8"), text)
        draw(run, args.plot)
    except (results.BadRun, check.BadFloors, OSError) as error:
        print(f"publish.py: {error}", file=sys.stderr)
        return 2
    except ImportError as error:
        print(f"publish.py: {error}: install the extra `bench`", file=sys.stderr)
        return 2
    args.readme.write_text(readme, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
