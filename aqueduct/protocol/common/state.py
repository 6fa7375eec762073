"""The life of the two halves of a channel, as tables.

Everything that changes a half's state stands here, and nothing here knows bytes, streams or
which side we are. A missing pair is a misuse by the application (REFUSED) or impossible.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import Final

__all__ = [
    "RECEIVER",
    "SENDER",
    "ReceiverInput",
    "ReceiverState",
    "SenderInput",
    "SenderState",
]


class _Member(Enum):
    """Members are looked up by identity: Enum's own hash would be a call of Python for each."""

    __hash__ = object.__hash__


class SenderState(_Member):
    """The sender half."""

    OPEN = auto()
    """Messages may be sent."""
    FINISHED = auto()
    """The finish is queued or sent; the state stays until the peer closes (AQ-R18)."""
    CANCELLED = auto()
    """The cancel is queued or sent; the state stays until the peer closes (AQ-R18)."""
    ENDED = auto()
    """Destroyed; the handle keeps its error."""


class SenderInput(_Member):
    """What can happen to a sender half."""

    SEND = auto()
    FINISH = auto()
    CANCEL = auto()
    CLOSE_RECEIVED = auto()
    LOST = auto()
    """The peer said that it is lost, or the cascade of AQ-R27 reached it."""
    DISCONNECTED = auto()


class ReceiverState(_Member):
    """The receiver half."""

    OPEN = auto()
    """Messages arrive."""
    FINISHING = auto()
    """The finish arrived before some of the messages that it counts (AQ-45)."""
    CLOSED = auto()
    """The close is said, or will be; the protocol state is destroyed, the queue may outlive it."""


class ReceiverInput(_Member):
    """What can happen to a receiver half."""

    MESSAGE = auto()
    FINISH = auto()
    COMPLETE = auto()
    """Everything that the finish counts has arrived, or the one message of a oneshot."""
    CANCEL = auto()
    RESET = auto()
    """A cancel that may come behind FINISH: its control stream was reset (AQ0-31)."""
    CLOSE = auto()
    """The application closes."""
    LOST = auto()
    DISCONNECTED = auto()


_S, _I = SenderState, SenderInput
SENDER: Final[dict[tuple[SenderState, SenderInput], SenderState | None]] = {
    # None: refused as a misuse by the application, state unchanged.
    (_S.OPEN, _I.SEND): _S.OPEN,
    (_S.OPEN, _I.FINISH): _S.FINISHED,
    (_S.OPEN, _I.CANCEL): _S.CANCELLED,
    (_S.OPEN, _I.CLOSE_RECEIVED): _S.ENDED,
    (_S.OPEN, _I.LOST): _S.ENDED,
    (_S.OPEN, _I.DISCONNECTED): _S.ENDED,
    (_S.FINISHED, _I.SEND): None,
    (_S.FINISHED, _I.FINISH): None,  # finish and cancel exclude each other (AQ-R18)
    (_S.FINISHED, _I.CANCEL): None,
    (_S.FINISHED, _I.CLOSE_RECEIVED): _S.ENDED,
    (_S.FINISHED, _I.LOST): _S.ENDED,
    (_S.FINISHED, _I.DISCONNECTED): _S.ENDED,
    (_S.CANCELLED, _I.SEND): None,
    (_S.CANCELLED, _I.FINISH): None,
    (_S.CANCELLED, _I.CANCEL): None,
    (_S.CANCELLED, _I.CLOSE_RECEIVED): _S.ENDED,
    (_S.CANCELLED, _I.LOST): _S.ENDED,
    (_S.CANCELLED, _I.DISCONNECTED): _S.ENDED,
    (_S.ENDED, _I.SEND): None,
    (_S.ENDED, _I.FINISH): None,
    (_S.ENDED, _I.CANCEL): None,
    (_S.ENDED, _I.CLOSE_RECEIVED): _S.ENDED,
    (_S.ENDED, _I.LOST): _S.ENDED,
    (_S.ENDED, _I.DISCONNECTED): _S.ENDED,
}

_R, _J = ReceiverState, ReceiverInput
RECEIVER: Final[dict[tuple[ReceiverState, ReceiverInput], ReceiverState | None]] = {
    # None: the peer breaks AQ-R18 (a second FINISH, a cancel after it).
    (_R.OPEN, _J.MESSAGE): _R.OPEN,
    (_R.OPEN, _J.FINISH): _R.FINISHING,
    (_R.OPEN, _J.COMPLETE): _R.CLOSED,
    (_R.OPEN, _J.CANCEL): _R.CLOSED,
    (_R.OPEN, _J.RESET): _R.CLOSED,
    (_R.OPEN, _J.CLOSE): _R.CLOSED,
    (_R.OPEN, _J.LOST): _R.CLOSED,
    (_R.OPEN, _J.DISCONNECTED): _R.CLOSED,
    (_R.FINISHING, _J.MESSAGE): _R.FINISHING,
    (_R.FINISHING, _J.FINISH): None,
    (_R.FINISHING, _J.COMPLETE): _R.CLOSED,
    (_R.FINISHING, _J.CANCEL): None,
    (_R.FINISHING, _J.RESET): _R.CLOSED,
    (_R.FINISHING, _J.CLOSE): _R.CLOSED,
    (_R.FINISHING, _J.LOST): _R.CLOSED,
    (_R.FINISHING, _J.DISCONNECTED): _R.CLOSED,
    # A closed half is out of the tables; what still reaches it is ignored (AQ-R24).
    (_R.CLOSED, _J.MESSAGE): _R.CLOSED,
    (_R.CLOSED, _J.FINISH): _R.CLOSED,
    (_R.CLOSED, _J.COMPLETE): _R.CLOSED,
    (_R.CLOSED, _J.CANCEL): _R.CLOSED,
    (_R.CLOSED, _J.RESET): _R.CLOSED,
    (_R.CLOSED, _J.CLOSE): _R.CLOSED,
    (_R.CLOSED, _J.LOST): _R.CLOSED,
    (_R.CLOSED, _J.DISCONNECTED): _R.CLOSED,
}
