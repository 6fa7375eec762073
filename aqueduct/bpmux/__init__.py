"""bpmux/rel by itself: requests, sinks, streams and duplexes over TCP or Unix, no Aqueduct.

``connect`` and ``serve`` give a ``Connection``, the same on both sides. See docs/protocols for the
numbers (BP-5, BP-R12) in these pages, and ``examples/bpmux_calls.py`` for two programs that call
each other.
"""

from aqueduct.bpmux.connection import Connection
from aqueduct.bpmux.server import Server, connect, serve
from aqueduct.bpmux.streams import Duplex, Request, Sink, Stream

__all__ = ["Connection", "Duplex", "Request", "Server", "Sink", "Stream", "connect", "serve"]
