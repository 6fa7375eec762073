"""Records of TLS between a socket and memory, by the OpenSSL that ``cryptography`` has in it.

Its functions are called by their addresses: many records at once, without the GIL, decrypted to
where the bytes belong and encrypted from where they lie. The handshake is not made here.

AES takes twice as long as the copies around it. Fewer copies were measured, and gained nothing.
"""

cimport cython
from cpython.buffer cimport (
    PyBUF_READ,
    PyBUF_SIMPLE,
    PyBUF_WRITABLE,
    PyBUF_WRITE,
    PyBuffer_Release,
    PyObject_GetBuffer,
)
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from cpython.exc cimport PyErr_CheckSignals, PyErr_SetFromErrno
from cpython.memoryview cimport PyMemoryView_FromMemory, PyMemoryView_GET_BUFFER
from libc.errno cimport EAGAIN, EINTR, errno
from libc.limits cimport INT_MAX
from libc.stdint cimport uintptr_t
from libc.string cimport memcpy

cdef extern from "<sys/socket.h>" nogil:
    ssize_t recv(int socket, void *buffer, size_t size, int flags)

__all__ = ["OpenSslRecords", "PlainRecords", "Records", "use"]

cdef enum:
    RECORD = 16384    # the most plain bytes that a record has
    SHORT = 4096      # buffers below this share records: each costs as much as 4 KiB of bytes
    TAKEN = 65536     # plain bytes encrypted before they are taken, still in the processor's cache
    WANT_READ = 2     # of SSL_get_error
    ZERO_RETURN = 6

cdef enum:
    # What a look at the socket found: as much as the memory holds, less, nothing, the end.
    FULL
    PART
    NONE
    ENDED

ctypedef int (*ssl_read_t)(void *, void *, int) noexcept nogil
ctypedef int (*ssl_write_t)(void *, const void *, int) noexcept nogil
ctypedef int (*ssl_error_t)(const void *, int) noexcept nogil
ctypedef int (*bio_read_t)(void *, void *, int) noexcept nogil
ctypedef int (*bio_write_t)(void *, const void *, int) noexcept nogil
ctypedef long (*bio_data_t)(void *, char **) noexcept nogil

cdef ssl_read_t ssl_read = NULL
cdef ssl_write_t ssl_write = NULL
cdef ssl_error_t ssl_error = NULL
cdef bio_read_t bio_read = NULL
cdef bio_write_t bio_write = NULL
cdef bio_data_t bio_data = NULL


def use(uintptr_t read, uintptr_t write, uintptr_t error, uintptr_t take, uintptr_t feed,
        uintptr_t data):
    """Where SSL_read, SSL_write, SSL_get_error, BIO_read, BIO_write and BIO_get_mem_data are."""
    if not (read and write and error and take and feed and data):
        raise ValueError("a function has no address")
    global ssl_read, ssl_write, ssl_error, bio_read, bio_write, bio_data
    ssl_read = <ssl_read_t> read
    ssl_write = <ssl_write_t> write
    ssl_error = <ssl_error_t> error
    bio_read = <bio_read_t> take
    bio_write = <bio_write_t> feed
    bio_data = <bio_data_t> data


@cython.auto_pickle(False)
cdef class Records:
    """The records of one connection whose handshake is over.

    A cdef class cannot be abstract: a library's own class has what raises NotImplementedError here.
    """

    def recv_into(self, object target not None):
        """Decrypts into ``target``; 0: the end. Raises BlockingIOError, OSError, and failures.

        Fewer bytes than ``target`` has room for, and not none: there are no more now.
        """
        cdef Py_buffer view
        cdef Py_ssize_t got
        PyObject_GetBuffer(target, &view, PyBUF_WRITABLE)
        try:
            got = self.decrypt(<char *> view.buf, view.len)
        finally:
            PyBuffer_Release(&view)
        if got < 0:
            raise BlockingIOError
        return got

    cdef Py_ssize_t decrypt(self, char *target, Py_ssize_t size) except -2:
        """As ``recv_into``; -1: there is nothing now."""
        raise NotImplementedError

    cdef Py_ssize_t land(
        self, char *target, Py_ssize_t size, char *ahead, Py_ssize_t more
    ) except -2:
        """As ``decrypt``; ``more`` bytes may go to ``ahead`` if that costs nothing."""
        return self.decrypt(target, size)

    def seal(self, buffers):
        """Encrypts ``buffers``, short ones together; returns all of it, for the socket."""
        cdef list sealed = []
        cdef char together[RECORD]
        cdef Py_ssize_t held = 0, waiting = 0
        cdef Py_buffer view
        for buffer in buffers:
            PyObject_GetBuffer(buffer, &view, PyBUF_SIMPLE)
            try:
                if held and held + view.len > RECORD or view.len >= SHORT:
                    waiting = self.encrypt(together, held, waiting, sealed)
                    held = 0
                if view.len < SHORT:
                    memcpy(together + held, view.buf, view.len)
                    held += view.len
                else:
                    waiting = self.encrypt(<const char *> view.buf, view.len, waiting, sealed)
            finally:
                PyBuffer_Release(&view)
        waiting = self.encrypt(together, held, waiting, sealed)
        if waiting:
            sealed.append(self.take())
        return sealed

    cdef Py_ssize_t encrypt(self, const char *source, Py_ssize_t size, Py_ssize_t waiting,
                            list sealed) except -1:
        """Encrypts; takes the records when there are many. Returns what waits to be taken."""
        raise NotImplementedError

    cdef bytes take(self):
        """What the library has encrypted."""
        raise NotImplementedError

    cdef int frame(self, object out) except -1:
        """Puts what belongs around what is in ``out``, an IovecWriter, before it is encrypted."""
        return 0


@cython.final
@cython.auto_pickle(False)
cdef class OpenSslRecords(Records):
    """By OpenSSL. ``owner`` keeps what the addresses name alive.

    ``fd`` is its socket, which does not block; ``failure`` makes an exception of what the library
    says of an error. ``scratch`` is memory for ciphertext, used within a call alone.
    """

    def __cinit__(self, object owner, uintptr_t ssl, uintptr_t incoming, uintptr_t outgoing,
                  int fd, object failure, object scratch not None):
        if not (ssl and incoming and outgoing and ssl_read != NULL):
            raise ValueError("there is no connection, or no library")
        self._owner = owner
        self._ssl = <void *> ssl
        self._incoming = <void *> incoming
        self._outgoing = <void *> outgoing
        self._fd = fd
        self._failure = failure
        self._scratch = scratch

    cdef Py_ssize_t decrypt(self, char *target, Py_ssize_t size) except -2:
        """As ``recv_into``; -1: there is nothing now."""
        cdef Py_ssize_t got = 0
        cdef int count, error = 0, filled = FULL
        while True:
            with nogil:
                count = 1
                while got < size:
                    count = ssl_read(self._ssl, target + got, <int> min(size - got, INT_MAX))
                    if count <= 0:
                        error = ssl_error(self._ssl, count)
                        break
                    got += count
            if count > 0:
                return got
            if error == ZERO_RETURN:
                self.closed = True
                return got
            if error != WANT_READ:
                raise self._failure()
            # After a short read the socket is not asked again: it says when it has more.
            if filled == FULL:
                filled = self.fill()
                if filled == FULL or filled == PART:
                    continue
            # An end without a close of TLS is one, too: the protocol above has a close of its own.
            if got or filled == ENDED:
                return got
            return -1

    cdef int fill(self) except -1:
        """Reads ciphertext from the socket."""
        cdef Py_ssize_t count
        cdef int taken
        cdef Py_buffer *room = PyMemoryView_GET_BUFFER(self._scratch)
        while True:
            with nogil:
                count = recv(self._fd, room.buf, <size_t> room.len, 0)
            if count >= 0:
                break
            if errno == EAGAIN:
                return NONE
            if errno != EINTR:
                PyErr_SetFromErrno(OSError)
            PyErr_CheckSignals()
        if count == 0:
            return ENDED
        with nogil:
            taken = bio_write(self._incoming, room.buf, <int> count)
        if taken != count:
            raise MemoryError
        return FULL if count == room.len else PART

    cdef Py_ssize_t encrypt(self, const char *source, Py_ssize_t size, Py_ssize_t waiting,
                            list sealed) except -1:
        """Encrypts; takes the records when there are many. Returns what waits to be taken."""
        cdef Py_ssize_t at = 0
        cdef int count = 1
        while at < size:
            with nogil:
                while at < size and waiting < TAKEN:
                    count = ssl_write(self._ssl, source + at, <int> min(size - at, RECORD))
                    if count <= 0:
                        break
                    at += count
                    waiting += count
            if count <= 0:
                raise self._failure()
            if waiting >= TAKEN:
                sealed.append(self.take())
                waiting = 0
        return waiting

    cdef bytes take(self):
        """What the library has encrypted."""
        cdef char *unused
        cdef int size = <int> bio_data(self._outgoing, &unused)
        cdef bytes taken = PyBytes_FromStringAndSize(NULL, size)
        cdef char *target = PyBytes_AS_STRING(taken)
        with nogil:
            size -= bio_read(self._outgoing, target, size)
        if size:
            raise MemoryError
        return taken


@cython.final
@cython.auto_pickle(False)
cdef class PlainRecords(Records):
    """By an object in Python, whose ``recv_into`` and ``seal`` are as those of ``Records``."""

    def __cinit__(self, object library not None):
        self._library = library

    cdef Py_ssize_t decrypt(self, char *target, Py_ssize_t size) except -2:
        cdef Py_ssize_t got
        try:
            got = self._library.recv_into(PyMemoryView_FromMemory(target, size, PyBUF_WRITE))
        except BlockingIOError:
            return -1
        self.closed = got < size
        return got

    cdef Py_ssize_t encrypt(self, const char *source, Py_ssize_t size, Py_ssize_t waiting,
                            list sealed) except -1:
        if size:
            sealed.extend(self._library.seal(
                (PyMemoryView_FromMemory(<char *> source, size, PyBUF_READ),)
            ))
        return 0

    cdef bytes take(self):
        return b""
