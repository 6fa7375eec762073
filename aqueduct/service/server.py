"""A service while it runs: its listeners, its connections, its calls, and its drain."""

from __future__ import annotations

import asyncio
import heapq
import inspect
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from contextvars import copy_context
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from aqueduct._speedups.channels.receiver import ReceiveQueue
from aqueduct.arrow.ipc import LONG_SCHEMA
from aqueduct.carriers.certificates import ServerTls
from aqueduct.carriers.contract import Bound
from aqueduct.config import Config
from aqueduct.endpoint import Connection, Message, Receiver, Server, accounts, serve_calls
from aqueduct.endpoint.eager_task import EagerTaskFactory
from aqueduct.endpoint.hooks import allows
from aqueduct.errors import (
    AqueductError,
    BadCall,
    BatchTooLarge,
    Busy,
    CallError,
    ChannelError,
    ConnectionLost,
    HandlerFailed,
    Refused,
    SchemaMismatch,
    UnknownHandler,
)
from aqueduct.escaping import Lines, logger_of, near_miss
from aqueduct.rpc.deadline import ProgressTimer
from aqueduct.rpc.head_cache import HeadCache
from aqueduct.rpc.keys import ALIVE, BODY
from aqueduct.rpc.request import PLACES, CallHead, check_attachments
from aqueduct.rpc.status import CANCELLED, OK, Status
from aqueduct.rpc.table_scan import PLAN, READ, ROWS
from aqueduct.rpc.threads import Job, ThreadPool, provide
from aqueduct.rpc.unary import room_of
from aqueduct.service.async_runner import (
    MapRunner,
    drive_async_generator,
    drive_coroutine,
    drive_coroutine_sink,
)
from aqueduct.service.call import Run, ServerCall
from aqueduct.service.call_connection import CallConnection
from aqueduct.service.call_totals import COUNTED, CallTotals
from aqueduct.service.context import Call
from aqueduct.service.handlers import Handler, HandlerShape
from aqueduct.service.reactive_gateway import (
    CallDispatcher,
    ReactiveGateway,
    connection_of,
    is_reactive,
    snapshot_line,
    snapshot_of,
)
from aqueduct.service.shared_runner import WaitingRooms
from aqueduct.service.task_book import TaskBook
from aqueduct.service.thread_runner import GeneratorRunner
from aqueduct.service.unary import UnaryCall
from aqueduct.service.waiting_room import run_in_turn

if TYPE_CHECKING:
    from aqueduct.admin.report import Phase
    from aqueduct.protocol.common.receiver import Received
    from aqueduct.service.telemetry import Observer

__all__ = ["COUNTERS", "Authorize", "RunningService"]

log = logger_of(__name__)

_Opening: TypeAlias = tuple[CallHead, memoryview | None]
"""A call, and the payload of its one batch if that came with it."""

Authorize: TypeAlias = Callable[[Call], Awaitable[bool | None] | bool | None]

_ENDS: Final = ("failed", "cancelled", "refused", "unreported")
COUNTERS: Final = (
    "calls",
    "open_calls",
    "waiting_calls",
    "connections",
    "open_connections",
    "resumes",
    *_ENDS,
    *COUNTED,
)
"""The names that ``RunningService.counters`` has."""

_OF_HANDLERS: Final = (HandlerFailed, SchemaMismatch, BatchTooLarge)
"""Errors of answers: the handler's fault, unless the client's input was wrong."""
_AT_ONCE: Final = 32
"""Calls of one connection that begin in one turn of the loop."""
_WIDE_AT_ONCE: Final = 4
"""Calls of one connection whose very wide schemas are read at the same time. Later calls wait."""
_CLOSING: Final = 2.0
"""Seconds at the end of a drain, at most, in which open calls fail and clients are told."""
_LAST: Final = 1 / 10
"""The part of Timing.close_linger in which connections of ReactiveSocket close, even if the drain
is over."""
_LEASED: Final = 4096
"""A unary call of so many bytes is charged until its end; a smaller one until it begins."""


class RunningService:
    """What ``Service.serving`` gives: a service that listens."""

    def __init__(
        self,
        name: str,
        config: Config,
        handlers: Mapping[str, Handler],
        *,
        authorize: Authorize | None = None,
        telemetry: Observer | None = None,
        server_tls: ServerTls | None = None,
        kept: Callable[[float], float] = lambda drain: 0.0,
    ) -> None:
        """``kept``: of the seconds of a drain, those that are for what comes after it."""
        self.name = name
        self.config = config
        self._kept = kept
        self.calls: set[ServerCall] = set()
        """Calls that are open now."""
        self._tls = server_tls
        self._server: Server | None = None
        self._ending: Server | None = None
        """The server, while it is being closed."""
        self._pool = ThreadPool(f"aqueduct-{name}")
        provide(self.config.calls.threads_at_work)
        self._connections: dict[CallConnection, set[ServerCall]] = {}
        self._gateway = ReactiveGateway(self)
        self._by_handler: Counter[str] = Counter()
        self._rooms = WaitingRooms(self, self.config.calls)
        self._counted: Counter[str] = Counter()
        self.totals = CallTotals(handlers)
        """What calls have done, by handler."""
        self.tasks = TaskBook(config.calls.spark_tasks)
        """What they have done, by Spark task."""
        self.since: dict[CallConnection, float] = {}
        """When each connection that is open began, by ``time.monotonic``."""
        self._number = 0
        self.ready = False
        """Whether clients should come: from the first address on, until a drain begins."""
        self._draining = False
        self.admin_addresses: list[str] = []
        """Where the admin port listens, such as ``http://127.0.0.1:9464``; empty: there is none."""
        self.listens = False
        """Whether clients could connect at some time."""
        self._closing = False
        """Whether no call is taken any more: later than a drain begins, if it has a delay."""
        self._forced = False
        self._idle = asyncio.Event()
        """Nothing more is waited for; looked at while the service drains."""
        self.handlers = handlers
        """The registered ones; more may come."""
        self._authorize = authorize
        self._telemetry = telemetry
        self.sizes: dict[str, int] = {}
        """Bytes of the largest answer of the last call of each handler that makes large ones."""
        self.room = room_of(self.config.calls)
        """Bytes of a call's answers that go with its status."""
        loop = asyncio.get_running_loop()
        self._starter = EagerTaskFactory(loop)
        self.watches = ProgressTimer(loop, self.config.timing.progress_deadline)
        """The deadlines of the calls."""

    @property
    def addresses(self) -> list[str]:
        """What clients connect to: real ports, and of a development certificate the fingerprint."""
        own = list(self._server.addresses) if self._server is not None else []
        return own + self._gateway.addresses

    def __repr__(self) -> str:
        places = ", ".join(self.addresses) or "no address"
        return (
            f"<RunningService {self.name!r} at {places}: {'ready' if self.ready else 'not ready'}, "
            f"{len(self._connections)} connections, {len(self.calls)} calls>"
        )

    @property
    def connections(self) -> list[Any]:
        """Those that are open now: a Connection, or a ReactiveSocketConnection."""
        return [connection_of(each) for each in tuple(self._connections)]

    @property
    def phase(self) -> Phase:
        """What the service is at."""
        if self.ready:
            return "serving"
        return "draining" if self.listens or self._draining else "starting"

    def counters(self) -> dict[str, int]:
        """What was counted since the start; may be called from any thread.

        ``calls`` and ``connections`` are totals and ``open_calls`` and ``open_connections`` what
        is there now; ``waiting_calls`` of the open ones wait for their turn. ``resumes`` are cuts
        after which a connection went on. Of the calls, ``failed`` ended with an error,
        ``cancelled`` were abandoned by their clients, and ``refused`` never began (busy, unknown,
        token, schema). ``unreported`` are those of them whose client is not told, as they were
        fired (REQUEST_FNF).
        """
        # First what is over, then what is open: what ends in between is not counted twice.
        moved = self.totals.moved()
        open_calls = tuple(self.calls)
        resumes = self._counted["resumes"]
        resumes += sum(connection.carrier.resumes for connection in tuple(self._connections))
        found = {
            "calls": self._number,
            "open_calls": len(open_calls),
            "waiting_calls": self._rooms.waiting,
            "connections": self._counted["connections"],
            "open_connections": len(self._connections),
            "resumes": resumes,
        }
        for name in _ENDS:
            found[name] = self._counted[name]
        found.update(moved)
        for call in open_calls:
            for name, count in call.counters().items():
                found[name] += count
        return found

    async def start(self, addresses: Sequence[str | Bound], *, origins: Sequence[str] = ()) -> None:
        """Begins to listen. Raises ConfigError for an address that cannot work or is taken.

        ``origins``: of web pages that may connect by a WebSocket.
        """
        reactive = [each for each in addresses if is_reactive(each)]
        others = [each for each in addresses if not is_reactive(each)]
        if others or not reactive:
            self._server = await serve_calls(
                self._serve_connection, others, config=self.config, tls=self._tls
            )
        try:
            await self._gateway.start(reactive, origins, self._tls)
        except BaseException:
            if self._server is not None:
                await self._server.close()
            raise
        self.listens = self.ready = True

    async def close(self, *, drain: float | None = None, alone: bool = False) -> None:
        """Takes no more calls, waits for those that are open, and ends, within ``drain`` seconds.

        None means Timing.drain_timeout. The last quarter of them, 2 s at most, is for the end of
        calls that are still open then: they fail with Refused. ``alone``: other workers go on, and
        so do calls of theirs whose bytes pass through here, on other connections.
        """
        self.ready = False
        self._draining = True
        server, self._server = self._server, None
        if self._closing:
            return
        self._closing = True
        if server is not None:
            self._ending = server
            server.stop_listening()
            if alone:
                server.end_relays()
        await self._gateway.drain()
        whole = self.config.timing.drain_timeout if drain is None else drain
        whole = max(whole - self._kept(whole), 0.0)
        closing = min(whole / 4, _CLOSING)
        seconds = whole - closing
        loop = asyncio.get_running_loop()
        began = loop.time()
        end = began + whole - closing / 2
        if not await self._wait_idle(0 if self._forced else seconds):
            # Less than was planned after a second signal.
            self._refuse_open_calls(round(min(loop.time() - began, seconds), 2))
            await self._wait_idle(closing / 2)
        relays = end - loop.time()
        last = _LAST * self.config.timing.close_linger
        closes = [self._gateway.close(max(end + closing / 2 - loop.time(), last))]
        if server is not None:
            closes.append(server.close(reason="the service has ended", relays=relays))
        await asyncio.gather(*closes)
        for running in tuple(self.calls):  # handlers that do not end
            running.task.cancel()
        self._rooms.close()
        self._pool.close()
        self._starter.close()
        self.watches.close()

    def _refuse_open_calls(self, seconds: float) -> None:
        log.warning(
            "%s: %d calls did not end within %g s and are ended now",
            self.name,
            len(self.calls),
            seconds,
        )
        for connection in self._connections:
            log.info("%s", snapshot_line(connection))
        for running in tuple(self.calls):
            call = running.call
            text = f"the service {self.name!r} is ending"
            ending = Refused(text, peer=call.peer, handler=call.handler, draining=True)
            running.abort(ending)

    async def drain(
        self, force: asyncio.Event, seconds: float | None = None, *, alone: bool = False
    ) -> None:
        """``close``, but from the moment that ``force`` is set open calls get no more time.

        First the service is not ``ready`` for Timing.drain_delay, and takes calls as before. This
        is part of the ``seconds``, half of them at most. ``alone``: not so, as others are ready.
        """
        self.ready, self._draining = False, True
        timing = self.config.timing
        whole = timing.drain_timeout if seconds is None else seconds
        delay = 0.0 if alone else min(timing.drain_delay, whole / 2)
        if delay:
            log.info("%s: not ready from now on; calls are taken for %g s more", self.name, delay)
            with suppress(TimeoutError):
                async with asyncio.timeout(delay):
                    await force.wait()
        closing = asyncio.ensure_future(self.close(drain=whole - delay, alone=alone))
        forced = asyncio.ensure_future(force.wait())
        await asyncio.wait((closing, forced), return_when=asyncio.FIRST_COMPLETED)
        forced.cancel()
        if not closing.done():
            self.force()
        await closing

    def force(self) -> None:
        """Ends the drain of a ``close`` that is under way, or is about to begin."""
        self._forced = True
        self._idle.set()
        if self._ending is not None:
            self._ending.end_relays()

    def memory(self) -> dict[str, int]:
        """Bytes that this process holds, of all its services and clients; for any thread.

        - ``received_bytes``: batches whose handlers or readers still use them.
        - ``kept_bytes``: batches that handlers keep although they asked for the next one.
        - ``sending_bytes``: what has not left the process yet.
        - ``connections``: how many are open, a number.
        """
        process = accounts.process()
        return {
            "received_bytes": process.receiving.used,
            "kept_bytes": process.receiving.kept,
            "sending_bytes": process.sending.used,
            "connections": process.connections,
        }

    def state(self) -> dict[str, Any]:
        """Counters, memory and connections as plain values, for JSON."""
        return {
            "counters": self.counters(),
            "memory": self.memory(),
            "turns": self._rooms.state(),
            "connections": [snapshot_of(connection) for connection in tuple(self._connections)],
        }

    async def _wait_idle(self, seconds: float) -> bool:
        if self.calls:
            self._idle.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._idle.wait()
        return not self.calls

    # Connections and the messages on their entrypoints

    async def _serve_connection(self, connection: Connection) -> None:
        dispatcher = _Dispatcher(self, connection)
        self.opened(dispatcher)
        try:
            dispatcher.read()
            with suppress(AqueductError):
                await connection.wait_closed()
        finally:
            connection.entrypoint.on_change = None
            self.closed(dispatcher)

    def message(self, dispatcher: _Dispatcher, received: Received) -> None:
        """One message on the entrypoint of a connection."""
        calls = dispatcher.calls
        if not received.attachments and any(key == ALIVE for key, _ in received.headers):
            for running in tuple(calls):
                running.alive()
            return
        if len(received.payload) >= LONG_SCHEMA and _schema_bytes(received) >= LONG_SCHEMA:
            dispatcher.open_apart(received)
        else:
            self.open(dispatcher, received, partial(dispatcher.heads.read, received))

    def open(
        self, dispatcher: _Dispatcher, received: Received, decode: Callable[[], _Opening]
    ) -> ServerCall | None:
        """Begins the call that ``decode`` finds in a message; None: it was refused."""
        try:
            head, payload = decode()
            if payload is None:
                running = self._begin(dispatcher, received, head)
            else:
                replying = dispatcher.connection.replying(received)
                if replying is None:
                    raise BadCall(
                        "a call of the kind unary carries one channel, the sender of a oneshot; "
                        f"{len(received.attachments)} came",
                        peer=dispatcher.connection.peer,
                    )
                number = self.place(dispatcher, head.handler)
                running = UnaryCall(self, dispatcher.connection, head, number, payload, replying)
                if len(payload) >= _LEASED:
                    running.input.lease = dispatcher.queue.lease(received.payload)
        except CallError as error:
            self.refused(dispatcher.connection.peer, error)
            _refuse(dispatcher.connection.message(received), error)
            return None
        self.begin(dispatcher, running)
        return running

    def begin(self, dispatcher: CallDispatcher, running: ServerCall) -> None:
        """A call that has its ``place`` begins."""
        dispatcher.calls.add(running)
        self.calls.add(running)
        self.totals.of(running.head.handler).calls += 1
        self._starter.start(running)

    def refused(self, peer: str, error: CallError, *, unanswered: bool = False) -> None:
        """A call that never began is counted. ``unanswered``: nobody is told."""
        self._counted["refused"] += 1
        self._counted["unreported"] += unanswered
        totals = self.totals.of(error.handler)
        totals.calls += 1
        totals.failed(error.status)
        fields = {**error.log_fields(), "peer": peer}
        log.info("%s: a call was refused: %s", peer, error, extra={"fields": fields})

    def opened(self, dispatcher: CallDispatcher) -> None:
        """A connection is there."""
        self._counted["connections"] += 1
        self._connections[dispatcher.connection] = dispatcher.calls
        self.since[dispatcher.connection] = time.monotonic()

    def closed(self, dispatcher: CallDispatcher) -> None:
        """A connection is over."""
        self.since.pop(dispatcher.connection, None)
        if self._connections.pop(dispatcher.connection, None) is not None:
            self._counted["resumes"] += dispatcher.connection.carrier.resumes

    def _begin(self, dispatcher: _Dispatcher, received: Received, head: CallHead) -> ServerCall:
        connection = dispatcher.connection
        halves = [half for half, _ in received.attachments]
        check_attachments(head.kind, len(halves))
        places = PLACES[head.kind]
        to_server = None if places.to_server is None else halves[places.to_server]
        output, status = halves[places.to_client], halves[places.status]
        sends = to_server is not None and to_server.is_sender
        if sends or not (output.is_sender and status.is_sender):
            raise BadCall(f"the channels of a call of the kind {head.kind} point the wrong way")
        number = self.place(dispatcher, head.handler)
        handle: Callable[[Any], Any] = connection.handle  # its kind was just looked at
        return ServerCall(
            self,
            connection,
            head,
            number,
            receiver=None if to_server is None else handle(to_server),
            sender=handle(output),
            status=handle(status),
        )

    def place(self, dispatcher: CallDispatcher, handler: str) -> int:
        """The number of a call for which there is room. Raises Refused and Busy."""
        limits, calls = self.config.calls, dispatcher.calls
        peer = dispatcher.connection.carrier.peer
        if self._closing:
            text = f"the service {self.name!r} is ending"
            raise Refused(text, peer=peer, handler=handler, draining=True, untouched=True)
        if len(calls) >= limits.max_calls_connection:
            text = (
                f"{len(calls)} calls are open on this connection, which is the limit "
                "(Calls.max_calls_connection)"
            )
        elif len(self.calls) >= limits.max_calls_process:
            text = (
                f"the service {self.name!r} has {len(self.calls)} calls open, which is the "
                "limit (Calls.max_calls_process)"
            )
        else:
            self._number += 1
            return self._number
        raise Busy(text, peer=peer, handler=handler)

    def table_of(self, head: CallHead) -> CallHead:
        """See GatewayHost."""
        rows = ROWS + head.handler
        if head.handler in self.handlers or rows not in self.handlers:
            return head
        return replace(head, handler=rows)

    # What running calls ask

    async def admit(self, running: ServerCall) -> Handler:
        """See CallHost."""
        if self._authorize is not None:
            for call in _asked_for(running):
                await self._allow(call, self._authorize)
        return self._find(running)

    async def _allow(self, call: Call, decide: Authorize) -> None:
        """Raises Refused if the service does not want the call."""
        names: Any = {"peer": call.peer, "handler": call.handler}
        # The client may be a stranger, who should not read what went wrong in the service.
        undecided = "the service could not decide about the call, so it is refused"
        try:
            answer: object = decide(call)
            if inspect.isawaitable(answer):
                answer = await answer
        except CallError:
            raise
        except Exception as error:
            log.exception("authorize raised for %r", call)
            raise Refused(undecided, **names) from error
        try:
            allowed = allows(answer, "authorize")
        except TypeError as error:
            log.error("%r is refused: %s", call, error)
            raise Refused(undecided, **names) from error
        if not allowed:
            raise Refused("the service does not allow the call", **names)

    def _find(self, running: ServerCall) -> Handler:
        call, peer, handlers = running.head, running.call.peer, self.handlers
        handler = handlers.get(call.handler)
        names = {"peer": peer, "handler": call.handler}
        if handler is None:
            alike = near_miss(call.handler, handlers)
            hint = f"did you mean {alike!r}?" if alike else _list_of(handlers)
            raise UnknownHandler(
                f"the service {self.name!r} has no handler {call.handler!r}; {hint}",
                **names,
            )
        running.check_kind(handler)
        if handler.max_calls is not None and self._by_handler[handler.name] >= handler.max_calls:
            raise Busy(
                f"handler {handler.name!r} has {handler.max_calls} calls open, which is its limit "
                "(max_calls)",
                **names,
            )
        running.input.ticket = self._rooms.enter(handler, running)
        self._by_handler[handler.name] += 1
        return handler

    def start_thread(self, work: Callable[[], None]) -> None:
        """A thread for ``work``. Raises Busy when the system has none."""
        if self._telemetry is not None:  # what the handler tells belongs to the call's span
            work = partial(copy_context().run, work)
        try:
            self._pool.start(work)
        except RuntimeError as error:
            raise Busy(f"the service {self.name!r} can start no thread: {error}") from error

    def runner_of(self, running: ServerCall) -> Run:
        """See CallHost."""
        if self._telemetry is not None:
            self._observe(running, self._telemetry)
        handler, ticket = running.handler, running.input.ticket
        if ticket is not None and not handler.one_to_one:
            run = self._plain_runner(handler)
            return lambda running: run_in_turn(ticket, partial(run, running))
        if (
            handler.one_to_one
            and running.single
            and ticket is None
            and handler.shape is HandlerShape.COROUTINE
        ):
            return drive_coroutine
        return self._plain_runner(handler)

    def _plain_runner(self, handler: Handler) -> Run:
        if handler.shape is HandlerShape.ASYNC_GENERATOR:
            return drive_async_generator
        if handler.one_to_one:
            return lambda running: MapRunner(running).drive()
        if handler.shape is HandlerShape.COROUTINE:
            return drive_coroutine_sink
        return lambda running: GeneratorRunner(running).drive()

    def concluded(self, running: ServerCall, status: Status, error: BaseException | None) -> bool:
        """See CallHost."""
        if running.observation is not None:
            try:
                running.observation.ended(status.code, status.message, running.counters())
            except Exception:
                log.exception("telemetry raised at the end of %r", running.call)
        totals = self.totals.of(running.head.handler)
        if running.accepted:
            totals.took(time.monotonic() - running.begun)
        if status.code != OK:
            totals.failed(status.code)
            self._count_end(running, status, error)
        return len(self.calls) == 1

    def _count_end(self, running: ServerCall, status: Status, error: BaseException | None) -> None:
        self._counted["unreported"] += running.unanswered
        more: Any = {"extra": {"fields": {"status": status.code}}}
        if status.code == CANCELLED or isinstance(error, ConnectionLost):
            self._counted["cancelled"] += 1
        elif not running.accepted:
            self._counted["refused"] += 1
            level = logging.WARNING if isinstance(error, HandlerFailed) else logging.INFO
            log.log(level, "%r was refused: %s", running.call, status.message, **more)
        else:
            self._counted["failed"] += 1
            running.failed = True
            # A fault of the handler is a warning for the operator of the service.
            own = not isinstance(error, CallError) or (
                isinstance(error, _OF_HANDLERS) and error is not running.input.fault
            )
            level = logging.WARNING if own else logging.INFO
            lines = Lines(status.traceback)
            log.log(level, "%r failed: %s%s", running.call, status.message, lines, **more)

    def _observe(self, running: ServerCall, telemetry: Observer) -> None:
        """Has telemetry observe a call. Its error does not end the call."""
        try:
            running.observation = telemetry.began(running.call)
        except Exception:
            log.exception("telemetry raised at the beginning of %r", running.call)

    def call_ended(self, running: ServerCall) -> None:
        """A call is over, its handler too: its place is free."""
        self.calls.discard(running)
        self.totals.of(running.head.handler).ended(running.counters(), running.resumes)
        if running.accepted:  # strangers that are refused are no tasks
            self.tasks.ended(running)
        connection_calls = self._connections.get(running.connection)
        if connection_calls is not None:
            connection_calls.discard(running)
        if running.admitted:
            self._by_handler[running.handler.name] -= 1
        if self._draining and not self.calls:
            self._idle.set()


class _Dispatcher:
    """The entrypoint of one connection: reads calls where they come in, without a task."""

    __slots__ = (
        "_later",
        "_opening",
        "_serving",
        "calls",
        "connection",
        "heads",
        "queue",
    )

    def __init__(self, serving: RunningService, connection: Connection) -> None:
        self._serving = serving
        self._later = False
        self._opening = 0  # calls with a very wide schema, which is being read
        self.connection = connection
        self.calls: set[ServerCall] = set()
        """The connection's calls that are open."""
        self.heads = HeadCache(connection.peer)
        self.queue: ReceiveQueue = connection.entrypoint.queue
        self.queue.keeps = True
        connection.entrypoint.on_change = self.read

    def read(self) -> None:
        """Begins the calls that have come; a few at once, then others have the loop."""
        if self._later or self._opening >= _WIDE_AT_ONCE:
            return
        connection = self.connection
        try:
            for _ in range(_AT_ONCE):
                received = connection.question()
                if received is None:
                    return
                self._serving.message(self, received)
                self.queue.settle()
                if not len(self.queue) or self._opening >= _WIDE_AT_ONCE:
                    return
        except ChannelError as error:  # the client will not call again, but reads its answers
            log.debug("%r: the entrypoint ended: %s", self.connection, error)
            return
        except ConnectionLost:
            return
        self._later = True
        asyncio.get_running_loop().call_soon(self._go_on)

    def _go_on(self) -> None:
        self._later = False
        self.read()

    def open_apart(self, received: Received) -> None:
        """Has a very wide schema read in a thread; then the call begins.

        Calls that come later may begin before it.
        """
        self._opening += 1
        job: Job[_Opening]

        def read() -> None:
            self._opening -= 1
            if self.connection.closed:
                return
            running = self._serving.open(self, received, job.result)
            if running is not None:
                running.catch_up()
            self.read()

        job = Job(partial(self.heads.read, received), read)


def _asked_for(running: ServerCall) -> tuple[Call, ...]:
    """The calls that ``authorize`` looks at: for all rows of a table, its plan and its reading."""
    head, name = running.head, running.head.handler.removeprefix(ROWS)
    if name == head.handler:
        return (running.call,)
    return tuple(
        Call(
            running.connection,
            replace(head, handler=does + name),
            running.call.number,
            state=running.call.state,
        )
        for does in (PLAN, READ)
    )


def _schema_bytes(received: Received) -> int:
    """Bytes of the schemas in the message of a call, as far as its headers say so."""
    for key, value in received.headers:
        if key == BODY:
            return int(value) if value.isdigit() and len(value) < 18 else 0
    return len(received.payload)


def _refuse(message: Message, error: CallError) -> None:
    """Answers a call that never began; its channels are ended one by one."""
    attachments = message.attachments
    for attachment in attachments:
        handle = attachment.handle
        with suppress(AqueductError):
            if isinstance(handle, Receiver):
                handle.close()
            elif attachment is attachments[-1]:
                headers, payload = Status.from_exception(error).encode()
                handle.send_nowait(payload, headers=headers, force=True)
            else:
                handle.finish()


def _list_of(handlers: Mapping[str, Handler]) -> str:
    own = (name for name in handlers if not name.startswith("aqueduct."))
    names = heapq.nsmallest(21, own)
    if not names:
        return "it has none"
    shown = ", ".join(map(repr, names[:20]))
    return f"it has {shown}" + (" ..." if len(names) > 20 else "")
