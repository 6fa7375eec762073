"""Arrow record batches between programs, over message channels on QUIC.

- ``Service``, ``Call``: handlers and what they are told. See ``aqueduct.service``.
- ``Client``: calls from asyncio; ``SyncClient``: calls from threads.
- ``ClientTls``, ``ServerTls``, ``dev_certificate``: certificates.
- ``Config`` and its parts in ``aqueduct.config``; every error in ``aqueduct.errors``.
- ``connect``, ``serve``, ``channel``, ``Sender``, ``Receiver``, ``Message``: the channels beneath,
  which need no Arrow. See ``aqueduct.endpoint``.
- ``aqueduct.bpmux``: requests, sinks and streams over TCP or Unix sockets, without Aqueduct.

The modules named here need no import of their own: ``aqueduct.errors.Busy``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from aqueduct import address as address
    from aqueduct import arguments as arguments
    from aqueduct import arrow as arrow
    from aqueduct import blocking as blocking
    from aqueduct import bpmux as bpmux
    from aqueduct import calls as calls
    from aqueduct import client as client
    from aqueduct import config as config
    from aqueduct import endpoint as endpoint
    from aqueduct import errors as errors
    from aqueduct import handlers as handlers
    from aqueduct import service as service
    from aqueduct import serving as serving
    from aqueduct import sinks as sinks
    from aqueduct import stream as stream
    from aqueduct import sync as sync
    from aqueduct import tables as tables
    from aqueduct import telemetry as telemetry
    from aqueduct import wire as wire
    from aqueduct import writes as writes
    from aqueduct.arrow.call import Partition
    from aqueduct.arrow.describe import Description
    from aqueduct.blocking import SyncStream
    from aqueduct.calls import Call
    from aqueduct.carriers.tls import ClientTls, ServerTls, dev_certificate
    from aqueduct.client import Client
    from aqueduct.config import Config
    from aqueduct.endpoint.connection import Connection
    from aqueduct.endpoint.handles import Mode, Receiver, Sender, channel
    from aqueduct.endpoint.message import Message
    from aqueduct.endpoint.serving import Server, connect, serve
    from aqueduct.errors import AqueductError
    from aqueduct.service import Service
    from aqueduct.stream import Stream
    from aqueduct.sync import SyncClient

__all__ = [
    "AqueductError",
    "Call",
    "Client",
    "ClientTls",
    "Config",
    "Connection",
    "Description",
    "Message",
    "Mode",
    "Partition",
    "Receiver",
    "Sender",
    "Server",
    "ServerTls",
    "Service",
    "Stream",
    "SyncClient",
    "SyncStream",
    "channel",
    "connect",
    "dev_certificate",
    "serve",
]

# Loaded on first use: those who want the channels alone, or one command, wait for no pyarrow.
_MODULES: Final = {
    "AqueductError": "aqueduct.errors",
    "Call": "aqueduct.calls",
    "Client": "aqueduct.client",
    "ClientTls": "aqueduct.carriers.tls",
    "Config": "aqueduct.config",
    "Connection": "aqueduct.endpoint.connection",
    "Description": "aqueduct.arrow.describe",
    "Message": "aqueduct.endpoint.message",
    "Mode": "aqueduct.endpoint.handles",
    "Partition": "aqueduct.arrow.call",
    "Receiver": "aqueduct.endpoint.handles",
    "Sender": "aqueduct.endpoint.handles",
    "Server": "aqueduct.endpoint.serving",
    "ServerTls": "aqueduct.carriers.tls",
    "Service": "aqueduct.service",
    "Stream": "aqueduct.stream",
    "SyncClient": "aqueduct.sync",
    "SyncStream": "aqueduct.blocking",
    "channel": "aqueduct.endpoint.handles",
    "connect": "aqueduct.endpoint.serving",
    "dev_certificate": "aqueduct.carriers.tls",
    "serve": "aqueduct.endpoint.serving",
}

_SUBMODULES: Final = (
    "address",
    "arguments",
    "arrow",
    "blocking",
    "bpmux",
    "calls",
    "client",
    "config",
    "endpoint",
    "errors",
    "handlers",
    "service",
    "serving",
    "sinks",
    "stream",
    "sync",
    "tables",
    "telemetry",
    "wire",
    "writes",
)
"""Those that are documented: ``aqueduct.errors`` needs no import of its own."""


def __getattr__(name: str) -> Any:
    module = _MODULES.get(name)
    if module is None:
        if name in _SUBMODULES:
            return importlib.import_module(f"aqueduct.{name}")
        raise AttributeError(f"module 'aqueduct' has no attribute {name!r}")
    found = getattr(importlib.import_module(module), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_SUBMODULES})
