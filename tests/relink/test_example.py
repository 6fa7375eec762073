"""The example of two programs, whose connections are cut all the time."""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path

import pytest

from aqueduct.address import Address
from aqueduct.testing.stream_relay import End, Fate, StreamRelay
from tests.relink.pairs import FAMILIES, within

ROOT = Path(__file__).parent.parent.parent
EXAMPLE = ROOT / "examples" / "relink_batches.py"
COUNT = 40

pytestmark = pytest.mark.checkout


async def start(*arguments: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, str(EXAMPLE), *arguments),
        env={"PYTHONPATH": str(ROOT)},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )


@pytest.mark.parametrize("family", FAMILIES)
async def test_a_producer_and_a_consumer_that_are_cut(family: str, tmp_path: Path) -> None:
    where = f"aqueduct+unix://{tmp_path}/socket" if family == "unix" else None
    consumer = await start("consume", where or "aqueduct+tcp://127.0.0.1:0")
    proxy = StreamRelay(
        up=Fate(limit=2000, end=End.RESET, chop=True), down=Fate(limit=900, end=End.RESET)
    )
    try:
        assert consumer.stdout is not None
        told = (await within(consumer.stdout.readline())).decode().split()
        assert told[:2] == ["listening", "at"]
        address = Address.parse(told[2])
        place = address.path or (address.host, address.port)
        proxied = proxy.start(place, f"{tmp_path}/proxy" if address.path else ("127.0.0.1", 0))
        if isinstance(proxied, str):
            target = f"aqueduct+unix://{proxied}"
        else:
            target = str(address.with_port(proxied[1]))
        producer = await start("produce", target, str(COUNT))
        try:
            said, complained = await within(producer.communicate())
        finally:
            if producer.returncode is None:
                producer.kill()
                await producer.wait()
        assert complained == b""
        times = re.fullmatch(rb"the link was resumed (\d+) times\n", said)
        assert times is not None
        assert int(times[1]) >= 3
        line = (await within(consumer.stdout.readline())).decode()
        total = sum(range(10 * COUNT))
        found = re.fullmatch(rf"{COUNT} batches, {total} in all, (\d+) resumes\n", line)
        assert found is not None, line
        assert int(found[1]) >= 3
    finally:
        proxy.close()
        consumer.terminate()
        await within(consumer.communicate())


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        ((), 2, "the following arguments are required: role, address"),
        (("producer", "aqueduct+tcp://127.0.0.1:1"), 2, "choose from 'consume', 'produce'"),
        (("produce", "aqueduct+tcp://127.0.0.1:1", "0"), 2, "say 1 or more"),
        (("produce", "aqueduct+tcp://127.0.0.1:1", "some"), 2, "say 1 or more"),
        (("produce", "aqueduct+tcp://127.0.0.1:1"), 1, "refused"),
        (("consume", "http://127.0.0.1"), 1, "unknown scheme 'http'"),
    ],
    ids=["nothing", "role", "zero", "word", "nobody there", "scheme"],
)
async def test_arguments_that_cannot_be(arguments: tuple[str, ...], code: int, text: str) -> None:
    program = await start(*arguments)
    _, complained = await within(program.communicate())
    last = complained.decode().splitlines()[-1]
    assert program.returncode == code
    assert text in last.replace("consume, produce", "'consume', 'produce'")  # as of Python 3.12
    assert b"Traceback" not in complained
