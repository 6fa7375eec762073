"""What tasks count, and its sum, without Spark."""

from __future__ import annotations

import pickle
from contextlib import closing
from dataclasses import fields

import pyarrow as pa
import pytest

from aqueduct.errors import HandlerFailed
from spark_udfs import exchange
from spark_udfs.numbers import Numbers, Tally, Total
from tests.spark.services import NUMBERS, make

ONE = Numbers(**{field.name: place + 1 for place, field in enumerate(fields(Numbers))})


def batches(*firsts):
    return iter([pa.record_batch({"id": [first, first]}, schema=NUMBERS) for first in firsts])


def test_a_sum_has_every_number():
    total = Total() + ONE + ONE
    assert total == Total(
        **{field.name: 2 * getattr(ONE, field.name) for field in fields(Numbers)}, tasks=2
    )
    assert total + total == Total() + ONE + ONE + ONE + ONE
    assert Total().tasks == 0  # what is added to is not changed


def test_a_tally_sums_up_and_begins_again():
    tally = Tally()
    assert "no numbers yet" in tally.summary()
    tally.add(ONE)
    tally.add(ONE)
    assert tally.value == Total() + ONE + ONE
    tally.clear()
    assert tally.value == Total()


def test_the_summary_is_for_people():
    tally = Tally()
    tally.add(
        Numbers(
            batches_sent=1200,
            rows_sent=12_000_000,
            bytes_sent=96 << 20,
            batches_received=1,
            rows_received=1,
            bytes_received=1 << 19,
            waiting_seconds=3.21,
            retries=1,
            reconnects=2,
        )
    )
    assert tally.summary().splitlines() == [
        "1 task",
        "sent      1,200 batches, 12,000,000 rows, 96.0 MiB",
        "received  1 batch, 1 row, 0.5 MiB",
        "waited    3.2 s for the service",
        "          1 retry, 2 reconnects, 0 failed batches",
    ]


def test_without_spark_a_copy_counts_for_itself():
    tally = Tally()
    tally.add(ONE)
    copy = pickle.loads(pickle.dumps(tally))
    copy.add(ONE)
    assert copy.value == tally.value == Total() + ONE


def test_a_function_counts_where_it_is_called(running):
    with running(make()) as address:
        score = exchange(address, "double")
        assert len(list(score(batches(1, 2, 3)))) == 3
        assert score.numbers.tasks == 1
        assert score.numbers.batches_sent == score.numbers.batches_received == 3
        assert score.numbers.rows_sent == score.numbers.rows_received == 6
        summary = score.summary()
    assert summary.startswith(f"'double' at {address.partition('?')[0]}: 1 task\n")
    assert "3 batches, 6 rows" in summary


def test_what_fails_or_is_left_early_counts_once(running):
    with running(make()) as address:
        failing = exchange(address, "fail")
        with pytest.raises(HandlerFailed):
            list(failing(batches(1, 42)))
        left = exchange(address, "double", in_flight=1)
        with closing(left(batches(1, 2, 3))) as answers:
            next(answers)
    assert failing.numbers.tasks == 1
    assert failing.numbers.batches_sent == 2
    assert left.numbers.tasks == left.numbers.batches_received == 1


def test_what_is_asked_again_is_in_the_log(running, caplog):
    with running(make()) as address:
        score = exchange(["aqueduct+tcp://127.0.0.1:9", address], "double", retries=3)
        with caplog.at_level("WARNING", "spark_udfs"):
            assert len(list(score(batches(1, 2, 3)))) == 3
    assert caplog.records  # a second one, if the other address takes that long to answer
    for record in caplog.records:
        assert record.levelname == "WARNING"
        said = record.getMessage()
        assert said.startswith("'double' at aqueduct+tcp://127.0.0.1:9: ConnectFailed: ")
        assert "is asked again, there not before 0." in said
