"""The answers of one call, for a thread that waits for them; ``SyncClient`` makes the calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, Self

import pyarrow as pa

from aqueduct.arrow.capsules import to_pandas, to_polars
from aqueduct.client.call import END, FailedBatch
from aqueduct.client.stream_text import stream_text
from aqueduct.client.thread_call import NEWS, SMALL, Failed, ThreadCall
from aqueduct.endpoint.pulling import PULLING
from aqueduct.errors import AqueductError, LocalProtocolError

__all__ = ["SyncStream"]

_EARLY: Final = 0.002
"""Seconds to look for the answer to a small first batch before the second one is read."""


class SyncStream:
    """The answers of one call: an iterator of record batches, to be closed if left early.

    ``with`` closes it. For one thread at a time. What iterating raises is the end of the call,
    unless failures are reported: one raised while the stream is not ``over`` is of the batch
    ``number`` alone, and the next answer may be asked for.
    """

    def __init__(
        self,
        call: ThreadCall,
        *,
        held: Callable[[], int] | None = None,
        ready: Callable[[], bool] | None = None,
    ) -> None:
        """``held``, ``ready``: see ``TaskClient.exchange_later``."""
        self._call = call
        source = call.source
        self._input: Iterator[pa.RecordBatch] | None = None
        self._peeked: Any = None
        self._over = False
        self._error: BaseException | None = None
        self.number = -1
        """Of the input batch that the last answer, or failure, belongs to; -1 before the first."""
        self._held = held
        self._ready = ready
        self._first = True
        if source is not None:
            self._input = iter(source.batches)

    @property
    def schema(self) -> pa.Schema | None:
        """Of the answers; None before the service has accepted the call (see ``opened``)."""
        return self._call.schema

    @property
    def counters(self) -> Mapping[str, int]:
        """What the service counted; empty before the end."""
        return self._call.counters

    @property
    def capabilities(self) -> frozenset[str]:
        """What the handler is, of ``one-to-one`` and ``idempotent``; empty before ``opened``.

        And which of those asked for the service grants: ``as-completed`` (``ordered=False``) and
        ``failures`` (``report_failures=True``).
        """
        return self._call.capabilities

    @property
    def over(self) -> bool:
        """Whether nothing more comes: the call has ended, or failed as a whole."""
        return self._over or self._error is not None

    @property
    def bytes_sent(self) -> int:
        """Of the batches that were sent, encoded."""
        return self._call.sent_bytes

    @property
    def bytes_received(self) -> int:
        """Of the answers so far, encoded."""
        return self._call.consumed_bytes

    @property
    def waited(self) -> float:
        """Seconds spent waiting for the service: neither an answer nor room to send."""
        return self._call.waited

    def opened(self) -> pa.Schema | None:
        """Waits until the service has accepted the call; returns ``schema``.

        Raises how the call failed.
        """
        call = self._call
        while not call.accepted:
            if self._error is not None:
                raise self._error
            found = call.wait(acceptance=True)
            if type(found) is Failed:
                self._error = found.error
            elif found is not NEWS:
                self._peeked = found
        return self.schema

    def read_all(self) -> pa.Table:
        """All answers that are still to come, as a Table: each batch as it came, none or many.

        Raises how the call failed.
        """
        batches = list(self)
        return pa.Table.from_batches(batches, self._opened())

    def to_table(self) -> pa.Table:
        """``read_all``, by the name that data frames have for it."""
        return self.read_all()

    def to_reader(self) -> pa.RecordBatchReader:
        """A reader of the answers, which asks for each as it is read.

        It knows the schema, so this waits until the service has accepted the call.
        """
        return pa.RecordBatchReader.from_batches(self._opened(), self)

    def to_pandas(self, **options: Any) -> Any:
        """``read_all`` as a DataFrame of pandas, the extra ``pandas``.

        ``options``: those of ``pyarrow.Table.to_pandas``. Raises ConfigError without pandas.
        """
        return to_pandas(self.read_all(), options)

    def to_polars(self) -> Any:
        """``read_all`` as a DataFrame of Polars, the extra ``polars``.

        Raises ConfigError without Polars.
        """
        return to_polars(self.read_all())

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        """The answers for any library that takes Arrow streams, read lazily; see ``to_reader``."""
        return self.to_reader().__arrow_c_stream__(requested_schema)

    def _opened(self) -> pa.Schema:
        schema = self.opened()
        if schema is None:
            raise LocalProtocolError("a sink answers with counters and no batches: SyncClient.sink")
        return schema

    def __iter__(self) -> SyncStream:
        return self

    def __next__(self) -> pa.RecordBatch:
        call = self._call
        while True:
            if self._error is not None:
                raise self._error
            if self._over:
                raise StopIteration
            call.check_process()
            found, self._peeked = self._peeked, None
            if found is None:
                found = call.pop()
            if found is None:
                if self._input is not None and self._held is not None:
                    call.hold(self._held())
                if self._input is not None and call.room:
                    self._push_next(self._input)
                    if self._first:
                        self._first = False
                        self._peeked = self._early()
                    continue
                found = call.wait(room=self._input is not None)
            if found is NEWS:
                continue
            if found is END:
                self._over = True
                self._close_input()
            elif type(found) is Failed:
                self._error = found.error
                self._close_input()
            else:
                call.rest()
                self.number, payload = found
                if type(payload) is FailedBatch:
                    raise payload.error
                return self._decode(payload)

    def close(self) -> None:
        """Abandons the call, unless it is over: the handler is told to stop."""
        if not self._over and self._error is None:
            self._fail()

    def __repr__(self) -> str:
        call = self._call
        return stream_text(self, call.head.handler, call.address, self._error)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        if not getattr(self, "_over", True) and self._error is None:
            self._call.abandon()

    # Within

    def _early(self) -> Any:
        """The answer to the first batch, if that is small and it comes at once.

        Where the second batch comes from may make its reader wait, and a first answer with it.
        """
        call = self._call
        if self._input is None or not 0 < call.sent_bytes <= SMALL:
            return None
        if self._ready is not None and self._ready():
            return None
        return call.glance(_EARLY)

    def _decode(self, payload: Any) -> pa.RecordBatch:
        try:
            return self._call.decode(payload)
        except AqueductError as error:
            self._fail(error)
            raise

    def _push_next(self, batches: Iterator[pa.RecordBatch]) -> None:
        call = self._call
        pulling = None if call.pull is None else PULLING.set(call.pull)
        try:
            call.push(next(batches), later=self._first)
        except StopIteration:
            self._close_input()
            call.finish()
        except BaseException as error:  # an iterable may raise anything
            self._fail(error)
            raise
        finally:
            if pulling is not None:
                PULLING.reset(pulling)

    def _close_input(self) -> None:
        self._input = None
        if self._call.source is not None:
            self._call.source.close()

    def _fail(self, error: BaseException | None = None) -> None:
        self._close_input()
        self._error = self._call.abandon(error)
