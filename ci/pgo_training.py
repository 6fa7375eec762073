"""What the compiled modules do most, for a compiler that counts what is done: ``AQUEDUCT_PGO=1``.

``setup.py`` runs this with modules that count, between their two builds. A service in a process of
its own answers calls of a few rows one by one and side by side, and streams batches of some sizes
both ways, over each kind of carrier. All of it is checked, so that no wrong way is learned from.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pyarrow as pa

import aqueduct
from aqueduct._speedups.channels.frames import MessageFrame
from aqueduct._speedups.control_streams.control_encoder import (
    encode_control_acks,
    encode_control_message,
)
from aqueduct._speedups.control_streams.control_frames import ControlFrameDecoder
from aqueduct._speedups.reactivesocket.reactive_frames import (
    COMPLETE,
    RESPONSE,
    ReactiveFrameDecoder,
    encode_head,
)

READ = 64 << 10
TIME_LIMIT = 120.0  # seconds, for each address
ROWS = pa.schema(
    [
        pa.field("key", pa.int64(), nullable=False),
        pa.field("score", pa.float64()),
        pa.field("text", pa.string()),
    ]
)
# Calls one by one, calls at once, and batches of a stream: over a byte stream, and over QUIC,
# whose packets run through far more code each.
STREAM, QUIC = (800, 100, 20), (100, 20, 5)


def batch_of(rows: int) -> pa.RecordBatch:
    """About 40 bytes a row."""
    score = [None if n % 7 == 0 else n / 8 for n in range(rows)]
    return pa.record_batch([range(rows), score, [f"the row {n}" for n in range(rows)]], schema=ROWS)


SMALL, MIDDLE, LARGE = batch_of(5), batch_of(1600), batch_of(26_000)


def service() -> aqueduct.Service:
    """The handlers that are called; each kind once."""
    service = aqueduct.Service("training")

    @service.handler("answer", input=ROWS, output=ROWS)
    def answer(batch: pa.RecordBatch) -> pa.RecordBatch:
        return batch

    @service.handler("echo", input=ROWS, output=ROWS)
    async def echo(batches: AsyncIterator[pa.RecordBatch]) -> AsyncIterator[pa.RecordBatch]:
        async for batch in batches:
            yield batch

    @service.handler("source", output=ROWS, kind="source")
    async def source() -> AsyncIterator[pa.RecordBatch]:
        for _ in range(STREAM[2]):
            yield LARGE

    @service.handler("sink", input=ROWS, kind="sink")
    async def sink(batches: AsyncIterator[pa.RecordBatch]) -> None:
        async for _ in batches:
            pass

    return service


async def serve(folder: str) -> None:
    """Listens everywhere until the standard input ends; says where."""
    addresses = [
        f"aqueduct+unix://{folder}/training.sock",
        "aqueduct+tcp://127.0.0.1:0",
        "aqueduct+tls://127.0.0.1:0",
        "aqueduct://127.0.0.1:0",
    ]
    async with service().serving(*addresses, dev_certificate=True) as running:
        print(*running.addresses, flush=True)
        await asyncio.to_thread(sys.stdin.read)


def same(found: list[pa.RecordBatch], sent: list[pa.RecordBatch]) -> None:
    """Ends the training where an answer is wrong."""
    if found != sent:
        sys.exit("what came back from the service is not what was sent")


async def stream(client: aqueduct.Client, batches: list[pa.RecordBatch]) -> None:
    """The same batches there and back, and there."""
    same([batch async for batch in client.exchange("echo", batches, schema=ROWS)], batches)
    await client.sink("sink", batches, schema=ROWS)


async def train(address: str) -> None:
    """Calls and streams over one connection."""
    calls, at_once, batches = QUIC if address.startswith("aqueduct:") else STREAM
    async with await aqueduct.Client.connect(address) as client:
        for _ in range(calls):
            for handler in "answer", "echo":
                same([await client.call(handler, SMALL)], [SMALL])
        for _ in range(calls // at_once):
            same(
                await asyncio.gather(*(client.call("answer", SMALL) for _ in range(at_once))),
                [SMALL] * at_once,
            )
        for batch in SMALL, MIDDLE, LARGE:
            await stream(client, [batch] * batches)
        async for batch in client.source("source"):
            same([batch], [LARGE])


def blocking(address: str) -> None:
    """As workers of Spark call: with no event loop of their own."""
    with aqueduct.SyncClient(address) as client:
        for _ in range(50):
            same(list(client.exchange("echo", [SMALL] * 3, schema=ROWS)), [SMALL] * 3)


def frames() -> None:
    """Frames of ReactiveSocket, as they come in reads of 64 KiB."""
    for size, count in ((200, 4000), (20_000, 400)):
        sent = b"".join(
            encode_head(RESPONSE, 2 * n + 1, size, flags=COMPLETE) + bytes(size)
            for n in range(count)
        )
        decoder, found, at = ReactiveFrameDecoder(), 0, 0
        while at < len(sent):
            room = decoder.room()
            if room is None:
                decoder.feed(sent[at : at + READ])
                at += READ
            else:
                part = sent[at : at + len(room)]
                room[: len(part)] = part
                decoder.landed(len(part))
                at += len(part)
            while decoder.next():
                found += len(decoder.data) == size
        if found != count:
            raise SystemExit(f"{found} frames of {count} came whole")


def control_streams() -> None:
    """Messages and acks of the control-stream draft, as they come in reads of 64 KiB.

    Those of calls have headers.
    """
    pairs = ((b"arrow-batch-2179bf", b"7"),)
    for size, count, headers in ((200, 4000, None), (200, 4000, pairs), (20_000, 400, pairs)):
        sent = b"".join(
            bytes(buffer)
            for number in range(count)
            for buffer in encode_control_message(0, number, bytes(size), (), headers)
        )
        blocks = headers is not None
        decoder = ControlFrameDecoder(from_server=False, carrier="uni", header_blocks=blocks)
        found, at = 0, 0
        while at < len(sent):
            room = decoder.receive_buffer(READ)
            if room is None:
                decoder.feed(sent[at : at + READ])
                at += READ
            else:
                part = sent[at : at + len(room)]
                room[: len(part)] = part
                decoder.received(len(part))
                at += len(part)
            while (frame := decoder.next()) is not None:
                found += isinstance(frame, MessageFrame) and frame.size == size
        if found != count:
            raise SystemExit(f"{found} messages of {count} came whole")
    decoder = ControlFrameDecoder(from_server=True, carrier="answer", channel=2)
    for number in range(2000):
        decoder.feed(encode_control_acks([number, 1, 2]))
        if decoder.next() is None:
            raise SystemExit("an ack did not come whole")


def main() -> None:
    """Starts the service and calls it at each of its addresses."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(Path(__file__).resolve()), "serve", folder]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            assert process.stdin and process.stdout
            try:
                addresses = process.stdout.readline().decode().split()
                if not addresses:
                    sys.exit("the service of the training said nothing of its addresses")
                for address in addresses:
                    asyncio.run(asyncio.wait_for(train(address), TIME_LIMIT))
                    blocking(address)
            finally:
                process.stdin.close()
        if process.returncode:
            sys.exit(f"the service of the training ended with {process.returncode}")
    frames()
    control_streams()


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        asyncio.run(asyncio.wait_for(serve(sys.argv[2]), 5 * TIME_LIMIT))
    else:
        main()
