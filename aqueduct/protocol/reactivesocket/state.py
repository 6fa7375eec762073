"""The life of a connection and of its streams, as tables.

Nothing here knows bytes or which side we are. None: that may not happen there.
"""

from __future__ import annotations

from enum import IntEnum, auto
from typing import Final

__all__ = [
    "CONNECTION",
    "REQUESTER",
    "RESPONDER",
    "ReactiveInput",
    "ReactiveState",
    "RequesterInput",
    "RequesterState",
    "ResponderInput",
    "ResponderState",
]


class ReactiveState(IntEnum):
    """A connection."""

    __hash__ = object.__hash__  # in C; tables are looked up for every frame

    NEW = auto()
    """At the server: no frame has come."""
    OFFERED = auto()
    """The SETUP was sent, or has come, and its acceptance is not known."""
    OPEN = auto()
    ENDED = auto()
    """Nothing follows but what waits to leave."""


class ReactiveInput(IntEnum):
    """What can happen to a connection."""

    __hash__ = object.__hash__  # in C; tables are looked up for every frame

    SETUP = auto()
    """A SETUP was sent or has come."""
    WITHOUT = auto()
    """Another first frame, where that is allowed (RS-R12)."""
    ACCEPT = auto()
    """At the server the application accepts; at the client a response or a request has come."""
    END = auto()


_C, _I = ReactiveState, ReactiveInput
CONNECTION: Final[dict[tuple[ReactiveState, ReactiveInput], ReactiveState | None]] = {
    (_C.NEW, _I.SETUP): _C.OFFERED,
    (_C.NEW, _I.WITHOUT): _C.OPEN,
    (_C.NEW, _I.ACCEPT): None,  # nothing was offered
    (_C.NEW, _I.END): _C.ENDED,
    (_C.OFFERED, _I.SETUP): _C.OFFERED,  # a second one is ignored (RS-R11)
    (_C.OFFERED, _I.WITHOUT): None,
    (_C.OFFERED, _I.ACCEPT): _C.OPEN,
    (_C.OFFERED, _I.END): _C.ENDED,
    (_C.OPEN, _I.SETUP): _C.OPEN,
    (_C.OPEN, _I.WITHOUT): None,
    (_C.OPEN, _I.ACCEPT): _C.OPEN,
    (_C.OPEN, _I.END): _C.ENDED,
    (_C.ENDED, _I.SETUP): _C.ENDED,
    (_C.ENDED, _I.WITHOUT): _C.ENDED,
    (_C.ENDED, _I.ACCEPT): None,
    (_C.ENDED, _I.END): _C.ENDED,
}


class RequesterState(IntEnum):
    """A stream at its requester."""

    __hash__ = object.__hash__  # in C; tables are looked up for every frame

    CLOSED = auto()
    """Before the request, and after the end."""
    REQUESTED = auto()


class RequesterInput(IntEnum):
    """What can happen to a stream at its requester."""

    __hash__ = object.__hash__  # in C; tables are looked up for every frame

    REQUEST = auto()
    FIRE = auto()
    """REQUEST_FNF was sent."""
    ITEM = auto()
    """A RESPONSE, or a fragment of one, that does not complete."""
    COMPLETE = auto()
    ERROR = auto()
    CANCEL = auto()


_Q, _S = RequesterState, RequesterInput
REQUESTER: Final[dict[tuple[RequesterState, RequesterInput], RequesterState | None]] = {
    (_Q.CLOSED, _S.REQUEST): _Q.REQUESTED,
    (_Q.CLOSED, _S.FIRE): _Q.CLOSED,
    (_Q.CLOSED, _S.ITEM): _Q.CLOSED,  # of an unknown stream: ignored (RS-R11)
    (_Q.CLOSED, _S.COMPLETE): _Q.CLOSED,
    (_Q.CLOSED, _S.ERROR): _Q.CLOSED,
    (_Q.CLOSED, _S.CANCEL): _Q.CLOSED,
    (_Q.REQUESTED, _S.REQUEST): None,  # an id is unique while it is in use (RS-3)
    (_Q.REQUESTED, _S.FIRE): None,
    (_Q.REQUESTED, _S.ITEM): _Q.REQUESTED,
    (_Q.REQUESTED, _S.COMPLETE): _Q.CLOSED,
    (_Q.REQUESTED, _S.ERROR): _Q.CLOSED,
    (_Q.REQUESTED, _S.CANCEL): _Q.CLOSED,
}


class ResponderState(IntEnum):
    """A stream at its responder."""

    __hash__ = object.__hash__  # in C; tables are looked up for every frame

    CLOSED = auto()
    """Before the request, and after the end."""
    RESPONDING = auto()


class ResponderInput(IntEnum):
    """What can happen to a stream at its responder."""

    __hash__ = object.__hash__  # in C; tables are looked up for every frame

    REQUEST = auto()
    FIRE = auto()
    """REQUEST_FNF has come."""
    DEMAND = auto()
    """REQUEST_N has come."""
    CANCEL = auto()
    ITEM = auto()
    COMPLETE = auto()
    ERROR = auto()


_P, _R = ResponderState, ResponderInput
RESPONDER: Final[dict[tuple[ResponderState, ResponderInput], ResponderState]] = {
    (_P.CLOSED, _R.REQUEST): _P.RESPONDING,
    (_P.CLOSED, _R.FIRE): _P.CLOSED,
    (_P.CLOSED, _R.DEMAND): _P.CLOSED,  # of an unknown stream: ignored (RS-R11)
    (_P.CLOSED, _R.CANCEL): _P.CLOSED,
    (_P.CLOSED, _R.ITEM): _P.CLOSED,
    (_P.CLOSED, _R.COMPLETE): _P.CLOSED,
    (_P.CLOSED, _R.ERROR): _P.CLOSED,
    (_P.RESPONDING, _R.REQUEST): _P.RESPONDING,  # with an id in use: ignored (RS-R11)
    (_P.RESPONDING, _R.FIRE): _P.RESPONDING,
    (_P.RESPONDING, _R.DEMAND): _P.RESPONDING,
    (_P.RESPONDING, _R.CANCEL): _P.CLOSED,
    (_P.RESPONDING, _R.ITEM): _P.RESPONDING,
    (_P.RESPONDING, _R.COMPLETE): _P.CLOSED,
    (_P.RESPONDING, _R.ERROR): _P.CLOSED,
}
