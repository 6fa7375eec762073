"""Whose turn it is among the peer's streams: what is read now, later, or behind the headers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from typing import Any

from aqueduct.protocol.common.arrivals import Arrivals
from aqueduct.protocol.common.context import ConnectionContext
from aqueduct.protocol.common.endings import Endings
from aqueduct.protocol.common.registry import Registry
from aqueduct.protocol.common.stalls import StallWatch

__all__ = ["StreamDispatcher"]


class StreamDispatcher(ABC):
    """The streams of the peer: those that are postponed, and those that wait for the gate."""

    def __init__(
        self,
        shared: ConnectionContext,
        registry: Registry,
        incoming: Any,
        *,
        lose_dropped: bool = False,
    ) -> None:
        """``incoming``: the streams of the peer; ``lose_dropped``: see Endings."""
        self._shared = shared
        self.incoming = incoming
        self.gate_open = False
        """Whether the peer's connection headers are in and accepted (AQ-R10, AQ0-20)."""
        self.endings = Endings(shared, registry, self._abandon, lose_dropped=lose_dropped)
        self.arrivals = Arrivals(shared, registry, self.endings, incoming, self.read)
        self.stalls = StallWatch(shared, incoming, self.endings.close_receiver)
        # Many go one by one from the front, which a dict would look for from its beginning.
        self._postponed: OrderedDict[Any, None] = OrderedDict()
        """Streams that go on in the next turn: enough was worked on in this one."""
        self._paused: dict[Any, None] = {}
        """Streams that wait for the gate."""

    @abstractmethod
    def feed_datagram(self, data: bytes) -> None:
        """One datagram. Raises RemoteProtocolError."""

    @abstractmethod
    def read(self, stream: Any, frame: Any = None) -> None:
        """Reads what has come on a stream. Raises RemoteProtocolError."""

    @abstractmethod
    def _abandon(self, stream: Any, half: Any) -> None:
        """The receiver that a stream is about has ended."""

    def open_gate(self) -> None:
        """The peer's connection headers are in and accepted: what waits for them is read.

        Raises RemoteProtocolError.
        """
        self.gate_open = True
        paused, self._paused = self._paused, {}
        for stream in self.incoming.streams.values():
            stream.decoder.pause = False
        for stream in paused:
            if stream.number in self.incoming.streams:
                self.incoming.unhold(stream)
                self.read(stream)
        for data in self.arrivals.take_early():
            self.feed_datagram(data)

    @property
    def goes_on(self) -> bool:
        """Whether ``read_on`` is to be called once others had their turn."""
        return bool(self._postponed) or self._shared.work >= max(1, self.incoming.most >> 3)

    def read_on(self) -> None:
        """Others had their turn: what was postponed is read. Raises RemoteProtocolError."""
        self._shared.work = 0
        while self._postponed and self._shared.work < self.incoming.most:
            stream, _ = self._postponed.popitem(last=False)
            stream.postponed = False
            self.incoming.unhold(stream)
            self.read(stream)

    def drain(self) -> None:
        """The connection is over: messages that are here whole need no room any more."""
        self.incoming.most = 1 << 62  # no other turn comes
        self.read_on()
        admission = self._shared.admission
        for stream in tuple(self.incoming.streams.values()):
            while (head := stream.head) is not None and stream.decoder.buffered >= head.size:
                admission.wait_no_more(stream.queue, stream)
                stream.head = None
                stream.queue.charge(admission.cost(head.size + head.overhead), 1)
                self.arrivals.admitted(stream, head)
                self.read(stream)

    def clear(self) -> None:
        """The connection is over."""
        self.incoming.clear()
        self.arrivals.take_early()
        self.stalls.clear()
        self._paused.clear()
        self._postponed.clear()
