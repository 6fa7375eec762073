"""A carrier inside one process: two linked ends, no sockets, every promise of the contract.

``pair()`` makes a linked client and server end. Without a loop nothing moves by itself: each
``MemoryLink.step`` carries what was flushed one hop further, in an order that depends on nothing
but the calls made (and a seed, if chunk sizes are to vary). With a loop the link steps itself.

``listen`` and ``connect`` serve ``memory://NAME``, for peers on the same event loop.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from aqueduct.address import Address
from aqueduct.carriers.contract import (
    BIDI,
    Buffer,
    Carrier,
    CarrierUser,
    PeerCredentials,
    PeerIdentity,
)
from aqueduct.config import DEFAULT, Config
from aqueduct.errors import ConfigError, ConnectFailed, ConnectionLost, LocalProtocolError

__all__ = [
    "MemoryCarrier",
    "MemoryLink",
    "MemoryListener",
    "PretendedPeer",
    "connect",
    "listen",
    "pair",
    "pretended",
]

_DATAGRAM_QUEUE: Final = 256
_STOPPED_KEPT: Final = 4096
_SMALL: Final = 4096  # bytes up to this are cut by copying; a view of each costs more
_names = itertools.count(1)


@dataclass(frozen=True, slots=True)
class PretendedPeer:
    """Whom a listener takes its clients for, instead of this process. For tests."""

    peer: str
    """Its address; "" for that of the link."""
    identity: PeerIdentity | None
    credentials: PeerCredentials | None


pretended: Final[dict[str, PretendedPeer]] = {}
"""For the names of listeners whose clients are taken for somebody else."""


def pair(
    config: Config = DEFAULT,
    *,
    server_config: Config | None = None,
    chunk: int = 64 << 10,
    seed: int | None = None,
    datagram_limit: int = 1200,
    loop: asyncio.AbstractEventLoop | None = None,
    name: str = "",
    bidi: bool = False,
) -> MemoryLink:
    """Makes a link. ``config`` is the client's and, unless ``server_config`` is given, both's.

    ``chunk`` is the most that one stream moves in one step, bytes; with a ``seed`` each piece
    has a random size from 1 to ``chunk``. ``datagram_limit`` 0 means no datagrams. With a
    ``loop`` the link steps by itself, soon after each flush. ``bidi``: it has bidirectional
    streams, too.
    """
    server_config = server_config or config
    return MemoryLink(config, server_config, chunk, seed, datagram_limit, loop, name, bidi)


class MemoryLink:
    """Two carriers joined; ``client`` and ``server``."""

    def __init__(
        self,
        config: Config,
        server_config: Config,
        chunk: int,
        seed: int | None,
        datagram_limit: int,
        loop: asyncio.AbstractEventLoop | None,
        name: str,
        bidi: bool = False,
    ) -> None:
        name = name or f"pair-{next(_names)}"
        self._chunk = chunk
        self._random = random.Random(seed) if seed is not None else None
        self._loop = loop
        self._scheduled = False
        self.client = MemoryCarrier(self, True, name, config, datagram_limit, bidi)
        self.server = MemoryCarrier(self, False, name, server_config, datagram_limit, bidi)
        self.client._join(self.server, server_config)
        self.server._join(self.client, config)

    def step(self) -> bool:
        """Carries what was flushed one hop, both ways. False: there was nothing to do."""
        moved = [self._carry(self.client), self._carry(self.server)]
        for carrier in (self.client, self.server):
            carrier._settle()
        return any(moved)

    def run(self, limit: int = 1_000_000) -> int:
        """Steps until nothing moves; returns the number of steps.

        Raises RuntimeError after ``limit`` steps: the two users keep each other busy for ever.
        """
        for count in range(limit):
            if not self.step():
                return count
        raise RuntimeError(f"the link did not come to rest in {limit} steps")

    def cut(self, reason: str = "the link was cut") -> None:
        """Ends both sides at once, as a lost network does."""
        for carrier in (self.client, self.server):
            carrier._end(ConnectionLost(f"{carrier.peer}: {reason}", reason=reason))

    def expire_linger(self) -> None:
        """Lets the linger time of a close that waits run out (there is no clock here)."""
        for carrier in (self.client, self.server):
            carrier._linger_over = True
        self._wake()

    def _piece(self) -> int:
        return self._chunk if self._random is None else self._random.randint(1, self._chunk)

    def _wake(self) -> None:
        if self._loop is not None and not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._stepped)

    def _stepped(self) -> None:
        self._scheduled = False
        if self.step():
            self._wake()

    def _carry(self, source: MemoryCarrier) -> bool:
        """One hop from ``source`` to its peer. True if anything was done."""
        target = source._other
        if not (source._alive() and target._alive()):
            return False
        moved = source._greet() | target._greet()
        orders, source._orders = source._orders, deque()
        for order in orders:
            order()
            moved = True
            if not (source._alive() and target._alive()):
                return True
        if source._close is None or not source._linger_over:
            moved |= self._carry_streams(source, target)
        if source._datagrams:
            while source._datagrams:
                target._report().datagram_received(source._datagrams.popleft())
            moved = True
            if source._alive():
                source._report().datagram_room_changed()
        if source._close is not None and (source._linger_over or not source._unsent()):
            code, reason = source._close
            source._end(
                ConnectionLost(
                    f"the connection to {source.peer} was closed here: {reason or code}",
                    code=code,
                    reason=reason,
                )
            )
            target._end(
                ConnectionLost(
                    f"{target.peer} closed the connection: {reason or code}",
                    code=code,
                    reason=reason,
                    remote=True,
                )
            )
            return True
        return moved

    def _carry_streams(self, source: MemoryCarrier, target: MemoryCarrier) -> bool:
        moved = False
        for number in list(source._ready):
            stream = source._outgoing[number]
            data = stream.take(min(self._piece(), stream.limit - stream.sent))
            fin = stream.fin and not stream.queue
            if data or fin:
                moved = True
                target._deliver(_there(number), data, fin)
                if data:
                    source._written[number] = source._written.get(number, 0) + len(data)
            if fin or not stream.movable:
                source._ready.pop(number, None)
            if fin:
                del source._outgoing[number]
                if number >= BIDI and source._half_ended(number):
                    source._announce()
        return moved


@dataclass(slots=True)
class _Outgoing:
    """One stream of mine."""

    limit: int
    queue: list[bytes | memoryview] = field(default_factory=list)
    sent: int = 0
    fin: bool = False
    fin_queued: bool = False

    @property
    def movable(self) -> bool:
        return self.sent < self.limit if self.queue else self.fin

    def take(self, size: int) -> bytes:
        count = 0
        for head in self.queue:
            if len(head) >= size:
                break
            size -= len(head)
            count += 1
        parts = self.queue[:count]
        if size > 0 and count < len(self.queue):
            head = self.queue[count]
            parts.append(head[:size])
            if len(head) > size:
                self.queue[count] = head[size:]
            else:
                count += 1
        del self.queue[:count]
        data = b"".join(parts)
        self.sent += len(data)
        return data


class MemoryCarrier:
    """One end of a link; a Carrier."""

    scheme = "memory"
    loopback = False
    suspended = False
    resumes = 0
    peer_certificate_fingerprint = None
    rtt = 0.0

    def __init__(
        self,
        link: MemoryLink,
        is_client: bool,
        name: str,
        config: Config,
        datagram_limit: int,
        bidi: bool,
    ) -> None:
        self.is_client = is_client
        self.early = False
        self.bidi = bidi
        self.local = f"memory://{name}#{'client' if is_client else 'server'}"
        self.peer = f"memory://{name}#{'server' if is_client else 'client'}"
        self.datagram_limit = datagram_limit
        self.peer_identity: PeerIdentity | None = None
        self.peer_credentials: PeerCredentials | None = PeerCredentials(
            os.getpid(), os.geteuid(), os.getegid()
        )
        """Of this process itself."""
        self._link = link
        self._config = config
        self._user: CarrierUser | None = None
        self._greeted = False
        self._reported = False
        self._over = False
        self._outgoing: dict[int, _Outgoing] = {}
        self._opened = 0
        self._ready: dict[int, None] = {}
        self._written: dict[int, int] = {}
        self._orders: deque[Callable[[], None]] = deque()  # what the next hop does at the peer
        self._unflushed: list[Callable[[], None]] = []
        self._datagrams: deque[bytes] = deque()
        self._datagrams_queued = 0
        self._incoming: dict[int, int] = {}  # the peer's open streams and their limits
        self._incoming_opened = 0
        self._incoming_ended = 0
        self._extra = 0
        self._announced = config.flow.streams
        # Bidirectional streams are in _outgoing and _incoming, too, each with its directions.
        self._bidi_opened = 0
        self._bidi_incoming = 0
        self._bidi_ended = 0
        self._bidi_announced = 0
        # Of mine, by the peer: writes that cross it are dropped.
        self._stopped: OrderedDict[int, None] = OrderedDict()
        self._close: tuple[int, str] | None = None
        self._linger_over = False
        self._received = 0
        self._sent = 0

    def _join(self, other: MemoryCarrier, other_config: Config) -> None:
        self._other = other
        self._stream_limit = other_config.flow.streams
        self._bidi_limit = 0
        if self.bidi:
            self._bidi_limit = other_config.limits.channels + 1
            self._bidi_announced = self._config.limits.channels + 1
        self._window = other_config.flow.initial_window

    def _pretend(self, peer: PretendedPeer) -> None:
        self.peer = peer.peer or self.peer
        self.peer_identity = peer.identity
        self.peer_credentials = peer.credentials

    # what the contract promises

    @property
    def openable(self) -> int:
        """How many more streams may be opened now."""
        return 0 if self._over else self._stream_limit - self._opened

    @property
    def bidi_openable(self) -> int:
        """How many more bidirectional streams may be opened now."""
        return 0 if self._over else self._bidi_limit - self._bidi_opened

    def attach(self, user: CarrierUser) -> None:
        """Installs the user. Raises LocalProtocolError if there is one."""
        if self._user is not None:
            raise LocalProtocolError("this carrier has a user already")
        self._user = user
        self._link._wake()

    def write(self, stream: int, buffers: Sequence[Buffer], fin: bool) -> None:
        """Queues bytes on my stream; see the contract."""
        if self._over or self._close is not None:
            return
        state = self._outgoing.get(stream)
        if state is None:
            if not self._may_open(stream):
                return
            state = self._outgoing[stream] = _Outgoing(self._window)
        elif state.fin_queued:
            raise LocalProtocolError(f"stream {stream} ended; nothing can be written to it")
        state.fin_queued = fin
        pieces = [
            buffer
            if type(buffer) is bytes and len(buffer) <= _SMALL
            else memoryview(buffer).cast("B")
            for buffer in buffers
            if len(buffer)
        ]
        self._unflushed.append(partial(self._queue, stream, pieces, fin))

    def reset(self, stream: int, code: int) -> None:
        """Gives up my stream."""
        if self._over or self._close is not None:
            return
        if not (0 <= stream < self._opened or (stream >= BIDI and self._has_bidi(stream))):
            raise LocalProtocolError(f"stream {stream} was never opened")
        self._stopped.pop(stream, None)
        if self._outgoing.pop(stream, None) is None:
            return
        self._ready.pop(stream, None)
        self._written.pop(stream, None)
        there = _there(stream)
        self._unflushed.append(
            lambda: self._orders.append(lambda: self._other._deliver_reset(there, code))
        )
        if stream >= BIDI and self._half_ended(stream):
            self._unflushed.append(self._announce)

    def stop(self, stream: int, code: int) -> None:
        """Asks the peer to send no more on its stream."""
        if self._reads(stream):
            there = _there(stream)
            self._unflushed.append(
                lambda: self._orders.append(lambda: self._other._be_stopped(there, code))
            )

    def credit(self, stream: int, limit: int) -> None:
        """Lets the peer send on its stream up to ``limit`` bytes in all."""
        if self._reads(stream) and limit > self._incoming[stream]:
            self._incoming[stream] = limit
            there = _there(stream)
            self._unflushed.append(
                lambda: self._orders.append(lambda: self._other._be_credited(there, limit))
            )

    def extra_streams(self, count: int) -> None:
        """Gives the peer more stream slots, or keeps some back."""
        if count == self._extra:
            return
        self._extra = count
        self._unflushed.append(self._announce)

    @property
    def datagram_room(self) -> int:
        """How many datagrams the queue takes now."""
        return _DATAGRAM_QUEUE - len(self._datagrams) - self._datagrams_queued

    def send_datagram(self, data: bytes) -> bool:
        """Queues a datagram; False if it was dropped."""
        limit, over = self.datagram_limit, self._over or self._close is not None
        if over or limit == 0 or len(data) > limit or self.datagram_room <= 0:
            return False
        self._datagrams_queued += 1
        self._unflushed.append(partial(self._queue_datagram, data))
        return True

    def ping(self) -> None:
        """Makes the peer answer: there and back with the next steps."""
        self._unflushed.append(
            lambda: self._orders.append(
                lambda: self._other._orders.append(lambda: self._report().ponged())
            )
        )

    def expect_input(self) -> None:
        """It comes without being looked for."""

    def flush(self) -> None:
        """Lets what was queued move with the next step."""
        if self._over:
            return
        while self._unflushed:
            unflushed, self._unflushed = self._unflushed, []
            for order in unflushed:
                order()
        self._link._wake()

    def snapshot(self) -> dict[str, object]:
        """Counters, as plain numbers and strings."""
        return {
            "carrier": "memory",
            "sent": self._sent,
            "received": self._received,
            "queued": sum(len(b) for s in self._outgoing.values() for b in s.queue),
            "opened": self._opened,
            "open": len(self._outgoing),
            "openable": self.openable,
            "peer_opened": self._incoming_opened,
            "peer_open": len(self._incoming),
            "bidi_openable": self.bidi_openable,
        }

    def close(self, code: int, reason: str, *, linger: float = 0.0) -> None:
        """Closes once the queue is empty or ``linger`` is over."""
        if self._over or self._close is not None:
            return
        self._linger_over = linger <= 0
        self.flush()
        self._close = (code, reason)
        if linger > 0 and self._link._loop is not None:
            self._link._loop.call_later(linger, self._link.expire_linger)
        self._link._wake()

    def abandon(self, error: ConnectionLost) -> None:
        """Closes without waiting: there is no socket that could stay open."""
        self.close(0, error.reason or "")

    # what the link does

    def _unsent(self) -> bool:
        """Whether anything queued waits still, be it for the peer's credit."""
        return any(stream.queue or stream.fin for stream in self._outgoing.values())

    def _greet(self) -> bool:
        if self._greeted or self._user is None:
            return False
        self._greeted = True
        self._report().connected()
        return True

    def _report(self) -> CarrierUser:
        assert self._user is not None
        self._reported = True
        return self._user

    def _settle(self) -> None:
        """Ends a step: what was written, the end of the burst, and what the user answered."""
        if self._over or self._user is None:
            return
        written, self._written = self._written, {}
        for stream, size in written.items():
            self._sent += size
            self._report().written(stream, size)
        if self._reported:
            self._reported = False
            self._user.end_of_input()
            self.flush()

    def _queue(self, stream: int, pieces: list[bytes | memoryview], fin: bool) -> None:
        state = self._outgoing.get(stream)
        if state is None:
            return
        state.queue.extend(pieces)
        state.fin = fin
        if state.movable:
            self._ready[stream] = None
        else:  # an empty first write still opens the stream at the peer
            self._orders.append(lambda: self._other._open_until(_there(stream)))

    def _queue_datagram(self, data: bytes) -> None:
        self._datagrams_queued -= 1
        self._datagrams.append(data)

    def _alive(self) -> bool:
        return not self._over and self._user is not None

    def _may_open(self, stream: int) -> bool:
        """Opens a stream of mine; False: the peer has stopped it. Raises LocalProtocolError."""
        bidi = stream >= BIDI
        if bidi and not self.bidi:
            raise LocalProtocolError(f"stream {stream}: there are no bidirectional streams here")
        following = BIDI | self._bidi_opened << 1 if bidi else self._opened
        theirs = bidi and stream & 1 == 1
        if theirs and not self._has_bidi(stream):
            raise LocalProtocolError(f"the peer never opened its stream {stream}")
        if theirs or stream < following:
            if stream in self._stopped:
                return False
            raise LocalProtocolError(f"stream {stream} ended; nothing can be written to it")
        if stream > following:
            raise LocalProtocolError(f"stream {stream}: the next one to open is {following}")
        if (self.bidi_openable if bidi else self.openable) < 1:
            raise LocalProtocolError(f"stream {stream}: the peer allows no more streams now")
        if bidi:
            self._bidi_opened += 1
            self._incoming[stream] = self._config.flow.initial_window
        else:
            self._opened += 1
        return True

    def _reads(self, stream: int) -> bool:
        """Whether the peer may still send on this stream. Raises LocalProtocolError."""
        if self._over or self._close is not None:
            return False
        if not (0 <= stream < self._incoming_opened or (stream >= BIDI and self._has_bidi(stream))):
            raise LocalProtocolError(f"the peer never opened its stream {stream}")
        return stream in self._incoming

    def _has_bidi(self, stream: int) -> bool:
        """Whether a bidirectional stream of this number was opened by its side."""
        opened = self._bidi_incoming if stream & 1 else self._bidi_opened
        return (stream ^ BIDI) >> 1 < opened

    def _half_ended(self, stream: int) -> bool:
        """One direction of a bidirectional stream is over; whether a slot of the peer returns."""
        if not stream & 1 or stream in self._outgoing or stream in self._incoming:
            return False
        self._bidi_ended += 1
        return True

    def _open_until(self, stream: int) -> None:
        if stream >= BIDI:
            while stream & 1 and not self._has_bidi(stream):
                opened = BIDI | self._bidi_incoming << 1 | 1
                self._bidi_incoming += 1
                self._incoming[opened] = self._config.flow.initial_window
                self._outgoing[opened] = _Outgoing(self._window)
            return
        while self._incoming_opened <= stream:
            self._incoming[self._incoming_opened] = self._config.flow.initial_window
            self._incoming_opened += 1

    def _deliver(self, stream: int, data: Buffer, fin: bool) -> None:
        self._open_until(stream)
        if stream not in self._incoming:
            return
        self._received += len(data)
        user = self._report()
        if fin:
            self._ended(stream)
        if fin or data:
            user.stream_data(stream, data, fin)

    def _deliver_reset(self, stream: int, code: int) -> None:
        self._open_until(stream)
        if stream in self._incoming:
            self._ended(stream)
            self._report().stream_reset(stream, code)

    def _ended(self, stream: int) -> None:
        del self._incoming[stream]
        if stream < BIDI:
            self._incoming_ended += 1
        elif not self._half_ended(stream):
            return
        self._unflushed.append(self._announce)

    def _announce(self) -> None:
        """Returns the slots of streams that ended, more or less those given or kept back."""
        limit = self._config.flow.streams + self._incoming_ended + self._extra
        if limit > self._announced:
            self._announced = limit
            self._orders.append(lambda: self._other._be_allowed(limit))
        bidi = self._config.limits.channels + 1 + self._bidi_ended
        if self.bidi and bidi > self._bidi_announced:
            self._bidi_announced = bidi
            self._orders.append(lambda: self._other._be_allowed_bidi(bidi))

    def _be_allowed(self, limit: int) -> None:
        if limit > self._stream_limit:
            self._stream_limit = limit
            self._report().openable_changed()

    def _be_allowed_bidi(self, limit: int) -> None:
        if limit > self._bidi_limit:
            self._bidi_limit = limit
            self._report().openable_changed()

    def _be_credited(self, stream: int, limit: int) -> None:
        if stream >= BIDI:  # of the peer's, it may be the first that is heard
            self._open_until(stream)
        state = self._outgoing.get(stream)
        if state is None:
            return
        state.limit = max(state.limit, limit)
        if state.movable:
            self._ready[stream] = None

    def _be_stopped(self, stream: int, code: int) -> None:
        if stream >= BIDI:  # of the peer's, it may be the first that is heard
            self._open_until(stream)
        if self._outgoing.pop(stream, None) is None:
            return
        self._ready.pop(stream, None)
        self._written.pop(stream, None)
        self._stopped[stream] = None
        if len(self._stopped) > _STOPPED_KEPT:
            self._stopped.popitem(last=False)
        self._unflushed.append(
            lambda: self._orders.append(lambda: self._other._deliver_reset(_there(stream), code))
        )
        if stream >= BIDI and self._half_ended(stream):
            self._unflushed.append(self._announce)
        self._report().stream_stopped(stream, code)

    def _end(self, error: ConnectionLost) -> None:
        if self._over:
            return
        self._over = True
        self._outgoing.clear()
        self._ready.clear()
        self._orders.clear()
        self._unflushed.clear()
        self._datagrams.clear()
        if self._user is not None:
            self._user.closed(error)


def _there(stream: int) -> int:
    """The number that the other side has for a stream."""
    return stream ^ 1 if stream >= BIDI else stream


class MemoryListener:
    """A listener of ``memory://NAME``."""

    def __init__(
        self, name: str, config: Config, on_carrier: Callable[[Carrier], None], bidi: bool
    ) -> None:
        self._name = name
        self._bidi = bidi
        self._config = config
        self._on_carrier = on_carrier
        self._loop = asyncio.get_running_loop()
        self._links: set[MemoryLink] = set()
        self._changed = asyncio.Event()
        self._closed = False

    @property
    def addresses(self) -> Sequence[str]:
        """The one address."""
        return (f"memory://{self._name}" + ("?dialect=control-streams" if self._bidi else ""),)

    def close(self) -> None:
        """Accepts no more."""
        self._closed = True
        if _listeners.get(self._name) is self:
            del _listeners[self._name]
        self._changed.set()

    async def wait_closed(self) -> None:
        """Returns when closed and the last connection has ended."""
        while not self._closed or any(not link.server._over for link in self._links):
            self._changed.clear()
            await self._changed.wait()

    def _accept(self, config: Config, bidi: bool) -> MemoryCarrier:
        link = pair(config, server_config=self._config, loop=self._loop, name=self._name, bidi=bidi)
        self._links = {old for old in self._links if not old.server._over} | {link}
        if self._name in pretended:
            link.server._pretend(pretended[self._name])
        end = link.server._end

        def ended(error: ConnectionLost) -> None:
            end(error)
            self._changed.set()

        link.server._end = ended  # type: ignore[method-assign]
        self._on_carrier(link.server)
        return link.client


_listeners: dict[str, MemoryListener] = {}


async def listen(
    address: Address,
    config: Config,
    on_carrier: Callable[[Carrier], None],
    *,
    bidi: bool = False,
) -> MemoryListener:
    """Listens on ``memory://NAME``. Raises ConfigError if the name is taken.

    ``bidi``: clients that ask for bidirectional streams have them.
    """
    if address.host in _listeners:
        raise ConfigError(f"{address}: something in this process listens there already")
    listener = _listeners[address.host] = MemoryListener(address.host, config, on_carrier, bidi)
    return listener


async def connect(address: Address, config: Config, *, bidi: bool = False) -> MemoryCarrier:
    """Connects to ``memory://NAME``. Raises ConnectFailed if nothing listens there.

    ``bidi``: with bidirectional streams, which the listener has to allow.
    """
    listener = _listeners.get(address.host)
    if listener is None:
        raise ConnectFailed(f"{address}: nothing in this process listens there")
    if listener._loop is not asyncio.get_running_loop():
        raise ConnectFailed(f"{address}: its listener lives on another event loop; use aqueduct://")
    if bidi and not listener._bidi:
        raise ConnectFailed(f"{address}: its listener allows no bidirectional streams")
    return listener._accept(config, bidi)
