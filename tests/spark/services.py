"""The handlers that the tests of this folder call; as a program, a service of its own.

``python services.py [batches [port]]`` prints its address; the handler ``stall`` answers that
many batches, prints ``taken`` when the next one came, and answers no more.
"""

from __future__ import annotations

import sys
import threading
import time

import pyarrow as pa
import pyarrow.compute as pc

import aqueduct
from aqueduct.config import Config, Timing

NUMBERS = pa.schema([("id", pa.int64())])
WORDS = pa.schema([("id", pa.int64()), ("word", pa.string())])


def make(stall_after: int = 1, **options) -> aqueduct.Service:
    """A fresh service with all handlers, so that its counters begin at zero."""
    # Spark kills workers, and a service would wait at its end for those that are silent.
    config = Config(timing=Timing(close_linger=0.2, drain_timeout=5))
    service = aqueduct.Service("test", config=config, **options)

    @service.handler("echo")
    def echo(batch):
        return batch

    @service.handler("double", input=NUMBERS, output=NUMBERS, concurrency=4)
    def double(batch):
        # The first batches take longest: only put in order do the answers come in order.
        time.sleep(0.02 / (1 + batch["id"][0].as_py() % 5) if batch.num_rows else 0)
        return pa.record_batch({"id": pc.multiply(batch["id"], 2)}, schema=NUMBERS)

    @service.handler("hundredfold", input=NUMBERS, output=NUMBERS)
    def hundredfold(batches, call):
        for batch in batches:
            for _ in range(100):
                yield batch

    @service.handler("total", input=NUMBERS, output=NUMBERS)
    def total(batches, call):
        total = sum(pc.sum(batch["id"]).as_py() or 0 for batch in batches)
        yield pa.record_batch({"id": [total]}, schema=NUMBERS)

    @service.handler("sort", input=NUMBERS, output=NUMBERS)
    def sort(batches, call):
        table = pa.Table.from_batches(batches, schema=NUMBERS)
        yield from table.sort_by([("id", "descending")]).to_batches(max_chunksize=10_000)

    @service.handler("fail", input=NUMBERS, output=NUMBERS)
    def fail(batch):
        if pc.any(pc.equal(batch["id"], 42)).as_py():
            raise ValueError("42 is not to my taste")
        return batch

    @service.handler("words", input=WORDS, output=WORDS)
    def words(batch):
        return batch

    certain_numbers = pa.schema([pa.field("id", pa.int64(), nullable=False)])

    @service.handler("certain", input=certain_numbers, output=NUMBERS)
    def certain(batch):
        return batch

    @service.handler(
        "about", output=pa.schema([("write_key", pa.string()), ("attempt", pa.string())])
    )
    def about(batches, call):
        for _ in batches:
            pass
        yield pa.record_batch({"write_key": [call.write_key], "attempt": [call.attempt]})

    @service.handler("stall", input=NUMBERS, output=NUMBERS)
    def stall(batches, call):
        for number, batch in enumerate(batches):
            if number == stall_after:
                print("taken", flush=True)
                ended = threading.Event()
                call.on_cancel(ended.set)
                ended.wait(60)
                return
            yield batch

    return service


if __name__ == "__main__":
    given = [int(argument) for argument in sys.argv[1:]]
    batches, port = given + [1, 0][len(given) :]
    make(batches).run(f"aqueduct://127.0.0.1:{port}", dev_certificate=True)
