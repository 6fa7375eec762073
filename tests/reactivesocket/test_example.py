"""The example of two programs that call each other."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from tests.reactivesocket.pairs import within

ROOT = Path(__file__).parent.parent.parent
EXAMPLE = ROOT / "examples" / "reactive_peers.py"

pytestmark = pytest.mark.checkout


async def start(*arguments: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, str(EXAMPLE), *arguments),
        env={"PYTHONPATH": str(ROOT)},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )


@pytest.mark.parametrize("family", ["tcp", "unix", "ws"])
async def test_a_station_and_its_visitors(family: str, tmp_path: Path) -> None:
    where = f"unix://{tmp_path}/socket" if family == "unix" else f"{family}://127.0.0.1:0"
    station = await start("station", f"reactivesocket+{where}")
    try:
        assert station.stdout is not None
        told = (await within(station.stdout.readline())).decode().split()
        assert told[:2] == ["listening", "at"]
        visitors = [await start("visitor", told[2], number) for number in ("5", "12")]
        for program, number in zip(visitors, (5, 12), strict=True):
            said, complained = await within(program.communicate())
            assert complained == b""
            lines = [f"measurement {each} at the lake" for each in range(number)]
            assert said.decode().splitlines() == lines
        lines = sorted([(await within(station.stdout.readline())).decode() for _ in range(4)])
        assert lines == [
            *["a visitor has left\n"] * 2,
            *["a visitor says: what is b'how are you?'?\n"] * 2,
        ]
    finally:
        station.terminate()
        await within(station.communicate())


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        ((), 2, "the following arguments are required: role, address"),
        (("visitor", "reactivesocket+tcp://127.0.0.1:1", "0"), 2, "say 1 or more"),
        (("visitor", "reactivesocket+tcp://127.0.0.1:1"), 1, "refused"),
        (("station", "aqueduct+tcp://127.0.0.1:1"), 1, "ReactiveSocket is spoken at"),
    ],
    ids=["nothing", "zero", "nobody there", "scheme"],
)
async def test_arguments_that_cannot_be(arguments: tuple[str, ...], code: int, text: str) -> None:
    program = await start(*arguments)
    _, complained = await within(program.communicate())
    assert program.returncode == code
    assert text in complained.decode().splitlines()[-1]
    assert b"Traceback" not in complained
