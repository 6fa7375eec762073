"""The one piece between any carrier and the connection core: inputs in, effects out, one timer.

Shared by all carriers, so that none of them knows of channels and the core knows of none. It is
compiled as every message passes here several times.
"""

import asyncio
from collections import deque

cimport cython

from aqueduct._speedups.channels.events cimport (
    CLOSE_EFFECT,
    CREDIT_EFFECT,
    DATAGRAM_EFFECT,
    RESET_EFFECT,
    STOP_EFFECT,
    WRITE_EFFECT,
)
from aqueduct._speedups.loop.waiter cimport Waiter

from aqueduct.carriers.clock import clock_of
from aqueduct.escaping import logger_of

__all__ = ["Pump", "apply"]

cdef enum:
    # Of events and what they lead to, in one flush.
    ROUNDS = 8

log = logger_of("aqueduct.loop")


@cython.final
@cython.auto_pickle(False)
cdef class Pump:
    """Drives one core over one carrier on the running event loop (it is the CarrierUser).

    ``last_input``: loop time of the last bytes from the peer, seconds. ``flushing``: a flush is
    under way; what is called was called by one. ``on_pong`` is called when the peer's transport has
    answered; ``written``, ``kept``: see CarrierUser. ``stepping``: what is being done ends with the
    steps of those who are ``_woken``.
    """

    def __init__(self, core not None, carrier not None, on_event not None, on_closed not None):
        self.core = core
        self.carrier = carrier
        self.written = core.written
        self.kept = core.outgoing.keep
        self._on_event = on_event
        self._on_closed = on_closed
        self._events = core.events
        self._effects = core.effects
        self._ledger = core.outgoing
        self._incoming = core.incoming
        self._extra_streams = 0
        self._rtt = -1.0
        self._loop = asyncio.get_running_loop()
        self._time = clock_of(self._loop)
        self._woken = deque()

    # The carrier calls

    def connected(self):
        """See CarrierUser."""
        cdef double now = self._time()
        self.last_input = now
        self.core.start(now, self.carrier.datagram_limit, self.carrier.early)
        if self.carrier.bidi:  # first: the stream of the connection headers is one of them
            self.core.bidi_openable_changed(self.carrier.bidi_openable, now)
        self.core.openable_changed(self.carrier.openable, now)
        self.core.datagram_room_changed(self.carrier.datagram_room, now)

    def early_decided(self, accepted):
        """See CarrierUser."""
        self._guarded(self.core.early_decided, accepted, self._time())
        self.openable_changed()
        self._guarded(self.core.datagram_room_changed, self.carrier.datagram_room, self._time())

    def stream_data(self, stream, data, fin):
        """See CarrierUser."""
        self.last_input = self._time()
        try:
            self.core.receive_stream(stream, data, fin, self.last_input)
        except Exception as error:  # not _guarded: this is the hottest call
            self._fault("while reading from", error)

    def inlet(self, stream):
        """See CarrierUser."""
        try:
            return self.core.inlet(stream)
        except Exception as error:  # as in stream_data
            self._fault("while reading from", error)
            return None

    def inlet_done(self, stream):
        """See CarrierUser."""
        self.last_input = self._time()
        try:
            self.core.inlet_done(stream, self.last_input)
        except Exception as error:  # as in stream_data
            self._fault("while reading from", error)

    def stream_reset(self, stream, code):
        """See CarrierUser."""
        self._guarded(self.core.receive_reset, stream, code, self._time())

    def stream_stopped(self, stream, code):
        """See CarrierUser."""
        self._guarded(self.core.receive_stop, stream, code, self._time())

    def datagram_received(self, data):
        """See CarrierUser."""
        self.last_input = self._time()
        self._guarded(self.core.receive_datagram, data, self.last_input)

    def openable_changed(self):
        """See CarrierUser."""
        if self.carrier.bidi:
            self._guarded(
                self.core.bidi_openable_changed, self.carrier.bidi_openable, self._time()
            )
        self._guarded(self.core.openable_changed, self.carrier.openable, self._time())

    def datagram_room_changed(self):
        """See CarrierUser."""
        self._guarded(
            self.core.datagram_room_changed, self.carrier.datagram_room, self._time(),
            self.carrier.datagram_limit,
        )
        self.flush_soon()

    def ponged(self):
        """See CarrierUser."""
        self.last_input = self._time()
        if self.on_pong is not None:
            self.on_pong()

    def end_of_input(self):
        """See CarrierUser."""
        cdef double rtt = self.carrier.rtt
        if rtt != self._rtt:
            self._rtt = rtt
            self.core.rtt_measured(rtt)
        self._told = False
        if self._flush_and_step():
            return
        # Other tasks that it woke run next, then this: what they send leaves in that turn.
        if self._told and not (self._flush_scheduled or self._closed):
            self._flush_scheduled, self._flush_wanted = True, False
            self._loop.call_soon(self._flush_now)

    def closed(self, error):
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

    def left_behind(self, error):
        """In a forked child: every handle reads ``error`` from now on, and nobody is woken."""
        self._closed = True  # nothing leaves
        self.core.connection_lost(error)

    # The endpoint calls

    cpdef object flush_soon(self):
        """Commands were given: apply their effects once this turn of the loop is over."""
        self._flush_wanted = True
        if not (self._flush_scheduled or self.flushing or self._closed):
            if self.stepping:
                return  # it ends with a flush
            self._flush_scheduled = True
            self._loop.call_soon(self._flush_now)

    def step(self, Waiter waiter not None):
        """Has the task that waits for it step: behind what is being done here, or soon."""
        if self.stepping:
            waiter.woken = True
            self._woken.append(waiter)
        else:
            waiter.step_soon()

    cpdef object flush(self):
        """Applies effects, hands out events, sets the timer."""
        cdef int left = ROUNDS
        if self._closed:
            return
        # Events first: the header hook's answer shares a stream with the acknowledged version.
        # What they lead to leaves with the same flush; a flush within one of them is a later one's.
        if self.flushing:
            self._again = True
            return
        self.flushing = True
        self._flush_wanted = False
        try:
            while left:
                left -= 1
                self._again = False
                if self._events or self._ledger.fell:
                    self._dispatch()
                self._apply()
                if self._closed:
                    return
                if not (self._events or self._effects or self._ledger.fell or self._again):
                    break
            else:
                self._again = True
        finally:
            self.flushing = False
        if self._again:
            self.flush_soon()  # others have the loop first
        if not self.stepping:
            self._set_timer()

    def flush_at_once(self):
        """The same, within a flush too: what was queued leaves before the rest of it is done."""
        if self.flushing and not self._closed:
            self._apply()
        else:
            self.flush()

    # Within

    cdef int _apply(self) except -1:
        cdef list wanted
        cdef object extra
        while True:
            wanted, extra = self.core.effects_to_apply(), self._incoming.extra
            if not wanted and extra == self._extra_streams:
                return 0
            if extra == self._extra_streams:
                extra = None
            else:
                self._extra_streams = extra
            carry_out(wanted, extra, self.core, self.carrier, self._time())
            if self._closed or not (self._events or self._effects or self._ledger.fell):
                return 0

    def _flush_now(self):
        self._flush_scheduled = False
        if self._flush_wanted:  # or another flush came first
            self._flush_and_step()

    cdef bint _flush_and_step(self) except -1:
        """A flush of a turn of the loop: who is woken by it is stepped, and what they send leaves.

        Returns whether anybody was. Whom that second flush wakes goes on in the next turn: others
        have the loop first.
        """
        cdef object woken = self._woken
        if self.stepping:
            self.flush()
            return False
        self.stepping = True
        try:
            self.flush()
            if not woken:
                return False
            while woken:
                (<Waiter?> woken.popleft()).step()
        finally:
            self.stepping = False
            while woken:  # a step was interrupted
                (<Waiter?> woken.popleft()).step_soon()
            if self._flush_wanted:
                self.flush()
            elif not self._closed:
                self._set_timer()
        return True

    def _guarded(self, work, *arguments):
        """A fault of ours must not reach the carrier, nor leave a connection that hangs."""
        try:
            work(*arguments)
        except Exception as error:
            self._fault("on the connection to", error)
            self.flush_soon()

    cdef int _fault(self, str where, error) except -1:
        log.error("a fault %s %s", where, self.carrier.peer, exc_info=error)
        self.core.fail_internal(error)
        return 0

    cdef int _dispatch(self) except -1:
        for event in self.core.events_received():
            self._told = True
            try:
                self._on_event(event)
            except Exception as error:  # as in stream_data
                self._fault("on the connection to", error)
                self.flush_soon()
        return 0

    cdef int _set_timer(self) except -1:
        cdef object deadline = self.core.next_deadline()
        if deadline is None:
            return 0
        if self._timer is not None:
            if self._timer_at <= <double> deadline:
                return 0
            self._timer.cancel()
        self._timer_at = deadline
        self._timer = self._loop.call_at(deadline, self._on_timer)
        return 0

    def _on_timer(self):
        self._timer = None
        # The loop may wake a timer a clock tick early.
        now = max(self._time(), self._timer_at)
        self.core.rtt_measured(self.carrier.rtt)
        self._guarded(self.core.handle_deadline, now)
        self._flush_and_step()


def apply(list wanted not None, extra_streams, core not None, carrier not None, double now):
    """Applies effects in their order and flushes; ``now`` is that of the core's inputs.

    ``extra_streams``: how many slots more the peer is due, None if that has not changed.
    """
    carry_out(wanted, extra_streams, core, carrier, now)


cdef int carry_out(
    list wanted, object extra_streams, object core, object carrier, double now
) except -1:
    """See ``apply``.

    The slots go first: those of streams that ended leave with a flush, and if what these lasted
    for has ended too, more would be given than the budget has, and never taken back.
    The core is told what room datagrams have left: the carrier may drop some for its own reasons.
    """
    cdef tuple effect
    cdef bint told = False
    cdef int kind
    if extra_streams is not None:
        carrier.extra_streams(extra_streams)
    for effect in wanted:
        kind = effect[0]
        if kind == WRITE_EFFECT:
            carrier.write(effect[1], effect[2], effect[3])
        elif kind == CREDIT_EFFECT:
            carrier.credit(effect[1], effect[2])
        elif kind == RESET_EFFECT:
            carrier.reset(effect[1], effect[2])
        elif kind == STOP_EFFECT:
            carrier.stop(effect[1], effect[2])
        elif kind == DATAGRAM_EFFECT:
            carrier.send_datagram(effect[1])
            told = True
        elif kind == CLOSE_EFFECT:
            linger = core.close_by - now if effect[1] == 0 else 0.0
            carrier.close(effect[1], effect[2], linger=max(linger, 0.0))
    if told:
        core.datagram_room_changed(carrier.datagram_room, now)
    carrier.flush()  # may report bytes as written at once, and so free room
    return 0
