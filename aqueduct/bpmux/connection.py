"""One bpmux connection on an event loop: the core of aqueduct.protocol.bpmux over a transport."""

from __future__ import annotations

import asyncio
import os
import select
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, Self, TypeAlias, cast

from aqueduct.arguments import Duration, Size, checked
from aqueduct.bpmux.link import BpmuxLink
from aqueduct.bpmux.streams import (
    BpmuxRequest,
    BpmuxSink,
    BpmuxStream,
    Buffer,
    Duplex,
    PendingRequest,
)
from aqueduct.carriers.binding import host_port
from aqueduct.carriers.stream.sockets import tune
from aqueduct.closing import AsyncClosing
from aqueduct.config import Config
from aqueduct.errors import ConnectionLost, Ended, LimitExceeded, RemoteProtocolError
from aqueduct.escaping import logger_of
from aqueduct.forks import own, sever
from aqueduct.protocol.bpmux import events
from aqueduct.protocol.bpmux.state import PLACES, REQ_IN, SINK_IN, Entity

__all__ = ["BpmuxConnection", "LoopProtocol", "Opened", "name_of"]

log = logger_of(__name__)

Opened: TypeAlias = BpmuxRequest | BpmuxSink | BpmuxStream | Duplex
"""What the peer may open, seen from this side: its sink is a BpmuxStream here, its stream a
BpmuxSink.
"""

_PROBE: Final = 0.1
"""Seconds between two looks for a peer that sends no more."""
_NO_PROGRESS: Final = (events.PING, events.PONG, events.PONG_MISSING)
"""Events that are no progress of what is open."""
END_CREDIT = 256
"""Bytes that the peer may say with the end of something on which only this side sends."""


class BpmuxConnection(AsyncClosing):
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
        self._link = link = BpmuxLink(transport, config, peer)
        self.mux = link.mux
        """The core; see aqueduct.protocol.bpmux."""
        self._transport = transport
        self._loop = asyncio.get_running_loop()
        self._closing = False
        """Whether ``close`` was called."""
        self._ended_by_peer: ConnectionLost | None = None
        """What ends the connection once all that is open has ended (BP-R14)."""
        self._peer_silent = False
        """Whether it has also ended its half of the transport: it sends nothing any more."""
        self._end_probe: asyncio.TimerHandle | None = None
        self._end_watch: asyncio.TimerHandle | None = None
        self._loss: tuple[Exception | None] | None = None
        """Why the transport has gone, while received bytes are not all read yet."""
        self._abort: asyncio.TimerHandle | None = None
        self._gone: asyncio.Future[None] = self._loop.create_future()
        self._heard = self._loop.time()
        self._opened: deque[tuple[Opened, int, tuple[tuple[Entity, int], ...]]] = deque()
        """With the credit that it is charged to, and the credit that follows once it is taken."""
        self._accepting = asyncio.Event()
        self._top = BpmuxSink(link, self.mux.top_sink)
        self._messages = BpmuxStream(link, self.mux.top_stream, config.byte_stream.top_credit)
        self.mux.credit(self.mux.top_stream, config.byte_stream.top_credit)
        self._alive = self._loop.call_later(config.timing.ping_interval, self._stay_alive)
        own(self)
        self._link.flush()

    @property
    def error(self) -> ConnectionLost | None:
        """Why it is over, once it is."""
        return self._link.error

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
        link = self._link
        link.usable()
        credit = self._credit(window)
        size = memoryview(payload).nbytes
        async with link.deadline(timeout):
            if not link.has_room(size):
                await link.room(size)
            total = self._total(payload)
            entity = self.mux.request(payload, credit=credit, total=total)
            call = PendingRequest(link, entity, size)
            try:
                link.flush()
                return await call.answer()
            finally:
                call.cancel()

    @checked()
    def open_sink(self, payload: Buffer = b"") -> BpmuxSink:
        """A sink to the peer, which reads it as a stream. Opens with a payload (BP-R5)."""
        size = self._opening(payload)
        total = self._total(payload)
        entity = self.mux.open_sink(payload, credit=END_CREDIT, whole=not total, total=total)
        sink = BpmuxSink(self._link, entity, queued=size)
        self._link.flush()
        return sink

    @checked()
    def open_stream(self, payload: Buffer = b"", *, window: Size | None = None) -> BpmuxStream:
        """A stream from the peer, which writes it as a sink, ``window`` bytes ahead at most."""
        size = self._opening(payload)
        credit = self._credit(window)
        entity = self.mux.open_stream(payload, credit=credit, total=self._total(payload))
        stream = BpmuxStream(self._link, entity, credit, queued=size)
        self._link.flush()
        return stream

    @checked()
    def open_duplex(self, payload: Buffer = b"", *, window: Size | None = None) -> Duplex:
        """Both in one."""
        size = self._opening(payload)
        credit = self._credit(window)
        out, into = self.mux.open_duplex(payload, credit=credit, total=self._total(payload))
        self.mux.consumed(out, END_CREDIT, 0)
        stream = BpmuxStream(self._link, into, credit, queued=size)
        duplex = Duplex(BpmuxSink(self._link, out), stream)
        self._link.flush()
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
            await self._link.give_way()
        if not self._opened:
            with self._link.reading(self.mux.top_stream):
                async with asyncio.timeout(cast("float | None", timeout)):
                    while not self._opened:
                        self._link.usable()
                        self._accepting.clear()
                        await self._accepting.wait()
        opened, charged, credits = self._opened.popleft()
        self.mux.consumed(self.mux.top_stream, charged, len(opened.payload))
        for entity, credit in credits:
            self.mux.consumed(entity, credit, 0)
        self._link.flush()
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
        self._link.flush()
        with suppress(ConnectionLost, Ended):
            with suppress(TimeoutError):
                async with asyncio.timeout(linger / 2):
                    await top.wait_ended()
            mux.end_bare()
            if mux.top_sink.items:
                mux.end(mux.top_sink, drop=True)
            self._link.flush()
            with suppress(TimeoutError):
                async with asyncio.timeout(linger / 2):
                    await top.wait_ended()

    async def wait_closed(self) -> None:
        """Returns once the transport is gone, whatever ended it: see ``error``."""
        await asyncio.shield(self._gone)

    def left_behind(self) -> None:
        """In a forked child: the connection is the parent's. Its socket is closed here."""
        sock = self._transport.get_extra_info("socket")
        if sock is not None:
            sever((sock.fileno(),))
        self._link.error = ConnectionLost(
            f"the connection to {self.peer} belongs to the process that process {os.getpid()} was "
            "forked from; connect after the fork"
        )
        if not self._gone.done():
            self._gone.set_result(None)

    def __repr__(self) -> str:
        return f"<bpmux BpmuxConnection with {self.peer}{' closed' if self.error else ''}>"

    # Within

    def _credit(self, window: Any) -> int:
        return int(window or self.window)

    def _total(self, payload: Buffer) -> int:
        """What an opening payload is to be announced as: 0 if it travels in one chunk.

        In one it waits for top-level credit for all of it, which the peer may never give.
        """
        size = memoryview(payload).nbytes
        most = min(self._top.most_credit or size, self.config.bpmux.chunk)
        return size if size > most else 0

    def _opening(self, payload: Buffer) -> int:
        """The size of an opening payload. Raises if nothing can be opened with it now."""
        self._link.usable()
        size = memoryview(payload).nbytes
        self._link.require_room(size)
        return size

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
        self._link.flush()
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
        for handle in tuple(self._link.live):
            if isinstance(handle, (PendingRequest, BpmuxStream)):
                handle.ended(lost)
        for sink in (self._top, *self._link.live):
            if isinstance(sink, BpmuxSink) and not (sink.ending or sink.error):
                self.mux.heartbeat(
                    sink.entity
                )  # a kernel without the peer's process answers by a reset
                break
        self._link.flush()
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
            self._link.progress = self._heard
        entity: Entity = event[1]
        handle: Any = entity.user
        if kind == events.PAYLOAD:
            _, _, payload, _, _, charged = event
            if handle is None:
                self._open(entity, payload, charged)
            else:
                handle.arrived(payload, charged)
        elif kind == events.CREDIT:
            if handle is not None:
                handle.changed()
        elif kind == events.PONG:
            if handle is not None:
                handle.ponged(self._loop.time() - event[2])
        elif kind == events.ENDED:
            _, _, payload, payer, charged = event
            held = (payer, charged, len(payload))
            if entity is self.mux.top_stream:
                self._link.consumed(*held)
                self._peer_ends(payload)
            elif handle is not None:
                handle.ended(Ended(f"the peer has ended {handle!r}", payload), held)
            else:
                self._link.consumed(*held)
        elif kind == events.ACKNOWLEDGED:
            if handle is not None:
                handle.ended(None)
        elif kind == events.ABANDONED and handle is not None:
            text = f"{handle!r} never came to be: one side has closed the top level"
            handle.ended(ConnectionLost(text, code=0))
        elif kind == events.PONG_MISSING:
            log.warning("%s has not answered a ping for %s", self.peer, entity)

    def _open(self, entity: Entity, payload: bytes, charged: int) -> None:
        """The peer opened something, and the whole payload of that is here."""
        if len(self._opened) >= self.config.bpmux.entities:
            raise LimitExceeded(
                f"the peer has opened {len(self._opened)} entities that were not accepted; "
                f"Bpmux.entities is {self.config.bpmux.entities}"
            )
        link, window = self._link, self.window
        opened: Opened
        credits: tuple[tuple[Entity, int], ...] = ()
        if entity.place == REQ_IN:
            opened = BpmuxRequest(link, entity, payload)
        elif entity.place == SINK_IN:
            opened = BpmuxSink(link, entity, payload)
            credits = ((entity, END_CREDIT),)
            if entity.twin is not None:
                opened = Duplex(opened, BpmuxStream(link, entity.twin, window))
                credits = ((entity.twin, window), (entity, END_CREDIT))
        else:
            opened = BpmuxStream(link, entity, window, payload)
            credits = ((entity, window),)
        self._opened.append((opened, charged, credits))
        self._accepting.set()

    def _peer_ends(self, payload: bytes) -> None:
        """The peer has ended its top level; what is open goes on (BP-R14)."""
        text = bytes(payload).decode("utf-8", "replace")
        reason = f": {text}" if text else ""
        error = ConnectionLost(
            f"{self.peer} closed the connection{reason}", code=0, reason=text, remote=True
        )
        self._ended_by_peer = error
        self._link.flushed = self._end_if_nothing_is_open
        self._messages.ended(error)
        deadline = self.config.bpmux.closing_deadline
        self._end_watch = self._loop.call_later(deadline, self._watch_end)

    def _end_if_nothing_is_open(self) -> None:
        error = self._ended_by_peer
        if error is None or self.error is not None or self._closing or not self.mux.idle:
            return
        if self._peer_silent:
            if not self._opened and not self._may_send():
                self._over(error)
            return
        mux = self.mux
        top = (not mux.top_sink.gone) + (not mux.top_stream.gone)
        if sum(mux.count(place) for place in range(len(PLACES))) > top:
            return
        self._over(error)

    def _may_send(self) -> bool:
        """Whether this side may have something to send yet: none of it is acknowledged any more."""
        return any(
            isinstance(half, (BpmuxRequest, BpmuxSink))
            and half is not self._top
            and (not half.ending or half.entity.items)
            for half in self._link.live
        )

    def _watch_end(self) -> None:
        """Closes if nothing that is open has moved for too long."""
        deadline = self.config.bpmux.closing_deadline
        left = self._link.progress + deadline - self._loop.time()
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
            self._alive.cancel()
            if self._end_watch is not None:
                self._end_watch.cancel()
            if self._end_probe is not None:
                self._end_probe.cancel()
            self._link.over(error)
            self._accepting.set()
        if abort:
            self._transport.abort()
        else:
            self._transport.close()
            if self._abort is None and not self._gone.done():
                linger = self.config.timing.close_linger
                self._abort = self._loop.call_later(linger, self._transport.abort)
        if self._loss is not None:
            self._transport_gone()  # it closed before all that it brought was looked at

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
                self._link.ping(top)
        self._link.flush()


Made: TypeAlias = Callable[[BpmuxConnection], ConnectionLost | None]
"""Is told of a new connection; returns why it is not wanted, if so."""


class LoopProtocol(asyncio.Protocol):
    """What the event loop calls."""

    def __init__(self, config: Config, window: int, place: str, made: Made | None = None) -> None:
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
        refused = self._made(self.connection) if self._made is not None else None
        if refused is not None:
            self.connection._over(refused, abort=True)

    def data_received(self, data: bytes) -> None:
        """See asyncio."""
        self.connection._received(data)

    def eof_received(self) -> bool:
        """See asyncio; ``connection_lost`` follows, at once unless this side may go on."""
        return self.connection._received_eof()

    def pause_writing(self) -> None:
        """See asyncio."""
        if self.connection.error is None:
            self.connection._link.writable.clear()

    def resume_writing(self) -> None:
        """See asyncio."""
        self.connection._link.writable.set()
        self.connection._link.flush()

    def connection_lost(self, error: Exception | None) -> None:
        """See asyncio."""
        self.connection._lost(error)


def name_of(place: Any) -> str:
    """An address of the socket module as people write it."""
    if not isinstance(place, tuple):
        return os.fsdecode(place) or "a process of this machine"
    return host_port(place)
