"""Tries each change in a tree of its own, with exactly the tests that carry its numbers."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Final

import pytest

from tests.sabotage.changes import Change
from tests.sabotage.tree import Tree

__all__ = ["Outcome", "Result", "RunError", "check", "files_with", "prepare", "try_changes"]

RUN_TIMEOUT: Final = 120.0
"""Seconds for the tests of one number: a change may make them wait for ever."""
SETUP_TIMEOUT: Final = 600.0
PYTEST: Final = ("-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--timeout=40")
# The tests of the core alone, where time is virtual. A socket or a clock could fail for its own
# reasons, and a change would count as caught; so would one that a random run meets by its seed.
FOLDERS: Final = ("tests/speedups", "tests/protocol")
BY_CHANCE: Final = {"test_machines.py", "test_model.py", "test_random.py"}
LEFT_OUT: Final = ("-m", "not long and not spark")
# A change that does not even run proves nothing about the tests.
BROKEN: Final = {"SyntaxError", "NameError", "UnboundLocalError", "ImportError"}


class RunError(Exception):
    """The tree as it is cannot be tried."""


class Outcome(Enum):
    """What became of a change."""

    CAUGHT = "caught"
    SURVIVED = "SURVIVED"
    PROBLEM = "PROBLEM"


@dataclass(frozen=True)
class Result:
    """A change with one of its numbers."""

    change: Change
    requirement: str
    outcome: Outcome
    text: str
    """The test that failed first, what breaks unseen, or why the entry proves nothing."""
    output: str = ""
    """What the programs said, if that matters."""

    def __str__(self) -> str:
        return f"{self.outcome.value:8} {self.requirement:6} {self.change.name}: {self.text}"


def files_with(root: Path, requirements: Iterable[str]) -> list[str]:
    """The test files of the core that mention one of the numbers."""
    numbers = re.compile(rf"\b({'|'.join(map(re.escape, requirements))})(?!\d)")
    return [
        str(path.relative_to(root))
        for folder in FOLDERS
        for path in sorted((root / folder).rglob("test_*.py"))
        if path.name not in BY_CHANCE and numbers.search(path.read_text())
    ]


def prepare(folder: Path, requirements: Iterable[str], jobs: int) -> Tree:
    """A tree in which all tests of these numbers pass. Raises RunError."""
    tree = Tree.of_the_project(folder)
    code, output = tree.python("-m", "tests.sabotage.compiling", timeout=SETUP_TIMEOUT)
    if code != 0:
        raise RunError(f"the tree does not compile:\n{output}")
    names = (
        "import aqueduct, aqueduct._speedups.channels.decoder as d; "
        "print(aqueduct.__file__, d.__file__)"
    )
    code, output = tree.python("-c", names, timeout=SETUP_TIMEOUT)
    if code != 0 or not all(name.startswith(f"{folder}/") for name in output.split()):
        raise RunError(f"another tree is imported:\n{output}")
    check(tree, requirements, jobs)
    return tree


def check(tree: Tree, requirements: Iterable[str], jobs: int) -> None:
    """Raises RunError unless the tests of these numbers pass: a failure must be a change's."""
    numbers = sorted(set(requirements))
    chosen = [part for number in numbers for part in ("--requirement", number)]
    workers = ["-n", f"{jobs}"] if jobs > 1 else []
    paths = files_with(tree.root, numbers)
    code, output = tree.python(*PYTEST, *workers, *LEFT_OUT, *chosen, *paths, timeout=SETUP_TIMEOUT)
    if code != pytest.ExitCode.OK:
        raise RunError(f"the tests do not pass without any change:\n{output}")


def try_changes(tree: Tree, changes: Iterable[Change], folder: Path, jobs: int) -> Iterator[Result]:
    """Tries them, some at once, and gives the results as they come."""
    with ThreadPoolExecutor(jobs) as pool:
        futures = [
            pool.submit(_try, tree, change, folder / f"{index}")
            for index, change in enumerate(changes)
        ]
        try:
            for future in as_completed(futures):
                yield from future.result()
        finally:
            for future in futures:
                future.cancel()


def _try(pristine: Tree, change: Change, folder: Path) -> list[Result]:
    tree = pristine.copy(folder)
    try:
        change.apply(tree.root)
        if change.compiled:
            code, output = tree.python("-m", "tests.sabotage.compiling", timeout=SETUP_TIMEOUT)
            if code != 0 or "aqueduct._speedups." not in output:
                number, *_ = change.requirements
                return [Result(change, number, Outcome.PROBLEM, "it does not compile", output)]
        return [_judge(tree, change, number) for number in change.requirements]
    finally:
        tree.remove()


def _judge(tree: Tree, change: Change, requirement: str) -> Result:
    report = tree.root / f"report-{requirement}.json"
    paths = files_with(tree.root, [requirement])
    if not paths:
        return Result(change, requirement, Outcome.SURVIVED, "no test carries the number")
    options = ["-p", "tests.sabotage.watch", *LEFT_OUT, "--requirement", requirement]
    code, output = tree.python(
        *PYTEST,
        *options,
        *paths,
        timeout=RUN_TIMEOUT,
        # The bytecode of the tree is that of the tree without the change.
        PYTHONDONTWRITEBYTECODE="1",
        AQUEDUCT_SABOTAGE_REPORT=str(report),
    )
    first = json.loads(report.read_text()) if report.exists() else {}
    if code is None:
        return Result(change, requirement, Outcome.CAUGHT, f"hangs for {RUN_TIMEOUT:.0f} s")
    if code == pytest.ExitCode.OK:
        return Result(change, requirement, Outcome.SURVIVED, change.breaks)
    if code == pytest.ExitCode.NO_TESTS_COLLECTED:
        return Result(change, requirement, Outcome.SURVIVED, "no test carries the number")
    if code != pytest.ExitCode.TESTS_FAILED or first.get("when") != "call":
        text = f"exit code {code}, and no test that failed"
        return Result(change, requirement, Outcome.PROBLEM, text, output)
    if first["kind"] in BROKEN:
        text = f"it does not run: {first['kind']}: {first['text']}"
        return Result(change, requirement, Outcome.PROBLEM, text, output)
    hangs = " (hangs)" if first["text"].startswith("Timeout") else ""
    return Result(change, requirement, Outcome.CAUGHT, first["test"] + hangs)
