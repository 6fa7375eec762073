"""One connection of ReactiveSocket over a byte stream."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

from aqueduct.carriers.transports.byte_transport import ByteTransport
from aqueduct.config import Config
from aqueduct.errors import AqueductError
from aqueduct.protocol.reactivesocket.connection import ReactiveConnection

__all__ = ["Carried", "FrameTransport"]


class Carried(Protocol):
    """A connection with its core."""

    core: ReactiveConnection

    def made(self) -> None:
        """The transport is there. Raises AqueductError if it is not wanted."""

    def advance(self) -> None:
        """The core has got bytes."""

    def drained(self) -> None:
        """More may leave."""

    def gone(self, error: Exception | None) -> None:
        """The transport has ended; None: it was closed."""


class FrameTransport(ByteTransport):
    """Frames with their length. Large data are read to where they stay."""

    def __init__(self, config: Config, carried: Carried, peer: str = "") -> None:
        super().__init__(config, "reactivesocket", peer)
        self._carried = carried

    def made(self) -> None:
        """The connection is there."""
        try:
            self._carried.made()
        except AqueductError as error:
            self.abort()
            self._carried.gone(error)
        else:
            self._carried.advance()

    def room(self) -> memoryview | None:
        """Where the next bytes go."""
        return self._carried.core.room()

    def landed(self, size: int, now: float) -> None:
        """They were read there."""
        self._carried.core.landed(size, now)
        self._carried.advance()

    def received(self, data: bytes, now: float) -> None:
        """The next bytes."""
        self._carried.core.receive_data(data, now)
        self._carried.advance()

    def take(self, limit: int) -> tuple[Iterable[Any], int]:
        """What is to leave next."""
        return self._carried.core.take(limit)

    def drained(self) -> None:
        """The kernel takes bytes again."""
        self._carried.drained()

    def lost(self, error: Exception | None) -> None:
        """The connection is over."""
        self._carried.gone(error)
