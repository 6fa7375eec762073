"""The demo's service: an example of a service of one's own.

Run it with ``python -m spark_udfs.demo.service [ADDRESS...]``, or with more to choose from::

    aqueduct serve spark_udfs.demo.service:service --listen aqueduct://127.0.0.1:0 --dev-certificate
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Final

import pyarrow as pa

import aqueduct
from spark_udfs.demo.flights import FLIGHTS, flights
from spark_udfs.demo.scoring import DelayModel, score, scored_schema

__all__ = ["service"]

MODEL: Final = DelayModel.fit(flights())  # once, as the service starts

service = aqueduct.Service("flights", description="Scores flights that left New York in 2013")


@service.handler("score", input=FLIGHTS, output=scored_schema, concurrency=2, idempotent=True)
def score_flights(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The same rows with the expected arrival delay and the great-circle distance."""
    return score(batch, MODEL)


@service.handler(
    "counters",
    kind="source",
    output=pa.schema([("name", pa.string()), ("value", pa.int64())]),
)
def counters() -> Iterator[pa.RecordBatch]:
    """What the service has counted since it started."""
    counted = service.counters()
    yield pa.record_batch({"name": list(counted), "value": list(counted.values())})


if __name__ == "__main__":
    service.run(sys.argv[1:] or ["aqueduct://127.0.0.1:0"], dev_certificate=True)
