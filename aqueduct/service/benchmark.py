"""The handler that ``aqueduct bench`` calls; a service has it if it was asked for."""

from __future__ import annotations

import os
import time
from typing import Final

import pyarrow as pa

from aqueduct.errors import BadCall
from aqueduct.rpc.benchmark import (
    BENCHMARK,
    BENCHMARK_ANSWER,
    BENCHMARK_QUESTION,
    answer_data,
)
from aqueduct.service.handlers import EXCHANGE, Handler, make_handler

__all__ = ["benchmark_handler"]

_CALLS: Final = 4
"""Calls of it at once: it may fill a network, and is there to measure it, not to load it."""


def benchmark_handler(limit: int) -> Handler:
    """The handler. ``limit``: bytes that one answer may have."""
    # Random, so that a link that compresses does not look faster than it is.
    source = os.urandom(limit)

    async def benchmark(batch: pa.RecordBatch) -> pa.RecordBatch:
        size = batch["answer_bytes"][0].as_py() if batch.num_rows == 1 else -1
        if not 0 <= size <= limit:
            raise BadCall(
                f"{BENCHMARK} takes batches of one row, whose answer_bytes is between 0 and "
                f"{limit} (Calls.fragment_bytes)"
            )
        arrays = [pa.array([time.time()]), answer_data(source, size)]
        return pa.RecordBatch.from_arrays(arrays, schema=BENCHMARK_ANSWER)

    return make_handler(
        benchmark,
        name=BENCHMARK,
        kind=EXCHANGE,
        input=BENCHMARK_QUESTION,
        output=BENCHMARK_ANSWER,
        concurrency=1,
        idempotent=True,
        max_calls=_CALLS,
        description="Does nothing but to answer: for aqueduct bench.",
    )
