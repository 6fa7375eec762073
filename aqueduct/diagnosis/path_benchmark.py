"""The measurements of ``aqueduct bench``: small calls, and both directions at full speed."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import pyarrow as pa

from aqueduct.client.client import Client
from aqueduct.endpoint import Connection
from aqueduct.errors import DeadlineExceeded
from aqueduct.rpc.benchmark import BENCHMARK, BENCHMARK_QUESTION, question

__all__ = ["Direction", "PathBenchmark"]

_PINGS: Final = 10
_IN_FLIGHT: Final = 8
"""Batches that are asked for and have not come: so few that the end does not take long."""
_GRACE: Final = 10.0
"""Seconds that a call may take beyond its share: the batches under way at its end still come."""
_PROBE: Final = 64 << 10
"""Bytes of the first batch each way, and of all where that one is slow."""
_SLOW: Final = 1.0
"""Seconds for the first batch from which on a way is slow."""
_TRIPS: Final = 5
"""Round trips that the first batch may take: the transport begins slowly."""


@dataclass(slots=True)
class Direction:
    """What passed one way."""

    bytes: int = 0
    """Of batches that arrived, without headers."""
    seconds: float = 0.0
    """From the call to the last of them."""
    batch: int = 0
    """Bytes of a batch: fewer than was asked for on a slow way."""
    cut: bool = False
    """Whether batches were still under way when the time was over."""

    @property
    def rate(self) -> float:
        """Bytes a second."""
        return self.bytes / self.seconds if self.seconds else 0.0


@dataclass(slots=True)
class PathBenchmark:
    """What was measured so far. ``run`` fills it, and may be cancelled at any time."""

    peer: str = ""
    carrier: str = ""
    pings: list[float] = field(default_factory=list)
    """Round trips of an idle connection, seconds."""
    calls: list[float] = field(default_factory=list)
    """Times of small calls, one after the other, seconds."""
    to_service: Direction = field(default_factory=Direction)
    from_service: Direction = field(default_factory=Direction)
    loaded_round_trip: float = 0.0
    """The transport's own, smoothed, after all that; 0.0: it has none."""
    packets_lost: int | None = None
    """Of those that this side sent; None: the carrier does not know."""
    complete: bool = False

    async def run(self, client: Client, *, seconds: float, size: int, most: int) -> None:
        """Measures for about ``seconds``, a third for each part.

        ``size``: bytes of a batch. ``most``: bytes each way, after which that direction ends.
        Raises what calls raise: UnknownHandler where the service has no such handler.
        """
        connection = client.connection
        self.peer = connection.peer
        self.carrier = connection.snapshot().carrier
        part = seconds / 3
        for _ in range(_PINGS):
            self.pings.append(await connection.ping())
        try:
            await self._call(client, part)
            await self._send(client, part, size, most)
            await self._receive(client, part, size, most)
            self.complete = True
        finally:
            self._look(connection)

    async def _call(self, client: Client, seconds: float) -> None:
        small = question(0)
        until = time.perf_counter() + seconds
        while (began := time.perf_counter()) < until:
            await client.call(BENCHMARK, small, deadline=seconds + _GRACE)
            self.calls.append(time.perf_counter() - began)

    async def _send(self, client: Client, seconds: float, size: int, most: int) -> None:
        data = os.urandom(size)
        await self._exchange(
            client, self.to_service, lambda size: question(0, data[:size]), seconds, size, most
        )

    async def _receive(self, client: Client, seconds: float, size: int, most: int) -> None:
        await self._exchange(client, self.from_service, question, seconds, size, most)

    async def _exchange(
        self,
        client: Client,
        way: Direction,
        asked: Callable[[int], pa.RecordBatch],
        seconds: float,
        size: int,
        most: int,
    ) -> None:
        """Measures one way. A call that is not over in time has measured what came till then."""
        began = time.perf_counter()
        try:
            way.batch = await self._fitting(client, asked, seconds, size)
            began = time.perf_counter()
            batch = asked(way.batch)

            def batches() -> Iterator[pa.RecordBatch]:
                sent = 0
                while not sent or (
                    time.perf_counter() - began < seconds and sent + way.batch <= most
                ):
                    sent += way.batch
                    yield batch

            async with client.exchange(
                BENCHMARK,
                batches(),
                schema=BENCHMARK_QUESTION,
                in_flight=_IN_FLIGHT,
                deadline=seconds + _GRACE,
            ) as answers:
                async for _ in answers:
                    way.bytes += way.batch
                    way.seconds = time.perf_counter() - began
        except DeadlineExceeded:
            way.cut = True

    async def _fitting(
        self, client: Client, asked: Callable[[int], pa.RecordBatch], seconds: float, size: int
    ) -> int:
        """``size``, or less on a way that is so slow that few batches would come."""
        first = min(size, _PROBE)
        began = time.perf_counter()
        await client.call(BENCHMARK, asked(first), deadline=seconds + _GRACE)
        took = time.perf_counter() - began
        return first if took > max(_SLOW, _TRIPS * min(self.pings)) else size

    def _look(self, connection: Connection) -> None:
        found = connection.snapshot()
        known = "packets_lost" in found.transport
        self.packets_lost = found.packets_lost if known else None
        kernel = found.transport.get("kernel_rtt")
        self.loaded_round_trip = kernel if isinstance(kernel, float) else found.rtt

    def to_dict(self) -> dict[str, Any]:
        """Plain values: seconds and bytes."""
        return {
            "peer": self.peer,
            "carrier": self.carrier,
            "complete": self.complete,
            "round_trip": _spread(self.pings),
            "loaded_round_trip": self.loaded_round_trip,
            "packets_lost": self.packets_lost,
            "call": _spread(self.calls),
            "to_service": _of(self.to_service),
            "from_service": _of(self.from_service),
        }


def _of(way: Direction) -> dict[str, Any]:
    return {
        "bytes": way.bytes,
        "seconds": way.seconds,
        "bytes_per_second": way.rate,
        "batch": way.batch,
        "cut": way.cut,
    }


def _spread(times: list[float]) -> dict[str, float]:
    """Count, median, the 99th of 100, and the ends; of none, the count alone."""
    if not times:
        return {"count": 0}
    ordered = sorted(times)
    return {
        "count": len(ordered),
        "least": ordered[0],
        "p50": statistics.median(ordered),
        "p99": ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))],
        "most": ordered[-1],
    }
