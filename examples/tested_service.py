"""A service and its tests in one file: ``pytest examples/tested_service.py``.

It keeps the balances of accounts. A caller shows a token, which names the account.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pyarrow as pa
import pyarrow.compute as pc
import pytest

import aqueduct
from aqueduct import testing
from aqueduct.errors import Cancelled, ConnectionLost, Refused

__all__ = ["authorize", "service", "spend", "statement"]

AMOUNTS = pa.schema([("amount", pa.int64())])
BALANCES = pa.schema([("balance", pa.int64())])


def authorize(call: aqueduct.Call) -> None:
    """Finds the account, for the handlers."""
    account = service.state.accounts.get(call.token)
    if account is None:
        raise Refused("this token has no account")
    call.state.account = account


service = aqueduct.Service("accounts", authorize=authorize)


@service.on_start
def open_accounts() -> None:
    """A real service reads them from a database."""
    service.state.accounts = {"token of anna": {"balance": 100}}


@service.handler(input=AMOUNTS, output=BALANCES)
async def spend(batch: pa.RecordBatch, call: aqueduct.Call) -> pa.RecordBatch:
    """Takes amounts from the account."""
    account = call.state.account
    account["balance"] -= pc.sum(batch["amount"]).as_py()
    return pa.record_batch({"balance": [account["balance"]]}, schema=BALANCES)


@service.handler(kind="source", output=BALANCES)
def statement(call: aqueduct.Call) -> Iterator[pa.RecordBatch]:
    """The balance, again and again, until the caller has seen enough."""
    while True:
        call.check()
        yield pa.record_batch({"balance": [call.state.account["balance"]]}, schema=BALANCES)


# ------------------------------------------------------------------ tests


def amounts(*values: int) -> pa.RecordBatch:
    """A batch of amounts."""
    return pa.record_batch({"amount": list(values)}, schema=AMOUNTS)


@pytest.fixture
def client() -> Iterator[aqueduct.SyncClient]:
    """Anna's client, of a service of its own for each test."""
    with testing.client(service, token="token of anna") as client:
        yield client


def test_amounts_are_spent(client: aqueduct.SyncClient) -> None:
    assert client.call("spend", amounts(30, 20)).to_pylist() == [{"balance": 50}]


def test_strangers_are_refused(client: aqueduct.SyncClient) -> None:
    with pytest.raises(Refused, match="this token has no account"):
        client.call("spend", amounts(1), token="guessed")


def test_a_handler_is_a_function() -> None:
    call = testing.call("spend", schema=AMOUNTS, state={"account": {"balance": 7}})
    answer = asyncio.run(spend(amounts(3), call))
    assert answer.to_pylist() == [{"balance": 4}]


def test_a_statement_ends_with_its_caller() -> None:
    call = testing.call("statement", kind="source", state={"account": {"balance": 7}})
    balances = statement(call)
    assert next(balances).to_pylist() == [{"balance": 7}]
    call.cancel()
    with pytest.raises(Cancelled):
        next(balances)


def test_a_cut_network_is_told_to_the_caller() -> None:
    async def ask() -> None:
        async with service.serving("aqueduct+tcp://127.0.0.1:0", drain=0) as serving:
            async with testing.FaultyNetwork(serving.addresses[0]) as network:
                connecting = aqueduct.Client.connect(network.address, token="token of anna")
                async with await connecting as client:
                    await client.call("spend", amounts(1))
                    network.cut()
                    with pytest.raises(ConnectionLost):
                        await client.call("spend", amounts(1))

    asyncio.run(ask())
