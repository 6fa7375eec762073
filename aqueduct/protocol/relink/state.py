"""The life of a link and of its channels, as tables.

Nothing here knows bytes or which side we are. None: the peer may not do that there.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import Final

__all__ = [
    "LINK",
    "RECEIVING",
    "SENDING",
    "ChannelState",
    "LinkInput",
    "LinkState",
    "ReceivingInput",
    "SendingInput",
]


class LinkState(Enum):
    """A link, over as many connections as it lives."""

    DOWN = auto()
    """There is no connection."""
    RESUMING = auto()
    """Connected, and the peer's resume has not come: messages wait (RL-8)."""
    UP = auto()
    """Messages may flow."""
    ENDED = auto()
    """Both sides have shut it down, or it is lost. Nothing follows."""


class LinkInput(Enum):
    """What can happen to a link."""

    NEW = auto()
    """A connection with a new link."""
    OLD = auto()
    """A connection with this link again."""
    RESUME = auto()
    """The peer's resume."""
    CUT = auto()
    """The connection is gone."""
    END = auto()
    """Both sides have shut down, or the link is lost."""


_L, _I = LinkState, LinkInput
LINK: Final[dict[tuple[LinkState, LinkInput], LinkState | None]] = {
    (_L.DOWN, _I.NEW): _L.UP,
    (_L.DOWN, _I.OLD): _L.RESUMING,
    (_L.DOWN, _I.CUT): _L.DOWN,
    (_L.DOWN, _I.END): _L.ENDED,
    (_L.RESUMING, _I.RESUME): _L.UP,
    (_L.RESUMING, _I.CUT): _L.DOWN,
    (_L.RESUMING, _I.END): _L.ENDED,
    (_L.UP, _I.RESUME): None,  # on a new link, or twice (RL-R11)
    (_L.UP, _I.CUT): _L.DOWN,
    (_L.UP, _I.END): _L.ENDED,
    (_L.ENDED, _I.CUT): _L.ENDED,
    (_L.ENDED, _I.END): _L.ENDED,
}


class ChannelState(Enum):
    """One direction of a channel."""

    OPEN = auto()
    CLOSING = auto()
    """At the sender: asked for, and messages or results are outstanding. At the receiver: the close
    has come, and the application has not finished what came before."""
    CLOSE_SENT = auto()
    """At the sender: waits for closed."""
    GONE = auto()
    """Without state. The sender may open the channel again (RL-18)."""


class SendingInput(Enum):
    """What can happen to a channel at its sender."""

    SEND = auto()
    """A message, or a decision about messages."""
    CLOSE = auto()
    """The application closes."""
    SETTLED = auto()
    """Nothing is outstanding that close has to wait for (RL-R15)."""
    CLOSED = auto()
    """The peer's acknowledgement of the close."""


class ReceivingInput(Enum):
    """What can happen to a channel at its receiver."""

    MESSAGE = auto()
    """A message, or a decision about messages."""
    CLOSE = auto()
    SETTLED = auto()
    """The application has finished all that came."""


_C, _S = ChannelState, SendingInput
SENDING: Final[dict[tuple[ChannelState, SendingInput], ChannelState | None]] = {
    (_C.OPEN, _S.SEND): _C.OPEN,
    (_C.OPEN, _S.CLOSE): _C.CLOSING,
    (_C.OPEN, _S.SETTLED): _C.OPEN,
    (_C.OPEN, _S.CLOSED): None,  # nothing was closed
    (_C.CLOSING, _S.SETTLED): _C.CLOSE_SENT,
    (_C.CLOSING, _S.CLOSED): None,
    (_C.CLOSE_SENT, _S.SETTLED): _C.CLOSE_SENT,
    (_C.CLOSE_SENT, _S.CLOSED): _C.GONE,
}

_R = ReceivingInput
RECEIVING: Final[dict[tuple[ChannelState, ReceivingInput], ChannelState | None]] = {
    (_C.OPEN, _R.MESSAGE): _C.OPEN,
    (_C.OPEN, _R.CLOSE): _C.CLOSING,
    (_C.OPEN, _R.SETTLED): _C.OPEN,
    (_C.CLOSING, _R.MESSAGE): None,  # between close and closed nothing is sent (RL-R15)
    (_C.CLOSING, _R.CLOSE): _C.CLOSING,  # again, after a resume
    (_C.CLOSING, _R.SETTLED): _C.GONE,
}
