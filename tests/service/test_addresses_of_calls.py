"""Calls need message headers, which the control-stream draft does not have: said at once."""

from __future__ import annotations

import pytest

from aqueduct import Client, Service, serve
from aqueduct.errors import ConfigError
from spark_udfs.options import _addresses

DRAFT = "aqueduct+tcp://127.0.0.1:0?dialect=control-streams"


async def test_a_service_does_not_listen_at_an_address_of_the_draft() -> None:
    service = Service("s")
    with pytest.raises(ConfigError, match=r"no message headers.*leave out dialect"):
        async with service.serving(DRAFT):
            raise AssertionError("it listens")


async def test_a_client_does_not_connect_to_an_address_of_the_draft() -> None:
    server = await serve(lambda connection: None, DRAFT)
    try:
        with pytest.raises(ConfigError, match=r"no message headers.*leave out dialect"):
            await Client.connect(server.addresses[0])
        assert server.accepted == 0
    finally:
        await server.close()


def test_spark_refuses_an_address_of_the_draft_on_the_driver() -> None:
    with pytest.raises(ConfigError, match=r"no message headers.*leave out dialect"):
        _addresses(f"aqueduct+tcp://127.0.0.1:1,{DRAFT}")
