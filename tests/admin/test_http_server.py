"""The HTTP server of the admin port: what it answers, and what it bears."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from aqueduct.admin.http_server import HttpRequest, HttpResponse, Route, text
from aqueduct.admin.thread import AdminThread
from aqueduct.config import Admin
from aqueduct.errors import ConfigError

WAIT = 30.0
HELLO = b"GET /hello HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"


async def hello(request: HttpRequest) -> HttpResponse:
    return text(f"hello {request.query}")


async def broken(request: HttpRequest) -> HttpResponse:
    raise RuntimeError("a secret of the service")


async def stuck(request: HttpRequest) -> HttpResponse:
    await asyncio.sleep(WAIT)
    raise AssertionError("unreachable")


async def large(request: HttpRequest) -> HttpResponse:
    return HttpResponse(bytes(64 << 20), "application/octet-stream")


ROUTES = {"/hello": hello, "/broken": broken, "/stuck": stuck, "/large": large}


@asynccontextmanager
async def server(
    settings: Admin | None = None, routes: Mapping[str, Route] = ROUTES
) -> AsyncIterator[int]:
    """The port of a server that answers on its own thread."""
    thread = AdminThread("127.0.0.1:0", routes, settings or Admin())
    await thread.start()
    try:
        yield int(thread.addresses[0].rpartition(":")[2])
    finally:
        await thread.close()


async def answer(port: int, said: bytes) -> bytes:
    """All that the server answers until it closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(said)
        async with asyncio.timeout(WAIT):
            return await reader.read()
    except ConnectionError:
        return b""
    finally:
        writer.close()


def request(method: str = "GET", target: str = "/hello", host: str = "127.0.0.1") -> bytes:
    return f"{method} {target} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode()


def status(answered: bytes) -> int:
    return int(answered.split()[1])


async def test_a_request_and_its_head() -> None:
    async with server() as port:
        head, _, body = (await answer(port, request(target="/hello?you"))).partition(b"\r\n\r\n")
        assert body == b"hello you\n"
        lines = [line.decode().lower() for line in head.split(b"\r\n")]
        assert lines[0].startswith("http/1.1 200")
        for line in (
            "cache-control: no-store",
            "connection: close",
            "content-length: 10",
            "content-type: text/plain; charset=utf-8",
            "x-content-type-options: nosniff",
            "x-frame-options: deny",
        ):
            assert line in lines
        assert any(line.startswith("content-security-policy: default-src 'none'") for line in lines)
        assert not any(line.startswith("access-control-") for line in lines)
        alone, _, nothing = (await answer(port, request("HEAD", "/hello?you"))).partition(
            b"\r\n\r\n"
        )
        assert (alone, nothing) == (head, b"")


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (request("POST"), 405),
        (request("OPTIONS", "*"), 405),
        (request("DELETE"), 405),
        (request(target="/"), 404),
        (request(target="/hello/"), 404),
        (request(target="/%68ello"), 404),
        (request(target="//hello"), 404),
        (request(target="/../hello"), 404),
        (request(target="http://127.0.0.1/nothing"), 404),
        (request(target="http://127.0.0.1?/hello"), 404),
        (request(target="http://evil.example/hello"), 421),
        (request(target="https://127.0.0.1/hello"), 404),
        (b"GET /hello HTTP/1.1\r\n\r\n", 400),
        (b"GET /hello HTTP/1.0\r\nHost: evil.example\r\n\r\n", 421),
        (b"GET /hello HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", 400),
        (b"GET /hello HTTP/1.1\r\nHost: 127.0.0.1\r\nBad Name: x\r\n\r\n", 400),
        (b"nonsense\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(20) + b"\r\n\r\n", 400),
    ],
)
async def test_requests_that_are_refused(said: bytes, expected: int) -> None:
    async with server() as port:
        answered = await answer(port, said)
        assert status(answered) == expected
        if expected == 405:
            assert b"allow: get, head" in answered.lower()
        assert status(await answer(port, HELLO)) == 200


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.1:9464", "localhost", "LocalHost:1"])
@pytest.mark.parametrize("more", [(), ("metrics.example.com",)])
async def test_own_hosts(host: str, more: tuple[str, ...]) -> None:
    async with server(Admin(hosts=more)) as port:
        for each in (host, "10.1.2.3:9464", "[::1]:80", "[fe80::1]", *more, *map(str.upper, more)):
            assert status(await answer(port, request(host=each))) == 200, each


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:9464",
        "127.0.0.1.evil.example",
        "localhost.evil.example",
        "evil.example@127.0.0.1",
        "127.0.0.1/x",
        "metrics.example.com.evil.example",
        "[::1].evil.example",
        "[::1",
        "2130706433",
        "",
    ],
)
async def test_a_page_that_makes_its_name_lead_here_is_told_nothing(host: str) -> None:
    async with server(Admin(hosts=("metrics.example.com",))) as port:
        for target in ROUTES:
            answered = await answer(port, request(target=target, host=host))
            assert status(answered) == 421
            assert b"hello" not in answered


@pytest.mark.parametrize(
    "said",
    [
        b"GET /hello?you HTTP/1.0\r\n\r\n",
        request(target="http://127.0.0.1:9464/hello?you"),
        request(target="http://localhost/hello?you", host="evil.example"),
    ],
)
async def test_requests_of_old_clients_and_through_proxies(said: bytes) -> None:
    async with server() as port:
        answered = await answer(port, said)
        assert status(answered) == 200 and answered.endswith(b"hello you\n")


def forked() -> int:
    """A child that does nothing."""
    child = os.fork()
    if not child:
        time.sleep(WAIT)
        os._exit(0)
    return child


def end(child: int) -> None:
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


async def test_a_forked_child_keeps_no_connection() -> None:
    async with server(Admin(request_deadline=WAIT)) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(HELLO[:-2])  # an empty line is missing, so the connection is there
        await writer.drain()
        assert status(await answer(port, HELLO)) == 200
        child = forked()
        try:
            writer.write(HELLO[-2:])
            async with asyncio.timeout(WAIT / 2):  # else the child's descriptor keeps it open
                assert status(await reader.read()) == 200
        finally:
            end(child)
            writer.close()


def test_hosts_that_are_no_names() -> None:
    for name in ("*", "http://metrics", "metrics:9464", "metrics/", "-x", "a b"):
        with pytest.raises(ConfigError, match=r"Admin\.hosts has .*without scheme, port or wild"):
            Admin(hosts=(name,))


async def test_an_error_is_told_to_the_log_alone(caplog: pytest.LogCaptureFixture) -> None:
    async with server() as port:
        answered = await answer(port, request(target="/broken"))
        assert status(answered) == 500
        assert b"secret" not in answered
        assert "a secret of the service" in caplog.text
        assert status(await answer(port, HELLO)) == 200


async def test_a_request_that_is_too_large() -> None:
    async with server(Admin(request_bytes=1024)) as port:
        long = b"GET /hello HTTP/1.1\r\nHost: 127.0.0.1\r\nX: " + b"x" * 2048
        assert status(await answer(port, long)) == 431
        assert status(await answer(port, long + b"\r\n\r\n")) == 431
        assert status(await answer(port, b"x" * 4096)) in (400, 431)
        assert status(await answer(port, HELLO)) == 200


async def test_a_body_is_not_read() -> None:
    async with server() as port:
        said = HELLO[:-2] + b"Content-Length: 5\r\n\r\nabcde" + HELLO
        answered = await answer(port, said)
        assert status(answered) == 200
        assert answered.count(b"HTTP/1.1") == 1


@pytest.mark.parametrize("said", [b"", b"GET /hello HT", request(target="/stuck")])
async def test_a_request_has_a_deadline(said: bytes) -> None:
    async with server(Admin(request_deadline=0.2)) as port:
        assert await answer(port, said) == b""


async def test_an_answer_that_is_not_read_has_one_too() -> None:
    async with server(Admin(request_deadline=0.2)) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
        writer.write(request(target="/large"))
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await reader.readuntil(b"\r\n\r\n")
            await asyncio.sleep(0.5)  # reads nothing: the buffers of both ends are full
            await reader.readexactly(64 << 20)
        writer.close()


async def test_connections_above_the_limit_take_the_place_of_one_that_is_silent() -> None:
    async with server(Admin(connections=3)) as port:
        silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
        assert status(await answer(port, HELLO)) == 200
        async with asyncio.timeout(WAIT):
            assert await _end(silent[0][0]) == b""  # the oldest
        silent[1][1].write(HELLO)
        async with asyncio.timeout(WAIT):
            assert status(await silent[1][0].read()) == 200
        for _, writer in silent:
            writer.close()


async def test_connections_above_the_limit_end_while_all_are_answered() -> None:
    held = [asyncio.Event() for _ in range(2)]
    loop, entered = asyncio.get_running_loop(), iter(held)

    async def hold(request: HttpRequest) -> HttpResponse:
        loop.call_soon_threadsafe(next(entered).set)
        return await stuck(request)

    async with server(
        Admin(connections=2, request_deadline=1.0), {**ROUTES, "/hold": hold}
    ) as port:
        busy = []
        for event in held:
            busy.append(asyncio.create_task(answer(port, request(target="/hold"))))
            async with asyncio.timeout(WAIT):
                await event.wait()
        assert await answer(port, HELLO) == b""
        assert await asyncio.gather(*busy) == [b"", b""]  # they had their time
        assert status(await answer(port, HELLO)) == 200


async def _end(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.read()
    except ConnectionError:
        return b""


async def test_every_address_of_a_name_and_settings_that_come_later() -> None:
    thread = AdminThread("localhost:0", ROUTES, Admin())
    await thread.start()
    try:
        ports = {address.rpartition(":")[2] for address in thread.addresses}
        assert len(ports) == 1
        port = int(ports.pop())
        strange = request(host="later.example")
        assert status(await answer(port, strange)) == 421
        thread.settings = replace(thread.settings, hosts=("later.example",))
        assert status(await answer(port, strange)) == 200
    finally:
        await thread.close()
    with pytest.raises(OSError):
        await asyncio.open_connection("127.0.0.1", port)


async def test_ports_that_cannot_be_bound() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"--admin\) 127\.0\.0\.1:{port} cannot be bound: "):
            await AdminThread(f"127.0.0.1:{port}", ROUTES, Admin()).start()
    with pytest.raises(ConfigError, match=r"the name 'no\.such\.invalid' does not resolve"):
        await AdminThread("no.such.invalid:0", ROUTES, Admin()).start()


@pytest.mark.parametrize("package", ["h11", "prometheus_client"])
def test_without_the_extra(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    missing: Any = None
    monkeypatch.setitem(sys.modules, package, missing)
    with pytest.raises(ConfigError, match=rf"{package}.*pip install 'aqueduct-arrow\[admin\]'"):
        AdminThread("127.0.0.1:0", ROUTES, Admin())
