"""Requests of the peer, and who answers them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeAlias

from aqueduct._speedups.reactivesocket import reactive_frames as frames
from aqueduct.carriers.transports.waiting import Waiters
from aqueduct.errors import Ended
from aqueduct.escaping import logger_of
from aqueduct.protocol.reactivesocket.reasons import APPLICATION_ERROR
from aqueduct.reactivesocket.face import ReactiveFace
from aqueduct.reactivesocket.requesting import Data

__all__ = ["ReactiveRequest", "Responder"]

log = logger_of(__name__)

KINDS: Final = {
    frames.REQUEST_RESPONSE: "request",
    frames.REQUEST_FNF: "fire",
    frames.REQUEST_STREAM: "stream",
    frames.REQUEST_SUB: "subscribe",
}


class ReactiveRequest:
    """A request of the peer.

    ``data`` may be used for as long as this lives; they count in the connection's memory until
    ``release``. ``send_nowait`` while it is ``writable``, or ``await send``, gives items;
    ``complete`` and ``fail`` end it. A request of the kind "request" is answered by
    ``complete(item)``; "fire" gets no answer; "subscribe" does not complete.
    """

    __slots__ = (
        "__weakref__",
        "_cost",
        "_face",
        "_waiters",
        "_why",
        "connection",
        "data",
        "ended",
        "kind",
        "on_change",
        "queue",
        "stream",
        "task",
    )

    def __init__(
        self, face: ReactiveFace, connection: Any, stream: int, kind: int, data: Any, cost: int
    ) -> None:
        self.connection = connection
        self.stream = stream
        """The id that the peer gave it."""
        self.kind = KINDS[kind]
        """"request", "fire", "stream" or "subscribe"."""
        self.data = memoryview(data)
        self.ended = kind == frames.REQUEST_FNF
        """It was answered or cancelled, or the connection is over: nothing is sent any more."""
        self.on_change: Callable[[], None] | None = None
        """Called in the event loop when demand or room have come, or it has ended."""
        self.task: asyncio.Task[None] | None = None
        """What answers it."""
        self.queue = face.core.queue_of(stream) if not self.ended else None
        """What waits to leave of it."""
        self._face = face
        self._cost = cost
        self._waiters = Waiters()
        self._why = "a fire is not answered" if self.ended else ""
        """What has ended it."""
        face.in_hand += cost

    @property
    def demand(self) -> int:
        """How many items may be sent now."""
        return 0 if self.ended else self._face.core.demand(self.stream)

    @property
    def writable(self) -> bool:
        """Whether an item may be sent now. If not, ``on_change`` is called once it may."""
        return self.demand > 0 and self._face.has_room_for(self)  # type: ignore[arg-type]

    @property
    def queued(self) -> int:
        """Bytes of its items that have not left, also once it is complete."""
        return 0 if self.queue is None else self.queue.cost

    def release(self) -> None:
        """Its data are done with: they count no more."""
        cost, self._cost = self._cost, 0
        if cost:
            self._face.give_back_request(cost)

    def charge(self, size: int) -> None:
        """So many bytes were made of its data, and count as these do. In any thread.

        Below zero: so many that were charged are done with; ``release`` knows nothing of them.
        """
        self._face.charge_request(size)

    def send_nowait(self, data: Data) -> bool:
        """Sends an item: a buffer, or several. False: it has ended.

        They are kept until they have left, and must not change. LocalProtocolError if it was not
        asked for, or is too large.
        """
        if self.ended or not self._face.core.item(self.stream, data):
            return False
        self._face.sent(self)  # type: ignore[arg-type]
        return True

    async def send(self, data: Data) -> None:
        """Sends an item once it was asked for and there is room. That of a "request" ends it.

        Raises Ended if it has ended, most often as the peer has cancelled it, and ConnectionLost if
        the connection is over. How long the peer takes to ask for it is the peer's affair; one that
        reads nothing is given up.
        """
        await self._waiters.until(lambda: self.ended or self.writable)
        sent = self.complete(data) if self.kind == "request" else self.send_nowait(data)
        if not sent:
            self._face.usable()
            raise Ended(f"request {self.stream} takes no item: {self._why}")

    def complete(self, data: Data | None = None) -> bool:
        """Ends it, with a last item unless ``data`` is None. False: it had ended.

        LocalProtocolError for an item while it is not ``writable``; ``send`` waits for that.
        """
        if self.ended or not self._face.core.complete(self.stream, data):
            return False
        self._finish("this side has completed it")
        return True

    def fail(self, text: str, word: str = APPLICATION_ERROR) -> bool:
        """Ends it with an ERROR of this text. False: it had ended."""
        if self.ended or not self._face.core.fail_stream(self.stream, text, word=word):
            return False
        self._finish("this side has ended it with an ERROR")
        return True

    def __del__(self) -> None:
        self.release()

    def __repr__(self) -> str:
        return f"<ReactiveRequest {self.stream}: {self.kind} of {self.data.nbytes} bytes>"

    # What the connection tells

    def changed(self) -> None:
        """Demand or room have come."""
        self._waiters.wake()
        if self.on_change is not None:
            try:
                self.on_change()
            except Exception:
                log.exception("on_change of %r failed", self)
                self.fail("the responder failed")

    def end(self, why: str) -> None:
        """The peer, or the end of the connection, has ended it."""
        if not self.ended:
            self._finish(why)
            if self.task is not None:
                self.task.cancel()
            self.changed()

    def give_up(self, text: str, word: str) -> None:
        """This side answers it no more."""
        if self.fail(text, word):
            if self.task is not None:
                self.task.cancel()
            self.changed()

    # Within

    def _finish(self, why: str) -> None:
        self.ended, self._why = True, why
        self._face.forget(self)  # type: ignore[arg-type]
        self._face.responding.pop(self.stream, None)
        self._face.advance_soon()


Responder: TypeAlias = Callable[[ReactiveRequest], Awaitable[None] | None]
"""Called in the event loop for each request of the peer, in order. A coroutine runs in a task,
which is cancelled if the peer cancels, or the connection ends."""
