"""``python -m spark_udfs.demo``: a service scores 336,776 flights for Spark, and is checked.

Ends with status 0 if every row came back and the checksum equals that of the same computation
without Spark and without a network; 1 if it does not, or if anything failed on the way; 2 if the
demo cannot start.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
import threading
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

import aqueduct
from aqueduct.errors import AqueductError
from aqueduct.escaping import escape_lines
from spark_udfs.demo import flights as data
from spark_udfs.demo import report
from spark_udfs.demo.checksum import checksum, differences
from spark_udfs.demo.process import DemoError, ServiceProcess, check_java, spark_session
from spark_udfs.demo.scoring import DelayModel, score

__all__ = ["main"]

FILES = 8
SCHEMES = {
    "quic": "aqueduct://127.0.0.1:0",
    "tls": "aqueduct+tls://127.0.0.1:0",
    "tcp": "aqueduct+tcp://127.0.0.1:0",
    "unix": "aqueduct+unix://{directory}/flights.sock",
}
"""Where the demo's service listens. Only processes of one machine meet at a Unix socket."""


def main(arguments: list[str] | None = None) -> int:
    """Runs the demo; returns the exit status."""
    options = _parser().parse_args(arguments)
    try:
        check_java()
        with contextlib.ExitStack() as stack:
            if options.keep is None:
                directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            else:
                directory = options.keep
                directory.mkdir(parents=True)
            return _run(options, directory, stack)
    except (DemoError, FileExistsError, ModuleNotFoundError) as error:
        print(f"The demo cannot start: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m spark_udfs.demo",
        description="A service scores flights for a Spark job, and the result is checked.",
    )
    parser.add_argument(
        "--rows", type=_positive, default=data.TOTAL, help="score only the first ROWS flights"
    )
    parser.add_argument(
        "--batch-rows", type=_positive, default=10_000, help="rows in a record batch (10000)"
    )
    parser.add_argument(
        "--in-flight", type=_positive, default=8, help="batches sent and not yet answered (8)"
    )
    parser.add_argument(
        "--keep", type=Path, metavar="DIRECTORY", help="keep the Parquet files in a new directory"
    )
    parser.add_argument(
        "--scheme",
        choices=sorted(SCHEMES),
        default="quic",
        help="how Spark reaches the service that is started (quic)",
    )
    parser.add_argument(
        "--address", help="call a running spark_udfs.demo.service instead of starting one"
    )
    parser.add_argument("--kill-after", type=_positive, help=argparse.SUPPRESS)
    return parser


def _run(options: argparse.Namespace, directory: Path, stack: contextlib.ExitStack) -> int:
    import pyspark
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException

    from spark_udfs.demo import job

    print("A service scores flights for Spark; the result is checked against plain numpy.\n")
    source, target = directory / "flights", directory / "scored"
    rows = min(options.rows, data.TOTAL)
    with report.step("Data", f"{rows:,} flights from New York in 2013, as Parquet"):
        table = data.flights().slice(0, rows)
        data.write_parquet(table, source, files=FILES)
    process, address = None, options.address
    if address is None:
        with report.step("Service", "a process of its own, which fits its model and listens"):
            # A directory of its own: the path of a Unix socket must be short.
            own = stack.enter_context(tempfile.TemporaryDirectory())
            process = ServiceProcess(SCHEMES[options.scheme].format(directory=own))
            stack.callback(process.stop)
            address = process.address
        report.remark(f"process {process.pid} at {address.partition('?')[0]}")
    else:
        with report.step("Service", "a running one"):
            _check_service(address)
    with report.step("Spark", f"{pyspark.__version__}, local[2], and its Python workers"):
        session = spark_session(directory, threads=2, batch_rows=options.batch_rows)
        spark = stack.enter_context(session)
    try:
        before, reading = _counters(address), _counters(address)
        if options.kill_after and process:
            _kill_after(process, options.kill_after, reading)
        with report.step("Job", "Parquet -> mapInArrow(exchange(...)) -> Parquet") as seconds:
            job.score_flights(
                spark, str(source), str(target), address=address, in_flight=options.in_flight
            )
        after = _counters(address)
    except (PySparkException, Py4JError, AqueductError) as error:
        return _failed(error, process, directory, kept=options.keep is not None)
    # To read the counters takes a call too: what it adds to them is taken off again.
    counted = {name: after[name] - 2 * reading[name] + before[name] for name in after}
    scored = spark.read.parquet(str(target))
    sample = [row.asDict() for row in job.sample(scored, rows).collect()]
    print(f"\n{len(sample)} of them; departed, arrived and expected in minutes of delay:\n")
    print(report.flights_table(sample))
    carriers = [row.asDict() for row in job.average_delays(scored).collect()]
    print("\nAverage arrival delay by carrier, as it was and as expected, in minutes:\n")
    print(report.carriers_table(carriers, data.airline_names()))
    print()
    print(*report.figures(counted, seconds()), sep="\n")
    return _check(table, target, counted)


def _check(table: pa.Table, target: Path, counted: dict[str, int]) -> int:
    """Compares what Spark wrote with the same computation here. Returns the exit status."""
    model = DelayModel.fit(data.flights())
    wanted = pa.Table.from_batches([score(batch, model) for batch in table.to_batches()])
    got = pq.read_table(target).cast(wanted.schema)  # Spark may write times in another unit
    sums = checksum(got), checksum(wanted)
    equal = sums[0] == sums[1] and got.num_rows == wanted.num_rows
    print(report.figure("Checksum", sums[0], "" if equal else f"wanted {sums[1]}"))
    print(
        f"\n{got.num_rows:,} of {wanted.num_rows:,} rows; checksum "
        f"{'equal to' if equal else 'DIFFERENT FROM'} the computation without the network"
    )
    print(report.service_line(counted), flush=True)
    if not equal:
        for line in differences(got, wanted, key="id"):
            print(f"  {line}", file=sys.stderr)
    return 0 if equal else 1


def _failed(
    error: Exception, process: ServiceProcess | None, directory: Path, *, kept: bool
) -> int:
    """Says why the job failed, in the words of the error."""
    text = str(error) or type(error).__name__
    print(f"\nThe job failed: {escape_lines(text.strip())}", file=sys.stderr)
    ended = process.ended() if process else None
    if ended:
        print(f"\nWhat happened: {ended}", file=sys.stderr)
    if kept:
        print(f"\nSpark's own words are in {directory / 'spark.log'}", file=sys.stderr)
    return 1


def _check_service(address: str) -> None:
    """Raises DemoError if the demo's service does not answer there."""
    try:
        _counters(address)
    except AqueductError as error:
        raise DemoError(str(error)) from error


def _counters(address: str) -> dict[str, int]:
    """What the service has counted so far. Its own connection: an unused one is soon closed."""
    with aqueduct.SyncClient(address) as client:
        return _read_counters(client)


def _read_counters(client: aqueduct.SyncClient) -> dict[str, int]:
    counters: dict[str, int] = {}
    for batch in client.source("counters"):
        counters |= zip(batch["name"].to_pylist(), batch["value"].to_pylist(), strict=True)
    return counters


def _kill_after(process: ServiceProcess, batches: int, before: dict[str, int]) -> None:
    """Kills the service, for a test, once it has taken that many batches of the job."""

    def watch() -> None:
        with (
            contextlib.suppress(AqueductError),
            aqueduct.SyncClient(process.address) as client,
        ):
            while _read_counters(client)["batches_in"] - before["batches_in"] < batches:
                pass
        process.kill()

    threading.Thread(target=watch, daemon=True).start()


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not above zero")
    return value


if __name__ == "__main__":
    sys.exit(main())
