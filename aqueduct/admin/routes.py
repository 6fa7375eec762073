"""What the admin port answers: health for orchestrators, and the state of a service as JSON."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Final, Protocol

from aqueduct.admin.http_server import HttpRequest, HttpResponse, Route, text
from aqueduct.admin.metrics import metrics_page
from aqueduct.admin.page import page_routes
from aqueduct.admin.report import Report

__all__ = ["ReportSource", "admin_routes"]


_FRESH: Final = 0.25
"""Seconds for which one report does for all requests. So many requests cost the service little."""
_PAGES: Final = 8
"""Pages that are kept with a report: requests may ask for a format in many words."""


class ReportSource(Protocol):
    """What has the report of a service."""

    async def report(self) -> Report:
        """It, as of now. Awaited on the event loop of the admin port."""


def admin_routes(source: ReportSource) -> Mapping[str, Route]:
    """The pages of a service, by path."""
    recent = _Recent(source)

    async def live(request: HttpRequest) -> HttpResponse:
        service = (await recent.report())["service"]
        if service["live"]:
            return text("live")
        return text(f"not live: the event loop has not turned for {service['loop_lag']:.0f} s", 503)

    async def ready(request: HttpRequest) -> HttpResponse:
        service = (await recent.report())["service"]
        if service["ready"]:
            return text("ready")
        return text("not ready: " + "; ".join(service["reasons"]), 503)

    async def state(request: HttpRequest) -> HttpResponse:
        return await recent.page(("state", ""), _state_page)

    async def metrics(request: HttpRequest) -> HttpResponse:
        accept = request.headers.get("accept", "")
        return await recent.page(("metrics", accept), partial(metrics_page, accept=accept))

    return {
        **page_routes(),
        "/health/live": live,
        "/health/ready": ready,
        "/metrics": metrics,
        "/state.json": state,
    }


def _state_page(report: Report) -> HttpResponse:
    return HttpResponse(json.dumps(report, separators=(",", ":")).encode(), "application/json")


class _Recent:
    """A source whose report is kept for a moment, with the pages that were made of it."""

    def __init__(self, source: ReportSource) -> None:
        self._source = source
        self._making = asyncio.Lock()
        self._report: Report | None = None
        self._made = 0.0
        self._pages: dict[tuple[str, str], HttpResponse] = {}

    async def report(self) -> Report:
        """See ``ReportSource``."""
        async with self._making:
            if self._report is None or time.monotonic() - self._made >= _FRESH:
                self._report = await self._source.report()
                self._made = time.monotonic()
                self._pages.clear()
            return self._report

    async def page(
        self, key: tuple[str, str], make: Callable[[Report], HttpResponse]
    ) -> HttpResponse:
        """What ``make`` makes of the report, once for each ``key``."""
        report = await self.report()
        found = self._pages.get(key)
        if found is None:
            found = make(report)
            if len(self._pages) < _PAGES:
                self._pages[key] = found
        return found
