"""The compiled modules; everything else about the project stands in pyproject.toml.

``AQUEDUCT_DEBUG=1`` builds them with bounds checks and line tracing. ``AQUEDUCT_PGO=1``, which
wheels have, builds them twice, with GCC: modules that count what runs, ``ci/pgo_training.py`` with
those, and from what they counted the ones that are kept, all in one file
(``aqueduct/_speedups/__init__.py``). ``AQUEDUCT_COMPILE=0`` compiles nothing: the Makefile
installs the sources so, while it compiles them.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from Cython.Build import cythonize
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

sys.path.insert(0, str(Path(__file__).parent))  # a build of PEP 517 does not look there
from ci.long_description import long_description

COMPILE = os.environ.get("AQUEDUCT_COMPILE") != "0"
DEBUG = os.environ.get("AQUEDUCT_DEBUG") == "1"
PGO = os.environ.get("AQUEDUCT_PGO") == "1" and not DEBUG
ROOT = Path(__file__).parent
# Python modules stay Python: compiled as they are, with cold caches, they make a small call 1.17
# times as long, since machine code is so much larger than byte code.
# What a call runs, it runs once, out of caches that others have emptied: small is fast. A module
# exports one function, and nobody replaces those that it calls itself.
FAST = ["-O2", "-g0", "-fvisibility=hidden", "-fno-semantic-interposition", "-fno-plt"]
FLAGS = ["-O0", "-g"] if DEBUG else FAST
COUNTING = ["-fprofile-generate", "-fprofile-update=prefer-atomic"]
# A module of which nothing was counted is an error: it would be built as if this were not asked
# for. The switches are kept in the file, for those who want to know how it was built.
COUNTED = ["-fprofile-use", "-fprofile-correction", "-fprofile-partial-training"]
COUNTED += ["-Werror=missing-profile", "-Wno-maybe-uninitialized", "-frecord-gcc-switches"]
TRAINING = 900.0  # seconds at most; half a minute is usual
COMPILED = ROOT / "aqueduct" / "_speedups"
TOGETHER = "aqueduct._speedups._all"


class Build(build_ext):  # type: ignore[misc]
    """Builds the modules, with AQUEDUCT_PGO=1 from what a training counted."""

    extensions: list[Extension]
    build_lib: str
    joined: str

    def build_extensions(self) -> None:
        """Once; or, after a training, again and in one file."""
        if not PGO:
            Path(self.get_ext_fullpath(TOGETHER)).unlink(missing_ok=True)  # of another build
            super().build_extensions()
            return
        self._require_gcc()
        self.force = True
        self._train()
        self._flags(COUNTED, [])
        super().build_extensions()
        self._join()

    def copy_extensions_to_source(self) -> None:
        """Of a build in place; what another build left there would be found instead."""
        super().copy_extensions_to_source()
        if PGO:
            self.copy_file(self.joined, self.get_ext_fullpath(TOGETHER))
        # Only now: who is killed in between still has modules.
        for path in COMPILED.rglob("*.so"):
            if path.name.startswith("_all.") != PGO:
                path.unlink()

    def _require_gcc(self) -> None:
        compiler = self.compiler.compiler_so[0]
        command = [compiler, "--version"]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        if "Free Software Foundation" not in said:
            found = f"{compiler} is {said.partition(chr(10))[0]}"
            sys.exit(f"AQUEDUCT_PGO=1 needs GCC, and {found}: set CC, or build without")

    def _train(self) -> None:
        """Leaves the counts beside the objects; the modules that count are in build/training."""
        tree = ROOT / "build" / "training"
        shutil.rmtree(tree, ignore_errors=True)
        shutil.rmtree(self.build_temp, ignore_errors=True)  # counts of other code
        shutil.copytree(ROOT / "aqueduct", tree / "aqueduct", ignore=shutil.ignore_patterns("*.so"))
        kept, self.build_lib = self.build_lib, str(tree)
        self._flags(COUNTING, ["-fprofile-generate"])
        super().build_extensions()
        command = [sys.executable, str(ROOT / "ci" / "pgo_training.py")]
        environment = {**os.environ, "PYTHONPATH": str(tree)}
        try:
            subprocess.run(command, env=environment, check=True, timeout=TRAINING)
        except subprocess.SubprocessError as error:
            sys.exit(f"AQUEDUCT_PGO=1: the training failed, see above: {error}")
        self.build_lib = kept

    def _join(self) -> None:
        """Links the objects of all modules into one file, in place of theirs."""
        sources = [source for extension in self.extensions for source in extension.sources]
        for extension in self.extensions:
            Path(self.get_ext_fullpath(extension.name)).unlink()
        objects = self.compiler.object_filenames(sources, output_dir=self.build_temp)
        self.joined = self.get_ext_fullpath(TOGETHER)
        self.compiler.link_shared_object(objects, self.joined)
        self.extensions = []  # nothing is left of them

    def _flags(self, compile_args: list[str], link_args: list[str]) -> None:
        for extension in self.extensions:
            extension.extra_compile_args = [*FLAGS, *compile_args]
            extension.extra_link_args = link_args


SOURCES = sorted(COMPILED.rglob("*.pyx"))
if len({path.stem for path in SOURCES}) < len(SOURCES):
    # Each exports a function that is named after its last part, and one file has them all.
    sys.exit(f"two compiled modules below {COMPILED} have one name")

extensions = [
    Extension(
        ".".join(path.relative_to(ROOT).with_suffix("").parts),
        [str(path.relative_to(ROOT))],
        extra_compile_args=[] if sys.platform == "win32" else FLAGS,
    )
    for path in SOURCES
]

# The compilers of Cython may be processes that import this file again.
if __name__ == "__main__":
    setup(
        long_description=long_description(ROOT),
        long_description_content_type="text/markdown",
        # One compiler for each processor, whoever asks for the build.
        options={"build_ext": {"parallel": os.cpu_count() or 1}},
        cmdclass={"build_ext": Build},
        ext_modules=cythonize(
            extensions if COMPILE else [],
            nthreads=os.cpu_count() or 1,
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
