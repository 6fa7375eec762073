"""The asyncio face of channels: ``connect``, ``serve``, ``channel`` and their handles."""

from aqueduct.endpoint.channel import Attachment, Headers, Message, Mode, Receiver, Sender, channel
from aqueduct.endpoint.connection import Connection
from aqueduct.endpoint.reply import PendingReply, Responder
from aqueduct.endpoint.server import (
    Server,
    bind,
    connect,
    connect_for_calls,
    serve,
    serve_calls,
)
from aqueduct.endpoint.snapshot import ConnectionSnapshot

__all__ = [
    "Attachment",
    "Connection",
    "ConnectionSnapshot",
    "Headers",
    "Message",
    "Mode",
    "PendingReply",
    "Receiver",
    "Responder",
    "Sender",
    "Server",
    "bind",
    "channel",
    "connect",
    "connect_for_calls",
    "serve",
    "serve_calls",
]
