"""``Call``: what a handler knows of the call that it works on."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Final

import pyarrow as pa

from aqueduct.arrow.call import CallHead, Partition
from aqueduct.carriers.contract import PeerCredentials, PeerIdentity
from aqueduct.endpoint import Connection
from aqueduct.errors import AqueductError

__all__ = ["Call", "call_of"]

log = logging.getLogger(__name__)

_LOCK: Final = threading.Lock()
"""Of the callbacks of all calls: most have none, and it is held for a moment."""


class Call:
    """One call, as its handler sees it. All of it may be used from any thread.

    A handler that works long between two batches should look at ``cancelled`` now and then:
    nobody is left to read its answers then. Taking or yielding the next batch ends it anyway.
    """

    __slots__ = (
        "_callbacks",
        "_deadline",
        "_reason",
        "attempt",
        "connection_headers",
        "handler",
        "headers",
        "kind",
        "number",
        "output_schema",
        "partition",
        "peer",
        "peer_credentials",
        "peer_identity",
        "run",
        "schema",
        "token",
    )

    def __init__(
        self,
        *,
        peer: str,
        handler: str,
        kind: str,
        number: int = 0,
        headers: Mapping[str, str],
        connection_headers: Mapping[str, str],
        schema: pa.Schema | None = None,
        output_schema: pa.Schema | None = None,
        run: str = "",
        attempt: str = "",
        token: str | None = None,
        partition: Partition | None = None,
        deadline: float | None = None,
        peer_credentials: PeerCredentials | None = None,
        peer_identity: PeerIdentity | None = None,
    ) -> None:
        self.peer = peer
        """The client's address."""
        self.peer_credentials = peer_credentials
        """The client's process (``pid``, ``uid``, ``gid``), as the kernel of this machine vouches
        for it; None unless the connection came over a Unix socket (or within this process)."""
        self.peer_identity = peer_identity
        """Whom the client's certificate names (``subject``, ``names``, ``fingerprint``); None if
        it showed none. A service demands one by ``ServerTls(client_ca=...)``."""
        self.handler = handler
        """The name that was called."""
        self.kind = kind
        """"exchange", "source" or "sink"."""
        self.number = number
        """Counts the service's calls from 1; for logs."""
        self.headers = headers
        """The user metadata of the call."""
        self.connection_headers = connection_headers
        """The headers of its connection."""
        self.schema = schema
        """Of the batches that come; None for a source."""
        self.output_schema = output_schema
        """Of the batches to yield; None for a sink, and while ``authorize`` looks at the call.
        While ``output=`` is called: what the client expects, None if it did not say."""
        self.run = run
        """The same for every attempt at one piece of work, and for no other; "" if not given."""
        self.attempt = attempt
        """Tells the attempts at one piece of work apart; "" if not given."""
        self.token = token
        """What the client shows to be let in; None if nothing. See Service(authorize=...)."""
        self.partition = partition
        """The share of a piece of work that this call is, if the client said so."""
        self._deadline = None if deadline is None else time.monotonic() + deadline
        self._reason: AqueductError | None = None
        self._callbacks: list[Callable[[], object]] | None = None

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

    def __repr__(self) -> str:
        state = " cancelled" if self.cancelled else ""
        return f"<Call {self.number} of {self.kind} {self.handler!r} from {self.peer}{state}>"

    # The service calls

    def _cancel(self, reason: AqueductError) -> None:
        with _LOCK:
            if self._reason is not None:
                return
            self._reason = reason
            callbacks, self._callbacks = self._callbacks, None
        for callback in callbacks or ():
            try:
                callback()
            except Exception:
                log.exception("on_cancel callback of %r raised", self)

    def _forget_callbacks(self) -> None:
        """The call is over: what waits for its cancellation waits in vain."""
        if self._callbacks is not None:
            with _LOCK:
                self._callbacks = None


def call_of(connection: Connection, head: CallHead, number: int) -> Call:
    """What a handler is told of a call that came by ``connection``."""
    token, carrier = head.token, connection.carrier
    return Call(
        peer=carrier.peer,
        handler=head.handler,
        kind=head.kind,
        number=number,
        headers=head.metadata,
        connection_headers=_text_headers(connection.headers) if connection.headers else {},
        schema=head.schema,
        run=head.run,
        attempt=head.attempt,
        token=None if token is None else token.decode("utf-8", "surrogateescape"),
        partition=head.partition,
        deadline=head.deadline,
        peer_credentials=carrier.peer_credentials,
        peer_identity=carrier.peer_identity,
    )


def _text_headers(headers: tuple[tuple[bytes, bytes], ...]) -> dict[str, str]:
    return {
        key.decode("ascii", "replace"): value.decode("utf-8", "replace") for key, value in headers
    }
