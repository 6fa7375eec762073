"""Drives a handler that occupies a thread for the whole call: plain generators, and plain sinks.

Batches cross between the event loop and the thread in both directions, a few ahead, so that a
thread with work at hand asks the loop for nothing. What crosses is bounded in number and bytes:
beyond it the thread waits for the loop, or the loop leaves batches in the channel, where they hold
back the client.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping
from queue import Empty, SimpleQueue
from typing import Any, Final

import pyarrow as pa

from aqueduct._speedups.channels.receiver import MemoryLease
from aqueduct.arrow.encode import Encoded
from aqueduct.endpoint.accounts import LARGE, Reservation
from aqueduct.rpc.deadline import ThreadWakeup
from aqueduct.service.async_runner import run_steps, sink_counters
from aqueduct.service.call import ServerCall
from aqueduct.service.handlers import SINK, SOURCE

__all__ = ["GeneratorRunner", "ThreadBatches"]

_AHEAD: Final = 16
_AHEAD_BYTES: Final = 1 << 20
_END: Final = object()


class GeneratorRunner:
    """One call whose handler runs in a thread of its own."""

    def __init__(self, running: ServerCall) -> None:
        self.running = running
        self._signal = ThreadWakeup()
        self._stopped = False
        # To the thread: (number, payload, lease), _END, or an exception to raise.
        self._inbox: SimpleQueue[Any] = SimpleQueue()
        self._handed = 0  # of the loop: batches put into the inbox, and their bytes
        self._handed_bytes = 0
        self._taken_bytes = 0  # of the thread; running.input.batches.taken counts them
        self._input_handed = running.input.over  # its end too
        self._hungry = False  # of the thread: it waits for a batch
        self._lease: MemoryLease | None = None  # of the thread: what the batch it has is charged
        # From the thread: (encoded, number, whether the accounts count it) in order.
        self._outbox: deque[tuple[Encoded, int, bool]] = deque()  # a source's have no number yet
        self._made = 0  # answers put into the outbox, of the thread, and their bytes
        self._given = 0
        self._sent = 0  # and taken out of it, of the loop
        self._room: SimpleQueue[None] = SimpleQueue()
        self._blocked = False  # of the thread: it waits for room
        self._granted: SimpleQueue[None] = SimpleQueue()
        self._crowd = running.connection.core.outgoing
        self._credit = running.output.credit
        self._mark = running.config.flow.connection_high_water
        self._account: Reservation | None = None  # of the thread: for answers that are large
        # The thread's last words.
        self._done = False
        self._result: Mapping[str, int] | None = None
        self._error: BaseException | None = None

    async def drive(self) -> Mapping[str, int] | None:
        """Works on the call to its end. The thread has come back when it returns."""
        running = self.running
        if expects := running.output.expects:  # so that calls get room in the order they came
            self._ask(expects)
        running.host.start_thread(self._work)
        await run_steps(running, self._signal, self._step, self._stop, self._settle)
        if self._error is not None:
            raise self._error
        return self._result

    # On the loop

    def _step(self) -> bool:
        """Moves batches as far as that goes now. True: the thread is done, and all is sent."""
        running, outbox, output = self.running, self._outbox, self.running.output
        done = self._done  # before the outbox is looked at: nothing comes into it afterwards
        while outbox and output.writable:
            encoded, number, counted = outbox.popleft()
            self._sent += encoded.size
            output.send(encoded, number if number >= 0 else output.batches.batches_out)
            if counted:
                assert self._account is not None
                self._account.posted(encoded.size)
        if self._blocked and self._has_room():
            self._blocked = False
            self._room.put(None)
        if outbox:
            output.notify_writable()
            if self._blocked:
                running.input.pass_on()
        elif done:
            return True
        if not self._input_handed:
            self._hand_in()
            if self._account is not None:
                self._account.retry()
        hungry = self._hungry and self._handed == running.input.batches.taken
        running.input.waits_for_client = hungry or self._blocked
        if not self._blocked:
            running.input.mark_soon()
        return False

    def _hand_in(self) -> None:
        running = self.running
        while True:
            ahead = self._handed - running.input.batches.taken
            if ahead and (
                ahead >= _AHEAD or self._handed_bytes - self._taken_bytes >= _AHEAD_BYTES
            ):
                return
            found = running.input.take()
            if found is None:
                break
            self._handed += 1
            self._handed_bytes += len(found[1])
            self._inbox.put((*found, running.input.take_lease()))
        if running.input.over:
            self._input_handed = True
            self._inbox.put(_END)

    def _stop(self) -> None:
        """The thread is told, by what it takes or yields next."""
        self._stopped = True
        self._inbox.put(self.running.call.reason or _END)
        self._room.put(None)
        self._granted.put(None)
        self._signal.set()

    async def _settle(self) -> None:
        while not self._done:
            await self._signal.wait()

    # In the thread

    def next_batch(self) -> pa.RecordBatch:
        """The next batch for the handler. Raises StopIteration, or why the call is over."""
        running = self.running
        running.call.check()
        if self._lease is not None:
            self._lease.give_back()
            self._lease = None
        try:
            found = self._inbox.get_nowait()
        except Empty:
            running.input.want(True, threading.get_ident())
            self._hungry = True
            self._wake()
            found = self._inbox.get()
            self._hungry = False
            running.input.want(False)
        if found is _END:
            self._inbox.put(_END)
            raise StopIteration
        if isinstance(found, BaseException):
            self._inbox.put(found)
            raise found
        number, payload, self._lease = found
        self._taken_bytes += len(payload)
        running.input.batches.taken = number + 1
        if self._handed - running.input.batches.taken == _AHEAD // 2 and not self._input_handed:
            self._wake()
        if running.input.decoder.unpacks:
            running.input.await_room(payload, self._lease)
        return running.input.decode(number, payload)

    def _work(self) -> None:
        running = self.running
        handler, call = running.handler, running.call
        exchange = handler.kind != SOURCE
        arguments = (ThreadBatches(self), call) if exchange else (call,)
        try:
            if handler.kind == SINK:
                self._result = sink_counters(handler, handler.invoke(*arguments))
            else:
                generator = handler.invoke(*arguments)
                try:
                    if self._account is not None:
                        self._await_room(self._account)
                    for batch in generator:
                        size = self._give(batch, running.input.answering if exchange else -1)
                        del batch  # or it would be kept while the next one has no room
                        if self._account is not None or size >= LARGE:
                            self._reserve(size, again=True)
                finally:
                    generator.close()
        except BaseException as error:  # noqa: BLE001  a handler may raise anything
            self._error = error
        self._done = True
        self._wake()

    def _give(self, batch: Any, number: int) -> int:
        """Hands an answer to the loop; returns its size in bytes."""
        call = self.running.call
        call.check()
        encoded = self.running.output.encode(batch)
        account, size = self._account, encoded.size
        if account is not None:
            account.made(size)
        self._made += 1
        self._given += size
        self._outbox.append((encoded, number, account is not None))
        del encoded, batch  # they belong to the outbox
        self._wake()
        while not self._has_room():
            self._blocked = True
            if self._has_room():  # the loop may not have seen the flag
                self._blocked = False
                return size
            self._wake()
            self._room.get()
            call.check()
        return size

    def _reserve(self, size: int, *, again: bool) -> None:
        """Waits until there is room for the next answer, about as large as this one."""
        if not self._ask(size, again=again):
            assert self._account is not None
            self._await_room(self._account)

    def _ask(self, size: int, *, again: bool = False) -> bool:
        if self._account is None:
            self._account = self.running.output.room(
                lambda: self._granted.put(None),
                lambda: self._input_handed or not self._inbox.empty(),
            )
        return self._account.ask(size, again=again)

    def _await_room(self, account: Reservation) -> None:
        while account.waits and not self._stopped:
            self._granted.get()
        self.running.call.check()

    def _has_room(self) -> bool:
        if self._stopped:
            return True
        if self._credit is not None and self._made >= self._credit():
            return False
        waiting = len(self._outbox)
        if not waiting:
            return True
        if self._crowd.queued >= self._mark:
            return False  # others wait to leave as well: one of each call is enough
        return waiting < _AHEAD and (waiting < 2 or self._given - self._sent < _AHEAD_BYTES)

    def _wake(self) -> None:
        if not self._signal.set_threadsafe():  # the service has ended without us
            self._stopped = True
            self._inbox.put(_END)
            self._room.put(None)
            self._granted.put(None)


class ThreadBatches:
    """The batches of a call, for a handler in a thread: a plain iterator."""

    __slots__ = ("_runner",)

    def __init__(self, runner: GeneratorRunner) -> None:
        self._runner = runner

    def __iter__(self) -> ThreadBatches:
        return self

    def __next__(self) -> pa.RecordBatch:
        return self._runner.next_batch()
