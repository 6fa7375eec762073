"""A message as its reader gets it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aqueduct._speedups.channels.frames import decode_headers
from aqueduct.protocol.channels.events import Headers

if TYPE_CHECKING:
    from aqueduct.endpoint.channel import Receiver, Sender

__all__ = ["Attachment", "Headers", "Message"]


class Attachment:
    """A channel half that came with a message: ``handle`` and the channel's ``headers``."""

    __slots__ = ("_headers", "handle")

    def __init__(self, handle: Sender | Receiver, headers: bytes | Headers) -> None:
        self.handle = handle
        self._headers = headers

    @property
    def headers(self) -> Headers:
        """(key, value) pairs of bytes; made when they are asked for."""
        self._headers = decode_headers(self._headers)
        return self._headers


class Message:
    """One received message. ``payload`` is bytes or any object with the buffer protocol."""

    __slots__ = ("attachments", "headers", "number", "payload")

    def __init__(
        self, payload: Any, headers: Headers, attachments: tuple[Attachment, ...], number: int
    ) -> None:
        self.payload = payload
        self.headers = headers
        self.attachments = attachments
        self.number = number

    @property
    def size(self) -> int:
        """Bytes of the payload."""
        return len(self.payload)

    def __repr__(self) -> str:
        return (
            f"<Message {self.number}: {self.size} bytes, {len(self.headers)} headers, "
            f"{len(self.attachments)} attachments>"
        )
