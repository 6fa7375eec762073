"""A PostgreSQL of the tests' own, and who reads its tables without any sink."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["Server", "running"]

ROOT = Path(__file__).parent.parent.parent


class Server:
    """A server on a Unix socket, without TCP."""

    def __init__(self, programs: Path, folder: Path, user: str | None) -> None:
        self.programs = programs
        self.folder = folder
        self.user = user
        self.uri = f"postgresql:///postgres?host={folder}&user=tester"

    def run(self, program: str, *arguments: str) -> str:
        done = subprocess.run(
            [self.programs / program, *arguments],
            user=self.user,
            cwd="/",
            check=True,
            capture_output=True,
            text=True,
            timeout=60,
        )
        return done.stdout

    def sql(self, text: str) -> list[str]:
        """The lines that psql prints: a reader that knows nothing of sinks."""
        arguments = ("-h", str(self.folder), "-U", "tester", "-d", "postgres", "-qtA", "-c", text)
        return self.run("psql", *arguments).splitlines()

    def ids(self, table: str) -> Counter[int]:
        """How often each id is in a table."""
        return Counter(map(int, self.sql(f'SELECT id FROM "{table}"')))


@contextmanager
def running() -> Iterator[Server]:
    """A new and empty one, for as long as the block."""
    found = subprocess.run(
        [ROOT / "ci" / "system.sh", "postgres"], check=True, stdout=subprocess.PIPE, text=True
    )
    # It refuses to run as root. Its socket's path has to be short.
    user = "postgres" if os.geteuid() == 0 else None
    folder = Path(tempfile.mkdtemp(prefix="aq-pg-", dir="/tmp"))
    server = Server(Path(found.stdout.strip()), folder, user)
    process = None
    try:
        if user is not None:
            shutil.chown(folder, user)
        data = str(folder / "data")
        server.run("initdb", "-D", data, "-A", "trust", "--no-sync", "-U", "tester", "--locale=C")
        process = subprocess.Popen(
            # It is not killed itself, so it need not wait for disks.
            [server.programs / "postgres", "-D", data, "-k", folder, "-h", "", "-F"],
            user=user,
            cwd="/",
            stderr=subprocess.DEVNULL,
        )
        while subprocess.run([server.programs / "pg_isready", "-q", "-h", folder]).returncode:
            assert process.poll() is None, "postgres did not start"
        yield server
    finally:
        if process is not None:
            process.send_signal(signal.SIGQUIT)
            process.wait(20)
        shutil.rmtree(folder, ignore_errors=True)
