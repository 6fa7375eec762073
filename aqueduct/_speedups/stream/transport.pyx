"""What a wake-up of a byte stream's carrier comes to: it reads, has the user answer, and writes.

Whose bytes these are, and all that is not done in every wake-up, is said by who builds on it, in
``aqueduct.carriers.stream``. These steps are compiled as a large message takes each of them, with
caches that its own bytes have emptied.
"""

cimport cython

from aqueduct._speedups.bpmux.entities cimport Entity
from aqueduct._speedups.stream.socket_reader cimport CORE, DRAINED, END, LEFT, WHOLE
from aqueduct._speedups.io.gather cimport IovecWriter
from aqueduct._speedups.channels.message_batches cimport DirectRead
from aqueduct._speedups.bpmux.scheduler cimport SchedulerBase

from aqueduct._speedups.bpmux.scheduler import write_out

__all__ = ["TransportBase"]

cdef enum:
    # Of answers and writing, before it is others' turn.
    ROUNDS = 4


@cython.auto_pickle(False)
cdef class TransportBase:
    """The base of a carrier on a byte stream.

    It has a ``_user``, and is ``_begun`` once that was told; it is ``_over`` when that was told so.
    What the user is to hear of, or to answer, is ``_reported``. Reading goes on by ``_intake``, and
    while it does, in what is ``_processing``, nothing is written. ``_received`` and ``_sent`` count
    bytes of streams.

    What waits to leave is in ``_turns`` or, if it is ``_dirty``, still to be asked for by
    ``_collect``. ``_out`` has what was taken, about ``_take`` bytes at once, and ``_offered``
    chunks behind that are shown to the kernel. In one wake-up ``_turn`` bytes are read, or
    ``_chunks`` chunks, and as many bytes written. ``_secure``: chunks may be sent, by ``_records``
    if that is not None. ``_writing``: the kernel takes no more now. ``_parting``: the last words
    are said.
    """

    # Reading

    def _read_some(self, Py_ssize_t budget):
        """Reads and reports; what it leaves of ``budget``, if there is more to read behind that."""
        if self._released:
            return 0
        self._processing = True
        try:
            try:
                return self._read(budget)
            except BlockingIOError:
                return 0
            finally:
                if self._inlet is not None:
                    self._close_inlet()
        except Exception as error:
            # A fault of this side ends the connection, too: it could not read on.
            self._read_failed(error)
            return 0
        finally:
            self._processing = False

    def _read(self, Py_ssize_t budget):
        """Reads until nothing is there, a large message is whole, or it is the turn of others."""
        cdef Py_ssize_t size
        cdef int outcome
        self._intake._reading.allowance = self._chunks
        while budget > 0 and self._reading:
            if not self._begun or not self._established:
                budget -= <Py_ssize_t> self._read_first()
                continue
            if self._mux.error is not None:
                raise self._mux.error  # what follows a violation is not read
            outcome, size = self._intake.read(budget)
            budget -= size
            if outcome == CORE:
                if self._inlet is not None:
                    self._close_inlet()
                self._mux.go_on(self._intake.step)
                self._take_events()
                if self._intake.drained and not self._intake._reading.unread:
                    return 0
            elif outcome == LEFT:
                break
            elif outcome == WHOLE:
                if budget > 0:
                    return budget
            elif outcome == DRAINED:
                return 0
            elif outcome == END:
                self._close_inlet()
                self._end_of_stream()
                return 0
        if self._reading and (
            self._records is not None or self._intake._shares or self._intake._reading.unread
        ):
            if not self._again:
                self._again = True
                self._loop.call_soon(self._read_again)  # these make no socket readable
        return 0

    def _read_again(self):
        """Others had their turn."""
        self._again = False
        if self._reading:
            self._readable()

    def _open_inlet(self, Entity entity not None):
        """Opens the inlet of a stream, if its user has one to give.

        Within a wake-up its bytes go there without a report for each read.
        """
        cdef object state = entity.user
        cdef DirectRead inlet
        if self._inlet is not None:
            self._close_inlet()
        if self._over or state is None or state.waiting:
            return  # of an opening payload the bytes are counted elsewhere
        inlet = self._user.inlet(entity.identifier - 1)
        if inlet is not None:
            self._inlet, self._inlet_of = inlet, entity
            self._intake.use(entity, inlet)

    def _close_inlet(self):
        """What came by it is reported, before anything else is."""
        cdef DirectRead inlet = self._inlet
        cdef Entity entity = self._inlet_of
        if inlet is None:
            return
        self._inlet = self._inlet_of = None
        self._intake.use(None, None)
        if inlet.size and not self._over:
            self._received += <Py_ssize_t> inlet.size
            if inlet.idle:
                return  # most of a large message comes like that
            self._reported = True
            self._user.inlet_done(entity.identifier - 1)

    # Writing

    def flush(self):
        """Writes what the kernel takes at once."""
        cdef bint reported = self._reported
        if not self._processing and not self._over:
            self._transmit()
            self._reported = reported  # what it reported as written, the caller looks at

    def _transmit(self):
        """Writes until nothing is queued, the kernel takes no more, or it is others' turn."""
        if self._transmitting or self._writing or self._released:
            return
        if self._out.left or self._dirty or self._parting or not self._turns.is_idle():
            self._transmitting = True
            try:
                self._write_out()
            except OSError as error:
                self._break(error)
            finally:
                self._transmitting = False
        if self._closing and not self._parting:
            self._drained()

    def _write_out(self):
        cdef SchedulerBase turns = self._turns
        cdef IovecWriter out = self._out
        cdef Py_ssize_t budget = self._turn, limit, most, sent
        cdef list written = []
        cdef bint goes_on
        while True:
            # One take at a time: what is taken can be overtaken by nothing. And whole: pieces of
            # chunks would cost the reader a call each.
            goes_on = self._secure and not self._parting
            if goes_on and self._dirty and self._established and not out.left:
                self._collect()
            # Datagrams that wait for a place in the core are looked at after each take.
            limit = self._take if goes_on else 0
            most = 1 if self._dirty else budget
            sent = write_out(
                turns, out, self._fd, limit, most, written, self._records, self._offered
            )
            budget -= sent
            if written or self._room_grew:
                self._report_written(written)
                written.clear()
            if out.left:
                self._wait_writable()
                return
            if self._parting:
                self._shut()
                return
            if not sent or (turns.is_idle() and not self._dirty):
                return
            if budget <= 0:
                self._wait_writable()
                return

    def _report_written(self, list written not None):
        """What has left, and room for datagrams."""
        cdef object user = self._user
        cdef Entity entity
        cdef Py_ssize_t size
        if self._over or not self._begun or user is None:
            return
        for entity, size in written:
            if entity.identifier:
                self._sent += size
                if user.written(entity.identifier - 1, size):
                    self._reported = True
        if self._room_grew and not self._out.left:
            self._room_grew = False
            self._reported = True
            user.datagram_room_changed()

    # Both

    def _settle(self):
        """Ends a burst: the user answers, and its answers leave."""
        cdef int rounds = ROUNDS
        cdef bint waits
        while rounds:
            rounds -= 1
            if self._over:
                return
            if self._reported:
                self._reported = False
                self._user.end_of_input()
            waits = (
                self._dirty or self._closing or self._out.left != 0 or not self._turns.is_idle()
            )
            if waits and not self._acks_wait():
                self._transmit()
            if not self._reported:
                return
        self._loop.call_soon(self._settle)
