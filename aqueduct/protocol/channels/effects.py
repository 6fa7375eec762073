"""What a connection core wants done by its carrier: small tuples, applied in order by the pump.

The first item says which; numbers are those of ``aqueduct.carriers.contract``.
"""

from __future__ import annotations

from typing import Any, Final, TypeAlias

__all__ = ["CLOSE", "CREDIT", "DATAGRAM", "RESET", "STOP", "WRITE", "Effect"]

WRITE: Final = 0
"""(WRITE, my stream, buffers, fin): the next number opens the stream."""
RESET: Final = 1
"""(RESET, my stream, code)"""
STOP: Final = 2
"""(STOP, the peer's stream, code)"""
CREDIT: Final = 3
"""(CREDIT, the peer's stream, limit in bytes from its start)"""
DATAGRAM: Final = 4
"""(DATAGRAM, bytes)"""
CLOSE: Final = 5
"""(CLOSE, code, reason)"""

Effect: TypeAlias = tuple[Any, ...]
