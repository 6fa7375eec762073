"""``FaultyNetwork``: what stands between a client and a service, and fails when you say so.

::

    with aqueduct.testing.FaultyNetwork(serving.addresses[0]) as network:
        client = aqueduct.SyncClient(network.address)
        network.cut(after="64k")
        ...
        assert network.cuts == 1
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Final, Literal, Self, TypeAlias, TypeVar, cast

from aqueduct.address import Address
from aqueduct.arguments import Duration, Size, checked
from aqueduct.client.loop_thread import LoopThread
from aqueduct.errors import ConfigError, LocalProtocolError
from aqueduct.testing.datagram_relay import DatagramRelay
from aqueduct.testing.stream_relay import End, Fate, Place, StreamRelay

__all__ = ["FaultyNetwork", "NetworkWay"]

T = TypeVar("T")

NetworkWay: TypeAlias = Literal["both", "up", "down"]
"""``up`` is the way from the client to the service."""

_HERE: Final = "127.0.0.1"
_ANY: Final = {"0.0.0.0": _HERE, "::": "::1", "localhost": _HERE}


class FaultyNetwork:
    """A relay to a service; ``address`` is what clients connect to instead.

    For ``with`` and ``async with``. It lives on a thread of its own, and any thread may give it
    orders. They hold for connections that there are, and for those that come. Bytes pass as they
    are: TLS goes through unread, and certificates are those of the service. A service at a Unix
    socket is reached by TCP, since memory is not shared through a relay.

    Over QUIC it relays datagrams, and nobody is told of a cut: both sides find out by
    Timing.idle_timeout, or by a deadline of a call.
    """

    @checked()
    def __init__(self, address: str | Address) -> None:
        """``address`` is the service's. Raises ConfigError for one without a network."""
        target = address if isinstance(address, Address) else Address.parse(address)
        if target.scheme == "memory":
            raise ConfigError(
                f"{target}: nothing lies between client and service in memory; serve at "
                "aqueduct+tcp://127.0.0.1:0, and give FaultyNetwork the address of the serving"
            )
        if not (target.port or target.unix):
            raise ConfigError(
                f"{target} has no port yet; give the address that serving.addresses has"
            )
        self._target = target
        self._address = ""
        self._fate = Fate()
        self._silent: set[str] = set()
        self._cuts = 0
        self._left = 0
        """Connections that are to be cut yet, after some bytes."""
        self._streams = StreamRelay()
        self._streams.on_limit = self._limit_reached
        self._datagrams = DatagramRelay(host=self._host, listen=_HERE)
        self._datagrams.on_limit = self._limit_reached
        self._thread: LoopThread | None = None

    @property
    def address(self) -> str:
        """What clients connect to, while the block runs."""
        self._running()
        return self._address

    @property
    def connections(self) -> int:
        """How many connections there were."""
        streams = self._streams
        if self._by_datagrams:
            return self._datagrams.clients
        return len(streams.links) + streams.cut_early

    @property
    def cuts(self) -> int:
        """How many connections were cut."""
        return self._cuts

    @property
    def lost(self) -> int:
        """How many datagrams did not pass, by ``lose``, stalls and cuts; 0 for a byte stream."""
        return self._datagrams.dropped

    @property
    def passed(self) -> dict[str, int]:
        """Bytes that have passed, ``up`` to the service and ``down``."""
        if self._by_datagrams:
            return {way: self._datagrams.bytes[way] for way in ("up", "down")}
        links = tuple(self._streams.links)
        return {
            "up": sum(link.up.passed for link in links),
            "down": sum(link.down.passed for link in links),
        }

    @checked()
    def cut(self, *, after: Size | None = None, times: int = 1) -> None:
        """Cuts all connections now, as a reset does. New ones may be made.

        With ``after``: each of the next ``times`` connections is cut once so many bytes more have
        passed one way. Exactly so many pass, but over QUIC whole datagrams alone.
        """
        if after is None:
            self._do(self._cut)
        else:
            limit, count = cast("int", after), times
            self._do(lambda: self._cut_after(limit, count))

    def stall(self, way: NetworkWay = "both") -> None:
        """Nothing passes any more, and connections stay open, until ``resume``.

        Over TCP senders find no room. Over QUIC what is sent is lost.
        """
        ways = {"both": ("up", "down"), "up": ("up",), "down": ("down",)}.get(way)
        if ways is None:
            raise ConfigError(f"FaultyNetwork.stall: way is {way!r}; it must be both, up or down")
        self._do(lambda: self._stall(ways))

    @checked()
    def slow(
        self, bytes_per_second: Size | None = None, *, latency: Duration | None = None
    ) -> None:
        """Lets through so many bytes a second of each connection each way, each so late.

        ``latency`` is that of one way: a round trip takes twice as long. None leaves it as it is
        without a fault.
        """
        if bytes_per_second is None and latency is None:
            raise ConfigError("FaultyNetwork.slow: give bytes_per_second, latency, or both")
        rate, late = cast("int | None", bytes_per_second), cast("float | None", latency)
        self._do(lambda: self._slow(rate, late or 0.0))

    def lose(self, fraction: float, *, seed: int = 0) -> None:
        """Loses so many of all datagrams, by the seed. For QUIC alone.

        Raises ConfigError for byte streams: their systems send again what is lost.
        """
        if not self._by_datagrams:
            raise ConfigError(
                f"{self._target}: programs see no loss of a byte stream, since the system sends "
                "again what is lost; take slow(latency=...), stall() or cut(), or serve at "
                "aqueduct:// (QUIC)"
            )
        known = isinstance(fraction, int | float) and not isinstance(fraction, bool)
        if not (known and 0 <= fraction <= 1):
            raise ConfigError(
                f"FaultyNetwork.lose: fraction is {fraction!r}; it must be a number from 0 to 1"
            )
        self._do(lambda: self._lose(float(fraction), seed))

    def resume(self) -> None:
        """All passes again, as fast as it can. Cuts that have not come to pass are forgotten."""
        self._do(self._resume)

    def __enter__(self) -> Self:
        if self._thread is not None:
            raise LocalProtocolError("this FaultyNetwork is in use by a block; make another one")
        thread = LoopThread("aqueduct-testing-network")
        try:
            thread.run(self._begin())
        except BaseException:
            thread.stop()
            raise
        self._thread = thread
        return self

    def __exit__(self, *exc: object) -> None:
        thread, self._thread = self._running(), None
        if thread.pid == os.getpid():
            try:
                thread.run(_called(self._end))
            finally:
                thread.stop()

    async def __aenter__(self) -> Self:
        return self.__enter__()

    async def __aexit__(self, *exc: object) -> None:
        self.__exit__(*exc)

    def __repr__(self) -> str:
        return f"<FaultyNetwork before {self._target}>"

    # Within

    @property
    def _by_datagrams(self) -> bool:
        return self._target.scheme == "aqueduct"

    @property
    def _host(self) -> str:
        return _ANY.get(self._target.host, self._target.host)

    def _running(self) -> LoopThread:
        if self._thread is None:
            raise LocalProtocolError(
                "this FaultyNetwork is not there yet, or not any more; use it in a block: "
                "with FaultyNetwork(address) as network"
            )
        return self._thread

    def _do(self, work: Callable[[], None]) -> None:
        self._running().run(_called(work))

    # On its thread

    async def _begin(self) -> None:
        target = self._target
        if self._by_datagrams:
            port = await self._datagrams.start(target.port)
        else:
            where: Place = target.path if target.unix else (self._host, target.port)
            place = self._streams.start(where)
            assert not isinstance(place, str)
            port = place[1]
        self._address = str(_address_here(target, port))

    def _end(self) -> None:
        if self._by_datagrams:
            self._datagrams.close()
        else:
            self._streams.close()

    def _cut(self) -> None:
        if self._by_datagrams:
            self._cuts += self._datagrams.cut_off()
        else:
            self._cuts += self._streams.cut()

    def _cut_after(self, limit: int, times: int) -> None:
        self._left = times
        self._fate = replace(self._fate, limit=limit, end=End.RESET)
        self._datagrams.limit = limit
        self._datagrams.count_from_here()
        self._change(anew=True)

    def _limit_reached(self) -> None:
        self._cuts += 1
        self._left -= 1
        if self._left <= 0:
            self._fate = replace(self._fate, limit=None)
            self._datagrams.limit = None
            self._change()

    def _stall(self, ways: tuple[str, ...]) -> None:
        self._silent.update(ways)
        self._change()

    def _slow(self, rate: int | None, latency: float) -> None:
        self._fate = replace(self._fate, rate=rate, delay=latency)
        self._datagrams.rate, self._datagrams.latency = rate, latency
        self._change()

    def _lose(self, fraction: float, seed: int) -> None:
        self._datagrams.drop = fraction
        self._datagrams.reseed(seed)

    def _resume(self) -> None:
        self._silent.clear()
        self._left = 0
        self._fate = Fate()
        relay = self._datagrams
        relay.limit, relay.rate, relay.latency, relay.drop = None, None, 0.0, 0.0
        self._change()

    def _change(self, *, anew: bool = False) -> None:
        """What holds from now on holds for all connections. ``anew``: limits count from here."""
        self._datagrams.silent = set(self._silent)
        stalled = Fate(limit=0)
        self._streams.up = stalled if "up" in self._silent else self._fate
        self._streams.down = stalled if "down" in self._silent else self._fate
        for link in self._streams.links:
            for way, fate in ((link.up, self._streams.up), (link.down, self._streams.down)):
                if anew or way.fate != fate:
                    way.change(fate, anew=anew)


def _address_here(target: Address, port: int) -> Address:
    """What leads to the relay instead: all options hold, and the certificate's name too."""
    options = dict(target.options)
    scheme = target.scheme
    if target.unix:
        scheme = scheme.removesuffix("unix") + "tcp"
        options.pop("mode", None)
    named = {"server_name", "fingerprint"} & options.keys() or options.get("verify") == "off"
    if target.certified and not named and target.host != _HERE:
        options["server_name"] = target.host
    return Address(scheme, _HERE, port, options, "" if target.unix else target.path)


async def _called(work: Callable[[], T]) -> T:
    return work()
