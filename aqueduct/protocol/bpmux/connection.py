"""The face of the core: inputs, commands, outputs."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import takewhile
from typing import Any, TypeAlias

from aqueduct._speedups.base.buffers import GatherList
from aqueduct._speedups.bpmux.chunks import ChunkStep
from aqueduct._speedups.bpmux.entity_receiver import EntityReceiver
from aqueduct._speedups.bpmux.scheduler import Scheduler
from aqueduct.config import Bpmux as Settings
from aqueduct.errors import FrameError, LocalProtocolError, RemoteProtocolError
from aqueduct.protocol.bpmux import events
from aqueduct.protocol.bpmux.budget import CreditBudget
from aqueduct.protocol.bpmux.state import (
    DUPLEX,
    HIGHEST,
    PLACES,
    REQ_IN,
    REQ_OUT,
    SINK_IN,
    SINK_OUT,
    STREAM_IN,
    STREAM_OUT,
    Entity,
    Item,
    State,
)

__all__ = ["Buffer", "Mux", "Taken"]

Buffer: TypeAlias = bytes | bytearray | memoryview
Taken: TypeAlias = tuple[list[bytes | memoryview], int, list[tuple[Entity, int]]]
"""Buffers in wire order, their bytes, and how many bytes of payload are in them of whom."""


class Mux:
    """bpmux/rel over one ordered and reliable stream of bytes: a function of its inputs.

    Both sides are alike. The order of calls: *inputs* (``receive_data``, ``landed``,
    ``receive_eof``, ``handle_deadline``), then ``events_received``, then *commands*, then ``take``
    as long as it gives something and the transport takes it. No call waits, none has a clock:
    ``now`` is in seconds, of any steady clock.

    **Entities.** Requests, sinks (written to) and streams (read from) are objects of class
    ``Entity``, in events and commands. ``entity.user`` is yours. ``top_sink`` and ``top_stream``
    are the top-level context: messages to the peer, and from it. ``find`` looks one up.

    **Credit.** The peer sends on an entity only what ``credit`` has granted, and we what it has:
    ``entity.credit_out`` says how much may leave now. Opening payloads are charged to the top-level
    (BP-R5): grant some of it with ``credit(mux.top_stream, ...)`` at the beginning, or no opening
    chunk carries a byte. A PAYLOAD event names the ``payer`` that it was charged to and the bytes
    to give back when they are consumed: ``consumed(payer, charged)``.

    **Payloads** come as their bytes come (``whole`` with the last piece), or, in a Mux made with
    ``whole=True``, each in one piece, put together up to ``Bpmux.payload_bytes``. Pieces are
    views of
    what was fed, so feed memory that does not change. ``expected`` and ``landed`` let a carrier
    read the rest of a payload straight to its place. End payloads always come in one piece.

    **Sending.** ``write`` queues by reference; what was taken must leave completely, what was not
    can still be dropped (``end(..., drop=True)``). ``take`` gives urgent chunks first
    (acknowledgements, credit, pings and pongs, ends with no payload before them, urgent messages),
    then sinks in turn by bytes, those that were idle first. Opening chunks leave in the order of
    opening, as long as none of them waits for top-level credit: a run of bytes never waits, it
    opens with what there is. A byte that has no credit waits.

    **Ends.** The last event of an entity is ENDED, ACKNOWLEDGED, ABANDONED, or the whole response
    to a request. After the peer's end or its acknowledgement, commands on the entity are without
    effect (the peer may end at any time, before you know). After an end of our own they raise
    LocalProtocolError, as every misuse does, and nothing has changed.

    **Failure.** A violation ends everything: FAILED is the last event, ``error`` what it was,
    nothing more is taken, and what is received or commanded is without effect. Terminate the
    connection.

    ``regrant`` (default: as ``whole``) grants the pieces of an unfinished partial payload back at
    once.

    **Memory.** With ``whole`` and ``regrant``, ``Bpmux.connection_bytes`` bounds received bytes
    that
    were not ``consumed`` and granted credit (BP-R12). Credit that finds no room is granted later.
    ``wait_for`` says which payload the application waits for, so that others cannot take all room.
    """

    def __init__(
        self,
        settings: Settings | None = None,
        *,
        whole: bool = False,
        regrant: bool | None = None,
    ) -> None:
        self.settings = settings or Settings()
        self.error: RemoteProtocolError | None = None
        self._state = State()
        self.top_sink = self._state.top_sink
        self.top_stream = self._state.top_stream
        self._events: list[events.Event] = []
        self.scheduler = Scheduler(self._state, self._events, self.settings)
        """For ``write_out``, which is ``take`` and its way to a socket at once."""
        self.turns = self.scheduler.turns
        """Whose turn it is to send."""
        regrant = whole if regrant is None else regrant
        self._budget: CreditBudget | None = None
        if whole and regrant:
            self._budget = self.scheduler.budget = CreditBudget(
                self.settings.connection_bytes,
                self.settings.payload_bytes,
                self.settings.entities,
                self.top_stream,
                self.turns.give_back,
            )
        self.receiver = EntityReceiver(
            self._state,
            self.scheduler,
            self._events,
            self.settings,
            whole=whole,
            regrant=regrant,
            budget=self._budget,
        )
        """For a ``SocketReader``, which feeds its decoder and takes what is plain."""
        self._next_request = 0
        self._next_sink = 1
        self._chosen = 0
        self._awaited: deque[list[Any]] = deque()

    # Inputs

    def receive_data(self, data: bytes | bytearray | memoryview, most: int = 0) -> None:
        """The next bytes from the peer, in any pieces.

        With ``most`` above zero no more chunks than that are taken: what is ``unread`` is taken
        by ``read_on``, before more is received.
        """
        if self.error is not None:
            return
        try:
            self.receiver.receive(data, most)
        except RemoteProtocolError as error:
            self._fail(error)

    @property
    def unread(self) -> bool:
        """Whether chunks are left of what was received."""
        return self.error is None and self.receiver.unread

    def read_on(self, most: int = 0) -> None:
        """Takes what is ``unread``, or ``most`` chunks of it."""
        if self.unread:
            self.receiver.allowance = most or -1
            self.go_on(ChunkStep.NOTHING)

    def go_on(self, step: int) -> None:
        """Takes what a ``SocketReader`` leaves to the core, from this step of its decoder on."""
        if self.error is not None:
            return
        try:
            self.receiver.go_on(step)
        except RemoteProtocolError as error:
            self._fail(error)

    def expected(self) -> tuple[Entity, int] | None:
        """(entity, bytes): whose payload the next bytes are, and how many of them; else None."""
        return None if self.error is not None else self.receiver.expected()

    def landed(self, size: int) -> None:
        """``size`` bytes of what is ``expected`` were read elsewhere.

        They are not reported, but the end of the payload is: by an empty PAYLOAD with ``whole`` and
        nothing to give back. Give back what landed when it is consumed: to the entity, as with
        pieces (its opening payload: to ``top_stream``, see ``charged_to``).
        """
        if self.error is not None:
            return
        try:
            self.receiver.landed(size)
        except RemoteProtocolError as error:
            self._fail(error)

    @property
    def charged_to(self) -> Entity:
        """Who the payload that is ``expected`` is charged to."""
        return self.receiver.payer

    def receive_eof(self) -> None:
        """The peer's bytes ended. Inside a chunk that is a failure."""
        if self.error is not None:
            return
        try:
            self.receiver.decoder.end()
        except FrameError as error:
            self._fail(error)

    def next_deadline(self) -> float | None:
        """When ``handle_deadline`` is due."""
        awaited = self._awaited
        while awaited and awaited[0][1] is None:
            awaited.popleft()
        return awaited[0][0] if awaited and self.error is None else None

    def handle_deadline(self, now: float) -> None:
        """Reports pings without an answer (BP-R11)."""
        while (deadline := self.next_deadline()) is not None and deadline <= now:
            _, entity, asked = self._awaited.popleft()
            self._events.append((events.PONG_MISSING, entity, asked))

    # Outputs

    def events_received(self) -> list[events.Event]:
        """What happened since the last call, in order; see ``events``."""
        result = self._events[:]
        self._events.clear()
        return result

    @property
    def idle(self) -> bool:
        """Nothing can leave now: ``take`` would be empty."""
        return self.error is not None or self.turns.idle

    def take(self, limit: int) -> Taken:
        """The next chunks: (buffers, bytes of them, [(entity, bytes of payload in them)]).

        About ``limit`` bytes: a chunk's head, or a payload that may not be cut, can exceed it.
        Heads and small buffers are joined, large ones are those that were given.
        """
        if self.error is not None:
            return [], 0, []
        return self.scheduler.take(limit)

    # Commands: opening

    def request(
        self,
        payload: Buffer | Iterable[Buffer] = b"",
        *,
        credit: int = 0,
        total: int = 0,
        identifier: int | None = None,
    ) -> Entity:
        """Opens a request; ``credit`` is for its response. ``total`` as in ``write``."""
        if identifier is None:
            identifier = self._next_request
            while identifier in self._state.maps[REQ_OUT]:
                identifier = (identifier + 1) & HIGHEST
        entity = self._open(REQ_OUT, REQ_OUT, identifier, payload, credit, True, total)
        self._next_request = (identifier + 1) & HIGHEST
        return entity

    def open_sink(
        self,
        payload: Buffer | Iterable[Buffer] | None = None,
        *,
        credit: int = 0,
        whole: bool = False,
        total: int = 0,
        keep: int = 0,
        identifier: int | None = None,
        ended: bool = False,
    ) -> Entity:
        """Opens a sink; ``credit`` is for the payload of an end by the peer.

        The payload is a run of bytes, as much of which leaves with the opening chunk as credit and
        ``Bpmux.opening`` allow, unless ``whole`` or ``total`` says otherwise. ``keep`` bytes of the
        sink's credit stay unspent for the payload of an end. ``ended``: an end without a payload
        follows. Sinks, streams and duplexes count their identifiers 1, 2, 3 ... together, unless
        one is given.
        """
        if identifier is None:
            identifier = self._identifier(SINK_OUT)
        entity = self._open(SINK_OUT, SINK_OUT, identifier, payload, credit, whole, total)
        entity.keep = keep
        if ended:
            entity.add(Item(whole=True, is_end=True))
            entity.ending = True
        return entity

    def open_stream(
        self,
        payload: Buffer | Iterable[Buffer] = b"",
        *,
        credit: int = 0,
        total: int = 0,
        identifier: int | None = None,
    ) -> Entity:
        """Opens a stream, which the peer writes to; ``credit`` is for what it writes."""
        if identifier is None:
            identifier = self._identifier(STREAM_OUT)
        return self._open(STREAM_OUT, STREAM_OUT, identifier, payload, credit, True, total)

    def open_duplex(
        self,
        payload: Buffer | Iterable[Buffer] | None = b"",
        *,
        credit: int = 0,
        total: int = 0,
        identifier: int | None = None,
    ) -> tuple[Entity, Entity]:
        """Opens both at once: (sink to write to, stream to read from), each with its own end.

        ``credit`` is for what the peer writes (BP-R9). With None the opening chunk carries bytes of
        a run that is written to the sink before the chunk is taken, as with ``open_sink``.
        """
        if identifier is None:
            identifier = self._identifier(STREAM_OUT, SINK_OUT)
        self._require_room(SINK_OUT, identifier)
        stream = self._open(STREAM_OUT, DUPLEX, identifier, payload, credit, True, total)
        if payload is None:
            stream.add(Item())
        sink = self._state.add(SINK_OUT, identifier)
        sink.opened = False
        sink.twin, stream.twin = stream, sink
        return sink, stream

    # Commands: sending

    def write(
        self,
        entity: Entity,
        data: Buffer | Iterable[Buffer],
        *,
        whole: bool = False,
        total: int = 0,
        urgent: bool = False,
    ) -> Item | None:
        """Queues bytes on a sink, by reference; they must not change until they were taken.

        Plain, they are a run of bytes that may be cut into payloads anywhere. ``whole``: one
        payload in one chunk, which waits for credit for all of it. ``total``: the beginning of one
        payload of so many bytes, which travels in pieces in Partial mode; following writes without
        options are the rest of it. ``urgent``: a whole payload that goes first and may use kept
        credit. Returns what can be withdrawn, if it is a payload of its own.
        """
        self._require(entity)
        if self._over(entity):
            return None
        item: Item | None = None
        last = entity.items[-1] if entity.items else None
        unfinished = last is not None and last.missing > 0
        if entity.place not in (SINK_OUT, SINK_IN) and not (unfinished and not urgent):
            raise LocalProtocolError(f"write: {entity!r} is not a sink")
        if entity.ending and not (unfinished and last is not None):
            raise LocalProtocolError(f"write: {entity!r} has been ended")
        if last is not None and unfinished and not urgent:
            if whole or total:
                raise LocalProtocolError(
                    f"write: a payload of {entity!r} lacks {last.missing} bytes; they come first"
                )
            self._continue(last, data)
        elif whole or total or urgent:
            item = self._item(data, whole=whole or urgent, total=total, urgent=urgent)
            if urgent:
                self._insert(entity, item)
            else:
                entity.add(item)
        else:
            if last is None or last.whole or last.total or last.is_end:
                last = Item()
                entity.add(last)
            _extend(last.scatter, data)
            if not last.scatter.nbytes:
                entity.items.remove(last)
        self.turns.wake(entity)
        return item

    def withdraw(self, entity: Entity, item: Item) -> bool:
        """Takes back a payload, a response or an end of which no byte has left; whether it could.

        Its memory is let go (BP-R15). After a response or an end the entity may be used again.
        """
        if item.begun or item not in entity.items:
            return False
        entity.items.remove(item)
        if item.is_end or item.is_response:
            entity.ending = False
        self.turns.wake(entity)
        return True

    def take_back(self, entity: Entity) -> bool:
        """Takes back what this side opened, if the peer has heard nothing of it; whether it could.

        Both halves of a Duplex are. The peer never sees it, and nothing is kept (BP-R15).
        """
        if entity.opened or entity.gone or self.error is not None:
            return False
        duplex = entity.twin is not None and entity.open_type != DUPLEX
        self.scheduler.forget(entity.twin if duplex and entity.twin is not None else entity)
        return True

    def message(self, payload: Buffer | Iterable[Buffer], *, urgent: bool = False) -> None:
        """One message on the top-level; it waits for credit as a whole."""
        self.write(self.top_sink, payload, whole=True, urgent=urgent)

    def respond(
        self, entity: Entity, payload: Buffer | Iterable[Buffer] = b"", *, total: int = 0
    ) -> Item | None:
        """Answers a request, which ends it (BP-R7). Returns what can be withdrawn."""
        if entity.place != REQ_IN:
            raise LocalProtocolError(f"respond: {entity!r} is no request of the peer")
        self._require(entity)
        if self._over(entity):
            return None
        if entity.ending:
            raise LocalProtocolError(f"respond: {entity!r} has been answered or ended")
        item = self._item(payload, whole=not total, total=total, is_response=True)
        entity.add(item)
        entity.ending = True
        self.turns.wake(entity)
        return item

    def end(
        self,
        entity: Entity,
        payload: Buffer | Iterable[Buffer] = b"",
        *,
        total: int = 0,
        drop: bool = False,
    ) -> None:
        """Ends: a sink is finished, a stream or a request cancelled, a request of the peer refused.

        What is queued leaves first, or is ``drop``-ped, with an end or a response that waits (an
        unfinished payload in Partial mode still leaves, as nothing else could). A request that is
        dropped before its opening chunk was taken is taken back. On the top-level it is the
        close. A payload waits for credit; ``end_bare`` sends the end without it.
        """
        self._require(entity)
        if self._over(entity):
            return
        begun = entity.items[0] if entity.items and entity.items[0].begun else None
        over = begun is not None and (begun.is_end or begun.is_response)
        if entity.end_out or over or (entity.ending and not drop):
            raise LocalProtocolError(f"end: {entity!r} has been ended")
        before = begun if drop else (entity.items[-1] if entity.items else None)
        if before is not None and before.missing:
            raise LocalProtocolError(f"end: a payload of {entity!r} lacks {before.missing} bytes")
        item = self._item(payload, whole=not total, total=total, is_end=True)
        if drop and entity.place == REQ_OUT and not entity.opened:
            self.scheduler.forget(entity)
            return
        if drop:
            while entity.items and not entity.items[-1].begun:
                entity.items.pop()
        entity.add(item)
        entity.ending = True
        self.turns.wake(entity)

    def end_bare(self) -> None:
        """Ends whose payloads wait for credit leave without them: the connection is to close.

        An end behind a payload that has not left stays: it would say that all was sent (BP-R15).
        """
        for known in self._state.maps:
            for entity in known.values():
                item = entity.items[0] if entity.items else None
                if item is not None and item.is_end and item.whole and item.scatter.nbytes:
                    entity.items[0] = self._item(b"", total=0, whole=True, is_end=True)
                    self.turns.wake(entity)

    def close(self, payload: Buffer | Iterable[Buffer] = b"") -> None:
        """Ends the top-level; messages that wait are dropped. Entities go on (BP-R14)."""
        self.end(self.top_sink, payload, drop=True)

    # Commands: credit and heartbeats

    def credit(self, entity: Entity, size: int) -> None:
        """Lets the peer send ``size`` more bytes on it, as soon as there is room for them."""
        self._require(entity)
        if not 0 <= size <= HIGHEST - entity.credit_in - entity.grant:
            raise LocalProtocolError(f"credit: {size} more bytes for {entity!r} are above 2^64 - 1")
        if entity.end_out:
            raise LocalProtocolError(f"credit: {entity!r} has been ended")
        if self._budget is not None:
            self._budget.give(entity, size, all_room=True)
        else:
            self.turns.give_back(entity, size)

    def consumed(self, entity: Entity, size: int, held: int | None = None) -> None:
        """As ``credit``, and without effect where the peer can use none any more.

        ``held``: bytes that are held no more, if that is another number. It is larger for a payload
        whose pieces were granted back before.
        """
        if self._budget is None:
            self.turns.give_back(entity, size)
            return
        self._budget.consumed(entity, size, size if held is None else held)

    def wait_for(self, entity: Entity) -> None:
        """The application waits for the next payload of it, until ``wait_no_more``.

        For what the peer opens, and for its messages, that is ``top_stream``.
        """
        if self._budget is not None:
            self._budget.wait_for(entity)

    def wait_no_more(self, entity: Entity) -> None:
        """The opposite of ``wait_for``; they come in pairs."""
        if self._budget is not None:
            self._budget.wait_no_more(entity)

    @property
    def held(self) -> int:
        """Received bytes that were not consumed; 0 where they are not counted."""
        return 0 if self._budget is None else self._budget.held

    def ping(self, entity: Entity, now: float) -> None:
        """Asks for a heartbeat: PONG, or PONG_MISSING after ``Bpmux.pong_deadline``."""
        self._require(entity)
        if entity.end_out or entity.ending:
            raise LocalProtocolError(f"ping: {entity!r} has been ended")
        if self._over(entity):
            return
        record = [now + self.settings.pong_deadline, entity, now]
        entity.wait_for_pong(record)
        self._awaited.append(record)
        entity.pings += 1
        self.turns.make_urgent(entity)

    def heartbeat(self, entity: Entity) -> None:
        """Sends a chunk that does nothing; the peer takes it for a pong."""
        self._require(entity)
        if entity.end_out or entity.ending:
            raise LocalProtocolError(f"heartbeat: {entity!r} has been ended")
        if not self._over(entity):
            entity.pongs += 1
            self.turns.make_urgent(entity)

    def drop(self) -> None:
        """The connection is over: drops all that waits, and all references to handles."""
        for known in self._state.maps:
            for entity in known.values():
                entity.drop()
                entity.joined = b""
                entity.user = entity.twin = None
        self.scheduler.drop()
        if self._budget is not None:
            self._budget.drop()
        self._events.clear()

    # Looking

    def find(self, place: int, identifier: int) -> Entity | None:
        """The entity of one of the six maps (``state.SINK_OUT``, ...)."""
        return self._state.maps[place].get(identifier)

    def count(self, place: int) -> int:
        """How many entities one of the six maps has."""
        return len(self._state.maps[place])

    # Within

    def _fail(self, error: RemoteProtocolError) -> None:
        # Its traceback would keep the frames, and with them all that this object refers to.
        self.error = error.with_traceback(None)
        self._events.append((events.FAILED, error))

    def _identifier(self, *places: int) -> int:
        """The next identifier that none of these maps has."""
        chosen = self._next_sink
        while any(chosen in self._state.maps[place] for place in places):
            chosen = chosen % HIGHEST + 1
        self._chosen = chosen
        return chosen

    @property
    def room_for_sinks(self) -> int:
        """How many more sinks may be opened (Bpmux.entities)."""
        return max(0, self.settings.entities - len(self._state.maps[SINK_OUT]))

    def _require_room(self, place: int, identifier: int) -> None:
        known = self._state.maps[place]
        if not 0 <= identifier <= HIGHEST:
            raise LocalProtocolError(f"{identifier} is no identifier; it must have 64 bits")
        if identifier in known or (identifier == 0 and place != REQ_OUT):
            raise LocalProtocolError(f"identifier {identifier} of {PLACES[place]} is in use")
        if len(known) >= self.settings.entities:
            raise LocalProtocolError(
                f"{len(known)} entities of {PLACES[place]} are open; "
                f"Bpmux.entities is {self.settings.entities}"
            )

    def _open(
        self,
        place: int,
        open_type: int,
        identifier: int,
        payload: Buffer | Iterable[Buffer] | None,
        credit: int,
        whole: bool,
        total: int,
    ) -> Entity:
        self._require_room(place, identifier)
        if not 0 <= credit <= HIGHEST:
            raise LocalProtocolError(f"the credit is {credit}; it must be 0 to 2^64 - 1")
        item = None
        if payload is not None:
            item = self._item(payload, whole=whole and not total, total=total)
            top = self.top_sink
            if (whole or total) and (item.scatter.nbytes or total):
                if top.gone or top.ending or top.end_in:
                    raise LocalProtocolError(
                        "the top-level has ended: nothing opens with a payload (BP-R5)"
                    )
            elif not item.scatter.nbytes:
                item = None
        entity = self._state.add(place, identifier)
        entity.opened = False
        entity.open_type = open_type
        entity.grant = credit
        if self._budget is not None:
            entity.grant = self._budget.opening(entity, credit)
        if place != REQ_OUT and identifier == self._chosen:
            self._next_sink = identifier % HIGHEST + 1
        if item is not None:
            entity.add(item)
        self.turns.wake(entity)
        return entity

    def _require(self, entity: Entity) -> None:
        if entity.identifier == 0 and entity.place in (SINK_IN, STREAM_IN):
            raise LocalProtocolError(f"{entity!r} cannot be addressed: 0 is the top-level (BP-R3)")

    def _over(self, entity: Entity) -> bool:
        """Nothing can be sent on it any more, for a reason that the application may not know."""
        return entity.gone or entity.end_in or self.error is not None

    def _item(self, data: Buffer | Iterable[Buffer], *, total: int, **kinds: bool) -> Item:
        if not 0 <= total <= HIGHEST:
            raise LocalProtocolError(f"the total size is {total}; it must be 0 to 2^64 - 1")
        item = Item(total=total, **kinds)
        if total:
            self._continue(item, data)
        else:
            _extend(item.scatter, data)
        return item

    def _continue(self, item: Item, data: Buffer | Iterable[Buffer]) -> None:
        given = GatherList()
        _extend(given, data)
        if given.nbytes > item.missing:
            raise LocalProtocolError(
                f"{given.nbytes} bytes of a payload that lacks {item.missing} of its total size"
            )
        item.missing -= given.nbytes
        item.scatter.extend(given.take(given.nbytes, given.nbytes))

    def _insert(self, entity: Entity, item: Item) -> None:
        """Urgent: before all that is not, and is not begun."""
        before = takewhile(lambda other: other.urgent or other.begun, entity.items)
        entity.add(item, sum(1 for _ in before))


def _extend(scatter: GatherList, data: Buffer | Iterable[Buffer]) -> None:
    if isinstance(data, (bytes, bytearray, memoryview)):
        scatter.append(data)
    else:
        scatter.extend(data)
