"""Sessions of bpmux/rel, played on a real core against a scripted peer.

A case has ``steps``: ["recv", HEX] are bytes of the peer, ["send", HEX] chunks that this side's
application wants sent. ``play`` answers what the core sent back by itself (``acks``, hex) and what
the application got (``delivered``: [map, identifier, "payload" | "end", hex]). A violation by the
peer, and what this side may not send, is an error.
"""

from __future__ import annotations

from typing import Any, Final

from aqueduct._speedups.bpmux.chunks import (
    ACK_END,
    CREDIT,
    END,
    PAYLOAD,
    PING,
    TYPE_NAMES,
    encode_head,
)
from aqueduct.config import Bpmux as Settings
from aqueduct.dissect.bpmux import Chunk, read_chunks
from aqueduct.dissect.values import WireError, hex_bytes, kind_of, list_of, one_of
from aqueduct.errors import AqueductError
from aqueduct.protocol.bpmux import events
from aqueduct.protocol.bpmux.connection import Mux
from aqueduct.protocol.bpmux.state import (
    DUPLEX,
    PLACES,
    REQ_IN,
    REQ_OUT,
    SINK_IN,
    SINK_OUT,
    STREAM_IN,
    STREAM_OUT,
    Entity,
)

__all__ = ["Session", "play"]

_AMPLE: Final = 1 << 60
_SETTINGS: Final = Settings(
    chunk=_AMPLE,
    opening=_AMPLE,
    entities=_AMPLE,
    payload_bytes=_AMPLE,
    unanswered_pings=_AMPLE,
)
"""Limits are an endpoint's policy: here they are off."""


def play(case: Any) -> dict[str, Any]:
    """Plays a case. Raises WireError with the number of the step that breaks a rule."""
    if not isinstance(case, dict):
        raise WireError(f"case must be an object, not {kind_of(case)}")
    session = Session()
    for k, entry in enumerate(list_of(case.get("steps"), "case.steps")):
        where = f"case.steps[{k}]"
        step = list_of(entry, where)
        if len(step) != 2:
            raise WireError(f"{where} has {len(step)} items; it must be [recv | send, hex]")
        what = one_of(step[0], ("recv", "send"), where)
        data = hex_bytes(step[1], f"{where} ({what})")
        try:
            if what == "recv":
                session.receive(data)
            else:
                session.send(data)
        except WireError as error:
            raise WireError(f"{where} ({what}): {error}", error.kind) from error
        except AqueductError as error:
            raise WireError(f"{where} ({what}): {error}") from error
    return {"acks": session.acks.hex(), "delivered": session.delivered}


class Session:
    """One core, driven by the bytes of both directions."""

    def __init__(self) -> None:
        self.mux = Mux(_SETTINGS, whole=True, regrant=False)
        self.acks = b""
        self.delivered: list[list[Any]] = []

    def receive(self, data: bytes) -> None:
        """Bytes of the peer; the core answers at once."""
        self.mux.receive_data(data)
        for event in self.mux.events_received():
            kind = event[0]
            if kind in (events.PAYLOAD, events.ENDED):
                entity = event[1]
                what = "payload" if kind == events.PAYLOAD else "end"
                self.delivered.append(
                    [PLACES[entity.place], entity.identifier, what, event[2].hex()]
                )
        if self.mux.error is not None:
            raise self.mux.error
        sent = b"".join(self.mux.take(_AMPLE)[0])
        for chunk in read_chunks(sent):
            if chunk.flags & ACK_END:
                self.acks += encode_head(chunk.type, chunk.flags, chunk.identifier)

    def send(self, data: bytes) -> None:
        """Chunks by commands of the application; all of it must leave."""
        for chunk in read_chunks(data):
            entity = self._send_chunk(chunk)
            self.mux.take(_AMPLE)
            if entity.queued or not entity.opened:
                raise WireError(
                    f"{entity.queued} bytes for {entity!r} cannot leave: the peer has given "
                    f"credit for {entity.credit_out}"
                )

    def _send_chunk(self, chunk: Chunk) -> Entity:
        name = f"{TYPE_NAMES[chunk.type]} {chunk.identifier}"
        if chunk.flags & ACK_END:
            raise WireError(f"the acknowledgement {name} is sent by the core itself")
        entity = self._find(chunk, name)
        if entity is None:
            return self._open(chunk, name)
        mux = self.mux
        if chunk.flags & CREDIT:
            mux.credit(entity, chunk.credit)
        if chunk.flags & PING:
            mux.ping(entity, 0.0)
        if chunk.flags & PAYLOAD:
            self._send_payload(entity, chunk, name)
        if chunk.flags & END:
            last = entity.items[-1] if entity.items else None
            if last is not None and last.is_end and last.missing:
                if chunk.total:
                    raise WireError(f"{name} is in partial mode already (BP-R10)")
                mux.write(entity, chunk.end)
            else:
                whole = chunk.flags & PAYLOAD or not chunk.total
                mux.end(entity, chunk.end, total=0 if whole else chunk.total)
        if not chunk.flags:
            mux.heartbeat(entity)
        return entity

    def _send_payload(self, entity: Entity, chunk: Chunk, name: str) -> None:
        mux = self.mux
        unfinished = bool(entity.items) and entity.items[-1].missing > 0
        if unfinished:
            if chunk.total or entity.items[-1].is_end:
                raise WireError(f"{name} is in partial mode already (BP-R10)")
            mux.write(entity, chunk.payload)
        elif entity.place == REQ_IN:
            mux.respond(entity, chunk.payload, total=chunk.total)
        else:
            mux.write(entity, chunk.payload, whole=not chunk.total, total=chunk.total)

    def _find(self, chunk: Chunk, name: str) -> Entity | None:
        """The entity that an own chunk speaks of (BP-R2, BP-R3); None: it opens one."""
        type_, identifier = chunk.type, chunk.identifier
        mux = self.mux
        if identifier == 0 and type_ in (SINK_IN, STREAM_IN):
            entity = mux.top_sink if type_ == SINK_IN else mux.top_stream
            if entity.gone:
                raise WireError(f"{name}: the top-level has ended")
            return entity
        if identifier == 0 and type_ in (SINK_OUT, STREAM_OUT):
            raise WireError(f"{name} is never sent (BP-R3)")
        if type_ == DUPLEX:
            half = mux.find(STREAM_OUT, identifier)
            if half is not None and half.open_type == DUPLEX and half.items:
                return half  # pieces of its opening payload
            if half is not None or mux.find(SINK_OUT, identifier) is not None:
                raise WireError(f"{name} is in use (BP-8)")
            return None
        known = mux.find(type_, identifier)
        if known is None and type_ not in (REQ_OUT, SINK_OUT, STREAM_OUT):
            raise WireError(f"{name} names nothing that the peer has opened (BP-7)")
        return known

    def _open(self, chunk: Chunk, name: str) -> Entity:
        if not chunk.flags & PAYLOAD:
            raise WireError(f"{name} is unknown, and opening it needs a payload (BP-8)")
        mux = self.mux
        credit, total, identifier = chunk.credit, chunk.total, chunk.identifier
        if chunk.type == REQ_OUT:
            entity = mux.request(chunk.payload, credit=credit, total=total, identifier=identifier)
        elif chunk.type == SINK_OUT:
            entity = mux.open_sink(
                chunk.payload, credit=credit, total=total, identifier=identifier, whole=True
            )
        elif chunk.type == STREAM_OUT:
            entity = mux.open_stream(
                chunk.payload, credit=credit, total=total, identifier=identifier
            )
        else:
            _, entity = mux.open_duplex(
                chunk.payload, credit=credit, total=total, identifier=identifier
            )
        if chunk.flags & PING:
            mux.ping(entity, 0.0)
        if chunk.flags & END:
            mux.end(entity, chunk.end)
        return entity
