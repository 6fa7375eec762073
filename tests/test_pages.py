"""Pages: their links lead to files and headings, their lines are short, and each is linked to."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from aqueduct.admin.report import TaskReport
from aqueduct.reactivesocket import requesting
from aqueduct.rpc import (
    describe,
    documents,
    executor_name,
    filters,
    request,
    sink_commit,
    status,
    table_scan,
    unary,
)
from aqueduct.service import benchmark, sink_attempts, sinks, task_book
from aqueduct.settings.table import SETTINGS

ROOT = Path(__file__).parent.parent
CODE = re.compile(r"^( *)```.*?^\1```", re.DOTALL | re.MULTILINE)
LINE = 110
FILE = re.compile(r"`([\w/.]*\w\.(?:pyx?|pxd))`")
LINK = re.compile(r"\]\(([^)\s]+)\)")

pytestmark = pytest.mark.checkout


def _pages() -> list[Path]:
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "*.md"]
    said = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True, timeout=60)
    found = sorted({ROOT / name for name in said.stdout.split("\0") if name})
    return [page for page in found if page.exists()]


PAGES = _pages()
OURS = [
    path.relative_to(ROOT).as_posix()
    for folder in ("aqueduct", "spark_udfs", "benchmarks", "tests", "ci", "examples")
    for path in (ROOT / folder).rglob("*.p*")
]


def links_of(text: str) -> list[str]:
    """The targets of relative links outside code, as (possibly empty) path and ``#heading``."""
    found = LINK.findall(re.sub(r"`[^`\n]*`", "`code`", CODE.sub("", text)))
    return [link for link in found if not re.match(r"[a-z][a-z+.-]*:", link)]


def anchors_of(text: str) -> set[str]:
    """What ``#...`` may follow a link to the page, by GitHub's rule."""
    anchors: set[str] = set()
    for heading in re.findall(r"^#{1,6} +(.*?) *#*$", CODE.sub("", text), re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        anchor = re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")
        nth, unique = 0, anchor
        while unique in anchors:
            nth += 1
            unique = f"{anchor}-{nth}"
        anchors.add(unique)
    return anchors


def broken_links(page: Path) -> list[str]:
    broken = []
    for link in links_of(page.read_text()):
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        if not target.exists() or (anchor and anchor not in anchors_of(target.read_text())):
            broken.append(link)
    return broken


def test_links_and_headings_are_read_as_they_are_shown(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# A `Call`: what it *is*\n## Twice\n## Twice\n[code](page.md#twice-1) [`x`](#twice)\n"
        "[out](https://example.com) `[no](link.md)` [a](#a-call-what-it-is)\n"
        "```\n# no heading\n[no](link.md)\n```\n"
        "[gone](gone.md) [less](page.md#twice-2) [b](#no-heading)\n"
    )
    assert broken_links(page) == ["gone.md", "page.md#twice-2", "#no-heading"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(page: Path) -> None:
    assert broken_links(page) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_lines_have_at_most_110_characters_outside_tables(page: Path) -> None:
    lines = [line for line in page.read_text().splitlines() if not line.startswith("|")]
    assert [line for line in lines if len(line) > LINE] == []


DESIGN = [ROOT / "ARCHITECTURE.md", *sorted((ROOT / "docs" / "design").glob("*.md"))]


@pytest.mark.parametrize("page", DESIGN, ids=lambda page: page.name)
def test_every_file_that_a_page_of_design_names_exists(page: Path) -> None:
    named = FILE.findall(page.read_text())
    assert named
    assert [
        name for name in named if not any(f"/{path}".endswith(f"/{name}") for path in OURS)
    ] == []


def test_the_scripts_that_the_page_of_benchmarks_names_are_all_that_there_are() -> None:
    folder = ROOT / "benchmarks"
    named = re.findall(r"`([\w/*]+\.py)`", (folder / "README.md").read_text())
    found = {path for name in named for path in folder.glob(name)}
    assert all(list(folder.glob(name)) for name in named)
    scripts = {path for path in folder.glob("*.py") if "__main__" in path.read_text()}
    assert scripts | set(folder.glob("micro/bench_*.py")) == found


def test_every_page_can_be_reached_from_the_readme() -> None:
    reached: set[Path] = set()
    found = [ROOT / "README.md"]
    while found:
        page = found.pop()
        if page in reached:
            continue
        reached.add(page)
        targets = [link.partition("#")[0] for link in links_of(page.read_text())]
        found += [(page.parent / name).resolve() for name in targets if name.endswith(".md")]
    assert sorted(set(PAGES) - reached) == []


def test_the_fixed_limits_are_those_of_the_page() -> None:
    page = (ROOT / "docs" / "guides" / "limits.md").read_text()
    section = page.partition("\n## Limits that are fixed\n")[2].partition("\n## ")[0]
    rows = dict(re.findall(r"^\| (\d.*?) \| (.+?) \|$", section, re.MULTILINE))
    days = request._DEADLINE_LIMIT // 86_400_000
    assert rows.keys() == {
        f"{request._NAME_LIMIT} bytes",
        f"{table_scan.NAME_LIMIT} bytes",
        f"{request._TOKEN_LIMIT >> 10} KiB",
        f"{request._METADATA_LIMIT >> 10} KiB",
        f"{request._SCHEMAS_LIMIT >> 20} MiB",
        f"{days:,} days",
        f"{unary.ANSWERS_LIMIT}",
        f"{status._STATUS_LIMIT >> 10} KiB",
        f"{describe._LIMIT >> 20} MiB",
        f"{executor_name._MOST >> 10} KiB",
        f"{sink_commit._ATTEMPT_LIMIT >> 10} KiB",
        f"{sink_attempts._ENDED_LIMIT:,}",
        f"{filters._DEPTH}, {documents._DEEPEST}",
        f"{benchmark._CALLS}",
        f"{requesting.ERROR_MOST >> 10} KiB",
    }
    assert sink_attempts._ENDED_LIMIT == sink_attempts._CLAIMS_LIMIT
    assert sinks._NAME_LIMIT == table_scan.NAME_LIMIT


@pytest.mark.parametrize(
    "page", ["SECURITY.md", "docs/guides/admin.md", "docs/guides/live-page.md"]
)
def test_pages_tell_what_the_admin_port_shows_of_a_spark_task(page: str) -> None:
    words = " ".join((ROOT / page).read_text().split())
    who = [name for name in TaskReport.__annotations__ if name in _WHO]
    assert set(who) == _WHO
    for name in who:
        assert name in words, name
    assert f"up to {task_book._CLIPPED} characters of the attempt" in words
    assert "o other header" in words and "no header" not in words


_WHO = {"application", "name", "host", "executor", "stage", "partition", "task"}


def test_the_help_of_admin_names_all_that_is_there() -> None:
    page = (ROOT / "docs" / "guides" / "admin.md").read_text()
    told = re.split(r"[ ,;]+", str(SETTINGS["serve.admin"].entry.metadata["help"]))
    paths = re.findall(r"^\| `(/\S*)` \|", page, re.MULTILINE)
    assert len(set(paths)) == 5
    assert set(paths) <= set(told)
