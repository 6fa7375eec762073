"""The README as the page of a package has it: its links lead to the files of this version.

On PyPI there is no file beside the page, so a link to ``docs/README.md`` would lead nowhere.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Final

__all__ = ["absolute_links", "long_description"]

FENCE: Final = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
LINK: Final = re.compile(r"\]\((?![a-z][a-z0-9+.-]*:|#|/)([^)\s]+)")


def long_description(root: Path) -> str:
    """README.md of the project in ``root``, with absolute links; "": there is none."""
    page = root / "README.md"
    if not page.exists():
        return ""  # a copy of the sources that is compiled and not packed
    text = (root / "pyproject.toml").read_text(encoding="utf-8")
    project = tomllib.loads(text)["project"]
    base = f"{project['urls']['Repository']}/blob/v{project['version']}/"
    return absolute_links(page.read_text(encoding="utf-8"), base)


def absolute_links(text: str, base: str) -> str:
    """Markdown in which relative links begin with ``base``; code stays as it is."""
    parts = FENCE.split(text)
    parts[::2] = [LINK.sub(rf"]({base}\1", part) for part in parts[::2]]
    return "".join(parts)
