"""What tests of early data share: a listener, a relay that holds packets back, and stores."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import socket
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

from aqueduct.address import Address
from aqueduct.carriers import quic
from aqueduct.carriers.contract import BIDI
from aqueduct.carriers.quic.packets import FastConnection
from aqueduct.carriers.quic.tickets import TicketStore
from aqueduct.carriers.quic.tls import client_configuration
from aqueduct.config import DEFAULT, Config
from aqueduct.testing.datagram_relay import DatagramRelay
from tests.carriers.users import DEADLINE, OVER, TLS, Recorder, met

CONNECT = sys.modules[quic.connect.__module__]
"""Where the store of the process is looked up."""


class Gate(DatagramRelay):
    """A relay that can hold back what clients send after the server's first answer."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.shut = False
        self.deaf = False
        """Whether clients hear nothing."""
        self.answered = False
        self.flight: list[bytes] = []
        """What came from clients before the first answer."""

    def pass_on(self, way: str, data: bytes, send: Callable[[bytes], Any]) -> None:
        if way == "down":
            self.answered = True
            if self.deaf:
                return
        elif not self.answered:
            self.flight.append(data)
        elif self.shut:
            self.dropped += 1
            return
        super().pass_on(way, data, send)


class Again(TicketStore):
    """A store that keeps its first ticket, and gives it out for ever."""

    def keep(self, *arguments: Any) -> None:
        if not len(self):
            super().keep(*arguments)

    def take(self, server: Any, now: float) -> Any:
        kept = next(iter(self._tickets.values()), None)
        return kept[1] if kept is not None and kept[0] == server else None


ON = "dialect=control-streams&early_data=on"
OFF = "dialect=control-streams"
MINE, THEIRS = BIDI, BIDI | 1
"""The first bidirectional stream of this side, and that of the other side."""


def settings(config: Config = DEFAULT, **changes: Any) -> Config:
    return dataclasses.replace(config, quic=dataclasses.replace(config.quic, **changes))


class EarlyUser(Recorder):
    """A user that also keeps what it hears of early data."""

    def __init__(self, carrier: Any, config: Config = DEFAULT) -> None:
        super().__init__(carrier, config)
        self.began_early = False
        self.decisions: list[bool] = []
        self.windows: list[dict[str, Any]] = []
        """Snapshots of before early data and of the decision on it."""

    def connected(self) -> None:
        self.began_early = self.carrier.early
        self.windows.append(self.carrier.snapshot())
        super().connected()

    def early_decided(self, accepted: bool) -> None:
        self._alive()
        self._check(self.began_early and not self.carrier.early, "a decision about nothing")
        self._check(not self.data, "data before the decision")
        self.decisions.append(accepted)
        self.windows.append(self.carrier.snapshot())
        self._check(len(self.decisions) == 1, "decided twice")


class Scene:
    """A listener, and what came to it."""

    def __init__(
        self, door: quic.QuicListener, config: Config, relay: DatagramRelay | None
    ) -> None:
        self.door = door
        self.config = config
        self.relay = relay
        self.port = Address.parse(door.addresses[0]).port
        self.target = Address.parse(door.addresses[0])
        self.accepted: list[EarlyUser] = []
        self.ends: list[EarlyUser] = []

    def accept(self, carrier: Any) -> None:
        self.accepted.append(EarlyUser(carrier, self.config))

    async def client(
        self, config: Config | None = None, tls: Any = None, **options: str
    ) -> EarlyUser:
        """Connects."""
        target = self.target
        target = dataclasses.replace(target, options={**target.options, **options})
        carrier = await quic.connect(target, config or self.config, tls, bidi=True)
        user = EarlyUser(carrier, config or self.config)
        self.ends.append(user)
        await user.until(lambda: user.begun)
        return user

    async def ticket(self, config: Config | None = None, tls: Any = None) -> None:
        """A whole connection, in which the client is given a ticket."""
        came = len(self.accepted)
        user = await self.client(config, tls)
        user.send(0, b"of a connection before", fin=True)
        await (await self.server(came + 1)).until_ended(0)
        await user.until(lambda: user.written_by)  # the ticket came before
        user.carrier.close(0, "")
        await user.until(lambda: user.lost)
        await self.accepted[-1].until(lambda: self.accepted[-1].lost)

    async def server(self, count: int) -> EarlyUser:
        """The user of the connection with this number, once it is there."""
        await met(lambda: len(self.accepted) >= count)
        return self.accepted[count - 1]


@contextlib.asynccontextmanager
async def scene(
    options: str = ON,
    config: Config = DEFAULT,
    *,
    relay: DatagramRelay | None = None,
    tls: Any = TLS,
    host: str = "127.0.0.1",
    port: int = 0,
) -> AsyncIterator[Scene]:
    """Listens; cleaned up at the end."""
    made: list[Scene] = []
    address = Address.parse(f"aqueduct://{host}:{port}?{options}")
    door = await quic.listen(
        address, config, tls, lambda carrier: made[0].accept(carrier), bidi=True
    )
    here = Scene(door, config, relay)
    made.append(here)
    if relay is not None:
        here.target = here.target.with_port(await relay.start(here.port))
    try:
        yield here
    finally:
        for user in (*here.ends, *here.accepted):
            user.carrier.abandon(OVER)
        door.close()
        await asyncio.wait_for(door.wait_closed(), DEADLINE)
        if relay is not None:
            relay.close()
        for user in (*here.ends, *here.accepted):
            assert not user.failures, user.failures


@contextlib.contextmanager
def half_open(address: Address) -> Iterator[None]:
    """A client that sends its first packet and no more."""
    connection = FastConnection(
        client_configuration(address, DEFAULT, quic.ClientTls(verify=False)),
        streams=16,
        initial_window=1000,
    )
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.connect((address.host, address.port))
        connection.connect(sock.getpeername(), now=0.0)
        for data, _where in connection.datagrams_to_send(0.0):
            sock.send(data)
        yield
