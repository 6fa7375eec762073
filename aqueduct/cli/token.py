"""``aqueduct token``: a token, and the line of it for a file of tokens."""

from __future__ import annotations

import argparse

from aqueduct.cli.common import Commands, reader
from aqueduct.service.signals import say

__all__ = ["add", "run"]


def add(commands: Commands) -> None:
    """Adds the command to the parser."""
    command = commands.add_parser(
        "token",
        help="make a token, and the line of it for a file of tokens (aqueduct.TokenFile)",
        epilog="The token is shown once: the file holds its hash alone.",
    )
    command.add_argument("name", metavar="NAME", help="who gets the token")
    for limit, what in (
        ("handlers", "handlers that it may call"),
        ("tables", "tables that it may read"),
        ("sinks", "sinks that it may write to"),
    ):
        command.add_argument(
            f"--{limit}",
            metavar="NAMES",
            type=reader("words"),
            default=(),
            help=f"the {what}, with commas; without any of these limits it may call everything",
        )
    command.add_argument(
        "--expires",
        metavar="TIME",
        default="",
        help="refused from then on: 2027-01-31, or 2027-01-31T18:00+01:00 (never)",
    )
    command.add_argument(
        "--file",
        metavar="FILE",
        help="put the line at the end of this file, which is made if it is not there, and write "
        "the token alone",
    )
    command.set_defaults(run=run, usage=command)


def run(args: argparse.Namespace) -> int:
    """Makes a token and prints it, once; the exit status."""
    from aqueduct.service.token_file import append_line, make_token, token_line

    token = make_token()
    line = token_line(
        args.name,
        token,
        handlers=args.handlers,
        tables=args.tables,
        sinks=args.sinks,
        expires=args.expires,
    )
    if args.file is None:
        say(f"token: {token}")
        say(f"line:  {line}")
        return 0
    append_line(args.file, line)
    say(token)
    return 0
