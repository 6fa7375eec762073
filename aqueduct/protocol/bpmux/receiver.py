"""What received chunks do to the state (BP-6 to BP-14, BP-16)."""

from __future__ import annotations

from typing import Final, Never

from aqueduct._speedups.bpmux.chunks import ACK_END, CREDIT, END, PAYLOAD, PING, ChunkStep
from aqueduct._speedups.bpmux.single_chunk import SingleChunkReader
from aqueduct.config import Bpmux as Settings
from aqueduct.errors import LimitExceeded, SequenceError
from aqueduct.protocol.bpmux import events
from aqueduct.protocol.bpmux.budget import CreditBudget
from aqueduct.protocol.bpmux.scheduler import Scheduler
from aqueduct.protocol.bpmux.state import (
    DUPLEX,
    HIGHEST,
    MIRROR,
    REQ_IN,
    REQ_OUT,
    SINK_IN,
    STREAM_IN,
    STREAM_OUT,
    TYPE_NAMES,
    Entity,
    State,
)

__all__ = ["EntityReceiver"]

_NOTHING: Final = ChunkStep.NOTHING  # what nearly every reading ends with

WITH_PAYLOAD = (REQ_OUT, STREAM_OUT, STREAM_IN)
"""Who may get payloads after its opening: we get responses, and messages to read (BP-R6)."""


class EntityReceiver(SingleChunkReader):
    """Reads chunks, moves the state, reports events. A violation is raised; see Mux."""

    def __init__(
        self,
        state: State,
        scheduler: Scheduler,
        reported: list[events.Event],
        settings: Settings,
        *,
        whole: bool,
        regrant: bool,
        brief: bool,
        budget: CreditBudget | None,
    ) -> None:
        super().__init__(
            state.top_stream,
            reported,
            state.maps,
            whole,
            urgent=scheduler.urgent,
            wake=scheduler.wake,
            entities=settings.entities,
            brief=brief,
        )
        self._state = state
        self._scheduler = scheduler
        self._events = reported
        self._settings = settings
        self._whole = whole
        self._regrant = regrant
        self._budget = budget

    def receive(self, data: bytes | bytearray | memoryview, most: int = 0) -> None:
        """The next bytes of the connection, or ``most`` chunks of them."""
        self.decoder.feed(data)
        self.allowance = most or -1
        self.go_on(_NOTHING)

    def go_on(self, step: int) -> None:
        """Takes this step of the decoder, if it is one, and all that follow.

        It stops before the chunk that is above the ``allowance``.
        """
        if self.unread:
            self.unread, step = False, ChunkStep.HEAD
        step = self.run(step)
        while step != _NOTHING:
            if step == ChunkStep.HEAD:
                if not self.allowance:
                    self.unread = True
                    return
                self.allowance -= self.allowance > 0
                self._head()
            elif step == ChunkStep.PIECE:
                self._piece()
            elif step == ChunkStep.DONE:
                self._done()
            elif step == ChunkStep.REST:
                self._rest()
            elif step == ChunkStep.END_PIECE:
                self.entity.join(self.decoder.data or b"")
            step = self.run(_NOTHING)

    def expected(self) -> tuple[Entity, int] | None:
        """Whose payload the next bytes are, and how many of them; None if they are not."""
        decoder = self.decoder
        if self._whole or not decoder.in_payload or not decoder.missing:
            return None
        return self.entity, decoder.missing

    def landed(self, size: int) -> None:
        """Bytes of the expected payload that were read elsewhere; the last ones are reported."""
        decoder = self.decoder
        decoder.landed_outside(size)
        if not decoder.missing:
            if self.last:
                self._events.append((events.PAYLOAD, self.entity, b"", True, self.purse, 0))
            self._finish_payload()
            if self.run_plain() == ChunkStep.DONE:
                self._done()

    # A chunk, from its head to its end.

    def _head(self) -> None:
        decoder = self.decoder
        type_ = decoder.type
        place = MIRROR[type_]
        entity = self._state.maps[place].get(decoder.identifier)
        self.opening = entity is None
        if entity is None:
            self.entity = entity = self._create(type_, place)
        else:
            self.entity = entity
            self._allow(entity, type_)
        flags = decoder.flags
        if decoder.total:
            self._begin_partial(entity, type_, bool(flags & PAYLOAD))
        elif entity.partial and flags & (PAYLOAD | END):
            self._continue_partial(entity, type_)
        if flags & PAYLOAD:
            size = decoder.payload
            self.purse = self._state.top_stream if self.opening or entity.opening_in else entity
            self._charge(self.purse, size, "a payload")
            if entity.partial:
                entity.partial -= size
            elif self._whole and size > self._settings.payload_bytes:
                self._too_large(entity, size)
            self.last = not entity.partial
            if not size:
                if self.last:
                    self._deliver(b"")
                self._finish_payload()

    def _piece(self) -> None:
        decoder = self.decoder
        data = decoder.data
        assert data is not None
        entity = self.entity
        whole = decoder.missing == 0 and self.last
        if not self._whole:
            self._events.append((events.PAYLOAD, entity, data, whole, self.purse, len(data)))
        elif whole and not entity.joined:
            self._deliver(bytes(data))
        else:
            entity.join(data)
            if whole:
                self._deliver(bytes(entity.joined))
                entity.joined = b""
        if decoder.missing == 0:
            self._finish_payload()

    def _deliver(self, data: bytes) -> None:
        """A payload as a whole; what pieces were given back before is not charged again."""
        entity = self.entity
        if not data and entity.joined:
            data, entity.joined = bytes(entity.joined), b""
        charged = self.decoder.payload if self._regrant or not self._whole else len(data)
        self._events.append((events.PAYLOAD, entity, data, True, self.purse, charged))

    def _finish_payload(self) -> None:
        """All bytes of the chunk's payload are here."""
        entity = self.entity
        if self.last:
            if self._budget is not None:
                self._budget.completed(entity)
            entity.opening_in = False
        elif self._regrant:
            self._refund(entity, self.decoder.payload)

    def _refund(self, entity: Entity, size: int) -> None:
        """Grants a piece again: or a payload above the window would never be whole (BP-R12)."""
        if self._budget is not None:
            self._budget.refund(self.purse, entity, size)
        else:
            self._scheduler.give_back(self.purse, size)

    def _rest(self) -> None:
        decoder = self.decoder
        entity = self.entity
        if decoder.flags & CREDIT:
            if entity.credit_out > HIGHEST - decoder.credit:
                self._break(f"credit above 2^64 - 1 for {entity!r} (BP-10)")
            if decoder.credit:
                entity.credit_out += decoder.credit
                self._events.append((events.CREDIT, entity))
                self._scheduler.credited(entity)
        if decoder.flags & END:
            size = decoder.end_payload
            self.purse = self._state.top_stream if self.opening else entity
            self._charge(self.purse, size, "an end payload")
            if entity.partial:
                entity.partial -= size
                if entity.partial and self._regrant:
                    self._refund(entity, size)
            elif size > self._settings.payload_bytes:
                self._too_large(entity, size)

    def _done(self) -> None:
        decoder = self.decoder
        entity = self.entity
        flags = decoder.flags
        if flags == PAYLOAD and entity.place != REQ_OUT:
            return
        if flags & PING:
            self._events.append((events.PING, entity))
            self._scheduler.owe_pong(entity)
        if flags & END and not entity.partial:
            data, entity.joined = bytes(entity.joined), b""
            charged = decoder.end_payload if self._regrant else len(data)
            self._events.append((events.ENDED, entity, data, self.purse, charged))
            self._scheduler.peer_ended(entity)
        elif flags & PAYLOAD:
            if entity.place == REQ_OUT and self.last:
                # A response is an end in every respect (BP-R7).
                self._scheduler.peer_ended(entity)
        elif flags & ACK_END:
            self._events.append((events.ACKNOWLEDGED, entity))
            if self._budget is not None:
                self._budget.closed(entity)
            self._state.remove(entity)
        elif not flags and entity.awaited:
            ping = entity.awaited.popleft()
            ping[1] = None
            self._events.append((events.PONG, entity, ping[2]))

    # What is allowed.

    def _create(self, type_: int, place: int) -> Entity:
        """A new entity for a chunk of an unknown identifier (BP-7, BP-8, BP-R4)."""
        decoder = self.decoder
        identifier = decoder.identifier
        name = f"{TYPE_NAMES[type_]} {identifier}"
        if place not in (REQ_IN, SINK_IN, STREAM_IN):
            self._break(f"{name} names nothing that this side has opened (BP-7, BP-R4)")
        if type_ == DUPLEX and identifier in self._state.maps[STREAM_IN]:
            self._break(f"{name} is in use for a sink of the peer (BP-8)")
        if not decoder.flags & PAYLOAD:
            self._break(f"{name} is unknown, and opening it needs a payload (BP-8)")
        if len(self._state.maps[place]) >= self._settings.entities or (
            type_ == DUPLEX and len(self._state.maps[STREAM_IN]) >= self._settings.entities
        ):
            raise LimitExceeded(
                f"{name} is one above Bpmux.entities ({self._settings.entities}) (BP-R12)"
            )
        entity = self._state.add(place, identifier)
        if type_ == DUPLEX:
            twin = self._state.add(STREAM_IN, identifier)
            entity.twin, twin.twin = twin, entity
        self._events.append((events.OPENED, entity))
        return entity

    def _allow(self, entity: Entity, type_: int) -> None:
        """A chunk for a known entity (BP-9, BP-12, BP-13, BP-R6)."""
        flags = self.decoder.flags
        if entity.end_in:
            self._break(f"a chunk for {entity!r}, which its sender has ended (BP-R8)")
        if flags & ACK_END and not entity.end_out:
            self._break(f"an acknowledgement for {entity!r}, which has not ended (BP-13)")
        more = entity.opening_in and entity.partial_type == type_
        if type_ == DUPLEX and not more:
            self._break(f"a Duplex for {entity!r}, which is known (BP-9)")
        if flags & PAYLOAD and entity.place not in WITH_PAYLOAD and not more:
            self._break(f"a payload for {entity!r} after its opening (BP-9, BP-R6)")

    def _begin_partial(self, entity: Entity, type_: int, payload: bool) -> None:
        total = self.decoder.total
        if entity.partial:
            self._break(f"a Partial for {entity!r}, which is in partial mode (BP-R10)")
        if (self._whole or not payload) and total > self._settings.payload_bytes:
            self._too_large(entity, total)
        entity.partial = total
        entity.partial_type = type_
        entity.partial_end = not payload
        entity.opening_in = self.opening

    def _continue_partial(self, entity: Entity, type_: int) -> None:
        decoder = self.decoder
        if type_ != entity.partial_type:
            self._break(
                f"a piece of a partial payload of {entity!r} comes as {TYPE_NAMES[type_]}; it "
                f"began as {TYPE_NAMES[entity.partial_type]} (BP-R10)"
            )
        payload = bool(decoder.flags & PAYLOAD)
        if payload == entity.partial_end:
            self._break(f"{entity!r} mixes payload and end payload in partial mode (BP-16)")
        if payload:
            if decoder.payload > entity.partial:
                self._above(entity, decoder.payload)
            if decoder.flags & END and decoder.payload < entity.partial:
                self._break(f"an end inside a partial payload of {entity!r} (BP-R10)")

    def _charge(self, purse: Entity, size: int, what: str) -> None:
        """Takes credit for received bytes (BP-10, BP-R5)."""
        entity = self.entity
        if size and (purse.gone or (purse.end_in and purse is not entity)):
            self._break(
                f"{what} of {size} bytes opens {entity!r} after the top-level ended (BP-R5)"
            )
        if size > purse.credit_in:
            self._break(
                f"{what} of {size} bytes for {entity!r}; {purse!r} has credit for "
                f"{purse.credit_in} (BP-10)"
            )
        if entity.partial and what == "an end payload" and size > entity.partial:
            self._above(entity, size)
        purse.credit_in -= size
        if self._budget is not None:
            self._budget.arrived(purse, size)

    def _above(self, entity: Entity, size: int) -> Never:
        self._break(
            f"a piece of {size} bytes for {entity!r}, whose partial payload lacks "
            f"{entity.partial} (BP-16)"
        )

    def _too_large(self, entity: Entity, size: int) -> Never:
        raise LimitExceeded(
            f"a payload of {size} bytes for {entity!r} is above Bpmux.payload_bytes "
            f"({self._settings.payload_bytes}) (BP-R12)"
        )

    def _break(self, text: str) -> Never:
        raise SequenceError(text)
