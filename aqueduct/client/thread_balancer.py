"""The thread that drives one piece of work over several calls.

It reads the input, encodes it and decodes the answers. It waits for whichever call has news first,
and for no longer than until the next thing is due.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable
from contextlib import suppress
from queue import Empty
from typing import Any

import pyarrow as pa

from aqueduct.client.balanced_spec import BatchAnswer
from aqueduct.client.balancer import Balancer, NextStep
from aqueduct.client.thread_call import News

__all__ = ["ThreadBalancer", "balance"]


class ThreadBalancer:
    """One piece of work, driven by the thread that takes its answers."""

    def __init__(
        self,
        balancer: Balancer,
        batches: Iterable[pa.RecordBatch],
        news: News,
        *,
        release: Callable[[], object] | None = None,
    ) -> None:
        """``news`` is the queue of ``balancer``. ``release`` lets go of ``batches`` at the end."""
        self.balancer = balancer
        self.over = False
        """Whether nothing more comes."""
        self._source = iter(batches)
        self._news = news
        self._release = release

    def advance(self) -> BatchAnswer | None:
        """Does the next thing, waiting for it if need be; an answer, if there is one."""
        balancer, news = self.balancer, self._news
        answer = balancer.next_answer()
        if answer is not None:
            return answer
        if balancer.is_over():
            self.close(well=True)
            return None
        found: tuple[Any, Any] | None = None
        with suppress(Empty):
            found = news.get_nowait()
        if found is None:
            now = time.monotonic()
            step = balancer.step(now)
            if step is NextStep.GIVE:
                balancer.give(next(self._source, None))
            elif step is NextStep.WAIT:
                found = _wait(balancer, news, now)
        if found is None:
            return None
        answered = balancer.read(*found)
        if answered is not None:
            call, number, payload = answered
            size = len(payload)
            balancer.answered(call, number, size, call.exchange.decode(payload))
        return None

    def close(self, *, well: bool = False) -> None:
        """Gives up all calls. Repeated calls are without effect."""
        if not self.over:
            self.over = True
            self.balancer.close(well=well)
            if self._release is not None:
                self._release()


def balance(
    balancer: Balancer, batches: Iterable[pa.RecordBatch], news: News
) -> Generator[BatchAnswer]:
    """The answers, as they come or in order. Closing it gives up all calls.

    ``news`` is the queue of ``balancer``.
    """
    work = ThreadBalancer(balancer, batches, news)
    try:
        while not work.over:
            answer = work.advance()
            if answer is not None:
                yield answer
    finally:
        work.close()


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
