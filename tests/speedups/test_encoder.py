"""The encoders: bytes like the model's, large buffers untouched, bad arguments named."""

from __future__ import annotations

from array import array
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aqueduct._speedups import channels as codec
from aqueduct._speedups.base.buffers import AlignedBuffer, BufferSlice, bytes_copied
from aqueduct.errors import LocalProtocolError
from tests.reference import codec as model
from tests.speedups.strategies import headers, piece_of

LARGE = codec.COALESCE
requirement = pytest.mark.requirement
HIGHEST = (1 << 64) - 1


def address(buffer: Any) -> int:
    return int(pa.py_buffer(buffer).address)


@given(
    st.lists(st.sampled_from([0, 1, 100, LARGE - 1, LARGE, LARGE + 1]), max_size=8),
    headers,
)
def test_payloads_of_several_buffers(sizes: list[int], pairs: model.Headers) -> None:
    parts = [bytes([number]) * size for number, size in enumerate(sizes)]
    before = bytes_copied()
    buffers = codec.encode_message(5, parts, pairs)
    assert bytes_copied() - before == sum(size for size in sizes if size < LARGE)
    frame = ("MESSAGE", 5, pairs, (), b"".join(parts))
    assert b"".join(buffers) == model.encode([frame])
    # The large ones are the same objects; between them at most one joined run.
    large = [part for part in parts if len(part) >= LARGE]
    assert [buffer for buffer in buffers if any(buffer is part for part in large)] == large
    assert len(buffers) <= 2 * len(large) + 1
    assert all(buffers)


@pytest.mark.parametrize(
    "payload",
    [
        b"b" * LARGE,
        bytearray(LARGE),
        memoryview(bytearray(2 * LARGE))[100 : 100 + LARGE],
        AlignedBuffer(LARGE),
        array("q", range(LARGE)),
        pa.py_buffer(bytes(LARGE)),
        pa.array(range(LARGE)).buffers()[1],
        memoryview(array("d", [0.5] * LARGE)),
        memoryview(bytes(LARGE)).cast("B", (2, LARGE // 2)),
        piece_of(bytes(LARGE)),
    ],
    ids=lambda payload: type(payload).__name__,
)
@pytest.mark.parametrize("alone", [True, False])
def test_addresses_of_large_buffers_are_unchanged(payload: Any, alone: bool) -> None:
    size = memoryview(payload).nbytes
    before = bytes_copied()
    head, body = codec.encode_message(0, payload if alone else [payload])
    assert bytes_copied() == before
    assert address(body) == address(memoryview(payload).cast("B") if size else payload)
    assert len(body) == size
    assert bytes(memoryview(body)[size - 1 :]) == bytes(memoryview(payload).cast("B")[-1:])
    if type(payload) in (bytes, bytearray, BufferSlice):
        assert body is payload
    assert bytes(head).endswith(model.varint(size))


def test_a_mebibyte_is_not_copied() -> None:
    before = bytes_copied()
    codec.encode_message(0, b"m" * (1 << 20))
    codec.encode_message(0, [b"m" * (1 << 20), bytearray(1 << 20)])
    assert bytes_copied() == before


def test_small_messages_are_one_buffer() -> None:
    assert codec.encode_message(0) == [b"\x04\x00\x00\x00\x00"]
    assert codec.encode_message(0, []) == [b"\x04\x00\x00\x00\x00"]
    assert codec.encode_message(1, b"ab") == [b"\x04\x01\x00\x00\x02ab"]
    assert codec.encode_message(1, memoryview(b"xaby")[1:3]) == [b"\x04\x01\x00\x00\x02ab"]
    parts: list[bytes | bytearray] = [b"a", bytearray(b"b")]
    assert codec.encode_message(1, iter(parts)) == [b"\x04\x01\x00\x00\x02ab"]


def test_headers_and_attachments_of_other_kinds() -> None:
    pairs = [[b"k", b"v"]]
    expected = codec.encode_message(0, b"", ((b"k", b"v"),), ((8, ((b"k", b"v"),)),))
    assert codec.encode_message(0, b"", pairs, [[8, pairs]]) == expected  # type: ignore[list-item]
    given = codec.encode_message(
        num=0,
        attachments=iter([(8, iter(pairs))]),
        headers=iter(pairs),
    )
    assert given == expected
    assert codec.encode_connection_headers(iter(pairs)) == b"\x02\x04\x01k\x01v"


@pytest.mark.requirement("AQ-12")
@pytest.mark.requirement("AQ-13")
@pytest.mark.requirement("AQ-19")
@pytest.mark.requirement("AQ-22")
@pytest.mark.requirement("AQ-23")
def test_constants() -> None:
    assert codec.VERSION.hex() == "ef505fa6600f408e41515545445543540b302e302e302d4146544552"
    plain = [codec.ACK_VERSION, codec.CANCEL_SENDER, codec.CLOSE_RECEIVER, codec.FORGET_CHANNEL]
    assert plain == [b"\x01", b"\x07", b"\x0a", b"\x0b"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((-1,), "the message number is -1"),
        pytest.param((HIGHEST,), r"must be 0 to 18446744073709551614", marks=requirement("AQ-R13")),
        ((0, b"", [(b"", b"v")]), "header key b'' must be ASCII and not empty"),
        ((0, b"", [(b"caf\xc3", b"v")]), "must be ASCII"),
        ((0, b"", [(b"k",)]), r"it must be \(key, value\)"),
        ((0, b"", (), [(0, ())]), "the entrypoint cannot be attached"),
        ((0, b"", (), [(8, ()), (8, ())]), "channel 8 is attached twice"),
        ((0, b"", (), [(8, ()), (9, ())]), "different creators"),
        ((0, b"", (), [(1 << 64, ())]), "an attached channel is"),
        ((0, b"", (), [(8, [(b"\xff", b"")])]), "must be ASCII"),
    ],
)
def test_bad_messages(arguments: tuple[Any, ...], text: str) -> None:
    with pytest.raises(LocalProtocolError, match=text):
        codec.encode_message(*arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        ("0",),
        (0.5,),
        (0, "text"),
        (0, None),
        (0, [b"a", "b"]),
        (0, b"", [("k", b"v")]),
        (0, b"", [(b"k", "v")]),
        (0, b"", 5),
        (0, b"", (), [8]),
    ],
)
def test_arguments_of_wrong_types(arguments: tuple[Any, ...]) -> None:
    with pytest.raises(TypeError):
        codec.encode_message(*arguments)


def test_payloads_that_are_not_contiguous() -> None:
    strided = memoryview(bytes(100))[::2]
    payloads: list[Any] = [strided, [b"a", strided]]
    for payload in payloads:
        with pytest.raises(BufferError, match="not contiguous"):
            codec.encode_message(0, payload)


def test_the_buffers_of_a_failed_message_are_released() -> None:
    held = bytearray(LARGE)
    with pytest.raises(TypeError):
        codec.encode_message(0, [held, "text"])  # type: ignore[list-item]
    held.append(0)  # no view is left


@pytest.mark.parametrize(
    ("encode", "arguments", "text"),
    [
        (codec.encode_route_to, (-1,), "the channel is -1"),
        (codec.encode_route_to, (1 << 64,), "the channel is 18446744073709551616"),
        pytest.param(codec.encode_sent_unreliable, (0,), "never sent", marks=requirement("AQ-R17")),
        (codec.encode_finish_sender, (-1,), "the count of messages is -1"),
        (codec.encode_ack_reliable, ((),), "pairs of gap and range"),
        (codec.encode_ack_reliable, ((1,),), "pairs of gap and range"),
        pytest.param(
            codec.encode_ack_reliable,
            ((0, 0),),
            "range number 1 is zero",
            marks=requirement("AQ-20"),
        ),
        (codec.encode_ack_reliable, ((0, 1, 0, 1),), "range number 2 is zero"),
        pytest.param(
            codec.encode_ack_reliable,
            ((1, HIGHEST),),
            r"above 2\^64 - 1",
            marks=requirement("AQ-R2"),
        ),
        (codec.encode_ack_reliable, ((0, -1),), "a length of a range is -1"),
        (codec.encode_ack_nack_unreliable, (0, ()), "nothing to say"),
        (codec.encode_ack_nack_unreliable, (0, (0,)), "nothing to say"),
        (codec.encode_ack_nack_unreliable, (0, (1, 0)), "range number 1 is zero"),
        (codec.encode_ack_nack_unreliable, (-1, (1,)), "the channel is -1"),
        (codec.encode_connection_headers, ([(b"", b"")],), "must be ASCII and not empty"),
    ],
)
def test_other_bad_frames(encode: Any, arguments: tuple[Any, ...], text: str) -> None:
    with pytest.raises(LocalProtocolError, match=text):
        encode(*arguments)
