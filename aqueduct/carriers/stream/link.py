"""The link under a connection that can be resumed: one channel of Relink each way."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import inf
from typing import Any, Final, Protocol

from aqueduct._speedups.relink.packets import PacketDecoder, encode_message_head, padding_of
from aqueduct._speedups.stream.transport import StreamTransport
from aqueduct._speedups.stream.tunnel import Tunnel
from aqueduct.carriers.stream.bpmux_streams import BpmuxStreams
from aqueduct.carriers.stream.sockets import limit_silence, scratch
from aqueduct.carriers.tls_library import Tls
from aqueduct.config import Config
from aqueduct.errors import LimitExceeded
from aqueduct.protocol.relink import events
from aqueduct.protocol.relink.handshake import LinkAgreement, Opening
from aqueduct.protocol.relink.link import Link
from aqueduct.protocol.relink.state import LinkState

__all__ = [
    "ENDPOINT",
    "CarrierLink",
    "LinkConnection",
    "LinkOwner",
    "RelayedBy",
    "framed",
    "opening",
]

ENDPOINT: Final = "aqueduct-bpmux"
"""The name of what is beneath: the bytes of a multiplexer."""
_CHANNEL: Final = 0
_TAKE: Final = 1 << 20
_LARGE: Final = 64 << 10
_A_LOOK: Final = 0.05  # seconds for the loop to read what is there


def opening(epoch: int = 0, link: int = 0) -> Opening:
    """What a client asks for: ids of no bytes, as there is one channel each way."""
    return Opening(
        ENDPOINT,
        connector_id_size=0,
        listener_id_size=0,
        require_old_link=bool(link),
        old_epoch=epoch,
        old_link=link,
    )


def framed(data: bytes) -> bytes:
    """A message of these bytes, as the channel carries it."""
    head = encode_message_head((_CHANNEL,), 0, (len(data),))
    return head + data + bytes(padding_of(len(data)))


@dataclass(frozen=True, slots=True)
class RelayedBy:
    """The connection of a link by way of another process, in which its TLS ends."""

    local: str
    peer: str
    cipher: str


@dataclass(frozen=True, slots=True)
class LinkConnection:
    """A connection that a link has, with what its handshakes have brought.

    ``answer`` is to be sent first. ``tls`` is None where TLS ends in another process (``relayed``).
    """

    sock: socket.socket
    tls: Tls | None
    agreement: LinkAgreement
    answer: bytes = b""
    relayed: RelayedBy | None = None


class LinkOwner(Protocol):
    """The carrier that a link is of."""

    transport: StreamTransport
    streams: BpmuxStreams

    def cut(self, why: str) -> bool:
        """The connection is gone; whether its link waits for another one."""

    def use_link(self, link: CarrierLink, connection: LinkConnection) -> None:
        """Goes on with this connection."""


class CarrierLink:
    """The core of one link, its clock, and what its tunnels tell of each connection.

    ``cut`` is called without a connection: another one is wanted, or the end is near.
    """

    def __init__(
        self,
        owner: LinkOwner,
        agreement: LinkAgreement,
        config: Config,
        time: Callable[[], float],
        *,
        is_client: bool,
    ) -> None:
        self._settings = settings = replace(
            config.relink,
            window_bytes=config.resume.window,
            message_bytes=max(config.resume.window, 2 * config.relink.message_bytes),
        )
        self.core = Link(agreement.opening, settings, connector=is_client, pieces=True)
        self.epoch, self.identifier = agreement.epoch, agreement.link
        """Both are secret."""
        self.down_since: float | None = None
        """Since when there is no connection, by the loop's time; None: there is one."""
        self.relayed: RelayedBy | None = None
        """By whom the connection that it has comes; None: it is this process's own."""
        self.clear = False
        """Of a link that is over: nothing waited to be sent before its last words."""
        self.messages = 0
        """How many have come whole, over all connections."""
        self._owner = owner
        self._time = time
        self._loop = asyncio.get_running_loop()
        self._tunnel: Tunnel | None = None
        self._sock: socket.socket | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._due = inf
        """When the timer looks; a look that comes early does no harm."""
        self._heard = 0.0
        self._told = 0
        """Bytes kept for the peer, as the account of the process has them."""

    def snapshot(self) -> dict[str, object]:
        """What operators see: state, seconds without a connection, resumes, bytes held."""
        since = self.down_since
        return {
            "state": "up" if since is None else "resuming",
            "resuming": 0.0 if since is None else self._time() - since,
            "resumes": self.core.resumes,
            "held": self.core.held_bytes,
            "relayed": self.relayed is not None,
        }

    # Connections

    def connected(self, connection: LinkConnection) -> Tunnel:
        """A connection begins; returns what its bytes come through."""
        sock, tls, agreement = connection.sock, connection.tls, connection.agreement
        self.relayed = connection.relayed
        self.core.connected(self._time(), resumed=agreement.resumed)
        self.core.events_received()
        decoder = self.core.decoder
        assert decoder is not None
        under = None if tls is None else tls.records
        self._sock, self.down_since = sock, None
        limit_silence(sock, self._settings.ack_deadline)
        tunnel = Tunnel(self, decoder, sock.fileno(), under, scratch("link"))
        self._tunnel = tunnel
        if agreement.left:
            tunnel.feed(agreement.left)
        self._account()
        self._schedule()
        return tunnel

    def go_on(self, connection: LinkConnection) -> None:
        """There is another connection: nothing of the old one counts any more (RL-R18)."""
        if self.down_since is None:
            self.cut()
        self._owner.use_link(self, connection)

    def cut(self) -> None:
        """The connection is gone. What was taken from the multiplexer is kept by the link."""
        taken = self._owner.transport.detach()
        if self._tunnel is not None:
            self.core.hand_over(_CHANNEL, self._tunnel.handed)
            self._tunnel.drop()
            self._tunnel = None
        if self._sock is not None:
            self._sock.close()
            self._sock = None
        self.core.disconnected()
        self.down_since = self._time()
        self._rest()
        self._owner.streams.connection_cut()
        self._owner.streams.written(taken, True)

    def end(self) -> None:
        """The link is over."""
        self.clear = self.core.state is LinkState.UP and self.core.idle
        self._tunnel = None
        self._rest()
        self.core.lose(forget=True)

    # What a tunnel tells and asks

    def take_packet(self, decoder: PacketDecoder) -> None:
        """The tunnel has read a packet that is no message. Raises RemoteProtocolError."""
        self.core.take_packet(decoder, self._time())
        self.core.events_received()
        self._account()
        self._schedule()

    def begin_message(self, decoder: PacketDecoder) -> int:
        """The tunnel has read the head of a message; how many of its bytes came before."""
        if decoder.sizes[0] > self.core.settings.message_bytes:
            raise LimitExceeded(f"a message of {decoder.sizes[0]} bytes on a link")
        if decoder.sizes[0] >= _LARGE:  # it may take long, and the sender is to hear of this side
            self._look_by(self._time() + self._settings.ack_deadline / 4)
        return self.core.begin_message(decoder)

    def end_message(self, decoder: PacketDecoder) -> None:
        """The tunnel has read a message to its end."""
        now = self._time()
        self.messages += 1
        self.core.end_message(decoder, now)
        if self._due > now + self._settings.ack_delay:
            self._schedule()

    def keep(self, parts: list[Any], size: int) -> None:
        """The tunnel sends these bytes as a message."""
        now = self._time()
        self.core.keep(_CHANNEL, parts, size, now)
        self._account()
        if self._due > now + self._settings.ack_deadline / 4:
            self._schedule()

    def may_send(self) -> bool:
        """Whether the tunnel may send a message."""
        core = self.core
        return core.state is LinkState.UP and core.writable(_CHANNEL, 1)

    def waits(self) -> bool:
        """Whether ``take`` has something."""
        return not self.core.idle

    def take(self) -> list[Any]:
        """The next packets, and messages that are sent again."""
        buffers, _ = self.core.take(_TAKE, self._time())
        self._schedule()
        return buffers

    # Within

    def _account(self) -> None:
        kept = self.core.outgoing.outstanding
        if kept != self._told and self._owner.streams.kept(kept - self._told):
            self._told = kept

    def _schedule(self) -> None:
        due = self.core.next_deadline()
        if due is not None:
            self._look_by(due)

    def _look_by(self, due: float) -> None:
        if self._due <= due:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._due = due
        self._timer = self._loop.call_at(due, self._look)

    def _rest(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._due = None, inf

    def _look(self) -> None:
        self._timer, self._due = None, inf
        core, transport = self.core, self._owner.transport
        coming = core.decoder is not None and core.decoder.in_payload
        if coming and transport.reader.relax():
            # A little of a message may have come without waking a task.
            self._look_by(self._time() + _A_LOOK)
            return
        if transport.last_input > self._heard:
            self._heard = transport.last_input
            core.heard(self._heard)
        core.handle_deadline(self._time())
        silent = [event[1] for event in core.events_received() if event[0] == events.SILENT]
        if silent:
            self._owner.cut(silent[0])
            return
        self._schedule()
        if coming:
            self._look_by(self._time() + self._settings.ack_deadline / 4)
        if not core.idle:
            transport.transmit()
