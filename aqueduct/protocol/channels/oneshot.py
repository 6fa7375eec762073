"""The two sequences of a oneshot channel, each whole in one piece, read at once (AQ-R28).

A call answers by such a channel: its one message comes with FINISH_SENDER in one sequence, and
ACK_RELIABLE and CLOSE_RECEIVER in another. No stream is made for them. What their frames do one by
one is done here in the same order; whatever needs a closer look is left untouched to the reader.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from aqueduct._speedups.alone import is_taken, message_of, route_of
from aqueduct._speedups.codec import Decoder
from aqueduct.protocol.channels.incoming import SMALL
from aqueduct.protocol.channels.receiving import Received, ReceiverHalf
from aqueduct.protocol.channels.registry import Registry
from aqueduct.protocol.channels.sending import SenderHalf
from aqueduct.protocol.channels.shared import Shared
from aqueduct.protocol.channels.state import ReceiverState, SenderState

__all__ = ["Oneshots"]


class Oneshots:
    """Reads what comes alone; ``decoder`` is for nothing else."""

    __slots__ = ("_decoder", "_registry", "_shared")

    def __init__(self, shared: Shared, registry: Registry, decoder: Decoder) -> None:
        self._shared = shared
        self._registry = registry
        self._decoder = decoder

    def read(self, data: Any) -> bool:
        """Reads all of a stream of the peer's. False: nothing has changed.

        Raises RemoteProtocolError for attachments that may not be.
        """
        half = self._registry.live(route_of(data))
        if half is None:
            return False
        if isinstance(half, SenderHalf):
            if self._shared.blocked or not _waits_for_close(half) or not is_taken(data):
                return False
            half.taken()
            self._registry.sender_closed(half)
            return True
        if not _waits_for_one(half) or half.room < 2 * SMALL:
            return False
        frame = message_of(self._decoder, data, SMALL)
        if frame is None:
            return False
        size = frame.size + frame.overhead
        attachments = frame.attachments and self._registry.attached(frame.attachments)
        self._arrived(half, Received.of(frame, attachments or (), half.cost(size)))
        # What is behind the message in its sequence does not matter any more (AQ-R24).
        self._registry.receiver_closed(half)
        return True

    def _arrived(self, half: ReceiverHalf, received: Received) -> None:
        """Admission, arrival and end in one."""
        half._charge(received.charge)
        half._outstanding += 1
        half.numbers.add(received.number)
        half.queue = deque((received,))
        half._complete()


def _waits_for_one(half: ReceiverHalf) -> bool:
    """Whether its one message may come without a look at anything else."""
    return (
        half._oneshot
        and half.state is ReceiverState.OPEN
        and half.given
        and half._declared < 0
        and half.placement is None
        and half._unreliable is None
        and not half.streams
    )


def _waits_for_close(half: SenderHalf) -> bool:
    """Whether its one message was sent, nothing hangs on it, and nothing else is under way."""
    return (
        half._oneshot
        and half.state is SenderState.FINISHED
        and half._numbers.next == 1
        and half._unreliable is None
        and half._control is None
        and not (half.links or half.acked_links)
        and half._message_stream is not None
        and not half._message_stream.queued
    )
