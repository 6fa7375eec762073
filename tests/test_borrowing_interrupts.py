"""Interrupts while a thread has borrowed an event loop: each in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent

INTERRUPTED = """
import os, signal, threading
from aqueduct.borrowing import BorrowedLoop

# A shell that starts the tests in the background has them ignore it.
signal.signal(signal.SIGINT, signal.default_int_handler)

thread = BorrowedLoop()
thread.rest()
while not thread.borrow():
    pass
steps = []

def work():
    steps.append("begun")
    os.kill(os.getpid(), signal.SIGINT)
    for _ in range(100_000):  # long enough for Python to run its handler here
        pass
    steps.append("ended")

for begin in (work, lambda: threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()):
    thread.loop.call_soon(begin)
    try:
        thread.turn(20)
    except KeyboardInterrupt:
        steps.append("interrupted")
thread.loop.call_soon(thread.loop.stop)
thread.turn(20)
thread.give_back()
assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
thread.stop()
assert steps == ["begun", "ended", "interrupted", "interrupted"], steps
"""


def test_an_interrupt_comes_between_two_callbacks():
    subprocess.run([sys.executable, "-c", INTERRUPTED], check=True, timeout=60, cwd=ROOT)


STEPPED = """
import os, signal, sys
from aqueduct.borrowing import BorrowedLoop
from aqueduct.endpoint import Asked

# A shell that starts the tests in the background has them ignore it.
signal.signal(signal.SIGINT, signal.default_int_handler)

thread = BorrowedLoop()
thread.rest()
while not thread.borrow():
    pass
asked, steps, tasks = Asked(thread.loop), [], []

class Connection:
    def attend(self, attended):
        steps.append(attended)

    def look(self):
        steps.append("look")
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(100_000):  # long enough for Python to run its handler here
            pass
        steps.append("looked")
        return False

async def work():
    await asked

try:
    thread.step(work(), Connection(), tasks.append)
except KeyboardInterrupt:
    steps.append("interrupted")
assert steps == [True, "look", "looked", False, "interrupted"], steps
assert len(tasks) == 1 and not tasks[0].done()
tasks[0].cancel()
thread.turn(0)
thread.give_back()
assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
thread.stop()
"""


TAKEN = """
import os, signal
from aqueduct.borrowing import BorrowedLoop

signal.signal(signal.SIGINT, signal.default_int_handler)
thread = BorrowedLoop()
thread.rest()
while not thread.borrow():
    pass
steps = []
os.kill(os.getpid(), signal.SIGINT)
for _ in range(100_000):
    pass
steps.append("taken")
try:
    thread.give_back()
except KeyboardInterrupt:
    steps.append("interrupted")
assert steps == ["taken", "interrupted"], steps
assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
while not thread.borrow():  # its own thread was told to stop, and lets go of it again
    pass
thread.give_back()
thread.stop()
"""


def test_an_interrupt_leaves_no_loop_with_nobody():
    subprocess.run([sys.executable, "-c", TAKEN], check=True, timeout=60, cwd=ROOT)


def test_an_interrupt_comes_behind_a_step():
    subprocess.run([sys.executable, "-c", STEPPED], check=True, timeout=60, cwd=ROOT)
