"""Nulls where a schema allows none, at any depth: found where they can be seen, and only there."""

from __future__ import annotations

import random

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aqueduct._speedups.arrow.nulls import KINDS, NotNull
from aqueduct._speedups.base.buffers import AlignedBuffer
from aqueduct.arrow.decode import Decoder
from aqueduct.arrow.encode import Encoder
from aqueduct.arrow.ipc import adopt
from aqueduct.arrow.nulls import Required
from aqueduct.arrow.schema import shorten
from aqueduct.errors import BadCall, LocalProtocolError, SchemaMismatch
from tests.arrow.strategies import make_array, schemas
from tests.support.selection import some_examples

X = pa.struct([pa.field("x", pa.int64(), nullable=False)])
OPEN_X = pa.struct([("x", pa.int64())])


def strict(name, kind):
    return pa.field(name, kind, nullable=False)


def declared(array, kind, *, nullable=True):
    """A batch of one column, read as a type that may be stricter than it is."""
    batch = pa.RecordBatch.from_arrays([array], names=["a"])
    return adopt(batch, pa.schema([pa.field("a", kind, nullable=nullable)]))


def joined(encoded):
    payload = AlignedBuffer(encoded.size)
    memoryview(payload)[:] = b"".join(encoded.buffers)
    return payload


def opened(kind):
    """The type with every field nullable."""
    types = pa.types
    if isinstance(kind, pa.BaseExtensionType):
        return kind
    if types.is_struct(kind):
        return pa.struct([pa.field(f.name, opened(f.type)) for f in kind])
    if types.is_map(kind):
        return pa.map_(opened(kind.key_type), pa.field("value", opened(kind.item_type)))
    if types.is_union(kind):
        fields = [kind.field(i) for i in range(kind.num_fields)]
        loose = [pa.field(f.name, opened(f.type)) for f in fields]
        return pa.union(loose, kind.mode, kind.type_codes)
    if types.is_dictionary(kind):
        return pa.dictionary(kind.index_type, opened(kind.value_type), kind.ordered)
    if types.is_run_end_encoded(kind):
        return pa.run_end_encoded(kind.run_end_type, opened(kind.value_type))
    if types.is_nested(kind):
        item = pa.field("item", opened(kind.value_field.type))
        if types.is_fixed_size_list(kind):
            return pa.list_(item, kind.list_size)
        make = {
            pa.lib.Type_LIST: pa.list_,
            pa.lib.Type_LARGE_LIST: pa.large_list,
            pa.lib.Type_LIST_VIEW: pa.list_view,
            pa.lib.Type_LARGE_LIST_VIEW: pa.large_list_view,
        }
        return make[kind.id](item)
    return kind


def raw(array, kind, buffer, row):
    buffers = [None, array.buffers()[buffer]]
    return pa.Array.from_buffers(kind, len(array), buffers, offset=array.offset)[row].as_py()


def seen(array, row, kind, path, nullable, found, owner=None):
    """The slow model: adds the paths of all fields with nulls that a reader could see.

    ``owner``: the path of the field whose values these are, if it is declared not null.
    """
    types = pa.types
    owner = None if nullable else owner or path
    while isinstance(kind, pa.BaseExtensionType):
        kind, array = kind.storage_type, array.storage
    if types.is_run_end_encoded(kind):
        ends = array.run_ends.to_pylist()
        run = next(i for i, end in enumerate(ends) if end > array.offset + row)
        seen(array.values, run, kind.value_type, f"{path}.values", nullable, found, owner)
        return
    if types.is_union(kind):
        # What pyarrow shows of a slice's codes and offsets begins before the slice.
        place = kind.type_codes.index(raw(array, pa.int8(), 1, row))
        inner = row if kind.mode == "sparse" else raw(array, pa.int32(), 2, row)
        field = kind.field(place)
        name = f"{path}.{field.name}"
        if field.nullable:
            seen(array.field(place), inner, field.type, name, nullable, found, owner)
        else:
            seen(array.field(place), inner, field.type, name, False, found)
        return
    if not array[row].is_valid:
        if not nullable:
            found.add(owner)
        return
    if types.is_dictionary(kind):
        index = array.indices[row].as_py()
        seen(array.dictionary, index, kind.value_type, path, nullable, found, owner)
    elif types.is_struct(kind):
        for place, field in enumerate(kind):
            child = array.field(place)
            seen(child, row, field.type, f"{path}.{field.name}", field.nullable, found)
    elif types.is_map(kind):
        entries, item = array[row].values, kind.item_field
        for place in range(len(entries)):
            seen(entries.field(0), place, kind.key_type, f"{path}.key", False, found)
            seen(entries.field(1), place, item.type, f"{path}.value", item.nullable, found)
    elif types.is_nested(kind):
        values, field = array[row].values, kind.value_field
        for place in range(len(values)):
            seen(values, place, field.type, f"{path}.item", field.nullable, found)


def model(batch):
    found: set[str] = set()
    for field, column in zip(batch.schema, batch.columns, strict=True):
        for row in range(len(column)):
            seen(column, row, field.type, field.name, field.nullable, found)
    return found


def found_in(batch):
    """The field that is found, as a tuple; None if there is none."""
    found = Required(batch.schema).find(batch)
    return None if found is None else (found.path, found.type, found.nulls)


@some_examples
@given(schemas(), st.integers(0, 1 << 32), st.data())
def test_nested_nulls_are_found_where_they_can_be_seen_and_only_there(schema, seed, data):
    chance = random.Random(seed)
    size = data.draw(st.integers(0, 12))
    columns = [make_array(opened(field.type), size, chance) for field in schema]
    names = [str(i) for i in range(len(schema))]
    batch = pa.RecordBatch.from_arrays(columns, names=names)
    fields = (pa.field(n, f.type, f.nullable) for n, f in zip(names, schema, strict=True))
    wanted = pa.schema(list(fields))
    batch = adopt(batch, wanted)
    start = data.draw(st.integers(0, size))
    batch = batch.slice(start, data.draw(st.integers(0, size - start)))
    expected = model(batch)
    found = Required(wanted).find(batch)
    assert (found is None) == (not expected)
    if found is None:
        decoded = Decoder(wanted).decode(joined(Encoder(wanted).encode(batch)))
        assert decoded.equals(batch)
    else:
        assert found.path in expected
        with pytest.raises(SchemaMismatch, match="of its values"):
            Encoder(wanted).encode(batch)
        loose = pa.schema([pa.field(n, opened(f.type)) for n, f in zip(names, schema, strict=True)])
        payload = joined(Encoder(loose).encode(adopt(batch, loose)))
        for checks in ("memory", "full", "layout"):
            with pytest.raises(BadCall, match="not null, and"):
                Decoder(wanted, checks=checks).decode(payload)


NESTED = {
    "struct": (X, pa.array([{"x": 1}, {"x": None}], OPEN_X), "a.x"),
    "struct of struct": (
        pa.struct([("s", X)]),
        pa.array([{"s": {"x": 1}}, {"s": {"x": None}}], pa.struct([("s", OPEN_X)])),
        "a.s.x",
    ),
    "list": (pa.list_(strict("item", pa.int64())), pa.array([[1], [2, None]]), "a.item"),
    "list of structs": (
        pa.list_(X),
        pa.array([[{"x": 1}], [{"x": None}]], pa.list_(OPEN_X)),
        "a.item.x",
    ),
    "large list": (
        pa.large_list(strict("item", pa.string())),
        pa.array([["a"], [None]], pa.large_list(pa.string())),
        "a.item",
    ),
    "fixed list": (
        pa.list_(strict("item", pa.int8()), 2),
        pa.array([[1, 2], [3, None]], pa.list_(pa.int8(), 2)),
        "a.item",
    ),
    "list view": (
        pa.list_view(strict("item", pa.int8())),
        pa.array([[1, 2], [3, None]], pa.list_view(pa.int8())),
        "a.item",
    ),
    "large list view": (
        pa.large_list_view(X),
        pa.array([[{"x": None}]], pa.large_list_view(OPEN_X)),
        "a.item.x",
    ),
    "map value": (
        pa.map_(pa.string(), strict("value", pa.int8())),
        pa.array([[("k", None)]], pa.map_(pa.string(), pa.int8())),
        "a.value",
    ),
    "map key": (
        pa.map_(X, pa.int8()),
        pa.array([[({"x": None}, 1)]], pa.map_(OPEN_X, pa.int8())),
        "a.key.x",
    ),
    "dictionary of structs": (
        pa.dictionary(pa.uint8(), X),
        pa.DictionaryArray.from_arrays(
            pa.array([0, 1], pa.uint8()), pa.array([{"x": 1}, {"x": None}], OPEN_X)
        ),
        "a.x",
    ),
    "dense union": (
        pa.dense_union([strict("u", pa.int64())]),
        pa.UnionArray.from_dense(
            pa.array([0, 0], pa.int8()), pa.array([0, 1], pa.int32()), [pa.array([1, None])], ["u"]
        ),
        "a.u",
    ),
    "sparse union": (
        pa.sparse_union([strict("u", pa.int64()), pa.field("v", pa.int64())]),
        pa.UnionArray.from_sparse(
            pa.array([1, 0], pa.int8()), [pa.array([1, None]), pa.array([1, 2])], ["u", "v"]
        ),
        "a.u",
    ),
    "run ends": (
        pa.run_end_encoded(pa.int16(), X),
        pa.RunEndEncodedArray.from_arrays(
            pa.array([2, 5], pa.int16()), pa.array([{"x": 1}, {"x": None}], OPEN_X)
        ),
        "a.values.x",
    ),
}


@pytest.mark.requirement("AC-26")
@pytest.mark.parametrize(("kind", "array", "path"), NESTED.values(), ids=NESTED)
def test_a_nested_null_is_refused_by_its_dotted_name_on_both_sides(kind, array, path):
    batch = declared(array, kind)
    with pytest.raises(SchemaMismatch, match=f"column '{path}' is declared .* not null") as caught:
        Encoder(batch.schema).encode(batch)
    assert caught.value.column == path
    loose = pa.schema([("a", array.type)])
    payload = joined(Encoder(loose).encode(pa.RecordBatch.from_arrays([array], schema=loose)))
    for checks in ("memory", "full", "layout"):
        with pytest.raises(BadCall, match=f"column '{path}' is declared .* not null"):
            Decoder(batch.schema, checks=checks).decode(payload)
    clean = batch.slice(0, 0)
    decoded = Decoder(batch.schema).decode(joined(Encoder(batch.schema).encode(clean)))
    assert decoded.equals(clean)


def test_an_encoder_goes_on_after_a_nested_null():
    schema = pa.schema([("a", X)])
    encoder = Encoder(schema)
    with pytest.raises(
        SchemaMismatch, match=r"1 of its values are null; fill them.* declare the field nullable"
    ):
        encoder.encode(declared(pa.array([{"x": None}], OPEN_X), X))
    good = declared(pa.array([{"x": 1}], OPEN_X), X)
    assert Decoder(schema).decode(joined(encoder.encode(good))).equals(good)


HIDDEN = {
    "null struct": (X, pa.array([{"x": 1}, None], OPEN_X)),
    "null grandparent": (
        pa.struct([strict("s", X)]),
        pa.array([None, {"s": {"x": 1}}], pa.struct([("s", OPEN_X)])),
    ),
    "null list": (
        pa.list_(strict("item", pa.int64())),
        pa.ListArray.from_arrays(
            pa.array([0, 1, 3, 4], pa.int32()),
            pa.array([1, None, None, 2]),
            mask=pa.array([False, True, False]),
        ).filter(pa.array([True, True, False])),
    ),
    "list in a null struct": (
        pa.struct([strict("l", pa.list_(strict("item", pa.int64())))]),
        pa.StructArray.from_arrays(
            [pa.array([[1], [None], [2]])], ["l"], mask=pa.array([False, True, False])
        ),
    ),
    "null fixed list": (
        pa.list_(strict("item", pa.int64()), 2),
        pa.array([[1, 2], None, [3, 4]], pa.list_(pa.int64(), 2)),
    ),
    "outside the offsets": (
        pa.list_(strict("item", pa.int64())),
        pa.ListArray.from_arrays(pa.array([1, 2, 3], pa.int32()), pa.array([None, 1, 2, None])),
    ),
    "view between": (
        pa.list_view(strict("item", pa.int64())),
        pa.ListViewArray.from_arrays(
            pa.array([2, 0, 2], pa.int32()),
            pa.array([1, 1, 1], pa.int32()),
            pa.array([1, None, 2]),
        ),
    ),
    "unused dictionary value": (
        pa.dictionary(pa.int8(), X),
        pa.DictionaryArray.from_arrays(
            pa.array([0, None, 2], pa.int8()),
            pa.array([{"x": 1}, {"x": None}, {"x": 2}], OPEN_X),
        ),
    ),
    "another child of a union": (
        pa.sparse_union([strict("u", pa.int64()), pa.field("v", pa.int64())]),
        pa.UnionArray.from_sparse(
            pa.array([0, 1], pa.int8()), [pa.array([1, None]), pa.array([None, None], pa.int64())]
        ),
    ),
    "value that no row of a union refers to": (
        pa.dense_union([strict("0", pa.int64())]),
        pa.UnionArray.from_dense(
            pa.array([0, 0], pa.int8()), pa.array([0, 2], pa.int32()), [pa.array([1, None, 3])]
        ),
    ),
}


@pytest.mark.requirement("AC-26")
@pytest.mark.parametrize(("kind", "array"), HIDDEN.values(), ids=HIDDEN)
def test_nested_nulls_out_of_sight_are_allowed(kind, array):
    batch = declared(array, kind)
    assert Required(batch.schema).find(batch) is None
    payload = joined(Encoder(batch.schema).encode(batch))
    for checks in ("memory", "full", "layout"):
        assert Decoder(batch.schema, checks=checks).decode(payload).equals(batch)
    for start in range(len(array)):
        assert Required(batch.schema).find(batch.slice(start, 1)) is None


def test_the_compiled_writer_and_reader_take_nested_nulls_out_of_sight():
    batch = declared(pa.array([None, {"x": 1}], OPEN_X), X)
    encoder, decoder = Encoder(batch.schema), Decoder(batch.schema)
    encoded = encoder.plain(batch)
    assert encoded is not None
    assert decoder.reader is not None
    assert decoder.reader.read(joined(encoded)).equals(batch)


def test_slices_of_nested_columns_count_their_own_nulls_alone():
    array = pa.array([{"x": None}, {"x": 1}, {"x": 2}, {"x": None}], OPEN_X)
    batch = declared(array, X)
    assert found_in(batch) == ("a.x", "int64", 2)
    assert found_in(batch.slice(1, 2)) is None
    assert found_in(batch.slice(1)) == ("a.x", "int64", 1)


@pytest.mark.parametrize("index", [pa.int8(), pa.uint16(), pa.int32(), pa.uint64()])
def test_a_null_in_a_dictionary_counts_where_a_row_refers_to_it(index):
    values = pa.array(["a", None])
    kind = pa.dictionary(index, pa.string())
    for indices, nulls in (([0, 0], 0), ([0, 1, 1], 1)):
        array = pa.DictionaryArray.from_arrays(pa.array(indices, index), values)
        found = Required(pa.schema([strict("a", kind)])).find(declared(array, kind, nullable=False))
        assert (0 if found is None else found.nulls) == nulls


RUNS = pa.RunEndEncodedArray.from_arrays(
    pa.array([2, 3, 5], pa.int16()), pa.array([1, None, 2], pa.int64())
)
TWO = pa.UnionArray.from_sparse(
    pa.array([1, 0, 1], pa.int8()), [pa.array([1, None, 3]), pa.array([None, 2, 3])], ["u", "v"]
)
DENSE = pa.UnionArray.from_dense(
    pa.array([0, 1, 0], pa.int8()),
    pa.array([0, 1, 1], pa.int32()),
    [pa.array([1, 2]), pa.array(["a", None])],
    ["u", "v"],
)
ELSEWHERE = {
    "runs": (RUNS, "a", 1),
    "runs in the middle": (RUNS.slice(1, 2), "a", 1),
    "runs of dictionary values": (
        pa.RunEndEncodedArray.from_arrays(
            pa.array([2, 3], pa.int32()),
            pa.DictionaryArray.from_arrays(pa.array([0, 1], pa.int8()), pa.array(["x", None])),
        ),
        "a",
        1,
    ),
    "runs of nothing": (
        pa.RunEndEncodedArray.from_arrays(pa.array([4], pa.int64()), pa.nulls(1)),
        "a",
        1,
    ),
    "dictionary index": (
        pa.DictionaryArray.from_arrays(pa.array([0, None], pa.int8()), pa.array(["x"])),
        "a",
        1,
    ),
    "dictionary value": (
        pa.DictionaryArray.from_arrays(pa.array([1, 0, 1], pa.uint16()), pa.array(["x", None])),
        "a",
        1,
    ),
    "sparse union": (TWO, "a", 2),
    "dense union": (DENSE, "a", 1),
    "union of runs": (
        pa.UnionArray.from_sparse(pa.array([0, 0, 0, 0, 0], pa.int8()), [RUNS], ["u"]),
        "a",
        1,
    ),
    "union in a union": (
        pa.UnionArray.from_sparse(pa.array([0, 0, 0], pa.int8()), [TWO], ["w"]),
        "a",
        2,
    ),
}


@pytest.mark.parametrize(("array", "path", "nulls"), ELSEWHERE.values(), ids=ELSEWHERE)
def test_not_null_holds_where_values_are_elsewhere_in_runs_unions_and_dictionaries(
    array, path, nulls
):
    wide = pa.RecordBatch.from_arrays([array], names=["a"])
    batch = declared(array, array.type, nullable=False)
    assert found_in(batch) == (path, str(array.type), nulls)
    with pytest.raises(SchemaMismatch, match=f"column '{path}' is declared .* not null") as caught:
        Encoder(batch.schema).encode(batch)
    assert caught.value.column == path
    payload = joined(Encoder(wide.schema).encode(wide))
    for checks in ("memory", "full", "layout"):
        with pytest.raises(BadCall, match=f"column '{path}' is declared .* not null"):
            Decoder(batch.schema, checks=checks).decode(payload)
    assert Decoder(wide.schema).decode(payload).equals(wide)


@pytest.mark.parametrize(("array", "path", "nulls"), ELSEWHERE.values(), ids=ELSEWHERE)
def test_not_null_fields_inside_columns_hold_for_runs_unions_and_dictionaries(array, path, nulls):
    around = pa.StructArray.from_arrays([array], ["x"])
    kind = pa.struct([strict("x", array.type)])
    assert found_in(declared(around, kind)) == ("a.x", shorten(str(array.type)), nulls)
    hidden = pa.StructArray.from_arrays([array], ["x"], mask=pa.array([True] * len(array)))
    assert found_in(declared(hidden, kind)) is None


@pytest.mark.parametrize(
    "array",
    [
        RUNS.slice(0, 2),
        RUNS.slice(3),
        DENSE.slice(0, 1),
        DENSE.slice(2),
        TWO.slice(2),
        pa.DictionaryArray.from_arrays(pa.array([0, 0]), pa.array(["x", None])),
    ],
)
def test_not_null_runs_unions_and_dictionaries_may_have_nulls_that_no_row_refers_to(array):
    batch = declared(array, array.type, nullable=False)
    assert found_in(batch) is None
    payload = joined(Encoder(batch.schema).encode(batch))
    found = Decoder(batch.schema).decode(payload)
    found.validate(full=True)
    assert found.equals(batch)


def test_a_not_null_child_of_a_not_null_union_is_named_itself():
    kind = pa.sparse_union([strict("u", pa.int64()), pa.field("v", pa.int64())])
    assert found_in(declared(TWO, kind, nullable=False)) == ("a", str(shorten(str(kind))), 1)
    assert found_in(declared(TWO.slice(1), kind, nullable=False)) == ("a.u", "int64", 1)


def test_a_nested_null_is_found_among_many_columns_of_one_type():
    good, bad = pa.array([{"x": 1}], OPEN_X), pa.array([{"x": None}], OPEN_X)
    schema = pa.schema([(f"c{n}", X) for n in range(2000)])
    batch = pa.RecordBatch.from_arrays([good] * 1990 + [bad] * 10, names=schema.names)
    batch = adopt(batch, schema)
    assert found_in(batch) == ("c1990.x", "int64", 1)
    check = Required(schema).check
    assert check is not None and check.count == 3


def test_columns_that_may_have_nulls_are_not_looked_at():
    assert Required(pa.schema([("a", pa.int64()), ("s", OPEN_X)])).check is None
    check = Required(pa.schema([("a", pa.int64()), ("s", X)])).check
    assert check is not None and check.count == 3


def test_many_overlapping_list_views_are_looked_at_once():
    rows, values = 20_000, 20_000
    array = pa.ListViewArray.from_arrays(
        pa.array([0] * rows, pa.int32()),
        pa.array([values] * rows, pa.int32()),
        pa.array([None, *range(values - 1)], pa.int64()),
    )
    batch = declared(array, pa.list_view(strict("item", pa.int64())))
    assert found_in(batch) == ("a.item", "int64", 1)


def test_offsets_that_point_outside_are_an_error_and_not_read():
    values = pa.array([{"x": None}], OPEN_X)
    offsets = pa.array([0, 1 << 30, 1], pa.int32()).buffers()[1]
    second_is_null = pa.py_buffer(b"\x01")
    array = pa.Array.from_buffers(pa.list_(OPEN_X), 2, [second_is_null, offsets], children=[values])
    batch = declared(array, pa.list_(X))
    with pytest.raises(ValueError, match="points outside its array"):
        Required(batch.schema).find(batch)
    with pytest.raises(LocalProtocolError, match="is damaged"):
        Encoder(batch.schema).encode(batch)


def test_nodes_that_are_no_tree_are_refused():
    assert set(KINDS) >= {"struct", "leaf", "dictionary"}
    leaf: tuple[str, bool, int, int, list[tuple[int, int, int]]] = ("leaf", True, 0, 1, [])
    wrong: list[list[tuple[str, bool, int, int, list[tuple[int, int, int]]]]] = [
        [],
        [("leaf", True, 0, 0, [])],
        [("struct", False, 0, 0, [(0, 0, 0)])],
        [("struct", False, 0, 0, [(0, 0, 2)]), leaf],
        [("struct", False, 0, 0, [(-2, 0, 1)]), leaf],
        [("struct", False, 0, 1, [(0, 0, 1)]), leaf],
        [("struct", False, 0, -1, [(0, 0, 1)]), leaf],
        [("struct", False, 0, i, [(0, 0, i + 1)]) for i in range(300)] + [leaf],
    ]
    for nodes in wrong:
        with pytest.raises(LocalProtocolError):
            NotNull(nodes)
