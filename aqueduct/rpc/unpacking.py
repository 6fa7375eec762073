"""Compressed batches: each is unpacked once there is room for all of it.

A few bytes may unpack to many. So the unpacked size is charged to the receive budgets before memory
is taken, and a batch waits for room as others do. After Timing.stall_deadline it is unpacked
without room: others may wait for its handler or reader.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pyarrow as pa

from aqueduct._speedups.channels.receiver import MemoryLease
from aqueduct.arrow.decode import Decoder
from aqueduct.endpoint import accounts
from aqueduct.rpc.deadline import ThreadWakeup
from aqueduct.rpc.threads import apart

__all__ = ["await_room", "decode_later"]


def await_room(decoder: Decoder, payload: Any, lease: MemoryLease | None, seconds: float) -> None:
    """Waits in this thread until ``payload`` may be unpacked, for so many ``seconds`` at most."""
    if lease is None or not (size := decoder.unpacked_bytes(payload)):
        return
    there, account = threading.Event(), accounts.process().receiving
    if not account.ask(lease, size, threading.get_ident(), there.set):
        try:
            there.wait(seconds)
        finally:
            account.insist(lease)


def decode_later(
    decoder: Decoder,
    payload: Any,
    lease: MemoryLease | None,
    decode: Callable[[], pa.RecordBatch],
    seconds: float,
    reader: object,
) -> asyncio.Task[pa.RecordBatch]:
    """``decode`` for a payload that takes long, or may be compressed; on an event loop.

    - ``lease``: what the payload is charged.
    - ``seconds``: how long it waits for room at most.
    - ``reader``: the thread or task that waits for the batch.
    """
    task = asyncio.get_running_loop().create_task(
        _decode(decoder, payload, lease, decode, seconds, reader)
    )
    task.add_done_callback(_seen)
    return task


async def _decode(
    decoder: Decoder,
    payload: Any,
    lease: MemoryLease | None,
    decode: Callable[[], pa.RecordBatch],
    seconds: float,
    reader: object,
) -> pa.RecordBatch:
    slow = decoder.slow(payload)
    if decoder.unpacks and lease is not None:
        measure = decoder.unpacked_bytes
        size = await apart(measure, payload) if slow else measure(payload)
        if size:
            await _room(lease, size, seconds, reader)
    return await apart(decode) if slow else decode()


async def _room(lease: MemoryLease, size: int, seconds: float, reader: object) -> None:
    there, account = ThreadWakeup(), accounts.process().receiving
    if account.ask(lease, size, reader, there.set_threadsafe):
        return
    try:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await there.wait()
    finally:
        account.insist(lease)


def _seen(task: asyncio.Task[pa.RecordBatch]) -> None:
    """An error is of no interest once nobody asks for the batch."""
    if not task.cancelled():
        task.exception()
