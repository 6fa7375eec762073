"""``aqueduct wire``: wire bytes to frames and back."""

from __future__ import annotations

import argparse
import sys

from aqueduct.cli.common import CommandFailed, Commands, reader, require_standard_input
from aqueduct.service.signals import say

__all__ = ["add", "run"]


def add(commands: Commands) -> None:
    """Adds the command to the parser."""
    command = commands.add_parser("wire", help="wire bytes to frames and back")
    command.add_argument(
        "protocol",
        metavar="PROTOCOL",
        nargs="?",
        help="aq, control-streams, bpmux, relink or reactivesocket",
    )
    command.add_argument("hex", metavar="HEX", nargs="?", help="the bytes, or - for standard input")
    command.add_argument(
        "--json",
        action="store_true",
        help="answer JSON lines of standard input: decode, encode, scenario",
    )
    command.add_argument(
        "--from",
        dest="sender",
        metavar="SIDE",
        help="client or server; of relink connector or listener",
    )
    command.add_argument(
        "--carrier",
        metavar="CARRIER",
        help="stream (the default) or datagram; of control-streams uni, datagram, bidi-opener or "
        "bidi-answer (uni and bidi-opener are tried)",
    )
    command.add_argument(
        "--channel",
        metavar="ID",
        type=reader("count or zero"),
        help="of control-streams: the channel of a bidi-answer (none: the connection's own)",
    )
    command.add_argument(
        "--header-blocks",
        action="store_true",
        default=None,
        help="of control-streams: the messages are those of Arrow calls, which begin with headers",
    )
    command.add_argument(
        "--framing",
        metavar="FRAMING",
        help="of reactivesocket: tcp (the default), or message for one frame without its length",
    )
    command.add_argument(
        "--what",
        metavar="WHAT",
        help="of relink: packets (the default), connector-hello, listener-hello, connector-open "
        "or listener-reply",
    )
    command.add_argument(
        "--id-sizes",
        metavar="SIZE",
        nargs=2,
        type=reader("count or zero"),
        help="of relink: bytes of a channel id, the connector's and the listener's (1 1)",
    )
    command.set_defaults(run=run, usage=command)


def run(args: argparse.Namespace) -> int:
    """Prints what the bytes say; the exit status."""
    from aqueduct import dissect as dissection

    connector, listener = args.id_sizes or (None, None)
    given = {
        "from": args.sender,
        "carrier": args.carrier,
        "channel": args.channel,
        "header_blocks": args.header_blocks,
        "framing": args.framing,
        "what": args.what,
        "connector_id_size": connector,
        "listener_id_size": listener,
    }
    context = {name: value for name, value in given.items() if value is not None}
    if args.json:
        if args.protocol or args.hex or context:
            args.usage.error("--json takes everything from standard input")
        require_standard_input()
        dissection.answer_lines(sys.stdin.buffer, sys.stdout)
        return 0
    if not args.protocol or not args.hex:
        args.usage.error("either PROTOCOL and HEX, or --json")
    if args.hex == "-":
        require_standard_input()
    text = sys.stdin.read() if args.hex == "-" else args.hex
    try:
        for line in dissection.dissect(args.protocol, text, context):
            say(line)
    except dissection.WireError as error:
        where = "" if error.offset is None else f" at byte {error.offset}"
        raise CommandFailed(f"{error.kind}{where}: {error}") from error
    return 0
