"""Compiles what is stale in the tree it is run in, quickly: ``python -m tests.sabotage.compiling``.

setup.py says what the modules are and with which directives Cython takes them; only what Cython
had to translate again is compiled, without optimisation. Prints the names, one a line.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

import setuptools
from setuptools import Distribution, Extension

__all__ = ["main"]

FLAGS = ["-O0", "-g0", "-w"]


def extensions() -> list[Extension]:
    """Those of setup.py, translated to C where a source is newer."""
    given: dict[str, Any] = {}
    original = setuptools.setup
    setuptools.setup = given.update
    try:
        runpy.run_path("setup.py", run_name="__main__")
    finally:
        setuptools.setup = original
    found: list[Extension] = given["ext_modules"]
    return found


def main() -> None:
    """Translates and compiles."""
    translated = {path: path.stat().st_mtime_ns for path in Path("aqueduct").rglob("*.c")}
    stale = [
        extension
        for extension in extensions()
        if Path(extension.sources[0]).stat().st_mtime_ns
        != translated.get(Path(extension.sources[0]))
    ]
    for extension in stale:
        extension.extra_compile_args = FLAGS
        extension.extra_link_args = []
    if stale:
        build = Distribution({"ext_modules": stale}).get_command_obj("build_ext")
        build.inplace = True
        build.force = True
        build.ensure_finalized()
        build.run()
    sys.stdout.write("".join(f"{extension.name}\n" for extension in stale))


if __name__ == "__main__":
    main()
