"""A program that writes orders into a service, and goes on after it was killed.

    python examples/writer.py serve aqueduct+tcp://127.0.0.1:7000 /tmp/orders
    python examples/writer.py write aqueduct+tcp://127.0.0.1:7000 100000
    python examples/writer.py count /tmp/orders

Kill either of the first two as often as you like, and start it again: each order is there once.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa

sys.path.insert(0, str(Path(__file__).parents[1]))

import aqueduct
from aqueduct.errors import AqueductError
from examples.sinks.parquet import ParquetSink, read

ORDERS = pa.schema([("order", pa.int64()), ("price", pa.float64())])
KEY = "orders-2026-11-28"
BATCH = 100
COMMIT = 20 * BATCH


def orders(start: int, end: int) -> Iterator[pa.RecordBatch]:
    """The source: it can be read again from any offset."""
    for first in range(start, end, BATCH):
        numbers = pa.array(range(first, min(first + BATCH, end)), pa.int64())
        prices = pa.array([number % 97 + 0.5 for number in numbers.to_pylist()])
        yield pa.record_batch([numbers, prices], schema=ORDERS)


async def write(address: str, end: int) -> None:
    """Writes all orders up to ``end`` that are not there yet."""
    async with (
        await aqueduct.Client.connect(address) as client,
        client.writer("orders", key=KEY) as writer,
    ):
        offset = writer.committed.note or 0
        print("goes on at order", offset, flush=True)
        for batch in orders(offset, end):
            await writer.write(batch)
            offset += batch.num_rows
            if offset % COMMIT == 0:
                await writer.commit(note=offset)
                print("committed up to", offset, flush=True)
        there = await writer.commit(note=offset)
        print("ok:", there.rows, "orders in", there.commits, "commits")


def serve(address: str, folder: str) -> None:
    """The service, until it is told to end."""
    service = aqueduct.Service("stock", description="Keeps orders.")
    service.sink("orders", ParquetSink(folder), schema=ORDERS)
    service.run(address)


def count(folder: str) -> None:
    """Counts orders, and those that are there more than once."""
    table = read(folder)
    numbers = [] if table is None else table["order"].to_pylist()
    print(len(numbers), "orders,", len(numbers) - len(set(numbers)), "twice")


def main() -> None:
    """Does one of the three."""
    parser = argparse.ArgumentParser(description="Writes orders into a service, each once.")
    roles = parser.add_subparsers(dest="role", required=True)
    for role, arguments in {
        "serve": ("address", "folder"),
        "write": ("address", "end"),
        "count": ("folder",),
    }.items():
        made = roles.add_parser(role)
        for name in arguments:
            made.add_argument(name, type=int if name == "end" else str)
    given = parser.parse_args()
    try:
        if given.role == "serve":
            serve(given.address, given.folder)
        elif given.role == "write":
            asyncio.run(write(given.address, given.end))
        else:
            count(given.folder)
    except AqueductError as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        pass


if __name__ == "__main__":
    main()
