"""Options by name: the same names as arguments, as Data Source options and as Spark settings.

An explicit argument beats the setting ``spark.aqueduct.NAME`` of the active session, which beats
the default. Settings are read on the driver, when ``exchange`` is called or a Data Source is made:
what an executor does is fixed by then.

Settings and Data Source options are text (``"8"``, ``"32m"``, ``"30s"``, ``"true"``), and names may
be spelled as Spark's are: ``inFlight`` is ``in_flight``. Arguments take such text too.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from aqueduct.address import Address
from aqueduct.arguments import (
    ARGUMENTS,
    KINDS,
    Kind,
    above_zero,
    an_instance,
    choice,
    flag,
    size,
    text,
    whole,
    words,
)
from aqueduct.carriers.certificates import ClientTls
from aqueduct.config import COMPRESSIONS
from aqueduct.errors import ConfigError
from aqueduct.escaping import shown
from spark_udfs.functions.casts import casts
from spark_udfs.schemas import active_session
from spark_udfs.tokens import TokenPath

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = [
    "FUNCTIONS",
    "HEADERS",
    "OPTIONS",
    "PREFIX",
    "SOURCE_SETTINGS",
    "TLS",
    "Option",
    "argument",
    "choice",
    "convert",
    "defaults",
    "flag",
    "layered",
    "missing_address",
    "seconds",
    "size",
    "text",
    "tls_of",
    "unknown",
    "whole",
    "words",
]

PREFIX: Final = "spark.aqueduct."
"""What the names of settings begin with."""
HEADERS: Final = MappingProxyType(
    {"header.": "headers", "connection_header.": "connection_headers"}
)
"""Options ``header.NAME`` are one header each; together they are the argument ``headers``. Spark
gives a Data Source the names of its options in lower case."""
TLS: Final = (
    "ca",
    "certificate",
    "fingerprint",
    "key",
    "key_password",
    "server_name",
    "verify",
)
"""The options that make a ``ClientTls``."""

Reader = Callable[[Any], Any]
"""Takes an option's text, or its value in Python; raises ValueError for what is neither."""

_PEM: Final = "-----BEGIN "


@dataclass(frozen=True, slots=True)
class Option:
    """One option: what it must be, and how it is read."""

    name: str
    must: str
    """What its value must be, for errors: "a whole number above zero"."""
    read: Reader
    setting: bool = True
    """Whether ``spark.aqueduct.NAME`` gives it a default."""
    secret: bool = False
    """Its value is not for errors."""

    def value(self, given: Any, where: str = "") -> Any:
        """What was given, checked, and made of text if it was text.

        Raises ConfigError that begins with ``where``, by default the option's name.
        """
        return Kind(self.must, self.read, self.secret).value(given, where or self.name)


def seconds(given: Any) -> float | None:
    """Reads durations above zero: 2.5, ``"30s"``, ``"500ms"``, ``"2min"``; None is ``"none"``."""
    if isinstance(given, str) and given.strip().lower() == "none":
        return None
    return above_zero(given)


def _addresses(given: Any) -> tuple[str, ...]:
    found = words(given)
    for each in found:
        Address.parse(each)
    return found


def _pem(given: Any) -> Any:
    """PEM text is given by value, as bytes; any other text is a path, read on the executor."""
    if isinstance(given, str) and given.lstrip().startswith(_PEM):
        return given.encode()
    if not given:
        raise ValueError
    return given


def _token(given: Any) -> Any:
    if not isinstance(given, str) and not callable(given):
        raise ValueError
    return given


def _names(given: Any) -> tuple[str, ...]:
    if isinstance(given, str):
        raise TypeError  # its letters are names, too
    found = tuple(given)
    if not found or not all(isinstance(name, str) for name in found):
        raise ValueError
    return found


def _distinct(given: Any) -> tuple[str, ...]:
    found = _names(given)
    if len(set(found)) < len(found):
        raise ValueError
    return found


def _paths(given: Any) -> list[str]:
    return [given] if isinstance(given, str) else [os.fspath(each) for each in given]


def _flag_or_none(given: Any) -> bool | None:
    if given is not None and not isinstance(given, bool):
        raise TypeError
    return given


def _type(given: Any) -> Any:
    if isinstance(given, str):
        return text(given)
    return an_instance("pyspark.sql.types.DataType")(given)


_SESSION: Final = ("pyspark.sql.session.SparkSession", "pyspark.sql.connect.session.SparkSession")
FUNCTIONS: Final[Mapping[str, Kind]] = MappingProxyType(
    {
        "batch_bytes": Kind("a size above zero, such as 2097152 or '2m'", size),
        "columns": Kind("a list of names, each once", _distinct),
        "connection_headers": ARGUMENTS["headers"],
        "config": ARGUMENTS["config"],
        "form": Kind(
            "one of 'table', 'key_table', 'batches', 'key_batches'",
            choice("table", "key_table", "batches", "key_batches"),
        ),
        "group_bytes": Kind("a size above zero, such as 67108864 or '64m'", size),
        "headers": ARGUMENTS["headers"],
        "keys": Kind("a list of at least one column's name", _names),
        "on_failure": Kind("'fail' or 'report'", choice("fail", "report")),
        "paths": Kind("a path, or several as a list", _paths),
        "progress": Kind("True, False or None", _flag_or_none),
        "read_ahead": Kind("a size above zero, such as 2097152 or '2m'", size),
        "read_columns": Kind("a list of at least one name, or None", _names),
        "returns": Kind("'receipts' or 'answers'", choice("receipts", "answers")),
        "returned_type": Kind("a type of Spark, as DDL text or a DataType", _type),
        "spark": Kind("a SparkSession", an_instance(*_SESSION)),
        "split": Kind("a size above zero, such as 134217728 or '128m'", size),
        "tasks": Kind("a whole number above zero", whole()),
        "telemetry": KINDS["function"],
        "tls": ARGUMENTS["tls"],
        "write": Kind("a directory's path or URI, as text", text),
    }
)
"""Arguments of functions that are no options, by name."""


def argument(name: str, given: Any, entry: str = "") -> Any:
    """Reads an argument that is no option by ``FUNCTIONS``, and returns its value.

    ``entry``: the name there, if it is another. Raises ConfigError.
    """
    kind = FUNCTIONS[entry or name]
    try:
        return kind.read(given)
    except (ValueError, TypeError, AttributeError):
        raise ConfigError(f"{name}={shown(given)}; it must be {kind.must}") from None


_ADDRESS: Final = (
    "an address such as aqueduct://HOST:PORT, several as a list or as text with commas"
)
_PEM_MUST: Final = "PEM text (by value) or the path of a PEM file that every executor has"
OPTIONS: Final[Mapping[str, Option]] = MappingProxyType(
    {
        option.name: option
        for option in (
            Option("address", _ADDRESS, _addresses),
            Option("handler", "the name of a handler", text, setting=False),
            Option("in_flight", "a whole number above zero", whole()),
            Option("in_flight_bytes", "a size above zero, such as 32m", size),
            Option("ordered", "true or false", flag),
            Option("deadline", "seconds above zero, such as 30s, or none", seconds),
            Option("batch_deadline", "seconds above zero, such as 30s, or none", seconds),
            Option("retries", "a whole number, zero or above", whole(0)),
            Option("backoff", "seconds above zero, such as 500ms", seconds),
            Option("backoff_limit", "seconds above zero, such as 30s", seconds),
            Option("on_error", "fail, null or skip", choice("fail", "null", "skip")),
            Option("error_column", "the name of a column", text, setting=False),
            Option("columns", "names of columns", words, setting=False),
            Option("columns_mode", "append or replace", choice("append", "replace"), setting=False),
            Option("check_rows", "true or false", flag),
            Option("merge_rows", "a whole number above zero", whole()),
            Option("merge_bytes", "a size above zero, such as 1m", size),
            Option("cast", "true, false or round", casts),
            Option("token", "text, or a function without arguments", _token, secret=True),
            Option("token_file", "the path of a file that every executor has", text),
            Option("compression", "one of lz4, zstd, none", choice(*COMPRESSIONS, "none")),
            Option("ca", _PEM_MUST, _pem),
            Option("certificate", _PEM_MUST, _pem),
            Option("key", _PEM_MUST, _pem, secret=True),
            Option("key_password", "text", text, secret=True),
            Option("fingerprint", "sha256: and 64 hexadecimal digits", text),
            Option("server_name", "the name that the certificate carries", text),
            Option("verify", "true or false", flag),
        )
    }
)
"""Every option that is common to ``exchange`` and its relatives, by name."""
SOURCE_SETTINGS: Final[Mapping[str, Option]] = MappingProxyType(
    {
        "commit_deadline": Option(
            "commit_deadline", "seconds above zero, such as 10min, or none", seconds
        ),
    }
)
"""Options of the Data Source alone that a setting may give, by name."""


def convert(
    given: Mapping[str, Any], known: Mapping[str, Option], *, what: str = "option", prefix: str = ""
) -> dict[str, Any]:
    """The values of ``given``, by their proper names; None counts as not given.

    ``known`` says what there is; ``header.NAME`` and ``connection_header.NAME`` are gathered into
    ``headers`` and ``connection_headers`` where ``known`` has an address. ``what`` and ``prefix``
    are for errors: what is given, and what precedes its name.

    Raises ConfigError: unknown, given twice, or not what it must be.
    """
    proper = {_squashed(name): option for name, option in known.items()}
    found: dict[str, Any] = {}
    for name, value in given.items():
        if value is None:
            continue
        header = _header(name) if "address" in known else None
        if header is not None:
            found.setdefault(HEADERS[header], {})[name[len(header) :]] = value
            continue
        option = proper.get(_squashed(name))
        if option is None:
            raise unknown(name, known, what=what, prefix=prefix)
        if option.name in found:
            raise ConfigError(f"{what} {prefix}{option.name} is given twice, once as {name!r}")
        found[option.name] = option.value(value, f"{what} {prefix}{option.name}")
    return found


def defaults(*names: str, session: SparkSession | None = None) -> dict[str, Any]:
    """The values that the settings of ``session`` give to the options ``names``.

    Without a session: of the active one, which is one of each thread; empty where there is none.
    Without names: all of them. Works on the driver, with classic and with Connect sessions. Raises
    ConfigError: an unknown setting under ``spark.aqueduct.``, or a value that it cannot have, also
    if it is none of ``names``.
    """
    every = {**OPTIONS, **SOURCE_SETTINGS}
    known = {name: option for name, option in every.items() if option.setting}
    found = convert(_settings(session), known, what="setting", prefix=PREFIX)
    return {name: value for name, value in found.items() if not names or name in names}


def unknown(
    name: str, known: Iterable[str], *, what: str = "option", prefix: str = ""
) -> ConfigError:
    """The error for a name that is none of ``known``; it names the nearest one."""
    proper = {_squashed(each): each for each in known}
    near = difflib.get_close_matches(_squashed(name), proper, n=1, cutoff=0.7)
    guess = f"did you mean {prefix}{proper[near[0]]}? " if near else ""
    return ConfigError(
        f"unknown {what} {prefix}{name}; {guess}there are {', '.join(sorted(proper.values()))}"
    )


def missing_address(how: str) -> ConfigError:
    """The error for an address that is missing; ``how`` says how to give it here."""
    return ConfigError(
        f"no address: give {how}, or set {PREFIX}address on the session; "
        "for example aqueduct://scores.example:4433"
    )


def layered(settings: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """What is ``given``, over what the settings of the session say.

    ``token_file`` becomes a ``token``, and either takes the other's place in the settings. Raises
    ConfigError where both are given.
    """
    values = dict(settings)
    if "token" in given or "token_file" in given:
        values.pop("token", None)
        values.pop("token_file", None)
    values |= given
    if "token_file" in values:
        if "token" in values:
            raise ConfigError("token and token_file are both given; a call shows one token")
        values["token"] = TokenPath(values.pop("token_file"))
    return values


def tls_of(values: dict[str, Any]) -> ClientTls | None:
    """Takes the options of ``TLS`` out of ``values``; None if there is none of them.

    PEM text is by value: it travels to the executors. Paths are read on each executor.
    """
    given: dict[str, Any] = {name: values.pop(name) for name in TLS if name in values}
    return ClientTls(**given) if given else None


def _settings(session: SparkSession | None) -> dict[str, str]:
    """Those that begin with ``PREFIX``, without it; None: of the active session."""
    session = session or active_session()
    if session is None:
        return {}
    pairs = session.conf.getAll.items()
    return {name[len(PREFIX) :]: value for name, value in pairs if name.startswith(PREFIX)}


def _header(name: str) -> str | None:
    for start in HEADERS:
        if name.lower().startswith(start) and len(name) > len(start):
            return start
    return None


def _squashed(name: str) -> str:
    return name.replace("_", "").lower()
