"""What public arguments must be: one table, and everybody's way in goes by it."""

from __future__ import annotations

import asyncio
import inspect
import math
import re
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import aqueduct
from aqueduct import bpmux, relink
from aqueduct.arguments import (
    ARGUMENTS,
    KINDS,
    UNGIVEN,
    Kind,
    checked,
    duration,
    read_arguments,
    size,
    whole,
)
from aqueduct.errors import AqueductError, ConfigError, LocalProtocolError, WrongType

LOOSE: Any = aqueduct
"""For calls that a type checker would refuse, too."""
BATCH = pa.record_batch({"id": [1, 2]})
NAN, INF = math.nan, math.inf

# ------------------------------------------------------------------ durations and sizes


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        (3, 3),
        (2.5, 2.5),
        (0, 0),
        ("3", 3.0),
        ("3s", 3.0),
        ("500ms", 0.5),
        ("1.5 s", 1.5),
        (".5s", 0.5),
        ("5min", 300.0),
        ("5 MIN", 300.0),
        ("2h", 7200.0),
        ("1d", 86_400.0),
        (timedelta(minutes=2), 120.0),
    ],
)
def test_durations_are_understood(given, seconds):
    assert duration(given) == seconds


@pytest.mark.parametrize(
    "given",
    [
        "",
        "s",
        "soon",
        "3 weeks",
        "-3s",
        "1e3",
        "nan",
        "inf",
        NAN,
        INF,
        -INF,
        -1,
        -0.1,
        True,
        False,
        None,
        [],
        b"3s",
        3j,
        timedelta(seconds=-1),
        "3s 4s",
        "٣s",
    ],
)
def test_what_is_no_duration_is_refused(given):
    with pytest.raises((ValueError, TypeError)):
        duration(given)
    for kind in ("duration", "duration or zero"):
        with pytest.raises(ConfigError, match=r"^wait(:| is) .*"):
            KINDS[kind].value(given, "wait")


@pytest.mark.parametrize("given", [3_162_240_001, 1e300, "36601d", timedelta(days=40_000)])
def test_a_duration_that_no_timer_takes_is_refused(given):
    for kind in ("duration", "duration or zero"):
        with pytest.raises(ConfigError, match=r"^wait: .* s is above 3162240000 s, the most"):
            KINDS[kind].value(given, "wait")
    assert duration("36600d") == 3_162_240_000


@pytest.mark.parametrize("given", ["5m", "5 m", "5M", "0.5m"])
def test_m_is_no_unit_of_time_and_the_error_says_min(given):
    with pytest.raises(ConfigError, match=r"wait: '.*': m is no unit of time; write [\d.]+min for"):
        KINDS["duration"].value(given, "wait")


@pytest.mark.parametrize(
    ("given", "count"),
    [
        (1, 1),
        (65536, 65536),
        ("65536", 65536),
        ("64k", 64 << 10),
        ("64K", 64 << 10),
        ("64kb", 64 << 10),
        ("64KiB", 64 << 10),
        ("32m", 32 << 20),
        ("32 MiB", 32 << 20),
        ("1g", 1 << 30),
        ("1.5g", 3 << 29),
        ("2t", 2 << 40),
        ("7b", 7),
    ],
)
def test_sizes_are_understood(given, count):
    assert size(given) == count


@pytest.mark.parametrize(
    "given",
    [
        "",
        "k",
        "big",
        "-1k",
        "1.0001",
        "0.3k",
        "1e6",
        "64kk",
        0,
        -1,
        1.5,
        64.0,
        NAN,
        INF,
        True,
        None,
        [],
        b"64k",
        1 << 63,
        "9999999t",
        "1s",
        "5min",
    ],
)
def test_what_is_no_size_is_refused(given):
    with pytest.raises((ValueError, TypeError)):
        size(given)
    with pytest.raises(ConfigError, match=r"^room(:| is) .*"):
        KINDS["size"].value(given, "room")


@given(st.floats(0, 800_000), st.sampled_from([("ms", 0.001), ("s", 1), ("min", 60), ("h", 3600)]))
def test_a_duration_is_its_number_times_its_unit(number, unit):
    name, factor = unit
    assert duration(f"{number:.6f}{name}") == pytest.approx(round(number, 6) * factor)


@given(st.integers(0, 1 << 20), st.sampled_from("kmg"), st.sampled_from(["", "b", "ib", "B", "iB"]))
def test_a_size_is_its_number_times_a_power_of_1024(number, unit, tail):
    expected = number << (10 * (" kmg".index(unit)))
    if expected:
        assert size(f"{number}{unit}{tail}") == expected
    assert size(f"{number}{unit}{tail}", least=0) == expected


def test_a_number_of_another_library_is_a_number():
    class Index:
        def __index__(self):
            return 5

    assert whole()(Index()) == 5
    assert size(Index()) == 5


# ------------------------------------------------------------------ kinds and the decorator


def test_an_error_names_the_argument_what_was_given_and_what_is_wanted():
    with pytest.raises(ConfigError) as caught:
        KINDS["duration"].value("soon", "Client.call: deadline")
    assert str(caught.value) == (
        "Client.call: deadline is 'soon'; it must be above zero: a duration, such as 2.5 "
        "(seconds), 500ms, 30s or 5min"
    )
    assert not isinstance(caught.value, TypeError)
    with pytest.raises(WrongType) as wrong:
        KINDS["text"].value(5, "name")
    assert isinstance(wrong.value, ConfigError) and isinstance(wrong.value, TypeError)


def test_an_error_shows_neither_a_secret_nor_a_page():
    with pytest.raises(ConfigError) as caught:
        ARGUMENTS["token"].value(["s3cret"], "token")
    assert str(caught.value) == "token is of the type list; it must be text or bytes"

    class Broken:
        def __repr__(self):
            raise RuntimeError

    for value in (pa.table({"a": range(1000)}), "x" * 10_000, Broken(), {"a": "\n" * 500}):
        with pytest.raises(ConfigError) as caught:
            KINDS["count"].value(value, "it")
        assert len(str(caught.value)) < 250
        assert "\n" not in str(caught.value)


def test_checked_reads_arguments_wherever_they_stand():
    @checked(wait="timeout", port="")
    def work(address, deadline=None, *addresses, wait=1.0, port=0, free=None):
        """Works."""
        return address, deadline, addresses, wait, port, free

    assert work("a", "500ms", "b", ["c"], wait="2min", port="x", free=7) == (
        *("a", 0.5, ("b", ["c"]), 120.0, "x", 7),
    )
    assert work(address="a") == ("a", None, (), 1.0, 0, None)
    assert work("a", None) == ("a", None, (), 1.0, 0, None)
    assert work.__doc__ == "Works." and str(inspect.signature(work)).startswith(
        "(address, deadline"
    )
    for args, kwargs in (
        ((5,), {}),
        (("a", "soon"), {}),
        (("a", 1, 5), {}),
        (("a",), {"wait": NAN}),
    ):
        with pytest.raises(ConfigError, match=r"work: \w+ is "):
            work(*args, **kwargs)
    with pytest.raises(WrongType):
        work("a", wait=None)  # its default is another


def test_what_can_be_read_once_is_read_once():
    @checked(headers="connection_headers")
    def work(headers):
        return headers

    assert work(iter([("a", "b")])) == (("a", "b"),)
    with pytest.raises(ConfigError, match="work: headers is"):
        work(iter([1]))


async def test_checked_leaves_a_coroutine_function_one():
    @checked()
    async def work(timeout):
        return timeout

    assert inspect.iscoroutinefunction(work)
    assert await work("3s") == 3.0
    with pytest.raises(ConfigError, match="timeout is -1"):
        await work(-1)


PUBLIC: list[Any] = [
    *(aqueduct.connect, aqueduct.serve, aqueduct.channel, aqueduct.dev_certificate),
    *(aqueduct.Client, aqueduct.SyncClient, aqueduct.Service, aqueduct.Connection),
    *(
        bpmux.connect,
        bpmux.serve,
        bpmux.BpmuxConnection,
        bpmux.BpmuxServer,
        bpmux.BpmuxRequest,
        bpmux.BpmuxSink,
    ),
    *(bpmux.BpmuxStream, bpmux.Duplex),
    *(relink.connect, relink.serve, relink.RelinkChannel, relink.RelinkConnection),
    *(relink.RelinkIncoming, relink.RelinkTransaction),
]
UNCHECKED = {
    # They are looked at together, by make_handler, make_table and Sink, which name the handler.
    "Service.handler": {
        *("name", "input", "output", "kind", "concurrency", "max_calls"),
        *("max_concurrency", "queue", "batch", "numpy"),
    },
    "Service.sink": {"name", "sink", "schema"},
    "Service.table": {
        *("name", "table", "schema", "splits", "filters"),
        *("max_calls", "max_concurrency", "queue"),
    },
    "Service": {"name"},
    # The small calls are looked at when the first of a kind is made, by ``read_arguments``.
    **dict.fromkeys(("Client.call", "Client.call_table", "SyncClient.call"), None),
    "SyncClient.call_table": None,
    # They are not for users.
    **dict.fromkeys(("EntityHandle.ended", "EntityHandle.ponged", "BpmuxStream.arrived"), None),
    "Client.over": None,
}
INNER = (
    *(aqueduct.Connection, bpmux.BpmuxConnection, bpmux.BpmuxServer),
    *(relink.RelinkChannel, relink.RelinkConnection),
    *(relink.RelinkIncoming, relink.RelinkTransaction),
)


def public_functions() -> Iterator[tuple[str, Callable[..., Any], bool]]:
    """Name, function, and whether it is one that this library's own code calls."""
    for thing in PUBLIC:
        if not isinstance(thing, type):
            yield thing.__qualname__, thing, False
            continue
        for cls in thing.__mro__[:-1]:
            for name, found in vars(cls).items():
                function = inspect.unwrap(getattr(found, "__func__", found))
                if not inspect.isfunction(function) or (name[0] == "_" and name != "__init__"):
                    continue
                if name == "__init__" and (
                    thing in INNER or cls.__module__.startswith("aqueduct.bpmux")
                ):
                    continue
                yield function.__qualname__.removesuffix(".__init__"), found, thing in INNER


def test_every_public_argument_is_in_the_table():
    lacking = []
    for name, found, inner in public_functions():
        allowed = UNCHECKED.get(name, set())
        if allowed is None or (inner and not hasattr(found, "__wrapped__")):
            continue
        function = getattr(found, "__func__", found)
        read = getattr(function, "__checked__", ())
        known = {"self", "cls", *read, *allowed}
        parameters = inspect.signature(function).parameters
        lacking += [f"{name}({each})" for each in parameters if each not in known]
    assert lacking == []


# ------------------------------------------------------------------ the ways in


@contextmanager
def refused(argument: str, *, where: str = "") -> Iterator[None]:
    """What is wrong is said by an error of the library, which names the argument."""
    with pytest.raises((ConfigError, LocalProtocolError)) as caught:
        yield
    text = str(caught.value)
    assert argument in text, text
    assert where in text, text
    assert not re.search("object has no attribute|not supported between|has no len", text)


@pytest.fixture
async def client() -> AsyncIterator[aqueduct.Client]:
    service = aqueduct.Service("arguments")
    service.handler("echo")(lambda batch: batch)
    service.handler("store", kind="sink")(
        lambda batches: {"rows": sum(b.num_rows for b in batches)}
    )
    service.handler("give", kind="source", output=BATCH.schema)(_give)
    async with service.serving("aqueduct+tcp://127.0.0.1:0") as running:
        async with await aqueduct.Client.connect(running.addresses[0]) as client:
            yield client


def _give():
    yield BATCH


OF_CALLS = [
    ("deadline", "soon"),
    ("deadline", "3m"),
    ("deadline", NAN),
    ("deadline", INF),
    ("deadline", True),
    ("deadline", -1),
    ("deadline", []),
    ("token", 123),
    ("token", ["a"]),
    ("headers", ["a"]),
    ("headers", 5),
    ("write_key", 1),
    ("attempt", b"x"),
    ("partition", 1),
    ("partition", aqueduct.Partition("a")),  # type: ignore[arg-type]
    ("partition", aqueduct.Partition(0, 1.5)),  # type: ignore[arg-type]
    ("output_schema", "id long"),
    ("output_schema", [("id", "int64")]),
]


@pytest.mark.parametrize(("name", "value"), OF_CALLS)
async def test_wrong_arguments_of_calls_are_refused(client, name, value):
    for kind in ("exchange", "source", "sink", "call", "call_table"):
        if kind == "sink" and name == "output_schema":
            continue
        method = getattr(client, kind)
        handler = {"source": "give", "sink": "store"}.get(kind, "echo")
        args: tuple[Any, ...] = (handler,)
        if kind != "source":
            args += (BATCH,) if kind.startswith("call") else ([BATCH],)
        with refused(name):
            made = method(*args, **{name: value})
            if inspect.isawaitable(made):
                await made
    assert await client.call("echo", BATCH) == BATCH


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("batches", [1]),
        ("batches", [BATCH, 1]),
        ("batches", [BATCH, None]),
        ("batches", 5),
        ("batches", None),
        ("batches", "text"),
        ("batches", {"id": [1]}),
        ("handler", 7),
        ("handler", None),
        ("schema", "id long"),
        ("in_flight", 0),
        ("in_flight", 1.5),
        ("in_flight", True),
        ("in_flight", "many"),
        ("in_flight_bytes", "5min"),
        ("in_flight_bytes", -1),
        ("compression", 5),
        ("ordered", "false"),
        ("report_failures", 1),
    ],
)
async def test_wrong_arguments_of_an_exchange_are_refused(client, name, value):
    given = {"handler": "echo", "batches": [BATCH], name: value}
    with refused(name if name != "batches" else "", where="Client.exchange"):
        client.exchange(**given)
    if name not in ("ordered", "report_failures"):
        with refused(name if name != "batches" else "", where="Client.sink"):
            await client.sink(**{**given, "handler": given["handler"]})


async def test_a_bool_is_no_number_although_it_equals_one(client):
    assert await client.call("echo", BATCH, deadline=1) == BATCH
    with refused("deadline is True"):
        await client.call("echo", BATCH, deadline=True)


async def test_durations_and_sizes_of_calls_are_text_too(client):
    stream = client.exchange("echo", [BATCH], deadline="30s", in_flight="2", in_flight_bytes="1m")
    assert [batch async for batch in stream] == [BATCH]
    assert await client.call("echo", BATCH, deadline="500ms") == BATCH
    assert await client.call("echo", BATCH, deadline=timedelta(seconds=30)) == BATCH
    assert await client.sink("store", [BATCH], deadline="1min") == {"rows": 2} | dict(
        await client.sink("store", [BATCH])
    )
    assert await client.ping(timeout="10s") < 10
    with refused("timeout"):
        await client.ping(timeout="x")


def test_a_sync_client_refuses_the_same():
    service = aqueduct.Service("arguments")
    service.handler("echo")(lambda batch: batch)

    def ask(address: str) -> None:
        with LOOSE.SyncClient(address) as client:
            for name, value in OF_CALLS:
                with refused(name):
                    client.exchange("echo", [BATCH], **{name: value})
                with refused(name):
                    client.call("echo", BATCH, **{name: value})
            with refused("", where="SyncClient.exchange"):
                client.exchange("echo", [1])
            with refused("timeout"):
                client.ping(timeout=-1)
            assert list(client.exchange("echo", [BATCH], deadline="1min")) == [BATCH]
            assert client.call("echo", BATCH, deadline="1min") == BATCH

    async def main() -> None:
        async with service.serving("aqueduct+tcp://127.0.0.1:0") as running:
            await asyncio.to_thread(ask, running.addresses[0])

    asyncio.run(main())


CONNECTING = [
    ("address", 5),
    ("address", None),
    ("config", {}),
    ("config", None),
    ("tls", 5),
    ("tls", {"ca": "x"}),
    ("headers", 5),
    ("headers", {"a": 1}),
    ("headers", "text"),
    ("headers", [("a",)]),
    ("token", 5),
    ("keep_alive", "yes"),
]


@pytest.mark.parametrize(("name", "value"), CONNECTING)
async def test_wrong_arguments_of_connecting_are_refused(name, value):
    given = {"address": "aqueduct+tcp://127.0.0.1:1", name: value}
    with refused(name, where="Client.connect"):
        await aqueduct.Client.connect(**given)
    with refused(name, where="SyncClient"):
        aqueduct.SyncClient(**given)
    if name not in ("token", "keep_alive"):
        with refused(name, where="connect"):
            await aqueduct.connect(**given)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("config", {}),
        ("config", None),
        ("authorize", "token"),
        ("authorize", 5),
        ("description", 5),
        ("telemetry", 5),
        ("name", 5),
        ("name", None),
    ],
)
def test_wrong_arguments_of_a_service_are_refused(name, value):
    with refused(name):
        aqueduct.Service(**{"name": "x", name: value})


@pytest.mark.parametrize(
    ("options", "argument"),
    [
        ({"addresses": (4433,)}, "addresses is 4433"),
        ({"addresses": (["aqueduct+tcp://127.0.0.1:0", 5],)}, "addresses is ["),
        ({"addresses": ()}, "at least one address"),
        ({"certificate": 5}, "certificate"),
        ({"certificate": ""}, "certificate"),
        ({"key": 5}, "key is of the type int"),
        ({"client_ca": 5}, "client_ca"),
        ({"dev_certificate": "yes"}, "dev_certificate"),
        ({"tls": aqueduct.ClientTls()}, "tls"),
    ],
)
async def test_wrong_arguments_of_serving_are_refused(options, argument):
    service = aqueduct.Service("x")
    addresses = options.pop("addresses", ("aqueduct+tcp://127.0.0.1:0",))
    with refused(argument):
        await asyncio.to_thread(service.run, *addresses, **options)
    with refused(argument):
        async with service.serving(*addresses, **options):
            pass


async def test_addresses_may_be_any_iterable():
    service = LOOSE.Service("x")
    for addresses in (
        {"memory://arguments"},
        iter(["memory://arguments"]),
        ("memory://arguments",),
    ):
        async with service.serving(addresses) as running:
            assert running.addresses == ["memory://arguments"]
    headers = [(bytearray(b"k"), memoryview(b"v")), ("a", "b")]
    async with service.serving("memory://arguments"):
        async with await LOOSE.Client.connect("memory://arguments", headers=iter(headers)):
            pass


async def test_wrong_arguments_of_the_ends_of_a_service_are_refused():
    service = LOOSE.Service("x")
    with refused("drain"):
        async with service.serving("aqueduct+tcp://127.0.0.1:0", drain="5m"):
            pass
    with refused("time_to_live"):
        service.sink("x", object(), time_to_live="1 month")
    with refused("idempotent"):
        service.handler("x", idempotent="yes")
    for wrong in ("on_connection", "addresses", "on_headers"):
        given: dict[str, Any] = {"on_connection": print, "addresses": "memory://x", wrong: 5}
        with refused(wrong):
            await aqueduct.serve(**given)


@pytest.mark.parametrize(
    ("make", "argument"),
    [
        (lambda: LOOSE.ClientTls(ca=5), "ClientTls.ca"),
        (lambda: LOOSE.ClientTls(verify="off"), "ClientTls.verify"),
        (lambda: LOOSE.ClientTls(server_name=5), "ClientTls.server_name"),
        (lambda: LOOSE.ClientTls(key_password=b"x"), "ClientTls.key_password is of the type bytes"),
        (lambda: LOOSE.ServerTls(None), "ServerTls.certificate"),
        (lambda: LOOSE.dev_certificate(5), "names"),
        (lambda: LOOSE.dev_certificate("abc"), "names"),
        (lambda: LOOSE.dev_certificate(days="x"), "days"),
        (lambda: LOOSE.channel(mode="ordered"), "mode"),
        (lambda: LOOSE.channel(oneshot=1), "oneshot"),
    ],
)
def test_wrong_arguments_of_small_things_are_refused(make, argument):
    with refused(argument):
        make()


@pytest.mark.parametrize(
    ("given", "argument"),
    [
        ({"payload": "text"}, "payload"),
        ({"payload": 5}, "payload"),
        ({"payload": None}, "payload"),
        ({"payload": [1]}, "payload"),
        ({"payload": BATCH}, "payload"),
        ({"headers": [1]}, "headers"),
        ({"headers": (("a", "b"),)}, "headers"),
        ({"attachments": [1]}, "attachments"),
        ({"mode": "ordered"}, "mode"),
    ],
)
async def test_wrong_arguments_of_a_message_are_refused(client, given, argument):
    sender, _ = aqueduct.channel()
    for each in (sender, client.connection.entrypoint):
        with refused(argument):
            await each.send(**given)
        with refused(argument):
            each.send_nowait(**given)
    assert await client.call("echo", BATCH) == BATCH


@pytest.mark.parametrize(
    "place",
    [
        5,
        None,
        ("127.0.0.1", "80:90"),
        ("127.0.0.1", 99999),
        ("127.0.0.1", -1),
        ("127.0.0.1", 80, 1),
        (5, 80),
        "",
        ("127.0.0.1", True),
    ],
)
async def test_places_of_bpmux_that_are_none_are_refused(place):
    with refused("place"):
        await bpmux.connect(place)
    with refused("place"):
        await bpmux.serve(_idle, place)


async def _idle(connection: bpmux.BpmuxConnection) -> None:
    await connection.wait_closed()


async def test_wrong_arguments_of_bpmux_are_refused():
    with refused("handler"):
        await bpmux.serve(5, ("127.0.0.1", 0))  # type: ignore[arg-type]
    async with await bpmux.serve(_idle, ("127.0.0.1", 0)) as server:
        with refused("window"):
            await bpmux.connect(server.place, window="wide")
        with refused("config"):
            await bpmux.connect(server.place, config={})  # type: ignore[arg-type]
        connection = await bpmux.connect(server.place, window="64k")
        assert connection.window == 64 << 10
        wrong: list[tuple[Callable[..., Any], dict[str, Any], str]] = [
            (connection.request, {"payload": "text"}, "payload"),
            (connection.request, {"timeout": "5m"}, "timeout"),
            (connection.request, {"window": 0}, "window"),
            (connection.open_sink, {"payload": 5}, "payload"),
            (connection.open_stream, {"window": -1}, "window"),
            (connection.open_duplex, {"payload": None}, "payload"),
            (connection.send, {"payload": "text"}, "payload"),
            (connection.send, {"payload": b"", "partial": 1}, "partial"),
            (connection.accept, {"timeout": NAN}, "timeout"),
            (connection.receive, {"timeout": "soon"}, "timeout"),
            (connection.ping, {"timeout": True}, "timeout"),
            (connection.close, {"payload": "bye"}, "payload"),
        ]
        for method, given, argument in wrong:
            with refused(argument):
                made = method(**given)
                if inspect.isawaitable(made):
                    await made
        sink = connection.open_sink(b"open")
        with refused("payload"):
            await sink.send("text")  # type: ignore[arg-type]
        with refused("payload"):
            sink.end(5)  # type: ignore[arg-type]
        assert await connection.ping(timeout="10s") < 10
        with pytest.raises(TimeoutError):
            await connection.accept(timeout="1ms")
        await connection.close()


def test_read_arguments_reads_by_the_same_table():
    assert read_arguments("call", deadline="3s", token=None) == {"deadline": 3.0, "token": None}
    with pytest.raises(AqueductError, match="call: deadline is 'x'"):
        read_arguments("call", deadline="x")


def test_what_was_not_given_shows_itself():
    assert repr(UNGIVEN) == "not given"
    assert Kind("x", str).value(5, "it") == "5"
