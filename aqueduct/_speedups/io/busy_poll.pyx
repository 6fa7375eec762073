"""Looking at a socket or two again and again for moments, in others' way as little as can be.

Two processors often share one core: what one does in the meantime, the other lacks. So most of the
time between two looks passes in an instruction that leaves the core to the other.
"""

from posix.time cimport CLOCK_MONOTONIC, clock_gettime, timespec

__all__ = ["look"]

cdef extern from *:
    """
    #include <poll.h>
    #include <sched.h>

    static void relax(int times) {
        for (int k = 0; k < times; k++) {
    #if defined(__x86_64__) || defined(__i386__)
            __builtin_ia32_pause();
    #elif defined(__aarch64__) || defined(__arm__)
            __asm__ volatile("yield" ::: "memory");
    #else
            __asm__ volatile("" ::: "memory");
    #endif
        }
    }
    """
    cdef struct pollfd:
        int fd
        short events
        short revents
    const int POLLIN
    int poll(pollfd *fds, unsigned long count, int timeout) nogil
    int sched_yield() nogil
    void relax(int times) noexcept nogil

cdef enum:
    MOST = 2
    PAUSES = 16     # between two looks
    # Times ``yielded``: the sender of the input may have used the processor meanwhile.
    PEER = 4

    NOTHING = -1
    OTHERS = -2


def look(fds, double seconds, double yielded):
    """Looks at ``fds``, two at most, for about so many ``seconds``.

    Returns what is readable, or had an error; -1: nothing; -2: others had the processor for more
    than ``yielded`` seconds. If there is input right after that, it was who sent it, on the same
    processor: that is no other, and will soon have one of its own.
    """
    cdef pollfd[MOST] sockets
    cdef unsigned long count = 0
    cdef int found = 0
    cdef double began, now, before
    for fd in fds:
        if count == MOST:
            raise ValueError(f"look takes {MOST} sockets, not {len(fds)}")
        sockets[count].fd = fd
        sockets[count].events = POLLIN
        sockets[count].revents = 0
        count += 1
    with nogil:
        began = now = seconds_now()
        while poll(sockets, count, 0) <= 0:
            if now - began >= seconds:
                found = NOTHING
                break
            relax(PAUSES)
            before = seconds_now()
            sched_yield()
            now = seconds_now()
            if now - before > yielded:
                if now - before > PEER * yielded or poll(sockets, count, 0) <= 0:
                    found = OTHERS
                break
    if found < 0:
        return found
    return sockets[0].fd if sockets[0].revents else sockets[1].fd


cdef double seconds_now() noexcept nogil:
    cdef timespec time
    clock_gettime(CLOCK_MONOTONIC, &time)
    return <double> time.tv_sec + <double> time.tv_nsec * 1e-9
