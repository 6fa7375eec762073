"""What the demo prints: plain text, 80 columns."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

__all__ = [
    "carriers_table",
    "figure",
    "figures",
    "flights_table",
    "remark",
    "service_line",
    "step",
    "table",
]

MiB: Final = 1 << 20


@contextlib.contextmanager
def step(name: str, text: str) -> Iterator[Callable[[], float]]:
    """Prints one step of the demo as it begins and the time it took as it ends.

    Gives a function for the seconds so far, or of the whole step once it is over.
    """
    print(f"{name:<9}{text:<61}", end="", flush=True)
    start, end = time.perf_counter(), None

    def seconds() -> float:
        return (time.perf_counter() if end is None else end) - start

    try:
        yield seconds
    except BaseException:
        print(flush=True)
        raise
    end = time.perf_counter()
    print(f"{seconds():>6.1f} s", flush=True)


def remark(text: str) -> None:
    """A line that belongs to the step above."""
    print(f"{'':<9}{text}", flush=True)


def table(headings: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table for people: numbers to the right, text to the left, a dash for null."""
    cells = [[_cell(value) for value in row] for row in rows]
    right = [
        all(text == "-" or _is_number(text) for text in column)
        for column in zip(*cells, strict=True)
    ] or [False] * len(headings)
    widths = [
        max([len(heading), *(len(row[i]) for row in cells)]) for i, heading in enumerate(headings)
    ]

    def line(texts: Sequence[str]) -> str:
        aligned = (
            text.rjust(width) if to_right else text.ljust(width)
            for text, width, to_right in zip(texts, widths, right, strict=True)
        )
        return ("  " + "  ".join(aligned)).rstrip()

    return "\n".join([line(headings), line(["-" * width for width in widths]), *map(line, cells)])


def flights_table(rows: Iterable[Mapping[str, Any]]) -> str:
    """Some scored flights."""
    return table(
        ("date", "flight", "route", "departed", "arrived", "expected", "km"),
        (
            (
                f"{row['year']}-{row['month']:02}-{row['day']:02}",
                f"{row['carrier']} {row['flight']}",
                f"{row['origin']}-{row['dest']}",
                _minutes(row["dep_delay"]),
                _minutes(row["arr_delay"]),
                _minutes(row["expected_arr_delay"], 1),
                row["great_circle_km"],
            )
            for row in rows
        ),
    )


def carriers_table(rows: Iterable[Mapping[str, Any]], names: Mapping[str, str]) -> str:
    """Average delays by carrier."""
    return table(
        ("carrier", "flights", "arrived", "delay", "expected", "km"),
        (
            (
                names.get(row["carrier"], row["carrier"]),
                row["flights"],
                row["arrived"],
                _minutes(row["actual"], 1),
                _minutes(row["expected"], 1),
                row["km"],
            )
            for row in rows
        ),
    )


def figure(name: str, value: str, text: str = "") -> str:
    """One result with a remark."""
    return f"{name:<9}{value:>17}  {text}".rstrip()


def figures(counted: Mapping[str, int], seconds: float) -> list[str]:
    """What went through the service, by its own counters for the job alone."""
    there, back = counted["bytes_in"] / MiB, counted["bytes_out"] / MiB
    return [
        figure("Rows", f"{counted['rows_in']:,}"),
        figure("Batches", f"{counted['batches_in']:,}"),
        figure("Seconds", f"{seconds:.1f}", "from Parquet to Parquet"),
        figure(
            "MiB/s",
            f"{(there + back) / seconds:.1f}",
            f"{there:.1f} MiB to the service and {back:.1f} MiB back",
        ),
    ]


def service_line(counted: Mapping[str, int]) -> str:
    """What the service says of the job."""
    return (
        f"The service counted {counted['calls']:,} calls, {counted['rows_in']:,} rows in, "
        f"{counted['rows_out']:,} rows out, {counted['connections']:,} connections"
    )


def _minutes(value: float | None, digits: int = 0) -> str | None:
    if value is None:
        return None
    return f"{value:+.{digits}f}" if round(value, digits) else f"{0:.{digits}f}"


def _is_number(text: str) -> bool:
    return text.lstrip("+-").replace(",", "").replace(".", "").isdigit()


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.0f}"
    if isinstance(value, int):
        return f"{value:,}"
    return str(value)
