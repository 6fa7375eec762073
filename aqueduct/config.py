"""Every limit, window and timeout, as frozen dataclasses with the defaults of the design.

Sizes are in bytes and times in seconds, or text: ``Timing(idle_timeout="2min")``,
``Flow(receive_budget="32m")``; ``aqueduct.arguments`` has the units. A value that cannot work
raises ConfigError at once.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, Final, SupportsIndex, TypeAlias

from aqueduct.arguments import Kind, an_instance, check_fields, debug_asked
from aqueduct.errors import ConfigError

__all__ = [
    "COMPRESSIONS",
    "DEFAULT",
    "Admin",
    "Bpmux",
    "ByteStream",
    "Calls",
    "Config",
    "Flow",
    "Limits",
    "Quic",
    "ReactiveSocket",
    "Relink",
    "Resume",
    "Sinks",
    "Tables",
    "Timing",
    "memory_bytes",
    "quarter_of_memory",
]

KiB: Final = 1 << 10
MiB: Final = 1 << 20
GiB: Final = 1 << 30
_CONGESTION_NAME: Final = 15  # TCP_CA_NAME_MAX of Linux, less the final zero
_BACKLOG: Final = (1 << 31) - 1
_DAY: Final = 86_400  # seconds
COMPRESSIONS: Final = ("lz4", "zstd")
"""Those of Arrow, in the order of its ``CompressionType``."""

_FALLBACK: Final = 4 << 30  # bytes, where the system does not tell
_LEAST: Final = 64 << 20
_HOST_NAME: Final = re.compile(r"(?a)[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?")
_GROUPS: Final = Path("sys/fs/cgroup")


def memory_bytes(root: Path = Path("/")) -> int:
    """Bytes of memory that this process may have.

    That is the memory of the machine (``proc/meminfo`` below ``root``), or the limit of the
    process's control group or a group above it, whichever is least. Groups may be of version 1 or
    2.
    """
    limits = [_machine_bytes(root), *_group_limits(root)]
    return min((limit for limit in limits if limit), default=_FALLBACK)


@lru_cache(1)
def quarter_of_memory() -> int:
    """A quarter of what this process may have, at least 64 MiB. It is looked up once."""
    return max(memory_bytes() // 4, _LEAST)


def _machine_bytes(root: Path) -> int:
    for line in _lines(root / "proc/meminfo"):
        name, _, rest = line.partition(":")
        words = rest.split()
        if name == "MemTotal" and words and words[0].isdigit():
            return int(words[0]) << 10
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):  # not of every system
        return 0


def _group_limits(root: Path) -> Iterator[int]:
    """The limits that are set; those of a group hold for all that are in it."""
    for line in _lines(root / "proc/self/cgroup"):
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            where, name = root / _GROUPS, "memory.max"
        elif "memory" in controllers.split(","):
            where, name = root / _GROUPS / "memory", "memory.limit_in_bytes"
        else:
            continue
        group = where / path.strip("/")
        for folder in (group, *group.parents):
            for text in _lines(folder / name):
                if text.strip().isdigit():  # "max": there is none
                    yield int(text)
            if folder == where:
                break


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except (OSError, UnicodeDecodeError):  # no such file here
        return []


# The type of a setting says how it is read and checked; see ``aqueduct.arguments.FIELDS``.
Bytes: TypeAlias = int
Count: TypeAlias = int
Seconds: TypeAlias = float
Share: TypeAlias = float


def _require_at_most(settings: Any, most: int, *names: str) -> None:
    for name in names:
        if getattr(settings, name) > most:
            raise ConfigError(
                f"{type(settings).__name__}.{name} is {getattr(settings, name)!r}; "
                f"a socket takes at most {most} bytes"
            )


@dataclass(frozen=True, slots=True)
class Limits:
    """What a peer may ask of this side before the connection closes (AQ-R31)."""

    frame_bytes: Bytes = 16 * MiB
    """The largest frame; a MESSAGE counts with headers, attachments and payload."""
    header_bytes: Bytes = 64 * KiB
    """The largest block of header data."""
    block_bytes: Bytes = 4 * MiB
    """The largest block of attachments, or of ranges in an ack: they are held whole."""
    attachments: Count = 1024
    """Attachments in one message."""
    channels: Count = 100_000
    """Channels of one connection that have state, counting attachments not yet taken. Those of up
    to 4 calls that have just been answered count until they are said to be closed, 25 ms later at
    most."""
    connections: Count = 16_384
    """Connections of a process, of all its services and clients together. A listener of
    aqueduct.relink counts its links by themselves."""
    unacknowledged: Count = 1 << 20
    """Unacknowledged messages of one sender; above it, sending waits."""
    received_ranges: Count = 65_536
    """Ranges of received message numbers of one channel, that is, holes plus one."""
    destroyed_ranges: Count = 1 << 16
    """Ranges of destroyed indexes kept for each of the remote channel spaces (AQ-R24)."""
    unready_connections: Count = 512
    """Connections of a server whose peer has not sent its connection headers. Above this the
    address with the most silent connections loses its oldest one (Timing.handshake_silence)."""
    connections_address: Count | None = None
    """Connections of a server from one IP address, one IPv6 network of 64 bits, or one process
    behind a Unix socket. None: any number, for sidecars and NAT have one address for all."""
    early_datagrams: Count = 64
    """Datagrams kept until the peer's CONNECTION_HEADERS arrive (AQ-R10)."""
    early_datagram_bytes: Bytes = 1 * MiB
    """The bytes of those datagrams."""
    early_bytes: Bytes = 64 * KiB
    """Bytes on streams that a client sends as early data (0-RTT), and that a server holds of it.
    Each stream counts as 512 more. Above this a client waits for the handshake to be complete, and
    a server closes the connection. A server over QUIC holds none: once it has taken a ticket back,
    Flow.initial_window and Flow.receive_budget bound what comes, as for any other data."""

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, slots=True)
class Flow:
    """Windows, budgets and marks: how much may be under way."""

    receive_budget: Bytes = 64 * MiB
    """Received bytes that one connection holds. They count from the first byte of a batch until its
    handler or reader asks for the next one, ends, or frees it. Above this one batch goes on at a
    time: the oldest whose handler or reader waits."""
    process_receive_budget: Bytes = 0
    """The same for all connections of a process. 0: a quarter of the memory of the machine, or of
    the process's control group. While others wait, one connection holds at most half of it."""
    process_send_budget: Bytes = 0
    """Bytes to be sent that all connections of a process hold, until they have left, and what their
    links keep (``Resume.window``). 0: a quarter of the memory, as above. ``connection_high_water``
    is the same for one connection, without its link.

    It bounds what services answer, and large batches (256 KiB and more) that clients pull from the
    input of their calls. While it is full, a call waits before it pulls a large batch, or its first
    one for a handler. One batch at a time may exceed the budget: that of a call whose reader waits.
    If nothing leaves for half of Timing.progress_deadline, a call goes on above the budget, and the
    log says so. A pull that takes longer than Timing.stall_deadline holds up no others.
    """
    stall_rate: Bytes = 64 * KiB
    """Bytes a second that a batch must gain while others wait for its room. A batch that gains less
    for Timing.stall_deadline fails with `busy`."""
    channel_receive_bytes: Bytes = 16 * MiB
    """Bytes of one channel that were received and not yet taken; one message is always admitted."""
    message_overhead: Bytes = 512
    """What a message is charged beside its declared size."""
    initial_window: Bytes = 64 * KiB
    """What a peer may send on a stream before anything of it is admitted."""
    read_ahead: Bytes = 4 * MiB
    """How far a stream of large messages may run ahead of the admitted one; charged."""
    # Measured on an echo of 1 MiB: 512 KiB has 0.78 of the speed, 4 MiB 0.93.
    loopback_read_ahead: Bytes = 1 * MiB
    """The same at most over TCP and TLS while as much is sent as is received, if both ends are on
    this machine. There is no way that has to be filled: what runs ahead lies in the machine's
    memory, and is read back from there once it is more than the processors' caches hold."""
    admitted_window: Bytes = 8 * MiB
    """How far ahead of the landed bytes an admitted message is credited."""
    channel_high_water: Bytes = 8 * MiB
    """Queued bytes of one sender above which its sends wait."""
    channel_hard_limit: Bytes = 64 * MiB
    """Queued bytes of one sender from which ``send_nowait`` raises SendQueueFull."""
    connection_high_water: Bytes = 64 * MiB
    """Queued bytes of a connection above which all sends wait."""
    streams: Count = 1024
    """Unidirectional streams that the peer may have open at once, beside those of channels."""
    channel_streams: Count = 8192
    """Streams beyond ``streams`` that live channels may keep open, at most two each: the stream of
    an ORDERED channel and that of the acks live as long as their channel."""
    unordered_streams: Count = 32
    """Streams that one channel in UNORDERED mode uses at once."""
    wake_up: Count = 1024
    """Frames, attachments and new streams of one connection that are worked on before others have
    their turn. Messages without attachments do not count: their bytes do (ByteStream.wake_up)."""
    control_share: Share = 0.25
    """The share of openable streams that only control streams may use."""

    zero_allowed: ClassVar[tuple[str, ...]] = ("process_receive_budget", "process_send_budget")

    def __post_init__(self) -> None:
        check_fields(self)
        if self.control_share >= 1:
            raise ConfigError(
                f"Flow.control_share is {self.control_share!r}; it must be below 1, "
                "or no message could ever be sent"
            )
        if self.channel_hard_limit < self.channel_high_water:
            raise ConfigError(
                f"Flow.channel_hard_limit ({self.channel_hard_limit}) must not be below "
                f"Flow.channel_high_water ({self.channel_high_water})"
            )
        if self.streams < 8:
            raise ConfigError(f"Flow.streams is {self.streams!r}; at least 8 are needed")

    @property
    def process_receive_bytes(self) -> int:
        """``process_receive_budget``, or what it is by default on this machine."""
        return self.process_receive_budget or quarter_of_memory()

    @property
    def process_send_bytes(self) -> int:
        """``process_send_budget``, or what it is by default on this machine."""
        return self.process_send_budget or quarter_of_memory()


@dataclass(frozen=True, slots=True)
class Timing:
    """Delays and deadlines, in seconds (AQ-R33 for the first four)."""

    ack_delay: Seconds = 0.025
    """A received message is acknowledged within this."""
    sent_unreliable_delay: Seconds = 0.05
    """Unreliable messages are announced within this."""
    receipt_deadline: Seconds = 1.0
    """Announced and unseen for max(this, 2 RTT): lost."""
    destroyed_memory: Seconds = 1.0
    """FORGET_CHANNELs for one channel are this far apart, and follow its close by this (AQ-R24)."""
    connect_timeout: Seconds = 10.0
    """For the transport's handshake and the exchange of connection headers together."""
    handshake_silence: Seconds = 0.4
    """Silence after which a peer that has sent nothing may lose its place to another one. This only
    happens while all places of handshakes are taken (ByteStream.half_open, Quic.half_open). A
    peer that has begun its handshake has twice as long for each step; single bytes are no step."""
    idle_timeout: Seconds = 30.0
    """A peer silent for this long is gone."""
    ping_interval: Seconds = 10.0
    """While calls are open, silence is broken by a ping this often."""
    progress_deadline: Seconds = 60.0
    """A call without a deadline of its own fails after this long without any progress."""
    stall_deadline: Seconds = 5.0
    """A batch that gains less than Flow.stall_rate for this long, while others wait for its room,
    fails. After this long others go on beside a batch above the budget that is still in use."""
    close_linger: Seconds = 5.0
    """A close lets queued data out for at most this long. A service whose drain is over has a tenth
    of it for clients of ReactiveSocket."""
    drain_timeout: Seconds = 25.0
    """A service ends within this time of its signal: less than the 30 s that Kubernetes gives.

    Open calls have all of it but the last quarter, or but the last 2 s if that is less. What
    ``on_stop`` functions have is no part of that.
    """
    drain_delay: Seconds = 0.0
    """Of ``drain_timeout``: how long a service is not ready and still takes calls, so that a load
    balancer that asks for its readiness sends it none by the time it takes no more."""
    start_timeout: Seconds = 240.0
    """For all ``on_start`` functions of a service together. A worker process has 300 s in all."""
    stop_timeout: Seconds = 5.0
    """For all ``on_stop`` functions together. They have a quarter of ``drain_timeout`` at most, or
    one second if that is more."""
    certificate_check: Seconds = 10.0
    """A service looks this often whether the files of its certificate, key and client CAs have
    changed; 0: never."""

    zero_allowed: ClassVar[tuple[str, ...]] = (
        "ack_delay",
        "certificate_check",
        "close_linger",
        "drain_delay",
        "drain_timeout",
        "handshake_silence",
    )

    def __post_init__(self) -> None:
        check_fields(self)
        if self.drain_delay and self.drain_delay >= self.drain_timeout:
            raise ConfigError(
                f"Timing.drain_delay ({self.drain_delay!r} s) must be below Timing.drain_timeout "
                f"({self.drain_timeout!r} s), or open calls have no time to end"
            )
        if self.ack_delay > 1.0:
            raise ConfigError(f"Timing.ack_delay is {self.ack_delay!r} s; at most 1 s (AQ-R33)")
        if self.ping_interval >= self.idle_timeout:
            raise ConfigError(
                f"Timing.ping_interval ({self.ping_interval!r} s) must be below "
                f"Timing.idle_timeout ({self.idle_timeout!r} s), or idle calls are cut"
            )


@dataclass(frozen=True, slots=True)
class Quic:
    """The QUIC carrier."""

    datagram_size: int | str = "auto"
    """Bytes of a UDP payload. "auto": 1,200 at first, then as many as the path is found to take. A
    number fixes it. Datagrams above 16,383 are not read."""
    socket_buffer: Bytes = 4 * MiB
    """Asked of the kernel for each direction of a UDP socket."""
    transport_buffer: Bytes = 2 * MiB
    """Bytes in flight on one connection: a cap on the congestion window, which nothing else
    bounds on a path without loss."""
    backlog: Count = 1024
    """First packets of one listener that wait for a place. Above this a new one is dropped; its
    client sends it again, later and later."""
    half_open: Count = 256
    """Connections of one listener whose handshake is not complete. Above this a new one takes the
    place of one that was silent for Timing.handshake_silence, or waits in the backlog."""
    gaps: Count = 512
    """Gaps in what has come of one stream, where packets were lost. A peer that leaves more is cut
    off, for each of its packets costs the more work, the more gaps there are."""
    congestion_control: str = "reno"
    """"reno" or "cubic"."""
    tickets: Count = 1024
    """Tickets for early data that a listener has given out and takes back. Above this the oldest is
    forgotten: a connection with it sends its early data again. A client's process keeps as many for
    all its servers, at most 8 of one server, each with up to 16 KiB of certificates. If its
    connections have several of these settings, the largest counts for the process."""
    ticket_lifetime: Seconds = 3600.0
    """Such a ticket is of use for so long, at most for a day."""

    def __post_init__(self) -> None:
        check_fields(self)
        _require_at_most(self, GiB, "socket_buffer")
        if self.ticket_lifetime > _DAY:
            raise ConfigError(
                f"Quic.ticket_lifetime is {self.ticket_lifetime!r}; it must be at most {_DAY} s, a "
                "day: aioquic's tickets are valid for so long"
            )
        size = self.datagram_size
        if size != "auto" and (isinstance(size, str) or not 1200 <= size <= 16383):
            raise ConfigError(
                f"Quic.datagram_size is {size!r}; it must be 'auto' or 1200 to 16383 bytes"
            )
        if self.congestion_control not in ("reno", "cubic"):
            raise ConfigError(
                f"Quic.congestion_control is {self.congestion_control!r}; 'reno' or 'cubic'"
            )


@dataclass(frozen=True, slots=True)
class Bpmux:
    """bpmux/rel, the multiplexer of byte streams."""

    chunk: Bytes = 256 * KiB
    """Payload bytes that one sink sends before it is another's turn."""
    opening: Bytes = 64 * KiB
    """The most bytes of a byte stream that travel with its opening chunk, on top-level credit."""
    entities: Count = 65_536
    """Entities of each kind and direction; a peer that opens more is cut off (BP-R12)."""
    payload_bytes: Bytes = 64 * MiB
    """The largest payload that is put together from its pieces (BP-R12)."""
    connection_bytes: Bytes = 64 * MiB
    """Received bytes that one connection of ``aqueduct.bpmux`` holds until the application takes
    them, over all entities. It grants credit only while there is room. One payload may be completed
    above this. The limit also holds for the bytes that wait to be sent (BP-R12)."""
    wake_up: Count = 256
    """Chunks of one connection that are read before others have their turn."""
    closing_deadline: Seconds = 30.0
    """After the peer has ended the top level, open entities go on. When nothing has moved for this
    long, the connection is closed (BP-R14)."""
    unanswered_pings: Count = 1024
    """Pings of the peer whose answers wait to leave; a peer that sends more does not read."""
    pong_deadline: Seconds = 30.0
    """A ping without an answer for this long is reported (BP-R11)."""

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, slots=True)
class Relink:
    """Relink, links that survive cut connections."""

    message_bytes: Bytes = 64 * MiB
    """The largest message that is received, all its parts together."""
    parts: Count = 65_536
    """Parts of one received message."""
    targets: Count = 1024
    """Channels that one received packet addresses."""
    targets_without_id: Count = 8
    """The same where ids take no bytes: a packet of 8 bytes would cause work without an end."""
    channels: Count = 4096
    """Channels of one link in each direction; a peer that opens more is cut off. Each that is open
    counts for 4 KiB of what the link keeps."""
    window_messages: Count = 65_536
    """Messages of one channel that the receiver has not consumed. Above this, sending waits."""
    window_bytes: Bytes = 64 * MiB
    """What messages of all channels of a link cost that the receiver has not consumed or answered:
    their bytes, 128 for each, and 64 for each part. Above this, sending waits. A channel of which
    nothing waits at the receiver may send its next message up to twice this, and a message alone
    may be larger. Transactions that are not committed yet have at most this together, and the
    oldest of them has it for itself."""
    receive_bytes: Bytes = 144 * MiB
    """What received messages of one link cost that the application has not consumed. Above this
    nothing more is read from the connection. While this side waits for an acknowledgement it reads
    up to twice this. Less than twice the peer's window_bytes and a message can make both sides wait
    for each other. So much may also come of transactions that are not committed yet."""
    unconfirmed_results: Count = 65_536
    """Runs of equal results, committed or not, that the sender of a channel may not know yet."""
    unanswered_pings: Count = 1024
    """Pings of the peer whose answers wait to leave; a peer that sends more does not read."""
    ack_delay: Seconds = 0.025
    """What was received and consumed is acknowledged within this."""
    ack_bytes: Bytes = 1 * MiB
    """So many received bytes are acknowledged at once."""
    ack_deadline: Seconds = 5.0
    """A connection on which something is unacknowledged, and which moves no byte for this long, is
    given up. So is one whose peer has read messages and acknowledges none for so long (RL-R17)."""
    ping_interval: Seconds = 15.0
    """Silence after which a ping is sent (RL-R17)."""
    silence: Seconds = 45.0
    """A connection without a byte from the peer for this long is given up (RL-R17)."""
    handshake_deadline: Seconds = 10.0
    """For the whole handshake (RL-R5)."""
    keep: Seconds = 60.0
    """A link without a connection is dropped after this long (RL-R16)."""
    kept_links: Count = 10_000
    """Links without a connection, of all listeners of an event loop, as a service has one for all
    its addresses; the oldest goes first (RL-R18)."""
    kept_bytes: Bytes = 256 * MiB
    """Bytes that those links hold."""
    links_bytes: Bytes = 0
    """Bytes that all links of one listener hold, with a connection or without one. Above this the
    link that holds most is dropped. 0: a quarter of the memory, as Flow.process_receive_budget."""
    unknown_links: Count = 100
    """Unknown links that are answered in a second; others are closed without an answer."""
    resumes: Count = 100
    """Resumes of one link in a second; more wait. One of 256 channels counts as two."""
    redial_first: Seconds = 0.1
    """The delay before the second attempt to reconnect; the first one is made at once. It doubles
    with each attempt, and each is moved at random by up to a half."""
    redial_most: Seconds = 10.0
    """The longest delay between two attempts."""

    zero_allowed: ClassVar[tuple[str, ...]] = ("ack_delay", "keep", "links_bytes")

    def __post_init__(self) -> None:
        check_fields(self)
        if self.ping_interval >= self.silence:
            raise ConfigError(
                f"Relink.ping_interval ({self.ping_interval!r} s) must be below Relink.silence "
                f"({self.silence!r} s), or idle connections are cut"
            )
        if self.redial_first > self.redial_most:
            raise ConfigError(
                f"Relink.redial_first ({self.redial_first!r} s) must not be above "
                f"Relink.redial_most ({self.redial_most!r} s)"
            )

    @property
    def all_links_bytes(self) -> int:
        """``links_bytes``, or what it is by default on this machine."""
        return self.links_bytes or quarter_of_memory()


@dataclass(frozen=True, slots=True)
class ReactiveSocket:
    """ReactiveSocket, requests that are answered as items are asked for."""

    frame_bytes: Bytes = 16 * MiB
    """The largest frame that is received or sent, without its length. A peer that sends a larger
    one, such as a request, gets an ERROR of the connection, which ends. A larger item is sent in
    fragments, which peers of the draft's time cannot put together (RS-R8)."""
    item_bytes: Bytes = 64 * MiB
    """The largest item, put together from its fragments; a larger one is cancelled (RS-R8)."""
    fragments: Count = 65_536
    """Fragments of one item."""
    fragments_bytes: Bytes = 128 * MiB
    """What fragments of all items of a connection cost that are not whole: their bytes, and 256
    for each. The stream whose fragment is above this is cancelled."""
    setup_bytes: Bytes = 64 * KiB
    """The data of a SETUP; a server closes for a larger one. So does it for as many bytes of a
    handshake of a WebSocket."""
    streams: Count = 16_384
    """Streams of one connection that are open, of each requester. More requests of the peer are
    answered with ERROR. Each stream counts for 1 KiB of what the connection holds. So does each
    request without an answer until it is done with. While as many coroutines answer requests,
    further ones of these are dropped."""
    receive_bytes: Bytes = 64 * MiB
    """What received requests and items of one connection cost that the application has not done
    with: their bytes, and 256 for each. Above this nothing more is read from the connection. If
    one of its streams waits to be asked for items, further requests are rejected instead."""
    send_bytes: Bytes = 64 * MiB
    """What frames cost that wait to leave: their bytes, and 256 for each. Above this requests and
    items are refused; one may be larger alone."""
    unsent_answers: Count = 1024
    """Errors and cancels that the peer has caused and that wait to leave. While so many do nothing
    more is read from the connection. A peer that takes none of them is given up."""
    json_values: Count = 1_000_000
    """Values, names and brackets of a request in JSON, about as many objects of Python. They are
    counted before any is made; a request with more is refused. So is one whose columns have more
    values: what a row lacks is one there, and a null list of fixed size has many."""
    first_demand: Seconds = 30.0
    """A request for 0 items ends with an ERROR when no REQUEST_N came for so long (RS-R6)."""
    idle_demand: Seconds = 300.0
    """A stream of a service ends with an ERROR when the client has all the items that it asked for,
    and asks for no more for so long. Subscriptions do not. It is looked at each quarter of
    Timing.progress_deadline."""
    ping: Seconds = 15.0
    """Silence after which a WebSocket is pinged. A peer that is silent for three times as long is
    gone. The other carriers have no pings: there the kernel looks (ByteStream.keepalive)."""

    def __post_init__(self) -> None:
        check_fields(self)
        if not 256 <= self.frame_bytes <= GiB:
            raise ConfigError(
                f"ReactiveSocket.frame_bytes is {self.frame_bytes!r}; it must be 256 to {GiB} bytes"
            )


@dataclass(frozen=True, slots=True)
class Resume:
    """Links under calls: what ``resume`` of an address brings, with Relink beneath it."""

    window: Bytes = 8 * MiB
    """Bytes of one connection that were sent and that the peer has not acknowledged. They are kept,
    by reference, to be sent again; above this, sending waits."""
    plain_for: Seconds = 600.0
    """A server that knows no links is dialled plainly for this long, without being asked again."""
    hand_over: Seconds = 5.0
    """A worker that is handed a connection by another one waits so long for what belongs to it."""
    relays: Count = 10_000
    """TLS connections that one listener relays to other workers. Above this, clients try again."""

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, slots=True)
class ByteStream:
    """The carriers over byte streams: TCP, TLS and Unix sockets, multiplexed by bpmux."""

    top_credit: Bytes = 1 * MiB
    """What the peer may have under way of opening payloads and datagrams (BP-R5)."""
    wake_up: Bytes = 4 * MiB
    """About the most that one connection reads, or writes, before others have their turn. What is
    urgent waits for so much too, where both ends share an event loop. Where memory is shared it is
    no more than ``shared_memory``."""
    read_ahead: Bytes = 64 * KiB
    """Read beyond what has a place of its own already, where small messages come; at most 64 KiB
    are."""
    notsent_lowat: Bytes = 256 * KiB
    """Bytes that the kernel holds of a connection and has not sent: what an urgent frame may
    have before it. Where TCP_NOTSENT_LOWAT is missing the socket buffer bounds it."""
    unix_buffer: Bytes = 1 * MiB
    """SO_SNDBUF of a Unix socket, up to what the system allows (net.core.wmem_max). What it holds
    is with the reader already and only not read, as what a receive buffer of TCP holds; with less
    than a message in it the two processes take turns instead of working at once."""
    # Less makes both sides take turns (1 MiB: 0.8 of the speed), more does not stay in the caches.
    shared_memory: Bytes = 2 * MiB
    """Memory that both ends of a Unix socket share, for each direction; 0: none. Whole pages of
    4 KiB, at least 64 KiB. What fits is with the reader already and only not read. A client makes
    it once it has moved ``shared_memory_after`` bytes; a server takes it if it is no larger than
    this. Each can do without, and then the socket carries everything."""
    shared_memory_after: Bytes = 4 * MiB
    """Bytes of payload, sent and received over a Unix socket, before memory is shared."""
    keepalive: Seconds = 15.0
    """Silence after which the kernel probes a TCP connection, seconds; 0: it does not."""
    loopback_congestion: str = "reno"
    """Congestion control of TCP where both ends are on this machine; empty: the system's. BBR, the
    default of many servers, paces by timers: that halves the speed of a link that is a copy in
    memory. Where the system does not know the name, or allows it to root alone, its own stays."""
    backlog: Count = 1024
    """Connections that the kernel keeps for a listener until they are accepted."""
    half_open: Count = 256
    """Connections of one listener whose handshake is not complete. Above this a new one takes the
    place of one that was silent for Timing.handshake_silence, or waits in the backlog."""
    attempt_delay: Seconds = 0.25
    """An address of a name that has not answered for this long is joined by the next one."""
    poll: Seconds = 0.001
    """Seconds that the event loop looks for the answer to a call of one batch, or for the next such
    call, before it sleeps; 0: it sleeps at once. It takes processor time that nobody else wants,
    where answers and calls came in time of late, and makes up for more than it lasts."""

    zero_allowed: ClassVar[tuple[str, ...]] = (
        "keepalive",
        "poll",
        "shared_memory",
        "shared_memory_after",
    )

    def __post_init__(self) -> None:
        check_fields(self)
        _require_at_most(self, GiB, "notsent_lowat", "unix_buffer")
        if self.backlog > _BACKLOG:
            raise ConfigError(
                f"ByteStream.backlog is {self.backlog}; the kernel takes at most {_BACKLOG}"
            )
        name = self.loopback_congestion
        plain = isinstance(name, str) and name.isascii() and "\0" not in name
        if not plain or len(name) > _CONGESTION_NAME:
            raise ConfigError(
                f"ByteStream.loopback_congestion is {name!r}; a congestion control has a name of "
                f"up to {_CONGESTION_NAME} ASCII characters, as in /proc/sys/net/ipv4/"
                "tcp_available_congestion_control, and an empty one leaves the system's"
            )
        memory = self.shared_memory
        if memory and (memory % (4 * KiB) or not 64 * KiB <= memory <= 1 * GiB):
            raise ConfigError(
                f"ByteStream.shared_memory is {memory!r}; whole pages of {4 * KiB} bytes are "
                f"needed, from {64 * KiB} to {GiB} bytes, or 0 for none"
            )
        if self.top_credit < 64 * KiB:
            raise ConfigError(
                f"ByteStream.top_credit is {self.top_credit!r}; at least {64 * KiB} bytes are "
                "needed for the largest datagram and a close"
            )
        if self.read_ahead < 64:
            raise ConfigError(
                f"ByteStream.read_ahead is {self.read_ahead!r}; at least 64 bytes are needed, for "
                "the head of a chunk"
            )


@dataclass(frozen=True, slots=True)
class Calls:
    """Arrow calls."""

    fragment_bytes: Bytes = 4 * MiB
    """An IPC message above this travels as several channel messages."""
    batch_limit: Bytes = 1 * GiB
    """The largest IPC message that is received."""
    # Measured on an echo of 1 MiB over TCP: 3 batches have 0.85 of the speed, 12 have 0.91.
    in_flight_batches: Count = 8
    """Batches of an exchange sent and not yet answered."""
    in_flight_bytes: Bytes = 32 * MiB
    """The bytes of those batches; one batch is always sent. All calls of a connection together have
    about half of Flow.receive_budget under way. Beyond that a call has one batch under way, and
    sends it once its reader waits: so what nobody reads does not keep out what is read."""
    small_batches: Count = 64
    """Small batches may be as many: so that both sides are at work all the time, which they are not
    where eight batches are gone in less time than a process takes to wake up."""
    small_bytes: Bytes = 2 * MiB
    """They are small as long as all that are under way have fewer bytes than this; 0: none are."""
    unary_bytes: Bytes = 256 * KiB
    """A call of one batch has it in the same message up to this size (and ``fragment_bytes``), and
    its answers in one message; what is larger travels as an exchange. With
    ``max_calls_connection`` of them open they take no more than ``Flow.receive_budget``."""
    max_calls_connection: Count = 256
    """Calls open at once on one connection; more are answered with `busy`."""
    compressions: tuple[str, ...] = COMPRESSIONS
    """What a service agrees to when a client asks for it; nothing is compressed by itself."""
    max_calls_process: Count = 1024
    """Calls open at once in a service; more are answered with `busy`."""
    queue: Count = 1024
    """Calls of one handler with ``max_concurrency`` that wait for their turn; more are answered
    with `busy`. A call that has begun does not count: its later batches may wait too. 0: none."""
    queue_deadline: Seconds = 600.0
    """A call that has waited for its turn this long ends with `busy`."""
    client_addresses: Count = 64
    """Addresses of one client. More in a list are an error, and more records of a name are left
    alone."""
    spark_tasks: Count = 1000
    """Tasks of Spark jobs whose numbers a service keeps for its live page: the latest.
    0: none. With 0 in the settings of a job its connections do not name their executor."""
    work_threads: Count = 0
    """Threads of the process that encode and decode large batches, and read long schemas, beside
    the event loop. 0: one for each processor, from 2 to 8. Work above that waits for its turn. The
    largest value of the process's clients and services holds for all of them."""

    zero_allowed: ClassVar[tuple[str, ...]] = (
        "queue",
        "small_bytes",
        "spark_tasks",
        "work_threads",
    )

    def __post_init__(self) -> None:
        check_fields(self)
        for name in self.compressions:
            if name not in COMPRESSIONS:
                raise ConfigError(
                    f"Calls.compressions has {name!r}; there are {', '.join(COMPRESSIONS)}"
                )

    @property
    def threads_at_work(self) -> int:
        """``work_threads``, or what it is by default on this machine."""
        return self.work_threads or max(2, min(8, os.cpu_count() or 1))


@dataclass(frozen=True, slots=True)
class Sinks:
    """Writes that are committed as a whole."""

    receipt_bytes: Bytes = 64 * KiB
    """The receipt of one attempt, as JSON."""
    document_bytes: Bytes = 64 * MiB
    """What one commit or abort says, as JSON: the receipts of all attempts of a write."""
    note_bytes: Bytes = 64 * KiB
    """The note of one commit of a writer, as JSON."""
    writer_bytes: Bytes = 32 * MiB
    """Batches of one writer that have no acknowledgement; ``write`` waits above it. One write may
    be larger. Half of it goes with one attempt."""
    writer_deadline: Seconds = 600.0
    """For one attempt of a writer, and for a commit; a service that is gone is waited for as
    long."""
    attempts: Count = 100_000
    """Attempts of one sink that are open, or prepared and not committed; more are answered with
    `busy`."""
    time_to_live: Seconds = 86_400.0
    """What was prepared, and neither committed nor aborted, is aborted after this many seconds in
    which nothing was heard of its write."""

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, slots=True)
class Tables:
    """Tables: how they are planned, on both sides."""

    question_bytes: Bytes = 1 * MiB
    """The largest question to a table: columns and filters."""
    question_parts: Count = 10_000
    """Lists and objects in one question; brackets within its texts count too. Each is memory that
    Python's collector of garbage looks through, while no thread runs."""
    answer_bytes: Bytes = 16 * MiB
    """The largest answer: schema, splits, offsets."""
    filters: Count = 1000
    """Filters in one question. Those inside others count too, and each value of an `in`. Arrow
    works on them by recursion: from some thousands on, its stack overflows."""
    splits: Count = 100_000
    """Splits in one answer."""
    split_bytes: Bytes = 8 * KiB
    """The largest split, as JSON: it says where rows are, and travels among a call's headers."""
    filter_bytes: Bytes = 8 * KiB
    """The filters that go with the reading of a split, as JSON; larger ones are not pushed."""
    offset_bytes: Bytes = 64 * KiB
    """The largest offset of a stream, as JSON."""

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, slots=True)
class Admin:
    """The HTTP port for operators: health, metrics and the state of a service."""

    hosts: tuple[str, ...] = ()
    """Names in the Host header of a request that are the server's, beside ``localhost``, the name
    that it listens at, and any IP address. A request with another name gets 421."""
    request_bytes: Bytes = 8 * KiB
    """The largest request; its line and its headers count."""
    request_deadline: Seconds = 5.0
    """For a whole request: to come, to be answered, and for the answer to be read."""
    connections: Count = 64
    """Connections of the port. Above this the one that has waited longest for its request ends."""
    listed: Count = 200
    """Connections, and calls, that ``/state.json`` lists each; all are counted."""
    ready_load: Share = 1.0
    """A service is not ready while its open calls or connections reach this share of their limits,
    Calls.max_calls_process and Limits.connections."""
    ready_memory: Share | None = None
    """The same for what it has received and what it sends, as a share of
    Flow.process_receive_budget and Flow.process_send_budget. None: memory is no reason, as full
    budgets make clients wait and nothing else."""
    ready_lag: Seconds = 5.0
    """A service is not ready while its event loop has not turned for so long."""
    live_lag: Seconds = 60.0
    """A service is not live while its event loop has not turned for so long."""

    def __post_init__(self) -> None:
        check_fields(self)
        for name in self.hosts:
            if not _HOST_NAME.fullmatch(name):
                raise ConfigError(
                    f"Admin.hosts has {name!r}; give the name of a host alone, without scheme, "
                    "port or wildcard, such as metrics.example.com"
                )


@dataclass(frozen=True, slots=True)
class Config:
    """All settings of one connection, client or service."""

    limits: Limits = field(default_factory=Limits)
    flow: Flow = field(default_factory=Flow)
    timing: Timing = field(default_factory=Timing)
    quic: Quic = field(default_factory=Quic)
    bpmux: Bpmux = field(default_factory=Bpmux)
    relink: Relink = field(default_factory=Relink)
    reactivesocket: ReactiveSocket = field(default_factory=ReactiveSocket)
    resume: Resume = field(default_factory=Resume)
    byte_stream: ByteStream = field(default_factory=ByteStream)
    calls: Calls = field(default_factory=Calls)
    sinks: Sinks = field(default_factory=Sinks)
    tables: Tables = field(default_factory=Tables)
    admin: Admin = field(default_factory=Admin)
    debug: bool = field(default_factory=debug_asked)
    """Checks that a buffer does not change between its sending and its leaving; slow. Its variable
    also adds the traceback to each failure of a command."""

    def __reduce_ex__(self, protocol: SupportsIndex) -> str | tuple[Any, ...]:
        if self is globals().get("DEFAULT"):
            return "DEFAULT"  # by its name: all tasks that unpickle it have the one object
        return super(Config, self).__reduce_ex__(protocol)

    def __post_init__(self) -> None:
        for entry in fields(self):
            given, kind = getattr(self, entry.name), entry.type
            if kind == "bool":
                continue
            Kind(f"an aqueduct.config.{kind}", an_instance(f"aqueduct.config.{kind}")).value(
                given, f"Config.{entry.name}"
            )
        check_fields(self)
        if self.calls.fragment_bytes + self.limits.header_bytes > self.limits.frame_bytes:
            raise ConfigError(
                f"Calls.fragment_bytes ({self.calls.fragment_bytes}) plus Limits.header_bytes "
                f"({self.limits.header_bytes}) must fit Limits.frame_bytes "
                f"({self.limits.frame_bytes})"
            )


DEFAULT: Final = Config()
