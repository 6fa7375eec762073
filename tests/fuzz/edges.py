"""Which edges of the compiled modules were ever taken, counted where the compiler counts them.

Clang gives each edge of a module a byte (``-fsanitize=fuzzer-no-link``). libFuzzer sets them to
zero before an input and looks at them after it, with those of Python code, and reports one sum;
here they are looked at by themselves.
"""

from __future__ import annotations

import ctypes
import struct
from pathlib import Path
from typing import Final

__all__ = ["Edges"]

SECTION: Final = b"__sancov_cntrs"


class Edges:
    """The counters of every shared object under a folder that this process has loaded."""

    def __init__(self, folder: Path) -> None:
        self._arrays: dict[str, ctypes.Array[ctypes.c_char]] = {}
        self._seen: dict[str, int] = {}
        for path, base in loaded(folder).items():
            place = section(path.read_bytes(), SECTION)
            if place is not None and place[1]:
                name = path.name.partition(".")[0]
                address, size = place
                self._arrays[name] = (ctypes.c_char * size).from_address(base + address)
                self._seen[name] = 0

    @property
    def total(self) -> int:
        """Edges that the compiler counts in all modules; 0: none was built for this."""
        return sum(map(len, self._arrays.values()))

    def note(self) -> None:
        """Adds what the last input took."""
        for name, array in self._arrays.items():
            self._seen[name] |= int.from_bytes(array.raw, "little")

    def seen(self) -> dict[str, tuple[int, int]]:
        """For each module: edges taken so far, and all of them."""
        counts = {}
        for name, array in self._arrays.items():
            taken = self._seen[name].to_bytes(len(array), "little")
            counts[name] = len(array) - taken.count(0), len(array)
        return counts


def loaded(folder: Path) -> dict[Path, int]:
    """Where this process has the shared objects under a folder."""
    found: dict[Path, int] = {}
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, _, offset, _, _, *name = line.split(maxsplit=5)
        path = Path(*name)
        if int(offset, 16) == 0 and path.suffix == ".so" and path.is_relative_to(folder):
            found.setdefault(path, int(span.partition("-")[0], 16))
    return found


def section(image: bytes, wanted: bytes) -> tuple[int, int] | None:
    """Address and size of a section of a 64-bit ELF file."""
    assert image[:6] == b"\x7fELF\x02\x01", "not a little-endian 64-bit ELF file"
    (start,) = struct.unpack_from("<Q", image, 0x28)
    size, count, names = struct.unpack_from("<HHH", image, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", image, start + size * n) for n in range(count)]
    texts = headers[names][4]
    for name, _, _, address, _, length in headers:
        at = texts + name
        if image[at : image.index(b"\0", at)] == wanted:
            return address, length
    return None
