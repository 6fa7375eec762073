"""How long one call with a large message keeps the event loop from everybody else.

    python benchmarks/stalls.py [--carrier unix|tcp|quic] [CASE ...]

A service in a process of its own and its client each run a task that wakes up every millisecond.
For each case the longest pause of that task is printed, in milliseconds, of the client's loop and
of the service's, and how long the call took. What keeps the loop busy for long on one message
keeps all other calls of the process waiting.
"""

from __future__ import annotations

import argparse
import asyncio
import string
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from typing import Final

import pyarrow as pa

import aqueduct

COLUMNS: Final = 20_000
VALUES: Final = 1_500_000
ROWS: Final = 2_000_000
GAP: Final = pa.schema([("milliseconds", pa.float64())])
BEAT: Final = 0.001  # seconds
TIME_LIMIT: Final = 300.0  # seconds, for each case


class Ticker:
    """Wakes up again and again, and knows its longest pause."""

    def __init__(self) -> None:
        self.longest = 0.0
        """Seconds."""
        self._last = time.perf_counter()

    def reset(self) -> float:
        """The longest pause since the last reset, in milliseconds."""
        now = time.perf_counter()
        longest, self.longest = max(self.longest, now - self._last), 0.0
        self._last = now
        return 1e3 * longest

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            await asyncio.sleep(BEAT)
            now = time.perf_counter()
            self.longest, self._last = max(self.longest, now - self._last), now


def columns() -> pa.RecordBatch:
    """One row of very many columns."""
    arrays = [pa.array([n]) for n in range(COLUMNS)]
    return pa.RecordBatch.from_arrays(arrays, [f"column_{n}" for n in range(COLUMNS)])


def required() -> pa.RecordBatch:
    """The same, of structs with a field that must not be null: many types inside types."""
    kind = pa.struct([pa.field("x", pa.int64(), nullable=False)])
    array = pa.array([{"x": 1}], kind)
    names = [f"column_{n}" for n in range(COLUMNS)]
    return pa.RecordBatch.from_arrays([array] * COLUMNS, names)


def words(count: int) -> pa.Array:
    """So many different texts."""
    return pa.array([f"value number {n:09}" for n in range(count)])


def dictionary() -> pa.RecordBatch:
    """A few rows with a very large dictionary."""
    indices = pa.array([0, VALUES - 1], pa.int32())
    return pa.record_batch([pa.DictionaryArray.from_arrays(indices, words(VALUES))], ["word"])


def nested_dictionary() -> pa.RecordBatch:
    """The same with values of lists."""
    texts = words(VALUES)
    lists = pa.ListArray.from_arrays(pa.array(range(VALUES + 1), pa.int32()), texts)
    indices = pa.array([0, VALUES - 1], pa.int32())
    return pa.record_batch([pa.DictionaryArray.from_arrays(indices, lists)], ["word"])


def views() -> pa.RecordBatch:
    """Every other row of a large column of views."""
    _, all_views, *texts = words(ROWS).cast(pa.string_view()).buffers()
    size = 16  # bytes of a view
    every_other = b"".join(
        memoryview(all_views)[place : place + size] for place in range(0, ROWS * size, 2 * size)
    )
    buffers = [None, pa.py_buffer(every_other), *texts]
    array = pa.Array.from_buffers(pa.string_view(), ROWS // 2, buffers)
    return pa.record_batch([array], ["view"])


def letters() -> pa.RecordBatch:
    """What compresses to little."""
    texts = pa.array([string.ascii_letters[n % 40 :] for n in range(ROWS)])
    return pa.record_batch([texts], ["text"])


BATCHES: Final[dict[str, Callable[[], pa.RecordBatch]]] = {
    "columns": columns,
    "required": required,
    "dictionary": dictionary,
    "nested_dictionary": nested_dictionary,
    "views": views,
    "compressed": letters,
}
CASES: Final = (
    *(f"{batch}/{way}" for batch in list(BATCHES)[:-1] for way in ("stream", "call")),
    "compressed/stream",
    "describe",
)


def service(ticker: Ticker) -> aqueduct.Service:
    """The handlers that are called, and one that tells of the pauses."""
    service = aqueduct.Service("stalls")
    service.handler("gap", output=GAP, kind="source")(_gap_of(ticker))

    @service.handler("stream")
    async def stream(batches: AsyncIterator[pa.RecordBatch]) -> AsyncIterator[pa.RecordBatch]:
        async for batch in batches:
            yield batch

    @service.handler("call")
    async def call(batch: pa.RecordBatch) -> pa.RecordBatch:
        return batch

    wide = pa.schema([(f"column_{n}", pa.int64()) for n in range(COLUMNS)])

    @service.handler("wide", input=wide, output=wide)
    def wide_handler(batch: pa.RecordBatch) -> pa.RecordBatch:
        return batch

    return service


def _gap_of(ticker: Ticker) -> Callable[[], AsyncIterator[pa.RecordBatch]]:
    async def gap() -> AsyncIterator[pa.RecordBatch]:
        yield pa.record_batch([[ticker.reset()]], schema=GAP)

    return gap


async def serve(address: str) -> None:
    """Listens until the standard input ends; says where."""
    pa.record_batch([[0.0]], schema=GAP)  # pyarrow imports pandas for it, which takes long
    ticker = Ticker()
    task = asyncio.create_task(ticker.run())
    async with service(ticker).serving(address, dev_certificate=True) as running:
        print(*running.addresses, flush=True)
        await asyncio.to_thread(sys.stdin.read)
    task.cancel()


async def measure(address: str, cases: list[str]) -> None:
    """Prints a line for each case."""
    ticker = Ticker()
    task = asyncio.create_task(ticker.run())
    print(f"{'case':28}{'client ms':>10}{'service ms':>11}{'call s':>8}")
    async with await aqueduct.Client.connect(address) as client:
        for case in cases:
            name, _, way = case.partition("/")
            batch = BATCHES[name]() if name in BATCHES else None
            await _gap(client)
            ticker.reset()
            began = time.perf_counter()
            async with asyncio.timeout(TIME_LIMIT):
                await _one(client, name, way, batch)
            took = time.perf_counter() - began
            mine = ticker.reset()
            theirs = await _gap(client)
            print(f"{case:28}{mine:10.1f}{theirs:11.1f}{took:8.2f}", flush=True)
    task.cancel()


async def _one(client: aqueduct.Client, name: str, way: str, batch: pa.RecordBatch | None) -> None:
    if batch is None:
        await client.describe()
        return
    if way == "call":
        found = await client.call("call", batch)
    else:
        compression = "zstd" if name == "compressed" else None
        stream = client.exchange("stream", [batch], compression=compression)
        (found,) = [each async for each in stream]
    if found.num_rows != batch.num_rows:
        sys.exit("what came back from the service is not what was sent")


async def _gap(client: aqueduct.Client) -> float:
    batches = [batch async for batch in client.source("gap", output_schema=GAP)]
    value: float = batches[0].column(0)[0].as_py()
    return value


def main() -> None:
    """Starts the service and measures each case."""
    parser = argparse.ArgumentParser(description=__doc__, add_help=True)
    parser.add_argument("--carrier", choices=("unix", "tcp", "quic"), default="unix")
    parser.add_argument("--serve", metavar="ADDRESS", help=argparse.SUPPRESS)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=", ".join(CASES))
    arguments = parser.parse_args()
    if arguments.serve:
        asyncio.run(serve(arguments.serve))
        return
    for case in arguments.cases:
        if case not in CASES:
            parser.error(f"{case!r} is none of {', '.join(CASES)}")
    with tempfile.TemporaryDirectory() as folder:
        address = {
            "unix": f"aqueduct+unix://{folder}/stalls.sock",
            "tcp": "aqueduct+tcp://127.0.0.1:0",
            "quic": "aqueduct://127.0.0.1:0",
        }[arguments.carrier]
        command = [sys.executable, __file__, "--serve", address]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            listening = process.stdout.readline().split()[0]
            try:
                asyncio.run(measure(listening, arguments.cases or list(CASES)))
            finally:
                process.communicate(timeout=30)


if __name__ == "__main__":
    main()
