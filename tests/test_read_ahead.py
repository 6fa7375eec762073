"""How far a stream of large messages runs ahead: less far where both ends share a machine."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from aqueduct.config import DEFAULT, Config
from aqueduct.endpoint import Connection, Sender, channel, connect, serve
from aqueduct.errors import ConfigError
from tests.endpoints import TLS, eventually

MiB = 1 << 20
MEMORY = "memory://ahead"
TCP = "aqueduct+tcp://127.0.0.1:0"
SECURE = "aqueduct+tls://127.0.0.1:0"


async def granted(listen: str, config: Config = DEFAULT) -> int:
    """Bytes that a stream in use keeps of its reader's budget, all its messages taken."""
    arrived: asyncio.Future[Connection] = asyncio.get_running_loop().create_future()
    tls = TLS if listen == SECURE else None
    async with (
        asyncio.timeout(60),
        await serve(arrived.set_result, listen, tls=tls, config=config) as server,
        await connect(server.addresses[0], config=config) as client,
    ):
        sender, receiver = channel()
        await client.entrypoint.send(b"", attachments=[receiver])
        service = await arrived
        (attachment,) = (await service.entrypoint.receive()).attachments
        sending = asyncio.create_task(send(sender))
        for index in range(24):
            message = await attachment.handle.receive()
            assert bytes(memoryview(message.payload)[:1]) == bytes([index])
        await sending
        await eventually(lambda: client.snapshot().queued_bytes == 0)
        return service.snapshot().receive_budget_used


async def send(sender: Sender) -> None:
    for index in range(24):
        await sender.send(bytes([index]) * MiB)


@pytest.mark.parametrize("listen", [TCP, "aqueduct+tcp://[::1]:0", SECURE])
async def test_what_stays_on_the_machine_runs_less_far_ahead(listen: str) -> None:
    assert await granted(listen) == DEFAULT.flow.loopback_read_ahead


async def test_elsewhere_it_runs_as_far_as_it_may(tmp_path: Path) -> None:
    for listen in (MEMORY, f"aqueduct+unix://{tmp_path}/server"):
        assert await granted(listen) == DEFAULT.flow.read_ahead


async def test_the_smaller_of_both_limits_counts() -> None:
    flow = DEFAULT.flow
    config = replace(DEFAULT, flow=replace(flow, loopback_read_ahead=2 * MiB))
    assert await granted(TCP, config) == 2 * MiB
    config = replace(DEFAULT, flow=replace(flow, loopback_read_ahead=1 << 30))
    assert await granted(TCP, config) == flow.read_ahead
    config = replace(DEFAULT, flow=replace(flow, read_ahead=MiB // 2))
    assert await granted(TCP, config) == MiB // 2


def test_none_at_all_is_no_limit() -> None:
    with pytest.raises(ConfigError, match=r"Flow\.loopback_read_ahead is 0"):
        replace(DEFAULT.flow, loopback_read_ahead=0)
