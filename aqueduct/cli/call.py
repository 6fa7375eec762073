"""``aqueduct call``: calls a handler with the rows of a file, and writes what it answers."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final

from aqueduct.cli.call_options import add_call_options, connection_options, options_for
from aqueduct.cli.common import (
    CALL_FAILED,
    CommandFailed,
    Commands,
    add_client_tls,
    add_token,
    client_tls,
    ended_by_signals,
    guess,
    reader,
    shown_token,
)
from aqueduct.cli.formats import FORMATS, STANDARD, BatchFile, OutputFile, format_of
from aqueduct.cli.output import Page, number
from aqueduct.cli.progress import Progress
from aqueduct.errors import AqueductError, Refused, UnknownHandler
from aqueduct.escaping import one_line
from aqueduct.service.signals import tell

if TYPE_CHECKING:
    import pyarrow as pa

    from aqueduct.client.sync_client import SyncClient
    from aqueduct.client.sync_stream import SyncStream

__all__ = ["add", "run"]

_ROWS: Final = 65_536
_KINDS: Final = ("exchange", "source", "sink", "writer")


def add(commands: Commands) -> None:
    """Adds the command to the parser."""
    command = commands.add_parser(
        "call",
        help="call a handler with the rows of a file",
        epilog="Files are .parquet, .arrow, .arrows (a stream) or .csv. Without --in it calls a "
        "source. Answers go to --out, which has its name once it is complete.",
    )
    command.add_argument("address", metavar="ADDRESS")
    command.add_argument("handler", metavar="HANDLER", help="a handler or a sink of the service")
    command.add_argument(
        "--in", dest="input", metavar="FILE", help="what is sent; - is standard input"
    )
    command.add_argument(
        "--out", dest="output", metavar="FILE", help="where answers go; - is standard output (-)"
    )
    command.add_argument(
        "--format",
        choices=FORMATS,
        help="of standard input and output, and of files whose suffix does not say it (arrow)",
    )
    command.add_argument(
        "--rows", metavar="N", type=reader("count"), default=_ROWS, help=f"of a batch ({_ROWS})"
    )
    command.add_argument(
        "--kind",
        choices=_KINDS,
        help="of the handler, where the service does not tell it; a writer writes exactly once",
    )
    add_token(command)
    add_client_tls(command)
    add_call_options(command)
    command.set_defaults(run=run, usage=command)


def run(args: argparse.Namespace) -> int:
    """Makes the call; the exit status."""
    from aqueduct.client.sync_client import SyncClient

    token, tls = shown_token(args), client_tls(args)
    for name in (args.input, args.output):
        if name is not None:
            format_of(name, args.format)  # what cannot work fails before the service is asked
    running = _Running(args)
    try:
        with ended_by_signals():
            with SyncClient(
                args.address, token=token, tls=tls, **connection_options(args)
            ) as client:
                return running.run(client)
    except KeyboardInterrupt:
        tell(f"aqueduct call: cancelled; {running.left}")
        raise


class _Running:
    """One call, from the description of the service to the last row."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._progress = Progress()
        self._output: OutputFile | None = None

    @property
    def left(self) -> str:
        """What there is after a call that was cancelled."""
        if self._output is None:
            return str(self._progress)
        left = "was not written" if self._output.replaces else "is incomplete"
        return f"{self._progress}; {self._output.name} {left}"

    def run(self, client: SyncClient) -> int:
        """Makes the call that the handler's kind wants; the exit status."""
        args = self._args
        kind, wanted = self._kind(client)
        self._check_files(kind)
        options = options_for(kind, args)
        with contextlib.ExitStack() as stack:
            if args.input is None:
                return self._exchange(lambda: client.source(args.handler, **options))
            file = BatchFile(
                args.input, format_of(args.input, args.format), rows=args.rows, wanted=wanted
            )
            stack.enter_context(file)
            self._progress.share = lambda: file.share
            batches, schema = self._counted(file), file.schema
            if kind == "writer":
                return self._write(client, batches, schema, options)
            options["schema"] = schema
            if kind == "sink":
                return self._sink(client, batches, options)
            return self._exchange(lambda: client.exchange(args.handler, batches, **options))

    # Within

    def _kind(self, client: SyncClient) -> tuple[str, pa.Schema | None]:
        """How the handler is called, and the schema that it wants."""
        name, given = self._args.handler, self._args.kind
        try:
            description = client.describe()
        except Refused:
            if given is None:
                raise
            return given, None
        handlers = {each.name: each for each in description.handlers}
        sinks = {each.name: each for each in description.sinks}
        tables = [each.name for each in description.tables]
        if name in handlers:
            kind, schema = str(handlers[name].kind), handlers[name].input
        elif name in sinks:
            kind, schema = "writer", sinks[name].schema
        elif name in tables:
            raise CommandFailed(f"{name} is a table, which Spark reads and this command does not")
        else:
            known = [*handlers, *sinks]
            raise UnknownHandler(
                f"the service {description.service!r} has no handler {name!r}"
                f"{guess(name, known) or '; aqueduct describe shows those it has'}",
                handler=name,
            )
        if given not in (None, kind):
            self._args.usage.error(f"{name} is a {kind}, so --kind {given} does not fit")
        return kind, schema

    def _check_files(self, kind: str) -> None:
        args, wrong = self._args, self._args.usage.error
        if kind == "source" and args.input is not None:
            wrong(f"{args.handler} is a source, which takes no --in")
        if kind != "source" and args.input is None:
            wrong(f"{args.handler} is called with rows: give --in")
        if kind in ("sink", "writer") and args.output is not None:
            wrong(f"{args.handler} is a sink, which answers no rows: leave --out away")
        if kind == "writer" and not args.write_key:
            wrong(f"{args.handler} writes exactly once: give --write-key, the same for each try")
        shown = kind in ("exchange", "source") and args.output in (None, STANDARD)
        if shown and format_of(STANDARD, args.format) != "csv" and sys.stdout.isatty():
            wrong("standard output is a terminal: give --out, or --format csv to read the rows")

    def _counted(self, file: BatchFile) -> Iterator[pa.RecordBatch]:
        for batch in file.batches():
            yield batch
            self._progress.sent(batch)

    def _exchange(self, begin: Callable[[], SyncStream]) -> int:
        name = self._args.output or STANDARD
        output = self._output = OutputFile(name, format_of(name, self._args.format))
        failed = 0
        with output, self._progress, begin() as stream:
            output.begin(stream.opened())
            while True:
                try:
                    batch = next(stream)
                except StopIteration:
                    break
                except AqueductError as error:
                    if stream.over:
                        raise
                    failed += 1
                    tell(f"aqueduct call: batch {stream.number}: {one_line(error)}")
                    continue
                output.write(batch)
                self._progress.received(batch, stream.waited)
            output.complete()
        if failed:
            tell(f"aqueduct call: {failed} batches failed; the answers of the others were written")
        return CALL_FAILED if failed else 0

    def _sink(
        self, client: SyncClient, batches: Iterator[pa.RecordBatch], options: dict[str, Any]
    ) -> int:
        with self._progress:
            counters = client.sink(self._args.handler, batches, **options)
        page = Page()
        for name, value in counters.items():
            page.line(f"{name}: {value}")
        return 0

    def _write(
        self,
        client: SyncClient,
        batches: Iterator[pa.RecordBatch],
        schema: pa.Schema,
        options: dict[str, Any],
    ) -> int:
        key = options.pop("write_key")
        writer = client.writer(self._args.handler, key=key, schema=schema, **options)
        with self._progress, writer:
            committed = writer.committed
            if not committed.commits:
                for batch in batches:
                    writer.write(batch)
                done = writer.commit()
        if committed.commits:
            there = f"{number(committed.rows)} rows were written under this key before"
            Page().line(f"{there}; nothing was sent")
        else:
            Page().line(f"{number(done.rows)} rows are written")
        return 0
