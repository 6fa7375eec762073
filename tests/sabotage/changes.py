"""The list of changes in ``changes/*.toml``, and how one is made in a tree.

A file holds ``[[change]]`` tables:

    name         short and unique
    requirement  the number whose tests must fail, or several
    file         of the core
    within       a function or class, "decode" or "Decoder.next", if the line repeats in the file
    old, new     one line each, without indentation; `pass` drops a call
    breaks       what goes wrong then

and ``[exempt]``: numbers without a change, each with the reason.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

__all__ = ["CORE", "LISTS", "Change", "ChangeError", "read_lists"]

LISTS: Final = tuple(sorted((Path(__file__).parent / "changes").glob("*.toml")))
CORE: Final = (
    "aqueduct/protocol/channels/",
    "aqueduct/protocol/common/",
    "aqueduct/protocol/control_streams/",
    "aqueduct/protocol/bpmux/",
    "aqueduct/protocol/relink/",
    "aqueduct/protocol/reactivesocket/",
    "aqueduct/_speedups/",
)
FIELDS: Final = {"name", "requirement", "file", "within", "old", "new", "breaks"}


class ChangeError(Exception):
    """An entry that cannot be tried: it is stale, or was never right."""


@dataclass(frozen=True)
class Change:
    """One line of the core, made wrong."""

    name: str
    requirements: tuple[str, ...]
    file: str
    within: str
    old: str
    new: str
    breaks: str

    @property
    def compiled(self) -> bool:
        """Whether a module has to be compiled for it."""
        return not self.file.endswith(".py")

    def apply(self, root: Path) -> None:
        """Makes the change in the tree at ``root``. Raises ChangeError if the line is not there."""
        path = root / self.file
        path.write_text(self.changed(path.read_text()))

    def changed(self, source: str) -> str:
        """The source with the change. Raises ChangeError unless the old line stands there once."""
        lines = source.split("\n")
        first, stop = _region(lines, self.within) if self.within else (0, len(lines))
        found = [at for at in range(first, stop) if lines[at].strip() == self.old]
        if len(found) != 1:
            place = f"{self.file}, {self.within}" if self.within else self.file
            raise ChangeError(f"{place} has {len(found)} lines {self.old!r}, not one")
        (at,) = found
        indent = lines[at][: len(lines[at]) - len(lines[at].lstrip())]
        lines[at] = indent + self.new
        return "\n".join(lines)


def read_lists(paths: Iterable[Path] = LISTS) -> tuple[list[Change], dict[str, str]]:
    """The changes of these files in their order, and the exempt numbers with their reasons."""
    changes: list[Change] = []
    exempt: dict[str, str] = {}
    for path in paths:
        document = tomllib.loads(path.read_text())
        changes += map(_change, document.pop("change", []))
        exempt |= document.pop("exempt", {})
        if document:
            raise ChangeError(f"{path.name} has {', '.join(document)}")
    names = [change.name for change in changes]
    repeated = {name for name in names if names.count(name) > 1}
    if repeated:
        raise ChangeError(f"names that repeat: {', '.join(sorted(repeated))}")
    return changes, exempt


def _change(entry: dict[str, Any]) -> Change:
    if set(entry) | {"within"} != FIELDS:
        raise ChangeError(f"an entry has {sorted(entry)}; the fields are {sorted(FIELDS)}")
    numbers = entry["requirement"]
    return Change(
        name=entry["name"],
        requirements=tuple([numbers] if isinstance(numbers, str) else numbers),
        file=entry["file"],
        within=entry.get("within", ""),
        old=entry["old"],
        new=entry["new"],
        breaks=entry["breaks"],
    )


def _region(lines: list[str], within: str) -> tuple[int, int]:
    """Where the body of a function or class stands; a dotted name leads from class to method."""
    first, stop = 0, len(lines)
    for name in within.split("."):
        head = re.compile(rf"\s*(?:async def|c?p?def|cdef class|class)\b[^(=]*\b{name}\b\s*[(:]")
        found = [at for at in range(first, stop) if head.match(lines[at])]
        if len(found) != 1:
            raise ChangeError(f"{len(found)} functions or classes are called {name!r}, not one")
        (first,) = found
        depth = len(lines[first]) - len(lines[first].lstrip())
        for at in range(first + 1, stop):
            text = lines[at].lstrip()
            # A signature of several lines ends with a bracket at the depth of its head.
            if text and len(lines[at]) - len(text) <= depth and not text.startswith(")"):
                stop = at
                break
    return first, stop
