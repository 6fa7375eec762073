"""The one piece between any carrier and the connection core: inputs in, effects out, one timer.

Shared by all carriers, so that none of them knows of channels and the core knows of none.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable

from aqueduct._speedups.runs import Inlet
from aqueduct._speedups.waiting import Waiter
from aqueduct.carriers.contract import Buffer, Carrier
from aqueduct.clock import clock_of
from aqueduct.errors import ConnectionLost
from aqueduct.protocol.channels import effects
from aqueduct.protocol.channels.connection import ChannelConnection
from aqueduct.protocol.channels.events import Event

__all__ = ["Pump", "apply"]

_ROUNDS = 8
"""Of events and what they lead to, in one flush."""

log = logging.getLogger(__name__)


class Pump:
    """Drives one core over one carrier on the running event loop (it is the CarrierUser)."""

    def __init__(
        self,
        core: ChannelConnection,
        carrier: Carrier,
        on_event: Callable[[Event], None],
        on_closed: Callable[[], None],
    ) -> None:
        self.core = core
        self.carrier = carrier
        self.last_input = 0.0
        """Loop time of the last bytes from the peer, seconds."""
        self._on_event = on_event
        self._on_closed = on_closed
        self._extra_streams = 0
        self._rtt = -1.0
        self._loop = asyncio.get_running_loop()
        self._time = clock_of(self._loop)
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._flush_scheduled = self._flush_wanted = False
        self.flushing = self._again = False
        """``flushing``: a flush is under way; what is called was called by one."""
        self._told = False
        """An event was handed out."""
        self._stepping = False
        """What is being done ends with the steps of those who are ``_woken``."""
        self._woken: deque[Waiter] = deque()
        self.attended = False
        """Who waits does what turns of the loop do; see ``attend``."""
        self._closed = False
        self.on_pong: Callable[[], None] | None = None
        self.written = core.written
        """See CarrierUser."""

    # The carrier calls

    def connected(self) -> None:
        """See CarrierUser."""
        now = self._time()
        self.last_input = now
        self.core.start(now, self.carrier.datagram_limit)
        self.core.openable_changed(self.carrier.openable, now)
        self.core.datagram_room_changed(self.carrier.datagram_room, now)

    def stream_data(self, stream: int, data: Buffer, fin: bool) -> None:
        """See CarrierUser."""
        self.last_input = now = self._time()
        try:
            self.core.receive_stream(stream, data, fin, now)
        except Exception as error:  # not _guarded: this is the hottest call
            log.exception("a fault while reading from %s", self.carrier.peer)
            self.core.fail_internal(error)

    def inlet(self, stream: int) -> Inlet | None:
        """See CarrierUser."""
        try:
            return self.core.inlet(stream)
        except Exception as error:  # as in stream_data
            log.exception("a fault while reading from %s", self.carrier.peer)
            self.core.fail_internal(error)
            return None

    def inlet_done(self, stream: int) -> None:
        """See CarrierUser."""
        self.last_input = now = self._time()
        try:
            self.core.inlet_done(stream, now)
        except Exception as error:  # as in stream_data
            log.exception("a fault while reading from %s", self.carrier.peer)
            self.core.fail_internal(error)

    def stream_reset(self, stream: int, code: int) -> None:
        """See CarrierUser."""
        self._guarded(self.core.receive_reset, stream, code, self._time())

    def stream_stopped(self, stream: int, code: int) -> None:
        """See CarrierUser."""
        self._guarded(self.core.receive_stop, stream, code, self._time())

    def datagram_received(self, data: bytes) -> None:
        """See CarrierUser."""
        self.last_input = now = self._time()
        self._guarded(self.core.receive_datagram, data, now)

    def openable_changed(self) -> None:
        """See CarrierUser."""
        self._guarded(self.core.openable_changed, self.carrier.openable, self._time())

    def datagram_room_changed(self) -> None:
        """See CarrierUser."""
        self._guarded(self.core.datagram_room_changed, self.carrier.datagram_room, self._time())
        self.flush_soon()

    def ponged(self) -> None:
        """See CarrierUser."""
        self.last_input = self._time()
        if self.on_pong is not None:
            self.on_pong()

    def end_of_input(self) -> None:
        """See CarrierUser."""
        rtt = self.carrier.rtt
        if rtt != self._rtt:
            self._rtt = rtt
            self.core.rtt_measured(rtt)
        self._told = False
        if self.attended:
            self.flush()
        elif self._flush_and_step():
            return
        # Who else was woken by it runs next, and this behind: what they send leaves in that turn.
        if self._told and not (self._flush_scheduled or self._closed or self.attended):
            self._flush_scheduled, self._flush_wanted = True, False
            self._loop.call_soon(self._flush_now)

    def closed(self, error: ConnectionLost) -> None:
        """See CarrierUser."""
        if self._closed:
            return
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self.core.connection_lost(error)
        self._dispatch()
        self._on_closed()

    # The endpoint calls

    def flush_soon(self) -> None:
        """Commands were given: apply their effects once this turn of the loop is over."""
        self._flush_wanted = True
        if not (self._flush_scheduled or self.flushing or self._closed or self.attended):
            if self._stepping:
                return  # it ends with a flush
            self._flush_scheduled = True
            self._loop.call_soon(self._flush_now)

    def step(self, waiter: Waiter) -> None:
        """See Stepper."""
        if self._stepping:
            waiter.woken = True
            self._woken.append(waiter)
        else:
            waiter.step_soon()

    def flush(self) -> None:
        """Applies effects, hands out events, sets the timer."""
        if self._closed:
            return
        # Events first: the header hook's answer shares a stream with the acknowledged version.
        # What they lead to leaves with the same flush; a flush within one of them is a later one's.
        if self.flushing:
            self._again = True
            return
        core = self.core
        events, effects, outgoing = core.events, core.effects, core.outgoing
        self.flushing = True
        self._flush_wanted = False
        try:
            for _ in range(_ROUNDS):
                self._again = False
                if events or outgoing.fell:
                    self._dispatch()
                self._apply()
                if self._closed:
                    return
                if not (events or effects or outgoing.fell or self._again):
                    break
            else:
                self._again = True
        finally:
            self.flushing = False
        if self._again:
            self.flush_soon()  # others have the loop first
        if not (self.attended or self._stepping):  # or as soon as turns of the loop may come
            self._set_timer()

    def attend(self, attended: bool) -> None:
        """Whether somebody calls ``flush_wanted`` instead of turns of the loop."""
        self.attended = attended
        if attended:
            return
        if self._flush_wanted:
            self.flush()
        elif not self._closed:
            self._set_timer()

    def flush_wanted(self) -> None:
        """Flushes if that was to be done soon."""
        if self._flush_wanted:  # or another flush came first
            self.flush()

    def flush_at_once(self) -> None:
        """The same, within a flush too: what was queued leaves before the rest of it is done."""
        if self.flushing and not self._closed:
            self._apply()
        else:
            self.flush()

    # Within

    def _apply(self) -> None:
        core = self.core
        while True:
            wanted, extra = core.effects_to_apply(), core.incoming.extra
            if not wanted and extra == self._extra_streams:
                return
            changed = extra if extra != self._extra_streams else None
            self._extra_streams = extra
            apply(wanted, changed, core, self.carrier, self._time())
            if self._closed or not (core.events or core.effects or core.outgoing.fell):
                return

    def _flush_now(self) -> None:
        self._flush_scheduled = False
        if self._flush_wanted:  # or another flush came first
            self._flush_and_step()

    def _flush_and_step(self) -> bool:
        """A flush of a turn of the loop: who is woken by it is stepped, and what they send leaves.

        Returns whether anybody was. Whom that second flush wakes goes on in the next turn: others
        have the loop first.
        """
        if self._stepping:
            self.flush()
            return False
        woken = self._woken
        self._stepping = True
        try:
            self.flush()
            if not woken:
                return False
            while woken:
                woken.popleft().step()
        finally:
            self._stepping = False
            while woken:  # a step was interrupted
                woken.popleft().step_soon()
            if self._flush_wanted:
                self.flush()
            elif not (self._closed or self.attended):
                self._set_timer()
        return True

    def _guarded(self, work: Callable[..., None], *arguments: object) -> None:
        """A fault of ours must not reach the carrier, nor leave a connection that hangs."""
        try:
            work(*arguments)
        except Exception as error:
            log.exception("a fault on the connection to %s", self.carrier.peer)
            self.core.fail_internal(error)
            self.flush_soon()

    def _dispatch(self) -> None:
        on_event = self._on_event
        for event in self.core.events_received():
            self._told = True
            try:
                on_event(event)
            except Exception as error:  # as in stream_data
                log.exception("a fault on the connection to %s", self.carrier.peer)
                self.core.fail_internal(error)
                self.flush_soon()

    def _set_timer(self) -> None:
        deadline = self.core.next_deadline()
        if deadline is None:
            return
        if self._timer is not None:
            if self._timer_at <= deadline:
                return
            self._timer.cancel()
        self._timer_at = deadline
        self._timer = self._loop.call_at(deadline, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        # The loop may wake a timer a clock tick early.
        now = max(self._time(), self._timer_at)
        self.core.rtt_measured(self.carrier.rtt)
        self._guarded(self.core.handle_deadline, now)
        self._flush_and_step()


def apply(
    wanted: Iterable[effects.Effect],
    extra_streams: int | None,
    core: ChannelConnection,
    carrier: Carrier,
    now: float,
) -> None:
    """Applies effects in their order and flushes; ``now`` is that of the core's inputs.

    The slots go first: those of streams that ended leave with a flush, and if what these lasted
    for has ended too, more would be given than the budget has, and never taken back.
    The core is told what room datagrams have left: the carrier may drop some for its own reasons.
    """
    if extra_streams is not None:
        carrier.extra_streams(extra_streams)
    told = False
    for effect in wanted:
        kind = effect[0]
        if kind == effects.WRITE:
            carrier.write(effect[1], effect[2], effect[3])
        elif kind == effects.CREDIT:
            carrier.credit(effect[1], effect[2])
        elif kind == effects.RESET:
            carrier.reset(effect[1], effect[2])
        elif kind == effects.STOP:
            carrier.stop(effect[1], effect[2])
        elif kind == effects.DATAGRAM:
            carrier.send_datagram(effect[1])
            told = True
        elif kind == effects.CLOSE:
            linger = core.close_by - now if effect[1] == 0 else 0.0
            carrier.close(effect[1], effect[2], linger=max(linger, 0.0))
    if told:
        core.datagram_room_changed(carrier.datagram_room, now)
    carrier.flush()  # may report bytes as written at once, and so free room
