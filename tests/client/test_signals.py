"""Signals while a thread waits for a call: a client is a guest, and leaves them as they are."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LONG = 60

BEGIN = """
import os, signal, sys, threading, time
import pyarrow as pa
import aqueduct

class Came(Exception):
    pass

def handler(number, frame):
    raise Came(signal.Signals(number).name)

before = {number: signal.getsignal(number) for number in signal.valid_signals()}
service = aqueduct.Service("test")
begun, go_on = threading.Event(), threading.Event()

@service.handler
def double(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch

@service.handler
def hold(batch: pa.RecordBatch, call) -> pa.RecordBatch:
    begun.set()
    while not go_on.wait(0.01):
        call.check()
    return batch

ONE = pa.record_batch({"id": [1]})
ready, ended = threading.Event(), threading.Event()

def serve():
    import asyncio
    async def main():
        async with service.serving("aqueduct+tcp://127.0.0.1:0") as running:
            serve.address = running.addresses[0]
            ready.set()
            await asyncio.to_thread(ended.wait)
    asyncio.run(main())

thread = threading.Thread(target=serve, daemon=True)
thread.start()
ready.wait()
client = aqueduct.SyncClient(serve.address)

def come(number):
    begun.wait()
    signal.pthread_kill(threading.main_thread().ident, number)
"""
END = """
assert client.call("double", ONE) == ONE
client.close()
ended.set()
thread.join()
print("well")
"""


def run(script: str, *arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", BEGIN + script + END, *arguments],
        capture_output=True,
        text=True,
        timeout=LONG,
        cwd=ROOT,
    )
    assert (done.returncode, done.stdout) == (0, "well\n"), done.stderr


CALLS = {
    "call": "client.call('hold', ONE)",
    "exchange": "list(client.exchange('hold', [ONE]))",
    "ping": "begun.set() or [client.ping() for _ in range(1_000_000)]",
}


@pytest.mark.parametrize("call", CALLS)
def test_ctrl_c_ends_a_call_at_once_and_the_client_goes_on(call: str) -> None:
    run(
        f"""
threading.Thread(target=come, args=(signal.SIGINT,)).start()
try:
    {CALLS[call]}
except KeyboardInterrupt:
    pass
else:
    raise AssertionError("the call was not interrupted")
"""
    )


@pytest.mark.parametrize("name", ["SIGALRM", "SIGTERM", "SIGUSR1", "SIGVTALRM"])
def test_what_a_handler_raises_comes_out_of_the_call(name: str) -> None:
    run(
        """
number = getattr(signal, sys.argv[1])
signal.signal(number, handler)
threading.Thread(target=come, args=(number,)).start()
try:
    client.call("hold", ONE)
except Came as error:
    assert str(error) == sys.argv[1]
else:
    raise AssertionError("the handler's exception was lost")
assert signal.getsignal(number) is handler
""",
        name,
    )


def test_a_timer_may_interrupt_many_small_calls_anywhere() -> None:
    run(
        """
signal.signal(signal.SIGALRM, handler)
came = made = 0
end = time.monotonic() + 20
while came < 100 and time.monotonic() < end:
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.0001 + 0.0007 * (came % 10) / 10)
        for _ in range(1000):
            assert client.call("double", ONE) == ONE
            made += 1
    except Came:
        came += 1
signal.setitimer(signal.ITIMER_REAL, 0)
assert came == 100, (came, made)
"""
    )


def test_a_handler_may_make_a_call_itself() -> None:
    run(
        """
found = []
def call(number, frame):
    found.append(client.call("double", ONE))
    go_on.set()
signal.signal(signal.SIGUSR1, call)
threading.Thread(target=come, args=(signal.SIGUSR1,)).start()
assert client.call("hold", ONE) == ONE
assert found == [ONE]
"""
    )


def test_no_handler_is_replaced_before_during_or_after_a_call() -> None:
    run(
        """
during = {}
def look(number, frame):
    during.update({each: signal.getsignal(each) for each in before})
    go_on.set()
signal.signal(signal.SIGUSR1, look)
threading.Thread(target=come, args=(signal.SIGUSR1,)).start()
assert client.call("hold", ONE) == ONE
before[signal.SIGUSR1] = look
after = {number: signal.getsignal(number) for number in before}
assert during == before == after
assert signal.set_wakeup_fd(-1) == -1
"""
    )
