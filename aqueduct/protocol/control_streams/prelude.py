"""Version and ConnectionControl, on the connection control stream (AQ0-19, AQ0-20)."""

from __future__ import annotations

from collections.abc import Callable

from aqueduct._speedups.channels.encoder import VERSION
from aqueduct._speedups.channels.sender import SendStream
from aqueduct._speedups.control_streams import control_encoder as encoder
from aqueduct.errors import SequenceError
from aqueduct.protocol.common.context import ConnectionContext
from aqueduct.protocol.common.events import Headers, HeadersReceived
from aqueduct.protocol.control_streams.bidi_streams import BidiStreams
from aqueduct.protocol.control_streams.registry import ControlRegistry

__all__ = ["ControlPrelude"]


class ControlPrelude:
    """What a side says, and hears, before its channels."""

    owes = False

    def __init__(
        self, shared: ConnectionContext, registry: ControlRegistry, bidi: BidiStreams
    ) -> None:
        self._shared = shared
        self._registry = registry
        self._bidi = bidi
        self._number = -1
        self._stream: SendStream | None = None
        """Of a client, whose number is another one once early data was rejected."""
        self.peer_headers: Headers | None = None
        """The peer's connection headers, once they are in."""
        self.version_required = shared.side == 1
        """Whether the peer begins every stream and datagram with Version."""
        self.open_gate: Callable[[], None] = _nothing
        """Lets everything be read that waits for the peer's headers; set by the connection."""
        # A server says nothing before it has the client's headers, and then needs no Version.
        shared.outgoing.version_acknowledged = shared.side == 1

    def is_stream(self, number: int) -> bool:
        """Whether it is the connection control stream."""
        return number == (self._number if self._stream is None else self._stream.number)

    def send(self, headers: Headers) -> None:
        """The connection headers of this side go out."""
        frame = encoder.encode_connection_control(headers)
        if self._shared.side == 0:
            self._stream = self._bidi.open([frame], None)  # which puts Version before it
            return
        self._bidi.write(self._bidi.answer(self._number), [VERSION, frame])
        self.version_required = False
        self._registry.open_entrypoint()

    def send_owed(self) -> None:
        """There is nothing."""

    def received(self, number: int, headers: Headers) -> None:
        """ConnectionControl came."""
        if self.peer_headers is not None:
            raise SequenceError("ConnectionControl arrived twice (AQ0-19)")
        self.peer_headers = headers
        self._number = number
        self._shared.events.append(HeadersReceived(headers))
        if self._shared.side == 0:
            self._shared.outgoing.version_acknowledged = True
            self.open_gate()


def _nothing() -> None:
    return None
