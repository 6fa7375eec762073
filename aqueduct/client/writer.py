"""``Writer``: rows of a program that are in a sink exactly once, without a driver.

::

    async with client.writer("shelf", key="orders") as writer:
        start = writer.committed.note or 0          # where the program was when it ended last
        for offset, batch in source(start):
            await writer.write(batch)
            if offset % 100 == 0:
                await writer.commit(note=offset)    # from here on the rows are there

Batches go to the sink in attempts, one after the other. Those of an attempt are kept until it has
its receipt; then they are acknowledged. If its connection is lost before, they are sent again by
another attempt. A commit names the attempts since the last one.
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final, Protocol, Self, TypeVar, Unpack

import pyarrow as pa

from aqueduct.arrow.capsules import has_batch, whole
from aqueduct.arrow.schema import check
from aqueduct.arrow.sizes import batch_bytes
from aqueduct.client.options import ExchangeOptions, UnaryOptions
from aqueduct.client.retry import Backoff, may_pass, with_note
from aqueduct.client.stream import Stream
from aqueduct.client.stream_input import batches_apart
from aqueduct.client.write_segments import Ack, Committed, Segment, size_of
from aqueduct.config import Config
from aqueduct.endpoint.accounts import process
from aqueduct.errors import (
    AqueductError,
    BadCall,
    BatchTooLarge,
    Cancelled,
    ConfigError,
    HandlerFailed,
    LocalProtocolError,
    Refused,
    WriteLost,
    WrongType,
)
from aqueduct.escaping import logger_of
from aqueduct.rpc.documents import answer_of
from aqueduct.rpc.request import Partition
from aqueduct.rpc.sink_commit import (
    ABORT,
    ATTEMPT_HEADER,
    CLAIM,
    COMMIT,
    DOCUMENT_SCHEMA,
    WRITE,
    Attempt,
    Claim,
    ClaimedKey,
    PreparedAttempt,
    Receipt,
    Settlement,
    document_of,
    numbered,
    to_batch,
)

__all__ = ["OnAck", "Token", "Writer", "WriterClient"]

log = logger_of(__name__)

T = TypeVar("T")
OnAck = Callable[[Ack], object]
"""Called with each acknowledgement, in order, and with those of a writer that has failed."""
Token = str | bytes | Callable[[], str | bytes] | None
"""What calls show to be let in; a function is asked for each call."""

_PREPARING: Final = 2
"""Attempts that are ended and have no receipt. More ends are put off, and taken together."""
_SPINS: Final = 32
_FIRST_PAUSE: Final = 0.05
_PAUSE_LIMIT: Final = 5.0
_LASTED: Final = 10.0
"""Seconds that a service must have had an attempt for its failure to count as the first one."""
_FAREWELL: Final = 5.0
"""Seconds to tell the sink of an abort, which it would find out by itself in its time."""


class WriterClient(Protocol):
    """What a writer needs of its client."""

    config: Config
    address: str

    @property
    def closed(self) -> bool:
        """Whether no connection is up."""

    @property
    def reconnects(self) -> bool:
        """Whether the next call connects again then; False once the program has closed it."""

    def check_here(self) -> None:
        """As Client's."""

    def exchange(self, handler: str, batches: Any, **options: Unpack[ExchangeOptions]) -> Stream:
        """As Client's."""

    async def call(
        self, handler: str, batch: pa.RecordBatch, **options: Unpack[UnaryOptions]
    ) -> pa.RecordBatch:
        """As Client's."""


class Writer:
    """Writes into one sink under one key. Made by ``Client.writer``; ``async with`` opens it.

    It belongs to the event loop of its client. Any task may write; commits take turns with writes.
    After a failure ``write`` and ``flush`` raise it, and the sink has nothing since the last
    commit: open another writer with the same key, and go on from ``committed``.
    """

    def __init__(
        self,
        client: WriterClient,
        sink: str,
        key: str,
        *,
        schema: pa.Schema | None = None,
        in_flight_bytes: int | None = None,
        deadline: float | None = None,
        ack_within: float | None = None,
        on_ack: OnAck | None = None,
        headers: Mapping[str, str] | None = None,
        token: Token = None,
        compression: str | None = None,
    ) -> None:
        """See ``Client.writer``. Raises ConfigError for what cannot work."""
        limits = client.config.sinks
        self.sink = sink
        self.key = key
        self.deadline = limits.writer_deadline if deadline is None else deadline
        """Seconds for an attempt, for a commit, and to reach a service that is not there."""
        self.in_flight_bytes = limits.writer_bytes if in_flight_bytes is None else in_flight_bytes
        """Bytes that may be kept without an acknowledgement; one write may always be."""
        self.committed = Committed()
        """What is there under the key; known once the writer is open."""
        self._limits = limits
        self._execution = uuid.uuid4().hex
        try:
            self._claim = Claim(key, self._execution)
        except BadCall as error:
            raise ConfigError(str(error)) from None
        self._client = client
        self._given = schema
        self._schema: pa.Schema | None = None
        self._ack_within = ack_within
        self._on_ack = on_ack
        self._headers = dict(headers or {})
        # What is tried again, and when, is for the writer to say.
        self._options: dict[str, Any] = {"retries": 0}
        self._token = token
        self._compression = compression
        self._account = process().sending
        self._open = self._closed = False
        self._turn = asyncio.Lock()
        self._running: Segment | None = None
        self._kept: deque[Segment] = deque()
        self._kept_bytes = 0
        self._writes = 0
        self._since: list[Segment] = []  # of the commit that is next
        self._tries = 0
        self._committing: set[asyncio.Task[Committed]] = set()
        self._waiters: list[asyncio.Future[None]] = []
        self._error: BaseException | None = None
        self._refused: BaseException | None = None
        self._told = False

    # What there is to see

    @property
    def schema(self) -> pa.Schema | None:
        """Of the batches; None until the sink, or the first batch, has said it."""
        return self._schema

    @property
    def kept_bytes(self) -> int:
        """Of batches without an acknowledgement."""
        return self._kept_bytes

    @property
    def uncommitted(self) -> int:
        """Rows that were written and not committed."""
        return sum(segment.rows for segment in tuple(self._since))

    @property
    def closed(self) -> bool:
        """Whether it was closed or aborted."""
        return self._closed

    def unacknowledged(self) -> list[pa.RecordBatch]:
        """The batches that are kept, in order. After a failure: those that were not prepared."""
        kept = tuple(self._kept)  # another thread may ask
        return [batch for segment in kept for batch in tuple(segment.batches)]

    # What there is to do

    async def open(self) -> Self:
        """Claims the key, and learns what is committed under it; ``async with`` does it.

        Another writer of the same key has lost it from here on. Raises BadCall if the sink keeps
        no notes of commits, and what calls raise.
        """
        self._check_here()
        if self._open or self._closed:
            raise LocalProtocolError(f"{self!r} was opened already; make another writer")
        claim = self._claim.to_json()

        async def ask(tries: int) -> ClaimedKey:
            answer = await self._ask(CLAIM, claim, self.key)
            with answer_of(self._client.address, CLAIM + self.sink):
                return ClaimedKey.from_json([answer], limit=self._limits.document_bytes)

        claimed = await self._patiently(ask, f"the claim of {self._where}")
        self._schema = claimed.description.schema
        if self._schema is None:
            self._schema = self._given
        elif self._given is not None:
            check(self._schema, self._given, where=self._where, handler=self.sink)
        kept = claimed.note if isinstance(claimed.note, dict) else {}
        rows = kept.get("rows", 0)
        self.committed = Committed(
            claimed.commits, rows if type(rows) is int else 0, kept.get("note")
        )
        self._open = True
        return self

    async def write(self, batch: Any) -> Ack:
        """Takes rows, and returns their acknowledgement, which may be awaited or not.

        ``batch``: a RecordBatch, a Table, or anything else of Arrow's C interface. It waits while
        ``in_flight_bytes`` are kept. All of it is taken, or if that raises, nothing.

        Raises SchemaMismatch and BatchTooLarge, after which others may be written, and the error of
        the writer once it has failed.
        """
        self._check_open()
        batches = _batches_of(batch)
        if batches is None:
            where = f"the input of {self._where}"
            batches = await batches_apart(batch, self._schema, where=where)
        schema = self._schema
        if schema is None and batches:
            schema = batches[0].schema
        limit = self._client.config.calls.batch_limit
        for each in batches:
            assert schema is not None
            check(schema, each.schema, where=f"the input of {self._where}", handler=self.sink)
            if (nbytes := batch_bytes(each)) > limit:
                raise BatchTooLarge(
                    f"a batch of {nbytes} bytes is above the limit of {limit} "
                    "(Calls.batch_limit); write fewer rows at a time",
                    handler=self.sink,
                )
        self._schema = schema  # a batch that is refused says nothing of the next one
        size = size_of(batches)
        if self._writes % _SPINS == _SPINS - 1:
            await asyncio.sleep(0)  # let others have the loop, whatever comes in
        async with self._turn:
            self._check_open()
            while self._kept and self._kept_bytes + size > self.in_flight_bytes:
                self._want(self._running)
                await self._change()
                self._check_open()
            return self._take(batches, size)

    async def flush(self) -> None:
        """Returns once all that was written before is acknowledged. Raises why it cannot be."""
        self._check_open()
        await self._flush()

    async def commit(self, note: Any = None) -> Committed:
        """Commits all that was written since the last commit, and returns once it is there.

        ``note``: any JSON of at most ``Sinks.note_bytes`` that the sink keeps with the rows. A
        program that ends, and opens a writer with the same key, finds it in ``committed``. A commit
        without rows is one, too: it keeps the note.

        Raises WriteLost if the sink has refused it or another writer has the key, ConnectionLost
        or DeadlineExceeded if that cannot be known now. After these two, and after a refusal,
        ``commit`` may be repeated, and nothing else. If its task is cancelled, it goes on.
        """
        self._check_usable()
        # The program may go on to change what it gave, before the sink is told of it.
        note = json.loads(self._text_of(note))
        committing = asyncio.get_running_loop().create_task(self._commit(note))
        self._committing.add(committing)
        committing.add_done_callback(self._look_at)
        try:
            return await asyncio.shield(committing)
        except asyncio.CancelledError:
            if not committing.cancelled():
                raise
            raise Cancelled(f"{self._where} was closed during its commit") from None

    async def close(self) -> None:
        """Ends a writer of which everything is committed.

        Raises LocalProtocolError, and closes nothing, while rows are not committed: ``commit`` or
        ``abort`` them. Raises the error of a writer that has failed, unless it was raised before.
        """
        if self._closed:
            return
        self._check_here()
        error = self._error or self._refused
        if error is None and self._since:
            raise LocalProtocolError(
                f"{self._where} has {self.uncommitted} rows that were written and not committed; "
                "await commit() before the end, or abort() to drop them"
            )
        await self.abort()
        if error is not None and not self._told:
            self._told = True
            raise error

    async def abort(self) -> None:
        """Ends the writer; the sink drops what is not committed. What is committed stays.

        It takes a few seconds at most, and raises nothing: what a sink is not told it drops after
        its ``time_to_live``. A commit that is under way may yet be done.
        """
        if self._closed:
            return
        self._check_here()
        self._closed = True
        failed = self._error is not None
        self._fail(Cancelled(f"{self._where} was closed"))
        tasks: list[asyncio.Task[Any]] = [
            each.task for each in self._since if each.task is not None
        ]
        for committing in self._committing:
            committing.cancel()
        tasks += self._committing
        if tasks:
            await asyncio.wait(tasks, timeout=_FAREWELL)
        if self._since and not (failed and self._client.closed):
            await self._say_abort()

    async def __aenter__(self) -> Self:
        return await self.open()

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            await self.abort()
            return
        try:
            await self.close()
        except LocalProtocolError:
            await self.abort()
            raise

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{self.uncommitted} rows not committed"
        return f"<Writer into {self.sink!r} by the key {self.key!r}, {state}>"

    # Batches

    @property
    def _where(self) -> str:
        return f"the writer into the sink {self.sink!r} by the key {self.key!r}"

    def _take(self, batches: list[pa.RecordBatch], size: int) -> Ack:
        loop = asyncio.get_running_loop()
        segment = self._running
        if segment is None:
            segment = self._running = Segment(len(self._since))
            self._since.append(segment)
            self._kept.append(segment)
            # An attempt has a deadline, so that it is not to be fed for ever.
            age = min(self.deadline / 2, self._ack_within or self.deadline)
            segment.timer = loop.call_later(age, self._want, segment)
            segment.task = loop.create_task(self._carry(segment, self.committed.commits))

        def end() -> None:
            self._want(segment)

        rows = sum(batch.num_rows for batch in batches)
        ack = Ack(self._writes, self.committed.commits, rows, size, loop.create_future(), end)
        self._writes += 1
        segment.add(batches, ack)
        self._keep(size)
        flow = self._client.config.flow
        if segment.size * 2 >= self.in_flight_bytes or self._account.used > flow.process_send_bytes:
            self._want(segment)
        return ack

    def _want(self, segment: Segment | None) -> None:
        """Somebody waits for the receipt of a segment: it ends as soon as may be."""
        if segment is not None and not segment.ended:
            segment.wanted = True
            self._advance()

    def _advance(self) -> None:
        segment = self._running
        if segment is None or not segment.wanted:
            return
        if sum(each.ended and each.prepared is None for each in self._kept) < _PREPARING:
            segment.end()
            self._running = None

    def _prepared(self, segment: Segment, prepared: PreparedAttempt) -> None:
        """An attempt has its receipt. Acknowledgements are given in the order of writing."""
        segment.prepared = prepared
        while self._kept and self._kept[0].prepared is not None:
            first = self._kept.popleft()
            self._keep(-first.size)
            acks = list(first.acks)
            first.release()
            self._acknowledge(acks, None)
        self._advance()
        self._wake()

    def _acknowledge(self, acks: list[Ack], error: BaseException | None) -> None:
        for ack in acks:
            ack.settle(error)
            if self._on_ack is not None:
                try:
                    self._on_ack(ack)
                except Exception:
                    log.exception("%s: on_ack failed for write %d", self._where, ack.number)

    def _keep(self, size: int) -> None:
        self._kept_bytes += size
        self._account.keep(size)

    async def _flush(self) -> None:
        last = self._kept[-1] if self._kept else None  # what others write meanwhile is theirs
        while last is not None and last in self._kept:
            self._want(last)
            await self._change()
            self._raise_error()
        self._raise_error()

    async def _change(self) -> None:
        """Waits until something has become of an attempt; each has its deadline."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        await waiter

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    def _fail(self, error: BaseException) -> None:
        """Nothing is sent any more."""
        if self._error is not None:
            return
        self._error = error
        kept, self._running = list(self._kept), None
        for segment in kept:
            segment.close()
        self._keep(-self._kept_bytes)
        for segment in kept:
            self._acknowledge(segment.acks, error)
        self._wake()

    # Calls

    async def _carry(self, segment: Segment, commit: int) -> None:
        """Attempts at one segment, until one has its receipt."""
        what = f"part {segment.number} of {self._where}"
        began = 0.0

        async def attempt(tries: int) -> PreparedAttempt:
            nonlocal began
            began = time.monotonic()
            return await self._attempt(segment, commit, tries)

        try:
            prepared = await self._patiently(attempt, what, lambda: segment.accepted)
        except Refused as error:
            if segment.accepted < began:  # the call was, by its token perhaps, and not the attempt
                self._fail(with_note(error, f"{self._where} has failed; {self._remedy}"))
                return
            self._fail(
                _caused(
                    WriteLost(
                        f"{self._where} has lost the {self.uncommitted} rows that it wrote since "
                        f"its last commit: the service takes no more: {error}; {self._remedy}"
                    ),
                    error,
                )
            )
        except Exception as error:  # noqa: BLE001  tasks that write or wait are to see it
            self._fail(error)
        else:
            self._prepared(segment, prepared)

    async def _attempt(self, segment: Segment, commit: int, tries: int) -> PreparedAttempt:
        attempt = Attempt(
            numbered(self.key, commit),
            execution=self._execution,
            partition=segment.number,
            task=tries,
        )
        handler = WRITE + self.sink
        assert self._schema is not None
        stream = self._client.exchange(
            handler,
            segment.feed(),
            schema=self._schema,
            output_schema=DOCUMENT_SCHEMA,
            in_flight_bytes=self.in_flight_bytes,
            deadline=self.deadline,
            headers={**self._headers, ATTEMPT_HEADER: attempt.to_json()},
            write_key=attempt.write_key.key,
            attempt=attempt.id,
            partition=Partition(segment.number),
            compression=self._compression,
            token=self._shown(),
            **self._options,
        )
        async with stream:
            await stream.opened()
            segment.accepted = time.monotonic()
            answers = [batch async for batch in stream]
        with answer_of(self._client.address, handler):
            receipt = Receipt.from_json(answers, limit=self._limits.document_bytes)
        if (receipt.batches, receipt.rows) != (len(segment.batches), segment.rows):
            raise BadCall(
                f"the sink {self.sink!r} was sent {len(segment.batches)} batches of {segment.rows} "
                f"rows, and prepared {receipt.batches} of {receipt.rows}",
                peer=self._client.address,
                handler=handler,
            )
        return PreparedAttempt(attempt, receipt.receipt)

    async def _commit(self, note: Any) -> Committed:
        async with self._turn:
            self._check_usable()
            await self._flush()
            number, rows = self.committed.commits, self.committed.rows + self.uncommitted
            prepared = [each.prepared for each in self._since if each.prepared is not None]
            write_key = numbered(self.key, number)
            kept = {"writer": self._execution, "rows": rows, "note": note}
            text = Settlement(write_key, tuple(prepared), self._execution, note=kept).to_json()

            async def ask(tries: int) -> Mapping[str, Any]:
                answer = await self._ask(COMMIT, text, write_key.key)
                where = "the answer to a commit"
                with answer_of(self._client.address, COMMIT + self.sink):
                    return document_of([answer], where, limit=self._limits.document_bytes)

            try:
                answer = await self._patiently(ask, f"commit {number} of {self._where}")
            except HandlerFailed as error:
                self._refused = WriteLost(
                    f"{self._where}: the sink refused commit {number}, so none of its "
                    f"{self.uncommitted} rows is there: {error}; if the cause passes, commit() may "
                    f"be repeated; if the sink has lost what it had prepared, {self._remedy}"
                )
                self._told = True
                raise self._refused from error
            except AqueductError as error:
                advice = (
                    f"whether commit {number} of {self._where} is there is not known; repeat "
                    f"commit(), or {self._remedy}"
                )
                self._refused, self._told = with_note(error, advice), True
                raise self._refused from error
            self._refused = None
            there = answer.get("note", kept)
            if not isinstance(there, dict) or there.get("writer") != self._execution:
                lost = WriteLost(
                    f"{self._where}: another writer has made commit {number}, so none of the "
                    f"{self.uncommitted} rows of this one is there; {self._remedy}"
                )
                self._fail(lost)
                self._raise_error()
            self.committed = Committed(number + 1, rows, there.get("note"), answer.get("result"))
            self._since.clear()
            return self.committed

    async def _say_abort(self) -> None:
        prepared = tuple(each.prepared for each in self._since if each.prepared is not None)
        write_key = numbered(self.key, self.committed.commits)
        text = Settlement(write_key, prepared, self._execution).to_json()
        try:
            async with asyncio.timeout(_FAREWELL):
                await self._ask(ABORT, text, write_key.key)
        except (AqueductError, TimeoutError) as error:
            log.warning("%s: the sink was not told of the abort: %s", self._where, error)

    async def _ask(self, what: str, text: str, write_key: str) -> pa.RecordBatch:
        return await self._client.call(
            what + self.sink,
            to_batch(text),
            output_schema=DOCUMENT_SCHEMA,
            deadline=self.deadline,
            headers=self._headers,
            write_key=write_key,
            token=self._shown(),
            **self._options,
        )

    async def _patiently(
        self,
        work: Callable[[int], Awaitable[T]],
        what: str,
        accepted: Callable[[], float] = lambda: 0.0,
    ) -> T:
        """The result of ``work``, which is done again while that may help.

        It is given how often others were tried for the same. ``accepted``: when a service last took
        it up. Raises how the last one failed, if the service was gone for ``deadline``.
        """
        backoff = Backoff(_FIRST_PAUSE, _PAUSE_LIMIT)
        failed_first, tries = 0.0, 0
        while True:
            began = time.monotonic()
            try:
                return await work(tries)
            except AqueductError as error:
                now = time.monotonic()
                if not may_pass(error) or self._given_up:
                    raise
                tries += 1
                # A service that is silent may take as long, and is gone all the same.
                if tries == 1 or (accepted() >= began and now - accepted() > _LASTED):
                    backoff.succeeded()
                    failed_first = now
                backoff.failed()
                if backoff.until - failed_first >= self.deadline:
                    text = f"{what}: tried {tries} times within {self.deadline:g} s (deadline)"
                    raise with_note(error, text) from error.__cause__
                pause = backoff.until - now
                log.warning(
                    "%s: %s: %s; it is sent again in %.2g s",
                    what,
                    type(error).__name__,
                    error,
                    pause,
                )
            await asyncio.sleep(pause)

    # Within

    def _shown(self) -> str | bytes | None:
        """The token of the next call. Raises ConfigError for what a function raises or gives."""
        if not callable(self._token):
            return self._token
        try:
            shown = self._token()
        except Exception as error:
            raise ConfigError(
                f"{self._where}: token, which is asked for each call, raised "
                f"{type(error).__name__}: {error}"
            ) from error
        if not isinstance(shown, str | bytes):
            raise ConfigError(
                f"{self._where}: token, which is asked for each call, gave a "
                f"{type(shown).__name__}; it must give text or bytes"
            )
        return shown

    @property
    def _given_up(self) -> bool:
        """Whether the program has closed the client."""
        return not self._client.reconnects

    @property
    def _remedy(self) -> str:
        return "open another writer with this key, and write again from its committed.note on"

    def _check_here(self) -> None:
        self._client.check_here()

    def _raise_error(self) -> None:
        if self._error is not None:
            self._told = True
            raise self._error.with_traceback(None)  # or each use would lengthen it

    def _check_usable(self) -> None:
        self._check_here()
        if self._closed or not self._open:
            state = "is closed" if self._closed else "is not open yet: use it by async with"
            raise LocalProtocolError(f"{self._where} {state}")
        self._raise_error()

    def _check_open(self) -> None:
        self._check_usable()
        if self._refused is not None:
            self._told = True
            raise self._refused.with_traceback(None)

    def _look_at(self, committing: asyncio.Task[Committed]) -> None:
        self._committing.discard(committing)
        if not committing.cancelled():
            committing.exception()  # the caller was told, or was cancelled

    def _text_of(self, note: Any) -> str:
        """A note as JSON. Raises ConfigError."""
        limit = self._limits.note_bytes
        try:
            text = json.dumps(note, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise ConfigError(f"the note of a commit cannot be written as JSON: {error}") from error
        if len(text) > limit:
            raise ConfigError(
                f"the note of a commit has {len(text)} bytes as JSON, above the limit of {limit} "
                "(Sinks.note_bytes); keep what is large elsewhere"
            )
        return text


def _batches_of(given: Any) -> list[pa.RecordBatch] | None:
    """The batches of what is in memory for sure; None: it has to be asked. Raises WrongType."""
    if isinstance(given, pa.RecordBatch):
        return [given]
    if isinstance(given, pa.Table):
        return given.to_batches() or [whole(given.schema, [], where="")]
    if not has_batch(given):
        raise WrongType(
            f"a writer takes a RecordBatch, a Table, or another object with __arrow_c_stream__ or "
            f"__arrow_c_array__, not {type(given).__name__}"
        )
    return None


def _caused(error: WriteLost, cause: BaseException) -> WriteLost:
    error.__cause__ = cause
    return error
