"""Where the calls of a task get their connections from: the pool of the process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import pyarrow as pa

from aqueduct.client.endpoints import ExchangeCall, OpenCall
from aqueduct.client.reactive_exchange import ReactiveExchange
from aqueduct.client.thread_call import Failed, News
from spark_udfs.calls.pool import Peer, PoolLease, process_pool
from spark_udfs.calls.spec import CallSpec
from spark_udfs.worker.task import TaskContext

__all__ = ["TaskConnector"]

_TROUBLE: Final = 5.0
"""Seconds for which tasks of this process begin elsewhere after an address did not answer."""
_troubled: dict[Peer, float] = {}


class TaskConnector:
    """The addresses of one task, for its Balancer."""

    def __init__(self, calling: CallSpec, *, schema: pa.Schema, place: TaskContext) -> None:
        """``schema``: of what is sent."""
        self._calling = calling
        self._schema = schema
        self._place = place
        peers = calling.peers
        first = (place.partition or 0) % len(peers)
        self._peers = peers[first:] + peers[:first]  # partitions begin at different ones

    @property
    def ends_badly(self) -> bool:
        """Whether connections close when the work does not end well.

        A Python worker ends with a task that failed or was left early: let the services hear.
        """
        return self._place.task is not None

    @property
    def over(self) -> bool:
        """Never: the pool connects for as long as there is a task."""
        return False

    def targets(self) -> Sequence[Peer]:
        """The addresses to call, in this order."""
        return self._peers

    def in_trouble(self, target: Peer, now: float) -> bool:
        """Whether other tasks had trouble with it a short time ago."""
        return _troubled.get(target, 0.0) > now

    def note(self, target: Peer, *, trouble: bool) -> None:
        """Whether it answers, for tasks that come later."""
        if trouble:
            _troubled[target] = time.monotonic() + _TROUBLE
        else:
            _troubled.pop(target, None)

    def connect(
        self,
        target: Peer,
        *,
        wanted: Callable[[], bool],
        done: Callable[[PoolLease | Failed], object],
        at_once: bool,
    ) -> None:
        """Takes a lease, in a thread unless ``at_once``."""

        def run() -> None:
            if not wanted():
                return  # to lease for a task that is over would end what the next one has
            found: PoolLease | Failed
            try:
                found = process_pool().lease(target, task=self._place.task)
            except BaseException as error:  # noqa: BLE001  it belongs to the thread of the task
                found = Failed(error)
            done(found)

        if at_once:
            run()
        else:
            threading.Thread(target=run, name="aqueduct-connect", daemon=True).start()

    def open_call(
        self,
        lease: PoolLease,
        news: News,
        tag: OpenCall,
        *,
        deadline: float | None,
        repeated: int,
    ) -> ExchangeCall:
        """A call on the connection of ``lease``. Raises ConnectionLost and ConfigError."""
        calling = self._calling
        head: dict[str, Any] = {**calling.head(self._place), "deadline": deadline}
        if repeated:
            head["attempt"] = f"{head['attempt'] or '0'}.{repeated}"
        call = lease.caller.exchange_call(
            calling.handler,
            news,
            tag,
            schema=self._schema,
            output_schema=calling.schema,
            compression=calling.compression,
            ordered=calling.keeps_order(len(self._peers)),
            **calling.options(),
            **head,
        )
        if isinstance(call, ReactiveExchange):
            call.splits = calling.splits
        return call
