"""Two programs that call each other over bpmux, without the rest of Aqueduct.

    python examples/bpmux_calls.py listen 127.0.0.1:7000      (or a path: a Unix socket)
    python examples/bpmux_calls.py dial 127.0.0.1:7000

Both answer requests, and both make some, over the one connection that the second has made.
"""

from __future__ import annotations

import asyncio
import sys

from aqueduct import bpmux


async def answer(connection: bpmux.BpmuxConnection, name: str) -> None:
    """What a program does for the other one, until one of them closes the connection."""
    async for opened in connection:
        match opened:
            case bpmux.BpmuxRequest(payload=b"name"):
                await opened.respond(name.encode())
            case bpmux.BpmuxRequest(payload=text):
                await opened.respond(text.upper())
            case bpmux.BpmuxSink(payload=count):
                # The other has opened a stream, and this side writes it.
                for number in range(int(count)):
                    await opened.send(b"%d" % number)
                opened.end(b"that was all")
            case bpmux.Duplex():
                async for text in opened:
                    await opened.send(text[::-1])
                opened.end()


async def listener(connection: bpmux.BpmuxConnection) -> None:
    """The program that was called: it asks back before it answers."""
    name = await connection.request(b"name")
    print(f"{name.decode()} is here", flush=True)
    await answer(connection, "listener")
    print(f"{name.decode()} has gone: {connection.error}", flush=True)


async def dialer(connection: bpmux.BpmuxConnection) -> None:
    """The program that calls."""
    answering = asyncio.create_task(answer(connection, "dialer"))
    print("it is called", (await connection.request(b"name")).decode())
    shouts = await asyncio.gather(*(connection.request(word) for word in (b"two", b"at once")))
    print("it shouts", *(shout.decode() for shout in shouts))
    numbers = connection.open_stream(b"3")
    print("it counts", *[number.decode() async for number in numbers])
    async with connection.open_duplex() as mirror:
        await mirror.send(b"mirror")
        print("it mirrors", (await mirror.receive()).decode())
    await connection.close(b"done")
    await answering


async def main(role: str, where: str) -> None:
    """Plays one of the two at this place."""
    host, colon, port = where.rpartition(":")
    place = (host, int(port)) if colon else where
    if role == "dial":
        async with await bpmux.connect(place) as connection:
            await dialer(connection)
    else:
        async with await bpmux.serve(listener, place) as server:
            print("listening at", server, flush=True)
            await asyncio.Event().wait()


if __name__ == "__main__":
    try:
        asyncio.run(main(*sys.argv[1:]))
    except KeyboardInterrupt:
        pass
