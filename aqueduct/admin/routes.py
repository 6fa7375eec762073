"""What the admin port answers: health for orchestrators, and the state of a service as JSON."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from typing import Final, Protocol

from aqueduct.admin.http_server import HttpRequest, HttpResponse, Route, text
from aqueduct.admin.metrics import metrics_page
from aqueduct.admin.page import page_routes
from aqueduct.admin.report import Report

__all__ = ["ReportSource", "admin_routes"]


_FRESH: Final = 0.25
"""Seconds for which one report does for all requests. So many requests cost the service little."""


class ReportSource(Protocol):
    """What has the report of a service."""

    async def report(self) -> Report:
        """It, as of now. Awaited on the event loop of the admin port."""


def admin_routes(source: ReportSource) -> Mapping[str, Route]:
    """The pages of a service, by path."""
    source = _Recent(source)

    async def live(request: HttpRequest) -> HttpResponse:
        service = (await source.report())["service"]
        if service["live"]:
            return text("live")
        return text(f"not live: the event loop has not turned for {service['loop_lag']:.0f} s", 503)

    async def ready(request: HttpRequest) -> HttpResponse:
        service = (await source.report())["service"]
        if service["ready"]:
            return text("ready")
        return text("not ready: " + "; ".join(service["reasons"]), 503)

    async def state(request: HttpRequest) -> HttpResponse:
        body = json.dumps(await source.report(), separators=(",", ":")).encode()
        return HttpResponse(body, "application/json")

    async def metrics(request: HttpRequest) -> HttpResponse:
        return metrics_page(await source.report(), request.headers.get("accept", ""))

    return {
        **page_routes(),
        "/health/live": live,
        "/health/ready": ready,
        "/metrics": metrics,
        "/state.json": state,
    }


class _Recent:
    """A source whose report is kept for a moment."""

    def __init__(self, source: ReportSource) -> None:
        self._source = source
        self._making = asyncio.Lock()
        self._report: Report | None = None
        self._made = 0.0

    async def report(self) -> Report:
        """See ``ReportSource``."""
        async with self._making:
            if self._report is None or time.monotonic() - self._made >= _FRESH:
                self._report = await self._source.report()
                self._made = time.monotonic()
            return self._report
