"""What a connection core wants done by its carrier: small tuples, applied in order by the pump.

The first item says which:

(WRITE, my stream, buffers, fin): the next number opens the stream.
(RESET, my stream, code)
(STOP, the peer's stream, code)
(CREDIT, the peer's stream, limit in bytes from its start)
(DATAGRAM, bytes)
(CLOSE, code, reason)

Numbers from BIDI on are those of bidirectional streams; see the contract of carriers.
"""

from __future__ import annotations

from typing import Any, Final, TypeAlias

from aqueduct._speedups.channels.events import CLOSE, CREDIT, DATAGRAM, RESET, STOP, WRITE

__all__ = ["BIDI", "CLOSE", "CREDIT", "DATAGRAM", "RESET", "STOP", "WRITE", "Effect"]

BIDI: Final = 1 << 61
"""The first number of a bidirectional stream; unidirectional streams have smaller ones."""

Effect: TypeAlias = tuple[Any, ...]
