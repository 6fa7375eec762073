"""The compiled part of cutting views: sizes are checked before anything is read or written."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aqueduct._speedups.arrow.views import (
    measure,
    measure_children,
    measure_lists,
    move_bits,
    rewrite,
)

TEXTS = ["short", "a text that is longer", None, "another one of those"]
ARRAY = pa.array(TEXTS, pa.string_view())


def parts(array=ARRAY):
    validity, views, *texts = array.buffers()
    return validity, views, texts


def test_what_is_in_use_is_measured():
    validity, views, texts = parts()
    sizes = [text.size for text in texts]
    assert measure(views, validity, 0, 4, sizes) == [(41, 0, 41)]
    assert measure(views, validity, 2, 2, sizes) == [(20, 21, 41)]
    assert measure(views, validity, 0, 1, sizes) == [(0, 0, 0)]
    assert measure(views, None, 0, 0, []) == []


@pytest.mark.parametrize(
    ("offset", "length", "sizes"),
    [(0, 4, []), (0, 4, [40]), (-1, 2, [41]), (0, -1, [41]), (0, 5, [41]), (1 << 62, 1, [41])],
)
def test_views_that_are_not_there_are_not_read(offset, length, sizes):
    validity, views, _ = parts()
    with pytest.raises(ValueError, match=r"view|values"):
        measure(views, validity, offset, length, sizes)


def test_a_bitmap_that_is_too_short_is_not_read():
    _, views, texts = parts()
    with pytest.raises(ValueError, match="4 bits from number 0 on are not there"):
        measure(views, b"", 0, 4, [text.size for text in texts])


def test_views_are_moved_and_packed():
    validity, views, texts = parts()
    for moves, buffers in (([(0, 0)], lambda room: texts), ([(-1, 0)], lambda room: [room])):
        out, room = pa.allocate_buffer(64), pa.allocate_buffer(41)
        rewrite(views, validity, 0, 4, texts, moves, out, room)
        found = pa.Array.from_buffers(pa.string_view(), 4, [validity, out, *buffers(room)])
        found.validate(full=True)
        assert found.to_pylist() == TEXTS


@pytest.mark.parametrize(("views_room", "text_room"), [(63, 41), (64, 40)])
def test_nothing_is_written_beyond_its_room(views_room, text_room):
    validity, views, texts = parts()
    out, room = pa.allocate_buffer(views_room), pa.allocate_buffer(text_room)
    with pytest.raises(ValueError, match="room"):
        rewrite(views, validity, 0, 4, texts, [(-1, 0)], out, room)


def test_moves_are_one_for_each_buffer():
    validity, views, texts = parts()
    out, room = pa.allocate_buffer(64), pa.allocate_buffer(0)
    with pytest.raises(ValueError, match="1 buffers and 0 moves"):
        rewrite(views, validity, 0, 4, texts, [], out, room)
    with pytest.raises(ValueError, match="outside"):
        rewrite(views, validity, 0, 4, texts, [(0, 5)], out, room)


@given(st.lists(st.booleans(), max_size=70), st.integers(0, 70), st.integers(0, 70))
def test_bits_are_moved(bits, start, length):
    start = min(start, len(bits))
    length = min(length, len(bits) - start)
    source = pa.array(bits, pa.bool_()).buffers()[1] or pa.py_buffer(b"")
    out = pa.allocate_buffer((length + 7) // 8)
    move_bits(source, start, length, out)
    found = pa.Array.from_buffers(pa.bool_(), length, [None, out])
    assert found.to_pylist() == bits[start : start + length]


def test_bits_that_are_not_there_are_not_read():
    for offset, length, room in ((0, 9, 2), (8, 1, 1), (0, 8, 0), (-1, 1, 1), (0, -1, 1)):
        with pytest.raises(ValueError, match="bits"):
            move_bits(b"\x55", offset, length, pa.allocate_buffer(room))


@pytest.mark.parametrize("large", [False, True])
def test_what_list_views_refer_to_is_measured(large):
    kind = pa.int64() if large else pa.int32()
    starts, sizes = (pa.array(n, kind).buffers()[1] for n in ([7, 0, 3, 9], [2, 0, 2, 5]))
    bits = b"\x07"
    assert measure_lists(starts, sizes, None, large, 0, 4) == (9, 3, 14)
    assert measure_lists(starts, sizes, bits, large, 0, 4) == (4, 3, 9)
    assert measure_lists(starts, sizes, bits, large, 1, 1) == (0, 0, 0)
    for offset, length, validity in ((-1, 1, None), (0, 99, None), (0, 4, b"")):
        with pytest.raises(ValueError, match=r"values|bits"):
            measure_lists(starts, sizes, validity, large, offset, length)


def test_what_dense_unions_refer_to_is_measured():
    codes, places = b"\x05\x00\x05", pa.array([4, 1, 6], pa.int32()).buffers()[1]
    assert measure_children(codes, places, 0, 3) == {0: (1, 1, 2), 5: (2, 4, 7)}
    assert measure_children(codes, places, 1, 1) == {0: (1, 1, 2)}
    with pytest.raises(ValueError, match="are not there"):
        measure_children(codes, places, 0, 99)
