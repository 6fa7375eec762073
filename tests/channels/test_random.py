"""Random traffic over every carrier against a model: each run is a function of its seed.

To play one again: ``pytest tests/channels/test_random.py -k 'NAME and SEED'``. The network's
timing is its own, so a failure that hangs on it may need some tries.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import pytest

from aqueduct.config import Flow
from tests.channels.peers import BRISK, Carrier, joined
from tests.channels.traffic import play
from tests.support.selection import mostly_long

F = TypeVar("F", bound=Callable[..., Any])

TIGHT = replace(
    BRISK,
    flow=Flow(
        receive_budget=40_000,
        channel_receive_bytes=10_000,
        initial_window=2_000,
        read_ahead=4_000,
        admitted_window=8_000,
        channel_high_water=20_000,
        connection_high_water=100_000,
        streams=24,
        unordered_streams=3,
    ),
)
"""Everything is short, so that everything is waited for."""

REQUIREMENTS = ("AQ-31", "AQ-34", "AQ-36", "AQ-38", "AQ-45", "AQ-R18", "AQ-R26", "AQ-R27", "AQ-R34")


def proves(function: F) -> F:
    """Marks what all of it together shows."""
    for number in REQUIREMENTS:
        function = pytest.mark.requirement(number)(function)
    return function


@proves
@pytest.mark.parametrize("run", mostly_long(range(3), 0, 1))
async def test_random_traffic(carrier: Carrier, run: int) -> None:
    async with joined(carrier, BRISK, seed=run) as peers:
        traffic = await play(peers, run, 600)
        assert len(traffic.parcels) > 100 and len(traffic.lines) > 10


@proves
@pytest.mark.parametrize("run", mostly_long(range(2), 0))
async def test_random_traffic_where_everything_is_short(carrier: Carrier, run: int) -> None:
    async with joined(carrier, TIGHT, seed=run) as peers:
        traffic = await play(peers, run, 500)
        assert len(traffic.parcels) > 50


@pytest.mark.long
@pytest.mark.parametrize("run", range(100, 130))
async def test_much_random_traffic(carrier: Carrier, run: int) -> None:
    async with joined(carrier, TIGHT if run % 3 == 0 else BRISK, seed=run) as peers:
        await play(peers, run, 2_000, lines=150)
