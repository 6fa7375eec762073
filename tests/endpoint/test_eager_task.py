"""Work that begins at once, and what asyncio shows of it to the code inside."""

from __future__ import annotations

import asyncio
import contextvars

import pytest

from aqueduct.endpoint.eager_task import EagerTaskFactory

VARIABLE: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="")


class Piece:
    """One coroutine as Work; remembers that it ended."""

    def __init__(self, body):
        self.body = body
        self.task: asyncio.Task[None]
        self.over = asyncio.Event()
        self.ends = 0
        self.result = None
        self.error: BaseException | None = None

    async def run(self):
        try:
            self.result = await self.body()
        except BaseException as error:  # noqa: BLE001  the test looks at it
            self.error = error

    def ended(self):
        self.ends += 1
        self.over.set()


@pytest.fixture
async def starter():
    """One with a spare task that is ready; used from callbacks, as carriers do."""
    starter = EagerTaskFactory(asyncio.get_running_loop())
    first = Piece(lambda: asyncio.sleep(0))
    starter.start(first)
    await first.over.wait()
    await asyncio.sleep(0)
    yield starter
    starter.close()
    await asyncio.sleep(0)


async def started(starter, body):
    """A piece that was started outside of any task."""
    piece = Piece(body)
    begun = asyncio.Event()

    def start():
        starter.start(piece)
        begun.set()

    asyncio.get_running_loop().call_soon(start)
    await begun.wait()
    return piece


def current():
    task = asyncio.current_task()
    assert task is not None
    return task


async def nothing():
    return current()


async def test_what_never_waits_is_over_at_once_and_its_task_is_used_again(starter):
    first = await started(starter, nothing)
    assert first.ends == 1
    assert first.result is first.task is not None
    tasks = {(await started(starter, nothing)).task for _ in range(5)}
    assert tasks == {first.task}
    assert not first.task.done()


async def test_what_waits_goes_on_in_the_same_task(starter):
    future = asyncio.get_running_loop().create_future()

    async def body():
        before = asyncio.current_task()
        VARIABLE.set("inside")
        found = await future
        await asyncio.sleep(0)
        return before, asyncio.current_task(), VARIABLE.get(), found

    piece = await started(starter, body)
    assert piece.ends == 0
    assert VARIABLE.get() == ""
    other = await started(starter, nothing)
    assert other.ends <= 1
    assert other.task is not piece.task
    future.set_result(7)
    await piece.over.wait()
    assert piece.result == (piece.task, piece.task, "inside", 7)
    assert piece.ends == 1
    await asyncio.sleep(0)
    assert piece.task.done()


async def test_each_has_a_context_of_its_own(starter):
    async def body():
        seen = VARIABLE.get()
        VARIABLE.set("mine")
        return seen

    assert [(await started(starter, body)).result for _ in range(3)] == ["", "", ""]


async def test_timeouts_and_groups_work_from_the_first_step(starter):
    async def body():
        async with asyncio.timeout(10), asyncio.TaskGroup() as group:
            task = group.create_task(nothing())
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await asyncio.sleep(10)
        return task.result()

    piece = await started(starter, body)
    await piece.over.wait()
    assert piece.error is None
    assert piece.result is not piece.task


async def test_a_timeout_that_is_not_needed(starter):
    async def body():
        async with asyncio.timeout(10):
            return await nothing() is not None

    assert (await started(starter, body)).result is True


@pytest.mark.parametrize("turns", [0, 1, 2])
async def test_a_cancel_reaches_what_waits_and_what_it_waits_for(starter, turns):
    inner = asyncio.get_running_loop().create_future()

    async def body():
        await inner

    piece = await started(starter, body)
    for _ in range(turns):
        await asyncio.sleep(0)
    piece.task.cancel()
    await piece.over.wait()
    assert isinstance(piece.error, asyncio.CancelledError)
    assert inner.cancelled()
    assert piece.ends == 1


async def test_a_cancel_comes_through_a_bare_yield_and_a_done_future(starter):
    done = asyncio.get_running_loop().create_future()

    async def bare():
        await asyncio.sleep(0)

    async def almost():
        asyncio.get_running_loop().call_soon(done.set_result, None)
        await done

    for body in (bare, almost):
        piece = Piece(body)

        def start(piece=piece):
            starter.start(piece)
            if piece.body is bare:
                piece.task.cancel()
            else:
                asyncio.get_running_loop().call_soon(piece.task.cancel)

        asyncio.get_running_loop().call_soon(start)
        await piece.over.wait()
        assert isinstance(piece.error, asyncio.CancelledError)
        await started(starter, lambda: asyncio.sleep(0))
        await asyncio.sleep(0)
        await asyncio.sleep(0)


async def test_a_cancel_that_is_swallowed(starter):
    async def body():
        try:
            await asyncio.sleep(10)
        except asyncio.CancelledError:
            current().uncancel()
        await asyncio.sleep(0)
        return current().cancelling()

    piece = await started(starter, body)
    piece.task.cancel()
    await piece.over.wait()
    assert piece.result == 0


async def test_what_cancels_itself_without_waiting_spoils_no_other(starter):
    async def body():
        current().cancel()
        return 1

    piece = await started(starter, body)
    assert piece.result == 1
    other = await started(starter, nothing)
    await other.over.wait()
    assert other.error is None
    assert other.task is not piece.task
    await asyncio.sleep(0)
    assert piece.task.cancelled()


class Open(Piece):
    """A piece that lets its error out, as work may."""

    async def run(self):
        self.result = await self.body()


async def test_what_is_cancelled_in_its_first_step_ends_as_a_task_would(starter):
    cancelled = asyncio.get_running_loop().create_future()
    cancelled.cancel()

    async def body():
        await cancelled

    piece = Open(body)
    asyncio.get_running_loop().call_soon(starter.start, piece)
    await asyncio.wait_for(piece.over.wait(), 5)
    assert piece.ends == 1
    assert not piece.task.done()
    assert (await started(starter, nothing)).task is piece.task


async def test_what_fails_in_its_first_step_has_ended(starter):
    failed = []

    async def body():
        raise SystemError

    piece = Open(body)

    def start():
        try:
            starter.start(piece)
        except SystemError as error:
            failed.append(error)

    asyncio.get_running_loop().call_soon(start)
    await asyncio.wait_for(piece.over.wait(), 5)
    assert piece.ends == len(failed) == 1
    assert (await started(starter, nothing)).task is piece.task


async def test_within_a_task_it_begins_a_turn_later(starter):
    piece = Piece(nothing)
    starter.start(piece)
    assert piece.ends == 0
    assert piece.task is not asyncio.current_task()
    await piece.over.wait()
    assert piece.result is piece.task


async def test_one_that_starts_another(starter):
    inner = Piece(nothing)

    async def body():
        starter.start(inner)
        return inner.ends

    piece = await started(starter, body)
    assert piece.result == 0
    await inner.over.wait()
    assert inner.result is not piece.task


async def test_its_end_leaves_no_task(starter):
    await started(starter, nothing)
    starter.close()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == {asyncio.current_task()}


@pytest.mark.parametrize("waits", [False, True])
async def test_its_end_within_a_first_step_leaves_no_task(starter, waits):
    inner = Piece(nothing)

    async def body():
        starter.close()
        starter.start(inner)
        if waits:
            await asyncio.sleep(0)

    piece = await started(starter, body)
    await piece.over.wait()
    await inner.over.wait()
    for _ in range(3):
        await asyncio.sleep(0)
    assert inner.result is inner.task
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_work_behind_work_that_waits_begins_at_once_too(starter):
    never = asyncio.get_running_loop().create_future()

    async def waits():
        await never

    pieces = []
    for _ in range(3):
        pieces.append(await started(starter, waits))
        await asyncio.sleep(0)
        quick = await started(starter, nothing)
        assert quick.ends == 1  # within the call of start
    assert len({piece.task for piece in (*pieces, quick)}) == 4
    never.set_result(None)
    for piece in pieces:
        await piece.over.wait()
