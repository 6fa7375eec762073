"""OpenTelemetry that writes into files, one JSON object a line, for several processes."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from opentelemetry import metrics, trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import ConsoleMetricExporter, PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import ConsoleSpanExporter, SimpleSpanProcessor


def tracers(path: str) -> TracerProvider:
    """Spans of this process go to the end of the file as they end."""
    provider = TracerProvider(resource=Resource({"pid": os.getpid()}))
    out = Path(path).open("a")  # noqa: SIM115 - for the life of the process
    exporter = ConsoleSpanExporter(out=out, formatter=lambda span: span.to_json(None) + "\n")
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return provider


def meters(path: str) -> MeterProvider:
    """Metrics of this process go to the end of the file, ten times a second."""
    out = Path(path).open("a")  # noqa: SIM115
    exporter = ConsoleMetricExporter(out=out, formatter=lambda data: data.to_json(None) + "\n")
    reader = PeriodicExportingMetricReader(exporter, export_interval_millis=100)
    return MeterProvider([reader], resource=Resource({"pid": os.getpid()}))


class SetUp:
    """What a Python worker is to call."""

    def __init__(self, directory: Path) -> None:
        self.directory = str(directory)

    def __call__(self) -> None:
        trace.set_tracer_provider(tracers(f"{self.directory}/workers"))
        metrics.set_meter_provider(meters(f"{self.directory}/metrics"))

    def __repr__(self) -> str:
        return f"SetUp({self.directory!r})"


def lines(path: Path) -> list[dict[str, Any]]:
    """What is in a file by now, whole lines alone."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(True) if line.endswith("\n")]


def until(wanted: Callable[[], bool]) -> None:
    """Waits until it is so; the test fails when it does not come to that."""
    deadline = time.monotonic() + 60
    while not wanted():
        assert time.monotonic() < deadline
        time.sleep(0.02)
