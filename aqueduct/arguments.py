"""Arguments and settings: what each must be, in one table, and how its value is read.

``@checked`` stands on public functions: each argument is read by the kind that ``ARGUMENTS`` has
for its name. So a wrong value is refused where it enters, by a ConfigError that names the argument,
what was given and what is wanted. Settings (``aqueduct.config``), options of the command line, of
addresses and of Spark are read by the same kinds.

- **Durations** are numbers of seconds, ``datetime.timedelta``, or text: ``500ms 3s 5min 2h 1d``.
- **Sizes** are numbers of bytes, or text: ``64k 32m 1g 1t``, in powers of 1,024. ``64kb`` and
  ``64KiB`` say the same.

Text without a unit counts as the bare number does. Durations and sizes are never negative, and
neither NaN, infinity nor a bool is one.
"""

from __future__ import annotations

import functools
import inspect
import math
import numbers
import operator
import os
import re
import sys
from collections.abc import AsyncIterable, Callable, Iterable, Mapping
from dataclasses import Field, dataclass, fields, replace
from datetime import timedelta
from types import MappingProxyType
from typing import Any, Final, TypeAlias, TypeVar, cast

from aqueduct.errors import ConfigError, WrongType
from aqueduct.escaping import shown
from aqueduct.origins import web_origin

__all__ = [
    "ARGUMENTS",
    "FIELDS",
    "KINDS",
    "UNGIVEN",
    "Duration",
    "Kind",
    "Size",
    "above_zero",
    "an_instance",
    "any_duration",
    "any_text",
    "check_fields",
    "checked",
    "choice",
    "debug_asked",
    "duration",
    "flag",
    "flag_text",
    "kind_of",
    "read_arguments",
    "signature_of",
    "size",
    "text",
    "unexpected",
    "whole",
    "words",
]

Duration: TypeAlias = float | str | timedelta
"""Seconds, or text such as "500ms", "3s", "5min" and "2h"."""
Size: TypeAlias = int | str
"""Bytes, or text such as "64k", "32m" and "1g"."""
Function = TypeVar("Function", bound=Callable[..., Any])

_MOST: Final = (1 << 63) - 1
_LONGEST: Final = 100 * 366 * 86_400
"""Seconds: a hundred years. A wait of ``threading`` may be about three times as long at most."""
_ARROW_STREAM: Final = "__arrow_c_stream__"
_ARROW_ARRAY: Final = "__arrow_c_array__"
_ENDPOINT: Final = 255  # bytes of a name in the handshake of Relink
_SIZE: Final = re.compile(r"(?ai)(\d+(?:\.\d+)?)\s*(?:([kmgt])i?)?b?")
_DURATION: Final = re.compile(r"(?ai)(\d+(?:\.\d*)?|\.\d+)\s*(ms|s|min|m|h|d)?")
_PLACE: Final = re.compile(r"(?a)(\[[0-9A-Fa-f:.%]+\]|[^\s:/@\[\]]+):([0-9]{1,5})")
_SECONDS: Final = {"ms": 0.001, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86_400.0}


@dataclass(frozen=True, slots=True)
class Kind:
    """What a value must be, and how it is read."""

    must: str
    """What the value must be, for errors: "a whole number above zero"."""
    read: Callable[[Any], Any]
    """Gives the value to use. Raises ValueError or TypeError for what is none, or a ConfigError
    that says more."""
    secret: bool = False
    """The value is not for errors."""

    def value(self, given: Any, where: str) -> Any:
        """What was given, checked and converted.

        Raises ConfigError, or its WrongType, that begins with ``where``.
        """
        try:
            return self.read(given)
        except Exception as error:  # noqa: BLE001  whatever a value of another kind leads to
            raise self.refusal(given, where, error) from None

    def refusal(self, given: Any, where: str, error: Exception) -> Exception:
        """The error to raise where ``read`` has raised ``error``."""
        if isinstance(error, ConfigError):
            return type(error)(f"{where}: {error}")
        wrong = ConfigError
        if isinstance(error, TypeError | AttributeError):
            wrong = WrongType
        elif not isinstance(error, ValueError | OverflowError):
            return error  # of the value's own
        found = f"of the type {type(given).__name__}" if self.secret else shown(given)
        return wrong(f"{where} is {found}; it must be {self.must}")


# ------------------------------------------------------------------ readers


def whole(least: int = 1, most: int = _MOST) -> Callable[[Any], int]:
    """Reads whole numbers, or text of digits, from ``least`` to ``most``."""

    def read(given: Any) -> int:
        if isinstance(given, str):
            given = int(given)
        if isinstance(given, bool):
            raise TypeError
        value = operator.index(given)
        if value > _MOST:
            raise ConfigError(f"{shown(value)} is above {_MOST}, the most that is possible")
        if not least <= value <= most:
            raise ValueError
        return value

    return read


def size(given: Any, *, least: int = 1) -> int:
    """Reads sizes in bytes: 1024, "64k", "32m", "1.5 GiB"; the units are powers of 1,024."""
    if isinstance(given, str):
        found = _SIZE.fullmatch(given.strip())
        if found is None:
            raise ValueError
        unit = (found[2] or "").lower()
        count, _, fraction = found[1].partition(".")
        scale = 1 << (10 * " kmgt".index(unit) if unit else 0)
        part = int(fraction or "0") * scale
        given, left = divmod(part, 10 ** len(fraction))
        if left:
            raise ValueError  # no whole number of bytes
        given += int(count) * scale
    return whole(least)(given)


def duration(given: Any, *, least: float = 0.0) -> float:
    """Reads seconds, ``least`` or more, a hundred years at most: 2.5, "2min", a ``timedelta``."""
    if isinstance(given, str):
        found = _DURATION.fullmatch(given.strip())
        if found is None:
            raise ValueError
        unit = (found[2] or "s").lower()
        if unit == "m":
            raise ConfigError(f"{given!r}: m is no unit of time; write {found[1]}min for minutes")
        given = float(found[1]) * _SECONDS[unit]
    elif isinstance(given, timedelta):
        given = given.total_seconds()
    if isinstance(given, bool) or not isinstance(given, (int, float, numbers.Real)):
        raise TypeError
    if not math.isfinite(given) or given < least:
        raise ValueError
    if float(given) > _LONGEST:
        raise ConfigError(f"{shown(given)} s is above {_LONGEST} s, the most that is possible")
    return given if isinstance(given, int | float) else float(given)


def above_zero(given: Any) -> float:
    """Reads durations above zero."""
    found = duration(given)
    if not found:
        raise ValueError
    return found


def any_duration(given: Any) -> float:
    """Reads durations of any sign: what is done with it says what it may be."""
    return duration(given, least=-math.inf)


def flag(given: Any) -> bool:
    """Reads "true" and "false", "on" and "off", and bools."""
    if isinstance(given, bool):
        return given
    if isinstance(given, str) and given.strip().lower() in ("true", "on"):
        return True
    if isinstance(given, str) and given.strip().lower() in ("false", "off"):
        return False
    raise ValueError


def flag_text(given: str) -> bool:
    """Reads the text of a variable: that of ``flag``, and "1" and "0"."""
    return flag({"1": "true", "0": "false"}.get(given.strip(), given))


def debug_asked() -> bool:
    """Whether the variable ``AQUEDUCT_DEBUG`` asks for slow checks, and tracebacks of commands.

    Text that is no flag asks for nothing here: ``aqueduct serve`` refuses it by its name.
    """
    try:
        return flag_text(os.environ.get("AQUEDUCT_DEBUG", ""))
    except ValueError:
        return False


def choice(*values: str) -> Callable[[Any], str]:
    """Reads one of ``values``."""

    def read(given: Any) -> str:
        value = given.strip().lower() if isinstance(given, str) else given
        if value not in values:
            raise ValueError
        return str(value)

    return read


def text(given: Any) -> str:
    """Reads text that is not empty."""
    if not given:
        raise ValueError
    return any_text(given)


def any_text(given: Any) -> str:
    """Reads text."""
    if not isinstance(given, str):
        raise TypeError
    return given


def an_instance(*names: str) -> Callable[[Any], Any]:
    """Reads objects of these classes, given as "module.Class": none of them is imported for it."""

    def read(given: Any) -> Any:
        if not _is_one(given, *names):
            raise TypeError
        return given

    return read


def _is_one(given: Any, *names: str) -> bool:
    kind: Any = type(given)
    return _is_named(kind, names)


@functools.lru_cache(maxsize=256)
def _is_named(kind: type, names: tuple[str, ...]) -> bool:
    return any(f"{each.__module__}.{each.__qualname__}" in names for each in kind.__mro__)


def words(given: Any) -> tuple[str, ...]:
    """Reads "a, b" or a sequence of text: one text or more."""
    parts = given.split(",") if isinstance(given, str) else given
    found = tuple(part.strip() if isinstance(part, str) else "" for part in parts)
    if not all(found) or not found:
        raise ValueError
    return found


def _words_or_none(given: Any) -> tuple[str, ...]:
    return () if isinstance(given, list | tuple) and not given else words(given)


def _text_or_texts(given: Any) -> tuple[str, ...]:
    return (text(given),) if isinstance(given, str) else tuple(text(each) for each in given)


def _bool(given: Any) -> bool:
    if not isinstance(given, bool):
        raise TypeError
    return given


def _share(given: Any) -> float:
    return above_zero(float(given) if isinstance(given, str) else given)


def _number(given: Any) -> float:
    return any_duration(float(given) if isinstance(given, str) else given)


def _datagram(given: Any) -> int | str:
    return "auto" if given == "auto" else size(given)


def _callable(given: Any) -> Any:
    if not callable(given):
        raise TypeError
    return given


def _observer(given: Any) -> Any:
    _callable(given.began)
    return given


def _call_observer(given: Any) -> Any:
    _callable(given.calls)
    return given


def _text_or_bytes(given: Any) -> Any:
    if not isinstance(given, str | bytes):
        raise TypeError
    return given


def _any_token(given: Any) -> Any:
    return given if callable(given) else _text_or_bytes(given)


def _texts(given: Any) -> tuple[str, ...]:
    if isinstance(given, str):
        raise TypeError  # its letters are text, too
    return tuple(any_text(each) for each in given)


def _origins(given: Any) -> tuple[str, ...]:
    return tuple(map(web_origin, _texts(given)))


def _buffer(given: Any) -> Any:
    memoryview(given).release()
    return given


def _identifier(given: Any) -> int:
    value = operator.index(given)
    if isinstance(given, bool) or not 0 <= value < 1 << 64:
        raise ValueError
    return value


def _endpoint(given: Any) -> str:
    if len(any_text(given).encode()) > _ENDPOINT:
        raise ValueError
    return str(given)


def _path(given: Any) -> Any:
    path = os.fspath(given)
    if not isinstance(path, str) or not path or "\0" in path:
        raise ValueError
    return given


def _file(given: Any) -> Any:
    if not isinstance(given, bytes) and not os.fspath(given):
        raise ValueError
    return given


def _mapping(given: Any) -> Any:
    if not isinstance(given, Mapping):
        raise TypeError
    return given


def _pairs(given: Any) -> Any:
    if isinstance(given, str | bytes):
        raise TypeError
    pairs = tuple(given.items() if isinstance(given, Mapping) else given)
    for key, value in pairs:
        for part in (key, value):
            if not isinstance(part, str):
                _buffer(part)
    return given if isinstance(given, Mapping) else pairs


def _byte_pairs(given: Any) -> Any:
    """An iterator is used up by a look at it, so what was read is given instead."""
    pairs = tuple(given)
    for key, value in pairs:
        memoryview(key).release()
        memoryview(value).release()
    return pairs


def _buffers(given: Any) -> Any:
    if isinstance(given, list | tuple):
        for each in given:
            _buffer(each)
    else:
        _buffer(given)
    return given


def _partition(given: Any) -> Any:
    an_instance("aqueduct.rpc.request.Partition")(given)
    whole(0)(given.index)
    if given.count is not None:
        whole()(given.count)
    return given


def _batches(given: Any) -> Any:
    if isinstance(given, (list, tuple)):
        sound: type | None = None
        for each in given:
            if type(each) is sound:
                continue
            if not hasattr(each, _ARROW_STREAM) and not hasattr(each, _ARROW_ARRAY):
                found = type(each).__name__
                raise WrongType(
                    f"a pyarrow.RecordBatch is wanted, got {found} in a "
                    f"{type(given).__name__}{_advice(each)}"
                )
            sound = type(each)
    elif isinstance(given, str | bytes | bytearray | memoryview | Mapping):
        raise TypeError
    elif hasattr(given, _ARROW_STREAM) or hasattr(given, _ARROW_ARRAY):
        pass
    elif not isinstance(given, Iterable | AsyncIterable):
        if advice := _advice(given):
            raise WrongType(f"record batches are wanted, got {type(given).__name__}{advice}")
        raise TypeError
    return given


def _advice(given: Any) -> str:
    """What makes batches of an object that has none yet."""
    for method in ("to_arrow_reader", "collect"):
        if callable(getattr(given, method, None)):
            return f"; give what its {method}() returns"
    return ""


def _address(given: Any) -> Any:
    return given if isinstance(given, str) else an_instance("aqueduct.address.Address")(given)


def _addresses(given: Any) -> Any:
    """An address, or several of them."""
    if isinstance(given, Iterable) and not isinstance(given, str | bytes | Mapping):
        return tuple(map(_address, given))
    return _address(given)


def _service(given: Any) -> Any:
    """An address, several of them, or a connection."""
    if _is_one(given, "aqueduct.endpoint.connection.Connection"):
        return given
    return _addresses(given)


def _listening(given: Any) -> Any:
    """An address, what was bound before, or several of them."""
    if isinstance(given, str):
        return given
    if isinstance(given, Iterable) and not isinstance(given, bytes | Mapping):
        return [_listening(each) for each in given]
    return an_instance("aqueduct.address.Address", "aqueduct.carriers.contract.Bound")(given)


def _listening_once(given: Any) -> Any:
    """An address, or what was bound before."""
    if isinstance(given, str):
        return given
    return an_instance("aqueduct.address.Address", "aqueduct.carriers.contract.Bound")(given)


def _callable_or_none(given: Any) -> Any:
    return None if given is None else _callable(given)


def _place(given: Any) -> Any:
    if isinstance(given, tuple | list):
        host, port = given
        return any_text(host), whole(0, 65_535)(port)
    if not given:
        raise ValueError
    os.fspath(given)
    return given


def _host_and_port(given: Any) -> str:
    found = _PLACE.fullmatch(any_text(given))
    if found is None:
        raise ValueError
    return f"{found[1]}:{whole(0, 65_535)(found[2])}"


# ---------------------------------------------------------------- the table

_SIZES: Final = "a size in bytes, such as 65536, 64k or 32m"
_DURATIONS: Final = "a duration, such as 2.5 (seconds), 500ms, 30s or 5min"

KINDS: Final[Mapping[str, Kind]] = MappingProxyType(
    {
        "count": Kind("above zero: a whole number", whole()),
        "count or zero": Kind("zero or above: a whole number", whole(0)),
        "size": Kind(f"above zero: {_SIZES}", size),
        "size or zero": Kind(f"zero or above: {_SIZES}", functools.partial(size, least=0)),
        "duration": Kind(f"above zero: {_DURATIONS}", above_zero),
        "duration or zero": Kind(f"zero or above: {_DURATIONS}", duration),
        "share": Kind("above zero: a number", _share),
        "flag": Kind("True or False", _bool),
        "text": Kind("text", any_text),
        "web origin": Kind("an origin, such as https://example.org", web_origin),
        "web origins": Kind("a list of origins, such as https://example.org", _origins),
        "addresses": Kind("a list of addresses such as aqueduct://HOST:PORT", _text_or_texts),
        "words": Kind("a tuple of text, or text with commas", _words_or_none),
        "host and port": Kind("HOST:PORT, such as 127.0.0.1:9464", _host_and_port),
        "file": Kind("the path of a PEM file, or PEM text as bytes", _file),
        "path": Kind("the path of a file", _path),
        "function": Kind("a function", _callable),
        "datagram": Kind("'auto' or 1200 to 16383 bytes", _datagram),
    }
)
"""What arguments and settings are, by what people call it."""

FIELDS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "Count": "count",
        "Bytes": "size",
        "Seconds": "duration",
        "Share": "share",
        "int": "count",
        "float": "duration",
        "bool": "flag",
        "Pem": "file",
        "FilePath": "path",
        "HostPort": "host and port",
        "str | None": "text",
        "tuple[str, ...]": "words",
        "Addresses": "addresses",
        "Origins": "web origins",
        "int | str": "datagram",
    }
)
"""The kinds of settings, by how their field is annotated; None is allowed where it says so. Text
has limits of its own everywhere."""

_SCHEMA: Final = Kind("a pyarrow.Schema", an_instance("pyarrow.lib.Schema"))
_TEXT_TO_TEXT: Final = "a mapping of text to text"
_ADDRESSES: Final = "an address such as aqueduct://HOST:PORT"

ARGUMENTS: Final[Mapping[str, Kind]] = MappingProxyType(
    {
        # Where, and with what certificates.
        "address": Kind(_ADDRESSES, _address),
        "client_service": Kind(
            f"{_ADDRESSES}, a list of them, or an aqueduct.Connection", _service
        ),
        "client_address": Kind(f"{_ADDRESSES}, or a list of them", _addresses),
        "text": Kind(_ADDRESSES, any_text),
        "addresses": Kind(f"{_ADDRESSES}, or a list of them", _listening),
        "listening": Kind(f"{_ADDRESSES}, or what was bound", _listening_once),
        "place": Kind(
            "(host, port) with a port from 0 to 65535, or the path of a Unix socket", _place
        ),
        "tls": Kind(
            "an aqueduct.ClientTls", an_instance("aqueduct.carriers.certificates.ClientTls")
        ),
        "server_tls": Kind(
            "an aqueduct.ServerTls", an_instance("aqueduct.carriers.certificates.ServerTls")
        ),
        "certificate": KINDS["file"],
        "key": replace(KINDS["file"], secret=True),
        "key_password": replace(KINDS["text"], secret=True),
        "client_ca": KINDS["file"],
        "dev_certificate": KINDS["flag"],
        "names": Kind("names of hosts, as a list", _texts),
        "days": Kind("a number of days", _number),
        # Connections and channels.
        "config": Kind("an aqueduct.Config", an_instance("aqueduct.config.Config")),
        "connection_headers": Kind(f"{_TEXT_TO_TEXT}, or pairs of text or bytes", _pairs),
        "keep_alive": KINDS["flag"],
        "on_connection": KINDS["function"],
        "on_headers": KINDS["function"],
        "on_connection_or_none": Kind("a function, or None", _callable_or_none),
        "responder": KINDS["function"],
        "setup": Kind("bytes, or another contiguous buffer", _buffer),
        "origin": Kind("an origin, such as https://example.org", text),
        "origins": Kind("origins such as https://example.org, as a list", _origins),
        "timeout": KINDS["duration or zero"],
        "window": KINDS["size"],
        "payload": Kind("bytes, or another contiguous buffer", _buffer),
        "partial": KINDS["flag"],
        "oneshot": KINDS["flag"],
        "parts": Kind("bytes, or another contiguous buffer", _buffer),
        "identifier": Kind("a whole number from 0 to 2^64 - 1", _identifier),
        "endpoint": Kind("text of at most 255 bytes", _endpoint),
        "transactions": Kind(
            "none, connector, listener or both", choice("none", "connector", "listener", "both")
        ),
        "id_size": Kind("a number of bytes from 0 to 8", whole(0, 8)),
        "mode": Kind(
            "a Mode, such as aqueduct.Mode.ORDERED",
            an_instance("aqueduct.protocol.common.sender.Mode"),
        ),
        "code": KINDS["count or zero"],
        "reason": KINDS["text"],
        "channels": KINDS["count or zero"],
        "message_payload": Kind("a buffer, or a sequence of buffers", _buffers),
        "message_headers": Kind("pairs of bytes", _byte_pairs),
        # Calls.
        "handler": KINDS["text"],
        "batches": Kind(
            "record batches: an iterable of them, or a table of Arrow, Polars, DuckDB or pandas",
            _batches,
        ),
        "schema": _SCHEMA,
        "output_schema": _SCHEMA,
        "in_flight": KINDS["count"],
        "in_flight_bytes": KINDS["size"],
        "deadline": Kind(_DURATIONS, any_duration),  # a call says itself which it can keep
        "headers": Kind(_TEXT_TO_TEXT, _mapping),
        "write_key": KINDS["text"],
        "ack_within": KINDS["duration"],
        "on_ack": KINDS["function"],
        "attempt": KINDS["text"],
        "token": Kind("text or bytes", _text_or_bytes, secret=True),
        "fresh_token": Kind("text, bytes, or a function that gives them", _any_token, secret=True),
        "partition": Kind("an aqueduct.Partition of whole numbers", _partition),
        "compression": KINDS["text"],
        "ordered": KINDS["flag"],
        "report_failures": KINDS["flag"],
        "retries": KINDS["count or zero"],
        "batch_deadline": KINDS["duration"],
        "backoff": KINDS["duration"],
        "backoff_limit": KINDS["duration"],
        "hedge": KINDS["duration"],
        "resolve": KINDS["duration"],
        "resolver": KINDS["function"],
        "held": KINDS["function"],
        "ready": KINDS["function"],
        "callback": KINDS["function"],
        "function": KINDS["function"],
        "on_end": KINDS["function"],
        # Services.
        "description": KINDS["text"],
        "authorize": KINDS["function"],
        "telemetry": Kind(
            "an object with began(call), such as aqueduct.OpenTelemetry()",
            _observer,
        ),
        "call_observer": Kind(
            "an object with calls(handler, kind, address), such as aqueduct.OpenTelemetry()",
            _call_observer,
        ),
        "idempotent": KINDS["flag"],
        "benchmark": KINDS["flag"],
        "drain": KINDS["duration or zero"],
        "admin": KINDS["host and port"],
        "environment": KINDS["flag"],
        "settings": Kind("the path of a TOML file", _path),
        "time_to_live": KINDS["duration"],
        # Tests.
        "after": KINDS["size"],
        "times": KINDS["count"],
        "bytes_per_second": KINDS["size"],
        "latency": KINDS["duration or zero"],
    }
)
"""What each public argument must be, by its name."""


class _Ungiven:
    def __repr__(self) -> str:
        return "not given"


UNGIVEN: Final[Any] = _Ungiven()
"""The default of arguments for which None is a value that can be wrong."""


# ------------------------------------------------------------------ the ways in


def checked(**names: str) -> Callable[[Function], Function]:
    """Decorates a public function: its arguments are read by ``ARGUMENTS`` before it is called.

    ``names``: for an argument whose name is not that of its entry, the entry's. What has none there
    is left to the function. None is allowed where it is the default. The error begins with the
    function's name, for example "Client.exchange: deadline is 'soon'; it must be ...".
    """

    def decorate(function: Function) -> Function:
        where = function.__qualname__.removesuffix(".__init__")
        readers: dict[str, Callable[[Any], Any]] = {}
        places: list[Callable[[Any], Any] | None] = []
        rest: Callable[[Any], Any] | None = None
        named = signature_of(function).parameters
        any_name = any(each.kind is each.VAR_KEYWORD for each in named.values())
        for name, parameter in named.items():
            kind = ARGUMENTS.get(names.get(name, name))
            reader = None
            if kind is not None:
                reader = readers[name] = _reader(kind, f"{where}: {name}", parameter.default)
            if parameter.kind is parameter.VAR_POSITIONAL:
                rest = reader
            elif parameter.kind is not parameter.KEYWORD_ONLY:
                places.append(reader)

        def read(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterable[Any]:
            if len(args) <= first and not kwargs:
                return args
            found = list(args)
            for place, value in enumerate(args):
                reader = places[place] if place < len(places) else rest
                if reader is not None:
                    found[place] = reader(value)
            for name, value in kwargs.items():
                reader = readers.get(name)
                if reader is not None:
                    kwargs[name] = reader(value)
                elif not any_name and name not in named:
                    raise unexpected(function.__qualname__, name)
            return found

        first = next((place for place, reader in enumerate(places) if reader), len(places))
        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def wrapper(*args: Any, **kwargs: Any) -> Any:
                return await function(*read(args, kwargs), **kwargs)

        else:

            @functools.wraps(function)
            def wrapper(*args: Any, **kwargs: Any) -> Any:
                return function(*read(args, kwargs), **kwargs)

        wrapper.__checked__ = frozenset(readers)  # type: ignore[attr-defined]  # for tests
        return cast("Function", wrapper)

    return decorate


def _reader(kind: Kind, where: str, default: Any) -> Callable[[Any], Any]:
    read = kind.read

    def checking(given: Any) -> Any:
        if given is default:
            return given
        try:
            return read(given)
        except Exception as error:  # noqa: BLE001  see ``Kind.value``
            raise kind.refusal(given, where, error) from None

    return checking


def unexpected(function: str, name: str) -> TypeError:
    """The error for an argument that a function does not have, as Python would say it."""
    return TypeError(f"{function}() got an unexpected keyword argument {name!r}")


def read_arguments(where: str, **given: Any) -> dict[str, Any]:
    """The same for arguments that one call of many shows: None is allowed. Raises ConfigError."""
    for name, value in given.items():
        if value is not None:
            kind = ARGUMENTS[name]
            try:
                given[name] = kind.read(value)
            except Exception as error:  # noqa: BLE001  see ``Kind.value``
                raise kind.refusal(value, f"{where}: {name}", error) from None
    return given


def check_fields(settings: Any) -> None:
    """Reads the fields of a frozen dataclass in place, by ``FIELDS``. Raises ConfigError."""
    for entry in fields(settings):
        given = getattr(settings, entry.name)
        kind = kind_of(type(settings), entry)
        if kind is None or (given is None and str(entry.type).endswith("| None")):
            continue
        value = kind.value(given, f"{type(settings).__name__}.{entry.name}")
        object.__setattr__(settings, entry.name, value)


def kind_of(owner: type, entry: Field[Any]) -> Kind | None:
    """What a field of a dataclass must be, by ``FIELDS``; None: they do not say.

    ``owner.zero_allowed`` has the names of those that may be 0.
    """
    annotation = str(entry.type)
    name = FIELDS.get(annotation) or FIELDS.get(annotation.removesuffix(" | None"))
    if name is None:
        return None
    zero = entry.name in getattr(owner, "zero_allowed", ())
    return replace(KINDS[f"{name} or zero" if zero else name], secret=not entry.repr)


def signature_of(function: Callable[..., Any]) -> inspect.Signature:
    """The signature of a function, without evaluating its annotations.

    They may name what is imported for type checkers alone. Raises TypeError and ValueError as
    ``inspect.signature`` does.
    """
    if sys.version_info >= (3, 14):
        import annotationlib

        return inspect.signature(function, annotation_format=annotationlib.Format.STRING)
    return inspect.signature(function)
