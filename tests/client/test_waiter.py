"""What tasks wait for: stepped where they are woken, and never forgotten."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import copy_context
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from aqueduct import Connection, Receiver, channel, connect, serve
from aqueduct._speedups.loop.pump import Pump
from aqueduct._speedups.loop.waiter import Waiter, WaiterSlot, nests
from aqueduct.errors import LocalProtocolError
from tests.carriers.streams import listen_at
from tests.carriers.users import DEADLINE


async def from_the_loop(work: Callable[[], object]) -> BaseException | None:
    """Runs it in a turn of its own, where no task is at work; what it raised."""
    done: asyncio.Future[BaseException | None] = asyncio.get_running_loop().create_future()

    def run() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001  the loop would end with it
            done.set_result(error)
        else:
            done.set_result(None)

    asyncio.get_running_loop().call_soon(run)
    return await done


def waiting_task(waiting: WaiterSlot, seen: list[str], name: str) -> asyncio.Task[None]:
    async def wait() -> None:
        await waiting.wait()
        seen.append(name)

    return asyncio.ensure_future(wait())


async def test_all_who_wait_are_woken_in_their_order() -> None:
    waiting, seen = WaiterSlot(), list[str]()
    tasks = [waiting_task(waiting, seen, name) for name in ("first", "second", "third")]
    await asyncio.sleep(0)
    waiting.wake()
    assert seen == []
    await asyncio.gather(*tasks)
    assert seen == ["first", "second", "third"]
    waiting.wake()  # nobody waits


async def test_who_gives_up_is_woken_no_more() -> None:
    waiting, seen = WaiterSlot(), list[str]()
    gone, there = (waiting_task(waiting, seen, name) for name in ("gone", "there"))
    await asyncio.sleep(0)
    gone.cancel("enough")
    with pytest.raises(asyncio.CancelledError, match="enough"):
        await gone
    assert waiting.waiters is not None
    assert len(waiting.waiters) == 1
    waiting.wake()
    await there
    assert seen == ["there"]


@pytest.mark.parametrize("first", ["woken", "cancelled"])
async def test_a_task_that_is_woken_and_cancelled_at_once_is_cancelled(first: str) -> None:
    """As it is with a Future: its cancellation is not lost, and it is stepped once."""
    waiter, steps = Waiter(asyncio.get_running_loop()), 0

    async def wait() -> None:
        nonlocal steps
        try:
            await waiter
        finally:
            steps += 1

    task = asyncio.ensure_future(wait())
    await asyncio.sleep(0)
    waiter.step_soon() if first == "woken" else task.cancel()
    task.cancel() if first == "woken" else waiter.step_soon()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert steps == 1


async def test_what_is_woken_already_is_not_waited_for_long() -> None:
    loop = asyncio.get_running_loop()
    waiter = Waiter(loop)
    waiter.step()
    await waiter
    marked = Waiter(loop)
    task = asyncio.ensure_future(asyncio.wait_for(marked_by(marked), DEADLINE))
    await asyncio.sleep(0)
    marked.woken = True  # somebody else steps it
    marked.step()
    await task


async def marked_by(waiter: Waiter) -> None:
    await waiter


async def test_who_is_woken_in_its_own_context_goes_on_in_the_next_turn() -> None:
    loop, context, seen = asyncio.get_running_loop(), copy_context(), list[str]()
    waiter = Waiter(loop)
    waiter.add_done_callback(lambda _: seen.append("stepped"), context=context)

    def wake() -> list[str]:
        waiter.step()
        return seen[:]

    turn: asyncio.Future[list[str]] = loop.create_future()
    loop.call_soon(lambda: turn.set_result(wake()), context=context)
    assert await turn == []
    await asyncio.sleep(0)
    assert seen == ["stepped"]


async def test_what_a_step_raises_leaves_its_context() -> None:
    context, waiter = copy_context(), Waiter(asyncio.get_running_loop())

    def fail(_: object) -> None:
        raise RuntimeError("a step failed")

    waiter.add_done_callback(fail, context=context)
    error = await from_the_loop(waiter.step)
    assert isinstance(error, RuntimeError) and str(error) == "a step failed"
    assert context.run(lambda: 7) == 7  # or it would be entered still


async def test_what_is_no_future_for_a_task_is_told() -> None:
    with pytest.raises(TypeError, match="loop"):
        Waiter(None)  # type: ignore[arg-type]
    waiter = Waiter(asyncio.get_running_loop())
    with pytest.raises(TypeError, match="context: a Context is needed, not dict"):
        waiter.add_done_callback(print, context={})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="callback"):
        waiter.add_done_callback(None, context=copy_context())  # type: ignore[arg-type]
    assert not waiter.cancel()


async def test_a_deadline_ends_a_wait() -> None:
    waiting = WaiterSlot()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await waiting.wait()
    assert not waiting.waiters


class Pair:
    """A channel from a client to a server over TCP, and a task that reads it."""

    def __init__(self, server: Connection, receiver: Receiver) -> None:
        self.core: Any = server.pump.core
        self.carrier: Any = server.pump.carrier
        self.came = asyncio.Event()
        self.steps: list[str] = []
        self.task = asyncio.ensure_future(self._read(receiver))

    async def _read(self, receiver: Receiver) -> None:
        async for message in receiver:
            assert bytes(message.payload) == b"one"
            self.steps.append("step")
            self.came.set()

    def note(self) -> None:
        """Has ``steps`` say when a flush asks what is to leave, and when the carrier goes on."""
        work, settle = self.core.effects_to_apply, self.carrier._settle

        def asked() -> object:
            self.steps.append("flush")
            return work()

        def settled() -> None:
            settle()
            self.steps.append("settled")

        self.core.effects_to_apply, self.carrier._settle = asked, settled


async def test_a_reader_is_stepped_where_its_message_was_read(tmp_path: Path) -> None:
    """After what the connection itself had to say has left, and before another turn begins."""
    arrived: asyncio.Future[Connection] = asyncio.get_running_loop().create_future()
    async with (
        asyncio.timeout(DEADLINE),
        await serve(arrived.set_result, listen_at("tcp", tmp_path)) as listener,
        await connect(listener.addresses[0]) as client,
    ):
        questions, to_server = channel()
        await client.entrypoint.send(b"", attachments=[to_server])
        server = await arrived
        receiver = (await server.entrypoint.receive()).attachments[0].handle
        assert isinstance(receiver, Receiver)
        pair = Pair(server, receiver)
        await asyncio.sleep(0)
        pair.note()
        await questions.send(b"one")
        await pair.came.wait()
        begun = pair.steps.index("step")
        assert pair.steps[begun - 1] == "flush"
        assert "settled" in pair.steps[begun + 1 :]
        pair.task.cancel()


def within_a_flush(pump: Pump, work: Callable[[], object]) -> None:
    """Has the next flush of this connection do that, once."""
    core: Any = pump.core
    asked = core.effects_to_apply

    def effects_to_apply() -> object:
        core.effects_to_apply = asked
        work()
        return asked()

    core.effects_to_apply = effects_to_apply


async def test_nobody_is_forgotten_if_a_step_is_interrupted(tmp_path: Path) -> None:
    """Ctrl-C comes out of the step of whatever task is at work."""
    arrived: asyncio.Future[Connection] = asyncio.get_running_loop().create_future()
    async with (
        asyncio.timeout(DEADLINE),
        await serve(arrived.set_result, listen_at("tcp", tmp_path)) as listener,
        await connect(listener.addresses[0]) as client,
    ):
        loop, pump = asyncio.get_running_loop(), client.pump
        interrupted, other = Waiter(loop), Waiter(loop)
        interrupted.add_done_callback(interrupt, context=copy_context())
        task = asyncio.ensure_future(marked_by(other))
        await asyncio.sleep(0)

        def wake() -> None:
            pump.step(interrupted)
            pump.step(other)
            pump.flush_soon()

        within_a_flush(pump, wake)
        assert isinstance(await from_the_loop(pump.end_of_input), KeyboardInterrupt)
        await task
        assert not pump._stepping
        assert not pump._woken
        assert not pump._flush_wanted


def interrupt(_: object) -> None:
    raise KeyboardInterrupt


async def test_who_is_woken_outside_of_a_turn_goes_on_in_the_next(tmp_path: Path) -> None:
    """Where some task flushes, no other task may be stepped."""
    arrived: asyncio.Future[Connection] = asyncio.get_running_loop().create_future()
    async with (
        asyncio.timeout(DEADLINE),
        await serve(arrived.set_result, listen_at("tcp", tmp_path)) as listener,
        await connect(listener.addresses[0]) as client,
    ):
        loop, pump = asyncio.get_running_loop(), client.pump
        waiter = Waiter(loop)
        task = asyncio.ensure_future(marked_by(waiter))
        await asyncio.sleep(0)
        within_a_flush(pump, partial(pump.step, waiter))
        done: list[bool] = []

        def work() -> None:
            pump.flush()
            done.append(task.done())

        await from_the_loop(work)
        assert done == [False]
        await task


async def test_who_waits_for_a_handle_is_on_its_loop() -> None:
    waiting, seen = WaiterSlot(asyncio.get_running_loop()), list[str]()

    async def wait() -> None:
        await waiting.wait()

    with pytest.raises(LocalProtocolError, match="belongs to another event loop"):
        await asyncio.to_thread(asyncio.run, wait())
    task = waiting_task(waiting, seen, "here")
    await asyncio.sleep(0)
    waiting.wake()
    await task
    assert seen == ["here"]


async def test_no_task_is_stepped_by_a_callback_of_a_loop_that_nests() -> None:
    """A callback that is at work could not run again within the step."""
    loop = asyncio.get_running_loop()
    assert not nests(loop)
    for nested in (False, True):
        if nested:
            loop._nest_patched = True  # type: ignore[attr-defined]
        waiter = Waiter(loop)
        task = asyncio.ensure_future(marked_by(waiter))
        await asyncio.sleep(0)
        done: list[bool] = []

        def step(waiter: Waiter = waiter, task: Any = task, done: list[bool] = done) -> None:
            waiter.step()
            done.append(task.done())

        await from_the_loop(step)
        assert done == [not nested]
        await task
    assert nests(loop)
