"""The carrier in memory: deterministic steps, and the registry of ``memory://``."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import threading
from typing import Any

import pytest

from aqueduct.address import Address
from aqueduct.carriers import memory
from aqueduct.config import DEFAULT
from aqueduct.errors import ConfigError, ConnectFailed
from tests.carriers.users import DEADLINE


class Log:
    """A user that writes down everything."""

    def __init__(self, carrier: memory.MemoryCarrier) -> None:
        self.carrier = carrier
        self.lines: list[tuple[Any, ...]] = []
        carrier.attach(self)

    def __getattr__(self, name: str) -> Any:
        return lambda *given: self.lines.append((name, *given))

    def of(self, *names: str) -> list[tuple[Any, ...]]:
        return [line for line in self.lines if line[0] in names]


def linked(**options: Any) -> tuple[memory.MemoryLink, Log, Log]:
    link = memory.pair(**options)
    return link, Log(link.client), Log(link.server)


def test_nothing_moves_but_by_steps() -> None:
    link, client, server = linked()
    assert client.lines == []
    link.step()
    assert client.lines == [("connected",), ("end_of_input",)]
    client.carrier.write(0, [b"one"], False)
    assert link.run() == 0  # not flushed
    client.carrier.flush()
    assert not server.of("stream_data")
    assert link.step()
    assert server.of("stream_data") == [("stream_data", 0, b"one", False)]
    assert client.of("written") == [("written", 0, 3)]
    assert server.lines[-1] == ("end_of_input",)
    assert not link.step()


def test_a_link_without_both_users_waits() -> None:
    link = memory.pair()
    client = Log(link.client)
    link.client.write(0, [b"x"], True)
    link.client.flush()
    assert link.run() == 0
    server = Log(link.server)
    link.run()
    assert client.of("connected") and server.of("stream_data")


def pieces(seed: int | None, chunk: int) -> list[int]:
    link, client, server = linked(chunk=chunk, seed=seed)
    link.run()
    client.carrier.write(0, [bytes(5000)], False)
    client.carrier.write(1, [bytes(5000)], True)
    client.carrier.flush()
    link.run()
    return [len(line[2]) for line in server.of("stream_data")]


def test_pieces() -> None:
    assert pieces(None, 2000) == [2000, 2000, 2000, 2000, 1000, 1000]
    assert pieces(None, 1) == [1] * 10_000
    assert pieces(3, 900) == pieces(3, 900) != pieces(4, 900)
    assert sum(pieces(3, 900)) == 10_000
    assert max(pieces(3, 900)) <= 900


def test_what_a_user_answers_in_a_burst_needs_no_flush() -> None:
    link, client, server = linked()
    link.run()

    def answer() -> None:
        if server.of("stream_data") and not server.of("answered"):
            server.lines.append(("answered",))
            link.server.write(0, [b"pong"], True)

    server.end_of_input = answer  # type: ignore[attr-defined]
    client.carrier.write(0, [b"ping"], True)
    client.carrier.flush()
    link.run()
    assert client.of("stream_data") == [("stream_data", 0, b"pong", True)]


def test_a_cut_link() -> None:
    link, client, server = linked()
    link.run()
    client.carrier.write(0, [b"x"], True)
    client.carrier.flush()
    link.cut("somebody tripped")
    link.cut()
    assert link.run() == 0
    for log in (client, server):
        (line,) = log.of("closed")
        assert "somebody tripped" in str(line[1]) and line[1].code is None
        assert log.carrier.openable == 0
    assert not server.of("stream_data")


def test_the_linger_runs_out_when_told() -> None:
    link, client, server = linked()
    link.run()
    client.carrier.write(0, [bytes(1 << 20)], True)
    client.carrier.close(3, "enough", linger=5)
    link.run()
    assert not client.of("closed")
    link.expire_linger()
    link.run()
    assert client.of("closed")[0][1].code == server.of("closed")[0][1].code == 3


def test_users_that_never_rest_are_stopped() -> None:
    link, _, server = linked()
    link.run()
    server.end_of_input = link.server.ping  # type: ignore[attr-defined]
    link.server.ping()
    link.server.flush()
    with pytest.raises(RuntimeError, match="come to rest"):
        link.run(limit=100)


def test_no_datagrams() -> None:
    link, client, _ = linked(datagram_limit=0)
    link.run()
    assert client.carrier.datagram_limit == 0
    assert not client.carrier.send_datagram(b"")


def test_each_side_has_its_own_limits() -> None:
    narrow = dataclasses.replace(DEFAULT, flow=dataclasses.replace(DEFAULT.flow, streams=9))
    link, client, server = linked(server_config=narrow)
    assert client.carrier.openable == 9
    assert server.carrier.openable == DEFAULT.flow.streams
    assert link.client.peer == link.server.local


def test_the_peer_is_this_process() -> None:
    link, _, _ = linked()
    for carrier in (link.client, link.server):
        found = carrier.peer_credentials
        assert found is not None
        assert (found.pid, found.uid, found.gid) == (os.getpid(), os.geteuid(), os.getegid())
        assert carrier.peer_identity is None


async def test_the_registry() -> None:
    address = Address.parse("memory://registry-test")
    with pytest.raises(ConnectFailed, match="nothing in this process listens"):
        await memory.connect(address, DEFAULT)
    accepted: list[Any] = []
    listener = await memory.listen(address, DEFAULT, accepted.append)
    assert list(listener.addresses) == ["memory://registry-test"]
    with pytest.raises(ConfigError, match="listens there already"):
        await memory.listen(address, DEFAULT, accepted.append)
    client = Log(await memory.connect(address, DEFAULT))
    server = Log(accepted[0])
    listener.close()
    with pytest.raises(ConnectFailed):
        await memory.connect(address, DEFAULT)
    waiting = asyncio.create_task(listener.wait_closed())
    client.carrier.write(0, [b"x"], True)
    client.carrier.close(0, "", linger=5)
    await asyncio.wait_for(waiting, DEADLINE)
    assert server.of("stream_data") == [("stream_data", 0, b"x", True)]
    assert server.of("closed") and client.of("closed")
    again = await memory.listen(address, DEFAULT, accepted.append)
    again.close()
    await asyncio.wait_for(again.wait_closed(), DEADLINE)


async def test_a_listener_of_another_loop() -> None:
    address = Address.parse("memory://other-loop")
    listener = await memory.listen(address, DEFAULT, lambda carrier: None)
    failures: list[BaseException] = []

    def elsewhere() -> None:
        try:
            asyncio.run(memory.connect(address, DEFAULT))
        except ConnectFailed as error:
            failures.append(error)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    await asyncio.to_thread(thread.join)
    listener.close()
    assert "another event loop" in str(failures[0])
