"""A Spark of its own whose tasks are tried four times: jobs come in by lines, outcomes go out.

``python -m tests.sinks.sparkjobs`` reads a JSON object a line, the arguments of ``write`` or, with
``checkpoint``, of ``stream``, and answers with one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent


def main() -> None:
    from pyspark.sql import SparkSession

    from spark_udfs.datasource import register

    spark = (
        SparkSession.builder.master("local[2, 4]")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.sql.execution.arrow.maxRecordsPerBatch", "2")
        .getOrCreate()
    )
    register(spark)
    options = {"handler": "sink", "backoff": "50ms", "retries": "10"}

    def write(first: int, *, fail: bool = False, mode: str = "append", **more: str) -> None:
        """15 rows in three partitions; one of them cannot be made, if so asked.

        The rest, of which the address is one, are options.
        """
        text = f"if({str(fail).lower()} and id = {first + 7}, raise_error('no more'), 'x')"
        frame = spark.range(first, first + 15, 1, 3)
        if fail:
            frame = frame.where(f"{text} = 'x'")
        frame.write.format("aqueduct").options(**options, **more).mode(mode).save()

    def stream(files: str, checkpoint: str, address: str) -> None:
        """What is in the folder of Parquet files, a file in each batch."""
        frames = spark.readStream.schema("id long").option("maxFilesPerTrigger", 1).parquet(files)
        writer = frames.writeStream.format("aqueduct").options(**options, address=address)
        query = writer.option("checkpointLocation", checkpoint).trigger(availableNow=True).start()
        query.awaitTermination()

    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        arguments = json.loads(line)
        try:
            (stream if "checkpoint" in arguments else write)(**arguments)
            answer: dict[str, Any] = {"error": None}
        except Exception as error:  # noqa: BLE001  it is the answer
            answer = {"error": str(error)}
        print(json.dumps(answer), flush=True)
    spark.stop()


class Spark:
    """That process, for tests."""

    def __init__(self, log: Path) -> None:
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        with log.open("wb") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, "-u", "-m", "tests.sinks.sparkjobs"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": path},
            )
        self.log = log
        assert self._answer() == {"ready": True}

    def run(self, **arguments: Any) -> str | None:
        """One job; what it failed with, or None."""
        assert self.process.stdin is not None
        print(json.dumps(arguments), file=self.process.stdin, flush=True)
        error: str | None = self._answer()["error"]
        return error

    def close(self) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        try:
            self.process.wait(60)
        finally:
            self.process.kill()
            self.process.wait()
            self.process.stdout.close()

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        raise AssertionError(f"Spark has ended:\n{self.log.read_text()[-4000:]}")


if __name__ == "__main__":
    main()
