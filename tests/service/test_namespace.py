"""Attributes that a service and a call keep: what is missing is named, and secrets stay inside."""

from __future__ import annotations

import copy

import pytest

import aqueduct
from aqueduct.service.namespace import Namespace
from tests.service.reactive_clients import WORDS, asked, asking, rows_of, words
from tests.support.calls import NUMBERS, connected, everything, numbers


def test_attributes_are_set_read_and_removed() -> None:
    state = Namespace({"first": 1})
    state.second = 2
    assert (state.first, state.second) == (1, 2)
    assert "second" in state and "third" not in state
    del state.first
    assert vars(state) == {"second": 2}
    assert repr(state) == "<Namespace with second>"
    assert vars(copy.deepcopy(state)) == {"second": 2}


def test_what_is_not_there_is_named_with_what_is() -> None:
    service = aqueduct.Service("models")
    with pytest.raises(AttributeError, match=r"^service\.state has no 'model'; it has nothing yet"):
        service.state.model  # noqa: B018
    service.state.modell = 1
    with pytest.raises(AttributeError, match=r"has no 'model'; it has 'modell'; an on_start func"):
        service.state.model  # noqa: B018
    with pytest.raises(AttributeError, match=r"^_private$"):
        service.state._private  # noqa: B018


def owned() -> aqueduct.Service:
    """Its handlers answer with what ``authorize`` has found out."""

    async def authorize(call: aqueduct.Call) -> None:
        call.state.owner = f"owner of {call.token}"
        call.state.seen = [*getattr(call.state, "seen", ()), call.handler]

    service = aqueduct.Service("owned", authorize=authorize)

    @service.handler(output=WORDS)
    def function(batch, call):
        return words(call.state.owner)

    @service.handler(output=WORDS, kind="source")
    async def source(call):
        yield words(call.state.owner)

    @service.handler(output=WORDS, kind="source")
    def missing(call):
        yield call.state.customer

    @service.table(schema=WORDS)
    def log(request):
        yield words(*request.call.state.seen)

    return service


async def test_what_authorize_finds_out_reaches_handlers_of_each_kind() -> None:
    async with connected(owned(), token="abc") as client:
        expected = [words("owner of abc")]
        assert await client.call("function", words("a")) == expected[0]
        assert await everything(client.exchange("function", [words("a")])) == expected
        again = await client.call("function", words("a"), token="x")
        assert again == words("owner of x")  # a state is of one call
        assert await everything(client.source("source")) == expected
        with pytest.raises(aqueduct.errors.HandlerFailed, match=r"call\.state has no 'customer'"):
            await everything(client.source("missing"))


async def test_it_reaches_handlers_that_are_asked_by_reactivesocket() -> None:
    async with asking(owned()) as (_, client):
        item = await client.request(asked("function", words("a"), token="abc"))
        assert rows_of(item.data) == [["owner of abc"]]
        async with client.stream(asked("log"), n=8) as stream:
            items = [item.data async for item in stream]
        # It is one call, of which authorize looks at two.
        assert rows_of(*items) == [["aqueduct.table.plan.log", "aqueduct.table.read.log"]]


async def test_it_lives_for_the_whole_of_a_call_of_many_batches() -> None:
    service = aqueduct.Service("counts")

    @service.handler(input=NUMBERS)
    def count(batch, call):
        call.state.batches = getattr(call.state, "batches", 0) + 1
        return numbers(call.state.batches)

    async with connected(service) as client:
        for _ in range(2):
            answers = await everything(client.exchange("count", [numbers(0)] * 3))
            assert [batch["id"].to_pylist() for batch in answers] == [[1], [2], [3]]
