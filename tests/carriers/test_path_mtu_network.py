"""Path MTU discovery between hosts of their own, behind a router that drops what is too large."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from tests.carriers.networks import Network, needs_namespaces, network

HOST = "tests.carriers.path_mtu_host"
HEADERS = {4: 28, 6: 48}
"""Bytes of IP and UDP before the payload."""
PATIENCE = 30.0

pytestmark = needs_namespaces


def tell(client: subprocess.Popen[str]) -> tuple[int, float]:
    """The client's datagram size, and the seconds of its longest call since it was asked last."""
    assert client.stdin is not None
    assert client.stdout is not None
    client.stdin.write("\n")
    client.stdin.flush()
    size, longest = client.stdout.readline().split()
    return int(size), float(longest)


def settled(client: subprocess.Popen[str], least: int, most: int) -> float:
    """Waits until the size lies within; returns the seconds of the longest call."""
    until = time.monotonic() + PATIENCE
    longest = 0.0
    while True:
        size, call = tell(client)
        longest = max(longest, call)
        if least <= size <= most:
            return longest
        assert time.monotonic() < until, f"datagrams have {size} bytes, not {least} to {most}"
        time.sleep(0.05)


@contextmanager
def asking(net: Network, family: int) -> Iterator[subprocess.Popen[str]]:
    """A client that calls a service of the other host, for as long as the block runs."""
    where = net.server[family]
    literal = f"[{where}]" if family == 6 else where
    with ExitStack() as stack:

        def python(host: str, *arguments: str) -> subprocess.Popen[str]:
            process = net.python(host, "-m", HOST, *arguments)
            stack.callback(process.communicate)
            stack.callback(process.kill)
            return process

        server = python("server", "serve", f"aqueduct://{literal}:0")
        assert server.stdout is not None
        yield python("client", "ask", server.stdout.readline().strip())


@pytest.mark.parametrize("family", [4, 6])
@pytest.mark.parametrize("mtu", [1280, 1500, 9001])
def test_datagrams_become_as_large_as_the_path_takes(mtu: int, family: int) -> None:
    with network(mtu) as net, asking(net, family) as client:
        most = mtu - HEADERS[family]
        settled(client, most - 16, most)


def test_a_path_that_shrinks_in_the_middle_of_calls_is_noticed() -> None:
    with network(9001) as net, asking(net, 4) as client:
        settled(client, 9001 - 28 - 16, 9001 - 28)
        net.limit(1280)
        settled(client, 1280 - 28 - 16, 1280 - 28)
        settled(client, 1280 - 28 - 16, 1280 - 28)  # and calls go on
