"""Payload memory and scatter lists.

Received payloads land once, in memory aligned to 64 bytes as Arrow wants it; what is sent leaves
as a list of buffers. ``bytes_copied`` says how much was copied on the way nevertheless.
"""

cimport cython
from cpython.buffer cimport (
    PyBUF_FORMAT,
    PyBUF_ND,
    PyBUF_STRIDES,
    PyBUF_WRITABLE,
    PyBuffer_IsContiguous,
)
from cpython.bytes cimport PyBytes_CheckExact, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.memoryview cimport (
    PyMemoryView_Check,
    PyMemoryView_FromObject,
    PyMemoryView_GET_BUFFER,
)
from libc.stdint cimport uint8_t, uint64_t
from libc.stdlib cimport free


cdef extern from "<stdlib.h>" nogil:
    int posix_memalign(void **memory, size_t alignment, size_t size)

cdef extern from *:
    """
    #include <errno.h>
    #include <string.h>
    #ifdef __linux__
    #include <sys/mman.h>
    #ifndef MADV_POPULATE_WRITE
    #define MADV_POPULATE_WRITE 23  /* since Linux 5.14 */
    #endif
    #endif
    /* 16 bytes that lie anywhere. */
    typedef unsigned char sixteen __attribute__((vector_size(16), aligned(1), may_alias));

    /* Like memcpy, but by loads and stores of vectors: compilers and libraries make `rep movs` of
       that. To memory that another processor has just read, it takes half as long again; and with
       the target a few bytes ahead of the source in its page, as it is where both are mapped
       blocks, it falls to a tenth of its speed on some processors. */
    static void copy_vectors(unsigned char *target, const unsigned char *source, size_t size) {
        for (; size >= 64; target += 64, source += 64, size -= 64) {
            const sixteen *from = (const sixteen *) source;
            sixteen *to = (sixteen *) target;
            sixteen first = from[0], second = from[1], third = from[2], fourth = from[3];
            to[0] = first, to[1] = second, to[2] = third, to[3] = fourth;
        }
        memcpy(target, source, size);
    }

    static int page_in_pages(void *start, size_t size) {
    #ifdef __linux__
        if (madvise(start, size, MADV_POPULATE_WRITE) < 0)
            return errno == EINVAL;
        return 0;
    #else
        return 1;
    #endif
    }
    """
    void copy_vectors(uint8_t *target, const uint8_t *source, size_t size) nogil
    # Whether the system has no such call. If it has no memory, the write will fail.
    bint page_in_pages(void *start, size_t size) nogil

__all__ = [
    "AlignedBuffer",
    "Keeper",
    "BufferSlice",
    "GatherList",
    "bytes_copied",
    "pooled_bytes",
    "size_of",
]

cdef enum:
    # Blocks of these sizes are kept when they are released, up to POOL_LIMIT bytes in all: fresh
    # memory from the system costs a page fault for each 4 KiB, several times the copy into it.
    POOLED_FROM = 64 << 10
    POOLED_TO = 8 << 20
    POOL_LIMIT = 32 << 20
    # Size classes: 8 in each octave, so that at most an eighth of a block is idle.
    STEPS = 8
    SMALLEST_STEP = 4 << 10
    CLASSES = 64
    # From here on a copy is long enough to be worth letting other threads run.
    LONG_COPY = 16384
    # The smallest page there is, and the fewest bytes that are worth a call of the system.
    PAGE = 4096
    PAGED_FROM = 32768

# A released block; the next one of its size class is written into its memory.
cdef struct Block:
    Block *next

# All of this is guarded by the GIL.
cdef Block *pool[CLASSES]
cdef Py_ssize_t pooled = 0
cdef int victim = 0

cdef uint64_t copied = 0
cdef bint pages_come = True    # when they are asked for

cdef char *BYTES_FORMAT = "B"


def bytes_copied():
    """Payload bytes that the compiled modules copied since the process began."""
    return copied


def size_of(list buffers not None):
    """Bytes of all ``buffers``: a list of bytes, bytearrays, memoryviews and Pieces."""
    cdef Py_ssize_t total = 0
    cdef object buffer
    for buffer in buffers:
        if PyBytes_CheckExact(buffer):
            total += PyBytes_GET_SIZE(buffer)
        elif type(buffer) is BufferSlice:
            total += (<BufferSlice> buffer).size
        elif PyMemoryView_Check(buffer):
            total += PyMemoryView_GET_BUFFER(buffer).len
        else:
            total += len(buffer)
    return total


cdef object piece_of(object fed, Py_ssize_t at, Py_ssize_t size):
    """``size`` bytes of a payload, at ``at`` of the bytes or memoryview that a decoder was fed."""
    cdef Py_ssize_t whole = 0
    cdef const uint8_t *start = memory_of(fed, &whole)
    if size < VIEW_FROM:
        count_copied(size)
        return PyBytes_FromStringAndSize(<const char *> start + at, size)
    if size == whole:
        return fed
    return PyMemoryView_FromObject(fed)[at:at + size]


cdef void count_copied(Py_ssize_t size) noexcept:
    """Counts payload bytes copied by a caller that holds the GIL."""
    global copied
    copied += <uint64_t> size


cdef void copy_bytes(uint8_t *target, const uint8_t *source, Py_ssize_t size) noexcept:
    """Copies and counts payload bytes, as ``copy_uncounted`` does."""
    copy_uncounted(target, source, size)
    count_copied(size)


cdef void copy_uncounted(uint8_t *target, const uint8_t *source, Py_ssize_t size) noexcept:
    """Copies bytes; long stretches without the GIL.

    The caller keeps both memories alive, also against other threads.
    """
    if size >= LONG_COPY:
        with nogil:
            copy_vectors(target, source, <size_t> size)
    else:
        copy_vectors(target, source, <size_t> size)


@cython.auto_pickle(False)
cdef class Keeper:
    """Who is told when the memory of a buffer is released; for compiled modules to build on."""

    cdef int freed(self) except -1:
        """The memory is about to be released, in any thread."""
        return 0


@cython.final
@cython.freelist(64)
@cython.no_gc
@cython.auto_pickle(False)
cdef class AlignedBuffer:
    """Owned, writable, uninitialised memory of ``size`` bytes, aligned to 64 bytes.

    It never moves or changes its size. ``exports`` counts the living views of it. The process
    keeps up to 32 MiB of released blocks from 64 KiB to 8 MiB for the next buffers.
    Raises ValueError for a negative size, MemoryError if the memory is not to be had.
    """

    def __cinit__(self, Py_ssize_t size):
        if size < 0:
            raise ValueError(f"size is {size}; it must not be negative")
        cdef bint fresh = False
        self._room = size
        self.data = <uint8_t *> take_memory(&self._room, &fresh)
        if self.data == NULL:
            raise MemoryError(f"no memory for a buffer of {size} bytes")
        self.size = size
        self._paged = 0 if fresh else size
        self.exports = 0

    def __dealloc__(self):
        if self.data != NULL:
            release_memory(self.data, self._room)
        if self.keeper is not None:
            self.keeper.freed()

    @property
    def address(self):
        """Where the memory starts, a multiple of 64."""
        return <size_t> self.data

    cdef void expect(self, const uint8_t *place, Py_ssize_t size) noexcept:
        """So many bytes are about to be written there, and nothing behind it was.

        A hint to the system: nothing here can raise.
        """
        cdef Py_ssize_t end = place - self.data + size
        if end > self._paged:
            page_in(self.data + self._paged, end - self._paged)
            self._paged = end

    def __len__(self):
        return self.size

    def __repr__(self):
        return f"<AlignedBuffer of {self.size} bytes at {<size_t> self.data:#x}>"

    def __buffer__(self, flags, /):
        """A view of the memory; Python 3.11 has the name in stubs only (PEP 688)."""
        return PyMemoryView_FromObject(self)

    def __getbuffer__(self, Py_buffer *view, int flags):
        view.obj = self
        describe(view, self.data, &self.size, False, flags)
        self.exports += 1

    def __releasebuffer__(self, Py_buffer *view):
        self.exports -= 1


@cython.final
@cython.freelist(256)
@cython.no_gc
@cython.auto_pickle(False)
cdef class BufferSlice:
    """Some bytes of a memory that it keeps; made by the compiled modules.

    It is what a memoryview would be, without its cost. No collector looks at it: whose memory it
    is has no way back to it.
    """

    def __len__(self):
        return self.size

    def __repr__(self):
        return f"<Piece of {self.size} bytes>"

    def __buffer__(self, flags, /):
        """A view of the bytes; Python 3.11 has the name in stubs only (PEP 688)."""
        return PyMemoryView_FromObject(self)

    def __getbuffer__(self, Py_buffer *view, int flags):
        if flags & PyBUF_WRITABLE:
            raise BufferError("a BufferSlice is read-only")
        view.obj = self
        describe(view, self.start, &self.size, True, flags)


cdef int describe(
    Py_buffer *view, const void *start, Py_ssize_t *size, bint readonly, int flags
) except -1:
    """Bytes in a row, as much of it as ``flags`` ask for."""
    view.buf = <void *> start
    view.len = size[0]
    view.itemsize = 1
    view.readonly = readonly
    view.ndim = 1
    view.format = BYTES_FORMAT if flags & PyBUF_FORMAT else NULL
    view.shape = size if flags & PyBUF_ND else NULL
    view.strides = &view.itemsize if (flags & PyBUF_STRIDES) == PyBUF_STRIDES else NULL
    view.suboffsets = NULL
    view.internal = NULL
    return 0


@cython.final
@cython.auto_pickle(False)
cdef class GatherList:
    """A first-in-first-out list of buffers that wait to leave; nothing is copied.

    A buffer is kept alive until its last byte was taken. ``nbytes`` is what waits, in bytes;
    ``len()`` counts the buffers.
    """

    def __cinit__(self):
        self.clear()

    def append(self, buffer):
        """Queues one contiguous buffer; empty ones are dropped.

        Raises TypeError without the buffer protocol, BufferError if it is not contiguous.
        """
        self.push(buffer)

    def extend(self, buffers):
        """Queues each of ``buffers``, in order."""
        for buffer in buffers:
            self.push(buffer)

    def __len__(self):
        return len(self.items) - self.head

    def take(self, Py_ssize_t max_bytes, Py_ssize_t max_buffers=1024):
        """Removes and returns the first ``max_bytes`` bytes, in at most ``max_buffers`` buffers.

        A whole ``bytes`` object comes as it is, anything else as a memoryview of bytes.
        """
        cdef list taken = []
        cdef Py_ssize_t size
        cdef object item
        while (
            self.head < len(self.items) and max_bytes > 0 and len(taken) < max_buffers
        ):
            item = self.items[self.head]
            size = len(item) - self.offset
            if size > max_bytes:
                item = memoryview(item)[self.offset:self.offset + max_bytes]
                self.offset += max_bytes
                size = max_bytes
            else:
                if self.offset:
                    item = memoryview(item)[self.offset:]
                elif type(item) is BufferSlice:
                    item = memoryview(item)
                self.items[self.head] = None
                self.head += 1
                self.offset = 0
            taken.append(item)
            self.nbytes -= size
            max_bytes -= size
        self.trim()
        return taken

    def clear(self):
        """Drops everything that waits."""
        self.items = []
        self.head = 0
        self.offset = 0
        self.nbytes = 0

    cdef int push(self, object buffer) except -1:
        cdef Py_ssize_t size = 0
        if not PyBytes_CheckExact(buffer) and type(buffer) is not BufferSlice:
            buffer = byte_view(buffer)
        memory_of(buffer, &size)
        if size:
            self.items.append(buffer)
            self.nbytes += size
        return 0

    cdef int skip(self, Py_ssize_t size) except -1:
        """Removes the first ``size`` bytes, which are here."""
        cdef Py_ssize_t length = 0
        self.nbytes -= size
        size += self.offset
        while size:
            memory_of(self.items[self.head], &length)
            if size < length:
                break
            size -= length
            self.items[self.head] = None
            self.head += 1
        self.offset = size
        return self.trim()

    cdef int trim(self) except -1:
        """Cuts the list when half of it is spent, so that taking stays linear in all."""
        if self.head == len(self.items):
            self.items.clear()
            self.head = 0
        elif self.head >= 64 and self.head * 2 >= len(self.items):
            del self.items[:self.head]
            self.head = 0
        return 0


def pooled_bytes():
    """Bytes of released blocks that wait for the next AlignedBuffer."""
    return pooled


cdef void page_in(uint8_t *start, Py_ssize_t size) noexcept:
    """Has the system give the pages of memory that is written next, all in one go.

    Otherwise it gives each when it is written to first, and takes several times as long for it.
    Nothing here can raise: if it does not, they come as they did.
    """
    cdef size_t first = (<size_t> start + PAGE - 1) & ~<size_t> (PAGE - 1)
    cdef size_t last = (<size_t> start + <size_t> size) & ~<size_t> (PAGE - 1)
    cdef bint unknown
    global pages_come
    if not pages_come or last < first + PAGED_FROM:
        return
    with nogil:
        unknown = page_in_pages(<void *> first, last - first)
    if unknown:
        pages_come = False  # they come as they are written to


cdef void *take_memory(Py_ssize_t *size, bint *fresh) noexcept:
    """Aligned memory of at least ``size`` bytes, which becomes its real size; NULL: none.

    ``fresh``: it is from the system, which may not have given any of its pages yet.
    This and the next two use C memory alone: nothing can raise.
    """
    cdef void *memory = NULL
    cdef int index = size_class(size)
    global pooled
    if index >= 0 and pool[index] != NULL:
        memory = pool[index]
        pool[index] = pool[index].next
        pooled -= size[0]
        return memory
    # Nothing is written here: the system pages large memory in when bytes land, or are about to.
    fresh[0] = index >= 0
    if posix_memalign(&memory, ALIGNMENT, <size_t> max(size[0], 1)) != 0:
        return NULL
    return memory


cdef void release_memory(void *memory, Py_ssize_t size) noexcept:
    """Keeps or frees memory of ``take_memory``; ``size`` is its real size."""
    cdef int index = size_class(&size)
    cdef Block *block = <Block *> memory
    global pooled, victim
    if index < 0:
        free(memory)
        return
    block.next = pool[index]
    pool[index] = block
    pooled += size
    # Above the limit every size gives a block up in turn, so that the pool follows the traffic.
    while pooled > POOL_LIMIT:
        victim = (victim + 1) % CLASSES
        block = pool[victim]
        if block != NULL:
            pool[victim] = block.next
            pooled -= (STEPS + victim % STEPS + 1) * (SMALLEST_STEP << (victim // STEPS))
            free(block)


cdef int size_class(Py_ssize_t *size) noexcept:
    """Rounds a size up to one of 8 in each octave and returns its index; -1: not pooled."""
    cdef Py_ssize_t step = SMALLEST_STEP
    cdef int octave = 0
    if not POOLED_FROM <= size[0] <= POOLED_TO:
        return -1
    while size[0] > 2 * STEPS * step:
        step *= 2
        octave += 1
    cdef int steps = <int> ((size[0] + step - 1) // step)
    size[0] = steps * step
    return octave * STEPS + steps - STEPS - 1


cdef AlignedBuffer new_aligned(Py_ssize_t size):
    """AlignedBuffer(size) for the other compiled modules."""
    return AlignedBuffer(size)


cdef BufferSlice new_piece(object owner, const uint8_t *start, Py_ssize_t size):
    """``size`` bytes of a memory that ``owner`` keeps."""
    cdef BufferSlice piece = BufferSlice.__new__(BufferSlice)
    piece.start = start
    piece.size = size
    piece._owner = owner
    return piece


cdef object byte_view(object buffer):
    """A one-dimensional memoryview of the bytes of any contiguous buffer."""
    cdef object view = PyMemoryView_FromObject(buffer)
    cdef Py_buffer *info = PyMemoryView_GET_BUFFER(view)
    if not PyBuffer_IsContiguous(info, b"C"):
        raise BufferError("the buffer is not contiguous; make a contiguous copy of it")
    if info.itemsize == 1 and info.ndim == 1 and info.format[0] == b"B":
        return view
    if info.len == 0:
        return memoryview(b"")
    return view.cast("B")
