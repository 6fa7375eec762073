"""The account of one connection: received bytes that nobody has taken, and granted credit (BP-R12).

A peer may send as much as it has credit for, so credit is promised memory. It counts until the peer
has used it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from itertools import islice
from typing import Final

from aqueduct.protocol.bpmux.state import Entity

__all__ = ["CreditBudget"]

_SHARE: Final = 32
"""A grant takes at most one part in so many of the free room, so that others find some, too."""
_LOOKED_AT: Final = 64
"""So many entities that lack credit are looked at to choose the next one."""


class CreditBudget:
    """The account of one connection.

    Credit is granted while there is room. Other credit is remembered, and granted when the
    application has taken something. A quarter of ``limit`` (bytes) is kept for small grants: each
    of ``entities`` can always send a few bytes, whatever the others hold.

    Two entities go on without room, so that nothing waits for ever. The first has begun a payload
    in Partial mode, and goes on until that is complete. The second has a reader that waits for a
    payload which needs more credit. Only entities are chosen whose next payload the application
    waits for (``wait_for``), as it takes that at once. The second one keeps its place until there
    is room for its credit.

    ``payload``: bytes of the largest payload. ``pay(entity, size)`` grants credit to an entity
    that may still use it.
    """

    __slots__ = (
        "__weakref__",
        "_ahead",
        "_ahead_size",
        "_finishing",
        "_floor",
        "_held",
        "_hungry",
        "_lacking",
        "_limit",
        "_openings",
        "_pay",
        "_payload",
        "_readers",
        "_shared",
        "_top",
        "granted",
        "held",
    )

    def __init__(
        self,
        limit: int,
        payload: int,
        entities: int,
        top: Entity,
        pay: Callable[[Entity, int], None],
    ) -> None:
        self.held = 0
        """Bytes that came and were not released."""
        self.granted = 0
        """Bytes that the peer has credit for."""
        self._floor = max(limit // 4 // entities, 1)
        self._limit = limit
        self._payload = payload
        self._shared = limit - limit // 4
        self._top = top
        self._pay = pay
        self._held: dict[Entity, int] = {}
        """By who paid for them: the entity, or the top-level for opening payloads."""
        self._lacking: OrderedDict[Entity, int] = OrderedDict()
        """Credit that found no room, and is granted later."""
        self._readers: dict[Entity, int] = {}
        """Entities whose next payload is waited for, and by how many."""
        self._openings: set[Entity] = set()
        """Entities whose opening payload is not complete."""
        self._finishing: Entity | None = None
        """Who goes on in Partial mode without room; the top-level for opening payloads."""
        self._hungry: OrderedDict[Entity, None] = OrderedDict()
        """Those of ``_readers`` that lack credit; some may have got it meanwhile."""
        self._ahead: Entity | None = None
        self._ahead_size = 0
        """What it was granted beyond the room that there was."""

    def drop(self) -> None:
        """The connection is over: nothing is granted any more."""
        self._pay = _nobody  # of who refers to this

    # Credit

    def opening(self, entity: Entity, size: int) -> int:
        """How much of the credit that goes with an opening may be granted now."""
        now = self._allowed(entity, size)
        self.granted += now
        if now < size:
            self._remember(entity, size - now)
        return now

    def give(self, entity: Entity, size: int, *, all_room: bool = False) -> None:
        """Grants credit: at once, or when there is room. ``all_room``: it may be all of it."""
        if not size or entity.gone or entity.end_in or entity.end_out:
            return
        lacking = self._lacking.pop(entity, 0) + size
        now = self._allowed(entity, lacking, all_room=all_room)
        self._grant(entity, now)
        if now < lacking:
            self._remember(entity, lacking - now)
            self._favour()

    def refund(self, payer: Entity, entity: Entity, size: int) -> None:
        """Grants the bytes of a piece of an unfinished payload of ``entity`` again."""
        if payer is self._top and entity is not payer:
            self._openings.add(entity)
        self.give(payer, size)
        if payer is self._finishing:
            self._finish(payer)

    def completed(self, entity: Entity) -> None:
        """A payload of it is whole."""
        self._openings.discard(entity)
        finishing = self._finishing
        if finishing is not None and not self._unfinished(finishing) and finishing in self._readers:
            self._finishing = None  # it is taken at once
            self._favour()

    # Bytes

    def arrived(self, payer: Entity, size: int) -> None:
        """Bytes came on this credit."""
        self.granted -= size
        self.held += size
        self._held[payer] = self._held.get(payer, 0) + size

    def consumed(self, payer: Entity, size: int, held: int) -> None:
        """The application has taken ``held`` bytes, or dropped them; ``size`` may come again.

        Who had room keeps it: others get what is left.
        """
        left = self._held.pop(payer, 0) - held
        if left > 0:
            self._held[payer] = left
        self.held -= held
        if payer is self._finishing and not self._unfinished(payer):
            self._finishing = None
        if size <= held and self.held + self.granted + size <= self._limit:
            self._grant(payer, size)
        else:
            self.give(payer, size)
        if self._lacking:
            self._go_on()

    def closed(self, entity: Entity) -> None:
        """The peer sends no more on it."""
        if entity.joined:  # an unfinished payload, which nobody gets
            payer = self._top if entity.opening_in else entity
            self.consumed(payer, 0, len(entity.joined))
            entity.joined = b""
        self.granted -= entity.credit_in + entity.grant
        entity.credit_in = 0
        self._lacking.pop(entity, None)
        self._openings.discard(entity)
        self._readers.pop(entity, None)
        if entity is self._finishing:
            self._finishing = None
        if entity is self._ahead:
            self._ahead = None
        if self._lacking:
            self._go_on()

    # Readers

    def wait_for(self, entity: Entity) -> None:
        """The application waits for a payload of it; ``wait_no_more`` follows."""
        self._readers[entity] = self._readers.get(entity, 0) + 1
        if entity in self._lacking:
            self._hungry[entity] = None
            self._favour()

    def wait_no_more(self, entity: Entity) -> None:
        """One that waited does so no more."""
        count = self._readers.pop(entity, 0)
        if count > 1:
            self._readers[entity] = count - 1

    # Within

    def _unfinished(self, payer: Entity) -> bool:
        """Whether a payload in Partial mode that it pays for is not complete."""
        if payer is self._top and self._openings:
            return True
        return payer.partial > 0 and not payer.opening_in

    def _finish(self, payer: Entity) -> None:
        """Grants what a payload misses that goes on without room.

        Of opening payloads, which a peer may mix, all together have room for one more.
        """
        if payer is self._top and self._openings:
            most = self._limit + self._payload + self._ahead_size - self.held - self.granted
        else:
            most = payer.partial - payer.credit_in - payer.grant
        lacking = self._lacking.get(payer, 0)
        now = min(lacking, max(most, 0))
        if now == lacking:
            self._lacking.pop(payer, None)
        else:
            self._lacking[payer] = lacking - now
        self._grant(payer, now)

    def _remember(self, entity: Entity, size: int) -> None:
        self._lacking[entity] = size
        if entity in self._readers:
            self._hungry[entity] = None

    def _grant(self, entity: Entity, size: int) -> None:
        if size and not (entity.gone or entity.end_in or entity.end_out):
            self.granted += size
            self._pay(entity, size)

    def _allowed(self, entity: Entity, lacking: int, *, all_room: bool = False) -> int:
        used = self.held + self.granted
        room = max(self._limit - used, 0) if all_room else max(self._shared - used, 0) // _SHARE
        if lacking <= room:
            return lacking
        has = entity.credit_in + entity.grant + self._held.get(entity, 0)
        return min(lacking, max(room, self._floor - has, 0))

    def _go_on(self) -> None:
        """There may be room again: it goes to those who wait longest."""
        for _ in range(min(len(self._lacking), _LOOKED_AT)):
            entity, lacking = self._lacking.popitem(last=False)
            now = self._allowed(entity, lacking)
            self._grant(entity, now)
            if now < lacking:
                self._lacking[entity] = lacking - now
                if not now:
                    self._lacking.move_to_end(entity, last=False)
                    break
        self._favour()

    def _favour(self) -> None:
        """Chooses who goes on without room."""
        if self._ahead is not None and self.held + self.granted <= self._limit:
            self._ahead = None  # what it had beyond the limit is made up for
        if self._ahead is None:
            self._ahead_size = 0
        if self._finishing is not None:
            self._finish(self._finishing)
            if self._ahead is not None:
                return
        readers = self._readers
        for entity in tuple(islice(self._hungry, _LOOKED_AT)):
            if entity not in readers or entity not in self._lacking:
                del self._hungry[entity]
            elif self._unfinished(entity):
                if self._finishing is None:
                    self._finishing = entity
                    self._finish(entity)
            elif self._ahead is None:
                self._ahead = entity
                self._ahead_size = self._lacking[entity]
                self._grant(entity, self._lacking.pop(entity))


def _nobody(entity: Entity, size: int) -> None:
    """Credit is granted to nobody."""
