"""The reference of the docs site: which names stand on which page, as sources for Sphinx.

What Python has is imported, and Sphinx reads its docstrings. Compiled modules are read from their
stubs (``.pyi``), and their docstrings from their sources (``.pyx``).
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from textwrap import dedent, indent
from typing import Final, NamedTuple

__all__ = ["PAGES", "ReferencePage", "compiled_module", "pages", "source_docstrings"]

ROOT: Final = Path(__file__).resolve().parents[1]
LONG: Final = 80
"""Characters of a value that is not shown."""
COMPILED: Final = ROOT / "aqueduct" / "_speedups"


class ReferencePage(NamedTuple):
    """A page of the reference: what it is about, and the names on it."""

    title: str
    about: str
    names: tuple[str, ...]
    """Classes and functions; or modules, each with all that it exports."""


PAGES: Final[Mapping[str, ReferencePage]] = {
    "service": ReferencePage(
        "Services",
        "A service, what its handlers are told, and who may call.",
        (
            "aqueduct.Service",
            "aqueduct.Call",
            "aqueduct.Batching",
            "aqueduct.CallRows",
            "aqueduct.TokenFile",
            "aqueduct.Jwt",
            "aqueduct.Partition",
        ),
    ),
    "client": ReferencePage(
        "Clients",
        "Calls to a service, from asyncio and from threads.",
        (
            "aqueduct.Client",
            "aqueduct.Stream",
            "aqueduct.Writer",
            "aqueduct.SyncClient",
            "aqueduct.SyncStream",
            "aqueduct.SyncWriter",
            "aqueduct.Description",
            "aqueduct.EndpointState",
            "aqueduct.OpenTelemetry",
        ),
    ),
    "certificates": ReferencePage(
        "Certificates",
        "TLS of clients and services.",
        ("aqueduct.ClientTls", "aqueduct.ServerTls", "aqueduct.dev_certificate"),
    ),
    "config": ReferencePage(
        "Settings",
        "Every limit, window and timeout. ``aqueduct.Config`` is ``aqueduct.config.Config``.",
        ("aqueduct.config",),
    ),
    "errors": ReferencePage(
        "Errors",
        "Every error. ``aqueduct.AqueductError`` is ``aqueduct.errors.AqueductError``.",
        ("aqueduct.errors",),
    ),
    "channels": ReferencePage(
        "Channels",
        "Message channels without Arrow.",
        (
            "aqueduct.connect",
            "aqueduct.serve",
            "aqueduct.channel",
            "aqueduct.Connection",
            "aqueduct.Server",
            "aqueduct.Sender",
            "aqueduct.Receiver",
            "aqueduct.Message",
            "aqueduct.Mode",
        ),
    ),
    "testing": ReferencePage("Testing", "Services and clients in tests.", ("aqueduct.testing",)),
    "spark": ReferencePage("Spark", "Functions for data frames.", ("spark_udfs",)),
    "bpmux": ReferencePage("bpmux", "The multiplexer by itself.", ("aqueduct.bpmux",)),
    "relink": ReferencePage("Relink", "Links that survive cut connections.", ("aqueduct.relink",)),
    "reactivesocket": ReferencePage(
        "ReactiveSocket", "Requests with demand.", ("aqueduct.reactivesocket",)
    ),
}
"""By the name of the page's file."""


def pages() -> dict[str, str]:
    """The text of each page, in the order of the contents."""
    found = {name: _heading(page.title) + _page(page) for name, page in PAGES.items()}
    found["compiled"] = _heading("Compiled modules") + COMPILED_ABOUT + _compiled()
    return found


COMPILED_ABOUT: Final = """
The modules that are written in Cython. Programs use what the other pages have. This page is for
those who work on the library.
"""


def _heading(title: str, line: str = "=") -> str:
    return f"{title}\n{line * len(title)}\n"


def _page(page: ReferencePage) -> str:
    parts = [f"\n{page.about}\n"]
    for name in page.names:
        module, _, last = name.rpartition(".")
        described = getattr(importlib.import_module(module), last) if module else None
        if described is None or inspect.ismodule(described):
            exporting = importlib.import_module(name)
            text = inspect.getdoc(exporting) or ""
            parts.append(f"\n.. py:module:: {name}\n\n{text}\n")
            parts += [_directive(name, each) for each in exporting.__all__]
        else:
            parts.append(_directive(module, last))
    text = "".join(parts)
    language = "text" if "|-- " in text else "python"  # a tree of errors, or code
    return f"\n.. highlight:: {language}\n{text}"


def _directive(module: str, name: str) -> str:
    value = getattr(importlib.import_module(module), name)
    kind = "data"
    if inspect.isclass(value):
        kind = "exception" if issubclass(value, BaseException) else "class"
    elif callable(value):
        kind = "function"
    option = ""
    if kind == "exception":
        option = "   :show-inheritance:\n"
    elif kind == "data" and len(repr(value)) > LONG:
        option = "   :no-value:\n"
    return f"\n.. auto{kind}:: {module}.{name}\n{option}"


def _compiled() -> str:
    parts = []
    for stub in sorted(COMPILED.rglob("*.pyi")):
        name = ".".join(stub.relative_to(ROOT).with_suffix("").parts)
        source = stub.with_suffix(".pyx")
        texts = source_docstrings(source.read_text()) if source.exists() else {}
        parts.append(compiled_module(name, stub.read_text(), texts))
    return "".join(parts)


def compiled_module(name: str, stub: str, texts: Mapping[str, str]) -> str:
    """A module from its stub, with docstrings by the dotted names in it; its own by ``""``."""
    short = name.removeprefix("aqueduct._speedups.")
    begin = f"\n{_heading(short, '-')}\n.. py:module:: {name}\n   :no-index:\n"
    module = ast.parse(stub)
    described = "".join(_described(module.body, texts, "", name))
    return f"{begin}\n{texts.get('', '')}\n{described}"


def _described(
    body: list[ast.stmt], texts: Mapping[str, str], within: str, module: str
) -> Iterator[str]:
    kind = "method" if within else "function"
    for node in body:
        if isinstance(node, ast.ClassDef):
            members = "".join(_described(node.body, texts, f"{node.name}.", module))
            yield _entry("class", node.name, texts.get(node.name, ""), members)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            if node.name.startswith("_"):
                continue
            text = texts.get(f"{within}{node.name}", "")
            decorators = {ast.unparse(each) for each in node.decorator_list}
            returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
            if "property" in decorators:
                yield _entry("attribute", node.name, text, type=returns[4:])
            elif not any(each.endswith(".setter") for each in decorators):
                arguments = [ast.unparse(node.args)]
                if within and "staticmethod" not in decorators:  # without self or cls
                    arguments = arguments[0].split(", ", 1)[1:]
                signature = f"{node.name}({''.join(arguments).removeprefix('/, ')}){returns}"
                yield _entry(kind, signature, text)
        elif isinstance(node, ast.AnnAssign) and not (name := ast.unparse(node.target)).startswith(
            "_"
        ):
            where = "attribute" if within else "data"
            yield _entry(where, name, "", type=ast.unparse(node.annotation))


def _entry(kind: str, signature: str, text: str, members: str = "", **options: str) -> str:
    head = [f".. py:{kind}:: {signature}", "   :no-index:"]
    head += [f"   :{name}: {value}" for name, value in options.items()]
    body = indent(f"{text}\n{members}", "   ")
    return "\n".join(["", *head, "", body])


_DEFINITION = re.compile(
    r"^( *)(?:(?:cdef )?class|(?:async )?def|cpdef(?: [\w.]+)*?) +(\w+)\s*[(:]"
)
_DOCSTRING = re.compile(r'^ *"""(.*?)"""', re.DOTALL)


def source_docstrings(source: str) -> dict[str, str]:
    """The docstrings of Cython source, by the dotted name in the module; its own by ``""``."""
    found: dict[str, str] = {}
    if match := _DOCSTRING.match(source):
        found[""] = _clean(match[1])
    lines = source.splitlines(keepends=True)
    scopes: list[tuple[int, str]] = []
    for number, line in enumerate(lines):
        match = _DEFINITION.match(line)
        if match is None:
            continue
        level = len(match[1])
        scopes = [*(scope for scope in scopes if scope[0] < level), (level, match[2])]
        begin = number
        while begin < len(lines) and not lines[begin].split("#")[0].rstrip().endswith(":"):
            begin += 1
        if text := _DOCSTRING.match("".join(lines[begin + 1 :])):
            found[".".join(name for _, name in scopes)] = _clean(text[1])
    return found


def _clean(text: str) -> str:
    first, _, rest = text.strip().partition("\n")
    return f"{first}\n{dedent(rest)}".strip()
