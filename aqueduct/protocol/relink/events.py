"""What a Link reports: small tuples, in order, drained by ``Link.events_received``.

The first item says which; a channel is its identifier. Numbers of messages count from 0 for each
channel and do not wrap.
"""

from __future__ import annotations

from typing import Any, Final, TypeAlias

__all__ = [
    "CLOSE",
    "CLOSED",
    "COMMIT",
    "ENDED",
    "FAILED",
    "MESSAGE",
    "PIECE",
    "PONG",
    "RESULT",
    "ROLLBACK",
    "SHUTDOWN",
    "SILENT",
    "UP",
    "WRITABLE",
    "Event",
]

UP: Final = "up"
"""(UP, resumed): messages may flow; of an old link after the peer's resume."""
MESSAGE: Final = "message"
"""(MESSAGE, channel, number, parts): a message is whole. ``parts`` is a list of buffers; None if
its pieces were reported. Say ``consume`` when it is done with; on a transactional channel wait for
the decision."""
PIECE: Final = "piece"
"""(PIECE, channel, number, part, data): the next bytes of a message, with the index of their part.
No byte comes twice, over all connections of the link. Only of a Link made with ``pieces``."""
COMMIT: Final = "commit"
"""(COMMIT, channel, first, last): process these messages, and say ``complete``."""
ROLLBACK: Final = "rollback"
"""(ROLLBACK, channel, first, last): drop these messages, some of which may not have come."""
CLOSE: Final = "close"
"""(CLOSE, channel): the sender closes it. It is answered once all that came is done with."""
RESULT: Final = "result"
"""(RESULT, channel, numbers, committed): whether the receiver has processed these messages."""
CLOSED: Final = "closed"
"""(CLOSED, channel): the receiver has done with all, and the channel may be opened again."""
WRITABLE: Final = "writable"
"""(WRITABLE, channel): there is room again for a message that had none."""
PONG: Final = "pong"
"""(PONG, seconds): the answer to a ping, after so long."""
SHUTDOWN: Final = "shutdown"
"""(SHUTDOWN,): the peer opens no more channels."""
SILENT: Final = "silent"
"""(SILENT, why): the connection moves no byte any more. Cut it, and connect again."""
ENDED: Final = "ended"
"""(ENDED,): both sides have shut down, and all channels are closed. The last event."""
FAILED: Final = "failed"
"""(FAILED, error): the peer broke the protocol. Close the connection; the link is lost. The last
event."""

Event: TypeAlias = tuple[Any, ...]
