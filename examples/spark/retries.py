"""A job over two services, of which one dies in the middle: it goes on, and no row is lost.

python examples/spark/retries.py                    starts the services too, and lets one die
python examples/spark/retries.py serve [BATCHES]    one service, which dies at that many batches
python examples/spark/retries.py ADDRESS,ADDRESS    the job alone
"""

from __future__ import annotations

import itertools
import os
import sys

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import SparkSession

import aqueduct
from program import serving
from spark_udfs import exchange

IDS = pa.schema([("id", pa.int64())])
SCORES = pa.schema([("score", pa.int64())])

service = aqueduct.Service("scores", description="Scores ids.")
life = {"batches": 0}
seen = itertools.count(1)


# idempotent=True is the service's word that a batch may be handed to it again.
@service.handler("score", input=IDS, output=SCORES, concurrency=4, idempotent=True)
def score(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Scores ids, all but one."""
    if next(seen) == life["batches"]:
        os._exit(1)  # as if it was killed: nobody is told
    if pc.any(pc.equal(batch["id"], 77_777)).as_py():
        raise ValueError("77777 has no score")
    return pa.record_batch([pc.multiply(batch["id"], 2)], schema=SCORES)


def job(spark: SparkSession, addresses: str) -> int:
    """Scores 100,000 ids; returns how often a call had to be made again."""
    spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", "500")
    scored = exchange(
        addresses,
        "score",
        retries=5,
        backoff="50ms",
        batch_deadline="30s",
        on_error="null",
        columns=["id"],
        error_column="why",
    )
    rows = spark.range(0, 100_000, 1, numPartitions=2).transform(scored.apply)
    sums = rows.selectExpr(
        "count(*) as rows",
        "count(distinct id) as ids",
        "sum(score) as score",
        "count(why) as failed",
    )
    found = sums.collect()[0].asDict()
    print(scored.summary())
    # The batch with the id that has no score, and no other: 77,500 to 77,999.
    total = 2 * (sum(range(100_000)) - sum(range(77_500, 78_000)))
    assert found == {"rows": 100_000, "ids": 100_000, "score": total, "failed": 500}, found
    return scored.numbers.retries


def main(arguments: list[str]) -> None:
    """See above."""
    if arguments[:1] == ["serve"]:
        life["batches"] = int(arguments[1]) if arguments[1:] else 0
        service.run("aqueduct+tcp://127.0.0.1:0")
        return
    with SparkSession.builder.master("local[2]").getOrCreate() as spark:
        if arguments:
            print(f"ok: {job(spark, arguments[0])} retries")
            return
        with serving(__file__, "30") as (mortal, process), serving(__file__) as (other, _):
            retries = job(spark, f"{mortal},{other}")
            assert process.wait(10) == 1, "the first service is still there"
            # None, where the calls to the other were there already and took over what was lost.
            print(f"ok: one of two services died, no row is missing; {retries} calls made again")


if __name__ == "__main__":
    main(sys.argv[1:])
