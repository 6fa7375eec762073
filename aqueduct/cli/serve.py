"""``aqueduct serve``: run a service in this process, or in workers."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from contextlib import redirect_stdout
from dataclasses import replace

from aqueduct.address import Address
from aqueduct.cli.common import Commands
from aqueduct.logs import LogSettings, as_json, configure
from aqueduct.service.loader import load_service
from aqueduct.service.service import serve_until_signal
from aqueduct.service.signals import ProcessDeadline, say, tell_as
from aqueduct.settings.in_force import ServiceSettings
from aqueduct.settings.options import add_options, options_of
from aqueduct.settings.places import forget_secrets, read_settings
from aqueduct.settings.table import Serve
from aqueduct.settings.text import toml_lines

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
    add_options(command)
    command.set_defaults(run=run, usage=command)


def run(args: argparse.Namespace) -> int:
    """Serves until SIGINT or SIGTERM; the exit status."""
    settings = read_settings(options_of(args), environment=os.environ, file=args.config)
    forget_secrets(os.environ)
    if args.print_config:
        return _print_config(args.service, settings)
    serve = settings.serve()
    if not serve.listen:
        args.usage.error(
            "an address to listen at is missing: --listen, AQUEDUCT_SERVE_LISTEN, or listen below "
            "[serve] in the file of --config"
        )
    if bool(serve.certificate) != bool(serve.key):
        args.usage.error(
            "--certificate and --key belong together, as serve.certificate and serve.key do"
        )
    needing = [text for text in serve.listen if Address.parse(text).certified]
    if needing and not serve.certificate and not serve.dev_certificate:
        args.usage.error(
            f"{needing[0]} needs a certificate: --certificate and --key, or --dev-certificate to "
            "make one"
        )
    if serve.client_ca and not (serve.certificate or serve.dev_certificate):
        args.usage.error("--client-ca belongs to a certificate of the service's own")
    if serve.key_password and not serve.certificate:
        where = settings.given["serve.key_password"].where
        args.usage.error(f"{where} belongs to --certificate and --key")
    if serve.certificate and serve.dev_certificate:
        args.usage.error(
            "--dev-certificate makes a certificate; it excludes --certificate and --key"
        )
    logs = LogSettings(serve.log_format, serve.log_level)
    configure(logs)
    if logs.format == "json":
        tell_as(as_json)
    if serve.workers:
        return _serve_by_workers(args.service, serve, settings, logs)
    service = load_service(args.service)
    service.configure(settings.config(service.config), benchmark=serve.benchmark)
    return asyncio.run(
        serve_until_signal(
            service,
            serve.listen,
            drain=None,
            deadline=ProcessDeadline(),
            certificate=serve.certificate,
            key=serve.key,
            key_password=serve.key_password,
            dev_certificate=serve.dev_certificate,
            client_ca=serve.client_ca,
            origins=serve.origins,
            admin=serve.admin,
        )
    )


def _print_config(name: str, settings: ServiceSettings) -> int:
    with redirect_stdout(sys.stderr):  # what a module prints is no TOML
        service = load_service(name)
    for line in toml_lines(settings, settings.config(service.config), code=name):
        say(line)
    return 0


def _serve_by_workers(
    service: str, serve: Serve, settings: ServiceSettings, logs: LogSettings
) -> int:
    from aqueduct.carriers.certificates import ServerTls, dev_certificate
    from aqueduct.service.supervisor import Restarts, Supervisor

    addresses = [Address.parse(text) for text in serve.listen]
    tls = None
    if serve.dev_certificate:
        tls = dev_certificate(address.host for address in addresses if address.host)
        tls = replace(tls, client_ca=serve.client_ca)
    elif serve.certificate:
        tls = ServerTls(serve.certificate, serve.key, serve.key_password, serve.client_ca)
    workers = Supervisor(
        service,
        addresses,
        count=serve.workers or 1,
        tls=tls,
        restarts=Restarts(limit=serve.restarts, start=serve.start_timeout),
        drain=settings.value("timing.drain_timeout"),
        origins=serve.origins,
        admin=serve.admin,
        settings=settings,
        logs=logs,
    )
    return asyncio.run(workers.run())
