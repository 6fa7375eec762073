"""What holds for every test: no silent skips, one Spark session, one interpreter."""

from __future__ import annotations

import gc
import os
import re
import sys
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

# Spark's workers run the interpreter of the tests, whatever `python3` is.
os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
# The many JVMs of these tests end before their best compiler would have paid for itself, and half
# of what they take is to load classes, unless `make test` has archived them (ci/spark_cds.py).
JAVA_OPTIONS = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
CLASSES = Path(sys.prefix) / "spark.jsa"
if " " not in str(CLASSES) and CLASSES.exists() and CLASSES.stat().st_size:
    JAVA_OPTIONS += f" -XX:SharedArchiveFile={CLASSES} -Xlog:cds*=off"
os.environ.setdefault("SPARK_SUBMIT_OPTS", JAVA_OPTIONS)

NO_SKIPS = os.environ.get("AQUEDUCT_NO_SKIPS") == "1" or os.environ.get("CI") == "true"
"""A test that is skipped or expected to fail proves nothing: there it counts as failed."""

# Without a clock, since a busy machine must not fail a test; and where a run decides about a
# change, with the same examples each time.
settings.register_profile(
    "project",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=NO_SKIPS,
)
settings.load_profile("project")

SPARK_TIMEOUT = 240
LONG_TIMEOUT = 1200


def _as_failure(report: Any) -> None:
    if not report.skipped and not hasattr(report, "wasxfail"):
        return
    reason = getattr(report, "wasxfail", None)
    if reason is None:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
    else:
        del report.wasxfail
    report.outcome = "failed"
    report.longrepr = f"{report.nodeid}: no test may be skipped or xfailed here: {reason}"


if NO_SKIPS:

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Counts a skip, an xfail and an xpass as a failure."""
        report = yield
        _as_failure(report)
        return report

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
        """The same for a whole module that asks to be skipped."""
        report = yield
        _as_failure(report)
        return report


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leaves a file alone if its `pytestmark` has a mark that `-m` rules out by "not".

    Its tests would be deselected anyway, but only after it was imported, and what it imports may
    not be there: PySpark, or the source tree.
    """
    ruled_out = set(re.findall(r"not (\w+)", config.option.markexpr))
    if not ruled_out or collection_path.suffix != ".py":
        return None
    whole_file = re.search(r"^pytestmark = (.*?)$", collection_path.read_text(), re.MULTILINE)
    marks = re.findall(r"pytest\.mark\.(\w+)", whole_file[1]) if whole_file else ()
    return True if ruled_out.intersection(marks) else None


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds ``--requirement``: the tests that prove one number, by their markers."""
    parser.addoption(
        "--requirement",
        action="append",
        default=[],
        metavar="NUMBER",
        help="run only tests marked with this requirement, AQ-R24 for example (repeatable)",
    )


def _select(config: pytest.Config, items: list[pytest.Item]) -> None:
    wanted = set(config.getoption("requirement"))
    if not wanted:
        return
    kept: list[pytest.Item] = []
    left: list[pytest.Item] = []
    for item in items:
        marks = item.iter_markers("requirement")
        (kept if any(wanted.intersection(mark.args) for mark in marks) else left).append(item)
    config.hook.pytest_deselected(items=left)
    items[:] = kept


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keeps what ``--requirement`` names; gives the slow tests a longer time limit.

    Tests of the project as a whole come first: some build or run all of it, and no other worker
    is to wait for them at the end.
    """
    _select(config, items)
    items.sort(key=lambda item: "/" in item.nodeid.removeprefix("tests/"))
    for item in items:
        if item.get_closest_marker("timeout") is None:
            if item.get_closest_marker("long") is not None:
                item.add_marker(pytest.mark.timeout(LONG_TIMEOUT))
            elif item.get_closest_marker("spark") is not None:
                item.add_marker(pytest.mark.timeout(SPARK_TIMEOUT))


@settings(max_examples=1, database=None)
@given(st.none())
def _first_use(_: None) -> None:
    """Has hypothesis keep its random numbers."""


def pytest_collection_finish() -> None:
    """Thousands of tests live to the end of a run: no search for garbage looks at them again.

    Hypothesis looks for who refers to its random numbers when they are first used, which Python
    3.14 cannot tell of what is frozen.
    """
    _first_use()
    gc.collect()
    gc.freeze()


SPARK_USERS = frozenset(
    f"test_{name}.py"
    for name in (
        *("addresses", "arguments", "awake", "datasource_catalog", "datasource_read"),
        *("casting", "datasource_stream", "datasource_tokens", "reactive_calls"),
        *("datasource_write", "files", "frames", "groups", "options", "progress"),
    )
)
"""Files, beside `test_spark_*`, with tests that take the fixture `spark`."""

SHARING = frozenset(("test_cli.py", "test_house.py", "test_network_breaks.py", "test_sabotage.py"))
"""Files whose tests share what takes seconds to make. So do those of ``tests/sinks`` (a database)
and ``tests/examples`` (compiled classes).
"""


def _scope(nodeid: str) -> str:
    """What a test is sent to a worker with. Two workers have a Spark session, for all who want
    one; what has a Spark of its own goes by the file, so that no two compete for one worker.
    """
    path = nodeid.partition("::")[0]
    name = path.rpartition("/")[2]
    if name.startswith("test_spark_"):
        return "the first Spark session"
    if "spark/" in path and name in SPARK_USERS:
        return "the second Spark session"
    folder = path.removesuffix("/" + name).rpartition("/")[2]
    if folder == "sinks":
        return "the database"
    return path if folder in ("spark", "examples") or name in SHARING else nodeid


class _Scheduling(LoadScopeScheduling):
    """Sends tests to workers by scope, the largest scopes first, whatever `--dist` says.

    Nearly all of the thousands of scopes have one test. The class beneath looks through all tests
    for the place of one, and through all scopes that a worker ever had after each test.
    """

    places: Mapping[str, int] | None = None
    """Where a worker has a test: the same for all, which `schedule` makes sure of."""

    def _split_scope(self, nodeid: str) -> str:
        return _scope(nodeid)

    def _assign_work_unit(self, node: WorkerController) -> None:
        if self.places is None:
            collection = self.registered_collections[node]
            self.places = {nodeid: place for place, nodeid in enumerate(collection)}
        scope, unit = self.workqueue.popitem(last=False)
        self.assigned_work[node][scope] = unit
        node.send_runtest_some([self.places[nodeid] for nodeid, done in unit.items() if not done])

    def mark_test_complete(
        self, node: WorkerController, item_index: int, duration: float = 0
    ) -> None:
        """Forgets a scope with its last test."""
        super().mark_test_complete(node, item_index, duration)
        scope, units = _scope(self.registered_collections[node][item_index]), self.assigned_work
        if node in units and all(units[node][scope].values()):
            del units[node][scope]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadScopeScheduling:
    """Has tests sent to workers by scope."""
    return _Scheduling(config, log)
