"""A service that holds a model: it is loaded once in each process, and all calls share it.

Serve it by ``python examples/model_service.py``, or in several processes:

    aqueduct serve model_service:service --listen aqueduct+tcp://127.0.0.1:4433 --workers 4

Each worker loads the model before it takes calls. The model here is a line, from a file of JSON
that the variable MODEL names; in its place may stand any other.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

import aqueduct

__all__ = ["Model", "service"]

POINTS = pa.schema([("x", pa.float64())])
SCORES = pa.schema([("score", pa.float64())])


@dataclass(frozen=True)
class Model:
    """A line."""

    slope: float
    offset: float

    def score(self, x: pa.Array) -> pa.Array:
        """One score for each value."""
        return pc.add(pc.multiply(x, self.slope), self.offset)


service = aqueduct.Service("model", description="Scores points by a model.")


@service.on_start
def load() -> None:
    """May take minutes: it runs in a thread, and clients are let in when it is done."""
    file = os.environ.get("MODEL")
    text = Path(file).read_text() if file else '{"slope": 2.0, "offset": 1.0}'
    service.state.model = Model(**json.loads(text))


@service.on_stop
def free() -> None:
    """Gives back what the model holds, after the last call."""
    del service.state.model


@service.handler(input=POINTS, output=SCORES, concurrency=2, idempotent=True)
def score(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Scores points."""
    return pa.record_batch([service.state.model.score(batch["x"])], schema=SCORES)


if __name__ == "__main__":
    service.run("aqueduct+tcp://127.0.0.1:4433")
