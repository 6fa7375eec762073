"""Checks that a release is what its tag says: ``python ci/release.py v0.1.0 REPOSITORY_URL``.

Code has its version from pyproject.toml alone, and README's links have their address from there.
What is published stays as it is, and so does a README that says that there is no package.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

__all__ = ["problems"]

ROOT: Final = Path(__file__).parents[1]
UNPUBLISHED: Final = {
    "README.md": ("not on PyPI yet",),
    "docs/install.md": ("not on PyPI yet", "Once the version is on PyPI"),
    "SECURITY.md": ("has no public repository yet",),
}
"""What pages say until there is a release. README is the package's own page on PyPI."""


def problems(tag: str, repository: str, root: Path = ROOT) -> list[str]:
    """What speaks against a release of ``tag`` from ``repository``, the address of its pages."""
    found = []
    text = (root / "pyproject.toml").read_text(encoding="utf-8")
    project = tomllib.loads(text)["project"]
    version, urls = project["version"], project["urls"]
    if tag != f"v{version}":
        found.append(f"pyproject.toml has the version {version}, and the tag is {tag}")
    if (urlsplit(repository).hostname or "example").endswith("example"):
        found.append(f"{repository!r} is not the address of a repository")
    for name, url in urls.items():
        if url != repository and not url.startswith(f"{repository}/"):
            found.append(f"project.urls.{name} is {url}, and the release is from {repository}")
    changes = (root / "CHANGES.md").read_text(encoding="utf-8")
    if not re.search(rf"^## {re.escape(version)}(?! \(unreleased\))", changes, re.MULTILINE):
        found.append(f"CHANGES.md has no heading '## {version}' without '(unreleased)'")
    for page, said in UNPUBLISHED.items():
        told = " ".join((root / page).read_text(encoding="utf-8").split())
        found += [
            f"{page} says {words!r}, which is wrong with the release"
            for words in said
            if words in told
        ]
    return found


def main(arguments: list[str]) -> int:
    """Prints the problems; returns the exit status."""
    if len(arguments) != 2:
        print("ci/release.py: say TAG REPOSITORY_URL", file=sys.stderr)
        return 2
    tag, repository = arguments
    found = problems(tag, repository)
    for line in found:
        print(f"ci/release.py: {line}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
