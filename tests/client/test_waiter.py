"""What tasks wait for: stepped where they are woken, and never forgotten."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import Context, ContextVar, copy_context
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


async def from_the_loop(
    work: Callable[[], object], context: Context | None = None
) -> BaseException | None:
    """Runs it in a turn of its own, where no task is at work; what it raised."""
    done: asyncio.Future[BaseException | None] = asyncio.get_running_loop().create_future()

    def run() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001  the loop would end with it
            done.set_result(error)
        else:
            done.set_result(None)

    asyncio.get_running_loop().call_soon(run, context=context)
    return await done


def waiting_task(waiting: WaiterSlot, seen: list[str], name: str) -> asyncio.Task[None]:
    async def wait() -> None:
        await waiting.wait()
        seen.append(name)

    return asyncio.ensure_future(wait())


async def test_all_waiting_tasks_are_woken_in_their_order() -> None:
    waiting, seen = WaiterSlot(), list[str]()
    tasks = [waiting_task(waiting, seen, name) for name in ("first", "second", "third")]
    await asyncio.sleep(0)
    waiting.wake()
    assert seen == []
    await asyncio.gather(*tasks)
    assert seen == ["first", "second", "third"]
    waiting.wake()  # nobody waits


async def test_a_task_that_gave_up_is_not_woken() -> None:
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


async def test_a_task_woken_in_its_own_context_runs_in_the_next_turn() -> None:
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
        self.came = asyncio.Event()
        self.steps: list[str] = []
        self.task = asyncio.ensure_future(self._read(receiver))

    async def _read(self, receiver: Receiver) -> None:
        async for message in receiver:
            assert bytes(message.payload) == b"one"
            self.steps.append("step")
            self.came.set()

    def note(self) -> None:
        """Has ``steps`` say when a flush asks what is to leave, and when another turn begins."""
        work = self.core.effects_to_apply

        def asked() -> object:
            self.steps.append("flush")
            asyncio.get_running_loop().call_soon(self.steps.append, "turn")
            return work()

        self.core.effects_to_apply = asked


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
        await asyncio.sleep(0)
        assert "turn" in pair.steps[begun + 1 :]
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


async def test_every_woken_task_runs_if_a_step_is_interrupted(tmp_path: Path) -> None:
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
        assert not pump.stepping
        assert not pump._woken
        assert not pump._flush_wanted


def interrupt(_: object) -> None:
    raise KeyboardInterrupt


async def test_a_task_woken_outside_of_a_turn_runs_in_the_next(tmp_path: Path) -> None:
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


async def test_a_handle_is_waited_for_on_its_own_loop_alone() -> None:
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


# A waiter alone


class OneWait:
    """A task that waits once and notes it."""

    def __init__(self, context: Context | None = None) -> None:
        loop = asyncio.get_running_loop()
        self.waiter = Waiter(loop)
        self.seen: list[str] = []
        self.task = loop.create_task(self._wait(), context=context)

    async def _wait(self) -> None:
        try:
            await self.waiter
            self.seen.append("woken")
        except BaseException as error:
            self.seen.append(type(error).__name__)
            raise


async def test_the_task_is_stepped_where_it_is_woken() -> None:
    waits = [OneWait() for _ in range(3)]
    await asyncio.sleep(0)
    seen = []

    def work() -> None:
        for each in waits:
            each.waiter.step()
            seen.append(list(each.seen))

    await from_the_loop(work)
    assert seen == [["woken"]] * 3
    for each in waits:
        await each.task


async def test_a_task_that_wakes_another_goes_on_first() -> None:
    wait = OneWait()
    await asyncio.sleep(0)
    wait.waiter.step()
    assert wait.seen == []
    await wait.task
    assert wait.seen == ["woken"]


async def test_what_runs_in_the_context_of_the_task_goes_on_first() -> None:
    context = copy_context()
    wait = OneWait(context)
    await asyncio.sleep(0)
    seen = []

    def work() -> None:
        wait.waiter.step()
        seen.append(list(wait.seen))

    await from_the_loop(work, context)
    assert seen == [[]]
    await wait.task
    assert wait.seen == ["woken"]


async def test_the_context_of_the_task_is_its_own() -> None:
    variable: ContextVar[str] = ContextVar("variable", default="nothing")
    waiter = Waiter(asyncio.get_running_loop())
    seen = []

    async def work() -> None:
        variable.set("the task's")
        await waiter
        seen.append(variable.get())

    task = asyncio.ensure_future(work())
    await asyncio.sleep(0)
    await from_the_loop(waiter.step)
    await task
    assert seen == ["the task's"]
    assert variable.get() == "nothing"


async def test_a_wake_before_the_wait_is_not_lost() -> None:
    wait = OneWait()
    wait.waiter.step()
    await wait.task
    assert wait.seen == ["woken"]


async def test_a_cancelled_task_hears_of_it() -> None:
    wait = OneWait()
    await asyncio.sleep(0)
    wait.task.cancel("enough")
    with pytest.raises(asyncio.CancelledError, match="enough"):
        await wait.task
    assert wait.seen == ["CancelledError"]
    wait.waiter.step()  # nobody waits


@pytest.mark.parametrize("first", ["cancel", "wake"])
async def test_a_cancel_and_a_wake_at_once_are_a_cancel(first: str) -> None:
    wait = OneWait()
    await asyncio.sleep(0)
    if first == "cancel":
        wait.task.cancel()
        wait.waiter.step()
    else:
        wait.waiter.step()
        wait.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await wait.task
    assert wait.seen == ["CancelledError"]


async def test_a_task_may_wait_again_after_a_cancel() -> None:
    waiter, again = (Waiter(asyncio.get_running_loop()) for _ in range(2))
    seen = []

    async def work() -> None:
        try:
            await waiter
        except asyncio.CancelledError:
            seen.append("cancelled")
        await again
        seen.append("woken")

    task = asyncio.ensure_future(work())
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert seen == ["cancelled"]
    await from_the_loop(again.step)
    await task
    assert seen == ["cancelled", "woken"]


async def test_a_timeout_ends_the_wait() -> None:
    waiter = Waiter(asyncio.get_running_loop())
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await waiter


async def test_it_belongs_to_its_loop() -> None:
    other = asyncio.new_event_loop()
    try:
        with pytest.raises(RuntimeError, match="different loop"):
            await Waiter(other)
    finally:
        other.close()
