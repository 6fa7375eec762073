"""The thread of the admin port."""

from __future__ import annotations

import asyncio
import threading

import pytest

from aqueduct.admin.thread import AdminThread
from aqueduct.config import Admin
from tests.support.calls import until


def threads() -> list[str]:
    return [each.name for each in threading.enumerate() if each.name == "aqueduct-admin"]


@pytest.mark.parametrize("turns", range(4))
async def test_a_start_that_is_cancelled_leaves_no_thread(turns: int) -> None:
    thread = AdminThread("127.0.0.1:0", {}, Admin())
    starting = asyncio.create_task(thread.start())
    if turns:
        await until(lambda: thread.addresses or starting.done())
    for _ in range(turns - 1):
        await asyncio.sleep(0)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
        raise asyncio.CancelledError  # it was quicker
    await thread.close()
    await until(lambda: not threads())
