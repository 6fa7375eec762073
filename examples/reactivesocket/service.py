"""A service for callers in other languages: rows to draw, and a handler to ask.

    python examples/reactivesocket/service.py [--port 7878] [--web-port 7879] [--page-port 8000]

It listens for ReactiveSocket over TCP and over WebSocket, and serves the page beside it over HTTP.
Open the address that it prints; or ask it from Java:

    java examples/reactivesocket/Ask.java 127.0.0.1 7878 lengths '[{"id": 1, "word": "one"}]'
    java examples/reactivesocket/Ask.java 127.0.0.1 7878 ticks --most 5
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import http.server
import threading
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

import aqueduct

HERE = Path(__file__).parent
WORDS = pa.schema([("id", pa.int64()), ("word", pa.string())])
LENGTHS = pa.schema([("id", pa.int64()), ("length", pa.int32())])
TICKS = pa.schema([("tick", pa.int64()), ("square", pa.float64())])
MADE = pa.schema([("made", pa.int32())])

service = aqueduct.Service("other languages")
made = 0
"""Items that the source has made, for all who ask."""


@service.handler(input=WORDS, output=LENGTHS)
def lengths(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The length of each word."""
    return pa.record_batch({"id": batch["id"], "length": pc.utf8_length(batch["word"])})


@service.handler(kind="source", output=TICKS)
def ticks() -> Iterator[pa.RecordBatch]:
    """Numbers without end. The generator is stepped only while someone asks for more."""
    global made
    tick = 0
    while True:
        tick += 1
        made += 1
        yield pa.record_batch({"tick": [tick], "square": [float(tick**2)]}, schema=TICKS)


@service.handler(input=pa.schema([("of", pa.string())]), output=MADE)
def made_so_far(batch: pa.RecordBatch) -> pa.RecordBatch:
    """How many items the source has made, so that a page can show what it did not ask for."""
    return pa.record_batch({"made": [made] * batch.num_rows}, schema=MADE)


@contextlib.contextmanager
def page_server(port: int) -> Iterator[str]:
    """Serves this folder over HTTP, in a thread; gives the origin of its pages."""
    folder = functools.partial(QuietHandler, directory=str(HERE))
    with http.server.ThreadingHTTPServer(("127.0.0.1", port), folder) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    """Serves files, and writes no line for each."""

    def log_message(self, format: str, *arguments: object) -> None:
        """Nothing: the terminal is for the addresses."""


async def main(port: int, web_port: int, page_port: int) -> None:
    """Serves until it is interrupted."""
    addresses = (
        f"reactivesocket+tcp://127.0.0.1:{port}",
        f"reactivesocket+ws://127.0.0.1:{web_port}",
    )
    with page_server(page_port) as origin:
        # A page of another origin is refused: any page that is open in a browser could ask else.
        async with service.serving(*addresses, origins=[origin]) as serving:
            tcp, web = serving.addresses
            print("for programs:", tcp)
            print(
                f"for a browser: {origin}/page.html?service=ws://{web.partition('://')[2]}/",
                flush=True,
            )
            await asyncio.Event().wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Rows for callers in other languages.")
    parser.add_argument("--port", type=int, default=7878, help="of ReactiveSocket over TCP (7878)")
    parser.add_argument("--web-port", type=int, default=7879, help="over WebSocket (7879)")
    parser.add_argument("--page-port", type=int, default=8000, help="of the page, over HTTP (8000)")
    given = parser.parse_args()
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(main(given.port, given.web_port, given.page_port))
