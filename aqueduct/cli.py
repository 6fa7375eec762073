"""The ``aqueduct`` command: serve a service, look at one, measure the way to it, dissect bytes.

Every failure is one line on standard error and exit status 1 (2 for wrong usage);
``AQUEDUCT_DEBUG=1`` adds the traceback.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from aqueduct.address import Address
from aqueduct.arguments import KINDS
from aqueduct.errors import AqueductError, ConfigError
from aqueduct.escaping import escape, one_line
from aqueduct.service.loader import load_service
from aqueduct.service.service import serve_until_signal
from aqueduct.service.signals import ProcessDeadline, say, tell

if TYPE_CHECKING:
    from aqueduct.carriers.certificates import ClientTls
    from aqueduct.rpc.describe import Description

__all__ = ["main"]


class _Failed(Exception):
    """An expected failure; its text is the line that the user reads."""


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
        if not isinstance(error, (_Failed, AqueductError, OSError)):
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

    serve = commands.add_parser(
        "serve",
        help="run a service until SIGINT or SIGTERM",
        epilog="SIGUSR1 writes the state of the service and its connections as a line of JSON.",
    )
    serve.add_argument("service", metavar="MODULE:SERVICE", help="found from here, like python -m")
    serve.add_argument(
        "--listen",
        metavar="ADDRESS",
        action="append",
        required=True,
        help="aqueduct://HOST:PORT, aqueduct+tls://HOST:PORT, aqueduct+tcp://HOST:PORT (port 0: "
        "any free one) or aqueduct+unix:///PATH; for clients of ReactiveSocket reactivesocket+tcp, "
        "+tls, +ws, +wss or +unix; may be repeated",
    )
    serve.add_argument(
        "--origin",
        metavar="ORIGIN",
        type=_reader("web origin"),
        action="append",
        default=[],
        help="of web pages that may connect to reactivesocket+ws:// and +wss://, such as "
        "https://app.example.com; may be repeated (by default no page may)",
    )
    serve.add_argument("--certificate", metavar="FILE", help="certificate chain, PEM")
    serve.add_argument("--key", metavar="FILE", help="its private key, PEM")
    serve.add_argument("--key-password", metavar="TEXT", help="of a private key that is encrypted")
    serve.add_argument(
        "--client-ca",
        metavar="FILE",
        help="CAs of the certificates that clients must show over aqueduct+tls://, PEM",
    )
    serve.add_argument(
        "--dev-certificate",
        action="store_true",
        help="make a certificate on the spot; the address printed pins its fingerprint",
    )
    serve.add_argument(
        "--workers",
        metavar="N",
        type=_reader("count"),
        help="serve by so many processes, which share the addresses and are replaced when they "
        "die (by default: by this one process)",
    )
    serve.add_argument(
        "--restarts",
        metavar="N",
        type=_reader("count or zero"),
        default=10,
        help="deaths of workers within a minute that are borne; one more ends the service (10)",
    )
    serve.add_argument(
        "--start-timeout",
        metavar="DURATION",
        type=_reader("duration"),
        default=300,
        help="how long a worker may take to load the service and to listen: seconds, or 5min (300)",
    )
    serve.add_argument(
        "--drain",
        metavar="DURATION",
        type=_reader("duration or zero"),
        help="the process ends within this time of SIGINT or SIGTERM; open calls fail a little "
        "earlier (by default Timing.drain_timeout of the service: 25)",
    )
    serve.add_argument(
        "--admin",
        metavar="HOST:PORT",
        type=_reader("host and port"),
        help="an HTTP port for operators, such as 127.0.0.1:9464: /health/live, /health/ready, "
        "/metrics and /state.json (by default there is none)",
    )
    serve.set_defaults(run=_serve, usage=serve)

    describe = commands.add_parser(
        "describe", help="the version, handlers and schemas of a service"
    )
    describe.add_argument("address", metavar="ADDRESS")
    describe.add_argument("--json", action="store_true", help="for programs")
    describe.add_argument("--token", help="what the service asks of its callers")
    _add_certificate(describe)
    describe.set_defaults(run=_describe, usage=describe)

    ping = commands.add_parser("ping", help="the times of a handshake and of round trips")
    ping.add_argument("address", metavar="ADDRESS")
    ping.add_argument("--count", type=_reader("count"), default=4, help="round trips (4)")
    _add_certificate(ping)
    ping.set_defaults(run=_ping, usage=ping)

    token = commands.add_parser(
        "token",
        help="make a token, and the line of it for a file of tokens (aqueduct.TokenFile)",
        epilog="The token is shown once: the file holds its hash alone.",
    )
    token.add_argument("name", metavar="NAME", help="who gets the token")
    for limit, what in (
        ("handlers", "handlers that it may call"),
        ("tables", "tables that it may read"),
        ("sinks", "sinks that it may write to"),
    ):
        token.add_argument(
            f"--{limit}",
            metavar="NAMES",
            type=_reader("words"),
            default=(),
            help=f"the {what}, with commas; without any of these limits it may call everything",
        )
    token.add_argument(
        "--expires",
        metavar="TIME",
        default="",
        help="refused from then on: 2027-01-31, or 2027-01-31T18:00+01:00 (never)",
    )
    token.add_argument(
        "--file",
        metavar="FILE",
        help="put the line at the end of this file, which is made if it is not there, and write "
        "the token alone",
    )
    token.set_defaults(run=_token, usage=token)

    dissection = commands.add_parser("wire", help="wire bytes to frames and back")
    dissection.add_argument(
        "protocol",
        metavar="PROTOCOL",
        nargs="?",
        help="aq, control-streams, bpmux, relink or reactivesocket",
    )
    dissection.add_argument(
        "hex", metavar="HEX", nargs="?", help="the bytes, or - for standard input"
    )
    dissection.add_argument(
        "--json",
        action="store_true",
        help="answer JSON lines of standard input: decode, encode, scenario",
    )
    dissection.add_argument(
        "--from",
        dest="sender",
        metavar="SIDE",
        help="client or server; of relink connector or listener",
    )
    dissection.add_argument(
        "--carrier",
        metavar="CARRIER",
        help="stream (the default) or datagram; of control-streams uni, datagram, bidi-opener or "
        "bidi-answer (uni and bidi-opener are tried)",
    )
    dissection.add_argument(
        "--channel",
        metavar="ID",
        type=_reader("count or zero"),
        help="of control-streams: the channel of a bidi-answer (none: the connection's own)",
    )
    dissection.add_argument(
        "--header-blocks",
        action="store_true",
        default=None,
        help="of control-streams: the messages are those of Arrow calls, which begin with headers",
    )
    dissection.add_argument(
        "--framing",
        metavar="FRAMING",
        help="of reactivesocket: tcp (the default), or message for one frame without its length",
    )
    dissection.add_argument(
        "--what",
        metavar="WHAT",
        help="of relink: packets (the default), connector-hello, listener-hello, connector-open "
        "or listener-reply",
    )
    dissection.add_argument(
        "--id-sizes",
        metavar="SIZE",
        nargs=2,
        type=_reader("count or zero"),
        help="of relink: bytes of a channel id, the connector's and the listener's (1 1)",
    )
    dissection.set_defaults(run=_wire, usage=dissection)
    return parser


def _add_certificate(command: argparse.ArgumentParser) -> None:
    command.add_argument("--certificate", metavar="FILE", help="a client's own certificate, PEM")
    command.add_argument("--key", metavar="FILE", help="its private key, PEM")
    command.add_argument(
        "--key-password", metavar="TEXT", help="of a private key that is encrypted"
    )
    command.add_argument("--ca", metavar="FILE", help="CAs of the service's certificate, PEM")


def _client_tls(args: argparse.Namespace) -> ClientTls | None:
    from aqueduct.carriers.certificates import ClientTls

    if bool(args.certificate) != bool(args.key):
        args.usage.error("--certificate and --key belong together")
    if not args.certificate and not args.ca:
        return None
    return ClientTls(
        ca=args.ca, certificate=args.certificate, key=args.key, key_password=args.key_password
    )


def _version() -> str:
    try:
        return version("aqueduct-arrow")
    except PackageNotFoundError:
        return "(not installed)"


def _reader(kind: str) -> Callable[[str], Any]:
    """A reader of arguments of this kind, one of ``aqueduct.arguments.KINDS``."""

    def read(text: str) -> Any:
        try:
            return KINDS[kind].value(text, "the value")
        except ConfigError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return read


# ------------------------------------------------------------------ serve


def _serve(args: argparse.Namespace) -> int:
    if bool(args.certificate) != bool(args.key):
        args.usage.error("--certificate and --key belong together")
    needing = [text for text in args.listen if Address.parse(text).certified]
    if needing and not args.certificate and not args.dev_certificate:
        args.usage.error(
            f"{needing[0]} needs a certificate: --certificate and --key, or --dev-certificate to "
            "make one"
        )
    if args.client_ca and not (args.certificate or args.dev_certificate):
        args.usage.error("--client-ca belongs to a certificate of the service's own")
    if args.certificate and args.dev_certificate:
        args.usage.error(
            "--dev-certificate makes a certificate; it excludes --certificate and --key"
        )
    if args.workers:
        return _serve_by_workers(args)
    return asyncio.run(
        serve_until_signal(
            load_service(args.service),
            args.listen,
            drain=args.drain,
            deadline=ProcessDeadline(),
            certificate=args.certificate,
            key=args.key,
            key_password=args.key_password,
            dev_certificate=args.dev_certificate,
            client_ca=args.client_ca,
            origins=args.origin,
            admin=args.admin,
        )
    )


def _serve_by_workers(args: argparse.Namespace) -> int:
    from aqueduct.carriers.certificates import ServerTls, dev_certificate
    from aqueduct.service.supervisor import Restarts, Supervisor

    addresses = [Address.parse(text) for text in args.listen]
    tls = None
    if args.dev_certificate:
        tls = dev_certificate(address.host for address in addresses if address.host)
        tls = replace(tls, client_ca=args.client_ca)
    elif args.certificate:
        tls = ServerTls(args.certificate, args.key, args.key_password, args.client_ca)
    workers = Supervisor(
        args.service,
        addresses,
        count=args.workers,
        tls=tls,
        restarts=Restarts(limit=args.restarts, start=args.start_timeout),
        drain=args.drain,
        origins=args.origin,
        admin=args.admin,
    )
    return asyncio.run(workers.run())


# --------------------------------------------------------- describe and ping


def _describe(args: argparse.Namespace) -> int:
    description = asyncio.run(_fetch_description(args.address, args.token, _client_tls(args)))
    if args.json:
        say(_printable_json(description.to_json()))
        return 0
    say(
        f"{description.service}  (aqueduct-arrow {description.library}, "
        f"call convention {description.convention})"
    )
    for handler in description.handlers:
        properties: list[str] = [handler.kind]
        if handler.concurrency > 1:
            properties.append(f"concurrency {handler.concurrency}")
        if handler.max_concurrency is not None:
            properties.append(f"max_concurrency {handler.max_concurrency}")
        if handler.idempotent:
            properties.append("idempotent")
        say("")
        say(f"{handler.name}  ({', '.join(properties)})")
        if handler.summary:
            say(f"  {handler.summary}")
        if handler.kind != "source":
            _print_schema("input", handler.input, "any")
        if handler.kind != "sink":
            _print_schema("output", handler.output, "depends on the call")
    for table in description.tables:
        say("")
        say(f"{table.name}  (table{', stream' if table.streams else ''})")
        if table.summary:
            say(f"  {table.summary}")
        _print_schema("columns", table.schema, "depend on the call")
    for sink in description.sinks:
        say("")
        say(f"{sink.name}  (sink, exactly once)")
        if sink.summary:
            say(f"  {sink.summary}")
        _print_schema("takes", sink.schema, "any")
    return 0


def _print_schema(label: str, schema: Any, otherwise: str) -> None:
    if schema is None:
        say(f"  {label}: {otherwise}")
        return
    say(f"  {label}:")
    names = [escape(field.name) for field in schema]
    width = max(map(len, names), default=0)
    for name, field in zip(names, schema, strict=True):
        say(f"    {name:{width}}  {field.type}{'' if field.nullable else ' not null'}")


def _printable_json(document: str) -> str:
    """The same document, with what is not printable written as JSON escapes it."""
    return "".join(each if each.isprintable() else json.dumps(each)[1:-1] for each in document)


async def _fetch_description(address: str, token: str | None, tls: ClientTls | None) -> Description:
    from aqueduct.client.client import Client

    async with await Client.connect(address, token=token, tls=tls) as client:
        return await client.describe()


def _ping(args: argparse.Namespace) -> int:
    asyncio.run(_measure(args.address, args.count, _client_tls(args)))
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


# ------------------------------------------------------------------ token


def _token(args: argparse.Namespace) -> int:
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


# ------------------------------------------------------------------- wire


def _wire(args: argparse.Namespace) -> int:
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
        dissection.answer_lines(sys.stdin.buffer, sys.stdout)
        return 0
    if not args.protocol or not args.hex:
        args.usage.error("either PROTOCOL and HEX, or --json")
    text = sys.stdin.read() if args.hex == "-" else args.hex
    try:
        for line in dissection.dissect(args.protocol, text, context):
            say(line)
    except dissection.WireError as error:
        where = "" if error.offset is None else f" at byte {error.offset}"
        raise _Failed(f"{error.kind}{where}: {error}") from error
    return 0


if __name__ == "__main__":
    sys.exit(main())
