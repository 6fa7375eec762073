"""``TokenFile``: who may call, by tokens in a file that holds their hashes alone.

::

    # tokens.txt, made by: aqueduct token etl --handlers score,enrich --file tokens.txt
    etl        sha256:1f0c...  handlers=score,enrich  expires=2027-01-31
    dashboard  sha256:9a41...  tables=trips
    admin      sha256:77be...

    service = aqueduct.Service("models", authorize=aqueduct.TokenFile("tokens.txt"))

A line is a name, a hash and what limits the token; ``#`` begins a comment.

| limit | the token is |
|---|---|
| ``handlers=a,b`` | for calls of these handlers |
| ``tables=a,b`` | for reading these tables |
| ``sinks=a,b`` | for writing to these sinks |
| ``expires=2027-01-31`` | refused from then on; a date, or a date with time, of UTC by default |

A token with none of the first three may call everything; with one of them nothing else. Each may
ask what the service offers (``aqueduct describe``). Several lines may have the same name. The
handler finds the name in ``call.state.caller``.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
import stat
import time
from collections.abc import Awaitable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from aqueduct.arguments import KINDS, Duration, Size
from aqueduct.errors import ConfigError, Refused, WrongType
from aqueduct.escaping import escape, logger_of, near_miss, shown
from aqueduct.reloading import Reload, WatchedFiles
from aqueduct.rpc.describe import DESCRIBE
from aqueduct.service.context import Call

__all__ = ["TokenEntry", "TokenFile", "append_line", "make_token", "token_line"]

log = logger_of(__name__)

_PREFIX: Final = "aq_"
"""Of tokens that are made here: tools that look for leaked secrets go by it."""
_LIMIT: Final = "16m"
"""Bytes of a file, unless code says another: more than a hundred thousand lines."""
_HASH: Final = re.compile(r"sha256:([0-9a-f]{64})", re.IGNORECASE)
_NAME: Final = re.compile(r"[^\s#=,]+")
_LISTS: Final = ("handlers", "tables", "sinks")
_LIMITS: Final = (*_LISTS, "expires")


@dataclass(frozen=True, slots=True)
class TokenEntry:
    """One line of a file of tokens."""

    name: str
    """Who has the token."""
    digest: bytes
    """SHA-256 of the token."""
    handlers: frozenset[str] | None = None
    """The handlers that it may call. None, like ``tables`` and ``sinks``: all."""
    tables: frozenset[str] | None = None
    sinks: frozenset[str] | None = None
    expires: datetime | None = None
    """From when on it is refused; None: never."""

    def check(self, handler: str) -> str:
        """What forbids a call of ``handler``, for the client; "" if nothing does."""
        if self.expires is not None and datetime.now(UTC) >= self.expires:
            return f"the token of {self.name!r} has expired ({self.expires.isoformat()})"
        kind, name = _kind_of(handler)
        allowed: frozenset[str] | None = getattr(self, kind) if kind else None
        if allowed is None or name in allowed:
            return ""
        what = kind.removesuffix("s")
        given = ", ".join(
            f"{each} {', '.join(sorted(names))}"
            for each in _LISTS
            if (names := getattr(self, each))
        )
        return f"the token of {self.name!r} is not for {what} {name!r}; it is for {given}"


class TokenFile:
    """An ``authorize`` that goes by tokens in a file, and reads the file again when it changes.

    A broken file raises ConfigError here. Later the service goes on by what it read last, and logs
    an error. So a file that is being written does no harm; it is whole once its last line ends.
    An empty file counts as broken. A comment alone refuses everyone.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        recheck: Duration = 1.0,
        timeout: Duration = 10.0,
        limit: Size = _LIMIT,
    ) -> None:
        """Reads the file for the first time.

        - ``path``: of the file; ``aqueduct token`` makes its lines.
        - ``recheck``: a call looks at the file if nobody has for so many seconds.
        - ``timeout``: seconds that a call waits for this look; then it is refused.
        - ``limit``: bytes of the file; a larger one is broken.

        Raises ConfigError for a file that cannot be read, or has a line that is wrong.
        """
        if not isinstance(path, str | os.PathLike) or not os.fspath(path):
            raise WrongType(f"TokenFile: path is {shown(path)}; it must be the path of a file")
        self.path = Path(path).absolute()
        self._recheck: float = KINDS["duration or zero"].value(recheck, "TokenFile: recheck")
        self._limit: int = KINDS["size"].value(limit, "TokenFile: limit")
        self._reload = Reload(
            self._look,
            name=f"the look at {self.path}",
            timeout=KINDS["duration"].value(timeout, "TokenFile: timeout"),
        )
        self._salt = secrets.token_bytes(32)
        self._entries: Mapping[bytes, TokenEntry] = {}
        self._files = WatchedFiles([self.path])
        self._mode = 0
        """Of the file, as of the last warning about it."""
        self._complaint = ""
        self._due = 0.0
        try:
            self._read()
        except (OSError, ValueError) as error:
            raise ConfigError(f"TokenFile: {error}") from error

    @property
    def entries(self) -> tuple[TokenEntry, ...]:
        """What was read last."""
        return tuple(self._entries.values())

    def __call__(self, call: Call) -> Awaitable[None] | None:
        """Raises Refused for a call whose token is not in the file, or is not for it."""
        if time.monotonic() >= self._due:
            return self._look_and_decide(call)
        self._decide(call)
        return None

    def __repr__(self) -> str:
        return f"<TokenFile {str(self.path)!r} with {len(self._entries)} tokens>"

    async def _look_and_decide(self, call: Call) -> None:
        await self._reload.run()
        self._decide(call)

    def _decide(self, call: Call) -> None:
        why, entry = "", None
        token = call.token
        if token is None:
            why = "the service asks for a token, and the call has none; give token=..."
        else:
            digest = hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()
            entry = self._entries.get(self._place(digest))
            if entry is None or not hmac.compare_digest(entry.digest, digest):
                why = "the service does not know the token of the call"
            else:
                why = entry.check(call.handler)
        if why or entry is None:
            raise Refused(why, peer=call.peer, handler=call.handler)
        call.state.caller = entry.name

    def _place(self, digest: bytes) -> bytes:
        """The key of a hash. No client knows it, so how long a search takes tells it nothing."""
        return hmac.digest(self._salt, digest, "sha256")

    # In a thread

    def _look(self) -> None:
        try:
            if self._read():
                log.info("%s: read again: %d tokens", self.path, len(self._entries))
            elif self._complaint:
                log.info("%s: as it was read before", self.path)
            self._complaint = ""
        except Exception as error:  # noqa: BLE001  it must not leave callers without an answer
            complaint = f"{type(error).__name__}: {error}"
            if complaint != self._complaint:  # else the log would have it at each look
                self._complaint = complaint
                log.error("%s; the %d tokens read before still hold", error, len(self._entries))
        self._due = time.monotonic() + self._recheck

    def _read(self) -> bool:
        """Reads the file if it has changed. Raises OSError and ValueError, which name it."""
        if not self._files.changed():
            return False
        with open(self.path, "rb") as file:
            content = file.read(self._limit + 1)
        if len(content) > self._limit:
            raise ValueError(f"{self.path} has more than {self._limit} bytes (limit)")
        entries = {
            self._place(entry.digest): entry for entry in _parse(content, where=str(self.path))
        }
        for mode in self._files.modes:
            self._warn(mode)
        changed = entries != self._entries
        self._entries = entries
        self._files.keep()
        return changed

    def _warn(self, mode: int) -> None:
        if mode & (stat.S_IWGRP | stat.S_IWOTH) and mode != self._mode:
            log.warning(
                "%s may be written by others than its owner, and they could let in anyone; "
                "chmod 600 ends that",
                self.path,
            )
        self._mode = mode


def make_token() -> str:
    """A new token, of 256 random bits."""
    return _PREFIX + secrets.token_urlsafe(32)


def token_line(
    name: str,
    token: str | bytes,
    *,
    handlers: Iterable[str] = (),
    tables: Iterable[str] = (),
    sinks: Iterable[str] = (),
    expires: str = "",
) -> str:
    """The line of a token for the file, without its end. Raises ConfigError for what is wrong."""
    if isinstance(token, str):
        token = token.encode("utf-8", "surrogateescape")
    words = [name, f"sha256:{hashlib.sha256(token).hexdigest()}"]
    for limit, names in zip(_LISTS, (handlers, tables, sinks), strict=True):
        if joined := ",".join(names):
            words.append(f"{limit}={joined}")
    if expires:
        words.append(f"expires={expires}")
    line = " ".join(words)
    if line.split() != words or "#" in line:
        raise ConfigError(f"{shown(line)}: names have neither white space nor '#'")
    try:
        _entry(line)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return line


def append_line(path: str | os.PathLike[str], line: str, *, limit: Size = _LIMIT) -> None:
    """Puts a line at the end of a file of tokens. A new file is for its owner alone.

    Raises ConfigError, and changes nothing, if it is broken, no regular file, or would have more
    than ``limit`` bytes.
    """
    most: int = KINDS["size"].value(limit, "append_line: limit")
    added = f"{line}\n".encode()
    # A pipe or a terminal is not waited for.
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
    with open(os.open(path, flags, 0o600), "r+b", buffering=0) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ConfigError(f"{escape(path)} is no regular file, as one of tokens must be")
        with open(file.fileno(), "rb", closefd=False) as reader:
            content = reader.read(most + 1)
        if len(content) + len(added) > most:
            raise ConfigError(f"{escape(path)} would have more than {most} bytes with this token")
        try:
            if content:
                tuple(_parse(content, where=os.fspath(path)))
        except ValueError as error:
            raise ConfigError(str(error)) from error
        file.write(added)  # at once: a reader sees the whole line or nothing of it


def _parse(content: bytes, *, where: str) -> Iterator[TokenEntry]:
    """The entries of a file. Raises ValueError that names the line."""
    if not content.endswith(b"\n"):
        lines = content.count(b"\n") + 1
        raise ValueError(
            f"{where}, line {lines} has no end of line, so more of it may be still to come; "
            "end the last line, or write a comment if there is no token"
        )
    lines_of: dict[bytes, int] = {}
    for number, line in enumerate(content.split(b"\n"), 1):
        try:
            entry = _entry(line.decode().split("#", 1)[0])
        except ValueError as error:
            raise ValueError(f"{where}, line {number}: {_reason(error)}") from error
        if entry is None:
            continue
        first = lines_of.setdefault(entry.digest, number)
        if first != number:
            raise ValueError(f"{where}, line {number}: the hash is that of line {first}")
        yield entry


def _reason(error: ValueError) -> str:
    return "it is not UTF-8" if isinstance(error, UnicodeDecodeError) else str(error)


def _entry(line: str) -> TokenEntry | None:
    """What a line says; None if it is blank. Raises ValueError."""
    words = line.split()
    if not words:
        return None
    name, *rest = words
    found = _HASH.fullmatch(rest[0]) if rest else None
    if found is None:
        # Any word of such a line may be a token, the first too, so none is shown.
        raise ValueError(
            "the line has no hash behind its name; a line is: NAME sha256:HASH [handlers=A,B], "
            "and a hash has 64 hexadecimal digits"
        )
    if not _NAME.fullmatch(name) or not name.isprintable():
        raise ValueError(f"{shown(name)} is no name; a line is: NAME sha256:HASH [handlers=A,B]")
    limits: dict[str, Any] = {}
    for word in rest[1:]:
        key, equals, value = word.partition("=")
        if key not in _LIMITS:
            near = near_miss(key, _LIMITS)
            hint = f"did you mean {near}=?" if near else f"known are {', '.join(_LIMITS)}"
            # A token may stand here, and may end with the "=" of Base64.
            what = shown(f"{key}=") if value.strip("=") else "a word"
            raise ValueError(f"{what} of {name!r} is no limit of a token; {hint}")
        if not equals or not value:
            raise ValueError(f"{key}= of {name!r} has nothing behind it")
        if key in limits:
            raise ValueError(f"{name!r} has {key}= twice")
        limits[key] = _time(value) if key == "expires" else _names(value, word)
    if any(key in limits for key in _LISTS):
        limits = {key: limits.get(key, frozenset()) for key in _LISTS} | limits
    return TokenEntry(name, bytes.fromhex(found[1]), **limits)


def _names(value: str, word: str) -> frozenset[str]:
    names = value.split(",")
    if not all(names):
        raise ValueError(f"{shown(word)}: a name between commas is empty")
    return frozenset(names)


def _time(value: str) -> datetime:
    try:
        found = datetime.fromisoformat(value)
    except ValueError:
        raise ValueError(
            f"expires={value} is no time; write it like 2027-01-31 or 2027-01-31T18:00+01:00"
        ) from None
    return found if found.tzinfo is not None else found.replace(tzinfo=UTC)


def _kind_of(handler: str) -> tuple[str, str]:
    """Which list a handler's name belongs to, and the name there."""
    if handler == DESCRIBE:
        return "", handler
    parts = handler.split(".", 3)
    if len(parts) == 4 and parts[0] == "aqueduct" and f"{parts[1]}s" in _LISTS:
        return f"{parts[1]}s", parts[3]
    return "handlers", handler
