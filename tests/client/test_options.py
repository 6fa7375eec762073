"""The options of calls: one table of them, and signatures that name each."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import Any, ForwardRef

import pytest

import aqueduct
from aqueduct.arguments import ARGUMENTS
from aqueduct.client.options import (
    CallOptions,
    ExchangeOptions,
    SinkOptions,
    SourceOptions,
    UnaryOptions,
    WorkOptions,
)
from aqueduct.client.task_client import TaskClient
from tests.support.calls import NUMBERS, numbers, sync_client

KINDS: dict[str, type] = {
    "exchange": ExchangeOptions,
    "call": UnaryOptions,
    "call_table": UnaryOptions,
    "source": SourceOptions,
    "sink": SinkOptions,
}
BATCHES = {"exchange", "sink"}


def parameters(function: Callable[..., Any]) -> dict[str, tuple[Any, Any, str]]:
    found = inspect.signature(function).parameters
    return {name: (each.kind, each.default, each.annotation) for name, each in found.items()}


@pytest.mark.parametrize("kind", [*KINDS, "describe", "ping", "close"])
def test_both_clients_have_the_same_signatures(kind):
    one, other = (
        parameters(getattr(client, kind)) for client in (aqueduct.Client, aqueduct.SyncClient)
    )
    assert list(one) == list(other)
    if kind in BATCHES:  # a SyncClient takes no async iterables
        assert one.pop("batches") != other.pop("batches")
    assert one == other


def test_both_clients_connect_by_the_same_arguments():
    one = parameters(aqueduct.Client.connect)
    other = parameters(aqueduct.SyncClient)
    assert one == other


@pytest.mark.parametrize("kind", KINDS)
def test_a_signature_names_each_option_with_its_type_and_default(kind):
    defaults = {field.name: (field.default, field.type) for field in fields(CallOptions)}
    for client in (aqueduct.Client, aqueduct.SyncClient, TaskClient):
        signature = inspect.signature(getattr(client, kind))
        named = {
            name: (each.default, each.annotation)
            for name, each in signature.parameters.items()
            if each.kind is each.KEYWORD_ONLY and name != "on_end"
        }
        assert named == {name: defaults[name] for name in KINDS[kind].__annotations__}


def test_every_option_has_one_type_and_is_read_by_the_table():
    options = {field.name: field.type for field in fields(CallOptions)}
    assert options.keys() <= ARGUMENTS.keys()
    told: set[str] = set()
    for kind in (WorkOptions, *KINDS.values()):
        for name, annotation in kind.__annotations__.items():
            assert isinstance(annotation, ForwardRef)
            assert annotation.__forward_arg__ == options[name]
            told.add(name)
    assert told == options.keys()


@pytest.mark.parametrize(("kind", "option"), [("sink", "ordered"), *((k, "colour") for k in KINDS)])
async def test_an_option_that_a_call_does_not_have_is_a_type_error(kind, option):
    service = aqueduct.Service("test")
    service.handler("echo")(lambda batch: batch)
    arguments = {"exchange": ([numbers(1)],), "sink": ([numbers(1)],), "source": ()}
    given = ("echo", *arguments.get(kind, (numbers(1),)))
    with sync_client(service, "tcp") as client:
        with pytest.raises(TypeError, match=rf"{kind[:4]}.*unexpected keyword argument '{option}'"):
            getattr(client, kind)(*given, **{option: True})
        assert client.call("echo", numbers(1)) == numbers(1)
        async with await aqueduct.Client.connect(client.address) as other:
            with pytest.raises(TypeError, match=f"unexpected keyword argument '{option}'"):
                made = getattr(other, kind)(*given, **{option: True})
                if inspect.isawaitable(made):
                    await made


def test_options_that_are_none_are_not_given():
    service = aqueduct.Service("test")
    service.handler("echo")(lambda batch: batch)
    nothing: dict[str, Any] = {
        "output_schema": None,
        "deadline": None,
        "headers": None,
        "token": None,
        "partition": None,
    }
    with sync_client(service, "tcp") as client:
        assert client.call("echo", numbers(1), **nothing) == numbers(1)
        found = client.exchange("echo", [numbers(1)], schema=NUMBERS, in_flight=None, **nothing)
        assert list(found) == [numbers(1)]
