"""Builds the docs site of the pages of the repository: ``make docs``, or ``-m ci.docs_site``.

- The contents are the tables of ``docs/README.md``: a heading is a section, a link to a page an
  entry. A ``README.md`` further down is a section within, with the pages that it links to.
- Pages beside ``docs`` (``ARCHITECTURE.md``) and files of source that a page links to become pages
  too. So a link between files works in the site as it does in the repository.
- The reference is made from docstrings; see ``ci/docs_reference.py``.
- No page loads anything from elsewhere. External links are listed in ``external-links.txt``, and
  nothing fetches them.

The pages are written to ``build/docs``, and Sphinx makes ``build/site`` of them. Any warning fails
the build: a link to no file or to no heading is one.
"""

from __future__ import annotations

import argparse
import os.path
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import Final

from ci import docs_reference

__all__ = [
    "contents",
    "external_links",
    "foreign_resources",
    "links_of",
    "main",
    "site_name",
    "state_table",
    "with_links",
    "write_pages",
]

ROOT: Final = Path(__file__).resolve().parents[1]
DOCS: Final = PurePosixPath("docs")
BESIDE: Final = {
    "README.md": "project/readme.md",
    "ARCHITECTURE.md": "design/architecture.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "CHANGES.md": "project/changes.md",
    "SECURITY.md": "project/security.md",
    "benchmarks/README.md": "project/benchmarks.md",
}
"""Pages that are not in ``docs``, by their path in the repository."""

BLOCK: Final = r"^( *)(`{3,})[^\n]*\n.*?^\1\2 *$"
CODE: Final = re.compile(rf"{BLOCK}|`[^`\n]+`", re.DOTALL | re.MULTILINE)
DIAGRAM: Final = re.compile(r"^```mermaid\n(stateDiagram.*?)^```$", re.DOTALL | re.MULTILINE)
LINK: Final = re.compile(r"(\]\()([^)\s]+)(\))")
EXTERNAL: Final = re.compile(r"[a-z][a-z+.-]*:")
RESOURCE: Final = re.compile(
    r"<(?:script|img|iframe|source|video|audio)\b[^>]*?\ssrc=[\"']?((?:https?:)?//[^\"'\s>]+)"
    r"|<link\b[^>]*?\shref=[\"']?((?:https?:)?//[^\"'\s>]+)"
    r"|(?:@import\s|url\()\s*[\"']?((?:https?:)?//[^\"')\s]+)"
)
IMAGES: Final = frozenset({".png", ".svg"})
LANGUAGES: Final = {".py": "python", ".toml": "toml", ".yml": "yaml", ".sh": "sh", ".lua": "lua"}


def links_of(text: str) -> list[str]:
    """The targets of the links outside code."""
    return [link for _, link, _ in LINK.findall(CODE.sub("code", text))]


def external_links(text: str) -> list[str]:
    """Those of them that lead out of the repository."""
    return [link for link in links_of(text) if EXTERNAL.match(link)]


def site_name(name: str) -> str:
    """Where a file of the repository stands in the site."""
    path = PurePosixPath(name)
    if path.is_relative_to(DOCS):
        within = path.relative_to(DOCS)
        return str(within.with_name("index.md") if within.name == "README.md" else within)
    if name in BESIDE:
        return BESIDE[name]
    return f"source/{name}" if path.suffix in IMAGES else f"source/{name}.md"


def _target(folder: Path, link: str) -> str | None:
    """The file of the repository that a relative link leads to, if there is one."""
    name = link.partition("#")[0]
    if not name or EXTERNAL.match(link):
        return None
    path = Path(os.path.normpath(folder / name))
    if path.is_dir():
        path /= "README.md"
    if not path.is_file() or not path.is_relative_to(ROOT):
        return None
    return path.relative_to(ROOT).as_posix()


def with_links(text: str, name: str) -> str:
    """The text of the file with this name, its links leading to pages of the site."""
    here = PurePosixPath(site_name(name)).parent

    def led(match: re.Match[str]) -> str:
        target = _target((ROOT / name).parent, match[2])
        if target is None:  # Sphinx looks for it, and says that it is not there
            return match[0]
        anchor = match[2].partition("#")[2]
        there = os.path.relpath(site_name(target), here)
        return f"{match[1]}{there}{'#' + anchor if anchor else ''}{match[3]}"

    return _outside_code(text, lambda part: LINK.sub(led, part))


def _outside_code(text: str, change: Callable[[str], str]) -> str:
    parts: list[str] = []
    end = 0
    for match in CODE.finditer(text):
        parts += [change(text[end : match.start()]), match[0]]
        end = match.end()
    return "".join([*parts, change(text[end:])])


def state_table(diagram: str) -> str:
    """A state diagram as a table: what draws Mermaid would have to be loaded from elsewhere."""
    found = re.findall(r"^ *(\S+) --> (\S+?)(?:: (.*))?$", diagram, re.MULTILINE)
    rows = [
        f"| {before.replace('[*]', 'begin')} | {inputs} | {after.replace('[*]', 'end')} |"
        for before, after, inputs in found
    ]
    notes = [f"- In {state}, {text}." for state, text in re.findall(NOTE, diagram)]
    return "\n".join(["| state | input | next state |", "|---|---|---|", *rows, "", *notes, ""])


NOTE: Final = r"note \w+ of (\w+): (.*)"


def contents(index: Path) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """The sections of a page with tables: heading, and title and name of each page in the site."""
    for part in re.split(r"^## ", index.read_text(), flags=re.MULTILINE)[1:]:
        heading, _, text = part.partition("\n")
        found = re.findall(r"^\| \[([^\]]+)\]\(([^)#]+\.md)\)", text, re.MULTILINE)
        named = [(title, _target(index.parent, link)) for title, link in found]
        yield heading, [(title, site_name(target)) for title, target in named if target]


def _toctree(entries: list[str], caption: str = "") -> str:
    head = ["```{toctree}", ":hidden:", *([f":caption: {caption}"] if caption else []), ""]
    return "\n".join(["", *head, *entries, "```", ""])


def _trees(name: str) -> str:
    """What makes the contents of a page that has other pages below it."""
    if name == "docs/README.md":
        trees = []
        for heading, pages in contents(ROOT / name):
            entries = [f"{title} </{page.removesuffix('.md')}>" for title, page in pages]
            if heading == "Reference":
                entries += [f"/reference/{page}" for page in docs_reference.pages()]
            trees.append(_toctree(entries, heading))
        return "".join(trees)
    folder = (ROOT / name).parent
    inner = [_target(folder, link) for link in links_of((ROOT / name).read_text())]
    within = dict.fromkeys(each for each in inner if each and (ROOT / each).parent == folder)
    within.pop(name, None)
    return _toctree([f"/{site_name(each).removesuffix('.md')}" for each in within])


def write_pages(folder: Path) -> None:
    """Writes all pages of the site as Sphinx reads them."""
    shutil.rmtree(folder, ignore_errors=True)
    pages = [path.relative_to(ROOT).as_posix() for path in (ROOT / DOCS).rglob("*.md")]
    pages += [name for name in BESIDE if (ROOT / name).exists()]
    others: set[str] = set()
    for name in pages:
        text = (ROOT / name).read_text()
        targets = [_target((ROOT / name).parent, link) for link in links_of(text)]
        others.update(target for target in targets if target and target not in pages)
        text = DIAGRAM.sub(lambda match: state_table(match[1]), with_links(text, name))
        if name.startswith("docs/") and name.endswith("/README.md"):
            text += _trees(name)
        _write(folder / site_name(name), text)
    for name in others:
        path = ROOT / name
        if path.suffix in IMAGES:
            (folder / site_name(name)).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, folder / site_name(name))
            continue
        code = f"``````{LANGUAGES.get(path.suffix, 'text')}\n{path.read_text()}``````\n"
        _write(folder / site_name(name), f"---\norphan: true\n---\n\n# {path.name}\n\n{code}")
    for page, text in docs_reference.pages().items():
        _write(folder / "reference" / f"{page}.rst", text)


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def foreign_resources(text: str) -> list[str]:
    """What a page or a style would load from elsewhere."""
    return [next(filter(None, found)) for found in RESOURCE.findall(text)]


def _look_through(site: Path) -> list[str]:
    return [
        f"{path.relative_to(site)} loads {found} from elsewhere"
        for path in sorted(site.rglob("*"))
        if path.suffix in {".html", ".css"}
        for found in foreign_resources(path.read_text(encoding="utf-8"))
    ]


def _list_external(site: Path) -> int:
    """Writes the links that lead out of the site, and says how many there are."""
    pages = [*(ROOT / DOCS).rglob("*.md"), *(ROOT / name for name in BESIDE)]
    where = {
        link: path.relative_to(ROOT).as_posix()
        for path in sorted(pages, reverse=True)
        if path.exists()
        for link in external_links(path.read_text())
    }
    listed = [f"{link}  in {name}\n" for link, name in sorted(where.items())]
    (site / "external-links.txt").write_text("".join(listed))
    return len(listed)


def main(arguments: list[str] | None = None) -> int:
    """Builds the site, and gives the status of the process."""
    parser = argparse.ArgumentParser(description="Builds the docs site; a warning is an error.")
    parser.add_argument("--pages", type=Path, default=ROOT / "build" / "docs")
    parser.add_argument("--site", type=Path, default=ROOT / "build" / "site")
    given = parser.parse_args(arguments)
    from sphinx.cmd.build import build_main

    write_pages(given.pages)
    shutil.rmtree(given.site, ignore_errors=True)
    options = ["-b", "html", "-q", "-W", "-d", str(given.pages / ".doctrees")]
    settings = ["-c", str(ROOT / "ci" / "docs")]
    status = int(build_main([*options, *settings, str(given.pages), str(given.site)]))
    if status:
        return status
    faults = _look_through(given.site)
    for fault in faults:
        print(fault, file=sys.stderr)
    links = _list_external(given.site)
    print(f"{given.site}: {links} external links, see external-links.txt, were not looked at")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
