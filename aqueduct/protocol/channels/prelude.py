"""VERSION, its acknowledgement, and the connection headers (AQ-26 to AQ-29)."""

from __future__ import annotations

from typing import Any

from aqueduct._speedups import channels as codec
from aqueduct._speedups.channels.recv_streams import RecvStream
from aqueduct.errors import SequenceError
from aqueduct.protocol.channels.dispatch import Handlers
from aqueduct.protocol.common.context import ConnectionContext
from aqueduct.protocol.common.events import Headers, HeadersReceived
from aqueduct.protocol.common.send_streams import SendStream

__all__ = ["ChannelPrelude"]


class ChannelPrelude:
    """What a side says, and hears, before its channels."""

    def __init__(self, shared: ConnectionContext) -> None:
        self._shared = shared
        self.peer_headers: Headers | None = None
        """The peer's connection headers, once they are in."""
        self.owes = False
        """Whether ACK_VERSION is to go with what leaves next (AQ-27)."""
        self.reader: Any = None
        """The dispatcher, to which its handlers belong."""
        self._version_seen = False

    def handlers(self) -> Handlers:
        """What its frames do."""
        return {
            codec.Version.TAG: self._on_version,
            codec.ConnectionHeaders.TAG: self._on_headers,
        }

    def send(self, headers: Headers) -> None:
        """The connection headers of this side go out."""
        self._send([codec.encode_connection_headers(headers)])

    def send_owed(self) -> None:
        """ACK_VERSION goes out."""
        self._send([])

    # Within

    def _on_version(self, stream: RecvStream, frame: codec.Version) -> None:
        if self._version_seen:
            return
        self._version_seen = True
        self.owes = not self.reader.incoming.version_checked  # with the effects of this input

    def _on_headers(self, stream: RecvStream, frame: codec.ConnectionHeaders) -> None:
        if self.peer_headers is not None:
            raise SequenceError("CONNECTION_HEADERS arrived twice (AQ-R10)")
        self.peer_headers = frame.headers
        self._shared.events.append(HeadersReceived(frame.headers))
        if self._shared.side == 0:
            self.reader.open_gate()

    def _send(self, frames: list[bytes]) -> None:
        incoming = self.reader.incoming
        if self._version_seen and not incoming.version_checked:
            incoming.version_checked = True
            self.owes = False
            frames = [codec.ACK_VERSION, *frames]  # they may share a stream (AQ-R8)
        self._shared.outgoing.write(SendStream(None, control=True), frames, fin=True)
