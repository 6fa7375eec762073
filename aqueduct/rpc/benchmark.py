"""The reserved handler ``aqueduct.benchmark``, which does nothing but to answer.

It is an exchange of one row each way: ``data`` may be as long as a batch may be, and
``answer_bytes`` says how much comes back. So one handler measures small calls, and both directions.
"""

from __future__ import annotations

import struct
from typing import Final

import pyarrow as pa

__all__ = ["BENCHMARK", "BENCHMARK_ANSWER", "BENCHMARK_QUESTION", "answer_data", "question"]

BENCHMARK: Final = "aqueduct.benchmark"
"""The handler that a service has if it was made with ``benchmark=True``, or served with it."""
BENCHMARK_QUESTION: Final = pa.schema(
    [
        pa.field("answer_bytes", pa.int64(), nullable=False),
        pa.field("data", pa.binary(), nullable=False),
    ]
)
BENCHMARK_ANSWER: Final = pa.schema(
    [pa.field("time", pa.float64(), nullable=False), pa.field("data", pa.binary(), nullable=False)]
)
"""``time`` is the service's clock: seconds since 1970, UTC."""


def question(answer_bytes: int, data: bytes = b"") -> pa.RecordBatch:
    """What a client sends."""
    return pa.record_batch([[answer_bytes], [data]], schema=BENCHMARK_QUESTION)


def answer_data(source: bytes, size: int) -> pa.Array:
    """One value of ``size`` bytes of ``source``, which is not copied."""
    offsets = pa.py_buffer(struct.pack("=ii", 0, size))
    return pa.Array.from_buffers(pa.binary(), 1, [None, offsets, pa.py_buffer(source)])
