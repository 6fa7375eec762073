"""``Call``: what a handler knows of the call that it works on."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Mapping
from typing import Final

import pyarrow as pa

from aqueduct.arguments import checked
from aqueduct.carriers.contract import PeerCredentials, PeerIdentity
from aqueduct.errors import AqueductError, Busy
from aqueduct.escaping import logger_of
from aqueduct.rpc.request import CallHead, Kind, Partition
from aqueduct.service.call_connection import CallOrigin
from aqueduct.service.namespace import Namespace

__all__ = ["Call", "cancel", "forget_callbacks", "no_memory"]

log = logger_of(__name__)

_LOCK: Final = threading.Lock()
"""Of the callbacks of all calls: most have none, and it is held for a moment."""


class Call:
    """One call, as its handler sees it. All of it may be used from any thread.

    A handler that works long between two batches should look at ``cancelled`` now and then:
    nobody is left to read its answers then. Taking or yielding the next batch ends it anyway.
    """

    __slots__ = (
        "_callbacks",
        "_carrier",
        "_deadline",
        "_greeting",
        "_head",
        "_reason",
        "_state",
        "handler",
        "number",
        "output_schema",
        "peer",
        "schema",
    )

    def __init__(
        self, connection: CallOrigin, head: CallHead, number: int, *, state: Namespace | None = None
    ) -> None:
        # Most calls are asked for next to nothing: what they know is looked up when it is.
        self._head = head
        self._carrier = connection.carrier
        self._greeting = connection.headers
        self.handler = head.handler
        """The name that was called."""
        self.peer = connection.carrier.peer
        """The client's address."""
        self.number = number
        """Counts the service's calls from 1; for logs."""
        self.schema = head.schema
        """Of the batches that come; None for a source."""
        self.output_schema: pa.Schema | None = None
        """Of the batches to yield; None for a sink, and while ``authorize`` looks at the call.
        While ``output=`` is called: what the client expects, None if it did not say."""
        deadline = head.deadline
        self._deadline = None if deadline is None else time.monotonic() + deadline
        self._reason: AqueductError | None = None
        self._callbacks: list[Callable[[], object]] | None = None
        self._state = state

    @property
    def state(self) -> Namespace:
        """Attributes of your own: what ``authorize`` sets here the handler finds.

        It belongs to this one call. What is for all calls is in ``Service.state``.
        """
        if self._state is None:
            with _LOCK:
                if self._state is None:
                    self._state = Namespace(whose="call.state", hint="; authorize may set more")
        return self._state

    @property
    def kind(self) -> Kind:
        """What batches go where: "exchange", "source" or "sink"."""
        return self._head.kind

    @property
    def peer_credentials(self) -> PeerCredentials | None:
        """The client's process (``pid``, ``uid``, ``gid``).

        The kernel of this machine vouches for it; None unless the connection came over a Unix
        socket (or within this process).
        """
        return self._carrier.peer_credentials

    @property
    def peer_identity(self) -> PeerIdentity | None:
        """Whom the client's certificate names (``subject``, ``names``, ``fingerprint``).

        None if it showed none. A service demands one by ``ServerTls(client_ca=...)``.
        """
        return self._carrier.peer_identity

    @property
    def headers(self) -> Mapping[str, str]:
        """The user metadata of the call."""
        return self._head.metadata

    @property
    def connection_headers(self) -> Mapping[str, str]:
        """The headers of its connection."""
        return {
            key.decode("ascii", "replace"): value.decode("utf-8", "replace")
            for key, value in self._greeting
        }

    @property
    def write_key(self) -> str:
        """The same for every attempt at one piece of work, and for no other; "" if not given."""
        return self._head.write_key

    @property
    def attempt(self) -> str:
        """Tells the attempts at one piece of work apart; "" if not given."""
        return self._head.attempt

    @property
    def token(self) -> str | None:
        """What the client shows to be let in; None if nothing. See Service(authorize=...)."""
        token = self._head.token
        return None if token is None else token.decode("utf-8", "surrogateescape")

    @property
    def partition(self) -> Partition | None:
        """The share of a piece of work that this call is, if the client said so."""
        return self._head.partition

    @property
    def deadline(self) -> float | None:
        """Seconds left of the client's deadline, never below 0; None without one."""
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    @property
    def cancelled(self) -> bool:
        """Whether the call is over for its client: abandoned, too late, or the client is gone."""
        return self._reason is not None

    @property
    def reason(self) -> AqueductError | None:
        """Why it was cancelled; None while it was not."""
        return self._reason

    def check(self) -> None:
        """Raises ``reason`` if the call was cancelled: a way out of deep loops."""
        if self._reason is not None:
            raise self._reason

    @checked()
    def on_cancel(self, callback: Callable[[], object]) -> None:
        """Calls ``callback()`` once when the call is cancelled, at once if it already is.

        It is called in the service's event loop (or in this thread, if at once), so it must be
        quick: set an event, close a socket.
        """
        with _LOCK:
            if self._reason is None:
                if self._callbacks is None:
                    self._callbacks = []
                self._callbacks.append(callback)
                return
        callback()

    async def wait_cancelled(self) -> None:
        """Returns once the call is cancelled. For handlers on the service's event loop."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()

        def wake() -> None:
            if not future.done():
                future.set_result(None)

        self.on_cancel(lambda: loop.call_soon_threadsafe(wake))
        await future

    def log_fields(self) -> dict[str, object]:
        """What a line of the log about it has as fields."""
        return {"peer": self.peer, "handler": self.handler, "call": self.number}

    def __repr__(self) -> str:
        state = " cancelled" if self.cancelled else ""
        return f"<Call {self.number} of {self.kind} {self.handler!r} from {self.peer}{state}>"


def cancel(call: Call, reason: AqueductError) -> None:
    """The call is over for its client. For the service."""
    with _LOCK:
        if call._reason is not None:
            return
        call._reason = reason
        callbacks, call._callbacks = call._callbacks, None
    for callback in callbacks or ():
        try:
            callback()
        except Exception:
            log.exception("on_cancel callback of %r raised", call)


def forget_callbacks(call: Call) -> None:
    """The call is over: what waits for its cancellation waits in vain. For the service."""
    if call._callbacks is not None:
        with _LOCK:
            call._callbacks = None


def no_memory(call: Call, error: MemoryError, what: str) -> Busy:
    """The error of a call for whose ``what`` there was no memory."""
    reason = str(error) or "no memory"
    text = (
        f"the service could not take memory for {what} of handler {call.handler!r} "
        f"({reason}); try again later or elsewhere, with fewer rows in a batch"
    )
    log.warning("%r: %s", call, text)
    return Busy(text, peer=call.peer, handler=call.handler)
