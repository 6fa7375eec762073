"""Relink by itself: links that survive cut connections, with channels of messages and transactions.

``connect`` and ``serve`` give a ``RelinkConnection``, the same on both sides. What was sent reaches
the other side once, however often the connection is cut, as long as both processes live. See
docs/protocols for the numbers (RL-R11) in these pages, and ``examples/relink_batches.py`` for two
programs.
"""

from aqueduct.relink.connection import RelinkConnection, RelinkSnapshot
from aqueduct.relink.dialing import connect
from aqueduct.relink.receiving import RelinkBatch, RelinkIncoming, RelinkMessage
from aqueduct.relink.sending import RelinkChannel, RelinkTransaction
from aqueduct.relink.server import RelinkServer, serve

__all__ = [
    "RelinkBatch",
    "RelinkChannel",
    "RelinkConnection",
    "RelinkIncoming",
    "RelinkMessage",
    "RelinkServer",
    "RelinkSnapshot",
    "RelinkTransaction",
    "connect",
    "serve",
]
