"""Two programs that call each other over ReactiveSocket.

    python examples/reactive_peers.py station reactivesocket+tcp://127.0.0.1:7878
    python examples/reactive_peers.py visitor reactivesocket+tcp://127.0.0.1:7878 5

The visitor subscribes to the measurements of the station, and reads as many as it wants. The
station asks each visitor where it is, over the same connection, and measures there.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
from itertools import count

from aqueduct import reactivesocket
from aqueduct.errors import AqueductError, ConnectionLost


async def measure(request: reactivesocket.ReactiveRequest) -> None:
    """The station's responder: a measurement for each item that is asked for."""
    place = json.loads(bytes((await request.connection.request(b"where are you?")).data))
    for number in count():
        # It waits here until the visitor asks for more.
        await request.send(json.dumps({"place": place, "number": number}).encode())


async def tell(request: reactivesocket.ReactiveRequest) -> None:
    """The visitor's responder."""
    if bytes(request.data) == b"where are you?":
        await request.send(json.dumps("at the lake").encode())
    else:
        request.fail(f"what is {bytes(request.data)!r}?")


async def station(address: str) -> None:
    """Waits for visitors at this address."""
    async with await reactivesocket.serve(welcome, address, responder=measure) as server:
        print("listening at", server, flush=True)
        await asyncio.Event().wait()


async def welcome(connection: reactivesocket.ReactiveSocketConnection) -> None:
    """Asks a visitor for what it does not know. The connection is closed when this returns."""
    with contextlib.suppress(ConnectionLost):
        try:
            await connection.request(b"how are you?")
        except reactivesocket.ReactiveError as error:
            print("a visitor says:", error.text, flush=True)
    await connection.wait_closed()
    print("a visitor has left", flush=True)


async def visitor(address: str, wanted: int) -> None:
    """Reads so many measurements."""
    async with (
        await reactivesocket.connect(address, responder=tell) as connection,
        connection.subscribe(b"measurements", n=4) as measurements,
    ):
        for _ in range(wanted):
            item = await measurements.receive(timeout="10s")
            assert item is not None
            found = json.loads(bytes(item.data))
            print(f"measurement {found['number']} {found['place']}", flush=True)


def _count(text: str) -> int:
    """A number of measurements, 1 or more."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of measurements: say 1 or more")
    return int(text)


def main() -> None:
    """Plays one of the two."""
    parser = argparse.ArgumentParser(description="Measures for visitors, or visits.")
    parser.add_argument("role", choices=("station", "visitor"), help="which of the two programs")
    parser.add_argument("address", help="of the station: reactivesocket+tcp://HOST:PORT")
    parser.add_argument("count", nargs="?", type=_count, default=10, help="measurements (10)")
    given = parser.parse_args()
    run = station(given.address) if given.role == "station" else visitor(given.address, given.count)
    try:
        asyncio.run(run)
    except (AqueductError, TimeoutError) as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        pass


if __name__ == "__main__":
    main()
