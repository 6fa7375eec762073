"""What the admin port answers: health for orchestrators, and the state of a service as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Protocol

from aqueduct.admin.http_server import HttpRequest, HttpResponse, Route, text
from aqueduct.admin.metrics import metrics_page
from aqueduct.admin.report import Report

__all__ = ["ReportSource", "admin_routes"]


class ReportSource(Protocol):
    """What has the report of a service."""

    async def report(self) -> Report:
        """It, as of now. Awaited on the event loop of the admin port."""


def admin_routes(source: ReportSource) -> Mapping[str, Route]:
    """The pages of a service, by path."""

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
        "/health/live": live,
        "/health/ready": ready,
        "/metrics": metrics,
        "/state.json": state,
    }
