"""Rows of different calls in one call of their handler: ``batch=`` of a handler."""

from __future__ import annotations

import asyncio
import decimal
import gc
import threading
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

import aqueduct
from aqueduct.client.client import Client
from aqueduct.endpoint import accounts
from aqueduct.errors import Busy, ConfigError, DeadlineExceeded, HandlerFailed, SchemaMismatch
from aqueduct.service.batching import BatchFilter, QueuedBatch, split
from aqueduct.service.turns import Fit
from tests.support.calls import (
    NUMBERS,
    config,
    connected,
    everything,
    numbers,
    serving,
    until,
    values,
)

DOUBLED = pa.schema([("double", pa.int64())])
SHAPES = ["function", "coroutine"]


def doubled(batch: pa.RecordBatch) -> pa.RecordBatch:
    return pa.record_batch({"double": pc.multiply(batch["id"], 2)}, schema=DOUBLED)


class Model:
    """A handler that can be held up, and says of each run whose rows it had."""

    def __init__(
        self,
        shape: str = "function",
        work: Callable[[pa.RecordBatch], Any] = doubled,
        *,
        input: pa.Schema | None = NUMBERS,
        output: pa.Schema | None = DOUBLED,
        batch: aqueduct.Batching | None = None,
        **options: Any,
    ) -> None:
        self.runs: list[list[int]] = []
        self.seen: list[tuple[aqueduct.CallRows, ...]] = []
        self.batches: list[pa.RecordBatch] = []
        self.open = threading.Event()
        self.open.set()
        self.charged = 0
        settings = {name: options.pop(name) for name in ("config",) if name in options}
        self.service = aqueduct.Service("model", **settings)
        options |= {"input": input, "output": output, "batch": batch or aqueduct.Batching()}

        def begin(batch: pa.RecordBatch, calls: tuple[aqueduct.CallRows, ...]) -> None:
            self.runs.append([each.rows for each in calls])
            self.seen.append(calls)
            self.batches.append(batch)

        if shape == "function":

            @self.service.handler("score", **options)
            def score(batch, calls):
                begin(batch, calls)
                assert self.open.wait(20)
                return work(batch)

        else:

            @self.service.handler("score", **options)
            async def score_async(batch, calls):
                begin(batch, calls)
                await until(self.open.is_set)
                return work(batch)

    async def together(self, client: Client, *batches: pa.RecordBatch, **options: Any) -> list[Any]:
        """What calls give that run together, behind one that keeps the handler busy."""
        self.open.clear()
        already = len(self.runs)
        first = asyncio.create_task(client.call("score", batches[0].slice(0, 0)))
        await until(lambda: len(self.runs) > already)
        calls = [asyncio.create_task(client.call("score", each, **options)) for each in batches]
        await until(lambda: self.service.counters()["waiting_calls"] == len(batches))
        self.open.set()
        await first
        return await asyncio.gather(*calls, return_exceptions=True)


@pytest.mark.parametrize("shape", SHAPES)
async def test_first_answers_of_a_run_leave_while_others_are_encoded(shape):
    model, loop, answered = Model(shape), asyncio.get_running_loop(), []

    def turn() -> None:
        answered.append(0)
        handle[0] = loop.call_soon(turn)

    async with connected(model.service, "memory") as client:
        call = client.call

        async def counted(*args: Any, **options: Any) -> Any:
            answer = await call(*args, **options)
            answered[-1] += 1
            return answer

        client.call = counted  # type: ignore[method-assign]
        handle = [loop.call_soon(turn)]
        await model.together(client, *(numbers(n) for n in range(40)))
        handle[0].cancel()
    assert model.runs == [[0], [1] * 40]
    turns = [count for count in answered if count]
    assert sum(turns) == 41
    # Eight at a time; a turn of the loop may see two times, and the call that kept it busy.
    assert max(turns) < 40 and all(count % 8 in (0, 1) for count in turns), turns


@pytest.mark.parametrize("carrier", ["memory", "tcp", "quic"])
@pytest.mark.parametrize("shape", SHAPES)
async def test_rows_of_many_calls_run_together_and_each_gets_its_own(carrier, shape):
    model = Model(shape)
    async with connected(model.service, carrier) as client:
        asked = [numbers(*range(10 * n, 10 * n + n)) for n in range(8)]
        found = await model.together(client, *asked)
        assert [each["double"].to_pylist() for each in found] == [
            [2 * value for value in each["id"].to_pylist()] for each in asked
        ]
    assert model.runs == [[0], list(range(8))]
    assert [each.start for each in model.seen[1]] == [0, 0, 1, 3, 6, 10, 15, 21]


async def test_a_function_may_do_without_the_calls_and_those_it_gets_say_whose_rows_they_are():
    model = Model()
    model.service.handler("plain", input=NUMBERS, output=DOUBLED, batch=aqueduct.Batching())(
        doubled
    )
    async with connected(model.service) as client:
        assert (await client.call("plain", numbers(4)))["double"].to_pylist() == [8]
        await model.together(client, numbers(1, 2), numbers(3), headers={"who": "me"})
    (one, two) = model.seen[1]
    assert (one.start, one.rows, two.start, two.rows) == (0, 2, 2, 1)
    assert one.call.headers == {"who": "me"} and one.call.number != two.call.number


@pytest.mark.parametrize("shape", SHAPES)
async def test_exchanges_and_single_calls_share_runs(shape):
    model = Model(shape, batch=aqueduct.Batching(rows=64))
    async with connected(model.service) as client:

        async def exchange(first: int) -> None:
            batches = [numbers(first + n, first + n + 1) for n in range(30)]
            found = await everything(client.exchange("score", batches))
            assert [each["double"].to_pylist() for each in found] == [
                [2 * (first + n), 2 * (first + n + 1)] for n in range(30)
            ]

        async def single(number: int) -> None:
            answer = await client.call("score", numbers(number))
            assert answer["double"].to_pylist() == [2 * number]

        await asyncio.gather(
            *(exchange(1000 * n) for n in range(6)), *(single(n) for n in range(30))
        )
    assert sum(map(sum, model.runs)) == 6 * 60 + 30
    assert all(sum(run) <= 64 for run in model.runs)
    assert len(model.runs) < 100


async def test_a_run_has_no_more_rows_and_bytes_than_it_may_unless_one_batch_has():
    model = Model(batch=aqueduct.Batching(rows=10, bytes=1000))
    async with connected(model.service) as client:
        await model.together(client, *(numbers(*range(4)) for _ in range(5)), numbers(*range(20)))
        assert model.runs[1:] == [[4, 4], [4, 4], [4], [20]]
        model.runs.clear()
        await model.together(client, numbers(*range(9)), numbers(1), numbers(1))
        assert model.runs[1:] == [[9, 1], [1]]
    model = Model(batch=aqueduct.Batching(bytes=1000))
    async with connected(model.service) as client:
        await model.together(client, *(numbers(*range(50)) for _ in range(5)))
        assert model.runs[1:] == [[50, 50], [50, 50], [50]]


async def test_a_lonely_call_does_not_wait_for_others():
    model = Model(batch=aqueduct.Batching(wait=20))
    async with connected(model.service) as client:
        for number in range(3):
            async with asyncio.timeout(10):
                await client.call("score", numbers(number))


async def test_calls_wait_for_those_that_have_called_before():
    """They come again one by one, and the handler is free; yet they run together."""
    model = Model(batch=aqueduct.Batching(wait=20))
    async with connected(model.service) as client:
        await model.together(client, *(numbers(n) for n in range(3)))
        assert model.runs[1:] == [[1, 1, 1]]
        calls = []
        for number in range(3):
            calls.append(asyncio.create_task(client.call("score", numbers(number))))
            await until(lambda: model.service.counters()["calls"] == 4 + len(calls))
        await asyncio.gather(*calls)
        assert model.runs[2:] == [[1, 1, 1]]


async def test_a_wait_for_others_ends():
    model = Model(batch=aqueduct.Batching(wait=0.05))
    async with connected(model.service) as client:
        await model.together(client, *(numbers(n) for n in range(3)))
        async with asyncio.timeout(10):
            await client.call("score", numbers(1))
        assert model.runs[2:] == [[1]]


async def test_a_wait_for_others_ends_when_there_are_rows_enough():
    model = Model(batch=aqueduct.Batching(rows=4, wait=20))
    async with connected(model.service) as client:
        await model.together(client, *(numbers(n) for n in range(4)))
        async with asyncio.timeout(10):
            await client.call("score", numbers(*range(4)))
        assert model.runs[2:] == [[4]]


@pytest.mark.parametrize("shape", SHAPES)
async def test_an_error_is_that_of_all_calls_of_the_run(shape):
    model = Model(shape, _poisoned)
    async with connected(model.service) as client:
        found = await model.together(client, numbers(1), numbers(13), numbers(2))
        assert [type(each) for each in found] == [HandlerFailed] * 3
        assert len({id(each) for each in found}) == 3
        assert all(
            "_poisoned" in each.remote_traceback and "ValueError: 13" in str(each) for each in found
        )
        assert (await client.call("score", numbers(3)))["double"].to_pylist() == [6]
    assert model.runs == [[0], [1, 1, 1], [1]]


def _poisoned(batch: pa.RecordBatch) -> pa.RecordBatch:
    if 13 in batch["id"].to_pylist():
        raise ValueError("13")
    return doubled(batch)


@pytest.mark.parametrize("shape", SHAPES)
async def test_each_is_tried_alone_so_that_one_fails_alone(shape):
    model = Model(shape, _poisoned, batch=aqueduct.Batching(retry_alone=True))
    async with connected(model.service) as client:
        one, two, three = await model.together(client, numbers(1), numbers(13), numbers(2))
        assert isinstance(two, HandlerFailed)
        assert [each["double"].to_pylist() for each in (one, three)] == [[2], [4]]
        assert model.runs == [[0], [1, 1, 1], [1], [1], [1]]
        # The failed batch of an exchange is reported as one.
        given = [numbers(1), numbers(13), numbers(2)]
        stream = client.exchange("score", given, report_failures=True)
        assert (await anext(stream))["double"].to_pylist() == [2]
        with pytest.raises(HandlerFailed, match="13"):
            await anext(stream)
        assert (await anext(stream))["double"].to_pylist() == [4]


async def test_an_error_of_a_call_reaches_all_as_it_is():
    def busy(batch: pa.RecordBatch) -> pa.RecordBatch:
        if batch.num_rows:
            raise Busy("the model is loading")
        return doubled(batch)

    model = Model(work=busy)
    async with connected(model.service) as client:
        found = await model.together(client, numbers(1), numbers(2))
        assert [type(each) for each in found] == [Busy, Busy]


@pytest.mark.parametrize("shape", SHAPES)
async def test_another_number_of_rows_is_an_error_that_says_so(shape):
    model = Model(
        shape, lambda batch: doubled(batch).slice(1) if batch.num_rows else doubled(batch)
    )
    async with connected(model.service) as client:
        found = await model.together(client, numbers(1), numbers(2, 3))
        words = (
            "one row for each row that it gets; for 3 rows (put together of 2 batches) it gave 2"
        )
        assert [words in str(each) for each in found] == [True, True]
        with pytest.raises(HandlerFailed, match="for 2 rows it gave 1"):
            await client.call("score", numbers(1, 2))


WORDS = pa.schema([("id", pa.int64()), ("word", pa.string())])


def in_parts(batch: pa.RecordBatch) -> pa.Table:
    return pa.Table.from_batches([batch.slice(0, 1), batch.slice(1)], batch.schema)


class Frame:
    """A table of another library, which keeps text in a layout of its own."""

    def __init__(self, batch: pa.RecordBatch) -> None:
        views = [
            pa.array(column.to_pylist(), pa.string_view()) if column.type == pa.string() else column
            for column in batch.columns
        ]
        self.table = in_parts(pa.record_batch(views, batch.schema.names))

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object:
        return self.table.__arrow_c_stream__(requested_schema)


@pytest.mark.parametrize("made", [in_parts, Frame])
@pytest.mark.parametrize("shape", SHAPES)
async def test_each_call_gets_its_own_rows_of_a_table_of_any_library(shape, made):
    model = Model(shape, made, input=WORDS, output=WORDS)
    async with connected(model.service) as client:
        asked = [
            pa.record_batch({"id": range(n), "word": [f"{n} {m}" for m in range(n)]}, schema=WORDS)
            for n in (2, 1, 3)
        ]
        assert await model.together(client, *asked) == asked
        assert await client.call("score", asked[0]) == asked[0]
    assert model.runs == [[0], [2, 1, 3], [2]]


@pytest.mark.parametrize("made", [in_parts, Frame])
async def test_rows_of_a_table_of_any_library_are_counted(made):
    model = Model(work=lambda batch: made(doubled(batch).slice(1)))
    async with connected(model.service) as client:
        for each in await model.together(client, numbers(1), numbers(2, 3)):
            assert isinstance(each, HandlerFailed)
            assert "3 rows (put together of 2 batches) it gave 2" in str(each)
        with pytest.raises(HandlerFailed, match="for 2 rows it gave 1"):
            await client.call("score", numbers(1, 2))


class Unreadable:
    """A table of a library that fails as it is read."""

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object:
        raise OSError("no such disk")


@pytest.mark.parametrize(
    ("gives", "error", "words"),
    [
        (lambda batch: Unreadable(), HandlerFailed, "OSError: no such disk"),
        (lambda batch: 7, HandlerFailed, "a pyarrow.RecordBatch is wanted, got int"),
        (lambda batch: batch, SchemaMismatch, "output of handler 'score'"),
    ],
    ids=["no table after all", "no batch", "another schema"],
)
async def test_what_is_no_answer_is_said_to_each(gives, error, words):
    model = Model(work=lambda batch: gives(batch) if batch.num_rows else doubled(batch))
    async with connected(model.service) as client:
        for each in await model.together(client, numbers(1), numbers(2)):
            assert isinstance(each, error) and words in str(each)


@pytest.mark.parametrize("shape", SHAPES)
async def test_rows_of_calls_that_are_over_are_dropped_before_the_run(shape):
    model = Model(shape)
    async with connected(model.service) as client:
        model.open.clear()
        first = asyncio.create_task(client.call("score", numbers(0)))
        await until(lambda: model.runs)
        gone = asyncio.create_task(client.call("score", numbers(1)))
        late = asyncio.create_task(client.call("score", numbers(2), deadline=0.1))
        stays = asyncio.create_task(client.call("score", numbers(3)))
        await until(lambda: model.service.counters()["waiting_calls"] >= 2)
        gone.cancel()
        with pytest.raises(DeadlineExceeded):
            await late
        await until(lambda: model.service.counters()["waiting_calls"] == 1)
        model.open.set()
        assert (await stays)["double"].to_pylist() == [6]
        await first
    assert [each["id"].to_pylist() for each in model.batches] == [[0], [3]]


@pytest.mark.parametrize("shape", SHAPES)
async def test_a_call_that_ends_during_a_run_leaves_the_others_alone(shape):
    model = Model(shape)
    async with connected(model.service) as client:
        model.open.clear()
        first = asyncio.create_task(client.call("score", numbers(0)))
        await until(lambda: model.runs)
        calls = [asyncio.create_task(client.call("score", numbers(n))) for n in range(3)]
        await until(lambda: model.service.counters()["waiting_calls"] == 3)
        model.open.set()
        await first
        await asyncio.gather(*calls)
        model.open.clear()
        calls = [asyncio.create_task(client.call("score", numbers(n))) for n in range(3)]
        await until(lambda: len(model.runs) >= 3)
        calls[0].cancel()
        await until(lambda: model.service.counters()["cancelled"] == 1)
        model.open.set()
        found = await asyncio.gather(*calls[1:])
        assert [each["double"].to_pylist() for each in found] == [[2], [4]]
        await until(lambda: not model.service.counters()["open_calls"])


async def test_a_coroutine_is_cancelled_once_all_its_calls_are_over():
    ended = asyncio.Event()
    service = aqueduct.Service("model")

    @service.handler("score", input=NUMBERS, batch=aqueduct.Batching())
    async def score(batch):
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            ended.set()
            raise

    async with connected(service) as client:
        call = asyncio.create_task(client.call("score", numbers(1)))
        await until(lambda: service.counters()["open_calls"])
        await asyncio.sleep(0)
        call.cancel()
        async with asyncio.timeout(20):
            await ended.wait()


async def test_a_handler_that_looks_whether_one_call_is_over_does_not_fail_the_others():
    gates = [threading.Event() for _ in range(2)]
    runs = []
    service = aqueduct.Service("model")

    @service.handler("score", input=NUMBERS, batch=aqueduct.Batching())
    def score(batch, calls):
        runs.append(len(calls))
        if len(runs) <= len(gates):
            assert gates[len(runs) - 1].wait(20)
        for each in calls:
            each.call.check()
        return batch

    async with connected(service) as client:
        first = asyncio.create_task(client.call("score", numbers()))
        await until(lambda: runs)
        calls = [asyncio.create_task(client.call("score", numbers(n))) for n in range(3)]
        await until(lambda: service.counters()["waiting_calls"] == 3)
        gates[0].set()
        await first
        await until(lambda: len(runs) == 2)
        calls[0].cancel()
        await until(lambda: service.counters()["cancelled"] == 1)
        gates[1].set()
        found = await asyncio.gather(*calls[1:])
        assert values(found) == [[1], [2]]
    assert runs == [1, 3, 1, 1]


async def test_batches_of_other_schemas_do_not_run_together():
    model = Model(input=None, output=None, work=lambda batch: batch)
    text = pa.record_batch({"text": ["a"]})
    told = numbers(5).replace_schema_metadata({"unit": "s"})
    async with connected(model.service) as client:
        asked = [numbers(1), text, numbers(2), told, text, numbers(3)]
        assert await model.together(client, *asked) == asked
    assert model.runs == [[0], [1, 1, 1], [1, 1], [1]]
    assert model.batches[3].schema.metadata == {b"unit": b"s"}


def _columns() -> list[pa.Array]:
    words = ["one", None, "three", "a text that does not fit a view"]
    dictionary = pa.DictionaryArray.from_arrays([1, 0, None, 1], ["x", "y"])
    return [
        pa.array(words),
        pa.array(words, pa.string_view()),
        pa.array(words, pa.large_binary()),
        dictionary,
        pa.StructArray.from_arrays([dictionary, pa.array([1, 2, None, 4])], ["word", "number"]),
        pa.array([[1, 2], None, [], [3]]),
        pa.array([[1, 2], None, [], [3]], pa.list_view(pa.int32())),
        pa.array([[1, 2]] * 4, pa.list_(pa.int8(), 2)),
        pa.array([[("a", 1)], [], None, [("b", None)]], pa.map_(pa.string(), pa.int64())),
        pa.array([True, None, False, True]),
        pa.nulls(4),
        pa.array([decimal.Decimal("1.50"), None] * 2, pa.decimal128(9, 2)),
        pc.run_end_encode(pa.array([7, 7, None, 8])),
        pa.UnionArray.from_sparse(
            pa.array([0, 1, 0, 1], pa.int8()), [pa.array([1, 2, 3, 4]), pa.array(list("abcd"))]
        ),
        pa.UnionArray.from_dense(
            pa.array([0, 1, 0, 1], pa.int8()),
            pa.array([0, 0, 1, 1], pa.int32()),
            [pa.array([1, 2]), pa.array(list("ab"))],
        ),
    ]


async def test_columns_of_all_kinds_are_put_together_and_taken_apart():
    columns = _columns()
    whole = pa.RecordBatch.from_arrays(columns, [str(each.type) for each in columns])
    model = Model(input=None, output=None, work=lambda batch: batch)
    async with connected(model.service, "tcp") as client:
        asked = [whole.slice(0, 1), whole, whole.slice(1, 3), whole.slice(0, 0), whole.slice(3)]
        found = await model.together(client, *asked)
        for one, other in zip(found, asked, strict=True):
            one.validate(full=True)
            assert one.to_pylist() == other.to_pylist()
    assert model.runs == [[0], [1, 4, 3, 0, 1]]


async def test_dictionaries_that_cannot_be_put_together_run_alone():
    def words(first: int) -> pa.RecordBatch:
        values = [f"w{n}" for n in range(first, first + 100)]
        column = pa.DictionaryArray.from_arrays(pa.array(range(100), pa.int8()), values)
        return pa.record_batch({"word": column})

    model = Model(input=None, output=None, work=lambda batch: batch)
    async with connected(model.service) as client:
        asked = [words(0), words(100)]
        found = await model.together(client, *asked)
        assert [each.to_pylist() for each in found] == [each.to_pylist() for each in asked]
    assert model.runs == [[0], [100], [100]]


async def test_the_rows_that_are_put_together_count_in_memory_while_they_run():
    account = accounts.process().receiving
    gc.collect()
    before = account.used
    used: list[int] = []

    def look(batch: pa.RecordBatch) -> pa.RecordBatch:
        used.append(account.used)
        return doubled(batch)

    model = Model(work=look, batch=aqueduct.Batching(rows=20_000))
    async with connected(model.service) as client:
        await model.together(client, *(numbers(*range(10_000)) for _ in range(2)))
        assert model.runs == [[0], [10_000, 10_000]]
        assert used[1] - used[0] >= 2 * 80_000  # the first run begins to work last
    model.batches.clear()
    gc.collect()
    await until(lambda: account.used <= before)


def test_a_part_of_an_answer_does_not_keep_the_whole():
    whole = pa.record_batch({"id": pa.array(range(100_000), pa.int64())})
    parts = split(whole, [1000, 99_000])
    assert values(parts) == [list(range(1000)), list(range(1000, 100_000))]
    addresses = [each.column(0).buffers()[1].address for each in (whole, *parts)]
    assert addresses[1] != addresses[0] and addresses[2] == addresses[0]


def test_a_filter_takes_what_is_alike_and_fits():
    fits = BatchFilter(aqueduct.Batching(rows=3, bytes=100))

    def fit(batch: pa.RecordBatch, size: int) -> Fit:
        work = QueuedBatch(0, batch, None)
        work.size = size
        return fits(work)

    assert fit(numbers(1), 60) is Fit.TAKEN
    assert fit(pa.record_batch({"x": [1]}), 1) is Fit.PASSED
    assert fit(numbers(1), 41) is Fit.FULL
    assert fit(numbers(1, 2, 3), 1) is Fit.FULL
    assert fit(numbers(1, 2), 40) is Fit.TAKEN
    assert (fits.rows, fits.size) == (3, 100)


async def test_one_peer_that_floods_gets_its_share_of_each_run():
    model = Model(batch=aqueduct.Batching(rows=6))
    async with serving(model.service, "tcp") as running, AsyncExitStack() as stack:
        flood, *others = [
            await stack.enter_async_context(await Client.connect(running.addresses[0]))
            for _ in range(3)
        ]
        model.open.clear()
        calls = [asyncio.create_task(flood.call("score", numbers(0))) for _ in range(40)]
        await until(lambda: model.service.counters()["waiting_calls"] == 39)
        calls += [
            asyncio.create_task(each.call("score", numbers(n + 1)))
            for n, each in enumerate(others)
            for _ in range(2)
        ]
        await until(lambda: model.service.counters()["waiting_calls"] == 43)
        model.open.set()
        await asyncio.gather(*calls)
    assert sorted(model.batches[1]["id"].to_pylist()) == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize("shape", SHAPES)
async def test_calls_are_served_while_the_service_drains(shape):
    model = Model(shape)
    async with serving(model.service) as running:
        async with await Client.connect(running.addresses[0]) as client:
            model.open.clear()
            calls = [asyncio.create_task(client.call("score", numbers(n))) for n in range(5)]
            await until(lambda: model.service.counters()["open_calls"] == 5)
            closing = asyncio.create_task(running.close(drain=20))
            await until(lambda: running.addresses == [])
            model.open.set()
            found = await asyncio.gather(*calls)
            assert [each["double"].to_pylist() for each in found] == [[2 * n] for n in range(5)]
            await closing


async def test_more_runs_than_one_at_once():
    model = Model(max_concurrency=2, batch=aqueduct.Batching(rows=2))
    async with connected(model.service) as client:
        model.open.clear()
        calls = [asyncio.create_task(client.call("score", numbers(n))) for n in range(6)]
        await until(lambda: len(model.runs) == 2)
        await until(lambda: model.service.counters()["waiting_calls"] == 4)
        model.open.set()
        await asyncio.gather(*calls)
    assert model.runs == [[1], [1], [1, 1], [1, 1]]


async def test_a_queue_is_full_for_batches_too():
    model = Model(queue=2)
    async with connected(model.service) as client:
        model.open.clear()
        calls = [asyncio.create_task(client.call("score", numbers(n))) for n in range(3)]
        await until(lambda: model.service.counters()["waiting_calls"] == 2)
        with pytest.raises(Busy, match="1 runs running"):
            await client.call("score", numbers(3))
        model.open.set()
        await asyncio.gather(*calls)


async def test_a_system_without_a_thread_to_give_is_busy(monkeypatch: pytest.MonkeyPatch):
    model = Model()
    async with serving(model.service) as running:
        async with await Client.connect(running.addresses[0]) as client:

            def start(work: object) -> None:
                raise Busy("the service 'model' can start no thread")

            with monkeypatch.context() as patched:
                patched.setattr(running, "start_thread", start)
                with pytest.raises(Busy, match="no thread"):
                    await client.call("score", numbers(1))
            assert (await client.call("score", numbers(1)))["double"].to_pylist() == [2]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rows": 0}, r"Batching\.rows is 0"),
        ({"bytes": "some"}, r"Batching\.bytes is 'some'"),
        ({"wait": -1}, r"Batching\.wait is -1"),
        ({"retry_alone": 2}, r"Batching\.retry_alone is 2"),
    ],
)
def test_settings_that_cannot_work(options, words):
    with pytest.raises(ConfigError, match=words):
        aqueduct.Batching(**options)


def test_settings_are_read_as_all_others():
    found = aqueduct.Batching(rows=10, bytes="8m", wait="5ms")  # type: ignore[arg-type]
    assert (found.bytes, found.wait) == (8 << 20, 0.005)


async def test_packed_rows_count_as_what_they_unpack_to():
    model = Model(batch=aqueduct.Batching(bytes=100_000), config=config())
    async with connected(model.service, "tcp") as client:
        model.open.clear()
        first = asyncio.create_task(client.call("score", numbers(0)))
        await until(lambda: model.runs)
        batch = numbers(*[7] * 10_000)
        streams = [
            asyncio.create_task(everything(client.exchange("score", [batch], compression="zstd")))
            for _ in range(3)
        ]
        await until(lambda: model.service.counters()["waiting_calls"] == 3)
        model.open.set()
        await asyncio.gather(first, *streams)
    assert model.runs[1:] == [[10_000]] * 3
