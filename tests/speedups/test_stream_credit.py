"""The credit of the peer's streams: half a window at a time, and read-ahead for large messages."""

from __future__ import annotations

from dataclasses import replace

import pytest

from aqueduct._speedups.channels.stream_credit import CreditedStream, StreamCredit
from aqueduct.config import DEFAULT
from aqueduct.protocol.common import effects
from aqueduct.protocol.common.context import ConnectionContext

KiB = 1024
WINDOW = 64 * KiB
LARGE = 128 * KiB


def made(
    budget: int = 64 << 20, read_ahead: int = 1 << 20
) -> tuple[ConnectionContext, StreamCredit, CreditedStream]:
    flow = replace(
        DEFAULT.flow, initial_window=WINDOW, receive_budget=budget, read_ahead=read_ahead
    )
    shared = ConnectionContext(replace(DEFAULT, flow=flow), 1)
    return shared, StreamCredit(shared), CreditedStream(4, WINDOW)


def test_a_credit_is_told_once_half_a_window_is_due() -> None:
    shared, credit, stream = made()
    credit.renew(stream, WINDOW // 2 - 1)
    assert not shared.effects
    credit.renew(stream, WINDOW // 2)
    assert shared.effects == [(effects.CREDIT, 4, WINDOW + WINDOW // 2)]
    assert stream.limit == WINDOW + WINDOW // 2
    assert shared.budget_used == 0


def test_a_stream_that_has_ended_has_no_credit() -> None:
    shared, credit, stream = made()
    stream.fin = True
    credit.renew(stream, 10 * WINDOW)
    assert not shared.effects


@pytest.mark.parametrize(("size", "granted"), [(32 * KiB - 1, 0), (32 * KiB, 64 * KiB)])
def test_messages_earn_read_ahead_from_a_size_on(size: int, granted: int) -> None:
    shared, credit, stream = made()
    credit.read_ahead(stream, size)
    assert stream.granted == shared.budget_used == granted
    credit.leave(stream)
    assert stream.granted == shared.budget_used == 0


def test_a_large_declared_size_earns_no_more_than_the_setting() -> None:
    shared, credit, stream = made(read_ahead=256 * KiB)
    credit.read_ahead(stream, 1 << 40)
    assert stream.granted == shared.budget_used == 256 * KiB


def test_a_stream_that_uses_its_read_ahead_has_it_doubled_up_to_the_setting() -> None:
    shared, credit, stream = made(read_ahead=1 << 20)
    credit.read_ahead(stream, LARGE)
    found = []
    taken = 0
    for _ in range(8):
        taken = stream.limit
        credit.renew(stream, taken)
        found.append(stream.granted)
        assert stream.limit == taken + WINDOW + stream.granted
    assert found == [512 * KiB, *[1 << 20] * 7]
    assert shared.budget_used == 1 << 20


def test_read_ahead_takes_half_of_the_budget_and_is_doubled_within_a_quarter() -> None:
    shared, credit, stream = made(budget=4 * LARGE)
    credit.read_ahead(stream, LARGE)
    assert stream.granted == 2 * LARGE
    credit.renew(stream, stream.limit)
    assert stream.granted == shared.budget_used == 2 * LARGE
    other = CreditedStream(8, WINDOW)
    credit.read_ahead(other, LARGE)
    assert other.granted == 0


def test_a_side_that_sends_as_much_as_it_reads_may_have_a_bound_of_its_own() -> None:
    flow = replace(DEFAULT.flow, initial_window=WINDOW, read_ahead=4 << 20)
    flow = replace(flow, loopback_read_ahead=256 * KiB)
    shared = ConnectionContext(replace(DEFAULT, flow=flow), 1, loopback=True)
    credit, stream = StreamCredit(shared), CreditedStream(4, WINDOW)
    credit.read_ahead(stream, LARGE)
    assert stream.granted == 256 * KiB
    credit.renew(stream, stream.limit)  # it has sent nothing: the larger bound holds
    assert stream.granted == 512 * KiB
