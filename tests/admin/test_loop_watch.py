"""Whether an event loop turns, as the admin port sees it."""

from __future__ import annotations

import asyncio
import time

from aqueduct.service.reporting import LoopWatch
from tests.support.calls import until


async def test_a_loop_that_turns_again_is_no_longer_late() -> None:
    watch = LoopWatch(asyncio.get_running_loop())
    assert watch.look() == 0.0
    time.sleep(0.05)  # noqa: ASYNC251  the loop does not turn
    assert watch.look() >= 0.05, "it was asked, and has not turned"
    await until(lambda: watch.lag >= 0.05)
    assert watch.look() == 0.0
    await asyncio.sleep(0)
    assert watch.lag < 0.05
