"""Bytes on their way to the kernel, gathered: one call for many buffers, and nothing joined.

``vmsplice`` is no way to save the kernel's copy: nothing tells when the memory may be used again,
and over TCP on loopback it costs two thirds more.
"""

import os

cimport cython
from cpython.bytes cimport PyBytes_CheckExact, PyBytes_FromStringAndSize
from cpython.exc cimport PyErr_CheckSignals
from libc.errno cimport EAGAIN, EINTR, errno
from libc.stdint cimport uint8_t, uint64_t
from libc.stdlib cimport free, realloc
from libc.string cimport memcpy, memmove, memset

from aqueduct._speedups.base.buffers cimport BufferSlice, GatherList
from aqueduct._speedups.base.buffers cimport byte_view, count_copied, memory_of
from aqueduct._speedups.io.shared_ring cimport Rings, send_byte
from aqueduct._speedups.io.tls_records cimport Records


cdef extern from "<sys/socket.h>" nogil:
    struct msghdr:
        iovec *msg_iov
        size_t msg_iovlen
    Py_ssize_t sendmsg(int fd, const msghdr *message, int flags)

__all__ = ["IovecWriter"]

cdef enum:
    # Parts that one call of the kernel gets; every system takes so many.
    PARTS = 512
    # An arena above this is given back once it is empty.
    ARENA_KEPT = 16384


@cython.final
@cython.auto_pickle(False)
cdef class IovecWriter:
    """Bytes on their way to the kernel: small buffers are joined, large ones stay as they are.

    ``size`` counts what was added since all of it had left, ``left`` what has not left yet.
    ``written`` says how many bytes of payload are in it, and of whom.
    """

    def __cinit__(self):
        self._owners = []
        self.written = []

    def __dealloc__(self):
        free(self._parts)
        free(self._arena)

    def add(self, buffer):
        """Appends a contiguous buffer."""
        cdef Py_ssize_t size = 0
        cdef const uint8_t *start
        if not PyBytes_CheckExact(buffer) and type(buffer) is not BufferSlice:
            buffer = byte_view(buffer)
        start = memory_of(buffer, &size)
        self.put(buffer, start, size)

    def extend(self, buffers):
        """Appends each of ``buffers``."""
        for buffer in buffers:
            self.add(buffer)

    @property
    def buffers(self):
        """All of it that has not left, as bytes and memoryviews."""
        cdef Py_ssize_t index, whole = 0, offset = self.offset
        cdef Part *part
        cdef list found = []
        cdef object owner
        for index in range(self._first, self._count):
            part = self._parts + index
            owner = self._owners[index]
            if owner is None:
                found.append(
                    PyBytes_FromStringAndSize(
                        <const char *> self._arena + part.place + offset, part.size - offset
                    )
                )
            elif not offset and part.size == len(owner):
                found.append(memoryview(owner) if type(owner) is BufferSlice else owner)
            else:
                offset += part.start - memory_of(owner, &whole)
                found.append(memoryview(owner)[offset:offset + part.size])
            offset = 0
        return found

    def send(self, int fd):
        """Has the kernel take what it takes now; returns how many bytes. Raises OSError."""
        return max(self.give(fd, NULL, 0), 0)

    def share(self, Rings rings):
        """What follows goes by this memory; None: nothing follows.

        Memory that was made here is passed to the peer with the next byte, and used once the peer
        does.
        """
        self._rings = rings
        if rings is not None:
            rings.gone = self._gone
            if rings.fileno() < 0:
                rings.begin()

    @property
    def shares(self):
        """Bytes go by memory: it is no event of the socket that there is room."""
        return self._rings is not None and self._rings.begun

    @property
    def waits(self):
        """There was no room in memory, and the peer has not yet said that there is some."""
        return self.shares and self._rings.waits

    def clear(self):
        """Drops everything."""
        self.left = 0
        self.size = 0
        self._begin()

    # For the other compiled modules.

    cdef int put(self, object owner, const uint8_t *start, Py_ssize_t size) except -1:
        """Appends bytes of ``owner``."""
        if size < COALESCE_BELOW:
            self.put_head(start, size)
            count_copied(size)
            return 0
        self._grow(0)
        self._parts[self._count] = Part(start, 0, size)
        self._count += 1
        self._owners.append(owner)
        self.size += size
        self.left += size
        return 0

    cdef int put_head(self, const uint8_t *start, Py_ssize_t size) except -1:
        """Appends a copy of bytes that are not payload."""
        if size == 0:
            return 0
        self._grow(size)
        memcpy(self._arena + self._filled, start, <size_t> size)
        if self._count and self._parts[self._count - 1].start == NULL:
            self._parts[self._count - 1].size += size
        else:
            self._parts[self._count] = Part(NULL, self._filled, size)
            self._count += 1
            self._owners.append(None)
        self._filled += size
        self.size += size
        self.left += size
        return 0

    cdef int put_before(self, const uint8_t *start, Py_ssize_t size) except -1:
        """Puts a copy of bytes before all that is here, none of which has left."""
        self._grow(size)
        memcpy(self._arena + self._filled, start, <size_t> size)
        memmove(self._parts + 1, self._parts, <size_t> self._count * sizeof(Part))
        self._parts[0] = Part(NULL, self._filled, size)
        self._owners.insert(0, None)
        self._count += 1
        self._filled += size
        self.size += size
        self.left += size
        return 0

    cdef int put_run(self, GatherList scatter, Py_ssize_t size) except -1:
        """Appends the first ``size`` bytes that wait in ``scatter``, which has them."""
        cdef Py_ssize_t length = 0, part
        cdef const uint8_t *start
        cdef object item
        while size > 0:
            item = scatter.items[scatter.head]
            start = memory_of(item, &length) + scatter.offset
            part = min(length - scatter.offset, size)
            self.put(item, start, part)
            scatter.skip(part)
            size -= part
        return 0

    cdef int seal(self, Records records) except -1:
        """Encrypts what is here, from where it lies. If that fails, nothing is here."""
        records.frame(self)
        if records.plain:
            return 0
        self.encrypt(records)
        return 0

    cdef int encrypt(self, Records records) except -1:
        """The same without what belongs around it."""
        cdef list sealed = []
        cdef Py_ssize_t index, waiting = 0
        cdef const uint8_t *start
        cdef Part *part
        try:
            for index in range(self._count):
                part = self._parts + index
                start = part.start if part.start != NULL else self._arena + part.place
                waiting = records.encrypt(<const char *> start, part.size, waiting, sealed)
            if waiting:
                sealed.append(records.take())
        finally:
            self.clear()
        self.extend(sealed)
        return 0

    cdef int _grow(self, Py_ssize_t size) except -1:
        """Room for one part more, and for ``size`` bytes in the arena."""
        cdef void *grown
        cdef Py_ssize_t wanted
        if self._count == self._room:
            wanted = max(2 * self._room, 16)
            grown = realloc(self._parts, <size_t> wanted * sizeof(Part))
            if grown == NULL:
                raise MemoryError(f"no memory for {wanted} buffers on their way out")
            self._parts = <Part *> grown
            self._room = wanted
        if self._filled + size > self._arena_room:
            wanted = max(2 * self._arena_room, self._filled + size, 256)
            grown = realloc(self._arena, <size_t> wanted)
            if grown == NULL:
                raise MemoryError(f"no memory for {wanted} bytes on their way out")
            self._arena = <uint8_t *> grown
            self._arena_room = wanted
        return 0

    cdef int _begin(self) except -1:
        """Empty, for the next bytes."""
        self._count = self._first = self.offset = self._filled = 0
        self._owners.clear()
        if self._arena_room > ARENA_KEPT:
            free(self._arena)
            self._arena = NULL
            self._arena_room = 0
        return 0

    cdef Py_ssize_t give(self, int fd, const iovec *behind, int more) except -2:
        """One call of the kernel; -1 if it takes nothing now.

        So many parts are offered behind all that is here; what it takes of them is counted in the
        result alone.
        """
        cdef iovec[PARTS] vector
        cdef msghdr message
        cdef Py_ssize_t sent, index, own
        cdef int count = 0, first = 0, failure
        cdef Part *part
        if self.left == 0:
            return 0
        if self._rings is not None:
            if self._rings.agreed():
                return self._share(fd)
            if self._rings.fileno() >= 0:
                if not self._pass(fd):
                    return -1
                first = 1
                if self.left == 0:
                    return first
        own = self.left
        for index in range(self._first, min(self._count, self._first + PARTS)):
            part = self._parts + index
            if part.start == NULL:
                vector[count].iov_base = <void *> (self._arena + part.place)
            else:
                vector[count].iov_base = <void *> part.start
            vector[count].iov_len = <size_t> part.size
            count += 1
        vector[0].iov_base = <uint8_t *> vector[0].iov_base + self.offset
        vector[0].iov_len -= <size_t> self.offset
        if more and count == self._count - self._first and count <= PARTS - more:
            memcpy(vector + count, behind, <size_t> more * sizeof(iovec))
            count += more
        memset(&message, 0, sizeof(msghdr))
        message.msg_iov = vector
        message.msg_iovlen = <size_t> count
        while True:
            with nogil:
                sent = sendmsg(fd, &message, 0)
                failure = errno
            if sent >= 0:
                break
            if failure == EAGAIN:
                return first or -1
            if failure != EINTR:
                raise OSError(failure, os.strerror(failure))
            PyErr_CheckSignals()
        self._passed(sent)
        self.leave(min(sent, own))
        return first + sent

    cdef bint _pass(self, int fd) except -1:
        """Passes the memory with the first byte that has not left; False: there is no room now."""
        cdef Part *part = self._parts + self._first
        cdef const uint8_t *start = part.start if part.start != NULL else self._arena + part.place
        if send_byte(fd, start[self.offset], self._rings.fileno()) < 0:
            return False
        self._rings.passed()
        self._passed(1)
        self.leave(1)
        return True

    cdef int _passed(self, Py_ssize_t size) except -1:
        """The socket took so many bytes."""
        self._gone += <uint64_t> size
        if self._rings is not None:
            self._rings.gone = self._gone
        return 0

    cdef Py_ssize_t _share(self, int fd) except -2:
        """Writes to memory; -1 if there is no room. With bytes left, a wake-up byte says when there
        is some."""
        cdef Rings rings = self._rings
        cdef Py_ssize_t total = 0, size
        cdef const uint8_t *start
        cdef Part *part
        rings.begin()
        while self.left:
            part = self._parts + self._first
            start = part.start if part.start != NULL else self._arena + part.place
            size = rings.put(start + self.offset, part.size - self.offset, fd)
            if size:
                total += size
                self.leave(size)
            elif rings.full():
                break
        return total or -1

    cdef int leave(self, Py_ssize_t size) except -1:
        """So many bytes of what is here have left."""
        self.left -= size
        if self.left == 0:
            self.size = 0
            self._begin()
            return 0
        size += self.offset
        while size >= self._parts[self._first].size:
            size -= self._parts[self._first].size
            self._owners[self._first] = None
            self._first += 1
        self.offset = size
        return 0
