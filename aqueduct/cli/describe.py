"""``aqueduct describe``: the version, handlers and schemas of a service."""

from __future__ import annotations

import argparse
import asyncio
import json
from typing import TYPE_CHECKING, Any

from aqueduct.cli.common import Commands, add_client_tls, client_tls
from aqueduct.escaping import escape
from aqueduct.service.signals import say

if TYPE_CHECKING:
    from aqueduct.carriers.certificates import ClientTls
    from aqueduct.rpc.describe import Description

__all__ = ["add", "run"]


def add(commands: Commands) -> None:
    """Adds the command to the parser."""
    command = commands.add_parser("describe", help="the version, handlers and schemas of a service")
    command.add_argument("address", metavar="ADDRESS")
    command.add_argument("--json", action="store_true", help="for programs")
    command.add_argument("--token", help="what the service asks of its callers")
    add_client_tls(command)
    command.set_defaults(run=run, usage=command)


def run(args: argparse.Namespace) -> int:
    """Prints the description; the exit status."""
    description = asyncio.run(_fetch_description(args.address, args.token, client_tls(args)))
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
