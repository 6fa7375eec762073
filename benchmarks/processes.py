"""A server process and a client process of its own for each measurement.

Both speak JSON lines on standard output. The server says ``{"address": ...}`` once it listens,
and reports when its standard input is closed; the client reports when it is done.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
import threading
from collections.abc import Mapping
from typing import IO, Any


class Failed(Exception):
    """A measurement that did not come to its end; the text is what its processes said."""


def run_pair(
    server_command: list[str],
    client_command: list[str],
    timeout: float,
    *,
    environment: Mapping[str, str] | None = None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The reports of server and client; the client is told the address as its last argument.

    Both have this process's environment or another. Raises Failed, with what the two said last, if
    either fails or takes above ``timeout`` s.
    """
    with tempfile.TemporaryFile() as complaints:
        server = subprocess.Popen(
            server_command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=complaints,
            env=environment,
        )
        deadline = threading.Timer(2 * timeout, server.kill)
        deadline.start()
        try:
            assert server.stdin is not None and server.stdout is not None
            first = server.stdout.readline()
            if not first:
                raise Failed("the server said nothing")
            address = json.dumps(json.loads(first)["address"])
            result = run([*client_command, address], timeout, environment=environment)
            server.stdin.close()
            return _last_answer(server.stdout.read()), result
        except Failed as error:
            server.kill()
            server.wait()
            complaints.seek(0)
            raise Failed(f"{error} [server: {_tail(complaints.read())}]") from None
        finally:
            deadline.cancel()
            server.kill()
            server.wait()
            for pipe in (server.stdin, server.stdout):
                _close(pipe)


def run(
    command: list[str], timeout: float, *, environment: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """The report of one process, in this process's environment or another. Raises Failed."""
    try:
        done = subprocess.run(
            command, capture_output=True, timeout=timeout, env=environment, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise Failed(f"no end after {timeout:g} s: {_tail(error.stderr or b'')}") from None
    if done.returncode:
        raise Failed(f"exit status {done.returncode}: {_tail(done.stderr)}")
    return _last_answer(done.stdout)


def _close(pipe: IO[bytes] | None) -> None:
    if pipe is not None:
        pipe.close()


def _last_answer(output: bytes) -> dict[str, Any]:
    try:
        answer: dict[str, Any] = json.loads(output.splitlines()[-1])
    except (IndexError, ValueError):
        raise Failed(f"no result: {_tail(output)}") from None
    return answer


def _tail(output: bytes) -> str:
    lines = output.decode(errors="replace").strip().splitlines()
    return lines[-1].strip() if lines else "nothing on stderr"
