"""``aqueduct doctor``: what stands between this machine and a service, check by check."""

from __future__ import annotations

import argparse
import asyncio
import json
from typing import Final

from aqueduct.cli.common import (
    FAILED,
    Commands,
    add_client_tls,
    add_token,
    client_tls,
    reader,
    shown_token,
)
from aqueduct.cli.output import Page
from aqueduct.service.signals import say

__all__ = ["add", "run"]

_STYLES: Final = {"ok": "green", "note": "", "warning": "yellow", "failed": "bold red"}


def add(commands: Commands) -> None:
    """Adds the command to the parser."""
    command = commands.add_parser(
        "doctor",
        help="what is wrong between here and a service, and what mends it",
        epilog="The exit status is 1 if a check failed; warnings and notes leave it at 0.",
    )
    command.add_argument("address", metavar="ADDRESS")
    command.add_argument("--json", action="store_true", help="for programs")
    command.add_argument(
        "--timeout",
        metavar="DURATION",
        type=reader("duration"),
        default=5.0,
        help="for each handshake (5); no check takes much longer than twice this",
    )
    for name in ("quic", "tls", "tcp"):
        command.add_argument(
            f"--{name}-port",
            metavar="PORT",
            type=reader("count"),
            help=f"where {name} is looked for as well (by default at the address's port)",
        )
    add_token(command)
    add_client_tls(command)
    command.set_defaults(run=run, usage=command)


def run(args: argparse.Namespace) -> int:
    """Examines, and prints what was found; the exit status."""
    from aqueduct.diagnosis import Severity, examine

    ports = {name: getattr(args, f"{name}_port") for name in ("quic", "tls", "tcp")}
    for name, port in ports.items():
        if port is not None and port > 65_535:
            args.usage.error(f"--{name}-port is {port}; a port is at most 65535")
    found = asyncio.run(
        examine(
            args.address,
            tls=client_tls(args),
            token=shown_token(args),
            ports={name: port for name, port in ports.items() if port is not None},
            timeout=args.timeout,
        )
    )
    status = FAILED if any(each.status is Severity.FAILED for each in found) else 0
    if args.json:
        findings = [each.to_dict() for each in found]
        say(json.dumps({"address": args.address, "failed": bool(status), "findings": findings}))
        return status
    page = Page()
    width = max(len(each.check) for each in found)
    for each in found:
        name = each.status.value
        page.line(f"{name:8}  {each.check:{width}}  {each.text}", _STYLES[name])
        if each.remedy:
            page.line(f"{'':{width + 12}}-> {each.remedy}")
    return status
