"""Sinks whose rows are written exactly once: attempts prepare, one commit takes all or none.

::

    class Shelf:                                     # one for the service
        def open(self, attempt, call):               # returns what takes the batches
            return Book(attempt.id, call.schema)

        def commit(self, write_key, prepared):       # all of these and no others; may be repeated
            ...

        def abort(self, write_key, prepared):        # these will never be committed
            ...

        def committed(self, write_key):              # for writers without a driver; see below
            ...

    class Book:                                      # one for each attempt
        def write(self, batch): ...
        def prepare(self): return {"rows": 3}        # durable now; the receipt is JSON
        def abort(self): ...                         # anything may have happened before

    service.sink("shelf", Shelf(), schema=WORDS)

Methods without ``async`` run in threads, those of one attempt in one thread; if ``open`` is a
coroutine function, so are ``write``, ``prepare`` and ``abort`` of what it returns, and all run on
the event loop. ``commit`` and ``abort`` of a write may be the one or the other.

What holds, and what the author of a sink must do:

- ``commit`` gets exactly the attempts whose receipts reached the driver, at most one for each
  partition. It makes all of them visible at once or, if it raises, none.
- ``commit`` comes again for the same write when its answer was lost, or the work was done again
  because of that, then with other attempts. The sink keeps a durable note of ``write_key.key``,
  made in the same stroke as the rows. When it finds it, it does nothing and returns a dict with
  ``"repeated": True``; what this commit named is then aborted, as far as it is not committed.
  Settlements of one write never overlap within a process.
- The process may die between any two steps. What ``prepare`` returned, and what it left behind,
  must do for a ``commit`` in another process; and ``commit`` must refuse as a whole if anything of
  what it is to commit is gone.
- ``abort`` of a write throws away what was prepared. It may come twice, for attempts of which
  nothing is left, and after a commit: what is committed it leaves alone.
- ``leftovers``, if there is one, is asked when the service begins to serve, and gives what former
  processes left behind: pairs of ``PreparedAttempt`` and the seconds since they were last
  touched. What
  nobody commits, or aborts, is aborted ``time_to_live`` seconds after the last sign of its write.
- ``committed``, if there is one, is what ``Client.writer`` needs: it looks for ``write_key.key`` in
  the sink's durable note and returns None, or a dict with ``"note"``, what ``commit`` was given
  with it. Then ``commit`` is called as ``commit(write_key, prepared, note)``; ``note`` is JSON, or
  None from Spark, to be kept in the same stroke as the rows.
"""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from typing import Any, Final

import pyarrow as pa

from aqueduct.arguments import signature_of
from aqueduct.config import Sinks
from aqueduct.errors import BadCall, ConfigError, WriteLost
from aqueduct.escaping import logger_of
from aqueduct.rpc.sink_commit import (
    ABORT,
    ATTEMPT_HEADER,
    CLAIM,
    COMMIT,
    DOCUMENT_SCHEMA,
    LOOK,
    VERSION,
    WRITE,
    Attempt,
    Claim,
    ClaimedKey,
    PreparedAttempt,
    Receipt,
    Settlement,
    SinkDescription,
    WriteKey,
    numbered,
    to_batch,
)
from aqueduct.rpc.threads import ThreadPool, apart
from aqueduct.service.context import Call
from aqueduct.service.handlers import EXCHANGE, Handler, make_handler, object_of
from aqueduct.service.sink_attempts import Attempts, KeyedLock, Known

__all__ = ["Attempt", "PreparedAttempt", "Sink", "WriteKey"]

log = logger_of(__name__)

_NAME_LIMIT: Final = 200
_CALLED_WITH: Final = {
    "open": ("attempt", "call"),
    "commit": ("write_key", "prepared"),
    "abort": ("write_key", "prepared"),
    "leftovers": (),
    "committed": ("write_key",),
}
_OPTIONAL: Final = ("leftovers", "committed")
_WRITER_BYTES: Final = 256
"""What a writer has in its note beside that of its program."""
_ATTEMPT_METHODS: Final = ("write", "prepare", "abort")


class Sink:
    """One sink of a service: its handlers, and what becomes of its attempts."""

    def __init__(
        self,
        name: str,
        sink: Any,
        *,
        schema: pa.Schema | None,
        limits: Sinks,
        time_to_live: float | None = None,
        description: str = "",
    ) -> None:
        """``sink``: an object with the methods above, or a class that makes it of nothing.

        Raises ConfigError for what cannot work.
        """
        where = f"sink {name!r}"
        if not isinstance(name, str) or not 1 <= len(name.encode()) <= _NAME_LIMIT:
            raise ConfigError(
                f"a sink's name is {name!r}; it must be text of 1 to {_NAME_LIMIT} bytes"
            )
        if schema is not None and not isinstance(schema, pa.Schema):
            raise ConfigError(
                f"{where}: schema must be a pyarrow.Schema, not {type(schema).__name__}"
            )
        if isinstance(sink, type):
            sink = object_of(sink)
        keeps_notes = getattr(sink, "committed", None) is not None
        for method, arguments in _CALLED_WITH.items():
            given = (*arguments, "note") if keeps_notes and method == "commit" else arguments
            _check_method(where, sink, method, given, optional=method in _OPTIONAL)
        if time_to_live is not None and not time_to_live > 0:
            raise ConfigError(f"{where}: time_to_live is {time_to_live!r}; it must be above zero")
        self.name = name
        self.sink = sink
        self.schema = schema
        self.limits = limits
        self.time_to_live = limits.time_to_live if time_to_live is None else time_to_live
        self._own_time = time_to_live is not None
        self.description = description or (inspect.getdoc(sink) or "").partition("\n\n")[0].strip()
        self.attempts = Attempts(name, limits.attempts)
        self._keeps_notes = keeps_notes
        self._turns = KeyedLock()
        self._pool = ThreadPool(f"aqueduct-sink-{name}")
        self._settling: set[asyncio.Task[Any]] = set()

    def configure(self, limits: Sinks) -> None:
        """Gives it other limits, before it is served."""
        self.limits = limits
        self.attempts.limit = limits.attempts
        if not self._own_time:
            self.time_to_live = limits.time_to_live

    def handlers(self) -> list[Handler]:
        """What the service answers for this sink."""
        asynchronous = inspect.iscoroutinefunction(self.sink.open)
        write = self._write_async if asynchronous else self._write
        return [
            self._handler(WRITE, write, self.schema),
            self._handler(COMMIT, self._commit, DOCUMENT_SCHEMA, idempotent=True),
            self._handler(ABORT, self._abort, DOCUMENT_SCHEMA, idempotent=True),
            self._handler(CLAIM, self._claim, DOCUMENT_SCHEMA, idempotent=True),
            self._handler(LOOK, self._look, None, idempotent=True),
        ]

    async def keep(self) -> None:
        """Recalls what former processes left, and aborts what has outlived its time, for ever."""
        leftovers = getattr(self.sink, "leftovers", None)
        if leftovers is not None:
            try:
                for prepared, seconds in await self._run(lambda: list(leftovers()), leftovers):
                    self.attempts.recall(prepared, seconds)
            except Exception:
                log.exception("sink %r: what was left behind cannot be told", self.name)
        while True:
            await asyncio.sleep(min(self.time_to_live / 4, 60.0))
            for write_key in self.attempts.expired(self.time_to_live):
                log.warning(
                    "sink %r: nothing was heard of write %r for %g s; what it prepared is aborted",
                    self.name,
                    write_key.key,
                    self.time_to_live,
                )
                try:
                    await self._settle_abort(Settlement(write_key), None)
                except Exception:
                    log.exception(
                        "sink %r: write %r could not be aborted", self.name, write_key.key
                    )

    # One attempt

    def _write(self, batches: Iterator[pa.RecordBatch], call: Call) -> Iterator[pa.RecordBatch]:
        known = self.attempts.begin(_attempt_of(call))
        count = rows = 0
        try:
            writer = self.sink.open(known.attempt, call)
            self._check_writer(writer, asynchronous=False)
            try:
                for batch in batches:
                    known.check()
                    writer.write(batch)
                    count += 1
                    rows += batch.num_rows
                _check_end(known, call)
                answer = self._receipt(writer.prepare(), count, rows)
            except BaseException:
                self._aborting(known, writer.abort)
                raise
        except BaseException:
            self.attempts.forget(known)
            raise
        yield self._prepared(known, answer)

    async def _write_async(self, batches: Any, call: Call) -> AsyncIterator[pa.RecordBatch]:
        known = self.attempts.begin(_attempt_of(call))
        count = rows = 0
        try:
            writer = await self.sink.open(known.attempt, call)
            self._check_writer(writer, asynchronous=True)
            try:
                async for batch in batches:
                    known.check()
                    await writer.write(batch)
                    count += 1
                    rows += batch.num_rows
                _check_end(known, call)
                answer = self._receipt(await writer.prepare(), count, rows)
            except BaseException:
                # A task that was cancelled may still wait; it is cancelled once.
                await asyncio.shield(self._own(self._aborting_async(known, writer.abort)))
                raise
        except BaseException:
            self.attempts.forget(known)
            raise
        yield self._prepared(known, answer)

    def _receipt(self, receipt: Any, batches: int, rows: int) -> tuple[Any, str]:
        text = Receipt(receipt, batches, rows).to_json(limit=self.limits.receipt_bytes)
        return json.loads(text)["receipt"], text

    def _prepared(self, known: Known, answer: tuple[Any, str]) -> pa.RecordBatch:
        self.attempts.prepared(known, answer[0])
        return to_batch(answer[1])

    def _check_writer(self, writer: Any, *, asynchronous: bool) -> None:
        """Raises TypeError for what ``open`` returned, if it cannot take batches."""
        for name in _ATTEMPT_METHODS:
            method = getattr(writer, name, None)
            if not callable(method):
                raise TypeError(
                    f"open of the sink {self.name!r} returned a {type(writer).__name__} without "
                    f"{name}(); it needs {', '.join(_ATTEMPT_METHODS)}"
                )
            if inspect.iscoroutinefunction(method) is not asynchronous:
                wanted = "a coroutine function, as open is" if asynchronous else "a plain function"
                raise TypeError(f"{type(writer).__name__}.{name} must be {wanted}")

    def _aborting(self, known: Known, abort: Callable[[], Any]) -> None:
        try:
            abort()
        except Exception:
            log.exception("sink %r: %s could not be aborted", self.name, known.attempt)

    async def _aborting_async(self, known: Known, abort: Callable[[], Any]) -> None:
        try:
            await abort()
        except Exception:
            log.exception("sink %r: %s could not be aborted", self.name, known.attempt)

    # A write

    async def _commit(self, batch: pa.RecordBatch, call: Call) -> pa.RecordBatch:
        settlement = await self._settlement(batch, call)
        if settlement.note is not None and not self._keeps_notes:
            raise self._without_notes()
        self._check_note(settlement.note)
        result = await self._outlast(self._settle_commit(settlement, call))
        if settlement.note is None or not _is_repeated(result):
            return _answer(result)
        # A writer can tell by the note whether the commit that is there is its own.
        found = await self._note(settlement.write_key)
        return _answer(result, note=None if found is None else found["note"])

    async def _abort(self, batch: pa.RecordBatch, call: Call) -> pa.RecordBatch:
        settlement = await self._settlement(batch, call)
        await self._outlast(self._settle_abort(settlement, call))
        return _answer(None)

    async def _settlement(self, batch: pa.RecordBatch, call: Call) -> Settlement:
        found = await apart(Settlement.from_json, [batch], limit=self.limits.document_bytes)
        _check_key(found.write_key.key, call)
        return found

    def _check_note(self, note: Any) -> None:
        """Raises BadCall for a note that is too large to be given back with each claim."""
        size, limit = len(json.dumps(note)), self.limits.note_bytes + _WRITER_BYTES
        if size > limit:
            raise BadCall(
                f"the note of a commit has {size} bytes, and the sink {self.name!r} keeps "
                f"{limit} (Sinks.note_bytes); keep what is large elsewhere"
            )

    async def _look(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        return to_batch(SinkDescription(self.schema, self.time_to_live).to_json())

    async def _claim(self, batch: pa.RecordBatch, call: Call) -> pa.RecordBatch:
        if not self._keeps_notes:
            raise self._without_notes()
        claim = await apart(Claim.from_json, [batch], limit=self.limits.document_bytes)
        _check_key(claim.key, call)
        claimed = await self._outlast(self._settle_claim(claim, call))
        return to_batch(claimed.to_json())

    async def _settle_claim(self, claim: Claim, call: Call) -> ClaimedKey:
        """The next commit of a key is the claim's: what others have prepared for it is aborted."""
        number = await self._count(claim.key)
        while True:
            write_key = numbered(claim.key, number)
            async with self._turns.turn(write_key.key):
                call.check()  # a client that gave up may have claimed it again since
                if await self._note(write_key) is None:
                    await self._abort_others(write_key, claim)
                    break
            number += 1  # the commit was under way
        last = await self._note(numbered(claim.key, number - 1)) if number else None
        description = SinkDescription(self.schema, self.time_to_live)
        return ClaimedKey(description, number, None if last is None else last["note"])

    async def _abort_others(self, write_key: WriteKey, claim: Claim) -> None:
        why = f"another writer has claimed the key {claim.key!r}"
        others = await apart(self.attempts.claimed, write_key, claim.execution, why)
        if not others:
            return
        abort = self.sink.abort
        try:
            await self._run(lambda: abort(write_key, others), abort)
        except BaseException:
            self._recall(others)
            raise

    async def _count(self, key: str) -> int:
        """How many commits of a key are there. They have no gaps, so few of them are looked for."""
        below, above = 0, 1
        while await self._note(numbered(key, above - 1)) is not None:
            below, above = above, 2 * above
        above -= 1  # this many are too many by one at least, and ``below`` are there
        while below < above:
            middle = (below + above) // 2
            if await self._note(numbered(key, middle)) is None:
                above = middle
            else:
                below = middle + 1
        return below

    async def _note(self, write_key: WriteKey) -> Mapping[str, Any] | None:
        """What the sink says of a commit: None, or a mapping with its note."""
        committed = self.sink.committed
        found = await self._run(lambda: committed(write_key), committed)
        if found is None or (isinstance(found, Mapping) and "note" in found):
            return found
        raise TypeError(
            f"committed of the sink {self.name!r} returned {found!r:.100}; it must return None, or "
            "a dict with 'note', what commit was given"
        )

    def _without_notes(self) -> BadCall:
        return BadCall(
            f"the sink {self.name!r} cannot tell what is committed under a key, which a writer "
            "needs: give it a method committed(write_key), and let its commit take a note"
        )

    async def _settle_commit(self, settlement: Settlement, call: Call) -> Any:
        write_key, commit, abort = settlement.write_key, self.sink.commit, self.sink.abort
        more = (settlement.note,) if self._keeps_notes else ()
        async with self._turns.turn(write_key.key):
            call.check()  # a client that gave up may have asked for something else since
            prepared = list(settlement.prepared)
            self._check_claim(settlement)
            result = await self._run(lambda: commit(write_key, prepared, *more), commit)
            others = await apart(self.attempts.committed, write_key, prepared)
            if _is_repeated(result):
                others = [*prepared, *others]
            if others:
                try:
                    await self._run(lambda: abort(write_key, others), abort)
                except Exception:  # it is committed all the same; they are tried again later
                    log.exception("sink %r: attempts that lost were not aborted", self.name)
                    self._recall(others)
        return result

    def _check_claim(self, settlement: Settlement) -> None:
        """Raises WriteLost for a commit by attempts of a writer whose key another one has."""
        executions = {each.attempt.execution for each in settlement.prepared}
        if settlement.execution is not None:
            executions.add(settlement.execution)
        for execution in executions:
            why = self.attempts.lost(settlement.write_key, execution)
            if why:
                raise WriteLost(f"the commit {settlement.write_key.key!r} comes too late: {why}")

    async def _settle_abort(self, settlement: Settlement, call: Call | None) -> None:
        write_key, abort = settlement.write_key, self.sink.abort
        why = (
            "nothing was heard of its write for too long"
            if call is None
            else "its write is aborted"
        )
        async with self._turns.turn(write_key.key):
            if call is not None:
                call.check()
            elif write_key not in self.attempts.expired(self.time_to_live):
                return  # it moved while others had their turn
            known, prepared = await apart(self._aborted, settlement, why)
            try:
                await self._run(lambda: abort(write_key, prepared), abort)
            except BaseException:
                self._recall(known)
                raise

    def _aborted(
        self, settlement: Settlement, why: str
    ) -> tuple[list[PreparedAttempt], list[PreparedAttempt]]:
        """The attempts that were known, and all that are to be aborted."""
        known = self.attempts.aborted(settlement.write_key, settlement.execution, why)
        named = {each.attempt.id for each in settlement.prepared}
        others = (each for each in known if each.attempt.id not in named)
        return known, [*settlement.prepared, *others]

    def _recall(self, prepared: Sequence[PreparedAttempt]) -> None:
        for each in prepared:
            self.attempts.recall(each, 0.0)

    # Where it runs

    async def _run(self, work: Callable[[], Any], method: Callable[..., Any]) -> Any:
        """``work``, which calls ``method``: here if that is asynchronous, else in a thread."""
        if inspect.iscoroutinefunction(method):
            return await work()
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()

        def settle(result: Any, error: BaseException | None) -> None:
            if future.cancelled():
                return
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)

        def in_thread() -> None:
            result: Any = None
            error: BaseException | None = None
            try:
                result = work()
            except StopIteration as caught:  # which no future may hold
                error = RuntimeError(f"{method.__qualname__} raised StopIteration")
                error.__cause__ = caught
            except BaseException as caught:  # noqa: BLE001  a sink may raise anything
                error = caught
            try:
                loop.call_soon_threadsafe(settle, result, error)
            except RuntimeError:  # the loop is closed: the service has ended without us
                pass

        self._pool.start(in_thread)
        return await future

    async def _outlast(self, work: Coroutine[Any, Any, Any]) -> Any:
        """``work`` goes on to its end, even if the client that asked for it goes away."""
        return await asyncio.shield(self._own(work))

    def _own(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(work)
        self._settling.add(task)
        task.add_done_callback(self._settled)
        return task

    def _settled(self, task: asyncio.Task[Any]) -> None:
        self._settling.discard(task)
        if not task.cancelled():
            task.exception()  # its client was told, or has gone

    def _handler(
        self,
        prefix: str,
        function: Callable[..., Any],
        schema: pa.Schema | None,
        *,
        idempotent: bool = False,
    ) -> Handler:
        return make_handler(
            function,
            name=prefix + self.name,
            kind=EXCHANGE,
            input=schema,
            output=DOCUMENT_SCHEMA,
            concurrency=1,
            idempotent=idempotent,
            max_calls=None,
            description=self.description,
        )


def _attempt_of(call: Call) -> Attempt:
    """Raises BadCall for a call that does not say which attempt it is."""
    header = call.headers.get(ATTEMPT_HEADER)
    if header is None:
        raise BadCall(
            f"the call does not say which attempt it is: it has no header {ATTEMPT_HEADER!r}; "
            "write by aqueduct.client.sink_writer.SinkWriter, or from Spark by "
            'df.write.format("aqueduct")',
            peer=call.peer,
            handler=call.handler,
        )
    attempt = Attempt.from_json(header)
    _check_key(attempt.write_key.key, call)
    return attempt


def _check_key(key: str, call: Call) -> None:
    """Raises BadCall if the write key that ``authorize`` saw is another one than is worked on."""
    if call.write_key not in ("", key):
        raise BadCall(
            f"the call has the write key {call.write_key!r}, and its document {key!r}; "
            "both must be the same",
            peer=call.peer,
            handler=call.handler,
        )


def _check_end(known: Known, call: Call) -> None:
    """Before an attempt is prepared: an end that came with a cancel is none."""
    known.check()
    call.check()


def _is_repeated(result: Any) -> bool:
    """Whether a sink says that it had committed the write before."""
    return isinstance(result, Mapping) and result.get("repeated") is True


def _answer(result: Any, **more: Any) -> pa.RecordBatch:
    document = {"version": VERSION, **more}
    try:
        text = json.dumps({**document, "result": result}, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        log.warning("what commit returned cannot be written as JSON: %s", error)
        text = json.dumps({**document, "result": None})
    return to_batch(text)


def _check_method(
    where: str, sink: Any, name: str, arguments: tuple[str, ...], *, optional: bool
) -> None:
    method = getattr(sink, name, None)
    if method is None and optional:
        return
    called = f"{name}({', '.join(arguments)})"
    if not callable(method):
        raise ConfigError(f"{where}: {type(sink).__name__} has no method {called}")
    if name != "leftovers" and (
        inspect.isgeneratorfunction(method) or inspect.isasyncgenfunction(method)
    ):
        raise ConfigError(f"{where}: {called} must be a function, not a generator")
    if name == "leftovers" and (
        inspect.iscoroutinefunction(method) or inspect.isasyncgenfunction(method)
    ):
        raise ConfigError(f"{where}: {called} must be a plain function or generator")
    signature = signature_of(method)
    try:
        signature.bind(*arguments)
    except TypeError as error:
        raise ConfigError(
            f"{where}: it is called as {called}; its signature is {signature}"
        ) from error
