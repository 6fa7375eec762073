"""What a connection had under way goes with it, at once: over every carrier, whoever ends it."""

from __future__ import annotations

import asyncio
import weakref
from pathlib import Path
from typing import Any

import pytest

from aqueduct import Connection, connect, serve
from aqueduct.config import Config, Timing
from aqueduct.errors import ConnectionLost, SendQueueFull
from tests.support.collector import uncollected
from tests.support.endpoints import TLS, eventually

MiB = 1 << 20
CARRIERS = {
    "tcp": "aqueduct+tcp://127.0.0.1:0",
    "tls": "aqueduct+tls://127.0.0.1:0",
    "quic": "aqueduct://127.0.0.1:0",
    "unix": "aqueduct+unix://",
}
LOST = ConnectionLost("lost for a test")


class Payload(bytearray):
    """Bytes that can be watched."""


@pytest.mark.parametrize("end", ["close", "closed by the peer", "lost", "lost by the peer"])
@pytest.mark.parametrize("carrier", CARRIERS)
async def test_what_was_not_sent_goes_with_the_connection(
    carrier: str, end: str, tmp_path: Path
) -> None:
    """Nobody reads at the other side, so most of it waits here."""
    arrived: asyncio.Future[Connection] = asyncio.get_running_loop().create_future()
    address = CARRIERS[carrier] + (str(tmp_path / "socket") if carrier == "unix" else "")
    server = await serve(arrived.set_result, address, tls=TLS)
    brief = Config(timing=Timing(close_linger=0.5))
    client = await connect(server.addresses[0], config=brief)
    other = await arrived
    payloads: list[weakref.ref[Payload]] = []

    def send() -> None:
        for _ in range(40):
            payload = Payload(MiB)
            payloads.append(weakref.ref(payload))
            try:
                client.entrypoint.send_nowait(payload)
            except SendQueueFull:
                return

    with uncollected():
        send()
        await client.ping()
        assert sum(payload() is not None for payload in payloads) > 10
        if end == "close":
            await client.close()
        elif end == "closed by the peer":
            await other.close()
        else:
            lost = client if end == "lost" else other
            carrier_of_it: Any = lost.carrier
            carrier_of_it.abandon(LOST)
        await eventually(lambda: client.closed)
        await eventually(lambda: not any(payload() is not None for payload in payloads))
    await client.close()
    await server.close()
