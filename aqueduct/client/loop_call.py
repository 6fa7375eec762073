"""One call of an asyncio client whose news go into a queue, as a ThreadCall's do for a thread."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Final

import pyarrow as pa

from aqueduct._speedups.calls.batch_sender import InFlightWindow
from aqueduct.arrow.decode import Decoder
from aqueduct.client.call import END, Batches, FailedBatch, abandoned
from aqueduct.client.client_connection import ClientConnection
from aqueduct.client.thread_call import NEWS, Failed
from aqueduct.endpoint.pulling import LARGE
from aqueduct.rpc.request import CallHead
from aqueduct.rpc.unpacking import decode_later

__all__ = ["LoopCall"]

_LOOK: Final = object()
"""In the queue: the call may have something."""


class LoopCall:
    """One call, on the event loop of its connection. An answer is taken when it is asked for."""

    def __init__(
        self,
        link: ClientConnection,
        head: CallHead,
        window: InFlightWindow | None,
        source: Batches | None,
        news: Any,
        tag: Any,
    ) -> None:
        """``source`` encodes what is sent."""
        self._source = source
        self._window = window
        self._news = news
        self._tag = tag
        self._told = False  # there is a _LOOK in the queue
        self._over = False
        self._reading = True
        self._waiting = False
        self._decoder: Decoder | None = None
        self._lease: Any = None
        self._call = link.begin(head, window, self._changed)
        if source is not None:
            self._call.wait_for_room(link.sizes)
        self._peer = link.address
        self._changed()

    @property
    def accepted(self) -> bool:
        """Whether the service has accepted the call."""
        return self._call.accepted

    @property
    def schema(self) -> pa.Schema | None:
        """Of the answers; None before the call is accepted."""
        return self._call.output_schema

    @property
    def capabilities(self) -> frozenset[str]:
        """What the handler is, and what is granted."""
        return self._call.capabilities

    @property
    def counters(self) -> Mapping[str, int]:
        """What the service counted; empty before the end."""
        return self._call.counters

    @property
    def room(self) -> bool:
        """Whether a batch may be sent; otherwise there are news when it may."""
        call = self._call
        if self._window is None or not self._window.open or not call.writable:
            return False
        if call.pull is not None:
            call.pull.withdraw()  # the batch may be sent by another call
        return True

    @property
    def settled(self) -> int:
        """Of how many batches the service needs no more."""
        return 0 if self._window is None else self._window.settled

    @property
    def sent_bytes(self) -> int:
        """Bytes of the payloads that were sent."""
        return 0 if self._window is None else self._window.sent_bytes

    def hold(self, size: int) -> None:
        """So many bytes are kept besides: they count against the window."""
        assert self._window is not None
        self._window.held = size

    def push(self, batch: pa.RecordBatch) -> int:
        """Sends a batch, whether or not there is ``room``; returns its number.

        Raises SchemaMismatch, LocalProtocolError and BatchTooLarge for what cannot be sent; then
        nothing was.
        """
        source, window, call = self._source, self._window, self._call
        assert source is not None and window is not None
        source.compression = call.sender.compression
        encoded = source.encode(batch)
        number = window.send(encoded.size)
        call.send(encoded, number)
        if call.sender.expects or encoded.size >= LARGE:
            call.fed(encoded.size)
        return number

    def finish(self) -> None:
        """No more batches come."""
        self._call.finish()

    def expect(self, *, room: bool = False, acceptance: bool = False) -> bool:
        """True: there is room, or acceptance, already. Otherwise there are news of it."""
        return (room and self.room) or (acceptance and self.accepted)

    def set_waiting(self, waiting: bool) -> None:
        """Whether the service is waited for: the deadline on progress runs then."""
        self._waiting = waiting
        self._tell_waiting()

    def set_reading(self, reading: bool) -> None:
        """Whether the application waits for an answer: else it has all the time it wants."""
        self._reading = reading
        self._tell_waiting()

    def check(self) -> None:
        """Without effect: the reader is on the loop itself."""

    def abandon(self) -> None:
        """The handler is told to stop, unless the call is over."""
        self._over = True
        self._give_back()
        self._call.fail(abandoned(self._peer, self._call.head.handler))

    def popped(self, found: Any) -> Any:
        """What there is: an answer as its number and payload, END, Failed, or NEWS."""
        self._give_back()
        self._told = False
        if self._over:
            return NEWS
        call = self._call
        try:
            taken = call.take()
        except BaseException as error:  # noqa: BLE001  it belongs to the driver of the call
            self._over = True
            return Failed(error)
        if taken is None:
            return NEWS
        if taken is END:
            self._over = True
            return END
        self._changed()  # there may be more
        if type(taken) is not FailedBatch:
            self._lease, call.answers.lease = call.answers.lease, None
        return call.answers.number, taken

    def decode(self, payload: Any) -> pa.RecordBatch | asyncio.Task[pa.RecordBatch]:
        """The batch of an answer, or a task for one that takes long or waits for room."""
        call = self._call
        if self._decoder is None:
            self._decoder = call.decoder()
        decoder = self._decoder
        if not (decoder.unpacks or decoder.slow(payload)):
            return decoder.decode(payload)
        return decode_later(
            decoder,
            payload,
            self._lease,
            lambda: decoder.decode(payload),
            call.config.timing.stall_deadline,
            id(asyncio.current_task()),
        )

    # Within

    def _changed(self) -> None:
        if not self._told and not self._over:
            self._told = True
            self._news.put((self._tag, _LOOK))

    def _give_back(self) -> None:
        lease, self._lease = self._lease, None
        if lease is not None:
            lease.give_back()

    def _tell_waiting(self) -> None:
        call = self._call
        if not self._over:
            waiting = self._waiting and self._reading
            call.set_waiting(waiting, id(asyncio.current_task()))
            if waiting and call.pull is not None:
                call.pull.want(None)
