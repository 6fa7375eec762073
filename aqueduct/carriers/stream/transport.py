"""The socket of a carrier: what is read when there is something, what is written at once.

Reading goes straight to where the bytes of a large payload belong, with a little room behind it
for what follows; nothing is joined. Writing gathers the core's buffers in one call of the kernel.
In one wake-up a connection moves about ``ByteStream.wake_up`` bytes, then it is others' turn.
"""

from __future__ import annotations

import asyncio
import math
import os
import socket
from abc import abstractmethod
from typing import Final

from aqueduct._speedups.io.gather import IovecWriter
from aqueduct._speedups.io.shared_ring import Rings, supported
from aqueduct._speedups.stream.socket_reader import SocketReader
from aqueduct.carriers.clock import clock_of
from aqueduct.carriers.stream.bpmux_streams import BpmuxStreams
from aqueduct.carriers.stream.busy_poll import ReplyExpectation, poller_of
from aqueduct.carriers.stream.sockets import on_loopback, scratch, take_of
from aqueduct.carriers.tls_library import Tls
from aqueduct.config import Config
from aqueduct.escaping import logger_of
from aqueduct.forks import own

__all__ = ["StreamTransport"]

logger = logger_of("aqueduct.carriers.stream")

_TAKE: Final = 256 << 10  # bytes taken from the core at once, at most
# Chunks that TCP is offered in the same call, if they are next in any case. Measured: one more, and
# a sink of 1 MiB batches has 0.93 of the speed; without them it has 0.92.
_OFFERED: Final = 3
_FAREWELL: Final = 3.0  # seconds for the peer to take a close
_ACK_DELAY: Final = 0.05  # seconds that acknowledgements of ends wait for company
_DISCARDS: Final = 16  # reads of what comes after the end, in one wake-up


class StreamTransport(BpmuxStreams):
    """A BpmuxStreams on a socket, plain or with TLS; the base of StreamCarrier."""

    def __init__(
        self, sock: socket.socket, config: Config, tls: Tls | None, *, is_client: bool
    ) -> None:
        super().__init__(config)
        self.is_client = is_client
        self.loopback = sock.family != socket.AF_UNIX and on_loopback(sock)
        self._sock = sock
        self._fd = sock.fileno()
        self._tls = tls
        self._config = config
        self._loop = asyncio.get_running_loop()
        self._time = clock_of(self._loop)
        # Reading.
        self._turn = config.byte_stream.wake_up
        """Bytes that are read, or written, before it is others' turn."""
        self._chunks = config.bpmux.wake_up
        self._ahead = scratch("plain")[: config.byte_stream.read_ahead]
        self._intake = SocketReader(
            self._mux.reading,
            self._fd,
            None if tls is None else tls.records,
            self._ahead,
            self._open_inlet,
            self._close_inlet,
        )
        self._last_input = self._time()
        self._lookout: ReplyExpectation | None = None
        """For input that is expected; made when it is for the first time."""
        self._offer_at = math.inf
        """Bytes sent and received, from which memory is shared with the peer."""
        if sock.family == socket.AF_UNIX and config.byte_stream.shared_memory and supported():
            if is_client:
                self._offer_at = config.byte_stream.shared_memory_after
            else:
                self._intake.expect_memory(self._take_memory)
        # Writing.
        self._watching = False
        self._secure = tls is None
        self._records = None if tls is None else tls.records
        self._take = take_of(sock, _TAKE)
        # A Unix socket would hold more than its buffer: what of it is not sent, it does not know.
        self._offered = _OFFERED if tls is None and sock.family != socket.AF_UNIX else 0
        self._out = IovecWriter()
        """What was taken from the core and the kernel has not taken."""
        self._measure_at = 0.0
        self._farewell: asyncio.TimerHandle | None = None
        self._acks: asyncio.Handle | None = None
        """Until when acknowledgements of ends wait for company."""

    # what happens above

    @abstractmethod
    def _shake_hands(self) -> bool:
        """Goes on with TLS; True when it is complete."""

    @abstractmethod
    def _hear(self, data: bytes) -> bool:
        """Looks at the first bytes of the peer; False: they end the connection."""

    @abstractmethod
    def _take_events(self) -> None:
        """Reports what the core has found. Raises RemoteProtocolError."""

    @abstractmethod
    def _end_of_stream(self) -> None:
        """The peer has closed its side."""

    @abstractmethod
    def _read_failed(self, error: Exception) -> None:
        """The peer broke the protocol, or TLS or the socket failed."""

    @abstractmethod
    def _write_failed(self, error: OSError) -> None:
        """Writing failed: what the peer has sent before may say why."""

    @abstractmethod
    def _drained(self) -> None:
        """What could be written was, and a close waits for it."""

    @abstractmethod
    def _ping(self, *, asked: bool) -> None:
        """Measures the round trip."""

    @abstractmethod
    def _gone(self) -> None:
        """The socket is closed."""

    # reading

    def _resume(self) -> None:
        if not self._reading and not self._released:
            self._reading = True
            self._loop.add_reader(self._fd, self._readable)

    def _pause(self) -> None:
        if self._reading:
            self._reading = False
            self._loop.remove_reader(self._fd)
            if self._lookout is not None:
                self._lookout.forget()

    def expect_input(self) -> None:
        """See the contract."""
        if self._config.byte_stream.poll and self._reading and not self._over:
            (self._lookout or self._watch()).expect(self._time())

    def _watch(self) -> ReplyExpectation:
        """Who looks for input."""
        if self._lookout is None:
            poller, limit = poller_of(self._loop), self._config.byte_stream.poll
            self._lookout = ReplyExpectation(poller, self._fd, limit, self._readable)
        return self._lookout

    def _readable(self) -> None:
        """There is something to read, or the end."""
        if self._released:
            return
        if self._parting:
            self._discard()
            return
        now = self._last_input = self._time()
        if self._tls is not None and not self._tls.complete and not self._shake_hands():
            return
        received = self._received
        budget = self._read_some(self._turn)
        while budget > 0 and not self._over:
            self._settle()  # a large message is taken before the next one has memory
            budget = self._read_some(budget)
        if self._lookout is not None and self._received != received:
            self._lookout.arrived(now)
        if self._begun and now >= self._measure_at:
            self._ping(asked=False)
        if self._received + self._sent > self._offer_at:
            self._offer_memory()
        if self._writing and self._room_came():
            self._writable()
        self._settle()

    def _read_first(self) -> int:
        """Reads while the handshakes go on, or nobody is there to be told; the bytes read."""
        recv_into = self._sock.recv_into if self._tls is None else self._tls.recv_into
        size = recv_into(self._ahead)
        if not size:
            self._end_of_stream()
            raise BlockingIOError
        self._intake.count(size)
        data = bytes(self._ahead[:size])
        if not self._established and not self._hear(data):
            raise BlockingIOError
        self._mux.receive_data(data)
        self._take_events()
        return size

    def _discard(self) -> None:
        """Reads what the peer still sends: closing over it would reset what it has not read."""
        if self._writing and self._room_came():
            self._writable()
        try:
            for _ in range(_DISCARDS):
                if not self._sock.recv_into(self._ahead):
                    self._release()
                    return
        except BlockingIOError:
            pass
        except OSError:
            self._release()

    # memory that is shared with the peer

    def _offer_memory(self) -> None:
        """Much is moved: from now on by memory, if the peer knows how."""
        self._offer_at = math.inf
        if self._over or self._released:
            return
        try:
            self._share(Rings(self._config.byte_stream.shared_memory))
        except OSError as error:
            logger.info("no memory is shared over a Unix socket: %s", error)

    def _take_memory(self, fd: int) -> None:
        """The peer has passed memory for what is written from now on."""
        try:
            self._share(Rings.of_peer(fd, self._config.byte_stream.shared_memory))
        except (OSError, ValueError) as error:
            logger.info("what was passed over a Unix socket is not shared: %s", error)
        finally:
            os.close(fd)

    def _share(self, rings: Rings) -> None:
        own(rings)
        # Who goes on while the other side fills, or empties, it again works with cold memory.
        self._turn = min(self._turn, self._config.byte_stream.shared_memory)
        self._intake.share(rings)
        self._out.share(rings)

    def _room_came(self) -> bool:
        """There was no room in the peer's memory, and there is again."""
        return self._out.shares and bool(self._out.left) and not self._out.waits

    # writing

    def _acks_wait(self) -> bool:
        """Whether nothing would leave but acknowledgements of ends.

        They go with the next message: a packet of their own costs the peer a turn of its loop.
        """
        if self._out.left or self._parting or self._closing or not self._established:
            return False
        if self._dirty:
            self._collect()
        if not self._turns.only_acks:
            return False
        if self._acks is None:
            self._acks = self._loop.call_later(_ACK_DELAY, self._acks_due)
        return True

    def _hurry_acks(self) -> None:
        """What waits for company waits no more."""
        if self._acks is not None:
            self._acks.cancel()
            self._acks = self._loop.call_soon(self._acks_due)

    def _acks_due(self) -> None:
        self._acks = None
        self._transmit()
        if self._reported:
            self._settle()

    def _add_words(self, words: bytes) -> None:
        """Bytes for the socket that are not of the core."""
        self._out.add(words)

    def _wait_writable(self) -> None:
        self._writing = True
        if self._out.shares:
            if not self._out.left:  # or the peer will say when there is room
                self._loop.call_soon(self._writable)
            return
        self._take = take_of(self._sock, _TAKE)  # segments grow with the window
        if not self._watching:
            self._watching = True
            self._loop.add_writer(self._fd, self._writable)

    def _writable(self) -> None:
        """The kernel takes more, or the peer's memory."""
        if self._released:
            return
        self._writing = False
        self._transmit()
        if self._reported:
            self._settle()
        if self._watching and (not self._writing or self._out.shares):
            self._watching = False
            self._loop.remove_writer(self._fd)

    # the end

    def _break(self, error: OSError) -> None:
        """The kernel takes nothing any more."""
        self._out.clear()
        self._writing = True
        if self._parting:
            self._release()
        else:
            self._write_failed(error)

    def _part(self, words: bytes) -> None:
        """Last words. Then the peer has some time to read them and to close its side."""
        if self._released:
            return
        self._parting = True
        self._intake.relax()
        if words:
            self._add_words(words)
        self._resume()
        self._farewell = self._loop.call_later(_FAREWELL, self._release)
        self._transmit()

    def _shut(self) -> None:
        try:
            self._sock.shutdown(socket.SHUT_WR)
        except OSError:
            self._release()  # the peer has gone

    def _release(self) -> None:
        """Closes the socket."""
        if self._released:
            return
        self._released = True
        self._pause()
        self._lookout = None
        if self._watching:
            self._watching = False
            self._loop.remove_writer(self._fd)
        if self._farewell is not None:
            self._farewell.cancel()
        if self._acks is not None:
            self._acks.cancel()
        self._out.clear()
        self._out.share(None)
        self._intake.share(None)
        self._sock.close()
        self._gone()
