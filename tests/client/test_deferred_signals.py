"""Signals while a thread has borrowed an event loop: each test in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from aqueduct.client.deferred_signals import DEFERRED

ROOT = Path(__file__).parents[2]
NAMES = ("SIGINT", "SIGALRM", "SIGTERM", "SIGUSR1", "SIGVTALRM")

BEGIN = """
import os, signal, sys, threading, time
from aqueduct.client.shared_loop import SharedLoop
from aqueduct.client.deferred_signals import DEFERRED
from aqueduct.endpoint import PendingReply

class Came(Exception):
    pass

def handler(number, frame):
    raise Came(signal.Signals(number).name)

NUMBER = getattr(signal, sys.argv[1])
signal.signal(NUMBER, handler)
steps, tasks = [], []

def come():
    os.kill(os.getpid(), NUMBER)
    for _ in range(100_000):  # long enough for Python to run a handler here
        pass

def borrow():
    end = time.monotonic() + 20
    while not thread.borrow():  # its own thread may have it for a moment
        assert time.monotonic() < end, "nobody lets go of the loop"

thread = SharedLoop()
thread.rest()
borrow()
"""
END = """
assert signal.getsignal(NUMBER) is handler
borrow()
thread.give_back()
thread.stop()
"""


def run(script: str, name: str) -> None:
    subprocess.run(
        [sys.executable, "-c", BEGIN + script + END, name], check=True, timeout=60, cwd=ROOT
    )


def test_the_signals_of_a_main_thread_wait():
    import signal

    assert {getattr(signal, name) for name in NAMES} <= set(DEFERRED)
    assert not {signal.SIGKILL, signal.SIGSTOP, signal.SIGSEGV} & set(DEFERRED)


IN_A_TURN = """
def work():
    steps.append("begun")
    come()
    steps.append("ended")

late = threading.Timer(0.05, os.kill, (os.getpid(), NUMBER))
for begin in (work, late.start):
    thread.loop.call_soon(begin)
    try:
        try:
            thread.turn(20)
        finally:
            steps.append("turned")
            thread.give_back()
    except Came as came:
        steps.append(str(came))
    borrow()
thread.give_back()
name = sys.argv[1]
assert steps == ["begun", "ended", "turned", name, "turned", name], steps
"""


@pytest.mark.parametrize("name", NAMES)
def test_a_signal_ends_a_turn_between_two_callbacks(name: str):
    run(IN_A_TURN, name)


IN_A_STEP = """
asked = PendingReply(thread.loop)

class Connection:
    def attend(self, attended):
        steps.append(attended)

    def look(self):
        steps.append("look")
        come()
        steps.append("looked")
        return False

async def work():
    await asked

thread.step(work(), Connection(), tasks.append)
assert len(tasks) == 1 and not tasks[0].done()
thread.turn(20)  # the signal has stopped it
tasks[0].cancel()
thread.turn(0)
try:
    thread.give_back()
except Came as came:
    steps.append(str(came))
assert steps == [True, "look", "looked", False, sys.argv[1]], steps
"""


@pytest.mark.parametrize("name", NAMES)
def test_a_signal_waits_for_the_end_of_a_step(name: str):
    run(IN_A_STEP, name)


TAKEN = """
come()
steps.append("taken")
try:
    thread.give_back()
except Came:
    steps.append("handled")
assert steps == ["taken", "handled"], steps
"""


def test_a_signal_leaves_no_loop_with_nobody():
    run(TAKEN, "SIGINT")
    run(TAKEN, "SIGALRM")


SEVERAL = """
def other(number, frame):
    steps.append(signal.Signals(number).name)
    raise KeyError("of the other one")

signal.signal(signal.SIGUSR2, other)
thread.give_back()
borrow()
come()
os.kill(os.getpid(), signal.SIGUSR2)
come()  # a second one of a kind is none, as everywhere
try:
    thread.give_back()
except KeyError as error:
    steps.append(type(error.__context__).__name__)
assert steps == ["SIGUSR2", "Came"], steps
assert signal.getsignal(signal.SIGUSR2) is other
"""


def test_each_of_several_signals_has_its_handler_run():
    run(SEVERAL, "SIGUSR1")


REPLACED = """
def last(number, frame):
    steps.append("last")

thread.loop.call_soon(signal.signal, NUMBER, last)
thread.loop.call_soon(come)
thread.loop.call_soon(thread.loop.stop)
thread.turn(20)
thread.give_back()
assert signal.getsignal(NUMBER) is last, signal.getsignal(NUMBER)
assert steps == ["last"], steps
signal.signal(NUMBER, handler)
"""


def test_a_handler_that_is_set_meanwhile_stays():
    run(REPLACED, "SIGTERM")


DURING_BEGIN = """
thread.give_back()
from aqueduct.client import deferred_signals

real = deferred_signals._signal.getsignal
def getsignal(number):
    if number == DEFERRED[-1] and not steps:
        steps.append("begun")
        signal.raise_signal(signal.SIGPROF)  # is waiting already: its number is a lower one
        deferred_signals._signal.getsignal = real
        raise Came("in the midst of it")
    return real(number)

signal.signal(signal.SIGPROF, lambda number, frame: steps.append("handled"))
signal_of_python, deferred_signals._signal = deferred_signals._signal, type("Module", (), {
    "getsignal": staticmethod(getsignal), "signal": staticmethod(deferred_signals._signal.signal)})
while True:
    try:
        if thread.borrow():
            break
    except Came:
        steps.append("raised")
        break
assert steps == ["begun", "handled", "raised"], steps
deferred_signals._signal = signal_of_python
"""


def test_what_is_raised_while_signals_begin_to_wait_leaves_all_as_it_was():
    run(DURING_BEGIN, "SIGALRM")
