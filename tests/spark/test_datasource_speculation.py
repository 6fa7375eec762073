"""A slow task gets a second attempt, both prepare, and the rows of one of them count."""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from aqueduct.service.context import Call
from aqueduct.service.sinks import Attempt
from tests.sinks.shelf import Book, Shelf, service_with
from tests.spark.engines import started

pytestmark = [pytest.mark.spark, pytest.mark.checkout]


class Twins(Shelf):
    """The attempts at partition 0 are prepared together: the first waits for the second."""

    def __init__(self) -> None:
        super().__init__()
        self.together = threading.Barrier(2)

    def open(self, attempt: Attempt, call: Call) -> Book:
        super().open(attempt, call)
        return Twin(self, attempt) if attempt.partition == 0 else Book(self, attempt)


class Twin(Book):
    def prepare(self) -> Any:
        assert isinstance(self.shelf, Twins)
        self.shelf.together.wait(100)
        receipt = super().prepare()
        self.shelf.together.wait(100)  # no receipt leaves before both are prepared
        return receipt


@pytest.mark.long  # a cluster of its own
@pytest.mark.timeout(240)
def test_two_attempts_are_prepared_and_one_counts(
    running: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYSPARK_SUBMIT_ARGS", "--conf spark.speculation=true pyspark-shell")
    shelf = Twins()
    with running(
        service_with(shelf), f"aqueduct+unix://{tmp_path}/s", dev_certificate=False
    ) as address:
        with started("cluster", tmp_path) as engine:
            engine.run("save", timeout=200, address=address, rows=200, partitions=4)
    assert Counter(shelf.rows) == Counter(range(200))
    prepared = [(partition, task) for _, partition, task in shelf.asked_for("prepare")]
    twins = {task for partition, task in prepared if partition == 0}
    assert len(twins) == 2
    ((_, _, committed),) = shelf.asked_for("commit")
    ((_, _, aborted),) = shelf.asked_for("abort run")
    assert sorted(partition for partition, _ in committed) == [0, 1, 2, 3]
    winner = dict(committed)[0]
    assert {winner} < twins and (0, *(twins - {winner})) in aborted
    assert shelf.staged == {}
