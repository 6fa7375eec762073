"""A service by its name: ``MODULE:SERVICE``, as the command line has it."""

from __future__ import annotations

import importlib
import os
import sys
from typing import TYPE_CHECKING, Any

from aqueduct.arguments import debug_asked
from aqueduct.errors import ConfigError

if TYPE_CHECKING:
    from aqueduct.service.service import Service

__all__ = ["load_service"]


def load_service(name: str) -> Service:
    """Imports MODULE:SERVICE with the current directory first on the path, as ``python -m`` does.

    Raises ConfigError that says what is missing.
    """
    from aqueduct.service.service import Service

    module_name, separator, inner = name.partition(":")
    if not separator or not module_name or not inner:
        raise ConfigError(f"{name!r} must be MODULE:SERVICE, for example flights.app:service")
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        if debug_asked():
            raise
        text = f"cannot import {module_name!r} from {here}: {type(error).__name__}: {error}"
        raise ConfigError(text) from error
    found: Any = module
    for part in inner.split("."):
        if not hasattr(found, part):
            names = [key for key, value in vars(module).items() if isinstance(value, Service)]
            hint = f"; its services: {', '.join(names)}" if names else ", and no Service at all"
            raise ConfigError(f"{module_name!r} has no {inner!r}{hint}")
        found = getattr(found, part)
    if not isinstance(found, Service):
        raise ConfigError(f"{name} is not an aqueduct.Service, but of type {type(found).__name__}")
    return found
