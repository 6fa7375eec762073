"""One bpmux connection on an event loop: the core of aqueduct.protocol.bpmux over a transport."""

from __future__ import annotations

import asyncio
import os
import select
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any, Final, Self, TypeAlias, cast
from weakref import proxy

from aqueduct.arguments import Duration, Size, checked
from aqueduct.bpmux.streams import (
    BpmuxRequest,
    BpmuxSink,
    BpmuxStream,
    Buffer,
    Duplex,
    EntityHandle,
    PendingRequest,
    again,
)
from aqueduct.carriers.binding import host_port
from aqueduct.carriers.stream.sockets import tune
from aqueduct.config import Config
from aqueduct.errors import ConnectionLost, Ended, LimitExceeded, RemoteProtocolError, SendQueueFull
from aqueduct.escaping import logger_of
from aqueduct.forks import own, sever
from aqueduct.protocol.bpmux import events
from aqueduct.protocol.bpmux.connection import Mux
from aqueduct.protocol.bpmux.state import PLACES, REQ_IN, SINK_IN, Entity

__all__ = ["BpmuxConnection", "LoopProtocol", "Opened", "name_of"]

log = logger_of(__name__)

Opened: TypeAlias = BpmuxRequest | BpmuxSink | BpmuxStream | Duplex
"""What the peer may open, seen from this side: its sink is a BpmuxStream here, its stream a
BpmuxSink.
"""

_PAYLOAD_COST: Final = 16
"""Bytes that each waiting payload counts beside its own."""
_IN_A_ROW: Final = 64
"""So many payloads are taken without a pause; then other tasks of the event loop have a turn."""
_PROBE: Final = 0.1
"""Seconds between two looks for a peer that sends no more."""
_NO_PROGRESS: Final = (events.PING, events.PONG, events.PONG_MISSING)
"""Events that are no progress of what is open."""
END_CREDIT = 256
"""Bytes that the peer may say with the end of something on which only this side sends."""


class BpmuxConnection:
    """Two programs, each of which may ask, offer and listen. Made by ``connect`` and ``serve``.

    ``async for opened in connection`` gives what the peer opens; ``receive`` its messages of the
    top level. Both hold the peer back while they are not taken: their payloads have the credit of
    the top level in common (BP-R5), ``BpmuxStream.top_credit`` bytes.

    Bpmux.connection_bytes bounds received bytes that nobody has taken, and bytes that wait to be
    sent. ``send``, ``request`` and ``respond`` wait for room; all other methods raise
    SendQueueFull.

    After the peer has ended its top level, open entities go on. The connection is closed when all
    have ended, or when nothing has moved for Bpmux.closing_deadline (BP-R14).

    Every wait ends: by its ``timeout`` (seconds; None: Timing.progress_deadline), or with the
    connection, which is lost when the peer says nothing for Timing.idle_timeout although it
    is pinged.
    """

    def __init__(
        self, transport: asyncio.Transport, config: Config, peer: str, window: int
    ) -> None:
        self.config = config
        self.peer = peer
        """The peer's address, for errors and logs."""
        self.window = window
        """Bytes that the peer may send ahead on each stream, and in answer to each request."""
        self.mux = Mux(config.bpmux, whole=True)
        """The core; see aqueduct.protocol.bpmux."""
        self.error: ConnectionLost | None = None
        """Why it is over, once it is."""
        self._transport = transport
        self._loop = asyncio.get_running_loop()
        self._writable = asyncio.Event()
        self._writable.set()
        self._live: set[EntityHandle] = set()
        self._queued = 0
        """Bytes that wait to be sent."""
        self._sendable = asyncio.Event()
        """Set when these have become fewer."""
        self._unread = 0
        """Payloads that wait to be received."""
        self._in_a_row = 0
        self._flushing: asyncio.Handle | None = None
        self._closing = False
        """Whether ``close`` was called."""
        self._ended_by_peer: ConnectionLost | None = None
        """What ends the connection once all that is open has ended (BP-R14)."""
        self._progress = 0.0
        """When something moved that is open."""
        self._peer_silent = False
        """Whether it has also ended its half of the transport: it sends nothing any more."""
        self._end_probe: asyncio.TimerHandle | None = None
        self._end_watch: asyncio.TimerHandle | None = None
        self._loss: tuple[Exception | None] | None = None
        """Why the transport has gone, while received bytes are not all read yet."""
        self._abort: asyncio.TimerHandle | None = None
        self._gone: asyncio.Future[None] = self._loop.create_future()
        self._heard = self._loop.time()
        self._opened: deque[tuple[Opened, int]] = deque()
        self._accepting = asyncio.Event()
        # These two are a part of it, and must not keep it.
        self._top = BpmuxSink(proxy(self), self.mux.top_sink)
        self._messages = BpmuxStream(
            proxy(self), self.mux.top_stream, config.byte_stream.top_credit
        )
        self.mux.credit(self.mux.top_stream, config.byte_stream.top_credit)
        self._alive = self._loop.call_later(config.timing.ping_interval, self._stay_alive)
        own(self)
        self._flush()

    # What this side begins

    @checked()
    async def request(
        self, payload: Buffer = b"", *, window: Size | None = None, timeout: Duration | None = None
    ) -> bytes:
        """Asks the peer, and waits for its response of at most Bpmux.payload_bytes.

        ``window``: how many bytes of it may come at once. A caller that is cancelled, or has waited
        for ``timeout``, cancels the request, or takes it back if it has not left. Raises Ended when
        the peer ends it without a response, ConnectionLost, TimeoutError.
        """
        self._usable()
        credit = self._credit(window)
        size = memoryview(payload).nbytes
        async with self._deadline(timeout):
            if not self._has_room(size):
                await self._room(size)
            total = self._total(payload)
            entity = self.mux.request(payload, credit=credit, total=total)
            call = PendingRequest(self, entity)
            call._queue(size)
            try:
                self._flush()
                return await call.answer()
            finally:
                call.cancel()

    @checked()
    def open_sink(self, payload: Buffer = b"") -> BpmuxSink:
        """A sink to the peer, which reads it as a stream. Opens with a payload (BP-R5)."""
        size = self._opening(payload)
        total = self._total(payload)
        entity = self.mux.open_sink(payload, credit=END_CREDIT, whole=not total, total=total)
        sink = BpmuxSink(self, entity)
        sink._queue(size)
        self._flush()
        return sink

    @checked()
    def open_stream(self, payload: Buffer = b"", *, window: Size | None = None) -> BpmuxStream:
        """A stream from the peer, which writes it as a sink, ``window`` bytes ahead at most."""
        size = self._opening(payload)
        credit = self._credit(window)
        entity = self.mux.open_stream(payload, credit=credit, total=self._total(payload))
        stream = BpmuxStream(self, entity, credit)
        stream._queue(size)
        self._flush()
        return stream

    @checked()
    def open_duplex(self, payload: Buffer = b"", *, window: Size | None = None) -> Duplex:
        """Both in one."""
        size = self._opening(payload)
        credit = self._credit(window)
        out, into = self.mux.open_duplex(payload, credit=credit, total=self._total(payload))
        self.mux.consumed(out, END_CREDIT, 0)
        duplex = Duplex(BpmuxSink(self, out), BpmuxStream(self, into, credit))
        duplex.stream._queue(size)
        self._flush()
        return duplex

    @checked()
    async def send(
        self, payload: Buffer, *, partial: bool | None = None, timeout: Duration | None = None
    ) -> None:
        """Sends a message on the top level; see BpmuxSink.send."""
        await self._top.send(payload, partial=partial, timeout=timeout)

    @checked()
    async def ping(self, *, timeout: Duration | None = None) -> float:
        """The round-trip time of a ping, seconds. Raises TimeoutError, ConnectionLost."""
        return await self._messages.ping(timeout=timeout)

    # What the peer begins

    @checked()
    async def accept(self, *, timeout: Duration | None = None) -> Opened:
        """The next thing that the peer opened.

        It is a BpmuxRequest, a BpmuxStream, a BpmuxSink or a Duplex.

        Raises ConnectionLost, and TimeoutError, if ``timeout`` (seconds) is given.
        """
        if self._opened:
            await self._yield()
        if not self._opened:
            with self._reading(self.mux.top_stream):
                async with asyncio.timeout(cast("float | None", timeout)):
                    while not self._opened:
                        self._usable()
                        self._accepting.clear()
                        await self._accepting.wait()
        opened, charged = self._opened.popleft()
        for half in _halves(opened):
            half.connection = self
        mux = self.mux
        mux.consumed(mux.top_stream, charged, len(opened.payload))
        if isinstance(opened, BpmuxStream):
            mux.consumed(opened._entity, opened.window, 0)
        elif isinstance(opened, Duplex):
            mux.consumed(opened.stream._entity, opened.stream.window, 0)
            mux.consumed(opened.sink._entity, END_CREDIT, 0)
        elif isinstance(opened, BpmuxSink):
            mux.consumed(opened._entity, END_CREDIT, 0)
        self._flush()
        return opened

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Opened:
        """What the peer opens, until one side closes the connection."""
        try:
            return await self.accept()
        except ConnectionLost as error:
            if error.code == 0:
                raise StopAsyncIteration from None
            raise

    @checked()
    async def receive(self, *, timeout: Duration | None = None) -> bytes:
        """The next message of the top level. Raises ConnectionLost, TimeoutError."""
        return await self._messages.receive(timeout=timeout)

    # Its end

    @checked()
    async def close(self, payload: Buffer = b"") -> None:
        """Ends the connection: the peer gets ``payload`` as the reason.

        What was sent before arrives. Waits for the peer's acknowledgement for at most
        Timing.close_linger. A payload that lacks credit waits for it for half of that; then the
        end leaves without it (BP-R15). Closing again waits for the first close.
        """
        if self.error is None and not self._closing:
            self._closing = True
            try:
                await self._say_end(payload)
            except BaseException:
                self._over(ConnectionLost("this side gave up the connection"), abort=True)
                raise
            self._over(ConnectionLost("this side closed the connection", code=0))
        await self.wait_closed()

    async def _say_end(self, payload: Buffer) -> None:
        """The end of the top level, until the peer has seen it."""
        mux, top = self.mux, self._top
        linger = self.config.timing.close_linger
        if not mux.top_sink.ending:
            mux.end(mux.top_sink, payload)
        top.ending = True
        self._flush()
        with suppress(ConnectionLost, Ended):
            with suppress(TimeoutError):
                async with asyncio.timeout(linger / 2):
                    await top._until(lambda: top.acknowledged)
            mux.end_bare()
            if mux.top_sink.items:
                mux.end(mux.top_sink, drop=True)
            self._flush()
            with suppress(TimeoutError):
                async with asyncio.timeout(linger / 2):
                    await top._until(lambda: top.acknowledged)

    async def wait_closed(self) -> None:
        """Returns once the transport is gone, whatever ended it: see ``error``."""
        await asyncio.shield(self._gone)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    def left_behind(self) -> None:
        """In a forked child: the connection is the parent's. Its socket is closed here."""
        sock = self._transport.get_extra_info("socket")
        if sock is not None:
            sever((sock.fileno(),))
        self.error = ConnectionLost(
            f"the connection to {self.peer} belongs to the process that process {os.getpid()} was "
            "forked from; connect after the fork"
        )
        if not self._gone.done():
            self._gone.set_result(None)

    def __repr__(self) -> str:
        return f"<bpmux BpmuxConnection with {self.peer}{' closed' if self.error else ''}>"

    # What handles ask

    def _deadline(self, timeout: Any) -> asyncio.Timeout:
        return asyncio.timeout(self.config.timing.progress_deadline if timeout is None else timeout)

    def _credit(self, window: Any) -> int:
        return int(window or self.window)

    def _ping(self, entity: Entity) -> None:
        self.mux.ping(entity, self._loop.time())
        self._flush()

    def _consumed(self, purse: Entity, charged: int, held: int) -> None:
        """The application has taken ``held`` bytes; ``charged`` of credit are given for them."""
        self.mux.consumed(purse, charged, held)
        self._flush()

    def _let_go(self, purse: Entity, charged: int, held: int) -> None:
        """As ``_consumed``, from anywhere: nothing is sent before the event loop's next turn."""
        self.mux.consumed(purse, charged, held)
        if self._flushing is None and self.error is None:
            with suppress(RuntimeError):  # another thread's garbage collection, or a closed loop
                self._flushing = self._loop.call_soon(self._flush_late)

    def _flush_late(self) -> None:
        self._flushing = None
        self._flush()

    @contextmanager
    def _reading(self, entity: Entity) -> Iterator[None]:
        """While the application waits for the next payload of this entity (BP-R12)."""
        self.mux.wait_for(entity)
        self._flush()
        try:
            yield
        finally:
            self.mux.wait_no_more(entity)

    async def _yield(self) -> None:
        """Lets other tasks run after several payloads that were taken without a wait."""
        self._in_a_row += 1
        if self._in_a_row >= _IN_A_ROW:
            self._in_a_row = 0
            await asyncio.sleep(0)

    def _count_unread(self) -> None:
        self._unread += 1
        limit = self.config.bpmux.connection_bytes
        if self._unread * _PAYLOAD_COST > limit:
            raise LimitExceeded(
                f"{self._unread} payloads wait to be received, each of which counts "
                f"{_PAYLOAD_COST} bytes; Bpmux.connection_bytes is {limit} (BP-R12)"
            )

    def _usable(self) -> None:
        if self.error is not None:
            raise again(self.error)

    def _total(self, payload: Buffer) -> int:
        """What an opening payload is to be announced as: 0 if it travels in one chunk.

        In one it waits for top-level credit for all of it, which the peer may never give.
        """
        size = memoryview(payload).nbytes
        most = min(self._top._most or size, self.config.bpmux.chunk)
        return size if size > most else 0

    def _has_room(self, size: int) -> bool:
        """Whether ``size`` bytes more may wait to be sent. One payload always may."""
        return not self._queued or self._queued + size <= self.config.bpmux.connection_bytes

    def _require_room(self, size: int) -> None:
        if size and not self._has_room(size):
            raise SendQueueFull(
                f"{self._queued} bytes wait to be sent to {self.peer}, and {size} more are above "
                f"Bpmux.connection_bytes ({self.config.bpmux.connection_bytes}); nothing was sent"
            )

    def _opening(self, payload: Buffer) -> int:
        """The size of an opening payload. Raises if nothing can be opened with it now."""
        self._usable()
        size = memoryview(payload).nbytes
        self._require_room(size)
        return size

    async def _room(self, size: int) -> None:
        """Waits until the transport takes more, and ``size`` bytes more may be queued."""
        await self._writable.wait()
        while self.error is None and not self._has_room(size):
            self._sendable.clear()
            await self._sendable.wait()
        self._usable()

    def _flush(self) -> None:
        """Gives the transport what may leave, unless it has enough, or is closing.

        After a loss, asyncio's ``writelines`` of Python 3.12 and 3.13 would watch a socket that is
        closed: the next one with its number would never be heard.
        """
        while self._writable.is_set() and self.error is None and not self._transport.is_closing():
            buffers, size, written = self.mux.take(self.config.bpmux.chunk)
            if not size:
                break
            self._transport.writelines(buffers)
            for entity, _ in written:
                if entity.user is not None:
                    entity.user._has_left()
            if written:
                self._progress = self._loop.time()
        if self._ended_by_peer is not None:
            self._end_if_nothing_is_open()

    # What the transport and the core tell

    def _received(self, data: bytes) -> None:
        self._heard = self._loop.time()
        if self.error is None:
            self.mux.receive_data(data, self.config.bpmux.wake_up)
            self._advance()

    def _read_on(self) -> None:
        if self.error is None:
            self.mux.read_on(self.config.bpmux.wake_up)
            self._advance()

    def _advance(self) -> None:
        """Dispatches events, and sends answers. The rest is read after other tasks had a turn."""
        self._dispatch()
        self._flush()
        if self.error is not None:
            return
        if self.mux.unread:
            self._transport.pause_reading()
            self._loop.call_soon(self._read_on)
        elif self._loss is not None:
            self._lost(*self._loss)
        else:
            self._transport.resume_reading()

    def _received_eof(self) -> bool:
        """The peer sends no more. Whether it still reads, as far as one can know.

        Who has ended the top level, and then its half of the transport, may wait for answers
        (BP-R14). What needs more of its bytes is over.
        """
        if self.error is None:
            self.mux.receive_eof()
            self._dispatch()
        lost = self._ended_by_peer
        if self.error is not None or lost is None or self.mux.unread:
            return False
        self._peer_silent = True
        self._accepting.set()
        for handle in tuple(self._live):
            if isinstance(handle, (PendingRequest, BpmuxStream)):
                handle._ended(lost)
        for sink in (self._top, *self._live):
            if isinstance(sink, BpmuxSink) and not (sink.ending or sink.error):
                self.mux.heartbeat(sink._entity)  # answered by a reset if nobody is there
                break
        self._flush()
        if self.error is None:
            self._look_for_peer()
        return self.error is None

    def _look_for_peer(self) -> None:
        """Closes once the peer has closed its transport for good: asyncio does not tell."""
        sock = self._transport.get_extra_info("socket")
        if self.error is not None or sock is None:
            return
        poll = select.poll()
        poll.register(sock.fileno(), 0)
        if poll.poll(0):  # a hang-up, or a reset
            self._transport.abort()
        else:
            self._end_probe = self._loop.call_later(_PROBE, self._look_for_peer)

    def _dispatch(self) -> None:
        for event in self.mux.events_received():
            try:
                self._happened(event)
            except RemoteProtocolError as error:
                self._broken(error)
            if self.error is not None:
                return

    def _happened(self, event: events.Event) -> None:
        kind = event[0]
        if kind == events.FAILED:
            self._broken(event[1])
            return
        if kind not in _NO_PROGRESS:
            self._progress = self._heard
        entity: Entity = event[1]
        handle: Any = entity.user
        if kind == events.PAYLOAD:
            _, _, payload, _, _, charged = event
            if handle is None:
                self._open(entity, payload, charged)
            else:
                handle._arrived(payload, charged)
        elif kind == events.CREDIT:
            if handle is not None:
                handle._changed()
        elif kind == events.PONG:
            if handle is not None:
                handle._ponged(self._loop.time() - event[2])
        elif kind == events.ENDED:
            _, _, payload, purse, charged = event
            held = (purse, charged, len(payload))
            if entity is self.mux.top_stream:
                self._consumed(*held)
                self._peer_ends(payload)
            elif handle is not None:
                handle._ended(Ended(f"the peer has ended {handle!r}", payload), held)
            else:
                self._consumed(*held)
        elif kind == events.ACKNOWLEDGED:
            if handle is not None:
                handle._seen()
        elif kind == events.ABANDONED and handle is not None:
            text = f"{handle!r} never came to be: one side has closed the top level"
            handle._ended(ConnectionLost(text, code=0))
        elif kind == events.PONG_MISSING:
            log.warning("%s has not answered a ping for %s", self.peer, entity)

    def _open(self, entity: Entity, payload: bytes, charged: int) -> None:
        """The peer opened something, and the whole payload of that is here."""
        if len(self._opened) >= self.config.bpmux.entities:
            raise LimitExceeded(
                f"the peer has opened {len(self._opened)} entities that were not accepted; "
                f"Bpmux.entities is {self.config.bpmux.entities}"
            )
        opened: Opened
        if entity.place == REQ_IN:
            opened = BpmuxRequest(self, entity, payload)
        elif entity.place == SINK_IN:
            opened = BpmuxSink(self, entity, payload)
            if entity.twin is not None:
                opened = Duplex(opened, BpmuxStream(self, entity.twin, self.window))
        else:
            opened = BpmuxStream(self, entity, self.window, payload)
        for half in _halves(opened):
            half.connection = proxy(self)  # what waits here must not keep the connection
        self._opened.append((opened, charged))
        self._accepting.set()

    def _peer_ends(self, payload: bytes) -> None:
        """The peer has ended its top level; what is open goes on (BP-R14)."""
        text = bytes(payload).decode("utf-8", "replace")
        reason = f": {text}" if text else ""
        error = ConnectionLost(
            f"{self.peer} closed the connection{reason}", code=0, reason=text, remote=True
        )
        self._ended_by_peer = error
        self._messages._ended(error)
        deadline = self.config.bpmux.closing_deadline
        self._end_watch = self._loop.call_later(deadline, self._watch_end)

    def _end_if_nothing_is_open(self) -> None:
        error = self._ended_by_peer
        if error is None or self.error is not None or self._closing or not self.mux.idle:
            return
        if self._peer_silent:
            if not self._opened and not self._owes():
                self._over(error)
            return
        mux = self.mux
        top = (not mux.top_sink.gone) + (not mux.top_stream.gone)
        if sum(mux.count(place) for place in range(len(PLACES))) > top:
            return
        self._over(error)

    def _owes(self) -> bool:
        """Whether this side may have something to send yet: none of it is acknowledged any more."""
        return any(
            isinstance(half, (BpmuxRequest, BpmuxSink))
            and half is not self._top
            and (not half.ending or half._entity.items)
            for half in self._live
        )

    def _watch_end(self) -> None:
        """Closes if nothing that is open has moved for too long."""
        deadline = self.config.bpmux.closing_deadline
        left = self._progress + deadline - self._loop.time()
        if left > 0:
            self._end_watch = self._loop.call_later(left, self._watch_end)
            return
        error = self._ended_by_peer
        assert error is not None
        text = f"{error}; nothing moved for {deadline:g} s after that (Bpmux.closing_deadline)"
        self._over(ConnectionLost(text, code=0, reason=error.reason, remote=True), abort=True)

    def _broken(self, error: RemoteProtocolError) -> None:
        log.warning("%s broke bpmux: %s", self.peer, error)
        lost = ConnectionLost(f"{self.peer} broke bpmux: {error}", code=error.code)
        lost.__cause__ = error.with_traceback(None)
        self._over(lost, abort=True)

    def _over(self, error: ConnectionLost, *, abort: bool = False) -> None:
        """Tells every handle, and lets the transport go."""
        if self.error is None:
            self.error = error
            self._alive.cancel()
            if self._end_watch is not None:
                self._end_watch.cancel()
            if self._end_probe is not None:
                self._end_probe.cancel()
            if self._flushing is not None:
                self._flushing.cancel()
            for handle in tuple(self._live):
                handle._ended(error)
            self._accepting.set()
            self._writable.set()  # who waits for it finds the error
            self._sendable.set()
        if abort:
            self._transport.abort()
        else:
            self._transport.close()
            if self._abort is None and not self._gone.done():
                linger = self.config.timing.close_linger
                self._abort = self._loop.call_later(linger, self._transport.abort)
        if self._loss is not None:
            self._transport_gone()  # it went before all that it brought was looked at

    def _lost(self, error: Exception | None) -> None:
        """The transport is gone."""
        if self.mux.unread and self.error is None:
            self._loss = (error,)  # what it brought before comes first
            return
        why = "without a close" if error is None else str(error)
        lost = ConnectionLost(f"the connection with {self.peer} is lost: {why}")
        if error is not None:
            lost.__cause__ = error.with_traceback(None)
        self._over(self._ended_by_peer or lost)
        self._transport_gone()

    def _transport_gone(self) -> None:
        if self._abort is not None:
            self._abort.cancel()
        if not self._gone.done():
            self._gone.set_result(None)
        self.mux.drop()  # the halves of duplexes refer to each other

    def _stay_alive(self) -> None:
        timing = self.config.timing
        self.mux.handle_deadline(self._loop.time())
        self._dispatch()
        silence = self._loop.time() - self._heard
        if silence >= timing.idle_timeout:
            text = f"{self.peer} said nothing for {silence:.0f} s (Timing.idle_timeout)"
            self._over(ConnectionLost(text), abort=True)
            return
        self._alive = self._loop.call_later(timing.ping_interval, self._stay_alive)
        if silence >= timing.ping_interval / 2:
            top = self.mux.top_sink if self._ended_by_peer else self.mux.top_stream
            if not (top.gone or top.ending):
                self._ping(top)
        self._flush()


class LoopProtocol(asyncio.Protocol):
    """What the event loop calls."""

    def __init__(self, config: Config, window: int, place: str, made: Any = None) -> None:
        self.connection: BpmuxConnection
        self._config = config
        self._window = window
        self._place = place
        """The peer's address, if it is known before."""
        self._made = made

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio."""
        assert isinstance(transport, asyncio.Transport)
        # Nothing overtakes what transport and kernel hold: let it be little.
        transport.set_write_buffer_limits(high=0)
        tune(transport.get_extra_info("socket"), self._config)
        place = self._place or name_of(transport.get_extra_info("peername"))
        self.connection = BpmuxConnection(transport, self._config, place, self._window)
        if self._made is not None:
            self._made(self.connection)

    def data_received(self, data: bytes) -> None:
        """See asyncio."""
        self.connection._received(data)

    def eof_received(self) -> bool:
        """See asyncio; ``connection_lost`` follows, at once unless this side may go on."""
        return self.connection._received_eof()

    def pause_writing(self) -> None:
        """See asyncio."""
        if self.connection.error is None:
            self.connection._writable.clear()

    def resume_writing(self) -> None:
        """See asyncio."""
        self.connection._writable.set()
        self.connection._flush()

    def connection_lost(self, error: Exception | None) -> None:
        """See asyncio."""
        self.connection._lost(error)


def _halves(opened: Opened) -> tuple[EntityHandle, ...]:
    return (opened.sink, opened.stream) if isinstance(opened, Duplex) else (opened,)


def name_of(place: Any) -> str:
    """An address of the socket module as people write it."""
    if not isinstance(place, tuple):
        return os.fsdecode(place) or "a process of this machine"
    return host_port(place)
