"""Rows of DuckDB and Polars through a service, without a word about Arrow.

    python examples/polars_and_duckdb.py

It serves a handler that rates flights, written with Polars. A client without asyncio sends a query
of DuckDB, and queries the answers while they come in. One with asyncio sends a frame of Polars.
"""

from __future__ import annotations

import asyncio
from typing import Any

import duckdb
import polars as pl
import pyarrow as pa

import aqueduct

RATED = pa.schema([("carrier", pa.string()), ("late", pa.bool_())])
FLIGHTS = """
    select 'C' || (range % 7) as carrier, ((range * 37) % 100)::bigint as delay
    from range(1000000)
"""

service = aqueduct.Service("flights")


@service.handler(output=RATED)
def rate(batch: pa.RecordBatch) -> pl.DataFrame:
    """Which flights are late."""
    flights: Any = pl.from_arrow(batch)
    rated: pl.DataFrame = flights.select(pl.col("carrier"), late=pl.col("delay") > 90)
    return rated


def with_duckdb(address: str) -> int:
    """The late flights of a query: it is read, sent, rated and queried batch by batch."""
    connection = duckdb.connect()
    with aqueduct.SyncClient(address) as client:
        with client.exchange("rate", connection.sql(FLIGHTS)) as answers:
            late: Any = duckdb.sql("select count(*) from answers where late")
            ((count,),) = late.fetchall()
            assert answers.over
    return int(count)


async def with_polars(address: str) -> dict[str, int]:
    """The late flights of a frame, by carrier."""
    flights = pl.DataFrame({"carrier": ["A", "B", "A", "A"], "delay": [95, 10, 99, 0]})
    async with await aqueduct.Client.connect(address) as client:
        stream = client.exchange("rate", flights)
        schema: Any = await stream.opened()
        print("the answers have", schema.names)
        rated = await stream.to_polars()
    late = rated.group_by("carrier").agg(pl.col("late").sum()).sort("carrier")
    return dict(late.iter_rows())


async def main() -> None:
    """Serves, and calls."""
    async with service.serving("aqueduct+tcp://127.0.0.1:0") as serving:
        address = serving.addresses[0]
        print("late by DuckDB:", await asyncio.to_thread(with_duckdb, address))
        print("late by Polars:", await with_polars(address))


if __name__ == "__main__":
    asyncio.run(main())
