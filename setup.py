"""The compiled modules; everything else about the project stands in pyproject.toml."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from Cython.Build import cythonize
from setuptools import Extension, setup

DEBUG = os.environ.get("AQUEDUCT_DEBUG") == "1"
ROOT = Path(__file__).parent
FLAGS = ["-O0", "-g"] if DEBUG else ["-O3"]

extensions = [
    Extension(
        f"aqueduct._speedups.{path.stem}",
        [str(path.relative_to(ROOT))],
        extra_compile_args=[] if sys.platform == "win32" else FLAGS,
    )
    for path in sorted((ROOT / "aqueduct" / "_speedups").glob("*.pyx"))
]

setup(
    # One compiler for each processor, whoever asks for the build.
    options={"build_ext": {"parallel": os.cpu_count() or 1}},
    ext_modules=cythonize(
        extensions,
        language_level=3,
        annotate=DEBUG,
        compiler_directives={
            "embedsignature": True,
            "boundscheck": DEBUG,
            "wraparound": False,
            "initializedcheck": DEBUG,
            "cdivision": True,
            "linetrace": DEBUG,
        },
    ),
)
