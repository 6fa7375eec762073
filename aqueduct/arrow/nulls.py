"""Nulls where a schema allows none: in columns, and in the fields inside them at any depth.

Arrow lets a program build such a batch, and does not check it. A reader that trusts the declaration
then reads the bytes behind the null, or fails later: a JVM fails without naming a column.

A null counts only where a reader could see it. What is inside a null struct or list may be
anything, and so may values that no row refers to.

Some arrays have values elsewhere: dictionaries, runs and unions. There a row is null if the value
that it refers to is null. A field of such a type that is declared not null must have no such row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import pyarrow as pa

from aqueduct._speedups.arrow.nulls import NotNull
from aqueduct.arrow.schema import shorten

__all__ = ["Found", "Required"]

_Link: TypeAlias = tuple[int, int, int]  # which child, its type code, its node
_Node: TypeAlias = tuple[str, bool, int, int, list[_Link]]
"""Kind, whether its bitmap must show no nulls, width, owner, links; see ``NotNull``."""
_Inner: TypeAlias = tuple[int, int, str | None, pa.DataType, bool]
"""Which child, its type code, its name or None, its type, whether it is declared not null."""


@dataclass(frozen=True, slots=True)
class Found:
    """A field that is declared without nulls, and has some."""

    path: str
    """Its name; names of fields inside a column follow with dots."""
    type: str
    nulls: int
    """How many; a dictionary's value counts once, and so does a run."""

    def __str__(self) -> str:
        return (
            f"column {self.path!r} is declared {self.type} not null, and {self.nulls} of its "
            "values are null"
        )


class Required:
    """The fields of a schema that are declared without nulls, those inside columns too."""

    def __init__(self, schema: pa.Schema) -> None:
        self._nodes: list[_Node] = []  # as long as they are gathered
        self._names: list[tuple[str, pa.DataType]] = []  # what follows the column's, of each node
        self._columns: dict[int, list[int]] = {}
        """The columns that may not have nulls, or fields in them, by the first of their nodes."""
        links = self._place("struct", False, 0, 0, "", pa.null())
        # Columns of one type share their nodes: of very many columns most are of a few types.
        known: dict[tuple[pa.DataType, bool], int] = {}
        for slot, field in enumerate(schema):
            kind, strict = field.type, not field.nullable
            if isinstance(kind, pa.BaseExtensionType):  # which may have no hash
                node = self._add("", kind, strict)
            elif (kind, strict) in known:
                node = known[kind, strict]
            else:
                node = known[kind, strict] = self._add("", kind, strict)
            if node:
                links.append((slot, 0, node))
                self._columns.setdefault(node, []).append(slot)
        self.check: NotNull | None = NotNull(self._nodes) if links else None
        """The check of batches; None if the schema allows all nulls."""
        self._nodes.clear()

    def find(self, batch: pa.RecordBatch) -> Found | None:
        """The first field with nulls that it must not have.

        The work is constant if the counts of nulls are known to be zero. Raises ValueError if an
        offset, an index or a run points outside its array.
        """
        if self.check is None:
            return None
        found = self.check.find(batch)
        if found is None:
            return None
        node, nulls = found
        name, kind = self._names[node]
        slots = self._columns[max(first for first in self._columns if first <= node)]
        if len(slots) > 1:  # these share the node: which of them is it?
            for slot in slots:
                alone = Required(pa.schema([batch.schema.field(slot)]))
                column = alone.find(batch.select([slot]))
                if column is not None:
                    return column
        path = batch.schema.field(slots[0]).name + name
        return Found(path, shorten(" ".join(str(kind).split())), nulls)

    def _place(
        self, kind: str, strict: bool, width: int, owner: int, path: str, declared: pa.DataType
    ) -> list[_Link]:
        """Adds a node; returns its links, which are to be filled."""
        links: list[_Link] = []
        self._nodes.append((kind, strict, width, owner, links))
        self._names.append((path, declared))
        return links

    def _add(self, path: str, kind: pa.DataType, strict: bool, owner: int | None = None) -> int:
        """The node of an array of this type; 0: nothing in it must be without nulls.

        ``owner``: the node of the field whose values the array has; None: it has its own field.
        """
        place = len(self._nodes)
        owner = place if owner is None else owner
        links = self._place(*_kind_of(kind, strict), owner, path, kind)
        while isinstance(kind, pa.BaseExtensionType):
            kind = kind.storage_type
        referring = strict and _has_values_elsewhere(kind)
        for slot, code, name, inner, declared in _inside(kind):
            inner_path = path if name is None else f"{path}.{name}"
            inner_owner = owner if referring and not declared else None
            node = self._add(inner_path, inner, declared or referring, inner_owner)
            if node:
                links.append((slot, code, node))
        if self._nodes[place][1] or links:
            return place
        del self._nodes[place:], self._names[place:]
        return 0


def _kind_of(kind: pa.DataType, strict: bool) -> tuple[str, bool, int]:
    """The kind of a node, whether its own bitmap must show no nulls, and its width."""
    types = pa.types
    while isinstance(kind, pa.BaseExtensionType):
        kind = kind.storage_type
    if types.is_primitive(kind):
        return "leaf", strict, 0
    if types.is_null(kind):
        return "nulls", strict, 0
    if types.is_struct(kind):
        return "struct", strict, 0
    if types.is_map(kind) or types.is_list(kind):
        return "list", strict, 0
    if types.is_large_list(kind):
        return "large_list", strict, 0
    if types.is_fixed_size_list(kind):
        return "fixed_list", strict, kind.list_size
    if types.is_list_view(kind):
        return "list_view", strict, 0
    if types.is_large_list_view(kind):
        return "large_list_view", strict, 0
    if types.is_union(kind):
        return f"{kind.mode}_union", False, 0
    if types.is_run_end_encoded(kind):
        return "run_ends", False, kind.run_end_type.bit_width // 8
    if types.is_dictionary(kind):
        signed = types.is_signed_integer(kind.index_type)
        name = "dictionary" if signed else "dictionary_unsigned"
        return name, strict, kind.index_type.bit_width // 8
    return "leaf", strict, 0


def _has_values_elsewhere(kind: pa.DataType) -> bool:
    """Whether a row of this type is null where the value that it refers to is null."""
    types = pa.types
    if types.is_primitive(kind):  # which most are
        return False
    kinds = (types.is_dictionary, types.is_run_end_encoded, types.is_union)
    return any(is_it(kind) for is_it in kinds)


def _inside(kind: pa.DataType) -> list[_Inner]:
    """The children of a type."""
    types = pa.types
    if types.is_primitive(kind):  # which most are
        return []
    if types.is_dictionary(kind):
        return [(-1, 0, None, kind.value_type, False)]
    if types.is_run_end_encoded(kind):
        return [(1, 0, "values", kind.value_type, False)]
    if types.is_map(kind):
        return [(0, 0, None, pa.struct([_named(kind.key_field, "key"), _value(kind)]), False)]
    if types.is_struct(kind):
        return [(i, 0, f.name, f.type, not f.nullable) for i, f in enumerate(kind)]
    if types.is_union(kind):
        fields = ((i, kind.field(i)) for i in range(kind.num_fields))
        codes = kind.type_codes
        return [(i, codes[i], field.name, field.type, not field.nullable) for i, field in fields]
    if types.is_nested(kind):
        item = kind.value_field
        return [(0, 0, "item", item.type, not item.nullable)]
    return []


def _value(kind: pa.MapType) -> pa.Field:
    return _named(kind.item_field, "value")


def _named(field: pa.Field, name: str) -> pa.Field:
    return pa.field(name, field.type, nullable=field.nullable)
