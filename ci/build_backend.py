"""setuptools, which is told what the training of ``AQUEDUCT_PGO=1`` imports (see setup.py).

The hooks of PEP 517: a build in an environment of its own has what these name, and nothing else.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403  - the hooks that stay as they are

__all__ = [*build_meta.__all__]

Settings = Mapping[str, Any] | None


def get_requires_for_build_wheel(config_settings: Settings = None) -> list[str]:
    """What a wheel is built with."""
    return [*build_meta.get_requires_for_build_wheel(config_settings), *_training()]


def get_requires_for_build_editable(config_settings: Settings = None) -> list[str]:
    """What an editable installation is built with."""
    return [*build_meta.get_requires_for_build_editable(config_settings), *_training()]


def _training() -> list[str]:
    if os.environ.get("AQUEDUCT_PGO") != "1":
        return []
    project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
    return list(project["dependencies"])
