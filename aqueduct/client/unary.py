"""A call of one batch as the client makes it: one message out, one message back.

``Client.call`` puts a face on it. What fits no message travels as an exchange, either way.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import pyarrow as pa

from aqueduct.arguments import Duration, read_arguments
from aqueduct.arrow.decode import Decoder
from aqueduct.arrow.encode import Encoded, Encoder
from aqueduct.arrow.ipc import LONG_SCHEMA
from aqueduct.arrow.schema import check_expected
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
from aqueduct.rpc.request import CallHead, Partition
from aqueduct.rpc.status import Status
from aqueduct.rpc.threads import apart
from aqueduct.rpc.unary import UnaryAnswer, UnaryTemplate, decode_answer, room_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aqueduct.protocol.channels.receiver import Received
    from aqueduct.rpc.keys import Headers

__all__ = [
    "AnswerCache",
    "UnaryCaller",
    "UnaryCallers",
    "UnaryResult",
    "one_batch",
    "same_schema",
    "token_bytes",
]

_KEPT_BYTES: Final = 64 << 10
_KEPT_HEADERS: Final = 256
_KINDS: Final = 64
"""Kinds of calls of one batch that are kept ready."""


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
    """Makes calls that are alike but for their batch. For one event loop.

    Several may share what they have ``heard``, if they expect the same of the same handler.
    """

    def __init__(
        self, connection: Connection, head: CallHead, *, peer: str, heard: AnswerCache | None = None
    ) -> None:
        """Raises LocalProtocolError for what cannot be sent."""
        assert head.schema is not None
        self.head = head
        self.schema: pa.Schema = head.schema
        self.question = UnaryTemplate(head)
        self._connection = connection
        self._config = connection.config
        self._room = room_of(connection.config.calls)
        self._peer = peer
        self._encoder: Encoder | None = None
        self._heard = AnswerCache(head.expected) if heard is None else heard

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
            raise self._expired(self.head.deadline) from None

    def fits(self, encoded: Encoded) -> bool:
        """Whether call and batch go in one message."""
        return self.question.body + encoded.size <= self._room

    async def ask(
        self,
        encoded: Encoded,
        watches: ProgressTimer,
        *,
        headers: Headers = (),
    ) -> UnaryResult:
        """One call. It leaves at once, unless others of ``watches`` are under way: then with them.

        ``headers``: what it says of itself beside what all say. Raises how the call failed.
        """
        connection, question, deadline = self._connection, self.question, self.head.deadline
        loop = watches.loop
        began = watches.time()
        waiting = _PendingUnary(loop, self, began)
        timer = None
        if deadline is None:
            watches.add(waiting)
        else:
            timer = loop.call_later(deadline, waiting.expire, deadline)
        answer = None
        alone = not watches.asking
        watches.asking += 1
        try:
            if not connection.entrypoint.writable:
                await _room(connection, waiting)
            payload = [question.prefix, *encoded.buffers]
            said = question.headers + headers if headers else question.headers
            connection.ask(waiting, payload, said, began, now=alone)
            while answer is None:
                await waiting
                answer = connection.answer(waiting)
        except ChannelError as error:
            raise self._given_up(error) from error
        finally:
            watches.asking -= 1
            if timer is None:
                watches.discard(waiting)
            else:
                timer.cancel()
            connection.forget(waiting, close=answer is None)
        if answer.attachments and deadline is not None:
            deadline = max(deadline - (watches.time() - began), 0.001)
        if len(answer.payload) >= LONG_SCHEMA and _schema_bytes(answer) >= LONG_SCHEMA:
            answered = await apart(self._read, answer)
        else:
            answered = self._read(answer)
        if answered is None:
            return UnaryResult(follow=connection.message(answer), deadline=deadline)
        return answered

    def following(self, answered: UnaryResult) -> CallHead:
        """The call whose answers follow."""
        return replace(self.head, deadline=answered.deadline)

    # Within

    def _make_encoder(self) -> Encoder:
        handler = self.head.handler
        return Encoder(
            self.schema, where=f"the input of handler {handler!r}", peer=self._peer, handler=handler
        )

    def _read(self, message: Received) -> UnaryResult | None:
        """What came back; None: the answers follow on the channels of the message."""
        heard = self._heard
        try:
            payload, found, known = message.payload, heard.found, heard.answered
            said = message.raw, len(payload)
            if found is not None and known is not None and said == heard.usual:
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
                if short and len(batches) == 1 and decoder is heard.found:
                    heard.usual = said
                else:
                    heard.usual = None
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

    def _decoder(self, answer: UnaryAnswer) -> Decoder:
        heard = self._heard
        if heard.found is not None and answer.schema == heard.answered:
            return heard.found
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
            heard.answered, heard.found = answer.schema, decoder
        return decoder

    def _given_up(self, error: ChannelError) -> AqueductError:
        return BadCall(
            f"{self._peer} gave up the call of handler {self.head.handler!r} without a status "
            f"({error}); is it an Aqueduct service for Arrow calls?",
            peer=self._peer,
            handler=self.head.handler,
        )

    def _expired(self, seconds: float) -> DeadlineExceeded:
        handler = self.head.handler
        if self.head.deadline is not None:
            text = f"handler {handler!r} at {self._peer} did not end within {seconds:g} s"
        else:
            text = (
                f"handler {handler!r} at {self._peer}: no answer came for {seconds:g} s "
                "(Timing.progress_deadline); give the call a deadline if it may take longer"
            )
        return DeadlineExceeded(text, peer=self._peer, handler=handler)


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

    def __init__(self, make: Callable[[CallHead], UnaryCaller], token: bytes | None) -> None:
        self._make = make
        self._token = token
        self._kept: dict[tuple[str, Duration | None, str | bytes | None], UnaryCaller] = {}

    def find(
        self,
        handler: str,
        batch: pa.RecordBatch,
        output_schema: pa.Schema | None,
        deadline: Duration | None,
        headers: Mapping[str, str] | None,
        run: str,
        attempt: str,
        token: str | bytes | None,
        partition: Partition | None,
    ) -> UnaryCaller:
        """The arguments are those of ``Client.call``. Raises LocalProtocolError."""
        if not isinstance(batch, pa.RecordBatch):
            raise LocalProtocolError(
                f"the call of handler {handler!r} takes one pyarrow.RecordBatch, not "
                f"{type(batch).__name__}; exchange takes any number of them"
            )
        key = (handler, deadline, token)
        alike = headers is None and partition is None and not run and not attempt
        if alike and deadline is not True:  # which a dict takes for 1
            try:
                found = self._kept.get(key)
                if (
                    found is not None
                    and batch.schema.equals(found.schema, check_metadata=True)
                    and same_schema(found.head.expected, output_schema)
                ):
                    return found
            except TypeError:
                pass  # an argument is none of its kind, as is said now
        given = read_arguments(
            "call",
            handler=handler,
            output_schema=output_schema,
            deadline=deadline,
            headers=headers,
            run=run,
            attempt=attempt,
            token=token,
            partition=partition,
        )
        head = CallHead(
            handler=handler,
            kind="exchange",
            schema=batch.schema,
            expected=output_schema,
            deadline=given["deadline"],
            run=run,
            attempt=attempt,
            token=self._token if token is None else token_bytes(token),
            partition=partition,
            metadata=headers or {},
        )
        asker = self._make(head)
        if alike and asker.question.body <= _KEPT_BYTES:  # to compare wide schemas takes long
            if len(self._kept) >= _KINDS:
                self._kept.clear()
            self._kept[key] = asker
        return asker


def token_bytes(token: str | bytes | None) -> bytes | None:
    """A token as it is sent."""
    return token.encode("utf-8", "surrogateescape") if isinstance(token, str) else token


def same_schema(one: pa.Schema | None, other: pa.Schema | None) -> bool:
    """Whether both are None, or equal with all their metadata."""
    if one is None or other is None:
        return one is other
    return one is other or one.equals(other, check_metadata=True)


def one_batch(schema: pa.Schema, batches: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
    """All of ``batches`` as one; without rows if there is none.

    Raises LocalProtocolError if Arrow cannot put them together.
    """
    if len(batches) == 1:
        return batches[0]
    if not batches:
        return pa.record_batch([pa.nulls(0, field.type) for field in schema], schema=schema)
    try:
        return pa.concat_batches(batches)
    except pa.ArrowException as error:
        raise LocalProtocolError(
            f"the {len(batches)} batches of the answer cannot be put together ({error}); "
            "call_table gives them as they are"
        ) from error


class _PendingUnary(PendingReply):
    """An answer that is waited for, but not for ever."""

    __slots__ = ("_asker", "_began")

    def __init__(self, loop: asyncio.AbstractEventLoop, asker: UnaryCaller, began: float) -> None:
        super().__init__(loop)
        self._asker = asker
        self._began = began

    def look(self, now: float, progress: float) -> None:
        """What ProgressTimer calls now and then: there is no progress but the answer."""
        if now - self._began >= progress:
            self.expire(progress)

    def expire(self, seconds: float) -> None:
        """It took too long."""
        if self.failure is None:
            self.fail(self._asker._expired(seconds))


async def _room(connection: Connection, waiting: _PendingUnary) -> None:
    """Returns once there is room for the question."""
    connection.hold()
    room = asyncio.ensure_future(connection.entrypoint.wait_writable())
    room.add_done_callback(lambda _: waiting.wake())
    try:
        while not room.done():
            await waiting
    finally:
        connection.release()
        room.cancel()
