"""Places for peers in their handshake, and which peer loses its place when all are taken.

A listener has a limited number of places. When all are taken, the address with the most silent
peers loses the one that was silent longest. While most peers do send something, a peer that
completes no step of its handshake counts as silent too: bytes alone keep no place. So such
peers delay honest peers only for a moment, even from the same address.
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

    @property
    def stepped_at(self) -> float | None:
        """The loop's time of the last step of its handshake; None: it has completed none."""

    def has_input(self) -> bool:
        """Whether it has sent bytes that are not read yet."""


Peer = TypeVar("Peer", bound=HandshakingPeer)


class _Place(NamedTuple):
    origin: Hashable
    came_at: float


class Places(Generic[Peer]):
    """At most ``limit`` peers. Times are those of the event loop, in seconds.

    A peer that has sent nothing may lose its place after ``patience``. A peer that was heard may
    lose it after twice that, as its answer may take long to arrive. The time of the latter runs
    from its last step if most peers were heard, else from its last bytes.
    """

    def __init__(self, limit: int, patience: float) -> None:
        self._limit = limit
        self._patience = patience
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
        found = [
            (place.origin, peer.heard_at is not None, until, peer)
            for peer, place, until in self._kept_until()
            if until <= now
        ]
        counts = Counter(origin for origin, _, _, _ in found)
        # Of one address first those that have sent nothing, the oldest first.
        found.sort(key=lambda each: (-counts[each[0]], each[1], each[2]))
        return next((peer for _, _, _, peer in found if not peer.has_input()), None)

    def pause(self, now: float) -> float:
        """Seconds until ``candidate`` may find a peer. There must be at least one."""
        first = min(until for _, _, until in self._kept_until())
        return max(first - now, _SHORTEST)

    def _kept_until(self) -> list[tuple[Peer, _Place, float]]:
        """The peers, their places, and until when each keeps its own at least."""
        heard = {peer: at for peer in self._places if (at := peer.heard_at) is not None}
        # Where most are silent, room comes from those: a slow peer may take its time.
        by_step = 2 * len(heard) > len(self._places)
        found = []
        for peer, place in self._places.items():
            if peer not in heard:
                until = place.came_at + self._patience
            else:
                since = peer.stepped_at if by_step else heard[peer]
                until = (place.came_at if since is None else since) + 2 * self._patience
            found.append((peer, place, until))
        return found


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
