"""Channels that share one window: nobody reads some of them, or both sides answer."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from aqueduct import relink
from tests.relink.pairs import brisk, eventually, joined, within

NARROW = brisk(window_bytes=100_000, receive_bytes=250_000)


async def send_all(channel: relink.RelinkChannel, count: int, size: int) -> None:
    for _ in range(count):
        await channel.send(bytes(size))
    await channel.close()


@pytest.mark.requirement("RL-R10")
async def test_a_reader_of_one_channel_after_the_other_gets_all(tmp_path: Path) -> None:
    """The first channel goes on while the second one, which nobody reads yet, fills the window."""
    async with joined("tcp", tmp_path, NARROW) as pair:
        first, second = pair.client.channel(1), pair.client.channel(2)
        await first.send(b"opens it")
        filling = asyncio.create_task(send_all(second, 40, 9000))
        await eventually(lambda: not pair.client.link.writable(2, 9000))
        sending = asyncio.create_task(send_all(first, 40, 9000))
        sizes = []
        for _ in range(2):
            channel = await within(pair.server.accept())
            assert channel is not None
            async with asyncio.timeout(20):
                sizes.append([len(message.parts[0]) async for message in channel])
        assert sizes == [[8, *[9000] * 40], [9000] * 40]
        await within(filling)
        await within(sending)


@pytest.mark.requirement("RL-R10")
async def test_two_programs_that_answer_each_other_do_not_wait_for_ever(tmp_path: Path) -> None:
    """Requests come faster than they are answered, and answers are larger than requests."""
    count = 300

    async def answer(connection: relink.RelinkConnection) -> None:
        channel = await connection.accept()
        assert channel is not None
        async for _ in channel:
            await connection.channel(1).send(bytes(16_000))

    async with joined("tcp", tmp_path, NARROW) as pair:
        answering = asyncio.create_task(answer(pair.server))
        asking = asyncio.create_task(send_all(pair.client.channel(1), count, 1000))
        answers = await within(pair.client.accept())
        assert answers is not None
        for _ in range(count):
            await within(answers.receive())
        answers.consume()
        await within(asking)
        await within(answering)


@pytest.mark.requirement("RL-R10")
async def test_a_peer_with_a_wider_window_is_answered_too(tmp_path: Path) -> None:
    """It fills this side, which reads on while it waits for its answers to be consumed."""
    count = 300

    async def answer(connection: relink.RelinkConnection) -> None:
        channel = await connection.accept()
        assert channel is not None
        async for _ in channel:
            await connection.channel(1).send(bytes(16_000))

    config = brisk(window_bytes=100_000, receive_bytes=60_000)
    async with joined("tcp", tmp_path, config) as pair:
        answering = asyncio.create_task(answer(pair.server))
        asking = asyncio.create_task(send_all(pair.client.channel(1), count, 1000))
        answers = await within(pair.client.accept())
        assert answers is not None
        for _ in range(count):
            await within(answers.receive())
        answers.consume()
        await within(asking)
        await within(answering)


@pytest.mark.requirement("RL-R10")
async def test_transactions_of_many_channels_at_once_are_all_committed(tmp_path: Path) -> None:
    async with joined("tcp", tmp_path, NARROW, transactions="connector") as pair:

        async def commit(number: int) -> bool:
            for _ in range(3):
                async with pair.client.channel(number).transaction() as transaction:
                    for _ in range(9):
                        await transaction.send(bytes(10_000))
                        await asyncio.sleep(0)
            return await transaction.result

        async def consume() -> None:
            async with asyncio.TaskGroup() as readers:
                for _ in range(5):
                    channel = await pair.server.accept()
                    assert channel is not None
                    readers.create_task(process(channel))

        async def process(channel: relink.RelinkIncoming) -> None:
            for _ in range(3):
                async with await channel.receive_batch() as batch:
                    assert len(batch.messages) == 9

        consuming = asyncio.create_task(consume())
        results = await within(asyncio.gather(*map(commit, range(5))))
        assert results == [True] * 5
        await within(consuming)
