"""Connections that one process has accepted, and another one has the link of.

A process connects to the Unix socket of its sibling. A plain socket goes there itself
(SCM_RIGHTS), and so is the sibling's from then on. Over TLS the Unix socket stays: by it the
process relays what it decrypts, until the client makes another connection. Before either goes what
was read of the handshake, and who the client has proved to be.
"""

from __future__ import annotations

import array
import asyncio
import json
import os
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from typing import Final

from aqueduct.carriers.contract import Siblings
from aqueduct.carriers.stream.binding import SocketFile
from aqueduct.carriers.stream.relay import Relay
from aqueduct.carriers.stream.sockets import limit_silence, readable, tune, why
from aqueduct.carriers.tls_library import Tls
from aqueduct.config import Config
from aqueduct.errors import ConfigError, RemoteProtocolError
from aqueduct.escaping import logger_of
from aqueduct.forks import own_socket

__all__ = ["Handed", "SiblingDoor"]

logger = logger_of("aqueduct.carriers.stream")

_SIZES: Final = struct.Struct("=II")
"""In front: the bytes of what is known of a client, as JSON, and of its handshake."""
_MOST_KNOWN: Final = 16 << 10
_MOST_READ: Final = 128 << 10
"""No read of a handshake has more than 64 KiB, and the opening has less than 1 KiB."""
_FDS: Final = array.array("i", [0])
_PAUSE: Final = 1.0  # seconds without accepting, when the process has no descriptors left
_CLOEXEC: Final = getattr(socket, "MSG_CMSG_CLOEXEC", 0)


@dataclass(frozen=True, slots=True)
class Handed:
    """What is known of a client whose connection is handed over."""

    scheme: str
    fingerprint: str | None
    """Of its certificate."""
    local: str
    peer: str
    cipher: str = ""
    """Of TLS, which ends in the process that hands it over."""
    relayed: bool = False
    """Its bytes come by way of that process."""
    greeted: bool = False
    """It has been sent a hello."""


class SiblingDoor:
    """Where one listener takes connections from its siblings, and hands them to these.

    ``take(handed, data, sock)`` is given each one that comes, with what was read of its handshake.
    ``idle()`` is called when the last relay has ended. Raises ConfigError if there is no place for
    the socket.
    """

    def __init__(
        self,
        siblings: Siblings,
        config: Config,
        take: Callable[[Handed, bytes, socket.socket], None],
        idle: Callable[[], None],
    ) -> None:
        self._siblings = siblings
        self._config = config
        self._take = take
        self._idle = idle
        self._loop = asyncio.get_running_loop()
        self._arriving: set[asyncio.Task[None]] = set()
        self._relays: set[Relay] = set()
        self._relayed = asyncio.Event()
        self._relayed.set()
        self._open = False
        path = siblings.paths[siblings.number]
        self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        own_socket(self._listening)
        try:
            with suppress(FileNotFoundError):  # of a process with this number that has died
                os.unlink(path)
            self._listening.bind(path)
            self._file = SocketFile(path)
            self._listening.listen(config.byte_stream.backlog)
            self._listening.setblocking(False)
        except OSError as error:
            self._listening.close()
            raise ConfigError(
                f"{path!r}, where connections are handed to this process, cannot be listened at: "
                f"{why(error)}"
            ) from error
        self._accept_more()

    @property
    def relays(self) -> int:
        """Connections whose bytes pass through this process to another one."""
        return len(self._relays)

    def close(self) -> None:
        """Takes no more. Relays go on."""
        self._rest()
        self._listening.close()
        self._file.remove()
        for task in self._arriving:
            task.cancel()

    def end_relays(self) -> None:
        """Cuts what passes through here: each client makes another connection."""
        for relay in tuple(self._relays):
            relay.close()

    async def wait_relays(self) -> None:
        """Returns when nothing passes through here any more."""
        await self._relayed.wait()

    # To another process

    def reach(self, number: int) -> socket.socket | None:
        """A connection to a sibling; None: there is none, and its links are gone with it.

        Raises OSError, if the sibling is there and cannot be asked now.
        """
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        own_socket(sock)
        try:
            tune(sock, self._config)
            sock.connect(self._siblings.paths[number])
        except (ConnectionRefusedError, FileNotFoundError):
            sock.close()
            return None
        except BaseException:
            sock.close()
            raise
        return sock

    @property
    def full(self) -> bool:
        """Whether no more connection may be relayed."""
        return len(self._relays) >= self._config.resume.relays

    def hand(self, to: socket.socket, handed: Handed, data: bytes, sock: socket.socket) -> None:
        """Gives a plain socket away, and closes both. Raises OSError."""
        record = _encoded(handed, data)
        with to, sock:
            rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [sock.fileno()]))
            if to.sendmsg([record], [rights]) != len(record):
                raise OSError(f"a handshake of {len(record)} bytes does not fit the socket")

    def relay(
        self, to: socket.socket, handed: Handed, data: bytes, sock: socket.socket, tls: Tls
    ) -> None:
        """Has the bytes of a connection over TLS pass through here."""
        limit_silence(sock, self._config.relink.ack_deadline)
        relay = Relay(
            sock,
            tls,
            to,
            _encoded(handed, data),
            linger=self._config.timing.close_linger,
            turn=self._config.byte_stream.wake_up,
            over=self._relay_over,
        )
        self._relays.add(relay)
        self._relayed.clear()

    def _relay_over(self, relay: Relay) -> None:
        self._relays.discard(relay)
        if not self._relays:
            self._relayed.set()
            self._idle()

    # From another process

    def _accept_more(self) -> None:
        if not self._open and self._listening.fileno() >= 0:
            self._open = True
            self._loop.add_reader(self._listening.fileno(), self._acceptable)

    def _rest(self) -> None:
        if self._open:
            self._open = False
            self._loop.remove_reader(self._listening.fileno())

    def _acceptable(self) -> None:
        try:
            while len(self._arriving) < self._config.byte_stream.half_open:
                sock, _ = self._listening.accept()
                own_socket(sock)
                task = self._loop.create_task(self._arrive(sock))
                self._arriving.add(task)
                task.add_done_callback(partial(self._arrived, sock))
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:
            logger.warning("no connection of another worker can be accepted: %s", why(error))
            self._loop.call_later(_PAUSE, self._accept_more)
        self._rest()

    def _arrived(self, sock: socket.socket, task: asyncio.Task[None]) -> None:
        if task.cancelled():  # maybe before its first step
            sock.close()
        self._arriving.discard(task)
        self._accept_more()

    async def _arrive(self, sock: socket.socket) -> None:
        passed: list[socket.socket] = []
        try:
            tune(sock, self._config)
            async with asyncio.timeout(self._config.resume.hand_over):
                handed, data = await _received(sock, passed)
            if handed.relayed == bool(passed):
                raise ValueError("a socket came where none should, or none did")
            taken, *more = [*passed, sock]
            for each in more:
                each.close()
            self._take(handed, data, taken)
        except BaseException as error:
            for each in (sock, *passed):
                each.close()
            if not isinstance(error, (OSError, ValueError, TypeError, RemoteProtocolError)):
                raise
            reason = str(error) or "nothing came in time (Resume.hand_over)"
            logger.info("a connection that another worker handed over is of no use: %s", reason)


def _encoded(handed: Handed, data: bytes) -> bytes:
    known = json.dumps(asdict(handed)).encode()
    return _SIZES.pack(len(known), len(data)) + known + data


async def _received(sock: socket.socket, passed: list[socket.socket]) -> tuple[Handed, bytes]:
    """What came, and no byte behind it; ``passed`` gets the sockets that came along.

    Raises OSError, and ValueError for what no sibling sends.
    """
    known_size, data_size = _SIZES.unpack(await _exactly(sock, _SIZES.size, passed))
    if known_size > _MOST_KNOWN or data_size > _MOST_READ:
        raise ValueError(f"it has {known_size} and {data_size} bytes")
    known = json.loads(await _exactly(sock, known_size, passed))
    return Handed(**known), await _exactly(sock, data_size, passed)


async def _exactly(sock: socket.socket, size: int, passed: list[socket.socket]) -> bytes:
    got = bytearray()
    while len(got) < size:
        try:
            data, rights, flags, _ = sock.recvmsg(
                size - len(got), socket.CMSG_SPACE(_FDS.itemsize), _CLOEXEC
            )
        except BlockingIOError:
            await readable(sock)
            continue
        for level, kind, found in rights:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                passed += map(_adopted, memoryview(found).cast("i"))
        if flags & socket.MSG_CTRUNC:
            raise OSError("this process has no file descriptor left for it")
        if not data:
            raise ValueError("it ended too soon")
        got += data
    return bytes(got)


def _adopted(fd: int) -> socket.socket:
    sock = socket.socket(fileno=fd)
    sock.set_inheritable(False)
    sock.setblocking(False)
    own_socket(sock)
    return sock
