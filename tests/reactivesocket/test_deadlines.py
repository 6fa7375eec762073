"""Requests that wait for an answer share one timer, and an answer at once needs no task."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from aqueduct.config import Flow
from aqueduct.reactivesocket import ReactiveRequest, connect
from aqueduct.reactivesocket.deadlines import RequestDeadlines, WaitDeadline
from tests.reactivesocket.pairs import Peer, brisk, scripted, serving, within


class Waiting:
    """Notes when it was waited for too long."""

    def __init__(self, log: list[Any]) -> None:
        self.log = log

    def expire(self) -> None:
        self.log.append(self)


async def test_each_is_told_once_and_in_order() -> None:
    log: list[Any] = []
    deadlines = RequestDeadlines(0.05)
    first, second, answered = Waiting(log), Waiting(log), Waiting(log)
    for each in (first, answered, second):
        deadlines.add(each)
    deadlines.remove(answered)
    deadlines.remove(answered)
    async with asyncio.timeout(5):
        while len(log) < 2:  # noqa: ASYNC110  timers tell no event
            await asyncio.sleep(0.01)
    third = Waiting(log)
    deadlines.add(third)
    async with asyncio.timeout(5):
        while len(log) < 3:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert log == [first, second, third]


async def test_nobody_is_told_after_the_end() -> None:
    log: list[Any] = []
    deadlines = RequestDeadlines(0.01)
    deadlines.add(Waiting(log))
    deadlines.stop()
    await asyncio.sleep(0.05)
    assert not log


async def test_a_request_that_nobody_answers_ends_by_the_deadline_of_all() -> None:
    cancelled = asyncio.Event()

    async def never(request: ReactiveRequest) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    config = brisk(timing={"progress_deadline": 0.3})
    async with serving(responder=never) as server:
        async with await connect(server.address, config=config) as client:
            with pytest.raises(TimeoutError, match=r"no answer within 0.3 s \(Timing.progress_"):
                await within(client.request(b"x"))
            await within(cancelled.wait())
            assert not client.core.requested


async def test_a_longer_timeout_counts_instead_of_it() -> None:
    async def late(request: ReactiveRequest) -> None:
        await asyncio.sleep(0.4)
        request.complete(b"late")

    config = brisk(timing={"progress_deadline": 0.2})
    async with serving(responder=late) as server:
        async with await connect(server.address, config=config) as client:
            assert (await within(client.request(b"x", timeout=5.0))).data == b"late"


async def test_a_deadline_says_what_was_missing() -> None:
    with pytest.raises(TimeoutError, match=r"^nothing came within 0.01 s$"):
        async with WaitDeadline(0.01, "nothing came"):
            await asyncio.sleep(30)
    with pytest.raises(TimeoutError, match=r"^this neither within 0.01 s \(Timing\.x\)$"):
        async with WaitDeadline(0.01, "nothing came", "Timing.x") as deadline:
            deadline.missing = "this neither"
            await asyncio.sleep(30)
    with pytest.raises(TimeoutError, match=r"^of another$"):
        async with WaitDeadline(30, "nothing came"):
            raise TimeoutError("of another")


async def test_what_waits_for_room_or_an_answer_says_so() -> None:
    async def deaf(peer: Peer) -> None:
        await leave.wait()

    leave = asyncio.Event()
    flow = Flow(connection_high_water=1 << 20)
    config = brisk(flow=flow, timing={"close_linger": 0.1})
    async with scripted(deaf) as address:
        async with await connect(address, config=config) as client:
            with pytest.raises(TimeoutError, match=r"^reactive\S* gave no answer within 0.05 s$"):
                await client.request(b"x", timeout=0.05)
            with pytest.raises(TimeoutError, match=r"^no item came from \S* within 0.05 s$"):
                await client.stream(b"x").receive(timeout=0.05)
            await client.fire(bytes(15 << 20))
            room = r"^there was no room to send a request to \S* within 0.05 s$"
            for waiting in (client.request, client.fire):
                with pytest.raises(TimeoutError, match=room):
                    await waiting(b"x", timeout=0.05)
        leave.set()
