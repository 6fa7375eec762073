"""The face of the core: one link over all its connections."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

from aqueduct._speedups.relink import packets
from aqueduct._speedups.relink.packets import PacketDecoder, PacketStep
from aqueduct.config import Relink as Settings
from aqueduct.errors import (
    LimitExceeded,
    LocalProtocolError,
    RemoteProtocolError,
    SequenceError,
)
from aqueduct.protocol.relink import events
from aqueduct.protocol.relink.acknowledging import Acknowledger
from aqueduct.protocol.relink.cost import CHANNEL_COST, message_cost
from aqueduct.protocol.relink.handshake import Opening
from aqueduct.protocol.relink.incoming import Incoming
from aqueduct.protocol.relink.liveness import Liveness
from aqueduct.protocol.relink.outbox import Outbox
from aqueduct.protocol.relink.outgoing import Outgoing
from aqueduct.protocol.relink.state import LINK, LinkInput, LinkState

__all__ = ["Buffer", "Link", "Taken"]

Buffer: TypeAlias = bytes | bytearray | memoryview
Taken: TypeAlias = tuple[list[Any], int]
"""Buffers in wire order, and their bytes."""


class Link:
    """A link of Relink: a function of its inputs, over as many connections as it lives.

    The order of calls: *inputs* (``connected``, ``receive_data``, ``landed``, ``handle_deadline``,
    ``disconnected``), then ``events_received``, then *commands*, then ``take`` as long as it gives
    something and the transport takes it. No call waits, none has a clock: ``now`` is in seconds, of
    any steady clock.

    **Channels** are numbers that fit the size of ids; each side has its own. A channel opens with
    its first message. ``transactional`` channels hold messages back at the receiver until
    ``commit``.

    **Connections.** ``connected`` begins one, after its handshake; ``disconnected`` ends it.
    Commands work without a connection as well: what they say leaves with the next one. On an old
    link nothing but acknowledgements leaves before the peer's resume (RL-R11).

    **Sending.** ``send`` keeps the parts by reference until the peer has received them, so they
    must not change. ``writable`` says whether the window has room; a message for which there is
    none is refused. ``take`` gives urgent packets first, then messages in the order of ``send``.
    What was taken must leave completely, or the connection is to be cut.

    **Signs of life.** Who takes a long time to say something, as a large message is coming or as it
    is ``full``, says nop in between. ``left`` tells that what was taken makes progress.

    **Receiving.** Messages come whole. Their large parts are AlignedBuffers: ``room`` and
    ``landed`` let a carrier read straight to there. With ``pieces`` they come as their bytes come.
    If the application holds more than ``Relink.receive_bytes``, the link is ``full``: read nothing
    until it is not. Twice that counts while this side waits for something that the peer is to
    consume or to answer: what it says of that is read then. What the peer has not decided about
    counts by itself. What is consumed or decided is acknowledged without being asked.

    **Failure.** A violation by the peer ends the link: FAILED is the last event, ``error`` what it
    was, and what is received or commanded after it is without effect.
    """

    def __init__(
        self,
        opening: Opening,
        settings: Settings | None = None,
        *,
        connector: bool,
        pieces: bool = False,
        start: int = 0,
    ) -> None:
        """``opening``: what the handshake agreed on. ``start``: of numbers, for tests."""
        self.settings = settings = settings or Settings()
        self.state = LinkState.DOWN
        self.error: RemoteProtocolError | None = None
        self.resumes = 0
        """How many connections have taken the link over from an earlier one."""
        mine, theirs = opening.connector_id_size, opening.listener_id_size
        own, other = opening.connector_transactions, opening.listener_transactions
        if not connector:
            mine, theirs, own, other = theirs, mine, other, own
        if pieces and other:
            raise LocalProtocolError("messages of transactions come whole, not in pieces")
        self.id_size, self._peer_id_size = mine, theirs
        self.transactional = own
        """Whether the channels of this side use transactions."""
        self.decoder: PacketDecoder | None = None
        """Of this connection; None: there is none. A carrier that reads packets itself takes those
        of messages from it, and leaves the others to ``take_packet``."""
        self._pieces = pieces
        self._events: list[events.Event] = []
        self._outbox = Outbox(mine)
        self._acknowledger = Acknowledger(settings, theirs, self._outbox)
        self.outgoing = Outgoing(
            settings,
            mine,
            transactional=own,
            reported=self._events,
            outbox=self._outbox,
            start=start,
        )
        self._incoming = Incoming(
            settings,
            transactional=other,
            pieces=pieces,
            reported=self._events,
            acknowledger=self._acknowledger,
            start=start,
        )
        self._shutdown_asked = False
        self.shut_down = False
        """This side has said that it is done: if the peer has dropped the link, it has ended."""
        self._now = 0.0
        self._liveness = Liveness(settings, 0.0)
        self._sign = 0.0
        """When this side has last shown that it lives."""

    # Inputs

    def connected(self, now: float, *, resumed: bool) -> None:
        """A connection begins. ``resumed``: with this link as it is, else with a new one."""
        self._now = now
        self._begin(connected=True)
        self._change(LinkInput.OLD if resumed else LinkInput.NEW)
        self.decoder = PacketDecoder(
            self._peer_id_size,
            self.id_size,
            parts=self.settings.parts,
            targets=1 if self._pieces else self.settings.targets,
            message_bytes=self.settings.message_bytes,
        )
        if resumed:
            self.resumes += 1
            self._incoming.tell_for_resume()
            self._outbox.urgent.append(packets.encode_general(packets.RESUME))
        else:
            self._flow(resumed=False)

    def disconnected(self) -> None:
        """The connection is gone. What had not left completely is sent again with the next one."""
        if self.state is not LinkState.ENDED:
            self._change(LinkInput.CUT)
        self._begin(connected=False)

    def receive_data(self, data: Buffer, now: float) -> None:
        """The next bytes from the peer, in any pieces, which must not change."""
        self.heard(now)
        decoder = self.decoder
        if decoder is None:
            return
        try:
            decoder.feed(data)
            self._go_on(decoder)
        except RemoteProtocolError as error:
            self.fail(error)

    def room(self) -> memoryview | None:
        """Where the next bytes go, of a large part; None: feed them."""
        assembly, decoder = self._incoming.assembly, self.decoder
        if assembly is None or decoder is None or not decoder.in_payload:
            return None
        return assembly.room()

    def expected(self) -> int:
        """How many of the next bytes are new ones of one part, in a Link with ``pieces``.

        They may be handed over without being fed. 0: feed them.
        """
        return 0 if self.decoder is None else self._incoming.expected(self.decoder)

    def landed(self, size: int, now: float) -> None:
        """``size`` bytes were read to ``room``, or handed over of what is ``expected``."""
        self.heard(now)
        decoder = self.decoder
        if decoder is None:
            return
        try:
            decoder.landed_outside(size)
            self._incoming.landed(size, decoder)
            self._go_on(decoder)
        except RemoteProtocolError as error:
            self.fail(error)

    def next_deadline(self) -> float | None:
        """When ``handle_deadline`` is due."""
        if self.decoder is None or self._liveness.silent:
            return None
        due = self._sign_due()
        if not self.full:
            due = min(due, self._liveness.next_deadline(self._unanswered))
        acknowledger = self._acknowledger
        if acknowledger.since is not None and not acknowledger.due:
            due = min(due, acknowledger.since + self.settings.ack_delay)
        return due

    def handle_deadline(self, now: float) -> None:
        """Lets acknowledgements and pings leave, and notices a connection that is silent."""
        self._now = max(self._now, now)
        acknowledger = self._acknowledger
        while (due := self.next_deadline()) is not None and due <= now:
            if (
                acknowledger.since is not None
                and not acknowledger.due
                and acknowledger.since + self.settings.ack_delay <= now
            ):
                acknowledger.due = True
                continue
            if self._sign_due() <= now:
                self._sign = now
                self._outbox.urgent.append(packets.encode_general(packets.NOP))
                continue
            if self.full:
                break  # nothing is read, so nothing is known
            why = self._liveness.judge(now, self._unanswered)
            if why:
                self._events.append((events.SILENT, why))
            elif why is not None:
                self.ping(now)

    # Outputs

    def events_received(self) -> list[events.Event]:
        """What happened since the last call, in order; see ``events``."""
        found = self._events[:]
        self._events.clear()
        return found

    @property
    def idle(self) -> bool:
        """Nothing can leave now: ``take`` would be empty."""
        if self.decoder is None:
            return True
        return self._outbox.empty and not self._liveness.pongs and not self._acknowledger.ready

    def take(self, limit: int, now: float) -> Taken:
        """The next packets: (buffers, bytes of them), about ``limit`` bytes.

        A message is not cut, so it can exceed that. Large parts are the buffers that were given.
        """
        self._now = max(self._now, now)
        if self.idle:
            return [], 0
        if self._acknowledger.due:
            self._acknowledger.tell_all()
        pongs, self._liveness.pongs = self._liveness.pongs, 0
        self._outbox.urgent.extend([packets.encode_general(packets.PONG)] * pongs)
        waited = self._outbox.unacknowledged
        taken = self._outbox.take(limit, now)
        if not waited and self._outbox.unacknowledged:
            self._liveness.acknowledged(self._now, self._outbox.unacknowledged)
        self._sign = self._now
        self._finish()
        return taken

    def left(self, now: float) -> None:
        """A connection takes bytes again, after it took none: it is not silent."""
        self._now = max(self._now, now)
        if self._unanswered is not None:
            self._outbox.asked = self._now
        self._liveness.moved = self._now

    @property
    def full(self) -> bool:
        """The application holds more than ``Relink.receive_bytes``: receive no more for now."""
        incoming, most = self._incoming, self.settings.receive_bytes
        if self.outgoing.waits:
            most *= 2
        return incoming.held - incoming.undecided >= most

    @property
    def held_bytes(self) -> int:
        """What this link keeps, as ``cost`` counts it.

        That is messages until they are consumed, also the one that is coming, and open channels.
        """
        incoming, outgoing = self._incoming, self.outgoing
        channels = len(incoming.channels) + len(outgoing.channels)
        return outgoing.outstanding + incoming.held + incoming.coming + CHANNEL_COST * channels

    @property
    def unacknowledged(self) -> int:
        """Messages that have left and are not known received."""
        return self._outbox.unacknowledged

    def unresolved(self) -> dict[int, tuple[list[int], list[int]]]:
        """What would be unknown if the link were lost, by channel of this side.

        The numbers of messages that are not consumed or answered, and the committed ones of them.
        """
        return {
            identifier: (outstanding, channel.unconfirmed())
            for identifier, channel in self.outgoing.channels.items()
            if (outstanding := channel.outstanding())
        }

    # Commands

    def writable(self, channel: int, size: int = 1, parts: int = 1) -> bool:
        """Whether there is room for ``size`` bytes in so many parts. If not, WRITABLE follows.

        A message counts for more than its bytes; see ``message_cost``.
        """
        return self.outgoing.writable(channel, message_cost(size, parts))

    def send(self, channel: int | Sequence[int], parts: Buffer | Iterable[Buffer]) -> list[int]:
        """Sends a message of these parts, to one channel or to several; returns its numbers there.

        LocalProtocolError for a channel that is closing, that has no room, or that cannot be.
        """
        if self.state is LinkState.ENDED:
            raise LocalProtocolError("the link has ended: nothing can be sent")
        if self._shutdown_asked:
            raise LocalProtocolError("the link is shut down: nothing more is sent")
        if isinstance(parts, (bytes, bytearray, memoryview)):
            parts = (parts,)
        targets = (channel,) if isinstance(channel, int) else channel
        full = self.full
        numbers = self.outgoing.send(targets, tuple(parts))
        self._read_again(full)
        return numbers

    def commit(self, channel: int, last: int | None = None) -> None:
        """Asks the receiver to process the messages up to number ``last``; None: all sent."""
        self.outgoing.decide(channel, last, commit=True)

    def rollback(self, channel: int, last: int | None = None) -> None:
        """Asks the receiver to ignore them."""
        self.outgoing.decide(channel, last, commit=False)

    def close(self, channel: int) -> None:
        """Closes a channel of this side once its messages are received.

        Of a transactional one, undecided messages are rolled back, and results awaited (RL-R15).
        CLOSED follows. A channel that is not open is not closed.
        """
        full = self.full
        self.outgoing.close(channel)
        self._read_again(full)

    def shutdown(self) -> None:
        """This side opens no more channels, and closes all. ENDED follows the peer's shutdown.

        What is undecided is rolled back.
        """
        if self._shutdown_asked or self.state is LinkState.ENDED:
            return
        self._shutdown_asked = True
        if self.id_size:
            for channel in tuple(self.outgoing.channels):
                self.outgoing.close(channel)
        else:
            self.outgoing.drop_undecided()  # its one channel is not closed (RL-R16)
        self._finish()

    def ping(self, now: float) -> None:
        """Asks the peer for a sign of life. Without a connection this does nothing."""
        if self.decoder is not None:
            self._liveness.ping(now)
            self._outbox.urgent.append(packets.encode_general(packets.PING))

    def consume(self, channel: int, last: int) -> None:
        """The application has done with the messages up to number ``last``."""
        if self.state is not LinkState.ENDED:
            full = self.full
            self._incoming.consume(channel, last, self._now)
            self._read_again(full)
            self._finish()

    def complete(self, channel: int, last: int, *, committed: bool) -> None:
        """The result of the commits up to message ``last``. LocalProtocolError: there is none."""
        if self.state is LinkState.ENDED:
            return
        full = self.full
        self._incoming.complete(channel, last, self._now, committed=committed)
        self._read_again(full)
        self._ask_for_results()
        self._finish()

    def lose(self, *, forget: bool = False) -> None:
        """The link is over: it cannot be resumed, or nobody wants it any more.

        ``forget``: nobody asks what is ``unresolved``, and no message is kept for that.
        """
        if self.state is not LinkState.ENDED:
            self._change(LinkInput.END)
            self._begin(connected=False)
        if forget:
            self.outgoing.channels.clear()
            self.outgoing.outstanding = 0
            self._incoming.channels.clear()

    # For a carrier that moves one channel's messages itself, each of one part

    def begin_message(self, decoder: PacketDecoder) -> int:
        """The decoder has the head of a message; returns how many of its bytes came before."""
        return self._incoming.begin_message(decoder, resuming=self.state is LinkState.RESUMING)

    def end_message(self, decoder: PacketDecoder, now: float) -> None:
        """The message is whole, and consumed at once."""
        self._incoming.pass_message(decoder, self.heard(now))

    def take_packet(self, decoder: PacketDecoder, now: float) -> None:
        """The decoder has another packet. Raises RemoteProtocolError, which ``fail`` is told."""
        self._take_packet(decoder, self.heard(now))
        self.outgoing.tell_writable()
        self._finish()

    def keep(self, channel: int, parts: list[Any], size: int, now: float) -> None:
        """A message of one part, which lies in these buffers, leaves now."""
        if not self._outbox.unacknowledged:
            self._liveness.acknowledged(now, 1)
        self.outgoing.keep(channel, tuple(parts), size)
        if self._outbox.asked is None:
            self._outbox.asked = now

    def hand_over(self, channel: int, handed: int) -> None:
        """The connection is about to end: so much of the message that is coming has its place."""
        self._incoming.hand_over(channel, handed)

    # Within

    @property
    def _unanswered(self) -> float | None:
        """Since when an answer is missing; None: none is."""
        outbox = self._outbox
        if outbox.asked is None and outbox.unacknowledged:
            return self._liveness.last_in
        return outbox.asked

    def _sign_due(self) -> float:
        """When the peer is to be shown that this side lives, though it has nothing to say."""
        decoder = self.decoder
        coming = decoder is not None and decoder.in_payload and self._liveness.last_in > self._sign
        if not coming and not self.full:
            return math.inf
        return self._sign + self.settings.ack_deadline / 4

    def _read_again(self, full: bool) -> None:
        """The time in which nothing was read is no silence of the peer."""
        if full and not self.full:
            self._liveness.last_in = self._now
            self._liveness.moved = self._now

    def _change(self, given: LinkInput) -> None:
        after = LINK.get((self.state, given))
        if after is None:
            raise SequenceError(f"{given.name} on a link that is {self.state.name} (RL-R11)")
        self.state = after

    def _ask_for_results(self) -> None:
        """Asks whether the peer has read results that are kept for it, once they are many."""
        if self.state is LinkState.UP and self._acknowledger.begin_confirming():
            self._liveness.ping(self._now, confirms=True)
            self._outbox.urgent.append(packets.encode_general(packets.PING))

    def _begin(self, *, connected: bool) -> None:
        """Lets go of what belongs to one connection."""
        self.decoder = None
        self._liveness = Liveness(self.settings, self._now)
        self._sign = self._now
        self._outbox.clear()
        self.outgoing.stop()
        self._incoming.begin(connected=connected)
        self._acknowledger.begin(self._incoming.channels.values())

    def heard(self, now: float) -> float:
        """Bytes came at this time; returns the latest."""
        self._now = max(self._now, now)
        self._liveness.last_in = max(self._liveness.last_in, now)
        asked = self._outbox.asked
        if asked is not None and asked <= now:
            self._outbox.asked = None
        return self._now

    def _flow(self, *, resumed: bool) -> None:
        """Messages may flow from now on."""
        self._events.append((events.UP, resumed))
        self._ask_for_results()
        self.outgoing.flow()
        if self.shut_down:
            self._outbox.queue.append(packets.encode_general(packets.SHUTDOWN))
        self._finish()

    def fail(self, error: RemoteProtocolError) -> None:
        """The peer broke the protocol: the link is over."""
        self.error = error
        self._events.append((events.FAILED, error))
        self.lose()

    def _go_on(self, decoder: PacketDecoder) -> None:
        """Takes what the decoder has."""
        incoming = self._incoming
        while (step := decoder.next()) != PacketStep.NOTHING:
            if step == PacketStep.PIECE:
                incoming.take_piece(decoder)
            elif step == PacketStep.DONE:
                incoming.take_whole(decoder, self._now)
            elif decoder.format == packets.MESSAGE:
                _check_targets(decoder, self._peer_id_size, self.settings)
                incoming.begin_message(decoder, resuming=self.state is LinkState.RESUMING)
            else:
                self._take_packet(decoder, self._now)
                if self.decoder is not decoder:
                    return  # the link has ended
        if incoming.assembly is not None and decoder.in_payload:
            incoming.assembly.reach(decoder)
        # Once for all packets: a peer can send many in a few bytes.
        self.outgoing.tell_writable()
        self._finish()

    def _take_packet(self, decoder: PacketDecoder, now: float) -> None:
        kind = decoder.format
        if kind == packets.GENERAL:
            self._take_general(decoder.type)
            return
        sequence = None if decoder.sequence < 0 else decoder.sequence
        operation = kind in (packets.CHANNEL_OP, packets.SEQUENCE_OP)
        if operation and self.state is not LinkState.UP:
            raise SequenceError("an operation before the resume (RL-R11)")
        # Formats of acknowledgements are odd, and name channels of this side (RL-10).
        _check_targets(decoder, self.id_size if kind & 1 else self._peer_id_size, self.settings)
        waited = self._outbox.unacknowledged
        for identifier in decoder.channels:
            if operation:
                self._incoming.take_operation(identifier, decoder.type, sequence, now)
            else:
                self.outgoing.take_acknowledgement(identifier, decoder.type, sequence)
        if self._outbox.unacknowledged < waited and self.state is LinkState.UP:
            self._liveness.acknowledged(now, self._outbox.unacknowledged)

    def _take_general(self, kind: int) -> None:
        liveness = self._liveness
        if kind == packets.PING:
            liveness.pongs += 1
            if liveness.pongs > self.settings.unanswered_pings:
                raise LimitExceeded(
                    f"{liveness.pongs} pings wait for their answers; Relink.unanswered_pings is "
                    "the limit"
                )
        elif kind == packets.PONG:
            answered = liveness.take_pong(self._now)
            if answered is not None:
                self._events.append((events.PONG, answered[0]))
                if answered[1]:
                    self._acknowledger.confirm()
                    self._ask_for_results()
        elif kind == packets.RESUME:
            self._change(LinkInput.RESUME)
            self.outgoing.take_resume()
            self._flow(resumed=True)
        elif kind == packets.SHUTDOWN and not self._incoming.closed_to_new:
            self._incoming.closed_to_new = True
            self._events.append((events.SHUTDOWN,))

    def _finish(self) -> None:
        """Says shutdown once all of this side is done, and ends once both sides have (RL-R16)."""
        if not self._shutdown_asked or self.state is LinkState.ENDED:
            return
        up = self.state is LinkState.UP
        if not self.shut_down:
            if not self.outgoing.drained:
                return
            self.shut_down = True
            if up:
                self._outbox.queue.append(packets.encode_general(packets.SHUTDOWN))
        if up and self._incoming.closed_to_new and self._incoming.drained and self.idle:
            self._change(LinkInput.END)
            self.decoder = None
            self._events.append((events.ENDED,))


def _check_targets(decoder: PacketDecoder, id_size: int, settings: Settings) -> None:
    """Raises LimitExceeded for a packet that names more channels than its bytes account for."""
    targets, most = len(decoder.channels), settings.targets_without_id
    if not id_size and targets > most:
        raise LimitExceeded(
            f"a packet for {targets} targets whose ids take no bytes; Relink.targets_without_id is "
            f"{most}"
        )
