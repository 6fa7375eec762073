"""What a call in the service needs of the connection that it came on, and of what sends answers.

``aqueduct.endpoint`` has both for channels, ``aqueduct.service.reactive_call`` for ReactiveSocket.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from aqueduct.carriers.contract import PeerCredentials, PeerIdentity
from aqueduct.config import Config
from aqueduct.endpoint import Headers
from aqueduct.endpoint.accounts import SendingAccount, SendLedger
from aqueduct.errors import ConnectionLost

__all__ = ["AnswerSender", "CallCarrier", "CallConnection", "CallCore", "CallOrigin", "CallPump"]


class CallCarrier(Protocol):
    """Who the peer is, and whether the transport is there."""

    @property
    def peer(self) -> str:
        """The address of the peer."""

    @property
    def peer_credentials(self) -> PeerCredentials | None:
        """The process at the other end of a Unix socket."""

    @property
    def peer_identity(self) -> PeerIdentity | None:
        """Whom the peer's certificate names."""

    @property
    def suspended(self) -> bool:
        """Whether there is no transport, and there may be one again."""

    @property
    def resumes(self) -> int:
        """How often there was one again."""


class CallCore(Protocol):
    """What waits to leave on a connection."""

    @property
    def outgoing(self) -> SendLedger:
        """Its bytes."""


class CallPump(Protocol):
    """What lets bytes leave."""

    def flush_soon(self) -> None:
        """What was queued leaves in this turn of the loop."""


class CallOrigin(Protocol):
    """What a Call tells of its connection."""

    @property
    def carrier(self) -> CallCarrier:
        """Who is at the other end."""

    @property
    def headers(self) -> Headers:
        """What the peer said when it connected."""


class CallConnection(Protocol):
    """A connection, for its calls."""

    @property
    def config(self) -> Config:
        """Its settings."""

    @property
    def carrier(self) -> CallCarrier:
        """Who is at the other end."""

    @property
    def core(self) -> CallCore:
        """What waits to leave."""

    @property
    def pump(self) -> CallPump:
        """What lets bytes leave."""

    @property
    def headers(self) -> Headers:
        """What the peer said when it connected."""

    @property
    def error(self) -> ConnectionLost | None:
        """Why it is over, once it is."""

    @property
    def closed(self) -> bool:
        """Whether it is over."""

    @property
    def sending(self) -> SendingAccount:
        """The account of what all connections of the process send."""

    def flush(self) -> None:
        """What was queued leaves at once."""

    def await_answer(self) -> None:
        """What was queued leaves at once: the peer sends nothing before it has come."""

    def room_came(self) -> None:
        """Something that came is done with, and others wait for its room."""


class AnswerSender(Protocol):
    """Where the answers of a call go; ``aqueduct.endpoint.Sender`` is one."""

    on_change: Callable[[], None] | None
    """Called when there is room that was asked for, or it has ended."""

    @property
    def row(self) -> Any:
        """What compiled code sends by; None: it sends by ``post`` alone."""

    @property
    def writable(self) -> bool:
        """Whether there is room for an answer."""

    @property
    def queued(self) -> int:
        """Bytes that have not left."""

    @property
    def error(self) -> Exception | None:
        """How it ended; None while it lives."""

    def post(self, payload: Any, headers: Headers) -> object:
        """Sends a message, whether or not there is room."""

    async def wait_writable(self, *, ample: bool = False) -> None:
        """Returns once there is room; raises ``error``."""

    def notify_writable(self, *, ample: bool = False) -> None:
        """Asks for one call of ``on_change`` once there is room."""

    def finish(self) -> None:
        """No answer follows."""

    async def wait_closed(self) -> None:
        """Returns once all has left."""

    def cancel(self) -> None:
        """Gives up what has not left."""
