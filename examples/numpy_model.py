"""A service that holds a model which knows numpy alone, and a client that scores images by it.

python examples/numpy_model.py
"""

from __future__ import annotations

import asyncio
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa

import aqueduct

Array: TypeAlias = "np.ndarray[Any, Any]"

IMAGES = pa.schema([("id", pa.int64()), ("image", pa.fixed_shape_tensor(pa.float32(), [8, 8]))])
SCORES = pa.schema(
    [("id", pa.int64()), ("best", pa.int32()), ("scores", pa.list_(pa.float32(), 10))]
)
service = aqueduct.Service("digits")


class Model:
    """Stands for a real one: a layer of weights, made once for each process."""

    def __init__(self) -> None:
        self.weights = np.random.default_rng(7).normal(size=(64, 10)).astype("f4")

    def scores(self, images: Array) -> Array:
        """Ten scores for each image."""
        return np.asarray(images.reshape(len(images), 64) @ self.weights)


@service.on_start
def load() -> None:
    """The model is read before the first call."""
    service.state.model = Model()


@service.handler("classify", input=IMAGES, output=SCORES, numpy=True)
def classify(arrays: dict[str, Array]) -> dict[str, Array]:
    """What is on each image, with all scores."""
    scores = service.state.model.scores(arrays["image"])  # of the shape (rows, 8, 8)
    return {"id": arrays["id"], "best": scores.argmax(axis=1), "scores": scores}


async def main() -> None:
    """Serves, and scores three images."""
    images = np.random.default_rng(1).random((3, 8, 8), dtype="f4")
    column = pa.FixedShapeTensorArray.from_numpy_ndarray(images)
    batch = pa.RecordBatch.from_arrays([pa.array([1, 2, 3]), column], schema=IMAGES)
    async with service.serving("aqueduct+tcp://127.0.0.1:0") as serving:
        async with await aqueduct.Client.connect(serving.addresses[0]) as client:
            answer = await client.call("classify", batch)
    for row in answer.to_pylist():
        print(f"image {row['id']}: class {row['best']}, score {max(row['scores']):.2f}")


if __name__ == "__main__":
    asyncio.run(main())
