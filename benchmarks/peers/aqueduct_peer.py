"""Aqueduct: a Service with asynchronous handlers, and the asyncio Client, as users write them."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pyarrow as pa

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from aqueduct.client.client import Client as AqueductClient
from aqueduct.client.sync_client import SyncClient
from aqueduct.config import Config, Quic
from aqueduct.service.service import Service
from benchmarks.peers import common

ENCRYPTED = ("quic", "tls")
BODY = pa.schema([pa.field("body", pa.binary())])


def body_batch(body: bytes) -> pa.RecordBatch:
    return pa.record_batch([pa.array([body], pa.binary())], schema=BODY)


def body_of(batch: pa.RecordBatch) -> bytes:
    value: bytes = batch.column(0)[0].as_py()
    return value


def address_of(setup: common.Setup) -> str:
    if setup.carrier == "unix":
        return f"aqueduct+unix://{setup.folder}/aqueduct.sock"
    scheme = "aqueduct" if setup.carrier == "quic" else f"aqueduct+{setup.carrier}"
    return f"{scheme}://127.0.0.1:0"


def config_of(setup: common.Setup) -> Config:
    return Config(quic=Quic(datagram_size=setup.datagram or "auto"))


def service_of(setup: common.Setup) -> Service:
    """The handlers of one measurement. Like the other peers', they sum every batch themselves."""
    service = Service("benchmark", config=config_of(setup))
    work = common.Work(setup)

    @service.handler("sink", input=common.SCHEMA, kind="sink")
    async def sink(batches: AsyncIterator[pa.RecordBatch]) -> None:
        async for batch in batches:
            work.arrived(batch)

    @service.handler("source", output=common.SCHEMA, kind="source")
    async def source() -> AsyncIterator[pa.RecordBatch]:
        for batch in work:
            yield batch

    @service.handler("echo", input=common.SCHEMA, output=common.SCHEMA)
    async def echo(batches: AsyncIterator[pa.RecordBatch]) -> AsyncIterator[pa.RecordBatch]:
        async for batch in batches:
            work.arrived(batch)
            yield batch

    @service.handler("request", input=BODY, output=BODY)
    async def request(batches: AsyncIterator[pa.RecordBatch]) -> AsyncIterator[pa.RecordBatch]:
        async for batch in batches:
            yield batch  # as it came, like the body of Flight's action

    @service.handler("compare", input=BODY, output=BODY)
    def compare(batch: pa.RecordBatch) -> pa.RecordBatch:
        ours = work.compare(setup.mode, False, json.loads(body_of(batch)))
        return body_batch(json.dumps(ours).encode())

    return service


class Client:
    """Runs the event loop for as long as one measurement asks."""

    def __init__(self, setup: common.Setup, address: str) -> None:
        self.runner = asyncio.Runner()
        self.target = address
        self.config = config_of(setup)
        if setup.carrier in ENCRYPTED:
            self.target += f"?ca={setup.certificate}&server_name=localhost"
        self.client: AqueductClient = self.runner.run(
            AqueductClient.connect(self.target, config=self.config)
        )

    def sink(self, work: common.Work) -> None:
        self.runner.run(self.client.sink("sink", work, schema=common.SCHEMA))

    def source(self, work: common.Work) -> None:
        async def run() -> None:
            async for batch in self.client.source("source"):
                work.arrived(batch)

        self.runner.run(run())

    def echo(self, work: common.Work) -> None:
        async def run() -> None:
            async for batch in self.client.exchange("echo", work, schema=common.SCHEMA):
                work.arrived(batch)

        self.runner.run(run())

    def requests(self, laps: common.Laps) -> None:
        async def run() -> None:
            for request in laps:
                laps.answered(body_of(await self.client.call("request", body_batch(request))))

        self.runner.run(run())

    def sync_requests(self, laps: common.Laps) -> None:
        """The same from a thread, without an event loop of the caller's."""
        with SyncClient(self.target, config=self.config) as client:
            for request in laps:
                laps.answered(body_of(client.call("request", body_batch(request))))

    def exchange_requests(self, laps: common.Laps) -> None:
        """The same by an exchange for each: what a call of one batch saves."""

        async def run() -> None:
            for request in laps:
                async for batch in self.client.exchange(
                    "request", [body_batch(request)], schema=BODY
                ):
                    answer = body_of(batch)
                laps.answered(answer)

        self.runner.run(run())

    def open_requests(self, laps: common.Laps) -> None:
        answered = asyncio.Event()

        async def asked() -> AsyncIterator[pa.RecordBatch]:
            for request in laps:
                yield body_batch(request)
                await answered.wait()
                answered.clear()

        async def run() -> None:
            async for batch in self.client.exchange("request", asked(), schema=BODY):
                laps.answered(body_of(batch))
                answered.set()

        self.runner.run(run())

    def compare(self, totals: dict[str, int]) -> dict[str, int]:
        async def run() -> dict[str, int]:
            question = body_batch(json.dumps(totals).encode())
            async for batch in self.client.exchange("compare", [question], schema=BODY):
                answer: dict[str, int] = json.loads(body_of(batch))
            return answer

        return self.runner.run(run())


def serve(setup: common.Setup, ready: common.Ready) -> None:
    service = service_of(setup)

    async def run() -> None:
        encrypted = setup.carrier in ENCRYPTED
        async with service.serving(
            address_of(setup),
            certificate=setup.certificate if encrypted else None,
            key=setup.key if encrypted else None,
        ) as running:
            ready(running.addresses[0])
            await asyncio.Event().wait()

    asyncio.run(run())


def connect(setup: common.Setup, address: Any) -> Client:
    return Client(setup, address)


if __name__ == "__main__":
    common.main(serve, connect)
