"""What the programs of this folder share: a service in a process of its own, and a Spark."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from pyspark.sql import SparkSession

import aqueduct

__all__ = ["run", "serving"]


@contextmanager
def serving(file: str, *arguments: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """``python FILE serve ARGUMENTS`` until the block ends: its address, and the process."""
    command = [sys.executable, "-u", file, "serve", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip(), process
        finally:
            process.terminate()


def run(file: str, service: aqueduct.Service, job: Callable[[SparkSession, str], None]) -> None:
    """Does what the command line says: the service, the job with an address, or both."""
    arguments = sys.argv[1:]
    if arguments == ["serve"]:
        service.run("aqueduct+tcp://127.0.0.1:0")
        return
    with SparkSession.builder.master("local[2]").getOrCreate() as spark:
        if arguments:
            job(spark, arguments[0])
        else:
            with serving(file) as (address, _):
                job(spark, address)
