"""One call of a sync client, between the thread that uses it and the event loop that carries it."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping
from queue import Empty, SimpleQueue
from typing import Any, Final, TypeAlias

import pyarrow as pa

from aqueduct._speedups.calls.batch_sender import InFlightWindow
from aqueduct._speedups.channels.receiver import MemoryLease
from aqueduct.arrow.decode import Decoder
from aqueduct.arrow.encode import Encoded
from aqueduct.client.call import END, Batches, ClientCall, abandoned, begin_pull
from aqueduct.client.client_connection import ClientConnection
from aqueduct.client.loop_thread import LoopThread
from aqueduct.endpoint import Message
from aqueduct.endpoint.pulling import LARGE, PULLING, UNKNOWN, Pull
from aqueduct.errors import ConnectionLost
from aqueduct.rpc.request import CallHead
from aqueduct.rpc.unpacking import await_room

__all__ = ["NEWS", "SMALL", "Failed", "News", "ThreadCall"]

News: TypeAlias = "SimpleQueue[tuple[Any, Any]]"
"""What calls have for a thread, each piece with the tag of its call."""

SMALL: Final = 16 << 10
"""Bytes of a first batch that need not leave before the thread waits."""
_AHEAD: Final = 16
_AHEAD_BYTES: Final = 8 << 20
_GLANCE: Final = 5.0

NEWS: Final = object()
"""There is room to send, or the call was accepted."""


class Failed:
    """How a call failed, on its way to the thread."""

    __slots__ = ("error",)

    def __init__(self, error: BaseException) -> None:
        self.error = error


class ThreadCall:
    """One call between a thread and the event loop that carries it.

    The thread has ``push`` for its batches, ``pop`` and ``wait`` for what comes:

    - NEWS: there is room, or the call was accepted, where ``wait`` or ``expect`` asked for it;
    - an answer: a tuple of the number of its input batch and its payload, for ``decode``, or a
      FailedBatch. The answer before is given back by that;
    - END, and nothing after it: all is answered, and the service says that it is well;
    - Failed, and nothing after it: the call is over, with its ``error``.

    Each field is written by one side alone; what the other side must notice it is woken for. The
    flags that ask for a wake are set before the last look at what they wait for, so that no
    change falls between.
    """

    def __init__(
        self,
        thread: LoopThread,
        client: ClientConnection,
        head: CallHead,
        window: InFlightWindow | None,
        source: Batches | None = None,
        *,
        news: News | None = None,
        tag: Any = None,
        answered: Message | None = None,
    ) -> None:
        """``source`` encodes what is sent.

        - ``news``: a queue that several calls of one thread have together. All that comes is put
          there as a pair of ``tag`` and what ``popped`` is to be given.
        - ``answered``: the call was made already, and this says on what channels its answers
          follow.
        """
        self.head = head
        self.source = source
        self._answered = answered
        self.call: ClientCall | None = None  # of the loop
        self._thread = thread
        self._client = client
        self._window = window
        if window is not None:
            window.share(client.under_way, None)  # a thread that asks for room waits for answers
        self._waking = False
        self._untold = False  # of the thread: the loop has not been woken for what changed
        # To the thread: the tag with a number, payload (or FailedBatch) and lease; END; Failed; or
        # NEWS.
        self._news: News = SimpleQueue() if news is None else news
        self._shared = news is not None
        self._tag = tag
        self._handed = self._handed_bytes = 0  # of the loop
        self._consumed = 0  # of the thread
        self._lease: MemoryLease | None = None  # of the answer that the thread has
        self._decoder: Decoder | None = None  # of the thread
        self.consumed_bytes = 0
        """Bytes of the answers' payloads that the thread has taken."""
        self.waited = 0.0
        """Seconds that the thread has waited in ``wait``."""
        self._paused = False  # of the loop: it hands over no more for now
        self._wants_room = self._wants_acceptance = False
        # To the loop.
        # Batches with their numbers, and the bytes that the process's account has of each.
        self._outbox: deque[tuple[Encoded, int, int]] = deque()
        self._input_over = False
        self._abandoned: BaseException | None = None
        self.pull: Pull | None = None
        """Room in the process for a batch that may be large, once one was or may be."""
        self._expects = 0 if window is None else client.sizes.get(head.handler, UNKNOWN)
        # Of the loop alone.
        self._blocked = False  # but the thread looks at it
        self._waiting = False  # of the thread
        self._reader = 0  # which thread waited last
        self._finished = False
        self._over = False
        self._pumping = False

    # In the thread

    @property
    def address(self) -> str:
        """The service's, without options."""
        return self._client.address

    @property
    def accepted(self) -> bool:
        """Whether the service has accepted the call."""
        return self.call is not None and self.call.accepted

    @property
    def schema(self) -> pa.Schema | None:
        """Of the answers; None before the call is accepted."""
        return None if self.call is None else self.call.output_schema

    @property
    def capabilities(self) -> frozenset[str]:
        """As those of a SyncStream."""
        return frozenset() if self.call is None else self.call.capabilities

    @property
    def counters(self) -> Mapping[str, int]:
        """What the service counted; empty before the end."""
        return {} if self.call is None else self.call.counters

    @property
    def room(self) -> bool:
        """Whether a batch may be sent, and pulled from the input before."""
        assert self._window is not None
        if not self._window.open or self._blocked:
            return False
        return not self._expects or self._has_room()

    def _has_room(self) -> bool:
        """Whether the process has room for a batch that may be large."""
        pull = self.pull or self._begin_pull()
        if not pull.ask():
            self._untold = True  # the loop is to run: it has the timer of the waiting threads
            return False
        if self._shared:
            pull.withdraw()  # its thread may send the batch by another call
        return True

    def _begin_pull(self) -> Pull:
        client = self._client
        pull = self.pull = begin_pull(
            client.connection,
            self._thread.loop,
            client.sizes,
            self.head.handler,
            peer=client.address,
            queued=self._queued,
            wake=self._found_room,
        )
        call = self.call
        if call is not None:
            call.pull = pull
        if self._over or (call is not None and call.over):
            pull.end()  # the call ended while its thread pulled
        return pull

    def _queued(self) -> int:
        return 0 if self.call is None else self.call.queued()

    @property
    def settled(self) -> int:
        """Of how many batches the service needs no more."""
        return 0 if self._window is None else self._window.settled

    @property
    def sent_bytes(self) -> int:
        """Bytes of the payloads that were sent."""
        return 0 if self._window is None else self._window.sent_bytes

    def hold(self, size: int) -> None:
        """The thread keeps so many bytes besides: they count against the window."""
        assert self._window is not None
        self._window.held = size

    def push(self, batch: pa.RecordBatch, *, later: bool = False) -> int:
        """Hands a batch to the loop, whether or not there is ``room``; returns its number.

        ``later``: if it is small, the loop hears of it as soon as the thread waits. Raises
        SchemaMismatch, LocalProtocolError and BatchTooLarge for what cannot be sent; then nothing
        was.
        """
        source, call = self.source, self.call
        assert source is not None and self._window is not None
        source.compression = (
            self._client.agreed(self.head) if call is None else call.sender.compression
        )
        encoded = source.encode(batch)
        number = self._window.send(encoded.size)
        charged = 0
        if self._expects or encoded.size >= LARGE:
            charged = encoded.size
            pull = self.pull or self._begin_pull()
            pull.pulled(charged)
            self._expects = pull.size
        self._outbox.append((encoded, number, charged))
        if later and encoded.size <= SMALL:
            self._untold = True
        else:
            self.wake()
        return number

    def finish(self) -> None:
        """No more batches come. A loop that has not begun the call hears of it as it begins."""
        self._input_over = True
        self.rest()
        if self.call is not None:
            self.wake()

    def rest(self) -> None:
        """The thread pulls no batch for now: it does something else."""
        if self.pull is not None:
            self.pull.withdraw()

    def pop(self) -> Any:
        """What the loop has for the thread, or None."""
        self._give_back()
        try:
            return self.popped(self._news.get_nowait()[1])
        except Empty:
            return None

    def decode(self, payload: Any) -> pa.RecordBatch:
        """The batch of an answer, once there is room for all of it.

        Of all answers of this call, in the order of their coming.

        Raises the errors of a Decoder: the call is of no use any more.
        """
        if self._decoder is None:
            assert self.call is not None
            self._decoder = self.call.decoder()
        decoder = self._decoder
        if decoder.unpacks:
            await_room(decoder, payload, self._lease, self._client.config.timing.stall_deadline)
        return decoder.decode(payload)

    def _give_back(self) -> None:
        """The thread asks for another answer, so it is done with the last one."""
        lease, self._lease = self._lease, None
        if lease is not None:
            lease.give_back()

    def wait(self, *, room: bool = False, acceptance: bool = False) -> Any:
        """The same, waited for; NEWS if there is room, or acceptance, if these were asked for.

        Bounded by the deadlines of the call, which the loop keeps.
        """
        if self.expect(room=room, acceptance=acceptance):
            return NEWS
        while True:
            if self._thread.ended:
                found = self.pop()
                if found is None:
                    self.check()
            else:
                found = self._look(_GLANCE)
            if found is not None:
                return found

    def glance(self, seconds: float) -> Any:
        """What the loop has for the thread by then, or None. The loop has heard of all then."""
        self._wants_room = self._wants_acceptance = False
        return self._look(seconds)

    def _look(self, seconds: float) -> Any:
        self.set_waiting(True)
        began = time.perf_counter()
        try:
            if self._untold or self.call is None:
                self.wake()
            return self.popped(self._news.get(timeout=seconds)[1])
        except Empty:
            return None
        finally:
            self.waited += time.perf_counter() - began
            self.set_waiting(False)

    def expect(self, *, room: bool = False, acceptance: bool = False) -> bool:
        """Asks for NEWS of room, or of acceptance. True: there it is already."""
        self._wants_room, self._wants_acceptance = room, acceptance
        if (room and self.room) or (acceptance and self.accepted):
            self._wants_room = self._wants_acceptance = False
            return True
        return False

    def check(self) -> None:
        """Raises LocalProtocolError if the loop is gone, so that no answer would come."""
        self._thread.check()

    def check_process(self) -> None:
        """Raises LocalProtocolError in a forked child: what has come is for the parent."""
        self._thread.check_process()

    def abandon(self, error: BaseException | None = None) -> BaseException:
        """The thread reads no more: the handler is told to stop, unless the call is over.

        Returns how the call failed by that. Nothing more comes but a Failed, for a thread that
        waits while another one gives up.
        """
        if error is None:
            error = abandoned(self._client.address, self.head.handler)
        self._abandoned = error
        if self.pull is not None:
            self.pull.end()
        self.wake()
        return error

    def wake(self) -> None:
        """Lets the loop look at what changed."""
        self._untold = False
        if not self._waking:
            self._waking = True
            try:
                self._thread.call(self._woken)
            except RuntimeError:
                self._news.put((self._tag, Failed(ConnectionLost(f"{self._client!r} is closed"))))

    def popped(self, found: Any) -> Any:
        """Counts what comes out of the queue; returns it, an answer as its number and payload."""
        if type(found) is tuple:
            number, payload, lease = found
            self._give_back()
            self._lease = lease
            self._consumed += 1
            self.consumed_bytes += len(payload)
            if self._paused and self._handed - self._consumed <= _AHEAD // 2:
                self.wake()
            return number, payload
        if found is not NEWS:
            self._give_back()
        return found

    def set_waiting(self, waiting: bool) -> None:
        """Whether the thread waits for the service: the deadline on progress runs then."""
        self._waiting = waiting
        pull = self.pull
        if waiting:
            self._give_back()
            self._reader = threading.get_ident()
            if (outer := PULLING.get()) is not None:
                outer.rest()  # it is idle until this answer comes
            if pull is not None:
                pull.want(self._reader)
        elif pull is not None:
            pull.unwant()
        if self.call is not None:
            self.call.set_waiting(waiting, self._reader)

    # On the loop

    def _found_room(self) -> None:
        if self._shared and self.pull is not None:
            self.pull.withdraw()  # its thread asks again
        self.pump()

    def _woken(self) -> None:
        self._waking = False
        self.pump()

    def pump(self) -> None:
        """Moves batches both ways as far as that goes now."""
        if self._pumping or self._over:
            return
        self._pumping = True
        try:
            self._pump()
        except BaseException as error:  # noqa: BLE001  it belongs to the thread
            self._over = True
            if self.pull is not None:
                self.pull.end()
            self._news.put((self._tag, Failed(error)))
        finally:
            self._pumping = False

    def _pump(self) -> None:
        call = self.call
        if self._abandoned is not None:
            self._over = True
            if call is not None:
                call.fail(self._abandoned)
            elif self.head.observed is not None:
                self.head.observed.ended(self._abandoned)
            # A thread may wait for a call that another one ends.
            self._news.put((self._tag, Failed(self._abandoned)))
            return
        if call is None:
            call = self._begin()
        while self._outbox:
            encoded, number, charged = self._outbox.popleft()
            call.send(encoded, number)
            if charged and self.pull is not None:
                self.pull.posted(charged)
        if self._input_over and not self._finished and not self._outbox:
            self._finished = True
            call.finish()
        self._blocked = not call.writable
        self._hand_over(call)
        news = (self._wants_room and self.room) or (self._wants_acceptance and call.accepted)
        if news and not self._over:
            self._wants_room = self._wants_acceptance = False
            self._news.put((self._tag, NEWS))

    def _begin(self) -> ClientCall:
        call = self._client.begin(self.head, self._window, self.pump, self._answered)
        call.set_waiting(self._waiting, self._reader)
        self.call = call
        call.pull = self.pull
        return call

    def _hand_over(self, call: ClientCall) -> None:
        while True:
            self._paused = True
            ahead = self._handed - self._consumed
            if ahead and (
                ahead >= _AHEAD or self._handed_bytes - self.consumed_bytes >= _AHEAD_BYTES
            ):
                return
            self._paused = False
            found = call.take()
            if found is None:
                return
            if found is END:
                self._over = True
                self._news.put((self._tag, END))
                return
            self._handed += 1
            self._handed_bytes += len(found)
            lease, call.answers.lease = call.answers.lease, None
            self._news.put((self._tag, (call.answers.number, found, lease)))
