"""The numbers of docs/protocols lead to tests, and the numbers in tests and comments to a page."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests import requirements
from tests.test_tooling import ROOT, tracked

pytestmark = pytest.mark.checkout

PAGE = """# A protocol

- **XY-1** (1.1) The first of all demands has a long text of many words,
  in two lines.
- **XY-2** Short. As AQ-9.
- **XY-R1** (2.2 to 2.4) A resolution: XY-3 is no line.
  1. **XY-4** is none either.
"""

SUITE = """
import pytest

requirement = pytest.mark.requirement
pytestmark = requirement("XY-1")

@requirement("XY-2")
class TestClass:
    @requirement("XY-R1")
    def test_method(self): pass

@pytest.mark.parametrize("x", [1, 2, pytest.param(3, marks=requirement("XY-2"))])
@pytest.mark.parametrize("y", ["a", "[b]"])
def test_function(x, y): pass

@requirement("XY-2")
@requirement("XY-2")
def test_twice(): pass
"""


@pytest.fixture
def page(tmp_path: Path) -> Path:
    path = tmp_path / "page.md"
    path.write_text(PAGE)
    return path


def run(folder: Path, code: str, body: str) -> subprocess.CompletedProcess[str]:
    """A program beside a test module of this text, with this project's tool."""
    (folder / "pyproject.toml").write_text(
        "[tool.pytest.ini_options]\nmarkers = ['requirement(name): x']\n"
    )
    (folder / "test_them.py").write_text(body)
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )


# The tool


def test_a_page_is_read(page: Path) -> None:
    assert requirements.ledger([page]) == {
        "XY-1": "The first of all demands has a long text of ...",
        "XY-2": "Short. As AQ-9.",
        "XY-R1": "A resolution: XY-3 is no line.",
    }


def test_a_number_given_twice_is_refused(page: Path) -> None:
    page.write_text(PAGE + "- **XY-2** Again.\n")
    with pytest.raises(ValueError, match=r"page.md has XY-2 twice"):
        requirements.ledger([page])


def test_marks_of_functions_classes_modules_and_parameters_count(tmp_path: Path) -> None:
    code = (
        "import json, sys; from tests.requirements import collect\n"
        "json.dump(collect('test_them.py'), sys.stdout)"
    )
    answer = run(tmp_path, code, SUITE)
    assert answer.returncode == 0, answer.stderr
    method, function, twice = (
        f"test_them.py::{name}"
        for name in ("TestClass::test_method", "test_function", "test_twice")
    )
    assert json.loads(answer.stdout) == {
        "XY-1": {method: 1, function: 6, twice: 1},
        "XY-2": {method: 1, function: 2, twice: 1},
        "XY-R1": {method: 1},
    }


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ("import no_such_module_here", "no_such_module_here"),
        ("", "could not be collected"),
        (SUITE.replace('"XY-R1"', '"XY-1", "XY-2"'), "has one number"),
        (SUITE.replace('"XY-R1"', ""), "has one number"),
        (SUITE.replace('"XY-R1"', "1"), "has one number"),
    ],
    ids=["an import that fails", "no tests", "two numbers", "no number", "no string"],
)
def test_what_cannot_be_collected_is_an_error(tmp_path: Path, body: str, error: str) -> None:
    answer = run(tmp_path, "from tests.requirements import collect; collect('test_them.py')", body)
    assert answer.returncode != 0
    assert error in answer.stderr


def test_a_number_without_a_test_and_a_test_without_a_number_are_faults(page: Path) -> None:
    numbers = requirements.ledger([page])
    carriers = {"XY-1": Counter({"test_a": 3}), "XY-R1": Counter(), "XY-11": Counter(["test_b"])}
    assert requirements.faults(numbers, carriers) == [
        "XY-2 has no test: Short. As AQ-9.",
        "XY-R1 has no test: A resolution: XY-3 is no line.",
        "XY-11 is on no page of docs/protocols; test_b has it",
    ]
    carriers = {number: Counter({"test_a": 3, "test_b": 1}) for number in numbers}
    assert requirements.faults(numbers, carriers) == []
    assert requirements.report(numbers, carriers)[:3] == [
        "XY-1  The first of all demands has a long text of ...",
        "    test_a (3)",
        "    test_b",
    ]


# This project


def test_no_number_is_left_out() -> None:
    wanted = [f"AQ-{n}" for n in range(1, 48)] + [f"AQ-R{n}" for n in range(1, 35)]
    wanted += [f"AC-{n}" for n in range(1, 105)]
    wanted += [f"BP-{n}" for n in range(1, 17)] + [f"BP-R{n}" for n in range(1, 16)]
    wanted += [f"AQ0-{n}" for n in range(1, 36)] + [f"AQ0-R{n}" for n in range(1, 17)]
    wanted += [f"RS-{n}" for n in range(1, 19)] + [f"RS-R{n}" for n in range(1, 16)]
    wanted += [f"RL-{n}" for n in range(1, 22)] + [f"RL-R{n}" for n in range(1, 20)]
    assert sorted(requirements.ledger()) == sorted(wanted)


def test_each_number_has_a_test_and_each_test_a_number() -> None:
    """What `make requirements` says of this tree."""
    answer = subprocess.run(
        [sys.executable, "-m", "tests.requirements"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=170,
    )
    assert (answer.returncode, answer.stderr) == (0, "")
    lines = answer.stdout.splitlines()
    assert lines[-1] == "each has a test"
    numbers = [line.split()[0] for line in lines if re.match(r"(AQ0?|AC|BP|RL|RS)-", line)]
    assert numbers == [*requirements.ledger()]
    assert sum(number.startswith("BP-") for number in numbers) == 31


@pytest.mark.parametrize(
    "page", sorted(requirements.PAGES.glob("*.md")), ids=lambda path: path.name
)
def test_pages_are_text_and_lead_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        assert (page.parent / target).exists(), target


def test_tests_that_a_page_names_exist() -> None:
    named = {
        name
        for page in requirements.PAGES.glob("*.md")
        for name in re.findall(r"`(test_[a-z0-9_]+)`", page.read_text(encoding="utf-8"))
    }
    sources = "".join(path.read_text(encoding="utf-8") for path in tracked(".py"))
    assert len(named) > 15
    assert [name for name in named if f"def {name}(" not in sources] == []


def test_numbers_in_comments_are_on_a_page() -> None:
    pages = [*tracked(".py", ".pyx", ".pxd", ".pyi"), *ROOT.glob("*.md")]
    cited = {
        (number, path.name)
        for path in pages
        for number in re.findall(r"\b(?:AQ0?|AC|BP|RL|RS)-R?\d+", path.read_text(encoding="utf-8"))
    }
    assert len(cited) > 81
    assert [entry for entry in cited if entry[0] not in requirements.ledger()] == []
