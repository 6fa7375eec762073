"""``Renewed``: what a server shows, made again when the files of its certificate change.

A timer of the event loop has a thread look at the files of all servers of this loop, one after the
other. Files that have changed are looked at a second time. A connection keeps the certificate of
its handshake; the next one gets the new certificate.
"""

from __future__ import annotations

import asyncio
import datetime
import functools
import hashlib
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Generic, TypeVar
from weakref import WeakKeyDictionary, ref

from cryptography import x509

from aqueduct.carriers.certificates import ServerTls, certificates_of, fingerprint_of
from aqueduct.errors import ConfigError
from aqueduct.escaping import logger_of
from aqueduct.reloading import Reload, WatchedFiles

__all__ = ["Renewed"]

log = logger_of(__name__)

T = TypeVar("T")

_FILES: Final = ("certificate", "key", "client_ca")
_SOON: Final = 2.0
"""Seconds after which files that have changed are looked at again, at most."""
_NOBODY_WAITS: Final = 1.0
"""Seconds: of a wait that there is not."""


class Renewed(Generic[T]):
    """What ``make`` makes of a certificate, its key and the CAs of clients.

    It is made anew when their files change, once two looks in a row have seen the same files: a
    program may be writing them. Files that are of no use change nothing: the log says why, and the
    next look tries again. A certificate that is not valid now is of no use. What was given as
    bytes stays, and so does all of it if one of the files is a pipe, which can be read once.
    """

    def __init__(self, tls: ServerTls, make: Callable[[ServerTls], T]) -> None:
        """Raises what ``make`` raises, ConfigError for files that are of no use.

        Warns of a certificate that is not valid now: there is no other one.
        """
        given = {name: getattr(tls, name) for name in _FILES}
        paths: dict[str, Any] = {
            name: Path(os.path.abspath(each))  # a link stays one: it may lead elsewhere later
            for name, each in given.items()
            if each is not None and not isinstance(each, bytes)
        }
        self.tls = replace(tls, **paths)
        """Its files, wherever the process goes."""
        self._make = make
        self._files = WatchedFiles(list(paths.values()))
        self._digests: list[bytes] = []
        self._watcher: _Watcher | None = None
        self.complaint = ""
        """Why the last look had no use for the files; empty: it had."""
        try:
            self._files.changed()
        except ValueError:
            self._files = WatchedFiles([])
            self._files.changed()
        else:
            self._digests = self._read()
        self.current = make(tls)
        """For the next connection."""
        self._files.keep()
        shown = tls.certificate
        if isinstance(shown, bytes) or Path(shown).is_file():  # a pipe is read once
            problem = _untimely(certificates_of(shown, "certificate")[0])
            if problem:
                name = "" if isinstance(shown, bytes) else f" {os.fspath(shown)!r}"
                _warn(f"the certificate{name} {problem}: clients will refuse it")

    def watch(self, seconds: float) -> None:
        """Has a look at the files every ``seconds``, by the event loop that runs; 0: none."""
        if seconds and self._files.paths:
            self._watcher = _Watcher.of(asyncio.get_running_loop())
            self._watcher.add(self, seconds)

    def close(self) -> None:
        """Ends the looks."""
        if self._watcher is not None:
            self._watcher.remove(self)
            self._watcher = None

    def look(self) -> str | None:
        """Makes it anew if the files have changed. Returns what the log is to say; may wait.

        None: they have changed since the last look, so a program may be writing them, and the next
        look decides. Raises ConfigError, ValueError and OSError for files that are of no use.
        """
        if not self._files.changed():
            return ""
        if not self._files.settled:
            return None
        digests = self._read()
        if digests == self._digests:
            self._files.keep()
            return ""
        made = self._make(self.tls)
        shown = certificates_of(self.tls.certificate, "certificate")[0]
        problem = _untimely(shown)
        if problem:
            raise ConfigError(f"{self.names}: the certificate {problem}")
        self.current = made
        self._digests = digests
        self._files.keep()
        return (
            f"{self.names}: read again; new connections get the certificate "
            f"{fingerprint_of(shown)}, valid until {shown.not_valid_after_utc.isoformat()}"
        )

    @property
    def names(self) -> str:
        """Of the files."""
        return ", ".join(map(str, self._files.paths))

    def _read(self) -> list[bytes]:
        """Tells the contents of the files from others."""
        found = []
        for path in self._files.paths:
            try:
                found.append(hashlib.sha256(path.read_bytes()).digest())
            except OSError:  # ``make`` says why
                found.append(b"")
        return found


def _untimely(certificate: x509.Certificate) -> str:
    """Why clients refuse a certificate at this time; empty: they do not."""
    now = datetime.datetime.now(datetime.UTC)
    if certificate.not_valid_after_utc < now:
        return f"has expired, on {certificate.not_valid_after_utc:%Y-%m-%d %H:%M} UTC"
    if certificate.not_valid_before_utc > now:
        return f"is not valid before {certificate.not_valid_before_utc:%Y-%m-%d %H:%M} UTC"
    return ""


@functools.cache  # once for all addresses of a service
def _warn(text: str) -> None:
    log.warning("%s", text)


class _Watcher:
    """Looks at the files of all servers on one event loop."""

    def __init__(self) -> None:
        self._watched: dict[Renewed[Any], float] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._reload = Reload(self._look, name="aqueduct-certificates", timeout=_NOBODY_WAITS)

    @staticmethod
    def of(loop: asyncio.AbstractEventLoop) -> _Watcher:
        """The one of this loop, which is the running one."""
        known = _watchers.get(loop)
        found = None if known is None else known()
        if found is None:
            found = _Watcher()
            _watchers[loop] = ref(found)
        return found

    def add(self, renewed: Renewed[Any], seconds: float) -> None:
        self._watched[renewed] = seconds
        self._wait()

    def remove(self, renewed: Renewed[Any]) -> None:
        self._watched.pop(renewed, None)
        if not self._watched and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _wait(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        seconds = min(self._watched.values())
        self._timer = asyncio.get_running_loop().call_later(seconds, self._due)

    def _due(self) -> None:
        self._wait()
        try:
            self._reload.begin()
        except RuntimeError as error:
            log.error("the files of certificates are not looked at: %s", error)

    # In a thread

    def _look(self) -> None:
        said: set[str] = set()
        """Servers of several addresses have the same files, and the log has each text once."""
        changing = [each for each in tuple(self._watched) if not self._look_at(each, said)]
        if changing:
            time.sleep(min([_SOON, *self._watched.values()]))
            for renewed in changing:
                if renewed in self._watched:
                    self._look_at(renewed, said)

    def _look_at(self, renewed: Renewed[Any], said: set[str]) -> bool:
        """Looks at one server's files. False: they have just changed, and the next look decides."""
        before, renewed.complaint = renewed.complaint, ""
        try:
            text = renewed.look()
        except Exception as error:  # noqa: BLE001  the others are to be looked at
            renewed.complaint = str(error) or type(error).__name__
            text = f"{renewed.complaint}; what was read before stays in use"
            if renewed.complaint != before and text not in said:
                log.error("%s", text)
        else:
            if text is None:
                renewed.complaint = before
                return False
            if before and not text:
                text = f"{renewed.names}: as they were read before"
            if text and text not in said:
                log.info("%s", text)
        said.add(text)
        return True


_watchers: WeakKeyDictionary[asyncio.AbstractEventLoop, ref[_Watcher]] = WeakKeyDictionary()
