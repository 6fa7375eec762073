"""The rules of conftest.py, tried on runs of their own: a skip or an xfail fails the run."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import pytest

from tests.conftest import SHARING, SPARK_USERS, _scope

CONFTEST = Path(__file__).with_name("conftest.py").read_text()
MARKED = """
@pytest.mark.skip(reason='because')
def test_skip(): pass

@pytest.mark.skipif(True, reason='because')
def test_skipif(): pass

def test_skip_inside(): pytest.skip('because')

def test_import(): pytest.importorskip('no_such_module_here', reason='because')

@pytest.mark.xfail(reason='because')
def test_xfail(): assert False

def test_xfail_inside(): pytest.xfail('because')

@pytest.mark.xfail(reason='because', strict=False)
def test_xpass(): pass
"""
NAMES = ("skip", "skipif", "skip_inside", "import", "xfail", "xfail_inside", "xpass")


@pytest.fixture(autouse=True)
def unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.delenv("AQUEDUCT_NO_SKIPS", raising=False)


def run(pytester: pytest.Pytester, body: str, *options: str) -> pytest.RunResult:
    pytester.makeconftest(CONFTEST)
    markers = ["spark", "long", "requirement"]
    pytester.makepyprojecttoml(f"[tool.pytest.ini_options]\nmarkers = {markers}")
    pytester.makepyfile(f"import pytest\ndef test_other(): pass\n{body}\n")
    return pytester.runpytest_subprocess("-p", "no:cacheprovider", *options, timeout=50)


@pytest.mark.parametrize(
    ("variable", "options"),
    [(("AQUEDUCT_NO_SKIPS", "1"), ()), (("CI", "true"), ("-n", "2"))],
    ids=["by its variable", "in CI, several workers"],
)
def test_what_does_not_run_fails(
    pytester: pytest.Pytester,
    monkeypatch: pytest.MonkeyPatch,
    variable: tuple[str, str],
    options: tuple[str, ...],
) -> None:
    monkeypatch.setenv(*variable)
    result = run(pytester, MARKED, *options)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    for name in NAMES:
        result.stdout.re_match_lines([rf".*::test_{name}: no test may be skipped .*because.*"])
    outcomes = result.parseoutcomes()
    assert outcomes["passed"] == 1
    assert outcomes["failed"] + outcomes["errors"] == len(NAMES)
    assert set(outcomes) == {"passed", "failed", "errors"}


def test_a_module_that_asks_to_be_skipped_fails(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AQUEDUCT_NO_SKIPS", "1")
    result = run(pytester, "pytest.skip('because', allow_module_level=True)")
    assert result.ret != 0
    result.assert_outcomes(errors=1)


def test_a_run_without_skips_passes(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AQUEDUCT_NO_SKIPS", "1")
    result = run(pytester, "")
    assert result.ret == 0
    result.assert_outcomes(passed=1)


def test_where_nobody_asks_skips_are_skips(pytester: pytest.Pytester) -> None:
    result = run(pytester, MARKED)
    assert result.ret == 0
    result.assert_outcomes(passed=1, skipped=4, xfailed=2, xpassed=1)


@pytest.mark.parametrize("marks", ["pytest.mark.spark", "[pytest.mark.long, pytest.mark.spark]"])
def test_what_a_run_rules_out_is_not_imported(pytester: pytest.Pytester, marks: str) -> None:
    body = f"pytestmark = {marks}\nimport no_such_module_here\ndef test_spark(): pass"
    result = run(pytester, body, "-m", "not spark")
    assert result.ret == pytest.ExitCode.NO_TESTS_COLLECTED
    pytester.makepyfile(test_second="def test_second(): pass")
    assert run(pytester, body, "-m", "not spark").ret == pytest.ExitCode.OK
    assert run(pytester, body, "-m", "spark").ret != pytest.ExitCode.OK


def test_one_worker_has_the_spark_session(pytester: pytest.Pytester) -> None:
    body = """
import os, pathlib, pytest

@pytest.mark.parametrize("number", range(12))
def test_it(number):
    worker = os.environ["PYTEST_XDIST_WORKER"]
    pathlib.Path(f"{pathlib.Path(__file__).stem}-{worker}").touch()
"""
    pytester.mkdir("spark")
    for name in ("test_spark_one", "test_spark_two", "test_demo"):
        (pytester.path / "spark" / f"{name}.py").write_text(body)
    result = run(pytester, body, "-n", "2")
    result.assert_outcomes(passed=4 * 12 + 1)
    workers = {path.name for path in pytester.path.glob("test_*-gw?")}
    one, two, demo = (
        [name[-3:] for name in workers if name.startswith(start)]
        for start in ("test_spark_one", "test_spark_two", "test_demo")
    )
    assert one == two
    assert len(one) == len(demo) == 1
    assert demo != one, "the other worker was left idle"


def test_what_is_costly_to_make_is_made_by_one_worker() -> None:
    together = [f"tests/sinks/test_{name}.py::test_it" for name in ("killed", "examples")]
    assert {_scope(nodeid) for nodeid in together} == {"the database"}
    names = {path.name for path in Path(__file__).parent.rglob("test_*.py")}
    assert names >= SHARING
    for path in (*(f"tests/carriers/{name}" for name in SHARING), "tests/examples/test_a.py"):
        assert _scope(f"{path}::test_one[a]") == _scope(f"{path}::test_two") == path
    assert _scope("tests/test_pages.py::test_one") != _scope("tests/test_pages.py::test_two")


def test_tests_of_the_whole_project_come_first(pytester: pytest.Pytester) -> None:
    pytester.mkdir("a_folder")
    (pytester.path / "a_folder" / "test_inner.py").write_text("def test_inner(): pass")
    result = run(pytester, "", "-v")
    assert re.findall(r"::(test_[^: ]+) PASSED", result.stdout.str()) == [
        "test_other",
        "test_inner",
    ]


NUMBERED = """
@pytest.mark.requirement("AQ-R2")
def test_two(): pass

@pytest.mark.requirement("AQ-R24")
@pytest.mark.requirement("AQ-46")
def test_twenty_four(): pass

@pytest.mark.parametrize("of", [pytest.param(3, marks=pytest.mark.requirement("AQ-3")), 4])
def test_one_of_them(of): pass

class TestAll:
    pytestmark = pytest.mark.requirement("AQ-46")
    def test_inside(self): pass
"""


@pytest.mark.parametrize(
    ("numbers", "names"),
    [
        (["AQ-R2"], ["test_two"]),  # the number, not its beginning
        (["AQ-R24"], ["test_twenty_four"]),
        (["AQ-46"], ["test_twenty_four", "test_inside"]),
        (["AQ-3"], ["test_one_of_them[3]"]),
        (["AQ-R2", "AQ-3"], ["test_two", "test_one_of_them[3]"]),
    ],
)
def test_tests_are_chosen_by_their_requirement(
    pytester: pytest.Pytester, numbers: list[str], names: list[str]
) -> None:
    options = [part for number in numbers for part in ("--requirement", number)]
    result = run(pytester, NUMBERED, "-v", *options)
    assert result.ret == 0
    assert re.findall(r"::(test_[^: ]+) PASSED", result.stdout.str()) == names
    assert result.parseoutcomes() == {"passed": len(names), "deselected": 6 - len(names)}


def test_a_requirement_that_no_test_proves_runs_nothing(pytester: pytest.Pytester) -> None:
    result = run(pytester, NUMBERED, "--requirement", "AQ-4")
    assert result.ret == pytest.ExitCode.NO_TESTS_COLLECTED


@pytest.mark.checkout
def test_a_crash_ends_the_run(pytester: pytest.Pytester) -> None:
    """Not so by itself: the tests that were left waited for a worker for ever."""
    settings = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())
    options = settings["tool"]["pytest"]["ini_options"]["addopts"]
    crash = """
import os, signal
@pytest.mark.parametrize("n", range(12))
def test_some(n):
    if n == 5:
        os.kill(os.getpid(), signal.SIGSEGV)
"""
    result = run(pytester, crash, "-n", "2", *options)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["*crashed while running*test_some?5?*"])


def test_whoever_takes_the_spark_session_shares_a_worker() -> None:
    takers = set()
    for path in Path(__file__).parent.glob("spark/test_*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                names = [argument.arg for argument in node.args.args]
                if "spark" in names and not path.name.startswith("test_spark_"):
                    is_test = node.name.startswith("test_")
                    fixtures = [ast.unparse(each) for each in node.decorator_list]
                    if is_test or any("fixture" in text for text in fixtures):
                        takers.add(path.name)
    assert takers == SPARK_USERS
