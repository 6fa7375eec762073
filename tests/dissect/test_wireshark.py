"""Wireshark reads channels and bpmux as ``aqueduct.dissect`` reads the same bytes."""

from __future__ import annotations

import json
import random
import stat
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import aqueduct
from aqueduct.address import Address
from aqueduct.bpmux import connect as connect_bpmux
from aqueduct.bpmux import serve as serve_bpmux
from aqueduct.dissect import answer, bpmux
from aqueduct.dissect.values import WireError
from tests.dissect.captures import Recording, Segment, cut_up, recorded, write_capture
from tests.dissect.wireshark import Seen, expected, frames_of, look
from tests.reference.codec import varint
from tests.support.installed_programs import installed
from tests.support.selection import mostly_long

pytestmark = pytest.mark.checkout

SCHEMA = pa.schema([("n", pa.int64())])
BATCH = pa.record_batch({"n": list(range(8_500))}, schema=SCHEMA)
GREETING = bytes.fromhex("a80000")
"""The first chunk of each side: credit for the top level."""
OUT_SINK, DUPLEX, IN_SINK = "Out-Sink", "Duplex", "In-Sink"
VECTORS = {
    name: json.loads((Path(__file__).parents[1] / "vectors" / f"{name}.json").read_text())
    for name in ("aq", "aq0", "bpmux")
}
PRELUDE: dict[str, list[dict[str, Any]]] = {
    "aq": [{"type": "VERSION"}, {"type": "CONNECTION_HEADERS", "headers": []}],
    "control-streams": [{"type": "Version"}, {"type": "ConnectionControl", "headers": []}],
}

service = aqueduct.Service("echoes")


@service.handler(input=SCHEMA)
async def echo(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch


@pytest.fixture(scope="module")
def tshark() -> str:
    return installed("tshark")


async def record(address: str, batch: pa.RecordBatch = BATCH) -> Recording:
    """What passes between a client and the service."""
    async with service.serving(address, dev_certificate="+tls" in address) as serving:
        served = serving.addresses[0]
        port = Address.parse(served).port
        async with recorded(port) as recording:
            there = served.replace(f":{port}", f":{recording.port}")
            async with await aqueduct.Client.connect(there) as client:
                assert await client.call("echo", batch) == batch
                answers = [each async for each in client.exchange("echo", [batch, batch])]
                assert answers == [batch, batch]
    return recording


def sent(recording: Recording) -> dict[bool, bytes]:
    return {server: recording.sent(server=server) for server in (False, True)}


def assert_alike(seen: Seen, wanted: Seen) -> None:
    assert seen.errors == []
    assert seen.chunks == wanted.chunks
    assert seen.sequences == wanted.sequences
    assert seen.datagrams == wanted.datagrams


async def test_a_call_over_tls_is_read_with_the_keys_that_the_library_writes(
    tshark: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, capture = tmp_path / "keys.txt", tmp_path / "tls.pcap"
    monkeypatch.setenv("SSLKEYLOGFILE", str(keys))
    recording = await record("aqueduct+tls://127.0.0.1:0")
    assert stat.S_IMODE(keys.stat().st_mode) == 0o600
    write_capture(capture, cut_up(recording.segments, 1, 3000))
    assert look(tshark, capture) == {}
    (seen,) = look(tshark, capture, "-o", f"tls.keylog_file:{keys}").values()
    assert seen.errors == []
    names = {frame["type"] for frames in seen.sequences.values() for frame in frames}
    assert names >= {"VERSION", "CONNECTION_HEADERS", "ROUTE_TO", "MESSAGE", "CLOSE_RECEIVER"}
    # Nobody else sees these bytes; they are written again from what was shown.
    for server in (False, True):
        assert_alike_frames(seen, server, encoded("bpmux", seen.chunks[server]))


def assert_alike_frames(seen: Seen, server: bool, data: bytes) -> None:
    wanted = expected({server: data})
    assert seen.chunks[server] == wanted.chunks[server]
    ours = {key: frames for key, frames in seen.sequences.items() if key[0] is server}
    assert ours == wanted.sequences
    assert sum(len(each.get("payload", "")) for frames in ours.values() for each in frames) > 1000


def chunk(kind: str, identifier: int, payload: bytes, *, end: bool = False) -> bytes:
    value = {"type": kind, "id": identifier, "payload": payload.hex()}
    return encoded("bpmux", [{**value, "end": ""} if end else value])


def encoded(protocol: str, value: list[dict[str, Any]], **context: Any) -> bytes:
    request = {"protocol": protocol, "op": "encode", "context": context, "value": value}
    return bytes.fromhex(answer(json.dumps(request))["hex"])


def connection_of(protocol: str, context: dict[str, Any], data: bytes) -> list[Segment] | None:
    """A connection whose stream 9, or whose one datagram, is ``data``; None: there can be none."""
    server = context["from"] == "server"
    carrier = context["carrier"]
    control = protocol == "control-streams"
    opener = {"carrier": "bidi-opener"} if control else {}
    hello = encoded(protocol, PRELUDE[protocol], **{"from": "client"}, **opener)
    segments = [(False, GREETING + chunk(DUPLEX if control else OUT_SINK, 1, hello))]
    if carrier == "datagram":
        last = chunk(IN_SINK, 0, b"\0" + data)
    elif carrier == "bidi-answer":
        first = hello
        if "channel" in context:
            other: dict[str, Any] = {"from": ("server", "client")[server], "carrier": "bidi-opener"}
            opening = bytes([2]) + varint(context["channel"])
            if frames_of(protocol, opening, other)[1] is not None:
                return None  # that side may not open this control stream
            first = opening
        segments.append((not server, chunk(DUPLEX, 9, first)))
        last = chunk(IN_SINK, 9, data, end=True)
    else:
        last = chunk(DUPLEX if carrier == "bidi-opener" else OUT_SINK, 9, data, end=True)
    return [*segments, (server, GREETING + last)]


def test_every_vector_is_read_as_the_dissector_reads_it(tshark: str, tmp_path: Path) -> None:
    """Frames up to what is wrong, and that something is."""
    connections: list[list[Segment]] = []
    cases: list[tuple[str, dict[str, Any], bytes]] = []
    for name, protocol in (("aq", "aq"), ("aq0", "control-streams")):
        for case in VECTORS[name]["valid"] + VECTORS[name]["invalid"]:
            context = {key: each for key, each in case["context"].items() if key != "header_blocks"}
            data = bytes.fromhex(case["hex"])
            connection = connection_of(protocol, context, data)
            if connection is not None:
                cases.append((protocol, context, data))
                connections.append(connection)
    for case in VECTORS["bpmux"]["valid"] + VECTORS["bpmux"]["invalid"]:
        cases.append(("bpmux", {}, bytes.fromhex(case["hex"])))
        connections.append([(False, GREETING + cases[-1][2])])
    assert len(cases) > 180
    capture = tmp_path / "vectors.pcap"
    write_capture(capture, *connections)
    seen = look(tshark, capture)
    for number, (protocol, context, data) in enumerate(cases):
        found = seen[number]
        told = (protocol, context, data.hex(), found.errors)
        if protocol == "bpmux":
            chunks, error = chunks_of(data)
            assert found.chunks[False][1:] == chunks, told
            # Of a chunk that is cut off more could come.
            assert bool(found.errors) is (error is not None and error.kind == "malformed"), told
            continue
        frames, error = frames_of(protocol, data, context)
        server = context["from"] == "server"
        if context["carrier"] == "datagram":
            assert found.datagrams[server] == [frames], told
        else:
            half = "in" if context["carrier"] == "bidi-answer" else "out"
            assert found.sequences.get((server, half, 9), []) == frames, told
        empty = not data and context["carrier"] != "datagram"  # there is no sequence to tell of
        assert bool(found.errors) is (error is not None and not empty), told


def chunks_of(data: bytes) -> tuple[list[dict[str, Any]], WireError | None]:
    found = []
    try:
        for _, each in bpmux.BpmuxContext().decode(data):
            found.append(each)
    except WireError as error:
        return found, error
    return found, None


@pytest.mark.parametrize(
    ("dialect", "passes"),
    mostly_long(
        [
            (dialect, passes)
            for dialect in ("", "?dialect=control-streams")
            for passes in ((), ("-2",))
        ],
        ("", ()),
    ),
    ids=["aq-once", "aq-twice", "control-streams-once", "control-streams-twice"],
)
async def test_a_call_over_tcp_is_read_whatever_segments_it_comes_in(
    tshark: str, tmp_path: Path, dialect: str, passes: tuple[str, ...]
) -> None:
    recording = await record(f"aqueduct+tcp://127.0.0.1:0{dialect}", BATCH.slice(0, 150))
    wanted = expected(sent(recording), control=bool(dialect))
    capture = tmp_path / "tcp.pcap"
    write_capture(capture, *(cut_up(recording.segments, size, size) for size in (15, 20, 1400)))
    seen = look(tshark, capture, *passes)
    assert sorted(seen) == [0, 1, 2]
    for each in seen.values():
        assert_alike(each, wanted)


@pytest.mark.long
async def test_bpmux_alone_is_read_without_channels(tshark: str, tmp_path: Path) -> None:
    async def respond(connection: aqueduct.bpmux.BpmuxConnection) -> None:
        async for opened in connection:
            if isinstance(opened, aqueduct.bpmux.BpmuxRequest):
                await opened.respond(opened.payload.upper())

    async with await serve_bpmux(respond, ("127.0.0.1", 0)) as server:
        async with recorded(int(server.place[1])) as recording:
            async with await connect_bpmux(("127.0.0.1", recording.port)) as connection:
                assert await connection.request(b"hello" * 1000) == b"HELLO" * 1000
    capture = tmp_path / "bpmux.pcap"
    write_capture(capture, cut_up(recording.segments, 1, 500))
    (seen,) = look(tshark, capture).values()
    wanted = expected(sent(recording))
    assert (seen.errors, seen.chunks, seen.sequences) == ([], wanted.chunks, {})


@pytest.mark.long
@pytest.mark.parametrize("dialect", ["", "?dialect=control-streams"])
async def test_wrong_bytes_are_told_and_break_nothing(
    tshark: str, tmp_path: Path, dialect: str
) -> None:
    """What comes before a wrong byte is read as ever. ``look`` sees whether Lua has an error."""
    recording = await record(f"aqueduct+tcp://127.0.0.1:0{dialect}", BATCH.slice(0, 20))
    good = sent(recording)
    chance = random.Random(7)
    connections: list[list[Segment]] = []
    places: list[tuple[bool, int]] = []
    for _ in range(60):
        server = chance.random() < 0.5
        # Most are in the first bytes: behind them payloads are large.
        place = chance.randrange(8, chance.choice([300, len(good[server])]))
        bad = bytearray(good[server])
        bad[place : place + 4] = b"\xff" * len(bad[place : place + 4])
        connections.append(_in_order(recording.segments, {**good, server: bytes(bad)}))
        places.append((server, place))
    capture = tmp_path / "bad.pcap"
    write_capture(capture, *connections)
    seen = look(tshark, capture)
    assert len(seen) == len(connections)
    assert sum(bool(each.errors) for each in seen.values()) > 3
    for number, (server, place) in enumerate(places):
        whole = [each for each, end in _ends(good[server]) if end <= place]
        assert seen[number].chunks[server][: len(whole)] == whole


def _in_order(segments: list[Segment], data: dict[bool, bytes]) -> list[Segment]:
    """These bytes in segments as those were."""
    made = []
    at = {False: 0, True: 0}
    for server, segment in segments:
        made.append((server, data[server][at[server] : at[server] + len(segment)]))
        at[server] += len(segment)
    return made


def _ends(data: bytes) -> list[tuple[dict[str, Any], int]]:
    """Chunks, and the offset at which each ends."""
    found = list(bpmux.BpmuxContext().decode(data))
    ends = [offset for offset, _ in found[1:]] + [len(data)]
    return [(each, end) for (_, each), end in zip(found, ends, strict=True)]
