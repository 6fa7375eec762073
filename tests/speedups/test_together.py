"""Compiled modules that a wheel has in one file are found there, and nothing else is."""

from __future__ import annotations

import importlib
import sys
from importlib.machinery import EXTENSION_SUFFIXES, ExtensionFileLoader
from importlib.util import module_from_spec
from pathlib import Path

import pytest

from aqueduct import _speedups


def finder(path: Path) -> _speedups.Together:
    return _speedups.Together(path)


def test_a_compiled_module_is_looked_for_in_the_file() -> None:
    path = Path("somewhere") / "_all.so"
    spec = finder(path).find_spec("aqueduct._speedups.base.ranges")
    assert spec is not None
    assert (spec.name, spec.origin) == ("aqueduct._speedups.base.ranges", str(path.absolute()))
    assert isinstance(spec.loader, ExtensionFileLoader)


@pytest.mark.parametrize(
    "name",
    ["aqueduct._speedups.nothing", "aqueduct.ranges", "ranges", "aqueduct._speedups", "json"],
)
def test_other_modules_are_not(name: str) -> None:
    assert finder(Path("_all.so")).find_spec(name) is None


def test_a_module_loads_from_the_file_that_has_it() -> None:
    """Whichever that is here: its own, or that of all."""
    ranges = importlib.import_module("aqueduct._speedups.base.ranges")
    spec = finder(Path(str(ranges.__file__))).find_spec("aqueduct._speedups.base.ranges")
    assert spec is not None
    assert {*vars(module_from_spec(spec))} >= {"__spec__", "__loader__"}
    assert spec.origin == ranges.__file__


def test_the_finder_is_last_and_there_only_with_the_file() -> None:
    """What has a file of its own, newer than that of all, comes from there."""
    folder = Path(str(_speedups.__file__)).parent
    together = [folder / f"_all{suffix}" for suffix in EXTENSION_SUFFIXES]
    there = [path for path in together if path.exists()]
    found = [each.path for each in sys.meta_path if isinstance(each, _speedups.Together)]
    assert found == [str(path) for path in there]
    if found:
        names = [type(each).__name__ for each in sys.meta_path]
        paths = [getattr(each, "__name__", "") for each in sys.meta_path]
        assert paths.index("PathFinder") < names.index("Together")
