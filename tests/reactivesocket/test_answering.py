"""Answers that are there at once need no task of their own."""

from __future__ import annotations

import asyncio
from typing import Any

from aqueduct.errors import ReactiveError
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


async def test_a_responder_that_is_cancelled_at_once_spoils_no_other() -> None:
    cancelled: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    cancelled.cancel()

    async def respond(request: ReactiveRequest) -> None:
        if bytes(request.data) == b"bad":
            await cancelled
        request.complete(request.data)

    async with serving(responder=respond) as server, await connect(server.address) as client:
        for _ in range(2):  # at the second one answers begin at once
            await within(client.request(b"x"))
        asked = (client.request(data) for data in (b"a", b"bad", b"b"))
        first, bad, last = await within(asyncio.gather(*asked, return_exceptions=True))
        assert isinstance(bad, ReactiveError)
        assert bad.word == "CANCELED"
        assert not isinstance(first, BaseException)
        assert not isinstance(last, BaseException)
        assert (first.data, last.data) == (b"a", b"b")
        assert (await within(client.request(b"on"))).data == b"on"
        (connection,) = server.connections
        assert not connection.answering()
