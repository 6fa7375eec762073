"""ReactiveSocket by itself: requests that are answered as items are asked for.

``connect`` and ``serve`` give a ``ReactiveSocketConnection``, the same on both sides: each of them
may request and answer. Data are bytes. See docs/guides/reactivesocket.md and
``examples/reactive_peers.py``.
"""

from aqueduct.errors import ReactiveError
from aqueduct.reactivesocket.connection import ReactiveSnapshot, ReactiveSocketConnection
from aqueduct.reactivesocket.dialing import connect
from aqueduct.reactivesocket.requesting import ReactiveItem, ReactiveStream
from aqueduct.reactivesocket.responding import ReactiveRequest, Responder
from aqueduct.reactivesocket.server import ReactiveSocketServer, serve

__all__ = [
    "ReactiveError",
    "ReactiveItem",
    "ReactiveRequest",
    "ReactiveSnapshot",
    "ReactiveSocketConnection",
    "ReactiveSocketServer",
    "ReactiveStream",
    "Responder",
    "connect",
    "serve",
]
