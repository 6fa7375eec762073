"""The options of calls on the command line: those of all clients, under the same names."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any, Final

from aqueduct.arguments import ARGUMENTS
from aqueduct.client.options import ExchangeOptions, SinkOptions, SourceOptions
from aqueduct.errors import ConfigError

__all__ = ["NOT_OFFERED", "OFFERED", "add_call_options", "connection_options", "options_for"]

OFFERED: Final[Mapping[str, tuple[str, str]]] = {
    "deadline": ("DURATION", "for the whole call; without one it fails when nothing moves"),
    "in_flight": ("N", "batches that are sent and not answered (8, of small ones up to 64)"),
    "in_flight_bytes": ("SIZE", "the same in bytes, such as 64m (32m)"),
    "compression": ("CODEC", "lz4 or zstd for batches both ways, or none"),
    "headers": ("NAME=VALUE", "for the handler; may be repeated"),
    "write_key": ("KEY", "names a write, the same each time it is tried; a sink writes it once"),
    "attempt": ("TEXT", "what tells this attempt from others with the same write key"),
    "ordered": ("", "--no-ordered takes answers of a function of one batch as they are made"),
    "report_failures": ("", "a batch that fails does not end the call; the status is 3 at its end"),
    "retries": ("N", "how often a broken call is made again without an answer between (0)"),
    "batch_deadline": ("DURATION", "for each batch of a function of one batch"),
    "backoff": ("DURATION", "the first pause before a call is made again; it doubles (0.1)"),
    "backoff_limit": ("DURATION", "the longest of these pauses (30)"),
    "hedge": ("DURATION", "after this a call is begun at another address, too (0.5)"),
    "resolve": ("DURATION", "take all addresses of the name, and resolve it again so often"),
}
"""What the command line has, each with the word for its value ("" for a flag) and its help."""

NOT_OFFERED: Final[Mapping[str, str]] = {
    "schema": "the input has one",
    "output_schema": "the output takes any",
    "token": "it has options of its own",
    "partition": "it is for the tasks of Spark",
    "config": "settings are for programs",
    "tls": "it has options of its own",
    "keep_alive": "there is no pause between calls",
    "resolver": "it is a function",
    "telemetry": "it is an object",
}
"""What it has not, each with the reason."""

_BY_KIND: Final[Mapping[str, frozenset[str]]] = {
    "exchange": frozenset(ExchangeOptions.__annotations__),
    "source": frozenset(SourceOptions.__annotations__),
    "sink": frozenset(SinkOptions.__annotations__),
    "writer": frozenset({"write_key", "deadline", "in_flight_bytes", "compression", "headers"}),
}
_OF_CONNECTION: Final = frozenset({"backoff", "backoff_limit", "hedge", "resolve"})


def add_call_options(command: argparse.ArgumentParser) -> None:
    """Adds each option of ``OFFERED``."""
    group = command.add_argument_group(
        "the call", "docs/guides/client.md says more of each; a handler may not take all of them"
    )
    for name, (metavar, text) in OFFERED.items():
        option = f"--{name.replace('_', '-')}"
        if name == "headers":
            group.add_argument("--header", dest=name, action="append", metavar=metavar, help=text)
        elif not metavar:
            group.add_argument(option, action=argparse.BooleanOptionalAction, help=text)
        else:
            group.add_argument(option, metavar=metavar, type=_reader(name), help=text)


def connection_options(args: argparse.Namespace) -> dict[str, Any]:
    """Those that were given and belong to the connection."""
    return _given(args, _OF_CONNECTION)


def options_for(kind: str, args: argparse.Namespace) -> dict[str, Any]:
    """Those that were given for a call of this kind.

    One that such a call does not have is wrong usage.
    """
    known = _BY_KIND[kind]
    for name in _given(args, frozenset(OFFERED) - _OF_CONNECTION - known):
        option = "header" if name == "headers" else name.replace("_", "-")
        args.usage.error(f"{args.handler} is called as {_article(kind)}, which has no --{option}")
    found = _given(args, known & frozenset(OFFERED))
    if "headers" in found:
        found["headers"] = _headers(args)
    return found


def _given(args: argparse.Namespace, names: frozenset[str]) -> dict[str, Any]:
    values = {name: getattr(args, name) for name in OFFERED if name in names}
    return {name: value for name, value in values.items() if value is not None}


def _headers(args: argparse.Namespace) -> dict[str, str]:
    found: dict[str, str] = {}
    for text in args.headers:
        name, equals, value = text.partition("=")
        if not name or not equals:
            args.usage.error("--header takes NAME=VALUE")
        if name in found:
            args.usage.error(f"--header {name} is given twice")
        found[name] = value
    return found


def _reader(name: str) -> Any:
    def read(text: str) -> Any:
        try:
            return ARGUMENTS[name].value(text, "the value")
        except ConfigError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return read


def _article(kind: str) -> str:
    return f"an {kind}" if kind == "exchange" else f"a {kind}"
