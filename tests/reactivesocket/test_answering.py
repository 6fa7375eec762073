"""Answers that are there at once need no task of their own."""

from __future__ import annotations

import asyncio
from typing import Any

from aqueduct.reactivesocket import ReactiveRequest, connect
from tests.reactivesocket.pairs import serving, within


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
