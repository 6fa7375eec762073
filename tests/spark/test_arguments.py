"""What the functions for Spark refuse, at once and on the driver, and with which words."""

from __future__ import annotations

from typing import Any

import pytest

import spark_udfs
from aqueduct.errors import ConfigError
from tests.support.selection import needs_pyspark

ADDRESS = "aqueduct+tcp://127.0.0.1:1"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("address", 5),
        ("address", "aqueduct://h:80:90"),
        ("address", []),
        ("handler", 5),
        ("handler", ""),
        ("headers", 5),
        ("headers", ["a"]),
        ("headers", {"a": 1}),
        ("connection_headers", 5),
        ("connection_headers", "text"),
        ("tls", 5),
        ("tls", {"ca": "x"}),
        ("config", {}),
        ("config", None),
        ("telemetry", 5),
        ("schema", 5),
        ("input_schema", 5),
        ("columns", 5),
        ("deadline", "5m"),
        ("batch_deadline", float("nan")),
        ("token", 5),
        ("in_flight", "x"),
        ("in_flight_bytes", "5min"),
        ("cast", "x"),
        ("ca", 5),
        ("key", 5),
        ("retries", True),
        ("compression", 5),
        ("on_error", 5),
    ],
)
def test_wrong_arguments_of_exchange_are_refused(name: str, value: Any) -> None:
    given = {"address": ADDRESS, "handler": "h", name: value}
    for function in (spark_udfs.exchange, spark_udfs.exchange_pandas):
        with pytest.raises(
            ConfigError, match=name if value != "aqueduct://h:80:90" else "a port is"
        ):
            function(**given)


@pytest.mark.parametrize(
    ("function", "given", "text"),
    [
        pytest.param(
            "exchange_column",
            {"returns": 5},
            "returns=5; it must be a type of Spark",
            marks=needs_pyspark(4, 1),
        ),
        pytest.param(
            "exchange_column",
            {"returns": "long", "columns": 5},
            "columns=5; it must be a list of n",
            marks=needs_pyspark(4, 1),
        ),
        pytest.param(
            "exchange_column",
            {"returns": "long", "columns": [1]},
            "columns=[1]; it must be a list",
            marks=needs_pyspark(4, 1),
        ),
        ("exchange_grouped", {"form": []}, "form=[]; it must be one of 'table'"),
        ("exchange_by_key", {"keys": 5}, "keys=5; it must be a list of at least one column's name"),
        ("exchange_by_key", {"keys": [1]}, "keys=[1]; it must be a list of at least one column's"),
        ("exchange_by_key", {"keys": ["k"], "group_bytes": 1.5}, "group_bytes=1.5; it must be a s"),
        ("exchange_by_key", {"keys": ["k"], "group_bytes": True}, "group_bytes=True; it must be a"),
        ("exchange_files", {"columns": 5}, "columns=5; it must be a list of at least one name"),
        ("exchange_files", {"columns": [1]}, "columns=[1]; it must be a list of at least one name"),
        ("exchange_files", {"returns": []}, "returns=[]; it must be 'receipts' or 'answers'"),
        ("exchange_files", {"write": 5}, "write=5; it must be a directory's path or URI"),
        ("exchange_files", {"on_failure": 5}, "on_failure=5; it must be 'fail' or 'report'"),
        ("exchange_files", {"batch_bytes": "5min"}, "batch_bytes='5min'; it must be a size above"),
        ("exchange_files", {"read_ahead": None}, "read_ahead=None; it must be a size above zero"),
        ("send_files", {"batch_bytes": 1.5}, "batch_bytes=1.5; it must be a size above zero"),
        ("send_files", {"deadline": "5m"}, "m is no unit of time; write 5min for minutes"),
    ],
)
def test_wrong_arguments_of_its_relatives_are_refused(
    function: str, given: dict[str, Any], text: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        getattr(spark_udfs, function)(ADDRESS, "h", **given)
    assert text in str(caught.value)


@pytest.mark.spark
@pytest.mark.parametrize(
    ("function", "arguments", "text"),
    [
        ("list_files", (5, "/tmp"), "spark=5; it must be a SparkSession"),
        ("list_files", (None, "/tmp"), "spark=None; it must be a SparkSession"),
        ("register", (5,), "spark=5; it must be a SparkSession"),
        ("register", (None,), "spark=None; it must be a SparkSession"),
    ],
)
def test_what_is_no_session_is_refused(
    function: str, arguments: tuple[Any, ...], text: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        getattr(spark_udfs, function)(*arguments)
    assert str(caught.value) == text


@pytest.mark.spark
@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"paths": 5}, "paths=5; it must be a path, or several as a list"),
        ({"paths": [5]}, "paths=[5]; it must be a path"),
        ({"split": "5min"}, "split='5min'; it must be a size above zero"),
        ({"split": 1.5}, "split=1.5; it must be a size above zero"),
        ({"tasks": "x"}, "tasks='x'; it must be a whole number above zero"),
        ({"tasks": 0}, "tasks=0; it must be a whole number above zero"),
    ],
)
def test_wrong_arguments_of_a_listing_are_refused(spark: Any, given: Any, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        spark_udfs.list_files(spark, **{"paths": "/tmp", **given})
    assert text in str(caught.value)
