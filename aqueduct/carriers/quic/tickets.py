"""Tickets for early data: those that a client keeps, and those that a listener takes back once.

A server gives a client a ticket, and the next connection may begin with it: what the client sends
then is readable at once, before the handshake is complete. Somebody who records such a first flight
can send it again. So a listener knows the tickets that it gave out, and forgets one when it comes
back. A ticket that it does not know is none: the handshake is a full one, and the early data of it
cannot even be read. A record that is full, or lost with its process, therefore costs a round trip,
and never lets a ticket pass twice.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from aioquic.tls import ExtensionType, SessionTicket
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from aqueduct.forks import own

__all__ = ["STORE", "Remembered", "TicketRecord", "TicketStore"]

_PARAMETERS: Final = ExtensionType.QUIC_TRANSPORT_PARAMETERS
_LARGEST: Final = 1024  # bytes: the first packet has room for it
_CHAIN: Final = 16 << 10
_OF_ONE: Final = 8  # tickets of one server: each connection uses up one, and is given another


@dataclass(frozen=True, slots=True)
class Remembered:
    """What a client keeps of one connection to begin the next one with."""

    ticket: SessionTicket
    chain: tuple[x509.Certificate, ...]
    """The certificates that the server showed: with a ticket it shows none again."""
    version: int
    """The version of QUIC that was spoken. A ticket is not for another (RFC 9369 section 5)."""


class TicketRecord:
    """The tickets of one listener that are out. Each is taken back once, from whom it was given to.

    At most ``limit``, each for ``lifetime`` seconds of ``clock``. A ticket does not show that its
    client has the address that it writes into its packets: only the one to which it was given has
    shown that, in a whole handshake.
    """

    def __init__(self, limit: int, lifetime: float, clock: Callable[[], float]) -> None:
        self._limit = limit
        self._lifetime = lifetime
        self._clock = clock
        self._out: dict[bytes, tuple[SessionTicket, object, float]] = {}

    def __len__(self) -> int:
        return len(self._out)

    def add(self, ticket: SessionTicket, client: Hashable) -> None:
        """A ticket goes out. The oldest is forgotten where there are too many.

        ``client``: what must be the same when it comes back, its IP address and version of QUIC.
        """
        self._out[ticket.ticket] = ticket, client, self._clock() + self._lifetime
        while len(self._out) > self._limit:
            del self._out[next(iter(self._out))]

    def take(self, name: bytes, client: Hashable) -> SessionTicket | None:
        """A ticket comes back, by its name; None: not known, too old, or of another client."""
        ticket, owner, until = self._out.pop(name, (None, None, 0.0))
        return ticket if client == owner and self._clock() < until else None


class TicketStore:
    """The tickets of a client, and the tokens that show its address; for all its servers.

    Each is given out once: two connections with one ticket could be linked by who listens, and the
    server would refuse the second. A ``server`` is what both connections have in common. Any
    thread may call.

    The bound is the largest that any connection has asked for. A server that gives many takes no
    place from others: its own oldest ticket goes first.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._limit = 0
        self._tickets: dict[int, tuple[Hashable, Remembered, float]] = {}
        self._tokens: dict[Hashable, bytes] = {}
        self._serial = 0
        own(self)

    def __len__(self) -> int:
        return len(self._tickets) + len(self._tokens)

    def keep(
        self,
        server: Hashable,
        ticket: SessionTicket,
        chain: Sequence[x509.Certificate],
        version: int,
        until: float,
        limit: int,
    ) -> None:
        """Keeps a ticket that allows early data until the time ``until``.

        ``limit``: how many there may be in all, and of this server if it is below 8.
        """
        extensions = [one for one in ticket.other_extensions if one[0] == _PARAMETERS]
        size = len(ticket.ticket) + sum(len(data) for _, data in extensions)
        certificates = sum(len(one.public_bytes(Encoding.DER)) for one in chain)
        if (
            ticket.max_early_data_size is None
            or not extensions
            or size > _LARGEST
            or certificates > _CHAIN
        ):
            return
        kept = Remembered(replace(ticket, other_extensions=extensions), tuple(chain), version)
        with self._lock:
            self._serial += 1
            self._tickets[self._serial] = server, kept, until
            self._limit = max(self._limit, limit)
            its = [serial for serial, (whose, *_) in self._tickets.items() if whose == server]
            full = len(self._tickets) > self._limit
            if len(its) > (1 if full else min(limit, _OF_ONE)):
                del self._tickets[its[0]]
            elif full:
                del self._tickets[next(iter(self._tickets))]

    def take(self, server: Hashable, now: float) -> Remembered | None:
        """The newest ticket of a server; None: there is none. Those that are too old go."""
        with self._lock:
            found: int | None = None
            for serial, (whose, _, until) in list(self._tickets.items()):
                if until <= now:
                    del self._tickets[serial]
                elif whose == server:
                    found = serial
            return None if found is None else self._tickets.pop(found)[1]

    def forget(self, server: Hashable) -> None:
        """Keeps no ticket of a server any more."""
        with self._lock:
            for serial in [one for one, (whose, *_) in self._tickets.items() if whose == server]:
                del self._tickets[serial]

    def keep_token(self, server: Hashable, token: bytes, limit: int) -> None:
        """Keeps what a server has sent by NEW_TOKEN; the newest takes the place of another."""
        if 0 < len(token) <= _LARGEST:
            with self._lock:
                self._tokens.pop(server, None)
                self._tokens[server] = token
                self._limit = max(self._limit, limit)
                if len(self._tokens) > self._limit:
                    del self._tokens[next(iter(self._tokens))]

    def take_token(self, server: Hashable) -> bytes:
        """A token for the next connection to a server; b"": there is none."""
        with self._lock:
            return self._tokens.pop(server, b"")

    def left_behind(self) -> None:
        """A forked child uses no ticket that its parent may use."""
        self._lock = threading.Lock()
        self._tickets.clear()
        self._tokens.clear()
        own(self)


STORE: Final = TicketStore()
"""That of this process."""
