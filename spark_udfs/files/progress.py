"""The progress of files on the driver, while tasks run.

Two sources say what is true at any time:

- Spark says how many tasks run and have ended. Its SQL store says which stages belong to a query
  with the function in its plan, and ``SparkContext.statusTracker`` how each stage stands.
- Tasks say rows, bytes, parts and seconds of waiting by a Spark accumulator. It gets the numbers of
  a task when the task has ended well, so they grow task by task. A task that runs has told nothing.

One daemon thread of the process looks at all functions that travel. A function whose context has
stopped is looked at no more, and the thread ends with the last one.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import fields
from typing import Any, Final

from aqueduct.client.call_metrics import CallMetrics
from aqueduct.escaping import escape, logger_of
from spark_udfs.files.bars import Bar, FilesProgress, bar_for
from spark_udfs.worker.metrics import Tally, Total

__all__ = ["Watch", "watch"]

log = logger_of(__name__)

_PAUSE: Final = 0.5  # seconds between two looks
_QUERIES: Final = 20  # of Spark's newest queries that are looked at
_MOST: Final = 8  # functions that are looked at, the newest ones
_FAILURES: Final = 5  # looks in a row
_FAREWELL: Final = 1.0  # seconds at the end of the program for the last line of a bar


class Watch:
    """One function whose queries are looked for, and their bars."""

    def __init__(
        self, name: str, title: str, tally: Tally, make: Callable[[], Bar], queries: Any
    ) -> None:
        """``name``: as plans have it, and no other function. ``queries``: see ``_Queries``."""
        self.name = name
        self._title = title
        self._tally = tally
        self._make = make
        self._queries = queries
        self._shown: dict[int, tuple[Bar, float, Total]] = {}
        """Bars by query, with when each began and what had been counted before."""
        self._before = tally.value
        """What had been counted when no query of the function ran."""
        self._over: set[int] = set()
        self.failures = 0
        """Looks in a row that have failed."""

    def look(self) -> None:
        """Shows how the queries stand. Raises what Spark raises."""
        self._queries.require_context()
        counted = self._tally.value
        if counted.tasks < self._before.tasks:  # `clear` was called
            self._before = Total()
        if not self._shown and not self._queries.at_work():
            self._before = counted
            return
        for number, stages, over in self._queries.with_function(self.name):
            if number in self._over:
                continue
            if number not in self._shown:
                if over:  # it was as quick as that
                    self._over.add(number)
                    self._before = counted
                    continue
                # Tasks that ended before this look count, unless they may be another query's.
                before = counted if self._shown else self._before
                self._shown[number] = self._make(), time.monotonic(), before
            bar, began, before = self._shown[number]
            progress = FilesProgress(self._title, seconds=time.monotonic() - began)
            for begun in filter(None, map(self._queries.stage, stages)):
                progress.tasks += begun.numTasks
                progress.running += begun.numActiveTasks
                progress.ended += begun.numCompletedTasks
                progress.failed += begun.numFailedTasks
            progress.total = _since(self._tally.value, before)
            bar.show(progress)
            if over:
                self._end(number)

    def close(self) -> None:
        """Ends all bars where they are."""
        for number in tuple(self._shown):
            self._end(number)

    def _end(self, number: int) -> None:
        bar, _, _ = self._shown.pop(number)
        self._over.add(number)
        self._before = self._tally.value
        try:
            bar.close()
        except Exception as error:  # noqa: BLE001  of a terminal that is gone
            log.debug("a bar could not be closed: %s: %s", type(error).__name__, error)


class _Queries:
    """Spark's queries, by what its SQL store and its status tracker say."""

    def __init__(self, session: Any) -> None:
        self._sql = session._jsparkSession.sharedState().statusStore()
        self._tracker = session.sparkContext.statusTracker()
        self.context = session.sparkContext
        self._has: dict[int, bool] = {}
        """Of the newest queries: whether they have the function. A plan may be long."""

    def require_context(self) -> None:
        """Raises AttributeError if the context has stopped. Its tracker would only look idle."""
        _ = self.context.startTime

    def at_work(self) -> bool:
        """Whether Spark runs any job."""
        return bool(self._tracker.getActiveJobsIds())

    def with_function(self, name: str) -> list[tuple[int, list[int], bool]]:
        """Number, stages and whether it is over, of each newest query with this function."""
        count = self._sql.executionsCount()
        newest = self._sql.executionsList(max(0, count - _QUERIES), _QUERIES)
        found, known, self._has = [], self._has, {}
        for place in range(newest.size()):
            query = newest.apply(place)
            number = int(query.executionId())
            has = known.get(number)
            if has is None:
                has = f"{name}(" in query.physicalPlanDescription()
            self._has[number] = has
            if has:
                stages = [int(each) for each in query.stages().mkString(",").split(",") if each]
                over = not query.completionTime().isEmpty()
                found.append((number, stages, over))
        return found

    def stage(self, number: int) -> Any:
        """How a stage stands; None: it has not begun, or Spark had no need of it."""
        found = self._tracker.getStageInfo(number)
        if found is None or not (
            found.numActiveTasks or found.numCompletedTasks or found.numFailedTasks
        ):
            return None
        return found


class _Watcher:
    """The thread that looks."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._watches: dict[str, Watch] = {}
        self._dropped: list[Watch] = []
        """Others took their places; the thread ends their bars."""
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()

    def add(self, watch: Watch) -> None:
        with self._lock:
            if self._pid != os.getpid():  # a fork: the thread and the bars are the parent's
                self._pid, self._watches, self._thread = os.getpid(), {}, None
                self._dropped = []
            if watch.name in self._watches:
                return
            while len(self._watches) >= _MOST:
                self._dropped.append(self._watches.pop(next(iter(self._watches))))
            self._watches[watch.name] = watch
            if self._thread is None:
                self._stopped = threading.Event()
                self._thread = threading.Thread(
                    target=self._run, args=(self._stopped,), name="aqueduct-progress", daemon=True
                )
                self._thread.start()

    def stop(self) -> None:
        """At the end of the program: bars get their last line."""
        thread = self._thread
        if thread is not None and self._pid == os.getpid():
            self._stopped.set()
            thread.join(_FAREWELL)

    def look(self) -> None:
        """Once, at all functions. One that fails too often is dropped."""
        for watch in tuple(self._watches.values()):
            try:
                watch.look()
                watch.failures = 0
            except Exception as error:  # noqa: BLE001  Spark changes what is looked at meanwhile
                watch.failures += 1
                if watch.failures >= _FAILURES:  # the context has stopped, or Spark differs
                    log.debug("progress is not shown: %s: %s", type(error).__name__, error)
                    with self._lock:
                        if self._watches.get(watch.name) is watch:  # else `add` has dropped it
                            self._dropped.append(self._watches.pop(watch.name))
        while self._dropped:
            self._dropped.pop().close()

    def _run(self, stopped: threading.Event) -> None:
        while not stopped.wait(_PAUSE):
            self.look()
            with self._lock:
                if not (self._watches or self._dropped):
                    self._thread = None  # the next function begins another
                    return
        self.look()
        with self._lock:
            watches = [*self._dropped, *self._watches.values()]
            self._dropped, self._watches, self._thread = [], {}, None
        for each in watches:
            each.close()


_watcher: Final = _Watcher()
atexit.register(_watcher.stop)


def watch(name: str, title: str, tally: Tally, wanted: bool | None) -> None:
    """Shows the queries of a function from now on, if they are to be shown.

    ``wanted``: None, if somebody can see it. Called on the driver when the function is sent off.
    """
    if wanted is False or "pyspark" not in sys.modules:
        return
    from pyspark import TaskContext
    from pyspark.sql import SparkSession
    from pyspark.sql.utils import is_remote

    if is_remote() or TaskContext.get() is not None:
        return
    make = bar_for(wanted)
    session = SparkSession.getActiveSession()
    if make is None or session is None:
        return
    try:
        queries = _Queries(session)
    except Exception as error:  # noqa: BLE001  of another Spark: the job goes on without a bar
        log.info("no progress is shown: %s: %s", type(error).__name__, error)
        return
    if wanted is None and _shows_its_own(queries.context):
        return
    _watcher.add(Watch(name, escape(title), tally, make, queries))


def _shows_its_own(context: Any) -> bool:
    """Whether Spark has a bar at this terminal: two in one line are none."""
    return bool(context.getConf().get("spark.ui.showConsoleProgress", "false") == "true")


def _since(now: Total, before: Total) -> Total:
    counted = {
        each.name: getattr(now, each.name) - getattr(before, each.name)
        for each in fields(CallMetrics)
    }
    return Total(**counted, tasks=now.tasks - before.tasks)
