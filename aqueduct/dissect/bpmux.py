"""Chunks of bpmux/rel, in the vocabulary of the test vectors: unset flags are absent."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Final

from aqueduct._speedups.bpmux import chunks as chunk_codec
from aqueduct._speedups.bpmux.chunks import ChunkDecoder, ChunkStep
from aqueduct.dissect.values import Fields, WireError, hex_bytes, kind_of, one_of
from aqueduct.errors import AqueductError

__all__ = ["BpmuxContext", "Chunk", "chunk_to_json", "contexts", "read_chunks"]

PARTIAL: Final = "Partial"
PREVIEW: Final = 32
"""Bytes of a payload that are shown to people."""


def contexts(given: Any) -> list[BpmuxContext]:
    """The one context: both sides speak alike, over one stream of bytes."""
    if not isinstance(given, Mapping):
        raise WireError(f"context must be an object, not {kind_of(given)}")
    return [BpmuxContext()]


class Chunk:
    """One chunk with its payloads; ``total`` above zero: a Partial stands before it."""

    __slots__ = ("credit", "end", "flags", "identifier", "offset", "payload", "total", "type")

    def __init__(self, offset: int, decoder: ChunkDecoder) -> None:
        self.offset = offset
        self.type = decoder.type
        self.flags = decoder.flags
        self.identifier = decoder.identifier
        self.total = decoder.total
        self.credit = 0
        self.payload = b""
        self.end = b""


def read_chunks(data: bytes) -> Iterator[Chunk]:
    """Chunks, through the compiled decoder. Raises WireError behind the last good one."""
    decoder = ChunkDecoder()
    decoder.feed(data)
    chunk: Chunk | None = None
    payload: list[bytes] = []
    end: list[bytes] = []
    offset = 0
    try:
        while (step := decoder.next()) != ChunkStep.NOTHING:
            if step == ChunkStep.HEAD:
                chunk = Chunk(offset, decoder)
            elif step == ChunkStep.PIECE:
                payload.append(bytes(decoder.data or b""))
            elif step == ChunkStep.END_PIECE:
                end.append(bytes(decoder.data or b""))
            elif step == ChunkStep.DONE:
                assert chunk is not None
                chunk.credit = decoder.credit
                chunk.payload, chunk.end = b"".join(payload), b"".join(end)
                payload.clear()
                end.clear()
                yield chunk
                offset = decoder.consumed
        decoder.end()
    except AqueductError as error:
        raise WireError.of(error, offset) from error


class BpmuxContext:
    """The chunks of one direction."""

    single: ClassVar[bool] = False

    def decode(self, data: bytes) -> Iterator[tuple[int, dict[str, Any]]]:
        """Chunks with the offset each begins at. Raises WireError behind the last good one."""
        for chunk in read_chunks(data):
            offset = chunk.offset
            if chunk.total:
                yield offset, {"type": PARTIAL, "total": chunk.total}
                offset += 1 + (chunk.total.bit_length() + 7) // 8
            yield offset, chunk_to_json(chunk)

    def encode(self, value: list[Any]) -> bytes:
        """The bytes of ``value``, checked like bytes that came. Raises WireError."""
        pieces: list[bytes] = []
        total = 0
        for k, given in enumerate(value):
            fields = Fields(given, f"chunk {k}")
            name = one_of(fields.take("type"), chunk_codec.TYPE_NAMES, f"chunk {k}: type")
            fields.where = f"chunk {k} ({name})"
            if total and name == PARTIAL:
                raise WireError(f"{fields.where} follows a Partial (BP-R10)")
            if name == PARTIAL:
                total = fields.number("total")
                if not total:
                    raise WireError(f"{fields.where}: total is zero (BP-16)")
            else:
                pieces.append(_encode_chunk(fields, chunk_codec.TYPE_NAMES.index(name), total))
                total = 0
            fields.end()
        if total:
            raise WireError("nothing follows the last Partial (BP-R10)")
        data = b"".join(pieces)
        try:
            for _ in self.decode(data):
                pass
        except WireError as error:  # whatever is wrong, it is in the value, not cut off
            raise WireError(str(error)) from error
        return data

    def meaning(self, frames: list[dict[str, Any]]) -> Any:
        """No chunk speaks of ranges."""
        return None

    def describe(self, frame: dict[str, Any]) -> list[str]:
        """One line with the fields, and one for each payload."""
        named = [
            f"{name} {value}" for name, value in frame.items() if name in ("id", "total", "credit")
        ]
        named += [name for name in ("ping", "ack_end") if name in frame]
        lines = [f"{frame['type']}  {', '.join(named)}"]
        for name in ("payload", "end"):
            if name in frame:
                data = bytes.fromhex(frame[name])
                more = f" ... ({len(data)} bytes)" if len(data) > PREVIEW else ""
                lines.append(f"{name} {data[:PREVIEW].hex() or '(empty)'}{more}")
        return lines


def chunk_to_json(chunk: Chunk) -> dict[str, Any]:
    """One chunk in the vocabulary of the test vectors, without the Partial before it."""
    result: dict[str, Any] = {"type": chunk_codec.TYPE_NAMES[chunk.type], "id": chunk.identifier}
    if chunk.flags & chunk_codec.PAYLOAD:
        result["payload"] = chunk.payload.hex()
    if chunk.flags & chunk_codec.CREDIT:
        result["credit"] = chunk.credit
    if chunk.flags & chunk_codec.PING:
        result["ping"] = True
    if chunk.flags & chunk_codec.END:
        result["end"] = chunk.end.hex()
    if chunk.flags & chunk_codec.ACK_END:
        result["ack_end"] = True
    return result


def _encode_chunk(fields: Fields, type_: int, total: int) -> bytes:
    identifier = fields.number("id")
    flags = 0
    payload = end = b""
    credit = 0
    if "payload" in fields.left:
        flags |= chunk_codec.PAYLOAD
        payload = hex_bytes(fields.take("payload"), f"{fields.where}: payload")
    if "credit" in fields.left:
        flags |= chunk_codec.CREDIT
        credit = fields.number("credit")
    if "end" in fields.left:
        flags |= chunk_codec.END
        end = hex_bytes(fields.take("end"), f"{fields.where}: end")
    for name, flag in (("ping", chunk_codec.PING), ("ack_end", chunk_codec.ACK_END)):
        given = fields.take(name, False)
        if not isinstance(given, bool):
            raise WireError(f"{fields.where}: {name} must be true or false, not {kind_of(given)}")
        flags |= flag * given
    head = chunk_codec.encode_head(type_, flags, identifier, len(payload), total)
    return head + payload + chunk_codec.encode_rest(flags, credit, len(end)) + end
