"""The metrics: names, values and formats, as Prometheus reads them; and the table of the guide."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_families
from prometheus_client.parser import text_string_to_metric_families as families

from aqueduct.admin.metrics import METRICS, metrics_page
from aqueduct.admin.report import BOUNDS, Report
from tests.admin.reports import handler, report

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "admin.md"
ROW = re.compile(r"^\| `(aqueduct_\w+)` \| (\w+) \| (.*?) \| (.*) \|$", re.MULTILINE)
NAME = 'a"b\\c\nd{e}'
"""A handler may be called anything."""


def full() -> Report:
    buckets = [0] * (len(BOUNDS) + 1)
    buckets[0], buckets[3], buckets[-1] = 1, 2, 3
    busy = handler(
        calls=7,
        rows_in=70,
        bytes_out=9000,
        open=2,
        waiting=1,
        resumes=4,
        errors={"busy": 1},
        seconds=12.5,
        buckets=buckets,
    )
    made = report(connections=3)
    made["handlers"][NAME] = busy
    made["workers"] = [
        {
            "number": 0,
            "pid": 1,
            "phase": "serving",
            "ready": True,
            "live": True,
            "reasons": [],
            "started": 1.0,
            "deaths": 2,
            "age": 0.1,
        }
    ]
    return made


def samples(text: str, parse) -> dict[tuple[str, frozenset], float]:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in parse(text)
        for sample in family.samples
    }


@pytest.mark.parametrize(
    ("accept", "kind", "parse"),
    [
        ("", "text/plain; version=0.0.4", families),
        ("text/html,*/*;q=0.1", "text/plain; version=0.0.4", families),
        ("application/openmetrics-text; version=1.0.0", "application/openmetrics", open_families),
    ],
)
def test_values_by_both_formats(accept, kind, parse) -> None:
    page = metrics_page(full(), accept)
    assert page.content_type.startswith(kind)
    found = samples(page.body.decode(), parse)

    def value(name: str, **labels: str) -> float:
        return found[name, frozenset(labels.items())]

    assert value("aqueduct_service_info", service="words", version="1.2.3") == 1
    assert value("aqueduct_ready") == value("aqueduct_live") == 1
    assert value("aqueduct_calls_total", handler=NAME) == 7
    assert value("aqueduct_call_errors_total", handler=NAME, status="busy") == 1
    assert value("aqueduct_call_rows_total", handler=NAME, direction="in") == 70
    assert value("aqueduct_call_rows_total", handler=NAME, direction="out") == 0
    assert value("aqueduct_call_bytes_total", handler=NAME, direction="out") == 9000
    assert value("aqueduct_call_resumes_total", handler=NAME) == 4
    assert value("aqueduct_open_calls", handler=NAME) == 2
    assert value("aqueduct_waiting_calls", handler=NAME) == 1
    seconds = "aqueduct_call_duration_seconds"
    assert value(f"{seconds}_sum", handler=NAME) == 12.5
    assert value(f"{seconds}_count", handler=NAME) == 6
    assert value(f"{seconds}_bucket", handler=NAME, le="0.001") == 1
    assert value(f"{seconds}_bucket", handler=NAME, le="0.01") == 3
    assert value(f"{seconds}_bucket", handler=NAME, le="1800.0") == 3
    assert value(f"{seconds}_bucket", handler=NAME, le="+Inf") == 6
    assert value("aqueduct_connections_total") == 3
    assert value("aqueduct_connection_resumes_total") == 6
    assert value("aqueduct_open_connections") == 1
    assert value("aqueduct_memory_bytes", account="kept") == 1
    assert value("aqueduct_memory_limit_bytes", account="sending") == 2000
    assert ("aqueduct_memory_limit_bytes", frozenset({("account", "kept")})) not in found
    assert value("aqueduct_worker_up", worker="0") == 1
    assert value("aqueduct_worker_deaths_total", worker="0") == 2


def test_every_metric_has_values_and_its_kind() -> None:
    text = metrics_page(full(), "").body.decode()
    told = dict(re.findall(r"^# TYPE (\w+) (\w+)$", text, re.MULTILINE))
    for metric in METRICS:
        assert told[metric.name] == ("gauge" if metric.kind == "info" else metric.kind)
    # Beside these there are only the times at which counters began, if at all.
    assert set(told) == {metric.name for metric in METRICS}


def test_names_follow_the_conventions() -> None:
    for metric in METRICS:
        assert re.fullmatch(r"aqueduct_[a-z_]+", metric.name)
        assert metric.name.endswith("_total") == (metric.kind == "counter")
        assert not re.search(r"_(ms|milliseconds|kb|mb|minutes)\b", metric.name)
        assert set(metric.labels) <= {
            "account",
            "direction",
            "handler",
            "service",
            "status",
            "version",
            "worker",
        }


@pytest.mark.checkout
def test_the_guide_has_them_all() -> None:
    rows = ROW.findall(GUIDE.read_text())
    expected = [
        (
            metric.name,
            metric.kind,
            ", ".join(f"`{label}`" for label in metric.labels) or "-",
            metric.what,
        )
        for metric in METRICS
    ]
    assert rows == expected
