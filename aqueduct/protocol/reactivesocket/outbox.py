"""What waits to leave on a connection."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator
from typing import Any, TypeAlias

from aqueduct._speedups.reactivesocket import reactive_frames as frames
from aqueduct.protocol.reactivesocket.cost import FRAME_COST, HEADER_BYTES
from aqueduct.protocol.reactivesocket.demand import UNBOUNDED

__all__ = ["Buffer", "FrameQueue", "OutFrame", "ReactiveOutbox"]

Buffer: TypeAlias = bytes | bytearray | memoryview
OutFrame: TypeAlias = tuple[list[Any], int]
"""Buffers in wire order, and their bytes."""


class FrameQueue:
    """The frames of one stream that wait to leave, in order.

    ``key`` names it in the outbox: the ids of both requesters are separate (RS-R10).
    """

    __slots__ = ("cost", "frames", "key", "more", "stream")

    def __init__(self, stream: int, key: int) -> None:
        self.stream = stream
        self.key = key
        self.frames: deque[OutFrame | None] = deque()
        """None stands for the REQUEST_N with all of ``more``."""
        self.more = 0
        self.cost = 0


class ReactiveOutbox:
    """Frames in the order in which they leave: urgent ones, then a frame of each stream in turn.

    ``cost`` is that of all frames. ``answers`` counts the urgent ones that the peer has caused.
    """

    def __init__(self, *, framed: bool, frame_bytes: int) -> None:
        self._framed = framed
        self.data_most = frame_bytes - HEADER_BYTES
        """Bytes of data in a frame that has a number of items or none."""
        self._urgent: deque[tuple[OutFrame, bool]] = deque()
        self._ready: OrderedDict[int, FrameQueue] = OrderedDict()
        """Queues with frames, by their keys."""
        self.cost = 0
        self.answers = 0

    @property
    def empty(self) -> bool:
        """Nothing waits."""
        return not self._urgent and not self._ready

    def clear(self) -> None:
        """Lets go of all."""
        for queue in tuple(self._ready.values()):
            self.drop(queue)
        self._urgent.clear()
        self.cost = self.answers = 0

    def frame(
        self, kind: int, stream: int, parts: list[Any], *, flags: int = 0, n: int | None = None
    ) -> OutFrame:
        """A frame with this data, which is kept by reference."""
        return frames.encode_frame(kind, stream, parts, flags=flags, n=n, framed=self._framed)

    def urge(self, frame: OutFrame, *, answer: bool = False) -> None:
        """A frame leaves before those of streams."""
        self._urgent.append((frame, answer))
        self.answers += answer
        self.cost += frame[1] + FRAME_COST

    def push(self, queue: FrameQueue, frame: OutFrame) -> None:
        """A frame leaves behind those of its stream."""
        self._add(queue, frame, frame[1] + FRAME_COST)

    def push_more(self, queue: FrameQueue, items: int) -> None:
        """A REQUEST_N leaves. What has not left yet is one with it: it costs once."""
        if not queue.more:
            self._add(queue, None, FRAME_COST)
        queue.more = min(queue.more + items, UNBOUNDED)

    def waits(self, key: int) -> FrameQueue | None:
        """The queue with this key; None: it has no frame."""
        return self._ready.get(key)

    def drop(self, queue: FrameQueue) -> None:
        """What waits for a stream does not leave."""
        self._ready.pop(queue.key, None)
        self.cost -= queue.cost
        queue.frames.clear()
        queue.cost = queue.more = 0

    def take(self) -> OutFrame | None:
        """The next frame; None: nothing waits."""
        if self._urgent:
            frame, answer = self._urgent.popleft()
            self.answers -= answer
            self.cost -= frame[1] + FRAME_COST
            return frame
        if not self._ready:
            return None
        key, queue = self._ready.popitem(last=False)
        waiting = queue.frames.popleft()
        if waiting is None:
            cost = FRAME_COST
            frame = self.frame(frames.REQUEST_N, queue.stream, [], n=queue.more)
            queue.more = 0
        else:
            frame = waiting
            cost = frame[1] + FRAME_COST
        queue.cost -= cost
        self.cost -= cost
        if queue.frames:
            self._ready[key] = queue  # behind all others
        return frame

    def _add(self, queue: FrameQueue, frame: OutFrame | None, cost: int) -> None:
        queue.frames.append(frame)
        queue.cost += cost
        self.cost += cost
        self._ready.setdefault(queue.key, queue)

    def fragments(self, parts: list[Any]) -> Iterator[list[Any]]:
        """The data of an item, cut to what one frame takes. Nothing is copied."""
        here: list[Any] = []
        room = self.data_most
        for part in parts:
            view = memoryview(part)
            while len(view) > room:
                if room:
                    here.append(view[:room])
                yield here
                view, here, room = view[room:], [], self.data_most
            if len(view):
                here.append(view)
                room -= len(view)
        yield here
