"""``aqueduct serve``: run a service in this process, or in workers."""

from __future__ import annotations

import argparse
import asyncio
from dataclasses import replace

from aqueduct.address import Address
from aqueduct.cli.common import Commands, reader
from aqueduct.logs import FORMATS, LEVELS, LogSettings, as_json, configure
from aqueduct.service.loader import load_service
from aqueduct.service.service import serve_until_signal
from aqueduct.service.signals import ProcessDeadline, tell_as

__all__ = ["add", "run"]


def add(commands: Commands) -> None:
    """Adds the command to the parser."""
    command = commands.add_parser(
        "serve",
        help="run a service until SIGINT or SIGTERM",
        epilog="SIGUSR1 writes the state of the service and its connections as a line of JSON.",
    )
    command.add_argument(
        "service", metavar="MODULE:SERVICE", help="found from here, like python -m"
    )
    command.add_argument(
        "--listen",
        metavar="ADDRESS",
        action="append",
        required=True,
        help="aqueduct://HOST:PORT, aqueduct+tls://HOST:PORT, aqueduct+tcp://HOST:PORT (port 0: "
        "any free one) or aqueduct+unix:///PATH; for clients of ReactiveSocket reactivesocket+tcp, "
        "+tls, +ws, +wss or +unix; may be repeated",
    )
    command.add_argument(
        "--origin",
        metavar="ORIGIN",
        type=reader("web origin"),
        action="append",
        default=[],
        help="of web pages that may connect to reactivesocket+ws:// and +wss://, such as "
        "https://app.example.com; may be repeated (by default no page may)",
    )
    command.add_argument("--certificate", metavar="FILE", help="certificate chain, PEM")
    command.add_argument("--key", metavar="FILE", help="its private key, PEM")
    command.add_argument(
        "--key-password", metavar="TEXT", help="of a private key that is encrypted"
    )
    command.add_argument(
        "--client-ca",
        metavar="FILE",
        help="CAs of the certificates that clients must show over aqueduct+tls://, PEM",
    )
    command.add_argument(
        "--dev-certificate",
        action="store_true",
        help="make a certificate on the spot; the address printed pins its fingerprint",
    )
    command.add_argument(
        "--workers",
        metavar="N",
        type=reader("count"),
        help="serve by so many processes, which share the addresses and are replaced when they "
        "die (by default: by this one process)",
    )
    command.add_argument(
        "--restarts",
        metavar="N",
        type=reader("count or zero"),
        default=10,
        help="deaths of workers within a minute that are borne; one more ends the service (10)",
    )
    command.add_argument(
        "--start-timeout",
        metavar="DURATION",
        type=reader("duration"),
        default=300,
        help="how long a worker may take to load the service and to listen: seconds, or 5min (300)",
    )
    command.add_argument(
        "--drain",
        metavar="DURATION",
        type=reader("duration or zero"),
        help="the process ends within this time of SIGINT or SIGTERM; open calls fail a little "
        "earlier (by default Timing.drain_timeout of the service: 25)",
    )
    command.add_argument(
        "--log-format",
        choices=FORMATS,
        default="text",
        help="of the log on standard error: text (the default), or json with one object a line",
    )
    command.add_argument(
        "--log-level", choices=LEVELS, default="info", help="the least that is logged (info)"
    )
    command.set_defaults(run=run, usage=command)


def run(args: argparse.Namespace) -> int:
    """Serves until SIGINT or SIGTERM; the exit status."""
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
    logs = LogSettings(args.log_format, args.log_level)
    configure(logs)
    if logs.format == "json":
        tell_as(as_json)
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
        logs=LogSettings(args.log_format, args.log_level),
    )
    return asyncio.run(workers.run())
