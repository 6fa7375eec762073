"""Handlers on numpy arrays, as they are registered, called and answered."""

from __future__ import annotations

import asyncio
import sys
import threading
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import aqueduct
from aqueduct.errors import BadCall, ConfigError, HandlerFailed
from tests.support.calls import connected, everything, sync_client, until

LOOSE: Any = aqueduct
POINTS = pa.schema([("x", pa.float64()), ("y", pa.float32())])
SUMS = pa.schema([("sum", pa.float32())])
FEATURES = pa.schema([("features", pa.fixed_shape_tensor(pa.float32(), [2, 3]))])


def points(*values: float | None) -> pa.RecordBatch:
    columns = {"x": pa.array(values, pa.float64()), "y": pa.array(values, pa.float32())}
    return pa.record_batch(columns, schema=POINTS)


@pytest.fixture
def service() -> aqueduct.Service:
    made = aqueduct.Service("models")

    @made.handler(numpy=True, input=POINTS, output=SUMS, concurrency=4)
    def add(arrays):
        """Adds the columns."""
        assert type(arrays) is dict
        return arrays["x"] + arrays["y"]

    @made.handler(numpy="nan", input=POINTS, output=SUMS)
    async def add_later(arrays, call):
        return {"sum": arrays["x"] * int(call.headers["factor"])}

    @made.handler(numpy=True)
    def same(arrays):
        return arrays

    @made.handler(numpy=True, input=FEATURES, output=lambda schema: SUMS)
    def flat(arrays):
        assert arrays["features"].shape[1:] == (2, 3)
        return {"sum": arrays["features"].sum(axis=(1, 2))}

    @made.handler(numpy=True, input=POINTS, output=SUMS)
    def wrong(arrays):
        return {"total": arrays["x"]}

    return made


@pytest.mark.parametrize("carrier", ["memory", "tcp"])
async def test_arrays_in_and_arrays_out(service, carrier):
    async with connected(service, carrier) as client:
        assert (await client.call("add", points(1, 2))).to_pydict() == {"sum": [2, 4]}
        batches = [points(*range(n)) for n in (0, 1, 5000)]
        found = await everything(client.exchange("add", batches, schema=POINTS))
        assert [batch["sum"].to_pylist() for batch in found] == [
            [2 * n for n in range(count)] for count in (0, 1, 5000)
        ]
        later = await client.call("add_later", points(1, None), headers={"factor": "3"})
        assert np.array_equal(later["sum"], [3, np.nan], equal_nan=True)
        assert await client.call("same", points(1, 2)) == points(1, 2)
        tensors = np.arange(12, dtype="f4").reshape(2, 2, 3)
        given = pa.RecordBatch.from_arrays(
            [pa.FixedShapeTensorArray.from_numpy_ndarray(tensors)], names=["features"]
        )
        assert (await client.call("flat", given)).to_pydict() == {"sum": [15, 51]}
        described = {each.name: each for each in (await client.describe()).handlers}
        assert described["add"].summary == "Adds the columns."
        assert described["add"].output == SUMS


async def test_rows_of_several_calls_become_one_array():
    service = aqueduct.Service("models")
    seen: list[tuple[int, int]] = []
    begun, free = threading.Event(), threading.Event()

    @service.handler(numpy=True, batch=aqueduct.Batching())
    def same(arrays, calls):
        seen.append((len(arrays["x"]), len(calls)))
        begun.set()
        assert free.wait(20)
        return arrays

    async with connected(service, "memory") as client:
        first = asyncio.create_task(client.call("same", points(0)))
        assert await asyncio.to_thread(begun.wait, 20)
        batches = [points(1, 2), points(3, 4)]
        calls = [asyncio.create_task(client.call("same", batch)) for batch in batches]
        await until(lambda: service.counters()["waiting_calls"] == 2)
        free.set()
        await first
        assert await asyncio.gather(*calls) == batches
    assert seen == [(1, 1), (4, 2)]


def test_a_sync_client_calls_the_same(service):
    with sync_client(service, "tcp") as client:
        assert client.call("add", points(1, 2)).to_pydict() == {"sum": [2, 4]}


async def test_what_is_wrong_with_a_batch_is_the_fault_of_the_client(service):
    async with connected(service) as client:
        with pytest.raises(BadCall, match=r"column 'x' \(double\) has 1 nulls, .*fill them before"):
            await client.call("add", points(1, None))
        other = pa.record_batch({"x": pa.array([{"a": 1}])})
        with pytest.raises(BadCall, match="column 'x' has the type struct"):
            await client.call("same", other)
        with pytest.raises(BadCall, match=r"column 'n' \(int64\) has 1 nulls"):
            await client.call("same", pa.record_batch({"n": [1, None]}))


async def test_what_is_wrong_with_an_answer_is_the_fault_of_the_handler(service):
    async with connected(service) as client:
        with pytest.raises(HandlerFailed, match="must have the keys 'sum'; it lacks 'sum'"):
            await client.call("wrong", points(1))


async def test_an_array_that_is_kept_keeps_its_values(service):
    kept = []

    @service.handler(numpy=True, input=POINTS)
    def keep(arrays):
        kept.append(arrays["x"])
        assert not arrays["x"].flags.writeable
        return arrays

    async with connected(service, "tcp") as client:
        for number in range(5):
            await client.call("keep", points(*[number] * 20_000))
    assert all((array == number).all() for number, array in enumerate(kept))


@pytest.mark.parametrize(
    ("options", "function", "why"),
    [
        ({"numpy": 5}, lambda arrays: arrays, "numpy is 5; it must be True, False or 'nan'"),
        ({"kind": "sink"}, lambda batches: None, "numpy=True needs an exchange .*, not a sink"),
        (
            {"input": pa.schema([("x", pa.decimal128(5))])},
            lambda arrays: arrays,
            r"handler 'f': input: column 'x' has the type decimal128\(5, 0\), which has no numpy",
        ),
        (
            {"output": pa.schema([("x", pa.null())])},
            lambda arrays: arrays,
            "handler 'f': output: column 'x' has the type null",
        ),
    ],
)
def test_what_cannot_work_is_refused(options, function, why):
    with pytest.raises(ConfigError, match=why):
        LOOSE.Service("models").handler("f", **{"numpy": True, **options})(function)


def test_generators_take_batches():
    service = aqueduct.Service("models")
    with pytest.raises(ConfigError, match="needs an exchange that is a function of one batch, not"):

        @service.handler(numpy=True)
        def steps(batches):
            yield from batches


def test_without_numpy_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "numpy", None)
    for name in ("aqueduct.arrow.numpy_arrays", "aqueduct.service.numpy_handler"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(ConfigError, match=r"numpy=True needs numpy .*pip install numpy"):
        aqueduct.Service("models").handler("f", numpy=True)(lambda arrays: arrays)
