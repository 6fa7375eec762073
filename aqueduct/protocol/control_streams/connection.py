"""The core of the control-stream draft; what it can do is told in ``common.connection``."""

from __future__ import annotations

from aqueduct._speedups.base.accounts import Account
from aqueduct.config import Config
from aqueduct.errors import ConnectionLost, NoDatagrams, RemoteProtocolError
from aqueduct.protocol.common import effects
from aqueduct.protocol.common.connection import ConnectionCore
from aqueduct.protocol.common.context import ConnectionContext
from aqueduct.protocol.common.effects import BIDI
from aqueduct.protocol.common.events import Headers
from aqueduct.protocol.control_streams.bidi_streams import BidiStreams
from aqueduct.protocol.control_streams.dispatch import ControlDispatcher
from aqueduct.protocol.control_streams.early import EarlyReads, EarlyWrites
from aqueduct.protocol.control_streams.frame_writer import ControlFrameWriter
from aqueduct.protocol.control_streams.prelude import ControlPrelude
from aqueduct.protocol.control_streams.registry import ControlRegistry

__all__ = ["ControlConnection"]


class ControlConnection(ConnectionCore):
    """One side of one connection."""

    def __init__(
        self,
        *,
        is_client: bool,
        config: Config,
        headers: Headers = (),
        header_blocks: bool = False,
        loopback: bool = False,
        receiving: Account | None = None,
        sending: Account | None = None,
    ) -> None:
        """``header_blocks``: messages have headers, in front of their payloads (AC-95).

        ``loopback``: see Carrier; ``receiving`` and ``sending``: see ConnectionContext.
        """
        shared = ConnectionContext(
            config, 0 if is_client else 1, loopback=loopback, receiving=receiving, sending=sending
        )
        self._bidi = bidi = BidiStreams(
            shared.outgoing, config.limits.channels, config.flow.wake_up
        )
        writer = ControlFrameWriter(shared.outgoing, bidi, header_blocks=header_blocks)
        registry = ControlRegistry(shared, writer)
        prelude = ControlPrelude(shared, registry, bidi)
        reader = ControlDispatcher(shared, registry, bidi, prelude, header_blocks=header_blocks)
        prelude.open_gate = reader.open_gate
        self._early: EarlyWrites | None = None
        """Of a client, until it is decided whether its early data counts."""
        self._dispatcher = reader
        super().__init__(shared, headers, registry, prelude, reader)

    def start(self, now: float, datagram_limit: int = 0, early: bool = False) -> None:
        """The transport is up. Without datagrams the draft does not work (AQ0-1)."""
        if not datagram_limit and self.error is None:
            self._shared.now = now
            self._fail(NoDatagrams("the transport has no datagrams, which the draft needs (AQ0-1)"))
            return
        limit = self.config.limits.early_bytes
        if early and self.is_client:
            self._early = EarlyWrites(self.outgoing, self._bidi, limit)
        elif early:
            self._dispatcher.early = EarlyReads(limit)
        super().start(now, datagram_limit, early)

    def early_decided(self, accepted: bool, now: float) -> None:
        """Early data counts from now on; that of a client, if not ``accepted``, is repeated."""
        self._shared.now = now
        early, self._early = self._early, None
        if self.error is not None and self._closing is None:
            return
        if early is not None and accepted:
            for number, size in early.accept(self._shared.effects).items():
                self.written(number, size)
            self._close_if_drained()
        elif early is not None:
            early.repeat(self._shared.effects)
        elif self.error is None and not self.is_client:
            try:
                self._dispatcher.read_early()
            except RemoteProtocolError as error:
                self._fail(error)
            self.use_room(now)

    def openable_changed(self, count: int, now: float) -> None:
        """The carrier can open ``count`` more streams."""
        held = 0 if self._early is None else self._early.held_streams
        super().openable_changed(count - held, now)

    def bidi_openable_changed(self, count: int, now: float) -> None:
        """The carrier can open ``count`` more bidirectional streams."""
        self._shared.now = now
        if self.error is None or self._closing is not None:
            held = 0 if self._early is None else self._early.held_bidi
            self._bidi.openable_changed(count - held)
            self._close_if_drained()

    @property
    def goes_on(self) -> bool:
        """Whether there is more to do once others had their turn (Flow.wake_up)."""
        return super().goes_on or self._bidi.goes_on

    def handle_deadline(self, now: float) -> None:
        """Does what is due."""
        super().handle_deadline(now)
        if self._bidi.goes_on:
            self._bidi.open_on()
            self._close_if_drained()

    def receive_stop(self, stream: int, code: int, now: float) -> None:
        """The peer reads no more of a stream of ours."""
        super().receive_stop(stream, code, now)
        self._bidi.stopped(stream)

    def written(self, stream: int, size: int) -> bool:
        """Bytes of a stream of ours left the carrier. Returns ``waits``."""
        if self._early is not None:
            self._early.written(stream, size)
            return self.waits
        waits = super().written(stream, size)
        if stream >= BIDI:
            self._bidi.written(stream)
            return self.waits
        return waits

    def effects_to_apply(self) -> list[effects.Effect]:
        """What the carrier is to do, in order."""
        found = super().effects_to_apply()
        self._bidi.effects_taken()
        if self._early is not None:
            found = self._early.leave(found)
            if found and found[-1][0] == effects.CLOSE:
                self._early = None
        return found

    def connection_lost(self, error: ConnectionLost) -> None:
        """The transport is gone. Early data is not repeated."""
        super().connection_lost(error)
        self._early = None
