"""How far a stream of large messages runs ahead: less far where both ends, on one machine, send."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from aqueduct.config import DEFAULT, Config
from aqueduct.endpoint import Connection, Receiver, Sender, channel, connect, serve
from aqueduct.errors import ConfigError
from tests.support.endpoints import TLS, eventually

MiB = 1 << 20
MESSAGES = 24
MEMORY = "memory://ahead"
TCP = "aqueduct+tcp://127.0.0.1:0"
SECURE = "aqueduct+tls://127.0.0.1:0"


async def granted(
    listen: str,
    config: Config = DEFAULT,
    *,
    back: bool = True,
) -> tuple[int, int]:
    """Bytes that streams in use keep of their readers' budgets, all their messages taken.

    Of the service, and of the client, to which messages go ``back`` or not.
    """
    arrived: asyncio.Future[Connection] = asyncio.get_running_loop().create_future()
    tls = TLS if listen == SECURE else None
    async with (
        asyncio.timeout(60),
        await serve(arrived.set_result, listen, tls=tls, config=config) as server,
        await connect(server.addresses[0], config=config) as client,
    ):
        there, thither = channel()
        hither, here = channel()
        await client.entrypoint.send(b"", attachments=[thither, hither])
        service = await arrived
        read, answer = (await service.entrypoint.receive()).attachments
        sending = asyncio.create_task(send(there, here if back else None))
        for index in range(MESSAGES):
            message = await read.handle.receive()
            assert bytes(memoryview(message.payload)[:1]) == bytes([index])
            if back:
                await answer.handle.send(message.payload)
        await sending
        for connection in (client, service):
            await eventually(lambda: connection.snapshot().queued_bytes == 0)  # noqa: B023
        return service.snapshot().receive_budget_used, client.snapshot().receive_budget_used


async def send(sender: Sender, answers: Receiver | None) -> None:
    """Sends messages, one ahead of the answers."""
    for index in range(MESSAGES):
        await sender.send(bytes([index]) * MiB)
        if answers is not None and index:
            await answers.receive()
    if answers is not None:
        await answers.receive()


@pytest.mark.parametrize("listen", [TCP, "aqueduct+tcp://[::1]:0", SECURE])
async def test_what_goes_both_ways_on_the_machine_runs_less_far_ahead(listen: str) -> None:
    ahead = DEFAULT.flow.loopback_read_ahead
    # The last answers come when nothing is sent any more, and one credit goes with them. On a busy
    # machine the service has sent its last answer but one before the last message comes, too.
    found = [await granted(listen) for _ in range(3)]
    assert {used for both in found for used in both} <= {ahead, 2 * ahead}
    assert any(service == ahead for service, _ in found)
    assert 2 * ahead < DEFAULT.flow.read_ahead


@pytest.mark.parametrize("listen", [TCP, SECURE])
async def test_what_goes_one_way_runs_as_far_as_it_may(listen: str) -> None:
    assert await granted(listen, back=False) == (DEFAULT.flow.read_ahead, 0)


async def test_elsewhere_it_runs_as_far_as_it_may(tmp_path: Path) -> None:
    ahead = DEFAULT.flow.read_ahead
    for listen in (MEMORY, f"aqueduct+unix://{tmp_path}/server"):
        assert await granted(listen) == (ahead, ahead)


async def test_the_smaller_of_both_limits_counts() -> None:
    flow = DEFAULT.flow
    config = replace(DEFAULT, flow=replace(flow, loopback_read_ahead=2 * MiB))
    assert (await granted(TCP, config))[0] == 2 * MiB
    config = replace(DEFAULT, flow=replace(flow, loopback_read_ahead=1 << 30))
    assert await granted(TCP, config) == (flow.read_ahead, flow.read_ahead)
    config = replace(DEFAULT, flow=replace(flow, read_ahead=MiB // 2))
    assert await granted(TCP, config) == (MiB // 2, MiB // 2)


def test_none_at_all_is_no_limit() -> None:
    with pytest.raises(ConfigError, match=r"Flow\.loopback_read_ahead is 0"):
        replace(DEFAULT.flow, loopback_read_ahead=0)
