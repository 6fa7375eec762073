"""Spark calls Arrow services: functions for ``mapInArrow`` and ``mapInPandas``."""

from __future__ import annotations

from spark_udfs.exchange import exchange
from spark_udfs.frames import exchange_pandas

__all__ = ["exchange", "exchange_pandas"]
