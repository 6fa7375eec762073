"""``aqueduct describe``: the version, handlers and schemas of a service."""

from __future__ import annotations

import argparse
import asyncio
import json
from typing import TYPE_CHECKING, Any

from aqueduct.cli.common import Commands, add_client_tls, add_token, client_tls, shown_token
from aqueduct.cli.output import Page
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
    add_token(command)
    add_client_tls(command)
    command.set_defaults(run=run, usage=command)


def run(args: argparse.Namespace) -> int:
    """Prints the description; the exit status."""
    description = asyncio.run(_fetch_description(args.address, shown_token(args), client_tls(args)))
    if args.json:
        say(_printable_json(description.to_json()))
        return 0
    page = Page()
    page.line(
        f"{description.service}  (aqueduct-arrow {description.library}, "
        f"call convention {description.convention})",
        "bold",
    )
    for handler in description.handlers:
        properties: list[str] = [handler.kind]
        if handler.concurrency > 1:
            properties.append(f"concurrency {handler.concurrency}")
        if handler.max_concurrency is not None:
            properties.append(f"max_concurrency {handler.max_concurrency}")
        if handler.idempotent:
            properties.append("idempotent")
        page.line()
        page.line(f"{handler.name}  ({', '.join(properties)})", "bold cyan")
        if handler.summary:
            page.line(f"  {handler.summary}", "italic")
        if handler.kind != "source":
            _print_schema(page, "input", handler.input, "any")
        if handler.kind != "sink":
            _print_schema(page, "output", handler.output, "depends on the call")
    for table in description.tables:
        page.line()
        page.line(f"{table.name}  (table{', stream' if table.streams else ''})", "bold cyan")
        if table.summary:
            page.line(f"  {table.summary}", "italic")
        _print_schema(page, "columns", table.schema, "depend on the call")
    for sink in description.sinks:
        page.line()
        page.line(f"{sink.name}  (sink, exactly once)", "bold cyan")
        if sink.summary:
            page.line(f"  {sink.summary}", "italic")
        _print_schema(page, "takes", sink.schema, "any")
    return 0


def _print_schema(page: Page, label: str, schema: Any, otherwise: str) -> None:
    if schema is None:
        page.line(f"  {label}: {otherwise}")
        return
    page.line(f"  {label}:")
    names = [escape(field.name) for field in schema]
    width = max(map(len, names), default=0)
    for name, field in zip(names, schema, strict=True):
        page.line(f"    {name:{width}}  {field.type}{'' if field.nullable else ' not null'}")


def _printable_json(document: str) -> str:
    """The same document, with what is not printable written as JSON escapes it."""
    return "".join(each if each.isprintable() else json.dumps(each)[1:-1] for each in document)


async def _fetch_description(address: str, token: str | None, tls: ClientTls | None) -> Description:
    from aqueduct.client.client import Client

    async with await Client.connect(address, token=token, tls=tls) as client:
        return await client.describe()
