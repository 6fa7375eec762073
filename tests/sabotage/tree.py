"""Copies of the source tree, and what is run in them."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Final

__all__ = ["ROOT", "Tree"]

ROOT: Final = Path(__file__).parents[2]
COMPILED: Final = "aqueduct/_speedups"


class Tree:
    """A tree of its own, in which nothing outside is imported from the project."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @classmethod
    def of_the_project(cls, root: Path) -> Tree:
        """A copy of what git tracks, or would, with the compiled modules as they are."""
        command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, timeout=60)
        names = {name for name in listed.stdout.decode().split("\0") if name}
        for suffix in ("so", "c"):
            names.update(str(p.relative_to(ROOT)) for p in (ROOT / COMPILED).rglob(f"*.{suffix}"))
        for name in names:
            if (ROOT / name).is_file():  # not one that was deleted and is still tracked
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, root / name)
        return cls(root)

    def copy(self, root: Path) -> Tree:
        """One more, with the bytecode. What no change is made to is shared: it is only read."""
        shutil.copytree(self.root, root, copy_function=self._copy_or_link)
        return Tree(root)

    def _copy_or_link(self, source: str, target: str) -> None:
        inside = Path(source).is_relative_to(self.root / "aqueduct")
        (shutil.copy2 if inside else os.link)(source, target)

    def remove(self) -> None:
        """It was needed for one change."""
        shutil.rmtree(self.root)

    def python(self, *arguments: str, timeout: float, **variables: str) -> tuple[int | None, str]:
        """Runs the interpreter of this process there: (exit code, output).

        The code is None if it took longer than ``timeout`` seconds; all its processes end then.
        """
        environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("PYTEST", "PYTHON", "HYPOTHESIS"))
        }
        environment |= {"PYTHONPATH": str(self.root), "AQUEDUCT_NO_SKIPS": "1", **variables}
        process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=self.root,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=timeout)
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            return None, output
        return process.returncode, output
