"""Collects the tests that cibuildwheel runs against a wheel, with what it has for them.

Run it as ``python -I ci/collect.py FOLDER`` in an environment with the wheel and its ``[test]``.
The folder is made, and has the files of ``test-sources`` and nothing else. An import that is
missing ends it with status 1.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TIME_LIMIT = 300.0  # seconds


def main(folder: Path) -> int:
    """Copies, collects and tells; the exit status."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    settings = project["tool"]["cibuildwheel"]
    folder.mkdir(parents=True)
    for source in settings["test-sources"]:
        (folder / source).parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / source).is_dir():
            shutil.copytree(
                ROOT / source, folder / source, ignore=shutil.ignore_patterns("__pycache__")
            )
        else:
            shutil.copy2(ROOT / source, folder / source)
    (command,) = (line for line in settings["test-command"] if " pytest " in line)
    program, *arguments = shlex.split(command)
    if program != "python":
        sys.exit(f"ci/collect.py: the command begins with {program!r}, not with python")
    done = subprocess.run(
        [sys.executable, *arguments, "--collect-only", "-qq"],
        cwd=folder,
        env={**os.environ, **settings["test-environment"]},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIME_LIMIT,
    )
    if done.returncode:
        print(done.stdout)
        return 1
    count = sum(int(line.rpartition(": ")[2]) for line in done.stdout.splitlines() if ": " in line)
    print(f"{count} tests for the wheel can be collected")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
