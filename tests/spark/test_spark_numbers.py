"""The numbers of tasks on the driver, by Spark's accumulators."""

from __future__ import annotations

import pytest
from pyspark.errors import PythonException

from aqueduct.config import Config, Timing
from spark_udfs import exchange, exchange_pandas
from tests.spark.spans import until

pytestmark = pytest.mark.spark


def test_the_driver_has_the_sum_of_all_tasks(spark, address, service, small_batches):
    score = exchange(address, "double")
    frame = spark.range(0, 4000, 1, numPartitions=5).mapInArrow(score, "id long")
    assert score.numbers.tasks == 0  # nothing has run
    assert len(frame.collect()) == 4000
    numbers, counters = score.numbers, service.counters()
    assert numbers.tasks == counters["calls"] == 5
    assert numbers.batches_sent == counters["batches_in"] == 40
    assert numbers.batches_received == counters["batches_out"] == 40
    assert numbers.rows_sent == numbers.rows_received == 4000
    assert "5 tasks\nsent      40 batches, 4,000 rows" in score.summary()


def test_jobs_of_one_function_add_up_until_it_is_cleared(spark, address):
    score = exchange(address, "double")
    frame = spark.range(0, 100, 1, numPartitions=2).mapInArrow(score, "id long")
    frame.collect()
    frame.collect()
    assert (score.numbers.tasks, score.numbers.rows_sent) == (4, 200)
    score.tally.clear()
    assert score.numbers.tasks == 0
    frame.collect()
    assert (score.numbers.tasks, score.numbers.rows_sent) == (2, 100)


def test_each_function_has_numbers_of_its_own(spark, address):
    first, second = exchange(address, "double"), exchange_pandas(address, "echo")
    frame = spark.range(0, 100, 1, numPartitions=2)
    frame.mapInArrow(first, "id long").mapInPandas(second, "id long").collect()
    assert first.numbers.rows_sent == second.numbers.rows_sent == 100
    assert "2 tasks" in second.summary()


def test_tasks_that_failed_are_not_in_the_sum(spark, address):
    score = exchange(address, "fail")
    with pytest.raises(PythonException, match="42 is not to my taste"):
        spark.range(42, 43, 1, numPartitions=1).mapInArrow(score, "id long").collect()
    assert score.numbers.tasks == 0
    assert "no numbers yet" in score.summary()


def test_tasks_that_were_left_early_are_not_in_the_sum(spark, address):
    score = exchange(address, "hundredfold", in_flight=1)
    frame = spark.range(0, 100_000, 1, numPartitions=1).mapInArrow(score, "id long")
    assert len(frame.take(3)) == 3
    assert score.numbers.tasks == 0


def test_an_idle_connection_closes_and_the_next_one_is_a_reconnect(spark, address, service):
    config = Config(timing=Timing(idle_timeout=1.0, ping_interval=0.3))
    score = exchange(address, "double", config=config)
    frame = spark.range(0, 100, 1, numPartitions=2).mapInArrow(score, "id long")
    frame.collect()
    assert score.numbers.reconnects == 0
    until(lambda: service.counters()["open_connections"] == 0)

    def reconnected():
        frame.collect()  # perhaps by workers that had no connection
        return score.numbers.reconnects > 0

    until(reconnected)
