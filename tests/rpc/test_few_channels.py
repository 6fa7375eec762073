"""Calls of one batch, where the service has few places for channels."""

from __future__ import annotations

import pytest

import aqueduct
from tests.support.calls import config, numbers


@pytest.mark.parametrize("channels", [6, 8, 16])
async def test_calls_one_by_one_fit_where_channels_are_few(channels):
    """The limit is the service's alone: what a client puts off saying counts there."""
    few = config(limits={"channels": channels, "attachments": 6})
    service = aqueduct.Service("few", config=few)

    @service.handler("same")
    async def same(batch):
        return batch

    async with (
        service.serving("aqueduct+tcp://127.0.0.1:0") as running,
        await aqueduct.Client.connect(running.addresses[0]) as client,
    ):
        for _ in range(100):
            assert await client.call("same", numbers(1)) == numbers(1)
