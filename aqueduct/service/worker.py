"""One worker of ``aqueduct serve --workers``: a process that serves on sockets it inherited.

It is started by ``workers`` as ``python -m aqueduct.service.worker SERVICE NUMBER FD``; FD is its
end of a socket pair, on which both sides write lines of JSON. First comes the job: addresses, file
descriptors, certificates, and where workers hand connections to each other. The worker answers
``ready`` or ``failed``, takes the commands ``drain``, ``force`` and ``look``, and ends when the
other end is gone.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import signal
import socket
import sys
import threading
import time
from contextlib import AsyncExitStack, suppress
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

from aqueduct.address import Address
from aqueduct.arguments import debug_asked
from aqueduct.carriers.contract import Bound, Siblings
from aqueduct.escaping import logger_of, one_line
from aqueduct.forks import own_socket
from aqueduct.logs import LogSettings, as_json, configure
from aqueduct.service.lifetime import unless
from aqueduct.service.loader import load_service
from aqueduct.service.reporting import ServiceReporter
from aqueduct.service.signals import (
    FORCE_SECONDS,
    ProcessDeadline,
    ServiceSignals,
    end_process,
    tell_as,
)
from aqueduct.settings.in_force import ServiceSettings

if TYPE_CHECKING:
    from aqueduct.carriers.certificates import ServerTls
    from aqueduct.service.server import RunningService
    from aqueduct.service.service import Service

__all__ = ["main", "tls_from_json", "tls_to_json"]

log = logger_of(__name__)


def main(arguments: list[str]) -> int:
    """Works until it is told to end; the exit status."""
    name, number, fd = arguments
    # The terminal's SIGINT goes to the whole group; what it means is for the first process to say.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return _Worker(name, int(number), socket.socket(fileno=int(fd))).run()


class _Worker:
    def __init__(self, name: str, number: int, control: socket.socket) -> None:
        control.set_inheritable(False)
        own_socket(control)
        self._name = name
        self._number = number
        self._control = control
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._running: RunningService | None = None
        self._reporter: ServiceReporter | None = None
        self._first = asyncio.Event()
        self._together = False
        """Whether all workers are drained."""
        self._second = asyncio.Event()
        self._deadline = ProcessDeadline()
        self._seconds = 0.0
        self._files: list[str] = []
        """What the first process made, and removes if it lives."""

    def run(self) -> int:
        # Unbuffered: a buffer's lock, held by a thread, would be in the way of the process's end.
        lines = self._control.makefile("rb", buffering=0)
        job = json.loads(lines.readline() or b"{}")
        if not job:
            return 1
        places = [
            Bound(
                Address.parse(place["address"]),
                tuple(_adopt(fd) for fd in place["sockets"]),
                siblings=_siblings(self._number, place["siblings"], job["epoch"]),
            )
            for place in job["places"]
        ]
        self._files = [path for place in job["places"] for path in place["siblings"]]
        if job.get("logs") is not None:
            settings = LogSettings(**job["logs"])
            configure(settings, worker=True)
            if settings.format == "json":
                tell_as(partial(as_json, worker=True))
        listener = threading.Thread(target=self._listen, args=(lines,), daemon=True)
        listener.start()
        try:
            service = load_service(self._name)
            operator = ServiceSettings.from_json(job["settings"])
            config, benchmark = operator.config(service.config), operator.value("serve.benchmark")
            service.configure(config, benchmark=benchmark)
            tls, drain, origins = tls_from_json(job["tls"]), job["drain"], job["origins"]
            status = asyncio.run(self._serve(service, places, tls, drain, origins))
            if job["admin"]:
                self._report()  # what it has counted in all
            return status
        except Exception as error:
            if debug_asked():
                raise
            self._tell({"failed": one_line(error)})
            return 1

    async def _serve(
        self,
        service: Service,
        places: list[Bound],
        tls: ServerTls | None,
        drain: float | None,
        origins: list[str],
    ) -> int:
        self._loop = asyncio.get_running_loop()
        self._seconds = service.config.timing.drain_timeout if drain is None else drain
        signals = ServiceSignals(  # to one worker alone: the first process replaces it
            drain=self._first.set,
            force=self._second.set,
            seconds=self._seconds,
            deadline=self._deadline,
            numbers=(signal.SIGTERM,),
        )
        with signals:
            serving = service.serving(*places, tls=tls, drain=self._seconds, origins=origins)
            async with AsyncExitStack() as stack:
                running = await unless(self._first, stack.enter_async_context(serving))
                if running is None:  # told to end before it had begun
                    return 0
                self._running = running
                self._reporter = ServiceReporter(running, self._loop)
                signals.look = self._look
                ready = {
                    "addresses": running.addresses,
                    "drain": self._seconds,
                    "delay": service.config.timing.drain_delay,
                    "admin": asdict(service.config.admin),
                }
                self._tell({"ready": ready})
                await self._first.wait()
                await running.drain(self._second, self._seconds, alone=not self._together)
        return 1 if self._second.is_set() else 0

    # From here on, what the first process says

    def _listen(self, lines: socket.SocketIO) -> None:
        """In a thread: a handler that blocks the event loop must not hide the end of the parent."""
        for line in lines:
            command = json.loads(line)
            if "seconds" in command:
                self._seconds = command["seconds"]
                self._deadline.end_in(self._seconds)
            if command["do"] == "report":
                self._report()
            else:
                self._in_loop(getattr(self, f"_{command['do']}"))
        # No supervisor watches this process any more, and nothing else would ever end it.
        for path in self._files:
            with suppress(OSError):
                os.unlink(path)
        for directory in {os.path.dirname(path) for path in self._files}:
            with suppress(OSError):
                os.rmdir(directory)
        if self._in_loop(self._force):
            time.sleep(FORCE_SECONDS)
        end_process(1)

    def _in_loop(self, command: Any) -> bool:
        try:
            assert self._loop is not None
            self._loop.call_soon_threadsafe(command)
        except (AssertionError, RuntimeError):  # no loop yet, or it has ended
            return False
        return True

    def _drain(self) -> None:
        self._together = True
        self._first.set()

    def _force(self) -> None:
        self._together = True
        self._second.set()
        self._first.set()

    def _look(self) -> None:
        if self._running is not None:
            state = {"worker": self._number, "pid": os.getpid(), **self._running.state()}
            # Not from the loop: the other side may be slow to read, and has much to read.
            threading.Thread(target=self._tell, args=({"state": state},), daemon=True).start()

    def _report(self) -> None:
        """Not on the loop: a handler may hold it up, which is what the report is to show."""
        if self._reporter is not None:
            try:
                self._tell({"report": self._reporter.make()})
            except Exception:
                log.exception("a worker could not report its state")

    def _tell(self, message: dict[str, Any]) -> None:
        line = json.dumps(message, separators=(",", ":")).encode() + b"\n"
        try:
            with self._lock:
                self._control.sendall(line)
        except OSError:
            pass  # the parent is gone, which ``_listen`` sees


def _siblings(number: int, paths: list[str], epoch: int) -> Siblings | None:
    return Siblings(number, tuple(paths), epoch) if paths else None


def _adopt(fd: int) -> socket.socket:
    sock = socket.socket(fileno=fd)
    sock.set_inheritable(False)
    own_socket(sock)
    return sock


def tls_to_json(tls: ServerTls | None) -> dict[str, Any] | None:
    """For the way from the first process to a worker. Paths stay paths: files may be renewed."""
    if tls is None:
        return None
    found: dict[str, Any] = {"key_password": tls.key_password, "development": tls.development}
    for name in ("certificate", "key", "client_ca"):
        value = getattr(tls, name)
        if isinstance(value, bytes):
            found[name] = {"pem": base64.b64encode(value).decode()}
        else:
            found[name] = None if value is None else os.fspath(value)
    return found


def tls_from_json(found: dict[str, Any] | None) -> ServerTls | None:
    """The reverse of ``tls_to_json``."""
    if found is None:
        return None
    from aqueduct.carriers.certificates import ServerTls

    given: dict[str, Any] = {
        name: base64.b64decode(value["pem"]) if isinstance(value, dict) else value
        for name, value in found.items()
    }
    return ServerTls(**given)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
