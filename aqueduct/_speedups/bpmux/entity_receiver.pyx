"""What received chunks do to the entities of bpmux/rel (BP-6 to BP-14, BP-16)."""

cimport cython
from libc.stdint cimport uint64_t

from aqueduct._speedups.bpmux.chunks cimport (
    ACK_END_FLAG,
    CREDIT_FLAG,
    DONE,
    DUPLEX_TYPE,
    END_FLAG,
    END_PIECE,
    HEAD,
    NOTHING,
    PAYLOAD_FLAG,
    PIECE,
    PING_FLAG,
    REST,
    ChunkDecoder,
    type_name,
)
from aqueduct._speedups.bpmux.entities cimport (
    ACKNOWLEDGED_EVENT,
    CREDIT_EVENT,
    ENDED_EVENT,
    OPENED_EVENT,
    PAYLOAD_EVENT,
    PING_EVENT,
    PONG_EVENT,
    REQ_IN_PLACE,
    REQ_OUT_PLACE,
    SINK_IN_PLACE,
    SINK_OUT_PLACE,
    STREAM_IN_PLACE,
    STREAM_OUT_PLACE,
    Entity,
    State,
)
from aqueduct._speedups.bpmux.scheduler cimport Scheduler

from aqueduct.errors import LimitExceeded, SequenceError

__all__ = ["EntityReceiver"]

cdef uint64_t HIGHEST = 0xFFFFFFFFFFFFFFFF

cdef int[7] MIRROR  # the place that a received type names (BP-6)
MIRROR[:] = [
    REQ_IN_PLACE, REQ_OUT_PLACE, STREAM_IN_PLACE, STREAM_OUT_PLACE, SINK_IN_PLACE, SINK_OUT_PLACE,
    SINK_IN_PLACE,  # of a Duplex the half that its opening chunk acts on (BP-R9)
]


@cython.final
@cython.auto_pickle(False)
cdef class EntityReceiver:
    """Reads chunks, changes the state, reports events. A violation is raised; see Mux.

    Of the chunk under way: ``entity`` is whom it is for, and ``payer`` whose credit its payload
    uses. ``allowance``: so many chunks are taken before others have their turn; below zero: any
    number. A chunk above it is ``unread``.
    """

    def __cinit__(
        self,
        State state not None,
        Scheduler scheduler not None,
        list reported not None,
        settings,
        *,
        bint whole,
        bint regrant,
        budget,
    ):
        self.decoder = ChunkDecoder()
        self.allowance = -1
        self.entity = self.payer = state.top_stream
        self.reported = reported
        self._state = state
        self._streams_in = state.maps[STREAM_IN_PLACE]
        self._streams_out = state.maps[STREAM_OUT_PLACE]
        self._sinks_out = state.maps[SINK_OUT_PLACE]
        self._scheduler = scheduler
        self._payload_bytes = settings.payload_bytes
        self._entities = settings.entities
        self._whole = whole
        self._regrant = regrant
        self._budget = budget

    def receive(self, data, int most=0):
        """The next bytes of the connection, or ``most`` chunks of them."""
        self.decoder.push(data)
        self.allowance = most or -1
        self.go_on(NOTHING)

    def go_on(self, int step):
        """Takes this step of the decoder, if it is one, and all that follow.

        It stops before the chunk that is above the ``allowance``.
        """
        if self.unread:
            self.unread, step = False, HEAD
        elif step == NOTHING:
            step = self.run_plain()
        while step != NOTHING:
            if step == HEAD:
                if not self.allowance:
                    self.unread = True
                    return
                self.allowance -= self.allowance > 0
                self._head()
            elif step == PIECE:
                self._piece()
            elif step == DONE:
                self._done()
            elif step == REST:
                self._rest()
            elif step == END_PIECE:
                self.entity.join(self.decoder.data or b"")
            step = self.run_plain()

    def expected(self):
        """Whose payload the next bytes are, and how many of them; None if they are not."""
        if self._whole or not self.decoder.in_payload or not self.decoder.missing:
            return None
        return self.entity, self.decoder.missing

    def landed(self, size):
        """Bytes of the expected payload that were read elsewhere; the last ones are reported."""
        self.decoder.landed_outside(size)
        if not self.decoder.missing:
            if self._last:
                self.reported.append((PAYLOAD_EVENT, self.entity, b"", True, self.payer, 0))
            self._finish_payload()
            if self.run_plain() == DONE:
                self._done()

    # Plain payloads: whole ones for a known stream, with credit, in a chunk with no more. And
    # plain credit.

    cdef int run_plain(self) except -1:
        """Reads on, reports plain payloads, and returns the first step that is not of such."""
        cdef ChunkDecoder decoder = self.decoder
        cdef int step
        while True:
            step = decoder.step()
            if step == PIECE and self.plain:
                self.reported.append((
                    PAYLOAD_EVENT, self.entity, decoder.data, decoder.missing == 0, self.entity,
                    len(decoder.data),
                ))
            elif step == DONE and self.plain:
                self.plain = False
            elif step != HEAD or self.allowance == 0 or not self.plain_head():
                return step
            else:
                self.allowance -= self.allowance > 0

    cdef bint plain_head(self) except -1:
        """Whether the chunk that begins is a plain payload, and if so takes its credit."""
        cdef ChunkDecoder decoder = self.decoder
        cdef Entity entity
        cdef int place
        cdef object found
        if (
            self._whole or decoder.flags != PAYLOAD_FLAG or decoder.total or not decoder.payload
        ):
            return False
        place = MIRROR[decoder.type]
        if place == STREAM_IN_PLACE:
            found = self._streams_in.get(decoder.identifier)
        elif place == STREAM_OUT_PLACE:
            found = self._streams_out.get(decoder.identifier)
        else:
            return False
        if found is None:
            return False
        entity = found
        if entity.end_in or entity.partial or decoder.payload > entity.credit_in:
            return False
        entity.credit_in -= decoder.payload
        self.entity = self.payer = entity
        self._opening = False
        self._last = True
        self.plain = True
        return True

    cdef bint credit_head(self) except -1:
        """Whether the chunk that begins is credit for a sink that we write to, and no more."""
        cdef ChunkDecoder decoder = self.decoder
        cdef object found
        if decoder.flags != CREDIT_FLAG or not decoder.identifier:
            return False
        if MIRROR[decoder.type] != SINK_OUT_PLACE:
            return False
        found = self._sinks_out.get(decoder.identifier)
        if found is None or (<Entity> found).end_in:
            return False
        self.entity = found
        self._opening = False
        return True

    cdef bint credit(self) except -1:
        """At the rest of a chunk: whether it was such credit, which has been taken now.

        It is not reported, as what may leave now does by itself. Credit above 2^64 - 1 is not
        taken: ``_rest`` raises the error.
        """
        cdef ChunkDecoder decoder = self.decoder
        cdef Entity entity = self.entity
        if (
            decoder.flags != CREDIT_FLAG or entity.place != SINK_OUT_PLACE or not entity.identifier
            or decoder.credit > HIGHEST - entity.credit_out
        ):
            return False
        entity.credit_out += decoder.credit
        if entity.items or not entity.opened:
            self._scheduler.turns.wake(entity)
        return True

    # A chunk, from its head to its end.

    cdef int _head(self) except -1:
        cdef ChunkDecoder decoder = self.decoder
        cdef int type = decoder.type, place = MIRROR[type], flags = decoder.flags
        cdef uint64_t size
        cdef bint opening
        cdef Entity entity = (<dict> self._state.maps[place]).get(decoder.identifier)
        self._opening = entity is None
        if entity is None:
            entity = self._create(type, place)
            self.entity = entity
        else:
            self.entity = entity
            self._allow(entity, type)
        if decoder.total:
            self._begin_partial(entity, type, flags & PAYLOAD_FLAG != 0)
        elif entity.partial and flags & (PAYLOAD_FLAG | END_FLAG):
            self._continue_partial(entity, type)
        if flags & PAYLOAD_FLAG:
            size = decoder.payload
            opening = self._opening or entity.opening_in
            self._charge(self._state.top_stream if opening else entity, size, "a payload")
            if entity.partial:
                entity.partial -= size
            elif self._whole and size > self._payload_bytes:
                self._too_large(size)
            self._last = not entity.partial
            if not size:
                if self._last:
                    self._deliver(b"")
                self._finish_payload()
        return 0

    cdef int _piece(self) except -1:
        cdef ChunkDecoder decoder = self.decoder
        cdef object data = decoder.data
        cdef Entity entity = self.entity
        cdef bint whole = decoder.missing == 0 and self._last
        if not self._whole:
            self.reported.append((PAYLOAD_EVENT, entity, data, whole, self.payer, len(data)))
        elif whole and not entity.joined:
            self._deliver(bytes(data))
        else:
            entity.join(data)
            if whole:
                self._deliver(bytes(entity.joined))
                entity.joined = b""
        if decoder.missing == 0:
            self._finish_payload()
        return 0

    cdef int _deliver(self, bytes data) except -1:
        """A payload as a whole; what pieces were given back before is not charged again."""
        cdef Entity entity = self.entity
        cdef uint64_t charged
        if not data and entity.joined:
            data, entity.joined = bytes(entity.joined), b""
        charged = <uint64_t> len(data)
        if self._regrant or not self._whole:
            charged = self.decoder.payload
        self.reported.append((PAYLOAD_EVENT, entity, data, True, self.payer, charged))
        return 0

    cdef int _finish_payload(self) except -1:
        """All bytes of the chunk's payload are here."""
        cdef Entity entity = self.entity
        if self._last:
            if self._budget is not None:
                self._budget.completed(entity)
            entity.opening_in = False
        elif self._regrant:
            self._refund(self.decoder.payload)
        return 0

    cdef int _refund(self, uint64_t size) except -1:
        """Grants the credit of a piece again (BP-R12).

        Without this a payload above the window would never be whole.
        """
        if self._budget is not None:
            self._budget.refund(self.payer, self.entity, size)
        else:
            self._scheduler.turns.give_back(self.payer, size)
        return 0

    cdef int _rest(self) except -1:
        cdef ChunkDecoder decoder = self.decoder
        cdef Entity entity = self.entity
        cdef uint64_t size
        if decoder.flags & CREDIT_FLAG:
            if entity.credit_out > HIGHEST - decoder.credit:
                raise SequenceError(f"credit above 2^64 - 1 for {entity!r} (BP-10)")
            if decoder.credit:
                entity.credit_out += decoder.credit
                self.reported.append((CREDIT_EVENT, entity))
                self._scheduler.credited(entity)
        if decoder.flags & END_FLAG:
            size = decoder.end_payload
            self._charge(
                self._state.top_stream if self._opening else entity, size, "an end payload"
            )
            if entity.partial:
                entity.partial -= size
                if entity.partial and self._regrant:
                    self._refund(size)
            elif size > self._payload_bytes:
                self._too_large(size)
        return 0

    cdef int _done(self) except -1:
        cdef ChunkDecoder decoder = self.decoder
        cdef Entity entity = self.entity
        cdef int flags = decoder.flags
        cdef uint64_t charged
        cdef bytes data
        cdef list ping
        if flags == PAYLOAD_FLAG and entity.place != REQ_OUT_PLACE:
            return 0
        if flags & PING_FLAG:
            self.reported.append((PING_EVENT, entity))
            self._scheduler.answer_ping(entity)
        if flags & END_FLAG and not entity.partial:
            data, entity.joined = bytes(entity.joined), b""
            charged = decoder.end_payload if self._regrant else <uint64_t> len(data)
            self.reported.append((ENDED_EVENT, entity, data, self.payer, charged))
            self._scheduler.peer_ended(entity)
        elif flags & PAYLOAD_FLAG:
            if entity.place == REQ_OUT_PLACE and self._last:
                # A response is an end in every respect (BP-R7).
                self._scheduler.peer_ended(entity)
        elif flags & ACK_END_FLAG:
            self.reported.append((ACKNOWLEDGED_EVENT, entity))
            if self._budget is not None:
                self._budget.closed(entity)
            self._state.remove(entity)
        elif not flags and entity.awaited:
            ping = entity.awaited.popleft()
            ping[1] = None
            self.reported.append((PONG_EVENT, entity, ping[2]))
        return 0

    # What is allowed.

    cdef Entity _create(self, int type, int place):
        """A new entity for a chunk of an unknown identifier (BP-7, BP-8, BP-R4)."""
        cdef ChunkDecoder decoder = self.decoder
        cdef uint64_t identifier = decoder.identifier
        cdef Entity entity, twin
        if place not in (REQ_IN_PLACE, SINK_IN_PLACE, STREAM_IN_PLACE):
            raise SequenceError(
                f"{type_name(type)} {identifier} names nothing that this side has opened "
                "(BP-7, BP-R4)"
            )
        if type == DUPLEX_TYPE and identifier in self._streams_in:
            raise SequenceError(
                f"{type_name(type)} {identifier} is in use for a sink of the peer (BP-8)"
            )
        if not decoder.flags & PAYLOAD_FLAG:
            raise SequenceError(
                f"{type_name(type)} {identifier} is unknown, and opening it needs a payload (BP-8)"
            )
        if len(<dict> self._state.maps[place]) >= self._entities or (
            type == DUPLEX_TYPE and len(self._streams_in) >= self._entities
        ):
            raise LimitExceeded(
                f"{type_name(type)} {identifier} is one above Bpmux.entities "
                f"({self._entities}) (BP-R12)"
            )
        entity = self._state.add(place, identifier)
        if type == DUPLEX_TYPE:
            twin = self._state.add(STREAM_IN_PLACE, identifier)
            entity.twin, twin.twin = twin, entity
        self.reported.append((OPENED_EVENT, entity))
        return entity

    cdef int _allow(self, Entity entity, int type) except -1:
        """A chunk for a known entity (BP-9, BP-12, BP-13, BP-R6)."""
        cdef int flags = self.decoder.flags
        cdef bint more = entity.opening_in and entity.partial_type == type
        if entity.end_in:
            raise SequenceError(f"a chunk for {entity!r}, which its sender has ended (BP-R8)")
        if flags & ACK_END_FLAG and not entity.end_out:
            raise SequenceError(
                f"an acknowledgement for {entity!r}, which has not ended (BP-13)"
            )
        if type == DUPLEX_TYPE and not more:
            raise SequenceError(f"a Duplex for {entity!r}, which is known (BP-9)")
        # We get responses, and messages to read; all others get one payload, with their opening.
        if flags & PAYLOAD_FLAG and not more and entity.place not in (
            REQ_OUT_PLACE, STREAM_OUT_PLACE, STREAM_IN_PLACE
        ):
            raise SequenceError(f"a payload for {entity!r} after its opening (BP-9, BP-R6)")
        return 0

    cdef int _begin_partial(self, Entity entity, int type, bint payload) except -1:
        cdef uint64_t total = self.decoder.total
        if entity.partial:
            raise SequenceError(f"a Partial for {entity!r}, which is in partial mode (BP-R10)")
        if (self._whole or not payload) and total > self._payload_bytes:
            self._too_large(total)
        entity.partial = total
        entity.partial_type = type
        entity.partial_end = not payload
        entity.opening_in = self._opening
        return 0

    cdef int _continue_partial(self, Entity entity, int type) except -1:
        cdef ChunkDecoder decoder = self.decoder
        cdef bint payload = decoder.flags & PAYLOAD_FLAG != 0
        if type != entity.partial_type:
            raise SequenceError(
                f"a piece of a partial payload of {entity!r} comes as {type_name(type)}; it "
                f"began as {type_name(entity.partial_type)} (BP-R10)"
            )
        if payload == entity.partial_end:
            raise SequenceError(
                f"{entity!r} mixes payload and end payload in partial mode (BP-16)"
            )
        if payload:
            if decoder.payload > entity.partial:
                self._above(decoder.payload)
            if decoder.flags & END_FLAG and decoder.payload < entity.partial:
                raise SequenceError(f"an end inside a partial payload of {entity!r} (BP-R10)")
        return 0

    cdef int _charge(self, Entity payer, uint64_t size, str what) except -1:
        """Takes credit for received bytes (BP-10, BP-R5)."""
        cdef Entity entity = self.entity
        self.payer = payer
        if size and (payer.gone or (payer.end_in and payer is not entity)):
            raise SequenceError(
                f"{what} of {size} bytes opens {entity!r} after the top-level ended (BP-R5)"
            )
        if size > payer.credit_in:
            raise SequenceError(
                f"{what} of {size} bytes for {entity!r}; {payer!r} has credit for "
                f"{payer.credit_in} (BP-10)"
            )
        if entity.partial and what == "an end payload" and size > entity.partial:
            self._above(size)
        payer.credit_in -= size
        if self._budget is not None:
            self._budget.arrived(payer, size)
        return 0

    cdef int _above(self, uint64_t size) except -1:
        raise SequenceError(
            f"a piece of {size} bytes for {self.entity!r}, whose partial payload lacks "
            f"{self.entity.partial} (BP-16)"
        )

    cdef int _too_large(self, uint64_t size) except -1:
        raise LimitExceeded(
            f"a payload of {size} bytes for {self.entity!r} is above Bpmux.payload_bytes "
            f"({self._payload_bytes}) (BP-R12)"
        )
