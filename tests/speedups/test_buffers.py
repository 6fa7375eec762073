"""Aligned memory and scatter lists."""

from __future__ import annotations

import gc
import weakref
from array import array
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aqueduct._speedups.base.buffers import (
    AlignedBuffer,
    GatherList,
    bytes_copied,
    pooled_bytes,
    size_of,
)
from tests.speedups.strategies import piece_of


@pytest.mark.parametrize("size", [0, 1, 63, 64, 65, 4096, 1 << 20])
def test_aligned_memory(size: int) -> None:
    buffers = [AlignedBuffer(size) for _ in range(5)]
    for number, buffer in enumerate(buffers):
        assert buffer.address % 64 == 0
        assert len(buffer) == buffer.size == size
        memoryview(buffer)[:] = bytes([number]) * size
    for number, buffer in enumerate(buffers):
        assert bytes(buffer) == bytes([number]) * size


def test_views_of_aligned_memory() -> None:
    buffer = AlignedBuffer(10)
    assert buffer.exports == 0
    with memoryview(buffer) as view, view[2:4] as part:
        assert (view.ndim, view.format, view.itemsize, view.readonly) == (1, "B", 1, False)
        assert (view.shape, view.strides, view.contiguous) == ((10,), (1,), True)
        assert part.nbytes == 2
        assert buffer.exports == 1
    assert buffer.exports == 0
    assert f"{buffer.address:#x}" in repr(buffer)


def test_a_view_keeps_the_memory() -> None:
    view = memoryview(AlignedBuffer(100))
    view[:] = b"a" * 100
    others = [AlignedBuffer(100) for _ in range(100)]
    for other in others:
        memoryview(other)[:] = b"b" * 100
    assert bytes(view) == b"a" * 100


def test_sizes_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="negative"):
        AlignedBuffer(-1)
    with pytest.raises(MemoryError, match="1152921504606846976 bytes"):
        AlignedBuffer(1 << 60)
    with pytest.raises(OverflowError):
        AlignedBuffer(1 << 64)


def empty_pool() -> list[AlignedBuffer]:
    """Takes every block of the pool; they go back with the list."""
    sizes = [(8 + step) * (4096 << octave) for octave in range(8) for step in range(1, 9)]
    held = []
    for size in sizes[7:]:
        before = None
        while pooled_bytes() != before:
            before = pooled_bytes()
            held.append(AlignedBuffer(size))
    assert pooled_bytes() == 0
    return held


@pytest.mark.parametrize("size", [64 << 10, (64 << 10) + 1, (1 << 20) - 5, 1 << 20, 8 << 20])
def test_released_blocks_are_used_again(size: int) -> None:
    held = empty_pool()
    buffer = AlignedBuffer(size)
    address = buffer.address
    del buffer
    assert size <= pooled_bytes() <= size * 9 / 8
    again = AlignedBuffer(size)
    assert (again.address, len(again), pooled_bytes()) == (address, size, 0)
    del held


def test_small_and_huge_blocks_are_not_kept() -> None:
    for size in (0, 100, (64 << 10) - 1, (8 << 20) + 1, 64 << 20):
        buffer = AlignedBuffer(size)
        before = pooled_bytes()
        del buffer
        assert pooled_bytes() == before


@given(st.lists(st.integers(64 << 10, 8 << 20), min_size=30, max_size=60))
def test_the_pool_is_bounded_and_follows_the_traffic(sizes: list[int]) -> None:
    held = [AlignedBuffer(size) for size in sizes]
    assert len({buffer.address for buffer in held}) == len(held)
    for number, buffer in enumerate(held):
        # The ends of each belong to nobody else.
        memoryview(buffer)[:1] = memoryview(buffer)[-1:] = bytes([number])
    ends = [bytes(buffer)[:: len(buffer) - 1] for buffer in held]
    assert ends == [bytes([number, number]) for number in range(len(held))]
    held.clear()
    assert pooled_bytes() <= 32 << 20
    # What is asked for again and again comes from the pool in the end.
    for _ in range(200):
        several = [AlignedBuffer(1 << 20) for _ in range(4)]
        addresses = {buffer.address for buffer in several}
        several.clear()
    several = [AlignedBuffer(1 << 20) for _ in range(4)]
    assert {buffer.address for buffer in several} == addresses


# Scatter.

KINDS: list[Any] = [bytes, bytearray, lambda data: memoryview(bytearray(data))]


@given(
    st.lists(
        st.one_of(
            st.tuples(st.integers(0, 2), st.binary(max_size=30)),
            st.tuples(st.integers(0, 40), st.integers(0, 5)),
        )
    )
)
def test_scatter_like_a_string_of_bytes(steps: list[tuple[int, Any]]) -> None:
    scatter, model = GatherList(), b""
    for first, second in steps:
        if isinstance(second, bytes):
            scatter.append(KINDS[first](second))
            model += second
        else:
            taken = scatter.take(first, second)
            data = b"".join(taken)
            assert len(taken) <= second
            assert model.startswith(data)
            # Either limit was met, or everything came.
            assert len(data) == first or len(taken) == second or data == model
            assert all(taken)
            model = model[len(data) :]
        assert scatter.nbytes == len(model)
        assert bool(len(scatter)) == bool(model)
    assert b"".join(scatter.take(1 << 30, 1 << 30)) == model


def test_scatter_copies_nothing() -> None:
    whole, cut = b"w" * 5000, bytearray(b"c" * 5000)
    scatter = GatherList()
    scatter.extend([whole, cut])
    before = bytes_copied()
    first, second = scatter.take(7000)
    (third,) = scatter.take(1 << 20)
    assert first is whole
    assert isinstance(second, memoryview)
    assert isinstance(third, memoryview)
    assert second.obj is third.obj is cut
    cut[0], cut[2000] = 1, 2
    assert (second[0], third[0]) == (1, 2)
    assert bytes_copied() == before


class Owner(bytearray):
    """A bytearray that can be watched."""


def test_scatter_holds_what_is_not_taken() -> None:
    scatter = GatherList()
    owners = [Owner(10) for _ in range(3)]
    watched = [weakref.ref(owner) for owner in owners]
    scatter.extend(owners)
    del owners
    gc.collect()
    assert all(watch() is not None for watch in watched)
    taken = scatter.take(15)
    del taken
    assert [watch() is not None for watch in watched] == [False, True, True]
    scatter.clear()
    assert [watch() for watch in watched] == [None] * 3
    assert (scatter.nbytes, len(scatter), scatter.take(10)) == (0, 0, [])


def test_scatter_of_elements_that_are_not_bytes() -> None:
    scatter = GatherList()
    scatter.append(array("q", [1, 2, 3]))
    assert scatter.nbytes == 24
    assert b"".join(scatter.take(9)) == (1).to_bytes(8, "little") + b"\2"
    with pytest.raises(BufferError, match="not contiguous"):
        scatter.append(memoryview(bytes(10))[::2])
    with pytest.raises(TypeError):
        scatter.append("text")  # type: ignore[arg-type]
    scatter.append(memoryview(array("q")))
    assert scatter.nbytes == 15


def test_scatter_stays_linear_and_small() -> None:
    scatter = GatherList()
    for _ in range(1000):
        scatter.append(b"ab")
    for left in range(999, -1, -1):
        assert scatter.take(2) == [b"ab"]
        assert len(scatter) == left


@given(st.lists(st.binary(max_size=100)), st.randoms(use_true_random=False))
def test_the_size_of_a_list_of_buffers(parts: list[bytes], random: Any) -> None:
    buffers = [random.choice([bytes, bytearray, memoryview])(part) for part in parts]
    assert size_of(buffers) == len(b"".join(parts))


def test_the_size_counts_bytes_and_not_items() -> None:
    assert size_of([memoryview(array("d", [1.0, 2.0, 3.0])), b"ab"]) == 26
    with pytest.raises(TypeError):
        size_of(None)  # type: ignore[arg-type]


def test_pieces_in_a_scatter() -> None:
    data = bytes(range(256)) * 8
    piece = piece_of(data)
    assert size_of([piece, b"ab"]) == len(data) + 2
    scatter = GatherList()
    scatter.extend([b"head", piece, piece])
    assert scatter.nbytes == 4 + 2 * len(data)
    taken = scatter.take(4 + len(data) + 100)
    assert b"".join(taken) == b"head" + data + data[:100]
    assert all(type(each) in (bytes, memoryview) for each in taken)
    (rest,) = scatter.take(1 << 20)
    assert type(rest) is memoryview and bytes(rest) == data[100:]
    scatter.append(piece)
    (whole,) = scatter.take(len(data))
    assert type(whole) is memoryview and whole.obj is piece


def test_a_piece_keeps_its_memory_and_nothing_else() -> None:
    piece = piece_of(bytes(8000))
    assert not gc.is_tracked(piece)
    with memoryview(piece) as view:
        del piece
        assert bytes(view) == bytes(8000)
