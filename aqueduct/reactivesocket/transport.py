"""One connection of ReactiveSocket over a byte stream."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, Protocol

from aqueduct.carriers.stream.tls import spoken
from aqueduct.carriers.transports.byte_transport import ByteTransport
from aqueduct.config import Config
from aqueduct.errors import AqueductError, ConnectionLost, FrameError
from aqueduct.protocol.reactivesocket.connection import ReactiveConnection

__all__ = ["FrameTransport", "FrameUser"]


_OTHERS: Final = ("it speaks TLS", "it speaks HTTP", "it speaks SSH")

_READ_IN_PLACE: Final = 32 << 10
"""Bytes that are read to their place. Fewer are read with what follows, and copied."""


class FrameUser(Protocol):
    """A connection with its core."""

    core: ReactiveConnection

    def made(self) -> None:
        """The transport is there. Raises AqueductError if it is not wanted."""

    def opened(self) -> None:
        """Frames may flow."""

    def advance(self) -> None:
        """The core may have something to tell, or to send."""

    def came(self) -> None:
        """The core has got bytes."""

    def drained(self) -> None:
        """More may leave."""

    def fail(self, error: ConnectionLost) -> None:
        """The transport is of no use."""

    def gone(self, error: Exception | None) -> None:
        """The transport has ended; None: it was closed."""


class FrameTransport(ByteTransport):
    """Frames with their length. Large data are read to where they stay."""

    def __init__(self, config: Config, user: FrameUser, peer: str = "") -> None:
        super().__init__(config, "reactivesocket", peer)
        self._heard = False
        self._user = user

    def made(self) -> None:
        """The connection is there."""
        try:
            self._user.made()
        except AqueductError as error:
            self.abort()
            self._user.gone(error)
        else:
            self._user.opened()

    def room(self) -> memoryview | None:
        """Where the next bytes go. A little is read with what follows it."""
        room = self._user.core.room()
        return room if room is not None and len(room) >= _READ_IN_PLACE else None

    def landed(self, size: int, now: float) -> None:
        """They were read there."""
        self._user.core.landed(size, now)
        self._user.came()

    def received(self, data: bytes, now: float) -> None:
        """The next bytes."""
        if not self._heard:
            self._heard = True
            other = spoken(data)
            if other in _OTHERS:
                text = f"this is ReactiveSocket, and the peer speaks something else: {other}"
                self._user.core.refuse(FrameError(text))
        self._user.core.receive_data(data, now)
        self._user.came()

    def take(self, limit: int) -> tuple[Iterable[Any], int]:
        """What is to leave next."""
        return self._user.core.take(limit)

    def drained(self) -> None:
        """The kernel takes bytes again."""
        self._user.drained()

    def lost(self, error: Exception | None) -> None:
        """The connection is over."""
        self._user.gone(error)
