"""``aqueduct top`` against the admin port of a service that runs."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

import aqueduct
from aqueduct.cli import main
from aqueduct.client.loop_thread import LoopThread
from tests.support.calls import NUMBERS, address_of, numbers

HOST = "127.0.0.1"


@pytest.fixture(scope="module")
def running() -> Iterator[tuple[str, str]]:
    """The address for clients and that of the admin port."""
    service = aqueduct.Service("busy")

    @service.handler("echo", input=NUMBERS)
    async def echo(batches):
        async for batch in batches:
            yield batch
            await asyncio.Event().wait()

    thread = LoopThread("test-service")
    context = service.serving(address_of("unix"), drain=0, admin=f"{HOST}:0")
    try:
        serving = thread.run(context.__aenter__())
        try:
            yield serving.addresses[0], serving.admin_addresses[0]
        finally:
            thread.run(context.__aexit__(None, None, None))
    finally:
        thread.stop()


def test_it_shows_the_service_its_handlers_and_its_calls(running, capsys):
    address, admin = running
    with aqueduct.SyncClient(address) as client:
        stream = client.exchange("echo", [numbers(1)], schema=NUMBERS)
        with stream:
            assert next(stream).num_rows == 1
            assert main(["top", admin, "--count", "2", "--interval", "0.01"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("busy  aqueduct-arrow ") == 2 and "serving, ready" in shown
    assert "calls 1 of " in shown
    lines = [line.split() for line in shown.splitlines()]
    assert any(line[:2] == ["echo", "1"] for line in lines)
    assert any(line[:1] == ["echo"] and "running" in line for line in lines)
    assert "unix" in shown
