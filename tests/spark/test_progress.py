"""The bar of files on the driver: what it says, where it is shown, whose queries it follows."""

from __future__ import annotations

import io
import json
import os
import pickle
import re
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar, TextIO

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import aqueduct
from aqueduct.errors import ConfigError
from spark_udfs import exchange_files
from spark_udfs.files import bars, progress
from spark_udfs.files.bars import FilesProgress, LineBar, RichBar, TerminalBar, bar_for
from spark_udfs.files.progress import Watch
from spark_udfs.worker.metrics import Tally, TaskMetrics, Total
from tests.support.calls import served

TOTAL = Total(rows_sent=1_234_567, bytes_sent=96 << 20, waiting_seconds=1.25, tasks=3)
HALF = FilesProgress("exchange_files 'score'", 8, 2, 4, 1, TOTAL, seconds=2.0)
SAID = (
    "4 of 8 tasks, 2 running, 1 failed, 3 files or parts, 1,234,567 rows, 96.0 MiB, 48.0 MiB/s, "
    "1.2 s waiting for the service"
)


@contextmanager
def terminal(columns: int = 0) -> Iterator[tuple[TextIO, list[str]]]:
    """A real terminal, and what was written to it."""
    ours, theirs = os.openpty()
    termios.tcsetwinsize(theirs, (24, columns))
    seen: list[str] = []

    def read() -> None:
        while True:
            try:
                data = os.read(ours, 1 << 16)
            except OSError:  # nobody has it open any more
                return
            seen.append(data.decode())

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    with open(theirs, "w", encoding="utf-8") as where:
        yield where, seen
    reader.join(10)
    os.close(ours)


def test_the_line_says_what_spark_and_the_tasks_say():
    assert str(HALF) == f"exchange_files 'score': {SAID}"
    assert "0 of 0 tasks, 0 running, 0 files or parts" in str(FilesProgress("new"))
    assert "failed" not in str(FilesProgress("new"))


@pytest.mark.parametrize("kind", [TerminalBar, RichBar])
def test_a_terminal_has_one_line_that_is_written_over(kind, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    with terminal(400) as (where, seen):
        bar = kind(where)
        bar.show(FilesProgress("exchange_files '\x1b]0;a\x07\n'", 8))
        bar.show(HALF)
        bar.close()
    text = "".join(seen)
    assert "\x1b]0" not in text and "\\x1b]0;a" in text, "a name cannot control the terminal"
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    assert "4 of 8 tasks" in shown
    assert text.rstrip("\x1b[?25h").endswith("\n"), "the last state stays"


def test_a_long_line_is_cut_to_the_terminal():
    with terminal() as (where, seen):
        TerminalBar(where).show(HALF)  # a new terminal has no size, and 80 columns are assumed
    (line,) = "".join(seen).split("\r\x1b[K")[1:]
    assert len(line) < 80 and line.endswith(" ...")


def test_lines_for_a_log_are_few_and_end_with_the_last_state():
    where = io.StringIO()
    bar = LineBar(where)
    bar.show(FilesProgress("first", 8))
    for _ in range(100):
        bar.show(HALF)
    bar.close()
    first, last = where.getvalue().splitlines()
    assert first.startswith("first: 0 of 8 tasks") and last == str(HALF)


def test_a_notebook_shows_text_and_no_markup():
    page = bars._html(FilesProgress("<script>alert(1)</script>\x1b", 8, ended=2))
    assert "<script" not in page and "\x1b" not in page
    assert '<progress max="8" value="2"></progress>' in page


# IPython with all that it needs has 55 MB, and is no package of the tests. These say what its
# kernel publishes for each of the calls, by the names of Jupyter's protocol.
NOTEBOOK = {
    "__init__.py": """
class Shell:
    kernel = object()  # of a shell at a terminal it is None


shell = None


def get_ipython():
    return shell
""",
    "display.py": """
import itertools
import json

numbers = itertools.count(1)


def publish(kind, data, identifier):
    transient = {"display_id": identifier}
    print(json.dumps({"msg_type": kind, "data": data, "transient": transient}))


class DisplayHandle:
    def __init__(self, display_id):
        self.display_id = display_id

    def update(self, data, *, raw):
        assert raw is True, "an object that is formatted, not data by their types"
        publish("update_display_data", data, self.display_id)


def display(data, *, raw, display_id):
    assert raw is True and display_id is True
    handle = DisplayHandle(f"display-{next(numbers)}")
    publish("display_data", data, handle.display_id)
    return handle
""",
}
CELL = r"""
import IPython

from spark_udfs.files.bars import FilesProgress, NotebookBar, bar_for

assert bar_for(None) is None, "no shell runs"
IPython.shell = IPython.Shell()
IPython.shell.kernel = None
assert bar_for(None) is None, "this shell is at a terminal, and standard error at none"
IPython.shell = IPython.Shell()
assert bar_for(None) is bar_for(True) is NotebookBar
assert bar_for(False) is None
title = "exchange_files '<b>&\x1b[2J'"
bar = bar_for(None)()
for ended in (0, 1, 3):
    bar.show(FilesProgress(title, 3, running=min(3 - ended, 1), ended=ended, seconds=ended))
bar.close()
"""


def test_a_notebook_has_one_output_that_is_replaced(tmp_path):
    (tmp_path / "IPython").mkdir()
    for name, text in NOTEBOOK.items():
        (tmp_path / "IPython" / name).write_text(text)
    paths = [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, "-c", CELL],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")
    published = [json.loads(line) for line in done.stdout.splitlines()]
    kinds = [message["msg_type"] for message in published]
    assert kinds == ["display_data", "update_display_data", "update_display_data"]
    (display,) = {message["transient"]["display_id"] for message in published}
    assert display
    first, last = published[0]["data"], published[-1]["data"]
    assert first.keys() == last.keys() == {"text/html", "text/plain"}
    assert '<progress max="3" value="0"></progress> 0 of 3 tasks, 1 running' in first["text/html"]
    assert '<progress max="3" value="3"></progress> 3 of 3 tasks, 0 running' in last["text/html"]
    assert "<b>exchange_files &#x27;&lt;b&gt;&amp;\\x1b[2J&#x27;</b>" in last["text/html"]
    assert last["text/plain"].startswith("exchange_files '<b>&\\x1b[2J': 3 of 3 tasks, 0 running")


class Screen:
    """What a terminal shows of what is written to it, where a line is wide enough."""

    def __init__(self, written: str) -> None:
        self.rows = [""]
        self.row = self.column = 0
        self.cursor_is_shown = True
        for control, text in re.findall(r"(\x1b\[[0-9;?]*[A-Za-z]|[\r\n])|([^\x1b\r\n]+)", written):
            self._control(control) if control else self._write(text)

    def _write(self, text: str) -> None:
        row = self.rows[self.row].ljust(self.column)
        end = self.column + len(text)
        self.rows[self.row] = row[: self.column] + text + row[end:]
        self.column = end

    def _control(self, control: str) -> None:
        if control == "\r":
            self.column = 0
        elif control == "\n":
            self.row += 1
            self.rows += [""] * (self.row == len(self.rows))
        elif control == "\x1b[K":
            self.rows[self.row] = self.rows[self.row][: self.column]
        elif control == "\x1b[2K":
            self.rows[self.row] = ""
        elif control == "\x1b[1A":
            self.row -= 1
        elif control in ("\x1b[?25l", "\x1b[?25h"):
            self.cursor_is_shown = control.endswith("h")
        else:
            assert control.endswith("m"), f"this terminal does not know {control!r}"


def shows(seen: list[str], text: str) -> bool:
    return any(text in row for row in Screen("".join(seen)).rows)


@pytest.mark.parametrize(("kind", "rows"), [(TerminalBar, 1), (RichBar, 2)])
def test_a_terminal_is_left_clean(kind, rows, monkeypatch):
    """A job is looked at three times: its bar takes the same rows, and the cursor ends below it."""
    monkeypatch.setenv("TERM", "xterm")
    if kind is TerminalBar:
        monkeypatch.setattr(bars, "find_spec", lambda name: None)
    queries, tally = Queries(), Tally()
    with terminal(400) as (where, seen):
        monkeypatch.setattr(sys, "stderr", where)
        make = bar_for(None)
        assert make is kind
        watch = Watch("f", "exchange_files 'score'", tally, make, queries)
        for ended in (0, 1, 3):
            queries.found = [(1, [7], ended == 3)]
            queries.stages = {7: Stage(3, min(3 - ended, 1), ended)}
            watch.look()
            tally.add(TaskMetrics(rows_sent=5))
            said = f"{ended} of 3 tasks, {min(3 - ended, 1)} running"
            waited(partial(shows, seen, said))
        assert os.isatty(sys.stderr.fileno())
    screen = Screen("".join(seen))
    assert screen.rows[0].startswith("exchange_files 'score' ")
    assert "3 of 3 tasks, 0 running, 2 files or parts, 10 rows" in screen.rows[rows - 1]
    assert screen.rows[rows:] == [""], "one state is left"
    assert (screen.row, screen.column, screen.cursor_is_shown) == (rows, 0, True)


def test_nothing_is_shown_where_nobody_can_see_it(monkeypatch):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    assert bar_for(None) is None and bar_for(False) is None
    assert bar_for(True) is LineBar
    monkeypatch.setattr(sys, "stderr", None)
    assert bar_for(None) is None
    with terminal() as (where, _):
        monkeypatch.setattr(sys, "stderr", where)
        assert bar_for(None) is RichBar
        assert bar_for(False) is None
        monkeypatch.setattr(bars, "find_spec", lambda name: None)
        assert bar_for(None) is TerminalBar


class Stage:
    def __init__(self, tasks: int, running: int, ended: int) -> None:
        self.numTasks, self.numActiveTasks = tasks, running  # Spark's names
        self.numCompletedTasks, self.numFailedTasks = ended, 0


class Queries:
    """What Spark says, written down."""

    def __init__(self) -> None:
        self.found: list[tuple[int, list[int], bool]] = []
        self.stages: dict[int, Stage] = {}
        self.busy = True

    def require_context(self) -> None:
        pass

    def at_work(self) -> bool:
        return self.busy

    def with_function(self, name: str) -> list[tuple[int, list[int], bool]]:
        return self.found

    def stage(self, number: int) -> Stage | None:
        return self.stages.get(number)


class Recorder:
    """A bar that keeps what it is shown."""

    made: ClassVar[list[Recorder]]

    def __init__(self) -> None:
        self.shown: list[FilesProgress] = []
        self.closed = 0
        self.made.append(self)

    def show(self, progress: FilesProgress) -> None:
        self.shown.append(progress)

    def close(self) -> None:
        self.closed += 1


def waited(condition: Callable[[], bool]) -> None:
    """Waits until it holds; Spark's first job takes long."""
    end = time.monotonic() + 240
    while not condition():
        assert time.monotonic() < end, "it never came to be so"
        time.sleep(0.02)


@pytest.fixture
def recorder():
    class Own(Recorder):
        made: ClassVar[list[Recorder]] = []

    return Own


def test_each_query_has_a_bar_of_its_own_and_counts_from_its_beginning(recorder):
    queries, tally = Queries(), Tally()
    watch = Watch("f", "title", tally, recorder, queries)
    tally.add(TaskMetrics(rows_sent=5))
    queries.found = [(1, [], True)]
    watch.look()
    assert recorder.made == [], "what was over before anybody looked is no news"
    queries.found.append((2, [7, 8, 9], False))
    queries.stages = {7: Stage(4, 2, 1), 8: Stage(3, 0, 3)}
    watch.look()
    (bar,) = recorder.made
    assert (bar.shown[-1].tasks, bar.shown[-1].running, bar.shown[-1].ended) == (7, 2, 4)
    assert bar.shown[-1].total == Total(), "what was counted before is another query's"
    tally.add(TaskMetrics(rows_sent=11, waiting_seconds=2.0))
    watch.look()
    assert bar.shown[-1].total == Total(rows_sent=11, waiting_seconds=2.0, tasks=1)
    queries.found[1] = (2, [7, 8, 9], True)
    watch.look()
    watch.look()
    assert bar.closed == 1 and len(recorder.made) == 1


def test_tasks_that_ended_before_the_first_look_count(recorder):
    queries, tally = Queries(), Tally()
    tally.add(TaskMetrics(rows_sent=5))  # before the function was sent off
    watch = Watch("f", "title", tally, recorder, queries)
    tally.add(TaskMetrics(rows_sent=1))
    queries.found = [(1, [], False)]
    watch.look()
    (bar,) = recorder.made
    assert bar.shown[-1].total == Total(rows_sent=1, tasks=1)
    tally.add(TaskMetrics(rows_sent=2))
    queries.found = [(1, [], True)]
    watch.look()
    assert bar.shown[-1].total == Total(rows_sent=3, tasks=2)
    queries.busy = False
    tally.add(TaskMetrics(rows_sent=7))  # of a query that nobody saw
    watch.look()
    queries.busy = True
    tally.add(TaskMetrics(rows_sent=4))
    queries.found.append((3, [], False))
    watch.look()
    assert recorder.made[1].shown[-1].total == Total(rows_sent=4, tasks=1)
    tally.add(TaskMetrics(rows_sent=8))  # of which of the two, nobody knows
    queries.found.append((4, [], False))
    watch.look()
    assert recorder.made[2].shown[-1].total == Total()
    queries.found = [(3, [], True), (4, [], True)]
    watch.look()
    tally.clear()
    queries.found.append((5, [], False))
    watch.look()
    assert recorder.made[3].shown[-1].total == Total(), "not below zero"


def test_a_watch_that_ends_early_closes_its_bars(recorder):
    queries = Queries()
    queries.found = [(1, [], False)]
    watch = Watch("f", "title", Tally(), recorder, queries)
    watch.look()
    watch.close()
    assert recorder.made[0].closed == 1


def test_the_newest_functions_alone_are_looked_at(recorder):
    watcher = progress._Watcher()
    watcher._thread = threading.current_thread()  # it begins none
    queries = Queries()
    queries.found = [(1, [], False)]
    for number in range(20):
        watch = Watch(f"f{number}", "title", Tally(), recorder, queries)
        watch.look()
        watcher.add(watch)
    watcher.look()
    assert list(watcher._watches) == [f"f{number}" for number in range(12, 20)]
    assert [bar.closed for bar in recorder.made] == [1] * 12 + [0] * 8


def test_a_look_that_fails_costs_no_bar_and_many_cost_that_of_one_function(recorder):
    class Broken(Queries):
        broken = 0

        def with_function(self, name: str) -> list[tuple[int, list[int], bool]]:
            if self.broken:
                self.broken -= 1
                raise RuntimeError("Spark has removed what is looked at")
            return super().with_function(name)

    watcher = progress._Watcher()
    watcher._thread = threading.current_thread()  # it begins none
    one, other = Broken(), Queries()
    for name, queries in (("one", one), ("other", other)):
        queries.found = [(1, [], False)]
        watcher.add(Watch(name, "title", Tally(), recorder, queries))
    watcher.look()
    one.broken = progress._FAILURES - 1
    for _ in range(progress._FAILURES):
        watcher.look()
    assert [len(bar.shown) for bar in recorder.made] == [2, 6]
    one.broken = progress._FAILURES
    for _ in range(progress._FAILURES):
        watcher.look()
    assert list(watcher._watches) == ["other"]
    assert [bar.closed for bar in recorder.made] == [1, 0]


def test_the_thread_ends_with_its_last_function_and_begins_with_the_next(recorder, monkeypatch):
    class Context:
        """As PySpark's: what a context that has stopped has Spark say is that it is idle."""

        running = True

        @property
        def startTime(self) -> int:
            if not self.running:
                raise AttributeError("'NoneType' object has no attribute 'startTime'")
            return 1

        def statusTracker(self) -> Any:
            return SimpleNamespace(getActiveJobsIds=list)

    def closed(bar: Recorder) -> None:
        bar.closed += 1
        raise ValueError("I/O operation on closed file")

    monkeypatch.setattr(Recorder, "close", closed)

    monkeypatch.setattr(progress, "_PAUSE", 0.01)
    watcher = progress._Watcher()
    for name in ("first", "second"):
        context = Context()
        state = SimpleNamespace(statusStore=int)
        spark = SimpleNamespace(sharedState=lambda state=state: state)
        queries = progress._Queries(SimpleNamespace(_jsparkSession=spark, sparkContext=context))
        watch = Watch(name, "title", Tally(), recorder, queries)
        watch._shown[1] = recorder(), 0.0, Total()
        queries.with_function = lambda name: []  # type: ignore[method-assign]
        watcher.add(watch)
        assert watcher._thread is not None and watcher._watches == {name: watch}
        context.running = False
        waited(lambda: watcher._thread is None)
        assert watcher._watches == {}
    assert [bar.closed for bar in recorder.made] == [1, 1]


def test_a_function_that_others_have_displaced_is_not_dropped_twice(recorder):
    class Displaced(Queries):
        def with_function(self, name: str) -> list[tuple[int, list[int], bool]]:
            watcher._watches.pop("f", None)
            raise RuntimeError("Spark has removed what is looked at")

    watcher = progress._Watcher()
    watcher._thread = threading.current_thread()  # it begins none
    watch = Watch("f", "title", Tally(), recorder, Displaced())
    watch.failures = progress._FAILURES
    watcher.add(watch)
    watcher.look()
    assert watcher._watches == {} and watcher._dropped == []


def test_progress_is_yes_no_or_none():
    with pytest.raises(ConfigError, match="progress='yes'; it must be True, False or None"):
        exchange_files("memory://x", "score", progress="yes")  # type: ignore[arg-type]


def test_sending_a_function_off_without_spark_shows_nothing(monkeypatch):
    monkeypatch.delitem(sys.modules, "pyspark", raising=False)
    pickle.dumps(exchange_files("aqueduct+tcp://127.0.0.1:9", "score", progress=True))
    assert progress._watcher._watches == {}


@pytest.mark.spark
@pytest.mark.long  # on a busy machine it waits for most of a minute
def test_the_bar_moves_while_a_job_runs(spark, tmp_path, monkeypatch, recorder):
    monkeypatch.setattr(progress, "bar_for", lambda wanted: recorder)
    service = aqueduct.Service("slow")
    release = threading.Event()
    for number in range(3):
        ids = [1000 * number + row for row in range(100)]
        pq.write_table(pa.table({"id": ids}), tmp_path / f"{number}.parquet")

    @service.handler("score")
    def score(batches, call):
        for batch in batches:
            if batch["id"][0].as_py() >= 2000:
                release.wait(300)
            yield batch

    with served(service, "tcp") as address:
        place = f"concat('{tmp_path}/', id, '.parquet') as path"
        files = spark.range(0, 3, 1, 3).selectExpr(place)
        function = exchange_files(address, "score")
        receipts = files.mapInArrow(function, function.schema)
        found: list[int] = []
        job = threading.Thread(target=lambda: found.append(len(receipts.collect())))
        job.start()

        def halfway() -> bool:
            return not job.is_alive() or any(
                each.running == 1 and each.total.tasks == 2
                for bar in recorder.made
                for each in bar.shown
            )

        try:
            waited(halfway)
        finally:
            release.set()
        job.join(60)
        waited(lambda: all(bar.closed for bar in recorder.made))
    assert found == [3]
    (bar,) = recorder.made
    last = bar.shown[-1]
    assert (last.tasks, last.running, last.ended) == (3, 0, 3)
    assert (last.total.tasks, last.total.rows_sent, last.total.rows_received) == (3, 300, 300)
    assert last.total.bytes_sent > 0 and last.title == "exchange_files 'score'"
