"""A message as its reader gets it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aqueduct.protocol.channels.events import Headers

if TYPE_CHECKING:
    from aqueduct.endpoint.handles import Receiver, Sender

__all__ = ["Attachment", "Headers", "Message"]


class Attachment:
    """A channel half that came with a message: ``handle`` and the channel's ``headers``."""

    __slots__ = ("handle", "headers")

    def __init__(self, handle: Sender | Receiver, headers: Headers) -> None:
        self.handle = handle
        self.headers = headers


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
