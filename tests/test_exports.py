"""Public modules say what is public: ``__all__`` stands, is true, sorted and complete.

Read from the source, so that no module need be importable here (PySpark, an event loop).
"""

from __future__ import annotations

import ast
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import aqueduct
from tests.test_floors import SOURCES

MODULES = {
    name.partition(":")[0]: path
    for name, path in SOURCES.items()
    if path.suffix == ".py" and not path.stem.startswith("__main__")
}
PUBLIC = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def bound_names(body: list[ast.stmt]) -> set[str]:
    """What statements at the top of a module bind, those in if and try included."""
    names: set[str] = set()
    for statement in body:
        if isinstance(statement, PUBLIC):
            names.add(statement.name)
        elif isinstance(statement, ast.Import | ast.ImportFrom):
            names.update((alias.asname or alias.name).split(".")[0] for alias in statement.names)
        elif isinstance(statement, ast.Assign | ast.AnnAssign):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            for target in targets:
                names.update(node.id for node in ast.walk(target) if isinstance(node, ast.Name))
        elif isinstance(statement, ast.If | ast.Try):
            for part in ("body", "orelse", "handlers", "finalbody"):
                for inner in getattr(statement, part, []):
                    names |= bound_names(inner.body if hasattr(inner, "type") else [inner])
    return names


def registered(node: ast.stmt) -> bool:
    """Whether a decorator that is a method of something takes the function: a handler, a test."""
    decorators = getattr(node, "decorator_list", [])
    return any(isinstance(call, ast.Call) and "." in ast.unparse(call.func) for call in decorators)


def faults(source: str) -> list[str]:
    """What is wrong with the exports of a module."""
    tree = ast.parse(source)
    body = [node for node in tree.body if not isinstance(node, ast.Expr)]
    if not body:
        return []
    exported: list[str] | None = None
    for node in body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            exported = ast.literal_eval(node.value)
    if exported is None:
        return ["no __all__"]
    found = [f"{name} is exported and not there" for name in set(exported) - bound_names(body)]
    if "__getattr__" in bound_names(body):
        found = []  # names that are imported when first used; the test below tries them
    own = {
        node.name
        for node in body
        if isinstance(node, PUBLIC) and node.name[0] != "_" and not registered(node)
    }
    found += [f"{name} is public by name and not exported" for name in own - set(exported)]
    if len(set(exported)) != len(exported):
        found.append("a name is exported twice")
    return sorted(found)


def test_exports() -> None:
    found = {module: faults(path.read_text()) for module, path in MODULES.items()}
    assert len(found) > 100
    assert {module: wrong for module, wrong in found.items() if wrong} == {}


def test_the_package_exports_what_it_names() -> None:
    for name in aqueduct.__all__:
        assert getattr(aqueduct, name) is not None, name


@pytest.mark.parametrize("name", aqueduct._SUBMODULES)
def test_documented_modules_need_no_import_of_their_own(name: str) -> None:
    """In a process of its own, where nothing else has imported them."""
    code = f"import aqueduct, types; assert isinstance(aqueduct.{name}, types.ModuleType)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_the_modules_that_are_shown_are_those_of_the_docs() -> None:
    assert {"errors", "config", "bpmux", "relink", "client", "dissect", "service"} <= set(
        dir(aqueduct)
    )
    with pytest.raises(AttributeError, match="module 'aqueduct' has no attribute 'nothing'"):
        aqueduct.nothing  # noqa: B018


def test_importing_the_package_is_light() -> None:
    heavy = ("pyarrow", "aioquic", "cryptography", "asyncio", "pyspark", "numpy", "pandas")
    code = (
        "import sys; before = set(sys.modules); import aqueduct; aqueduct.errors; aqueduct.config\n"
        f"print(*sorted((set(sys.modules) - before) & {set(heavy)!r}))"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == []


@pytest.mark.parametrize("package", ["aqueduct", "spark_udfs"])
def test_types_are_for_users_too(package: str) -> None:
    spec = find_spec(package)
    assert spec is not None and spec.origin is not None
    assert (Path(spec.origin).parent / "py.typed").is_file()


def test_everything_the_package_exports_is_documented() -> None:
    undocumented = [
        name
        for name in aqueduct.__all__
        if callable(getattr(aqueduct, name)) and not getattr(aqueduct, name).__doc__
    ]
    assert undocumented == []


@pytest.mark.parametrize(
    ("source", "fault"),
    [
        ("x = 1", "no __all__"),
        ("__all__ = ['f']", "f is exported and not there"),
        ("__all__ = []\ndef f(): pass", "f is public by name and not exported"),
        (
            "__all__ = []\n@dataclass(frozen=True)\nclass C: pass",
            "C is public by name and not exported",
        ),
        ("__all__ = []\nclass C: pass", "C is public by name and not exported"),
        ("__all__ = ['x', 'x']\nx = 1", "a name is exported twice"),
    ],
)
def test_a_fault_is_seen(source: str, fault: str) -> None:
    assert faults(source) == [fault]


def test_sound_exports_pass() -> None:
    source = "'''Doc.'''\nfrom a import b\n__all__ = ['b', 'c', 'd']\nc: int = 1\ntry:\n d = 2\n"
    assert faults(source + "except ValueError:\n d = 3\ndef _hidden(): pass\n") == []
    assert faults("__all__ = []\n@service.handler('name')\ndef handler(): pass") == []
    assert faults("'''An empty room.'''\n") == []
