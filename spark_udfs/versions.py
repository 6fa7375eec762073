"""What only younger versions of PySpark have, looked for when it is used."""

from __future__ import annotations

import importlib
from typing import Any

from aqueduct.errors import ConfigError

__all__ = ["younger"]


def younger(name: str, since: str, what: str) -> Any:
    """What PySpark has by this full name, from version ``since`` on.

    ``what`` is what needs it, for the error. Raises ConfigError that names both versions.
    """
    import pyspark

    module, _, attribute = name.rpartition(".")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ModuleNotFoundError, AttributeError) as error:
        if isinstance(error, ModuleNotFoundError) and error.name != module:
            raise  # PySpark has it, and lacks something of its own
        raise ConfigError(
            f"{what} needs PySpark {since} or newer, for {attribute}; here is PySpark "
            f"{pyspark.__version__}. Install the newer version on the driver and the executors"
        ) from None
