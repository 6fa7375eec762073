"""A producer that commits batches to a consumer, over a link that survives cut connections.

    python examples/relink_batches.py consume aqueduct+tcp://127.0.0.1:7000
    python examples/relink_batches.py produce aqueduct+tcp://127.0.0.1:7000 100

The consumer processes each batch once, however often the connection is cut meanwhile, as long as
both programs live. If one of them ends, the other is told what is unknown.
"""

from __future__ import annotations

import asyncio
import sys

from aqueduct import relink
from aqueduct.errors import LinkLost

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


async def main(role: str, address: str, count: str = "10") -> None:
    """Plays one of the two at this address."""
    if role == "produce":
        async with await relink.connect(address, transactions="connector") as connection:
            await producer(connection, int(count))
        print("the link was resumed", connection.snapshot().resumes, "times")
    else:
        async with await relink.serve(consumer, address, transactions="connector") as server:
            print("listening at", server, flush=True)
            await asyncio.Event().wait()


if __name__ == "__main__":
    try:
        asyncio.run(main(*sys.argv[1:]))
    except LinkLost as error:
        sys.exit(f"the consumer is lost: {error}")
    except KeyboardInterrupt:
        pass
