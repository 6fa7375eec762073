"""The answers of one call, for a thread that waits for them; ``SyncClient`` makes the calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any, Final

import pyarrow as pa

from aqueduct.arrow.decode import Decoder
from aqueduct.client.call import END, Batches, FailedBatch
from aqueduct.client.thread_call import NEWS, Failed, ThreadCall
from aqueduct.endpoint.pulling import PULLING
from aqueduct.errors import AqueductError

__all__ = ["SyncStream"]

_SMALL: Final = 16 << 10
"""Bytes of a first batch whose answer is looked for before the second batch is read."""
_EARLY: Final = 0.002
"""Seconds to look."""


class SyncStream:
    """The answers of one call: an iterator of record batches, to be closed if left early.

    ``with`` closes it. For one thread at a time. What iterating raises is the end of the call,
    unless failures are reported: one raised while the stream is not ``over`` is of the batch
    ``number`` alone, and the next answer may be asked for.
    """

    def __init__(self, crossing: ThreadCall, source: Batches | None) -> None:
        self._crossing = crossing
        self._source = source
        self._input: Iterator[pa.RecordBatch] | None = None
        self._decoder: Decoder | None = None
        self._peeked: Any = None
        self._over = False
        self._error: BaseException | None = None
        self.number = -1
        """Of the input batch that the last answer, or failure, belongs to; -1 before the first."""
        self.held: Callable[[], int] | None = None
        self.ready: Callable[[], bool] | None = None
        self._first = True
        if source is not None:
            self._input = iter(source.batches)

    @property
    def schema(self) -> pa.Schema | None:
        """Of the answers; None before the service has accepted the call (see ``opened``)."""
        crossing = self._crossing
        if not crossing.accepted:
            return None
        assert crossing.call is not None
        expected = crossing.head.expected
        return crossing.call.schema if expected is None else expected

    @property
    def counters(self) -> Mapping[str, int]:
        """What the service counted; empty before the end."""
        call = self._crossing.call
        return {} if call is None else call.counters

    @property
    def capabilities(self) -> frozenset[str]:
        """What the handler is, of ``one-to-one`` and ``idempotent``; empty before ``opened``.

        And which of those asked for the service grants: ``as-completed`` (``ordered=False``) and
        ``failures`` (``report_failures=True``).
        """
        call = self._crossing.call
        return frozenset() if call is None else call.capabilities

    @property
    def over(self) -> bool:
        """Whether nothing more comes: the call has ended, or failed as a whole."""
        return self._over or self._error is not None

    @property
    def bytes_sent(self) -> int:
        """Of the batches that were sent, encoded."""
        return self._crossing.sent_bytes

    @property
    def bytes_received(self) -> int:
        """Of the answers so far, encoded."""
        return self._crossing.consumed_bytes

    @property
    def waited(self) -> float:
        """Seconds spent waiting for the service: neither an answer nor room to send."""
        return self._crossing.waited

    def opened(self) -> pa.Schema | None:
        """Waits until the service has accepted the call; returns ``schema``.

        Raises how the call failed.
        """
        crossing = self._crossing
        if crossing.call is None:
            crossing.tell(wake=False)
        while not crossing.accepted:
            if self._error is not None:
                raise self._error
            found = crossing.wait(acceptance=True)
            if type(found) is Failed:
                self._error = found.error
            elif found is not NEWS:
                self._peeked = found
        return self.schema

    def __iter__(self) -> SyncStream:
        return self

    def __next__(self) -> pa.RecordBatch:
        crossing = self._crossing
        while True:
            if self._error is not None:
                raise self._error
            if self._over:
                raise StopIteration
            found, self._peeked = self._peeked, None
            if found is None:
                found = crossing.take_nowait()
            if found is None:
                if self._input is not None and self.held is not None:
                    crossing.hold(self.held())
                if self._input is not None and crossing.room:
                    self._send_next(self._input)
                    if self._first:
                        self._first = False
                        self._peeked = self._early()
                    continue
                found = crossing.wait(room=self._input is not None)
            if found is NEWS:
                continue
            if found is END:
                self._over = True
                self._input = None
            elif type(found) is Failed:
                self._error = found.error
                self._input = None
            else:
                crossing.rest()
                self.number, payload = found
                if type(payload) is FailedBatch:
                    raise payload.error
                return self._decode(payload)

    def close(self) -> None:
        """Abandons the call, unless it is over: the handler is told to stop."""
        if not self._over and self._error is None:
            self._fail(self._crossing.abandoned())

    def __enter__(self) -> SyncStream:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if not getattr(self, "_over", True) and self._error is None:
            self._crossing.abandon(self._crossing.abandoned())

    # Within

    def _early(self) -> Any:
        """The answer to the first batch, if that is small and it comes at once.

        Where the second batch comes from may make its reader wait, and a first answer with it.
        """
        crossing = self._crossing
        if self._input is None or not 0 < crossing.sent_bytes <= _SMALL:
            return None
        if self.ready is not None and self.ready():
            return None
        return crossing.glance(_EARLY)

    def _decode(self, payload: Any) -> pa.RecordBatch:
        if self._decoder is None:
            assert self._crossing.call is not None
            self._decoder = self._crossing.call.decoder()
        try:
            return self._decoder.decode(payload, grow=self._crossing.grow)
        except AqueductError as error:
            self._fail(error)
            raise

    def _send_next(self, batches: Iterator[pa.RecordBatch]) -> None:
        source = self._source
        assert source is not None
        source.compression = self._crossing.compression
        pull = self._crossing.pull
        pulling = None if pull is None else PULLING.set(pull)
        try:
            encoded = source.encode(next(batches))
        except StopIteration:
            self._input = None
            self._crossing.finish(wake=self._crossing.flows)
        except BaseException as error:  # an iterable may raise anything
            self._fail(error)
            raise
        else:
            self._crossing.send(encoded, wake=not self._first or encoded.size > _SMALL)
        finally:
            if pulling is not None:
                PULLING.reset(pulling)

    def _fail(self, error: BaseException) -> None:
        self._error = error
        self._input = None
        self._crossing.abandon(error)
