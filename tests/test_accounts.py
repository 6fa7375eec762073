"""The accounts of a process: what all of its connections have in common."""

from __future__ import annotations

import gc
import subprocess
import sys

from aqueduct.accounts import Receiving, process
from aqueduct.config import DEFAULT
from aqueduct.protocol.channels.shared import Shared

FORK = """
import os
from aqueduct.accounts import process
process().receiving.charge(100)
process().sending.charge(200)
process().connections += 1
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
    account, woken = Receiving(), []
    one = Shared(DEFAULT, 0, receiving=account)
    other = Shared(DEFAULT, 1, receiving=account)
    one.wake, other.wake = (lambda: woken.append("one")), (lambda: woken.append("other"))
    account.press()
    assert sorted(woken) == ["one", "other"]
    other.wake = None
    account.press()
    assert woken.count("one") == 2
    del one, other
    gc.collect()
    assert not account.members
