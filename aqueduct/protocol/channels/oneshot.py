"""The two sequences of a oneshot channel, each whole in one piece, read at once (AQ-R28).

A call answers by such a channel: its one message comes with FINISH_SENDER in one sequence, and
ACK_RELIABLE and CLOSE_RECEIVER in another. No stream is made for them. What their frames do one by
one is done in the same order by ``aqueduct._speedups.channels.oneshot_fast``, as is what sends
them, and the
message that carries such a channel; whatever needs a closer look is left to the general way.
"""

from __future__ import annotations

from aqueduct._speedups.channels.codec import FrameDecoder
from aqueduct._speedups.channels.oneshot_fast import Brisk
from aqueduct.protocol.channels.context import ConnectionContext
from aqueduct.protocol.channels.receiver import ReceiverHalf
from aqueduct.protocol.channels.recv_streams import SMALL
from aqueduct.protocol.channels.registry import Registry
from aqueduct.protocol.channels.sender import SenderHalf
from aqueduct.protocol.channels.state import (
    RECEIVER,
    SENDER,
    ReceiverInput,
    ReceiverState,
    SenderInput,
    SenderState,
)

__all__ = ["Oneshots"]


class Oneshots(Brisk):
    """The short way of calls; ``decoder`` is for nothing else."""

    __slots__ = ()

    def __init__(
        self, shared: ConnectionContext, registry: Registry, decoder: FrameDecoder
    ) -> None:
        super().__init__(
            shared,
            registry,
            decoder,
            halves=(SenderHalf, ReceiverHalf),
            states=(
                SenderState.OPEN,
                SENDER[SenderState.OPEN, SenderInput.FINISH],
                SENDER[SenderState.FINISHED, SenderInput.CLOSE_RECEIVED],
                ReceiverState.OPEN,
                RECEIVER[ReceiverState.OPEN, ReceiverInput.COMPLETE],
            ),
            small=SMALL,
        )
