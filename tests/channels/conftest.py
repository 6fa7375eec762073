"""The fixtures of the channel suite."""

from __future__ import annotations

from tests.channels.peers import carrier, peers, seed

__all__ = ["carrier", "peers", "seed"]
