"""A question and its answer, without the handles of their channel."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pyarrow as pa
import pytest

import aqueduct
from aqueduct.client.client import Client
from aqueduct.endpoint import Connection, PendingReply, channel, connect, serve
from aqueduct.errors import ConnectionLost, ReceiverClosed
from aqueduct.protocol.common.receiver import Received
from tests.support.calls import NUMBERS, numbers, serving


class Question:
    """A question, and what its one task waits by."""

    def __init__(self) -> None:
        self.changed = asyncio.Event()
        self.pending = PendingReply(self.changed.set)

    def ask(self, client: Connection, *, now: bool = False) -> None:
        began = asyncio.get_running_loop().time()
        client.ask(self.pending, [b"a question"], (), began, now=now)

    async def answer(self, client: Connection) -> Received:
        while (found := client.answer(self.pending)) is None:
            await self.changed.wait()
            self.changed.clear()
        return found


async def test_handlers_that_begin_at_once_may_ask_in_turn() -> None:
    """Their first step is taken within another's task, where it cannot be stepped directly."""
    service = aqueduct.Service("test")
    clients: list[Client] = []

    @service.handler("one", input=NUMBERS, output=NUMBERS)
    async def one(batch: pa.RecordBatch) -> pa.RecordBatch:
        return numbers(*(value + 1 for value in batch["id"].to_pylist()))

    @service.handler("two", input=NUMBERS, output=NUMBERS)
    async def two(batch: pa.RecordBatch) -> pa.RecordBatch:
        return await clients[0].call("one", await clients[0].call("one", batch))

    async with (
        serving(service) as running,
        await Client.connect(running.addresses[0]) as client,
        await Client.connect(running.addresses[0]) as inner,
    ):
        clients.append(inner)
        answers = await asyncio.gather(*(client.call("two", numbers(n)) for n in range(20)))
        assert [answer["id"].to_pylist() for answer in answers] == [[n + 2] for n in range(20)]


@asynccontextmanager
async def both() -> AsyncIterator[tuple[Connection, Connection]]:
    """A connection as its client has it, and as its server has."""
    served: asyncio.Future[Connection] = asyncio.get_running_loop().create_future()
    async with AsyncExitStack() as stack:
        server = await serve(served.set_result, "aqueduct+tcp://127.0.0.1:0")
        stack.push_async_callback(server.close)
        client = await stack.enter_async_context(await connect(server.addresses[0]))
        yield client, await served


@pytest.mark.parametrize("alone", [True, False])
async def test_what_is_alone_leaves_before_the_rest_of_a_flush(alone: bool) -> None:
    """A reply is on its way while its sender is still within the handler of an event."""
    sent: list[int] = []
    async with both() as (client, connection):
        entrypoint = connection.entrypoint

        def answer() -> None:
            question = connection.question()
            if question is not None:
                before = connection.carrier.snapshot()["sent"]
                replying = connection.replying(question)
                assert replying is not None
                connection.reply(replying, [b"an answer"], (), now=alone)
                sent.append(connection.carrier.snapshot()["sent"] - before)  # type: ignore[operator]

        entrypoint.on_change = answer
        asked = Question()
        asked.ask(client, now=alone)
        async with asyncio.timeout(20):
            found = await asked.answer(client)
        assert bytes(found.payload) == b"an answer"
        client.forget(asked.pending, close=False)
        assert len(sent) == 1
        assert (sent[0] > 0) is alone
        entrypoint.on_change = None


async def test_an_abandoned_answer_wakes_no_task() -> None:
    async with both() as (client, connection):
        asked = Question()
        asked.ask(client, now=True)
        message = await connection.entrypoint.receive()
        client.forget(asked.pending, close=True)
        with pytest.raises(ReceiverClosed):
            await message.attachments[0].handle.wait_closed()
        assert not asked.changed.is_set()
        assert asked.pending.half is None


async def test_where_an_answer_goes_is_known_without_a_handle() -> None:
    """Not for what is no question; who abandons one is noticed, and a Sender can take its place."""
    async with both() as (client, connection):
        assert connection.question() is None
        (lasting, _), (_, its) = channel(), channel(oneshot=True)
        (first, _), (second, _) = channel(oneshot=True), channel(oneshot=True)
        for attached in ([], [lasting], [its], [first, second]):
            client.entrypoint.send_nowait(b"no question", attachments=attached)
        asked = [Question() for _ in range(2)]
        for each in asked:
            each.ask(client)
        async with asyncio.timeout(20):
            await client.ping()  # what was sent before it has come
            for _ in range(4):
                message = connection.question()
                assert message is not None
                assert connection.replying(message) is None
            replies = []
            for _ in range(2):
                message = connection.question()
                assert message is not None
                replying = connection.replying(message)
                assert replying is not None
                assert replying.error is None
                replies.append(replying)
            gone = asyncio.Event()
            replies[0].on_change = gone.set
            client.forget(asked[0].pending, close=True)
            await gone.wait()
            assert isinstance(replies[0].error, ReceiverClosed)
            sender = connection.sender(replies[1])
            sender.send_nowait(b"an answer")
            found = await asked[1].answer(client)
        assert bytes(found.payload) == b"an answer"
        client.forget(asked[1].pending, close=False)
        await client.close()
        await connection.wait_closed()
        with pytest.raises(ConnectionLost):
            connection.question()
