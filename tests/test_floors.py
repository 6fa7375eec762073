"""The house has floors: a room imports from lower ones, never from above and never a sibling.

A room is a module or package by its prefix, the longest one that fits; what is inside one room may
import each other. Imports are read from the source, wherever they stand in it: those in functions
and those for type checkers alone count too.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

GROUND = "the ground floor"
FLOORS: tuple[dict[str, str], ...] = (
    {
        f"aqueduct.{name}": GROUND
        for name in (
            "errors",
            "arguments",
            "config",
            "address",
            "closing",
            "escaping",
            "forks",
            "logs",
            "origins",
            "reloading",
            "settings",
        )
    },
    {"aqueduct._speedups": "", "aqueduct._speedups.base": ""},
    {"aqueduct._speedups.io": ""},
    {
        f"aqueduct._speedups.{name}": ""
        for name in ("channels", "bpmux", "relink", "reactivesocket")
    },
    {"aqueduct._speedups.control_streams": "", "aqueduct.protocol.common": ""},
    {
        f"aqueduct.protocol.{name}": ""
        for name in ("channels", "control_streams", "bpmux", "relink", "reactivesocket")
    },
    {
        f"aqueduct.{name}": ""
        for name in ("carriers.contract", "carriers.clock", "carriers.foreign", "dissect")
    },
    {"aqueduct._speedups.stream": ""},
    {"aqueduct._speedups.loop": ""},
    {f"aqueduct.carriers.{name}": "" for name in ("places", "binding", "certificates", "key_log")},
    {"aqueduct.carriers.renewal": "", "aqueduct.carriers.verify": ""},
    {"aqueduct.carriers.tls_openssl": "", "aqueduct.carriers.tls_stdlib": ""},
    {"aqueduct.carriers.tls_library": ""},
    {f"aqueduct.carriers.{name}": "" for name in ("memory", "quic", "stream")},
    {"aqueduct.carriers.transports": ""},
    {"aqueduct.endpoint": "", "aqueduct.bpmux": "", "aqueduct.relink": ""},
    {"aqueduct.reactivesocket": ""},
    {"aqueduct._speedups.arrow": ""},
    {"aqueduct.arrow": ""},
    {"aqueduct._speedups.calls": ""},
    {"aqueduct.rpc": ""},
    {"aqueduct.admin": ""},
    {"aqueduct.client": "", "aqueduct.service": ""},
    {"aqueduct.testing": "", "aqueduct.diagnosis": ""},
    {"aqueduct": ""},
    {"aqueduct.cli": "", "spark_udfs": ""},
    {"spark_udfs.demo": ""},
)
"""From the bottom: prefix to room, where several prefixes are one room; else the prefix is it.

``aqueduct.*`` are the modules right in the package that have no other room: services and clients.
"""

ROOMS = {
    prefix: (floor, room or prefix)
    for floor, rooms in enumerate(FLOORS)
    for prefix, room in rooms.items()
}
PACKAGES_ONLY = ("aqueduct.protocol", "aqueduct.carriers")
"""Empty packages around rooms. They, and what is new in them, belong to no room by themselves."""

ARROW_FLOOR = ROOMS["aqueduct.arrow"][0]
OUTSIDERS = {
    "aioquic": ("aqueduct.carriers.quic",),
    "h11": ("aqueduct.admin",),
    "jwt": ("aqueduct.service",),
    "numpy": ("aqueduct.arrow", "spark_udfs"),
    "pandas": ("spark_udfs",),
    "prometheus_client": ("aqueduct.admin",),
    "pyspark": ("spark_udfs",),
    "websockets": ("aqueduct.reactivesocket",),
}
"""Which rooms may use what comes from outside, beside pyarrow, which has a floor."""

FROM = re.compile(r"^\s*from\s+([\w.]+)\s+c?import\s+(?:\(([^)]*)\)|([^#\n]+))", re.MULTILINE)
PLAIN = re.compile(r"^\s*c?import\s+([\w., ]+)", re.MULTILINE)


def room_of(module: str) -> tuple[int, str] | None:
    """Floor and room of a module; None: it has none."""
    prefix = module
    while prefix and prefix not in ROOMS:
        if prefix in PACKAGES_ONLY:
            return None
        prefix = prefix.rpartition(".")[0]
    if prefix == "aqueduct" and module.count(".") == 1:
        prefix = "aqueduct.*"
    elif prefix == "aqueduct" and module != prefix:
        return None
    return ROOMS.get(prefix)


def names_imported(source: str, cython: bool) -> Iterator[str]:
    """Full names: for ``from a import b`` it is ``a.b``, which may be a module or a name in a."""
    if cython:
        for match in FROM.finditer(source):
            for name in re.split(r"[\s,]+", match[2] or match[3]):
                if name not in ("", "as"):
                    yield f"{match[1]}.{name}"
        for match in PLAIN.finditer(source):
            yield from (part.split()[0] for part in match[1].split(",") if part.strip())
        return
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports are not used here"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def violations(module: str, source: str, *, cython: bool = False) -> list[str]:
    """What a module of this name may not import, each with its reason."""
    place = room_of(module)
    if place is None:
        return [f"{module} has no room: give it one in tests/test_floors.py"]
    floor, room = place
    found = []
    for name in names_imported(source, cython):
        outsider = name.partition(".")[0]
        if outsider == "pyarrow":
            if floor < ARROW_FLOOR:
                found.append(
                    f"{module} imports {name}, which begins at the floor of aqueduct.arrow"
                )
        elif outsider in OUTSIDERS:
            if not module.startswith(OUTSIDERS[outsider]):
                found.append(f"{module} imports {name}, which is for {OUTSIDERS[outsider]}")
        elif outsider in ("aqueduct", "spark_udfs"):
            # The last part may be a name in a module instead of a module.
            target = room_of(name if name in MODULES else name.rpartition(".")[0])
            if target is None:
                found.append(f"{module} imports {name}, which has no room")
            elif target[1] != room and target[0] > floor:
                found.append(f"{module} imports {name} from upstairs")
            elif target[1] != room and target[0] == floor:
                found.append(f"{module} imports {name} from a sibling")
    return found


def sources() -> dict[str, Path]:
    """Every module of both packages that there is source for, by name."""
    found = {}
    for package in ("aqueduct", "spark_udfs"):
        spec = find_spec(package)
        assert spec is not None
        assert spec.origin is not None
        root = Path(spec.origin).parent
        for path in sorted(root.rglob("*.p*")):
            if path.suffix in (".py", ".pyx", ".pxd"):
                parts = path.relative_to(root.parent).with_suffix("").parts
                name = ".".join(part for part in parts if part != "__init__")
                found[f"{name}:{path.suffix}"] = path
    return found


SOURCES = sources()
MODULES = {name.partition(":")[0] for name in SOURCES}


def test_no_module_imports_from_a_floor_above() -> None:
    found: list[str] = []
    for name, path in SOURCES.items():
        module, _, suffix = name.partition(":")
        source = path.read_text()
        if module in PACKAGES_ONLY:
            assert not list(names_imported(source, cython=False)), f"{module} is no room"
        else:
            found += violations(module, source, cython=suffix != ".py")
    assert found == []


def test_the_walk_meets_every_floor() -> None:
    met = {room_of(name.partition(":")[0]) for name in SOURCES}
    assert {place[0] for place in met if place} == set(range(len(FLOORS)))


@pytest.mark.parametrize(
    ("module", "source", "reason"),
    [
        ("aqueduct.config", "import aqueduct.endpoint", "upstairs"),
        ("aqueduct.config", "from aqueduct import endpoint", "upstairs"),
        ("aqueduct.config", "from aqueduct import Service", "upstairs"),
        ("aqueduct.config", "def f():\n    from aqueduct.arrow.ipc import read", "upstairs"),
        ("aqueduct.endpoint", "if TYPE_CHECKING:\n    import aqueduct.service.service", "upstairs"),
        (
            "aqueduct.carriers.quic.flow_control",
            "from aqueduct.carriers.memory import x",
            "a sibling",
        ),
        ("aqueduct.carriers.quic", "from aqueduct.carriers import memory", "a sibling"),
        ("aqueduct.protocol.channels.ids", "import aqueduct.carriers.contract", "upstairs"),
        ("aqueduct.cli", "import spark_udfs", "a sibling"),
        ("aqueduct.service.service", "from spark_udfs.calls.pool import Pool", "upstairs"),
        ("aqueduct.endpoint.channel", "import pyarrow as pa", "aqueduct.arrow"),
        ("aqueduct.carriers.memory", "from pyarrow.lib import Buffer", "aqueduct.arrow"),
        ("aqueduct.service.service", "import pyspark.sql", "spark_udfs"),
        ("aqueduct.arrow.ipc", "import pandas as pd", "spark_udfs"),
        ("aqueduct.endpoint", "from aioquic.quic import events", "carriers.quic"),
        ("aqueduct.service.service", "from aqueduct import Client", "upstairs"),
        ("aqueduct.attic.box", "", "no room"),
        ("aqueduct.carriers.pigeon", "", "no room"),
    ],
)
def test_a_bad_import_is_seen(module: str, source: str, reason: str) -> None:
    assert any(reason in line for line in violations(module, source))


@pytest.mark.parametrize(
    "source",
    [
        "from aqueduct.endpoint cimport thing",
        "from aqueduct.endpoint import (\n    one,\n    two,\n)",
        "cimport aqueduct.endpoint",
        "import os, aqueduct.endpoint as e",
        "cdef int f():\n    from aqueduct import endpoint",
    ],
)
def test_a_bad_import_in_cython_is_seen(source: str) -> None:
    assert any(
        "upstairs" in line for line in violations("aqueduct._speedups.x", source, cython=True)
    )


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("aqueduct.config", "import os\nfrom aqueduct.errors import ConfigError"),
        (
            "aqueduct.carriers.quic.flow_control",
            "import aioquic\nfrom aqueduct.carriers.contract import A",
        ),
        ("aqueduct.service.service", "import pyarrow\nfrom aqueduct import arrow, errors"),
        ("spark_udfs.calls.pool", "import pyspark\nfrom aqueduct import SyncClient"),
        ("spark_udfs.demo.job", "from spark_udfs import exchange"),
    ],
)
def test_a_good_import_passes(module: str, source: str) -> None:
    assert violations(module, source) == []
