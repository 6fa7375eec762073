"""What services, streams and clients say of themselves."""

from __future__ import annotations

import pytest

import aqueduct
from aqueduct.client.client import Client
from aqueduct.client.stream_text import stream_text
from aqueduct.errors import HandlerFailed
from tests.support.calls import NUMBERS, connected, numbers, served, serving


def service() -> aqueduct.Service:
    made = aqueduct.Service("words")

    @made.handler("echo")
    async def echo(batches):
        async for batch in batches:
            yield batch

    @made.handler("fails")
    def fails(batches):
        raise RuntimeError("no")
        yield from batches

    @made.table("trips", schema=NUMBERS)
    def trips():
        yield numbers(1)

    return made


async def test_a_service_says_what_it_offers_and_where():
    made = service()
    assert repr(made) == "<Service 'words': handlers 'echo', 'fails'; table 'trips'; not served>"
    async with serving(made, "tcp") as running:
        (address,) = running.addresses
        assert repr(made).endswith(f"table 'trips'; served at {address}>")
        ready = f"<RunningService 'words' at {address}: ready, 0 connections, 0 calls>"
        assert repr(running) == ready
    assert repr(running) == (
        "<RunningService 'words' at no address: not ready, 0 connections, 0 calls>"
    )
    assert repr(made).endswith("not served>")
    for number in range(7):
        made.handler(f"more{number}")(lambda batch: batch)
    assert "'fails', 'more0', 'more1', 'more2' and 4 more; table" in repr(made)
    assert repr(aqueduct.Service("empty")) == "<Service 'empty': not served>"


@pytest.mark.parametrize("several", [False, True])
async def test_a_stream_says_whose_answers_it_has_and_how_it_stands(several):
    made = service()
    async with serving(made, "tcp") as one, serving(made, "tcp") as other:
        places = [*one.addresses, *other.addresses] if several else one.addresses
        async with Client(places, retries=0) as client:
            stream = client.exchange("echo", [numbers(1), numbers(2)], schema=NUMBERS)
            kind = type(stream).__name__
            assert repr(stream).startswith(f"<{kind}") and "open, no answer yet>" in repr(stream)
            await anext(stream)
            assert " of 'echo' at " in repr(stream) and one.addresses[0] in repr(stream)
            assert repr(stream).endswith(": open, last answer to batch 0>")
            assert [batch async for batch in stream] == [numbers(2)]
            assert repr(stream).endswith(": ended, last answer to batch 1>")
            left = client.exchange("echo", [numbers(1)], schema=NUMBERS)
            await left.opened()
            await left.aclose()
            assert ": closed, " in repr(left)
            failing = client.exchange("fails", [numbers(1)], schema=NUMBERS)
            with pytest.raises(HandlerFailed):
                await anext(failing)
            assert repr(failing).endswith(": failed with HandlerFailed, no answer yet>")


async def test_a_stream_of_one_address():
    async with connected(service(), "tcp") as client:
        stream = client.exchange("echo", [numbers(1)], schema=NUMBERS)
        await anext(stream)
        assert repr(stream).startswith("<Stream of 'echo' at ")
        await stream.aclose()


def test_a_stream_of_a_sync_client():
    with served(service(), "tcp") as address, aqueduct.SyncClient(address) as client:
        with client.exchange("echo", [numbers(1)], schema=NUMBERS) as stream:
            assert "open, no answer yet>" in repr(stream)
            assert list(stream) == [numbers(1)]
            assert " of 'echo' at " in repr(stream)
            assert repr(stream).endswith(": ended, last answer to batch 0>")


def test_what_a_peer_chose_is_escaped():
    class Known:
        number, over = 3, False

    assert stream_text(Known(), "a\nb", "host\x1b[31m", None) == (
        "<Known of 'a\\nb' at host\\x1b[31m: open, last answer to batch 3>"
    )
