"""What may be registered: shapes, signatures, and what is refused with which words."""

from __future__ import annotations

import functools

import pyarrow as pa
import pytest

import aqueduct
from aqueduct.errors import ConfigError
from aqueduct.handlers import Shape
from tests.calls import NUMBERS


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
        (async_generator, Shape.ASYNC_GENERATOR),
        (generator, Shape.GENERATOR),
        (coroutine, Shape.COROUTINE),
        (function, Shape.FUNCTION),
        (lambda batch: batch, Shape.FUNCTION),
        (functools.partial(generator, call=None), Shape.GENERATOR),
        (functools.partial(functools.partial(async_generator)), Shape.ASYNC_GENERATOR),
        (CallableGenerator(), Shape.GENERATOR),
        (CallableFunction(), Shape.FUNCTION),
        (CallableFunction().__call__, Shape.FUNCTION),
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
    ],
)
def test_what_cannot_work_is_refused_at_once(service, written, options, words):
    with pytest.raises(ConfigError, match=words) as caught:
        service.handler("odd", **options)(written)
    assert "'odd'" in str(caught.value)
    assert "odd" not in service.handlers


@pytest.mark.parametrize("name", ["", None, "x" * 257])
def test_a_name_that_cannot_be_sent_is_refused(service, name):
    with pytest.raises(ConfigError, match="must be text of 1 to 256 bytes"):
        service.handler(name)(function)


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
    described = service.describe()
    assert described.service == "test"
    first, second = described.handlers
    assert (first.name, first.kind, first.input, first.output) == ("a", "exchange", NUMBERS, output)
    assert (first.concurrency, first.idempotent) == (3, True)
    assert (second.name, second.kind, second.input, second.output) == ("b", "source", None, None)
