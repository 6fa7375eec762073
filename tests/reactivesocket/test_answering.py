"""Answers at once need no task of their own; late ones have the deadline of their request."""

from __future__ import annotations

import asyncio
from typing import Any

from aqueduct.reactivesocket import ReactiveRequest, connect
from tests.reactivesocket.pairs import brisk, serving, within


async def test_a_longer_timeout_counts_instead_of_it() -> None:
    async def late(request: ReactiveRequest) -> None:
        await asyncio.sleep(0.4)
        request.complete(b"late")

    config = brisk(timing={"progress_deadline": 0.2})
    async with serving(responder=late) as server:
        async with await connect(server.address, config=config) as client:
            assert (await within(client.request(b"x", timeout=5.0))).data == b"late"


async def test_answers_at_once_share_a_task() -> None:
    tasks: set[Any] = set()

    async def at_once(request: ReactiveRequest) -> None:
        tasks.add(asyncio.current_task())
        request.complete(request.data)

    async with serving(responder=at_once) as server:
        async with await connect(server.address) as client:
            for _ in range(20):
                await within(client.request(b"x"))
    assert len(tasks) < 5
