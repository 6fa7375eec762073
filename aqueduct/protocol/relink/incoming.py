"""The channels of the peer: what has come on them, and what the application has done with it."""

from __future__ import annotations

from aqueduct._speedups.relink import packets
from aqueduct._speedups.relink.packets import PacketDecoder
from aqueduct.config import Relink as Settings
from aqueduct.errors import LimitExceeded, LocalProtocolError, SequenceError
from aqueduct.protocol.relink import events
from aqueduct.protocol.relink.acknowledging import Acknowledger
from aqueduct.protocol.relink.assembly import Assembly
from aqueduct.protocol.relink.cost import message_cost
from aqueduct.protocol.relink.receiving import PartialMessage, ReceiveChannel
from aqueduct.protocol.relink.sending import SEQUENCE_MASK
from aqueduct.protocol.relink.state import ChannelState, ReceivingInput

__all__ = ["Incoming"]


class Incoming:
    """All channels of the peer.

    ``held``: bytes that came and that the application has not done with; ``undecided``: those of
    them that wait for the sender's decision. ``closed_to_new``: the peer has shut down, and opens
    no more channels. ``connected``: what is said may leave.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        transactional: bool,
        pieces: bool,
        reported: list[events.Event],
        acknowledger: Acknowledger,
        start: int,
    ) -> None:
        self.channels: dict[int, ReceiveChannel] = {}
        self.held = 0
        self.undecided = 0
        self._unsettled = 0
        """Channels of which the application has not finished all that came."""
        self.closed_to_new = False
        self.connected = False
        self.assembly: Assembly | None = None
        """Of the message that is coming; None with ``pieces``."""
        self._settings = settings
        self._transactional = transactional
        self._pieces = pieces
        self._events = reported
        self._acknowledger = acknowledger
        self._start = start
        self._arrived = 0
        """Bytes of the message that is coming, on this connection."""

    # What the connection does

    def begin(self, *, connected: bool) -> None:
        """Another connection, or none. Only what was handed over stays of a message in between."""
        self.connected = connected
        self.assembly = None if self._pieces else Assembly()
        self._arrived = 0
        if not self._pieces:
            for channel in self.channels.values():
                channel.partial = None

    @property
    def coming(self) -> int:
        """What the message costs that is not whole yet."""
        return 0 if self.assembly is None else self.assembly.cost

    def tell_for_resume(self) -> None:
        """Acknowledges everything that has come, on any connection (RL-R11)."""
        for channel in self.channels.values():
            if channel.received > channel.start:
                self._acknowledger.tell(channel)

    # What the peer does

    def begin_message(self, decoder: PacketDecoder, *, resuming: bool) -> int:
        """The head of a message is here; returns how many of its bytes were handed over before."""
        handed = 0
        for identifier in decoder.channels:
            channel = self.channels.get(identifier)
            if resuming and (channel is None or channel.received == channel.start):
                raise SequenceError(f"a message on channel {identifier} before the resume (RL-R11)")
            if channel is None:
                channel = self._accept(identifier)
            self._go_on(channel, ReceivingInput.MESSAGE)
            partial = channel.partial
            if partial is None:
                channel.partial = PartialMessage(decoder.sizes)
                continue
            handed = partial.handed
            if partial.sizes != decoder.sizes:
                raise SequenceError(
                    f"{channel!r}: message {channel.received} comes again with other sizes"
                )
        self._arrived = 0
        return handed

    def take_piece(self, decoder: PacketDecoder) -> None:
        """A piece of a message. What an earlier connection has handed over is skipped."""
        if self.assembly is not None:
            self.assembly.keep(decoder)
            return
        if not decoder.channels:
            return  # a message to nobody is legal (RL-R6)
        data = decoder.data
        assert data is not None
        channel, partial = self._coming(decoder)
        self._arrived += len(data)
        new = self._arrived - partial.handed
        if new <= 0:
            return
        partial.handed = self._arrived
        fresh = data if new == len(data) else memoryview(data)[-new:]
        self._events.append(
            (events.PIECE, channel.identifier, channel.received, decoder.part, fresh)
        )

    def expected(self, decoder: PacketDecoder) -> int:
        """How many of the next bytes may be handed over without being fed, as pieces."""
        if self.assembly is not None or not decoder.in_payload or not decoder.channels:
            return 0
        _, partial = self._coming(decoder)
        return decoder.missing if self._arrived == partial.handed else 0

    def landed(self, size: int, decoder: PacketDecoder) -> None:
        """``size`` bytes of the part that is coming have their place."""
        if self.assembly is not None:
            self.assembly.landed(size)
            return
        _, partial = self._coming(decoder)
        self._arrived += size
        partial.handed = self._arrived

    def take_whole(self, decoder: PacketDecoder, now: float) -> None:
        """A message is whole."""
        parts = None if self.assembly is None else self.assembly.finish(decoder.sizes)
        cost = message_cost(sum(decoder.sizes), len(decoder.sizes))
        for identifier in decoder.channels:
            channel = self.channels[identifier]
            before = _counts_of(channel)
            number, dropped = channel.take_message(cost)
            self._count(channel, before)
            self._acknowledger.add(channel, now)
            if not dropped:
                self._events.append((events.MESSAGE, identifier, number, parts))
        most = self._settings.receive_bytes
        if self.undecided > most and self.undecided > cost * len(decoder.channels):
            raise LimitExceeded(
                f"{self.undecided} bytes came and were neither committed nor rolled back; "
                f"Relink.receive_bytes is {most}"
            )

    def pass_message(self, decoder: PacketDecoder, now: float) -> None:
        """A message is whole that somebody else has taken: it is consumed."""
        channel = self.channels[decoder.channels[0]]
        channel.pass_message(decoder.sizes[0])
        self._acknowledger.add(channel, now)

    def hand_over(self, channel: int, handed: int) -> None:
        """So many bytes of the message that is coming were taken by somebody else."""
        found = self.channels.get(channel)
        if found is not None and found.partial is not None:
            found.partial.handed = max(found.partial.handed, handed)

    def take_operation(self, identifier: int, kind: int, sequence: int | None, now: float) -> None:
        """A commit, rollback or close of the sender."""
        channel = self.channels.get(identifier)
        if kind == packets.CLOSE:
            if channel is None:
                self._acknowledger.tell_closed(identifier)
                return
            again = channel.state is ChannelState.CLOSING
            self._go_on(channel, ReceivingInput.CLOSE)
            channel.close_came = True
            if channel.transactional and channel.decided < channel.received:
                self._take_decision(channel, (channel.received - 1) & SEQUENCE_MASK, commit=False)
            if not again:
                self._events.append((events.CLOSE, identifier))
            self._answer_close(channel)
            return
        if channel is None:
            raise SequenceError(f"a decision about channel {identifier}, which is not open")
        self._go_on(channel, ReceivingInput.MESSAGE)
        self._take_decision(channel, sequence, commit=kind == packets.COMMIT)
        self._acknowledger.add(channel, now)

    # What the application does

    def consume(self, channel: int, last: int, now: float) -> None:
        """As ``Link.consume``."""
        found = self._require(channel, last)
        if found is None or found.transactional:
            return
        before = _counts_of(found)
        found.consume(last + 1)
        self._count(found, before)
        if self.connected:
            # While other channels fill the sender's window, it waits for this to send the next one.
            waited_for = found.settled and 4 * self.held >= self._settings.receive_bytes
            self._acknowledger.add(found, now, at_once=waited_for)
            self._answer_close(found)

    def complete(self, channel: int, last: int, now: float, *, committed: bool) -> None:
        """As ``Link.complete``."""
        found = self._require(channel, last)
        if found is None:
            return
        if found.kept_results >= self._settings.unconfirmed_results:
            raise LocalProtocolError(
                f"channel {channel}: the peer has not read {found.kept_results} results; "
                "Relink.unconfirmed_results is the limit"
            )
        before = _counts_of(found)
        if not found.add_result(last, committed=committed):
            raise LocalProtocolError(
                f"channel {channel}: message {last} has a result, or was not committed (RL-R9)"
            )
        self._count(found, before)
        if self.connected:
            self._acknowledger.add(found, now, at_once=True)  # the sender waits for it
            self._answer_close(found)

    @property
    def drained(self) -> bool:
        """Whether the application has done with all that came."""
        return not self._unsettled

    # Within

    def _accept(self, identifier: int) -> ReceiveChannel:
        if self.closed_to_new:
            raise SequenceError(f"channel {identifier} is opened after the shutdown (RL-R16)")
        if len(self.channels) >= self._settings.channels:
            raise LimitExceeded(
                f"the peer has {len(self.channels)} channels open; Relink.channels is the limit"
            )
        channel = ReceiveChannel(identifier, transactional=self._transactional, start=self._start)
        self.channels[identifier] = channel
        return channel

    def _coming(self, decoder: PacketDecoder) -> tuple[ReceiveChannel, PartialMessage]:
        """Of the message that is coming, in pieces: it has one target."""
        channel = self.channels[decoder.channels[0]]
        assert channel.partial is not None
        return channel, channel.partial

    def _go_on(self, channel: ReceiveChannel, given: ReceivingInput) -> None:
        if not channel.change(given):
            raise SequenceError(f"{channel!r}: the peer sends on it after its close (RL-R15)")

    def _take_decision(
        self, channel: ReceiveChannel, sequence: int | None, *, commit: bool
    ) -> None:
        before = _counts_of(channel)
        found = channel.on_decision(sequence, commit=commit)
        self._count(channel, before)
        if found is not None:
            kind = events.COMMIT if commit else events.ROLLBACK
            self._events.append((kind, channel.identifier, *found))

    def _count(self, channel: ReceiveChannel, before: tuple[int, int, bool]) -> None:
        """Brings the sums in step with a channel, of which ``before`` was counted."""
        held, undecided, settled = before
        self.held += channel.held - held
        self.undecided += channel.undecided - undecided
        self._unsettled += settled - channel.settled

    def _answer_close(self, channel: ReceiveChannel) -> None:
        """Says closed once the application has done with all that came before (RL-R15).

        On another connection the close comes again first: it has one answer.
        """
        if not channel.close_came or not channel.settled:
            return
        channel.change(ReceivingInput.SETTLED)
        self._acknowledger.tell(channel)
        self._acknowledger.tell_closed(channel.identifier)
        self.held -= channel.held
        del self.channels[channel.identifier]

    def _require(self, channel: int, last: int) -> ReceiveChannel | None:
        """The channel of a command; None: it is closed, and the command is without effect."""
        found = self.channels.get(channel)
        if found is not None and last >= found.received:
            raise LocalProtocolError(
                f"channel {channel}: message {last} has not come; {found.received} have"
            )
        return found


def _counts_of(channel: ReceiveChannel) -> tuple[int, int, bool]:
    """What is counted of a channel."""
    return channel.held, channel.undecided, channel.settled
