"""What a carrier gives to the channels above it, and what it calls.

A carrier moves the bytes of streams and datagrams between two peers and knows nothing of
channels. One object of class Carrier is one live connection; its user is a CarrierUser
(see ``_speedups.pump``), installed with ``attach`` before anything is reported.

Stream numbers: each side numbers the streams that it opens 0, 1, 2, ... in the order of opening,
and the carrier opens them in that order. So a number names a stream of *mine* in ``write``,
``reset``, ``written`` and ``stopped``, and a stream of the *peer's* in ``stop``, ``credit``,
``stream_data`` and ``stream_reset``; no table maps one to the other.

Bidirectional streams are there if both sides have asked for them (``Carrier.bidi``). Their numbers
begin at ``BIDI``, which tells them from unidirectional streams. The k-th that this side opened
(k = 0, 1, 2, ...) is ``BIDI | k << 1``, the k-th that the peer opened ``BIDI | k << 1 | 1``. All
calls above take these numbers, of mine and of the peer's. Each stands for one direction alone:
``write``, ``reset``, ``written`` and ``stopped`` for what I send, the others for what the peer
sends. An end, a reset or a stop of one direction leaves the other one as it is.

A side opens a bidirectional stream by its first ``write``. The peer may hear of it by any report,
a ``stream_reset`` or ``stream_stopped`` included; from then on it may write, too. Each direction
begins with ``Flow.initial_window`` bytes of credit. A side lets the peer have
``Limits.channels`` + 1 of its bidirectional streams open at once, as a control stream lives as long
as its channel. A byte stream has fewer if ``Bpmux.entities`` is lower. A slot returns when both
directions have ended.

Early data (0-RTT): a carrier may be connected before its handshake is complete, if it is told to.
Then ``Carrier.early`` is true until ``CarrierUser.early_decided``, which it calls once. What a
client writes meanwhile is early data, and a server that rejects it reports nothing of it. What a
server is told meanwhile may be a replay. A rejection makes the client's carrier forget the streams
that were opened so far. Their numbers are not used again.

Threads: everything of one carrier happens on the event loop that made it.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from aqueduct._speedups.channels.receiver import DirectRead
from aqueduct.address import Address
from aqueduct.errors import ConnectionLost
from aqueduct.protocol.common.effects import BIDI

__all__ = [
    "BIDI",
    "Bound",
    "Buffer",
    "Carrier",
    "CarrierUser",
    "Listener",
    "PeerCredentials",
    "PeerIdentity",
    "Siblings",
]

Buffer: TypeAlias = bytes | bytearray | memoryview
"""Anything with the buffer protocol, one dimension of bytes, contiguous."""


@dataclass(frozen=True, slots=True)
class PeerCredentials:
    """The process at the other end, as the kernel of this machine names it."""

    pid: int
    """Its process id when it connected (or listened); 0 where the system does not tell."""
    uid: int
    """Its effective user id then."""
    gid: int
    """Its effective group id then."""


@dataclass(frozen=True, slots=True)
class PeerIdentity:
    """Who the peer's certificate says it is.

    It is as good as the check that the certificate has passed: a server has checked those of its
    clients against ``ServerTls.client_ca``, a client with ``verify=off`` has checked nothing.
    """

    fingerprint: str
    """``sha256:HEX`` of the certificate."""
    subject: str
    """The subject, as RFC 4514 writes it."""
    names: tuple[str, ...]
    """The alternative names: DNS names, then URIs, mail addresses and IP addresses."""


class CarrierUser(Protocol):
    """What a carrier calls. No call may raise; each is quick; ``end_of_input`` ends each burst."""

    def connected(self) -> None:
        """Streams may be opened, and properties are final.

        The transport's handshake is complete, unless ``Carrier.early`` says that it is not.
        """

    def early_decided(self, accepted: bool) -> None:
        """Early data is decided on: once, after ``connected``, if ``Carrier.early`` was true then.

        ``Carrier.early`` is false from now on. A client whose data was not ``accepted``: nothing
        that it wrote on streams will arrive, nor any datagram. ``Carrier.openable`` and
        ``Carrier.bidi_openable`` count without those streams. A server: always ``accepted``. The
        handshake is complete, or the transport has ruled out a replay.
        """

    def stream_data(self, stream: int, data: Buffer, fin: bool) -> None:
        """The next bytes of the peer's stream, in order. ``data`` may be empty with ``fin``."""

    def inlet(self, stream: int) -> DirectRead | None:
        """Where the next bytes of the peer's stream go without a report for each read.

        Never asked for a bidirectional stream.

        Open until ``inlet_done``, before which nothing else is reported and the event loop does
        not turn; or let go of, if nothing else was reported and it is ``idle``. None: hand them to
        ``stream_data``. The end of the stream comes by that, too.
        """

    def inlet_done(self, stream: int) -> None:
        """The inlet of the stream is closed; what came by it is looked at now."""

    def stream_reset(self, stream: int, code: int) -> None:
        """The peer gave up its stream; bytes not yet reported are gone."""

    def stream_stopped(self, stream: int, code: int) -> None:
        """The peer reads no more of my stream; what was queued is dropped.

        It may come after all of the stream has left, with its end.
        """

    def datagram_received(self, data: bytes) -> None:
        """One datagram."""

    def openable_changed(self) -> None:
        """``Carrier.openable`` or ``Carrier.bidi_openable`` grew."""

    def datagram_room_changed(self) -> None:
        """``Carrier.datagram_room`` grew, or ``Carrier.datagram_limit`` is another."""

    def written(self, stream: int, size: int) -> bool:
        """``size`` bytes of my stream left the carrier's queue; their buffers are released.

        Returns whether the user has something to do about it: only then ``end_of_input`` has to
        follow. Over QUIC bytes have left when the peer has acknowledged them: until then they may
        be needed again. With a link they have left once, and are ``kept`` from then on. Bytes
        dropped by a reset, a stop or a lost connection are not reported.
        """

    def kept(self, size: int) -> None:
        """``size`` more bytes that have left are kept for another connection; below 0: fewer.

        A link keeps them until its peer has acknowledged them, up to Resume.window.
        """

    def ponged(self) -> None:
        """The peer's transport answered the last ``Carrier.ping``."""

    def end_of_input(self) -> None:
        """The carrier has reported all that it had; the user answers with its effects now."""

    def closed(self, error: ConnectionLost) -> None:
        """The connection is over, whatever ended it. Called once, and nothing is called after."""


class Carrier(Protocol):
    """One connection. Methods queue and return at once; ``flush`` lets the queue leave.

    What is queued during a call of CarrierUser leaves after ``end_of_input`` without a flush.
    After ``close``, or when the connection is over, every method that queues is without effect.
    """

    is_client: bool
    scheme: str
    loopback: bool
    """Both ends are on this machine, and what is under way lies in a socket's buffers there."""

    @property
    def early(self) -> bool:
        """It is connected, and its handshake is not complete; false wherever there is no such data.

        A client: what is written now is early data. A server: what is reported now may be a replay.
        """

    @property
    def suspended(self) -> bool:
        """It has no connection for now, and is to be resumed: nothing can move."""

    @property
    def resumes(self) -> int:
        """How often it went on with another connection below it."""

    @property
    def peer(self) -> str:
        """The peer's address as text, for errors and logs."""

    @property
    def local(self) -> str:
        """This side's address as text."""

    @property
    def peer_certificate_fingerprint(self) -> str | None:
        """``sha256:HEX`` of the peer's certificate, if it showed one."""

    @property
    def peer_identity(self) -> PeerIdentity | None:
        """Who the peer's certificate says it is, if it showed one."""

    @property
    def peer_credentials(self) -> PeerCredentials | None:
        """The process at the other end, where the kernel vouches for it: Unix sockets, memory."""

    @property
    def rtt(self) -> float:
        """The smoothed round-trip time, seconds; 0.0 before the first sample."""

    @property
    def datagram_limit(self) -> int:
        """The largest payload of ``send_datagram``, bytes; 0: datagrams are not to be had."""

    @property
    def datagram_room(self) -> int:
        """How many datagrams the queue takes now; the next one is dropped."""

    @property
    def openable(self) -> int:
        """How many more unidirectional streams may be opened now."""

    @property
    def bidi(self) -> bool:
        """Whether the connection has bidirectional streams; final once it is handed on."""

    @property
    def bidi_openable(self) -> int:
        """How many more bidirectional streams may be opened now; 0 if the connection has none."""

    def attach(self, user: CarrierUser) -> None:
        """Installs the user, once. Before it, nothing is reported; nothing is during it."""

    def write(self, stream: int, buffers: Sequence[Buffer], fin: bool) -> None:
        """Queues bytes on my stream, opening it if it is the next number.

        The buffers are not copied here and must not change until they are reported ``written``.
        Raises LocalProtocolError above ``openable`` or ``bidi_openable``, or after ``fin`` or
        ``reset``. On a stream
        that the peer has stopped it is without effect.
        """

    def reset(self, stream: int, code: int) -> None:
        """Gives up my stream: what is queued is dropped. Without effect on one that ended."""

    def stop(self, stream: int, code: int) -> None:
        """Asks the peer to send no more on its stream. Without effect on one that ended."""

    def credit(self, stream: int, limit: int) -> None:
        """Lets the peer send on its stream up to ``limit`` bytes, counted from its start.

        A limit never falls; a lower one is without effect. A stream begins with
        ``Flow.initial_window``.
        """

    def extra_streams(self, count: int) -> None:
        """Gives the peer ``count`` slots beside ``Flow.streams``; below zero: keeps them back.

        They are of unidirectional streams.

        Replaces the count given before. A slot returns by itself when the end of its stream (or
        its reset) was reported. A user that keeps the data of ended streams holds their slots
        back, or the peer could fill it with ever new streams of one initial window each. Streams
        that live as long as something above them are made up for by more slots. Slots already
        given are not taken back.
        """

    def send_datagram(self, data: bytes) -> bool:
        """Sends a datagram, or drops it and says False (too large, none to be had, queue full)."""

    def ping(self) -> None:
        """Makes the peer's transport answer (``CarrierUser.ponged``), which keeps it alive."""

    def expect_input(self) -> None:
        """The user waits for what the peer sends within moments: an answer, the next call.

        A hint. A carrier may look for it for a moment, rather than let its event loop sleep.
        """

    def flush(self) -> None:
        """Lets queued bytes leave as far as flow and congestion control allow.

        Within it bytes may be reported as ``written``, and then no ``end_of_input`` follows.
        """

    def snapshot(self) -> dict[str, object]:
        """Counters and windows for people: plain numbers and strings only.

        ``congestion_window``, ``in_flight`` (bytes) and ``packets_lost`` where it has such.
        """

    def close(self, code: int, reason: str, *, linger: float = 0.0) -> None:
        """Closes. Queued data leaves first, for at most ``linger`` seconds, then the close.

        ``CarrierUser.closed`` follows when the peer has taken it, or has had a few seconds for it,
        and nothing is left open. Repeated calls are without effect.
        """

    def abandon(self, error: ConnectionLost) -> None:
        """Ends it now, and leaves nothing open. The peer is told if that takes no time.

        ``CarrierUser.closed`` follows, unless the connection is over already.
        """


class Listener(Protocol):
    """Accepts connections; each new carrier is handed to the callback it was made with."""

    @property
    def addresses(self) -> Sequence[str]:
        """The addresses that clients can use, with real port numbers."""

    def close(self) -> None:
        """Accepts no more. Live connections go on (they keep what they need open)."""

    async def wait_closed(self) -> None:
        """Returns when the last of its connections has ended and the sockets are closed."""


@dataclass(frozen=True, slots=True)
class Siblings:
    """The processes that share an address, for what one of them has and another one is asked for.

    They are numbered from 0, and each keeps its number when it is replaced.
    """

    number: int
    """Of this process."""
    paths: tuple[str, ...]
    """Where each takes what others hand to it: files of Unix sockets, in a private directory."""
    epoch: int
    """When the first process began, in microseconds since 1970: clients tell instances by it."""


@dataclass(frozen=True, slots=True)
class Bound:
    """An address with the sockets that listen there already, for a listener to take over.

    Processes that share an address get one each: the process that started them has bound the
    sockets and keeps them, so that the address outlives any of those that serve it.
    """

    address: Address
    """With its real port."""
    sockets: tuple[socket.socket, ...]
    """One for each place that the address names; bound, and listening where the kind listens."""
    release: Callable[[], None] | None = None
    """Removes what the address leaves behind beside its sockets: the file of a Unix socket."""
    siblings: Siblings | None = None
    """The processes with which the address is shared, if they hand connections to each other."""

    def close(self) -> None:
        """For the code that has bound it: this process frees the address."""
        for sock in self.sockets:
            sock.close()
        if self.release is not None:
            self.release()
