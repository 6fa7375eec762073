"""What commands have in common: their failure, TLS options, and readers of arguments."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

from aqueduct.arguments import KINDS
from aqueduct.errors import ConfigError

if TYPE_CHECKING:
    from aqueduct.carriers.certificates import ClientTls

__all__ = ["CommandFailed", "Commands", "add_client_tls", "client_tls", "reader"]

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
"""Where a command adds itself."""


class CommandFailed(Exception):
    """An expected failure; its text is the line that the user reads."""


def add_client_tls(command: argparse.ArgumentParser) -> None:
    """Adds the TLS options of a client."""
    command.add_argument("--certificate", metavar="FILE", help="a client's own certificate, PEM")
    command.add_argument("--key", metavar="FILE", help="its private key, PEM")
    command.add_argument(
        "--key-password", metavar="TEXT", help="of a private key that is encrypted"
    )
    command.add_argument("--ca", metavar="FILE", help="CAs of the service's certificate, PEM")


def client_tls(args: argparse.Namespace) -> ClientTls | None:
    """What the TLS options say; None: none of them is given."""
    from aqueduct.carriers.certificates import ClientTls

    if bool(args.certificate) != bool(args.key):
        args.usage.error("--certificate and --key belong together")
    if not args.certificate and not args.ca:
        return None
    return ClientTls(
        ca=args.ca, certificate=args.certificate, key=args.key, key_password=args.key_password
    )


def reader(kind: str) -> Callable[[str], Any]:
    """A reader of arguments of this kind, one of ``aqueduct.arguments.KINDS``."""

    def read(text: str) -> Any:
        try:
            return KINDS[kind].value(text, "the value")
        except ConfigError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return read
