"""Casts of lists by offsets and sizes, of structs, maps, dictionaries and runs, nested.

Trees of arrays are drawn together with what each row must become, as plain Python values.
"""

from __future__ import annotations

import datetime
import itertools
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Final

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aqueduct.arrow.cast_ways import obstacle
from aqueduct.arrow.casts import Unfit, cast, first_null
from tests.arrow.judges import Fails, cast_by_hand
from tests.support.selection import EXAMPLES

BAD: Final = object()
"""What a row becomes that cannot be cast."""
LONG = "a text too long for being inside of a view"
LISTS = {
    pa.list_: pa.ListArray,
    pa.large_list: pa.LargeListArray,
    pa.list_view: pa.ListViewArray,
    pa.large_list_view: pa.LargeListViewArray,
}
WIDE = (pa.large_list, pa.large_list_view)
VIEWS = (pa.list_view, pa.large_list_view)
LEAVES = [
    (pa.int64(), pa.int8(), [0, 1, -5, 127, 128, None]),
    (pa.uint8(), pa.string_view(), [0, 255, None]),
    (pa.string(), pa.int32(), ["1", "-7", "x", None]),
    (
        pa.string_view(),
        pa.string(),
        ["", "word", "a text too long for being inside of a view", None],
    ),
    (pa.string_view(), pa.string_view(), ["", "a text too long for being inside of a view", None]),
    (pa.binary(), pa.string(), [b"", b"a", b"\xff", None]),
    (pa.float64(), pa.float32(), [0.5, -0.0, float("nan"), 1e300, None]),
    (pa.decimal128(5, 2), pa.decimal256(3, 1), [Decimal("1.50"), Decimal("1.25"), None]),
    (pa.bool_(), pa.int16(), [True, False, None]),
    (pa.int16(), pa.int16(), [1, None]),
    (pa.null(), pa.int16(), [None]),
]


@dataclass
class Tree:
    """An array, the type that it is to be cast to, and what each row must become."""

    array: pa.Array
    wanted: pa.DataType
    rows: list[Any]


@st.composite
def trees(draw: Any, length: int, depth: int, encoded: bool = True) -> Tree:
    """Trees of arrays of ``length`` rows; ``encoded``: also dictionaries and runs."""
    kinds = [leaf_trees]
    if depth:
        kinds = [list_trees, list_trees, struct_trees, map_trees]
        kinds += [dictionary_trees, run_trees] if encoded else []
    made: Tree = draw(draw(st.sampled_from(kinds))(length, depth))
    assert len(made.array) == len(made.rows) == length
    return made


@st.composite
def leaf_trees(draw: Any, length: int, depth: int) -> Tree:
    got, wanted, values = draw(st.sampled_from(LEAVES))
    values = [draw(st.sampled_from(values)) for _ in range(length)]
    return Tree(pa.array(values, got), wanted, [by_hand(each, got, wanted) for each in values])


def by_hand(value: Any, got: pa.DataType, wanted: pa.DataType) -> Any:
    if isinstance(value, str) and wanted in (pa.string(), pa.string_view()):
        return value
    if isinstance(value, bytes):
        return BAD if value == b"\xff" else value.decode()
    if value is not None and wanted == pa.string_view():
        return str(value)
    try:
        return cast_by_hand(value, got, wanted, False)
    except Fails:
        return BAD


@st.composite
def list_trees(draw: Any, length: int, depth: int) -> Tree:
    child = draw(trees(draw(st.integers(0, 6)), depth - 1))
    nulls = draw(st.lists(st.booleans(), min_size=length, max_size=length))
    form = draw(st.sampled_from([*LISTS, None]))
    if form is None:
        size = draw(st.integers(1, 3))  # Arrow divides by it
        child = draw(trees(size * length, depth - 1))
        got = pa.list_(child.array.type, size)
        array = pa.FixedSizeListArray.from_arrays(child.array, type=got, mask=mask(nulls))
        parts = [(place * size, size) for place in range(length)]
    else:
        parts = parts_in_order(draw, length, len(child.rows), form in VIEWS)
        array = lists(form, parts, nulls, child.array)
    return listed(draw, child, parts, nulls, array)


def parts_in_order(draw: Any, length: int, size: int, view: bool) -> list[tuple[int, int]]:
    """Places of lists in their values: of views anywhere, else one after the other."""
    if view:
        starts = [draw(st.integers(0, size)) for _ in range(length)]
        return [(start, draw(st.integers(0, size - start))) for start in starts]
    ends = sorted(draw(st.integers(0, size)) for _ in range(length + 1))
    return [(start, end - start) for start, end in itertools.pairwise(ends)]


def lists(form: Any, parts: list[tuple[int, int]], nulls: list[bool], values: pa.Array) -> pa.Array:
    """Lists of these offsets and sizes; what is null may have values too."""
    width = pa.int64() if form in WIDE else pa.int32()
    offsets = [start for start, _ in parts]
    if form in VIEWS:
        sizes = pa.array([size for _, size in parts], width)
        return LISTS[form].from_arrays(pa.array(offsets, width), sizes, values, mask=mask(nulls))
    offsets.append(sum(parts[-1]) if parts else 0)
    return LISTS[form].from_arrays(pa.array(offsets, width), values, mask=mask(nulls))


def mask(nulls: list[bool]) -> pa.Array | None:
    return pa.array(nulls, pa.bool_()) if any(nulls) else None


def listed(
    draw: Any, child: Tree, parts: list[tuple[int, int]], nulls: list[bool], array: pa.Array
) -> Tree:
    """Lists around ``child``, to become lists of any form."""
    field = pa.field("element", child.wanted, draw(st.booleans()))
    rows: list[Any] = []
    for (start, size), null in zip(parts, nulls, strict=True):
        inner = child.rows[start : start + size]
        bad = any(each is BAD or (each is None and not field.nullable) for each in inner)
        rows.append(None if null else BAD if bad else inner)
    form = draw(st.sampled_from([*LISTS, None]))
    if form is None:
        size = array.type.list_size if pa.types.is_fixed_size_list(array.type) else 2
        rows = [row if row is None or row is BAD or len(row) == size else BAD for row in rows]
        return Tree(array, pa.list_(field, size), rows)
    return Tree(array, form(field), rows)


@st.composite
def struct_trees(draw: Any, length: int, depth: int) -> Tree:
    names = draw(st.sampled_from([["x"], ["x", "Y"], ["y", "x"]]))
    fields = {name: draw(trees(length, depth - 1)) for name in names}
    nulls = draw(st.lists(st.booleans(), min_size=length, max_size=length))
    array = pa.StructArray.from_arrays(
        [tree.array for tree in fields.values()], names, mask=mask(nulls)
    )
    wanted = [
        pa.field(name.lower(), tree.wanted, draw(st.booleans())) for name, tree in fields.items()
    ]
    wanted.sort(key=lambda field: field.name)
    mine = {name.lower(): tree.rows for name, tree in fields.items()}
    rows: list[Any] = []
    for row, null in enumerate(nulls):
        found = {field.name: mine[field.name][row] for field in wanted}
        bad = any(
            found[field.name] is BAD or (found[field.name] is None and not field.nullable)
            for field in wanted
        )
        rows.append(None if null else BAD if bad else found)
    return Tree(array, pa.struct(wanted), rows)


@st.composite
def map_trees(draw: Any, length: int, depth: int) -> Tree:
    child = draw(trees(draw(st.integers(0, 6)), depth - 1))
    keys = [f"key {place}" for place in range(len(child.rows))]
    nulls = draw(st.lists(st.booleans(), min_size=length, max_size=length))
    parts = parts_in_order(draw, length, len(keys), False)
    offsets: list[int | None] = [start for start, _ in parts]
    offsets.append(sum(parts[-1]) if parts else 0)
    array = pa.MapArray.from_arrays(
        pa.array(offsets, pa.int32()), pa.array(keys), child.array, mask=mask(nulls)
    )
    field = pa.field("item", child.wanted, draw(st.booleans()))
    rows: list[Any] = []
    for (start, size), null in zip(parts, nulls, strict=True):
        inner = list(zip(keys, child.rows, strict=True))[start : start + size]
        bad = any(each is BAD or (each is None and not field.nullable) for _, each in inner)
        rows.append(None if null else BAD if bad else inner)
    return Tree(array, pa.map_(draw(st.sampled_from([pa.string(), pa.string_view()])), field), rows)


@st.composite
def dictionary_trees(draw: Any, length: int, depth: int) -> Tree:
    child = draw(trees(draw(st.integers(1, 4)), depth - 1, encoded=False))
    choices = st.none() | st.integers(0, len(child.rows) - 1)
    indices = [draw(choices) for _ in range(length)]
    array = pa.DictionaryArray.from_arrays(pa.array(indices, pa.int8()), child.array)
    rows = [None if index is None else child.rows[index] for index in indices]
    wanted = child.wanted
    if draw(st.booleans()):
        wanted = pa.dictionary(draw(st.sampled_from([pa.int8(), pa.uint32()])), child.wanted)
    return Tree(array, wanted, rows)


@st.composite
def run_trees(draw: Any, length: int, depth: int) -> Tree:
    ends = sorted({draw(st.integers(1, max(length, 1))) for _ in range(3)} | {max(length, 1)})
    child = draw(trees(len(ends), depth - 1, encoded=False))
    array = pa.RunEndEncodedArray.from_arrays(pa.array(ends, pa.int32()), child.array)
    rows = [child.rows[next(i for i, end in enumerate(ends) if row < end)] for row in range(length)]
    wanted = child.wanted
    if draw(st.booleans()):
        wanted = pa.run_end_encoded(draw(st.sampled_from([pa.int16(), pa.int64()])), child.wanted)
    return Tree(array.slice(0, length), wanted, rows)


def same(found: Any, wanted: Any) -> bool:
    """Equal by value, inside too: NaN is NaN, and -0.0 is 0.0."""
    if isinstance(wanted, list | tuple):
        return len(found) == len(wanted) and all(map(same, found, wanted))
    if isinstance(wanted, dict):
        return list(found) == list(wanted) and all(map(same, found.values(), wanted.values()))
    return bool(found == wanted or (found != found and wanted != wanted))


@settings(max_examples=4 * EXAMPLES, deadline=None)
@given(st.data())
def test_casts_of_nested_types_change_no_value_to_depth_two(data):
    length = data.draw(st.integers(0, 5))
    tree = data.draw(trees(length, data.draw(st.integers(1, 2))))
    start = data.draw(st.integers(0, length))
    size = data.draw(st.integers(0, length - start))
    array, rows = tree.array.slice(start, size), tree.rows[start : start + size]
    assert obstacle(tree.wanted, array.type) is None
    if BAD in rows:
        with pytest.raises(Unfit) as caught:
            cast(array, tree.wanted)
        assert rows[caught.value.row] is BAD
        return
    made = cast(array, tree.wanted)
    made.validate(full=True)
    assert made.type.equals(tree.wanted)
    assert same(made.to_pylist(), rows), (made.to_pylist(), rows)


# List views


def view(form: Any, parts: list[Any], values: pa.Array) -> pa.Array:
    """A list view of these offsets and sizes; None is a null that has values of its own."""
    nulls = [part is None for part in parts]
    return lists(form, [(1, 2) if part is None else part for part in parts], nulls, values)


@pytest.mark.parametrize("wanted", [*LISTS], ids=lambda form: form.__name__)
@pytest.mark.parametrize("form", VIEWS, ids=lambda form: form.__name__)
@pytest.mark.parametrize(
    ("parts", "rows"),
    [
        ([(0, 2), (2, 1)], [["a", "b"], ["c"]]),
        ([(4, 1), (0, 2)], [["e"], ["a", "b"]]),
        ([(0, 3), (1, 3)], [["a", "b", "c"], ["b", "c", "d"]]),
        ([(1, 1), (3, 2)], [["b"], ["d", "e"]]),
        ([None, (0, 1), None], [None, ["a"], None]),
        ([(3, 0), (5, 0), (0, 5)], [[], [], ["a", "b", "c", "d", "e"]]),
    ],
    ids=["in order", "out of order", "overlaps", "gaps", "nulls", "empty"],
)
def test_list_views_are_read_by_offsets_and_sizes(form, wanted, parts, rows):
    for values in (pa.array([*"abcde"]), pa.array([*"abcde"], pa.string_view())):
        array = view(form, parts, values)
        assert cast(array, wanted(pa.large_string())).to_pylist() == rows
        for start in range(len(rows) + 1):
            assert cast(array.slice(start), wanted(pa.string())).to_pylist() == rows[start:]
        column = pa.StructArray.from_arrays([array], ["v"])
        inside = pa.struct([("v", wanted(pa.string()))])
        assert cast(column.slice(1), inside).to_pylist() == [{"v": row} for row in rows[1:]]


def test_list_views_name_the_row_of_a_value_that_does_not_fit():
    array = view(pa.list_view, [(2, 1), (0, 1), (0, 3)], pa.array(["1", "x", "3"]))
    assert cast(array.slice(0, 2), pa.list_(pa.int8())).to_pylist() == [[3], [1]]
    with pytest.raises(Unfit) as caught:
        cast(array, pa.list_(pa.int8()))
    assert (caught.value.row, caught.value.path) == (2, ("item",))
    assert caught.value.value == "'x'"


def test_list_views_that_overlap_too_much_are_refused_before_memory_is_taken():
    rows = 1 << 16
    values = pa.array([1] * rows, pa.int8())
    array = lists(pa.list_view, [(0, rows)] * rows, [False] * rows, values)
    with pytest.raises(Unfit, match="more values together than list<item: int64> can count") as e:
        cast(array, pa.list_(pa.int64()))
    assert e.value.row is None
    with pytest.raises(Unfit, match=r"its lists overlap, .* the limit of 1073741824 bytes"):
        cast(array, pa.large_list(pa.int64()))
    few = array.slice(0, 2)
    assert len(cast(few, pa.list_(pa.int8()), limit=2 * rows).flatten()) == 2 * rows
    with pytest.raises(Unfit, match=r"than the limit of 131071 bytes \(Calls.batch_limit\)"):
        cast(few, pa.list_(pa.int8()), limit=2 * rows - 1)
    # What one value takes counts, not how many there are.
    words = pa.array(["", "x" * 1000, *[""] * 1000])
    array = lists(pa.list_view, [(1, 1)] * 100, [False] * 100, words)
    with pytest.raises(Unfit, match="its lists overlap"):
        cast(array, pa.list_(pa.string()), limit=50_000)
    assert cast(array, pa.list_(pa.string()), limit=200_000).to_pylist() == [["x" * 1000]] * 100
    apart = lists(pa.list_view, [(500, 500), (0, 0), (0, 500)], [False] * 3, words)
    made = cast(apart, pa.list_(pa.string()), limit=1000)
    assert made.to_pylist() == apart.to_pylist()


def test_lists_of_another_form_share_their_values():
    array = pa.array([[1, 2], [3]])
    made = cast(array, pa.large_list(pa.field("element", pa.int64())))
    assert made.buffers()[3].address == array.buffers()[3].address


@pytest.mark.parametrize(
    ("rows", "size", "why"),
    [
        ([[1, 2], None, [3]], 2, "it has 1 values, and 2 are wanted"),
        ([[1], []], 1, "it has 0 values, and 1 are wanted"),
    ],
)
def test_lists_of_one_size_have_that_size(rows, size, why):
    with pytest.raises(Unfit) as caught:
        cast(pa.array(rows), pa.list_(pa.int8(), size))
    assert (caught.value.row, caught.value.why) == (len(rows) - 1, why)


# Structs, maps, dictionaries, runs


def test_struct_casts_find_fields_by_name():
    array = pa.array([{"b": 1, "A": "2"}, None], pa.struct([("b", pa.int64()), ("A", pa.string())]))
    wanted = pa.struct([("a", pa.int8()), ("b", pa.string())])
    assert cast(array, wanted).to_pylist() == [{"a": 2, "b": "1"}, None]
    assert cast(pa.array([{}, None, {}], pa.struct([])), pa.struct([])).to_pylist() == [
        {},
        None,
        {},
    ]


def test_struct_casts_do_not_look_at_what_a_null_hides():
    hidden = pa.StructArray.from_arrays([pa.array(["x", "1"])], ["v"], mask=pa.array([True, False]))
    runs = pa.RunEndEncodedArray.from_arrays(pa.array([1, 2], pa.int32()), pa.array(["x", "1"]))
    encoded = pa.StructArray.from_arrays([runs], ["v"], mask=pa.array([True, False]))
    wanted = pa.struct([pa.field("v", pa.int8(), nullable=False)])
    for array in (hidden, encoded):
        assert cast(array, wanted).to_pylist() == [None, {"v": 1}]
        assert cast(array.slice(1), wanted).to_pylist() == [{"v": 1}]


def test_map_casts_lose_no_entry():
    array = pa.array(
        [[("1", "a")], None, [("1", "b"), ("01", "c")]], pa.map_(pa.string(), pa.string())
    )
    with pytest.raises(Unfit, match="two keys would become one") as caught:
        cast(array, pa.map_(pa.int64(), pa.string()))
    assert (caught.value.row, caught.value.path) == (2, ("key",))
    made = cast(array.slice(0, 2), pa.map_(pa.int64(), pa.string()))
    assert made.to_pylist() == [[(1, "a")], None]
    near = pa.array([[(0.1, 1), (0.10000000000000002, 2)]], pa.map_(pa.float64(), pa.int8()))
    with pytest.raises(Unfit, match="two keys would become one"):
        cast(near, pa.map_(pa.float32(), pa.int8()))
    halves = pa.array([[(1.5, 1), (2.0, 2)]], pa.map_(pa.float64(), pa.int8()))
    with pytest.raises(Unfit, match="two keys would become one: 2, 2"):
        cast(halves, pa.map_(pa.int8(), pa.int8()), rounding=True)


def test_dictionary_casts_look_only_at_what_rows_have():
    array = pa.DictionaryArray.from_arrays(pa.array([1, None, 1]), pa.array(["x", "1"]))
    assert cast(array, pa.int8()).to_pylist() == [1, None, 1]
    made = cast(array, pa.dictionary(pa.int8(), pa.int8()))
    assert made.to_pylist() == [1, None, 1]
    with pytest.raises(Unfit) as caught:
        cast(pa.DictionaryArray.from_arrays(pa.array([1, 0]), pa.array(["x", "1"])), pa.int8())
    assert (caught.value.row, caught.value.value) == (1, "'x'")


def test_dictionary_casts_keep_the_order_of_values():
    kind = pa.dictionary(pa.int32(), pa.string(), ordered=True)
    array = pa.DictionaryArray.from_arrays(
        pa.array([1, 0]), pa.array(["low", "high"]), ordered=True
    )
    wanted = pa.dictionary(pa.int8(), pa.large_string(), ordered=True)
    made = cast(array.cast(kind), wanted)
    assert made.type.equals(wanted)
    assert made.dictionary.to_pylist() == ["low", "high"] and made.to_pylist() == ["high", "low"]


def test_dictionary_and_run_casts_name_what_cannot_be_counted():
    values = pa.array([str(number) for number in range(300)])
    with pytest.raises(Unfit, match="value 129 of the dictionary, above what int8 can") as caught:
        cast(values, pa.dictionary(pa.int8(), pa.string()))
    assert (caught.value.row, caught.value.value) == (128, "'128'")
    with pytest.raises(Unfit, match="value 257 of the dictionary, above what uint8 can"):
        cast(values, pa.dictionary(pa.uint8(), pa.string()))
    many = pa.nulls(1 << 15, pa.int8())
    with pytest.raises(Unfit, match="32768 rows are more than run ends of int16 can count"):
        cast(many, pa.run_end_encoded(pa.int16(), pa.int64()))


def test_nulls_of_dictionaries_and_runs_count_where_none_may_be():
    entries = pa.array(["a", None])
    hidden = pa.DictionaryArray.from_arrays(pa.array([0, 1]), entries)
    for inner in (hidden.type, pa.run_end_encoded(pa.int32(), pa.string())):
        field = pa.field("v", inner, nullable=False)
        array = pa.StructArray.from_arrays([hidden], ["v"])
        with pytest.raises(Unfit, match="declared not null") as caught:
            cast(array, pa.struct([field]))
        assert (caught.value.row, caught.value.path) == (1, ("v",))


TEXTS = pa.array(["a", "b", None])
ONES = pa.DictionaryArray.from_arrays(pa.array([0, 2, 2, 1]), TEXTS)
CODES = pa.array([0, 1, 0, 1], pa.int8())


@pytest.mark.parametrize(
    ("array", "rows"),
    [
        (ONES, [1, 2]),
        (pa.DictionaryArray.from_arrays(pa.array([0, None, 2, 1]), TEXTS), [1, 2]),
        (
            pa.RunEndEncodedArray.from_arrays(pa.array([1, 3, 5], pa.int32()), ONES[:3]),
            [1, 2, 3, 4],
        ),
        (pa.UnionArray.from_sparse(CODES, [ONES, pa.array([1, None, 3, None])]), [1, 2, 3]),
        (
            pa.UnionArray.from_dense(
                CODES, pa.array([0, 1, 2, 0], pa.int32()), [TEXTS, pa.array([None, 2])]
            ),
            [2, 3],
        ),
        (pa.ExtensionArray.from_storage(pa.opaque(ONES.type, "a", "b"), ONES), [1, 2]),
    ],
    ids=["dictionary", "indices", "runs", "sparse union", "dense union", "extension"],
)
def test_nulls_that_no_bitmap_tells_are_found_in_slices(array, rows):
    for start in range(len(array)):
        for end in range(start, len(array) + 1):
            wanted = [row - start for row in rows if start <= row < end]
            assert first_null(array.slice(start, end - start)) == (wanted or [-1])[0]
    there = pa.array([row == rows[1] for row in range(len(array))])
    assert first_null(array, there) == rows[1]


def test_values_of_datetime_inside_are_judged_by_datetime():
    noon, midnight = datetime.datetime(2024, 1, 1, 12), datetime.datetime(2024, 1, 2)
    array = pa.array([[midnight], None, [midnight, noon]])
    assert cast(array.slice(0, 2), pa.list_view(pa.date32())).to_pylist() == [
        [midnight.date()],
        None,
    ]
    with pytest.raises(Unfit) as caught:
        cast(array, pa.list_(pa.date32()))
    assert (caught.value.row, caught.value.value) == (2, repr(noon))
