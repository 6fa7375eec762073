"""The batches of one exchange as requests of ReactiveSocket: a batch each, several under way."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import pyarrow as pa

from aqueduct.arrow.encode import Encoded, Encoder
from aqueduct.arrow.ipc import ALIGNMENT, first_line, serialize_schema
from aqueduct.arrow.joining import joined
from aqueduct.arrow.schema import check, check_expected
from aqueduct.client.call import END, FailedBatch, abandoned, expired
from aqueduct.client.loop_thread import LoopThread
from aqueduct.client.options import CallOptions
from aqueduct.client.thread_call import NEWS, Failed, News
from aqueduct.errors import (
    AqueductError,
    BadCall,
    BatchTooLarge,
    Busy,
    CallError,
    ConfigError,
    ConnectionLost,
    ReactiveError,
    Refused,
    UnknownHandler,
)
from aqueduct.protocol.reactivesocket.cost import HEADER_BYTES
from aqueduct.protocol.reactivesocket.reasons import CANCELED
from aqueduct.reactivesocket import ReactiveItem, ReactiveSocketConnection
from aqueduct.rpc.describe import Description, HandlerDescription
from aqueduct.rpc.reactive_calls import (
    ASK_BY_STREAM,
    ReactiveItems,
    decode_error,
    encode_request,
    is_call_given_up,
    split_rows,
)
from aqueduct.rpc.request import FAILURES, IDEMPOTENT, ONE_TO_ONE, CallHead

__all__ = ["ReactiveAnswer", "ReactiveExchange"]

_EVER: Final = 7 * 86400.0
"""Seconds for one request: the exchange watches all of them, and ends them earlier."""
"""Bytes of a frame that are no data of a request."""
_DEADLINE: Final = 16
"""Digits by which a deadline may be longer than another one."""
_LOOKS: Final = 4
"""How often progress is looked at in the time that may pass without any."""


class ReactiveAnswer:
    """What came for one batch: an item, or one for each part of a batch that was split."""

    __slots__ = ("items",)

    def __init__(self, items: Sequence[ReactiveItem]) -> None:
        self.items = items

    def __len__(self) -> int:
        """Bytes of the answer."""
        return sum(len(item.data) for item in self.items)


class ReactiveExchange:
    """The requests of one caller, between its thread and the event loop that carries them.

    To the thread it is what a ``ThreadCall`` is for an exchange whose news go into a queue of the
    thread: ``push`` a batch, take what comes from the queue by ``popped``, ``decode`` it. Each
    batch is a request of its own, so a handler that is no function of one batch refuses the first.
    """

    def __init__(
        self,
        thread: LoopThread,
        connection: ReactiveSocketConnection,
        head: CallHead,
        options: CallOptions,
        *,
        described: Callable[[], Awaitable[Description | None]],
        news: News,
        tag: object,
        peer: str,
    ) -> None:
        """``described`` asks the service for its description; None: it has none."""
        self.head = head
        self.schema: pa.Schema | None = head.expected
        """Of the answers, as far as it is known."""
        self.capabilities: frozenset[str] = frozenset()
        """What the handler is, once the exchange is accepted."""
        self.counters: Mapping[str, int] = {}
        """What the service counted: ReactiveSocket does not carry that."""
        self.accepted = False
        self.splits = True
        """Whether the rows of a batch above the limit of a frame go as several requests."""
        self._thread = thread
        self._connection = connection
        self._config = config = connection.config
        self._described = described
        self._news = news
        self._tag = tag
        self._peer = peer
        self._reports = options.report_failures
        assert head.schema is not None
        said = sum(map(len, encode_request(head))) + len(serialize_schema(head.schema))
        self._most = config.reactivesocket.frame_bytes - HEADER_BYTES
        self._room = self._most - said - 2 * ALIGNMENT - _DEADLINE
        """Bytes of a batch for which a request has room in any case."""
        # Of the thread.
        self._window = options.window(config)
        self._encoder: Encoder | None = None
        self._answer: ReactiveAnswer | None = None
        self._until = None if head.deadline is None else time.monotonic() + head.deadline
        # To the thread, beside the news: set before it is told.
        self._wants_acceptance = False
        # Of the loop.
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._accepting: asyncio.Task[None] | None = None
        self._finished = False
        self._over = False
        self._waiting = False
        self._moved = 0.0
        self._watch: asyncio.TimerHandle | None = None

    # In the thread

    @property
    def room(self) -> bool:
        """Whether a batch may be sent."""
        return self._window.open

    @property
    def sent_bytes(self) -> int:
        """Bytes of the batches that were sent."""
        return self._window.sent_bytes

    @property
    def settled(self) -> int:
        """Of how many batches the service needs no more."""
        return self._window.settled

    def hold(self, size: int) -> None:
        """The thread keeps so many bytes besides: they count against the window."""
        self._window.held = size

    def push(self, batch: pa.RecordBatch) -> int:
        """Sends a batch, whether or not there is ``room``; returns its number.

        Raises SchemaMismatch, LocalProtocolError and BatchTooLarge for what cannot be sent; then
        nothing was.
        """
        first, *others = self._parts(batch)
        request = self._request(first)
        number = self._window.send(first.size + sum(part.size for part in others))
        self._call(self._begin, number, request, others)
        return number

    def finish(self) -> None:
        """No more batches come."""
        self._call(self._finish)

    def expect(self, *, room: bool = False, acceptance: bool = False) -> bool:
        """Asks for NEWS of acceptance. True: there it is already, or room is.

        Of room there are no news of its own: it comes with the answers.
        """
        self._wants_acceptance = acceptance
        return (room and self.room) or (acceptance and self.accepted)

    def set_waiting(self, waiting: bool) -> None:
        """Whether the thread waits for the service: the deadline on progress runs then."""
        self._waiting = waiting
        if waiting:
            self._give_back()

    def popped(self, found: Any) -> Any:
        """Counts what comes out of the queue; returns it."""
        self._give_back()
        if type(found) is tuple:
            self._window.settle_one(found[0])
        return found

    def decode(self, answer: ReactiveAnswer) -> pa.RecordBatch:
        """The batch of an answer. Raises BadCall and SchemaMismatch."""
        self._answer = answer
        batches = [self._decode(item) for item in answer.items]
        if len(batches) == 1:
            return batches[0]
        try:
            return joined(batches)
        except pa.ArrowException as error:
            handler = self.head.handler
            text = (
                f"handler {handler!r} at {self._peer}: its {len(batches)} answers to the parts of "
                f"a batch cannot be put together: {first_line(error)}; send fewer rows at a time"
            )
            raise BadCall(text, peer=self._peer, handler=handler) from None

    def check(self) -> None:
        """Raises LocalProtocolError if the loop is gone, so that no answer would come."""
        self._thread.check()

    def abandon(self) -> None:
        """The thread wants no more: what is under way is cancelled."""
        self._call(self._fail, abandoned(self._peer, self.head.handler))

    def wake(self) -> None:
        """Lets the loop begin: it asks the service what the handler is."""
        self._call(self._begin_accepting)

    def _call(self, callback: Callable[..., object], *arguments: Any) -> None:
        try:
            self._thread.call(callback, *arguments)
        except RuntimeError:  # the loop has ended
            self._put(Failed(ConnectionLost(f"the connection to {self._peer} is closed")))

    def _give_back(self) -> None:
        answer, self._answer = self._answer, None
        if answer is not None:
            for item in answer.items:
                item.release()

    def _parts(self, batch: pa.RecordBatch) -> Iterator[Encoded]:
        """A batch, split by rows until each part fits a frame. Raises BatchTooLarge for a row."""
        encoded = self._encode(batch)
        if encoded.size <= self._room:
            yield encoded
        elif not self.splits:
            raise self._too_large(encoded.size, self._room)
        elif batch.num_rows <= 1:
            self._request(encoded)  # raises that it is too large, unless there was room to spare
            yield encoded
        else:
            for part in split_rows(batch, encoded.size, self._room):
                yield from self._parts(part)

    def _too_large(self, size: int, room: int) -> BatchTooLarge:
        handler = self.head.handler
        return BatchTooLarge(
            f"handler {handler!r} at {self._peer}: a group has {size} bytes, and a request of "
            f"ReactiveSocket takes {room}; parts of it would be other groups. Raise "
            "ReactiveSocket.frame_bytes on both sides, or call an aqueduct:// or aqueduct+tls:// "
            "address of the service, which carries it",
            peer=self._peer,
            handler=handler,
        )

    def _encode(self, batch: pa.RecordBatch) -> Encoded:
        encoder = self._encoder
        if encoder is None or not encoder.independent:  # each request has its own dictionaries
            handler, schema = self.head.handler, self.head.schema
            assert schema is not None
            where = f"the input of handler {handler!r}"
            encoder = Encoder(schema, where=where, peer=self._peer, handler=handler)
            self._encoder = encoder
        return encoder.encode(batch)

    def _request(self, encoded: Encoded) -> list[Any]:
        head = self.head
        if self._until is not None:
            head = replace(head, deadline=max(0.001, self._until - time.monotonic()))
        return list(encode_request(head, encoded, most=self._most))

    def _decode(self, item: ReactiveItem) -> pa.RecordBatch:
        peer, handler = self._peer, self.head.handler
        items = ReactiveItems(handler=handler, peer=peer, config=self._config)
        batch = items.read(item.data)
        if self.head.expected is not None:
            check_expected(self.head.expected, items.schema, peer=peer, handler=handler)
        return batch

    # On the loop

    def _put(self, found: Any) -> None:
        self._news.put((self._tag, found))

    def _begin_accepting(self) -> None:
        if not self._over:
            self._accepting = asyncio.get_running_loop().create_task(self._accept())

    async def _accept(self) -> None:
        """Asks what the handler is. A service without a description takes what it is sent.

        So does one that refuses its description: it may allow the handler all the same.
        """
        try:
            try:
                description = await self._described()
            except Refused as error:
                if error.draining:
                    raise
                description = None
            capabilities = {ONE_TO_ONE, FAILURES}
            if description is not None:
                handler = description.exchange(self.head.handler)
                self._compare(handler)
                if handler.idempotent:
                    capabilities.add(IDEMPOTENT)
            self.capabilities = frozenset(capabilities)
        except Exception as error:  # noqa: BLE001  it belongs to the thread
            self._fail(error)
            return
        self.accepted = True
        if self._wants_acceptance and not self._over:
            self._wants_acceptance = False
            self._put(NEWS)

    def _compare(self, handler: HandlerDescription) -> None:
        names = {"peer": self._peer, "handler": handler.name}
        if handler.input is not None:
            where = f"the input of handler {handler.name!r}"
            check(handler.input, self.head.schema, where=where, **names)
        if handler.output is not None:
            if self.head.expected is not None:
                check_expected(self.head.expected, handler.output, **names)
            self.schema = self.head.expected or handler.output

    def _begin(self, number: int, request: list[Any], others: Sequence[Encoded]) -> None:
        if self._over:
            return
        loop = asyncio.get_running_loop()
        if not self._tasks:
            self._moved = loop.time()
        self._tasks[number] = loop.create_task(self._ask(number, request, others))
        if self._watch is None and self.head.deadline is None:
            self._watch = loop.call_later(self._progress / _LOOKS, self._look)

    @property
    def _progress(self) -> float:
        return self._config.timing.progress_deadline

    async def _ask(self, number: int, request: list[Any], others: Sequence[Encoded]) -> None:
        """One batch, there and back. Its parts go one by one: it takes one place of the window."""
        ask, now = self._connection.request, asyncio.get_running_loop().time
        try:
            items = [await ask(request, timeout=_EVER)]
            for part in others:
                self._moved = now()
                items.append(await ask(self._request(part), timeout=_EVER))
        except ReactiveError as error:
            failed = self._failed(error, number)
            own = isinstance(failed, CallError) and not isinstance(failed, Busy | Refused)
            if not self._reports or not own:
                self._fail(failed)
                return
            answer: Any = FailedBatch(failed)
        except AqueductError as error:
            self._fail(error)
            return
        else:
            answer = ReactiveAnswer(items)
        if self._over:
            return
        del self._tasks[number]
        self._moved = now()
        self._put((number, answer))
        self._finish_if_done()

    def _failed(self, error: ReactiveError, number: int) -> AqueductError:
        """What an ERROR of the service is, in answer to this batch."""
        handler = self.head.handler
        if error.word == CANCELED and not is_call_given_up(error.text):
            text = f"handler {handler!r} at {self._peer}: {error.text or 'the service gives it up'}"
            return ConnectionLost(text)  # its side closes the connection
        code, _, text = error.text.partition(": ")
        if code == UnknownHandler.status and text.endswith(ASK_BY_STREAM):
            return ConfigError(
                f"{self._peer}: {text}, which a task does not; an aqueduct:// or aqueduct+tls:// "
                "address of the service carries it"
            )
        return decode_error(error.text, peer=self._peer, handler=handler, batch=number)

    def _finish(self) -> None:
        self._finished = True
        self._finish_if_done()

    def _finish_if_done(self) -> None:
        if self._finished and not self._tasks and not self._over:
            self._stop()
            self._put(END)

    def _fail(self, error: BaseException) -> None:
        if not self._over:
            self._stop()
            self._put(Failed(error))

    def _stop(self) -> None:
        self._over = True
        if self._watch is not None:
            self._watch.cancel()
        for task in (self._accepting, *self._tasks.values()):
            if task is not None and task is not asyncio.current_task():
                task.cancel()
        self._tasks.clear()

    def _look(self) -> None:
        """Ends the exchange if the service has answered nothing for too long."""
        loop = asyncio.get_running_loop()
        self._watch = None
        if self._over or not self._tasks:
            return
        if not self._waiting:
            self._moved = loop.time()  # it is the thread that takes its time
        elif loop.time() - self._moved >= self._progress:
            self._fail(expired(self._peer, self.head, self._progress, "no answer came"))
            return
        self._watch = loop.call_later(self._progress / _LOOKS, self._look)
