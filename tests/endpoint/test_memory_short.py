"""A service that has no memory for a batch says so: it is not the handler that failed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pytest

import aqueduct
from aqueduct.errors import Busy, HandlerFailed

MiB = 1 << 20
SERVICE = '''
"""Serves at a socket whose path is the argument; the room for memory is bounded on request."""
import asyncio, resource, sys

import pyarrow as pa
import aqueduct

service = aqueduct.Service("small")
COUNT = pa.schema([("rows", pa.int64())])


def counted(batch):
    return pa.record_batch([pa.array([batch.num_rows])], schema=COUNT)


@service.handler("bound")
def bound(batch):
    """From here on the process may have so many bytes of address space more."""
    with open("/proc/self/statm") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    limit = now + batch["more"][0].as_py()
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
    return batch


@service.handler("unbound")
def unbound(batch):
    """As it was; gives the resident bytes."""
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)
    with open("/proc/self/statm") as file:
        now = int(file.read().split()[1]) * resource.getpagesize()
    return pa.record_batch({"more": [now]})


@service.handler("function", output=COUNT)
def function(batch):
    return counted(batch)


@service.handler("coroutine", output=COUNT)
async def coroutine(batch):
    return counted(batch)


@service.handler("generator", output=COUNT)
def generator(batches):
    for batch in batches:
        yield counted(batch)


@service.handler("async-generator", output=COUNT)
async def async_generator(batches):
    try:
        async for batch in batches:
            yield counted(batch)
    except Exception as error:
        raise RuntimeError("it makes something else of that") from error


@service.handler("greedy", output=COUNT)
def greedy(batch):
    raise MemoryError("the handler's own")


service.run(f"aqueduct+unix://{sys.argv[1]}")
'''


@contextmanager
def small_service(folder: Path) -> Iterator[aqueduct.SyncClient]:
    (folder / "app.py").write_text(SERVICE)
    process = subprocess.Popen(
        [sys.executable, folder / "app.py", folder / "s"],
        stdout=subprocess.PIPE,
        # Other pools of Arrow, and the C library for each thread, reserve address space long before
        # they use it.
        env={
            "PYTHONPATH": str(Path(aqueduct.__file__).parents[1]),
            "ARROW_DEFAULT_MEMORY_POOL": "system",
            "MALLOC_ARENA_MAX": "1",
        },
        text=True,
    )
    try:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        with aqueduct.SyncClient(address) as client:
            yield client
            assert process.poll() is None
    finally:
        process.terminate()
        process.communicate(timeout=60)


def number(value: int) -> pa.RecordBatch:
    return pa.record_batch({"more": [value]})


def ask(client: aqueduct.SyncClient, handler: str, value: int) -> int:
    (answer,) = client.exchange(handler, [number(value)])
    found: int = answer["more"][0].as_py()
    return found


HANDLERS = ("function", "coroutine", "generator", "async-generator")
ROWS = 192 * MiB // 8


def count(client: aqueduct.SyncClient, handler: str, batch: pa.RecordBatch) -> int:
    return sum(each["rows"][0].as_py() for each in client.exchange(handler, [batch]))


@pytest.mark.parametrize("compression", [None, "zstd"], ids=["received", "decompressed"])
def test_no_memory_for_a_batch_is_busy_and_not_the_handlers_failure(
    compression: str | None, tmp_path: Path
) -> None:
    large = pa.record_batch([pa.repeat(pa.scalar(7), ROWS)], names=["x"])
    small = large.slice(0, 1000)
    with small_service(tmp_path) as client:
        for handler in HANDLERS:  # what threads and pools take, they have by now
            assert count(client, handler, small) == 1000
        before = ask(client, "unbound", 0)
        for handler in HANDLERS:
            ask(client, "bound", 96 * MiB)
            # Compression is agreed on with the first answer, so a small batch goes first.
            stream = client.exchange(handler, [small, large], compression=compression, in_flight=1)
            with pytest.raises(Busy) as caught:
                list(stream)
            text = str(caught.value)
            wanted = f"could not take memory for batch 1 of the input of handler '{handler}'"
            assert wanted in text and "try again later or elsewhere" in text
            assert count(client, handler, small) == 1000
            assert ask(client, "unbound", 0) - before < 64 * MiB
        assert count(client, "function", large) == ROWS


def test_a_memory_error_of_the_handler_is_its_failure(tmp_path: Path) -> None:
    with small_service(tmp_path) as client:
        with pytest.raises(HandlerFailed, match="raised MemoryError: the handler's own") as caught:
            list(client.exchange("greedy", [number(1)]))
        assert caught.value.kind == "MemoryError"
