"""Batches in one step: the plain ones, and nothing else."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aqueduct._speedups.arrow.reader import BatchReader
from aqueduct._speedups.calls.batch_receiver import AnswerReceiver, InputReceiver
from aqueduct._speedups.calls.batch_sender import InFlightWindow
from aqueduct._speedups.channels.receiver import MessageBatch, ReceiveBudget, Received, ReceiveQueue
from aqueduct._speedups.channels.tracker import ReceivedNumbers
from aqueduct.arrow.decode import Decoder
from aqueduct.arrow.encode import Encoder
from aqueduct.arrow.layout import plan
from aqueduct.errors import BadCall
from aqueduct.rpc.fragments import Assembler, batch_headers
from aqueduct.rpc.keys import BATCH, FRAGMENT
from tests.speedups.strategies import client_decoder, message

SCHEMA = pa.schema([("x", pa.int64())])
LIMIT = 100_000


def received(*messages: tuple[Any, bytes]) -> list[Received]:
    """Messages of (headers, payload) as they come from a stream."""
    decoder, run = client_decoder(), MessageBatch()
    for number, (headers, payload) in enumerate(messages):
        decoder.feed(message(number, payload, headers))
    assert run.read(decoder, ReceivedNumbers(), 512, 1 << 30) is None
    assert len(run.messages) == len(messages)
    return run.messages


class Room:
    """A queue, and how often it was told that there is room."""

    def __init__(self, *messages: Received) -> None:
        self.budget = ReceiveBudget()
        self.queue = ReceiveQueue(self.budget)
        self.told = 0
        for each in messages:
            self.queue.charge(each.charge, 1)
            self.queue.push(each)

    def came(self) -> None:
        self.told += 1

    def inputs(self) -> InputReceiver:
        inputs = InputReceiver()
        inputs.arrive_by(self.queue, self.came, BATCH, LIMIT)
        return inputs

    def answers(self, window: InFlightWindow | None = None) -> AnswerReceiver:
        answers = AnswerReceiver(window)
        answers.arrive_by(self.queue, self.came, BATCH, LIMIT)
        return answers


def payload_of(*values: int) -> bytes:
    batch = pa.record_batch([pa.array(values, pa.int64())], schema=SCHEMA)
    encoded = Encoder(SCHEMA, where="", peer="", handler="").encode(batch)
    return b"".join(map(bytes, encoded.buffers))


def test_batches_in_turn_are_taken_and_counted() -> None:
    payloads = [b"a", bytes(LIMIT), b"c" * 5000]
    room = Room(*received(*((batch_headers(n), each) for n, each in enumerate(payloads))))
    inputs = room.inputs()
    for count, payload in enumerate(payloads, start=1):
        assert bytes(inputs.take_whole()) == payload
        assert inputs.batches_in == inputs.moved == count
        assert inputs.bytes_in == sum(map(len, payloads[:count]))
    assert inputs.take_whole() is None
    assert (room.queue.charged, room.queue.outstanding, room.told) == (0, 0, 0)
    assert inputs.rows_in == inputs.taken == 0


def test_nothing_is_taken_from_nowhere() -> None:
    inputs = InputReceiver()
    assert inputs.take_whole() is inputs.next_batch() is None
    inputs.arrive_by(None, print, BATCH, LIMIT)
    assert inputs.take_whole() is None
    with pytest.raises(ValueError, match="127 bytes"):
        inputs.arrive_by(None, print, b"k" * 128, LIMIT)
    with pytest.raises(TypeError):
        inputs.arrive_by("no queue", print, BATCH, LIMIT)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("headers", "payload"),
    [
        ((), b"payload"),
        (((b"arrow-batch-2179be", b"0"),), b"payload"),
        ((*batch_headers(0), *batch_headers(0)), b"payload"),
        ((*batch_headers(0), (FRAGMENT, b"0/14")), b"payload"),
        ((*batch_headers(0), (b"k", b"")), b"payload"),
        (((b"k", b"0"), *batch_headers(0)), b"payload"),
        (batch_headers(0), bytes(LIMIT + 1)),
        (batch_headers(10**18), b"payload"),
    ],
)
def test_what_is_not_plain_is_left_where_it_is(headers: Any, payload: bytes) -> None:
    room = Room(*received((headers, payload), (batch_headers(0), b"next")))
    for arrivals in (room.inputs(), room.answers()):
        assert arrivals.take_whole() is None
        assert len(room.queue) == 2
        assert room.queue.charged == sum(each.charge for each in room.queue)
        assert arrivals.moved == 0


def test_batches_out_of_turn_and_marks_are_no_inputs() -> None:
    for number, payload in ((1, b"early"), (0, b"")):
        room = Room(*received((batch_headers(number), payload)))
        assert room.inputs().take_whole() is None
        assert len(room.queue) == 1


def test_what_the_core_has_to_look_at_is_left_to_it() -> None:
    [plain] = received((batch_headers(0), b"payload"))
    of = {"number": 0, "headers": batch_headers(0), "payload": b"payload", "charge": 7}
    dropped = received((batch_headers(0), b"payload"))
    dropped[0].dropped = True
    strange = received((batch_headers(0), b"payload"))
    strange[0].payload = memoryview(b"payload")
    for first in (
        Received(attachments=(("half", ()),), **of),  # type: ignore[arg-type]
        Received(attachments=(), reliable=False, **of),  # type: ignore[arg-type]
        Received(attachments=(), **of),  # type: ignore[arg-type]
        dropped[0],
        strange[0],
    ):
        assert Room(first, plain).inputs().take_whole() is None
    assert Room(plain).inputs().take_whole() == b"payload"


def test_the_rest_of_a_batch_is_waited_for() -> None:
    inputs = Room(*received((batch_headers(0), b"payload"))).inputs()
    inputs.partial = True
    assert inputs.take_whole() is None
    inputs.partial = False
    assert inputs.take_whole() == b"payload"


@given(st.one_of(st.text("0123456789", max_size=20), st.text("09 +-_/a", max_size=4)))
def test_numbers_are_read_as_the_assembler_reads_them(text: str) -> None:
    value = text.encode()
    room = Room(*received((((BATCH, value),), b"payload")))
    inputs = room.inputs()
    try:
        expected = Assembler().add(((BATCH, value),), b"payload")
    except BadCall:
        expected = None
    if expected is not None and len(value) <= 18:  # longer ones are left to the general way
        inputs.batches_in = expected[0] + 1
        assert inputs.take_whole() is None
        inputs.batches_in = expected[0]
        assert inputs.take_whole() == b"payload"
    assert inputs.take_whole() is None
    assert room.answers().take_whole() is None


def test_answers_settle_batches_and_marks_are_passed_over() -> None:
    sent = [(0, b"first"), (3, b""), (3, b""), (4, b"second"), (7, b"")]
    room = Room(*received(*((batch_headers(number), payload) for number, payload in sent)))
    window = InFlightWindow(100, 1 << 30)
    for _ in range(20):
        window.send(1)
    answers = room.answers(window)
    assert answers.take_whole() == b"first"
    assert window.settled == 1
    assert answers.take_whole() == b"second"
    assert window.settled == 5
    assert answers.take_whole() is None
    assert window.settled == 8
    assert answers.moved == 5
    assert Room(*received((batch_headers(5), b"x"))).answers().take_whole() == b"x"


def test_marks_are_taken_by_themselves_up_to_the_next_answer() -> None:
    sent = [(0, b""), (3, b""), (4, b"answer"), (7, b"")]
    room = Room(*received(*((batch_headers(number), payload) for number, payload in sent)))
    window = InFlightWindow(100, 1 << 30)
    for _ in range(20):
        window.send(1)
    answers = room.answers(window)
    told: list[int] = []
    answers.on_change = lambda: told.append(window.settled)
    answers.heard()
    assert (window.settled, answers.moved, len(room.queue)) == (4, 2, 2)
    answers.heard()
    assert answers.moved == 2
    assert answers.take_whole() == b"answer"
    answers.heard()
    assert (window.settled, answers.moved, room.queue.charged) == (8, 4, 0)
    assert told == [4, 4, 8]  # once each time, when what they say is settled
    AnswerReceiver(window).heard()  # from nowhere, and nobody is told


def test_answers_keep_the_number_of_their_batch() -> None:
    sent = [(0, b"a"), (2, b"b"), (2, b"c"), (3, b""), (1, b"d")]
    room = Room(*received(*((batch_headers(number), payload) for number, payload in sent)))
    answers = room.answers()
    found = [answers.number]
    while answers.take_whole() is not None:
        found.append(answers.number)
    assert found == [-1, 0, 2, 2]
    assert len(room.queue) == 1  # one that falls is left to the general way


def test_room_that_others_wait_for_is_told_of() -> None:
    room = Room(*received((batch_headers(0), b"a"), (batch_headers(1), b"b")))
    inputs = room.inputs()
    room.budget.starved["another"] = None
    inputs.take_whole()
    assert room.told == 1
    room.budget.starved.clear()
    room.queue.waiting = OrderedDict({"a stream": None})
    inputs.take_whole()
    assert room.told == 2
    assert list(room.budget.relieved) == [room.queue]


def test_batches_are_read_where_they_can_be() -> None:
    decoder = Decoder(SCHEMA)
    assert decoder.reader is not None
    good, bad = payload_of(1, 2, 3), bytes(64)
    messages = received(*((batch_headers(n), each) for n, each in enumerate((good, bad, good))))
    inputs = Room(*messages).inputs()
    assert inputs.next_batch() is None
    assert inputs.batches_in == 0  # without a reader nothing is taken
    inputs.read_by(decoder.reader)
    batch = inputs.next_batch()
    assert batch.schema == SCHEMA
    assert batch.to_pydict() == {"x": [1, 2, 3]}
    assert (inputs.taken, inputs.rows_in, inputs.batches_in) == (1, 3, 1)
    assert not inputs.holds_payload
    for _ in range(2):  # what nobody has taken is not passed by
        assert inputs.next_batch() is None
        assert inputs.holds_payload
    assert inputs.take_whole() == bad
    assert (inputs.taken, inputs.rows_in, inputs.batches_in) == (1, 3, 2)
    assert inputs.next_batch().num_rows == 3
    assert inputs.next_batch() is None

    messages = received((batch_headers(0), b""), (batch_headers(0), good), (batch_headers(1), bad))
    answers = Room(*messages).answers()
    assert answers.next_batch() is None
    answers.read_by(decoder.reader)
    assert answers.next_batch().num_rows == 3
    assert answers.next_batch() is None
    assert answers.holds_payload
    assert answers.take_whole() == bad


def test_an_error_of_a_reader_is_left_to_who_reads_it_again() -> None:
    def refuse(address: int, schema: Any) -> Any:
        raise pa.ArrowInvalid("no")

    columns = plan(SCHEMA).columns
    assert columns is not None
    good = payload_of(1)
    answers = Room(*received((batch_headers(0), good))).answers()
    answers.read_by(BatchReader(columns, refuse, SCHEMA))
    assert answers.next_batch() is None
    assert answers.take_whole() == good
    assert Decoder(SCHEMA, checks="full").reader is None  # it looks closer than a reader does


def test_it_is_quiet_while_nothing_is_there_and_more_may_come() -> None:
    assert not InputReceiver().quiet  # from nowhere
    room = Room(*received((batch_headers(0), bytes(64))))
    inputs = room.inputs()
    assert not inputs.quiet
    inputs.read_by(Decoder(SCHEMA).reader)
    assert inputs.next_batch() is None  # it was taken, and waits for somebody else to read it
    assert not room.queue and not inputs.quiet
    assert inputs.take_whole() == bytes(64)
    assert inputs.quiet
    room.queue.end()
    assert not inputs.quiet
