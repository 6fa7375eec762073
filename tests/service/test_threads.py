"""Threads on call, and event loops in threads."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from aqueduct.client.loop_thread import LoopThread
from aqueduct.errors import LocalProtocolError
from aqueduct.rpc import threads
from aqueduct.rpc.threads import ThreadPool


@pytest.fixture
def bench():
    bench = ThreadPool("test-bench", idle_limit=3)
    yield bench
    bench.close()


def run(bench, count):
    """Runs ``count`` pieces of work that are all at work at once; returns their threads."""
    together = threading.Barrier(count + 1, timeout=20)
    seen = []

    def work():
        seen.append(threading.current_thread())
        together.wait()

    for _ in range(count):
        bench.start(work)
    together.wait()
    return seen


def eventually(condition):
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def idle(bench):
    return len(bench._idle)


def test_each_piece_of_work_has_a_thread_at_once(bench):
    seen = run(bench, 20)
    assert len(set(seen)) == 20
    assert all(thread.daemon for thread in seen)
    eventually(lambda: bench.threads == 3)  # the others found the bench full


def test_threads_are_used_again(bench):
    first = run(bench, 2)
    eventually(lambda: idle(bench) == 2)
    assert set(run(bench, 2)) == set(first)
    assert bench.threads == 2


def test_work_that_raises_harms_no_other(bench, caplog):
    def fail():
        raise SystemExit("odd")

    bench.start(fail)
    eventually(lambda: idle(bench) == 1)
    assert "odd" in caplog.text
    run(bench, 1)
    assert bench.threads == 1


def test_a_closed_pool_ends_its_idle_threads(bench):
    go_on = threading.Event()
    bench.start(go_on.wait)
    seen = run(bench, 2)
    eventually(lambda: idle(bench) == 2)
    bench.close()
    for thread in seen:
        thread.join(20)
        assert not thread.is_alive()
    assert bench.threads == 1
    go_on.set()
    eventually(lambda: bench.threads == 0)


def test_threads_that_nobody_needs_end(bench, monkeypatch):
    monkeypatch.setattr(threads, "_IDLE_SECONDS", 0.02)
    seen = run(bench, 3)
    for thread in seen:
        thread.join(20)
    assert bench.threads == 0
    assert len(run(bench, 3)) == 3


def test_a_thread_that_cannot_start_is_not_counted(bench, monkeypatch):
    def start(self):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(RuntimeError):
        bench.start(print)
    assert bench.threads == 0


def test_threads_that_never_end_do_not_keep_the_interpreter():
    code = """
    import threading
    from aqueduct.rpc.threads import ThreadPool
    from aqueduct.client.loop_thread import LoopThread
    begun = threading.Event()
    def forever():
        begun.set()
        threading.Event().wait()
    ThreadPool().start(forever)
    LoopThread()
    begun.wait()
    """
    subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        timeout=30,
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )


@pytest.fixture
def loop_thread():
    thread = LoopThread()
    yield thread
    thread.stop()


def test_a_loop_in_a_thread_runs_coroutines(loop_thread):
    async def answer():
        await asyncio.sleep(0)
        return threading.current_thread()

    assert loop_thread.run(answer()) is not threading.current_thread()
    seen = threading.Event()
    loop_thread.call(seen.set)
    assert seen.wait(20)


def test_what_a_coroutine_raises_is_raised(loop_thread):
    async def fail():
        raise ZeroDivisionError("there")

    with pytest.raises(ZeroDivisionError, match="there"):
        loop_thread.run(fail())


def test_a_timeout_cancels(loop_thread):
    cancelled = threading.Event()

    async def forever():
        try:
            await asyncio.sleep(3600)
        finally:
            cancelled.set()

    with pytest.raises(TimeoutError):
        loop_thread.run(forever(), timeout=0.01)
    assert cancelled.wait(20)


async def nothing():
    pass


def test_a_waiting_thread_is_told_of_the_end_of_the_loop(loop_thread):
    begun = threading.Event()

    async def forever():
        begun.set()
        await asyncio.sleep(3600)

    def stop():
        assert begun.wait(20)
        loop_thread.stop()

    threading.Thread(target=stop).start()
    with pytest.raises(LocalProtocolError, match="its event loop has ended"):
        loop_thread.run(forever())


@pytest.mark.parametrize("when", ["before it is there", "behind it", "while it is put there"])
def test_work_that_comes_as_the_loop_ends_is_refused(loop_thread, monkeypatch, when):
    put = loop_thread.loop.call_soon_threadsafe

    def late(callback):
        monkeypatch.undo()
        if when == "before it is there":
            loop_thread.stop()
            put(callback)
        elif when == "behind it":
            loop_thread.stop()
        else:
            threading.Thread(target=loop_thread.stop).start()
        # Otherwise it is on a loop that has made its last turn.

    monkeypatch.setattr(loop_thread.loop, "call_soon_threadsafe", late)
    with pytest.raises(LocalProtocolError, match="its event loop has ended"):
        loop_thread.run(nothing())


def test_a_loop_that_has_ended_says_so(loop_thread):
    assert loop_thread.alive
    loop_thread.stop()
    loop_thread.stop()
    assert not loop_thread.alive
    with pytest.raises(LocalProtocolError, match="its event loop has ended"):
        loop_thread.run(nothing())


def test_what_still_runs_is_cancelled_at_the_end(loop_thread):
    ended = threading.Event()

    async def forever():
        try:
            await asyncio.sleep(3600)
        finally:
            ended.set()

    tasks = []

    async def begin():
        tasks.append(asyncio.ensure_future(forever()))
        await asyncio.sleep(0)

    loop_thread.run(begin())
    loop_thread.stop()
    assert ended.is_set()


def test_a_loop_cannot_wait_for_itself(loop_thread):
    async def wait_for_itself():
        loop_thread.run(nothing())

    with pytest.raises(LocalProtocolError, match="would wait for itself"):
        loop_thread.run(wait_for_itself())


def test_a_fork_leaves_the_loop_behind(loop_thread):
    child = os.fork()
    if child == 0:
        status = 1
        try:
            loop_thread.check()
        except LocalProtocolError as error:
            status = 0 if "make a client after the fork" in str(error) else 2
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    assert loop_thread.alive
