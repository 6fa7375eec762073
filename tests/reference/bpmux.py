"""bpmux/rel in its plainest form: one endpoint's state, a chunk at a time, nothing is fast.

It follows the text and the resolutions of ``docs/protocols/bpmux.md``, not the core. Chunks are
whole; acknowledgements are sent at once. ``receive`` raises Violation, ``send`` Misuse.
"""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["Chunk", "Endpoint", "Misuse", "Violation", "encode"]

HIGHEST = (1 << 64) - 1
TYPES = (
    *("Out-Request", "In-Request", "Out-Sink", "In-Sink", "Out-Stream", "In-Stream", "Duplex"),
)
MAPS = {
    "Out-Request": ("req_in", "req_out"),
    "In-Request": ("req_out", "req_in"),
    "Out-Sink": ("stream_in", "sink_out"),
    "In-Sink": ("stream_out", "sink_in"),
    "Out-Stream": ("sink_in", "stream_out"),
    "In-Stream": ("sink_out", "stream_in"),
    "Duplex": ("sink_in", "stream_out"),
}
"""Type to the map that it names when received, and when sent."""

CARRY = ("In-Request", "In-Sink", "Out-Sink")
"""Who may carry a payload after the opening."""
ACKS = {
    "Out-Request": "In-Request",
    "In-Request": "Out-Request",
    "Out-Sink": "In-Stream",
    "In-Sink": "Out-Stream",
    "Out-Stream": "In-Sink",
    "In-Stream": "Out-Sink",
    "Duplex": "In-Sink",
}


class Violation(Exception):
    """The peer broke the protocol."""


class Misuse(Exception):
    """This side wants to break it."""


@dataclass
class Chunk:
    """One chunk; None is an unset flag."""

    type: str
    id: int
    payload: bytes | None = None
    credit: int | None = None
    ping: bool = False
    end: bytes | None = None
    ack: bool = False
    total: int = 0

    @property
    def empty(self) -> bool:
        return (self.payload, self.credit, self.end) == (None, None, None) and not self.ping


@dataclass
class Entity:
    credit_out: int = 0
    credit_in: int = 0
    end_out: bool = False
    partial: int = 0
    pieces: list[bytes] = field(default_factory=list)
    partial_type: str = ""
    partial_end: bool = False
    opening: bool = False


def varu64(number: int) -> bytes:
    if number < 248:
        return bytes([number])
    size = (number.bit_length() + 7) // 8
    return bytes([247 + size]) + number.to_bytes(size, "big")


def encode(chunk: Chunk) -> bytes:
    """A chunk as bytes, whatever it says."""
    out = b""
    if chunk.total:
        size = (chunk.total.bit_length() + 7) // 8
        out += bytes([0xE0 | size - 1]) + chunk.total.to_bytes(size, "big")
    flags = (
        16 * (chunk.payload is not None)
        + 8 * (chunk.credit is not None)
        + 4 * chunk.ping
        + 2 * (chunk.end is not None)
        + chunk.ack
    )
    out += bytes([TYPES.index(chunk.type) << 5 | flags]) + varu64(chunk.id)
    if chunk.payload is not None:
        out += varu64(len(chunk.payload)) + chunk.payload
    if chunk.credit is not None:
        out += varu64(chunk.credit)
    if chunk.end is not None:
        out += varu64(len(chunk.end)) + chunk.end
    return out


class Endpoint:
    """The state of one side, what its application got, and what it acknowledged."""

    def __init__(self) -> None:
        names = ("req_out", "req_in", "sink_out", "sink_in", "stream_out", "stream_in")
        self.maps: dict[str, dict[int, Entity]] = {name: {} for name in names}
        self.maps["sink_out"][0] = Entity()
        self.maps["stream_out"][0] = Entity()
        self.delivered: list[tuple[str, int, str, bytes]] = []
        self.acks: list[Chunk] = []

    # Receiving

    def receive(self, chunk: Chunk) -> None:
        self._check_form(chunk, Violation)
        place = MAPS[chunk.type][0]
        opening = chunk.id not in self.maps[place]
        if opening:
            self._create(chunk, place)
        entity = self.maps[place][chunk.id]
        partial = entity.partial > 0
        first = chunk.total > 0
        piece = partial and (chunk.payload is not None or chunk.end is not None)
        if not opening:
            if chunk.type == "Duplex" and not (piece and entity.partial_type == "Duplex"):
                raise Violation("a known Duplex")
            again = piece and entity.opening and entity.partial_type == chunk.type
            if chunk.payload is not None and not again and chunk.type not in CARRY:
                raise Violation("a payload after the opening")
        if first:
            if partial:
                raise Violation("partial mode already")
            entity.partial = chunk.total
            entity.partial_type = chunk.type
            entity.partial_end = chunk.payload is None
            entity.opening = opening
        elif piece:
            if chunk.type != entity.partial_type:
                raise Violation("another type")
            if (chunk.payload is None) != entity.partial_end:
                raise Violation("payload and end payload are mixed")
        responds = self._receive_payload(chunk, place, entity, opening)
        if chunk.credit is not None:
            if entity.credit_out + chunk.credit > HIGHEST:
                raise Violation("too much credit")
            entity.credit_out += chunk.credit
        ends = self._receive_end(chunk, place, entity, opening)
        if ends or responds:
            del self.maps[place][chunk.id]
            if not entity.end_out:
                self.acks.append(self._ack_for(chunk))
        if chunk.ack:
            if not entity.end_out:
                raise Violation("an acknowledgement of nothing")
            del self.maps[place][chunk.id]

    def _receive_payload(self, chunk: Chunk, place: str, entity: Entity, opening: bool) -> bool:
        """Whether it was a response, whole."""
        if chunk.payload is None:
            return False
        self._charge(entity, len(chunk.payload), opening or entity.opening)
        if entity.partial:
            if len(chunk.payload) > entity.partial:
                raise Violation("above the total size")
            entity.partial -= len(chunk.payload)
            entity.pieces.append(chunk.payload)
            if entity.partial:
                if chunk.end is not None:
                    raise Violation("an end inside a payload")
                return False
            entity.opening = False
            self.delivered.append((place, chunk.id, "payload", b"".join(entity.pieces)))
            entity.pieces.clear()
        else:
            self.delivered.append((place, chunk.id, "payload", chunk.payload))
        return chunk.type == "In-Request"

    def _receive_end(self, chunk: Chunk, place: str, entity: Entity, opening: bool) -> bool:
        """Whether the end is whole."""
        if chunk.end is None:
            return False
        self._charge(entity, len(chunk.end), opening)
        if entity.partial:
            if len(chunk.end) > entity.partial:
                raise Violation("above the total size")
            entity.partial -= len(chunk.end)
            entity.pieces.append(chunk.end)
            if entity.partial:
                return False
            self.delivered.append((place, chunk.id, "end", b"".join(entity.pieces)))
        else:
            self.delivered.append((place, chunk.id, "end", chunk.end))
        return True

    def _create(self, chunk: Chunk, place: str) -> None:
        if chunk.type in ("In-Request", "In-Sink", "In-Stream"):
            raise Violation("an in-entity is unknown")
        if chunk.type == "Duplex" and chunk.id in self.maps["stream_in"]:
            raise Violation("in use")
        if chunk.payload is None:
            raise Violation("opening without a payload")
        self.maps[place][chunk.id] = Entity()
        if chunk.type == "Duplex":
            self.maps["stream_in"][chunk.id] = Entity()

    def _charge(self, entity: Entity, size: int, opening: bool) -> None:
        purse = self.maps["stream_out"].get(0) if opening else entity
        if size and (purse is None or size > purse.credit_in):
            raise Violation("more than the credit")
        if purse is not None:
            purse.credit_in -= size

    def _ack_for(self, chunk: Chunk) -> Chunk:
        if chunk.id == 0 and chunk.type in ("In-Sink", "In-Stream"):
            return Chunk("In-Stream" if chunk.type == "In-Sink" else "In-Sink", 0, ack=True)
        return Chunk(ACKS[chunk.type], chunk.id, ack=True)

    # Sending

    def send(self, chunk: Chunk) -> None:
        """A chunk of the application, without Partial mode."""
        self._check_form(chunk, Misuse)
        if chunk.ack or chunk.total:
            raise Misuse("not the application's")
        place = MAPS[chunk.type][1]
        if chunk.id == 0 and chunk.type in ("In-Sink", "In-Stream"):
            place = "sink_out" if chunk.type == "In-Sink" else "stream_out"
        elif chunk.id == 0 and chunk.type in ("Out-Sink", "Out-Stream", "Duplex"):
            raise Misuse("never sent")
        entity = self.maps[place].get(chunk.id)
        opening = entity is None
        if entity is None:
            if chunk.type not in ("Out-Request", "Out-Sink", "Out-Stream", "Duplex"):
                raise Misuse("unknown")
            if chunk.type == "Duplex" and chunk.id in self.maps["sink_out"]:
                raise Misuse("in use")
            if chunk.payload is None:
                raise Misuse("opening without a payload")
            entity = self.maps[place][chunk.id] = Entity()
            if chunk.type == "Duplex":
                self.maps["sink_out"][chunk.id] = Entity()
        else:
            if entity.end_out:
                raise Misuse("after our end")
            if chunk.type == "Duplex":
                raise Misuse("a known Duplex")
            if chunk.payload is not None and chunk.type not in CARRY:
                raise Misuse("a payload after the opening")
        top = self.maps["sink_out"].get(0)
        purse = top if opening else entity
        usable = 0 if purse is None or (opening and purse.end_out) else purse.credit_out
        size = len(chunk.payload or b"") + len(chunk.end or b"")
        if size > usable:
            raise Misuse("more than the credit")
        if purse is not None:
            purse.credit_out -= size
        if chunk.credit is not None:
            if entity.credit_in + chunk.credit > HIGHEST:
                raise Misuse("too much credit")
            entity.credit_in += chunk.credit
        if chunk.end is not None or (chunk.payload is not None and chunk.type == "In-Request"):
            entity.end_out = True

    # Both

    def _check_form(self, chunk: Chunk, error: type[Violation | Misuse]) -> None:
        """What no chunk may say, whatever the state."""
        if chunk.ack and not chunk.empty:
            raise error("ack-end stands alone")
        if chunk.type == "In-Request" and chunk.payload is not None and chunk.end is not None:
            raise error("a response with an end")
        if chunk.type == "In-Stream" and chunk.payload is not None:
            raise error("a payload on In-Stream")
        if chunk.type == "Duplex" and chunk.payload is None:
            raise error("a Duplex without a payload")
        if chunk.type == "Duplex" and chunk.id == 0:
            raise error("Duplex 0 (BP-R13)")
        if chunk.total:
            first = chunk.end if chunk.payload is None else chunk.payload
            if first is None:
                raise error("a Partial before nothing")
            if len(first) > chunk.total:
                raise error("above the total size")
            if chunk.payload is not None and chunk.end is not None and len(first) < chunk.total:
                raise error("an end inside a payload")
