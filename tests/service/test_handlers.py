"""What may be registered: shapes, signatures, and what is refused with which words."""

from __future__ import annotations

import functools
import sys

import pyarrow as pa
import pytest

import aqueduct
from aqueduct.errors import ConfigError
from aqueduct.service.batching import Batching
from aqueduct.service.handlers import HandlerShape
from tests.sinks.shelf import Shelf
from tests.support.calls import NUMBERS, connected, everything, numbers


@pytest.fixture
def service():
    return aqueduct.Service("test")


def shape_of(service, function, **options):
    service.handler("name", **options)(function)
    return service.handlers["name"].shape


class CallableGenerator:
    def __call__(self, batches, call):
        yield from batches


class CallableFunction:
    def __call__(self, batch):
        return batch


async def async_generator(batches, call):
    async for batch in batches:
        yield batch


def generator(batches, call):
    yield from batches


async def coroutine(batch, call):
    return batch


def function(batch):
    return batch


@pytest.mark.parametrize(
    ("written", "shape"),
    [
        (async_generator, HandlerShape.ASYNC_GENERATOR),
        (generator, HandlerShape.GENERATOR),
        (coroutine, HandlerShape.COROUTINE),
        (function, HandlerShape.FUNCTION),
        (lambda batch: batch, HandlerShape.FUNCTION),
        (functools.partial(generator, call=None), HandlerShape.GENERATOR),
        (functools.partial(functools.partial(async_generator)), HandlerShape.ASYNC_GENERATOR),
        (CallableGenerator(), HandlerShape.GENERATOR),
        (CallableFunction(), HandlerShape.FUNCTION),
        (CallableFunction().__call__, HandlerShape.FUNCTION),
    ],
)
def test_the_shape_is_seen(service, written, shape):
    assert shape_of(service, written) is shape


def test_the_call_is_given_to_those_who_have_a_place_for_it(service):
    def takes(function):
        return (
            service.handler(f"h{len(service.handlers)}")(function)
            and list(service.handlers.values())[-1].takes_call
        )

    assert takes(lambda batch, call: batch)
    assert takes(lambda batch, *rest: batch)
    assert takes(lambda batch, call=None: batch)
    assert not takes(lambda batch: batch)
    assert not takes(lambda batch, factor=2: batch)
    assert not takes(lambda batch, *, factor=2: batch)


def test_registering_returns_the_function_unchanged(service):
    assert service.handler("name")(function) is function


def test_a_description_is_the_first_paragraph_of_the_docstring(service):
    @service.handler("name")
    def documented(batch):
        """Doubles
        everything.

        At length.
        """
        return batch

    assert service.handlers["name"].description == "Doubles\neverything."


def test_a_handler_twice_is_an_error(service):
    service.handler("name")(function)
    with pytest.raises(ConfigError, match="'test' has a handler 'name' already"):
        service.handler("name")(generator)


@pytest.mark.parametrize(
    ("written", "options", "words"),
    [
        (function, {"kind": "sponge"}, "kind is 'sponge'; known kinds: 'exchange', 'source'"),
        (7, {}, "a function is wanted, got int"),
        (function, {"kind": "source", "output": NUMBERS}, "a source must be written as async gene"),
        (generator, {"kind": "sink"}, "a sink must be written as coroutine function or function"),
        (lambda: None, {}, r"it is called with \(batch, call\), where call may be left out"),
        (lambda a, b, c: a, {}, r"its signature is \(a, b, c\)"),
        (lambda batch, *, must: batch, {}, "it is called with"),
        (function, {"input": [("id", "int")]}, "input must be a pyarrow.Schema, not list"),
        (function, {"output": 7}, "output must be a pyarrow.Schema or a callable"),
        (lambda: (yield), {"kind": "source"}, "a source needs output="),
        (lambda: (yield), {"kind": "source", "input": NUMBERS}, "so it has no input schema"),
        (function, {"kind": "sink", "output": NUMBERS}, "so it has no output schema"),
        (function, {"concurrency": 0}, "concurrency is 0; it must be 1 or more"),
        (function, {"concurrency": True}, "concurrency is True"),
        (generator, {"concurrency": 2}, "needs a function of one batch; generator handlers see"),
        (function, {"max_calls": 0}, "max_calls is 0; it must be 1 or more, or None"),
        (function, {"max_concurrency": 0}, "max_concurrency is 0; it must be 1 or more, or None"),
        (generator, {"max_concurrency": True}, "max_concurrency is True"),
        (function, {"max_concurrency": 1, "queue": -1}, "queue is -1; it must be 0 or more"),
        (function, {"max_concurrency": 1, "queue": "2"}, "queue is '2'; it must be 0 or more"),
        (function, {"queue": 2}, "queue=2 needs max_concurrency= or batch="),
        (function, {"batch": 4096}, r"batch is 4096; it must be an aqueduct\.Batching"),
        (generator, {"batch": Batching()}, "function of one batch, not generator"),
        (function, {"kind": "sink", "batch": Batching()}, "function of one batch, not a sink"),
        (lambda: None, {"batch": Batching()}, r"called with \(batch, calls\), where calls may be"),
    ],
)
def test_what_cannot_work_is_refused_at_once(service, written, options, words):
    with pytest.raises(ConfigError, match=words) as caught:
        service.handler("odd", **options)(written)
    assert "'odd'" in str(caught.value)
    assert "odd" not in service.handlers


@pytest.mark.parametrize("name", ["", None, "x" * 257])
def test_a_name_that_cannot_be_sent_is_refused(service, name):
    with pytest.raises(ConfigError, match=r"must be text of 1 to 2.. bytes"):
        service.handler(name)(function)


@pytest.mark.requirement("AC-9")
def test_names_of_the_library_are_reserved(service):
    with pytest.raises(ConfigError, match=r"names that begin with 'aqueduct.' are the library's"):
        service.handler("aqueduct.describe")(function)


@pytest.mark.parametrize("name", ["", "two\nlines", None])
def test_a_service_needs_a_name(name):
    with pytest.raises(ConfigError, match="it must be printable text"):
        aqueduct.Service(name)


def test_the_description_of_a_service_has_its_handlers(service):
    output = pa.schema([("length", pa.int32())])
    service.handler("a", input=NUMBERS, output=output, concurrency=3, idempotent=True)(function)
    service.handler("b", kind="source", output=lambda call: output)(lambda: (yield))
    service.handler("c", batch=Batching())(function)
    described = service.describe()
    assert described.service == "test"
    first, second, third = described.handlers
    assert (first.max_concurrency, third.max_concurrency) == (None, 1)
    assert (first.name, first.kind, first.input, first.output) == ("a", "exchange", NUMBERS, output)
    assert (first.concurrency, first.idempotent) == (3, True)
    assert (second.name, second.kind, second.input, second.output) == ("b", "source", None, None)


# ------------------------------------------------------------------ decorators


async def test_decorators_without_parentheses_register(service):
    """With the name of what is decorated, which stays as it is."""

    @service.handler
    def twice(batch):
        """Doubles."""
        return pa.record_batch({"id": pa.compute.multiply(batch["id"], 2)}, schema=batch.schema)

    @service.handler
    async def later(batches, call):
        async for batch in batches:
            yield batch

    @service.handler(kind="source", output=NUMBERS)
    def give():
        yield numbers(5)

    @service.handler(kind="sink")
    def store(batches):
        return {"rows": sum(batch.num_rows for batch in batches)}

    @service.handler()
    def once(batch):
        return batch

    @service.table
    class Entries:
        schema = NUMBERS

        def read(self, split):
            yield numbers(7)

    @service.table(schema=NUMBERS)
    def rows():
        yield numbers(8)

    @service.table("named", schema=NUMBERS)
    def others():
        yield numbers(9)

    @service.sink
    class Kept(Shelf):
        """Keeps rows."""

    @service.sink("kept again", schema=NUMBERS)
    class Again(Shelf):
        pass

    assert isinstance(Entries, type) and isinstance(Kept, type) and isinstance(Again, type)
    assert twice(numbers(1)) == numbers(2)
    assert service.handlers["twice"].description == "Doubles."
    described = service.describe()
    assert {each.name for each in described.handlers} == {"twice", "later", "give", "store", "once"}
    assert {each.name for each in described.tables} == {"Entries", "rows", "named"}
    assert {each.name for each in described.sinks} == {"Kept", "kept again"}
    async with connected(service) as client:
        assert await client.call("twice", numbers(2)) == numbers(4)
        assert await everything(client.exchange("later", [numbers(1)])) == [numbers(1)]
        assert await everything(client.source("give")) == [numbers(5)]
        assert (await client.sink("store", [numbers(1, 2)]))["rows"] == 2


def test_what_has_no_name_of_its_own_needs_one(service):
    for nameless in (lambda batch: batch, functools.partial(function), CallableFunction()):
        with pytest.raises(
            ConfigError, match=r'has no name of its own: .*service\.handler\("NAME"'
        ):
            service.handler(nameless)
        with pytest.raises(ConfigError, match="has no name of its own"):
            service.handler()(nameless)
    with pytest.raises(ConfigError, match=r'service\.sink\("NAME"\)'):
        service.sink(Shelf())
    assert [name for name in service.handlers if not name.startswith("aqueduct.")] == []


@pytest.mark.parametrize("decorator", ["handler", "table", "sink"])
@pytest.mark.parametrize("given", [5, None, b"name", ["name"], {"name": 1}])
def test_what_is_neither_a_name_nor_a_function_is_refused_at_once(service, decorator, given):
    with pytest.raises(ConfigError, match=r"must be text of 1 to 2.. bytes"):
        getattr(service, decorator)(given)


def test_what_was_registered_without_parentheses_is_not_replaced(service):
    service.handler(function)
    with pytest.raises(ConfigError, match="has a handler 'function' already"):
        service.handler(function)
    assert service.handlers["function"].function is function


def test_a_sink_is_no_function(service):
    with pytest.raises(ConfigError, match=r"open, commit and abort; .*handler\(kind=\"sink\"\)"):
        service.sink(function)
    with pytest.raises(ConfigError, match=r"open, commit and abort"):
        service.sink("named")(function)

    class Needy(Shelf):
        def __init__(self, folder):
            super().__init__()

    with pytest.raises(
        ConfigError, match=r"Needy\(\) needs arguments .*give an object, Needy\(...\)"
    ):
        service.sink(Needy)
    with pytest.raises(ConfigError, match="Needy"):
        service.sink("named", Needy)
    assert service.describe().sinks == ()


# ------------------------------------------------------------------ annotations

ANNOTATED = """
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    from somewhere import Batch, Batches, Call, Request

def of_a_batch(batch: Batch, call: Call) -> Batch:
    return batch

def without_call(batch: Batch | None) -> list[Batch]:
    return batch

async def of_batches(batches: Batches[Batch], call: Call = None) -> Batches:
    async for batch in batches:
        yield batch

class Callable:
    def __call__(self, batch: Batch, call: Call) -> Batch:
        return batch

class Table:
    def read(self, split: object, request: Request) -> Batches:
        yield

    def splits(self, request: Request) -> list[Batch]:
        return []

class Sink:
    def open(self, attempt: Attempt, call: Call) -> Book: ...
    def commit(self, write_key: WriteKey, prepared: list[Prepared]) -> None: ...
    def abort(self, write_key: WriteKey, prepared: list[Prepared]) -> None: ...

class WrongSink(Sink):
    def commit(self, write_key: WriteKey) -> None: ...

def of_nothing() -> Batch:
    return None
"""


def annotated() -> dict:
    """As a module of today has it: evaluated when asked for from 3.14 on, or text."""
    text = "" if sys.version_info >= (3, 14) else "from __future__ import annotations\n"
    names: dict = {"__name__": "annotated"}
    exec(compile(text + ANNOTATED, "annotated.py", "exec", dont_inherit=True), names)
    return names


def test_annotations_that_only_type_checkers_import_are_not_evaluated(service):
    names = annotated()
    service.handler(names["of_a_batch"])
    service.handler(names["without_call"])
    service.handler(names["of_batches"])
    service.handler("callable", concurrency=2)(names["Callable"]())
    service.table("table", names["Table"](), schema=NUMBERS)
    service.sink("sink", names["Sink"])
    assert service.handlers["of_a_batch"].takes_call
    assert not service.handlers["without_call"].takes_call
    assert service.handlers["of_batches"].shape is HandlerShape.ASYNC_GENERATOR
    with pytest.raises(ConfigError, match=r"its signature is \(\) ?-> ?'?Batch"):
        service.handler(names["of_nothing"])
    with pytest.raises(
        ConfigError, match=r"called as commit\(write_key, prepared\); its signature is \(write_key"
    ):
        service.sink("wrong", names["WrongSink"])
