"""Memory of two processes: what is made, and what is accepted from a peer."""

from __future__ import annotations

import fcntl
import gc
import mmap
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from aqueduct._speedups.io.shared_ring import LARGEST, SMALLEST, Rings, supported

KiB = 1 << 10
PAGE = 4 * KiB
SEALS = ("SHRINK", "GROW", "SEAL")

pytestmark = pytest.mark.skipif(
    not supported(), reason="this system has no memory whose size can be sealed"
)


@contextmanager
def memory(size: int, seals: tuple[str, ...] = SEALS, head: bytes = b"") -> Iterator[int]:
    """A descriptor of memory that somebody else has made."""
    fd = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size)
        os.pwrite(fd, head, 0)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, sum(getattr(fcntl, f"F_SEAL_{name}") for name in seals))
        yield fd
    finally:
        os.close(fd)


def descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


def mappings() -> int:
    with open("/proc/self/maps") as lines:
        return sum("aqueduct-rings" in line for line in lines)


@pytest.mark.parametrize("capacity", [SMALLEST, 256 * KiB + PAGE])
def test_a_peer_maps_what_was_made(capacity: int) -> None:
    rings = Rings(capacity)
    peer = Rings.of_peer(rings.fileno(), LARGEST)
    assert rings.capacity == peer.capacity == capacity
    assert not (rings.begun or peer.begun or rings.waits or peer.waits)
    assert peer.fileno() == -1, "the descriptor is still its owner's"


@pytest.mark.parametrize("capacity", [-PAGE, 0, PAGE, SMALLEST - 1, SMALLEST + 1, LARGEST + PAGE])
def test_sizes_that_are_refused(capacity: int) -> None:
    with pytest.raises(ValueError, match=f"capacity: {capacity}; whole pages of 4096 bytes"):
        Rings(capacity)


def test_the_size_cannot_be_changed_by_who_has_it() -> None:
    rings = Rings(SMALLEST)
    for size in 0, 1 << 20:
        with pytest.raises(PermissionError):
            os.ftruncate(rings.fileno(), size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(rings.fileno(), fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)


def test_nothing_is_left_of_it() -> None:
    gc.collect()
    before = descriptors(), mappings()
    rings = Rings(SMALLEST)
    fd = rings.fileno()
    peer = Rings.of_peer(fd, LARGEST)
    assert mappings() == before[1] + 2
    rings.passed()
    assert rings.fileno() == -1
    rings.passed()  # again: nothing
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    other = Rings(SMALLEST)  # not passed before it goes
    del rings, peer, other
    gc.collect()
    assert (descriptors(), mappings()) == before


def test_no_descriptor_is_left_where_it_cannot_be_mapped(monkeypatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(1, "no seals today")

    before = descriptors()
    monkeypatch.setattr(fcntl, "fcntl", refuse)
    with pytest.raises(OSError, match="no seals today"):
        Rings(SMALLEST)
    assert descriptors() == before


def head_of(capacity: int) -> bytes:
    return b"AQQRING1"[:: 1 if sys.byteorder == "little" else -1] + capacity.to_bytes(
        8, sys.byteorder
    )


def test_made_by_hand_it_is_accepted() -> None:
    """Or the refusals below would prove nothing."""
    with memory(PAGE + 2 * SMALLEST, head=head_of(SMALLEST)) as fd:
        assert Rings.of_peer(fd, LARGEST).capacity == SMALLEST


@pytest.mark.parametrize(
    ("size", "seals", "head", "told"),
    [
        (PAGE + 2 * SMALLEST, ("SHRINK", "GROW"), head_of(SMALLEST), "its size is not sealed"),
        (PAGE + 2 * SMALLEST, ("GROW", "SEAL"), head_of(SMALLEST), "its size is not sealed"),
        (PAGE + 2 * SMALLEST, ("SHRINK", "SEAL"), head_of(SMALLEST), "its size is not sealed"),
        (PAGE + 2 * SMALLEST, SEALS, b"", "it does not begin as rings do"),
        (PAGE + 2 * SMALLEST, SEALS, head_of(2 * SMALLEST), "it does not begin as rings do"),
        (0, SEALS, b"", "it has 0 bytes"),
        (100, SEALS, head_of(SMALLEST), "it has 100 bytes"),
        (2 * SMALLEST, SEALS, head_of(SMALLEST), "it has 131072 bytes"),
        (PAGE + 2 * SMALLEST + 1, SEALS, head_of(SMALLEST), "it has 135169 bytes"),
        (3 * PAGE, SEALS, head_of(PAGE), "it has 12288 bytes"),
        (3 * PAGE + 2 * LARGEST, SEALS, head_of(LARGEST + PAGE), "it has 2147495936 bytes"),
    ],
)
def test_memory_of_a_peer_that_is_refused(size: int, seals, head: bytes, told: str) -> None:
    with memory(size, seals, head) as fd:
        with pytest.raises(ValueError, match=f"^{told}$"):
            Rings.of_peer(fd, LARGEST)
        assert os.fstat(fd).st_size == size, "the descriptor is still the caller's"


def test_what_is_no_memory_is_refused(tmp_path) -> None:
    reader, writer = os.pipe()
    # A file of a tmpfs could be sealed.
    said = "it is no memory: Invalid argument|its size is not sealed"
    with open(tmp_path / "file", "wb") as file, pytest.raises(ValueError, match=said):
        Rings.of_peer(file.fileno(), LARGEST)
    for fd in reader, writer:
        with pytest.raises(ValueError, match="it is no memory: Invalid argument"):
            Rings.of_peer(fd, LARGEST)
        os.close(fd)
    with pytest.raises(ValueError, match="it is no memory: Bad file descriptor"):
        Rings.of_peer(reader, LARGEST)


@pytest.mark.skipif(not hasattr(os, "MFD_HUGETLB"), reason="no such pages here")
def test_pages_of_a_pool_that_may_be_empty_are_refused() -> None:
    """Whoever touches one that is not there gets SIGBUS."""
    try:
        fd = os.memfd_create("test", os.MFD_ALLOW_SEALING | os.MFD_HUGETLB)
    except OSError as error:
        pytest.skip(f"this kernel has no huge pages: {error.strerror}")
    try:
        fcntl.fcntl(
            fd,
            fcntl.F_ADD_SEALS,
            fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL,
        )
        with pytest.raises(ValueError, match="its pages are of a pool that may be empty"):
            Rings.of_peer(fd, LARGEST)
    finally:
        os.close(fd)


def test_what_one_writes_the_other_sees() -> None:
    rings = Rings(SMALLEST)
    with mmap.mmap(rings.fileno(), 0) as seen:
        assert seen[:16] == head_of(SMALLEST)
        seen[:1] = b"?"
    with pytest.raises(ValueError, match="it does not begin as rings do"):
        Rings.of_peer(rings.fileno(), LARGEST)


def test_memory_that_is_larger_than_the_own_limit_is_refused() -> None:
    rings = Rings(128 * KiB)
    assert Rings.of_peer(rings.fileno(), 128 * KiB).capacity == 128 * KiB
    told = "it has 131072 bytes for each direction; 131071 is the limit"
    with pytest.raises(ValueError, match=told):
        Rings.of_peer(rings.fileno(), 128 * KiB - 1)


def test_memory_that_may_not_be_written_to_is_refused() -> None:
    with memory(PAGE + 2 * SMALLEST, (*SEALS, "WRITE"), head_of(SMALLEST)) as fd:
        with pytest.raises(PermissionError):
            Rings.of_peer(fd, LARGEST)


def mapped() -> int:
    """How many pieces of such memory this process has in its address space."""
    return Path("/proc/self/maps").read_text().count("aqueduct-rings")


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # is multi-threaded
def test_in_a_forked_child_there_is_other_memory_in_its_place():
    ours = Rings(SMALLEST)
    theirs = Rings.of_peer(ours.fileno(), SMALLEST)
    before = mapped()
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        ours.left_behind()
        ours.left_behind()
        os.write(writing, f"{ours.fileno()} {mapped()} {ours.waits}".encode())
        del ours  # which lets go of what is there now
        os._exit(0)
    os.close(writing)
    with open(reading) as said:
        assert said.read() == f"-1 {before - 1} False"  # that of ``theirs`` is left
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert ours.fileno() >= 0
    assert not theirs.waits
    assert mapped() == before
