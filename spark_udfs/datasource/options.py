"""What ``option(...)`` of the Data Source may be, and what it becomes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

from aqueduct.carriers.certificates import ClientTls
from aqueduct.config import DEFAULT, Config
from aqueduct.errors import ConfigError
from spark_udfs.calls.pool import Peer
from spark_udfs.calls.telemetry import Trace, carrier_of
from spark_udfs.functions.casts import Cast
from spark_udfs.options import (
    HEADERS,
    OPTIONS,
    SOURCE_SETTINGS,
    TLS,
    Option,
    convert,
    layered,
    missing_address,
    size,
    text,
    tls_of,
    whole,
)
from spark_udfs.tokens import fresh

__all__ = ["IGNORED", "KNOWN", "READING", "SHARED", "WRITING", "Settings", "settings_of"]

SHARED: Final[Mapping[str, Option]] = MappingProxyType(
    {
        name: OPTIONS[name]
        for name in (
            "address",
            "handler",
            "deadline",
            "retries",
            "backoff",
            "token",
            "token_file",
            "compression",
            "cast",
            *TLS,
        )
    }
    | {
        option.name: option
        for option in (
            Option("path", "the name of a table or a sink", text, setting=False),
            Option("trace", "what spark_udfs.traced() gives", carrier_of, setting=False),
        )
    }
)
"""Those of reading and of writing. ``path`` is what ``load`` and ``save`` are called with: another
way to say ``handler``."""
READING: Final[Mapping[str, Option]] = MappingProxyType(
    {
        option.name: option
        for option in (
            OPTIONS["columns"],
            Option("partitions", "a whole number above zero", whole(), setting=False),
            Option("max_rows", "a whole number above zero", whole(), setting=False),
            Option("max_bytes", "a size above zero, such as 32m", size, setting=False),
            Option("max_files", "a whole number above zero", whole(), setting=False),
        )
    }
)
"""Those of reading alone."""
WRITING: Final[Mapping[str, Option]] = MappingProxyType(
    {
        option.name: option
        for option in (
            SOURCE_SETTINGS["commit_deadline"],
            Option(
                "write_key",
                "the name of what is written, the same when it is done again",
                text,
                setting=False,  # all writes of the session would be one
            ),
        )
    }
)
"""Those of writing alone."""
KNOWN: Final[Mapping[str, Option]] = MappingProxyType({**SHARED, **READING, **WRITING})
IGNORED: Final = frozenset({"checkpointlocation", "queryname", "serialization.format"})
"""Spark's own, which it passes on."""
_OWN: Final = "option."
"""The prefix of an option among the properties of a catalog table."""
_NOTHING: Final = (
    "no options came. If this is a table of Spark's catalog: Spark keeps the options of "
    "CREATE TABLE and saveAsTable, but hands none of them to a source in Python. Give them where "
    "the table is used: SELECT ... FROM NAME WITH (address = '...', handler = '...'), INSERT INTO "
    "NAME WITH (...), spark.read.option(...).table(NAME) or df.writeTo(NAME).option(...).append(). "
    "Or make a view, which keeps them: CREATE TEMPORARY VIEW NAME USING aqueduct OPTIONS (...). "
    'Otherwise give .option("address", ...) and .option("handler", ...)'
)

_ADDRESS: Final = '.option("address", ...)'


@dataclass(frozen=True)
class Settings:
    """The options of one reading or writing. Picklable."""

    addresses: tuple[str, ...]
    handler: str
    """The name of the table, or of the sink."""
    deadline: float | None = None
    """Seconds for one call."""
    retries: int = 3
    """Calls made again in a row, where that cannot do harm."""
    backoff: float = 0.1
    """Seconds of the pause before the first of them; doubles from one to the next."""
    token: str | Callable[[], str] | None = field(default=None, repr=False)
    """A callable is asked for each call; see ``fresh_token``."""
    compression: str | None = None
    cast: Cast = False
    """Whether rows are cast: those written to what the sink takes, those read to ``.schema``."""
    headers: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    connection_headers: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    tls: ClientTls | None = field(default=None, repr=False)
    config: Config = DEFAULT
    more: Mapping[str, Any] = field(default_factory=dict)
    """The values of ``READING`` and ``WRITING`` that were given."""
    trace: Trace = field(default_factory=Trace, repr=False)
    """What the spans of the tasks belong to."""

    @property
    def driver_headers(self) -> dict[str, str]:
        """What goes with a call of the driver's: of its span, and what the user gave."""
        return {**self.trace.carrier, **dict(self.headers)}

    def fresh_token(self) -> str | None:
        """What the next call shows. Raises ConfigError for what a callable raises."""
        return fresh(self.token)

    def peer(self, attempt: int = 0) -> Peer:
        """Whom to ask at the ``attempt``-th time: the addresses take turns."""
        address = self.addresses[attempt % len(self.addresses)]
        return Peer(address, self.tls, self.connection_headers, self.config)


def settings_of(
    given: Mapping[str, str], defaults: Mapping[str, Any], trace: Trace | None = None
) -> Settings:
    """What was given, over ``defaults`` (from the settings of the session when it was registered).

    ``trace`` is that of the registration; the option ``trace`` names a later span. Raises
    ConfigError: unknown, missing, not what it must be, or none at all, as Spark has it for a table
    of its catalog.
    """
    mine = _given(given)
    if not mine:
        raise ConfigError(_NOTHING)
    known = (*KNOWN, *HEADERS.values())
    values = {name: value for name, value in defaults.items() if name in known}
    values = layered(values, convert(mine, KNOWN))
    path = values.pop("path", None)
    carrier = values.pop("trace", None)
    trace = Trace() if trace is None else trace
    values["trace"] = trace if carrier is None else trace.of(carrier)
    handler = values.pop("handler", path)
    if handler is None:
        raise ConfigError(
            'no handler: give .option("handler", NAME), the name of a table to read or of a sink '
            "to write to"
        )
    if path is not None and path != handler:
        raise ConfigError(f"handler is {handler!r}, and the path is {path!r}: give one of them")
    if "address" not in values:
        raise missing_address(_ADDRESS)
    tls = tls_of(values)
    more = {name: values.pop(name) for name in (*READING, *WRITING) if name in values}
    for name in ("headers", "connection_headers"):
        values[name] = tuple(values.get(name, {}).items())
    return Settings(addresses=values.pop("address"), handler=handler, tls=tls, more=more, **values)


def _given(given: Mapping[str, str]) -> dict[str, str]:
    """The user's options, without those that Spark adds.

    For a table of its catalog, Spark hands over the table's properties. These have each option
    twice, once after ``option.``. They also have Spark's own, such as ``provider`` and
    ``location``.
    """
    names = {name.lower(): name for name in given}
    mine = {name: value for name, value in given.items() if name.lower() not in IGNORED}
    twice = {_OWN + name for name in names}
    if not ("provider" in names and "owner" in names):
        return {name: value for name, value in mine.items() if name.lower() not in twice}
    found = {
        name[len(_OWN) :]: value for name, value in mine.items() if name.lower().startswith(_OWN)
    }
    if "path" in names and not {"path", "handler"} & {name.lower() for name in found}:
        found["path"] = given[names["path"]]
    return found
