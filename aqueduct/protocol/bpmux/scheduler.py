"""What leaves next: urgent chunks first, then sinks in turn, by bytes.

As in fq_codel: who was idle goes first once (the fresh), for at most ``Bpmux.chunk`` bytes; who has
more to send than that waits for its turn among the bulky. So a small message waits for at most what
was taken before, however much is queued elsewhere. The turns, and plain runs of bytes, are compiled
(``_speedups.turns``); all other chunks are made here.
"""

from __future__ import annotations

from typing import TypeAlias

from aqueduct._speedups.bpmux.chunks import (
    CREDIT,
    END,
    PAYLOAD,
    PING,
    encode_head,
    encode_rest,
)
from aqueduct._speedups.bpmux.single_chunk import SingleChunkScheduler
from aqueduct._speedups.io.gather import IovecWriter
from aqueduct.config import Bpmux as Settings
from aqueduct.errors import LimitExceeded
from aqueduct.protocol.bpmux import events
from aqueduct.protocol.bpmux.budget import CreditBudget
from aqueduct.protocol.bpmux.state import DUPLEX, Entity, Item, State, type_for

__all__ = ["Buffer", "Scheduler", "Taken"]

Buffer: TypeAlias = bytes | bytearray | memoryview
Taken: TypeAlias = tuple[list[bytes | memoryview], int, list[tuple[Entity, int]]]
"""Buffers in wire order, their bytes, and how many bytes of payload are in them of whom."""

UNLIMITED = 1 << 62
_FORGOTTEN = 64


class Scheduler(SingleChunkScheduler):
    """Everything that waits to leave."""

    def __init__(self, state: State, reported: list[events.Event], settings: Settings) -> None:
        super().__init__(
            settings.chunk,
            state.top_sink,
            state.maps,
            most=settings.opening,
            entities=settings.entities,
        )
        self._state = state
        self._events = reported
        self._settings = settings
        self.budget: CreditBudget | None = None
        """Told of entities on which the peer sends no more."""
        self._begun: Entity | None = None
        """Whose opening payload is leaving in pieces. Another one would take the credit that it
        needs to become whole, and neither might."""
        self._forgotten = 0
        """Entities that were taken back and may still stand in a lane."""

    def take(self, limit: int) -> Taken:
        """Commits and returns the next chunks, about ``limit`` bytes of them."""
        out = IovecWriter()
        self.gather(out, limit)
        return out.buffers, out.size, out.written

    def credited(self, entity: Entity) -> None:
        """The peer gave it credit."""
        self.wake(entity)
        if entity is self._state.top_sink:
            self._wake_waiting()

    def owe_pong(self, entity: Entity) -> None:
        """The peer has sent a ping (BP-R11)."""
        if entity.end_out:
            return
        entity.pongs += 1
        if entity.pongs > self._settings.unanswered_pings:
            raise LimitExceeded(
                f"{entity.pongs} pings for {entity!r} without reading an answer; "
                f"Bpmux.unanswered_pings is {self._settings.unanswered_pings}"
            )
        self.hurry(entity)

    def peer_ended(self, entity: Entity) -> None:
        """The peer's end is here: what waits is dropped, and the end acknowledged (BP-12)."""
        if self.budget is not None:
            self.budget.closed(entity)
        if entity.end_out:
            self._state.remove(entity)
        else:
            entity.end_in = True
            entity.drop()
            entity.grant = entity.pings = entity.pongs = 0
            self.hurry(entity)
        if entity is self._state.top_sink:
            self.abandon_waiting()
        self._wait_no_more(entity)

    def abandon_waiting(self) -> None:
        """The top-level ended: an opening payload that waits for its credit never leaves."""
        while self._waiting:
            entity, _ = self._waiting.popitem(last=False)
            self._abandon(entity)

    def drop(self) -> None:
        """Nothing leaves any more."""
        for lane in (self.urgent, self.fresh, self.bulky, self._waiting):
            lane.clear()
        self._begun = None

    def _abandon(self, entity: Entity) -> None:
        if entity.gone or entity.end_in:
            return
        self._events.append((events.ABANDONED, entity))
        entity.drop()
        if not entity.opened:
            self.forget(entity)

    def forget(self, entity: Entity) -> None:
        """Takes an entity back that the peer does not know of."""
        self._wait_no_more(entity)
        halves = [entity]
        if entity.open_type == DUPLEX and entity.twin is not None:
            halves.append(entity.twin)
        for half in halves:
            if self.budget is not None:
                self.budget.closed(half)
            self._state.remove(half)
        self._forgotten += len(halves)
        if self._forgotten > max(_FORGOTTEN, (len(self.fresh) + len(self.bulky)) // 2):
            self._clear_lanes()

    def _clear_lanes(self) -> None:
        """Nothing is kept of what was taken back while the transport takes nothing."""
        self._forgotten = 0
        for lane in (self.urgent, self.fresh, self.bulky):
            left = [entity for entity in lane if not entity.gone]
            lane.clear()
            lane.extend(left)

    def _wait_no_more(self, entity: Entity) -> None:
        """It has what it waited for, or needs it no more: the next one is tried."""
        waited = entity in self._waiting
        if waited:
            del self._waiting[entity]
        if entity is self._begun and not (entity.items and entity.items[0].begun):
            self._begun = None
            waited = True
        if waited:
            self._wake_waiting()

    def _wake_waiting(self) -> None:
        if self._waiting:
            self.wake(next(iter(self._waiting)))

    # Chunks.

    def _send_urgent(self, entity: Entity, out: IovecWriter) -> None:
        """Credit, pings and pongs, and what else may not wait."""
        if entity.gone:
            return
        if entity.end_out or not entity.opened:
            return  # credit and pings travel with the opening chunk
        identifier = entity.identifier
        type_ = entity.place if identifier else type_for(entity)
        if entity.pongs:
            out.add(encode_head(type_, 0, identifier) * entity.pongs)
            entity.pongs = 0
        if entity.grant:
            flags = CREDIT | (PING if entity.pings else 0)
            out.add(encode_head(type_, flags, identifier) + encode_rest(CREDIT, entity.grant))
            entity.credit_in += entity.grant
            entity.grant = 0
            entity.pings -= 1 if entity.pings else 0
        if entity.pings:
            out.add(encode_head(type_, PING, identifier) * entity.pings)
            entity.pings = 0
        while entity.items:
            if not self.goes_first(entity):
                self.wake(entity)
                return
            if not self._send(entity, UNLIMITED, out):
                return

    def _send(self, entity: Entity, room: int, out: IovecWriter) -> bool:
        """One chunk of what waits, of at most ``room`` bytes of payload; False: nothing can go."""
        items = entity.items
        opening = not entity.opened
        if opening:
            if entity.twin is not None and entity.open_type != DUPLEX:
                return False  # the other half of the Duplex opens both
        elif not items or entity.end_out or entity.end_in:
            return False
        item = items[0] if items and not (opening and items[0].is_end) else None
        top = self._state.top_sink
        on_top = opening or (item is not None and item.opening)
        purse = top if on_top else entity
        if on_top and (top.gone or top.end_in or top.end_out):
            available = 0
        elif item is not None and (item.is_end or item.urgent):
            available = purse.credit_out
        else:
            available = max(purse.credit_out - purse.keep, 0)
        size, total = 0, 0
        if item is not None:
            waiting = item.scatter.nbytes
            if item.whole:
                size = waiting
                enough = size <= available
            elif item.total:
                size = min(waiting, room, available)
                enough = size > 0 and not (on_top and self._begun not in (None, entity))
                total = 0 if item.begun or size == item.total else item.total
            else:
                size = min(waiting, room, available)
                if opening:
                    size = min(size, self._settings.opening)
                enough = opening or size > 0
            if not enough:
                if on_top and waiting:
                    self._wait(entity)
                return False
        return self._chunk(entity, item, size, total, available, out)

    def _wait(self, entity: Entity) -> None:
        """Its opening payload needs more top-level credit than there is."""
        top = self._state.top_sink
        if top.gone or top.end_in or top.end_out:
            self._abandon(entity)
        elif entity not in self._waiting:
            self._waiting[entity] = None
            if entity is self._begun:
                self._waiting.move_to_end(entity, last=False)

    def _chunk(
        self,
        entity: Entity,
        item: Item | None,
        size: int,
        total: int,
        available: int,
        out: IovecWriter,
    ) -> bool:
        """Commits one chunk: ``size`` bytes of ``item``, and the end if it fits behind them."""
        items = entity.items
        opening = not entity.opened
        on_top = opening or (item is not None and item.opening)
        purse = self._state.top_sink if on_top else entity
        flags = PAYLOAD
        done = True
        end: Item | None = None
        if item is not None:
            if item.is_end:
                flags = END
            if item.total:
                item.total -= size
                item.begun = True
                item.opening = on_top
                done = not item.total
            elif not item.whole:
                done = size == item.scatter.nbytes
        following = 1 if item is not None else 0
        if done and flags == PAYLOAD and len(items) > following:
            end = items[following]
            room = available - size if purse is entity or opening else entity.credit_out
            if not end.is_end or not end.whole or end.scatter.nbytes > room:
                end = None
        end_size = 0
        if end is not None:
            flags |= END
            end_size = end.scatter.nbytes
        if opening:
            flags |= (CREDIT if entity.grant else 0) | (PING if entity.pings else 0)
        type_ = entity.open_type if on_top else type_for(entity)
        if flags & PAYLOAD:
            out.add(encode_head(type_, flags, entity.identifier, size, total))
        else:
            end_size = size
            out.add(
                encode_head(type_, flags, entity.identifier, 0, total) + encode_rest(END, 0, size)
            )
        purse.credit_out -= size
        if item is not None:
            for buffer in item.scatter.take(size, UNLIMITED):
                out.add(buffer)
            if not item.is_end and (size or item.whole):
                out.written.append((entity, size))
            if done:
                items.popleft()
        if flags & PAYLOAD and flags & (CREDIT | END):
            out.add(encode_rest(flags, entity.grant, end_size))
        if end is not None:
            (purse if opening else entity).credit_out -= end_size
            for buffer in end.scatter.take(end_size, UNLIMITED):
                out.add(buffer)
        if opening:
            self._has_opened(entity)
        if on_top and not done:
            self._begun = entity
        if on_top:
            self._wait_no_more(entity)
        ends = item is not None and (item.is_end or item.is_response)
        if end is not None or (ends and done):
            self._has_ended(entity)
        return True

    def _has_opened(self, entity: Entity) -> None:
        """Its opening chunk was taken, with the credit that waited."""
        entity.opened = True
        entity.credit_in += entity.grant
        entity.grant = 0
        entity.pings -= 1 if entity.pings else 0
        if entity.pings:
            self.hurry(entity)
        if entity.open_type == DUPLEX and entity.twin is not None:
            twin = entity.twin
            twin.opened = True
            if twin.grant or twin.pings:
                self.hurry(twin)
            self.wake(twin)

    def _has_ended(self, entity: Entity) -> None:
        """Our end was taken; nothing else leaves (BP-R8)."""
        entity.end_out = True
        if self.budget is not None:
            self.budget.granted -= entity.grant
        entity.drop()
        entity.grant = entity.pings = entity.pongs = 0
        if entity is self._state.top_sink:
            self.abandon_waiting()
