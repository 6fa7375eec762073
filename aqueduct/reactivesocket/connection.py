"""A connection of ReactiveSocket on an event loop, with both roles."""

from __future__ import annotations

import asyncio
import inspect
import os
from collections import Counter
from collections.abc import Awaitable
from dataclasses import dataclass
from types import CoroutineType
from typing import Any, Final, Self

from cryptography import x509

from aqueduct._speedups.reactivesocket import reactive_frames as frames
from aqueduct.arguments import Duration, Size, checked
from aqueduct.carriers.contract import PeerCredentials, PeerIdentity
from aqueduct.carriers.stream.sockets import credentials_of
from aqueduct.carriers.transports.byte_transport import ByteTransport
from aqueduct.carriers.transports.reasons import reason_of
from aqueduct.carriers.transports.waiting import Waiters
from aqueduct.carriers.verify import TlsError, identity_read
from aqueduct.config import Config
from aqueduct.endpoint.eager_task import EagerTaskFactory
from aqueduct.errors import AqueductError, ConnectFailed, ConnectionLost
from aqueduct.escaping import logger_of
from aqueduct.forks import own, sever
from aqueduct.protocol.reactivesocket import events, reasons
from aqueduct.protocol.reactivesocket.connection import ReactiveConnection
from aqueduct.protocol.reactivesocket.state import ReactiveState
from aqueduct.reactivesocket.face import ReactiveFace
from aqueduct.reactivesocket.owner import ReactiveOwner
from aqueduct.reactivesocket.requesting import (
    ERROR_MOST,
    Data,
    ReactiveItem,
    ReactiveStream,
    ask,
    error_of,
    no_room,
)
from aqueduct.reactivesocket.responding import ReactiveRequest, Responder

__all__ = ["ReactiveSnapshot", "ReactiveSocketConnection"]

log = logger_of(__name__)

_ROUNDS: Final = 8
"""So often in a row what has left makes room for more; then other connections have a turn."""
_CLOSED: Final = "this side closes the connection"


@dataclass(frozen=True, slots=True)
class ReactiveSnapshot:
    """What a connection is doing."""

    state: str
    """``offered`` before the SETUP is known accepted, ``open`` or ``ended``."""
    requested: int
    """Requests of this side that have not ended."""
    responding: int
    """Requests of the peer that have not ended."""
    held_bytes: int
    """Bytes that are kept: what came and is in use, what waits to leave, and open streams."""
    queued_bytes: int
    """Those of them that wait to leave."""
    reading: bool
    """Whether bytes of the peer are read. They are not while too many are in use."""


class ReactiveSocketConnection:
    """Two programs that request from each other. Made by ``connect`` and ``serve``.

    ``request``, ``fire``, ``stream`` and ``subscribe`` ask the peer. What the peer asks goes to the
    ``responder`` of this side.

    ``async with`` closes it at the end.
    """

    def __init__(
        self,
        core: ReactiveConnection,
        config: Config,
        owner: ReactiveOwner,
        responder: Responder | None,
        *,
        setup: bytes = b"",
        peer: str = "",
    ) -> None:
        self.config = config
        self.core = core
        """See aqueduct.protocol.reactivesocket."""
        self.peer = peer
        """The address of the peer."""
        self.peer_identity: PeerIdentity | None = None
        """Who the peer's certificate says it is; None: it has shown none."""
        self.peer_credentials: PeerCredentials | None = None
        """The process at the other end of a Unix socket; None: it is none."""
        self.setup = setup
        """The data of the client's SETUP."""
        self._owner = owner
        self._responder = responder
        self._face = ReactiveFace(core, config, self.advance)
        self._loop = asyncio.get_running_loop()
        self._transport: ByteTransport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._early: dict[int, events.Event] | None = None if core.client else {}
        """Requests that came before the SETUP was accepted, by their stream; None: it was. Those
        that want no answer have numbers below zero."""
        self._fired = 0
        """How many of the latter came."""
        self._doomed: Counter[int] = Counter()
        """How often streams of the peer are cancelled by events that are still to be told."""
        self._deciding: asyncio.Task[None] | None = None
        self._answering: set[_Answering] = set()
        """What answers requests and has not ended."""
        self._eager = EagerTaskFactory(self._loop)
        self._rejected = False
        self._stuck_since: float | None = None
        """When the peer has last taken some of what waits to leave; None: the kernel takes it."""
        self._untaken = 0
        """Bytes that had not been taken then."""
        self._held_since: float | None = None
        """When this side began to read nothing, as too much is in use; None: it reads."""
        self._refusing = False
        """It reads all the same, and refuses requests until less is in use."""
        self._changes = Waiters()
        self._gone: asyncio.Future[None] = self._loop.create_future()
        own(self)

    @property
    def error(self) -> ConnectionLost | None:
        """Why the connection is over; None: it is not."""
        return self._face.error

    @property
    def closed(self) -> bool:
        """Whether the connection is over."""
        return self._face.error is not None

    # What the application does

    @checked(data="message_payload")
    async def request(self, data: Data = b"", *, timeout: Duration | None = None) -> ReactiveItem:
        """Asks for one item. ``data``: a buffer, or several, which must not change meanwhile.

        Raises ReactiveError if the peer answers with an ERROR, ConnectionLost, LocalProtocolError
        for data that cannot be sent, and TimeoutError after ``timeout`` (seconds; None:
        Timing.progress_deadline). A request that is given up is cancelled.
        """
        self._requestable()
        if timeout is None and self._face.free:
            return await ask(self._face, self.peer, data, timed=True)
        async with self._face.deadline(timeout, no_room(self.peer)) as deadline:
            await self._face.wait_room()
            deadline.missing = f"{self.peer} gave no answer"
            return await ask(self._face, self.peer, data)

    @checked(data="message_payload")
    async def fire(self, data: Data = b"", *, timeout: Duration | None = None) -> None:
        """Sends a request without an answer. It waits for room to send alone.

        Whether it arrives is not known. Raises as ``request`` does.
        """
        self._requestable()
        if not self._face.free:
            async with self._face.deadline(timeout, no_room(self.peer)):
                await self._face.wait_room()
        self.core.request(frames.REQUEST_FNF, data)
        self._face.advance_soon()

    @checked(data="message_payload", n="in_flight", bytes="in_flight_bytes")
    def stream(self, data: Data = b"", *, n: int = 16, bytes: Size | None = None) -> ReactiveStream:
        """Items that end; see ReactiveStream.

        ``n``: items that are asked for ahead. ``bytes``: what these may have (None:
        Flow.channel_receive_bytes).
        """
        return self._stream(frames.REQUEST_STREAM, data, n, bytes)

    @checked(data="message_payload", n="in_flight", bytes="in_flight_bytes")
    def subscribe(
        self, data: Data = b"", *, n: int = 16, bytes: Size | None = None
    ) -> ReactiveStream:
        """Items that come until one side ends them; else as ``stream``."""
        return self._stream(frames.REQUEST_SUB, data, n, bytes)

    async def close(self) -> None:
        """Ends the connection: what waits to leave does so, within Timing.close_linger.

        Requests of this side end with ConnectionLost. Those of the peer that are not answered get
        an ERROR. Closing again waits for the first close.
        """
        face = self._face
        if face.error is None and not face.closing:
            face.closing = True
            for request in tuple(face.responding.values()):
                request.give_up(_CLOSED, reasons.CANCELED)
            error = ConnectionLost(_CLOSED, code=0)
            for awaited in tuple(face.requested.values()):
                awaited.end(error)
            until = self._loop.time() + self.config.timing.close_linger
            self.advance()
            try:
                async with asyncio.timeout_at(until):
                    await self._changes.until(lambda: face.error is not None or self._all_left())
            except TimeoutError:
                log.info("%s: it did not take everything before the close", self.peer)
            finally:
                self._over(error, until)
        await self.wait_closed()

    async def wait_closed(self) -> None:
        """Returns once the connection is over and its transport gone; see ``error``."""
        await asyncio.shield(self._gone)

    def answering(self) -> list[asyncio.Task[None]]:
        """The tasks that answer requests of the peer and have not ended."""
        return [task for work in self._answering if (task := work.at_work) is not None]

    def snapshot(self) -> ReactiveSnapshot:
        """What the connection is doing."""
        core, face = self.core, self._face
        state = "offered" if core.state in (ReactiveState.NEW, ReactiveState.OFFERED) else "open"
        return ReactiveSnapshot(
            "ended" if self.closed else state,
            len(core.requested),
            len(core.responding),
            face.lent if self.closed else core.held_bytes + face.unsent + face.lent,
            core.queued_bytes + face.unsent,
            self._held_since is None or self._refusing,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    def left_behind(self) -> None:
        """In a forked child: the connection is the parent's. Its socket is closed here."""
        sock = None if self._transport is None else self._transport.extra("socket")
        if sock is not None:
            sever((sock.fileno(),))
        error = ConnectionLost(
            f"the connection with {self.peer} belongs to the process that process {os.getpid()} "
            "was forked from; connect after the fork"
        )
        self._face.end(error)
        if not self._gone.done():
            self._gone.set_result(None)

    def log_fields(self) -> dict[str, object]:
        """What a line of the log about it has as fields."""
        return {"peer": self.peer}

    def __repr__(self) -> str:
        return f"<ReactiveSocketConnection with {self.peer}, {self.snapshot().state}>"

    # What the owner does

    def carry(self, transport: ByteTransport) -> None:
        """This is its transport."""
        self._transport = transport

    def abandon(self, reason: str) -> None:
        """Ends it at once."""
        if self._transport is not None:
            self._transport.abort()
        self._over(ConnectionLost(f"the connection with {self.peer} is ended: {reason}", code=0))
        self._is_gone()

    def accepted(self) -> None:
        """At a server: the SETUP is taken. Requests that came with it begin."""
        self.core.accept()
        early, self._early = self._early or {}, None
        for event in early.values():
            self._happened(event)
        self._face.advance_soon()

    def rejected(self, text: str) -> None:
        """At a server: the SETUP is not taken. The client is told, and the connection ends."""
        self._rejected = True
        self.core.reject(text)
        reason = f"the SETUP of {self.peer} is rejected: {text}"
        log.info("%s", reason)
        self._over(ConnectionLost(reason))

    # What a transport tells

    def made(self) -> None:
        """The transport is there."""
        transport = self._transport
        assert transport is not None
        self.peer = transport.peer
        sock, tls = transport.extra("socket"), transport.extra("ssl_object")
        if sock is not None:
            self.peer_credentials = credentials_of(sock)
        if tls is not None:
            shown = tls.getpeercert(binary_form=True)
            try:
                self.peer_identity = identity_read(
                    lambda: x509.load_der_x509_certificate(shown) if shown else None
                )
            except TlsError as error:
                raise ConnectionLost(f"{self.peer}: {error}", reason=str(error)) from error
        self._owner.made(self)

    def opened(self) -> None:
        """Frames may flow."""
        self._owner.opened(self)
        self.advance()

    def fail(self, error: ConnectionLost) -> None:
        """The transport is of no use."""
        if not self.core.client:
            log.info("%s", error)
        self._over(error)

    def advance(self) -> None:
        """Dispatches what happened, sends what may leave, and sets the timer."""
        face, transport = self._face, self._transport
        if face.advancing or face.error is not None:
            return
        face.advancing = True
        more = False
        try:
            face.settle()
            self._dispatch()
            for _ in range(_ROUNDS):
                if transport is None or face.error is not None:
                    break
                face.settle()
                transport.flush()
                face.unsent = transport.unsent
                more = face.tell_room()
                if not self._dispatch() and (self.core.idle or not transport.free):
                    break
            else:
                more = True
        finally:
            face.advancing = False
        if face.error is not None:
            return
        if more or face.unsettled:
            face.advance_soon()  # others have a turn before
        self._count()
        if face.closing:
            self._changes.wake()
        self._hold()
        self._arm()

    def came(self) -> None:
        """Bytes have come: most often a part of something large."""
        if self.core.pending:
            self.advance()
        elif self._face.error is None:
            self._count()
            self._hold()
            if self._held_since is not None:
                self._arm()

    def drained(self) -> None:
        """More may leave."""
        self._stuck_since = None
        self.advance()

    def gone(self, error: Exception | None) -> None:
        """The transport has ended."""
        if isinstance(error, ConnectionLost):
            self._over(error)
        elif self._face.error is None:
            if error is None:
                self.core.receive_eof()
                self._dispatch()
            why = "the peer closed the connection" if error is None else str(error)
            if isinstance(error, OSError):
                why = reason_of(error, server=not self.core.client)
            transport = self._transport
            silent = transport is not None and transport.heard_at is None
            if silent and self.core.client and self.peer_identity is not None:
                why += "; it has said nothing within TLS: perhaps it demands another certificate"
            text = f"the connection with {self.peer} is over: {why}"
            self._over(ConnectionLost(text, reason=why, remote=True))
        self._is_gone()

    # Within

    def _requestable(self) -> None:
        self._face.usable()
        if self._face.closing:
            raise ConnectionLost(_CLOSED, code=0)

    def _stream(self, kind: int, data: Data, n: int, most: Any) -> ReactiveStream:
        self._requestable()
        most = self.config.flow.channel_receive_bytes if most is None else most
        return ReactiveStream(self._face, kind, data, self.peer, n, most)

    def _count(self) -> None:
        """Tells the accounts of the process what this holds."""
        face, transport = self._face, self._transport
        queued = self.core.queued_bytes
        received = self.core.held_bytes - queued + face.lent
        if transport is not None:
            received += transport.coming
        face.memory.count(received, queued + face.unsent)

    def _all_left(self) -> bool:
        return self.core.idle and not self._face.unsent

    def _hold(self) -> None:
        """Reads nothing while too much that came is in use."""
        transport, now = self._transport, self._loop.time()
        core, face = self.core, self._face
        full = core.full or not face.memory.may_read(core.whole_bytes, now)
        if not full:
            self._refusing = False
        if face.crowded or core.unheard or (full and not self._refusing):
            if self._held_since is None:
                self._held_since = now
                face.held = True
                if transport is not None:
                    transport.hold(True)
        elif self._held_since is not None:
            self._held_since = None
            face.held = False
            if transport is not None:
                transport.hold(False)

    def _arm(self) -> None:
        """Sets the timer for what is due next."""
        if self._transport is None or self._transport.free:
            self._stuck_since = None
        elif self._stuck_since is None:
            self._stuck_since, self._untaken = self._loop.time(), self._transport.untaken
        due = self.core.next_deadline()
        timing = self.config.timing
        if self._stuck_since is not None:
            stuck = self._stuck_since + timing.progress_deadline
            due = stuck if due is None else min(due, stuck)
        if self._held_since is not None:
            held = self._held_since + timing.stall_deadline
            due = held if due is None else min(due, held)
        timer = self._timer
        if timer is not None and (due is None or due < timer.when()):
            timer.cancel()
            self._timer = timer = None
        if due is not None and timer is None:
            self._timer = self._loop.call_at(due, self._timed)

    def _timed(self) -> None:
        self._timer = None
        now, timing = self._loop.time(), self.config.timing
        stuck, held = self._stuck_since, self._held_since
        transport = self._transport
        if stuck is None or transport is None or now < stuck + timing.progress_deadline:
            pass
        elif (untaken := transport.untaken) != self._untaken:
            self._stuck_since, self._untaken = now, untaken  # it is slow
        else:
            seconds = timing.progress_deadline
            self.abandon(
                f"the peer has taken nothing for {seconds:g} s of what waits to leave "
                "(Timing.progress_deadline)"
            )
            return
        if held is not None and now >= held + timing.stall_deadline:
            # What waits may need what the peer says next, as its demand, or an answer.
            self._held_since = now
            self._refusing = self._early is None and self.core.whole_bytes > 0
        self.core.handle_deadline(now)
        self.advance()

    def _dispatch(self) -> bool:
        """Tells the handles what happened; whether something did."""
        found = self.core.events_received()
        for event in found:
            if event[0] == events.CANCELLED:
                self._doomed[event[1]] += 1
        for event in found:
            if self._face.error is not None:
                break
            self._happened(event)
        return bool(found)

    def _happened(self, event: events.Event) -> None:
        kind = event[0]
        face = self._face
        if kind == events.ITEM:
            awaited = face.requested.get(event[1])
            if awaited is not None:
                awaited.item(event[2], event[3])
            else:
                self.core.release(event[3])
        elif kind == events.REQUEST:
            self._requested(event)
        elif kind == events.COMPLETED:
            self._ended(event[1], None)
        elif kind == events.DEMAND:
            request = face.responding.get(event[1])
            if request is not None:
                request.changed()
            elif self._early is not None:
                pass  # it is answered later, and looks at its demand then
        elif kind == events.ERROR:
            self.core.release(event[3])
            self._ended(event[1], error_of(event[2], self.peer))
        elif kind == events.BROKEN:
            self._ended(event[1], event[2])
        elif kind in (events.CANCELLED, events.ABORTED):
            self._cancelled(event)
        elif kind == events.SETUP:
            self.setup = event[1]
            self._decide()
        elif kind in (events.REJECTED, events.PEER_FAILED):
            self._refused(kind, event[1])
        elif kind == events.ENDED:
            said = "" if self._transport is None else self._transport.said
            text = f"the peer {self.peer} closed the connection" + (said and f": {said}")
            self._over(ConnectionLost(text, code=0, remote=True))
        elif kind == events.FAILED:
            log.warning("%s broke ReactiveSocket: %s", self.peer, event[1])
            text = f"{self.peer} broke ReactiveSocket: {event[1]}"
            error = ConnectionLost(text, code=event[1].code, reason=str(event[1]))
            error.__cause__ = event[1].with_traceback(None)
            self._over(error)

    def _ended(self, stream: int, error: AqueductError | None) -> None:
        awaited = self._face.requested.pop(stream, None)
        if awaited is not None:
            awaited.end(error)

    def _refused(self, kind: str, data: bytes) -> None:
        """The peer ends the connection, or has not taken the SETUP."""
        _, text = reasons.decode_reason(data[:ERROR_MOST])
        if kind == events.REJECTED:
            said = f"{self.peer} rejects the SETUP: {text}"
            self._over(ConnectFailed(said, reason=text, remote=True))
        else:
            said = f"{self.peer} ended the connection: {text}"
            self._over(ConnectionLost(said, reason=text, remote=True))

    def _requested(self, event: events.Event) -> None:
        """A request of the peer."""
        if self._early is not None:
            if self._deciding is None and self.core.state is ReactiveState.OPEN:
                self._decide()  # a client without a SETUP
            if self._early is not None:
                self._fired += event[2] == frames.REQUEST_FNF
                key = -self._fired if event[2] == frames.REQUEST_FNF else event[1]
                self._early[key] = event
                return
        _, stream, kind, _, data, cost = event
        if kind != frames.REQUEST_FNF and (
            stream in self._doomed or stream not in self.core.responding
        ):
            self.core.release(cost)  # it was cancelled meanwhile; its id may be in use again
            return
        most = self.config.reactivesocket.streams
        if kind == frames.REQUEST_FNF and len(self._answering) >= most:
            self.core.release(cost)  # nobody would hear of a refusal
            return
        request = ReactiveRequest(self._face, self, stream, kind, data, cost)
        if kind != frames.REQUEST_FNF:
            self._face.responding[stream] = request
        if self._refusing:
            request.fail(
                "requests that are not done with hold all memory that there is for them "
                "(ReactiveSocket.receive_bytes, Flow.process_receive_budget)",
                reasons.REJECTED,
            )
        elif self._face.closing:
            request.fail(_CLOSED, reasons.REJECTED)
        elif self._responder is None:
            request.fail("this side answers no requests", reasons.REJECTED)
        else:
            self._respond(self._responder, request)

    def _cancelled(self, event: events.Event) -> None:
        """A request of the peer has ended by what the peer did."""
        kind, stream = event[0], event[1]
        why = "the peer has cancelled it" if kind == events.CANCELLED else str(event[2])
        if kind == events.CANCELLED:
            self._doomed[stream] -= 1
            if not self._doomed[stream]:
                del self._doomed[stream]
        request = self._face.responding.get(stream)
        if request is not None:
            request.end(why)
        early = self._early.pop(stream, None) if self._early else None
        if early is not None:
            self.core.release(early[-1])

    def _respond(self, responder: Responder, request: ReactiveRequest) -> None:
        try:
            answering = responder(request)
        except Exception:
            log.exception("the responder failed at %r", request)
            request.fail("the responder failed")
            return
        if type(answering) is CoroutineType or inspect.isawaitable(answering):
            # One that answers at once needs no task of its own, which would cost as much again.
            work = _Answering(answering, request, self._answering)
            self._answering.add(work)
            self._eager.start(work)
        elif answering is not None:
            found = type(answering).__name__
            log.error("the responder must return a coroutine or None, not %s: %r", found, request)
            request.fail("the responder failed")

    def _decide(self) -> None:
        """At a server: whether the SETUP is taken."""
        if self.core.client:
            return
        self._deciding = self._loop.create_task(self._ask_owner())

    async def _ask_owner(self) -> None:
        try:
            text = await self._owner.offered(self)
        except Exception:
            log.exception("the SETUP of %s could not be looked at", self.peer)
            text = "the server failed to look at the SETUP"
        if self.closed:
            return
        if text is None:
            self.accepted()
        else:
            self.rejected(text)

    def _over(self, error: ConnectionLost, until: float | None = None) -> None:
        """Tells every handle, and lets the transport go; see ``finish`` of it for ``until``."""
        face = self._face
        if face.error is not None:
            return
        face.end(error)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._deciding is not None and self._deciding is not asyncio.current_task(self._loop):
            self._deciding.cancel()
        transport = self._transport
        if transport is not None:
            # In TLS there is no half of a close: the peer closes when it has read the ERROR.
            last = self.core.error is not None or self._rejected
            transport.finish(drain=True, last=last, until=until)
        self.core.receive_eof()
        requests, awaited_ones = tuple(face.responding.values()), tuple(face.requested.values())
        face.requested.clear()
        for request in requests:
            request.end(str(error))
        current = asyncio.current_task(self._loop)
        for work in self._answering:
            work.connection_ended(current)
        for awaited in awaited_ones:
            awaited.end(error)
        self._early = {}
        face.stop()
        self._eager.close()
        face.count_over()
        self._changes.wake()
        self._owner.over(self)
        if transport is None:
            self._is_gone()

    def _is_gone(self) -> None:
        if not self._gone.done():
            self._gone.set_result(None)
            self._owner.released(self)


class _Answering:
    """What answers a request, as work of an EagerTaskFactory."""

    __slots__ = ("_all", "_answering", "_request")

    def __init__(
        self, answering: Awaitable[None], request: ReactiveRequest, all_: set[_Answering]
    ) -> None:
        self._answering = answering
        self._request = request
        self._all = all_

    @property
    def task(self) -> asyncio.Task[None]:
        """The request knows it, which cancels it."""
        assert self._request.task is not None
        return self._request.task

    @task.setter
    def task(self, task: asyncio.Task[None]) -> None:
        self._request.task = task

    @property
    def at_work(self) -> asyncio.Task[None] | None:
        """The task; None: it has answered."""
        return self._request.task

    def connection_ended(self, current: asyncio.Task[Any] | None) -> None:
        """What has no stream is cancelled here, unless it ends the connection itself."""
        task = self._request.task
        if self._request.kind == "fire" and task is not None and task is not current:
            task.cancel()

    def ended(self) -> None:
        """See Work."""
        self._all.discard(self)
        if inspect.iscoroutine(self._answering):
            # It was never begun if the task was cancelled before its first step.
            self._answering.close()

    async def run(self) -> None:
        """Answers the request."""
        request = self._request
        try:
            await self._answering
        except asyncio.CancelledError:
            request.fail("the responder was cancelled", reasons.CANCELED)
            raise
        except Exception as error:
            if not request.ended:
                log.exception("the responder failed at %r", request)
                request.fail(f"the responder failed: {type(error).__name__}")
        else:
            if request.kind == "subscribe":
                request.fail("the subscription has ended", reasons.APPLICATION_ERROR)
            elif request.kind == "request" and not request.ended:
                request.fail("the responder gave no answer")
            else:
                request.complete()
        finally:
            request.task = None
            request.release()
