"""Bytes between two processes by memory that both map, where a Unix socket connects them.

A Unix socket takes pages for what it is given, gives them back once it is read, and takes others
for what comes next: they are cold each time, and that takes longer than all else that is done for
a large message. Here the same few pages are written and read in turn, by a ring for each direction.

One side makes them and passes their descriptor with a byte of its stream; a peer that knows nothing
of it does not see it. A peer that does goes on in its ring, and then so does who made them, each
after any byte of its stream: ``since`` says after how many. From there on a byte of the socket is a
wake-up byte: it wakes who sleeps, and says nothing else. The end is still the socket's.

The peer can write what it likes, at any time. So what is read is copied first, its positions are
checked, and the size of the memory is sealed: it cannot be cut off below who uses it.
"""

import errno as codes
import fcntl
import os

cimport cython
from cpython.exc cimport PyErr_SetFromErrno
from libc.errno cimport EAGAIN, EINTR, ENOBUFS, ETOOMANYREFS, errno
from libc.stdint cimport uint8_t, uint64_t

from aqueduct._speedups.base.buffers cimport copy_uncounted, page_in

from aqueduct.errors import RemoteProtocolError

__all__ = ["LARGEST", "SMALLEST", "Rings", "supported"]

cdef extern from *:
    """
    #include <string.h>
    #include <sys/mman.h>
    #include <sys/socket.h>
    #include <unistd.h>
    #ifdef __linux__
    #include <sys/vfs.h>
    #endif

    #ifndef MSG_NOSIGNAL
    #define MSG_NOSIGNAL 0
    #endif

    #define LOAD(place) __atomic_load_n(&(place), __ATOMIC_ACQUIRE)
    #define STORE(place, value) __atomic_store_n(&(place), value, __ATOMIC_RELEASE)
    #define SWAP(place, value) __atomic_exchange_n(&(place), value, __ATOMIC_SEQ_CST)
    #define FENCE() __atomic_thread_fence(__ATOMIC_SEQ_CST)

    /* One byte, and a descriptor if it is not below zero. */
    static ssize_t send_one(int fd, unsigned char byte, int passed) {
        union { char room[CMSG_SPACE(sizeof(int))]; struct cmsghdr align; } control;
        struct iovec part = {&byte, 1};
        struct msghdr message;
        memset(&message, 0, sizeof(message));
        message.msg_iov = &part;
        message.msg_iovlen = 1;
        if (passed >= 0) {
            memset(&control, 0, sizeof(control));
            message.msg_control = control.room;
            message.msg_controllen = sizeof(control.room);
            struct cmsghdr *head = CMSG_FIRSTHDR(&message);
            head->cmsg_level = SOL_SOCKET;
            head->cmsg_type = SCM_RIGHTS;
            head->cmsg_len = CMSG_LEN(sizeof(int));
            memcpy(CMSG_DATA(head), &passed, sizeof(int));
        }
        return sendmsg(fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
    }

    /* Whether its pages come from a pool that may be empty: touching them could end the process. */
    static int is_huge(int fd) {
    #ifdef __linux__
        struct statfs found;
        return fstatfs(fd, &found) != 0 || (unsigned int) found.f_type == 0x958458F6u;
    #else
        return 0;
    #endif
    }

    /* The first descriptor that came, -1 if none did; others are closed. */
    static int passed_in(void *control, size_t size) {
        struct msghdr message;
        int found = -1;
        memset(&message, 0, sizeof(message));
        message.msg_control = control;
        message.msg_controllen = size;
        for (struct cmsghdr *head = CMSG_FIRSTHDR(&message); head;
             head = CMSG_NXTHDR(&message, head)) {
            if (head->cmsg_level != SOL_SOCKET || head->cmsg_type != SCM_RIGHTS)
                continue;
            size_t count = (head->cmsg_len - CMSG_LEN(0)) / sizeof(int);
            for (size_t k = 0; k < count; k++) {
                int fd;
                memcpy(&fd, CMSG_DATA(head) + k * sizeof(int), sizeof(int));
                if (found < 0)
                    found = fd;
                else
                    close(fd);
            }
        }
        return found;
    }
    """
    uint64_t LOAD(uint64_t place) nogil
    int LOAD_INT "LOAD"(int place) nogil
    void STORE(uint64_t place, uint64_t value) nogil
    void STORE_INT "STORE"(int place, int value) nogil
    int SWAP(int place, int value) nogil
    void FENCE() nogil
    ssize_t send_one(int fd, uint8_t byte, int passed) nogil
    int passed_in(void *control, size_t size) nogil
    int is_huge(int fd) nogil
    int PROT_READ, PROT_WRITE, MAP_SHARED, MAP_PRIVATE, MAP_ANONYMOUS, MAP_FIXED
    void *MAP_FAILED
    void *mmap(void *place, size_t size, int protection, int flags, int fd, ssize_t offset) nogil
    int close(int fd) nogil
    int munmap(void *place, size_t size) nogil

cdef enum:
    PAGE = 4096             # of the header; positions and data have pages of their own
    # Copied before it is told: the other side works on it meanwhile.
    PIECE = 131072

cdef uint64_t MAGIC = 0x31474E4952515141    # "AQQRING1" where the lowest byte comes first
cdef uint64_t NOT_YET = 0xFFFFFFFFFFFFFFFF

SMALLEST = 64 << 10
LARGEST = 1 << 30
SEALS = 0
if hasattr(fcntl, "F_ADD_SEALS"):
    SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def supported():
    """Whether this system has memory whose size can be sealed."""
    return bool(SEALS) and hasattr(os, "memfd_create")


@cython.final
@cython.auto_pickle(False)
cdef class Rings:
    """Memory of two processes: positions, and a ring of ``capacity`` bytes for each direction.

    ``Rings(capacity)`` makes it: whole pages of 4 KiB. Raises OSError if the system gives none.
    ``fileno()`` is to be passed to the peer; then ``passed()`` closes it here.
    """

    def __init__(self, Py_ssize_t capacity):
        if capacity % PAGE or not SMALLEST <= capacity <= LARGEST:
            raise ValueError(
                f"capacity: {capacity}; whole pages of {PAGE} bytes are needed, from {SMALLEST} to "
                f"{LARGEST} bytes"
            )
        if not supported():
            raise OSError(codes.ENOSYS, "this system has no memory whose size can be sealed")
        self._free()
        cdef int fd = os.memfd_create("aqueduct-rings", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, PAGE + 2 * capacity)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
            self._map(fd, capacity, 0)
        except BaseException:
            os.close(fd)
            raise
        self._fd = fd
        cdef Header *header = <Header *> self._memory
        cdef int way
        header.magic = MAGIC
        header.capacity = <uint64_t> capacity
        for way in range(2):
            header.ways[way].since = NOT_YET
            header.ways[way].reader_waits = 1

    @classmethod
    def of_peer(cls, int fd, Py_ssize_t limit):
        """Memory that the peer has passed, ``limit`` bytes for each direction at most.

        ``fd`` is still the caller's. Raises ValueError if it is not such memory.
        """
        if not supported():
            raise ValueError("this system has no memory whose size can be sealed")
        try:
            if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & SEALS != SEALS:
                raise ValueError("its size is not sealed")
            size = os.fstat(fd).st_size
        except OSError as error:
            raise ValueError(f"it is no memory: {error.strerror}") from error
        if is_huge(fd):
            raise ValueError("its pages are of a pool that may be empty")
        cdef Py_ssize_t capacity = (size - PAGE) >> 1
        if capacity % PAGE or not SMALLEST <= capacity <= LARGEST or size != PAGE + 2 * capacity:
            raise ValueError(f"it has {size} bytes")
        if capacity > limit:
            raise ValueError(f"it has {capacity} bytes for each direction; {limit} is the limit")
        cdef Rings self = Rings.__new__(Rings)
        self._map(fd, capacity, 1)
        cdef Header *header = <Header *> self._memory
        if header.magic != MAGIC or header.capacity != <uint64_t> capacity:
            raise ValueError("it does not begin as rings do")
        return self

    def __cinit__(self):
        self._fd = -1

    def __dealloc__(self):
        self._free()

    def fileno(self):
        """The descriptor; -1 once it was passed."""
        return self._fd

    def passed(self):
        """The peer has a descriptor of its own."""
        close_descriptor(self._fd)
        self._fd = -1

    def left_behind(self):
        """In a forked child: memory of the child's own is in this place from now on.

        The parent goes on with what was here, so the child must not write to it. Raises OSError.
        """
        cdef void *memory
        self.passed()
        if self._memory == NULL:
            return
        memory = mmap(
            self._memory,
            <size_t> (PAGE + 2 * self.capacity),
            PROT_READ | PROT_WRITE,
            MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED,
            -1,
            0,
        )
        if memory == MAP_FAILED:
            PyErr_SetFromErrno(OSError)

    @property
    def waits(self):
        """Whether there was no room, and the peer has not yet said that there is some."""
        return LOAD_INT(self._out.writer_waits) != 0

    cdef int _map(self, int fd, Py_ssize_t capacity, int out) except -1:
        cdef void *memory
        cdef size_t size = <size_t> (PAGE + 2 * capacity)
        with nogil:
            memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0)
        if memory == MAP_FAILED:
            PyErr_SetFromErrno(OSError)
        self._memory = memory
        self.capacity = capacity
        self._out = (<Header *> memory).ways + out
        self._in = (<Header *> memory).ways + (1 - out)
        self._out_data = <uint8_t *> memory + PAGE + out * capacity
        self._in_data = <uint8_t *> memory + PAGE + (1 - out) * capacity
        return 0

    cdef void _free(self) noexcept:
        close_descriptor(self._fd)
        self._fd = -1
        if self._memory != NULL:
            munmap(self._memory, <size_t> (PAGE + 2 * self.capacity))
            self._memory = NULL

    # For the writer.

    cdef bint agreed(self) noexcept:
        """Whether the peer goes on here, so that this side may."""
        return self.begun or LOAD(self._in.since) != NOT_YET

    cdef void begin(self) noexcept:
        """What is written from now on goes this way."""
        if not self.begun:
            self.begun = True
            STORE(self._out.since, self.gone)

    cdef Py_ssize_t put(self, const uint8_t *start, Py_ssize_t size, int fd) except -1:
        """Writes up to ``size`` bytes; wakes a reader that sleeps."""
        cdef Positions *way = self._out
        cdef uint64_t held
        cdef Py_ssize_t done = 0, part, place
        while done < size:
            held = self._written - LOAD(way.head)
            if held > <uint64_t> self.capacity:
                raise OSError(codes.EPROTO, "the peer broke the memory that is shared with it")
            place = <Py_ssize_t> (self._written % <uint64_t> self.capacity)
            part = min(self.capacity - <Py_ssize_t> held, size - done, PIECE, self.capacity - place)
            if part == 0:
                break
            if self._written < <uint64_t> self.capacity:
                page_in(self._out_data + place, part)  # the first time round
            copy_uncounted(self._out_data + place, start + done, part)
            done += part
            self._written += <uint64_t> part
            STORE(way.tail, self._written)
            FENCE()
            if LOAD_INT(way.reader_waits) and SWAP(way.reader_waits, 0):
                self._wake_peer(fd)
        return done

    cdef bint full(self) noexcept:
        """Room is to wake this side; False: there is some already."""
        STORE_INT(self._out.writer_waits, 1)
        FENCE()
        if self._written - LOAD(self._out.head) == <uint64_t> self.capacity:
            return True
        STORE_INT(self._out.writer_waits, 0)
        return False

    # For the reader.

    cdef bint reached(self, uint64_t heard) noexcept:
        """Whether all that was to come by the socket has, of which ``heard`` bytes were read."""
        return heard >= LOAD(self._in.since)

    cdef Py_ssize_t surplus(self, uint64_t heard) noexcept:
        """How many of ``heard`` bytes were none of the stream, but wake-up bytes."""
        cdef uint64_t since = LOAD(self._in.since)
        return <Py_ssize_t> (heard - since) if heard > since else 0

    cdef Py_ssize_t take(self, uint8_t *target, Py_ssize_t size, int fd) except -1:
        """Reads up to ``size`` bytes; wakes a writer that waits for room."""
        cdef Positions *way = self._in
        cdef uint64_t ready
        cdef Py_ssize_t done = 0, part, place
        while done < size:
            ready = LOAD(way.tail) - self._read
            if ready > <uint64_t> self.capacity:
                raise RemoteProtocolError(
                    f"its position in shared memory is {ready} bytes ahead of what was read; there "
                    f"is room for {self.capacity}"
                )
            place = <Py_ssize_t> (self._read % <uint64_t> self.capacity)
            part = min(<Py_ssize_t> ready, size - done, PIECE, self.capacity - place)
            if part == 0:
                break
            copy_uncounted(target + done, self._in_data + place, part)
            done += part
            self._read += <uint64_t> part
            STORE(way.head, self._read)
            FENCE()
            if LOAD_INT(way.writer_waits):
                # Half of the ring is worth waking up for.
                if LOAD(way.tail) - self._read <= <uint64_t> (self.capacity >> 1):
                    if SWAP(way.writer_waits, 0):
                        self._wake_peer(fd)
        return done

    cdef bint sleeps(self) noexcept:
        """The next byte is to wake this side; False: there is one already."""
        STORE_INT(self._in.reader_waits, 1)
        FENCE()
        return LOAD(self._in.tail) == self._read

    cdef void awake(self) noexcept:
        """Nobody need wake this side."""
        STORE_INT(self._in.reader_waits, 0)

    cdef int _wake_peer(self, int fd) except -1:
        self.begin()  # or it would be a byte of the stream
        send_byte(fd, WAKE_BYTE, -1)
        return 0


cdef void close_descriptor(int fd) noexcept:
    """One system call, whose failure changes nothing: it cannot raise."""
    if fd >= 0:
        close(fd)


cdef int send_byte(int fd, uint8_t byte, int passed) except -2:
    """Sends a byte, and a descriptor if there is one; -1: the socket takes no more now.

    Of wake-up bytes that is as good: there are so many before it that the peer will wake.
    """
    cdef ssize_t sent
    while True:
        with nogil:
            sent = send_one(fd, byte, passed)
        if sent >= 0:
            return 0
        if errno == EAGAIN or errno == ENOBUFS:
            return -1
        if errno == ETOOMANYREFS and passed >= 0:
            passed = -1  # too many descriptors are under way: the peer does without
        elif errno != EINTR:
            PyErr_SetFromErrno(OSError)


cdef int take_descriptor(void *control, size_t size) noexcept:
    """The descriptor that came with bytes of a socket, -1 if none did; more are closed."""
    return passed_in(control, size)
