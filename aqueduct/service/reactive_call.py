"""A request of ReactiveSocket as a call: what it came on, where its answers go, how it ends."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping
from typing import Any, Final

from aqueduct._speedups.loop.waiter import Waiter
from aqueduct.carriers.contract import PeerCredentials, PeerIdentity
from aqueduct.config import Config
from aqueduct.endpoint import Headers, accounts
from aqueduct.endpoint.accounts import SendingAccount
from aqueduct.errors import (
    AqueductError,
    BadCall,
    BatchTooLarge,
    Busy,
    Cancelled,
    ConnectionLost,
    DeadlineExceeded,
    HandlerFailed,
    LocalProtocolError,
    UnknownHandler,
)
from aqueduct.reactivesocket import ReactiveRequest, ReactiveSocketConnection
from aqueduct.rpc.json_codecs import JsonDecoder, JsonEncoder
from aqueduct.rpc.reactive_calls import ASK_BY_STREAM, JSON, encode_error
from aqueduct.rpc.request import CallHead
from aqueduct.rpc.sink_commit import ABORT, COMMIT, WRITE
from aqueduct.rpc.status import OK, Status
from aqueduct.rpc.table_scan import ROWS
from aqueduct.rpc.unary import schema_prefix
from aqueduct.service.call import CallHost, Run, ServerCall
from aqueduct.service.context import Call
from aqueduct.service.handlers import EXCHANGE, SINK, SOURCE, Handler, HandlerShape

__all__ = ["ReactiveCall", "ReactiveCaller", "ReactiveSender"]

REQUEST: Final = "request"
FIRE: Final = "fire"
STREAM: Final = "stream"
SUBSCRIBE: Final = "subscribe"

_ELSEWHERE: Final = "an address of aqueduct://, aqueduct+tls:// or aqueduct+tcp:// takes it"
_FITS: Final[Mapping[str, str]] = {
    EXCHANGE: "a batch that is to be answered by REQUEST_RESPONSE or REQUEST_STREAM",
    SOURCE: "REQUEST_STREAM or REQUEST_SUB without a body",
    SINK: "REQUEST_FNF; to hear how a sink ends, client.sink at an address of aqueduct+tcp://",
}
"""How each kind of handler is asked."""
_ASKED: Final[Mapping[str, str]] = {
    REQUEST: "REQUEST_RESPONSE",
    FIRE: "REQUEST_FNF",
    STREAM: "REQUEST_STREAM",
    SUBSCRIBE: "REQUEST_SUB",
}


_DONE: Final = Status(OK)


class ReactiveCaller:
    """A connection of ReactiveSocket as calls need it; a CallConnection and its parts."""

    suspended = False
    resumes = 0
    headers: Headers = ()

    def __init__(self, connection: ReactiveSocketConnection, config: Config) -> None:
        self.reactive = connection
        self.config = config
        self.peer = connection.peer
        self._unread = 0
        """Streams that were ended while there was no room."""
        self.process_budget = config.flow.process_send_bytes
        self.sending: SendingAccount = accounts.process().sending

    @property
    def peer_credentials(self) -> PeerCredentials | None:
        """The process at the other end of a Unix socket."""
        return self.reactive.peer_credentials

    @property
    def peer_identity(self) -> PeerIdentity | None:
        """Whom the peer's certificate names."""
        return self.reactive.peer_identity

    @property
    def carrier(self) -> ReactiveCaller:
        """Itself: it knows who the peer is."""
        return self

    @property
    def core(self) -> ReactiveCaller:
        """Itself."""
        return self

    @property
    def pump(self) -> ReactiveCaller:
        """Itself."""
        return self

    @property
    def outgoing(self) -> ReactiveCaller:
        """Itself."""
        return self

    @property
    def queued(self) -> int:
        """Bytes that wait to leave."""
        return self.reactive.core.queued_bytes

    @property
    def error(self) -> ConnectionLost | None:
        """Why it is over, once it is."""
        return self.reactive.error

    @property
    def closed(self) -> bool:
        """Whether it is over."""
        return self.reactive.error is not None

    def fail(self, request: ReactiveRequest, status: Status, *, begun: bool = False) -> None:
        """Ends a request with an ERROR. ``begun``: its handler may have done something."""
        if self.ends(request):
            word, text = encode_error(status, begun=begun)
            request.fail(text, word)

    def ends(self, request: ReactiveRequest) -> bool:
        """Whether a frame may leave for which there need be no room, as it ends a stream.

        Not when the peer has caused many of them and reads none: then the connection is given up.
        """
        if self.queued < self.config.flow.connection_high_water:
            self._unread = 0
            return True
        self._unread += 1
        most = self.config.reactivesocket.unsent_answers
        if self._unread <= most:
            return True
        self.reactive.abandon(
            f"{self.queued} bytes wait to leave, and {most} answers more: the peer does not read "
            "(ReactiveSocket.unsent_answers)"
        )
        return False

    def flush_soon(self) -> None:
        """Items leave by themselves, as all below."""

    def flush(self) -> None:
        """See ``flush_soon``."""

    def await_answer(self) -> None:
        """See ``flush_soon``."""

    def room_came(self) -> None:
        """Nothing that came waits for room here."""


class ReactiveSender:
    """Sends the answers of one request as items. It has room where there is a credit and room."""

    row = None

    def __init__(self, request: ReactiveRequest, config: Config, account: SendingAccount) -> None:
        """``account``: where an answer counts while it is held."""
        self.on_change: Callable[[], None] | None = None
        self.on_end: Callable[[], None] | None = None
        """Called when the requester has cancelled, or the connection is over."""
        self.request = request
        self.prefix = b""
        """What comes before the first item: its schema."""
        self.single = request.kind == REQUEST
        """Whether there is one answer, which ends the request."""
        self.held: list[Any] | None = None
        """That answer."""
        self._held_size = 0
        self._account = account
        self._posted = 0
        self._most = config.reactivesocket.item_bytes
        self._waiter: Waiter | None = None
        if request.kind != FIRE:
            request.on_change = self.changed

    @property
    def writable(self) -> bool:
        """Whether there is a credit, and room on the connection. One answer may always be held."""
        return self.request.writable or (self.single and self.held is None)

    @property
    def queued(self) -> int:
        """Bytes that have not left."""
        return self._held_size if self.request.ended else self._held_size + self.request.queued

    @property
    def error(self) -> AqueductError | None:
        """Why nothing is sent any more."""
        request = self.request
        if not request.ended or request.kind == FIRE:
            return None
        return request.connection.error or Cancelled("the client cancelled the request")

    def post(self, payload: Any, headers: Headers) -> None:
        """Sends an answer, or keeps it as the last one. Raises what the handler is to be told.

        Messages without a payload are not for clients of ReactiveSocket.
        """
        if self.request.ended or not payload:
            return
        parts = payload
        if self.prefix:
            parts = [self.prefix, *parts]
            self.prefix = b""
        if self.single:
            size = self._check_size(parts)
            if self.held is not None:
                raise HandlerFailed("the handler gave a second answer")
            self.held = parts
            self._held_size = size
            self._account.charge(size)
            return
        try:
            self.request.send_nowait(parts)
        except LocalProtocolError:
            self._check_size(parts)
            raise
        self._posted += 1

    def granted(self) -> int:
        """Items that were asked for, in all; for any thread. It may be one too low for a moment."""
        return self._posted + self.request.demand

    def let_go(self) -> None:
        """The answer that was held is queued, or of no use: it counts here no more."""
        self.held = None
        size, self._held_size = self._held_size, 0
        if size:
            # Once the connection has counted its queue: there is no room in between.
            asyncio.get_running_loop().call_soon(self._account.charge, -size)

    async def wait_writable(self, *, ample: bool = False) -> None:
        """Returns once there is a credit and room. Raises ``error``."""
        while not self.request.writable:
            if (error := self.error) is not None:
                raise error
            self._waiter = Waiter(asyncio.get_running_loop())
            await self._waiter

    def notify_writable(self, *, ample: bool = False) -> None:
        """Asks for one call of ``on_change`` once there is."""
        if self.writable and self.on_change is not None:
            asyncio.get_running_loop().call_soon(self.on_change)

    def changed(self) -> None:
        """A credit or room came, or the request has ended."""
        waiter, self._waiter = self._waiter, None
        if waiter is not None:
            waiter.step_soon()
        if self.request.ended and self.on_end is not None:
            self.on_end()
        if self.on_change is not None:
            self.on_change()

    def _check_size(self, parts: list[Any]) -> int:
        size = sum(memoryview(part).nbytes for part in parts)
        if size > self._most:
            raise BatchTooLarge(
                f"an answer of {size} bytes is above the limit of {self._most} of an item "
                f"(ReactiveSocket.item_bytes); yield fewer rows at a time, or {_ELSEWHERE}"
            )
        return size

    def finish(self) -> None:
        """The status of the call says so."""

    async def wait_closed(self) -> None:
        """What has not left is the connection's."""

    def cancel(self) -> None:
        """The connection gives up a peer that does not read."""


class _StatusOf:
    """The status channel of a call, as far as that is looked at: when it is of no use any more."""

    __slots__ = ("_sender",)

    def __init__(self, sender: ReactiveSender) -> None:
        self._sender = sender

    @property
    def on_change(self) -> Callable[[], None] | None:
        """Called when the requester has gone."""
        return self._sender.on_end

    @on_change.setter
    def on_change(self, changed: Callable[[], None] | None) -> None:
        self._sender.on_end = changed

    @property
    def error(self) -> AqueductError | None:
        """Why nobody hears the status."""
        return self._sender.error


class _DataLease:
    """The data of a request, which count in memory until its call ends."""

    __slots__ = ("give_back",)

    def __init__(self, request: ReactiveRequest) -> None:
        self.give_back = request.release


class _ColumnsLease:
    """The data of a request in JSON, and the columns that are made of it, until its call ends."""

    __slots__ = ("_account", "_call", "_charged", "_lock", "_most", "_over", "_request")

    def __init__(self, request: ReactiveRequest, call: Call, config: Config) -> None:
        self._request = request
        self._call = call
        self._account = accounts.process().receiving
        self._most = config.flow.process_receive_bytes
        self._charged = 0
        self._over = False
        self._lock = threading.Lock()  # large requests are read in a thread

    def charge(self, size: int) -> None:
        """So many bytes of columns were made. Raises Busy where there is no room for them."""
        with self._lock:
            if self._over:
                raise Cancelled("the call has ended, and its rows are read no further")
            # What this call was charged before may not have come to the account yet.
            used = max(self._account.used, self._charged) + size
            self._charged += size
            self._request.charge(size)
        if used > self._most:
            handler = self._call.handler
            raise Busy(
                f"the input of handler {handler!r}: the columns of its rows have no room; with "
                f"{size} bytes of them this process holds {used} bytes that came, above the "
                f"{self._most} of Flow.process_receive_budget; try again later, or send fewer "
                "rows at a time",
                peer=self._call.peer,
                handler=handler,
            )

    def give_back(self) -> None:
        """The call has ended."""
        with self._lock:
            self._over = True
            charged, self._charged = self._charged, 0
        if charged:
            self._request.charge(-charged)
        self._request.release()


class _Paced:
    """An async generator that is stepped only while there is a credit, and room."""

    def __init__(self, generator: Any, running: ReactiveCall) -> None:
        self._generator = generator
        self._running = running
        self._request = running.request

    def __aiter__(self) -> _Paced:
        return self

    async def __anext__(self) -> Any:
        if not self._request.writable:
            await self._running.wait_writable()
        return await self._generator.__anext__()

    async def aclose(self) -> None:
        await self._generator.aclose()


class ReactiveCall(ServerCall):
    """One request. Its answers are items, its status the end of the stream."""

    def __init__(
        self,
        host: CallHost,
        caller: ReactiveCaller,
        head: CallHead,
        number: int,
        request: ReactiveRequest,
        format: str,
        payload: memoryview | None,
        *,
        leased: bool,
    ) -> None:
        """``leased``: the data count until the call ends."""
        self.answers = answers = ReactiveSender(request, caller.config, caller.sending)
        super().__init__(
            host,
            caller,
            head,
            number,
            status=_StatusOf(answers),
            sender=answers,
            payload=payload,
        )
        self.request = request
        self._caller = caller
        self.unanswered = request.kind == FIRE
        self._asked = 0
        """Items that were asked for when the call was looked at last."""
        self._idle_since = host.watches.time()
        """Since when the client has all that it asked for, as far as was noticed."""
        self._json = format == JSON
        if not leased:
            request.release()
        self._columns = _ColumnsLease(request, self.call, self.config) if self._json else None
        if self._columns is not None:
            self.input.lease = self._columns  # a few bytes may make many columns
        elif leased:
            self.input.lease = _DataLease(request)
        output = self.output
        output.fragment_bytes = self.config.calls.batch_limit
        if request.kind in (STREAM, SUBSCRIBE):
            output.credit = answers.granted
            output.patient = self._is_patient

    @property
    def endless(self) -> bool:
        """Whether only an ERROR or the client ends it."""
        return self.request.kind == SUBSCRIBE

    def check_kind(self, handler: Handler) -> None:
        """Raises UnknownHandler that says how the handler is asked, or where."""
        kind, head, asked = handler.kind, self.head, self.request.kind
        if kind == EXCHANGE and asked == REQUEST and not handler.one_to_one:
            text = (
                f"handler {handler.name!r} is no function of one batch, so it may answer often: "
                + ASK_BY_STREAM
            )
        elif handler.name.startswith(ROWS) and (asked != STREAM or kind != head.kind):
            text = f"{handler.name.removeprefix(ROWS)!r} is a table: {ASK_BY_STREAM} without a body"
        elif kind != head.kind or (asked == SUBSCRIBE and kind != SOURCE):
            article = "an" if kind == EXCHANGE else "a"
            came = "with" if self.single else "without"
            text = (
                f"handler {handler.name!r} is {article} {kind}, and was asked by {_ASKED[asked]} "
                f"{came} a body: it takes {_FITS[kind]}"
            )
        elif handler.name.startswith((WRITE, COMMIT, ABORT)):
            text = f"what writes exactly once cannot be asked so: {_ELSEWHERE}"
        else:
            # One answer ends the stream: no empty item has to follow it.
            self.answers.single = self.answers.single or (asked == STREAM and handler.one_to_one)
            if self._json and kind != SOURCE and handler.input is None:
                raise BadCall(
                    f"handler {handler.name!r} declares no input=, by which rows of JSON are read: "
                    "declare it, or send Arrow",
                    peer=self.call.peer,
                    handler=head.handler,
                )
            return
        raise UnknownHandler(text, peer=self.call.peer, handler=head.handler)

    def pace(self, generator: Any) -> Any:
        """See ServerCall."""
        return _Paced(generator, self) if self.output.credit is not None else generator

    async def wait_writable(self) -> None:
        """Waits for a credit, and room, as the handler does."""
        self.input.waits_for_client = True
        try:
            await self.answers.wait_writable()
        finally:
            self.input.waits_for_client = False

    def ended(self) -> None:
        """See ServerCall."""
        super().ended()
        self.answers.let_go()
        self.request.on_change = None  # no cycle for the collector of garbage
        self.output.credit = self.output.patient = None

    # Within

    def _is_patient(self) -> bool:
        """A subscription may be silent, and a client may take its time to ask for more, up to now.

        A call that has waited too long for that ends here.
        """
        if self.endless:
            return True
        answers, now = self.answers, self.host.watches.time()
        waited = self._asked == (asked := answers.granted()) and not answers.queued
        self._asked = asked
        if self.request.demand or not waited:
            self._idle_since = now
            return not self.request.demand
        most = self.config.reactivesocket.idle_demand
        if now - self._idle_since >= most:
            names: Any = {"peer": self.call.peer, "handler": self.call.handler}
            text = (
                f"the client asked handler {self.call.handler!r} for no more items for {most:g} s "
                "(ReactiveSocket.idle_demand); CANCEL ends a stream that is not wanted"
            )
            self.abort(DeadlineExceeded(text, **names))
        return True

    async def _open(self) -> Run:
        run = await super()._open()
        return run if self.request.kind == FIRE else _Asked(run)

    def _check_input(self, handler: Handler) -> None:
        if self._json:
            self.call.schema = handler.input
        else:
            super()._check_input(handler)

    def _make_codecs(self, handler: Handler) -> None:
        if not self._json:
            super()._make_codecs(handler)
            return
        call, where = self.call, f"handler {handler.name!r}"
        names: dict[str, Any] = {"peer": call.peer, "handler": handler.name}
        if call.schema is not None:
            config = self.config
            self.input.decoder = JsonDecoder(
                call.schema,
                values=config.reactivesocket.json_values,
                batch_limit=config.calls.batch_limit,
                charge=None if self._columns is None else self._columns.charge,
                where=f"the input of {where}",
                **names,
            )
        if call.output_schema is not None:
            self.output.encoder = JsonEncoder(
                call.output_schema, where=f"the output of {where}", fault=handler.fault, **names
            )

    def _accept(self, handler: Handler) -> None:
        """Nothing is said: the first item has the schema."""
        schema = self.call.output_schema
        if schema is not None and not self._json:
            self.answers.prefix = schema_prefix(schema)
        self.output.use(self.answers)

    def _success(self, counters: Mapping[str, int] | None) -> Status:
        return _DONE  # nobody is told the counters

    def _tell(self, status: Status, alone: bool) -> None:
        request = self.request
        if request.kind == FIRE:
            return
        if status.code != OK:
            self._caller.fail(request, status, begun=self.accepted)
        elif self.endless:
            request.fail(
                f"ended: handler {self.call.handler!r} has no more, and an ERROR is the one end of "
                "a subscription (RS-17); REQUEST_STREAM tells the end without one"
            )
        else:
            held, prefix = self.answers.held, self.answers.prefix
            if held is None and prefix and request.kind == STREAM and request.writable:
                held = [prefix]  # without a batch a reader still gets the schema
            if held is not None or self._caller.ends(request):
                request.complete(held)
            self.answers.let_go()


class _Asked:
    """A runner that begins once the client wants an answer, and ends when that can leave."""

    __slots__ = ("_run",)

    def __init__(self, run: Run) -> None:
        self._run = run

    async def __call__(self, running: ServerCall) -> Mapping[str, int] | None:
        assert isinstance(running, ReactiveCall)
        answers, output = running.answers, running.output
        if (output.credit is not None or output.expected) and not answers.request.writable:
            await running.wait_writable()
        if output.expected and running.handler.shape is HandlerShape.COROUTINE:
            await output.wait_room(running.input.tell)  # the other runners wait themselves
        counters = await self._run(running)
        if answers.held is not None and not answers.request.writable:
            await running.wait_writable()
        return counters
