"""A client of ReactiveSocket that drives the work of a task; ``spark_udfs`` uses it.

To a task it is what a ``TaskClient`` is, for what ReactiveSocket can carry: functions of one batch.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Final, Unpack

import pyarrow as pa

from aqueduct import reactivesocket
from aqueduct.address import Address
from aqueduct.arguments import checked
from aqueduct.carriers.certificates import ClientTls
from aqueduct.client.client_connection import plain
from aqueduct.client.loop_thread import LoopThread
from aqueduct.client.options import CallOptions, ExchangeOptions, takes, token_bytes
from aqueduct.client.reactive_exchange import ReactiveExchange
from aqueduct.client.thread_call import News
from aqueduct.config import DEFAULT, Config
from aqueduct.errors import (
    BadCall,
    CallError,
    ConnectionLost,
    LocalProtocolError,
    ReactiveError,
    UnknownHandler,
)
from aqueduct.rpc.describe import DESCRIBE, Description
from aqueduct.rpc.reactive_calls import decode_error, encode_request
from aqueduct.rpc.request import CallHead

__all__ = ["ReactiveTaskClient"]

_DESCRIPTION: Final = 16 << 20
"""Bytes of a description."""


class ReactiveTaskClient:
    """One connection of a task to a service that speaks ReactiveSocket."""

    told_resumes = 0
    """As that of a TaskClient."""
    resumes = 0
    """A connection of ReactiveSocket that is cut is over."""

    def __init__(
        self, address: str | Address, *, config: Config = DEFAULT, tls: ClientTls | None = None
    ) -> None:
        """Raises ConnectFailed, and ConfigError for what the address cannot have."""
        self.address = plain(address)
        """The service's address, without options."""
        self.config = config
        self._described: dict[bytes | None, tuple[float, asyncio.Task[Description | None]]] = {}
        """Of the loop: what the service says of itself to those with a token, and till when one
        waits for that."""
        self._thread = LoopThread("aqueduct-reactive-client")
        try:
            self._connection = self._thread.run(
                reactivesocket.connect(address, config=config, tls=tls)
            )
        except BaseException:
            self._thread.stop()
            raise

    @property
    def closed(self) -> bool:
        """Whether the connection is over, or was left behind by a fork."""
        return not self._thread.alive or self._connection.closed

    @checked()
    @takes(ExchangeOptions)
    def exchange_call(
        self, handler: str, news: News, tag: object, **options: Unpack[ExchangeOptions]
    ) -> ReactiveExchange:
        """As that of a TaskClient: an exchange for a thread that drives several at once."""
        self._thread.check()
        if self._connection.closed:
            raise self._connection.error or ConnectionLost(f"{self!r} is closed")
        given = CallOptions(**options)
        head = given.head("exchange", handler, given.schema, None)
        head.encode()  # errors belong here rather than into the other thread
        exchange = ReactiveExchange(
            self._thread,
            self._connection,
            head,
            given,
            described=lambda: self._description(head.token),
            news=news,
            tag=tag,
            peer=self.address,
        )
        exchange.wake()
        return exchange

    def describe(self, *, token: str | bytes | None = None) -> Description | None:
        """What the service says of itself; None if it is none of Aqueduct's.

        Raises Refused for a token that will not do, and ConnectionLost.
        """
        return self._thread.run(self._description(token_bytes(token)))

    def close(self) -> None:
        """Closes the connection and ends its thread. Without effect in a forked child."""
        if self._thread.alive:
            timing = self.config.timing
            limit = timing.close_linger + timing.connect_timeout
            try:
                with suppress(TimeoutError, LocalProtocolError):
                    self._thread.run(self._connection.close(), timeout=limit)
            finally:
                self._thread.stop()

    def __repr__(self) -> str:
        return f"<ReactiveTaskClient of {self.address}{' closed' if self.closed else ''}>"

    # On the loop

    async def _description(self, token: bytes | None) -> Description | None:
        """Asked for once, for each token; a task of its own, as one who waits may give up.

        A service that is none of Aqueduct's may answer nothing at all. So after a while it is
        taken for one without a description, until that comes.
        """
        loop, timing = asyncio.get_running_loop(), self.config.timing
        until, task = self._described.get(token, (0.0, None))
        if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
            until = loop.time() + timing.connect_timeout
            task = loop.create_task(self._ask_description(token))
            if len(self._described) >= 16:
                self._described.clear()
            self._described[token] = until, task
            task.add_done_callback(_seen)
        await asyncio.wait((task,), timeout=until - loop.time())
        return task.result() if task.done() else None

    async def _ask_description(self, token: bytes | None) -> Description | None:
        head = CallHead(handler=DESCRIBE, kind="source", token=token)
        parts, size = [], 0
        try:
            # Whoever waits has a deadline; this ends with the connection at the latest.
            async with self._connection.stream(b"".join(encode_request(head)), n=4) as items:
                async for item in items:
                    parts.append(bytes(item.data))
                    size += len(parts[-1])
                    if size > _DESCRIPTION:
                        return None
        except ReactiveError as error:
            failed = decode_error(error.text, peer=self.address, handler=DESCRIBE)
            if type(failed) in (UnknownHandler, BadCall, CallError):
                return None  # it knows nothing of that, or no words for what it knows
            raise failed from None
        try:
            with pa.ipc.open_stream(b"".join(parts)) as reader:
                return Description.from_batches(list(reader), peer=self.address)
        except (pa.ArrowException, BadCall):
            return None


def _seen(task: asyncio.Task[Description | None]) -> None:
    """Marks its error as seen: callers that wait get it, and perhaps none waits."""
    if not task.cancelled():
        task.exception()
