"""``aqueduct serve --workers N``: processes that share addresses, and the one that watches them.

The first process binds every address, starts the workers and serves nothing itself. It never loads
the service, so it has nothing to crash by. Workers are fresh interpreters, not forks: no thread or
lock of one is in another. Each has inherited its sockets, and the first process keeps them too: an
address stays taken, and its clients' packets go where they went, while a worker is replaced.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

from aqueduct.config import DEFAULT, Admin
from aqueduct.endpoint.server import bind
from aqueduct.errors import ConfigError
from aqueduct.escaping import logger_of
from aqueduct.service.crew_report import CrewAdmin
from aqueduct.service.signals import (
    FORCE_SECONDS,
    LEAST,
    ProcessDeadline,
    ServiceSignals,
    say,
    tell_state,
)
from aqueduct.service.worker import tls_to_json
from aqueduct.settings.in_force import ServiceSettings

if TYPE_CHECKING:
    from aqueduct.address import Address
    from aqueduct.admin.report import Phase
    from aqueduct.carriers.certificates import ServerTls
    from aqueduct.carriers.contract import Bound
    from aqueduct.logs import LogSettings

__all__ = ["Restarts", "Supervisor"]

log = logger_of(__name__)

_LAST: Final = 1.0
"""Seconds of a drain, at most, that the first process keeps for the end of its workers."""


_DIRECTORY_BYTES: Final = 88
"""A path of a Unix socket has 103 bytes at most on some systems; the sockets have short names."""


@dataclass(frozen=True, slots=True)
class Restarts:
    """How dead workers are replaced."""

    limit: int = 10
    """Deaths of workers within ``period`` that are borne; one more ends the service."""
    period: float = 60.0
    """Seconds."""
    pause: float = 0.25
    """Seconds before a worker that died soon is replaced; doubled for each time in a row."""
    longest_pause: float = 8.0
    """Seconds that this grows to."""
    settled: float = 10.0
    """Who lived so many seconds did not die soon, and is replaced at once."""
    start: float = 300.0
    """Seconds that a worker has to load its service and to listen."""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if value < 0 or (value == 0 and name not in ("limit", "pause")):
                raise ConfigError(f"Restarts.{name} is {value!r}; it must be above zero")

    def wait(self, in_a_row: int) -> float:
        """Seconds before the next process of one that died soon, so many times in a row."""
        return min(self.longest_pause, self.pause * 2.0 ** min(in_a_row - 1, 60))


class Supervisor:
    """The first process: starts, watches, replaces and drains ``count`` workers."""

    def __init__(
        self,
        service: str,
        addresses: Sequence[str | Address],
        *,
        count: int,
        tls: ServerTls | None,
        restarts: Restarts | None = None,
        drain: float | None = None,
        origins: Sequence[str] = (),
        admin: str | None = None,
        settings: ServiceSettings | None = None,
        logs: LogSettings | None = None,
    ) -> None:
        """``drain``: seconds that the end may take; None: what the service's settings say.

        ``origins`` and ``admin``: see ``Service.serving``. ``settings``: what the operator has set;
        each worker serves with it. ``logs``: of the workers; None: as Python logs.
        """
        self._service = service
        self._addresses = addresses
        self._count = count
        self._tls = tls
        self._restarts = restarts or Restarts()
        self._drain = drain
        self._origins = list(origins)
        self._admin_place = admin
        self._admin: CrewAdmin | None = None
        self._settings = ServiceSettings() if settings is None else settings
        self._logs = logs
        self._deadline = ProcessDeadline(self._kill)
        self._deaths: deque[float] = deque()
        self._places: list[list[Bound]] = []
        self._epoch = time.time_ns() // 1000
        """Of the links of all workers: a client that comes back knows this service by it."""
        self._directory = ""
        """Where workers hand each other the connections of links; empty: there are none."""
        self._crew: list[_Slot] = []
        self._announced = False
        self._signals: ServiceSignals
        self._ended = 0
        """How often this was told to end."""
        self._failure = ""
        self._unheard: OSError | None = None
        """Why nobody could be told the addresses."""
        self._cut = False
        self._delay = 0.0
        """Of a drain: how long connections are taken as before."""
        self._loop: asyncio.AbstractEventLoop
        self._over: asyncio.Event

    async def run(self) -> int:
        """Serves until a signal, then drains; the exit status.

        0 after a drain, also of calls that outlasted it and were cut. 1 after a second signal, when
        a worker died in the drain, or when workers died too often. Raises ConfigError when a worker
        cannot begin.
        """
        self._loop = asyncio.get_running_loop()
        self._over = asyncio.Event()
        self._places = await bind(self._addresses, self._count)
        self._signals = ServiceSignals(
            drain=self._drained,
            force=self._forced,
            seconds=DEFAULT.timing.drain_timeout if self._drain is None else self._drain,
            deadline=self._deadline,
            grace=FORCE_SECONDS + 2 * _LAST,
        )
        self._signals.look = self._look
        self._loop.add_signal_handler(signal.SIGCHLD, self._reap)
        try:
            with self._signals:
                await self._administer()
        finally:
            self._loop.remove_signal_handler(signal.SIGCHLD)
        if self._unheard is not None:
            raise self._unheard
        if not self._announced and self._failure:
            raise ConfigError(self._failure)
        return 1 if self._cut else 0

    async def _administer(self) -> None:
        """``_watch``, beside the admin port if there is one."""
        if self._admin_place is None:
            await self._watch()
            return
        self._admin = CrewAdmin(
            self._admin_place,
            self,
            self._count,
            self._service,
            self._settings.config().admin,
        )
        try:
            await self._admin.start()
            await self._watch()
        finally:
            await self._admin.close()

    async def _watch(self) -> None:
        try:
            if any(bound.address.resume is not None for bound in self._places[0]):
                self._directory = _private_directory()
            self._crew = [_Slot(self, number, self._job(number)) for number in range(self._count)]
            for slot in self._crew:
                slot.start()
            await self._over.wait()
        finally:
            self._kill()
            self._let_go()
            if self._directory:
                shutil.rmtree(self._directory, ignore_errors=True)

    def _job(self, number: int) -> dict[str, Any]:
        places = [
            {
                "address": str(bound.address),
                "sockets": [sock.fileno() for sock in bound.sockets],
                "siblings": self._siblings(place, bound.address),
            }
            for place, bound in enumerate(self._places[number])
        ]
        return {
            "places": places,
            "epoch": self._epoch,
            "tls": tls_to_json(self._tls),
            "drain": self._drain,
            "origins": self._origins,
            "admin": self._admin is not None,
            "settings": self._settings.to_json(),
            "logs": None if self._logs is None else asdict(self._logs),
        }

    def _siblings(self, place: int, address: Address) -> list[str]:
        """Where each worker takes connections of this address; nowhere, if it has no links."""
        if address.resume is None:
            return []
        return [os.path.join(self._directory, f"{place}-{number}") for number in range(self._count)]

    def _let_go(self) -> None:
        """The addresses are free: clients are refused instead of waiting in vain."""
        for bound in (bound for places in self._places for bound in places):
            bound.close()

    # Signals

    def _drained(self) -> None:
        self._ended = 1
        self._end("draining; a second signal ends at once", self._delay)

    def _forced(self) -> None:
        self._ended = 2
        self._force("ended by a second signal; calls were cut")

    def _kill(self) -> None:
        for slot in self._crew:
            slot.kill()

    def _look(self) -> None:
        for slot in self._crew:
            slot.look()

    def _reap(self) -> None:
        for slot in self._crew:
            slot.reap()

    # The end

    @property
    def ending(self) -> bool:
        """Whether no worker is to be replaced any more."""
        return bool(self._ended or self._failure)

    def _end(self, text: str, delay: float = 0.0) -> None:
        log.info("%s", text)
        if delay:
            self._loop.call_later(delay, self._let_go)
        else:
            self._let_go()
        for slot in self._crew:
            slot.end()
        self._check_over()

    def _force(self, text: str) -> None:
        self._cut = True
        log.warning("%s", text)
        self._let_go()
        for slot in self._crew:
            slot.force()

    # What the admin port asks

    @property
    def phase(self) -> Phase:
        """See CrewHost."""
        if self.ending:
            return "draining"
        return "serving" if self._announced else "starting"

    @property
    def addresses(self) -> list[str]:
        """See CrewHost."""
        return next((slot.addresses for slot in self._crew if slot.addresses), [])

    def ask_reports(self) -> Collection[int]:
        """See CrewHost."""
        return [slot.number for slot in self._crew if slot.tell_report()]

    def _check_over(self) -> None:
        if self.ending and all(slot.process is None for slot in self._crew):
            self._over.set()

    # What the slots report

    def ready(self, slot: _Slot, drain: float, delay: float) -> None:
        """A worker listens. Once all do, for the first time, the addresses are told.

        ``drain``: seconds that its end may take. ``delay``: Timing.drain_delay.
        """
        self._signals.seconds = drain
        self._delay = min(delay, drain / 2)
        if self._announced:
            log.info("%s listens", slot.name)
        elif all(other.addresses for other in self._crew):
            try:
                for address in slot.addresses:
                    say(f"listening on {address}")
            except OSError as error:  # it ends, as one process does that can tell nobody
                self._unheard, self._failure = error, "standard output takes no addresses"
                self._kill()
                return
            self._announced = True
            if self._admin is not None:
                for address in self._admin.addresses:
                    log.info("admin at %s", address)

    @property
    def admin(self) -> CrewAdmin | None:
        """The admin port; None: there is none."""
        return self._admin

    def died(self, slot: _Slot, how: str, *, well: bool) -> float | None:
        """A worker has ended. In how many seconds it is to be replaced; None: not at all."""
        if self.ending:
            if self._announced and not (well or slot.unfinished or self._ended > 1):
                self._cut = True
                log.error("%s %s", slot.name, how)
            self._check_over()
            return None
        if not self._announced:
            self._failure = slot.failed or f"{slot.name} {how} before it listened"
            self._kill()
            self._check_over()
            return None
        if well:
            log.info("%s was drained; another takes its place", slot.name)
            return 0.0
        how = slot.failed or f"{slot.name} {how}"
        now = self._loop.time()
        self._deaths.append(now)
        while self._deaths[0] < now - self._restarts.period:
            self._deaths.popleft()
        if len(self._deaths) > self._restarts.limit:
            self._failure = how
            self._cut = True
            self._end(
                f"{how}; {len(self._deaths)} workers died within {self._restarts.period:g} s, and "
                f"{self._restarts.limit} are borne (--restarts): draining the others"
            )
            return None
        pause = slot.pause(self._restarts)
        when = f" in {pause:g} s" if pause else ""
        log.error("%s; another takes its place%s", how, when)
        return pause

    @property
    def start_time(self) -> float:
        """Seconds that a worker has to begin."""
        return self._restarts.start

    @property
    def service(self) -> str:
        """MODULE:SERVICE."""
        return self._service


class _Slot:
    """The place of one worker: its sockets stay, processes come and go."""

    def __init__(self, workers: Supervisor, number: int, job: dict[str, Any]) -> None:
        self._workers = workers
        self.number = number
        self._job = json.dumps(job)
        self._sockets = [fd for place in job["places"] for fd in place["sockets"]]
        self._loop = asyncio.get_running_loop()
        self._control: socket.socket | None = None
        self._input = bytearray()
        self._timers: list[asyncio.TimerHandle] = []
        self._began = 0.0
        self._quick = 0
        self._drain = 0.0
        self.process: subprocess.Popen[bytes] | None = None
        self.addresses: list[str] = []
        """Where the process listens; empty while it does not."""
        self.failed = ""
        """What the process said about its failure."""
        self.name = f"worker {number}"
        self.unfinished = False
        """Whether it was killed before it listened, which cost nobody anything."""

    def start(self) -> None:
        """Starts a process."""
        if self._workers.ending:
            return
        ours, theirs = socket.socketpair()
        fd = theirs.fileno()
        command = [sys.executable, "-m", "aqueduct.service.worker", self._workers.service]
        try:
            self.process = subprocess.Popen(
                [*command, str(self.number), str(fd)],
                stdin=subprocess.DEVNULL,
                pass_fds=(fd, *self._sockets),
            )
        except OSError as error:
            ours.close()
            self._ended(f"cannot be started: {error}", well=False)
            return
        finally:
            theirs.close()
        self.name = f"worker {self.number} (process {self.process.pid})"
        if self._workers.admin is not None:
            self._workers.admin.workers.began(self.number, self.process.pid)
        self._began = self._loop.time()
        self.failed, self._input = "", bytearray()
        self._control = ours
        ours.settimeout(FORCE_SECONDS)
        self._write(self._job)
        ours.setblocking(False)
        self._loop.add_reader(ours.fileno(), self._readable)
        self._after(self._workers.start_time, self._too_slow)

    def end(self) -> None:
        """Drains."""
        self._forget_timers()
        if self.process is None:
            return
        if self.addresses:
            # Time is left to see the worker's end, which is to come before that of this process.
            seconds = max(self._drain, LEAST)
            last = min(_LAST, seconds / 4)
            self._write(json.dumps({"do": "drain", "seconds": seconds - last}))
            self._after(seconds - last / 2, self._stuck)
        else:
            self.unfinished = True
            self.kill()

    def force(self) -> None:
        """Ends now; a worker that does not is killed."""
        self._write(json.dumps({"do": "force", "seconds": FORCE_SECONDS}))
        self._after(FORCE_SECONDS + _LAST, self.kill)

    def look(self) -> None:
        """Has the process tell its state."""
        if self.addresses:
            self._write(json.dumps({"do": "look"}))

    def tell_report(self) -> bool:
        """Has the process tell its report, if it listens; whether it does."""
        if self.addresses:
            self._write(json.dumps({"do": "report"}))
        return bool(self.addresses)

    def kill(self) -> None:
        """Kills the process."""
        self._forget_timers()
        if self.process is not None and self.process.poll() is None:
            self.process.kill()

    def pause(self, restarts: Restarts) -> float:
        """Seconds to wait before the next process."""
        if self._loop.time() - self._began >= restarts.settled:
            self._quick = 0
            return 0.0
        self._quick += 1
        return restarts.wait(self._quick)

    def reap(self) -> None:
        """Looks whether the process has ended."""
        if self.process is None or (status := self.process.poll()) is None:
            return
        self._readable()  # its last words
        self._forget_timers()
        if self._control is not None:
            self._loop.remove_reader(self._control.fileno())
            self._control.close()
            self._control = None
        self.process, self.addresses = None, []
        if self._workers.admin is not None:
            self._workers.admin.ended(self.number, well=status == 0)
        self._ended(_how(status), well=status == 0)

    # Within

    def _ended(self, how: str, *, well: bool) -> None:
        pause = self._workers.died(self, how, well=well)
        if pause is not None:
            self._after(pause, self.start)

    def _too_slow(self) -> None:
        if not self.addresses:
            seconds = self._workers.start_time
            self.failed = f"{self.name} did not listen within {seconds:g} s (--start-timeout)"
            self.kill()

    def _stuck(self) -> None:
        log.error("%s does not end and is killed", self.name)
        self.kill()

    def _after(self, seconds: float, call: Callable[[], None]) -> None:
        self._timers.append(self._loop.call_later(seconds, call))

    def _forget_timers(self) -> None:
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()

    def _write(self, line: str) -> None:
        if self._control is not None:
            with suppress(OSError):  # it has died, as SIGCHLD will say
                self._control.sendall(line.encode() + b"\n")

    def _readable(self) -> None:
        while self._control is not None:
            try:
                data = self._control.recv(1 << 16)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._loop.remove_reader(self._control.fileno())
                return
            self._input += data
            if b"\n" in data:
                *lines, self._input = self._input.split(b"\n")
                for line in lines:
                    self._message(json.loads(line))

    def _message(self, message: dict[str, Any]) -> None:
        if "failed" in message:
            self.failed = message["failed"]
        elif "state" in message:
            with suppress(OSError):  # nobody reads standard error
                tell_state(message["state"])
        elif "report" in message:
            if self._workers.admin is not None:
                self._workers.admin.came(self.number, message["report"])
        elif "ready" in message:
            self._forget_timers()
            self.addresses = message["ready"]["addresses"]
            self._drain = message["ready"]["drain"]
            if self._workers.admin is not None:
                self._workers.admin.configure(Admin(**message["ready"]["admin"]))
            if self._workers.ending:
                self.end()
            else:
                self._workers.ready(self, self._drain, message["ready"]["delay"])


def _private_directory() -> str:
    """A new directory for sockets, which other users cannot enter. Raises ConfigError."""
    try:
        found = tempfile.mkdtemp(prefix="aqueduct-")
    except OSError as error:
        raise ConfigError(
            "resume with several workers needs a directory for their sockets, and none can be "
            f"made: {error}; set TMPDIR"
        ) from error
    if len(os.fsencode(found)) > _DIRECTORY_BYTES:
        os.rmdir(found)
        raise ConfigError(
            f"resume with several workers needs a directory for their sockets, and {found!r} is "
            f"longer than {_DIRECTORY_BYTES} bytes: set TMPDIR to a shorter one, such as /tmp"
        )
    return found


def _how(status: int) -> str:
    """How a process ended."""
    if status >= 0:
        return f"ended with status {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"was killed by signal {-status}"
