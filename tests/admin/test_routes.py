"""Pages are made of a report, and one report does for many requests."""

from __future__ import annotations

import asyncio
import json
import time

from aqueduct.admin.http_server import HttpRequest
from aqueduct.admin.report import Report
from aqueduct.admin.routes import admin_routes
from tests.admin.reports import handler, report


class Source:
    """Counts how often it is asked."""

    def __init__(self) -> None:
        self.asked = 0

    async def report(self) -> Report:
        self.asked += 1
        await asyncio.sleep(0)
        return report(double=handler(calls=self.asked))


def request(accept: str = "") -> HttpRequest:
    return HttpRequest("/", "", {"accept": accept})


async def test_no_header_has_one_page_for_another() -> None:
    routes = admin_routes(Source())
    metrics = await routes["/metrics"](request("state"))
    state = await routes["/state.json"](request())
    assert metrics.content_type.startswith("text/plain")
    assert state.content_type == "application/json"


async def test_many_requests_have_one_report_for_a_moment() -> None:
    source = Source()
    routes = admin_routes(source)
    began = time.monotonic()
    for number in range(100):
        for path in ("/health/live", "/health/ready", "/metrics", "/state.json"):
            await routes[path](request(f"text/{number}"))
    await asyncio.gather(*(routes["/state.json"](request()) for _ in range(100)))
    assert 1 <= source.asked <= (time.monotonic() - began) / 0.25 + 1


async def test_pages_are_those_of_the_report() -> None:
    source = Source()
    routes = admin_routes(source)
    seen: list[int] = []
    async with asyncio.timeout(30):
        while len(seen) < 3:
            state = json.loads((await routes["/state.json"](request())).body)
            calls = state["handlers"]["double"]["calls"]
            assert calls == source.asked
            if calls not in seen:
                seen.append(calls)
                page = await routes["/metrics"](request())
                assert b'calls_total{handler="double"} %.1f' % source.asked in page.body
                openly = await routes["/metrics"](request("application/openmetrics-text"))
                assert openly.content_type.startswith("application/openmetrics-text")
            await asyncio.sleep(0.01)
    assert seen == sorted(seen)
