"""``aqueduct ping``: the times of a handshake and of round trips."""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from typing import TYPE_CHECKING

from aqueduct.cli.common import Commands, add_client_tls, client_tls, reader
from aqueduct.service.signals import say

if TYPE_CHECKING:
    from aqueduct.carriers.certificates import ClientTls

__all__ = ["add", "run"]


def add(commands: Commands) -> None:
    """Adds the command to the parser."""
    command = commands.add_parser("ping", help="the times of a handshake and of round trips")
    command.add_argument("address", metavar="ADDRESS")
    command.add_argument("--count", type=reader("count"), default=4, help="round trips (4)")
    add_client_tls(command)
    command.set_defaults(run=run, usage=command)


def run(args: argparse.Namespace) -> int:
    """Measures, and prints each time; the exit status."""
    asyncio.run(_measure(args.address, args.count, client_tls(args)))
    return 0


async def _measure(address: str, count: int, tls: ClientTls | None) -> None:
    from aqueduct.endpoint import connect

    began = time.perf_counter()
    connection = await connect(address, tls=tls)
    try:
        say(f"handshake with {connection.peer}: {_ms(time.perf_counter() - began)}")
        trips = []
        for number in range(1, count + 1):
            trips.append(await connection.ping())
            say(f"round trip {number}: {_ms(trips[-1])}")
    finally:
        await connection.close()
    middle = _ms(statistics.median(trips))
    say(f"min {_ms(min(trips))}, median {middle}, max {_ms(max(trips))}")


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.3f} ms"
