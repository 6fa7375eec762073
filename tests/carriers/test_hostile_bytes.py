"""Peers that send on while their connection is being closed put no traceback into the log."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

import aqueduct
from aqueduct.address import Address
from aqueduct.carriers import quic, stream
from aqueduct.config import DEFAULT
from tests.bpmux.pairs import attacked, within
from tests.carriers.chunks import Kind, RawPeer, chunk, varu64
from tests.carriers.users import Recorder

ONE = pa.record_batch({"n": pa.array([1], pa.int64())})
ADDRESSES = {
    "tcp": "aqueduct+tcp://127.0.0.1:0",
    "tls": "aqueduct+tls://127.0.0.1:0",
    "quic": "aqueduct://127.0.0.1:0",
    "unix": "aqueduct+unix://{}",
}
MESSAGE = b"\x04\x00\x00\x00\x07payload"  # number 0
BEGIN = b"\xefP_\xa6`\x0f@\x8eAQUEDUCT\x0b0.0.0-AFTER\x03\x00"  # VERSION, ROUTE_TO the entrypoint
NOISE = random.Random(5).randbytes(100_000)

SEQUENCES = {
    "noise": [NOISE],
    "noise behind a route": [BEGIN + NOISE],
    "a message twice": [BEGIN + MESSAGE + MESSAGE + NOISE],
    "no version": [MESSAGE + NOISE],
    "one bad stream of many": [BEGIN, NOISE[:50], BEGIN + MESSAGE, *[NOISE] * 20],
    "a message of a large size": [BEGIN + MESSAGE[:1] + b"\xff" * 9 + NOISE],
}
GREETING = chunk(Kind.IN_STREAM, 0, credit=1 << 20) + chunk(Kind.IN_SINK, 0, b"\1" + varu64(100))
VIOLATIONS = {
    "no chunk": b"\x60\xf8\x00",
    "a stream out of order": chunk(Kind.OUT_SINK, 9, b"", credit=9),
    "a bad message": chunk(Kind.IN_SINK, 0, b"\2what"),
    "an end of the connection": chunk(Kind.IN_SINK, 0, end=b"\0bye"),
    "noise in a stream": chunk(Kind.OUT_SINK, 1, NOISE[:60], credit=9),
}
ENDS = {
    "a violation": b"\x60\xf8\x00",
    "a close": b"",  # which the other side makes
    "an end": chunk(Kind.IN_SINK, 0, end=b""),
}


@pytest.fixture(autouse=True)
def no_traceback(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    with caplog.at_level(logging.INFO):
        yield
    faults = [
        record for record in caplog.records if record.exc_info or record.levelno >= logging.ERROR
    ]
    assert not faults, faults[0].exc_info


def service() -> aqueduct.Service:
    made = aqueduct.Service("attacked")
    made.handler("echo")(lambda batch: batch)
    return made


@pytest.mark.parametrize("carrier", ADDRESSES)
@pytest.mark.parametrize("name", SEQUENCES)
async def test_streams_that_go_on_behind_a_violation(
    carrier: str, name: str, tmp_path: Path
) -> None:
    place = ADDRESSES[carrier].format(tmp_path / "socket")
    secure = carrier in ("tls", "quic")
    async with service().serving(place, dev_certificate=secure, drain=0) as running:
        address = Address.parse(running.addresses[0])
        connect = quic.connect if carrier == "quic" else stream.connect
        peer = Recorder(await connect(address, DEFAULT), DEFAULT)
        await peer.until(lambda: peer.begun)
        for number, data in enumerate(SEQUENCES[name]):
            peer.carrier.write(number, [data], False)
        peer.carrier.flush()
        for number in range(len(SEQUENCES[name])):
            await asyncio.sleep(0)
            if not peer.lost:
                peer.carrier.write(number, [NOISE], True)
                peer.carrier.flush()
        async with await aqueduct.Client.connect(running.addresses[0]) as client:
            assert await client.call("echo", ONE) == ONE
        peer.carrier.close(0, "the test is over")


@pytest.mark.parametrize("carrier", ["tcp", "unix"])
@pytest.mark.parametrize("name", VIOLATIONS)
async def test_bytes_in_the_same_read_as_a_violation_and_behind_it(
    carrier: str, name: str, tmp_path: Path
) -> None:
    place = ADDRESSES[carrier].format(tmp_path / "socket")
    async with service().serving(place, drain=0) as running:
        address = Address.parse(running.addresses[0])
        host = str(tmp_path / "socket") if carrier == "unix" else ("127.0.0.1", address.port)
        peer = await RawPeer.connect(host)
        more = chunk(Kind.IN_SINK, 0, b"\0datagram") * 1000 + NOISE
        for said in (GREETING + VIOLATIONS[name] + more, more, more):
            try:
                await peer.say(said)
            except OSError:
                break  # the service is gone already
        await peer.until_over()
        peer.close()
        async with await aqueduct.Client.connect(running.addresses[0]) as client:
            assert await client.call("echo", ONE) == ONE


@pytest.mark.parametrize("family", ["tcp", "unix"])
@pytest.mark.parametrize("ends", ENDS)
async def test_chunks_that_go_on_while_bpmux_is_closed(
    family: str, ends: str, tmp_path: Path
) -> None:
    many = chunk(Kind.IN_SINK, 0, b"") * 2000  # more than Bpmux.wake_up at once
    async with attacked(family, tmp_path) as (peer, connection):
        await peer.until(lambda: peer.credit(Kind.IN_STREAM, 0))
        closing = None
        if ends == "a close":
            closing = asyncio.create_task(connection.close())
        try:
            await peer.say(many + ENDS[ends] + many + NOISE)
            await peer.say(many)
        except OSError:
            pass  # the other side is gone already
        await peer.until_over()
        await within(asyncio.ensure_future(connection.wait_closed()))
        if closing is not None:
            await within(closing)
