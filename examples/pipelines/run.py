"""A declarative pipeline that writes into a service, each row exactly once, however often it runs.

python examples/pipelines/run.py                 starts the service too; needs pyspark[pipelines]
python examples/pipelines/run.py serve FOLDER    the service alone, with a socket in the folder
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyspark

sys.path.insert(0, str(Path(__file__).parents[2]))

import aqueduct
from examples.sinks.parquet import ParquetSink, read

CELSIUS = pa.schema([("celsius", pa.float64())])
CONVERTED = pa.schema([("fahrenheit", pa.float64())])
FAHRENHEIT = pa.schema([("id", pa.int64()), ("fahrenheit", pa.float64())])
SPEC = """
name: readings
libraries:
  - glob:
      include: flows.py
storage: file://{folder}/storage
configuration:
  spark.sql.shuffle.partitions: "2"
  spark.readings.address: aqueduct+unix://{folder}/socket
  spark.readings.folder: {folder}/readings
"""


def serve(folder: str) -> None:
    """The service, until it is told to end."""
    service = aqueduct.Service("weather", description="Converts readings, and keeps them.")
    service.sink("kept", ParquetSink(folder), schema=FAHRENHEIT)

    @service.handler("convert", input=CELSIUS, output=CONVERTED, concurrency=4)
    def convert(batch: pa.RecordBatch) -> pa.RecordBatch:
        """Degrees of one kind to those of the other."""
        made = pc.add(pc.multiply(batch["celsius"], 1.8), 32.0)
        return pa.record_batch([made], schema=CONVERTED)

    service.run(f"aqueduct+unix://{folder}/socket")


def put(folder: Path, start: int) -> None:
    """A hundred readings more, as a file."""
    rows = [{"id": number, "celsius": number / 10} for number in range(start, start + 100)]
    folder.mkdir(exist_ok=True)
    fresh = folder.parent / "fresh"
    fresh.write_text("\n".join(map(json.dumps, rows)))
    fresh.rename(folder / f"{start}.json")


def run_pipeline(spec: Path) -> None:
    """What ``spark-pipelines run`` does, with the tools that PySpark has installed."""
    tools = Path(pyspark.__file__).parent
    environment = {
        **os.environ,
        "SPARK_HOME": str(tools),
        "PYSPARK_PYTHON": sys.executable,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    command = [str(tools / "bin" / "spark-pipelines"), "run", "--spec", str(spec)]
    done = subprocess.run(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=900,
        check=False,
    )
    print(done.stdout)
    # After a completed run 4.2.1 and 4.3.0 fail on news that Python functions in flows have.
    if "Run is COMPLETED" not in done.stdout:
        done.check_returncode()
        raise RuntimeError("the pipeline has not completed")


def main(arguments: list[str]) -> None:
    """See above."""
    if arguments[:1] == ["serve"]:
        serve(arguments[1])
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = [sys.executable, "-u", __file__, "serve", name]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None and process.stdout.readline()
            try:
                shutil.copy(Path(__file__).parent / "flows.py", folder)
                spec = folder / "spark-pipeline.yml"
                spec.write_text(SPEC.format(folder=name))
                for start in (0, 100):
                    put(folder / "readings", start)
                    run_pipeline(spec)
            finally:
                process.terminate()
        rows = read(name)
        assert rows is not None
        found = sorted(zip(rows["id"].to_pylist(), rows["fahrenheit"].to_pylist(), strict=True))
        assert [number for number, _ in found] == list(range(200)), found
        assert all(abs(degrees - (32 + number * 0.18)) < 1e-9 for number, degrees in found)
    print("ok: two runs of the pipeline wrote 200 rows, each once")


if __name__ == "__main__":
    main(sys.argv[1:])
