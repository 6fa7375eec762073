"""Messages that arrive: each finds room, lands in its place, and is delivered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from aqueduct._speedups.channels.frames import MessageFrame, MessageHead
from aqueduct._speedups.channels.receiver import Received, ReceiveQueue
from aqueduct.protocol.common.context import ConnectionContext
from aqueduct.protocol.common.endings import Endings
from aqueduct.protocol.common.receiver import ReceiverHalf
from aqueduct.protocol.common.registry import Registry

__all__ = ["Arrivals"]


class Arrivals:
    """The messages of all receivers of one connection, from their heads to their queues."""

    def __init__(
        self,
        shared: ConnectionContext,
        registry: Registry,
        endings: Endings,
        incoming: Any,
        read: Callable[[Any], None],
    ) -> None:
        """``incoming``: the streams of the peer; ``read``: reads what has come on one of them."""
        self._shared = shared
        self._registry = registry
        self._endings = endings
        self._incoming = incoming
        self._read = read
        self._admission = shared.admission
        self._early: list[bytes] = []
        """Datagrams that wait for the connection headers."""

    def head(self, stream: Any, frame: MessageHead) -> None:
        """The head of a message: its payload may land, or waits for room."""
        half: ReceiverHalf = stream.half
        half.check_number(frame.num)
        if half.queue.waiting or not self._admission.admit_head(half.queue, frame):
            self._admission.wait(half.queue, stream, frame)
        else:
            self.admitted(stream, frame)

    def admitted(self, stream: Any, head: MessageHead) -> None:
        """Its payload may land: where the application wants it, or in fresh memory."""
        half = stream.half
        stream.partial = head.size + head.overhead
        try:
            target = half.queue.place(head)
            if half.error is not None:  # the hook closed its own receiver
                return
            stream.decoder.admit(target)
        except Exception as error:  # noqa: BLE001 - the hook's error, or that of its buffer, ends the channel
            self._endings.close_receiver(half, error)
            return
        self._incoming.granting.read_ahead(stream, head.size)

    def message(self, stream: Any, frame: MessageFrame) -> None:
        """A whole message."""
        half: ReceiverHalf = stream.half
        size = frame.size + frame.overhead
        charge = self._admission.cost(size)
        if stream.partial < 0:
            half.check_number(frame.num)
            half.queue.charge(charge, 1)
        else:
            if stream.partial != size:
                half.queue.charge(size - stream.partial)
            half.check_number(frame.num)  # two streams may have declared one number (AQ-R13)
        stream.partial = -1
        attachments = frame.attached and self._registry.attached(frame.attached)
        half.message(Received.of(frame, attachments or (), charge))
        if half.error is not None:
            self._endings.half_ended(half)

    def datagram(self, half: ReceiverHalf, frame: MessageFrame) -> None:
        """An unreliable message, if it is new and finds room."""
        size = frame.size + frame.overhead
        evicted: list[Received] = []
        wanted = half.wants_datagram(frame.num, size, evicted)
        if evicted:
            self._shared.datagrams_evicted += len(evicted)
            self._endings.drop(evicted)
        if not wanted:
            return
        attachments = frame.attached and self._registry.attached(frame.attached)
        half.datagram(
            Received.of(frame, attachments or (), self._admission.cost(size), reliable=False)
        )
        if half.error is not None:
            self._endings.half_ended(half)

    # Room that came back

    def resume(self) -> None:
        """Reads on where messages waited for room. Raises RemoteProtocolError.

        Channels with room of their own again come first, then the others in the order in which
        they began to wait for the budget; above it, the first of those whose reader waits.
        """
        shared = self._shared
        while shared.relieved or (shared.freed and shared.starved):
            if shared.relieved:
                self._resume_one(shared.relieved.popitem()[0])
                continue
            shared.freed = False
            while shared.starved:
                queue = next(iter(shared.starved))
                self._resume_one(queue)
                if queue in shared.starved:
                    break
            if shared.place is None:
                awaited = next(
                    (queue for queue in shared.starved if self._admission.is_awaited(queue)), None
                )
                if awaited is not None:
                    self._resume_one(awaited)
        shared.freed = False
        if not shared.starved:
            shared.process.waiting.pop(shared, None)

    def _resume_one(self, queue: ReceiveQueue) -> None:
        while queue.waiting:
            stream = next(iter(queue.waiting))
            head = stream.head
            assert head is not None
            if not self._admission.admit_head(queue, head):
                break
            self._admission.wait_no_more(queue, stream)
            stream.head = None
            self.admitted(stream, head)
            self._read(stream)
        self._admission.queue_up(queue)

    # Datagrams that came early

    def keep_early(self, data: bytes) -> None:
        """Datagrams that wait for the connection headers: a few, the others drop (AQ-R10)."""
        limits = self._shared.config.limits
        size = sum(map(len, self._early))
        if (
            len(self._early) < limits.early_datagrams
            and size + len(data) <= limits.early_datagram_bytes
        ):
            self._early.append(data)

    def take_early(self) -> list[bytes]:
        """Those, which wait no more."""
        early, self._early = self._early, []
        return early
