"""The compiled modules. Wheels for Linux have them in one file (``AQUEDUCT_PGO=1``, see setup.py).

What a call runs of thirty modules then shares a few pages of memory, instead of some in each of
thirty files: in a process that has done other work meanwhile, a call takes a twentieth less.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import EXTENSION_SUFFIXES, ExtensionFileLoader, ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType

__all__ = ["Together"]

_FOLDER = Path(__file__).parent


class Together:
    """Finds the modules of the one file, unless they have a file of their own."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """As of any finder of the import system. Each compiled module has a stub."""
        above, _, below = name.partition(f"{__name__}.")
        if above or not below or not (_FOLDER / f"{below.replace('.', '/')}.pyi").exists():
            return None
        return spec_from_file_location(name, self.path, loader=ExtensionFileLoader(name, self.path))


for _path in (_FOLDER / f"_all{suffix}" for suffix in EXTENSION_SUFFIXES):
    if _path.exists():
        # Behind the other finders, which find modules that have a file of their own.
        sys.meta_path.append(Together(_path))
        break
