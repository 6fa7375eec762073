"""Addresses of the byte-stream carriers, with a proxy before the server; and what is left after."""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from aqueduct.address import UNIX, Address
from aqueduct.carriers.certificates import dev_certificate
from aqueduct.carriers.stream.connection import StreamCarrier
from aqueduct.protocol.channels.connection import ChannelConnection
from aqueduct.testing.stream_relay import Place, StreamRelay
from tests.support.selection import mostly_long

__all__ = [
    "SCHEMES",
    "TLS",
    "Leaves",
    "eventually",
    "listen_at",
    "nothing_left",
    "place_of",
    "through",
]

SCHEMES = mostly_long(("tcp", "unix", "tls"), "tcp", "tls")
"""For ``parametrize``: a Unix socket is the same byte stream as TCP."""
TLS = dev_certificate()
DEADLINE = 30.0


def listen_at(scheme: str, folder: Path) -> str:
    """An address to listen on that nobody else has."""
    return f"{UNIX}://{folder}/server" if scheme == "unix" else f"aqueduct+{scheme}://127.0.0.1:0"


def place_of(address: str) -> Place:
    """The same for plain sockets."""
    parsed = Address.parse(address)
    return parsed.path if parsed.scheme == UNIX else (parsed.host, parsed.port)


def through(proxy: StreamRelay, address: str, folder: Path) -> str:
    """Puts the proxy before the server at ``address``; the address for its clients."""
    parsed = Address.parse(address)
    if parsed.scheme == UNIX:
        path = proxy.start(parsed.path, str(folder / "proxy"))
        return f"{UNIX}://{path}"
    place = proxy.start((parsed.host, parsed.port))
    return str(parsed.with_port(int(place[1])))


class Leaves:
    """What a process has that a connection could leave behind."""

    def __init__(self) -> None:
        self.descriptors = len(os.listdir("/proc/self/fd"))
        self.tasks = len(asyncio.all_tasks())

    def more_than(self, before: Leaves) -> str:
        """What there is more than before; empty: nothing."""
        now = vars(self)
        more = {name: now[name] - was for name, was in vars(before).items() if now[name] > was}
        return ", ".join(f"{count} {name}" for name, count in more.items())


def alive() -> int:
    """Carriers and cores in memory."""
    gc.collect()
    found = gc.get_objects()
    return sum(isinstance(one, (StreamCarrier, ChannelConnection)) for one in found)


@asynccontextmanager
async def nothing_left() -> AsyncIterator[None]:
    """Fails if sockets, tasks, carriers or cores outlive what is done inside.

    Whoever holds a connection in a variable of its own has to let go of it before the end.
    """
    before, lived = Leaves(), alive()
    yield
    await eventually(lambda: not Leaves().more_than(before), lambda: Leaves().more_than(before))
    for _ in range(20):
        if alive() <= lived:
            return
        await asyncio.sleep(0.1)
    raise AssertionError(f"{alive() - lived} carriers and cores are left in memory")


async def eventually(
    condition: Callable[[], object], why: Callable[[], object] = lambda: "it never came to be so"
) -> None:
    """Waits until something that nothing reports is so."""
    for _ in range(int(DEADLINE * 200)):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError(why())
