"""Arrow record batches between programs, over message channels on QUIC.

- ``Service``, ``Call``: handlers and what they are told. See ``aqueduct.service.service``.
- ``Client``: calls from asyncio; ``SyncClient``: calls from threads.
- ``TokenFile``, ``Jwt``: who may call a service.
- ``ClientTls``, ``ServerTls``, ``dev_certificate``: certificates.
- ``Config`` and its parts in ``aqueduct.config``; every error in ``aqueduct.errors``.
- ``connect``, ``serve``, ``channel``, ``Sender``, ``Receiver``, ``Message``: the channels beneath,
  which need no Arrow. See ``aqueduct.endpoint``.
- ``aqueduct.bpmux``: requests, sinks and streams over TCP or Unix sockets, without Aqueduct.
- ``aqueduct.relink``: messages and transactions over links that survive cut connections.
- ``aqueduct.testing``: services and clients in tests.

The modules named here need no import of their own: ``aqueduct.errors.Busy``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from aqueduct import address as address
    from aqueduct import arguments as arguments
    from aqueduct import arrow as arrow
    from aqueduct import bpmux as bpmux
    from aqueduct import client as client
    from aqueduct import config as config
    from aqueduct import dissect as dissect
    from aqueduct import endpoint as endpoint
    from aqueduct import errors as errors
    from aqueduct import relink as relink
    from aqueduct import rpc as rpc
    from aqueduct import service as service
    from aqueduct import testing as testing
    from aqueduct.carriers.certificates import ClientTls, ServerTls, dev_certificate
    from aqueduct.client.client import Client
    from aqueduct.client.endpoint_set import EndpointState
    from aqueduct.client.stream import Stream
    from aqueduct.client.sync_client import SyncClient
    from aqueduct.client.sync_stream import SyncStream
    from aqueduct.client.sync_writer import SyncWriter
    from aqueduct.client.writer import Writer
    from aqueduct.config import Config
    from aqueduct.endpoint.channel import Message, Mode, Receiver, Sender, channel
    from aqueduct.endpoint.connection import Connection
    from aqueduct.endpoint.server import Server, connect, serve
    from aqueduct.errors import AqueductError
    from aqueduct.rpc.describe import Description
    from aqueduct.rpc.request import Partition
    from aqueduct.rpc.telemetry import OpenTelemetry
    from aqueduct.service.batching import Batching, CallRows
    from aqueduct.service.context import Call
    from aqueduct.service.json_web_token import Jwt
    from aqueduct.service.service import Service
    from aqueduct.service.token_file import TokenFile

__all__ = [
    "AqueductError",
    "Batching",
    "Call",
    "CallRows",
    "Client",
    "ClientTls",
    "Config",
    "Connection",
    "Description",
    "EndpointState",
    "Jwt",
    "Message",
    "Mode",
    "OpenTelemetry",
    "Partition",
    "Receiver",
    "Sender",
    "Server",
    "ServerTls",
    "Service",
    "Stream",
    "SyncClient",
    "SyncStream",
    "SyncWriter",
    "TokenFile",
    "Writer",
    "channel",
    "connect",
    "dev_certificate",
    "serve",
]

# Loaded on first use: those who want the channels alone, or one command, wait for no pyarrow.
_MODULES: Final = {
    "AqueductError": "aqueduct.errors",
    "Batching": "aqueduct.service.batching",
    "Call": "aqueduct.service.context",
    "CallRows": "aqueduct.service.batching",
    "Client": "aqueduct.client.client",
    "ClientTls": "aqueduct.carriers.certificates",
    "Config": "aqueduct.config",
    "Connection": "aqueduct.endpoint.connection",
    "Description": "aqueduct.rpc.describe",
    "EndpointState": "aqueduct.client.endpoint_set",
    "Jwt": "aqueduct.service.json_web_token",
    "Message": "aqueduct.endpoint.channel",
    "Mode": "aqueduct.endpoint.channel",
    "OpenTelemetry": "aqueduct.rpc.telemetry",
    "Partition": "aqueduct.rpc.request",
    "Receiver": "aqueduct.endpoint.channel",
    "Sender": "aqueduct.endpoint.channel",
    "Server": "aqueduct.endpoint.server",
    "ServerTls": "aqueduct.carriers.certificates",
    "Service": "aqueduct.service.service",
    "Stream": "aqueduct.client.stream",
    "SyncClient": "aqueduct.client.sync_client",
    "SyncStream": "aqueduct.client.sync_stream",
    "SyncWriter": "aqueduct.client.sync_writer",
    "TokenFile": "aqueduct.service.token_file",
    "Writer": "aqueduct.client.writer",
    "channel": "aqueduct.endpoint.channel",
    "connect": "aqueduct.endpoint.server",
    "dev_certificate": "aqueduct.carriers.certificates",
    "serve": "aqueduct.endpoint.server",
}

_SUBMODULES: Final = (
    "address",
    "arguments",
    "arrow",
    "bpmux",
    "client",
    "config",
    "dissect",
    "endpoint",
    "errors",
    "relink",
    "rpc",
    "service",
    "testing",
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
