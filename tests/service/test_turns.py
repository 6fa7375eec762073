"""A client that sends very much at once: a service works on it in turns, and answers others."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest

import aqueduct
from aqueduct import channel
from aqueduct.endpoint import connect
from tests.support.calls import serving

ATTACHED = 1000
"""Channels that come with one message, which is no call."""
MESSAGES = 30


@pytest.mark.parametrize("carrier", ["unix", "quic"])
async def test_messages_with_many_attachments_are_refused_in_turns(carrier: str) -> None:
    service = aqueduct.Service("turns")
    async with serving(service, carrier) as running:
        turns: list[int] = []

        async def count() -> None:
            while True:
                turns.append(running.counters()["refused"])
                await asyncio.sleep(0)

        connection = await connect(running.addresses[0])
        counting = asyncio.create_task(count())
        handles = []
        for _ in range(MESSAGES):
            pairs = [channel() for _ in range(ATTACHED)]
            connection.entrypoint.send_nowait(b"", attachments=[there for _, there in pairs])
            handles += [here for here, _ in pairs]
        async with asyncio.timeout(60):
            while turns[-1:] != [MESSAGES]:  # noqa: ASYNC110  each turn is looked at
                await asyncio.sleep(0)
        counting.cancel()
        # A turn of the loop may have two of the core: what came, and what it had left for later.
        assert max(after - before for before, after in pairwise(turns)) <= 4
        for handle in handles:
            handle.cancel()
        await connection.close()
