"""bpmux/rel by itself: requests, sinks, streams and duplexes over TCP or Unix, no Aqueduct.

``connect`` and ``serve`` give a ``Connection``, the same on both sides. See docs/protocols for the
numbers (BP-5, BP-R12) in these pages, and ``examples/bpmux_calls.py`` for two programs that call
each other.
"""

from aqueduct.bpmux.connection import Connection
from aqueduct.bpmux.handles import Duplex, Request, Sink, Stream
from aqueduct.bpmux.serving import Server, connect, serve

__all__ = ["Connection", "Duplex", "Request", "Server", "Sink", "Stream", "connect", "serve"]
