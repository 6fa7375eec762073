"""One call as the client makes it, without a face: on the event loop, and without waiting.

``Stream`` (asyncio) and ``SyncStream`` (threads) put a face on it. Everything is sent at once, the
call and its first batches in the same flight; answers are read to their end before the status is
believed.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Final
from weakref import ref

import pyarrow as pa

from aqueduct._speedups.calls.batch_receiver import AnswerReceiver
from aqueduct._speedups.calls.batch_sender import BatchSender, InFlightWindow
from aqueduct._speedups.loop.waiter import Waiter
from aqueduct.arrow.capsules import as_batch, fitted, has_batch, has_stream
from aqueduct.arrow.compression import compress
from aqueduct.arrow.decode import Decoder
from aqueduct.arrow.encode import Encoded, Encoder
from aqueduct.arrow.ipc import LONG_SCHEMA
from aqueduct.arrow.schema import check_expected
from aqueduct.client.stream_input import StreamReader
from aqueduct.config import Config
from aqueduct.endpoint import Connection, Message, Receiver, Sender
from aqueduct.endpoint.pulling import LARGE, PULLING, UNKNOWN, Pull
from aqueduct.errors import (
    AqueductError,
    BadCall,
    BatchTooLarge,
    Cancelled,
    ChannelError,
    ConnectionLost,
    DeadlineExceeded,
    Finished,
    LocalProtocolError,
)
from aqueduct.rpc.deadline import Deadline, ProgressTimer
from aqueduct.rpc.fragments import Assembler, fragments
from aqueduct.rpc.keys import ALIVE, BATCH, FRAGMENT, STATUS, number_of, one_each
from aqueduct.rpc.request import AS_COMPLETED, FAILURES, Accepted, CallHead
from aqueduct.rpc.status import Status
from aqueduct.rpc.threads import Job

__all__ = [
    "END",
    "Batches",
    "ClientCall",
    "FailedBatch",
    "abandoned",
    "begin_pull",
    "expired",
    "given_up",
]

_BATCH_ALONE: Final = frozenset({BATCH})
_SMALL: Final = 16 << 10  # bytes of a batch whose answer is looked for
END: Final = object()
"""What ``ClientCall.take`` gives when the call has ended well."""


class FailedBatch:
    """What ``ClientCall.take`` gives for a batch on which the handler failed. The call goes on.

    ``error`` is a CallError, or Cancelled, whose text names the batch.
    """

    __slots__ = ("error",)

    def __init__(self, error: AqueductError) -> None:
        self.error = error

    def __len__(self) -> int:
        return 0  # bytes of a payload


class ClientCall:
    """One call on the client's event loop. Made sent; ends by ``take`` or ``fail``."""

    def __init__(
        self,
        connection: Connection,
        head: CallHead,
        *,
        peer: str,
        window: InFlightWindow | None,
        on_change: Callable[[], None],
        calls: set[ClientCall],
        watches: ProgressTimer,
        compression: str,
        agree: Callable[[str], None],
        answered: Message | None = None,
    ) -> None:
        """``on_change`` is called whenever ``take`` or ``writable`` may have something new.

        ``calls`` holds the call as long as it is not over; ``agree`` is told the compression that
        the service agrees to, and ``compression`` is the one that it is known to. ``answered`` is
        the accept message of a call of one batch whose answers did not fit one message: they
        follow on its channels.
        """
        calls_config = connection.config.calls
        most = min(calls_config.fragment_bytes, calls_config.batch_limit)
        self.sender = BatchSender(self, window, BATCH, most, connection.pump.flush_soon, LARGE)
        self.window = window
        self._moved = 0
        self.loop = asyncio.get_running_loop()
        self.connection = connection
        self.config: Config = connection.config
        self._fragment = self.config.calls.fragment_bytes
        self.head = head
        self.peer = peer
        self.schema: pa.Schema | None = None
        """Of the answers, once the accept message has come."""
        self.accepted = False
        """Whether the accept message has come."""
        self.capabilities: frozenset[str] = frozenset()
        """Those of the handler, and which of those asked for are granted."""
        self.error: BaseException | None = None
        """Why the call failed, once it has."""
        self.counters: Mapping[str, int] = {}
        """What the service counted, once the call has ended."""
        self._agree = agree
        self.sender.compression = compression
        self._waiting = False
        self.supplying = False
        """Whether the service may be waiting for the application's next batch."""
        self.pull: Pull | None = None
        """Room for its batches, once one of them was large or may be."""
        self._sizes: dict[str, int] = {}
        self._on_change = on_change
        self._calls = calls
        self._output_over = False
        self._loose = False  # the answers come in any order
        self.opening: Job[Accepted] | None = None
        """The job that reads an accept message with a very wide schema, while it runs."""
        self.decoding: asyncio.Task[pa.RecordBatch] | None = None
        """What decodes an answer that takes long, or waits for room, while it runs."""
        self.answers = AnswerReceiver(window)
        self.answers.on_change = on_change
        """Those that are read without further ado; the others come by ``take``. Its ``number`` is
        that of the last, of both kinds."""
        self._assembler = Assembler(
            self.config.calls.batch_limit,
            where=f"the answers of handler {head.handler!r}",
            peer=peer,
            handler=head.handler,
        )
        self._input: Sender | None = None
        if answered is None:
            self._send_call()
        else:
            self._follow(answered)
        connection.hold()
        self._output.on_change = self.answers.heard
        self._status.on_change = on_change
        if self._input is not None:
            self._input.on_change = on_change
            self.sender.row = self._input.row
        self._watch = Deadline(
            watches, deadline=head.deadline, moved=self._progress, expired=self._expired
        )
        calls.add(self)

    def _send_call(self) -> None:
        connection = self.connection
        headers, payload = self.head.encode()
        feeds = self.head.kind != "source"
        self._input, self._output, self._status = connection.call(payload, headers, feeds=feeds)
        self._read_answers()

    def _read_answers(self) -> None:
        """Prepares the channel of answers: these are charged until the application is done."""
        output, assembler = self._output, self._assembler
        output.placement, output.placement_key = assembler.place, FRAGMENT
        output.announce = assembler.announce
        queue = output.queue
        assert queue is not None
        queue.keeps = queue.told = True
        self._queue = queue

    def _follow(self, answered: Message) -> None:
        count = len(answered.attachments)
        handles = [attachment.handle for attachment in answered.attachments]
        receivers = [handle for handle in handles if isinstance(handle, Receiver)]
        if count != 2 or len(receivers) != 2:
            raise BadCall(
                f"{self.peer} answered handler {self.head.handler!r} with {count} channels where "
                "two receivers belong",
                peer=self.peer,
                handler=self.head.handler,
            )
        self._output, self._status = receivers
        self._read_answers()
        self._read_accepted(answered.headers, answered.payload)

    @property
    def over(self) -> bool:
        """Whether the call has ended, well or not."""
        return self.sender.over

    # Sending

    def wait_for_room(self, sizes: dict[str, int]) -> None:
        """From now on a batch that may be large is pulled when the process has room for it.

        ``sizes``: see ``Client.sizes``.
        """
        self._sizes = sizes
        self.sender.expects = sizes.get(self.head.handler, UNKNOWN)

    @property
    def writable(self) -> bool:
        """Whether the channel of the batches has room, and the process for one that may be large.

        Otherwise asks for ``on_change``.
        """
        channel = self._input
        if channel is None or channel.writable:
            expects = self.sender.expects
            if not expects or self.over or channel is None or channel.error is not None:
                return True
            return (self.pull or self._begin_pull()).ask()
        channel.notify_writable(ample=True)
        return False

    def fed(self, size: int) -> None:
        """A batch of ``size`` bytes that is large, or might have been, is queued."""
        if self.over:
            return
        pull = self.pull or self._begin_pull()
        pull.fed(size)
        self.sender.expects = pull.size

    def _begin_pull(self) -> Pull:
        pull = self.pull = begin_pull(
            self.connection,
            self.loop,
            self._sizes,
            self.head.handler,
            peer=self.peer,
            queued=self.queued,
            wake=self._found_room,
        )
        if self.waiting:
            pull.want(None)
        return pull

    def _found_room(self) -> None:
        self._on_change()

    def queued(self) -> int:
        """Bytes of batches that have not left; may be called from another thread."""
        return 0 if self._input is None else self._input.queued

    def send(self, encoded: Encoded, number: int) -> None:
        """Sends batch ``number``, whether or not there is room; ``feed`` does most without it.

        Without effect when the service reads no more: its status says why.
        """
        channel = self._input
        if self.over or channel is None or channel.error is not None:
            return
        self.sender.moved += 1
        try:
            if encoded.size <= self._fragment:
                channel.post(encoded.buffers, ((BATCH, b"%d" % number),))
                return
            for headers, payload in fragments(encoded, number, self._fragment):
                channel.post(payload, headers)
            if (row := channel.row) is not None:
                row.end_batch()
        except (ChannelError, ConnectionLost):
            pass  # reading says more

    @property
    def lacks_room(self) -> bool:
        """Whether the process has no room for the next batch."""
        return self.pull is not None and self.pull.waits

    @property
    def waiting(self) -> bool:
        """Whether the application waits for an answer."""
        return self._waiting

    def set_waiting(self, waiting: bool, reader: object = None) -> None:
        """Whether it does, in the thread or task ``reader``; may be called from another thread."""
        self._waiting = waiting
        self._queue.want(waiting, reader)
        if self.window is not None:
            self.window.want(waiting)
        if self.pull is not None and not waiting:
            self.pull.unwant()

    def expect_answer(self) -> None:
        """The reader may wait for the answer to one small batch, which often comes at once."""
        if self.waiting and self.window is not None and self.window.is_one_below(_SMALL):
            self.connection.await_answer()

    def wait_answer(self) -> Waiter | None:
        """What to await, at once, when ``take`` would give nothing; None: look again.

        ``waiting`` is True until whoever awaits it says otherwise by ``set_waiting``.
        """
        receiver = self._status if self._output_over else self._output
        if self.window is not None and self.window.is_one_below(_SMALL):
            self.connection.await_answer()
            if receiver.readable:  # what that has sent may have brought something about
                return None
        task = asyncio.current_task()
        self.set_waiting(True, id(task))
        if (outer := PULLING.get()) is not None:
            outer.rest()  # it is idle until this answer comes
        if self.pull is not None:
            self.pull.want(None if task is None else ref(task))
        return receiver.wait_change()

    def finish(self) -> None:
        """No more batches will be sent."""
        channel = self._input
        if not self.over and channel is not None and channel.error is None:
            channel.finish()
        self.sender.expects = 0
        if self.pull is not None:
            self.pull.withdraw()

    # Receiving

    def take(self) -> Any:
        """The payload of the next answer, a FailedBatch, None if there is none now, or END.

        ``answers.number`` is that of its batch. Raises how the call failed, now and ever after.
        """
        if self.error is not None:
            raise self.error
        if self.over:
            return END
        try:
            return self._take()
        except AqueductError as error:
            self.fail(error)
            raise

    def _take(self) -> Any:
        payload = self.answers.take_whole()  # and its ``lease`` what it is charged
        if payload is not None:
            return payload
        while not self._output_over:
            if self.opening is not None:
                return None
            try:
                message = self._output.receive_nowait()
            except Finished as end:
                end.__traceback__ = None  # its frames would keep the last batch until a collection
                self._output_over = True
                break
            except ChannelError as error:
                raise self._given_up(error) from error
            if message is None:
                return None
            self._moved += 1
            if not self.accepted:
                self._read_accepted(message.headers, message.payload)
                self._queue.settle()
                payload = self.answers.take_whole()
                if payload is not None:
                    return payload
                continue
            if not len(message.payload) and any(key == ALIVE for key, _ in message.headers):
                self._queue.settle()
                continue  # the call waits for its turn, and nothing more is said
            if FAILURES in self.capabilities and (failure := self._failure(message)) is not None:
                self._queue.settle()
                return failure
            found = self._assembler.add(message.headers, message.payload)
            self.answers.partial = found is None
            if self.window is not None:
                self.window.answering = found is None
            if found is None:
                # The answer is on its way, so its batch is worked on no more: the next large one
                # can go while this one comes.
                if not self._loose:
                    self._settle(_number(message.headers))
                continue
            number, payload = found
            if not len(payload):
                self._queue.settle()
                if not self._loose:
                    self._settle(number, answered=False)
                continue  # a mark: these inputs are taken
            self._answered(number)
            if self.head.kind == "sink":
                raise BadCall(
                    f"the sink {self.head.handler!r} at {self.peer} answered with a batch",
                    peer=self.peer,
                    handler=self.head.handler,
                )
            self.answers.lease = self._queue.lease(payload)
            return payload
        try:
            message = self._status.receive_nowait()
        except ChannelError as error:
            raise self._given_up(error) from error
        if message is None:
            return None
        status = self._decode_status(message)
        failed = status.to_exception(peer=self.peer, handler=self.head.handler)
        if failed is not None:
            raise failed
        if self.answers.partial or not self.accepted:
            missing = "in the middle of a batch" if self.accepted else "without an accept message"
            raise BadCall(
                f"handler {self.head.handler!r} at {self.peer} ended well {missing}",
                peer=self.peer,
                handler=self.head.handler,
            )
        self.counters = status.counters
        self._close()
        return END

    @property
    def output_schema(self) -> pa.Schema | None:
        """Of the batches that answers become; None before the call is accepted."""
        expected = self.head.expected if self.accepted else None
        return self.schema if expected is None else expected

    def decoder(self) -> Decoder:
        """What makes batches of the answers' payloads."""
        schema, compression = self.output_schema, self.sender.compression
        assert schema is not None
        return Decoder(
            schema,
            dictionary_limit=self.config.calls.batch_limit,
            compressions=(compression,) if compression else (),
            where=f"the answers of handler {self.head.handler!r}",
            peer=self.peer,
            handler=self.head.handler,
        )

    @property
    def readable(self) -> Receiver:
        """Whose ``wait_readable`` to await before the next ``take``."""
        return self._status if self._output_over else self._output

    # The end

    def fail(self, error: BaseException | None) -> None:
        """Ends the call before its end; the service is told, and ``take`` raises ``error``."""
        if self.over:
            return
        self.error = error
        self._close()

    def _close(self) -> None:
        if self.head.observed is not None:
            self.head.observed.ended(self.error)
        self.sender.close()
        self._calls.discard(self)
        self._watch.cancel()
        self.connection.release()
        if self.pull is not None:
            self.pull.end()
        if self.window is not None:
            self.window.end()
        for handle in (self._input, self._output, self._status):
            if handle is not None:
                handle.on_change = None
        self._output.placement = self._output.announce = None
        if self._input is not None:
            self._input.cancel()
        if self.opening is not None:
            self.opening.forget()
        if self.decoding is not None:
            self.decoding.cancel()
        if self.error is not None:  # else both were read to their ends
            self._output.close()
            self._status.close()
        if self.error is not None or not self._queue.held:
            self._queue.let_go()  # else with the last of what was taken ahead
        on_change, self._on_change = self._on_change, _nothing  # which may hold on to the call
        self.answers.on_change = None
        on_change()

    # Within

    def _answered(self, number: int) -> None:
        """An answer, or a failure, to batch ``number``. Raises BadCall if it cannot be."""
        window = self.window
        if self._loose:
            assert window is not None
            if not window.settle_one(number):
                raise self._bad(f"batch {number} was answered, which was not sent, or is already")
        else:
            if number < self.answers.number:
                last = self.answers.number
                raise self._bad(f"an answer to batch {number} came behind one to batch {last}")
            # A handler that was given no batch answers with the number 0.
            if window is not None and number >= max(window.sent, 1):
                raise self._bad(f"batch {number} was answered and {window.sent} were sent")
            self._settle(number)
        self.answers.number = number

    def _failure(self, message: Message) -> FailedBatch | None:
        """What a message tells of a failed batch, if that is what it is."""
        headers = message.headers
        if not any(key == STATUS for key, _ in headers):
            return None
        number = number_of(one_each(headers, _BATCH_ALONE).get(BATCH, b""), BATCH)
        status = replace(self._decode_status(message), batch=number)
        error = status.to_exception(peer=self.peer, handler=self.head.handler)
        if error is None or self.answers.partial:
            raise self._bad(f"batch {number} failed with the status {status.code!r} out of turn")
        self._answered(number)
        return FailedBatch(error)

    def _bad(self, text: str) -> BadCall:
        handler = self.head.handler
        text = f"the answers of handler {handler!r} at {self.peer}: {text}"
        return BadCall(text, peer=self.peer, handler=handler)

    def _settle(self, number: int, *, answered: bool = True) -> None:
        if self.window is not None:
            self.window.settle(number, answered)

    def _read_accepted(self, headers: Any, payload: Any) -> None:
        if len(payload) < LONG_SCHEMA:
            self._accept(self._decode_accepted(headers, payload))
        else:
            self.opening = Job(partial(self._decode_accepted, headers, payload), self._opened)

    def _opened(self) -> None:
        """The wide schema is read."""
        job, self.opening = self.opening, None
        if self.over or job is None:
            return
        try:
            self._accept(job.result())
        except Exception as error:  # noqa: BLE001  the reader is to see it
            self.fail(error)
        else:
            self._on_change()

    def _decode_accepted(self, headers: Any, payload: Any) -> Accepted:
        names = {"peer": self.peer, "handler": self.head.handler}
        accepted = Accepted.decode(headers, payload, kind=self.head.kind, **names)
        if accepted.schema is not None and self.head.expected is not None:
            check_expected(self.head.expected, accepted.schema, **names)
        if accepted.compression and accepted.compression not in self.head.compressions:
            raise BadCall(
                f"handler {self.head.handler!r} at {self.peer} answered with the compression "
                f"{accepted.compression!r}, which was not asked for",
                **names,
            )
        return accepted

    def _accept(self, accepted: Accepted) -> None:
        self.sender.compression = accepted.compression
        if accepted.compression:
            self._agree(accepted.compression)
        self.schema = accepted.schema
        # What was not asked for is not granted.
        self.capabilities = accepted.capabilities - (
            {AS_COMPLETED, FAILURES} - self.head.capabilities
        )
        self._loose = AS_COMPLETED in self.capabilities and self.window is not None
        self.accepted = True
        # A sink answers with marks alone.
        limit = 0 if self.head.kind == "sink" else self.config.calls.batch_limit
        if not self._loose:
            self.answers.arrive_by(self._output.queue, self.connection.room_came, BATCH, limit)

    def _decode_status(self, message: Any) -> Status:
        return Status.decode(
            message.headers, message.payload, peer=self.peer, handler=self.head.handler
        )

    def _given_up(self, error: ChannelError) -> AqueductError:
        """The service ended a channel without finishing it. A status, if there is one, says why."""
        try:
            message = self._status.receive_nowait()
        except (ChannelError, ConnectionLost):
            message = None
        if message is not None:
            failed = self._decode_status(message).to_exception(
                peer=self.peer, handler=self.head.handler
            )
            if failed is not None:
                return failed
        return given_up(self.peer, self.head.handler, error)

    def _progress(self) -> object:
        if (
            self.supplying
            or not self.waiting
            or self.lacks_room
            or self.connection.carrier.suspended
        ):
            # An application that does not wait has all the time it wants, room has its own, and
            # so has the resumption of a connection.
            return object()
        queued = 0 if self._input is None else self._input.queued
        # The service takes batches of other calls in turn: this call gets its turn too.
        others = self.connection.core.outgoing.queued if queued else 0
        return self.sender.moved, self._moved, self.answers.moved, queued, others

    def _expired(self, seconds: float) -> None:
        self.fail(expired(self.peer, self.head, seconds, "nothing moved"))


def _number(headers: tuple[tuple[bytes, bytes], ...]) -> int:
    """The batch's number in headers that the assembler has taken."""
    return next(int(value) for key, value in headers if key == BATCH)


def _nothing() -> None:
    pass


def begin_pull(
    connection: Connection,
    loop: asyncio.AbstractEventLoop,
    sizes: dict[str, int],
    handler: str,
    *,
    peer: str,
    queued: Callable[[], int],
    wake: Callable[[], object],
) -> Pull:
    """Room for batches that may be large; see Pull. ``wake`` is called on ``loop``."""
    return Pull(
        connection.sending.pulls,
        sizes,
        handler,
        peer=peer,
        budget=connection.core.outgoing.process_budget,
        timing=connection.config.timing,
        queued=queued,
        wake=partial(_call_soon, loop, wake),
        later=partial(_call_later, loop),
    )


def _call_soon(loop: asyncio.AbstractEventLoop, callback: Callable[[], object]) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed
        loop.call_soon_threadsafe(callback)


def _call_later(
    loop: asyncio.AbstractEventLoop, seconds: float, callback: Callable[[], object]
) -> None:
    """``loop.call_later``, for any thread."""
    _call_soon(loop, partial(loop.call_later, seconds, callback))


class Batches:
    """The input of a call in whatever form, with its schema: found out before anything is sent."""

    __slots__ = ("_where", "batches", "compression", "encoder", "limit", "schema")

    def __init__(
        self,
        batches: Any,
        schema: pa.Schema | None,
        *,
        handler: str,
        peer: str,
        limit: int,
    ) -> None:
        """Raises LocalProtocolError if the schema is neither given nor to be had."""
        where = f"the input of handler {handler!r}"
        if schema is None and isinstance(getattr(batches, "schema", None), pa.Schema):
            schema = batches.schema  # a RecordBatch, a Table, a RecordBatchReader
        if isinstance(batches, pa.RecordBatch):
            batches = (batches,)
        elif isinstance(batches, pa.Table):
            batches = batches.to_batches()
        elif hasattr(batches, "__aiter__"):
            pass
        elif has_stream(batches):
            batches = StreamReader(batches, where=where, schema=schema)
            if schema is None:
                schema = batches.open()
        elif has_batch(batches):
            batches = (batches,)  # as one of a list
        if schema is None and isinstance(batches, (list, tuple)) and batches:
            # What is made of another library's table here, is made again when its turn has come.
            schema = as_batch(batches[0], where=where).schema
        if not isinstance(schema, pa.Schema):
            raise LocalProtocolError(
                f"the call of handler {handler!r} needs schema=, the pyarrow.Schema of its batches"
            )
        self.batches = batches
        self._where = where
        self.compression = ""
        """What to compress the next payload by, "" for nothing; may change between two."""
        self.schema = schema
        self.limit = limit
        self.encoder = Encoder(schema, where=where, peer=peer, handler=handler)

    def close(self) -> None:
        """Nothing is read any more: what was opened here is released."""
        batches, self.batches = self.batches, ()
        if isinstance(batches, StreamReader):
            batches.close()

    def read(self, batch: Any) -> pa.RecordBatch:
        """One batch as it is, or another library's table as one batch. Raises WrongType."""
        if isinstance(batch, pa.RecordBatch):
            return batch
        return fitted(as_batch(batch, where=self._where), self.schema)

    def encode(self, batch: Any) -> Encoded:
        """The payload of one batch, or of another library's table, all of it as one batch.

        Raises WrongType, SchemaMismatch, LocalProtocolError and BatchTooLarge.
        """
        if not isinstance(batch, pa.RecordBatch) and has_batch(batch):
            batch = self.read(batch)
        encoded = self.encoder.encode(batch)
        if encoded.size > self.limit:
            raise BatchTooLarge(
                f"{self._where}: a batch of {encoded.size} bytes is above the limit of "
                f"{self.limit} (Calls.batch_limit); send fewer rows at a time"
            )
        if self.compression:
            return compress(encoded, self.compression)
        return encoded


def given_up(peer: str, handler: str, error: ChannelError) -> BadCall:
    """What a call raises whose service ended a channel without a status."""
    return BadCall(
        f"{peer} gave up the call of handler {handler!r} without a status ({error}); is it an "
        "Aqueduct service for Arrow calls?",
        peer=peer,
        handler=handler,
    )


def expired(peer: str, head: CallHead, seconds: float, what: str) -> DeadlineExceeded:
    """What a call raises after its deadline; without one, ``what`` has been so for ``seconds``."""
    text = f"handler {head.handler!r} at {peer} did not end within {seconds:g} s"
    if head.deadline is None:
        text = (
            f"handler {head.handler!r} at {peer}: {what} for {seconds:g} s "
            "(Timing.progress_deadline); give the call a deadline if it may take longer"
        )
    return DeadlineExceeded(text, peer=peer, handler=head.handler)


def abandoned(peer: str, handler: str) -> Cancelled:
    """What a stream raises that was closed before its end."""
    return Cancelled(f"the call of handler {handler!r} at {peer} was closed here")
