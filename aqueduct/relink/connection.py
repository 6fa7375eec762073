"""A link on an event loop: the core of aqueduct.protocol.relink over one connection at a time."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, Self

from aqueduct.arguments import Duration, checked
from aqueduct.carriers.transports.waiting import raised
from aqueduct.config import Config
from aqueduct.errors import ConnectionLost, LinkLost, LinkUnknown, LocalProtocolError
from aqueduct.escaping import logger_of
from aqueduct.forks import own, sever
from aqueduct.protocol.relink import events
from aqueduct.protocol.relink.handshake import LinkAgreement, Opening
from aqueduct.protocol.relink.link import Link
from aqueduct.protocol.relink.link_table import link_name
from aqueduct.protocol.relink.state import LinkState
from aqueduct.relink.link_face import LinkFace
from aqueduct.relink.receiving import RelinkIncoming
from aqueduct.relink.sending import RelinkChannel
from aqueduct.relink.transport import LinkTransport

__all__ = ["RelinkConnection", "RelinkOwner", "RelinkSnapshot"]

log = logger_of(__name__)

_NAMED: Final = 8
"""So many channels are named in the text of LinkLost."""
_WHERE_TO_LOOK: Final = {
    "restarted": "The process that had link {} has ended, as by a restart; its log may say why",
    "dropped": (
        "Its log says why, under link {}. Common causes: its handler has failed or returned, there "
        "was no connection for its Relink.keep, or one of its limits was exceeded"
    ),
}
"""The protocol has no word for the reason, so a listener cannot give it."""


class RelinkOwner(Protocol):
    """Who finds connections for a link: it dials, or listens."""

    def up(self, connection: RelinkConnection) -> None:
        """Messages may flow."""

    def down(self, connection: RelinkConnection) -> None:
        """The link has no connection."""

    def grown(self, connection: RelinkConnection, size: int) -> None:
        """The link keeps ``size`` bytes more; less if that is negative."""

    def over(self, connection: RelinkConnection) -> None:
        """The link is over; see ``RelinkConnection.error``."""


@dataclass(frozen=True, slots=True)
class RelinkSnapshot:
    """What a link is doing."""

    state: str
    """``up``, ``resuming`` or ``ended``."""
    resuming_since: float | None
    """When it was noticed that the connection was cut, in seconds since 1970; None: it is not."""
    resumes: int
    """How many connections have taken the link over from an earlier one."""
    held_bytes: int
    """Bytes that are kept: sent and not consumed by the peer, received and not consumed here."""
    unacknowledged: int
    """Messages that have left and are not known received."""
    channels: int
    """Channels that are open, of both sides."""


class RelinkConnection:
    """Two programs with a link between them, over as many connections as it takes.

    Made by ``connect`` and ``serve``. ``channel`` sends; ``incoming`` gives the channels of the
    peer. A cut is not seen: what waits goes on when the link is resumed, within its own deadline.
    If no connection can resume it, everything that waits raises LinkLost, which says what is
    unknown.

    ``async with`` closes it at the end; a block that an exception leaves gives the link up.
    """

    def __init__(
        self, agreement: LinkAgreement, config: Config, owner: RelinkOwner, *, connector: bool
    ) -> None:
        self.config = config
        self.opening: Opening = agreement.opening
        """What both sides agreed on: the endpoint's name, sizes of ids, transactions."""
        self.name = link_name(agreement.link)
        """What logs call the link. Its id is a secret."""
        self.peer = ""
        """The peer's address on the last connection."""
        self.cut_by = ""
        """Why the last connection was cut."""
        self.link = Link(agreement.opening, config.relink, connector=connector)
        """The core; see aqueduct.protocol.relink."""
        self._owner = owner
        self.counted_bytes = 0
        """What the link keeps, as the owner was told last."""
        self._face = LinkFace(self.link, config, self.name, self.advance)
        self._loop = asyncio.get_running_loop()
        self._transport: LinkTransport | None = None
        self._down_since: tuple[float, float] | None = None
        """The loop's time, and that of the clock, when the cut was noticed."""
        self._up = False
        self._peer_done = False
        """Whether the peer has shut down: it opens no more channels."""
        opening = agreement.opening
        self._transactional = (
            opening.listener_transactions if connector else opening.connector_transactions
        )
        """Whether the peer's channels use transactions."""
        self._one_channel = not (
            opening.listener_id_size if connector else opening.connector_id_size
        )
        """Whether the peer has one channel alone, which its shutdown ends."""
        self._incoming: dict[int, RelinkIncoming] = {}
        self._arrived: deque[RelinkIncoming] = deque()
        self._unannounced = 0
        """Channels of the peer that the application has not heard of: they have nothing for it."""
        self._timer: asyncio.TimerHandle | None = None
        self._resume_by: asyncio.TimerHandle | None = None
        self._gone: asyncio.Future[None] = self._loop.create_future()
        own(self)

    @property
    def error(self) -> ConnectionLost | None:
        """Why it is over, once it is. Code 0: both sides have closed it."""
        return self._face.error

    @property
    def state(self) -> str:
        """``up``; ``resuming`` while there is no connection, or the peer resumes; ``ended``."""
        if self.error is not None:
            return "ended"
        return "up" if self._up else "resuming"

    def snapshot(self) -> RelinkSnapshot:
        """What the link is doing."""
        link, since = self.link, self._down_since
        return RelinkSnapshot(
            state=self.state,
            resuming_since=None if since is None or self.error is not None else since[1],
            resumes=link.resumes,
            held_bytes=link.held_bytes,
            unacknowledged=link.unacknowledged,
            channels=self.open_channels,
        )

    @property
    def closing(self) -> bool:
        """Whether this side has begun to close it."""
        return self._face.closing

    @property
    def open_channels(self) -> int:
        """How many channels of both sides are open."""
        return len(self._face.open) + len(self._incoming)

    # What the application does

    @checked()
    def channel(self, identifier: int) -> RelinkChannel:
        """A channel of this side. ``identifier`` fits the size of ids (``opening``).

        The same object as long as somebody has it or the channel is open.
        """
        if identifier >= 1 << 8 * self.link.id_size:
            raise LocalProtocolError(
                f"channel {identifier} does not fit an id of {self.link.id_size} bytes"
            )
        channels = self._face.channels
        found: RelinkChannel | None = channels.get(identifier)
        if found is None:
            found = channels[identifier] = RelinkChannel(self._face, identifier)
        return found

    @checked()
    async def accept(self, *, timeout: Duration | None = None) -> RelinkIncoming | None:
        """The next channel that the peer has opened; None: it opens no more.

        Raises LinkLost, and TimeoutError if ``timeout`` (seconds) is given.
        """
        face = self._face
        async with asyncio.timeout(timeout):  # type: ignore[arg-type]  # as ``checked`` read it
            await face.changes.until(
                lambda: self._arrived or face.error is not None or self._no_more_channels()
            )
        if self._arrived:
            return self._arrived.popleft()
        if face.error is not None and face.error.code != 0:
            raise raised(face.error)
        return None

    async def incoming(self) -> AsyncIterator[RelinkIncoming]:
        """The channels that the peer opens, until it closes the connection. Raises LinkLost."""
        while (found := await self.accept()) is not None:
            yield found

    @checked()
    async def close(self, *, timeout: Duration | None = None) -> None:
        """Closes all channels of this side and then the link, which ends when both sides have.

        Batches that were not taken, and those that still come, are uncommitted. It waits for at
        most ``timeout`` (seconds; None: Timing.close_linger). Then the link is given up. Raises
        LinkLost if the peer may not have consumed, or answered, something. Closing again waits for
        the first close.
        """
        face = self._face
        if face.error is None:
            face.closing = True
            for channel in tuple(face.channels.values()):
                channel.changed()
            for incoming in self._with_batches():
                incoming.refuse()
            self.link.shutdown()
            self.advance()
            linger = self.config.timing.close_linger if timeout is None else timeout
            try:
                async with asyncio.timeout(linger):  # type: ignore[arg-type]
                    await face.changes.until(lambda: face.error is not None)
            except TimeoutError:
                self._end_here(f"it was not done with everything within {linger:g} s of the close")
            except BaseException:
                self._end_here("the close was given up")
                raise
            await self.wait_closed()
            if isinstance(face.error, LinkLost) and face.error.unconsumed:
                raise raised(face.error)
        await self.wait_closed()

    async def wait_closed(self) -> None:
        """Returns once the link is over and its connection is gone; see ``error``."""
        await asyncio.shield(self._gone)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: object, *rest: object) -> None:
        if kind is None:
            await self.close()
        else:
            self.give_up_batches()
            self.abandon("this side gave it up")
            await self.wait_closed()

    def left_behind(self) -> None:
        """In a forked child: the link is the parent's. Its socket is closed here."""
        transport = self._transport
        sock = None if transport is None else transport.extra("socket")
        if sock is not None:
            sever((sock.fileno(),))
        self._face.error = ConnectionLost(
            f"the link with {self.peer} belongs to the process that process {os.getpid()} was "
            "forked from; connect after the fork"
        )
        if not self._gone.done():
            self._gone.set_result(None)

    def __repr__(self) -> str:
        return f"<RelinkConnection {self.name} with {self.peer}, {self.state}>"

    # What the owner does

    @property
    def down_since(self) -> float | None:
        """The loop's time when the cut was noticed; None: messages flow."""
        return None if self._down_since is None else self._down_since[0]

    @property
    def attached(self) -> bool:
        """Whether there is a connection."""
        return self._transport is not None

    async def settled(self) -> None:
        """Returns once messages flow, or there is no connection, or the link is over."""
        await self._face.changes.until(
            lambda: self._up or not self.attached or self.error is not None
        )

    def attach(self, transport: LinkTransport, agreement: LinkAgreement) -> None:
        """This connection has the link from now on; an older one is closed (RL-R18)."""
        now = self._loop.time()
        if self._transport is not None:
            self._detach("another connection has taken the link over", now)
        self._transport = transport
        self.peer = transport.peer
        if agreement.resumed:
            deadline = self.config.relink.handshake_deadline
            self._resume_by = self._loop.call_later(deadline, self._not_resumed)
        transport.carry(self)
        self.link.connected(now, resumed=agreement.resumed)
        if agreement.left:
            self.link.receive_data(agreement.left, now)
        self.advance()

    def unknown(self, error: LinkUnknown) -> None:
        """The listener does not have the link."""
        link = self.link
        if link.shut_down or (self._peer_done and not link.unresolved()):
            self._over(ConnectionLost(f"{self.peer} has closed the link", code=0, remote=True))
        else:
            why = "restarted" if error.restarted else "dropped"
            self.lose(why, f"{error}. {_WHERE_TO_LOOK[why].format(self.name)}", remote=True)

    def lose(self, why: str, reason: str, *, remote: bool = False) -> None:
        """The link is lost; ``why`` as in LinkLost."""
        if self.error is not None:
            return
        unresolved = self.link.unresolved()
        unconsumed = {channel: found for channel, (found, _) in unresolved.items()}
        unconfirmed = {channel: found for channel, (_, found) in unresolved.items() if found}
        unknown = [
            text
            for text in (
                _counted(unconsumed, "that may not be consumed"),
                _counted(unconfirmed, "committed without a result"),
            )
            if text
        ]
        text = f"the link {self.name} with {self.peer} is lost: {reason}"
        if unknown:
            text += f"; unknown: {', and '.join(unknown)}"
        error = LinkLost(
            text,
            why=why,
            unconsumed=unconsumed,
            unconfirmed=unconfirmed,
            reason=reason,
            remote=remote,
        )
        if self.link.error is not None:
            error.code = self.link.error.code
            error.__cause__ = self.link.error.with_traceback(None)
        self._over(error)

    def abandon(self, reason: str) -> None:
        """This side ends the link at once. What is unknown is in ``error``."""
        if self.error is None:
            self._log_end(reason)
            self.lose("closed", reason)

    def give_up_batches(self) -> None:
        """The application has failed: batches that it has not answered are uncommitted."""
        for channel in self._with_batches():
            channel.give_up()
        self.advance()

    # What a transport tells

    def transport_gone(self, transport: LinkTransport, error: Exception | None) -> None:
        """The connection is over."""
        if transport is not self._transport:
            return
        why = "the peer closed the connection" if error is None else str(error)
        self._detach(why, self._loop.time())
        if self.error is not None:
            self._is_gone()
        else:
            self._tell_down()

    def advance(self) -> None:
        """Dispatches what happened, sends what may leave, and sets the timer."""
        self._dispatch()
        while self._transport is not None and self.error is None:
            self._transport.flush()
            if not self._dispatch():
                break
        self._count()
        if self.error is None:
            if self._transport is not None:
                self._transport.hold(self.link.full)
            self._arm()

    # Within

    def _count(self) -> None:
        """Tells the owner what the link keeps. It may drop this link, or another one."""
        grown = self.link.held_bytes - self.counted_bytes
        if grown and self.error is None:
            self.counted_bytes += grown
            self._owner.grown(self, grown)

    def _arm(self) -> None:
        due, timer = self.link.next_deadline(), self._timer
        if timer is not None and (due is None or due < timer.when()):
            timer.cancel()
            self._timer = timer = None
        if due is not None and timer is None:
            self._timer = self._loop.call_at(due, self._timed)

    def _timed(self) -> None:
        self._timer = None
        self.link.handle_deadline(self._loop.time())
        self.advance()

    def _dispatch(self) -> bool:
        """Tells the handles what happened; whether something did."""
        found = self.link.events_received()
        for event in found:
            if self.error is not None:
                break
            self._happened(event)
        return bool(found)

    def _happened(self, event: events.Event) -> None:
        kind = event[0]
        if kind == events.MESSAGE:
            channel = self._channel_of(event[1])
            channel.arrived(event[2], event[3])
            self._announce(channel)
        elif kind in (events.COMMIT, events.ROLLBACK):
            channel = self._channel_of(event[1])
            channel.decided(event[3], commit=kind == events.COMMIT)
            self._announce(channel)
        elif kind == events.CLOSE:
            closed = self._incoming.pop(event[1], None)
            if closed is not None:
                closed.ended()
                if not closed.announced:
                    self._unannounced -= 1
                    self._face.changes.wake()
        elif kind == events.RESULT:
            sender = self._face.open.get(event[1])
            if sender is not None:
                sender.resulted(event[2], committed=event[3])
        elif kind in (events.WRITABLE, events.CLOSED):
            if kind == events.CLOSED:
                self._face.open.pop(event[1], None)
            sender = self._face.channels.get(event[1])
            if sender is not None:
                sender.changed()
        elif kind == events.UP:
            self._now_up()
        elif kind == events.SHUTDOWN:
            self._peer_done = True
            if self._one_channel:
                for incoming in self._incoming.values():
                    incoming.ended()  # nothing else does; channels with ids end by their close
            self._face.changes.wake()
        elif kind == events.SILENT:
            self._cut(event[1])
        elif kind == events.ENDED:
            text = f"the link {self.name} with {self.peer} is closed"
            self._over(ConnectionLost(text, code=0))
        elif kind == events.FAILED:
            log.warning("link %s: %s broke Relink: %s", self.name, self.peer, event[1])
            self.lose("violation", f"{self.peer} broke Relink: {event[1]}")

    def _channel_of(self, identifier: int) -> RelinkIncoming:
        found = self._incoming.get(identifier)
        if found is None:
            found = RelinkIncoming(self._face, identifier, transactional=self._transactional)
            self._incoming[identifier] = found
            self._unannounced += 1
        return found

    def _with_batches(self) -> tuple[RelinkIncoming, ...]:
        """The channels of the peer that may have batches without an answer."""
        return *self._incoming.values(), *self._face.unanswered

    def _announce(self, channel: RelinkIncoming) -> None:
        """Gives the channel to the application once there is something for it."""
        if channel.waiting and not channel.announced:
            channel.announced = True
            self._unannounced -= 1
            self._arrived.append(channel)
            self._face.changes.wake()

    def _no_more_channels(self) -> bool:
        """Whether the application hears of no more channels: a shutdown leaves the open ones."""
        return self._peer_done and (self._one_channel or not self._unannounced)

    def _now_up(self) -> None:
        self._up, self._down_since = True, None
        if self._resume_by is not None:
            self._resume_by.cancel()
            self._resume_by = None
        self._owner.up(self)
        self._face.changes.wake()

    def _not_resumed(self) -> None:
        deadline = self.config.relink.handshake_deadline
        self._cut(f"no resume came within {deadline:g} s (Relink.handshake_deadline)")

    def _cut(self, why: str) -> None:
        """Ends the connection, which is of no use; the link may live on."""
        if self._transport is not None:
            self._detach(why, self._loop.time())
            self._tell_down()

    def _detach(self, why: str, now: float) -> None:
        """The connection is not the link's any more."""
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.abort()
        for timer in (self._timer, self._resume_by):
            if timer is not None:
                timer.cancel()
        self._timer = self._resume_by = None
        self._up, self.cut_by = False, why
        if self.error is None:
            self.link.disconnected()
            if self._down_since is None:
                self._down_since = now, time.time()

    def _tell_down(self) -> None:
        log.info("link %s with %s is cut: %s", self.name, self.peer, self.cut_by)
        self._face.changes.wake()
        self._count()
        if self.error is None:
            self._owner.down(self)

    def _end_here(self, reason: str) -> None:
        """Ends the link without the peer's consent; in order if the peer lacks nothing."""
        if self.error is not None:
            return
        self._log_end(reason)
        if self.link.unresolved():
            self.lose("closed", reason)
        else:
            self._over(ConnectionLost("this side closed the link", code=0))

    def _log_end(self, reason: str) -> None:
        """Says why this side ends the link: the peer is told to look here."""
        level = logging.WARNING if self.link.held_bytes else logging.INFO
        log.log(level, "link %s with %s is ended by this side: %s", self.name, self.peer, reason)

    def _over(self, error: ConnectionLost) -> None:
        """Tells every handle, and lets the connection go."""
        face = self._face
        face.error = error
        face.stop()
        for timer in (self._timer, self._resume_by):
            if timer is not None:
                timer.cancel()
        self._timer = self._resume_by = None
        self._up = False
        if self.link.state is not LinkState.ENDED:
            self.link.lose()
        if self._transport is None:
            self._is_gone()
        else:
            self._transport.finish()
        self._owner.over(self)
        for channel in tuple(face.channels.values()):
            channel.changed()
        for incoming in (*self._incoming.values(), *self._arrived):
            incoming.changed()
        face.changes.wake()

    def _is_gone(self) -> None:
        if not self._gone.done():
            self._gone.set_result(None)


def _counted(numbers: Mapping[int, Sequence[int]], what: str) -> str:
    """How many messages, and where; empty: none."""
    if not numbers:
        return ""
    names = [str(channel) for channel in list(numbers)[:_NAMED]]
    if len(numbers) > _NAMED:
        names.append("others")
    count = sum(map(len, numbers.values()))
    messages = "message" if count == 1 else "messages"
    channels = "channel" if len(numbers) == 1 else "channels"
    return f"{count} {messages} {what} on {channels} {', '.join(names)}"
