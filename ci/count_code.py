"""Counts the lines of code of the two packages, and the bytes of prose in the repository.

    python ci/count_code.py                          the work tree
    python ci/count_code.py --at COMMIT              a commit
    python ci/count_code.py --since COMMIT           the work tree, and what changed since then
    python ci/count_code.py --at NEW --since OLD     a commit, and what changed between the two
    python ci/count_code.py ... --json               the same numbers as JSON

A line counts as code if some of it is neither blank, nor a comment, nor a docstring. A docstring is
a statement that is nothing but a string, wherever it stands. C code in a string under
``cdef extern from`` is code. Files are those that end in ``.py``, ``.pyx`` and ``.pxd``: a ``.pyi``
repeats what its module says. Prose is every ``.md`` file, in bytes.
"""

from __future__ import annotations

import argparse
import io
import json
import re
import subprocess
import sys
import tarfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Final

__all__ = ["Counts", "code_lines", "count", "files_at", "files_here"]

ROOT: Final = Path(__file__).resolve().parents[1]
PACKAGES: Final = ("aqueduct", "spark_udfs")
SUFFIXES: Final = (".py", ".pyx", ".pxd")
PROSE: Final = "prose .md, bytes"

Counts = dict[str, int]
"""Lines by package and suffix, ``aqueduct .py`` for example, and bytes of prose."""

_TOKEN: Final = re.compile(
    r"""
      (?P<string> [a-zA-Z]{0,2} (?:
          \"{3} (?: [^\\] | \\. )*? \"{3} | '{3} (?: [^\\] | \\. )*? '{3}
        | " (?: [^"\\\n] | \\. )* " | ' (?: [^'\\\n] | \\. )* '
      ))
    | (?P<comment> \#[^\n]* )
    | (?P<joined> \\\n )
    | (?P<newline> \n )
    | (?P<blank> [^\S\n]+ )
    | (?P<opening> [(\[{] )
    | (?P<closing> [)\]}] )
    | (?P<other> \w+ | . )
    """,
    re.VERBOSE | re.DOTALL,
)
_C_CODE: Final = re.compile(r"\s*cdef\s+extern\s+from\b")
_C_COMMENT: Final = re.compile(r"/\*.*?\*/|//[^\n]*", re.DOTALL)


def _statements(source: str) -> Iterator[list[tuple[str, str, int]]]:
    """The logical lines: kind, text and first line of each token that is not blank or comment."""
    statement: list[tuple[str, str, int]] = []
    line, depth = 1, 0
    for match in _TOKEN.finditer(source):
        kind, text = str(match.lastgroup), match[0]
        if kind in ("string", "opening", "closing", "other"):
            statement.append((kind, text, line))
            depth += (kind == "opening") - (kind == "closing")
        elif kind == "newline" and depth <= 0 and statement:
            yield statement
            statement = []
        line += text.count("\n")
    if statement:
        yield statement


def _lines_of(text: str, first: int) -> Iterator[int]:
    """The numbers of the lines of a token that are not blank."""
    return (first + at for at, part in enumerate(text.split("\n")) if part.strip())


def code_lines(source: str) -> int:
    """How many lines of a Python or Cython source are code."""
    found: set[int] = set()
    before = ""
    for statement in _statements(source):
        is_string = all(kind == "string" for kind, _, _ in statement)
        for _, text, first in statement:
            if is_string:
                if not _C_CODE.match(before):
                    continue
                # The quotes stand where they are, but are no code of C.
                text = _C_COMMENT.sub(lambda match: "\n" * match[0].count("\n"), text)
                text = text.replace('"""', "").replace("'''", "")
            found.update(_lines_of(text, first))
        before = " ".join(text for _, text, _ in statement)
    return len(found)


def count(files: Iterable[tuple[str, bytes]]) -> Counts:
    """The numbers of these files: path with slashes, from the root of the project, and content."""
    found = {f"{package} {suffix}": 0 for package in PACKAGES for suffix in SUFFIXES}
    found[PROSE] = 0
    for name, content in files:
        path = PurePosixPath(name)
        kind = f"{path.parts[0]} {path.suffix}"
        if kind in found:
            found[kind] += code_lines(content.decode())
        elif path.suffix == ".md":
            found[PROSE] += len(content)
    return found


def _git(root: Path, *arguments: str) -> bytes:
    done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, check=False)
    if done.returncode:
        raise SystemExit(f"git {' '.join(arguments)}: {done.stderr.decode().strip()}")
    return done.stdout


def files_here(root: Path = ROOT) -> Iterator[tuple[str, bytes]]:
    """The files of the work tree that git has, or would take."""
    listed = _git(root, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    for name in sorted(set(listed.decode().split("\0"))):
        if name and (root / name).is_file():
            yield name, (root / name).read_bytes()


def files_at(commit: str, root: Path = ROOT) -> Iterator[tuple[str, bytes]]:
    """The files of a commit. Raises SystemExit if git knows no such commit."""
    with tarfile.open(fileobj=io.BytesIO(_git(root, "archive", "--format=tar", commit))) as archive:
        for member in archive:
            content = archive.extractfile(member) if member.isfile() else None
            if content is not None:
                yield member.name, content.read()


def totals(counts: Mapping[str, int]) -> Counts:
    """The numbers with a sum for each package, and one for the code of both."""
    found: Counts = {}
    for package in PACKAGES:
        parts = {name: value for name, value in counts.items() if name.startswith(f"{package} ")}
        found |= parts | {package: sum(parts.values())}
    return found | {
        "code": sum(found[package] for package in PACKAGES),
        PROSE: counts[PROSE],
    }


def table(new: Mapping[str, int], old: Mapping[str, int] | None) -> str:
    """The numbers, one a line; with what they were and how they changed if there is ``old``."""
    lines = []
    for name, value in new.items():
        cells = [f"{name:<18}", f"{value:>9,}"]
        if old is not None:
            cells += [f"{old[name]:>9,}", f"{value - old[name]:>+9,}"]
        lines.append(" ".join(cells))
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """The status of the process."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--at", metavar="COMMIT", help="count this commit, not the work tree")
    parser.add_argument("--since", metavar="COMMIT", help="compare with this commit")
    parser.add_argument("--json", action="store_true", help="print JSON")
    given = parser.parse_args(arguments)
    new = totals(count(files_at(given.at) if given.at else files_here()))
    old = totals(count(files_at(given.since))) if given.since else None
    if given.json:
        document = {"counts": new}
        if old is not None:
            document |= {"before": old, "change": {name: new[name] - old[name] for name in new}}
        print(json.dumps(document, indent=2))
    else:
        print(table(new, old))
    return 0


if __name__ == "__main__":
    sys.exit(main())
