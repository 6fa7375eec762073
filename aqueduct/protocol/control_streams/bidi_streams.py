"""Bidirectional streams: who may open one now, and what waits for that."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, Final

from aqueduct._speedups.base.buffers import size_of
from aqueduct._speedups.channels.encoder import VERSION
from aqueduct._speedups.channels.sender import SendStream
from aqueduct.errors import LimitExceeded
from aqueduct.protocol.common.effects import BIDI
from aqueduct.protocol.common.send_streams import SendStreams

__all__ = ["BIDI", "BidiStreams", "is_mine"]

WAITING_STREAM: Final = 512
"""What a stream of a half that has ended weighs beside its bytes, while it waits for a slot."""


def is_mine(number: int) -> bool:
    """Whether this side opened the bidirectional stream of this number."""
    return not number & 1


@dataclass(slots=True)
class _Waiting:
    """A stream that waits for a slot."""

    frames: list[Any]
    owner: Any
    fin: bool = False
    reset: int | None = None
    weight: int = 0
    """What of it counts as stalled."""


class BidiStreams:
    """This side's directions of bidirectional streams.

    A stream that this side opens waits for a slot, and what is written on it waits with it. A reset
    waits until all that was written has left: the peer would drop a stream whose first frame it
    never saw (AQ0-R5).
    """

    def __init__(self, outgoing: SendStreams, channels: int, at_once: int) -> None:
        """``channels``: Limits.channels. As many streams may be open whose channels have ended.

        ``at_once``: how many that waited may open before others have their turn.
        """
        self._outgoing = outgoing
        self._at_once = at_once
        self.goes_on = False
        """Whether more waiting streams are to be opened once others had their turn."""
        self._channels = channels
        self._unended: set[int] = set()
        """Streams that this side has opened, and on which the peer has not ended its direction."""
        self._openable = self._opened_since = self._next = 0
        self._waiting: OrderedDict[SendStream, _Waiting] = OrderedDict()
        self._resets: dict[int, tuple[SendStream, int]] = {}
        self.owners: dict[int, Any] = {}
        """Whom the peer's answers are for, by the numbers of streams that this side has opened."""

    def openable_changed(self, count: int) -> None:
        """The carrier can open ``count`` more, those in waiting effects included."""
        self._openable = count - self._opened_since
        if not self.goes_on:
            self.open_on()

    def open_on(self) -> None:
        """Opens streams that wait; ``goes_on``: the rest follows once others had their turn."""
        left = self._at_once
        while left and self._waiting and self._openable > 0:
            left -= 1
            stream, waiting = self._waiting.popitem(last=False)
            self._outgoing.waiting_beside -= 1
            self._begin(stream, waiting)
        self.goes_on = bool(self._waiting) and self._openable > 0

    def effects_taken(self) -> None:
        """The carrier sees the effects so far before it counts again."""
        self._opened_since = 0

    def recount(self, held: int, *, forgotten: bool) -> None:
        """``held`` streams more are opened in effects that the carrier has not seen.

        ``forgotten``: they are not, nor is any other. It has forgotten all streams.
        """
        if forgotten:
            self._next -= self._opened_since + held
            self._openable = self._opened_since = 0
        else:
            self._opened_since += held

    def repeat(self, number: int, frames: list[Any], *, fin: bool) -> None:
        """All that was written on a forgotten stream waits, before what waits already."""
        self._unended.discard(number)
        owner = self.owners.pop(number, None)
        _, code = self._resets.pop(number, (None, None))
        stream = self._outgoing.withdraw(number)
        if stream is not None:
            waiting = self._waiting[stream] = _Waiting(frames, owner, fin, code)
            self._outgoing.waiting_beside += 1
            self._weigh(waiting, size_of(frames))
            self._waiting.move_to_end(stream, last=False)

    def open(self, frames: list[Any], owner: Any) -> SendStream:
        """A stream of this side; ``owner``: whom the peer's answers are for."""
        if len(self._unended) > 2 * self._channels:
            raise LimitExceeded(
                f"the peer leaves {len(self._unended)} control streams open, and many of their "
                f"channels have ended; twice Limits.channels ({self._channels}) are allowed"
            )
        stream = SendStream(None, control=True)
        waiting = _Waiting(frames, owner)
        if self._openable > 0 and not self._waiting:
            self._begin(stream, waiting)
        else:
            self._waiting[stream] = waiting
            self._outgoing.waiting_beside += 1
            self._weigh(waiting, size_of(frames))
        return stream

    def answer(self, number: int) -> SendStream:
        """This side's direction of a stream that the peer has opened."""
        stream = SendStream(None, control=True)
        self._outgoing.adopt(stream, number)
        return stream

    def write(self, stream: SendStream, frames: list[Any], *, fin: bool = False) -> None:
        """Frames on a direction of this side; without effect behind its end."""
        waiting = self._waiting.get(stream)
        if waiting is not None:
            if not waiting.fin:
                waiting.frames += frames
                if fin:
                    self._ends(waiting)
                waiting.fin = fin
                self._weigh(waiting, size_of(frames))
        elif not stream.fin:
            self._outgoing.write(stream, frames, fin=fin)

    def reset(self, stream: SendStream, code: int) -> None:
        """Gives up a direction, once the peer has what was written on it."""
        waiting = self._waiting.get(stream)
        if waiting is not None:
            self._ends(waiting)
            waiting.reset = code
        elif stream.queued and is_mine(stream.number) and not stream.dead:
            self._resets[stream.number] = stream, code
        else:
            self._outgoing.reset(stream, code)

    def written(self, number: int) -> None:
        """Bytes of a stream have left: a reset may be due."""
        found = self._resets.get(number)
        if found is not None and not found[0].queued:
            del self._resets[number]
            self._outgoing.reset(*found)

    def heard(self, number: int) -> None:
        """The peer has answered on a stream, so it has seen its first frame."""
        found = self._resets.pop(number, None)
        if found is not None:
            self._outgoing.reset(*found)

    def stopped(self, number: int) -> None:
        """The peer reads no more of a stream: with that it was given up."""
        self._resets.pop(number, None)

    def answered(self, number: int) -> None:
        """The peer has ended its direction of a stream that this side has opened."""
        self._unended.discard(number)

    def clear(self) -> None:
        """The connection is over."""
        self._unended.clear()
        for waiting in self._waiting.values():
            self._outgoing.stalled_beside -= waiting.weight
        self._waiting.clear()
        self.goes_on = False
        self._resets.clear()
        self.owners.clear()

    # Within

    def _weigh(self, waiting: _Waiting, size: int) -> None:
        """What waits for a slot is bounded: the peer may let us open none."""
        self._outgoing.stalled_beside += size
        waiting.weight += size

    def _ends(self, waiting: _Waiting) -> None:
        """Halves that live are bounded by Limits.channels; streams of others count themselves."""
        if not waiting.fin and waiting.reset is None:
            self._weigh(waiting, WAITING_STREAM)

    def _begin(self, stream: SendStream, waiting: _Waiting) -> None:
        self._outgoing.stalled_beside -= waiting.weight
        number = BIDI | self._next << 1
        self._next += 1
        self._openable -= 1
        self._opened_since += 1
        self.owners[number] = waiting.owner
        self._unended.add(number)
        self._outgoing.adopt(stream, number)
        frames = waiting.frames
        if not self._outgoing.version_acknowledged:
            frames = [VERSION, *frames]
        self._outgoing.write(stream, frames, fin=waiting.fin)
        if waiting.reset is not None:
            self._resets[number] = stream, waiting.reset
