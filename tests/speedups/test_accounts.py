"""The sum of what the connections of a process hold."""

from __future__ import annotations

from aqueduct._speedups.base.accounts import Account
from aqueduct._speedups.channels.receiver import ReceiveBudget
from aqueduct.config import DEFAULT
from aqueduct.protocol.channels.frame_writer import ChannelFrameWriter
from aqueduct.protocol.common.context import ConnectionContext
from aqueduct.protocol.common.send_streams import SendStream, SendStreams
from aqueduct.protocol.common.sender import SenderHalf


def test_those_who_wait_are_told_of_what_returns() -> None:
    account, woken = Account(), []
    budget = ReceiveBudget()
    budget.process, budget.wake = account, lambda: woken.append(account.used)
    account.charge(100)
    account.charge(-10)
    assert woken == []
    account.waiting[budget] = None
    account.charge(-20)
    account.charge(5)
    assert woken == [70]
    assert (account.used, account.returned) == (75, 30)


def test_a_large_batch_counts_until_all_of_it_has_left() -> None:
    sending = Account()
    before = sending.used
    shared = ConnectionContext(DEFAULT, 0, sending=sending)
    ledger: SendStreams = shared.outgoing
    half = SenderHalf(shared, ChannelFrameWriter(ledger), 0, accessible=True, given=True)
    stream = SendStream(half, False)
    ledger._charge(stream, 1000)
    half.end_batch()
    ledger._charge(stream, 50)
    ledger._release(stream, 400)
    assert (ledger.queued, ledger.retained, sending.used - before) == (650, 400, 1050)
    ledger._release(stream, 620)
    assert (ledger.queued, ledger.retained, sending.used - before) == (30, 0, 30)
    half.end_batch()
    ledger._release(stream, 10)
    assert (ledger.queued, ledger.retained, sending.used - before) == (20, 10, 30)
    ledger.clear()
    assert sending.used == before
