"""How much memory this process may have: the machine's, or less if its control group says so."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Final

__all__ = ["memory_bytes", "quarter_of_memory"]

_FALLBACK: Final = 4 << 30  # bytes, where the system does not tell
_LEAST: Final = 64 << 20
_GROUPS: Final = Path("sys/fs/cgroup")


def memory_bytes(root: Path = Path("/")) -> int:
    """Bytes of memory that this process may have.

    That is the memory of the machine (``proc/meminfo`` below ``root``), or the limit of the
    process's control group or a group above it, whichever is least. Groups may be of version 1 or
    2.
    """
    limits = [_machine_bytes(root), *_group_limits(root)]
    return min((limit for limit in limits if limit), default=_FALLBACK)


@lru_cache(1)
def quarter_of_memory() -> int:
    """A quarter of what this process may have, at least 64 MiB. It is looked up once."""
    return max(memory_bytes() // 4, _LEAST)


def _machine_bytes(root: Path) -> int:
    for line in _lines(root / "proc/meminfo"):
        name, _, rest = line.partition(":")
        words = rest.split()
        if name == "MemTotal" and words and words[0].isdigit():
            return int(words[0]) << 10
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):  # not of every system
        return 0


def _group_limits(root: Path) -> Iterator[int]:
    """The limits that are set; those of a group hold for all that are in it."""
    for line in _lines(root / "proc/self/cgroup"):
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            where, name = root / _GROUPS, "memory.max"
        elif "memory" in controllers.split(","):
            where, name = root / _GROUPS / "memory", "memory.limit_in_bytes"
        else:
            continue
        group = where / path.strip("/")
        for folder in (group, *group.parents):
            for text in _lines(folder / name):
                if text.strip().isdigit():  # "max": there is none
                    yield int(text)
            if folder == where:
                break


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except (OSError, UnicodeDecodeError):  # no such file here
        return []
