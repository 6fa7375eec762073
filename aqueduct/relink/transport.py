"""One connection of a link: its handshake, then its bytes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

from aqueduct.carriers.transports.byte_transport import ByteTransport
from aqueduct.config import Config
from aqueduct.errors import AqueductError
from aqueduct.protocol.relink.handshake import (
    ConnectorHandshake,
    LinkAgreement,
    ListenerHandshake,
)
from aqueduct.protocol.relink.link import Link

__all__ = ["Carried", "LinkTransport", "Shaker"]


class Shaker(Protocol):
    """Who makes a connection or has accepted it, until the handshake is over."""

    def made(self, transport: LinkTransport) -> bytes:
        """It is there. Returns what to send first; raises AqueductError if it is not wanted."""

    def agreed(self, transport: LinkTransport, agreement: LinkAgreement) -> None:
        """The handshake is over. ``carry`` is to follow, or ``abort``."""

    def failed(self, transport: LinkTransport, error: Exception | None) -> None:
        """The connection has ended before; None: the peer has closed it."""


class Carried(Protocol):
    """A link with what is around it."""

    link: Link

    def advance(self) -> None:
        """The link has got bytes, or can send some."""

    def transport_gone(self, transport: LinkTransport, error: Exception | None) -> None:
        """The connection is over."""


class LinkTransport(ByteTransport):
    """A connection, first in the hands of a Shaker, then of a link.

    After ``abort`` it tells nobody anything: bytes that still come are refused (RL-R18). Large
    parts of messages are read to where the link has room for them.
    """

    def __init__(
        self,
        config: Config,
        shaker: Shaker,
        handshake: ConnectorHandshake | ListenerHandshake,
        peer: str = "",
    ) -> None:
        """``peer``: its address, if it is known before."""
        super().__init__(config, "relink", peer)
        self._shaker: Shaker | None = shaker
        self._handshake = handshake
        self._carried: Carried | None = None

    # What the owner does

    def carry(self, carried: Carried) -> None:
        """From now on it carries a link. What the handshake still has to say leaves before."""
        self._say()
        self._shaker, self._carried = None, carried
        self.hold(False)

    def abort(self) -> None:
        """Ends it now. Nobody hears of it any more."""
        self._shaker = self._carried = None
        super().abort()

    # ByteTransport

    def made(self) -> None:
        """The connection is there."""
        assert self._shaker is not None
        try:
            first = self._shaker.made(self)
        except AqueductError as error:
            self._fail(error)
        else:
            self.write(first)

    def room(self) -> memoryview | None:
        """Where the next bytes go."""
        return None if self._carried is None else self._carried.link.room()

    def landed(self, size: int, now: float) -> None:
        """They were read there."""
        if self._carried is not None:
            self._carried.link.landed(size, now)
            self._carried.advance()

    def received(self, data: bytes, now: float) -> None:
        """The next bytes."""
        carried = self._carried
        if carried is None:
            self._shake(data)
        else:
            carried.link.receive_data(data, now)
            carried.advance()

    def take(self, limit: int) -> tuple[Iterable[Any], int]:
        """What is to leave next."""
        if self._carried is None:
            return (), 0
        return self._carried.link.take(limit, self._loop.time())

    def drained(self) -> None:
        """The kernel takes bytes again."""
        carried = self._carried
        if carried is not None:
            carried.link.left(self._loop.time())
            carried.advance()

    def lost(self, error: Exception | None) -> None:
        """The connection is over."""
        carried, shaker = self._carried, self._shaker
        self._carried = self._shaker = None
        if carried is not None:
            carried.transport_gone(self, error)
        elif shaker is not None:
            shaker.failed(self, error)

    # Within

    def _shake(self, data: bytes) -> None:
        shaker, handshake = self._shaker, self._handshake
        if shaker is None:
            return  # it was given up; its last bytes
        try:
            agreement = handshake.receive_data(data)
        except AqueductError as error:
            self._say()
            self._fail(error)
            return
        if agreement is None:
            self._say()
            return
        self.stepped_at = self.heard_at
        self.hold(True)  # until ``carry``
        shaker.agreed(self, agreement)

    def _say(self) -> None:
        """Sends what the listener's side of the handshake has to say."""
        if isinstance(self._handshake, ListenerHandshake) and self._handshake.output:
            self.write(self._handshake.output)
            self._handshake.output = b""
            self.stepped_at = self.heard_at

    def _fail(self, error: Exception) -> None:
        shaker, self._shaker = self._shaker, None
        self.finish()
        if shaker is not None:
            shaker.failed(self, error)
