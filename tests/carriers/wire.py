"""Two QUIC connections joined without sockets or a clock: every datagram passes through here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.connection import QuicConnection

from aqueduct.address import Address
from aqueduct.carriers.quic import ClientTls
from aqueduct.carriers.quic.packets import FastConnection
from aqueduct.carriers.quic.tls import client_configuration, server_configuration
from aqueduct.config import DEFAULT, Config
from tests.carriers.users import TLS

CLIENT, SERVER = ("client", 1), ("server", 2)
Make = Callable[..., Any]


def fast(configuration: QuicConfiguration, config: Config, **options: Any) -> FastConnection:
    """One end as the carrier makes it."""
    return FastConnection(
        configuration,
        streams=config.flow.streams,
        initial_window=config.flow.initial_window,
        **options,
    )


def discovering(configuration: QuicConfiguration, config: Config, **options: Any) -> FastConnection:
    """One end that finds out how large its datagrams may be."""
    return fast(configuration, config, discover=True, **options)


def plain(configuration: QuicConfiguration, _: Config, **options: Any) -> QuicConnection:
    """One end as aioquic makes it."""
    return QuicConnection(configuration=configuration, **options)


class Wire:
    """A client and a server, stepped by hand. ``lose(way, number)`` says which datagrams go."""

    def __init__(
        self, make: Make = fast, config: Config = DEFAULT, size: int = 1200, limit: int = 1 << 16
    ) -> None:
        address = Address.parse("aqueduct://localhost?verify=off")
        client = client_configuration(address, config, ClientTls(verify=False))
        server = server_configuration(config, TLS)
        client.max_datagram_size = server.max_datagram_size = size
        self.client = make(client, config)
        self.server = make(
            server,
            config,
            original_destination_connection_id=self.client.original_destination_connection_id,
        )
        self.now = 1000.0
        self.lose: Callable[[str, int], bool] = lambda way, number: False
        self.limit = limit
        """Bytes of the largest datagram that gets through."""
        self.sent = {"up": 0, "down": 0}
        self.events: dict[str, list[Any]] = {"client": [], "server": []}
        self.client.connect(SERVER, now=self.now)
        self.run()

    def step(self) -> bool:
        """Carries what both have to send; True if there was any."""
        carried = False
        for way, source, target, origin in (
            ("up", self.client, self.server, CLIENT),
            ("down", self.server, self.client, SERVER),
        ):
            for data in self._datagrams(source):
                carried = True
                number = self.sent[way]
                self.sent[way] += 1
                if len(data) <= self.limit and not self.lose(way, number):
                    self._deliver(target, data, origin)
        self._collect()
        return carried

    def run(self, seconds: float = 0.2, tick: float = 0.001) -> None:
        """Steps, and lets time pass in ticks, for so long."""
        end = self.now + seconds
        while self.now < end:
            if not self.step():
                self.now += tick
                for connection in (self.client, self.server):
                    at = connection.get_timer() if connection._close_at is not None else None
                    if at is not None and at <= self.now:
                        connection.handle_timer(self.now)

    def _datagrams(self, source: Any) -> list[bytes]:
        if not source._network_paths:
            return []
        if not isinstance(source, FastConnection):
            return [data for data, _ in source.datagrams_to_send(self.now)]
        outlet = Outlet()
        while source.transmit(self.now, outlet):
            pass
        return outlet.datagrams

    def _deliver(self, target: Any, data: bytes, origin: Any) -> None:
        if isinstance(target, FastConnection):
            target.receive(memoryview(data), origin, self.now)
        else:
            target.receive_datagram(data, origin, self.now)

    def _collect(self) -> None:
        for name, connection in (("client", self.client), ("server", self.server)):
            while (event := connection.next_event()) is not None:
                self.events[name].append(event)


class Outlet:
    """Keeps datagrams."""

    blocked = False

    def __init__(self) -> None:
        self.datagrams: list[bytes] = []

    def send(self, datagrams: Any) -> None:
        self.datagrams += [data for data, _ in datagrams]

    def send_run(self, parts: list[bytes], size: int, address: Any) -> bool:
        run = [b"".join(parts[at : at + 2]) for at in range(0, len(parts), 2)]
        assert all(len(data) == size for data in run[:-1])
        assert len(run[-1]) <= size
        self.datagrams += run
        return True
