"""The docs site: what `make docs` makes of pages, stubs and links; and what pages promise."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

import aqueduct
import spark_udfs
from ci import docs_reference, docs_site, screenshots
from tests.test_guides import PROGRAM_TEXT

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"

pytestmark = pytest.mark.checkout


# Links


def test_links_lead_to_pages_of_the_site() -> None:
    text = (
        "[a](../README.md) [`b`](guides/client.md#streams) ![c](../benchmarks/plots/loopback.png)\n"
        "[d](../examples/tokens.py) [e](https://example.com/x.md) [f](gone.md) [g](#here)\n"
        "`[h](../README.md)`\n```\n[i](../README.md)\n```\n[j](cookbook/README.md)\n"
    )
    assert docs_site.with_links(text, "docs/faq.md") == (
        "[a](project/readme.md) [`b`](guides/client.md#streams)"
        " ![c](source/benchmarks/plots/loopback.png)\n"
        "[d](source/examples/tokens.py.md) [e](https://example.com/x.md) [f](gone.md) [g](#here)\n"
        "`[h](../README.md)`\n```\n[i](../README.md)\n```\n[j](cookbook/index.md)\n"
    )
    assert docs_site.with_links("[a](docs/faq.md#x)", "SECURITY.md") == "[a](../faq.md#x)"
    assert docs_site.external_links(text) == ["https://example.com/x.md"]


def test_every_page_has_its_place_in_the_contents() -> None:
    """Sphinx warns of a page without one, but that is known only after a build."""
    listed = [page for _, pages in docs_site.contents(DOCS / "README.md") for _, page in pages]
    assert len(listed) == len(set(listed))
    for index in ("cookbook/index.md", "protocols/index.md"):
        assert index in listed
        folder = (DOCS / index).parent
        text = (folder / "README.md").read_text()
        listed += [
            f"{folder.name}/{link.partition('#')[0]}"
            for link in docs_site.links_of(text)
            if "/" not in link and link.partition("#")[0].endswith(".md")
        ]
    pages = {docs_site.site_name(path.relative_to(ROOT).as_posix()) for path in DOCS.rglob("*.md")}
    beside = {page for name, page in docs_site.BESIDE.items() if (ROOT / name).exists()}
    assert sorted((pages | beside) - set(listed) - {"index.md"}) == []


def test_what_is_loaded_from_elsewhere_is_found() -> None:
    assert docs_site.foreign_resources(
        '<script src="https://a.example/x.js"></script><link rel=stylesheet href="//b.example/y">'
        '<img alt="" src=\'http://c.example/z.png\'><a href="https://d.example">d</a>'
        '<script src="_static/x.js"></script> @import "https://e.example"; url(//f.example/g)'
    ) == [
        "https://a.example/x.js",
        "//b.example/y",
        "http://c.example/z.png",
        "https://e.example",
        "//f.example/g",
    ]


def test_every_picture_can_be_taken_again(tmp_path: Path) -> None:
    made = {*screenshots.PICTURES, *screenshots.PICTURES_OF_DOCS}
    assert {path.name for path in screenshots.IMAGES.iterdir()} == made
    with pytest.raises(SystemExit, match=r"has no index\.html: type make docs"):
        screenshots.docs_pages(tmp_path)
    (tmp_path / "reference").mkdir()
    for page in screenshots.PICTURES_OF_DOCS.values():
        (tmp_path / page).touch()
    addresses = screenshots.docs_pages(tmp_path)
    assert addresses["docs-site.png"] == (tmp_path / "index.html").as_uri()


def test_a_diagram_of_states_becomes_a_table() -> None:
    text = "stateDiagram-v2\n    [*] --> OPEN\n    OPEN --> GONE: lost\n    note left of GONE: no\n"
    assert docs_site.state_table(text) == (
        "| state | input | next state |\n|---|---|---|\n| begin |  | OPEN |\n"
        "| OPEN | lost | GONE |\n\n- In GONE, no.\n"
    )


# The reference


def test_every_public_name_is_in_the_reference() -> None:
    names = {name for page in docs_reference.PAGES.values() for name in page.names}
    modules = {"aqueduct.config": "Config", "aqueduct.errors": "AqueductError"}
    there = {f"aqueduct.{other}" for module, other in modules.items() if module in names}
    assert {f"aqueduct.{name}" for name in aqueduct.__all__} <= names | there
    assert {"aqueduct.testing", "spark_udfs"} <= names
    assert spark_udfs.__all__


def test_a_compiled_module_is_shown_by_its_stub_and_the_docstrings_of_its_source() -> None:
    source = (
        '"""The module."""\n\ncdef class Box:\n    """Holds\n    things."""\n\n'
        '    def put(\n        self, int x\n    ):\n        """Puts one in."""\n\n'
        "    def take(self):\n        return 1\n\n"
        'cpdef int count(Box box) except -1:\n    """How many."""\n'
    )
    texts = docs_reference.source_docstrings(source)
    assert texts == {
        "": "The module.",
        "Box": "Holds\nthings.",
        "Box.put": "Puts one in.",
        "count": "How many.",
    }
    stub = (
        "class Box:\n    size: int\n    @property\n    def full(self) -> bool: ...\n"
        "    def put(self, x: int) -> None: ...\n    def _hidden(self) -> None: ...\n"
        "    @classmethod\n    def of(cls) -> Box: ...\n"
        "def count(box: Box) -> int: ...\n"
    )
    shown = docs_reference.compiled_module("aqueduct._speedups.base.boxes", stub, texts)
    directives = re.findall(r"^ *\.\. py:(.*)$", shown, re.MULTILINE)
    assert directives == [
        "module:: aqueduct._speedups.base.boxes",
        "class:: Box",
        "attribute:: size",
        "attribute:: full",
        "method:: put(x: int) -> None",
        "method:: of() -> Box",
        "function:: count(box: Box) -> int",
    ]
    assert "Holds\n   things." in shown and "Puts one in." in shown and "How many." in shown


# What pages promise


def test_every_extra_is_on_the_install_page() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    rows = re.findall(
        r"^\| (`\w+`(?:, `\w+`)*) \|", (DOCS / "install.md").read_text(), re.MULTILINE
    )
    named = {name for row in rows for name in re.findall(r"\w+", row)}
    assert set(project["optional-dependencies"]) == named


def test_the_glossary_has_twelve_words_and_the_questions_are_ten() -> None:
    glossary = (DOCS / "glossary.md").read_text()
    assert len(re.findall(r"^\| \*\*", glossary, re.MULTILINE)) == 12
    assert len(re.findall(r"^## .*\?$", (DOCS / "faq.md").read_text(), re.MULTILINE)) == 10


def test_the_programs_of_the_readme_are_those_of_the_tutorial() -> None:
    tutorial = dict(PROGRAM_TEXT.findall((DOCS / "tutorial.md").read_text()))
    readme = dict(PROGRAM_TEXT.findall((ROOT / "README.md").read_text()))
    assert set(readme) == {"service.py", "job.py"}
    assert readme == {name: tutorial[name] for name in readme}
    assert sum(bool(line.strip()) for text in readme.values() for line in text.splitlines()) < 20


def test_the_first_command_of_the_readme_is_one_short_line() -> None:
    readme = (ROOT / "README.md").read_text()
    (first, *_) = re.findall(r"^```\n(.*?)^```", readme, re.DOTALL | re.MULTILINE)
    assert re.fullmatch(r"pip install \S+\n", first)


def test_figures_of_the_readme_are_those_of_the_benchmarks() -> None:
    tables = (ROOT / "benchmarks" / "README.md").read_text()
    readme = (ROOT / "README.md").read_text()
    rows = re.findall(r"^\| (`(?:tcp|tls|unix|spark)-[^|]*) \| ([^|]*) \|", readme, re.MULTILINE)
    checked = 0
    for cases, figures in rows:
        names = re.findall(r"`([\w-]+)`", cases)
        numbers = re.findall(r"\d+\.\d+", figures)
        assert len(names) == len(numbers)
        for name, number in zip(names, numbers, strict=True):
            lines = [line for line in tables.splitlines() if line.startswith(f"| {name} ")]
            cells = {cell.split()[0] for line in lines for cell in line.split("|") if cell.strip()}
            assert number in cells, name
            checked += 1
    assert checked >= 8
