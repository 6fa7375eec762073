"""What the demo prints: plain text, 80 columns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

__all__ = ["carriers_table", "flights_table", "result_lines", "step", "table"]

MiB: Final = 1 << 20


def step(name: str, text: str, seconds: float | None = None) -> str:
    """One step of the demo with the time it took."""
    timing = "" if seconds is None else f"{seconds:.1f} s"
    return f"{name:<9}{text:<61}{timing:>8}".rstrip()


def table(headings: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table for people: numbers to the right, text to the left, a dash for null."""
    cells = [[_cell(value) for value in row] for row in rows]
    right = [
        all(text == "-" or text[-1].isdigit() for text in column)
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


def result_lines(counters: Mapping[str, int], seconds: float) -> list[str]:
    """What went through the service, by its own counters for the job alone."""
    there, back = counters["bytes_in"] / MiB, counters["bytes_out"] / MiB
    ways = f"{there:.1f} MiB to the service and {back:.1f} MiB back"
    return [
        f"Rows      {counters['rows_in']:>9,}    in {counters['batches_in']:,} batches",
        f"Seconds   {seconds:>9.1f}    from Parquet to Parquet, Spark's start not counted",
        f"MiB/s     {(there + back) / seconds:>9.1f}    {ways}",
    ]


def _minutes(value: float | None, digits: int = 0) -> str | None:
    return None if value is None else f"{value:+.{digits}f}"


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.0f}"
    if isinstance(value, int):
        return f"{value:,}"
    return str(value)
