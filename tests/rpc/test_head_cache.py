"""Calls that are alike: what is worked out once for them, and what each still says for itself."""

from __future__ import annotations

import pyarrow as pa
import pytest

import aqueduct
from aqueduct.arrow.ipc import serialize_schema
from aqueduct.errors import BadCall, HandlerFailed, SchemaMismatch
from aqueduct.protocol.common.receiver import Received
from aqueduct.rpc import keys
from aqueduct.rpc.head_cache import HeadCache
from aqueduct.rpc.request import CallHead, Partition
from aqueduct.rpc.status import OK, Status, _kept_status
from tests.support.calls import NUMBERS, PAIRS, connected, everything, numbers, values

PEER = "aqueduct+tcp://a:1"


def message(**said):
    headers, payload = CallHead(handler="score", kind="exchange", schema=NUMBERS, **said).encode()
    return headers, b"".join(payload)


def read(heads, headers, payload):
    """The head that ``heads`` read in a message as a connection gives it."""
    head, rest = heads.read(Received(0, headers, (), payload, 0))
    assert rest is None
    return head


def test_a_call_that_came_before_is_known():
    heads = HeadCache(PEER)
    first = read(heads, *message())
    assert read(heads, *message()) is first
    assert first == CallHead.decode(*message())


@pytest.mark.parametrize("order", [1, -1])
def test_each_call_says_what_is_its_own(order):
    heads = HeadCache(PEER)
    own = [
        {},
        {"write_key": "r", "attempt": "1", "partition": Partition(0, 2), "deadline": 2.5},
        {"write_key": "s", "attempt": "2", "partition": Partition(1, 2)},
    ][::order]
    for said in own * 2:
        head = read(heads, *message(token=b"t", **said))
        assert head == CallHead.decode(*message(token=b"t", **said))


def test_what_differs_otherwise_is_another_call():
    heads = HeadCache(PEER)
    read(heads, *message())
    for said in ({"token": b"t"}, {"metadata": {"a": "b"}}, {"expected": PAIRS}):
        assert read(heads, *message(**said)) == CallHead.decode(*message(**said))
    headers, _ = message()
    assert read(heads, headers, serialize_schema(PAIRS)).schema == PAIRS


@pytest.mark.parametrize(
    ("key", "value"), [(keys.DEADLINE, b"0"), (keys.WRITE_KEY, b"\xff"), (keys.PARTITION, b"2/2")]
)
def test_what_is_its_own_and_wrong_is_refused_as_ever(key, value):
    heads = HeadCache(PEER)
    headers, payload = message()
    read(heads, headers, payload)
    for wrong in ((*headers, (key, value)), (*headers, (key, b"1"), (key, b"1"))):
        with pytest.raises(BadCall) as caught:
            read(heads, wrong, payload)
        with pytest.raises(BadCall) as wanted:
            CallHead.decode(wrong, payload, peer=PEER)
        assert str(caught.value) == str(wanted.value)
        assert caught.value.peer == PEER
        assert caught.value.handler == wanted.value.handler


def test_few_and_small_calls_are_remembered():
    heads = HeadCache(PEER)
    for number in range(100):
        read(heads, *message(token=b"%d" % number))
        assert len(heads._kept) <= 32
    large = message(metadata={"a": "b" * (16 << 10)})
    head = read(heads, *large)
    assert head.metadata["a"] == "b" * (16 << 10) and read(heads, *large) is not head


def test_types_that_may_be_registered_later_are_looked_at_each_time():
    field = pa.field("id", pa.int64(), metadata={"ARROW:extension:name": "test.unknown"})
    heads = HeadCache(PEER)
    headers, payload = CallHead(handler="a", kind="exchange", schema=pa.schema([field])).encode()
    one, two = (read(heads, headers, b"".join(payload)) for _ in range(2))
    assert one == two and one is not two


def test_few_and_small_statuses_are_remembered():
    _kept_status.cache_clear()
    for number in range(200):
        status = Status(OK, counters={"rows_in": number})
        headers, payload = status.encode()
        assert Status.decode(headers, b"".join(payload)) == status
    assert _kept_status.cache_info().currsize <= 64
    headers, payload = Status("busy", message="x" * 600).encode()
    before = _kept_status.cache_info()
    assert Status.decode(headers, b"".join(payload)).message == "x" * 600
    assert _kept_status.cache_info() == before


async def test_the_handler_sees_each_call_as_it_is():
    service = aqueduct.Service("test")
    seen = []

    @service.handler("echo")
    async def echo(batches, call):
        assert call.deadline is None or 0 < call.deadline <= 30
        seen.append(
            (call.write_key, call.attempt, call.partition, call.deadline is None, call.number)
        )
        async for batch in batches:
            yield batch

    async with connected(service) as client:
        for index in range(4):
            stream = client.exchange(
                "echo",
                [numbers(index)],
                write_key="r",
                attempt=str(index),
                partition=Partition(index),
                deadline=30.0 if index % 2 else None,
            )
            assert values(await everything(stream)) == [[index]]
            assert stream.schema == NUMBERS
    assert seen == [("r", str(i), Partition(i), i % 2 == 0, i + 1) for i in range(4)]


async def test_calls_that_are_alike_may_be_open_together():
    service = aqueduct.Service("test")

    @service.handler("double", input=NUMBERS, output=NUMBERS)
    async def double(batches):
        async for batch in batches:
            yield numbers(*(2 * value for value in batch["id"].to_pylist()))

    async with connected(service) as client:
        given = [[numbers(10 * call + part) for part in range(5)] for call in range(8)]
        streams = [client.exchange("double", batches) for batches in given]
        answers = [values(await everything(stream)) for stream in reversed(streams)][::-1]
        assert answers == [[[2 * (10 * call + part)] for part in range(5)] for call in range(8)]


async def test_batches_that_stand_on_others_share_nothing():
    schema = pa.schema([("name", pa.dictionary(pa.int32(), pa.string()))])
    service = aqueduct.Service("test")

    @service.handler("echo")
    async def echo(batches):
        async for batch in batches:
            yield batch

    def named(*names):
        return pa.record_batch([pa.array(names).dictionary_encode()], schema=schema)

    async with connected(service) as client:
        for _ in range(3):
            given = [named("a", "b"), named("a", "b", "c")]
            found = await everything(client.exchange("echo", given, schema=schema))
            assert [batch["name"].to_pylist() for batch in found] == [["a", "b"], ["a", "b", "c"]]


async def test_an_output_that_depends_on_the_call_is_asked_for_each_time():
    service = aqueduct.Service("test")
    asked = []

    def output(schema):
        asked.append(schema)
        return schema

    @service.handler("echo", output=output)
    async def echo(batches):
        async for batch in batches:
            yield batch

    async with connected(service) as client:
        for _ in range(3):
            assert values(await everything(client.exchange("echo", [numbers(1)]))) == [[1]]
    assert asked == [NUMBERS] * 3


async def test_a_call_that_failed_or_was_refused_leaves_nothing_to_others():
    service = aqueduct.Service("test")
    fails = iter((True, False, True, False))

    @service.handler("maybe", input=NUMBERS)
    async def maybe(batches):
        async for batch in batches:
            if next(fails):
                raise ValueError("not this time")
            yield batch

    async with connected(service) as client:
        for _ in range(2):
            with pytest.raises(HandlerFailed, match="not this time"):
                await everything(client.exchange("maybe", [numbers(1)]))
            assert values(await everything(client.exchange("maybe", [numbers(1)]))) == [[1]]
            with pytest.raises(SchemaMismatch):
                await everything(client.exchange("maybe", [], schema=PAIRS))


async def test_capabilities_are_granted_to_every_call():
    service = aqueduct.Service("test")

    @service.handler("odd", idempotent=True)
    async def odd(batch):
        if not batch["id"][0].as_py() % 2:
            raise ValueError("even")
        return batch

    async with connected(service) as client:
        for _ in range(2):
            given = [numbers(1), numbers(2), numbers(3)]
            stream = client.exchange("odd", given, report_failures=True)
            assert values([await anext(stream)]) == [[1]]
            with pytest.raises(HandlerFailed, match="even"):
                await anext(stream)
            assert values([await anext(stream)]) == [[3]]
            assert stream.capabilities == {"one-to-one", "idempotent", "failures"}
            with pytest.raises(StopAsyncIteration):
                await anext(stream)
