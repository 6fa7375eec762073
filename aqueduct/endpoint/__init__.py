"""The asyncio face of channels: ``connect``, ``serve``, ``channel`` and their handles."""

from aqueduct.endpoint.connection import Connection
from aqueduct.endpoint.handles import (
    Attachment,
    Headers,
    Message,
    Mode,
    Receiver,
    Sender,
    channel,
)
from aqueduct.endpoint.serving import Server, connect, serve

__all__ = [
    "Attachment",
    "Connection",
    "Headers",
    "Message",
    "Mode",
    "Receiver",
    "Sender",
    "Server",
    "channel",
    "connect",
    "serve",
]
