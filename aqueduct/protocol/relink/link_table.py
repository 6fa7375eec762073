"""The links of one listener: their ids, and those that wait for their connector without one."""

from __future__ import annotations

import hashlib
import secrets
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Generic, TypeVar
from weakref import WeakKeyDictionary

from aqueduct.config import Relink as Settings
from aqueduct.protocol.relink.handshake import (
    ChosenLink,
    DistantLink,
    Opening,
    RefusedLink,
)

__all__ = ["KeptLinks", "KnownLink", "LinkPlace", "LinkTable", "link_name"]

T = TypeVar("T")
_LINK_BITS: Final = 63
_CHANNELS_A_RESUME: Final = 256
"""Channels that cost as much as a resume without any."""


def link_name(link: int) -> str:
    """What logs call a link: a hash of its id, which is a secret (RL-R18)."""
    return hashlib.blake2s(link.to_bytes(8, "little"), digest_size=4).hexdigest()


@dataclass(frozen=True, slots=True)
class LinkPlace:
    """Which of ``count`` processes with one epoch a listener is in, from 0.

    The first bits of an id say which process has the link. All others are random: with eight
    processes there are 60 of them (RL-R18).
    """

    number: int = 0
    count: int = 1

    @property
    def random_bits(self) -> int:
        """How many bits of an id do not say where its link is."""
        return _LINK_BITS - (self.count - 1).bit_length()

    def new_id(self, random: Callable[[int], int]) -> int:
        """An id for a link of this process."""
        bits = self.random_bits
        return self.number << bits | (1 + random((1 << bits) - 1))

    def number_of(self, link: int) -> int:
        """The process that an id names. It may be none: an id is the peer's word."""
        return link >> self.random_bits


@dataclass(slots=True, eq=False)
class KnownLink(Generic[T]):
    """A link of a LinkTable.

    ``owner`` is what the table's user keeps for it. ``proof``: who may resume it, such as its
    scheme with the certificate that was shown, or the user id of a Unix socket (RL-R18).
    """

    identifier: int
    opening: Opening
    proof: Hashable
    owner: T
    held_bytes: int = 0
    """Since it has no connection."""
    expires: float | None = None
    """When it is dropped, in seconds; None: it has a connection."""
    resume_debt: float = 0.0
    resumed_at: float = 0.0
    """How many resumes were too many at that time; see ``LinkTable.resume_delay``."""
    name: str = field(init=False)

    def __post_init__(self) -> None:
        self.name = link_name(self.identifier)


class KeptLinks:
    """Links without a connection, of all tables that share it: they are bounded together (RL-R18).

    The one that has had none for longest goes first.
    """

    def __init__(self) -> None:
        self._links: OrderedDict[KnownLink[Any], Callable[[str], None]] = OrderedDict()
        self._bytes = 0

    @staticmethod
    def of(loop: object) -> KeptLinks:
        """What all listeners of an event loop share: only its thread may drop their links."""
        return _shared.setdefault(loop, KeptLinks())

    def add(self, known: KnownLink[Any], drop: Callable[[str], None]) -> None:
        """A link has lost its connection. ``drop(why)`` is called when it has to go."""
        self._links[known] = drop
        self._bytes += known.held_bytes

    def remove(self, known: KnownLink[Any]) -> None:
        """It has a connection again, or has ended."""
        del self._links[known]
        self._bytes -= known.held_bytes

    def grown(self, known: KnownLink[Any], size: int) -> None:
        """It holds ``size`` bytes more."""
        known.held_bytes += size
        self._bytes += size

    def bound(self, settings: Settings) -> None:
        """Drops the oldest ones while there are too many, or they hold too much."""
        while len(self._links) > settings.kept_links:
            self._drop_oldest("Relink.kept_links is the limit")
        while self._bytes > settings.kept_bytes:
            self._drop_oldest("Relink.kept_bytes is the limit")

    def _drop_oldest(self, why: str) -> None:
        next(iter(self._links.values()))(why)


_shared: WeakKeyDictionary[Any, KeptLinks] = WeakKeyDictionary()


class LinkTable(Generic[T]):
    """All links of a listener. ``now`` is in seconds, of any steady clock.

    Links without a connection are bounded in number and bytes by ``together``, and here in time
    (RL-R18). Those that went are told to ``dropped``, with the reason.
    """

    def __init__(
        self,
        epoch: int,
        settings: Settings,
        dropped: Callable[[KnownLink[T], str], None],
        random: Callable[[int], int] = secrets.randbelow,
        place: LinkPlace = LinkPlace(),
        together: KeptLinks | None = None,
    ) -> None:
        """``epoch``: microseconds since 1970, when the listener began (RL-6)."""
        self.epoch = epoch
        self._settings = settings
        self._dropped = dropped
        self._random = random
        self._place = place
        self._links: dict[int, KnownLink[T]] = {}
        self._kept: OrderedDict[int, KnownLink[T]] = OrderedDict()
        self._together = together or KeptLinks()
        self._unknown = 0.0
        self._unknown_since = 0.0

    def __len__(self) -> int:
        return len(self._links)

    @property
    def kept(self) -> int:
        """Links without a connection."""
        return len(self._kept)

    def choose(
        self, opening: Opening, proof: Hashable, now: float
    ) -> tuple[ChosenLink | RefusedLink | DistantLink, KnownLink[T] | None]:
        """What answers an opening, and the link if it is an old one.

        An old link is given to whoever has its id and the same proof, also while it has a
        connection: the newest wins (RL-R18). ``add`` a new one. A link that another process has
        is distant; if that process cannot be reached, ``unknown`` answers.
        """
        if not opening.old_link:
            return ChosenLink(self.epoch, self._new_id(), resumed=False), None
        found = self._links.get(opening.old_link) if opening.old_epoch == self.epoch else None
        if found is not None and found.proof == proof and _alike(found.opening, opening):
            return ChosenLink(self.epoch, found.identifier, resumed=True), found
        if opening.require_old_link:
            number = self._place.number_of(opening.old_link)
            near = number == self._place.number or number >= self._place.count
            if near or opening.old_epoch != self.epoch:
                return self.unknown(now), None
            return DistantLink(number), None
        return ChosenLink(self.epoch, self._new_id(), resumed=False), None

    def unknown(self, now: float) -> RefusedLink:
        """What answers an opening of an old link that nobody has."""
        return RefusedLink(self.epoch, self._may_answer(now), "the link is unknown (RL-7)")

    def find(self, link: int) -> KnownLink[T]:
        """The link of an id that ``choose`` has given back."""
        return self._links[link]

    def add(self, link: int, opening: Opening, proof: Hashable, owner: T) -> KnownLink[T]:
        """A new link, which has a connection."""
        known = self._links[link] = KnownLink(link, opening, proof, owner)
        return known

    def disconnected(self, known: KnownLink[T], held_bytes: int, now: float) -> None:
        """A link has lost its connection, and holds so many bytes. Others may have to go for it."""
        if self._links.get(known.identifier) is not known:
            return
        self.connected(known)
        known.expires, known.held_bytes = now + self._settings.keep, held_bytes
        self._kept[known.identifier] = known
        self._together.add(known, partial(self._drop, known))
        self._together.bound(self._settings)

    def connected(self, known: KnownLink[T]) -> None:
        """A link has a connection again."""
        if self._kept.pop(known.identifier, None) is not None:
            self._together.remove(known)
        known.expires, known.held_bytes = None, 0

    def grown(self, known: KnownLink[T], size: int) -> None:
        """A link that may have no connection holds ``size`` bytes more. Others may have to go."""
        if known.expires is not None:
            self._together.grown(known, size)
            self._together.bound(self._settings)

    def resume_delay(self, known: KnownLink[T], channels: int, now: float) -> float:
        """Seconds to wait before a link with so many channels is resumed, as that costs work.

        It counts as a resume. ``Relink.resumes`` in a row are for nothing, if channels are few.
        """
        rate = self._settings.resumes
        known.resume_debt = max(0.0, known.resume_debt - (now - known.resumed_at) * rate)
        known.resumed_at = now
        delay = max(0.0, known.resume_debt + 1 - rate) / rate
        # Those who hurry are not kept waiting for ever.
        known.resume_debt = min(known.resume_debt, 2.0 * rate) + 1 + channels / _CHANNELS_A_RESUME
        return delay

    def remove(self, known: KnownLink[T]) -> None:
        """A link has ended."""
        self.connected(known)
        if self._links.get(known.identifier) is known:
            del self._links[known.identifier]

    def next_deadline(self) -> float | None:
        """When ``handle_deadline`` is due."""
        return next((known.expires for known in self._kept.values()), None)

    def handle_deadline(self, now: float) -> None:
        """Drops the links that waited for too long."""
        while (due := self.next_deadline()) is not None and due <= now:
            why = f"it had no connection for {self._settings.keep:g} s (Relink.keep)"
            self._drop(next(iter(self._kept.values())), why)

    def _drop(self, known: KnownLink[T], why: str) -> None:
        self.remove(known)
        self._dropped(known, why)

    def _new_id(self) -> int:
        while True:
            link = self._place.new_id(self._random)
            if link not in self._links:
                return link

    def _may_answer(self, now: float) -> bool:
        """Whether a wrong id is answered; else its connection is closed, as guesses are slowed."""
        rate = self._settings.unknown_links
        self._unknown = max(0.0, self._unknown - (now - self._unknown_since) * rate)
        self._unknown_since = now
        if self._unknown >= rate:
            return False
        self._unknown += 1
        return True


def _alike(one: Opening, other: Opening) -> bool:
    """Whether two openings are about the same endpoint, id sizes and transactions."""
    return _terms(one) == _terms(other)


def _terms(opening: Opening) -> tuple[Hashable, ...]:
    return (
        opening.endpoint,
        opening.connector_id_size,
        opening.listener_id_size,
        opening.connector_transactions,
        opening.listener_transactions,
    )
