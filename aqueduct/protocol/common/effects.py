"""What a connection core wants done by its carrier: small tuples, applied in order by the pump.

The first item says which:

(WRITE, my stream, buffers, fin): the next number opens the stream.
(RESET, my stream, code)
(STOP, the peer's stream, code)
(CREDIT, the peer's stream, limit in bytes from its start)
(DATAGRAM, bytes)
(CLOSE, code, reason)
"""

from __future__ import annotations

from typing import Any, TypeAlias

from aqueduct._speedups.channels.events import CLOSE, CREDIT, DATAGRAM, RESET, STOP, WRITE

__all__ = ["CLOSE", "CREDIT", "DATAGRAM", "RESET", "STOP", "WRITE", "Effect"]

Effect: TypeAlias = tuple[Any, ...]
