"""bpmux/rel by itself: requests, sinks, streams and duplexes over TCP or Unix, no Aqueduct.

``connect`` and ``serve`` give a ``BpmuxConnection``, the same on both sides. See docs/protocols
for the
numbers (BP-5, BP-R12) in these pages, and ``examples/bpmux_calls.py`` for two programs that call
each other.
"""

from aqueduct.bpmux.connection import BpmuxConnection
from aqueduct.bpmux.server import BpmuxServer, connect, serve
from aqueduct.bpmux.streams import BpmuxRequest, BpmuxSink, BpmuxStream, Duplex

__all__ = [
    "BpmuxConnection",
    "BpmuxRequest",
    "BpmuxServer",
    "BpmuxSink",
    "BpmuxStream",
    "Duplex",
    "connect",
    "serve",
]
