"""Chunks of bpmux/rel: every vector, whole, byte by byte, with trailing bytes."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from aqueduct._speedups.bpmux import chunks as chunk_codec
from aqueduct._speedups.bpmux.chunks import ChunkDecoder, ChunkStep
from aqueduct.errors import FrameError, LocalProtocolError

Vector = dict[str, Any]
VECTORS: dict[str, Any] = json.loads(
    (Path(__file__).parent.parent / "vectors" / "bpmux.json").read_text()
)
valid = pytest.mark.parametrize("vector", VECTORS["valid"], ids=lambda vector: vector["name"])
invalid = pytest.mark.parametrize("vector", VECTORS["invalid"], ids=lambda vector: vector["name"])


def read_all(decoder: ChunkDecoder, pieces: list[bytes]) -> list[Vector]:
    """The chunks of these pieces, in the words of the vectors."""
    chunks: list[Vector] = []
    parts = {ChunkStep.PIECE: b"", ChunkStep.END_PIECE: b""}
    for piece in pieces:
        decoder.feed(piece)
        while (step := decoder.next()) != ChunkStep.NOTHING:
            if step in (ChunkStep.PIECE, ChunkStep.END_PIECE):
                assert decoder.data
                parts[step] += decoder.data
            elif step == ChunkStep.DONE:
                if decoder.total:
                    chunks.append({"type": "Partial", "total": decoder.total})
                chunk: Vector = {
                    "type": chunk_codec.TYPE_NAMES[decoder.type],
                    "id": decoder.identifier,
                }
                if decoder.flags & chunk_codec.PAYLOAD:
                    chunk["payload"] = parts[ChunkStep.PIECE].hex()
                    assert decoder.payload == len(parts[ChunkStep.PIECE])
                if decoder.flags & chunk_codec.CREDIT:
                    chunk["credit"] = decoder.credit
                if decoder.flags & chunk_codec.PING:
                    chunk["ping"] = True
                if decoder.flags & chunk_codec.END:
                    chunk["end"] = parts[ChunkStep.END_PIECE].hex()
                    assert decoder.end_payload == len(parts[ChunkStep.END_PIECE])
                if decoder.flags & chunk_codec.ACK_END:
                    chunk["ack_end"] = True
                chunks.append(chunk)
                parts = {ChunkStep.PIECE: b"", ChunkStep.END_PIECE: b""}
    return chunks


def encoded(chunks: list[Vector]) -> bytes:
    """The bytes of chunks in the words of the vectors."""
    out = b""
    total = 0
    for chunk in chunks:
        if chunk["type"] == "Partial":
            total = chunk["total"]
            continue
        payload = bytes.fromhex(chunk.get("payload", ""))
        end = bytes.fromhex(chunk.get("end", ""))
        flags = (
            chunk_codec.PAYLOAD * ("payload" in chunk)
            | chunk_codec.CREDIT * ("credit" in chunk)
            | chunk_codec.PING * ("ping" in chunk)
            | chunk_codec.END * ("end" in chunk)
            | chunk_codec.ACK_END * ("ack_end" in chunk)
        )
        type_ = chunk_codec.TYPE_NAMES.index(chunk["type"])
        out += chunk_codec.encode_head(type_, flags, chunk["id"], len(payload), total) + payload
        out += chunk_codec.encode_rest(flags, chunk.get("credit", 0), len(end)) + end
        total = 0
    return out


@pytest.mark.requirement("BP-1")
@pytest.mark.requirement("BP-2")
@pytest.mark.requirement("BP-3")
@valid
def test_valid_chunks_are_read(vector: Vector) -> None:
    data = bytes.fromhex(vector["hex"])
    for pieces in ([data], [data[at : at + 1] for at in range(len(data))]):
        decoder = ChunkDecoder()
        assert read_all(decoder, pieces) == vector["decoded"]
        decoder.end()
        trailing = bytes.fromhex("6009")
        assert read_all(decoder, [trailing]) == [{"type": "In-Sink", "id": 9}]
    assert read_all(ChunkDecoder(), [data + data]) == vector["decoded"] * 2


@pytest.mark.requirement("BP-1")
@pytest.mark.requirement("BP-3")
@valid
def test_valid_chunks_are_written(vector: Vector) -> None:
    assert encoded(vector["decoded"]).hex() == vector["hex"]


@pytest.mark.requirement("BP-R1")
@invalid
def test_invalid_bytes_are_told(vector: Vector) -> None:
    data = bytes.fromhex(vector["hex"])
    for pieces in ([data], [data[at : at + 1] for at in range(len(data))]):
        decoder = ChunkDecoder()
        with pytest.raises(FrameError) as caught:
            read_all(decoder, pieces)
            decoder.end()
        assert caught.value.truncated == (vector["kind"] == "truncated")
        if vector["kind"] == "malformed":
            calls: list[Callable[[], object]] = [
                decoder.next,
                decoder.end,
                partial(decoder.feed, b"\x60\x09"),
            ]
            for call in calls:
                with pytest.raises(FrameError) as again:
                    call()
                assert again.value is caught.value


@pytest.mark.requirement("BP-R1")
@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "00"),
        (247, "f7"),
        (248, "f8f8"),
        (255, "f8ff"),
        (256, "f90100"),
        ((1 << 56) - 1, "fe" + "ff" * 7),
        ((1 << 64) - 1, "ff" * 9),
    ],
)
def test_numbers_have_one_form(value: int, text: str) -> None:
    assert chunk_codec.encode_varu64(value).hex() == text
    data = bytes.fromhex(text)
    assert chunk_codec.decode_varu64(b"\x07" + data + b"\x00", 1) == (value, 1 + len(data))
    for cut in range(len(data)):
        with pytest.raises(FrameError, match="end inside") as caught:
            chunk_codec.decode_varu64(data[:cut])
        assert caught.value.truncated


@pytest.mark.requirement("BP-R1")
@pytest.mark.parametrize("text", ["f800", "f8f7", "f900ff", "f90000", "ff00ffffffffffffff", "fa00"])
def test_longer_forms_are_refused(text: str) -> None:
    with pytest.raises(FrameError, match="shortest form"):
        chunk_codec.decode_varu64(bytes.fromhex(text))


@pytest.mark.parametrize("value", [-1, 1 << 64])
def test_numbers_outside_64_bits_are_refused(value: int) -> None:
    for call in (
        lambda: chunk_codec.encode_varu64(value),
        lambda: chunk_codec.encode_head(2, 16, value),
        lambda: chunk_codec.encode_head(2, 16, 1, value),
        lambda: chunk_codec.encode_head(2, 16, 1, 0, value),
        lambda: chunk_codec.encode_rest(8, value),
        lambda: chunk_codec.encode_rest(2, 0, value),
    ):
        with pytest.raises(LocalProtocolError, match="must be 0 to"):
            call()
