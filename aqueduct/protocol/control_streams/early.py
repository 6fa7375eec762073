"""Early data (0-RTT): what a client repeats if it is rejected, what a server holds until it counts.

Both sides weigh it alike, so that a client stays below what a server with the same settings holds.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

from aqueduct._speedups.base.buffers import size_of
from aqueduct._speedups.channels.encoder import VERSION
from aqueduct.errors import LimitExceeded
from aqueduct.protocol.common import effects
from aqueduct.protocol.common.effects import BIDI
from aqueduct.protocol.common.send_streams import SendStreams
from aqueduct.protocol.control_streams.bidi_streams import BidiStreams

__all__ = ["EarlyReads", "EarlyWrites"]

STREAM_WEIGHT: Final = 512
"""What a stream of early data weighs beside its bytes."""


@dataclass(slots=True)
class _Kept:
    """What was written on one stream."""

    buffers: list[Any] = field(default_factory=list)
    fin: bool = False


class EarlyWrites:
    """What a client has written before the decision: it may have to be written again (AQ0-2).

    None of it counts as written until then, so that it stays accounted as it was. What would bring
    it above the limit is held back until the decision, with all that follows it.
    """

    def __init__(self, outgoing: SendStreams, bidi: BidiStreams, limit: int) -> None:
        """``limit``: Limits.early_bytes."""
        self._outgoing = outgoing
        self._bidi = bidi
        self._limit = limit
        self._weight = 0
        self._kept: dict[int, _Kept] = {}
        self._left: dict[int, int] = {}
        """Bytes of each stream that have left the carrier."""
        self._held: list[effects.Effect] = []
        """What waits for the decision, in order."""
        self.held_streams = 0
        """Unidirectional streams that are opened in what is held."""
        self.held_bidi = 0
        """Bidirectional ones."""
        outgoing.waiting_beside += 1

    def leave(self, wanted: list[effects.Effect]) -> list[effects.Effect]:
        """Of effects, what the carrier may do now."""
        now = []
        for effect in wanted:
            if effect[0] == effects.WRITE:
                self._keep(*effect[1:])
            elif effect[0] == effects.RESET:
                self._kept.pop(effect[1], None)  # the reset gave its data up
            elif effect[0] != effects.CLOSE:
                now.append(effect)
                continue
            if effect[0] != effects.CLOSE and self._weight > self._limit:
                self._held.append(effect)
            else:
                now.append(effect)
        return now

    def written(self, number: int, size: int) -> None:
        """Bytes of a stream have left: whether they arrive is open."""
        self._left[number] = self._left.get(number, 0) + size

    def accept(self, waiting: list[effects.Effect]) -> dict[int, int]:
        """All of it counts: what was held goes before the effects that wait.

        Returns how many bytes of each stream have left.
        """
        self._outgoing.waiting_beside -= 1
        waiting[:0] = self._held
        self._recount(forgotten=False)
        return self._left

    def repeat(self, waiting: list[effects.Effect]) -> None:
        """None of it counts: it waits for new streams, before all that waits already."""
        self._outgoing.waiting_beside -= 1
        self._recount(forgotten=True)
        self.leave(waiting)  # these streams are unknown to the carrier, too
        waiting[:] = [
            effect for effect in waiting if effect[0] not in (effects.WRITE, effects.RESET)
        ]
        for number in sorted(self._kept, reverse=True):  # each goes to the front
            kept = self._kept[number]
            frames = kept.buffers
            if frames and frames[0] is VERSION:
                del frames[0]  # a stream begins with it anew, if that is needed
            if number >= BIDI:
                self._bidi.repeat(number, frames, fin=kept.fin)
            else:
                self._outgoing.withdraw(number, frames)

    # Within

    def _recount(self, *, forgotten: bool) -> None:
        self._outgoing.recount(self.held_streams, forgotten)
        self._bidi.recount(self.held_bidi, forgotten=forgotten)

    def _keep(self, number: int, buffers: list[Any], fin: bool) -> None:
        kept = self._kept.get(number)
        opens = kept is None
        if kept is None:
            kept = self._kept[number] = _Kept()
        kept.buffers += buffers
        kept.fin = kept.fin or fin
        self._weight += size_of(buffers) + (STREAM_WEIGHT if opens else 0)
        if opens and self._weight > self._limit:
            if number >= BIDI:
                self.held_bidi += 1
            else:
                self.held_streams += 1


class EarlyReads:
    """The streams of the peer before a replay is ruled out: nothing of them is read (AQ0-3)."""

    def __init__(self, limit: int) -> None:
        """``limit``: Limits.early_bytes."""
        self._limit = limit
        self._weight = 0
        self.streams: dict[Any, None] = {}
        """Those that have begun, in order."""

    def opened(self, stream: Any) -> None:
        """A stream begins. Raises LimitExceeded."""
        stream.postponed = True
        self.streams[stream] = None
        self.came(STREAM_WEIGHT)

    def came(self, size: int) -> None:
        """Bytes of a stream came. Raises LimitExceeded."""
        self._weight += size
        if self._weight > self._limit:
            raise LimitExceeded(
                f"{self._weight} bytes of early data came before the handshake was complete; "
                f"Limits.early_bytes ({self._limit}) are allowed"
            )
