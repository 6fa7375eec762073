"""What the writer does about a service that is away, full or unwilling; real services, no JVM."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import aqueduct
from aqueduct.client.loop_thread import LoopThread
from aqueduct.endpoint import serve
from aqueduct.errors import (
    Busy,
    ConfigError,
    ConnectFailed,
    ConnectionLost,
    HandlerFailed,
    HeadersRejected,
    Refused,
    SchemaMismatch,
    UnknownHandler,
)
from aqueduct.service.sinks import WriteKey
from spark_udfs.worker.task import TaskContext
from tests.sinks.shelf import Shelf, service_with
from tests.support.calls import NUMBERS, config, numbers

pytestmark = pytest.mark.spark

RUN = WriteKey("run 1")
PLACE = TaskContext(partition=2, stage=1, attempt=0, task=77)


@pytest.fixture
def shelf() -> Shelf:
    return Shelf()


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"aqueduct+unix://{tmp_path}/s"


@pytest.fixture
def writing(address: str) -> Callable[..., Any]:
    """Makes what a writer has, with these options."""

    def make(**options: str) -> Any:
        from spark_udfs.datasource.options import settings_of
        from spark_udfs.datasource.writer import Writing

        given = {"address": address, "handler": "shelf", "backoff": "10ms", **options}
        return Writing(settings_of(given, {}), False, "e")

    return make


def messages(shelf: Shelf, writing: Any) -> list[Any]:
    return [writing.write(RUN, iter([numbers(1), numbers(2)]), PLACE)]


def test_a_partition_is_an_attempt_with_the_ids_of_its_task(
    shelf: Shelf, address: str, running: Any, writing: Any
) -> None:
    with running(service_with(shelf), address, dev_certificate=False):
        (message,) = messages(shelf, writing())
        attempt = message.prepared.attempt
        found = (
            attempt.write_key,
            attempt.execution,
            attempt.stage,
            attempt.partition,
            attempt.task,
        )
        assert found == (RUN, "e", 1, 2, 77)
        writing().commit(RUN, [message])
    assert shelf.rows == [1, 2]


def test_what_a_task_wrote_and_a_write_came_to_is_in_the_log(
    shelf: Shelf, address: str, running: Any, writing: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with running(service_with(shelf), address, dev_certificate=False):
        with caplog.at_level(logging.INFO, "spark_udfs"):
            told = messages(shelf, writing())
            writing().commit(RUN, told)
        one, all_ = (each for each in caplog.records if each.name.startswith("spark_udfs"))
        wrong = iter([pa.record_batch({"no": ["number"]})])
        with pytest.raises(SchemaMismatch), caplog.at_level(logging.INFO, "spark_udfs"):
            writing().write(RUN, wrong, PLACE)
    assert one.getMessage().startswith("'shelf', partition 2 (stage 1, attempt 0, task 77): well;")
    context = one.__dict__["context"]
    assert (context["batches_sent"], context["rows_sent"]) == ("2", "2")
    assert int(context["bytes_sent"]) > 2 * 8 and context["task"] == "77"
    text = "'shelf': write 'run 1' is committed, 2 rows of 1 tasks: "
    assert all_.getMessage().startswith(text)
    failed = caplog.records[-1]
    assert failed.__dict__["context"]["outcome"] == "failed with SchemaMismatch"


def test_a_commit_waits_for_a_service_that_is_away(
    shelf: Shelf, address: str, running: Any, writing: Any
) -> None:
    with running(service_with(shelf), address, dev_certificate=False):
        told = messages(shelf, writing())
    failed: list[BaseException] = []

    def commit() -> None:
        try:
            writing(retries="0").commit(RUN, told)
        except BaseException as error:  # noqa: BLE001  it is looked at below
            failed.append(error)

    thread = threading.Thread(target=commit)
    thread.start()
    thread.join(0.2)
    assert thread.is_alive() and shelf.rows == []
    with running(service_with(shelf), address, dev_certificate=False):
        thread.join(60)
    assert not thread.is_alive() and failed == []
    assert shelf.rows == [1, 2]


def test_a_slow_commit_is_waited_for_where_it_has_no_deadline(
    shelf: Shelf, address: str, running: Any, writing: Any
) -> None:
    """The service ends a call without a deadline sooner, and the job would fail for it."""
    settings = config(timing={"progress_deadline": 0.2})
    shelf.blocked.clear()
    with running(service_with(shelf, settings), address, dev_certificate=False):
        told = messages(shelf, writing())
        going_on = threading.Timer(1.0, shelf.blocked.set)
        going_on.start()
        writing(commit_deadline="none").commit(RUN, told)
        going_on.join(20)
    assert shelf.rows == [1, 2]


def test_a_commit_that_nobody_answers_fails_after_its_deadline(address: str, writing: Any) -> None:
    began = time.monotonic()
    with pytest.raises(ConnectFailed):
        writing(commitDeadline="300ms").commit(RUN, [])
    assert time.monotonic() - began >= 0.3


def test_a_commit_waits_for_a_token_that_is_not_there(
    shelf: Shelf, address: str, running: Any, writing: Any, tmp_path: Path
) -> None:
    """Whoever renews it may have removed it first."""
    shown: list[tuple[str, str | None]] = []

    def authorize(call: aqueduct.Call) -> None:
        shown.append((call.handler.split(".")[2], call.token))

    path = tmp_path / "token"
    given = {"token_file": str(path), "retries": "9"}
    service = aqueduct.Service("test", authorize=authorize)
    service.sink("shelf", shelf, schema=NUMBERS)
    with running(service, address, dev_certificate=False):
        path.write_text("old")
        told = messages(shelf, writing(**given))
        path.unlink()
        with pytest.raises(ConfigError, match=rf"No such file or directory: '{path}'"):
            writing(**given, commit_deadline="100ms").commit(RUN, told)
        with pytest.raises(ConfigError, match=rf"No such file or directory: '{path}'"):
            writing(**given, backoff="1h").abort(RUN, told, "e")  # loses nothing: at once
        waiting = threading.Timer(0.2, path.write_text, ["new"])
        waiting.start()
        writing(**given).commit(RUN, told)
        waiting.join(20)
    assert shelf.rows == [1, 2]
    assert (shown[0][1], shown[-1]) == ("old", ("commit", "new"))
    assert [token for what, token in shown if what == "commit"] == ["new"]


def test_looking_and_aborting_give_up_after_some_tries(address: str, writing: Any) -> None:
    from pyspark.sql.types import StructType

    with pytest.raises(ConnectFailed):
        writing(retries="2").look(StructType())
    with pytest.raises(ConnectFailed):
        writing(retries="2").abort(RUN, [], "e")


def test_an_answer_that_says_no_is_not_asked_for_again(
    shelf: Shelf, address: str, running: Any, writing: Any
) -> None:
    asked = []

    def authorize(call: aqueduct.Call) -> None:
        asked.append(call.handler)
        raise Refused("you may not")

    service = aqueduct.Service("test", authorize=authorize)
    service.sink("shelf", shelf, schema=NUMBERS)
    with running(service, address, dev_certificate=False):
        with pytest.raises(Refused, match="you may not"):
            writing().commit(RUN, [])
        with pytest.raises(Refused, match="you may not"):
            writing().abort(RUN, [], "e")
    assert asked == ["aqueduct.sink.commit.shelf", "aqueduct.sink.abort.shelf"]


def test_a_commit_that_the_sink_cannot_make_is_not_repeated(
    shelf: Shelf, address: str, running: Any, writing: Any
) -> None:
    shelf.fail["commit"] = OSError("no room")
    with running(service_with(shelf), address, dev_certificate=False):
        with pytest.raises(HandlerFailed, match="no room"):
            writing().commit(RUN, [])
    assert len(shelf.asked_for("commit")) == 1


def test_a_sink_that_is_full_is_asked_again_before_an_attempt_begins(
    shelf: Shelf, address: str, running: Any, writing: Any
) -> None:
    settings = config(calls={"max_calls_process": 1})
    with running(service_with(shelf, settings), address, dev_certificate=False):
        first, second = threading.Event(), threading.Event()

        def slow() -> Iterator[Any]:
            yield numbers(1)
            first.set()
            assert second.wait(20)
            yield numbers(2)

        other = TaskContext(partition=0, stage=1, attempt=0, task=None)
        thread = threading.Thread(target=lambda: writing().write(RUN, slow(), other))
        thread.start()
        assert first.wait(20)
        with pytest.raises(Busy, match=r"partition 2 \(stage 1, attempt 0, task 77\)"):
            writing(retries="0").write(RUN, iter([numbers(3)]), PLACE)
        waiting = threading.Timer(0.3, second.set)
        waiting.start()
        message = writing(retries="100").write(RUN, iter([numbers(3), numbers(4)]), PLACE)
        thread.join(20)
        assert message.prepared.receipt["rows"] == 2  # none was lost in the tries
    assert shelf.asked_for("open") == [("open", 0, 0), ("open", 2, 77)]


def test_an_attempt_that_has_sent_rows_is_not_made_again(
    shelf: Shelf, address: str, running: Any, writing: Any
) -> None:
    """Its rows are gone; Spark tries the task again."""
    shelf.fail["write"] = Busy("not today")
    with running(service_with(shelf), address, dev_certificate=False):
        with pytest.raises(Busy, match="not today"):
            writing(retries="5").write(RUN, iter([numbers(3)]), PLACE)
    assert len(shelf.asked_for("open")) == 1


def test_several_addresses_take_turns(
    shelf: Shelf, address: str, running: Any, writing: Any, tmp_path: Path
) -> None:
    nobody = f"aqueduct+unix://{tmp_path}/nobody"
    with running(service_with(shelf), address, dev_certificate=False):
        both = writing(address=f"{nobody},{address}", retries="0")  # each is tried once at least
        told = messages(shelf, both)
        both.commit(RUN, told)
        both.abort(WriteKey("run 2"), [], "e")
    assert shelf.rows == [1, 2]


def test_a_service_that_turns_the_connection_away_is_asked_once(address: str, writing: Any) -> None:
    """Nothing of Service does so; a server beneath it may."""
    asked = []

    def refuse(headers: Any, connection: Any) -> bool:
        asked.append(1)
        raise HeadersRejected("not you")

    thread = LoopThread("test-refusing")
    server = thread.run(serve(lambda connection: None, address, on_headers=refuse))
    try:
        with pytest.raises(ConnectionLost, match="not you"):
            writing().commit(RUN, [])
        with pytest.raises(ConnectionLost, match="not you"):
            writing(retries="5").write(RUN, iter([numbers(3)]), PLACE)
    finally:
        thread.run(server.close())
        thread.stop()
    assert len(asked) == 2


def test_a_partition_without_rows_says_so(writing: Any) -> None:
    message = writing().write(RUN, iter([]), PLACE)  # and asks nobody
    assert message.prepared is None and message.write_key == RUN


def test_a_sink_that_is_not_there_is_called_by_its_name(
    shelf: Shelf, address: str, running: Any, writing: Any
) -> None:
    with running(service_with(shelf), address, dev_certificate=False):
        with pytest.raises(UnknownHandler, match=r"has no sink 'shelv'; did you mean 'shelf'\?"):
            writing(handler="shelv").commit(RUN, [])
