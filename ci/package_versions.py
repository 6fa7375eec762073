"""Versions of dependencies that pyproject.toml allows.

``python ci/package_versions.py aioquic`` prints all that PyPI has, oldest first. Releases that were
withdrawn, and those for testers, are left out, as pip leaves them out. ``--lowest`` prints the
lowest of each dependency, as requirements for pip: of the build, the library and its extras.
"""

from __future__ import annotations

import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from packaging.requirements import Requirement
from packaging.version import Version

ROOT: Final = Path(__file__).parents[1]


def requirement(name: str) -> Requirement:
    """What the project's dependencies ask of ``name``. Raises LookupError: nothing."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for entry in map(Requirement, project["dependencies"]):
        if entry.name == name:
            return entry
    raise LookupError(f"pyproject.toml has no dependency {name}")


def allowed(wanted: Requirement, listing: str) -> list[str]:
    """Those of the output of ``pip index versions`` that ``wanted`` allows, oldest first."""
    for line in listing.splitlines():
        title, _, rest = line.partition(":")
        if title == "Available versions":
            found = [Version(text.strip()) for text in rest.split(",")]
            return [str(version) for version in sorted(found) if version in wanted.specifier]
    raise LookupError(f"pip lists no versions of {wanted.name}: {listing!r}")


def lowest() -> list[str]:
    """Requirements with the lower bound of each dependency as its version.

    Raises ValueError: one has no lower bound, or has several, of which not all would be tested.
    """
    document = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    project = document["project"]
    wanted = [*document["build-system"]["requires"], *project["dependencies"]]
    wanted += [entry for extra in project["optional-dependencies"].values() for entry in extra]
    by_name: dict[str, list[Requirement]] = {}
    for entry in map(Requirement, wanted):
        if entry.name != project["name"]:  # one extra in another: what it has is here by itself
            by_name.setdefault(entry.name, []).append(entry)
    return [_at_the_bound(entries) for _, entries in sorted(by_name.items())]


def _at_the_bound(entries: Sequence[Requirement]) -> str:
    first = entries[0]
    bounds = {
        bound.version
        for entry in entries
        for bound in entry.specifier
        if bound.operator in (">=", "==")
    }
    if len(bounds) != 1 or not all(entry.specifier for entry in entries):
        every = ", ".join(map(str, entries))
        raise ValueError(f"pyproject.toml: not one lower bound, and the same everywhere: {every}")
    extras = sorted({extra for entry in entries for extra in entry.extras})
    marker = f"; {first.marker}" if first.marker else ""
    return f"{first.name}{extras or ''}=={bounds.pop()}{marker}".replace("'", "")


def main(name: str) -> None:
    """Prints the versions."""
    if name == "--lowest":
        print(*lowest(), sep="\n")
        return
    wanted = requirement(name)
    command = [sys.executable, "-m", "pip", "index", "versions", name]
    command.append("--disable-pip-version-check")
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=120)
    print(*allowed(wanted, done.stdout))


if __name__ == "__main__":
    main(sys.argv[1])
