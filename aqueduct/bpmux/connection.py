"""One bpmux connection on an event loop: the core of aqueduct.protocol.bpmux over a transport."""

from __future__ import annotations

import asyncio
import logging
import os
from collections import deque
from contextlib import suppress
from types import TracebackType
from typing import Any, Self, TypeAlias

from aqueduct.bpmux.handles import Buffer, Call, Duplex, Half, Request, Sink, Stream
from aqueduct.carriers.ports import host_port
from aqueduct.carriers.stream.sockets import tune
from aqueduct.config import Config
from aqueduct.errors import ConnectionLost, Ended, LimitExceeded, RemoteProtocolError
from aqueduct.forks import own, sever
from aqueduct.protocol.bpmux import events
from aqueduct.protocol.bpmux.connection import Mux
from aqueduct.protocol.bpmux.state import REQ_IN, SINK_IN, Entity

__all__ = ["Connection", "Link", "Opened", "name_of"]

log = logging.getLogger(__name__)

Opened: TypeAlias = Request | Sink | Stream | Duplex
"""What the peer may open, seen from this side: its sink is a Stream here, its stream a Sink."""

END_CREDIT = 256
"""Bytes that the peer may say with the end of something on which only this side sends."""


class Connection:
    """Two programs, each of which may ask, offer and listen. Made by ``connect`` and ``serve``.

    ``async for opened in connection`` gives what the peer opens; ``receive`` its messages of the
    top level. Both hold the peer back while they are not taken: their payloads have the credit of
    the top level in common (BP-R5), ``Stream.top_credit`` bytes.

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
        self.mux = Mux(config.mux, whole=True)
        """The core; see aqueduct.protocol.bpmux."""
        self.error: ConnectionLost | None = None
        """Why it is over, once it is."""
        self._transport = transport
        self._loop = asyncio.get_running_loop()
        self._writable = asyncio.Event()
        self._writable.set()
        self._live: set[Half] = set()
        self._leaving: set[Half] = set()
        """Those with something queued that somebody waits for."""
        self._abort: asyncio.TimerHandle | None = None
        self._gone: asyncio.Future[None] = self._loop.create_future()
        self._heard = self._loop.time()
        self._opened: deque[tuple[Opened, int]] = deque()
        self._accepting = asyncio.Event()
        self._top = Sink(self, self.mux.top_sink)
        self._messages = Stream(self, self.mux.top_stream, config.stream.top_credit)
        self.mux.credit(self.mux.top_stream, config.stream.top_credit)
        self._alive = self._loop.call_later(config.timing.ping_interval, self._stay_alive)
        own(self)
        self._flush()

    # What this side begins

    async def request(
        self, payload: Buffer = b"", *, window: int | None = None, timeout: float | None = None
    ) -> bytes:
        """Asks the peer, and waits for its response of at most Mux.payload_bytes.

        ``window``: how many bytes of it may come at once. A caller that is cancelled, or has waited
        for ``timeout``, cancels the request. Raises Ended when the peer ends it without a response,
        ConnectionLost, TimeoutError.
        """
        self._usable()
        entity = self.mux.request(payload, credit=window or self.window, total=self._total(payload))
        call = Call(self, entity)
        self._flush()
        try:
            async with self._deadline(timeout):
                return await call.answer()
        finally:
            call.cancel()

    def open_sink(self, payload: Buffer = b"") -> Sink:
        """A sink to the peer, which reads it as a stream. Opens with a payload (BP-R5)."""
        self._usable()
        total = self._total(payload)
        entity = self.mux.open_sink(payload, credit=END_CREDIT, whole=not total, total=total)
        sink = Sink(self, entity)
        self._flush()
        return sink

    def open_stream(self, payload: Buffer = b"", *, window: int | None = None) -> Stream:
        """A stream from the peer, which writes it as a sink, ``window`` bytes ahead at most."""
        self._usable()
        window = window or self.window
        entity = self.mux.open_stream(payload, credit=window, total=self._total(payload))
        stream = Stream(self, entity, window)
        self._flush()
        return stream

    def open_duplex(self, payload: Buffer = b"", *, window: int | None = None) -> Duplex:
        """Both in one."""
        self._usable()
        window = window or self.window
        out, into = self.mux.open_duplex(payload, credit=window, total=self._total(payload))
        self.mux.consumed(out, END_CREDIT)
        duplex = Duplex(Sink(self, out), Stream(self, into, window))
        self._flush()
        return duplex

    async def send(
        self, payload: Buffer, *, partial: bool | None = None, timeout: float | None = None
    ) -> None:
        """Sends a message on the top level; see Sink.send."""
        await self._top.send(payload, partial=partial, timeout=timeout)

    async def ping(self, *, timeout: float | None = None) -> float:
        """The round-trip time of a ping, seconds. Raises TimeoutError, ConnectionLost."""
        return await self._messages.ping(timeout=timeout)

    # What the peer begins

    async def accept(self, *, timeout: float | None = None) -> Opened:
        """The next thing that the peer opened: a Request, a Stream, a Sink or a Duplex.

        Raises ConnectionLost, and TimeoutError, if ``timeout`` (seconds) is given.
        """
        async with asyncio.timeout(timeout):
            while not self._opened:
                self._usable()
                self._accepting.clear()
                await self._accepting.wait()
        opened, charged = self._opened.popleft()
        self.mux.consumed(self.mux.top_stream, charged)
        if isinstance(opened, Stream):
            self.mux.consumed(opened._entity, opened.window)
        elif isinstance(opened, Duplex):
            self.mux.consumed(opened.stream._entity, opened.stream.window)
            self.mux.consumed(opened.sink._entity, END_CREDIT)
        elif isinstance(opened, Sink):
            self.mux.consumed(opened._entity, END_CREDIT)
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

    async def receive(self, *, timeout: float | None = None) -> bytes:
        """The next message of the top level. Raises ConnectionLost, TimeoutError."""
        return await self._messages.receive(timeout=timeout)

    # Its end

    async def close(self, payload: Buffer = b"") -> None:
        """Ends the connection: the peer gets ``payload`` as the reason.

        What was sent before arrives. Waits for the peer's acknowledgement for at most
        Timing.close_linger.
        """
        if self.error is None:
            self.mux.end(self.mux.top_sink, payload)
            self._top.ending = True
            self._flush()
            with suppress(TimeoutError, ConnectionLost, Ended):
                async with asyncio.timeout(self.config.timing.close_linger):
                    await self._top._until(lambda: self._top.acknowledged)
            self._over(ConnectionLost("this side closed the connection", code=0))
        await self.wait_closed()

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
        return f"<bpmux Connection with {self.peer}{' closed' if self.error else ''}>"

    # What handles ask

    def _deadline(self, timeout: float | None) -> asyncio.Timeout:
        return asyncio.timeout(self.config.timing.progress_deadline if timeout is None else timeout)

    def _ping(self, entity: Entity) -> None:
        self.mux.ping(entity, self._loop.time())
        self._flush()

    def _consumed(self, entity: Entity, charged: int) -> None:
        self.mux.consumed(entity, charged)
        self._flush()

    def _usable(self) -> None:
        if self.error is not None:
            raise self.error.with_traceback(None)

    def _total(self, payload: Buffer) -> int:
        """What an opening payload is to be announced as: 0 if it travels in one chunk.

        In one it waits for top-level credit for all of it, which the peer may never give.
        """
        size = memoryview(payload).nbytes
        most = min(self._top._most or size, self.config.mux.chunk)
        return size if size > most else 0

    async def _room(self) -> None:
        """Waits until the transport takes more."""
        await self._writable.wait()
        self._usable()

    def _flush(self) -> None:
        """Gives the transport what may leave, unless it has enough."""
        while self._writable.is_set() and self.error is None:
            buffers, size, _ = self.mux.take(self.config.mux.chunk)
            if not size:
                break
            self._transport.writelines(buffers)
        for handle in tuple(self._leaving):
            if not handle._entity.items:
                handle._changed()

    # What the transport and the core tell

    def _received(self, data: bytes) -> None:
        self._heard = self._loop.time()
        if self.error is None:
            self.mux.receive_data(data)
            self._dispatch()
            self._flush()

    def _received_eof(self) -> None:
        if self.error is None:
            self.mux.receive_eof()
            self._dispatch()

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
            handle._ponged(self._loop.time() - event[2])
        elif kind == events.ENDED:
            if entity is self.mux.top_stream:
                self._closed_by_peer(event[2])
            elif handle is not None:
                handle._ended(Ended(f"the peer has ended {handle!r}", event[2]))
        elif kind == events.ACKNOWLEDGED:
            handle._seen()
        elif kind == events.ABANDONED and handle is not None:
            text = f"{handle!r} never came to be: one side has closed the top level"
            handle._ended(ConnectionLost(text, code=0))
        elif kind == events.PONG_MISSING:
            log.warning("%s has not answered a ping for %s", self.peer, entity)

    def _open(self, entity: Entity, payload: bytes, charged: int) -> None:
        """The peer opened something, and the whole payload of that is here."""
        if len(self._opened) >= self.config.mux.entities:
            raise LimitExceeded(
                f"the peer has opened {len(self._opened)} entities that were not accepted; "
                f"Mux.entities is {self.config.mux.entities}"
            )
        opened: Opened
        if entity.place == REQ_IN:
            opened = Request(self, entity, payload)
        elif entity.place == SINK_IN:
            opened = Sink(self, entity, payload)
            if entity.twin is not None:
                opened = Duplex(opened, Stream(self, entity.twin, self.window))
        else:
            opened = Stream(self, entity, self.window, payload)
        self._opened.append((opened, charged))
        self._accepting.set()

    def _closed_by_peer(self, payload: bytes) -> None:
        self._flush()  # the acknowledgement
        text = bytes(payload).decode("utf-8", "replace")
        reason = f": {text}" if text else ""
        self._over(
            ConnectionLost(
                f"{self.peer} closed the connection{reason}", code=0, reason=text, remote=True
            )
        )

    def _broken(self, error: RemoteProtocolError) -> None:
        log.warning("%s broke bpmux: %s", self.peer, error)
        lost = ConnectionLost(f"{self.peer} broke bpmux: {error}", code=error.code)
        lost.__cause__ = error
        self._over(lost, abort=True)

    def _over(self, error: ConnectionLost, *, abort: bool = False) -> None:
        """Tells every handle, and lets the transport go."""
        if self.error is None:
            self.error = error
            self._alive.cancel()
            for handle in tuple(self._live):
                handle._ended(error)
            self._accepting.set()
            self._writable.set()  # who waits for it finds the error
        if abort:
            self._transport.abort()
        else:
            self._transport.close()
            if self._abort is None:
                linger = self.config.timing.close_linger
                self._abort = self._loop.call_later(linger, self._transport.abort)

    def _lost(self, error: Exception | None) -> None:
        """The transport is gone."""
        why = "without a close" if error is None else str(error)
        lost = ConnectionLost(f"the connection with {self.peer} is lost: {why}")
        lost.__cause__ = error
        self._over(lost)
        if self._abort is not None:
            self._abort.cancel()
        if not self._gone.done():
            self._gone.set_result(None)

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
            self._ping(self.mux.top_stream)


class Link(asyncio.Protocol):
    """What the event loop calls."""

    def __init__(self, config: Config, window: int, place: str, made: Any = None) -> None:
        self.connection: Connection
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
        self.connection = Connection(transport, self._config, place, self._window)
        if self._made is not None:
            self._made(self.connection)

    def data_received(self, data: bytes) -> None:
        """See asyncio."""
        self.connection._received(data)

    def eof_received(self) -> None:
        """See asyncio; ``connection_lost`` follows."""
        self.connection._received_eof()

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


def name_of(place: Any) -> str:
    """An address of the socket module as people write it."""
    if not isinstance(place, tuple):
        return os.fsdecode(place) or "a process of this machine"
    return host_port(place)
