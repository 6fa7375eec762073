"""Calls of one batch that a thread makes again and again: what they have in common is made once.

Much of the work of a small call is to say what the last call said, too. So that is kept here.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping
from concurrent.futures import CancelledError

import pyarrow as pa

from aqueduct.arrow.encode import Encoded
from aqueduct.client.call import abandoned
from aqueduct.client.client import Client
from aqueduct.client.loop_thread import LoopThread
from aqueduct.client.sync_stream import SyncStream
from aqueduct.client.thread_call import ThreadCall
from aqueduct.client.unary import UnaryCaller, UnaryResult, token_bytes
from aqueduct.errors import AqueductError, ConnectionLost, LocalProtocolError
from aqueduct.rpc.keys import Headers
from aqueduct.rpc.request import Partition, own_headers

__all__ = ["StubCall", "UnaryStub"]


class UnaryStub:
    """Makes calls of one batch that are alike; ``SyncClient.prepare`` gives it.

    For one thread at a time.
    """

    __slots__ = ("_asker", "_client", "_thread")

    def __init__(self, thread: LoopThread, client: Client, asker: UnaryCaller) -> None:
        self._thread = thread
        self._client = client
        self._asker = asker

    def encode(self, batch: pa.RecordBatch) -> Encoded | None:
        """The payload of a batch; None if it is too large to go with its call.

        Raises SchemaMismatch and LocalProtocolError.
        """
        encoded = self._asker.encode(batch)
        return encoded if self._asker.fits(encoded) else None

    def call(
        self,
        encoded: Encoded,
        *,
        headers: Mapping[str, str] | None = None,
        run: str = "",
        attempt: str = "",
        token: str | bytes | None = None,
        partition: Partition | None = None,
    ) -> StubCall:
        """One call; nothing is sent yet. Raises LocalProtocolError for what cannot be said."""
        shown = self._client.token if token is None else token_bytes(token)
        own = own_headers(run, attempt, shown, partition, headers)
        return StubCall(self._thread, self._client, self._asker, encoded, tuple(own))


class StubCall:
    """One call of one batch. ``result`` is for the thread that made it, ``close`` for any."""

    __slots__ = (
        "_asker",
        "_client",
        "_closed",
        "_headers",
        "_task",
        "_thread",
        "encoded",
        "waited",
    )

    def __init__(
        self,
        thread: LoopThread,
        client: Client,
        asker: UnaryCaller,
        encoded: Encoded,
        headers: Headers,
    ) -> None:
        self._thread = thread
        self._client = client
        self._asker = asker
        self._headers = headers
        self._task: asyncio.Task[UnaryResult] | None = None
        self._closed = False
        self.encoded = encoded
        self.waited = 0.0
        """Seconds that ``result`` took."""

    def result(self) -> UnaryResult:
        """What came back; to be asked for once. Raises how the call failed."""
        began = time.perf_counter()
        try:
            return self._thread.run(self._wait())
        except (asyncio.CancelledError, CancelledError):
            raise self._lost() from None
        except LocalProtocolError:  # the loop has ended
            if self._closed:
                raise self._lost() from None
            raise
        except BaseException:
            self.close()  # an interrupt leaves nothing behind
            raise
        finally:
            self.waited = time.perf_counter() - began

    def follow(self, answered: UnaryResult) -> SyncStream:
        """The answers that did not fit the message: ``answered`` says where they are."""
        head = self._asker.following(answered)
        crossing = ThreadCall(self._thread, self._client, head, None, answered=answered.follow)
        crossing.finish()
        return SyncStream(crossing, None)

    def close(self) -> None:
        """Abandons the call, unless it is over: the handler is told to stop."""
        self._closed = True
        task = self._task
        if task is None:
            return
        if not task.done():
            with contextlib.suppress(RuntimeError):  # the loop has ended, and the task with it
                self._thread.call(task.cancel)
        elif not task.cancelled():
            task.exception()  # nobody asks for it any more, and asyncio need not complain of that

    # Within

    async def _wait(self) -> UnaryResult:
        """On the loop."""
        self._task = asyncio.current_task()
        if self._closed and self._task is not None:
            self._task.cancel()
        return await self._client.ask(self._asker, self.encoded, self._headers)

    def _lost(self) -> AqueductError:
        if self._closed:
            return abandoned(self._client.address, self._asker.head.handler)
        return ConnectionLost(f"{self._client!r} is closed")
