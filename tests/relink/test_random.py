"""Transactions both ways over connections that are cut at random: each run follows its seed."""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from pathlib import Path

import pytest

from aqueduct import relink
from aqueduct.testing.stream_relay import End, Fate, StreamRelay
from tests.relink.pairs import Pair, brisk, joined, within

BATCHES = 15


class Programs:
    """Two programs that commit numbered batches to each other, refuse some, and roll some back."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.processed: dict[tuple[str, int], list[int]] = defaultdict(list)
        """What was committed, by who has processed it and the channel."""

    async def run(self, pair: Pair) -> None:
        """Until both sides have closed the link."""
        consuming = asyncio.gather(
            self._consume(pair.client, "client"), self._consume(pair.server, "server")
        )
        channels = [pair.client.channel(number) for number in (1, 2, 3)]
        channels += [pair.server.channel(number) for number in (1, 7)]
        await asyncio.gather(*map(self._produce, channels))
        await asyncio.gather(pair.client.close(timeout=20), pair.server.close(timeout=20))
        await consuming

    async def _produce(self, channel: relink.RelinkChannel) -> None:
        chance = self.chance
        for batch in range(BATCHES):
            committed = False
            while not committed:
                if chance.random() < 0.1:
                    with pytest.raises(KeyError):
                        async with channel.transaction() as dropped:
                            await dropped.send(b"-1")
                            raise KeyError
                async with channel.transaction() as transaction:
                    for _ in range(chance.randrange(1, 4)):
                        await transaction.send(b"%d" % batch, bytes(chance.randrange(900)))
                committed = await transaction.result
        await channel.close()

    async def _consume(self, connection: relink.RelinkConnection, who: str) -> None:
        async with asyncio.TaskGroup() as group:
            async for channel in connection.incoming():
                group.create_task(self._process(channel, who))

    async def _process(self, channel: relink.RelinkIncoming, who: str) -> None:
        async for batch in channel.transactions():
            async with batch:
                (number,) = {int(bytes(message.parts[0])) for message in batch.messages}
                if self.chance.random() < 0.15:
                    await batch.uncommitted()
                else:
                    self.processed[who, channel.identifier].append(number)


def fate(chance: random.Random, least: int, most: int) -> Fate:
    end = chance.choice([End.RESET, End.FIN])
    return Fate(limit=chance.randrange(least, most), end=end, chop=chance.random() < 0.5)


async def run(seed: int, folder: Path) -> None:
    """One run; raises AssertionError if anything was lost, came twice or stayed."""
    chance = random.Random(seed)
    proxy = StreamRelay(up=fate(chance, 3000, 60_000), down=fate(chance, 2000, 40_000), seed=seed)
    config = brisk(ack_delay=chance.choice([0.0, 0.005, 0.025]), redial_first=0.001)
    family = chance.choice(["tcp", "unix"])
    async with joined(family, folder, config, transactions="both", proxy=proxy) as pair:
        programs = Programs(seed)
        await within(programs.run(pair))
        wanted = [("client", 1), ("client", 7), *(("server", number) for number in (1, 2, 3))]
        assert programs.processed == {key: list(range(BATCHES)) for key in wanted}
        for side in (pair.client, pair.server):
            assert side.error is not None
            assert side.error.code == 0
            assert side.snapshot().held_bytes == 0


@pytest.mark.requirement("RL-R12")
@pytest.mark.parametrize("seed", range(10))
async def test_each_batch_is_processed_once(seed: int, tmp_path: Path) -> None:
    await run(seed, tmp_path)


@pytest.mark.long
@pytest.mark.requirement("RL-R12")
@pytest.mark.parametrize("seed", range(10, 500))
async def test_each_batch_is_processed_once_for_long(seed: int, tmp_path: Path) -> None:
    await run(seed, tmp_path)
