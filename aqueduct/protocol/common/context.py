"""What the halves of one connection share: settings, streams out, the event list, the budget."""

from __future__ import annotations

from collections import deque
from typing import Any, Final, Protocol, TypeAlias

from aqueduct._speedups.base.accounts import Account
from aqueduct._speedups.channels.receiver import ReceiveBudget
from aqueduct.config import Config
from aqueduct.protocol.common.admission import Admission
from aqueduct.protocol.common.effects import Effect
from aqueduct.protocol.common.events import Event
from aqueduct.protocol.common.send_streams import SendStreams

__all__ = ["CLOSES", "ConnectionContext", "HalfError", "OwesAck", "OwesClose", "OwesWord"]

CLOSES: Final = 4  # they count at the peer meanwhile, whose limit of channels we do not know
CLOSES_AGE: Final = 1 / 8  # of the delay of acks

HalfError: TypeAlias = Exception
"""How a half ended: a ChannelError, ConnectionLost, or what a placement hook raised."""


class OwesAck(Protocol):
    """A half, as far as its acks go."""

    error: Any

    def ack_due(self) -> None:
        """Says what it owes."""


class OwesClose(Protocol):
    """A patient receiver that has ended."""

    channel: int


class OwesWord(Protocol):
    """A sender that has something to say later, or to hear by then."""

    error: Any

    def announce(self) -> None:
        """How many datagrams it has sent."""

    def stop_due(self) -> None:
        """The peer stopped one of its streams, and should have said more by now."""


class ConnectionContext(ReceiveBudget):
    """One object for each connection, known to all of its halves."""

    __slots__ = (
        "__weakref__",
        "ack_due",
        "admission",
        "announce_due",
        "blocked",
        "close_due",
        "closes_together",
        "closes_wait",
        "closing",
        "config",
        "datagram_limit",
        "datagram_room",
        "datagrams_dropped",
        "datagrams_evicted",
        "datagrams_missed",
        "datagrams_nacked",
        "datagrams_told",
        "effects",
        "events",
        "now",
        "outgoing",
        "read_ahead",
        "read_ahead_both",
        "receipt_due",
        "rtt",
        "side",
        "stopped_due",
    )

    def __init__(
        self,
        config: Config,
        side: int,
        *,
        loopback: bool = False,
        receiving: Account | None = None,
        sending: Account | None = None,
    ) -> None:
        """``receiving`` and ``sending``: of the process; without them this one counts alone."""
        self.config = config
        flow = config.flow
        self.budget, self.channel_budget = flow.receive_budget, flow.channel_receive_bytes
        if receiving is not None:
            self.process = self.shown = receiving
            self.process_budget = flow.process_receive_bytes
            receiving.join(self)
        self.admission = Admission(self, flow)
        self.read_ahead = flow.read_ahead
        """Bytes that a stream of large messages may run ahead."""
        self.read_ahead_both = flow.read_ahead
        """The same while this side sends as much as it receives."""
        if loopback:
            self.read_ahead_both = min(flow.read_ahead, flow.loopback_read_ahead)
        self.side = side
        """0: we are the client, 1: the server."""
        self.now = 0.0
        """The time of the input that is being worked on, seconds."""
        self.events: list[Event] = []
        self.effects: list[Effect] = []
        self.outgoing = SendStreams(config, self.effects, sending)
        self.ack_due: deque[tuple[float, OwesAck]] = deque()
        """Who owes an ack, or the first frame of a control stream; the delay is constant, so
        the order of arrival is the order of deadlines."""
        self.closing: dict[OwesClose, None] = {}
        """Patient receivers that have ended and not said so."""
        self.close_due: list[tuple[float, OwesClose]] = []
        """When they have to say so at the latest: one entry for the first of them."""
        # Of calls in quick succession, a few ends leave together: each is work for both sides that
        # the next question would wait for. Not so many that the peer lacks places for channels.
        self.closes_together = max(1, min(CLOSES, config.limits.channels >> 6))
        """So many leave with what is sent next."""
        self.closes_wait = config.timing.ack_delay * (1 - CLOSES_AGE)
        """Fewer do if the first of them is due within so many seconds."""
        self.announce_due: deque[tuple[float, OwesWord]] = deque()
        """Who has datagrams to announce, in order."""
        self.receipt_due: deque[list[Any]] = deque()
        """Until when datagrams numbered below the last item are waited for (AQ-37)."""
        self.stopped_due: deque[tuple[float, OwesWord]] = deque()
        """Senders of which the peer stopped a stream, and until when its receiver may be closed."""
        self.datagram_limit = 0
        """The largest datagram, bytes; 0: unreliable messages go by stream (AQ-R17)."""
        self.datagram_room = 1 << 62
        """How many datagrams the carrier takes, those in effects that it has not seen left out;
        endless until it says."""
        self.datagrams_told = 0
        """Datagrams in effects that the carrier has not seen yet."""
        self.datagrams_dropped = 0
        """Unreliable messages that found no room and were dropped here; they count as sent."""
        self.datagrams_nacked = 0
        """Unreliable messages of ours that were lost, those included."""
        self.datagrams_missed = 0
        """Unreliable messages of the peer that did not come in time."""
        self.datagrams_evicted = 0
        """Unreliable messages of the peer that gave way to later ones."""
        self.rtt = 0.0
        """Smoothed round trip as the carrier last told it, seconds; 0.0 before the first."""
        self.blocked: dict[Any, Any] = {}
        """Senders whose user waits for room, for which mode, and whether for ample room."""
