"""Tests of services and clients: without a network, and over one that fails when you say so.

- ``client``: a client of a service in this process, for ``with`` and for ``async with``.
- ``call`` and ``batches``: what a handler is called with, made by hand.
- ``FaultyNetwork``: a relay to put between a client and a service, which cuts, stalls, slows and
  loses.

No test framework is needed.
"""

from __future__ import annotations

from aqueduct.carriers.contract import PeerCredentials, PeerIdentity
from aqueduct.testing.handmade import HandMadeBatches, HandMadeCall, batches, call
from aqueduct.testing.network import FaultyNetwork
from aqueduct.testing.served import ServedClient, client

__all__ = [
    "FaultyNetwork",
    "HandMadeBatches",
    "HandMadeCall",
    "PeerCredentials",
    "PeerIdentity",
    "ServedClient",
    "batches",
    "call",
    "client",
]
