"""The numbered requirements of ``docs/protocols`` and the tests that prove them.

``python -m tests.requirements`` prints each number with its tests. It fails when a number has
none, and when a test carries a number that is on no page. What a test carries is asked of pytest
itself, so that marks of modules, classes and parameters count like those of functions.
"""

from __future__ import annotations

import contextlib
import io
import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

__all__ = ["Carriers", "collect", "faults", "ledger", "main", "report"]

ROOT = Path(__file__).parent.parent
PAGES = ROOT / "docs" / "protocols"

ENTRY = re.compile(r"^- \*\*([A-Z]+\d?-R?\d+)\*\* (?:\([\d. to]+\) )?(.*)$", re.MULTILINE)
WORDS = 10

Carriers = dict[str, Counter[str]]
"""Requirement to the tests that carry it: name of the function, and how often with parameters."""


def ledger(pages: Iterable[Path] | None = None) -> dict[str, str]:
    """Every number in the order of the pages, with the first words of its text."""
    found: dict[str, str] = {}
    for page in sorted(PAGES.glob("*.md")) if pages is None else pages:
        for number, text in ENTRY.findall(page.read_text(encoding="utf-8")):
            if number in found:
                raise ValueError(f"{page.name} has {number} twice")
            words = text.split()
            found[number] = " ".join(words[:WORDS]) + (" ..." if len(words) > WORDS else "")
    return found


@dataclass
class _Collector:
    """A pytest plugin: what is collected, by requirement."""

    carriers: Carriers = field(default_factory=dict)
    bad: list[str] = field(default_factory=list)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        for item in session.items:
            function = item.nodeid.partition("[")[0]
            numbers = set()
            for mark in item.iter_markers("requirement"):
                if len(mark.args) != 1 or mark.kwargs or not isinstance(mark.args[0], str):
                    self.bad.append(f"{function}: a requirement mark has one number, not {mark}")
                else:
                    numbers.add(mark.args[0])
            for number in numbers:
                self.carriers.setdefault(number, Counter())[function] += 1


def _marked() -> list[str]:
    """The files that have the word, as a mark needs it: others take half of the time."""
    paths = sorted((ROOT / "tests").rglob("test_*.py"))
    return [str(path) for path in paths if "requirement" in path.read_text(encoding="utf-8")]


def collect(*arguments: str) -> Carriers:
    """Which tests carry which number, by a collection of these tests: of all, unless named.

    Raises RuntimeError with pytest's own words when something cannot be collected, and ValueError
    when a mark is not one number.
    """
    collector = _Collector()
    options = ["--collect-only", "-q", "--no-header", "-p", "no:cacheprovider"]
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        status = pytest.main([*options, *(arguments or _marked())], [collector])
    if status != pytest.ExitCode.OK:
        raise RuntimeError(f"the tests could not be collected ({status!r}):\n{output.getvalue()}")
    if collector.bad:
        raise ValueError("\n".join(sorted(set(collector.bad))))
    return collector.carriers


def faults(numbers: Mapping[str, str], carriers: Carriers) -> list[str]:
    """What is wrong: numbers without a test, tests with a number that there is not."""
    found = [
        f"{number} has no test: {text}"
        for number, text in numbers.items()
        if not carriers.get(number)
    ]
    for number in sorted(carriers.keys() - numbers.keys()):
        tests = ", ".join(sorted(carriers[number]))
        found.append(f"{number} is on no page of docs/protocols; {tests} has it")
    return found


def report(numbers: Mapping[str, str], carriers: Carriers) -> list[str]:
    """Lines for people: each number, and below it its tests."""
    lines = []
    for number, text in numbers.items():
        lines.append(f"{number}  {text}")
        for test, count in sorted(carriers.get(number, {}).items()):
            lines.append(f"    {test}" + (f" ({count})" if count > 1 else ""))
    return lines


def main() -> int:
    """Prints all; the status is 1 if something is missing."""
    numbers = ledger()
    carriers = collect()
    print("\n".join(report(numbers, carriers)))
    wrong = faults(numbers, carriers)
    tests = {test for number in numbers for test in carriers.get(number, ())}
    print(f"\n{len(numbers)} requirements, {len(tests)} tests that carry one")
    print("\n".join(wrong) if wrong else "each has a test", file=sys.stderr if wrong else None)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
