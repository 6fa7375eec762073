"""Records of TLS between a socket and memory."""

cdef class Records:
    cdef bint closed            # the peer has closed TLS: no socket tells of that once more
    cdef bint plain             # nothing is encrypted

    cdef Py_ssize_t decrypt(self, char *target, Py_ssize_t size) except -2
    cdef Py_ssize_t land(
        self, char *target, Py_ssize_t size, char *ahead, Py_ssize_t more
    ) except -2
    cdef Py_ssize_t encrypt(self, const char *source, Py_ssize_t size, Py_ssize_t waiting,
                            list sealed) except -1
    cdef bytes take(self)
    cdef int frame(self, object out) except -1

cdef class OpenSslRecords(Records):
    cdef void *_ssl             # SSL
    cdef void *_incoming        # BIO: ciphertext that the library has not read
    cdef void *_outgoing        # BIO: ciphertext that was not taken
    cdef object _owner
    cdef int _fd
    cdef object _failure
    cdef object _scratch        # a memoryview

    cdef int fill(self) except -1

cdef class PlainRecords(Records):
    cdef object _library
