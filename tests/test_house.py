"""What the floors do not see: circles, names used twice, private names, and classes that grew.

Each rule has a list of exceptions in ``tests/house.toml``, which may only shrink. A test fails if
the code breaks a rule anew, and if an exception is no longer needed. ``python -m tests.test_house``
prints all that there is today, and ``--write`` takes from the lists what is no longer needed; it
adds nothing.

Modules are read from their source, compiled ones too. A type is never known, so a private name
counts for the module that defines it; if the using module defines the same name, it is taken for
its own.
"""

from __future__ import annotations

import ast
import importlib
import re
import sys
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cache
from pathlib import Path

import pytest

from tests.test_floors import MODULES, ROOMS, SOURCES, names_imported

pytestmark = pytest.mark.checkout

LISTS = Path(__file__).parent / "house.toml"
MEMBERS = 45
LIBRARY = ("aqueduct", "spark_udfs")
COMPILED = "aqueduct._speedups"
ASIDE = frozenset({"Protocol", "Exception", "BaseException", "Enum", "IntEnum", "Flag", "IntFlag"})
"""What derives from these may have bases at will: protocols, errors and enumerations."""
EVENTS = re.compile(r"\.events$|\.signals$")
"""Modules of events, whose classes may have bases at will."""

_QUOTED = re.compile(
    r"\"{3}(?:[^\\]|\\.)*?\"{3}|'{3}(?:[^\\]|\\.)*?'{3}"
    r"|\"(?:[^\"\\\n]|\\.)*\"|'(?:[^'\\\n]|\\.)*'|#[^\n]*",
    re.DOTALL,
)
_CLASS = re.compile(r"^( *)(?:cdef +)?class +(\w+)(?:\(([^)]*)\))? *:", re.MULTILINE)
_FUNCTION = re.compile(r"(?:async +)?c?p?def +.*?(\w+) *\(")
_FIELDS = re.compile(r"cdef +(?:public +|readonly +)?[\w.]+(?: *\[[^]]*\])?[ *](.+)")
_FOR_C = re.compile(r"cdef +(?!public |readonly )")
_VARIABLE = re.compile(r"(\w+(?: *, *\w+)*) *[:=](?!=)")
_OWN = re.compile(r"\bself\.(\w+) *(?::[^=\n]*)?=(?!=)")
_USE = re.compile(r"(?<![\w.])(self|cls)\._\w+|\._(?!_)(\w+)")
_PRIVATE_IMPORT = re.compile(r"(?:^|\.)_(?!_)\w+$")


@dataclass
class Class:
    """A class of the library, as its source has it."""

    name: str
    module: str
    bases: set[str] = field(default_factory=set)
    members: set[str] = field(default_factory=set)
    """What ``dir`` tells of the class: methods, properties, slots, fields that Python may read.

    Plain attributes of its instances, and what only C code sees, are not among them.
    """


@dataclass
class Module:
    """A module: its ``.pxd`` and its source together."""

    name: str
    imports: set[str] = field(default_factory=set)
    """Full names: of modules, or of what is in them."""
    classes: dict[str, Class] = field(default_factory=dict)
    private: set[str] = field(default_factory=set)
    """Private names that it defines, by themselves or in its classes."""
    uses: Counter[str] = field(default_factory=Counter)
    """Private names that it takes from something other than ``self`` and ``cls``."""


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def is_own(name: str) -> bool:
    """Whether a member counts: what Python itself calls does not."""
    return not (name.startswith("__") and name.endswith("__"))


# ----------------------------------------------------------------- reading Python


def _assigned(target: ast.expr) -> Iterator[ast.expr]:
    if isinstance(target, ast.Tuple | ast.List):
        for element in target.elts:
            yield from _assigned(element)
    else:
        yield target


def _targets(node: ast.AST) -> Iterator[ast.expr]:
    if isinstance(node, ast.Assign):
        for target in node.targets:
            yield from _assigned(target)
    elif isinstance(node, ast.AnnAssign | ast.AugAssign | ast.For | ast.AsyncFor):
        yield from _assigned(node.target)
    elif isinstance(node, ast.withitem) and node.optional_vars is not None:
        yield from _assigned(node.optional_vars)


def _defined(body: Iterable[ast.stmt]) -> Iterator[str]:
    """The names that statements define, those under ``if`` and ``try`` too."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        for target in _targets(node):
            if isinstance(target, ast.Name):
                yield target.id
                if target.id == "__slots__" and isinstance(node, ast.Assign):
                    yield from (
                        constant.value
                        for constant in ast.walk(node.value)
                        if isinstance(constant, ast.Constant) and isinstance(constant.value, str)
                    )
        if isinstance(node, ast.If | ast.Try):
            yield from _defined(node.body)
            yield from _defined(node.orelse)


def _attributes(node: ast.ClassDef) -> Iterator[str]:
    """What the methods of a class assign to its instances."""
    for inner in ast.walk(node):
        for target in _targets(inner):
            if isinstance(target, ast.Attribute):
                receiver = target.value
                if isinstance(receiver, ast.Name) and receiver.id == "self":
                    yield target.attr


def _base(node: ast.expr) -> str:
    """The last name of a base: ``Protocol`` of ``typing.Protocol[T]``."""
    if isinstance(node, ast.Subscript):
        node = node.value
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def read_python(module: Module, source: str) -> None:
    tree = ast.parse(source)
    module.imports.update(names_imported(source, cython=False))
    module.private.update(filter(is_private, _defined(tree.body)))
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            members = set(filter(is_own, _defined(node.body)))
            module.private.update(filter(is_private, {*members, *_attributes(node)}))
            if node in tree.body:
                bases = {name for name in map(_base, node.bases) if name}
                module.classes[node.name] = Class(node.name, module.name, bases, members)
        elif isinstance(node, ast.Attribute) and is_private(node.attr):
            receiver = node.value
            if isinstance(receiver, ast.Call) and _base(receiver.func) == "super":
                continue
            if not (isinstance(receiver, ast.Name) and receiver.id in ("self", "cls")):
                module.uses[node.attr] += 1


# ----------------------------------------------------------------- reading Cython


def _blank(match: re.Match[str]) -> str:
    return re.sub(r"[^\n]", " ", match[0])


def _fields(line: str) -> Iterator[str]:
    """The members that a line right in the body of a class declares."""
    if match := _FUNCTION.match(line):
        yield match[1]
    elif line.startswith("cdef ") and not line.rstrip().endswith(":"):
        if match := _FIELDS.match(line):
            for part in match[1].split(","):
                names = re.findall(r"\w+", re.sub(r"\[.*|=.*", "", part))
                yield from names[-1:]
    elif match := _VARIABLE.match(line):
        yield from re.findall(r"\w+", match[1])


def _body(lines: list[str], depth: int) -> Iterator[str]:
    for line in lines:
        if line.strip() and len(line) - len(line.lstrip()) <= depth:
            return
        yield line


def read_cython(module: Module, source: str) -> None:
    module.imports.update(names_imported(source, cython=True))
    code = _QUOTED.sub(_blank, source)
    module.private.update(
        name for line in code.split("\n") for name in _fields(line) if is_private(name)
    )
    for match in _CLASS.finditer(code):
        body = list(_body(code[match.end() :].split("\n")[1:], len(match[1])))
        inside = min((len(line) - len(line.lstrip()) for line in body if line.strip()), default=0)
        members: set[str] = set()
        for line in body:
            if line.strip() and not line[:inside].strip() and line[inside : inside + 1] != " ":
                names = set(filter(is_own, _fields(line[inside:])))
                module.private.update(filter(is_private, names))
                if not _FOR_C.match(line[inside:]):
                    members |= names
        module.private.update(filter(is_private, _OWN.findall("\n".join(body))))
        found = module.classes.setdefault(match[2], Class(match[2], module.name))
        found.members |= members
        found.bases |= {base.split(".")[-1].strip() for base in (match[3] or "").split(",")} - {""}
    for match in _USE.finditer(code):
        if match[2]:
            module.uses[f"_{match[2]}"] += 1


@cache
def library() -> dict[str, Module]:
    """Every module of the library, by name. It takes seconds, so that no import does it."""
    found: dict[str, Module] = {}
    for key, path in SOURCES.items():
        name, _, suffix = key.partition(":")
        module = found.setdefault(name, Module(name))
        (read_python if suffix == ".py" else read_cython)(module, path.read_text())
    return found


# ----------------------------------------------------------------- the rules


def module_of(name: str, modules: Iterable[str]) -> str | None:
    """The module that an imported name is, or is in; None: another package's."""
    while name and name not in modules:
        name = name.rpartition(".")[0]
    return name or None


def circles(edges: Mapping[str, set[str]]) -> list[frozenset[str]]:
    """The sets of modules, each of which imports all others of its set, by way of others too."""
    reached: dict[str, set[str]] = {}
    for start in edges:
        seen: set[str] = set()
        waiting = [start]
        while waiting:
            for target in edges.get(waiting.pop(), ()):
                if target not in seen:
                    seen.add(target)
                    waiting.append(target)
        reached[start] = seen
    return sorted(
        {
            frozenset({other for other in seen if one in reached.get(other, ())})
            for one, seen in reached.items()
            if one in seen
        },
        key=sorted,
    )


def edges_of(modules: Mapping[str, Module]) -> dict[str, set[str]]:
    """What each module imports of the library."""
    return {
        name: {found for full in module.imports if (found := module_of(full, modules))} - {name}
        for name, module in modules.items()
    }


def twice(modules: Mapping[str, Module]) -> dict[str, int]:
    """Public class names with the number of modules that define one, if there are several."""
    names = Counter(
        name for module in modules.values() for name in module.classes if not name.startswith("_")
    )
    return {name: number for name, number in names.items() if number > 1}


def asyncio_users(modules: Mapping[str, Module]) -> list[str]:
    """Compiled modules, and what is beside them, that import asyncio."""
    return [
        name
        for name, module in modules.items()
        if name.startswith(COMPILED)
        and any(full.partition(".")[0] == "asyncio" for full in module.imports)
    ]


def private_uses(modules: Mapping[str, Module]) -> dict[str, int]:
    """How often a module uses private names of another: ``user owner`` to a number.

    The owner is the module that defines the name. If several do, it is the one among them that the
    user imports, else ``several``.
    """
    owners: defaultdict[str, set[str]] = defaultdict(set)
    for name, module in modules.items():
        for private in module.private:
            owners[private].add(name)
    edges = edges_of(modules)
    found: Counter[str] = Counter()
    for name, module in modules.items():
        for private, number in module.uses.items():
            candidates = owners[private]
            if not candidates or name in candidates or f"{name}.{private}" in modules:
                continue
            if len(candidates) > 1:
                candidates = (candidates & edges[name]) or candidates
            owner = next(iter(candidates)) if len(candidates) == 1 else "several"
            found[f"{name} {owner}"] += number
        for full in module.imports:
            owner = module_of(full, modules) or name
            rest = full.removeprefix(owner)
            if owner != name and _PRIVATE_IMPORT.search(rest):
                found[f"{name} {owner}"] += 1
    return dict(found)


class Family:
    """Classes with their bases, found by the names that modules import."""

    def __init__(self, modules: Mapping[str, Module]) -> None:
        self._modules = modules
        self._by_name: defaultdict[str, list[Class]] = defaultdict(list)
        for module in modules.values():
            for one in module.classes.values():
                self._by_name[one.name].append(one)

    def _find(self, name: str, where: Module, user: Class) -> Class | None:
        if name in where.classes and where.classes[name] is not user:
            return where.classes[name]
        for full in where.imports:
            owner = module_of(full, self._modules)
            there = self._modules[owner].classes if owner else {}
            if full.rpartition(".")[2] == name and name in there:
                return there[name]
        # By way of a package that hands it on, or by another name for the module.
        found = self._by_name.get(name, [])
        return found[0] if len(found) == 1 and found[0] is not user else None

    def ancestors(self, one: Class) -> tuple[list[Class], set[str]]:
        """The library's classes among its bases, and theirs; and the names of all others."""
        ours: list[Class] = []
        others: set[str] = set()
        waiting = [one]
        while waiting:
            user = waiting.pop()
            for name in sorted(user.bases):
                found = self._find(name, self._modules[user.module], user)
                if found is None:
                    others.add(name)
                elif found is not one and found not in ours:
                    ours.append(found)
                    waiting.append(found)
        return ours, others

    def members(self, one: Class) -> set[str]:
        """Of the class and of its bases."""
        return set().union(*(base.members for base in (one, *self.ancestors(one)[0])))

    def bases(self, one: Class) -> int:
        """How many classes of ours it has for bases, where that counts."""
        ours, others = self.ancestors(one)
        if EVENTS.search(one.module) or any(
            name in ASIDE or name.endswith(("Error", "Warning")) for name in others
        ):
            return 0
        return len(ours)


def _largest(numbers: Iterable[tuple[str, int]], above: int) -> dict[str, int]:
    found: dict[str, int] = {}
    for name, number in numbers:
        if number > above:
            found[name] = max(number, found.get(name, 0))
    return found


def today(modules: Mapping[str, Module]) -> dict[str, dict[str, int]]:
    """All that breaks a rule: by the rule's name, what it is and how much of it there is."""
    family = Family(modules)
    classes = [one for module in modules.values() for one in module.classes.values()]
    return {
        "circles": {" ".join(sorted(circle)): len(circle) for circle in circles(edges_of(modules))},
        "class_names": twice(modules),
        "asyncio": dict.fromkeys(asyncio_users(modules), 1),
        "private_names": private_uses(modules),
        "members": _largest(((one.name, len(family.members(one))) for one in classes), MEMBERS),
        "bases": _largest(((one.name, family.bases(one)) for one in classes), 1),
    }


# ----------------------------------------------------------------- the exceptions


def lists(text: str) -> dict[str, dict[str, int]]:
    """The exceptions. Two entries for one thing are added: a script may have merged modules."""
    found: dict[str, dict[str, int]] = {}
    for rule, entries in tomllib.loads(text).items():
        numbers: Counter[str] = Counter()
        for entry in entries:
            words = entry.split()
            if rule == "circles":
                words = sorted(set(words))
                numbers[" ".join(words)] = len(words)
            elif words[-1].isdecimal():
                numbers[" ".join(words[:-1])] += int(words[-1])
            else:
                numbers[entry] = 1
        found[rule] = dict(numbers)
    return found


def as_text(rules: Mapping[str, Mapping[str, int]]) -> str:
    lines = ["# Exceptions from the rules of tests/test_house.py. They may only shrink."]
    for rule, entries in rules.items():
        lines += ["", f"{rule} = ["]
        for name, number in sorted(entries.items()):
            counted = rule not in ("circles", "asyncio")
            lines.append(f'    "{name} {number}",' if counted else f'    "{name}",')
        lines.append("]")
    return "\n".join(lines) + "\n"


def shrunk(
    allowed: Mapping[str, Mapping[str, int]], found: Mapping[str, Mapping[str, int]]
) -> dict[str, dict[str, int]]:
    """The exceptions without what is no longer needed of them."""
    return {
        rule: {
            name: min(number, found[rule][name])
            for name, number in entries.items()
            if name in found[rule]
        }
        for rule, entries in allowed.items()
    }


def differences(allowed: Mapping[str, int], found: Mapping[str, int]) -> list[str]:
    """What is new, and which exceptions are no longer needed; sorted."""
    lines = []
    for name in sorted({*allowed, *found}):
        may, does = allowed.get(name, 0), found.get(name, 0)
        if does > may:
            lines.append(f"{name}: {does}, allowed {may}")
        elif does < may:
            lines.append(f"{name}: {does}, so tests/house.toml need not allow {may}")
    return lines


ALLOWED = lists(LISTS.read_text()) if LISTS.exists() else {}
MEANINGS = {
    "circles": "modules import each other in a circle",
    "class_names": "a public class name is used by several modules",
    "asyncio": "a compiled module imports asyncio",
    "private_names": "a module uses private names of another",
    "members": f"a class has more than {MEMBERS} members, those of its bases counted",
    "bases": "a class has more than one base of ours, counted through all of them",
}


@pytest.mark.parametrize("rule", MEANINGS)
def test_the_code_breaks_a_rule_where_an_exception_says_so_and_nowhere_else(rule: str) -> None:
    assert differences(ALLOWED[rule], today(library())[rule]) == [], MEANINGS[rule]


def test_the_rules_and_the_exceptions_are_the_same() -> None:
    assert set(ALLOWED) == set(today(library())) == set(MEANINGS)


def test_every_row_of_the_floors_names_something() -> None:
    assert [prefix for prefix in ROOMS if prefix != "aqueduct.*" and prefix not in MODULES] == []


def test_the_whole_library_is_read() -> None:
    assert len(library()) > 80
    assert sum(len(module.classes) for module in library().values()) > 150


# ----------------------------------------------------------------- whether the rules can fail


def small(**sources: str) -> dict[str, Module]:
    """A library of these modules; names with ``c_`` in front are compiled."""
    found = {}
    for name, source in sources.items():
        compiled = name.startswith("c_")
        full = f"{COMPILED if compiled else 'aqueduct'}.{name}"
        found[full] = Module(full)
        (read_cython if compiled else read_python)(found[full], source)
    return found


def test_a_circle_is_found_through_compiled_modules_and_functions() -> None:
    modules = small(
        a="from aqueduct._speedups.c_b import B",
        c_b="def f():\n    from aqueduct import c\n",
        c="if TYPE_CHECKING:\n    import aqueduct.a",
        d="import aqueduct.a",
    )
    (circle,) = circles(edges_of(modules))
    assert circle == {"aqueduct.a", "aqueduct._speedups.c_b", "aqueduct.c"}


def test_two_circles_are_told_apart() -> None:
    found = circles({"a": {"b"}, "b": {"a", "c"}, "c": {"d"}, "d": {"c"}, "e": {"a"}})
    assert found == [{"a", "b"}, {"c", "d"}]


def test_a_public_class_name_used_twice_is_found() -> None:
    modules = small(
        a="class One: pass\nclass _Own: pass",
        c_b="cdef class One:\n    pass\nclass _Own:\n    pass",
    )
    assert twice(modules) == {"One": 2}


def test_asyncio_is_found_in_compiled_modules_alone() -> None:
    modules = small(
        a="import asyncio",
        c_b="from asyncio import events\n",
        c_c="cdef f():\n    import asyncio\n",
    )
    assert asyncio_users(modules) == [f"{COMPILED}.c_b", f"{COMPILED}.c_c"]


OWNER = "class A:\n    def __init__(self):\n        self._x = 1\n    def _f(self): ...\n"


@pytest.mark.parametrize(
    ("source", "number"),
    [
        ("def f(a):\n    return a._x + a._f()", 2),
        ("class B:\n    def g(self):\n        self.a._x = 1", 1),
        ("class B(A):\n    def g(self):\n        self._x = super()._f()", 0),
        ("class B:\n    def g(self, b):\n        self._x = b._x", 0),
        ("import os\nos._exit(0)", 0),
        ("def f(a):\n    return a.__dict__", 0),
    ],
)
def test_private_names_of_another_module_are_counted(source: str, number: int) -> None:
    found = private_uses(small(a=OWNER, b=source))
    assert found == ({"aqueduct.b aqueduct.a": number} if number else {})


@pytest.mark.parametrize(
    ("source", "number"),
    [
        ("cdef f(object a):\n    return a._x  # not a._f\n", 1),
        ('cdef class B:\n    """a._x"""\n    cdef g(self):\n        return self._x\n', 0),
        ("cdef class B:\n    cdef g(self):\n        return self.a._x + self.a._f()\n", 2),
        ("cdef class B:\n    cdef public int _x, y\n    cdef g(self, b):\n        b._x = 1\n", 0),
    ],
)
def test_private_names_are_counted_in_compiled_modules(source: str, number: int) -> None:
    found = private_uses(small(a=OWNER, c_b=source))
    assert found == ({f"{COMPILED}.c_b aqueduct.a": number} if number else {})


def test_a_private_name_that_is_imported_counts() -> None:
    modules = small(a="_X = 1\nY = 2", b="from aqueduct.a import _X, Y")
    assert private_uses(modules) == {"aqueduct.b aqueduct.a": 1}


def test_of_several_owners_the_imported_one_counts() -> None:
    use = "def f(a):\n    return a._x"
    modules = small(a=OWNER, b=OWNER, c=f"from aqueduct.b import A\n{use}", d=use)
    assert private_uses(modules) == {"aqueduct.c aqueduct.b": 1, "aqueduct.d several": 1}


def test_members_and_bases_are_counted_through_all_bases() -> None:
    modules = small(
        c_a="cdef class A:\n    cdef public int one, two\n    cdef readonly object three\n"
        "    cdef char for_c[16]\n    cdef int also_for_c(self) except -1:\n        return 1\n"
        "    cpdef int four(self) except -1:\n        cdef public_local = 1\n        return 1\n"
        "    def __init__(self):\n        pass\n",
        b=f"from {COMPILED}.c_a import A\n"
        "class B(A):\n    five = 5\n    def six(self):\n        self.plain, self.one = 7, 1\n",
        c="from aqueduct.b import B\nclass C(B):\n    __slots__ = ('seven',)\n    eight: int\n",
    )
    family = Family(modules)
    found = modules["aqueduct.c"].classes["C"]
    members = {"one", "two", "three", "four", "five", "six", "seven", "eight"}
    assert family.members(found) == members
    assert family.bases(found) == 2
    assert family.bases(modules["aqueduct.b"].classes["B"]) == 1


def test_the_members_are_those_that_python_tells_of() -> None:
    """Compiled classes are loaded and asked, which shows that their sources are read rightly."""
    family = Family(library())
    compared = 0
    for module in library().values():
        if not module.name.startswith(COMPILED) or not module.classes:
            continue
        loaded = importlib.import_module(module.name)
        for one in module.classes.values():
            known = getattr(loaded, one.name, None)
            if known is None or issubclass(known, (BaseException, Enum)):
                continue
            told = {name for name in dir(known) if is_own(name)}
            assert family.members(one) == told, one.name
            compared += 1
    assert compared > 20


@pytest.mark.parametrize("root", ["Exception", "Protocol", "IntEnum", "ValueError"])
def test_errors_protocols_and_enumerations_may_have_bases(root: str) -> None:
    source = f"class A({root}): pass\nclass B(A): pass\nclass C(B): pass"
    modules = small(a=source)
    assert Family(modules).bases(modules["aqueduct.a"].classes["C"]) == 0


def test_exceptions_only_shrink() -> None:
    allowed = lists('private_names = ["a b 3", "c d 1"]\ncircles = ["y x"]\nasyncio = ["m", "n"]')
    found = {"private_names": {"a b": 2, "e f": 1}, "circles": {"x y": 2}, "asyncio": {"m": 1}}
    assert shrunk(allowed, found) == {
        "private_names": {"a b": 2},
        "circles": {"x y": 2},
        "asyncio": {"m": 1},
    }
    assert lists(as_text(shrunk(allowed, found))) == shrunk(allowed, found)
    lines = differences(allowed["private_names"], found["private_names"])
    assert [line.partition(":")[0] for line in lines] == ["a b", "c d", "e f"]


def test_exceptions_of_modules_that_were_merged_are_added() -> None:
    assert lists('private_names = ["a b 3", "a b 1"]') == {"private_names": {"a b": 4}}


def main(arguments: list[str]) -> int:
    """Prints what breaks a rule today; ``--write`` shrinks the exceptions to it."""
    if arguments == ["--write"]:
        LISTS.write_text(as_text(shrunk(ALLOWED, today(library()))))
    else:
        print(as_text(today(library())), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
