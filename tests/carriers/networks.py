"""Two hosts in network namespaces of their own, with a router between them: what Linux has."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Final

import pytest

__all__ = ["Network", "needs_namespaces", "network"]

ROOT = Path(__file__).resolve().parents[2]


def _possible() -> bool:
    if not (sys.platform == "linux" and shutil.which("ip") and shutil.which("nsenter")):
        return False
    tried = subprocess.run(["unshare", "--net", "true"], capture_output=True, check=False)
    return tried.returncode == 0


needs_namespaces = pytest.mark.skipif(
    not _possible(), reason="network namespaces need Linux, root and iproute2"
)


class Network:
    """A client's host, a router, and a server's host. Packets cross the router, or do not."""

    server: Final = MappingProxyType({4: "10.87.2.2", 6: "fd87:2::2"})
    """Its address, by the version of IP."""

    def __init__(self, pids: dict[str, int]) -> None:
        self._pids = pids

    def run(self, host: str, *command: str) -> None:
        """Runs a command on a host."""
        subprocess.run(self.command(host, *command), check=True, capture_output=True, timeout=30)

    def command(self, host: str, *command: str) -> list[str]:
        """What runs a command on a host."""
        return ["nsenter", "--net", "--target", str(self._pids[host]), *command]

    def python(self, host: str, *arguments: str) -> subprocess.Popen[str]:
        """A Python process on a host."""
        return subprocess.Popen(
            self.command(host, sys.executable, "-u", *arguments),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )

    def limit(self, mtu: int) -> None:
        """The MTU of the path behind the client's host: its own device takes 65,000 bytes."""
        self.run("router", "ip", "link", "set", "south", "mtu", str(mtu))
        self.run("server", "ip", "link", "set", "eth", "mtu", str(mtu))


@contextmanager
def network(mtu: int) -> Iterator[Network]:
    """The three hosts, for as long as the block runs."""
    with ExitStack() as stack:
        pids = {}
        for host in ("client", "router", "server"):
            process = stack.enter_context(
                subprocess.Popen(
                    ["unshare", "--net", "sleep", "600"], stdin=subprocess.DEVNULL, text=True
                )
            )
            stack.callback(process.kill)
            pids[host] = process.pid
            _wait_for_namespace(process.pid)
        made = Network(pids)
        _link(made, "client", "eth", "router", "north", 1)
        _link(made, "server", "eth", "router", "south", 2)
        made.run("router", "sysctl", "-qw", "net.ipv4.ip_forward=1")
        made.run("router", "sysctl", "-qw", "net.ipv6.conf.all.forwarding=1")
        made.limit(mtu)
        yield made


def _wait_for_namespace(pid: int) -> None:
    own = os.readlink("/proc/self/ns/net")
    until = time.monotonic() + 30
    while time.monotonic() < until:
        if os.readlink(f"/proc/{pid}/ns/net") != own:
            return
        time.sleep(0.001)
    raise TimeoutError("unshare made no namespace")


def _link(net: Network, host: str, device: str, router: str, port: str, number: int) -> None:
    """A cable between a host and the router."""
    net.run(host, "ip", "link", "set", "lo", "up")
    net.run(
        host, "ip", "link", "add", device, "mtu", "65000", "type", "veth",
        "peer", "name", port, "mtu", "65000", "netns", str(net._pids[router]),
    )  # fmt: skip
    for where, name, last in ((host, device, 2), (router, port, 1)):
        net.run(where, "ip", "link", "set", name, "up")
        net.run(where, "ip", "addr", "add", f"10.87.{number}.{last}/24", "dev", name)
        net.run(where, "ip", "addr", "add", f"fd87:{number}::{last}/64", "dev", name, "nodad")
    net.run(host, "ip", "route", "add", "default", "via", f"10.87.{number}.1")
    net.run(host, "ip", "-6", "route", "add", "default", "via", f"fd87:{number}::1")
