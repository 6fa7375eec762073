"""Calls go to addresses of either dialect, also where one listener serves both."""

from __future__ import annotations

import pytest

import aqueduct
from aqueduct import Client, Service
from aqueduct.errors import ConfigError
from spark_udfs.options import _addresses
from tests.support.calls import DRAFT, numbers

TCP = "aqueduct+tcp://127.0.0.1:0"


async def test_a_listener_serves_calls_of_both_dialects() -> None:
    service = Service("s")
    service.handler("echo")(lambda batch: batch)
    async with service.serving(TCP + DRAFT, drain=0) as running:
        (address,) = running.addresses
        assert address.endswith(DRAFT)
        for text in (address, address.removesuffix(DRAFT)):
            async with await Client.connect(text) as client:
                assert client.connection.carrier.bidi == (text == address)
                assert await client.call("echo", numbers(1)) == numbers(1)
                assert [batch async for batch in client.exchange("echo", [numbers(2)])] == [
                    numbers(2)
                ]


async def test_a_client_refuses_plain_channels_of_the_draft() -> None:
    service = Service("s")
    service.handler("echo")(lambda batch: batch)
    async with service.serving(TCP + DRAFT, drain=0) as running:
        async with await aqueduct.connect(running.addresses[0]) as connection:
            with pytest.raises(ConfigError, match="has plain channels of the control-stream draft"):
                Client(connection)


def test_spark_takes_an_address_of_the_draft() -> None:
    text = f"aqueduct+tcp://127.0.0.1:1,{TCP}{DRAFT}"
    assert _addresses(text) == tuple(text.split(","))


async def test_a_connection_of_the_draft_is_not_resumed() -> None:
    address = f"{TCP}{DRAFT}&resume=60s"
    with pytest.raises(ConfigError, match="leave out one of resume and dialect"):
        await Client.connect(address)
    with pytest.raises(ConfigError, match="leave out one of resume and dialect"):
        async with Service("s").serving(address):
            raise AssertionError("it listens")
    with pytest.raises(ConfigError, match="leave out one of resume and dialect"):
        _addresses(address)
