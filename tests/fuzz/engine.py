"""One target under libFuzzer: the process that ``python -m tests.fuzz`` starts and watches.

    python -m tests.fuzz.engine TARGET REPORT [libFuzzer's arguments]

It runs the compiled modules of build/fuzz under the address sanitizer (see ci/fuzz.sh), and says
in REPORT, a JSON file, which of their edges were taken.
"""

from __future__ import annotations

import importlib
import json
import shlex
import sys
import time
from pathlib import Path
from typing import Final

import atheris

from tests.fuzz.edges import Edges

__all__ = ["main"]

ROOT: Final = Path(__file__).parents[2]
REPORT_EVERY: Final = 0.5
"""Seconds. libFuzzer ends the process by itself, so the last report is what stays."""


def main() -> None:
    """Fuzzes until an argument of libFuzzer, or a finding, ends it."""
    name, report, *arguments = sys.argv[1:]
    # What leads the fuzzer is the code that is tested, not the tests.
    with atheris.instrument_imports(include=["aqueduct.protocol"]):
        target = importlib.import_module(f"tests.fuzz.{name.replace('-', '_')}").target
    edges = Edges(ROOT)
    if not edges.total:
        sys.exit(
            "tests.fuzz.engine: the compiled modules count no edges, so that nothing would lead "
            "the fuzzer through them: they are not those that ci/fuzz.sh builds in build/fuzz"
        )
    due = 0.0

    def one(data: bytes) -> None:
        nonlocal due
        target(data)
        edges.note()
        if (now := time.monotonic()) >= due:
            due = now + REPORT_EVERY
            Path(report).write_text(json.dumps(edges.seen()))

    atheris.Setup([again(name, report), *arguments], one)
    atheris.Fuzz()


def again(name: str, report: str) -> str:
    """A program that is this process once more: libFuzzer starts one to merge a corpus."""
    command = shlex.join([sys.executable, "-m", "tests.fuzz.engine", name, report])
    script = Path(report).with_suffix(".sh")
    script.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
    script.chmod(0o755)
    return str(script)


if __name__ == "__main__":
    main()
