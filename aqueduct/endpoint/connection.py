"""One Aqueduct connection on an event loop: handles above, a core and its pump beneath."""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields
from functools import partial
from typing import Any, Final

from aqueduct._speedups.loop.pump import Pump
from aqueduct._speedups.loop.waiter import nests
from aqueduct.arguments import checked
from aqueduct.carriers.clock import clock_of
from aqueduct.carriers.contract import Carrier
from aqueduct.closing import AsyncClosing
from aqueduct.config import Config
from aqueduct.endpoint import accounts
from aqueduct.endpoint.channel import (
    Headers,
    Message,
    Receiver,
    Sender,
    handle_of,
    message_of,
    take,
)
from aqueduct.endpoint.hooks import allows
from aqueduct.endpoint.local_channel import queue_full
from aqueduct.endpoint.reply import PendingReply, Responder
from aqueduct.endpoint.snapshot import ConnectionSnapshot
from aqueduct.errors import ConnectionLost, LocalProtocolError, Refused
from aqueduct.escaping import logger_of, shown
from aqueduct.forks import own
from aqueduct.protocol.channels.connection import ChannelConnection
from aqueduct.protocol.common.connection import ConnectionCore
from aqueduct.protocol.common.events import (
    Closed,
    Event,
    HeadersReceived,
    Readable,
    SenderEnded,
    Writable,
)
from aqueduct.protocol.common.receiver import Received, ReceiverHalf
from aqueduct.protocol.common.registry import Attach, Half
from aqueduct.protocol.common.sender import SenderHalf
from aqueduct.protocol.common.state import SenderState
from aqueduct.protocol.control_streams.connection import ControlConnection

__all__ = ["Connection"]

log = logger_of(__name__)

_OF_A_HALF: Final = (Readable, Writable, SenderEnded)

_DROPS: Final = 256
"""Channels of dropped handles that are ended in one turn of the loop."""

_FORKED: Final = object()
"""Stands for the event loop in a forked child, where the connection is the parent's."""

OnHeaders = Callable[[Headers, "Connection"], Headers | bool]
"""The server's hook: given the client's headers, returns the server's own.

True accepts and sends those given to ``serve``. False refuses, and so does raising. Any other
answer refuses too (close code 6), with an error in the log.
"""


class Connection(AsyncClosing):
    """One live connection. Made by ``connect`` or handed to the callback of ``serve``."""

    def __init__(
        self,
        carrier: Carrier,
        config: Config,
        *,
        headers: Headers = (),
        on_headers: OnHeaders | None = None,
        header_blocks: bool = False,
    ) -> None:
        """``header_blocks``: of the control-stream draft, see ControlConnection."""
        self.is_client = carrier.is_client
        self.config = config
        self.carrier = carrier
        self.takes_calls = header_blocks or not carrier.bidi
        """Whether messages have headers, which Arrow calls need."""
        self._process = accounts.process()
        self._process.opened()
        core: Callable[..., ConnectionCore] = ChannelConnection
        if carrier.bidi:
            core = partial(ControlConnection, header_blocks=header_blocks)
        self.core = core(
            is_client=carrier.is_client,
            config=config,
            headers=headers,
            loopback=carrier.loopback,
            receiving=self._process.receiving,
            sending=self._process.sending,
        )
        self.core.budget.wake = self._room_soon
        self._room_due = False
        self.pump = Pump(self.core, carrier, self._on_event, self._transport_gone)
        self.headers: Headers = ()
        """The peer's connection headers."""
        self._own_headers = headers
        self._on_headers = on_headers
        self.loop = asyncio.get_running_loop()
        """The event loop that it lives on."""
        self.time = clock_of(self.loop)
        """The time of the loop."""
        self._made = self.time()
        self._ready: asyncio.Future[None] = self.loop.create_future()
        self._closed: asyncio.Future[None] = self.loop.create_future()
        self._pongs: list[asyncio.Future[None]] = []
        self._dropped: deque[Half] = deque()
        self._dropping = False
        """Whether ``_drop_some`` will be called."""
        self._alive_timer: asyncio.TimerHandle | None = None
        self._holds = 0
        self._entrypoint: Any = self.core.entrypoint
        self.entrypoint: Any = handle_of(self._entrypoint, self)
        """The client's Sender, the server's Receiver: the channel that is there at the start."""
        self.home: object = self.loop
        """The loop that may use this connection; ``_FORKED`` in a forked child."""
        own(self)
        carrier.attach(self.pump)
        self._alive_timer = self.loop.call_later(config.timing.ping_interval, self._stay_alive)

    # For people and errors

    @property
    def peer(self) -> str:
        """The peer's address."""
        return self.carrier.peer

    @property
    def local(self) -> str:
        """This side's address."""
        return self.carrier.local

    @property
    def sending(self) -> accounts.SendingAccount:
        """The account of what all connections of the process send."""
        return self._process.sending

    @property
    def rtt(self) -> float:
        """The smoothed round-trip time, seconds."""
        return self.carrier.rtt

    @property
    def fingerprint(self) -> str | None:
        """``sha256:HEX`` of the peer's certificate."""
        return self.carrier.peer_certificate_fingerprint

    @property
    def heard_at(self) -> float | None:
        """The loop's time when the peer's last bytes came; None: none came yet."""
        last: float = self.pump.last_input
        return last or None

    @property
    def stepped_at(self) -> float | None:
        """None: the connection headers are the only step, and end what counts as a handshake."""
        return None

    def has_input(self) -> bool:
        """Whether bytes of the peer are unread, as far as can be told without reading."""
        return False

    @property
    def closed(self) -> bool:
        """Whether the connection is over."""
        return self.core.error is not None

    @property
    def error(self) -> ConnectionLost | None:
        """Why it is over, once it is."""
        return self.core.error

    @checked()
    def snapshot(self, *, channels: int = 1000) -> ConnectionSnapshot:
        """Channels, queues, windows and losses at this moment, for logs, tools and tests.

        At most ``channels`` of them are listed, those with the lowest ids; all are counted.
        """
        view = self.core.view(channels)
        told = self.carrier.snapshot()
        numbers = {name: value for name, value in told.items() if isinstance(value, int)}
        state = "closed" if self.closed else "open" if self.core.ready else "connecting"
        return ConnectionSnapshot(
            **{field.name: getattr(view, field.name) for field in fields(view)},
            peer=self.peer,
            local=self.local,
            side="client" if self.is_client else "server",
            carrier=str(told.get("carrier", "")),
            state=state,
            error=str(self.error or ""),
            age=self.time() - self._made,
            rtt=self.rtt,
            congestion_window=numbers.get("congestion_window", 0),
            bytes_in_flight=numbers.get("in_flight", 0),
            packets_lost=numbers.get("packets_lost", 0),
            streams_openable=self.carrier.openable,
            datagram_room=self.carrier.datagram_room,
            transport=told,
        )

    def __repr__(self) -> str:
        side = "client" if self.is_client else "server"
        return f"<Connection {side} {self.local} - {self.peer}{' closed' if self.closed else ''}>"

    # Life

    async def wait_ready(self) -> None:
        """Returns once the peer's connection headers are in; raises ConnectionLost."""
        self.check_here()
        await asyncio.shield(self._ready)

    async def ping(self) -> float:
        """The round-trip time of one ping, seconds.

        Raises ConnectionLost, or TimeoutError after Timing.idle_timeout.
        """
        self.check_here()
        if self.error is not None:
            raise self.error.with_traceback(None)
        pong = self.loop.create_future()
        self._pongs.append(pong)
        self.pump.on_pong = self._ponged
        began = self.time()
        self.carrier.ping()
        self.carrier.flush()
        try:
            async with asyncio.timeout(self.config.timing.idle_timeout):
                await pong
        finally:
            if pong in self._pongs:
                self._pongs.remove(pong)
        return self.time() - began

    def hold(self) -> None:
        """Keeps an otherwise idle connection alive by pings until ``release``."""
        self._holds += 1

    def release(self) -> None:
        """Ends one ``hold``."""
        self._holds -= 1

    @checked()
    def close_soon(self, code: int = 0, reason: str = "") -> None:
        """Begins to close: queued data leaves first, for at most Timing.close_linger."""
        self.core.close(code, reason, self.time())
        self.pump.flush()

    @checked()
    async def close(self, code: int = 0, reason: str = "") -> None:
        """Closes and waits until the transport is gone.

        In a forked child it returns at once, and the parent's connection goes on. Raises
        LocalProtocolError on another event loop.
        """
        if self._closed.done():
            return
        self.check_here()
        self.close_soon(code, reason)
        await self.wait_closed()

    async def wait_closed(self) -> None:
        """Returns once the transport is gone, whatever ended it."""
        if self._closed.done():
            return
        self.check_here()
        await asyncio.shield(self._closed)

    def check_here(self) -> None:
        """Raises LocalProtocolError unless the caller is on this connection's event loop.

        And in its process: a forked child has no connection of its parent's.
        """
        if asyncio._get_running_loop() is not self.home:
            raise LocalProtocolError(self._elsewhere())
        if self.pump.stepping and nests(self.loop):
            # The pump stepped this task, and reads nothing from the peer until the task waits.
            raise LocalProtocolError(
                f"the connection to {self.peer} cannot go on within this step of the task: the "
                "event loop was made to nest only now; call nest_asyncio.apply() before the first "
                "call, or await something, as asyncio.sleep(0), after it"
            )

    def left_behind(self) -> None:
        """In a forked child: the connection is the parent's. Its sockets are closed here."""
        self.home = _FORKED
        if not self._closed.done():
            self._closed.set_result(None)
        self.pump.left_behind(ConnectionLost(self._elsewhere()))

    # What handles ask

    def ask(
        self,
        asked: PendingReply,
        payload: Any,
        headers: Headers,
        began: float,
        *,
        now: bool = False,
    ) -> None:
        """A message on the entrypoint that carries the sender of a oneshot channel.

        ``asked`` is told when something comes there. ``began`` is the loop's time; ``now`` lets
        the message leave at once: for one that has no company. Raises as Sender.send_nowait.
        """
        half = self._entrypoint
        if not half.writable and half.full and half.error is None:
            raise queue_full(half.queued)
        attach = Attach(keep_sender=False, is_oneshot=True)
        self.core.send(half, payload, began, headers=headers, attachments=(attach,))
        answer = self.patient(attach.half)
        answer.handle = asked
        asked.half = answer
        if now:
            self.pump.flush_at_once()
        else:
            self.pump.flush_soon()
        self.carrier.expect_input()

    def call(
        self, payload: Any, headers: Headers, *, feeds: bool
    ) -> tuple[Sender | None, Receiver, Receiver]:
        """A message on the entrypoint that carries the peer's halves of new channels.

        Here stay a Sender, if ``feeds``, a Receiver, and the Receiver of a oneshot channel, which
        is what attaching pairs of ``channel()`` in this order comes to, with less ado. What the
        receivers owe at their ends may leave with what is sent next. Raises as
        Sender.send_nowait.
        """
        entrypoint = self._entrypoint
        if entrypoint.full and entrypoint.error is None:
            raise queue_full(entrypoint.queued)
        answers = Attach(keep_sender=False, is_oneshot=False)
        status = Attach(keep_sender=False, is_oneshot=True)
        wanted = [answers, status]
        if feeds:
            wanted.insert(0, Attach(keep_sender=True, is_oneshot=False))
        self.core.send(entrypoint, payload, self.time(), headers=headers, attachments=wanted)
        sender = wanted[0].half
        self.pump.flush_soon()
        return (
            Sender(sender, self) if isinstance(sender, SenderHalf) else None,
            Receiver(self.patient(answers.half), self),
            Receiver(self.patient(status.half), self),
        )

    def patient(self, half: Half | None) -> ReceiverHalf:
        """What a networked receiver owes at its end may leave with what is sent next."""
        assert isinstance(half, ReceiverHalf)
        half.patient = True
        return half

    def answer(self, asked: PendingReply) -> Received | None:
        """What has come for ``asked``; None if nothing has. Raises how its channel ended.

        The halves that came with it become handles by ``message``.
        """
        assert asked.half is not None
        return take(self, asked.half)

    def question(self) -> Received | None:
        """What has come on the entrypoint of a server, as by ``answer``."""
        return take(self, self._entrypoint)

    def replying(self, received: Received) -> Responder | None:
        """Where the answer to a question goes; None if it came with something else."""
        attachments = received.attachments
        if len(attachments) == 1:
            half = attachments[0][0]
            if isinstance(half, SenderHalf) and half.oneshot:
                return Responder(half)
        return None

    def sender(self, replying: Responder) -> Sender:
        """A Sender in its place, for what is more than one message."""
        replying.on_change = None
        return Sender(replying.half, self)

    def forget(self, asked: PendingReply, *, close: bool) -> None:
        """``asked`` is told no more. ``close``: no task wants the answer."""
        asked.on_change = None
        half, asked.half = asked.half, None
        if half is not None:
            half.handle = None
            if close:
                self.core.close_receiver(half, self.time())
                self.pump.flush_soon()

    def reply(self, replying: Responder, payload: Any, headers: Headers, *, now: bool) -> None:
        """The one message of a oneshot channel; its receiver often asks again soon.

        ``now`` lets it leave at once if input is being worked on: so it is on its way while what
        else there is to do is done here. Raises as Sender.send_nowait.
        """
        replying.forget()
        self.core.send(replying.half, payload, self.time(), headers=headers)
        if now and self.pump.flushing:
            self.pump.flush_at_once()
        else:
            self.pump.flush_soon()
        self.carrier.expect_input()

    def flush(self) -> None:
        """What was queued leaves at once, while what else there is to do here is done."""
        self.pump.flush_at_once()

    def await_answer(self) -> None:
        """What was queued leaves at once: nothing else is to be sent before its answer is here."""
        self.pump.flush_at_once()
        self.carrier.expect_input()

    def room_came(self) -> None:
        """Messages were taken, and others wait for their room (see ``Receiver.queue``)."""
        self.core.use_room(self.time())
        if self.core.waits:
            self.pump.flush_soon()  # a credit is due

    def _room_soon(self) -> None:
        """Receivers may go on. May be called in any thread."""
        if not self._room_due:
            self._room_due = True
            try:
                self.loop.call_soon_threadsafe(self._room_now)
            except RuntimeError:  # the loop is closed, and the connection with it
                self.core.budget.wake = None

    def _room_now(self) -> None:
        self._room_due = False
        if not self.closed:
            self.core.budget.freed = True
            self.core.use_room(self.time())
            self.pump.flush_soon()  # a credit may be due, and a timer

    def dropped(self, half: Half) -> None:
        """A handle was garbage-collected, in any thread: its channel cannot be used any more."""
        if self.closed or self.loop.is_closed():
            return
        if isinstance(half, SenderHalf):
            if half.state is not SenderState.OPEN:
                return
        elif half.error is not None and not half.queue:
            return  # what it still queued has its price, and may carry channels
        self._dropped.append(half)
        if not self._dropping:
            self._dropping = True
            with suppress(RuntimeError):  # the loop may close in another thread
                self.loop.call_soon_threadsafe(self._drop_some)

    # Within

    def _elsewhere(self) -> str:
        """The text of the error where another loop or process uses this connection."""
        if self.home is _FORKED:
            return (
                f"the connection to {self.peer} belongs to the process that process {os.getpid()} "
                "was forked from; connect after the fork"
            )
        if self.loop.is_closed():
            return (
                f"the event loop of the connection to {self.peer} has ended, and the connection "
                "with it; connect on the loop that uses it"
            )
        return (
            f"the connection to {self.peer} belongs to another event loop; use it there "
            "(asyncio.run_coroutine_threadsafe brings a call from another thread), connect on "
            "this loop, or take a SyncClient, which any thread may use"
        )

    def _drop_some(self) -> None:
        """A message may carry very many handles that nobody takes: a few in each turn."""
        if self.closed:
            self._dropped.clear()
            return
        self._dropping = False
        for _ in range(min(len(self._dropped), _DROPS)):
            self.core.drop_attachment(self._dropped.popleft(), self.time())
        self.pump.flush()
        if self._dropped and not self._dropping:
            self._dropping = True
            self.loop.call_soon(self._drop_some)

    def message(self, received: Received) -> Message:
        """What was received, as its reader gets it."""
        return message_of(received, self)

    def handle(self, half: Half) -> Sender | Receiver:
        """What code holds of a half that came with a message."""
        return handle_of(half, self)

    def _on_event(self, event: Event) -> None:
        if isinstance(event, _OF_A_HALF):
            reference = event.half.handle
            handle = reference() if reference is not None else None
            if handle is not None:
                handle.changed()
        elif isinstance(event, HeadersReceived):
            self._headers_received(event.headers)
        elif isinstance(event, Closed):
            self._on_closed(event.error)

    def _headers_received(self, headers: Headers) -> None:
        self.headers = headers
        if not self.is_client:
            own: Any = self._own_headers
            if self._on_headers is not None:
                try:
                    answer = self._on_headers(headers, self)
                    if not isinstance(answer, bool):
                        own = answer
                    elif not allows(answer, "on_headers"):
                        raise Refused("the server does not allow the connection")
                except Exception as error:  # noqa: BLE001 - whatever the hook raises refuses
                    self.core.reject_headers(str(error) or type(error).__name__)
                    self.pump.flush_soon()
                    return
            self.pump.flush_soon()
            try:
                self.core.accept_headers(own, self.time())
            except Exception as error:
                log.exception(
                    "the connection headers for %s cannot be sent: on_headers returned %s",
                    self.peer,
                    shown(own),
                )
                self.core.fail_internal(error)
                return
        if not self._ready.done():
            self._ready.set_result(None)

    def _on_closed(self, error: ConnectionLost) -> None:
        if self._alive_timer is not None:
            self._alive_timer.cancel()
            self._alive_timer = None
        if not self._ready.done():
            self._ready.set_exception(error)
            self._ready.exception()  # waiting tasks get it; without one there is no warning
        for pong in self._pongs:
            if not pong.done():
                pong.set_exception(error)
                pong.exception()
        self._pongs.clear()

    def _transport_gone(self) -> None:
        """The carrier reported its end."""
        self.core.budget.wake = None
        self._process.closed()
        if not self._closed.done():
            self._closed.set_result(None)

    def _ponged(self) -> None:
        pongs, self._pongs = self._pongs, []
        for pong in pongs:
            if not pong.done():
                pong.set_result(None)

    def _stay_alive(self) -> None:
        """A pause must not end a connection on which something is open (design: Flow)."""
        interval = self.config.timing.ping_interval
        left = interval - (self.time() - self.pump.last_input)
        if left <= 0:
            left = interval
            if (self._holds > 0 or self.core.channels > 1) and not self.carrier.suspended:
                self.carrier.ping()
                self.carrier.flush()
        # Counted from the last input: at fixed times a silence could grow to two intervals.
        self._alive_timer = self.loop.call_later(left, self._stay_alive)
