"""A model that takes one batch at a time, and many callers with a few rows each.

    python examples/batched_model.py [CALLERS]

The model costs as much for one row as for a thousand. So the service puts the rows of different
callers together (``batch=``). One caller sends a row that the model does not take: it alone fails,
as the service tries each one alone then (``retry_alone``).
"""

from __future__ import annotations

import asyncio
import sys
import time

import pyarrow as pa
import pyarrow.compute as pc

import aqueduct

ROWS = pa.schema([("length", pa.float64()), ("width", pa.float64())])
SCORES = pa.schema([("score", pa.float64())])
EACH = 8
service = aqueduct.Service("model")
runs: list[int] = []


class Model:
    """Stands for a device: a run takes 5 ms and a little for each row."""

    def predict(self, batch: pa.RecordBatch) -> pa.Array:
        """One score for each row. Raises ValueError for a row without a length."""
        if batch["length"].null_count:
            raise ValueError("a row has no length")
        time.sleep(0.005 + 2e-6 * batch.num_rows)
        return pc.add(pc.multiply(batch["length"], 0.75), batch["width"])


model = Model()


@service.handler(
    input=ROWS,
    output=SCORES,
    batch=aqueduct.Batching(rows=4096, bytes="8m", retry_alone=True),  # type: ignore[arg-type]
)
def score(batch: pa.RecordBatch, calls: tuple[aqueduct.CallRows, ...]) -> pa.RecordBatch:
    """Scores the rows of one call, or of many: one run at a time, as the model wants it."""
    runs.append(len(calls))
    return pa.record_batch({"score": model.predict(batch)}, schema=SCORES)


async def ask(client: aqueduct.Client, number: int) -> bool:
    """One caller. The first one sends a row that the model does not take."""
    lengths = [float(number + row) if number else None for row in range(EACH)]
    batch = pa.record_batch({"length": lengths, "width": [1.0] * EACH}, schema=ROWS)
    try:
        answer = await client.call("score", batch, deadline="30s")
    except aqueduct.errors.HandlerFailed as error:
        print(f"caller {number}: {error.detail}")
        return False
    wanted = [0.75 * (number + row) + 1.0 for row in range(EACH)]
    return bool(wanted == answer["score"].to_pylist())


async def main(callers: int) -> None:
    """Serves, and has all callers ask at once."""
    async with service.serving("aqueduct+tcp://127.0.0.1:0") as serving:
        async with await aqueduct.Client.connect(serving.addresses[0]) as client:
            answered = await asyncio.gather(*(ask(client, number) for number in range(callers)))
    print(f"{callers} callers of {EACH} rows, {sum(answered)} answered")
    print(f"the largest run had the rows of {max(runs)} callers")


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]) if len(sys.argv) > 1 else 64))
