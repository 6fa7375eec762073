"""The messages of a channel that have come: how they land, wait to be taken, and what they charge.

A step of Python for each frame, each number and each charge is what a message would cost most;
for plain messages in a row these steps are taken here, and once in Python for the run.
What is taken returns its charge, or keeps it for as long as somebody works on it (``MemoryLease``).
"""

cimport cython
from libc.stdint cimport int64_t, uint8_t, uint64_t

from aqueduct._speedups.base.accounts cimport Account
from aqueduct._speedups.base.buffers cimport AlignedBuffer, Keeper
from aqueduct._speedups.channels.decoder cimport AT_PAYLOAD, FrameDecoder
from aqueduct._speedups.channels.frames cimport MessageFrame, MessageHead, headers_of
from aqueduct._speedups.channels.receive_buffer cimport ReceiveBuffer
from aqueduct._speedups.channels.tracker cimport ReceivedNumbers

from collections import OrderedDict, deque
from types import MappingProxyType

from aqueduct.errors import LocalProtocolError

__all__ = [
    "EMPTY",
    "DirectRead",
    "MemoryLease",
    "MessageBatch",
    "ReceiveBudget",
    "ReceiveQueue",
    "Received",
]

cdef int64_t UNLIMITED = <int64_t> 1 << 62

cdef enum:
    # Of a budget: a reader that holds as much, or less, lets others go on above it meanwhile. That
    # is what a batch in one message has (Calls.fragment_bytes of Flow.receive_budget).
    PASSED_ON_SHARE = 16
    # Fewer bytes are not read straight to their place: a call for them costs more than their copy.
    LANDING_FROM = 4096
    # Where payloads are so large, the next one is not looked for in more bytes than need be.
    LARGE = 32768

# A connection may have very many channels, of which most are idle: what they do not need now has
# this in its place. It cannot be changed, so a forgotten replacement is an error.
EMPTY = MappingProxyType({})


@cython.final
@cython.freelist(1024)
@cython.auto_pickle(False)
cdef class Received:
    """One message. ``attachments`` are (half, headers) pairs, the halves those of this side's core;
    the headers are pairs, or bytes for ``frames.decode_headers``. ``raw``: those of the message as
    they are now, bytes or pairs: equal only where ``headers`` are.

    ``charge``: bytes of the budget that return when it is taken. ``dropped``: evicted by a later
    unreliable message; still in the queue, but nobody gets it.
    """

    def __init__(
        self,
        uint64_t number,
        headers,
        tuple attachments not None,
        payload,
        Py_ssize_t charge,
        *,
        bint reliable=True,
    ):
        self.number = number
        self.raw = headers
        self.attachments = attachments
        self.payload = payload
        self.charge = charge
        self.reliable = reliable

    @staticmethod
    def of(
        MessageFrame message not None,
        tuple attachments not None,
        Py_ssize_t charge,
        *,
        bint reliable=True,
    ):
        """What became of a frame. Headers that are bytes in it stay so until they are asked for."""
        cdef Received received = Received.__new__(Received)
        received.number = message.num
        received.raw = message.raw_headers
        received.attachments = attachments
        received.payload = message.payload
        received.charge = charge
        received.reliable = reliable
        return received

    @property
    def headers(self):
        """(key, value) pairs of bytes."""
        if type(self.raw) is bytes:
            self.raw = headers_of(self.raw)
        return self.raw

    def __repr__(self):
        return f"<Received: message {self.number}, {len(self.attachments)} attachments>"


@cython.final
@cython.freelist(8)
@cython.auto_pickle(False)
cdef class MessageBatch:
    """Plain messages in a row: without attachments, and of numbers that are new.

    ``messages`` are Received; ``admitted`` counts them, and one whose payload is still landing;
    ``charge`` is what these are charged in sum, below zero if an earlier one was charged too much.
    ``pending`` is what that last one is charged beside the overhead, -1 if there is none;
    ``largest`` the largest payload that was let in. ``follows`` is what comes next; ``full`` that
    it was not looked at, for want of room.
    """

    def __cinit__(self):
        self.messages = []
        self.pending = -1

    def read(
        self,
        FrameDecoder decoder not None,
        ReceivedNumbers numbers not None,
        Py_ssize_t overhead,
        int64_t room,
        int64_t pending=-1,
        bytes asked=None,
    ):
        """Takes plain messages from ``decoder``; returns ``follows``, as ``FrameDecoder.next``
        does.

        Each is added to ``numbers`` and charged with its size and ``overhead``. A MessageHead is
        admitted if its message is plain and fits ``room`` with the others, and has no header with
        the key ``asked``. The run also ends, with None, when ``charge`` is above ``room``. What is
        not plain is returned, and ``numbers`` is without it. ``pending`` is what a message that
        began to land before was charged beside the overhead; that is put right when it is whole.
        After an error the run holds what came before it.
        """
        self.pending = pending
        self.take(decoder, numbers, overhead, room, asked)
        return self.follows

    cdef int take(
        self, FrameDecoder decoder, ReceivedNumbers numbers, Py_ssize_t overhead, int64_t room,
        bytes asked
    ) except -1:
        """As ``read``, which may be gone on with as long as nothing follows and it is not full."""
        cdef object frame
        cdef MessageFrame message
        cdef MessageHead head
        cdef Received received
        cdef int64_t size
        cdef bint later
        self.full = False
        self.follows = None
        while self.charge <= room:
            frame = decoder.next()
            if type(frame) is MessageHead:
                head = <MessageHead> frame
                size = <int64_t> head.size + head.overhead
                if (
                    size + overhead > room - self.charge
                    or not is_plain(head, asked)
                    or not numbers.is_new(head.num)
                ):
                    break
                later = (
                    self._puts_off and decoder.length >= ALONE and len(self.messages) > 0
                    and decoder.buffer.left() < <uint64_t> decoder.length
                )
                if later:
                    decoder.buffer.missing = decoder.length
                else:
                    try:
                        decoder.buffer.prepare(decoder.length, None)
                    except MemoryError:
                        break  # ``FrameDecoder.admit`` says so again
                decoder.state = AT_PAYLOAD
                self.pending = size
                self.charge += size + overhead
                self.admitted += 1
                self.largest = max(self.largest, <int64_t> head.size)
                if later:
                    return 0
                continue
            if type(frame) is not MessageFrame:
                break
            message = <MessageFrame> frame
            if message.raw_attachments or not numbers.take_in(message.num):
                break
            received = Received.__new__(Received)
            received.number = message.num
            received.raw = message.raw_headers
            received.attachments = ()
            received.payload = message.payload
            received.charge = message.size + message.overhead + overhead
            received.reliable = True
            if self.pending < 0:
                self.charge += received.charge
                self.admitted += 1
            else:
                self.charge += received.charge - overhead - self.pending
                self.pending = -1
            self.messages.append(received)
        else:
            self.full = True
            return 0
        self.follows = frame
        return 0


@cython.final
@cython.auto_pickle(False)
cdef class DirectRead:
    """Where a carrier puts the bytes of one stream of the peer without a step of Python for each.

    The stream's owner opens it, and takes back what became of them (``close``). Between the two
    nothing else may happen on the connection: neither a command nor an input. ``place`` (in C) and
    ``room`` are memory for the next bytes of a large payload; ``push`` takes any that come next.
    Plain messages in a row become a ``run``; ``stopped``: what comes next needs the owner first.
    ``window``: what the peer may send of an admitted payload before more of it has landed.
    ``landing`` makes one for a decoder whose messages all need a look: it has no run.
    """

    def __cinit__(
        self,
        FrameDecoder decoder,
        Py_ssize_t overhead,
        ReceivedNumbers numbers,
        Py_ssize_t window,
        *,
        ReceiveBuffer buffer=None,
    ):
        if buffer is None and (decoder is None or numbers is None):
            raise TypeError("a DirectRead needs a decoder and numbers, or a buffer")
        self.decoder = decoder
        self.buffer = decoder.buffer if buffer is None else buffer
        self._overhead = overhead
        self._numbers = numbers
        self._window = window
        self.stopped = True

    @staticmethod
    def landing(ReceiveBuffer buffer not None):
        """One that takes the payload under way in ``buffer``, and nothing else."""
        return DirectRead(None, 0, None, 0, buffer=buffer)

    def lands(self):
        """Opens it for the payload under way. False if too little of that is missing."""
        self.open(-1, -1, None)
        self.stopped = self.wanted() == 0
        return not self.stopped

    cpdef object open(self, int64_t room, int64_t pending, bytes asked):
        """Takes messages as ``MessageBatch.read`` does; with ``room`` below zero none but the
        payload that is landing."""
        self.run = None
        if room >= 0:
            if self.decoder is None:
                raise LocalProtocolError("open: an inlet made by landing takes no messages")
            self.run = MessageBatch.__new__(MessageBatch)
            self.run.pending = pending
            self.run._puts_off = True
        self._room = room
        self._asked = asked
        self.stopped = False
        self.size = 0

    cpdef MessageBatch close(self):
        """No more bytes are taken; returns the run, or None if there could be none."""
        cdef MessageBatch run = self.run
        self.run = None
        self.stopped = True
        return run

    @property
    def idle(self):
        """All that came is a part of a payload whose rest the peer may send already.

        Then its owner has nothing to do, and need not be asked to close it.
        """
        cdef MessageBatch run = self.run
        return (
            run is not None and run.pending >= 0 and not run.admitted and not self.stopped
            and 0 < self.buffer.missing <= self._window - <Py_ssize_t> self.size
            and not self.buffer.left()
        )

    def room(self, Py_ssize_t most):
        """A view of the memory for the next bytes, at most ``most``; None if they are to be fed."""
        return None if self.wanted() == 0 else self.buffer.room(most)

    def landed(self, Py_ssize_t size):
        """``size`` bytes were written to ``room``."""
        if not 0 <= size <= self.wanted():
            raise LocalProtocolError(
                f"landed({size}): {self.wanted()} bytes of a payload are missing"
            )
        self.fill(size)

    def feed(self, data):
        """Takes the next bytes, by reference."""
        if self.stopped:
            raise LocalProtocolError("feed: the inlet is stopped")
        self.push(data)

    cdef int take_up(self) except -1:
        """More is to come by this inlet: what is whole is not taken before that."""
        cdef ReceiveBuffer buffer = self.buffer
        if buffer.missing and buffer.payload is None and not self.stopped:
            try:
                buffer.take_up()
            except MemoryError:
                pass  # with the next bytes its owner is told
        return 0

    cdef Py_ssize_t wanted(self) noexcept:
        """How many bytes ``place`` has room for; 0 if it is not worth it. Looks at fields alone."""
        cdef ReceiveBuffer buffer = self.buffer
        if (
            self.stopped or buffer.payload is None or buffer.missing < LANDING_FROM or buffer.left()
        ):
            return 0
        return buffer.missing

    cdef uint8_t *place(self) noexcept:
        """Where the next bytes of the payload go. A field, as ``wanted``."""
        return self.buffer.place

    cdef int fill(self, Py_ssize_t size) except -1:
        """``size`` bytes, no more than are ``wanted``, were written to ``place``."""
        cdef ReceiveBuffer buffer = self.buffer
        buffer.place += size
        buffer.missing -= size
        buffer.skip_outside(<uint64_t> size)
        self.size += <uint64_t> size
        if buffer.missing == 0:
            self._go_on()
        return 0

    cdef int push(self, object data) except -1:
        """Takes the next bytes, by reference."""
        cdef uint64_t before = self.buffer.fed
        self.buffer.push(data)
        self.size += self.buffer.fed - before
        self._go_on()
        return 0

    cdef int _go_on(self) except -1:
        cdef MessageBatch run = self.run
        if run is None:
            self.stopped = self.buffer.left() > 0 or self.buffer.missing == 0
            return 0
        try:
            run.take(self.decoder, self._numbers, self._overhead, self._room, self._asked)
        except Exception:
            # The decoder raises it again when its owner reads on.
            self.stopped = True
            return 0
        if run.largest:
            self.large = run.largest >= LARGE
        self.stopped = run.full or run.follows is not None
        return 0


cdef bint is_plain(MessageHead head, bytes asked) except -1:
    """Whether nobody needs to look at a message before it is whole."""
    if head.raw_attachments:
        return False
    # Of a frame that was decoded the headers are bytes. A value may hold the key, too: then the
    # message is looked at, and that is all.
    return asked is None or not head.raw_headers or asked not in <bytes?> head.raw_headers


@cython.no_gc_clear  # its end needs the account
@cython.auto_pickle(False)
cdef class ReceiveBudget:
    """What a connection's receivers share: the bytes they hold, and who waits for them.

    ``budget_used`` counts bytes admitted and not yet given back by the application, and read-ahead
    granted, which may be ``budget``, and ``channel_budget`` of one channel. ``freed`` says whether
    it fell since starved receivers were last looked at.
    ``starved``: receivers whose next message waits for room in the budget, in order; ``relieved``:
    those that got room of their own while messages wait there.
    ``place``: the receiver that goes on above the budget, or None. ``process`` counts what all
    connections hold, which may be ``process_budget``; it has a place of its own.
    ``wake``, if not None, is called, in any thread, when receivers may go on. ``work``: frames and
    attachments that were worked on in this turn; see Flow.wake_up.
    """

    def __cinit__(self):
        self.relieved = {}
        self.starved = OrderedDict()
        self.process = self.shown = Account()
        self.process_budget = UNLIMITED

    def __dealloc__(self):
        self.process.used -= self.budget_used

    def fits_process(self, int64_t size):
        """Whether ``size`` bytes fit into what the process allows this connection."""
        return size <= self.free_in_process()

    def reserve(self, int64_t size):
        """Charges ``size`` bytes that the peer may send; below zero: no more."""
        self.spend(size)

    def detach(self):
        """The connection is over: the process counts its bytes no more."""
        cdef Account process = self.process
        cdef Account own
        if self.place is not None:
            (<ReceiveQueue?> self.place).leave_place()
        process.waiting.pop(self, None)
        own = Account()
        own.used = self.budget_used
        self.process = own
        process.spend(-self.budget_used)
        if process.waiting or process.pulling:
            process.notify()  # fewer wait

    cdef bint is_awaited(self) except -1:
        """Whether somebody waits for room that may have come back."""
        return len(self.relieved) > 0 or len(<dict> self.starved) > 0

    cdef int spend(self, int64_t size) except -1:
        """Charges ``size`` bytes here and to the process; below zero: they return."""
        self.budget_used += size
        if size < 0:
            self.freed = True
        return self.process.spend(size)

    cdef int64_t free(self) except? -1:
        """How many bytes fit into both budgets; below zero if they are exceeded."""
        return min(self.budget - self.budget_used, self.free_in_process())

    cdef int64_t free_in_process(self) except? -1:
        """While other connections wait, one holds no more than half of the process's budget."""
        cdef Account process = self.process
        cdef int64_t free = self.process_budget - process.used
        cdef Py_ssize_t waiting = len(process.waiting)
        if waiting > 1 or (waiting == 1 and self not in process.waiting):
            free = min(free, (self.process_budget >> 1) - self.budget_used)
        return free

    cdef int tell(self) except -1:
        """Room came back outside of what the connection does by itself."""
        if self.wake is not None and self.is_awaited():
            self.wake()
        return 0


@cython.final
@cython.freelist(64)
@cython.auto_pickle(False)
cdef class ReceiveQueue:
    """The messages of one channel that wait to be taken; its length is their number.

    ``charged``: the bytes admitted here and not yet taken, in ``outstanding`` messages.
    ``waiting``: streams whose next message was not admitted, in order; when these fall there is
    news for them. ``assured``: one message finds room whatever the budgets. For the application has
    the handle, and can make that room. What only waits for its handle has no such claim.
    ``ended``: nothing more comes. ``evictions`` counts messages that gave way to later ones.

    What is taken returns its charge. If the queue ``keeps``, the charge goes to a ``lease``, or
    returns by ``settle``; ``held`` is the sum of the leases. Where the reader tells when it waits
    (``told``), the queue is ``wanted`` while it does, by ``reader``.
    ``pledged``: bytes charged for the rest of a batch that comes in several messages.

    ``placement``: a Placement; with a ``placement_key`` it is asked for messages with a header of
    this key alone. ``announce``: an Announcement, asked for messages with that header.
    """

    def __cinit__(self, ReceiveBudget budget not None, bint assured=False):
        self.budget = budget
        self.assured = assured
        self.messages = self._unreliable = ()
        self.waiting = EMPTY

    def __len__(self):
        return len(self.messages) - self._evicted

    def __iter__(self):
        return iter([received for received in self.messages if not (<Received?> received).dropped])

    @property
    def owed(self):
        """Bytes of messages that were taken and belong to no lease yet: parts of a batch."""
        return self._owed

    @property
    def growing(self):
        """Whether the rest of a message, or of a batch, is still to come."""
        return (
            self.pledged > 0 or self._owed > 0
            or self.outstanding > <Py_ssize_t> len(self) + self._owed_messages
        )

    cdef int64_t left(self) except? -1:
        """Bytes of messages that can be admitted without asking for each; below zero: none."""
        cdef ReceiveBudget budget = self.budget
        if self.waiting or (self.placement is not None and self.placement_key is None):
            return -1  # or they would pass by what waits for ever
        return min(budget.channel_budget - self.charged, budget.free())

    @property
    def crowded(self):
        """Whether the connection's other receivers hold half of its budget."""
        cdef ReceiveBudget budget = self.budget
        return budget.budget_used - self.charged - self.held >= budget.budget >> 1

    def add(self, MessageBatch run not None):
        """Queues and charges what was read; whether there was nothing to take before."""
        cdef bint first = not self.messages
        self.outstanding += run.admitted
        if run.charge:
            self.count(run.charge)
        if not run.messages:
            return False
        self.messages = self.messages or deque()
        self.messages.extend(run.messages)
        if not self.told:
            self.leave_place()  # it is whole: others may go on
        return first

    def push(self, Received received not None):
        """Queues one message, charged before; whether there was nothing to take before."""
        cdef bint first = not self.messages
        self.messages = self.messages or deque()
        self.messages.append(received)
        if not received.reliable:
            self._unreliable = self._unreliable or deque()
            self._unreliable.append(received)
        if not self.told:
            self.leave_place()  # it is whole: others may go on
        return first

    def evict(self, list evicted not None):
        """Drops the oldest unreliable message and adds it to ``evicted``; False: there is none."""
        cdef Received oldest
        if not self._unreliable:
            return False
        oldest = <Received?> self._unreliable.popleft()
        self._unreliable = self._unreliable or ()
        oldest.dropped = True
        oldest.payload = b""
        evicted.append(oldest)
        self.evictions += 1
        self.charge(-oldest.charge, -1)
        self._evicted += 1
        if self._evicted * 2 > <Py_ssize_t> len(self.messages):
            self.messages = deque(self) if len(self) else ()
            self._evicted = 0
        return True

    def drop(self):
        """Empties the queue; returns what nobody gets."""
        cdef list dropped = list(self)
        cdef Received received
        self.messages = self._unreliable = ()
        self._evicted = 0
        for received in dropped:
            self.charge(-received.charge, -1)
        return dropped

    def end(self):
        """Nothing more comes."""
        self.ended = True
        if self.pledged:
            self.count(-self.pledged)  # the rest of a batch
            self.pledged = 0
        if not (self.outstanding or self.held):
            self.leave_place()

    def place(self, MessageHead head not None):
        """Where a message is to land; None: anywhere. Raises what the hook raises."""
        cdef object key = self.placement_key
        if self.placement is None or (key is not None and key not in dict(head.headers)):
            return None
        return self.placement(head.headers, head.size)

    def assure(self):
        """The application has the handle now."""
        self.assured = True
        if self.waiting:
            self.budget.relieved[self] = None

    cpdef object charge(self, int64_t size, Py_ssize_t messages=0):
        """Charges ``size`` bytes, of so many messages more; below zero: they return."""
        self.count(size)
        if messages < 0:
            self.release(-messages)
        else:
            self.outstanding += messages

    cdef int count(self, int64_t size) except -1:
        """Charges ``size`` bytes, here and in the budget; below zero: they return."""
        cdef ReceiveBudget budget = self.budget
        self.charged += size
        budget.spend(size)
        if size < 0 and self.waiting:
            budget.relieved[self] = None
        return 0

    # Each in one step: connections in other threads charge the same process meanwhile.

    def charge_within(self, int64_t size):
        """Charges a message of ``size`` bytes if it fits into both budgets; whether it does."""
        if size > self.budget.free():
            return False
        self.charge(size, 1)
        return True

    def charge_above(self, int64_t size):
        """Charges a message, and takes the place above each budget that has no room for it.

        False, and nothing is changed, if such a place is another's.
        """
        if not self.take_place(size):
            return False
        self.charge(size, 1)
        return True

    cdef bint take_place(self, int64_t size) except -1:
        """Takes the place above each budget that has no room for ``size`` bytes, if it is free."""
        cdef ReceiveBudget budget = self.budget
        cdef Account process = budget.process
        cdef bint here = budget.budget_used + size > budget.budget
        cdef bint everywhere = size > budget.free_in_process()
        if here and budget.place is not None and budget.place is not self:
            return False
        if everywhere and process.place is not None and process.place is not self:
            return False
        if here:
            budget.place = self
        if everywhere:
            process.place = self
        return True

    cpdef Received take(self):
        """The next message, or None if there is none now."""
        cdef Received received
        cdef object messages = self.messages
        while messages:
            received = <Received?> messages.popleft()
            if not messages:
                self.messages = ()
            if received.dropped:
                self._evicted -= 1
                continue
            if not received.reliable:
                self._unreliable.popleft()
                self._unreliable = self._unreliable or ()
            if self.keeps:
                self._owed += received.charge
                self._owed_messages += 1
            else:
                self.count(-received.charge)
                self.release(1)
            return received
        return None

    # Charges that are kept beyond the taking

    cpdef MemoryLease lease(self, object payload):
        """The charge of what was taken since the last lease, for as long as somebody works on it.

        It returns with the lease, or with the memory of ``payload``, if that is an AlignedBuffer.
        The channel has room again, its connection has not.
        """
        cdef MemoryLease lease = MemoryLease.__new__(MemoryLease)
        cdef Account account = self.budget.shown
        cdef AlignedBuffer buffer
        if self._reading is None:
            self._reading = DirectReading.__new__(DirectReading)
            self._reading.queue = self
        lease._reading = self._reading
        lease._account = account
        lease._charge = self._owed
        self.held += self._owed
        self.charged -= self._owed
        self.outstanding -= self._owed_messages
        self._owed = self._owed_messages = 0
        if self.waiting:
            self.budget.relieved[self] = None
        if type(payload) is AlignedBuffer and (<AlignedBuffer> payload).keeper is None:
            buffer = <AlignedBuffer> payload
            buffer.keeper = lease
            lease._size = buffer.size
            account.alive += buffer.size
            account.lent += buffer.size
            self._held_alive += buffer.size
        return lease

    cpdef object settle(self):
        """What was taken since the last lease returns its charge."""
        cdef Py_ssize_t messages = self._owed_messages
        cdef int64_t owed = self._owed
        if messages:
            self._owed = self._owed_messages = 0
            self.count(-owed)
            self.release(messages)

    def let_go(self):
        """Whoever read here is done: what was taken, and not given back, returns its charge."""
        cdef int64_t held = self.held
        self.keeps = self.wanted = False
        self.settle()
        if self._reading is not None:
            self._reading.queue = None
            self._reading = None
        self.budget.shown.lent -= self._held_alive
        self.held = self._held_alive = 0
        if held:
            self.budget.spend(-held)
        self.leave_place()
        self.budget.tell()

    cdef int release(self, Py_ssize_t messages) except -1:
        self.outstanding -= messages
        if self.outstanding == 0 and self.held == 0:
            self.leave_place()
        return 0

    # Above the budget

    def want(self, bint wanted, reader=None):
        """Whether ``reader``, anything that compares, waits for the next message; in any thread.

        If that reader holds the batch above the budget, it gives it back only after this message.
        So the place becomes free.
        """
        cdef ReceiveBudget budget = self.budget
        cdef object place
        self.wanted = wanted
        if not wanted:
            return
        self.reader = reader
        for place in (budget.place, budget.process.place):
            if (
                place is not None and place is not self and not (<ReceiveQueue?> place).wanted
                and (<ReceiveQueue> place).told and (<ReceiveQueue> place).reader == reader
            ):
                (<ReceiveQueue> place).leave_place()
        if self.waiting:
            budget.relieved[self] = None
            budget.tell()

    def pass_on(self):
        """Its reader waits for the peer, and may so for long: others go on above the budget.

        Just these may be what the peer waits for. A reader that holds much stays alone above the
        budget, until it has not given back for ``Timing.stall_deadline``; so does one that is above
        the budget of the process.
        """
        cdef ReceiveBudget budget = self.budget
        if budget.place is not self or self.pledged or self._owed or not self.held:
            return
        if self.held <= budget.budget // PASSED_ON_SHARE:
            budget.place = None
            budget.freed = True
            budget.tell()

    cpdef object leave_place(self):
        """Gives up the place above the budget to others."""
        cdef ReceiveBudget budget = self.budget
        cdef Account process = budget.process
        if budget.place is self:
            budget.place = None
            budget.freed = True
            budget.tell()
            if process.pulling:
                process.notify()
        if process.place is self:
            process.place = None
            if process.waiting or process.pulling:
                process.notify()


@cython.final
@cython.auto_pickle(False)
cdef class DirectReading:
    pass


@cython.final
@cython.no_gc  # no way leads back to it from what it refers to, once its reader is done
@cython.auto_pickle(False)
cdef class MemoryLease(Keeper):
    """The charge of a batch that somebody works on; made by ``ReceiveQueue.lease``.

    It returns by ``give_back``, in any thread, or once neither the lease nor the buffer exists.
    """

    @property
    def size(self):
        """Bytes that are charged by it."""
        return 0 if self._reading is None or self._reading.queue is None else self._charge

    def __dealloc__(self):
        self.give_back()

    cpdef object give_back(self):
        """The batch is worked on no more; without effect the second time."""
        cdef DirectReading reading = self._reading
        cdef ReceiveQueue queue
        cdef ReceiveBudget budget
        if reading is None:
            return
        self._reading = None
        queue = reading.queue
        if queue is None:
            return
        budget = queue.budget
        queue.held -= self._charge
        queue._held_alive -= self._size
        self._account.lent -= self._size
        budget.spend(-self._charge)
        queue.release(0)
        if queue.waiting:
            budget.relieved[queue] = None
        elif queue.held == 0 and queue.ended:
            queue._reading = None  # nothing more comes: it need not lead back here
        budget.tell()

    def unpack(self, int64_t size, reader=None, bint insist=False):
        """Charges the ``size`` bytes that the batch takes beside its payload, once it is unpacked.

        False, and nothing is charged, if the budgets have no room for them. One batch may exceed
        them at a time, and any that has to ``insist``; ``reader`` is as for ``want``. The charge
        outlives the payload, which is not what the batch points into.
        """
        cdef ReceiveQueue queue = None if self._reading is None else self._reading.queue
        cdef bint wanted
        if queue is None or self._unpacked:
            return True
        if not insist and size > queue.budget.free():
            wanted = queue.wanted
            queue.want(True, reader)  # what it has above the budget, it gives back after this one
            queue.wanted = wanted
            if self._unpacked:  # ``want`` gave back room, and this batch was charged with it
                return True
            if not queue.take_place(size):
                return False
        self._unpacked = True
        self._change(size)
        return True

    cdef int _change(self, int64_t by) except -1:
        cdef ReceiveQueue queue = self._reading.queue
        self._charge += by
        queue.held += by
        queue.budget.spend(by)
        return 0

    cdef int freed(self) except -1:
        cdef int64_t size = self._size
        cdef ReceiveQueue queue
        if self._unpacked and self._reading is not None and self._reading.queue is not None:
            queue = self._reading.queue
            queue._held_alive -= size
            self._account.lent -= size
            self._change(-size)
            queue.budget.tell()
        else:
            self.give_back()
        self._size = 0
        self._account.alive -= size
        return 0
