"""Spark's filters as Aqueduct's."""

from __future__ import annotations

from typing import Any, Final

from pyspark.sql import datasource as spark

from aqueduct.errors import ConfigError
from aqueduct.rpc.filters import Filter

__all__ = ["filter_of"]

_OPERATIONS: Final[dict[type[spark.Filter], str]] = {
    spark.EqualTo: "equal",
    spark.EqualNullSafe: "same",
    spark.LessThan: "less",
    spark.LessThanOrEqual: "less_or_equal",
    spark.GreaterThan: "greater",
    spark.GreaterThanOrEqual: "greater_or_equal",
    spark.In: "in",
    spark.StringStartsWith: "starts_with",
    spark.StringEndsWith: "ends_with",
    spark.StringContains: "contains",
    spark.IsNull: "is_null",
    spark.IsNotNull: "is_not_null",
}


def filter_of(filter: spark.Filter) -> Filter | None:
    """The same condition; None if there is no such, so that it stays with Spark."""
    if isinstance(filter, spark.Not):
        part = filter_of(filter.child)
        return None if part is None else Filter("not", parts=(part,))
    operation = _OPERATIONS.get(type(filter))
    if operation is None:
        return None
    given: Any = filter
    value: Any = getattr(given, "value", None)
    if operation == "in":
        value = tuple(value)
    try:
        made = Filter(operation, tuple(given.attribute), value)
        made.to_json()  # a value may have no form there: a list, a struct
    except ConfigError:
        return None
    return made
