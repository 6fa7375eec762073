"""The socket of a byte-stream connection: what is read when it is readable, and written at once.

Reading goes straight to where the bytes of a large payload belong, with a little room behind it
for what follows; nothing is joined. Writing gathers the core's buffers in one call of the kernel.
In one wake-up a connection moves about ``ByteStream.wake_up`` bytes, then it is others' turn.

This is compiled because each large message takes these steps, with caches that its own bytes have
emptied.
"""

from math import inf
from socket import SHUT_WR

cimport cython

from aqueduct._speedups.bpmux.entities cimport Entity
from aqueduct._speedups.channels.receiver cimport DirectRead
from aqueduct._speedups.io.gather cimport IovecWriter
from aqueduct._speedups.io.shared_ring cimport Rings
from aqueduct._speedups.io.tls_records cimport Records
from aqueduct._speedups.stream.socket_reader cimport CORE, DRAINED, END, LEFT, WHOLE, SocketReader
from aqueduct._speedups.stream.tunnel cimport Tunnel

from aqueduct._speedups.bpmux.scheduler import write_out

__all__ = ["StreamTransport"]

cdef enum:
    # Of answers and writing, before it is others' turn.
    ROUNDS = 4
    # Reads of what comes after the end, in one wake-up.
    DISCARDS = 16

cdef double ACK_DELAY = 0.05  # seconds that acknowledgements of ends wait for another chunk
cdef double FAREWELL = 3.0    # seconds for the peer to take a close


@cython.final
@cython.auto_pickle(False)
cdef class StreamTransport:
    """The socket ``sock`` of the connection ``owner``, which carries ``streams``.

    ``owner`` has four methods. ``early_input()`` reads during the handshakes and returns the bytes
    read; it raises BlockingIOError if nothing is there. ``failed(error)`` ends the connection: None
    says that the peer has closed its side. ``drained()`` is called after writing, if the streams
    are closing. ``released()`` is called once the socket is closed.

    ``streams`` is a ``BpmuxStreams``. ``ahead`` is memory that is read to and copied from at once.
    In one wake-up ``turn`` bytes are read, or ``chunks`` chunks, and as many bytes written.
    ``take_of()`` says how many bytes are best taken from the core at once. ``offered`` chunks
    behind them are shown to the kernel in the same call. With ``records`` all is encrypted, or, if
    they are a ``Tunnel``, goes as messages of a link.
    """

    def __init__(
        self,
        owner,
        streams,
        sock,
        loop,
        time,
        *,
        Records records,
        ahead,
        Py_ssize_t turn,
        int chunks,
        take_of,
        Py_ssize_t offered,
    ):
        self._owner = owner
        self._streams = streams
        self._sock = sock
        self._fd = sock.fileno()
        self._loop = loop
        self._time = time
        self._records = records
        self._tunnel = <Tunnel> records if type(records) is Tunnel else None
        self.reader = SocketReader(
            streams.mux.receiver, self._fd, records, ahead, self._open_inlet, self._close_inlet
        )
        self.last_input = time()
        self.turn = turn
        self._chunks = chunks
        self._scheduler = streams.mux.scheduler
        self._turns = self._scheduler.turns
        self.out = IovecWriter()
        self.secure = records is None
        self._take_of = take_of
        self.take = take_of()
        self._offered = offered
        self.share_after = inf

    # Reading

    def resume(self):
        """Reads when there is something to read."""
        if not self.reading and not self.released:
            self.reading = True
            self._loop.add_reader(self._fd, self.readable)

    def pause(self):
        """Reads no more."""
        if self.reading:
            self.reading = False
            self._loop.remove_reader(self._fd)
            if self.expectation is not None:
                self.expectation.forget()

    def readable(self):
        """There is something to read, or the end."""
        cdef Py_ssize_t budget, received
        cdef object streams = self._streams
        if self.released:
            return
        if self.parting:
            self._discard()
            return
        self.last_input = self._time()
        received = streams.received
        budget = self._read_some(self.turn)
        while budget > 0 and not streams.over:
            self.settle()  # a large message is taken before the next one has memory
            budget = self._read_some(budget)
        if self.expectation is not None and streams.received != received:
            self.expectation.arrived(self.last_input)
        streams.measure(self.last_input)
        if streams.received + streams.sent > self.share_after:
            self.share_after = inf
            if not streams.over and not self.released:
                self.offer_memory()
        if self.writing and self._room_came():
            self._writable()
        self.settle()

    cdef Py_ssize_t _read_some(self, Py_ssize_t budget) except -1:
        """Reads and reports; what it leaves of ``budget``, if there is more to read behind that."""
        if self.released:
            return 0
        self.processing = True
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
            self._owner.failed(error)
            return 0
        finally:
            self.processing = False

    cdef Py_ssize_t _read(self, Py_ssize_t budget) except -1:
        """Reads until nothing is there, a large message is whole, or it is the turn of others."""
        cdef object streams = self._streams
        cdef object mux = streams.mux
        cdef SocketReader reader = self.reader
        cdef Py_ssize_t size
        cdef int outcome
        reader.allow(self._chunks)
        while budget > 0 and self.reading:
            if not streams.begun:
                budget -= <Py_ssize_t> self._owner.early_input()
                continue
            if mux.error is not None:
                raise mux.error  # what follows a violation is not read
            outcome, size = reader.read(budget)
            budget -= size
            if outcome == CORE:
                if self._inlet is not None:
                    self._close_inlet()
                mux.go_on(reader.step)
                streams.take_events()
                if reader.drained and not mux.unread:
                    return 0
            elif outcome == LEFT or (self._tunnel is not None and self._tunnel.hurried):
                break
            elif outcome == WHOLE:
                if budget > 0:
                    return budget
            elif outcome == DRAINED:
                return 0
            elif outcome == END:
                self._close_inlet()
                self._owner.failed(None)
                return 0
        if self.reading and not self._again and (
            self._records is not None or reader.shares or mux.unread
        ):
            self._again = True
            self._loop.call_soon(self._read_again)  # these make no socket readable
        return 0

    def _read_again(self):
        """Others had their turn."""
        self._again = False
        if self.reading:
            self.readable()

    def _open_inlet(self, Entity entity not None):
        """Opens the inlet of a stream, if its user has one to give."""
        cdef DirectRead inlet
        if self._inlet is not None:
            self._close_inlet()
        inlet = self._streams.inlet_of(entity)
        if inlet is not None:
            self._inlet, self._inlet_of = inlet, entity
            self.reader.use(entity, inlet)

    def _close_inlet(self):
        """What came by it is reported, before anything else is."""
        cdef DirectRead inlet = self._inlet
        cdef Entity entity = self._inlet_of
        if inlet is None:
            return
        self._inlet = self._inlet_of = None
        self.reader.use(None, None)
        if inlet.size:
            self._streams.inlet_closed(entity, inlet.size, inlet.idle)

    cdef int _discard(self) except -1:
        """Reads what the peer still sends: closing over it would reset what it has not read."""
        cdef int count = DISCARDS
        if self.writing and self._room_came():
            self._writable()
        try:
            while count and not self.released:
                count -= 1
                if not self._sock.recv(1 << 16):
                    self.release()
        except BlockingIOError:
            pass
        except OSError:
            self.release()
        return 0

    # Memory that is shared with the peer

    def share(self, Rings rings not None, Py_ssize_t size):
        """Goes on by memory of ``size`` bytes in each direction."""
        # A side that goes on while the other one fills or empties it works with cold memory.
        self.turn = min(self.turn, size)
        self.reader.share(rings)
        self.out.share(rings)

    cdef bint _room_came(self) except -1:
        """There was no room in the peer's memory, and there is again."""
        return self.out.shares and self.out.left != 0 and not self.out.waits

    # Writing

    def flush(self):
        """Writes what the kernel takes at once."""
        cdef object streams = self._streams
        if not self.processing and not streams.over:
            reported = streams.reported
            self.transmit()
            streams.reported = reported  # what it reported as written, the caller looks at

    def settle(self):
        """Ends a burst: the user answers, and its answers leave."""
        cdef int rounds = ROUNDS
        cdef object streams = self._streams
        while rounds:
            rounds -= 1
            if streams.over:
                return
            if streams.reported:
                streams.reported = False
                streams.user.end_of_input()
            if self.released:
                return  # its link has another connection, or none
            if (self._has_output() or streams.closing) and not self._acks_wait():
                self.transmit()
            if not streams.reported:
                return
        self._loop.call_soon(self.settle)

    def transmit(self):
        """Writes until nothing is queued, the kernel takes no more, or it is others' turn."""
        if self._transmitting or self.writing or self.released:
            return
        if self._has_output() or self.parting:
            self._transmitting = True
            try:
                self._write_out()
            except OSError as error:
                self._break(error)
            finally:
                self._transmitting = False
        if self._streams.closing and not self.parting:
            self._owner.drained()

    cdef bint _has_output(self) except -1:
        """Whether something may be written."""
        if self.out.left != 0 or self._streams.dirty or not self._turns.is_idle():
            return True
        return self._tunnel is not None and self._tunnel.waits()

    cdef int _write_out(self) except -1:
        cdef object streams = self._streams
        cdef IovecWriter out = self.out
        cdef Py_ssize_t budget = self.turn, limit, most, sent
        cdef list written = []
        cdef bint goes_on, dirty
        while True:
            # One take at a time: nothing can overtake what is taken. And whole: pieces of
            # chunks would cost the reader a call each.
            goes_on = self.secure and not self.parting
            dirty = streams.dirty
            if goes_on and dirty and not out.left and streams.established:
                streams.collect()
                dirty = streams.dirty
            # Datagrams that wait for a place in the core are looked at after each take.
            limit = self.take if goes_on else 0
            if self._tunnel is not None and (
                out.left or self._tunnel.fill(out) or not self._tunnel.may_send()
            ):
                limit = 0  # what the link has to say, and sends again, is before what is new
            most = 1 if dirty or self._tunnel is not None else budget
            sent = write_out(
                self._scheduler, out, self._fd, limit, most, written, self._records, self._offered
            )
            budget -= sent
            if written or streams.room_grew:
                streams.written(written, not out.left)
                written.clear()
            if out.left:
                self._wait_writable()
                return 0
            if self.parting:
                self._shut()
                return 0
            if not sent or not self._has_output():
                return 0
            if budget <= 0:
                self._wait_writable()
                return 0

    cdef int _wait_writable(self) except -1:
        self.writing = True
        if self.out.shares:
            if not self.out.left:  # or the peer will say when there is room
                self._loop.call_soon(self._writable)
            return 0
        self.take = self._take_of()  # segments grow with the window
        if not self._watching:
            self._watching = True
            self._loop.add_writer(self._fd, self._writable)
        return 0

    def _writable(self):
        """The kernel takes more, or the peer's memory."""
        if self.released:
            return
        self.writing = False
        self.transmit()
        if self._streams.reported:
            self.settle()
        if self._watching and (not self.writing or self.out.shares):
            self._watching = False
            self._loop.remove_writer(self._fd)

    # Acknowledgements of ends

    cdef bint _acks_wait(self) except -1:
        """Whether nothing would leave but acknowledgements of ends.

        They go with the next message: a packet of their own costs the peer a turn of its loop.
        """
        cdef object streams = self._streams
        if self.out.left or self.parting or streams.closing or not streams.established:
            return False
        if self._tunnel is not None and self._tunnel.waits():
            return False
        if streams.dirty:
            streams.collect()
        if not self._turns.only_acks:
            return False
        if self._acks is None:
            self._acks = self._loop.call_later(ACK_DELAY, self._send_acks)
        return True

    def hurry_acks(self):
        """Acknowledgements that wait are sent now."""
        if self._acks is not None:
            self._acks.cancel()
            self._acks = self._loop.call_soon(self._send_acks)

    def _send_acks(self):
        self._acks = None
        self.transmit()
        if self._streams.reported:
            self.settle()

    # The end

    def _break(self, error):
        """The kernel takes nothing any more. What the peer has sent before may say why."""
        self.out.clear()
        self.writing = True
        if self.parting:
            self.release()
        else:
            self._loop.call_soon(self._read_last, error)

    def _read_last(self, error):
        if self._streams.begun and not self._streams.over:
            self.readable()
        if not self._streams.over and not self.released:
            self._owner.failed(error)

    def part(self, bytes last not None):
        """Sends ``last``. Then the peer has some time to read it and to close its side."""
        if self.released:
            return
        self.parting = True
        self.reader.relax()
        if last:
            self.out.add(last)
        self.resume()
        self._farewell = self._loop.call_later(FAREWELL, self.release)
        self.transmit()

    def _shut(self):
        try:
            self._sock.shutdown(SHUT_WR)
        except OSError:
            self.release()  # the peer has gone

    def release(self):
        """Closes the socket."""
        if self.released:
            return
        self._detach()
        self._sock.close()
        self._owner.released()

    def detach(self):
        """Lets go of the socket, which stays open. What was taken and has not left is dropped.

        Returns whose bytes of payload that was, as ``streams.written`` is told.
        """
        cdef list taken = []
        if not self.released:
            taken = self.out.written[:]
            self.out.written.clear()
            self._detach()
        return taken

    def _detach(self):
        self.released = True
        self.pause()
        self.expectation = None
        if self._watching:
            self._watching = False
            self._loop.remove_writer(self._fd)
        for timer in (self._farewell, self._acks):
            if timer is not None:
                timer.cancel()
        self.out.clear()
        self.out.share(None)
        self.reader.share(None)
