"""What waits to leave on the connection of a link."""

from __future__ import annotations

from collections import deque
from typing import Any, Final

from aqueduct._speedups.relink import packets
from aqueduct.protocol.relink.sending import SendChannel, SentMessage

__all__ = ["OutMessage", "Outbox"]

_PADDING: Final = tuple(bytes(size) for size in range(8))


class OutMessage:
    """A message that waits to leave, with the channels and numbers that it has there."""

    __slots__ = ("message", "targets")

    def __init__(self, message: SentMessage, targets: list[tuple[SendChannel, int]]) -> None:
        self.message = message
        self.targets = targets


class Outbox:
    """Packets in the order in which they leave: urgent ones first, then messages and what follows.

    ``unacknowledged`` counts messages that have left and are not known received. ``asked`` is when
    something left that the peer answers, in seconds; None: nothing did since the peer was heard.
    """

    def __init__(self, id_size: int) -> None:
        self._id_size = id_size
        self.urgent: deque[bytes] = deque()
        """Acknowledgements, pings, pongs and resume."""
        self.queue: deque[OutMessage | bytes] = deque()
        """Messages, operations and shutdown."""
        self.unacknowledged = 0
        self.asked: float | None = None

    def clear(self) -> None:
        """Another connection begins."""
        self.urgent.clear()
        self.queue.clear()
        self.asked = None

    @property
    def empty(self) -> bool:
        """Nothing waits."""
        return not self.urgent and not self.queue

    def take(self, limit: int, now: float) -> tuple[list[Any], int]:
        """The next packets, as ``Link.take`` gives them."""
        buffers: list[Any] = list(self.urgent)
        self.urgent.clear()
        size = sum(map(len, buffers))
        if self.queue and self.asked is None and size < limit:
            self.asked = now
        while self.queue and size < limit:
            out = self.queue.popleft()
            if type(out) is OutMessage:
                size += self._take_message(out, buffers)
            elif type(out) is bytes:
                buffers.append(out)
                size += len(out)
        return buffers, size

    def _take_message(self, out: OutMessage, buffers: list[Any]) -> int:
        """Adds a message to ``buffers``; returns its bytes."""
        for channel, number in out.targets:
            if number >= channel.sent:
                self.unacknowledged += number + 1 - channel.sent
                channel.sent = number + 1
        message = out.message
        sizes = [memoryview(part).nbytes for part in message.parts]
        if message.one_part:
            sizes = [message.size]
        targets = [channel.identifier for channel, _ in out.targets]
        head = packets.encode_message_head(
            targets, self._id_size, sizes, multicast=len(targets) > 1
        )
        buffers.append(head)
        if message.one_part:
            buffers.extend(message.parts)
            buffers.append(_PADDING[-message.size & 7])
            return len(head) + message.size + (-message.size & 7)
        total = len(head)
        for part, size in zip(message.parts, sizes, strict=True):
            if size:
                buffers.append(part)
                padding = -size & 7
                if padding:
                    buffers.append(_PADDING[padding])
                total += size + padding
        return total
