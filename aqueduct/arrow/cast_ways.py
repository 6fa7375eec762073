"""From which Arrow types to which others a cast leads, and what keeps it from leading there.

``RULES`` is the table: a rule for each pair of kinds of types. docs/cookbook/casts.md explains it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import pyarrow as pa

from aqueduct.arrow.cast_numbers import (
    Rule,
    binary,
    boolean,
    decimal_number,
    floating,
    integer,
    text_of,
    text_to_boolean,
    text_to_decimal,
    text_to_floating,
    text_to_integer,
)
from aqueduct.arrow.cast_times import (
    day,
    from_count,
    from_text,
    rescaled,
    to_count,
    to_text,
    zoned,
)

__all__ = ["RULES", "Obstacle", "kind_of", "misnamed", "obstacle", "places_by_name", "stands_for"]

RULES: Final[Mapping[tuple[str, str], Rule]] = MappingProxyType(
    {
        ("bool", "integer"): integer,
        ("bool", "float"): floating,
        ("bool", "decimal"): decimal_number,
        ("bool", "text"): text_of,
        ("integer", "bool"): boolean,
        ("integer", "integer"): integer,
        ("integer", "float"): floating,
        ("integer", "decimal"): decimal_number,
        ("integer", "date"): from_count,
        ("integer", "time"): from_count,
        ("integer", "timestamp"): from_count,
        ("integer", "duration"): from_count,
        ("integer", "text"): text_of,
        ("float", "bool"): boolean,
        ("float", "integer"): integer,
        ("float", "float"): floating,
        ("float", "decimal"): decimal_number,
        ("float", "text"): text_of,
        ("decimal", "bool"): boolean,
        ("decimal", "integer"): integer,
        ("decimal", "float"): floating,
        ("decimal", "decimal"): decimal_number,
        ("decimal", "text"): text_of,
        ("date", "integer"): to_count,
        ("date", "date"): day,
        ("date", "timestamp"): day,
        ("date", "text"): to_text,
        ("time", "integer"): to_count,
        ("time", "time"): rescaled,
        ("time", "text"): to_text,
        ("timestamp", "integer"): to_count,
        ("timestamp", "date"): day,
        ("timestamp", "timestamp"): zoned,
        ("timestamp", "text"): to_text,
        ("duration", "integer"): to_count,
        ("duration", "duration"): rescaled,
        ("text", "bool"): text_to_boolean,
        ("text", "integer"): text_to_integer,
        ("text", "float"): text_to_floating,
        ("text", "decimal"): text_to_decimal,
        ("text", "date"): from_text,
        ("text", "time"): from_text,
        ("text", "timestamp"): from_text,
        ("text", "text"): binary,
        ("text", "binary"): binary,
        ("binary", "text"): binary,
        ("binary", "binary"): binary,
    }
)
"""By kinds of types (``kind_of``), from and to.

A type also leads to itself, and ``null`` to every type. A list, struct or map leads to another one
if the types inside do."""

_LEAVES: Final = (
    (pa.types.is_null, "null"),
    (pa.types.is_boolean, "bool"),
    (pa.types.is_integer, "integer"),
    (pa.types.is_floating, "float"),
    (pa.types.is_decimal, "decimal"),
    (pa.types.is_date, "date"),
    (pa.types.is_time, "time"),
    (pa.types.is_timestamp, "timestamp"),
    (pa.types.is_duration, "duration"),
    (pa.types.is_interval, "interval"),
    (pa.types.is_struct, "struct"),
    (pa.types.is_map, "map"),
    (pa.types.is_union, "union"),
    (pa.types.is_dictionary, "dictionary"),
    (pa.types.is_run_end_encoded, "runs"),
    (pa.types.is_nested, "list"),  # all others are
    (pa.types.is_fixed_size_binary, "binary"),
)
_BY_TYPE: Final = {
    **dict.fromkeys((pa.string(), pa.large_string(), pa.string_view()), "text"),
    **dict.fromkeys((pa.binary(), pa.large_binary(), pa.binary_view()), "binary"),
}


@dataclass(frozen=True, slots=True)
class Obstacle:
    """Why there is no cast from one type to another."""

    path: tuple[str, ...]
    """The names of fields from the column to where it is, without the column's own."""
    wanted: pa.DataType
    got: pa.DataType
    """The types there."""
    why: str
    """More about it, such as the field that is missing; may be empty."""


def obstacle(wanted: pa.DataType, got: pa.DataType, path: tuple[str, ...] = ()) -> Obstacle | None:
    """Why there is no cast from ``got`` to ``wanted``; None: there is one."""
    if wanted.equals(got):
        return None
    mine, theirs = (isinstance(kind, pa.BaseExtensionType) for kind in (wanted, got))
    if mine and theirs:
        return Obstacle(path, wanted, got, "")
    if mine or theirs:
        return obstacle(stands_for(wanted), stands_for(got), path)
    have, want = kind_of(got), kind_of(wanted)
    if have == "null":
        return None
    if want == "dictionary" and wanted.ordered and not (have == "dictionary" and got.ordered):
        return Obstacle(path, wanted, got, "the order of its values is not known")
    if have in ("dictionary", "runs"):
        return obstacle(wanted, got.value_type, path)
    if want in ("dictionary", "runs"):
        return obstacle(wanted.value_type, got, path)
    why = ""
    if (have, want) in RULES:
        fixed = all(map(pa.types.is_fixed_size_binary, (wanted, got)))
        if not fixed or wanted.byte_width == got.byte_width:
            return None
    elif have == want == "struct":
        places = places_by_name(_names(wanted), _names(got))
        if places is not None:
            pairs = [(mine, got.field(place)) for mine, place in zip(wanted, places, strict=True)]
            return _first_obstacle(path, [(mine.name, mine, theirs) for mine, theirs in pairs])
        why = misnamed(wanted, got) or "a name is there twice, or in two cases"
    elif have == want == "map":
        if wanted.keys_sorted and not got.keys_sorted:
            return Obstacle(path, wanted, got, "its keys are not declared to be sorted")
        return _first_obstacle(
            path,
            [
                ("key", wanted.key_field, got.key_field),
                ("value", wanted.item_field, got.item_field),
            ],
        )
    elif have == want == "list":
        fixed = all(map(pa.types.is_fixed_size_list, (wanted, got)))
        if not fixed or wanted.list_size == got.list_size:
            return _first_obstacle(path, [("item", wanted.value_field, got.value_field)])
    return Obstacle(path, wanted, got, why)


def stands_for(kind: pa.DataType) -> pa.DataType:
    """What an extension type is to casts: its storage, or ``bool``, which bool8 stores as numbers.

    Other types stand for themselves.
    """
    if not isinstance(kind, pa.BaseExtensionType):
        return kind
    stored: pa.DataType = kind.storage_type
    return pa.bool_() if kind.extension_name == "arrow.bool8" else stored


def kind_of(kind: pa.DataType) -> str:
    """What a type is in ``RULES``: ``integer``, ``text``, ``list`` and so on."""
    if isinstance(kind, pa.BaseExtensionType):
        return "extension"
    for is_it, name in _LEAVES:
        if is_it(kind):
            return name
    return _BY_TYPE.get(kind, "other")


def places_by_name(wanted: Sequence[str], got: Sequence[str]) -> list[int] | None:
    """Where each of the names ``wanted`` is in ``got``; None unless each has one of the other.

    In any order, and where that is clear, in any case.
    """
    if wanted == got:
        return list(range(len(wanted)))
    lower = [name.lower() for name in got]
    found = []
    for name in wanted:
        if got.count(name) == 1:
            found.append(got.index(name))
        elif lower.count(name.lower()) == 1:
            found.append(lower.index(name.lower()))
        else:
            return None
    return found if len(set(found)) == len(got) else None


def _names(kind: pa.DataType) -> list[str]:
    return [field.name for field in kind]


def misnamed(wanted: pa.DataType, got: pa.DataType) -> str:
    """Which fields one struct has and another has not; empty if they have the same names."""
    mine, theirs = _names(wanted), _names(got)
    lacking = [repr(name) for name in mine if name not in theirs]
    surplus = [repr(name) for name in theirs if name not in mine]
    said = [f"it lacks the field {', '.join(lacking)}"] if lacking else []
    said += [f"the field {', '.join(surplus)} is not wanted"] if surplus else []
    return ", and ".join(said)


def _first_obstacle(
    path: tuple[str, ...], pairs: list[tuple[str, pa.Field, pa.Field]]
) -> Obstacle | None:
    for name, mine, theirs in pairs:
        found = obstacle(mine.type, theirs.type, (*path, name))
        if found is not None:
            return found
    return None
