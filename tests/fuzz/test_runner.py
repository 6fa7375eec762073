"""What decides whether a run was one: counters found in a module, and edges enough."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from tests.fuzz import __main__ as runner
from tests.fuzz.edges import SECTION, section


def elf(sections: list[tuple[bytes, int, int]]) -> bytes:
    """A 64-bit ELF file of headers alone: (name, address, size), then the names."""
    names = b"\0" + b"".join(name + b"\0" for name, _, _ in sections) + b".shstrtab\0"
    begin = 64
    places = [names.index(b"\0" + name + b"\0") + 1 for name, _, _ in sections]
    headers = [struct.pack("<IIQQQQ24x", 0, 0, 0, 0, 0, 0)]
    for place, (_, address, size) in zip(places, sections, strict=True):
        headers.append(struct.pack("<IIQQQQ24x", place, 1, 3, address, 0, size))
    headers.append(struct.pack("<IIQQQQ24x", names.index(b".shstrtab"), 3, 0, 0, begin, len(names)))
    head = b"\x7fELF\x02\x01".ljust(0x28, b"\0") + struct.pack("<Q", begin + len(names))
    head = head.ljust(0x3A, b"\0") + struct.pack("<HHH", 64, len(headers), len(headers) - 1)
    return head.ljust(begin, b"\0") + names + b"".join(headers)


def test_a_section_is_found_by_its_name() -> None:
    image = elf([(b".text", 0x1000, 5), (SECTION, 0x64600, 0xBBF), (b".data", 0x70000, 8)])
    assert section(image, SECTION) == (0x64600, 0xBBF)
    assert section(image, b".data") == (0x70000, 8)


def test_a_module_that_counts_nothing_has_no_such_section() -> None:
    assert section(elf([(b".text", 0x1000, 5)]), SECTION) is None


@pytest.fixture
def build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(runner, "BUILD", tmp_path)
    return tmp_path


def report(target: str, each: int, *, without: str = "") -> None:
    counts = {name: (each, 9999) for name in runner.MODULES[target] if name != without}
    runner.report_path(target).write_text(json.dumps(counts))


@pytest.mark.usefixtures("build")
@pytest.mark.parametrize("target", runner.TARGETS)
def test_a_run_with_edges_enough_is_one(target: str) -> None:
    report(target, 500)
    assert runner.check_edges(target) == 500 * len(runner.MODULES[target])


@pytest.mark.usefixtures("build")
@pytest.mark.parametrize("target", runner.TARGETS)
def test_a_run_without_edges_fails(target: str) -> None:
    with pytest.raises(runner.Failure, match="0 compiled edges seen"):
        runner.check_edges(target)


@pytest.mark.usefixtures("build")
@pytest.mark.parametrize("target", runner.TARGETS)
def test_a_run_with_few_edges_fails(target: str) -> None:
    report(target, 1)
    with pytest.raises(runner.Failure, match=f"{runner.FLOORS[target]} expected"):
        runner.check_edges(target)


@pytest.mark.usefixtures("build")
def test_a_run_that_never_entered_a_module_fails() -> None:
    report("wire", 5000, without="tracker")
    with pytest.raises(runner.Failure, match="tracker"):
        runner.check_edges("wire")


def test_every_target_has_its_settings_and_its_corpus() -> None:
    for table in (runner.FLOORS, runner.MODULES, runner.LENGTHS):
        assert set(table) == set(runner.TARGETS)
    for target in runner.TARGETS:
        assert runner.corpus(target)
        assert runner.FLOORS[target] > 0
