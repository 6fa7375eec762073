"""From batches to messages: what leaves as one plain message, and what is left to the call."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest

from aqueduct._speedups.calls.batch_sender import BatchSender, InFlightWindow, SendWaker
from aqueduct._speedups.loop.waiter import Waiter
from aqueduct.arrow.encode import Encoded, Encoder
from aqueduct.errors import SchemaMismatch
from aqueduct.protocol.common import effects
from tests.speedups.test_posting import Half, Streams

WORDS = pa.schema([pa.field("word", pa.string())])


def batch_of(*words: str) -> pa.RecordBatch:
    return pa.record_batch([pa.array(words, pa.string())], schema=WORDS)


class Source:
    """Batches as a call has them, without a limit of their bytes."""

    def __init__(self) -> None:
        self.encoder = Encoder(WORDS)
        self.compression = ""
        self.encoded: list[str] = []

    def encode(self, batch: pa.RecordBatch) -> Encoded:
        self.encoded.append(self.compression)
        return self.encoder.encode(batch)


class Call:
    """A call that notes what is left to it."""

    def __init__(self, row: Half | None, batches: int = 100, most: int = 1 << 20) -> None:
        self.flushes = 0
        window = InFlightWindow(batches, 1 << 30)
        self.sender = BatchSender(self, window, b"number", most, self.flush, 1 << 40)
        self.sender.row = row
        self.sent: list[tuple[int, int]] = []
        self.asked = 0
        self.finished = False

    def flush(self) -> None:
        self.flushes += 1

    @property
    def writable(self) -> bool:
        self.asked += 1
        return self.sender.row is None

    def send(self, encoded: Encoded, number: int) -> None:
        self.sent.append((encoded.size, number))

    def fed(self, size: int) -> None:
        raise AssertionError("no batch here is large")

    def finish(self) -> None:
        self.finished = True


def payloads(half: Half) -> bytes:
    told = half.streams.told
    assert [effect[:2] for effect in told] == [(effects.WRITE, 0)]
    return b"".join(told[0][2])


def test_batches_leave_as_messages_until_they_are_all() -> None:
    call = Call(half := Half(Streams()))
    source = Source()
    batches = [batch_of(word) for word in ("one", "two", "three", "four", "five")]
    rest = iter(batches)
    assert call.sender.feed(source, rest, 2) is None
    assert (call.sender.moved, call.flushes, call.finished) == (2, 1, False)
    assert call.sender.feed(source, rest, 9) is True
    assert (call.sender.moved, call.flushes, call.finished) == (5, 2, True)
    assert call.sender.feed(source, rest, 9) is True and call.flushes == 2  # there was nothing
    assert call.sender.window is not None and call.sender.window.sent == 5
    data, encoder = payloads(half), Encoder(WORDS)
    for number, batch in enumerate(batches):
        head = b"\x06number\x01%d" % number
        payload = b"".join(encoder.encode(batch).buffers)
        assert data.index(head) < data.index(payload)
        data = data[data.index(payload) + len(payload) :]
    assert not data and not source.encoded and not call.sent


def test_it_ends_where_there_is_no_room() -> None:
    call, source = Call(Half(Streams()), batches=3), Source()
    assert call.sender.feed(source, iter([batch_of("x")] * 9), 9) is False
    assert (call.sender.moved, call.asked) == (3, 0)  # the window: nobody asks the channel
    call = Call(half := Half(Streams()))
    stream = half.message_stream
    assert stream is not None
    stream.dead = True
    assert call.sender.feed(source, iter([batch_of("x")]), 9) is False
    assert (call.sender.moved, call.asked, call.flushes) == (0, 1, 0)


@pytest.mark.parametrize("reason", ["no row", "an error", "too large"])
def test_what_is_not_one_message_of_a_live_call_is_left_to_it(reason: str) -> None:
    half = None if reason == "no row" else Half(Streams())
    call, source = Call(half, most=100 if reason == "too large" else 1 << 20), Source()
    if half is not None and reason == "an error":
        half.error = ValueError()
    batch = batch_of("word" * 100)
    call.sender.give(source, batch)
    call.sender.give(source, batch)
    size = Encoder(WORDS).encode(batch).size
    assert call.sent == [(size, 0), (size, 1)]
    assert (call.sender.moved, call.flushes) == (0, 0)
    assert len(source.encoded) == (2 if reason == "too large" else 0)


def test_compression_is_the_sources_work() -> None:
    call, source = Call(Half(Streams())), Source()
    call.sender.give(source, batch_of("a"))
    call.sender.compression = "lz4"
    call.sender.give(source, batch_of("b"))
    assert source.encoded == ["lz4"]
    assert (call.sender.moved, call.flushes) == (2, 2)


def test_what_goes_wrong_stops_it_after_what_was_sent() -> None:
    call, source = Call(Half(Streams())), Source()

    def batches() -> Iterator[Any]:
        yield batch_of("right")
        yield pa.record_batch([pa.array([1])], names=["wrong"])

    rest = batches()
    with pytest.raises(SchemaMismatch):
        call.sender.feed(source, rest, 9)
    assert (call.sender.moved, call.flushes, call.finished) == (1, 1, False)

    def failing() -> Iterator[Any]:
        yield batch_of("right")
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        call.sender.feed(source, failing(), 9)
    assert (call.sender.moved, call.flushes, call.finished) == (2, 2, False)


def test_what_comes_when_the_call_is_over_is_dropped() -> None:
    call, source = Call(Half(streams := Streams())), Source()
    call.sender.close()
    assert call.sender.over and call.sender.may_send
    call.sender.give(source, batch_of("a"))
    assert call.sender.feed(source, iter([batch_of("b")]), 9) is True
    assert (call.sender.moved, call.flushes, call.asked, call.finished) == (0, 0, 0, False)
    assert not streams.told and not call.sent


def test_a_call_that_ends_as_its_batch_is_made_is_asked_nothing_more() -> None:
    call, source = Call(Half(Streams())), Source()

    def ending() -> Iterator[pa.RecordBatch]:
        yield batch_of("a")
        call.sender.close()

    assert call.sender.feed(source, ending(), 9) is True
    assert (call.sender.moved, call.flushes, call.finished) == (1, 1, False)


def test_a_call_without_a_window_sends_nothing() -> None:
    sender = BatchSender(Call(None), None, b"number", 10, list, 10)
    with pytest.raises(TypeError, match="without a window"):
        sender.feed(Source(), iter(()), 1)
    with pytest.raises(TypeError, match="without a window"):
        sender.give(Source(), batch_of("x"))


class Steps:
    """Who was to be stepped."""

    def __init__(self) -> None:
        self.stepped: list[Waiter] = []

    def step(self, waiter: Waiter) -> None:
        self.stepped.append(waiter)


async def test_the_feeding_task_is_stepped_once_there_is_room() -> None:
    call, feeding, steps = Call(Half(Streams()), batches=1), SendWaker(), Steps()
    feeding.wake()  # nobody waits yet
    call.sender.give(Source(), batch_of("a"))
    assert not call.sender.may_send
    waiter = feeding.wait(call.sender, asyncio.get_running_loop(), steps)
    feeding.wake()
    assert (steps.stepped, waiter.woken) == ([], False)
    assert call.sender.window is not None
    call.sender.window.settle(0)
    feeding.wake()
    feeding.wake()  # as it is about to go on
    assert steps.stepped == [waiter] and waiter.woken
    await waiter  # so it returns at once


async def test_the_feeding_task_is_stepped_when_the_call_is_over() -> None:
    call, feeding, steps = Call(None, batches=1), SendWaker(), Steps()
    assert call.sender.window is not None
    call.sender.window.send(1)
    waiter = feeding.wait(call.sender, asyncio.get_running_loop(), steps)
    feeding.wake()
    assert not steps.stepped
    call.sender.close()
    feeding.wake()
    assert steps.stepped == [waiter]


async def test_a_call_without_a_window_is_not_fed_by_a_task() -> None:
    sender = BatchSender(Call(None), None, b"key", 1, list, 1 << 20)
    with pytest.raises(TypeError, match="without a window"):
        SendWaker().wait(sender, asyncio.get_running_loop(), Steps())
