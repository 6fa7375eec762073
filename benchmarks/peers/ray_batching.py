"""The model of ``benchmarks/batching.py`` as a deployment of Ray Serve, and its callers.

It runs in a Python that has ``ray[serve]`` and not this library: ``PYTHON ray_batching.py TOLD``.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
from typing import Any, Final

RUN_SECONDS: Final = 0.005
ROW_SECONDS: Final = 2e-6
ROWS: Final = 8
"""Of one call."""
WAIT_SECONDS: Final = 0.02
"""For others to join a run. Without a wait its runs are of few calls: half the rows a second."""
MOST: Final = 4096 // ROWS
"""Calls of one run."""


def percentiles(took: list[float], seconds: float) -> dict[str, float]:
    """Rows a second, and how long calls took."""
    took = sorted(took)
    return {
        "rows_s": ROWS * len(took) / seconds,
        "p50_us": 1e6 * took[len(took) // 2],
        "p99_us": 1e6 * took[len(took) * 99 // 100],
    }


def deployment(batched: bool) -> Any:
    """The model, deployed: one replica, one run at a time.

    More ongoing requests than runs: with one, callers that wait poll the replica.
    """
    from ray import serve

    @serve.deployment(num_replicas=1, max_ongoing_requests=1024)
    class Model:
        def __init__(self) -> None:
            self.lock = threading.Lock()

        def work(self, rows: int) -> None:
            with self.lock:
                time.sleep(RUN_SECONDS + ROW_SECONDS * rows)

        @serve.batch(  # type: ignore[untyped-decorator]
            max_batch_size=MOST, batch_wait_timeout_s=WAIT_SECONDS, max_concurrent_batches=1
        )
        async def together(self, calls: list[list[int]]) -> list[list[int]]:
            await asyncio.to_thread(self.work, sum(map(len, calls)))
            return calls

        async def __call__(self, rows: list[int]) -> list[int]:
            if batched:
                answer: list[int] = await self.together(rows)
                return answer
            await asyncio.to_thread(self.work, len(rows))
            return rows

    return Model.bind()  # type: ignore[attr-defined]


async def call(handle: Any, callers: int, seconds: float) -> dict[str, float]:
    """The callers."""
    took: list[float] = []

    async def caller(number: int) -> None:
        rows = list(range(number, number + ROWS))
        while time.perf_counter() < end:
            began = time.perf_counter()
            answer = await handle.remote(rows)
            if began >= start:
                took.append(time.perf_counter() - began)
            if answer != rows:
                raise AssertionError("the answer is another caller's")

    await handle.remote([1])
    start = time.perf_counter() + seconds / 10
    end = start + seconds
    await asyncio.gather(*(caller(number) for number in range(callers)))
    return percentiles(took, seconds)


def main(text: str) -> None:
    """One measurement; its result is the last line."""
    import ray
    from ray import serve

    told = json.loads(text)
    ray.init(num_cpus=4, include_dashboard=False, logging_level="error", log_to_driver=False)
    try:
        handle = serve.run(deployment(told["how"] == "ray/batched"))
        found = asyncio.run(call(handle, told["callers"], told["seconds"]))
        serve.shutdown()
    finally:
        ray.shutdown()
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
