"""Private names of other projects: each is listed, is used, and is there in what is installed."""

from __future__ import annotations

import argparse
import ast
import asyncio
import io
import re
import subprocess
import sys
import types
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from aqueduct.carriers import foreign
from tests.carriers import test_aioquic_names as aioquic_names

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    page
    for folder in ("aqueduct", "spark_udfs")
    for page in (ROOT / folder).rglob("*.p*")
    if page.suffix in (".py", ".pyx") and page.name != "foreign.py"
)
LISTED = {name for each in foreign.NAMES for name in each.names}
OF_AIOQUIC = {name for each in foreign.NAMES if each.project == "aioquic" for name in each.names}
PUBLIC = {"_exit", "_replace", "_fields"}
"""That begin with ``_`` and are documented: of ``os``, and of named tuples."""

pytestmark = pytest.mark.checkout


@cache
def nodes(page: Path) -> list[ast.AST]:
    """All of a page's syntax, which is walked once for all tests."""
    return list(ast.walk(ast.parse(page.read_text())))


def modules(page: Path) -> set[str]:
    """Private names in what a page imports from other projects."""
    found: set[str] = set()
    for node in nodes(page):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            if node.module.split(".")[0] in ("aqueduct", "spark_udfs", "__future__", "_typeshed"):
                continue
            found.update(part for part in node.module.split(".") if part.startswith("_"))
            found.update(name.name for name in node.names if name.name.startswith("_"))
    return found - {"_rust"}  # on the way to ``_openssl``


@cache
def names_of_ours() -> frozenset[str]:
    """All private names that the library itself defines."""
    ours: set[str] = set()
    for page in PAGES:
        if page.suffix == ".pyx":
            texts = [page.read_text()]
            if page.with_suffix(".pxd").exists():
                texts.append(page.with_suffix(".pxd").read_text())
            for one in texts:
                ours.update(re.findall(r"(?:\b(?:cdef|cpdef|def)\b.*?|self\.)\b(_[a-z]\w*)", one))
            continue
        for node in nodes(page):
            match node:
                case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                    ours.add(node.name)
                case ast.Name(ctx=ast.Store()):
                    ours.add(node.id)
                case ast.Attribute(ctx=ast.Store(), value=ast.Name(id="self")):
                    ours.add(node.attr)
                case ast.Constant(value=str(text)) if text.isidentifier():
                    ours.add(text)  # of __slots__
    return frozenset(ours)


def attributes(page: Path) -> set[str]:
    """Private attributes that a page reads, by name or by ``getattr``."""
    found: set[str] = set()
    for node in nodes(page):
        match node:
            case ast.Attribute() if re.fullmatch(r"_[a-z]\w*", node.attr):
                found.add(node.attr)
            case ast.Call(func=ast.Name(id="getattr" | "hasattr"), args=[_, ast.Constant(), *_]):
                second = node.args[1]
                assert isinstance(second, ast.Constant)
                if re.fullmatch(r"_[a-z]\w*", str(second.value)):
                    found.add(str(second.value))
    return found


def test_no_other_private_name_is_used() -> None:
    assert len(PAGES) > 200
    unlisted: dict[str, set[str]] = {}
    for page in PAGES:
        # test_aioquic_names has a test of its own for those of QUIC.
        if page.suffix == ".py" and page.parent.name != "quic":
            names = modules(page) | (attributes(page) - names_of_ours())
            unlisted[str(page.relative_to(ROOT))] = names - LISTED - PUBLIC
    assert {page: names for page, names in unlisted.items() if names} == {}


def test_every_name_of_the_list_is_used() -> None:
    words = {word for page in PAGES for word in re.findall(r"\w+", page.read_text())}
    assert LISTED - words == set()


def test_the_names_of_aioquic_are_those_that_are_tested() -> None:
    tables = (aioquic_names.OF_THE_CONNECTION, aioquic_names.METHODS, aioquic_names.OF_OTHERS)
    assert {name for table in tables for name in table} | {"_buffer"} == OF_AIOQUIC


def _loop() -> Any:
    loop = asyncio.new_event_loop()
    loop.close()
    return loop


def _session() -> Any:
    """Whose instances have it."""
    made = pytest.importorskip("pyspark.sql").SparkSession.__init__
    return types.SimpleNamespace(**dict.fromkeys(made.__code__.co_names))


def _spark() -> Any:
    return pytest.importorskip("pyspark").SparkContext


def _connection() -> Any:
    from OpenSSL import SSL

    return SSL.Connection(SSL.Context(SSL.TLS_CLIENT_METHOD))


def _store() -> Any:
    from OpenSSL import crypto

    return crypto.X509Store()


def _rust() -> Any:
    from cryptography.hazmat.bindings import _rust

    return _rust


def _batch() -> Any:
    import pyarrow as pa

    return pa.RecordBatch


def _accumulators() -> Any:
    accumulators = pytest.importorskip("pyspark.accumulators")

    return accumulators.Accumulator(0, 0, accumulators.AddingAccumulatorParam(0))


def _websocket() -> Any:
    return pytest.importorskip("websockets.server").ServerProtocol()


OWNERS: dict[str, Callable[[], Any]] = {
    "_get_running_loop": lambda: asyncio,
    "_enter_task": lambda: asyncio,
    "_leave_task": lambda: asyncio,
    "_asyncio_future_blocking": lambda: _loop().create_future(),
    "_selector": lambda: asyncio.BaseEventLoop,
    "_ssock": _loop,
    "_csock": _loop,
    "_current_frames": lambda: sys,
    "_getframe": lambda: sys,
    "_active_spark_context": _spark,
    "_deserialized": _accumulators,
    "_jsparkSession": _session,
    "_actions": argparse.ArgumentParser,
    "_option_string_actions": argparse.ArgumentParser,
    "_import_from_c": _batch,
    "_import_from_c_capsule": _batch,
    "_openssl": _rust,
    "_ssl": _connection,
    "_into_ssl": _connection,
    "_from_ssl": _connection,
    "_store": _store,
    "recv_frame": _websocket,
    "max_message_size": _websocket,
}


@pytest.mark.parametrize("name", sorted(LISTED - OF_AIOQUIC - {"_nest_patched"}))
def test_a_name_is_there(name: str) -> None:
    if name == "_selector":
        loop: Any = asyncio.new_event_loop()
        assert isinstance(loop._selector.fileno(), int)
        loop.close()
        return
    assert hasattr(OWNERS[name](), name)


def test_a_loop_that_nests_says_so() -> None:
    """In a process of its own, as it patches asyncio."""
    pytest.importorskip("nest_asyncio")
    code = (
        "import asyncio, nest_asyncio; loop = asyncio.new_event_loop(); "
        "nest_asyncio.apply(loop); assert loop._nest_patched; loop.close()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_what_is_missing_is_named_and_told_once(caplog: pytest.LogCaptureFixture) -> None:
    foreign.require(io, "BytesIO")
    with pytest.raises(foreign.Missing, match=r"^io has no _gone, _lost$") as caught:
        foreign.require(io, "BytesIO", "_gone", "_lost")
    for _ in range(2):
        foreign.warn_once(caught.value, "this test goes another way")
    assert [record.message for record in caplog.records] == [
        "io has no _gone, _lost: this test goes another way"
    ]
