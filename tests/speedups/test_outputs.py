"""Answers of a handler: which leave as they are made, and how they are counted."""

from __future__ import annotations

import pyarrow as pa
import pytest

from aqueduct._speedups.calls.batch_outputs import OutputSender
from aqueduct._speedups.calls.batch_receiver import InputReceiver
from aqueduct.arrow.encode import Encoder
from tests.speedups.test_feeding import WORDS, batch_of, payloads
from tests.speedups.test_posting import Half, Streams


class Call:
    """A call that has its encoder and where its answers leave, and nothing else."""

    def __init__(self, row: Half | None, most: int = 1 << 20) -> None:
        self.flushes = 0
        self.input = InputReceiver()
        self.output = OutputSender(self.input)
        self.output.encoder = Encoder(WORDS)
        self.output.leave_by(row, b"number", most, self.flush)
        self.give, self.count = self.output.give, self.output.count

    def flush(self) -> None:
        self.flushes += 1

    @property
    def counters(self) -> tuple[int, int, int]:
        return self.output.batches_out, self.output.rows_out, self.output.bytes_out

    @property
    def settled(self) -> tuple[int, int]:
        return self.output.settled, self.output.settled_bytes


def test_answers_leave_in_order_and_are_counted() -> None:
    call = Call(half := Half(Streams()))
    call.input.bytes_in = 77
    batches = [batch_of("a"), batch_of("b", "c"), batch_of("d")]
    for number, batch in zip((0, 5, 3), batches, strict=True):
        assert call.give(batch, number)
    data, size = payloads(half), 0
    for number, batch in zip((0, 5, 3), batches, strict=True):
        payload = b"".join(Encoder(WORDS).encode(batch).buffers)
        assert data.index(b"\x06number\x01%d" % number) < data.index(payload)
        data = data[data.index(payload) + len(payload) :]
        size += len(payload)
    assert not data
    assert call.counters == (3, 4, size) and call.flushes == 3
    assert call.settled == (6, 77)


def test_what_was_sent_otherwise_is_counted_too() -> None:
    call = Call(None)
    call.input.bytes_in = 5
    call.count(2, 1000)
    call.count(1, 10)
    assert call.counters == (2, 0, 1010) and call.settled == (3, 5)


@pytest.mark.parametrize(
    "reason", ["no row", "an error", "no room", "too large", "no encoder", "another schema"]
)
def test_the_rest_is_refused_and_nothing_is_done(reason: str) -> None:
    half = Half(streams := Streams())
    call = Call(None if reason == "no row" else half, 100 if reason == "too large" else 1 << 20)
    batch = batch_of("word" * 100)
    if reason == "an error":
        half.error = ValueError()
    elif reason == "no room":
        streams._open[0].dead = True
    elif reason == "no encoder":
        call.output.encoder = None
    elif reason == "another schema":
        batch = pa.record_batch([pa.array([1])], names=["number"])
    assert call.give(batch, 0) is False
    assert call.counters == (0, 0, 0) and not call.flushes and call.settled == (0, 0)
    assert not streams.told
