"""The ``aqueduct`` command: serve a service, call one, look at one, dissect bytes.

Every failure is one line on standard error, and an exit status that docs/guides/command-line.md
lists. ``--debug``, or ``AQUEDUCT_DEBUG=1``, adds the traceback.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import traceback
from importlib.metadata import PackageNotFoundError, version

from aqueduct.arguments import debug_asked
from aqueduct.cli import bench, call, completion, describe, doctor, ping, serve, token, top, wire
from aqueduct.cli.common import (
    CALL_FAILED,
    FAILED,
    CommandFailed,
    CommandParser,
    ShowVersion,
    Terminated,
    give_up_output,
    open_if_closed,
    require_standard_output,
)
from aqueduct.cli.formats import STANDARD
from aqueduct.errors import AqueductError, CallError
from aqueduct.escaping import escape_lines, one_line
from aqueduct.service.signals import tell

__all__ = ["main"]

COMMANDS = (serve, call, describe, ping, top, bench, doctor, token, wire, completion)
"""The module of each command: ``add(commands)`` and ``run(args)``."""


def main(arguments: list[str] | None = None) -> int:
    """Runs the command with ``arguments`` (by default the process's own); the exit status."""
    open_if_closed("stderr")
    args = argparse.Namespace(command="", debug=False)  # what is known until they are read
    try:
        _parser().parse_args(sys.argv[1:] if arguments is None else arguments, args)
        if getattr(args, "output", None) in (None, STANDARD):  # else it writes a file alone
            require_standard_output()
        open_if_closed("stdout")
        status: int = args.run(args)
        if sys.stdout is not None and not sys.stdout.closed:  # code of a service may do as it likes
            sys.stdout.flush()  # while a failure can be told in one line
    except KeyboardInterrupt as error:
        return 128 + (error.number if isinstance(error, Terminated) else signal.SIGINT)
    except BrokenPipeError:
        # The reader of our output has ended (`| head`): this is no error, and needs no message.
        return 128 + signal.SIGPIPE
    except Exception as error:  # noqa: BLE001  what it is, is said in one line
        with contextlib.suppress(OSError):  # nobody can be told
            _tell(error, args)
        return CALL_FAILED if isinstance(error, CallError) else FAILED
    finally:
        give_up_output()
    return status


def _tell(error: Exception, args: argparse.Namespace) -> None:
    if args.debug or debug_asked():
        print(escape_lines(traceback.format_exc().rstrip("\n")), file=sys.stderr)
    text = one_line(error)
    if not isinstance(error, (CommandFailed, AqueductError, OSError)):
        text = f"{type(error).__name__}: {text} (--debug shows where)"
    tell(f"{f'aqueduct {args.command}'.rstrip()}: {text}")


def _parser() -> CommandParser:
    parser = CommandParser(
        prog="aqueduct", description="Arrow record batches over message channels on QUIC."
    )
    parser.add_argument("--version", action=ShowVersion, const=f"aqueduct {_version()}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for module in COMMANDS:
        module.add(commands)
    for command in commands.choices.values():
        command.add_argument(
            "--debug", action="store_true", help="a failure shows its traceback, too"
        )
    parser.set_defaults(parser=parser)
    return parser


def _version() -> str:
    try:
        return version("aqueduct-arrow")
    except PackageNotFoundError:
        return "(not installed)"
