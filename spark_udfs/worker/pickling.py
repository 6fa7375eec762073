"""How a function of this package travels from the driver to the executors.

What Spark sends is a pickle, and unpickling it imports the package. Where that fails, the user is
to read why. So the outermost thing in the pickle is a small function by value, as source text: it
needs nothing but Python, imports the package, and says what is missing. The rest is bytes inside.

A version differs from another in its first two numbers, or does not matter: ``0.1.0`` on the driver
and ``0.1.4`` on an executor work together, with a line in the worker's log; ``0.2.0`` raises
ConfigError. The service's version does not matter: that of the Arrow call convention does.
"""

from __future__ import annotations

import functools
import inspect
import pickle
import sys
from collections.abc import Mapping
from dataclasses import fields
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

from aqueduct.errors import ConfigError
from aqueduct.escaping import logger_of

__all__ = ["PickledFunction", "check_picklable", "library_version", "open_parcel", "unpacked"]

_DISTRIBUTION: Final = "aqueduct-arrow"
_log = logger_of("spark_udfs")


class PickledFunction:
    """A dataclass that travels so: what is given to Spark as a function."""

    def __reduce__(self) -> tuple[Any, tuple[str, bytes]]:
        parts = [getattr(self, entry.name) for entry in fields(self)]  # type: ignore[arg-type]
        return _Opener(), (library_version(), _dumps((type(self), parts)))


def open_parcel(version: str, data: bytes):  # type: ignore[no-untyped-def]
    """What the pickle runs first, from its source: it must need nothing but Python."""
    import platform
    import sys

    try:
        from spark_udfs.worker.pickling import unpacked
    except ImportError as error:
        raise ModuleNotFoundError(
            f"the Python worker of this executor cannot import aqueduct-arrow ({error}). "
            f"It is {sys.executable}, Python {platform.python_version()}, on {platform.node()}. "
            f"Install there what the driver has: pip install aqueduct-arrow=={version}; or ship "
            "an environment that has it (spark.archives with conda-pack or venv-pack), and let "
            "PYSPARK_PYTHON name its Python"
        ) from error
    return unpacked(version, data)


def unpacked(driver: str, data: bytes) -> Any:
    """What a parcel holds. ``driver`` is the driver's version. Raises ConfigError."""
    own = library_version()
    if "" not in (driver, own) and driver.split(".")[:2] != own.split(".")[:2]:
        raise ConfigError(
            f"the driver has aqueduct-arrow {driver}, and this executor's Python "
            f"({sys.executable}) has {own}; the first two numbers must be the same: "
            f"pip install {_DISTRIBUTION}=={driver} there"
        )
    if driver != own:
        _log.warning("aqueduct-arrow is %s on the driver and %s here", driver, own)
    rebuild, parts = pickle.loads(data)
    return rebuild(*parts)


@functools.cache
def library_version() -> str:
    """The version of this library; "" if it runs from files that were never installed."""
    try:
        return version(_DISTRIBUTION)
    except PackageNotFoundError:
        return ""


def check_picklable(arguments: Mapping[str, Any]) -> None:
    """Raises ConfigError that names the argument which cannot be sent to executors.

    Without Spark in this process nothing is sent anywhere, and nothing is checked.
    """
    if "pyspark" not in sys.modules:
        return
    for name, value in arguments.items():
        try:
            _dumps(value)
        except Exception as error:
            raise ConfigError(
                f"{name} cannot be sent to the executors: {type(error).__name__}: {error}. "
                "It is pickled, and must hold no lock, file, connection or Spark session: hold "
                "plain values, and open what you need inside the function"
            ) from error


class _Opener:
    """``open_parcel``, pickled as its source."""

    def __call__(self, version: str, data: bytes) -> Any:
        return open_parcel(version, data)

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return eval, (_EXPRESSION,)


# A worker that has unpickled such a function before has what it needs.
_EXPRESSION: Final = (
    "(lambda modules, names: modules['spark_udfs.worker.pickling'].unpacked "
    "if 'spark_udfs.worker.pickling' in modules "
    f"else (exec({inspect.getsource(open_parcel)!r}, names), names['open_parcel'])[1])"
    "(__import__('sys').modules, {})"
)


def _dumps(value: Any) -> bytes:
    """A pickle as Spark makes it: functions of the user's program go by value."""
    if "pyspark" in sys.modules:
        from pyspark import cloudpickle

        found: bytes = cloudpickle.dumps(value)  # type: ignore[no-untyped-call]
        return found
    return pickle.dumps(value)
