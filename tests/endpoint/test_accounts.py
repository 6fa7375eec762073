"""The accounts of a process: what all of its connections have in common."""

from __future__ import annotations

import gc
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

from aqueduct.config import DEFAULT
from aqueduct.endpoint.accounts import (
    LARGE,
    ProcessAccounts,
    ReceivingAccount,
    SendingAccount,
    process,
)
from aqueduct.protocol.channels.connection import ChannelConnection
from aqueduct.protocol.common.context import ConnectionContext

FORK = """
import os
from aqueduct.endpoint.accounts import process
process().receiving.charge(100)
process().sending.charge(200)
process().opened()
child = os.fork()
if not child:
    found = process()
    os._exit(0 if (found.receiving.used, found.sending.used, found.connections) == (0, 0, 0) else 1)
status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
assert (process().receiving.used, process().connections) == (100, 1)
raise SystemExit(status)
"""


def test_the_child_of_a_fork_has_accounts_of_its_own() -> None:
    done = subprocess.run([sys.executable, "-c", FORK], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr


def test_there_is_one_process() -> None:
    assert process() is process()


def test_all_connections_are_told_when_one_begins_to_wait() -> None:
    account, woken = ReceivingAccount(), []
    one = ConnectionContext(DEFAULT, 0, receiving=account)
    other = ConnectionContext(DEFAULT, 1, receiving=account)
    one.wake, other.wake = (lambda: woken.append("one")), (lambda: woken.append("other"))
    account.press()
    assert sorted(woken) == ["one", "other"]
    other.wake = None
    account.press()
    assert woken.count("one") == 2
    del one, other
    gc.collect()
    assert not account.members


def test_connections_of_several_threads_are_all_counted() -> None:
    counted = ProcessAccounts()

    def open_and_close(_: int) -> None:
        for _ in range(10_000):
            counted.opened()
            counted.closed()
        counted.opened()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(open_and_close, range(4)))
    assert counted.connections == 4


def test_what_a_handler_makes_after_the_end_of_its_call_does_not_count() -> None:
    account = SendingAccount()
    ledger = ChannelConnection(is_client=True, config=DEFAULT, sending=account).outgoing
    room = account.reservation(ledger, lambda: 0, lambda: None)
    assert room.ask(LARGE) and account.used == LARGE
    room.made(2 * LARGE)
    assert account.used == 2 * LARGE
    room.end()
    assert account.used == 0
    assert room.ask(LARGE)
    room.made(LARGE)
    room.posted(LARGE)
    assert account.used == 0 and not account.waiting
