"""What a job counted, three ways: a summary, the workers' log as a table, and one trace.

python examples/spark/counted.py              starts the service too
python examples/spark/counted.py serve FILE   the service alone; its spans go to the file
"""

from __future__ import annotations

import json
import sys
import tempfile
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import ConsoleSpanExporter, SimpleSpanProcessor
from pyspark.sql import SparkSession

import aqueduct
from aqueduct.service.telemetry import OpenTelemetry
from program import serving
from spark_udfs import exchange

NUMBERS = pa.schema([("id", pa.int64())])


def spans_to(file: str) -> None:
    """Sets this process up: its spans go to a file. Yours would send them to a collector."""
    out = Path(file).open("a")  # noqa: SIM115 - for the life of the process
    exporter = ConsoleSpanExporter(out=out, formatter=lambda span: span.to_json(None) + "\n")
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)


def serve(file: str) -> None:
    """A service whose calls are spans."""
    spans_to(file)
    service = aqueduct.Service("numbers", telemetry=OpenTelemetry())

    @service.handler("double", input=NUMBERS, output=NUMBERS)
    def double(batch: pa.RecordBatch) -> pa.RecordBatch:
        return pa.record_batch([pc.multiply(batch["id"], 2)], schema=NUMBERS)

    service.run("aqueduct+tcp://127.0.0.1:0")


def job(spark: SparkSession, address: str, directory: Path) -> None:
    """Doubles numbers, and looks at what was counted."""
    spark.conf.set("spark.sql.pyspark.worker.logging.enabled", "true")
    spans_to(str(directory / "driver"))
    with trace.get_tracer("job").start_as_current_span("nightly doubling"):
        set_up = partial(spans_to, str(directory / "workers"))
        score = exchange(address, "double", schema="id long", telemetry=set_up)
        rows = spark.range(0, 10_000, 1, numPartitions=4).transform(score.apply)
        assert sum(row.id for row in rows.collect()) == 2 * sum(range(10_000))

    print(score.summary())
    assert (score.numbers.tasks, score.numbers.rows_received) == (4, 10_000)

    log = spark.tvf.python_worker_logs().where("logger = 'spark_udfs'")
    log.select("level", "msg").show(truncate=False)
    rows_logged = log.selectExpr("sum(cast(context['rows_received'] as long)) as rows").first()
    assert rows_logged is not None and rows_logged["rows"] == 10_000

    spans = [
        json.loads(line)
        for file in ("driver", "workers", "service")
        for line in (directory / file).read_text().splitlines()
    ]
    (whole,) = [span for span in spans if span["name"] == "nightly doubling"]
    tasks = [span for span in spans if span["parent_id"] == whole["context"]["span_id"]]
    inside = {span["context"]["span_id"] for span in tasks}
    calls = [span for span in spans if span["parent_id"] in inside]
    assert (len(tasks), len(calls)) == (4, 4), spans
    assert {span["context"]["trace_id"] for span in spans} == {whole["context"]["trace_id"]}
    print(f"ok: one trace of {len(spans)} spans, from the driver over the tasks to the handler")


def main(arguments: list[str]) -> None:
    """See above."""
    if arguments[:1] == ["serve"]:
        serve(arguments[1])
        return
    with tempfile.TemporaryDirectory() as directory:
        with SparkSession.builder.master("local[2]").getOrCreate() as spark:
            with serving(__file__, f"{directory}/service") as (address, _):
                job(spark, address, Path(directory))


if __name__ == "__main__":
    main(sys.argv[1:])
