"""Calls of one batch that a thread makes; a UnaryStub has ready what many of them have in common.

Much of the work of a small call is to say what the last call said, too. So that is kept here.
"""

from __future__ import annotations

import contextlib
import time
from queue import SimpleQueue
from typing import Unpack

import pyarrow as pa

from aqueduct.arrow.encode import Encoded
from aqueduct.client.call import abandoned
from aqueduct.client.client_connection import ClientConnection
from aqueduct.client.loop_thread import LoopThread
from aqueduct.client.options import CallOptions, WorkOptions, token_bytes
from aqueduct.client.sync_stream import SyncStream
from aqueduct.client.thread_call import ThreadCall
from aqueduct.client.unary import UnaryCaller, UnaryResult
from aqueduct.errors import ConnectionLost
from aqueduct.rpc.keys import Headers
from aqueduct.rpc.request import own_headers

__all__ = ["StubCall", "UnaryStub"]


class UnaryStub:
    """Makes calls of one batch that are alike; ``TaskClient.prepare`` gives it.

    For one thread at a time.
    """

    __slots__ = ("_caller", "_client", "_thread")

    def __init__(self, thread: LoopThread, client: ClientConnection, caller: UnaryCaller) -> None:
        self._thread = thread
        self._client = client
        self._caller = caller

    def encode(self, batch: pa.RecordBatch) -> Encoded | None:
        """The payload of a batch; None if it is too large to go with its call.

        Raises SchemaMismatch and LocalProtocolError.
        """
        encoded = self._caller.encode(batch)
        return encoded if self._caller.fits(encoded) else None

    def call(self, encoded: Encoded, **work: Unpack[WorkOptions]) -> StubCall:
        """One call; nothing is sent yet. Raises LocalProtocolError for what cannot be said."""
        given = CallOptions(**work)
        shown = self._client.token if given.token is None else token_bytes(given.token)
        own = own_headers(given.write_key, given.attempt, shown, given.partition, given.headers)
        return StubCall(self._thread, self._client, self._caller, encoded, tuple(own))


class StubCall:
    """One call of one batch. ``result`` is for the thread that made it, ``close`` for any."""

    __slots__ = ("_call", "_caller", "_client", "_ended", "_thread", "encoded", "waited")

    def __init__(
        self,
        thread: LoopThread,
        client: ClientConnection,
        caller: UnaryCaller,
        encoded: Encoded,
        headers: Headers = (),
    ) -> None:
        self._thread = thread
        self._client = client
        self._caller = caller
        self._ended: SimpleQueue[bool | None] = SimpleQueue()
        self._call = client.unary_call(caller, encoded, self._over, headers)
        self.encoded = encoded
        self.waited = 0.0
        """Seconds that ``result`` waited."""

    def result(self) -> UnaryResult:
        """What came back; to be asked for once. Raises how the call failed."""
        self._thread.check()
        began = time.perf_counter()
        try:
            ended = self._thread.wait(self._ended, self._call.begin)
        except BaseException:
            self.close()  # an interrupt leaves nothing behind
            raise
        finally:
            self.waited = time.perf_counter() - began
        if ended is None:
            raise ConnectionLost(f"{self._client!r} is closed")
        if self._call.slow:
            self._call.read()
        return self._call.result()

    def follow(self, answered: UnaryResult) -> SyncStream:
        """The answers that did not fit the message: ``answered`` says where they are."""
        head = self._caller.following(answered)
        call = ThreadCall(self._thread, self._client, head, None, answered=answered.follow)
        call.finish()
        call.wake()
        return SyncStream(call)

    def close(self) -> None:
        """Abandons the call, unless it is over: the handler is told to stop."""
        error = abandoned(self._client.address, self._caller.head.handler)
        with contextlib.suppress(RuntimeError):  # the loop has ended, and the call with it
            self._thread.call(self._call.end, error)

    # Within

    def _over(self) -> None:
        """On the loop: there no handler of a signal interrupts what reads the answer."""
        if not self._call.slow:
            self._call.read()
        self._ended.put(True)
