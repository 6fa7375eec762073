"""The programs in guides and cookbook run as they stand, and print what the page says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PROGRAM = re.compile(r"```python\n# (\w+\.py)\n(.*?)```\n\n```\n(.*?)```", re.DOTALL)
PROGRAM_TEXT = re.compile(r"```python\n# (\w+\.py)\n(.*?)```", re.DOTALL)
PAGES = [
    page
    for folder in ("guides", "cookbook")
    for page in sorted((ROOT / "docs" / folder).glob("*.md"))
]
PROGRAMS = {
    f"{page.name}-{name}": (name, text, prints)
    for page in PAGES
    for name, text, prints in PROGRAM.findall(page.read_text())
}

pytestmark = pytest.mark.checkout


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_a_program_of_a_guide_prints_what_the_page_says(
    program: tuple[str, str, str], tmp_path: Path
) -> None:
    name, text, prints = program
    (tmp_path / name).write_text(text)
    run = subprocess.run(
        [sys.executable, name],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (run.returncode, run.stdout) == (0, prints), run.stderr


def test_every_named_program_of_a_guide_is_run() -> None:
    pages = [page.read_text() for page in PAGES]
    named = sum(len(re.findall(r"```python\n# \w+\.py\n", page)) for page in pages)
    assert named == len(PROGRAMS) >= 5
