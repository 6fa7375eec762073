"""Where programs meet: addresses, files of sockets, handlers, and the example of two processes."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from aqueduct.bpmux import BpmuxConnection, connect, serve
from aqueduct.config import DEFAULT
from aqueduct.errors import ConfigError, ConnectFailed, ConnectionLost
from tests.bpmux.pairs import FAMILIES, answering, eventually, joined, place_for

ROOT = Path(__file__).parent.parent.parent
EXAMPLE = ROOT / "examples" / "bpmux_calls.py"


async def test_connecting_fails_where_no_server_listens(tmp_path: Path) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        with pytest.raises(ConnectFailed, match="refused"):
            await connect(unused.getsockname())
    with pytest.raises(ConnectFailed, match="No such file"):
        await connect(tmp_path / "nobody")
    with pytest.raises(ConnectFailed):
        await connect(tmp_path / ("x" * 200))


async def test_no_answer_in_time() -> None:
    """A backlog that is full: the kernel lets the handshake wait."""
    config = replace(DEFAULT, timing=replace(DEFAULT.timing, connect_timeout=0.2))
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen(0)
        place = busy.getsockname()
        with socket.socket() as first, socket.socket() as second:
            for sock in (first, second):
                sock.setblocking(False)
                sock.connect_ex(place)
            with pytest.raises(ConnectFailed, match="connect_timeout"):
                await connect(place, config=config)


async def test_the_file_of_a_socket(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(path))
    async with await serve(answering, path) as server:
        assert path.stat().st_mode & 0o777 == 0o600
        assert server.place == str(path)
        with pytest.raises(ConfigError, match="listen"):
            await serve(answering, path)
        async with await connect(path) as client:
            assert await client.request(b"a") == b"A"
    assert not path.exists()


async def test_ipv6_and_its_name() -> None:
    async with await serve(answering, ("::1", 0)) as server:
        async with await connect(server.place) as client:
            assert client.peer.startswith("[::1]:")
            assert await client.request(b"a") == b"A"
            (connection,) = server.connections
            assert connection.peer.startswith("[::1]:")
            assert "[::1]" in repr(connection)


@pytest.mark.parametrize("family", FAMILIES)
async def test_a_handler_that_fails_ends_its_connection_alone(
    family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def handler(connection: BpmuxConnection) -> None:
        if await connection.receive() == b"bad":
            raise ValueError("a fault")
        await connection.send(b"good")

    async with await serve(handler, place_for(family, tmp_path)) as server:
        async with await connect(server.place) as one, await connect(server.place) as two:
            await one.send(b"bad")
            with pytest.raises(ConnectionLost) as caught:
                await one.receive()
            assert caught.value.reason == "the handler failed"
            await two.send(b"fine")
            assert await two.receive() == b"good"
            with pytest.raises(ConnectionLost):
                await two.receive()  # the handler returned
        await eventually(lambda: not server.connections)
    assert "a fault" in caplog.text


@pytest.mark.parametrize("family", FAMILIES)
async def test_a_server_that_closes_takes_its_connections_along(
    family: str, tmp_path: Path
) -> None:
    async with joined(family, tmp_path) as pair:
        waiting = asyncio.create_task(pair.client.accept())
        await asyncio.sleep(0)
        await pair.listener.close(b"closing time")
        with pytest.raises(ConnectionLost, match="closing time"):
            await waiting
        with pytest.raises(ConnectFailed):
            await connect(pair.listener.place)


@pytest.mark.checkout
@pytest.mark.parametrize("family", FAMILIES)
def test_two_programs_call_each_other(family: str, tmp_path: Path) -> None:
    where = str(tmp_path / "socket") if family == "unix" else "127.0.0.1:0"
    command = [sys.executable, str(EXAMPLE)]
    environment = {"PYTHONPATH": str(ROOT)}
    listener = subprocess.Popen(
        [*command, "listen", where], env=environment, stdout=subprocess.PIPE, text=True
    )
    try:
        assert listener.stdout is not None
        told = listener.stdout.readline().split()
        assert told[:2] == ["listening", "at"]
        dialer = subprocess.run(
            [*command, "dial", told[2]],
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert dialer.stderr == ""
        assert dialer.stdout.splitlines() == [
            "it is called listener",
            "it shouts TWO AT ONCE",
            "it counts 0 1 2",
            "it mirrors rorrim",
        ]
        assert listener.stdout.readline() == "dialer is here\n"
        assert "closed the connection: done" in listener.stdout.readline()
    finally:
        listener.terminate()
        listener.wait(30)
        if listener.stdout is not None:
            listener.stdout.close()
