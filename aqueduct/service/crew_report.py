"""The report of a service with workers, in their first process: it asks them and adds up."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from contextlib import suppress
from typing import Final, Protocol

from aqueduct.admin.merging import WorkerReports
from aqueduct.admin.report import Phase, Report
from aqueduct.admin.routes import admin_routes
from aqueduct.admin.thread import AdminThread
from aqueduct.config import Admin

__all__ = ["CrewAdmin", "CrewHost"]

_POLL: Final = 1.0
"""Seconds between two looks at all workers, whether or not anybody asks."""
_PATIENCE: Final = 0.5
"""Seconds that a request waits for workers; then what they told before has to do."""


class CrewHost(Protocol):
    """The first process, as the report needs it."""

    @property
    def phase(self) -> Phase:
        """What the service is at."""

    @property
    def addresses(self) -> list[str]:
        """Where the workers listen."""

    def ask_reports(self) -> Collection[int]:
        """Asks each worker that listens for its report; gives their numbers."""


class CrewAdmin:
    """The admin port of the first process. Lives on its event loop, but for ``report``."""

    def __init__(
        self, place: str, host: CrewHost, count: int, service: str, settings: Admin
    ) -> None:
        """``settings``: as far as the operator has set them; those of the service come later.

        Raises ConfigError without the extra ``admin``.
        """
        self._host = host
        self._loop = asyncio.get_running_loop()
        self._waiting: list[tuple[set[int], asyncio.Event]] = []
        self._polling: asyncio.Task[None] | None = None
        self.workers = WorkerReports(count, service)
        """What the workers have told."""
        self._thread = AdminThread(place, admin_routes(self), settings)

    @property
    def addresses(self) -> list[str]:
        """Where it listens."""
        return self._thread.addresses

    async def start(self) -> None:
        """Begins to answer. Raises ConfigError."""
        await self._thread.start()
        self._polling = self._loop.create_task(self._poll())

    async def close(self) -> None:
        """Ends."""
        if self._polling is not None:
            self._polling.cancel()
        await self._thread.close()

    def configure(self, settings: Admin) -> None:
        """The settings of the service, which a worker has told."""
        self._thread.settings = settings

    def came(self, number: int, report: Report) -> None:
        """A worker has told its state."""
        self.workers.came(number, report)
        self._settle(number)

    def ended(self, number: int, *, well: bool) -> None:
        """A process of a worker has ended."""
        self.workers.ended(number, well=well)
        self._settle(number)

    async def report(self) -> Report:
        """See ``ReportSource``: on the event loop of the port."""
        asked = asyncio.run_coroutine_threadsafe(self._fresh(), self._loop)
        return await asyncio.wrap_future(asked)

    # Within

    async def _fresh(self) -> Report:
        await self._ask()
        host = self._host
        settings = self._thread.settings
        return self.workers.make(host.phase, host.addresses, settings.listed, settings.live_lag)

    async def _ask(self) -> None:
        """Returns once all workers that listen have told their state, or are late."""
        asked = set(self._host.ask_reports())
        if not asked:
            return
        entry = asked, asyncio.Event()
        self._waiting.append(entry)
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(_PATIENCE):
                    await entry[1].wait()
        finally:
            self._waiting.remove(entry)

    async def _poll(self) -> None:
        while True:
            await self._ask()
            await asyncio.sleep(_POLL)

    def _settle(self, number: int) -> None:
        for asked, event in self._waiting:
            asked.discard(number)
            if not asked:
                event.set()
