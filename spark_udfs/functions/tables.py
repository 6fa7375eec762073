"""A table function: ``SELECT * FROM score(TABLE(trips))``, by an exchange handler.

::

    score = exchange_table("aqueduct://scores.example", "score")
    spark.udtf.register("score", score)
    spark.sql("SELECT * FROM score(TABLE(trips))")
    score(trips.asTable())

Spark hands over one batch after the other and wants the rows that come of it. So the call runs in
a thread of its own: several batches are in flight, and the last answers come with ``terminate``.
"""

from __future__ import annotations

import contextlib
import contextvars
import threading
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, cast

import pyarrow as pa

from aqueduct.errors import ConfigError, WrongType
from aqueduct.escaping import logger_of
from spark_udfs.functions.discovery import declared_output, refusal
from spark_udfs.functions.exchange import Exchange, exchange
from spark_udfs.schemas import AnySchema, arrow_schema, large_types
from spark_udfs.spark_schemas import spark_schema
from spark_udfs.versions import younger
from spark_udfs.worker.awake import idle_limit, sign_after, without_rows
from spark_udfs.worker.pickling import PickledFunction

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

__all__ = ["TableCall", "TableExchange", "exchange_table"]

log = logger_of("spark_udfs")

_LEAVE: Final = 5.0
"""Seconds until a thread whose call does not end is left to the end of the process."""


def exchange_table(
    address: str | Sequence[str],
    handler: str,
    returns: AnySchema | None = None,
    *,
    rows: AnySchema | None = None,
    **options: Any,
) -> Any:
    """A table function of an exchange handler: rows of a table go, rows come back.

    It is an ``arrow_udtf`` with one argument, a table. ``spark.udtf.register(NAME, made)`` gives it
    a name in SQL, and ``made(frame.asTable())`` calls it from Python. Each partition is a call with
    several batches in flight. With ``PARTITION BY`` each key is a call of its own.

    - ``returns``: the columns that come back; None asks the service.
    - ``rows``: the columns of the table, for a handler whose answer depends on them, and for the
      option ``columns``, whose answers are joined to the rows.
    - ``options``: those of ``exchange``.

    What is returned has ``summary()`` and ``tally`` beside, as what ``exchange`` returns.

    Needs Spark 4.1 or newer and an active session, as ``arrow_udtf`` does. Raises ConfigError.
    """
    arrow_udtf = younger("pyspark.sql.functions.arrow_udtf", "4.1", "exchange_table")
    call = replace(exchange(address, handler, **options), exact=True, large=large_types())
    made_of = _returned(call, returns, rows)
    call = replace(call, declared=arrow_schema(made_of, "returns"))
    table = TableExchange(call)

    class Handler:
        """What Spark makes once for each partition. Its class travels by value."""

        def __init__(self) -> None:
            self.work = table()

        def eval(self, batch: Any) -> Iterator[pa.RecordBatch]:
            return self.work.batch(batch)

        def terminate(self) -> Iterator[pa.RecordBatch]:
            return self.work.end()

        def cleanup(self) -> None:
            self.work.close()

    Handler.__name__ = f"exchange_{handler}"  # Spark shows it in plans
    made: Any = arrow_udtf(Handler, returnType=made_of)
    made.tally, made.summary = call.tally, call.summary
    return made


def _returned(call: Exchange, returns: AnySchema | None, rows: AnySchema | None) -> StructType:
    """The columns that come back, as Spark calls them."""
    where = f"the answer of {call.handler!r}"
    if rows is not None and returns is None:
        return call.output_schema(rows)
    if returns is None:
        if call.shape.columns:
            raise ConfigError(
                "with columns=[...] what comes back has the table's other columns too: say what it "
                'has, rows="id long, text string", or what comes back, returns="..."'
            )
        returns = call.schema if call.schema is not None else declared_output(call.calling)
    if isinstance(returns, pa.Schema):
        return spark_schema(returns, refusal(where))
    if isinstance(returns, str):
        from pyspark.sql.types import StructType

        arrow_schema(returns, "returns")  # says what is wrong with it
        return cast("StructType", StructType.fromDDL(returns))
    return returns


@dataclass(frozen=True)
class TableExchange(PickledFunction):
    """What travels to the executors: call it for the work of one partition."""

    call: Exchange

    def __call__(self) -> TableCall:
        """One partition's call, which begins with its first batch."""
        return TableCall(self.call)


class TableCall:
    """A call that is given its batches one by one, and gives answers as they are there.

    Its thread has at most one batch that was not asked for and one answer that nobody took: what is
    in flight is the call's own affair.
    """

    def __init__(self, call: Exchange) -> None:
        self._call = call
        self._change = threading.Condition()
        self._given: pa.RecordBatch | None = None
        self._answer: pa.RecordBatch | None = None
        self._no_more = False
        """Whether the input has ended."""
        self._left = False
        """Whether nobody wants answers any more."""
        self._ended = False
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._sign = sign_after(idle_limit())

    def batch(self, batch: Any) -> Generator[pa.RecordBatch]:
        """Sends a batch; gives the answers that came until there was room for it."""
        if not isinstance(batch, pa.RecordBatch):
            raise WrongType(
                f"exchange_table takes one table, and got a {type(batch).__name__}: "
                f"SELECT * FROM {self._call.handler}(TABLE(t)), or made(frame.asTable())"
            )
        if self._thread is None:
            run = contextvars.copy_context().run
            self._thread = threading.Thread(
                target=run, args=(self._work,), name="aqueduct-table", daemon=True
            )
            self._thread.start()
        yield from self._answers(to_the_end=False)
        with self._change:
            self._given = batch
            self._change.notify_all()

    def end(self) -> Generator[pa.RecordBatch]:
        """Ends the input; gives the answers that are left."""
        if self._thread is None:
            # Without a batch not even the table's columns are known.
            yield from self._call.fitted(())
            return
        with self._change:
            self._no_more = True
            self._change.notify_all()
        yield from self._answers(to_the_end=True)

    def close(self) -> None:
        """Cancels what is under way. It may be called twice, and in the middle of anything."""
        if self._thread is None:
            return
        with self._change:
            self._left = self._no_more = True
            self._change.notify_all()
        self._thread.join(_LEAVE)
        if self._thread.is_alive():
            log.warning("a call has not ended after %.0f s: its thread is left", _LEAVE)

    def _answers(self, *, to_the_end: bool) -> Generator[pa.RecordBatch]:
        """Answers until the call has ended, or until there is room for a batch."""
        while True:
            with self._change:
                free = self._change.wait_for(
                    lambda: (
                        self._answer is not None
                        or self._ended
                        or (self._given is None and not to_the_end)
                    ),
                    self._sign,
                )
                answer, self._answer = self._answer, None
                self._change.notify_all()
                ended = self._ended
            if answer is not None:
                yield answer
            elif not free:
                assert self._call.declared is not None
                yield from without_rows(self._call.declared)
            elif self._error is not None:
                raise self._error
            elif ended or not to_the_end:
                return

    def _work(self) -> None:
        try:
            with contextlib.closing(self._call.fitted(self._batches())) as answers:
                for answer in answers:
                    with self._change:
                        self._change.wait_for(lambda: self._answer is None or self._left)
                        if self._left:
                            return
                        self._answer = answer
                        self._change.notify_all()
                with self._change:
                    self._change.wait_for(lambda: self._answer is None or self._left)
        except BaseException as error:  # noqa: BLE001 - raised where answers are waited for
            self._error = error
        finally:
            with self._change:
                self._ended = True
                self._change.notify_all()

    def _batches(self) -> Iterator[pa.RecordBatch]:
        while True:
            with self._change:
                self._change.wait_for(lambda: self._given is not None or self._no_more)
                batch, self._given = self._given, None
                self._change.notify_all()
            if batch is None:
                return
            yield batch
