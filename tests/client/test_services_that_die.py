"""Services that are killed during a call, and start again: clients of all their addresses go on."""

from __future__ import annotations

from typing import Any

import pytest

import aqueduct
from tests.support.calls import NUMBERS, numbers
from tests.support.neighbours import Neighbour

QUICK: Any = {"backoff": 0.01, "backoff_limit": 0.05}


@pytest.fixture(scope="module")
def neighbours():
    """Three services in processes of their own."""
    found = [Neighbour() for _ in range(3)]
    for each in found:
        each.launch()
    for each in found:
        each.wait()
    yield found
    for each in found:
        each.kill()


COUNT = 900


def die(neighbours, seen):
    """Kills one of the services now and then, and starts it again."""
    if seen in (100, 300, 500):
        one = neighbours[seen // 200]
        one.kill()
        one.launch()


async def test_services_that_die_and_come_back_lose_and_repeat_nothing(neighbours):
    given = (numbers(n) for n in range(COUNT))
    found: list[int] = []
    places = [each.address for each in neighbours]
    async with aqueduct.Client(places, retries=1000, **QUICK) as client:
        async with client.exchange("square", given, schema=NUMBERS) as stream:
            async for batch in stream:
                assert stream.number == len(found)
                found.append(batch["id"][0].as_py())
                die(neighbours, len(found))
    assert found == [n * n for n in range(COUNT)]


def test_the_same_from_a_thread(neighbours):
    found: list[int] = []
    places = [each.address for each in neighbours]
    with aqueduct.SyncClient(places, retries=1000, **QUICK) as client:
        stream = client.exchange("square", [numbers(n) for n in range(COUNT)], ordered=False)
        for batch in stream:
            assert batch["id"][0].as_py() == stream.number**2
            found.append(stream.number)
            die(neighbours, len(found))
        for n in range(20):  # the last ones may be starting still
            assert client.call("square", numbers(n)) == numbers(n * n)
    assert sorted(found) == list(range(COUNT))
