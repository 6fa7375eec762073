"""Varints: the tools' face of the inline functions that the codec uses."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aqueduct._speedups.base import varint
from aqueduct.errors import FrameError, LocalProtocolError
from tests.reference.codec import varint as model

HIGHEST = (1 << 64) - 1


@pytest.mark.requirement("AQ-2")
@given(st.integers(0, 9).flatmap(lambda n: st.integers(max(0, 2 ** (7 * n) - 2), 2 ** (7 * n) + 2)))
def test_round_trip(value: int) -> None:
    data = varint.encode(value)
    assert data == model(value)
    assert varint.decode(b"\xff" + data + b"\xff", 1) == (value, 1 + len(data))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "00"),
        (127, "7f"),
        (128, "8001"),
        (300, "ac02"),
        (1 << 63, "80808080808080808001"),
        (HIGHEST, "ffffffffffffffffff01"),
    ],
)
@pytest.mark.requirement("AQ-2")
def test_boundaries(value: int, text: str) -> None:
    assert varint.encode(value).hex() == text
    assert varint.decode(bytes.fromhex(text)) == (value, len(text) // 2)


@pytest.mark.requirement("AQ-R1")
@pytest.mark.parametrize("text", ["8000", "ff00", "80808000", "ffffffffffffffffff00"])
def test_not_the_shortest_form(text: str) -> None:
    with pytest.raises(FrameError, match="shortest") as caught:
        varint.decode(bytes.fromhex(text))
    assert not caught.value.truncated


@pytest.mark.requirement("AQ-R1")
@pytest.mark.parametrize("text", ["ffffffffffffffffff02", "80808080808080808082", "ff" * 11])
def test_above_64_bits(text: str) -> None:
    with pytest.raises(FrameError, match="64 bits"):
        varint.decode(bytes.fromhex(text))


@pytest.mark.parametrize("text", ["", "80", "ff" * 9])
def test_cut(text: str) -> None:
    with pytest.raises(FrameError) as caught:
        varint.decode(bytes.fromhex(text))
    assert caught.value.truncated


def test_bad_arguments() -> None:
    for value in (-1, HIGHEST + 1, 1 << 100):
        with pytest.raises(LocalProtocolError, match=r"a varint is -?\d+; it must be 0 to"):
            varint.encode(value)
    with pytest.raises(TypeError):
        varint.encode("1")  # type: ignore[arg-type]
    for offset in (-1, 3):
        with pytest.raises(ValueError, match="outside the 2 bytes"):
            varint.decode(b"\x01\x02", offset)


@pytest.mark.requirement("AQ-4")
@given(
    st.integers(0, 300),
    st.lists(st.integers(1, 1 << 56), max_size=5),
    st.integers(0, 300),
)
def test_ranges_round_trip(first: int, middle: list[int], last: int) -> None:
    lengths = (first, *middle, last)
    block = b"".join(map(model, lengths))
    data = varint.encode_ranges(lengths)
    assert data == model(len(block)) + block
    assert varint.decode_ranges(b"\xff" + data + b"\xff", 1) == (lengths, 1 + len(data))


def test_ranges_of_little() -> None:
    assert varint.encode_ranges(()) == b"\x00"
    assert varint.decode_ranges(b"\x00") == ((), 1)
    assert varint.encode_ranges(iter([0])) == b"\x01\x00"
    assert varint.decode_ranges(b"\x01\x00") == ((0,), 2)


@pytest.mark.requirement("AQ-R2")
@pytest.mark.parametrize(
    ("text", "why", "truncated"),
    [
        ("03010001", "may be zero", False),
        ("0bffffffffffffffffff0101", "reach above", False),
        ("0180", "inside a varint", False),
        ("028000", "shortest", False),
        ("0201", "inside the ranges", True),
        ("80", "inside a varint", True),
        ("", "inside a varint", True),
    ],
)
@pytest.mark.requirement("AQ-4")
def test_ranges_that_do_not_decode(text: str, why: str, truncated: bool) -> None:
    with pytest.raises(FrameError, match=why) as caught:
        varint.decode_ranges(bytes.fromhex(text))
    assert caught.value.truncated == truncated


@pytest.mark.parametrize("lengths", [(1, 0, 1), (HIGHEST, 1), (-1, 1), (1, HIGHEST + 1)])
@pytest.mark.requirement("AQ-4")
def test_ranges_that_cannot_be_encoded(lengths: tuple[int, ...]) -> None:
    with pytest.raises(LocalProtocolError):
        varint.encode_ranges(lengths)
