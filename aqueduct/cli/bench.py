"""``aqueduct bench``: how fast the way to a service is, by a handler that does nothing."""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
from typing import TYPE_CHECKING, Final

from aqueduct.cli.common import (
    CALL_FAILED,
    FAILED,
    CommandFailed,
    Commands,
    add_client_tls,
    add_token,
    client_tls,
    reader,
    shown_token,
)
from aqueduct.cli.output import Page, number, of_bytes
from aqueduct.errors import AqueductError, CallError, UnknownHandler
from aqueduct.escaping import one_line
from aqueduct.service.signals import say, tell

if TYPE_CHECKING:
    from aqueduct.diagnosis import Direction, PathBenchmark

__all__ = ["add", "run"]

_LARGEST_BATCH: Final = 1000 << 20
"""Bytes of data, which are made at once. With what Arrow adds it is below Calls.batch_limit."""


def add(commands: Commands) -> None:
    """Adds the command to the parser."""
    command = commands.add_parser(
        "bench",
        help="latency and throughput of the way to a service",
        epilog="The service must be served with --benchmark, or made with Service(..., "
        "benchmark=True). Ctrl-C ends it early, and what was measured so far is shown.",
    )
    command.add_argument("address", metavar="ADDRESS")
    command.add_argument("--json", action="store_true", help="for programs")
    command.add_argument(
        "--seconds",
        metavar="DURATION",
        type=reader("duration"),
        default=5.0,
        help="in all: a third for small calls, and for each direction (5)",
    )
    command.add_argument(
        "--batch",
        metavar="SIZE",
        type=reader("size"),
        default=1 << 20,
        help="bytes of a batch, such as 256k; 1000m at most (1m)",
    )
    command.add_argument(
        "--most",
        metavar="SIZE",
        type=reader("size"),
        default=4 << 30,
        help="bytes each way, after which that direction ends early (4g)",
    )
    add_token(command)
    add_client_tls(command)
    command.set_defaults(run=run, usage=command)


def run(args: argparse.Namespace) -> int:
    """Measures, and prints the figures; the exit status."""
    if args.batch > _LARGEST_BATCH:
        most = f"{_LARGEST_BATCH} (1000m)"
        args.usage.error(f"--batch is {args.batch} bytes; it may be {most} at most")
    from aqueduct.diagnosis import PathBenchmark

    found = PathBenchmark()
    status = 0
    try:
        asyncio.run(_measure(found, args))
    except KeyboardInterrupt:
        if not found.pings:
            raise
        status = 128 + signal.SIGINT
    except UnknownHandler as error:
        raise CommandFailed(
            f"{args.address} has no handler to measure with; serve it with aqueduct serve "
            "--benchmark, or make it with Service(..., benchmark=True)"
        ) from error
    except AqueductError as error:
        if not found.pings:
            raise
        tell(f"the service failed: {one_line(error)}")
        status = CALL_FAILED if isinstance(error, CallError) else FAILED
    if args.json:
        say(json.dumps({"address": args.address, **found.to_dict()}))
    else:
        _show(found)
    return status


async def _measure(found: PathBenchmark, args: argparse.Namespace) -> None:
    from aqueduct.client.client import Client

    connecting = Client.connect(args.address, token=shown_token(args), tls=client_tls(args))
    async with await connecting as client:
        await found.run(client, seconds=args.seconds, size=args.batch, most=args.most)


def _show(found: PathBenchmark) -> None:
    figures = found.to_dict()
    page = Page()
    page.line(f"{found.peer}, over {found.carrier}", "bold")
    if not found.complete:
        page.line("ended early: what follows is what was measured so far", "yellow")
    trip, call = figures["round_trip"], figures["call"]
    rows = [("round trip, idle", f"{_ms(trip['p50'])} (from {_ms(trip['least'])})")]
    if found.loaded_round_trip:
        rows.append(("round trip, at the end", _ms(found.loaded_round_trip)))
    if call["count"]:
        rows.append(("small call, p50", _ms(call["p50"])))
        rows.append(("small call, p99", f"{_ms(call['p99'])} of {number(call['count'])} calls"))
    for title, way in (
        ("to the service", found.to_service),
        ("from the service", found.from_service),
    ):
        if way.bytes or way.cut:
            rows.append((title, _rate(way)))
    lost = found.packets_lost
    rows.append(("packets lost", "not known here" if lost is None else number(lost)))
    page.table(("", "measured"), rows)
    page.line()
    page.line("A small call is one row there and back, one call at a time. The rates are of one")
    page.line("call with large batches, without headers. Packets lost are those of this side,")
    page.line("which were sent again. Handlers of your own take their time on top of this.")


def _rate(way: Direction) -> str:
    if not way.bytes:
        return f"no batch of {of_bytes(way.batch)} came in time: give a smaller --batch"
    return f"{of_bytes(way.rate)}/s ({of_bytes(way.bytes)} in {way.seconds:.1f} s)"


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.3f} ms"
