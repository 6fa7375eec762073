"""The live page of a service in a real browser, while a real Spark job calls it."""

from __future__ import annotations

import json
import socket
import threading
import urllib.error
import urllib.request
from pathlib import Path

import pyarrow as pa
import pytest

import aqueduct
from spark_udfs import exchange
from tests.spark.services import NUMBERS
from tests.spark.spans import until
from tests.support.chromium import Page, opened
from tests.support.installed_programs import installed

pytestmark = pytest.mark.spark


def rows_of(page: Page, table: str) -> list[dict[str, str]]:
    """The rows of a table, by the heads of its columns."""
    return list(
        page.evaluate(
            f"(table => [...table.tBodies[0].rows].map(row => Object.fromEntries("
            f"[...row.cells].map((cell, place) =>"
            f" [table.tHead.rows[0].cells[place].textContent, cell.textContent]))))"
            f"(document.querySelector('#{table} table'))"
        )
    )


def test_a_browser_sees_what_the_tasks_of_a_job_do(spark, running, tmp_path: Path):
    go_on = threading.Event()
    service = aqueduct.Service("scores")

    @service.handler("halved", input=NUMBERS, output=NUMBERS, concurrency=4)
    def halved(batch: pa.RecordBatch) -> pa.RecordBatch:
        go_on.wait(60)
        return batch.slice(0, batch.num_rows // 2)

    lives: list = []
    program = installed("chromium")
    # The Python workers are there before a deadline counts.
    spark.range(0, 2, 1, 2).mapInArrow(lambda batches: batches, "id long").collect()
    with running(service, admin="127.0.0.1:0", lives=lives) as address:
        place = lives[0].admin_addresses[0]
        score = exchange(address, "halved")
        frame = spark.range(0, 4000, 1, numPartitions=4).mapInArrow(score, "id long")
        job = threading.Thread(target=frame.collect)
        job.start()
        try:
            until(lambda: service.counters()["rows_in"] == 2000)  # two tasks at once, of four
            with opened(f"{place}/", tmp_path, program=program) as page:
                page.until(
                    "document.querySelectorAll('#tasks tbody tr').length === 2 &&"
                    " document.getElementById('open-calls').textContent === '2'"
                )
                tasks = rows_of(page, "tasks")
                assert {task["Partition"] for task in tasks} == {"0", "1"}
                assert {task["Doing"] for task in tasks} == {"at work"}
                assert {task["Handler"] for task in tasks} == {"halved"}
                assert {(task["Rows in"], task["Rows out"]) for task in tasks} == {("1,000", "0")}
                (executor,) = rows_of(page, "executors")
                assert executor["Executor"].startswith(f"{socket.gethostname()} · process ")
                assert executor["Application"] == "aqueduct tests"
                assert (executor["Calls in flight"], executor["Rows in"]) == ("2", "2,000")
                assert [call["Handler"] for call in rows_of(page, "calls")] == ["halved"] * 2

                go_on.set()
                job.join(60)
                # The page shows the service's numbers, which are those of the job.
                page.until(
                    "[...document.querySelectorAll('#tasks tbody tr')].filter(row =>"
                    " row.textContent.includes('no call for')).length === 4"
                )
                page.until("document.getElementById('open-calls').textContent === '0'")
                counters, numbers = service.counters(), score.numbers
                (handler,) = rows_of(page, "handlers")
                (executor,) = rows_of(page, "executors")
                tasks = rows_of(page, "tasks")
                for shown in (handler, executor):
                    assert shown["Calls"] == str(counters["calls"]) == str(numbers.tasks) == "4"
                    assert shown["Rows in"] == f"{counters['rows_in']:,}" == "4,000"
                    assert shown["Rows out"] == f"{numbers.rows_received:,}" == "2,000"
                assert {task["Partition"] for task in tasks} == {"0", "1", "2", "3"}
                assert {(task["Rows in"], task["Rows out"]) for task in tasks} == {("1,000", "500")}
                assert page.text("errors") == "0" and page.text("trouble") == ""
                assert set(
                    page.evaluate(
                        "performance.getEntriesByType('resource').map(e => new URL(e.name).origin)"
                    )
                ) == {place}
        finally:
            go_on.set()
            job.join(60)
        check_hidden(place)


def check_hidden(place: str) -> None:
    """No page of another name is answered, and nothing but numbers and names is told."""
    for path in ("/", "/live/page.js", "/state.json"):
        request = urllib.request.Request(place + path, headers={"Host": "evil.example"})
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(request, timeout=20)
        assert refused.value.code == 421
        refused.value.close()
    with urllib.request.urlopen(f"{place}/state.json", timeout=20) as response:
        (task, *_) = json.load(response)["spark"]["tasks"]
    assert set(task) == {
        *("application", "name", "host", "executor", "stage", "partition", "task", "handler"),
        *("calls", "open_calls", "waiting_turn", "waiting_client", "failed", "idle"),
        *("batches_in", "rows_in", "bytes_in", "batches_out", "rows_out", "bytes_out"),
    }
