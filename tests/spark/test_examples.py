"""Each example of the cookbook runs as a program, and says at its end that its result is right."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
EXAMPLES = sorted((ROOT / "examples" / "spark").glob("*.py"))
PAGES = sorted((ROOT / "docs" / "cookbook").glob("*.md"))

pytestmark = [pytest.mark.spark, pytest.mark.checkout]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs(path: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "SPARK_LOCAL_IP": "127.0.0.1"}
    done = subprocess.run(
        [sys.executable, str(path)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith("ok"), done.stdout + done.stderr


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
