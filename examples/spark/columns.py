"""Wide rows, of which a service needs one column: the others stay where they are.

python examples/spark/columns.py              starts the service too
python examples/spark/columns.py serve        the service alone; prints its address
python examples/spark/columns.py ADDRESS      the job alone
"""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import SparkSession

import aqueduct
from program import run
from spark_udfs import exchange

TEXTS = pa.schema([("text", pa.string())])
FOUND = pa.schema([("words", pa.int32()), ("shout", pa.bool_())])

service = aqueduct.Service("texts", description="Looks at texts.")


@service.handler("look", input=TEXTS, output=FOUND, concurrency=4)
def look(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Counts the words of each text, and hears whether it shouts."""
    if pc.any(pc.equal(batch["text"], "")).as_py():
        raise ValueError("an empty text")
    words = pc.list_value_length(pc.utf8_split_whitespace(batch["text"]))
    return pa.record_batch([words, pc.ends_with(batch["text"], "!")], schema=FOUND)


def job(spark: SparkSession, address: str) -> None:
    """Counts words in texts that come with a kilobyte each that nobody looks at."""
    rows = spark.range(0, 10_000, 1, numPartitions=4).selectExpr(
        "id", "repeat('x', 1000) as picture", "if(id % 2 = 0, 'one two', 'three!') as text"
    )
    found = rows.transform(exchange(address, "look", columns=["text"]).apply)
    assert found.columns == ["id", "picture", "text", "words", "shout"], found.columns
    wanted = {"rows": 10_000, "words": 15_000, "shouts": 5_000, "bytes": 10_000_000}
    sums = found.selectExpr(
        "count(*) as rows",
        "sum(words) as words",
        "count_if(shout) as shouts",
        "sum(length(picture)) as bytes",
    )
    assert [row.asDict() for row in sums.collect()] == [wanted], sums.collect()

    # A batch that the handler fails on: its rows stay, without an answer and with the reason.
    some = rows.withColumn("text", rows.text.substr(1, 100)).coalesce(1).limit(10)
    holes = some.selectExpr("id", "if(id = 3, '', text) as text")
    tolerant = exchange(address, "look", columns="text", on_error="null", error_column="why")
    answers = holes.transform(tolerant.apply).collect()
    assert all(row.words is None and "an empty text" in row.why for row in answers), answers
    print(f"ok: {wanted['words']:,} words in {wanted['rows']:,} texts")


if __name__ == "__main__":
    run(__file__, service, job)
