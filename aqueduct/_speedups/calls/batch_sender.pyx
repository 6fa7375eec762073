"""From the batches of an iterable to messages of a channel, as far as there is room.

It is what a caller who sends without end does for each batch; ``aqueduct.client.call`` has the
rest of a call.
"""

cimport cython
from cpython.object cimport PyObject
from cpython.ref cimport Py_DECREF

from aqueduct._speedups.arrow.writer cimport BatchEncoder, Encoded
from aqueduct._speedups.channels.sender cimport SenderBase
from aqueduct._speedups.loop.waiter cimport Waiter


cdef extern from "Python.h":
    PyObject *PyIter_Next(object) except? NULL

__all__ = ["BatchSender", "SendWaker", "InFlightWindow", "SharedWindow"]


@cython.final
@cython.auto_pickle(False)
cdef class SharedWindow:
    """What all calls of a connection have under way: ``used`` bytes, of which ``limit`` is enough.

    A handler may hold a batch until its answer is read. So calls whose answers nobody reads must
    not fill the receive budget of the service: the call that is read could not go on. A batch
    counts until it is answered, or its handler has taken the next one.
    """

    def __init__(self, Py_ssize_t limit):
        self.limit = limit
        self._blocked = {}

    cdef int give_back(self, Py_ssize_t size) except -1:
        """``size`` bytes are under way no more. Once there is ample room, all who wait are told."""
        cdef InFlightWindow window
        cdef object wake
        self.used -= size
        if self._blocked and self.used < self.limit - (self.limit >> 2):
            blocked, self._blocked = self._blocked, {}
            for window in blocked:
                wake = window._wake
                if wake is not None:
                    wake()
        return 0


@cython.final
@cython.no_gc_clear  # its end needs what it shares
@cython.auto_pickle(False)
cdef class InFlightWindow:
    """How many batches, and bytes of them, may be sent and not yet answered or taken.

    One side counts what it sends, the other what was settled; so it may be used by two threads.
    ``sent``: the next batch's number. ``settled``: of how many batches the service needs no more.
    Those are the first ones, unless ``settle_one`` has been used, and then nothing else is.
    ``held``: bytes that the sender keeps besides; they count as what is under way does.

    Of small batches there may be up to ``small_batches`` as long as they, and what is held, have
    less than ``small_bytes``: a few of them would be gone before the other side has had its turn.

    Calls may ``share`` a SharedWindow. While that is full, a call has one batch under way at most.
    It sends that once its application waits for an answer of which nothing has come (``answering``:
    part of it has).
    """

    def __init__(
        self,
        Py_ssize_t batches,
        Py_ssize_t size,
        Py_ssize_t small_batches=0,
        Py_ssize_t small_bytes=0,
    ):
        self._batches = batches
        self._bytes = size
        self._small_batches = small_batches
        self._small_bytes = small_bytes
        self._sizes = {}
        self._wanted = True

    def __dealloc__(self):
        if self._shared is not None:
            self._shared.used -= self._sent_bytes - self._settled_bytes + self._taken

    def share(self, SharedWindow shared not None, wake):
        """From now on its batches count in ``shared``, too.

        ``wake`` is called when the window may have opened again. If it is None, whoever asks
        whether it is open waits for an answer, and looks again when one came.
        """
        if self._shared is None:
            self._shared = shared
            self._wake = wake
            self._wanted = wake is None
            shared.used += self._sent_bytes - self._settled_bytes

    def want(self, bint wanted):
        """Whether the application waits for an answer of the call."""
        if self._shared is None or self._wake is None:
            return
        self._wanted = wanted
        if wanted and self in self._shared._blocked:
            del self._shared._blocked[self]
            self._wake()

    def end(self):
        """The call is over: nothing is under way any more."""
        cdef SharedWindow shared = self._shared
        if shared is not None:
            self._shared = self._wake = None
            shared._blocked.pop(self, None)
            shared.give_back(self._sent_bytes - self._settled_bytes + self._taken)

    @property
    def open(self):
        """Whether one more may be sent. If none is under way, one may that is waited for."""
        return self.is_open()

    cdef bint is_open(self) except -1:
        cdef SharedWindow shared = self._shared
        cdef Py_ssize_t under_way = self.sent - self.settled
        cdef Py_ssize_t size = self._sent_bytes - self._settled_bytes + self.held
        if (
            shared is not None and shared.used >= shared.limit
            and (under_way or self.answering or not self._wanted)
        ):
            if self._wake is not None:
                shared._blocked[self] = None
            return False
        if not under_way:
            return True
        if size >= self._bytes:
            return False
        if under_way < self._batches:
            return True
        return under_way < self._small_batches and size < self._small_bytes

    def is_one_below(self, Py_ssize_t size):
        """Whether one batch is under way, of at most ``size`` bytes."""
        return self.sent - self.settled == 1 and self._sent_bytes - self._settled_bytes <= size

    @property
    def sent_bytes(self):
        """The sizes of all batches that were sent, in sum."""
        return self._sent_bytes

    cpdef Py_ssize_t send(self, Py_ssize_t size) except -1:
        """Counts a batch of ``size`` bytes as sent; returns its number."""
        cdef Py_ssize_t number = self.sent
        self._sizes[number] = size
        self._sent_bytes += size
        if self._shared is not None:
            self._shared.used += size
        self.sent = number + 1
        return number

    cpdef int settle(self, Py_ssize_t number, bint answered=True) except -1:
        """The batches up to ``number`` are answered, or taken."""
        cdef Py_ssize_t size = 0, due = self._taken
        if self.settled > number and not (answered and self.settled == number + 1):
            return 0
        while self.settled <= number and self._sizes:
            size = self._sizes.pop(self.settled)
            self._settled_bytes += size
            due += size
            self.settled += 1
        self._taken = 0 if answered else size
        return self._gave_back(due - self._taken)

    cdef int _gave_back(self, Py_ssize_t size) except -1:
        if self._shared is not None and size:
            self._shared.give_back(size)
        return 0

    def settle_one(self, Py_ssize_t number):
        """Batch ``number`` is answered, whatever became of others. False: it was not due."""
        cdef object size = self._sizes.pop(number, None)
        if size is None:
            return False
        self._settled_bytes += size
        self.settled += 1
        self._gave_back(size)
        return True


@cython.final
@cython.auto_pickle(False)
cdef class BatchSender:
    """The sending side of a call.

    ``row`` takes the messages, None if there is no channel for batches; ``flush`` is called once
    some were queued. ``compression``: what batches may be compressed by, "" for nothing. ``over``:
    the call has ended, and what is sent is dropped. ``moved`` grows with all that happens, for the
    progress deadline. ``slow``: a batch that takes long to encode, or None. The caller encodes it
    elsewhere and gives it by ``give_encoded`` before all later batches. ``expects``: bytes that the
    next batch may have, 0 if it is small.

    The call has the rest: ``writable``, which alone decides if the next batch may be large;
    ``fed(size)``, which is told of a large one; ``finish()``; and ``send(encoded, number)`` for
    what is not one plain message.
    """

    def __init__(
        self, call not None, InFlightWindow window, bytes key not None, Py_ssize_t most, flush,
        Py_ssize_t large
    ):
        """``key``: of the header with a batch's number. ``most``: bytes of one message.

        ``large``: bytes from which on ``fed`` is told of a batch in any case.
        """
        self._call = call
        self.window = window
        self.compression = ""
        self._key = key
        self._most = most
        self._flush = flush
        self._large = large

    def close(self):
        """The call is over: nothing more is sent, and nothing asked of it."""
        self.over = True
        self._call = None

    def feed(self, source not None, batches not None, Py_ssize_t count):
        """Sends what there is room for, at most ``count`` batches of an iterator.

        ``source`` encodes them. True: that were all, and the channel is finished. False: there is
        no room. None: there is room still, and it is others' turn; or the next one is ``slow``.
        """
        cdef PyObject *found
        cdef object batch
        cdef bint posted = False
        self._check()
        try:
            for _ in range(count):
                if not (self.window.is_open() and self.ready()):
                    return False
                found = PyIter_Next(batches)
                if found == NULL:
                    if not self.over:
                        self._call.finish()
                    return True
                batch = <object> found
                Py_DECREF(batch)
                posted |= self.push(source, batch)
                if self.slow is not None:
                    return None
        finally:
            if posted:
                self._flush()
        return None

    def give(self, source not None, batch):
        """Sends one batch, whether or not there is room, unless it is ``slow``."""
        self._check()
        if self.push(source, batch):
            self._flush()

    def give_encoded(self, Encoded encoded not None):
        """Sends the payload of a batch, whether or not there is room."""
        self._check()
        if self.push_encoded(encoded):
            self._flush()

    @property
    def may_send(self):
        """Whether who sends the batches has something to do: there is room, or the call is over.

        If it is the channel that has none, the call hears of it.
        """
        self._check()
        return self.can_send()

    cdef bint can_send(self) except -1:
        return self.over or (self.window.is_open() and self.ready())

    cdef int _check(self) except -1:
        if self.window is None:
            raise TypeError("a call without a window sends no batches")
        return 0

    cdef bint ready(self) except -1:
        """Whether the channel has room; otherwise the call hears of it."""
        cdef SenderBase row = self.row
        if self.over:
            return True
        if not self.expects and row is not None and row.error is None and row.room():
            return True
        return self._call.writable

    cdef bint push(self, object source, object batch) except -1:
        """Sends one batch; whether it was queued for ``flush``."""
        cdef BatchEncoder encoder = source.encoder
        cdef Encoded encoded = None
        if not self.compression:
            encoded = encoder.plain(batch)
        if encoded is None or encoded.size > self._most:
            source.compression = self.compression
            if encoder.slow(batch, self.compression):
                self.slow = batch
                return False
            encoded = source.encode(batch)
        return self.push_encoded(encoded)

    cdef bint push_encoded(self, Encoded encoded) except -1:
        cdef Py_ssize_t number
        cdef bint posted = False
        number = self.window.send(encoded.size)
        if self.over:
            return False
        # What the service does not want any more is dropped: its status says why.
        if (
            encoded.size > self._most or self.row is None or self.row.error is not None
            or self.row.post(encoded.buffers, ((self._key, b"%d" % number),)) is None
        ):
            self._call.send(encoded, number)
        else:
            self.moved += 1
            posted = True
        if not self.over and (self.expects or encoded.size >= self._large):
            self._call.fed(encoded.size)
        return posted


@cython.final
@cython.auto_pickle(False)
cdef class SendWaker:
    """What wakes the task that feeds a call: it knows the sender, but nobody who reads."""

    def wake(self):
        """Lets the task go on, if it waits and may."""
        cdef Waiter waiter = self._waiter
        if waiter is not None and not waiter.woken and self._sender.can_send():
            waiter.woken = True
            self._stepper.step(waiter)

    def wait(self, BatchSender sender not None, loop not None, stepper not None):
        """What to await, once, after ``may_send`` of ``sender`` was found to be False.

        ``stepper.step(waiter)`` has the task step.
        """
        sender._check()
        self._sender = sender
        self._stepper = stepper
        self._waiter = Waiter(loop)
        return self._waiter
