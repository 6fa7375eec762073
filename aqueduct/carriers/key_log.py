"""Keys of TLS connections for Wireshark: the file that ``SSLKEYLOGFILE`` names.

Python's ``ssl``, curl and browsers know the variable. It is for debugging alone: who has the file
can read all that passed.
"""

from __future__ import annotations

import os
from typing import Final

from aqueduct.errors import ConfigError
from aqueduct.escaping import logger_of

__all__ = ["KEY_LOG", "key_log_file", "write_key"]

KEY_LOG: Final = "SSLKEYLOGFILE"
log = logger_of("aqueduct")
_told: set[str] = set()


def key_log_file() -> str | None:
    """The file for the keys; None: they are not written, as ever without the variable.

    It is made for its owner alone, and a warning names it once. Raises ConfigError.
    """
    path = os.environ.get(KEY_LOG)
    if not path:
        return None
    try:
        os.close(_opened(path))
    except OSError as error:
        raise ConfigError(
            f"{KEY_LOG} names {path!r}, which cannot be written ({error.strerror}); name another "
            "file, or unset the variable"
        ) from error
    if path not in _told:
        _told.add(path)
        log.warning(
            "%s: the keys of TLS connections go to %r; who reads it reads all that passes",
            KEY_LOG,
            path,
        )
    return path


def write_key(path: str, line: bytes) -> None:
    """Adds one line, in one write: other processes may add theirs."""
    file = _opened(path)
    try:
        os.write(file, line + b"\n")
    finally:
        os.close(file)


def _opened(path: str) -> int:
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
