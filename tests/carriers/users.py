"""A CarrierUser that keeps what it hears, and pairs of carriers to try it on."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import random
import socket
import tempfile
from collections.abc import AsyncIterator, Callable
from typing import Any

from aqueduct.address import Address
from aqueduct.carriers import memory, quic, stream
from aqueduct.carriers.contract import Buffer, Carrier
from aqueduct.config import DEFAULT, Config
from aqueduct.errors import ConnectionLost
from aqueduct.testing.datagram_relay import DatagramRelay

DEADLINE = 40.0
TLS = quic.dev_certificate()
OVER = ConnectionLost("the test is over")


class Recorder:
    """Keeps all that is reported, and checks the order in which it comes.

    ``window``: credit given ahead of what has arrived; None: none beyond the first window.
    """

    def __init__(self, carrier: Carrier, config: Config, window: int | None = 1 << 20) -> None:
        self.carrier = carrier
        self.window = window
        self.first_window = config.flow.initial_window
        self.begun = 0
        self.data: dict[int, bytearray] = {}
        self.pieces = 0
        self.limits: dict[int, int] = {}
        self.order: list[int] = []
        self.ended: set[int] = set()
        self.resets: dict[int, int] = {}
        self.stops: dict[int, int] = {}
        self.datagrams: list[bytes] = []
        self.kept_bytes = 0
        self.written_by: dict[int, int] = {}
        self.openings = 0
        self.rooms = 0
        self.pongs = 0
        self.bursts = 0
        self.lost: list[ConnectionLost] = []
        self.hooks: list[Callable[[], None]] = []
        self.failures: list[str] = []
        self._changed = asyncio.Event()
        carrier.attach(self)

    # what carriers call

    def connected(self) -> None:
        self.begun += 1
        self._check(self.begun == 1 and not self.data, "connected is first, and once")

    def early_decided(self, accepted: bool) -> None:
        self._alive()
        self._check(False, "a decision on early data, and none was offered")

    def stream_data(self, stream: int, data: Buffer, fin: bool) -> None:
        self._alive()
        self._check(stream not in self.ended, f"data of stream {stream} after its end")
        self._check(stream not in self.resets, f"data of stream {stream} after its reset")
        if stream not in self.data:
            self.order.append(stream)
        held = self.data.setdefault(stream, bytearray())
        held += data
        self.pieces += 1
        limit = self.limits.get(stream, self.first_window)
        self._check(len(held) <= limit, f"stream {stream} has {len(held)} bytes, allowed {limit}")
        if fin:
            self.ended.add(stream)
        elif self.window is not None:
            self.credit(stream, len(held) + self.window)

    def inlet(self, stream: int) -> None:
        """Has none to give."""

    def inlet_done(self, stream: int) -> None:
        raise AssertionError("no inlet was opened")

    def stream_reset(self, stream: int, code: int) -> None:
        self._alive()
        self._check(stream not in self.ended and stream not in self.resets, "two ends")
        self.resets[stream] = code

    def stream_stopped(self, stream: int, code: int) -> None:
        self._alive()
        self._check(stream not in self.stops, "stopped twice")
        self.stops[stream] = code

    def datagram_received(self, data: bytes) -> None:
        self._alive()
        self.datagrams.append(data)

    def openable_changed(self) -> None:
        self._alive()
        self.openings += 1

    def datagram_room_changed(self) -> None:
        self._alive()
        self.rooms += 1
        self._changed.set()  # a flush may report it, without a burst

    def written(self, stream: int, size: int) -> bool:
        self._alive()
        self._check(size > 0, "an empty report")
        self.written_by[stream] = self.written_by.get(stream, 0) + size
        self._changed.set()  # a flush may report it, without a burst
        return True

    def kept(self, size: int) -> None:
        self._alive()
        self.kept_bytes += size

    def ponged(self) -> None:
        self._alive()
        self.pongs += 1

    def end_of_input(self) -> None:
        self._alive()
        self.bursts += 1
        for hook in self.hooks:
            hook()
        self._changed.set()

    def closed(self, error: ConnectionLost) -> None:
        self.lost.append(error)
        self._check(len(self.lost) == 1, "closed twice")
        self._changed.set()

    # what tests call

    def credit(self, stream: int, limit: int) -> None:
        self.limits[stream] = max(limit, self.limits.get(stream, self.first_window))
        self.carrier.credit(stream, limit)

    def send(self, stream: int, *buffers: bytes, fin: bool = False) -> None:
        self.carrier.write(stream, buffers, fin)
        self.carrier.flush()

    @property
    def total(self) -> int:
        return sum(len(held) for held in self.data.values())

    async def until(self, condition: Callable[[], Any], what: str = "") -> None:
        """Waits for the condition, looking at it after each burst."""
        try:
            async with asyncio.timeout(DEADLINE):
                while not condition():
                    assert not self.failures, self.failures
                    if self.lost and not condition():
                        raise AssertionError(f"{what}: lost before: {self.lost[0]!r}")
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError as error:
            raise AssertionError(f"{what or 'condition'} not met: {self!r}") from error
        assert not self.failures, self.failures

    async def until_ended(self, *streams: int) -> None:
        """Waits for the ends of the peer's streams."""
        await self.until(lambda: self.ended.issuperset(streams), f"the end of {streams}")

    def __repr__(self) -> str:
        return (
            f"<{'client' if self.carrier.is_client else 'server'}: {len(self.data)} streams, "
            f"{self.total} bytes, {len(self.ended)} ended, resets {self.resets}, "
            f"stops {self.stops}, lost {self.lost}, {self.carrier.snapshot()}>"
        )

    def _alive(self) -> None:
        self._check(self.begun == 1, "a report before connected")
        self._check(not self.lost, "a report after closed")

    def _check(self, condition: bool, what: str) -> None:
        if not condition:  # an exception would end in the loop's handler, unseen
            self.failures.append(what)


@dataclasses.dataclass
class Pair:
    """Two linked carriers and their users."""

    client: Recorder
    server: Recorder
    relay: DatagramRelay | None = None
    listener: Any = None
    cut: Callable[[], None] = lambda: None
    """Ends the connection, as far as this carrier can, without a word."""

    def check(self) -> None:
        """Fails if a carrier broke the order of reports."""
        for user in (self.client, self.server):
            assert not user.failures, user.failures


STREAMS = ("tcp", "tls", "unix", "unix-memory")
KINDS = ("memory", "memory-split", "quic", "quic-auto", "quic-1200", "quic-lossy", *STREAMS)


def by_memory(config: Config, size: int = 64 << 10) -> Config:
    """The same with little memory to share over a Unix socket, from the first bytes on."""
    stream = dataclasses.replace(config.byte_stream, shared_memory=size, shared_memory_after=0)
    return dataclasses.replace(config, byte_stream=stream)


def is_lossy(kind: str) -> bool:
    return kind == "quic-lossy"


@contextlib.asynccontextmanager
async def linked(
    kind: str = "quic",
    config: Config = DEFAULT,
    server_config: Config | None = None,
    *,
    window: int | None = 1 << 20,
    server_window: int | None = 1 << 20,
    relay: DatagramRelay | None = None,
    bidi: bool = False,
) -> AsyncIterator[Pair]:
    """Two carriers of a kind, connected; cleaned up at the end."""
    server_config = server_config or config
    if kind.startswith("memory"):
        split = kind == "memory-split"
        link = memory.pair(
            config,
            server_config=server_config,
            chunk=5000 if split else 1 << 16,
            seed=11 if split else None,
            loop=asyncio.get_running_loop(),
            bidi=bidi,
        )
        pair = Pair(
            Recorder(link.client, config, window),
            Recorder(link.server, server_config, server_window),
            cut=link.cut,
        )
        yield pair
        link.cut()
        pair.check()
        return
    if kind in STREAMS:
        async with stream_pair(kind, config, server_config, bidi=bidi) as (client, server, door):
            pair = Pair(
                Recorder(client, config, window),
                Recorder(server, server_config, server_window),
                listener=door,
                cut=lambda: client._sock.shutdown(socket.SHUT_RDWR),
            )
            yield pair
        pair.check()
        return
    accepted: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    size = {"quic": "16000", "quic-auto": "auto"}.get(kind, "1200")
    address = Address.parse(f"aqueduct://127.0.0.1:0?datagram_size={size}")
    listener = await quic.listen(address, server_config, TLS, accepted.set_result, bidi=bidi)
    if kind == "quic-lossy" and relay is None:
        relay = DatagramRelay(seed=5, drop=0.04, reorder=0.05, delay=0.002)
    target = Address.parse(listener.addresses[0])
    if relay is not None:
        target = target.with_port(await relay.start(target.port))
    carrier = await quic.connect(target, config, bidi=bidi)
    async with asyncio.timeout(DEADLINE):
        server_carrier = await accepted
    pair = Pair(
        Recorder(carrier, config, window),
        Recorder(server_carrier, server_config, server_window),
        relay,
        listener,
        cut=lambda: server_carrier.abandon(OVER),
    )
    try:
        yield pair
    finally:
        for end in (carrier, server_carrier):
            end.abandon(OVER)
        listener.close()
        await asyncio.wait_for(listener.wait_closed(), DEADLINE)
        if relay is not None:
            relay.close()
        pair.check()


@contextlib.asynccontextmanager
async def stream_pair(
    kind: str,
    config: Config = DEFAULT,
    server_config: Config | None = None,
    *,
    bidi: bool = False,
) -> AsyncIterator[tuple[stream.StreamCarrier, Any, stream.StreamListener]]:
    """A client and a server over a byte stream, and the listener between them."""
    if kind == "unix-memory":
        kind, config, server_config = "unix", by_memory(config), by_memory(server_config or config)
    with tempfile.TemporaryDirectory() as directory:
        accepted: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        place = f"{directory}/socket" if kind == "unix" else "127.0.0.1:0"
        address = Address.parse(f"aqueduct+{kind}://{place}")
        listener = await stream.listen(
            address, server_config or config, TLS, accepted.set_result, bidi=bidi
        )
        carrier = await stream.connect(Address.parse(listener.addresses[0]), config, bidi=bidi)
        async with asyncio.timeout(DEADLINE):
            server = await accepted
        try:
            yield carrier, server, listener
        finally:
            for end in (carrier, server):
                end.abandon(OVER)
            listener.close()
            await asyncio.wait_for(listener.wait_closed(), DEADLINE)


def timing(**changes: float) -> Config:
    return dataclasses.replace(DEFAULT, timing=dataclasses.replace(DEFAULT.timing, **changes))


def record(carrier: Any) -> None:
    """A user for a carrier that the test does not look at."""
    Recorder(carrier, DEFAULT)


async def met(condition: Callable[[], object]) -> None:
    """Waits for what nothing reports."""
    async with asyncio.timeout(DEADLINE):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def transfer(pair: Pair, size: int, first: int = 0) -> None:
    """Random bytes both ways at once, on two streams each."""
    await pair.client.until(lambda: pair.client.begun)
    await pair.server.until(lambda: pair.server.begun)
    users = (pair.client, pair.server)
    sent = {n: random.Random(n).randbytes(size) for n in (first, first + 1)}
    for user in users:
        for number, data in sent.items():
            user.carrier.write(number, [data], True)
        user.carrier.flush()
    for user in users:
        await user.until_ended(*sent)
        assert all(user.data[number] == data for number, data in sent.items())
