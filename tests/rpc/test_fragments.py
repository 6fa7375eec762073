"""Payloads in fragments: every byte once, in its place, and nothing out of turn."""

from __future__ import annotations

import random

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aqueduct._speedups.base.buffers import AlignedBuffer
from aqueduct.arrow.decode import Decoder
from aqueduct.arrow.encode import Encoded, Encoder
from aqueduct.errors import BadCall, BatchTooLarge, LocalProtocolError
from aqueduct.rpc.fragments import Assembler, batch_headers, fragments
from aqueduct.rpc.keys import BATCH, FRAGMENT


def encoded_of(*parts):
    return Encoded(list(parts), sum(map(len, parts)))


def fragment(number, offset, total):
    return ((BATCH, b"%d" % number), (FRAGMENT, b"%d/%d" % (offset, total)))


@pytest.mark.requirement("AC-27")
def test_a_small_payload_is_one_message_of_its_own_buffers():
    buffers = [b"head", memoryview(b"body")]
    [(headers, payload)] = fragments(encoded_of(*buffers), 7, limit=8)
    assert headers == ((b"arrow-batch-2179bf", b"7"),)
    assert payload is not None and all(a is b for a, b in zip(payload, buffers, strict=True))


@pytest.mark.requirement("AC-28")
def test_a_large_one_is_cut_at_exact_places():
    data = bytes(range(100))
    encoded = encoded_of(data[:3], memoryview(data)[3:60], data[60:61], data[61:])
    made = list(fragments(encoded, 3, limit=40))
    assert [headers for headers, _ in made] == [
        ((b"arrow-batch-2179bf", b"3"), (b"arrow-piece-99faef", b"0/100")),
        ((b"arrow-batch-2179bf", b"3"), (b"arrow-piece-99faef", b"40/100")),
        ((b"arrow-batch-2179bf", b"3"), (b"arrow-piece-99faef", b"80/100")),
    ]
    assert [b"".join(buffers) for _, buffers in made] == [data[:40], data[40:80], data[80:]]


def test_nothing_is_copied_in_cutting():
    data = bytearray(1000)
    whole = pa.py_buffer(data).address
    made = list(fragments(encoded_of(b"head", memoryview(data)), 0, limit=300))
    parts = [pa.py_buffer(buffer) for _, buffers in made for buffer in buffers]
    assert [part.address - whole for part in parts[1:]] == [0, 296, 596, 896]


@pytest.mark.requirement("AC-28")
@given(st.lists(st.integers(0, 50), max_size=8), st.integers(1, 60))
def test_fragments_joined_are_the_payload(sizes, cut):
    data = random.Random(1).randbytes(sum(sizes))
    buffers, place = [], 0
    for size in sizes:
        buffers.append(memoryview(data)[place : place + size])
        place += size
    made = list(fragments(encoded_of(*buffers), 1, cut))
    assert b"".join(b"".join(payload) for _, payload in made) == data
    lengths = [sum(map(len, payload)) for _, payload in made]
    assert all(length == cut for length in lengths[:-1]) and 0 <= lengths[-1] <= cut
    assert len(made) == 1 or all(lengths)


def test_a_cut_that_cannot_be():
    with pytest.raises(LocalProtocolError, match="cannot be cut into fragments of 0 bytes"):
        next(fragments(encoded_of(b"x"), 0, limit=0))


def land(assembler, headers, data, placed=True):
    """A message as the channels give it: landed where it was to land, or elsewhere."""
    target = assembler.place(headers, len(data)) if placed else None
    if target is None:
        return data
    assert len(target) == len(data)
    target[:] = data
    return target


@given(st.data())
def test_what_is_put_together_is_what_was_cut(data):
    chance = random.Random(data.draw(st.integers(0, 1 << 32)))
    cut = data.draw(st.integers(1, 30))
    sizes = data.draw(st.lists(st.integers(1, 100), max_size=8))
    payloads = [chance.randbytes(size) for size in sizes]
    numbers = sorted(chance.randrange(4) for _ in payloads)
    messages = [
        (headers, b"".join(buffers))
        for number, payload in zip(numbers, payloads, strict=True)
        for headers, buffers in fragments(encoded_of(payload), number, cut)
    ]
    assembler, result = Assembler(), []
    waiting: list = []
    placed = data.draw(st.booleans())
    while messages or waiting:
        if messages and (not waiting or chance.random() < 0.6):
            headers, part = messages.pop(0)
            waiting.append((headers, land(assembler, headers, part, placed)))
        else:
            found = assembler.add(*waiting.pop(0))
            if found is not None:
                result.append((found[0], bytes(found[1])))
    assert result == list(zip(numbers, payloads, strict=True))


def test_pieces_land_in_one_aligned_buffer():
    data = bytes(range(200))
    assembler = Assembler()
    found = None
    for headers, buffers in fragments(encoded_of(data), 5, limit=64):
        assert found is None
        part = land(assembler, headers, b"".join(buffers))
        assert isinstance(part, memoryview)
        found = assembler.add(headers, part)
    assert found is not None
    number, payload = found
    assert number == 5
    assert isinstance(payload, AlignedBuffer) and payload.address % 64 == 0
    assert bytes(payload) == data


def test_a_whole_message_is_passed_on_as_it_is():
    assembler, payload = Assembler(), b"payload"
    assert assembler.place(batch_headers(4), len(payload)) is None
    number, same = assembler.add(batch_headers(4), payload) or (None, None)
    assert number == 4 and same is payload


@pytest.mark.requirement("AC-35")
def test_a_mark_has_no_payload():
    assembler = Assembler()
    assert assembler.place(batch_headers(9), 0) is None
    assert assembler.add(batch_headers(9), b"") == (9, b"")


@pytest.mark.requirement("AC-30")
def test_a_payload_above_the_limit_is_refused_before_memory_is_taken():
    huge = 1 << 62
    for size, headers in (
        (101, batch_headers(3)),
        (1, fragment(3, 0, 101)),
        (1, fragment(3, 0, huge)),
    ):
        for call in ("place", "add"):
            assembler = Assembler(100, where="the input of handler 'h'", peer="p", handler="h")
            with pytest.raises(BatchTooLarge) as caught:
                argument = size if call == "place" else bytes(size)
                getattr(assembler, call)(headers, argument)
            total = huge if b"/%d" % huge in headers[-1][1] else 101
            assert str(caught.value) == (
                f"the input of handler 'h': batch 3 has {total} bytes, above the limit of 100 "
                "(Calls.batch_limit); send fewer rows at a time"
            )
            assert (caught.value.peer, caught.value.handler) == ("p", "h")


BAD_HEADERS = {
    "no number": ((), "a message without the header arrow-batch-2179bf is no batch"),
    "two numbers": (
        ((BATCH, b"1"), (BATCH, b"1")),
        "the header arrow-batch-2179bf is there twice",
    ),
    "sign": (((BATCH, b"-1"),), "the header arrow-batch-2179bf is b'-1', which is not a number"),
    "zeros": (((BATCH, b"01"),), "the header arrow-batch-2179bf is b'01', which is not a number"),
    "empty": (((BATCH, b""),), "the header arrow-batch-2179bf is b'', which is not a number"),
    "other digits": (((BATCH, "٣".encode()),), "which is not a number"),
    "long": (((BATCH, b"1" * 99),), "which is not a number"),
    "large": (
        ((BATCH, b"9" * 19),),
        (
            "the header arrow-batch-2179bf is 9999999999999999999, which is not between 0 and "
            "9223372036854775807"
        ),
    ),
    "no total": (
        ((BATCH, b"1"), (FRAGMENT, b"0")),
        "the header arrow-piece-99faef is b'', which is not a number",
    ),
    "no offset": (((BATCH, b"1"), (FRAGMENT, b"/9")), "is b'', which is not a number"),
    "three numbers": (((BATCH, b"1"), (FRAGMENT, b"0/9/9")), "is b'9/9', which is not a number"),
}


@pytest.mark.parametrize(("headers", "text"), BAD_HEADERS.values(), ids=BAD_HEADERS)
def test_headers_that_are_no_batchs(headers, text):
    for call, argument in (("place", 4), ("add", b"data")):
        with pytest.raises(BadCall) as caught:
            getattr(Assembler(where="w", peer="p"), call)(headers, argument)
        assert str(caught.value).startswith("w: ")
        assert str(caught.value).endswith(text)
        assert caught.value.peer == "p"


@pytest.mark.requirement("AC-3")
def test_headers_of_others_are_ignored():
    assembler = Assembler()
    headers = ((b"other-aaaaaa", b"x"), *batch_headers(1), (b"other-aaaaaa", b"y"))
    assert assembler.add(headers, b"data") == (1, b"data")


@pytest.mark.requirement("AC-29")
@pytest.mark.parametrize(
    ("offset", "total", "size"), [(0, 10, 11), (10, 10, 1), (11, 10, 1), (0, 10, 0), (0, 0, 0)]
)
def test_pieces_outside_the_total(offset, total, size):
    text = f"a fragment of batch 2 at {offset}/{total} has {size} bytes"
    with pytest.raises(BadCall, match=text):
        Assembler().place(fragment(2, offset, total), size)
    with pytest.raises(BadCall, match=text):
        Assembler().add(fragment(2, offset, total), bytes(size))


@pytest.mark.requirement("AC-29")
@pytest.mark.parametrize("placed", [False, True])
@pytest.mark.parametrize(
    ("headers", "came"),
    [
        (fragment(1, 5, 30), "a fragment at 5/30 of batch 1"),
        (fragment(1, 11, 30), "a fragment at 11/30 of batch 1"),
        (fragment(1, 0, 30), "a fragment at 0/30 of batch 1"),
        (fragment(1, 10, 31), "a fragment at 10/31 of batch 1"),
        (fragment(2, 10, 30), "a fragment at 10/30 of batch 2"),
        (fragment(2, 0, 30), "a fragment at 0/30 of batch 2"),
        (batch_headers(1), "a whole message of batch 1"),
        (batch_headers(2), "a whole message of batch 2"),
    ],
)
def test_messages_out_of_turn(headers, came, placed):
    assembler = Assembler()
    first = land(assembler, fragment(1, 0, 30), bytes(10), placed)
    assert assembler.add(fragment(1, 0, 30), first) is None
    second = land(assembler, headers, bytes(10), placed)
    with pytest.raises(BadCall) as caught:
        assembler.add(headers, second)
    assert str(caught.value) == (f"{came} came when the next fragment was due of batch 1, at 10/30")


def test_a_message_that_is_not_where_it_was_to_land():
    assembler = Assembler()
    first = assembler.place(fragment(1, 0, 30), 20)
    assert first is not None
    assert assembler.place(fragment(1, 20, 30), 10) is not None
    assembler.add(fragment(1, 0, 30), first)
    with pytest.raises(LocalProtocolError, match="a fragment of batch 1 at 20/30 did not land in"):
        assembler.add(fragment(1, 20, 30), bytes(10))


@pytest.mark.requirement("AC-29")
def test_a_batch_that_begins_in_its_middle():
    with pytest.raises(BadCall, match="batch 1 begins with a fragment at 10/30"):
        Assembler().add(fragment(1, 10, 30), bytes(10))


def test_no_byte_is_given_away_twice():
    # What was read already would change under the reader.
    assembler = Assembler()
    first = assembler.place(fragment(1, 0, 30), 20)
    assert first is not None
    for again in (fragment(1, 0, 30), fragment(1, 10, 30), fragment(1, 21, 30)):
        assert assembler.place(again, 5) is None
    rest = assembler.place(fragment(1, 20, 30), 10)
    assert rest is not None
    assembler.add(fragment(1, 0, 30), first)
    assert assembler.add(fragment(1, 20, 30), rest) is not None
    assert assembler.place(fragment(1, 20, 30), 10) is None


@pytest.mark.requirement("AC-30")
def test_false_sizes_take_no_memory():
    # One reservation is made for the first; the others must wait until it is whole.
    assembler = Assembler(1 << 40)
    targets = [assembler.place(fragment(number, 0, 1 << 30), 1) for number in range(1000)]
    assert [target is not None for target in targets] == [True] + [False] * 999


def test_one_row_of_any_size_travels_in_one_buffer():
    size = 300 << 20
    value = pa.py_buffer(AlignedBuffer(size))
    offsets = pa.py_buffer(
        size.to_bytes(12, "little")[-4:] * 0 + bytes(8) + size.to_bytes(8, "little")
    )
    column = pa.Array.from_buffers(pa.large_binary(), 1, [None, offsets, value])
    batch = pa.record_batch([column], names=["blob"])
    assembler, found, count = Assembler(), None, 0
    for headers, buffers in fragments(Encoder(batch.schema).encode(batch), 0):
        length = sum(map(len, buffers))
        target = assembler.place(headers, length)
        assert target is not None and found is None
        found, count = assembler.add(headers, target), count + 1
        if count == 1:  # the rest would only cost time: zeros are as good as any
            target[:] = b"".join(buffers)
    assert found is not None and count == 76
    result = Decoder(batch.schema).decode(found[1])
    assert result.num_rows == 1
    data = result.column(0).buffers()[2]
    assert data.size == size
    start = pa.py_buffer(found[1]).address
    assert start < data.address < start + size + 4096


@pytest.mark.parametrize("value", [b"00", b"01", b"-1", b"+1", b" 1", b"", b"1_0", b"9" * 19, b"x"])
def test_numbers_that_are_not_well_said_are_refused(value):
    headers, assembler = ((BATCH, value),), Assembler(where="the input")
    for call in (lambda: assembler.place(headers, 5), lambda: assembler.add(headers, b"abcde")):
        with pytest.raises(BadCall, match=r"^the input: the header arrow-batch-2179bf is "):
            call()
    for good in (b"0", b"10", b"9" * 18, b"%d" % ((1 << 63) - 1)):
        headers = ((BATCH, good),)
        assert assembler.place(headers, 5) is None
        assert assembler.add(headers, b"abcde") == (int(good), b"abcde")
        assert assembler.add(list(headers), b"abcde") == (int(good), b"abcde")
        assert assembler.add((*headers, (b"other", b"")), b"abcde") == (int(good), b"abcde")


def test_a_payload_of_wider_items_counts_in_bytes():
    payload = memoryview(bytes(64)).cast("q")
    assert Assembler(64).add(((BATCH, b"7"),), payload) == (7, payload)
    with pytest.raises(BatchTooLarge, match="has 64 bytes, above the limit of 63"):
        Assembler(63).add(((BATCH, b"7"),), payload)
    with pytest.raises(BatchTooLarge, match="has 64 bytes, above the limit of 63"):
        Assembler(63).place(((BATCH, b"7"),), 64)
