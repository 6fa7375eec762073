"""Places for peers in their handshake, and which peer loses its place when all are taken.

A listener has a limited number of places. When all are taken, the address with the most silent
peers loses the one that was silent longest. A handshake that goes on, however slowly, keeps its
place. So many silent peers delay honest peers only for a moment, even from the same address.
"""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Hashable
from typing import Final, Generic, NamedTuple, Protocol, TypeVar

from aqueduct.carriers.contract import PeerCredentials

__all__ = ["HandshakingPeer", "Places", "origin_of"]

_SHORTEST: Final = 0.01  # seconds, at least, between two looks for a silent peer
_PREFIX: Final = 64  # bits of an IPv6 address that one customer of a network has


class HandshakingPeer(Protocol):
    """A peer that has a place."""

    @property
    def heard_at(self) -> float | None:
        """The loop's time when its last bytes came; None: it has sent nothing."""

    def has_input(self) -> bool:
        """Whether it has sent something that nobody has read yet."""


Peer = TypeVar("Peer", bound=HandshakingPeer)


class _Place(NamedTuple):
    origin: Hashable
    came_at: float


class Places(Generic[Peer]):
    """At most ``limit`` peers. Times are those of the event loop, in seconds.

    A peer that has sent nothing may lose its place after ``patience``. A peer that was heard may
    lose it after twice that silence, as its answer may take long to arrive. If none is silent,
    and most send a little now and then, a peer that came ``longest`` ago may lose its place.
    """

    def __init__(self, limit: int, patience: float, longest: float) -> None:
        self._limit = limit
        self._patience = patience
        self._longest = longest
        self._places: dict[Peer, _Place] = {}

    def __len__(self) -> int:
        return len(self._places)

    @property
    def full(self) -> bool:
        """Whether a new peer gets a place only if another one loses its own."""
        return len(self._places) >= self._limit

    def add(self, peer: Peer, origin: Hashable, now: float) -> None:
        """Gives ``peer``, which comes from ``origin``, a place."""
        self._places[peer] = _Place(origin, now)

    def discard(self, peer: Peer) -> bool:
        """Removes ``peer`` from its place; False: it had none."""
        return self._places.pop(peer, None) is not None

    def candidate(self, now: float) -> Peer | None:
        """The peer that is to lose its place; None: none may yet, see ``pause``."""
        known = [(peer, place, peer.heard_at) for peer, place in self._places.items()]
        found = [
            (place.origin, heard_at is not None, until, peer)
            for peer, place, heard_at in known
            if (until := self._patient_until(place, heard_at)) <= now
        ]
        # Not where the others have just come: these will be silent in a moment, or will not.
        if not found and 2 * sum(heard_at is not None for _, _, heard_at in known) > len(known):
            found = [
                (place.origin, True, place.came_at, peer)
                for peer, place, _ in known
                if now - place.came_at >= self._longest
            ]
        counts = Counter(origin for origin, _, _, _ in found)
        # Of one address first those that have sent nothing, the oldest first.
        found.sort(key=lambda each: (-counts[each[0]], each[1], each[2]))
        return next((peer for _, _, _, peer in found if not peer.has_input()), None)

    def pause(self, now: float) -> float:
        """Seconds until ``candidate`` may find a peer. There must be at least one."""
        first = min(
            self._patient_until(place, peer.heard_at) for peer, place in self._places.items()
        )
        return max(first - now, _SHORTEST)

    def _patient_until(self, place: _Place, heard_at: float | None) -> float:
        if heard_at is None:
            return place.came_at + self._patience
        return heard_at + 2 * self._patience


def origin_of(peer: str, credentials: PeerCredentials | None) -> Hashable:
    """What counts as one address: a process behind a Unix socket, else an IP address.

    Of an IPv6 address it is the network of 64 bits. ``peer`` is the text of ``Carrier.peer``.
    """
    if credentials is not None:
        return "process", credentials.pid
    host = peer.rpartition(":")[0].strip("[]")
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv6Address):
        return address.packed[: _PREFIX // 8]
    return address.packed
