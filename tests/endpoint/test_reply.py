"""What one task waits for: as much of a future as tasks use, and its turns of the loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from contextvars import Context, ContextVar, copy_context

import pyarrow as pa
import pytest

import aqueduct
from aqueduct.client.client import Client
from aqueduct.endpoint import Connection, PendingReply, channel, connect, serve
from aqueduct.errors import ConnectionLost, ReceiverClosed
from tests.support.calls import NUMBERS, numbers, serving


class Waiter:
    """A task that waits ``times`` times and notes it."""

    def __init__(self, times: int = 1, context: Context | None = None) -> None:
        loop = asyncio.get_running_loop()
        self.asked = PendingReply(loop)
        self.seen: list[str] = []
        self.task = loop.create_task(self._wait(times), context=context)

    async def _wait(self, times: int) -> None:
        for _ in range(times):
            try:
                await self.asked
                self.seen.append("woken")
            except BaseException as error:
                self.seen.append(type(error).__name__)
                raise


async def from_the_loop(work: Callable[[], object], context: Context | None = None) -> None:
    """Runs it in a turn of its own, where no task is at work."""
    done = asyncio.Event()

    def run() -> None:
        work()
        done.set()

    asyncio.get_running_loop().call_soon(run, context=context)
    await done.wait()


async def test_the_task_is_stepped_where_it_is_woken() -> None:
    waiter = Waiter(3)
    await asyncio.sleep(0)
    counts = []

    def work() -> None:
        for _ in range(3):
            waiter.asked.wake()
            counts.append(len(waiter.seen))

    await from_the_loop(work)
    assert counts == [1, 2, 3]
    await waiter.task


async def test_a_task_that_wakes_another_goes_on_first() -> None:
    waiter = Waiter()
    await asyncio.sleep(0)
    waiter.asked.wake()
    assert waiter.seen == []
    await waiter.task
    assert waiter.seen == ["woken"]


async def test_what_runs_in_the_context_of_the_task_goes_on_first() -> None:
    context = copy_context()
    waiter = Waiter(context=context)
    await asyncio.sleep(0)
    seen = []

    def work() -> None:
        waiter.asked.wake()
        seen.append(list(waiter.seen))

    await from_the_loop(work, context)
    assert seen == [[]]
    await waiter.task
    assert waiter.seen == ["woken"]


async def test_the_context_of_the_task_is_its_own() -> None:
    variable: ContextVar[str] = ContextVar("variable", default="nothing")
    asked = PendingReply(asyncio.get_running_loop())
    seen = []

    async def wait() -> None:
        variable.set("the task's")
        await asked
        seen.append(variable.get())

    task = asyncio.ensure_future(wait())
    await asyncio.sleep(0)
    await from_the_loop(asked.wake)
    await task
    assert seen == ["the task's"]
    assert variable.get() == "nothing"


async def test_a_wake_before_the_wait_is_not_lost() -> None:
    waiter = Waiter()
    waiter.asked.wake()
    await waiter.task
    assert waiter.seen == ["woken"]


async def test_a_failure_is_raised_now_and_later() -> None:
    waiter = Waiter()
    await asyncio.sleep(0)
    await from_the_loop(lambda: waiter.asked.fail(ValueError("late")))
    with pytest.raises(ValueError, match="late"):
        await waiter.task
    with pytest.raises(ValueError, match="late"):
        await waiter.asked


async def test_a_cancelled_task_hears_of_it() -> None:
    waiter = Waiter()
    await asyncio.sleep(0)
    waiter.task.cancel("enough")
    with pytest.raises(asyncio.CancelledError, match="enough"):
        await waiter.task
    assert waiter.seen == ["CancelledError"]
    waiter.asked.wake()  # nobody waits


@pytest.mark.parametrize("first", ["cancel", "wake"])
async def test_a_cancel_and_a_wake_at_once_are_a_cancel(first: str) -> None:
    waiter = Waiter()
    await asyncio.sleep(0)
    if first == "cancel":
        waiter.task.cancel()
        waiter.asked.wake()
    else:
        waiter.asked.wake()
        waiter.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiter.task
    assert waiter.seen == ["CancelledError"]


async def test_a_task_may_wait_again_after_a_cancel() -> None:
    asked = PendingReply(asyncio.get_running_loop())
    seen = []

    async def wait() -> None:
        try:
            await asked
        except asyncio.CancelledError:
            seen.append("cancelled")
        await asked
        seen.append("woken")

    task = asyncio.ensure_future(wait())
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert seen == ["cancelled"]
    await from_the_loop(asked.wake)
    await task
    assert seen == ["cancelled", "woken"]


async def test_a_timeout_ends_the_wait() -> None:
    asked = PendingReply(asyncio.get_running_loop())
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await asked


async def test_it_belongs_to_its_loop() -> None:
    other = asyncio.new_event_loop()
    try:
        with pytest.raises(RuntimeError, match="different loop"):
            await PendingReply(other)
    finally:
        other.close()


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
        asked = PendingReply(asyncio.get_running_loop())
        client.ask(asked, [b"a question"], (), asyncio.get_running_loop().time(), now=alone)
        async with asyncio.timeout(20):
            while (found := client.answer(asked)) is None:
                await asked
        assert bytes(found.payload) == b"an answer"
        client.forget(asked, close=False)
        assert len(sent) == 1
        assert (sent[0] > 0) is alone
        entrypoint.on_change = None


async def test_an_answer_that_nobody_wants_any_more_wakes_nobody() -> None:
    async with both() as (client, connection):
        asked = PendingReply(asyncio.get_running_loop())
        client.ask(asked, [b"a question"], (), asyncio.get_running_loop().time(), now=True)
        message = await connection.entrypoint.receive()
        client.forget(asked, close=True)
        with pytest.raises(ReceiverClosed):
            await message.attachments[0].handle.wait_closed()
        assert not asked.woken
        assert asked.half is None


async def test_where_an_answer_goes_is_known_without_a_handle() -> None:
    """Not for what is no question; who abandons one is noticed, and a Sender can take its place."""
    async with both() as (client, connection):
        assert connection.question() is None
        (lasting, _), (_, its) = channel(), channel(oneshot=True)
        (first, _), (second, _) = channel(oneshot=True), channel(oneshot=True)
        for attached in ([], [lasting], [its], [first, second]):
            client.entrypoint.send_nowait(b"no question", attachments=attached)
        asked = [PendingReply(asyncio.get_running_loop()) for _ in range(2)]
        for each in asked:
            client.ask(each, [b"a question"], (), asyncio.get_running_loop().time())
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
            client.forget(asked[0], close=True)
            await gone.wait()
            assert isinstance(replies[0].error, ReceiverClosed)
            sender = connection.sender(replies[1])
            sender.send_nowait(b"an answer")
            while (found := client.answer(asked[1])) is None:
                await asked[1]
        assert bytes(found.payload) == b"an answer"
        client.forget(asked[1], close=False)
        await client.close()
        await connection.wait_closed()
        with pytest.raises(ConnectionLost):
            connection.question()
