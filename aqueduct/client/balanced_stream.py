"""The answers of a call that may take several connections; for tasks and for threads.

A reader uses them as a ``Stream`` or a ``SyncStream``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress

import pyarrow as pa

from aqueduct.client.balanced_spec import BatchAnswer
from aqueduct.client.call import abandoned
from aqueduct.client.call_metrics import CallMetrics
from aqueduct.client.loop_balancer import LoopBalancer
from aqueduct.client.stream import Stream
from aqueduct.client.stream_text import stream_text
from aqueduct.client.sync_stream import SyncStream
from aqueduct.client.thread_balancer import ThreadBalancer
from aqueduct.errors import LocalProtocolError
from aqueduct.rpc.tracing import CallObservation

__all__ = ["BalancedStream", "SyncBalancedStream"]


class BalancedStream(Stream):
    """The answers of a call over the addresses of a client; see ``Stream``."""

    def __init__(self, work: LoopBalancer, *, handler: str, places: str) -> None:
        self._work = work
        self._handler = handler
        self._places = places
        self._number = -1

    @property
    def schema(self) -> pa.Schema | None:
        """Of the answers; None before a service has accepted the call (see ``opened``)."""
        balancer = self._work.balancer
        return None if balancer is None else balancer.schema

    @property
    def counters(self) -> Mapping[str, int]:
        """What the service counted; empty before the end, and where several calls were made."""
        balancer = self._work.balancer
        return {} if balancer is None else balancer.counters

    @property
    def number(self) -> int:
        """Of the input batch that the last answer, or failure, belongs to; -1 before the first."""
        return self._number

    @property
    def capabilities(self) -> frozenset[str]:
        """What the handler is; see ``Stream.capabilities``."""
        balancer = self._work.balancer
        return frozenset() if balancer is None else balancer.capabilities

    @property
    def over(self) -> bool:
        """Whether nothing more comes: the call has ended, or failed as a whole."""
        return self._work.over

    async def opened(self) -> pa.Schema | None:
        """Waits until a service has accepted the call; returns ``schema``."""
        await self._work.opened()
        return self.schema

    async def __anext__(self) -> pa.RecordBatch:
        answer = await self._work.next_answer()
        if answer is None:
            raise StopAsyncIteration
        self._number = answer.number
        if answer.batch is None:
            assert answer.error is not None
            raise answer.error
        return answer.batch

    async def aclose(self) -> None:
        """Abandons the call, unless it is over: the handlers are told to stop."""
        self._work.stop(abandoned(self._places, self._handler))
        await self._work.stopped()

    def __repr__(self) -> str:
        return stream_text(self, self._handler, self._places, self._work.error)

    def __del__(self) -> None:
        work = getattr(self, "_work", None)
        if work is not None and not work.ended:
            error = abandoned(self._places, self._handler)
            with suppress(RuntimeError):  # the loop is closed, and the connections with it
                work.task.get_loop().call_soon_threadsafe(work.stop, error)


class SyncBalancedStream(SyncStream):
    """The answers of a call over the addresses of a client; see ``SyncStream``."""

    def __init__(
        self,
        work: ThreadBalancer,
        numbers: CallMetrics,
        *,
        check: Callable[[], object],
        handler: str,
        places: str,
        seen: CallObservation | None = None,
    ) -> None:
        """``check`` raises in a forked child. ``seen`` is told of the end."""
        self._work = work
        self._numbers = numbers
        self._check = check
        self._handler = handler
        self._places = places
        self._seen = seen
        self._line: deque[BatchAnswer] = deque()
        self._error: BaseException | None = None
        self.number = -1

    @property
    def schema(self) -> pa.Schema | None:
        """Of the answers; None before a service has accepted the call (see ``opened``)."""
        return self._work.balancer.schema

    @property
    def counters(self) -> Mapping[str, int]:
        """What the service counted; empty before the end, and where several calls were made."""
        return self._work.balancer.counters

    @property
    def capabilities(self) -> frozenset[str]:
        """What the handler is; see ``SyncStream.capabilities``."""
        return self._work.balancer.capabilities

    @property
    def over(self) -> bool:
        """Whether nothing more comes: the call has ended, or failed as a whole."""
        return self._error is not None or (self._work.over and not self._line)

    @property
    def bytes_sent(self) -> int:
        """Of the batches that were sent, encoded; those that were sent again count again."""
        return self._numbers.bytes_sent

    @property
    def bytes_received(self) -> int:
        """Of the answers so far, encoded."""
        return self._numbers.bytes_received

    @property
    def waited(self) -> float:
        """Seconds spent waiting for the services: neither an answer nor room to send."""
        return self._numbers.waiting_seconds

    def opened(self) -> pa.Schema | None:
        """Waits until a service has accepted the call; returns ``schema``."""
        while not self._work.balancer.accepted and not self._work.over:
            answer = self._advance()
            if answer is not None:
                self._line.append(answer)
        return self.schema

    def __next__(self) -> pa.RecordBatch:
        answer = self._line.popleft() if self._line else None
        while answer is None:
            if self._error is None and self._work.over:
                raise StopIteration
            answer = self._advance()
        self.number = answer.number
        if answer.batch is None:
            assert answer.error is not None
            raise answer.error
        return answer.batch

    def close(self) -> None:
        """Abandons the call, unless it is over: the handlers are told to stop."""
        if not self._work.over:
            self._error = self._error or abandoned(self._places, self._handler)
            self._work.close()
            if self._seen is not None:
                with suppress(LocalProtocolError):  # in a forked child it is the parent's call
                    self._check()
                    self._seen.ended(self._error)

    def __repr__(self) -> str:
        return stream_text(self, self._handler, self._places, self._error)

    def __del__(self) -> None:
        if getattr(self, "_work", None) is not None:
            self.close()

    # Within

    def _advance(self) -> BatchAnswer | None:
        if self._error is not None:
            raise self._error
        self._check()
        try:
            answer = self._work.advance()
        except BaseException as error:
            self._error = error
            self._work.close()
            if self._seen is not None:
                self._seen.ended(error)
            raise
        if self._seen is not None and self._work.over:
            self._seen.ended(None)
        return answer
