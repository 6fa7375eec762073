"""The thread that drives one piece of work over several calls.

It reads the input, encodes it and decodes the answers. It waits for whichever call has news first,
and for no longer than until the next thing is due.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable
from contextlib import suppress
from queue import Empty
from typing import Any

import pyarrow as pa

from aqueduct.client.balanced_spec import BatchAnswer
from aqueduct.client.balancer import Balancer, NextStep
from aqueduct.client.thread_call import News

__all__ = ["balance"]


def balance(
    balancer: Balancer, batches: Iterable[pa.RecordBatch], news: News
) -> Generator[BatchAnswer]:
    """The answers, as they come or in order. Closing it gives up all calls.

    ``news`` is the queue of ``balancer``.
    """
    source = iter(batches)
    well = False
    try:
        while True:
            while (answer := balancer.next_answer()) is not None:
                yield answer
            if balancer.is_over():
                break
            found: tuple[Any, Any] | None = None
            with suppress(Empty):
                found = news.get_nowait()
            if found is None:
                now = time.monotonic()
                step = balancer.step(now)
                if step is NextStep.GIVE:
                    balancer.give(next(source, None))
                elif step is NextStep.WAIT:
                    found = _wait(balancer, news, now)
            if found is None:
                continue
            answered = balancer.read(*found)
            if answered is not None:
                call, number, payload = answered
                size = len(payload)
                balancer.answered(call, number, size, call.exchange.decode(payload))
        well = True
    finally:
        balancer.close(well=well)


def _wait(balancer: Balancer, news: News, now: float) -> tuple[Any, Any] | None:
    """What comes next; None: look again."""
    seconds = balancer.begin_wait(now)
    if seconds is None:
        return None
    found: tuple[Any, Any] | None = None
    try:
        with suppress(Empty):
            found = news.get(timeout=seconds)
    finally:
        balancer.end_wait(now, in_vain=found is None)
    return found
