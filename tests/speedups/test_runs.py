"""Runs of messages: they take what ``Decoder.next`` would give, and no more."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aqueduct._speedups import channels as codec
from aqueduct._speedups.channels.receiver import MessageBatch, Received
from aqueduct._speedups.channels.tracker import ReceivedNumbers
from aqueduct.errors import FrameError, LimitExceeded
from tests.reference import tracker as model
from tests.reference.codec import Frame
from tests.speedups.strategies import (
    HIGHEST,
    as_tuple,
    client_decoder,
    cut,
    cuts,
    encode_frames,
    message,
    read_all,
    sequences,
)

NO_END = (1 << 63) - 1


def taken_as_tuple(received: Received) -> tuple[Any, ...]:
    assert received.reliable
    assert not received.dropped
    return (
        "MESSAGE",
        received.number,
        received.headers,
        received.attachments,
        bytes(received.payload),
    )


@given(sequences(), cuts, st.integers(1, 4), st.integers(0, 600), st.integers(0, 50))
def test_runs_against_the_model(
    sequence: tuple[list[Frame], bool, bool],
    places: list[int],
    range_limit: int,
    room: int,
    overhead: int,
) -> None:
    frames, from_server, datagram = sequence
    data = encode_frames(frames)
    whole = list(read_all(codec.FrameDecoder(from_server=from_server, datagram=datagram), [data]))
    sizes = iter([frame for frame in whole if isinstance(frame, codec.MessageFrame)])
    decoder = codec.FrameDecoder(from_server=from_server, datagram=datagram)
    numbers, expected = ReceivedNumbers(range_limit), model.ReceivedNumbers(range_limit)
    seen: list[Any] = []
    for piece in cut(data, places):
        decoder.feed(piece)
        while True:
            run = MessageBatch()
            frame = run.read(decoder, numbers, overhead, room)
            for received in run.messages:
                twin = next(sizes)
                assert received.charge == twin.size + twin.overhead + overhead
                assert received.attachments == ()
                assert expected.add(received.number)
            seen += map(taken_as_tuple, run.messages)
            charges = [received.charge for received in run.messages]
            assert run.charge == sum(charges)
            assert sum(charges[:-1]) <= room
            if frame is None and run.charge <= room:
                break
            if frame is not None:
                seen.append(as_tuple(frame))
            if isinstance(frame, codec.MessageFrame):
                next(sizes)
                if not frame.attachments:
                    with pytest.raises((LimitExceeded, AssertionError)):
                        assert expected.add(frame.num)
    assert seen == frames
    assert numbers.count == expected.count
    assert numbers.take_ack() == expected.take_ack()


def test_a_number_seen_before_is_given_back() -> None:
    decoder, numbers, run = client_decoder(), ReceivedNumbers(), MessageBatch()
    decoder.feed(message(0, b"a") + message(1, b"b") + message(0, b"c") + message(2, b"d"))
    frame = run.read(decoder, numbers, 1, NO_END)
    assert isinstance(frame, codec.MessageFrame)
    assert (frame.num, frame.payload) == (0, b"c")
    assert [received.payload for received in run.messages] == [b"a", b"b"]
    assert run.charge == 4
    assert run.read(decoder, numbers, 1, NO_END) is None
    assert [received.number for received in run.messages] == [0, 1, 2]
    assert numbers.take_ack() == (0, 3)


def test_one_hole_too_many_is_given_back_and_changes_nothing() -> None:
    decoder, numbers, run = client_decoder(), ReceivedNumbers(2), MessageBatch()
    decoder.feed(message(0) + message(5) + message(9) + message(1))
    frame = run.read(decoder, numbers, 0, NO_END)
    assert isinstance(frame, codec.MessageFrame)
    assert frame.num == 9
    assert (numbers.count, numbers.pending) == (2, 2)
    run.read(decoder, numbers, 0, NO_END)
    assert [received.number for received in run.messages] == [0, 5, 1]


def test_the_highest_number_is_for_its_reader_to_refuse() -> None:
    decoder, numbers, run = client_decoder(), ReceivedNumbers(), MessageBatch()
    decoder.feed(b"\x04" + b"\xff" * 9 + b"\x01" + b"\x00\x00\x00")
    frame = run.read(decoder, numbers, 0, NO_END)
    assert isinstance(frame, codec.MessageFrame)
    assert frame.num == HIGHEST
    assert not run.messages
    assert numbers.count == 0


def test_without_room_nothing_is_read() -> None:
    decoder, numbers, run = client_decoder(), ReceivedNumbers(), MessageBatch()
    decoder.feed(message(0) + message(1))
    assert run.read(decoder, numbers, 10, -1) is None
    assert not run.messages
    assert run.read(decoder, numbers, 10, 9) is None
    assert [received.number for received in run.messages] == [0]
    assert decoder.buffered


def test_what_came_before_an_error_is_there() -> None:
    decoder, numbers, run = client_decoder(), ReceivedNumbers(), MessageBatch()
    decoder.feed(message(0, b"good") + b"\x7f")
    with pytest.raises(FrameError):
        run.read(decoder, numbers, 0, NO_END)
    assert [received.payload for received in run.messages] == [b"good"]
    assert run.charge == 4
    with pytest.raises(FrameError):
        run.read(decoder, numbers, 0, NO_END)


def test_a_payload_without_room_ends_the_run() -> None:
    decoder, numbers, run = client_decoder(), ReceivedNumbers(), MessageBatch()
    decoder.auto_admit = 3
    decoder.feed(message(0, b"abc") + message(1, b"abcd"))
    head = run.read(decoder, numbers, 0, 3 + 3)
    assert isinstance(head, codec.MessageHead)
    assert head.num == 1
    assert [received.number for received in run.messages] == [0]
    assert (run.admitted, run.charge, run.pending, run.largest) == (1, 3, -1, 0)
    decoder.admit()
    run = MessageBatch()
    assert run.read(decoder, numbers, 0, 0, 4) is None  # it was charged when it was admitted
    assert [received.payload for received in run.messages] == [b"abcd"]
    assert (run.admitted, run.charge, run.pending) == (0, 0, -1)


def test_what_was_charged_too_much_or_too_little_is_put_right() -> None:
    """A small message lands without asking: its reader charges it before it knows the size."""
    for charged in (2, 16_384):
        decoder, numbers, run = client_decoder(), ReceivedNumbers(), MessageBatch()
        whole = message(0, bytes(100), ((b"k", b"value"),))
        decoder.feed(whole[:50])
        assert run.read(decoder, numbers, 7, NO_END) is None
        assert (run.admitted, run.charge, run.pending) == (0, 0, -1)
        decoder.feed(whole[50:] + message(1))
        assert run.read(decoder, numbers, 7, NO_END, charged) is None
        first, second = run.messages
        assert run.charge == first.charge + second.charge - (charged + 7)
        assert (run.admitted, run.pending) == (1, -1)


@given(
    st.lists(st.integers(0, 9000), max_size=8), cuts, st.integers(-1, 5000), st.integers(0, 30_000)
)
def test_what_is_admitted_is_charged_once_whatever_the_pieces(
    sizes: list[int], places: list[int], auto_admit: int, room: int
) -> None:
    """Runs that follow each other, as a reader makes them; what has no room is admitted by it."""
    payloads = [bytes([number]) * size for number, size in enumerate(sizes)]
    data = b"".join(message(number, payload) for number, payload in enumerate(payloads))
    decoder, numbers = client_decoder(), ReceivedNumbers()
    decoder.auto_admit = auto_admit
    taken: list[tuple[int, bytes]] = []
    charged, admitted, pending = 0, 0, -1
    for piece in cut(data, places):
        decoder.feed(piece)
        while True:
            run = MessageBatch()
            frame = run.read(decoder, numbers, 7, room, pending)
            taken += [(received.number, bytes(received.payload)) for received in run.messages]
            charged, admitted, pending = charged + run.charge, admitted + run.admitted, run.pending
            assert run.largest <= max(room, 0)
            assert pending == -1 or pending > auto_admit
            if isinstance(frame, codec.MessageHead):
                assert frame.size + 7 > room - run.charge
                decoder.admit()
                charged, admitted, pending = charged + frame.size + 7, admitted + 1, frame.size
            elif run.charge <= room:
                break
    assert taken == list(enumerate(payloads))
    assert (charged, admitted, pending) == (sum(sizes) + 7 * len(sizes), len(sizes), -1)
    assert numbers.count == len(sizes)


def test_heads_that_somebody_must_look_at_are_given_back() -> None:
    decoder, numbers = client_decoder(), ReceivedNumbers()
    decoder.auto_admit = -1
    long = ((b"plain", b"x" * 100),)
    headers = [(), ((b"plain", b"1"),), ((b"plain", b"1"), (b"asked", b"2")), long]
    decoder.feed(b"".join(message(n, bytes(5000), pairs) for n, pairs in enumerate(headers)))
    decoder.feed(message(4, bytes(5000), (), ((4, ()),)) + message(0, bytes(5000)))
    decoder.feed(b"\x04" + b"\xff" * 9 + b"\x01" + b"\x00\x00\x05abcde")
    for given_back, read in ((2, [0, 1]), (4, [3]), (0, []), (HIGHEST, [])):
        run = MessageBatch()
        head = run.read(decoder, numbers, 0, NO_END, -1, b"asked")
        assert isinstance(head, codec.MessageHead)
        assert head.num == given_back
        assert [received.number for received in run.messages] == read
        assert run.pending == -1
        decoder.admit()
        assert isinstance(decoder.next(), codec.MessageFrame)


def test_a_number_that_two_streams_declared_is_given_back_once_whole() -> None:
    numbers = ReceivedNumbers()
    first, second = client_decoder(), client_decoder()
    for decoder in (first, second):
        decoder.auto_admit = -1
        decoder.feed(message(3, bytes(5000))[:1000])
        run = MessageBatch()
        assert run.read(decoder, numbers, 1, NO_END) is None
        assert (run.pending, run.charge, run.admitted, run.largest) == (5000, 5001, 1, 5000)
    for decoder in (first, second):
        decoder.feed(message(3, bytes(5000))[1000:])
    run = MessageBatch()
    assert run.read(first, numbers, 1, NO_END, 5000) is None
    assert (run.pending, run.charge, run.admitted) == (-1, 0, 0)
    frame = run.read(second, numbers, 1, NO_END, 5000)
    assert isinstance(frame, codec.MessageFrame)
    assert run.pending == 5000  # still charged: whoever refuses it gives that back


def test_large_headers_stay_bytes_until_they_are_asked_for() -> None:
    pairs = tuple((b"key", bytes([k]) * 20) for k in range(200))
    decoder, numbers, run = client_decoder(), ReceivedNumbers(), MessageBatch()
    decoder.feed(b"".join(codec.encode_message(0, b"", pairs)))
    run.read(decoder, numbers, 0, NO_END)
    assert run.messages[0].headers == pairs
    assert run.messages[0].charge == 200 * 25


def test_a_received_message() -> None:
    received = Received(7, ((b"k", b"v"),), ((None, ()),), b"payload", 519, reliable=False)
    assert (received.number, received.headers, received.charge) == (7, ((b"k", b"v"),), 519)
    assert received.attachments == ((None, ()),)
    assert not received.reliable
    received.payload, received.dropped = b"", True
    assert (received.payload, received.dropped) == (b"", True)
    assert repr(received) == "<Received: message 7, 1 attachments>"
