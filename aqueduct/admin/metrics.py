"""The metrics of a service in the text format of Prometheus, or as OpenMetrics where it is asked.

They are written from a ``Report``, so nothing is counted here. Labels have few values: registered
handlers, statuses of the library, accounts, workers. Nothing that a client invents is a label.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

from aqueduct.admin.http_server import HttpResponse
from aqueduct.admin.report import BOUNDS, HandlerReport, Report

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric as MetricFamily

__all__ = ["METRICS", "Metric", "metrics_page"]

_Values: TypeAlias = Iterable[tuple[tuple[str, ...], Any]]
"""The values of labels, and a number; of a histogram, a HandlerReport."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric."""

    name: str
    """As Prometheus shows it; of a histogram without ``_bucket``, ``_sum`` and ``_count``."""
    kind: Literal["counter", "gauge", "histogram", "info"]
    labels: tuple[str, ...]
    what: str
    """What it is, for people."""
    values: Callable[[Report], _Values]


def _one(value: Callable[[Report], float]) -> Callable[[Report], _Values]:
    return lambda report: [((), value(report))]


def _each(value: Callable[[HandlerReport], Any]) -> Callable[[Report], _Values]:
    """A value of each handler."""
    return lambda report: [((name,), value(each)) for name, each in report["handlers"].items()]


def _both(what: Literal["batches", "rows", "bytes"]) -> Callable[[Report], _Values]:
    """What each handler has received and sent."""

    def values(report: Report) -> _Values:
        for name, each in report["handlers"].items():
            counted: Mapping[str, Any] = each
            yield (name, "in"), counted[f"{what}_in"]
            yield (name, "out"), counted[f"{what}_out"]

    return values


def _errors(report: Report) -> _Values:
    for name, each in report["handlers"].items():
        for status, count in each["errors"].items():
            yield (name, status), count


def _limits(report: Report) -> _Values:
    for name, account in report["memory"].items():
        if account["limit"] is not None:
            yield (name,), account["limit"]


_HANDLER: Final = ("handler",)

METRICS: Final = (
    Metric(
        "aqueduct_service_info",
        "info",
        ("service", "version"),
        "1; the labels name the service, and the version of the library",
        lambda report: [((report["service"]["name"], report["service"]["version"]), 1)],
    ),
    Metric(
        "aqueduct_start_time_seconds",
        "gauge",
        (),
        "When the service began, seconds since 1970",
        _one(lambda report: report["service"]["started"]),
    ),
    Metric(
        "aqueduct_ready",
        "gauge",
        (),
        "1 if /health/ready answers 200, else 0",
        _one(lambda report: report["service"]["ready"]),
    ),
    Metric(
        "aqueduct_live",
        "gauge",
        (),
        "1 if /health/live answers 200, else 0",
        _one(lambda report: report["service"]["live"]),
    ),
    Metric(
        "aqueduct_event_loop_lag_seconds",
        "gauge",
        (),
        "By how much the event loop was late when it was last asked to turn; with workers the most",
        _one(lambda report: report["service"]["loop_lag"]),
    ),
    Metric(
        "aqueduct_calls_total",
        "counter",
        _HANDLER,
        "Calls that came, refused ones included",
        _each(lambda each: each["calls"]),
    ),
    Metric(
        "aqueduct_call_errors_total",
        "counter",
        ("handler", "status"),
        "Calls that ended with this status, which is not ok",
        _errors,
    ),
    Metric(
        "aqueduct_call_duration_seconds",
        "histogram",
        _HANDLER,
        "Calls that were accepted, from their message to their status",
        _each(lambda each: each),
    ),
    Metric(
        "aqueduct_call_batches_total",
        "counter",
        ("handler", "direction"),
        "Batches that calls have moved, in or out",
        _both("batches"),
    ),
    Metric(
        "aqueduct_call_rows_total",
        "counter",
        ("handler", "direction"),
        "Rows of those batches",
        _both("rows"),
    ),
    Metric(
        "aqueduct_call_bytes_total",
        "counter",
        ("handler", "direction"),
        "Bytes of those batches, as they travel",
        _both("bytes"),
    ),
    Metric(
        "aqueduct_call_resumes_total",
        "counter",
        _HANDLER,
        "Cuts of their connection after which open calls went on",
        _each(lambda each: each["resumes"]),
    ),
    Metric(
        "aqueduct_open_calls",
        "gauge",
        _HANDLER,
        "Calls that are open, waiting ones included",
        _each(lambda each: each["open"]),
    ),
    Metric(
        "aqueduct_waiting_calls",
        "gauge",
        _HANDLER,
        "Calls in the queue of their handler: they wait for their turn",
        _each(lambda each: each["waiting"]),
    ),
    Metric(
        "aqueduct_open_calls_limit",
        "gauge",
        (),
        "Calls.max_calls_process; with workers the sum",
        _one(lambda report: report["calls"]["limit"]),
    ),
    Metric(
        "aqueduct_connections_total",
        "counter",
        (),
        "Connections that were accepted",
        _one(lambda report: report["connections"]["total"]),
    ),
    Metric(
        "aqueduct_connection_resumes_total",
        "counter",
        (),
        "Cuts after which a connection went on",
        _one(lambda report: report["connections"]["resumes"]),
    ),
    Metric(
        "aqueduct_open_connections",
        "gauge",
        (),
        "Connections that are open",
        _one(lambda report: report["connections"]["open"]),
    ),
    Metric(
        "aqueduct_open_connections_limit",
        "gauge",
        (),
        "Limits.connections; with workers the sum",
        _one(lambda report: report["connections"]["limit"]),
    ),
    Metric(
        "aqueduct_memory_bytes",
        "gauge",
        ("account",),
        "Bytes of batches: received and in use, kept by handlers beyond need, and to be sent",
        lambda report: [((name,), each["bytes"]) for name, each in report["memory"].items()],
    ),
    Metric(
        "aqueduct_memory_limit_bytes",
        "gauge",
        ("account",),
        "Flow.process_receive_budget and Flow.process_send_budget; with workers the sum",
        _limits,
    ),
    Metric(
        "aqueduct_worker_up",
        "gauge",
        ("worker",),
        "1 if the worker listens, else 0; without --workers there is none",
        lambda report: [
            ((str(each["number"]),), each["phase"] == "serving") for each in report["workers"]
        ],
    ),
    Metric(
        "aqueduct_worker_deaths_total",
        "counter",
        ("worker",),
        "Processes of the worker that died",
        lambda report: [((str(each["number"]),), each["deaths"]) for each in report["workers"]],
    ),
)
"""All metrics, in the order in which they are shown."""


def metrics_page(report: Report, accept: str) -> HttpResponse:
    """The metrics in the format that ``accept``, a header of the request, asks for."""
    from prometheus_client.exposition import choose_encoder

    encode, content_type = choose_encoder(accept)
    return HttpResponse(encode(_Collected(report)), content_type)


class _Collected:
    """A report, as ``prometheus_client`` reads it."""

    def __init__(self, report: Report) -> None:
        self._report = report

    def collect(self) -> Iterator[MetricFamily]:
        """Each metric that has values, with them."""
        from prometheus_client.metrics_core import (
            CounterMetricFamily,
            GaugeMetricFamily,
            HistogramMetricFamily,
            InfoMetricFamily,
        )

        for metric in METRICS:
            family: Any
            name, what, names = metric.name, metric.what, metric.labels
            if metric.kind == "histogram":
                family = HistogramMetricFamily(name, what, labels=names)
            elif metric.kind == "counter":
                family = CounterMetricFamily(name, what, labels=names)
            elif metric.kind == "gauge":
                family = GaugeMetricFamily(name, what, labels=names)
            else:
                family = InfoMetricFamily(name.removesuffix("_info"), what)
            for labels, value in metric.values(self._report):
                if metric.kind == "histogram":
                    sums = accumulate(value["buckets"])
                    buckets = list(zip((*map(str, BOUNDS), "+Inf"), sums, strict=True))
                    family.add_metric(labels, buckets, sum_value=value["seconds"])
                elif metric.kind == "info":
                    family.add_metric((), dict(zip(names, labels, strict=True)))
                else:
                    family.add_metric(labels, float(value))
            if family.samples:
                yield family
