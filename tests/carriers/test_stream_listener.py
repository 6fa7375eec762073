"""Listening on byte streams: ports and socket files, crowds at the door, and what is left after."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import resource
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from aqueduct.address import Address
from aqueduct.carriers import stream
from aqueduct.config import DEFAULT, ByteStream, Config
from aqueduct.errors import ConfigError, ConnectFailed
from tests.carriers.test_stream_connect import Start, connected, start
from tests.carriers.users import DEADLINE, OVER, met, timing

__all__ = ["start"]


def few(half_open: int, timeout: float = 10.0) -> Config:
    """So many places, which silence alone does not free."""
    return dataclasses.replace(
        timing(connect_timeout=timeout, handshake_silence=DEADLINE),
        byte_stream=ByteStream(half_open=half_open),
    )


def place_of(listener: stream.StreamListener) -> tuple[str, int]:
    return "127.0.0.1", Address.parse(listener.addresses[0]).port


@contextlib.contextmanager
def nobody() -> Iterator[None]:
    """A user without rights to anything, for as long as the block runs."""
    if os.geteuid():
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


# Ports


async def test_a_free_port_is_told(start: Start) -> None:
    listener = await start("aqueduct+tcp://127.0.0.1:0")
    (address,) = listener.addresses
    assert Address.parse(address).port > 0
    assert await connected(address) == f"127.0.0.1:{Address.parse(address).port}"


async def test_a_port_that_is_taken(start: Start) -> None:
    listener = await start("aqueduct+tcp://127.0.0.1:0")
    with pytest.raises(ConfigError, match=r"cannot be listened at: 127\.0\.0\.1:.*in use"):
        await start(listener.addresses[0])


async def test_a_name_that_does_not_resolve(start: Start) -> None:
    with pytest.raises(ConfigError, match=r"'no-such-host\.invalid' does not resolve"):
        await start("aqueduct+tcp://no-such-host.invalid:0")


async def test_every_address_takes_both_families(start: Start) -> None:
    listener = await start("aqueduct+tcp://[::]:0")
    port = Address.parse(listener.addresses[0]).port
    assert await connected(f"aqueduct+tcp://127.0.0.1:{port}") == f"127.0.0.1:{port}"
    assert await connected(f"aqueduct+tcp://[::1]:{port}") == f"[::1]:{port}"


async def test_a_port_can_be_had_again_at_once(start: Start) -> None:
    listener = await start("aqueduct+tcp://127.0.0.1:0")
    address = listener.addresses[0]
    carrier = await stream.connect(Address.parse(address), DEFAULT)
    listener.close()
    await start(address)  # while a connection of the one before is open
    await connected(address)
    carrier.abandon(OVER)


async def test_copies_share_a_port(tmp_path: Path) -> None:
    for text in ("aqueduct+tcp://127.0.0.1:0", f"aqueduct+unix://{tmp_path}/shared"):
        first, second = await stream.bind(Address.parse(text), 2)
        assert first.address == second.address
        assert len(first.sockets) == len(second.sockets) == 1
        assert first.sockets[0].getsockname() == second.sockets[0].getsockname()
        taken: list[object] = []
        for bound in (first, second):
            # The one that goes on answers, when the other has gone.
            listener = await stream.listen(
                bound.address, DEFAULT, None, taken.append, sockets=bound.sockets
            )
            carrier = await stream.connect(bound.address, DEFAULT)
            await met(lambda: taken)  # noqa: B023
            carrier.abandon(OVER)
            listener.close()
            taken.pop().abandon(OVER)  # type: ignore[attr-defined]
            await asyncio.wait_for(listener.wait_closed(), DEADLINE)
        if first.address.path:
            assert os.path.exists(first.address.path)  # noqa: ASYNC240 - who has bound it removes it
        with pytest.raises(ConnectFailed):
            await stream.connect(first.address, DEFAULT)


# Socket files


def mode_of(path: Path) -> int:
    found = os.stat(path)
    assert stat.S_ISSOCK(found.st_mode)
    return stat.S_IMODE(found.st_mode)


@pytest.mark.parametrize(("option", "mode"), [("", 0o600), ("?mode=0666", 0o666)])
async def test_the_rights_of_a_socket_file(
    start: Start, tmp_path: Path, option: str, mode: int
) -> None:
    path = tmp_path / "a b"
    listener = await start(f"aqueduct+unix://{tmp_path}/a%20b{option}")
    assert mode_of(path) == mode
    assert listener.addresses == (f"aqueduct+unix://{tmp_path}/a%20b",)
    await connected(listener.addresses[0])
    listener.close()
    assert not path.exists()


def let_in(path: Path) -> None:
    """Everybody may enter the directories of this test."""
    for part in (path, *path.parents):
        if "pytest" in part.name:
            part.chmod(0o755)


async def test_who_has_no_right_to_a_socket_file(start: Start, tmp_path: Path) -> None:
    let_in(tmp_path)
    listener = await start(f"aqueduct+unix://{tmp_path}/mine")
    os.chmod(tmp_path / "mine", 0o400 if os.geteuid() else 0o600)
    with nobody(), pytest.raises(ConnectFailed, match=r"not permitted: this user \(uid \d+\)"):
        await stream.connect(Address.parse(listener.addresses[0]), DEFAULT)
    os.chmod(tmp_path, 0o555)
    with nobody(), pytest.raises(ConfigError, match="may not make a socket in"):
        await start(f"aqueduct+unix://{tmp_path}/other")
    os.chmod(tmp_path, 0o755)


async def test_a_file_left_behind_is_replaced(start: Start, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(f"{tmp_path}/s")
    listener = await start(f"aqueduct+unix://{tmp_path}/s")
    assert mode_of(tmp_path / "s") == 0o600
    await connected(listener.addresses[0])


async def test_a_file_that_somebody_listens_at_is_left_alone(start: Start, tmp_path: Path) -> None:
    listener = await start(f"aqueduct+unix://{tmp_path}/s")
    with pytest.raises(ConfigError, match="another process listens there"):
        await start(f"aqueduct+unix://{tmp_path}/s")
    await connected(listener.addresses[0])


async def test_a_file_that_is_no_socket_is_left_alone(start: Start, tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("mine")
    with pytest.raises(ConfigError, match="exists and is no socket; it is left alone"):
        await start(f"aqueduct+unix://{tmp_path}/notes")
    assert (tmp_path / "notes").read_text() == "mine"


async def test_a_directory_that_is_not_there(start: Start, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"the directory '.*/none' does not exist"):
        await start(f"aqueduct+unix://{tmp_path}/none/s")


async def test_a_file_of_another_server_is_not_removed(start: Start, tmp_path: Path) -> None:
    first = await start(f"aqueduct+unix://{tmp_path}/s")
    os.rename(tmp_path / "s", tmp_path / "moved")
    second = await start(f"aqueduct+unix://{tmp_path}/s")
    first.close()
    assert (tmp_path / "s").exists()
    await connected(second.addresses[0])


# The door


async def test_the_half_open_are_bounded_and_the_others_wait(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    listener = await start("aqueduct+tcp://127.0.0.1:0", config=few(4))
    crowd: list[socket.socket] = []
    try:
        with caplog.at_level(logging.WARNING, "aqueduct.carriers.stream"):
            crowd += [socket.create_connection(place_of(listener)) for _ in range(12)]
            await met(lambda: listener.half_open == 4)
            await met(lambda: "ByteStream.half_open" in caplog.text)
        late = asyncio.ensure_future(stream.connect(Address.parse(listener.addresses[0]), DEFAULT))
        await asyncio.sleep(0.05)
        assert listener.half_open == listener.connections == 4
        assert not late.done()
        for sock in crowd:
            sock.close()
        carrier = await asyncio.wait_for(late, DEADLINE)  # those before it have made room
        carrier.abandon(OVER)
    finally:
        for sock in crowd:
            sock.close()


async def test_who_says_nothing_is_put_out(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    for scheme, what in (("tcp", "the first credit of bpmux"), ("tls", "the handshake of TLS")):
        listener = await start(f"aqueduct+{scheme}://127.0.0.1:0", config=few(4, timeout=0.2))
        with socket.create_connection(place_of(listener)) as sock:
            with caplog.at_level(logging.DEBUG, "aqueduct.carriers.stream"):
                await met(lambda: listener.connections == 1)  # noqa: B023
                await met(lambda: listener.connections == 0)  # noqa: B023
            sock.settimeout(DEADLINE)
            while sock.recv(4096):
                pass
        assert f"{what} did not come within 0.2 s" in caplog.text


async def test_a_connection_that_goes_before_it_says_anything_is_no_warning(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    listener = await start("aqueduct+tcp://127.0.0.1:0")
    with caplog.at_level(logging.DEBUG, "aqueduct.carriers.stream"):
        socket.create_connection(place_of(listener)).close()
        await met(lambda: "without a word" in caplog.text)
    assert [record.levelno for record in caplog.records] == [logging.DEBUG]
    assert listener.connections == 0


async def test_no_file_descriptors_left(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    listener = await start("aqueduct+tcp://127.0.0.1:0")
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.socket() as probe, caplog.at_level(logging.WARNING, "aqueduct.carriers.stream"):
        following = os.dup(0)
        os.close(following)
        resource.setrlimit(resource.RLIMIT_NOFILE, (following, before[1]))
        try:
            probe.connect(place_of(listener))
            await met(lambda: "no connection can be accepted: Too many open files" in caplog.text)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
    await connected(listener.addresses[0])


async def test_a_listener_that_closes_leaves_live_connections(start: Start) -> None:
    taken: list[stream.StreamCarrier] = []
    listener = await stream.listen(
        Address.parse("aqueduct+tcp://127.0.0.1:0"),
        DEFAULT,
        None,
        taken.append,  # type: ignore[arg-type]
    )
    carrier = await stream.connect(Address.parse(listener.addresses[0]), DEFAULT)
    with socket.create_connection(place_of(listener)):
        await met(lambda: listener.connections == 2)
        await met(lambda: taken)
        listener.close()
        assert (listener.connections, listener.half_open) == (1, 0)
    assert taken[0].error is None and carrier.error is None
    waiting = asyncio.ensure_future(listener.wait_closed())
    await asyncio.sleep(0)
    assert not waiting.done()
    taken[0].abandon(OVER)
    await asyncio.wait_for(waiting, DEADLINE)
    with pytest.raises(ConnectFailed, match="connection refused"):
        await stream.connect(Address.parse(listener.addresses[0]), DEFAULT)
    carrier.abandon(OVER)
