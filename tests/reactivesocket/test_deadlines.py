"""Requests that wait for an answer share one timer, and an answer at once needs no task."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from aqueduct.reactivesocket import ReactiveRequest, connect
from aqueduct.reactivesocket.deadlines import RequestDeadlines
from tests.reactivesocket.pairs import brisk, serving, within


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
