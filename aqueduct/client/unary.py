"""A call of one batch as the client makes it: one message out, one message back.

``Client.call`` puts a face on it. What fits no message travels as an exchange, either way.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import pyarrow as pa

from aqueduct.arguments import Duration, read_arguments, unexpected
from aqueduct.arrow.capsules import fitted
from aqueduct.arrow.decode import Decoder
from aqueduct.arrow.encode import Encoded, Encoder
from aqueduct.arrow.ipc import LONG_SCHEMA, adopt
from aqueduct.arrow.joining import joined as joined_batches
from aqueduct.arrow.schema import check, check_expected
from aqueduct.client.call import expired, given_up
from aqueduct.client.options import CallOptions, UnaryOptions, joined
from aqueduct.endpoint import Connection, Message, PendingReply
from aqueduct.errors import (
    AqueductError,
    BadCall,
    ChannelError,
    DeadlineExceeded,
    LocalProtocolError,
)
from aqueduct.rpc.deadline import ProgressTimer
from aqueduct.rpc.keys import ACCEPTED, ANSWERS
from aqueduct.rpc.request import CallHead, own_headers
from aqueduct.rpc.status import Status
from aqueduct.rpc.threads import apart
from aqueduct.rpc.unary import UnaryAnswer, UnaryTemplate, decode_answer, room_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aqueduct.protocol.common.receiver import Received
    from aqueduct.rpc.keys import Headers
    from aqueduct.rpc.tracing import CallObservation

__all__ = [
    "AnswerCache",
    "PendingCall",
    "UnaryCaller",
    "UnaryCallers",
    "UnaryResult",
    "in_schema",
    "one_batch",
    "same_schema",
    "trace_headers",
]

_KEPT_BYTES: Final = 64 << 10
_KEPT_HEADERS: Final = 256
_KINDS: Final = 64
"""Kinds of calls of one batch that are kept ready, and handlers whose answers are known."""
_ALIKE: Final = frozenset({"output_schema", "deadline", "token"})
"""Options that calls of one kind share."""


class UnaryResult:
    """What a call gave: a schema and batches, or the message on whose channels they follow."""

    __slots__ = ("batches", "deadline", "follow", "schema", "size")

    def __init__(
        self,
        schema: pa.Schema | None = None,
        batches: Sequence[pa.RecordBatch] = (),
        *,
        size: int = 0,
        follow: Message | None = None,
        deadline: float | None = None,
    ) -> None:
        self.schema = schema
        self.batches = batches
        self.size = size
        """Bytes of the batches, encoded."""
        self.follow = follow
        """The accept message of an answer that did not fit."""
        self.deadline = deadline
        """Seconds left for it."""


class AnswerCache:
    """What answers were like: those of one handler often are as before."""

    __slots__ = ("answered", "expected", "found", "usual")

    def __init__(self, expected: pa.Schema | None) -> None:
        self.expected = expected
        """The schema that they were compared with."""
        self.answered: bytes | None = None
        """The schema message that ``found`` is for."""
        self.found: Decoder | None = None
        self.usual: tuple[bytes | Headers, int] | None = None
        """Headers and size of the last answer, if it was one batch that ``found`` reads."""


class UnaryCaller:
    """Makes calls that are alike but for their batch. For one thread at a time.

    Several may share an AnswerCache, if they expect the same of the same handler.
    """

    def __init__(
        self, connection: Connection, head: CallHead, *, peer: str, cache: AnswerCache | None = None
    ) -> None:
        """Raises LocalProtocolError for what cannot be sent."""
        assert head.schema is not None
        self.head = head
        self.schema: pa.Schema = head.schema
        self.template = UnaryTemplate(head)
        self.connection = connection
        self._config = connection.config
        self._room = room_of(connection.config.calls)
        self._peer = peer
        self._encoder: Encoder | None = None
        self._cache = AnswerCache(head.expected) if cache is None else cache

    def encode(self, batch: pa.RecordBatch) -> Encoded:
        """The payload of a batch. Raises SchemaMismatch and LocalProtocolError."""
        encoder = self._encoder
        if encoder is not None:
            written = encoder.plain(batch)
            if written is not None:
                return written
        if encoder is None or not encoder.independent:
            encoder = self._encoder = self._make_encoder()
        return encoder.encode(batch)

    def slow(self, batch: pa.RecordBatch) -> bool:
        """Whether ``encode`` may take milliseconds, so that it is for a thread."""
        if self._encoder is None:
            self._encoder = self._make_encoder()
        return self._encoder.slow(batch)

    async def encode_apart(self, batch: pa.RecordBatch) -> Encoded:
        """``encode`` in a thread. Raises DeadlineExceeded, too."""
        try:
            async with asyncio.timeout(self.head.deadline):
                # One of its own: other calls may be made meanwhile.
                return await apart(self._make_encoder().encode, batch)
        except TimeoutError:
            assert self.head.deadline is not None
            raise self.expired(self.head.deadline) from None

    def fits(self, encoded: Encoded) -> bool:
        """Whether call and batch go in one message."""
        return self.template.body + encoded.size <= self._room

    def read(self, message: Received) -> UnaryResult | None:
        """What came back; None: the answers follow on the channels of the message."""
        cache = self._cache
        try:
            payload, found, known = message.payload, cache.found, cache.answered
            said = message.raw, len(payload)
            if found is not None and known is not None and said == cache.usual:
                view, start = memoryview(payload), len(known)
                if bytes(view[:start]) == known:
                    batch = found.decode(view[start:], number=0)
                    return UnaryResult(found.schema, (batch,), size=len(view) - start)
            answer = decode_answer(message.headers, payload)
            if answer is not None:
                decoder = self._decoder(answer)
                batches = [
                    decoder.decode(payload, number=number)
                    for number, payload in enumerate(answer.batches)
                ]
                short = isinstance(said[0], bytes) and len(said[0]) <= _KEPT_HEADERS
                if short and len(batches) == 1 and decoder is cache.found:
                    cache.usual = said
                else:
                    cache.usual = None
                return UnaryResult(decoder.schema, batches, size=sum(map(len, answer.batches)))
        except BadCall as error:
            if error.handler:
                raise
            raise BadCall(
                str(error), peer=self._peer, handler=self.head.handler
            ) from error.__cause__
        if any(key == ACCEPTED for key, _ in message.headers):
            return None
        names = {"peer": self._peer, "handler": self.head.handler}
        status = Status.decode(message.headers, message.payload, **names)
        failed = status.to_exception(**names)
        if failed is not None:
            raise failed
        text = f"handler {self.head.handler!r} at {self._peer} ended well without an answer"
        raise BadCall(text, **names)

    def following(self, answered: UnaryResult) -> CallHead:
        """The call whose answers follow."""
        return replace(self.head, deadline=answered.deadline)

    def given_up(self, error: ChannelError) -> AqueductError:
        """The service ended the channel of the answer without one."""
        failed = given_up(self._peer, self.head.handler, error)
        failed.__cause__ = error
        return failed

    def expired(self, seconds: float) -> DeadlineExceeded:
        """No answer came in time."""
        return expired(self._peer, self.head, seconds, "no answer came")

    # Within

    def _make_encoder(self) -> Encoder:
        handler = self.head.handler
        return Encoder(
            self.schema, where=f"the input of handler {handler!r}", peer=self._peer, handler=handler
        )

    def _decoder(self, answer: UnaryAnswer) -> Decoder:
        cache = self._cache
        if cache.found is not None and answer.schema == cache.answered:
            return cache.found
        handler = self.head.handler
        schema, expected = answer.read_schema(), self.head.expected
        if expected is not None:
            check_expected(expected, schema, peer=self._peer, handler=handler)
        decoder = Decoder(
            expected or schema,
            dictionary_limit=self._config.calls.batch_limit,
            where=f"the answers of handler {handler!r}",
            peer=self._peer,
            handler=handler,
        )
        if len(answer.schema) <= _KEPT_BYTES and decoder.independent:
            cache.answered, cache.found = answer.schema, decoder
        return decoder


class PendingCall:
    """One call of one batch, on the event loop. It has no task: what comes moves it.

    ``begin`` sends it. ``over`` is called once, when there is something to ``read``.
    """

    __slots__ = (
        "_alone",
        "_answer",
        "_asked",
        "_began",
        "_caller",
        "_encoded",
        "_error",
        "_follow",
        "_headers",
        "_left",
        "_over",
        "_result",
        "_room",
        "_timer",
        "_watches",
    )

    def __init__(
        self,
        caller: UnaryCaller,
        encoded: Encoded,
        watches: ProgressTimer,
        over: Callable[[], object],
        headers: Headers = (),
    ) -> None:
        """``headers``: what it says of itself beside what all of ``caller`` say."""
        self._caller = caller
        self._encoded = encoded
        self._watches = watches
        self._headers = headers
        self._over: Callable[[], object] | None = over
        self._asked = PendingReply(self._look)
        self._began: float | None = None
        self._alone = False
        self._timer: asyncio.TimerHandle | None = None
        self._room: asyncio.Future[None] | None = None
        self._left = caller.head.deadline
        self._error: BaseException | None = None
        self._answer: Received | None = None
        self._follow: Message | None = None
        self._result: UnaryResult | None = None

    def begin(self) -> None:
        """Sends it: at once, unless others of ``watches`` are under way, then with them."""
        if self._over is None:
            return  # it was ended before
        watches, connection, deadline = self._watches, self._caller.connection, self._left
        self._began = watches.time()
        self._alone = not watches.asking
        watches.asking += 1
        watches.asking_bytes += self._encoded.size
        if deadline is None:
            watches.add(self)
        else:
            self._timer = watches.loop.call_later(deadline, self._expire, deadline)
        if connection.entrypoint.writable:
            self._send()
        else:
            connection.hold()
            self._room = asyncio.ensure_future(connection.entrypoint.wait_writable())
            self._room.add_done_callback(self._found_room)

    def end(self, error: BaseException | None = None) -> None:
        """Ends it before its end, unless it is over: the handler is told to stop."""
        over, self._over = self._over, None
        if over is None:
            return
        self._error = error
        if self._began is not None:
            watches = self._watches
            watches.asking -= 1
            watches.asking_bytes -= self._encoded.size
            if self._timer is None:
                watches.discard(self)
            else:
                self._timer.cancel()
                self._left = max(self._timer.when() - watches.loop.time(), 0.001)
            if self._room is not None:
                self._room.cancel()
        self._caller.connection.forget(self._asked, close=self._answer is None)
        over()

    def look(self, now: float, progress: float) -> None:
        """What ProgressTimer calls now and then: there is no progress but the answer."""
        if self._began is None:
            return
        if self._caller.connection.carrier.suspended:
            self._began = now  # nothing can move
        elif now - self._began >= progress:
            self._expire(progress)

    @property
    def slow(self) -> bool:
        """Whether ``read`` may take milliseconds, so that it is for a thread."""
        answer = self._answer
        if answer is None or len(answer.payload) < LONG_SCHEMA:
            return False
        return _schema_bytes(answer) >= LONG_SCHEMA

    def read(self) -> None:
        """Reads the answer for ``result``; in any thread, but by one alone."""
        answer, caller = self._answer, self._caller
        if answer is None or self._error is not None:
            return
        try:
            found = caller.read(answer)
            if found is None:
                follow = self._follow or caller.connection.message(answer)
                found = UnaryResult(follow=follow, deadline=self._left)
            self._result = found
        except Exception as error:  # noqa: BLE001  the reader of the result gets it
            self._error = error

    def result(self) -> UnaryResult:
        """What came back, once it was read. Raises how the call failed."""
        if self._result is None:
            assert self._error is not None
            raise self._error
        return self._result

    # Within

    def _found_room(self, room: asyncio.Future[None]) -> None:
        self._caller.connection.release()
        self._room = None
        if room.cancelled():
            self.end(asyncio.CancelledError())
        elif (error := room.exception()) is not None:
            self.end(error)
        elif self._over is not None:
            self._send()

    def _send(self) -> None:
        caller, template, began = self._caller, self._caller.template, self._began
        assert began is not None
        payload = [template.prefix, *self._encoded.buffers]
        headers = template.headers + self._headers if self._headers else template.headers
        try:
            caller.connection.ask(self._asked, payload, headers, began, now=self._alone)
        except Exception as error:  # noqa: BLE001  as in ``read``
            self._failed(error)

    def _look(self) -> None:
        connection = self._caller.connection
        try:
            answer = connection.answer(self._asked)
        except Exception as error:  # noqa: BLE001  as in ``read``
            self._failed(error)
            return
        if answer is not None:
            self._answer = answer
            if answer.attachments:
                self._follow = connection.message(answer)
            self.end()

    def _failed(self, error: Exception) -> None:
        self.end(self._caller.given_up(error) if isinstance(error, ChannelError) else error)

    def _expire(self, seconds: float) -> None:
        self.end(self._caller.expired(seconds))


def _schema_bytes(answer: Received) -> int:
    """Where the schema of an answer ends, as far as its headers say so."""
    for key, value in answer.headers:
        if key == ANSWERS:
            end = value.split(b",", 1)[0]
            return int(end) if end.isdigit() and len(end) < 18 else 0
    return 0


class UnaryCallers:
    """Makes a UnaryCaller for each call of one batch, or finds an earlier one. For one thread.

    Calls that name a piece of work of their own have one of their own.
    """

    def __init__(self, connection: Connection, peer: str, token: bytes | None) -> None:
        self._connection = connection
        self._peer = peer
        self._token = token
        self._caches: dict[str, AnswerCache] = {}
        self._kept: dict[tuple[str, Duration | None, str | bytes | None], UnaryCaller] = {}

    def find(
        self,
        handler: str,
        batch: pa.RecordBatch,
        options: UnaryOptions,
        observed: CallObservation | None = None,
    ) -> UnaryCaller:
        """The arguments are those of ``Client.call``. Raises LocalProtocolError and TypeError.

        ``observed``: its headers are of a call that says more of itself, beside the user's.
        """
        if not isinstance(batch, pa.RecordBatch):
            raise LocalProtocolError(
                f"the call of handler {handler!r} takes one pyarrow.RecordBatch, not "
                f"{type(batch).__name__}; exchange takes any number of them"
            )
        expected, deadline = options.get("output_schema"), options.get("deadline")
        key = (handler, deadline, options.get("token"))
        alike = options.keys() <= _ALIKE
        if alike and deadline is not True:  # which a dict takes for 1
            try:
                found = self._kept.get(key)
                if (
                    found is not None
                    and batch.schema.equals(found.schema, check_metadata=True)
                    and same_schema(found.head.expected, expected)
                ):
                    return found
            except TypeError:
                pass  # an argument is none of its kind, as is said now
        for name in options.keys() - UnaryOptions.__annotations__.keys():
            raise unexpected("call", name)
        read_arguments("call", handler=handler)
        given = CallOptions(**read_arguments("call", **options))
        if observed is not None and not alike:
            given = replace(given, headers=joined(observed, given.headers))
        head = given.head("exchange", handler, batch.schema, self._token)
        caller = self._make(head)
        if alike and caller.template.body <= _KEPT_BYTES:  # to compare wide schemas takes long
            if len(self._kept) >= _KINDS:
                self._kept.clear()
            self._kept[key] = caller
        return caller

    def _make(self, head: CallHead) -> UnaryCaller:
        cache = self._caches.get(head.handler)
        if cache is None or not same_schema(cache.expected, head.expected):
            if len(self._caches) >= _KINDS:
                self._caches.clear()
            cache = self._caches[head.handler] = AnswerCache(head.expected)
        return UnaryCaller(self._connection, head, peer=self._peer, cache=cache)


def trace_headers(caller: UnaryCaller, observed: CallObservation | None) -> Headers:
    """What one call says of its trace beside what all of ``caller`` say."""
    if observed is None or caller.head.metadata:
        return ()
    return tuple(own_headers(metadata=observed.headers))


def same_schema(one: pa.Schema | None, other: pa.Schema | None) -> bool:
    """Whether both are None, or equal with all their metadata."""
    if one is None or other is None:
        return one is other
    return one is other or one.equals(other, check_metadata=True)


def in_schema(
    batch: pa.RecordBatch, schema: pa.Schema | None, *, foreign: bool, handler: str
) -> pa.RecordBatch:
    """The batch of a call in the schema that the call was told, as an exchange sends it.

    ``foreign``: whether it is of another library, whose layout may differ. Raises SchemaMismatch,
    and WrongType for a schema that is none.
    """
    read_arguments("call", schema=schema)
    if schema is None or not isinstance(batch, pa.RecordBatch):
        return batch
    if foreign:
        batch = fitted(batch, schema)
    if batch.schema.equals(schema, check_metadata=True):
        return batch
    check(schema, batch.schema, where=f"the input of handler {handler!r}", handler=handler)
    return adopt(batch, schema)


def one_batch(schema: pa.Schema, batches: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
    """All of ``batches`` as one; without rows if there is none.

    Raises LocalProtocolError if Arrow cannot put them together.
    """
    if len(batches) == 1:
        return batches[0]
    if not batches:
        return pa.record_batch([pa.nulls(0, field.type) for field in schema], schema=schema)
    try:
        return joined_batches(batches)
    except pa.ArrowException as error:
        raise LocalProtocolError(
            f"the {len(batches)} batches of the answer cannot be put together ({error}); "
            "call_table gives them as they are"
        ) from error
