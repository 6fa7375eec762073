"""A producer that commits batches to a consumer, over a link that survives cut connections.

    python examples/relink_batches.py consume aqueduct+tcp://127.0.0.1:7000
    python examples/relink_batches.py produce aqueduct+tcp://127.0.0.1:7000 100

The consumer processes each batch once, however often the connection is cut meanwhile, as long as
both programs live. If one of them ends, the other is told what is unknown.
"""

from __future__ import annotations

import argparse
import asyncio
import sys

from aqueduct import relink
from aqueduct.errors import AqueductError, LinkLost

ORDERS = 1
"""The channel of this example."""


async def consumer(connection: relink.RelinkConnection) -> None:
    """Processes what one producer commits, until that closes the link."""
    sums: dict[int, int] = {}
    busy: set[int] = set()
    try:
        async for channel in connection.incoming():
            async for batch in channel.transactions():
                async with batch:  # committed when it is left, uncommitted by an exception
                    numbers = [int(bytes(message.parts[0])) for message in batch.messages]
                    first = numbers[0]
                    if first % 50 == 0 and first not in busy:
                        busy.add(first)
                        await batch.uncommitted()  # come back later
                        continue
                    assert first not in sums, "a batch came twice"
                    sums[first] = sum(numbers)
    except LinkLost as error:
        print("the producer is lost:", error, flush=True)
    resumes = connection.snapshot().resumes
    print(f"{len(sums)} batches, {sum(sums.values())} in all, {resumes} resumes", flush=True)


async def producer(connection: relink.RelinkConnection, count: int) -> None:
    """Commits so many batches of ten numbers each. What was not committed is sent again."""
    channel = connection.channel(ORDERS)
    for first in range(0, 10 * count, 10):
        while True:
            async with channel.transaction() as transaction:
                for number in range(first, first + 10):
                    await transaction.send(b"%d" % number)
            if await transaction.result:
                break
    await channel.close()


async def produce(address: str, count: int) -> None:
    """Opens a link to the consumer, and commits so many batches."""
    async with await relink.connect(address, transactions="connector") as connection:
        await producer(connection, count)
    print("the link was resumed", connection.snapshot().resumes, "times")


async def consume(address: str) -> None:
    """Waits for producers at this address."""
    async with await relink.serve(consumer, address, transactions="connector") as server:
        print("listening at", server, flush=True)
        await asyncio.Event().wait()


def _count(text: str) -> int:
    """A number of batches, 1 or more."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of batches: say 1 or more")
    return int(text)


def main() -> None:
    """Plays one of the two."""
    parser = argparse.ArgumentParser(description="Commits batches over a link, or consumes them.")
    parser.add_argument("role", choices=("consume", "produce"), help="which of the two programs")
    parser.add_argument("address", help="where the consumer listens: aqueduct+tcp://HOST:PORT")
    parser.add_argument("count", nargs="?", type=_count, default=10, help="batches to produce (10)")
    given = parser.parse_args()
    run = consume(given.address) if given.role == "consume" else produce(given.address, given.count)
    try:
        asyncio.run(run)
    except LinkLost as error:
        sys.exit(f"the consumer is lost: {error}")
    except AqueductError as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        pass


if __name__ == "__main__":
    main()
