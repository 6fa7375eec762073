"""A Unix socket's connection goes on in shared memory, once much was moved.

The client offers memory and passes its descriptor over the socket. A server that takes it writes
there from then on, and so does the client.
"""

from __future__ import annotations

import os

from aqueduct._speedups.io.shared_ring import Rings, supported
from aqueduct._speedups.stream.transport import StreamTransport
from aqueduct.config import ByteStream
from aqueduct.escaping import logger_of
from aqueduct.forks import own

__all__ = ["MemoryUpgrade"]

logger = logger_of("aqueduct.carriers.stream")


class MemoryUpgrade:
    """What one transport does about shared memory."""

    def __init__(self, transport: StreamTransport, config: ByteStream) -> None:
        self._transport = transport
        self._size = config.shared_memory
        self._after = config.shared_memory_after

    def prepare(self, *, is_client: bool) -> None:
        """The client offers memory after some bytes; the server waits for what it is passed."""
        if not self._size or not supported():
            return
        if is_client:
            self._transport.offer_memory = self.offer
            self._transport.share_after = self._after
        else:
            self._transport.reader.expect_memory(self.take)

    def offer(self) -> None:
        """Much is moved: from now on by memory, if the peer knows how."""
        try:
            self._share(Rings(self._size))
        except OSError as error:
            logger.info("no memory is shared over a Unix socket: %s", error)

    def take(self, fd: int) -> None:
        """The peer has passed memory for what is written from now on."""
        try:
            self._share(Rings.of_peer(fd, self._size))
        except (OSError, ValueError) as error:
            logger.info("what was passed over a Unix socket is not shared: %s", error)
        finally:
            os.close(fd)

    def _share(self, rings: Rings) -> None:
        own(rings)
        self._transport.share(rings, self._size)
