"""Each example of the cookbook runs as a program, and says at its end that its result is right."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
FOLDER = ROOT / "examples" / "spark"
EXAMPLES = sorted(path for path in FOLDER.glob("*.py") if path.stem != "program")
PAGES = sorted((ROOT / "docs" / "cookbook").glob("*.md"))

pytestmark = [pytest.mark.spark, pytest.mark.checkout]


# One after the other in one process: they share a JVM, whose start is most of their time.
RUNNER = """
import os, runpy, sys, traceback
sys.path.insert(0, os.path.dirname(sys.argv[1]))  # as python does for a program
for path in sys.argv[1:]:
    name = os.path.basename(path)
    folder = os.path.join(os.getcwd(), name + ".d")
    os.mkdir(folder)
    os.chdir(folder)
    sys.argv = [path]
    print(f"BEGIN {name}", flush=True)
    try:
        runpy.run_path(path, run_name="__main__")
        print(f"END {name}", flush=True)
    except BaseException:
        print(traceback.format_exc(), flush=True)
    os.chdir(os.path.dirname(folder))
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What all examples print."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "SPARK_LOCAL_IP": "127.0.0.1"}
    done = subprocess.run(
        [sys.executable, "-c", RUNNER, *map(str, EXAMPLES)],
        cwd=tmp_path_factory.mktemp("examples"),
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=560,
        check=False,
    )
    return done.stdout


@pytest.mark.timeout(600)
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs(path: Path, said: str) -> None:
    _, begun, rest = said.partition(f"BEGIN {path.name}\n")
    assert begun, said
    output, ended, _ = rest.partition(f"END {path.name}\n")
    assert ended, rest
    printed = [line for line in output.splitlines() if line.startswith("ok")]
    assert printed and "BEGIN" not in output, output


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_has_its_page(path: Path) -> None:
    name = f"examples/spark/{path.name}"
    assert any(name in page.read_text() for page in PAGES), f"no page of the cookbook names {name}"


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_a_page_is_in_the_index_and_its_links_lead_somewhere(path: Path) -> None:
    index = (ROOT / "docs" / "cookbook" / "README.md").read_text()
    assert path.name == "README.md" or f"]({path.name})" in index
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", path.read_text())
    assert [link for link in links if not (path.parent / link).exists()] == []


def test_there_are_examples_and_pages() -> None:
    assert len(EXAMPLES) >= 1 and len(PAGES) >= 2
