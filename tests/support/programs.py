"""Services in processes of their own, run in each way in which a service can be."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FORMS = ("run", "serve", "workers")
"""``service.run()``, ``aqueduct serve``, and the same with ``--workers``."""
PATIENCE = 60.0
"""Seconds for what takes a moment, on a machine that has much else to do."""


class Program:
    """A running service, and what it has written."""

    def __init__(self, process: subprocess.Popen[str], form: str) -> None:
        self.process = process
        self.form = form
        self.told: list[str] = []
        """Lines of standard error so far."""
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._errors: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._readers = [
            threading.Thread(target=self._read, args=arguments, daemon=True)
            for arguments in ((process.stdout, self._lines), (process.stderr, self._errors))
        ]
        for reader in self._readers:
            reader.start()
        self.address = ""

    def line(self) -> str:
        """The next line of standard output; fails when there is none."""
        found = self._lines.get(timeout=PATIENCE)
        assert found is not None, self.errors()
        return found

    def error(self, words: str) -> str:
        """The next line of standard error with these words."""
        while True:
            found = self._errors.get(timeout=PATIENCE)
            assert found is not None, f"no line with {words!r}: {self.told}"
            self.told.append(found)
            if words in found:
                return found

    def errors(self) -> list[str]:
        """All of standard error, once it is closed."""
        while (found := self._errors.get(timeout=PATIENCE)) is not None:
            self.told.append(found)
        return self.told

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def ended(self) -> int:
        """The exit status."""
        return self.process.wait(PATIENCE)

    def _read(self, pipe, lines) -> None:
        with pipe:
            for line in pipe:
                lines.put(line.rstrip("\n"))
        lines.put(None)

    def finish(self) -> None:
        """Kills the process, and all that it has left behind."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for reader in self._readers:
            reader.join(PATIENCE)


@contextmanager
def program(
    folder: Path, source: str, form: str, address: str, *options: str, group: bool = False
) -> Iterator[Program]:
    """Runs the service that ``source`` calls ``service``; kills its process group at the end.

    ``options`` are those of ``aqueduct serve`` that ``Service.run`` has, too.
    """
    (folder / "app.py").write_text(textwrap.dedent(source))
    if form == "run":
        given = dict(zip(options[::2], options[1::2], strict=True))
        arguments = {"drain": float(given["--drain"])} if "--drain" in given else {}
        secure = address.startswith(("aqueduct:", "aqueduct+tls:"))
        code = f"import app; app.service.run({address!r}, dev_certificate={secure}, **{arguments})"
        command = [sys.executable, "-c", code]
    else:
        command = [sys.executable, "-m", "aqueduct.cli", "serve", "app:service"]
        command += ["--listen", address, *options]
        if address.startswith(("aqueduct:", "aqueduct+tls:")):
            command.append("--dev-certificate")
        if form == "workers":
            command += ["--workers", "1"]
    process = subprocess.Popen(
        command,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), *sys.path])},
        start_new_session=True,
    )
    running = Program(process, form)
    try:
        running.address = running.line().removeprefix("listening on ")
        yield running
    finally:
        running.finish()


def python(code: str, *arguments: str, timeout: float = PATIENCE) -> subprocess.CompletedProcess:
    """Runs a program to its end; fails if it has to be ended."""
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
        # From 3.12 on Python warns of every fork of a process with threads.
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(sys.path),
            "PYTHONWARNINGS": "ignore::DeprecationWarning",
        },
        check=False,
    )
