"""The ``aqueduct`` command: serve a service, look at one, measure the way to it, dissect bytes.

Every failure is one line on standard error and exit status 1 (2 for wrong usage);
``AQUEDUCT_DEBUG=1`` adds the traceback.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from importlib.metadata import PackageNotFoundError, version

from aqueduct.cli import describe, ping, serve, token, wire
from aqueduct.cli.common import CommandFailed
from aqueduct.errors import AqueductError
from aqueduct.escaping import one_line
from aqueduct.service.signals import tell

__all__ = ["main"]

COMMANDS = (serve, describe, ping, token, wire)
"""The module of each command: ``add(commands)`` and ``run(args)``."""


def main(arguments: list[str] | None = None) -> int:
    """Runs the command with ``arguments`` (by default the process's own); the exit status."""
    args = _parser().parse_args(arguments)
    try:
        status: int = args.run(args)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:
        # The reader of our output has ended (`| head`): this is no error, and needs no message.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except Exception as error:
        if os.environ.get("AQUEDUCT_DEBUG") == "1":
            raise
        text = one_line(error)
        if not isinstance(error, (CommandFailed, AqueductError, OSError)):
            text = f"{type(error).__name__}: {text} (AQUEDUCT_DEBUG=1 shows where)"
        tell(f"aqueduct {args.command}: {text}")
        return 1
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="aqueduct", description="Arrow record batches over message channels on QUIC."
    )
    parser.add_argument("--version", action="version", version=f"aqueduct {_version()}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add(commands)
    return parser


def _version() -> str:
    try:
        return version("aqueduct-arrow")
    except PackageNotFoundError:
        return "(not installed)"
