"""What a ReactiveConnection reports: small tuples, in order, drained by ``events_received``.

The first item says which. A stream is its id; ids of the two requesters are separate (RS-R10).
``cost`` is for ``release``, once the application has done with what came.
"""

from __future__ import annotations

from typing import Any, Final, TypeAlias

__all__ = [
    "ABORTED",
    "ACCEPTED",
    "BROKEN",
    "CANCELLED",
    "COMPLETED",
    "DEMAND",
    "ENDED",
    "ERROR",
    "EXTENSION",
    "FAILED",
    "ITEM",
    "PEER_FAILED",
    "REJECTED",
    "REQUEST",
    "SETUP",
    "WRITABLE",
    "Event",
]

SETUP: Final = "setup"
"""(SETUP, data): at the server. Answer with ``accept`` or ``reject``. Requests may follow at once;
they can be answered once it is accepted."""
ACCEPTED: Final = "accepted"
"""(ACCEPTED,): at the client: the server takes the SETUP."""
REJECTED: Final = "rejected"
"""(REJECTED, data): at the client: the server does not take it. The last event."""

REQUEST: Final = "request"
"""(REQUEST, stream, kind, n, data, cost): of the peer, for so many items. ``kind`` is a type of
frame; REQUEST_FNF wants no answer."""
DEMAND: Final = "demand"
"""(DEMAND, stream): a responder that had to wait may send items again."""
CANCELLED: Final = "cancelled"
"""(CANCELLED, stream): the requester wants no more. Its stream has ended."""
ABORTED: Final = "aborted"
"""(ABORTED, stream, error): this side, the responder, has ended it for what the peer did."""

ITEM: Final = "item"
"""(ITEM, stream, parts, cost): an item is whole; ``parts`` is a list of buffers."""
COMPLETED: Final = "completed"
"""(COMPLETED, stream): nothing follows."""
ERROR: Final = "error"
"""(ERROR, stream, data, cost): the responder failed; any bytes, most often text (RS-R13)."""
BROKEN: Final = "broken"
"""(BROKEN, stream, error): the responder broke the protocol on this stream. It is cancelled."""

EXTENSION: Final = "extension"
"""(EXTENSION, extended type, data, cost): a frame of a type that the application knows."""
WRITABLE: Final = "writable"
"""(WRITABLE,): there is room again for what was refused."""
ENDED: Final = "ended"
"""(ENDED,): the peer sends nothing more. All streams have ended. The last event."""
PEER_FAILED: Final = "peer failed"
"""(PEER_FAILED, data): the peer ends the connection for an error. The last event."""
FAILED: Final = "failed"
"""(FAILED, error): the peer broke the protocol. Let out what waits, then close. The last event."""

Event: TypeAlias = tuple[Any, ...]
