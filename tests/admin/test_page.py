"""The live page of the admin port: its files, and what a real browser makes of them."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any, cast

import pytest

from aqueduct.admin.http_server import HttpRequest, HttpResponse
from aqueduct.admin.page import page_routes
from aqueduct.admin.report import BOUNDS, Report
from aqueduct.admin.thread import AdminThread
from aqueduct.config import Admin
from tests.admin.reports import handler, report
from tests.support.chromium import Page, opened
from tests.support.installed_programs import installed

HOSTILE = "<script>globalThis.ran = true</script><b>\u202ex\x1b[1m"
SHOWN = "<script>globalThis.ran = true</script><b>\\u{202e}x\\u{1b}[1m"


def asked(path: str) -> HttpResponse:
    route = page_routes()[path]
    return asyncio.run(route(HttpRequest(path, "", {})))  # type: ignore[arg-type]


def test_a_browser_is_told_to_run_and_load_what_is_here_alone():
    for path in page_routes():
        response = asked(path)
        policy = response.headers["Content-Security-Policy"].split("; ")
        assert "default-src 'none'" in policy and "frame-ancestors 'none'" in policy
        assert "require-trusted-types-for 'script'" in policy
        assert not any("unsafe" in each or "*" in each or "http" in each for each in policy)
        assert response.status == 200 and response.body
    assert asked("/live/page.js").content_type == "text/javascript; charset=utf-8"


def test_the_files_name_no_other_place_and_have_nothing_inline():
    for path in page_routes():
        body = asked(path).body.decode()
        places = set(re.findall(r"\b\w+://[^\s\"'<]*", body))
        assert places <= {"http://www.w3.org/2000/svg"}, path
        assert not re.search(r"\b(innerHTML|outerHTML|insertAdjacent|document\.write|eval)\b", body)
    html = asked("/").body.decode()
    assert not re.search(r"\sstyle=|\son\w+=|<style|<script(?![^>]* src=)", html)
    for asset in re.findall(r'(?:src|href)="(/live/[^"]*)"', html):
        assert asset in page_routes()


def test_the_page_knows_the_buckets_of_the_report():
    found = re.search(r"const BOUNDS = \[([^\]]*)\]", asked("/live/page.js").body.decode())
    assert found is not None
    assert tuple(map(float, found[1].split(","))) == BOUNDS


class Served:
    """A server with the page, and a document that the test makes."""

    def __init__(self, document: Report) -> None:
        self.document = document
        self.broken = False
        self.looks = 0
        self._loop = asyncio.new_event_loop()
        self._thread: AdminThread | None = None
        self.port = 0

    def start(self) -> None:
        routes = {**page_routes(), "/state.json": self._state}
        self._thread = AdminThread(f"127.0.0.1:{self.port}", routes, Admin())
        self._loop.run_until_complete(self._thread.start())
        self.port = int(self._thread.addresses[0].rpartition(":")[2])

    def stop(self) -> None:
        if self._thread is not None:
            self._loop.run_until_complete(self._thread.close())
        self._thread = None

    def close(self) -> None:
        self.stop()
        self._loop.close()

    async def _state(self, request: HttpRequest) -> HttpResponse:
        self.looks += 1
        if self.broken:
            raise RuntimeError("on purpose")
        return HttpResponse(json.dumps(self.document).encode(), "application/json")


@pytest.fixture
def served():
    served = Served(full())
    served.start()
    yield served
    served.close()


def full() -> Report:
    """A service with more of all than a page shows, and names of strangers."""
    made: Any = report(
        connections=5000,
        same=handler(open=2, calls=7, rows_in=1234567, bytes_in=3 << 20, errors={"busy": 3}),
    )
    made["handlers"][HOSTILE] = handler(calls=1, errors={HOSTILE: 1, "cancelled": 2})
    made["service"].update(name=HOSTILE, ready=False, reasons=[HOSTILE], addresses=[HOSTILE])
    (one,) = made["connections"]["listed"]
    made["connections"].update(open=1000, limit=16384)
    made["connections"]["listed"] = [
        {**one, "peer": HOSTILE if number == 0 else f"10.0.0.1:{number}"} for number in range(200)
    ]
    made["calls"]["listed"] = [
        {
            "handler": HOSTILE,
            "kind": "exchange",
            "peer": HOSTILE,
            "number": 17,
            "since": 1000.0,
            "seconds": 61.0,
            "state": "waiting",
            "rows_in": 5,
            "rows_out": 4,
            "bytes_in": 2048,
            "bytes_out": 1,
            "worker": 1,
        }
    ]
    executor: Any = {
        **dict.fromkeys(("batches_in", "rows_in", "bytes_in"), 3),
        **dict.fromkeys(("batches_out", "rows_out", "bytes_out"), 2),
        "application": HOSTILE,
        "name": HOSTILE,
        "host": HOSTILE,
        "executor": "1",
        "calls": 9,
        "open_calls": 1,
        "waiting_turn": 0,
        "waiting_client": 1,
        "failed": 2,
        "idle": None,
    }
    task = {**executor, "stage": None, "partition": 4, "task": HOSTILE, "handler": HOSTILE}
    made["spark"] = {
        "executors": [executor],
        "executor_count": 1,
        "tasks": [task] * 21,
        "task_count": 300,
        "forgotten": 12345,
    }
    made["workers"] = [
        {
            "number": 0,
            "pid": None,
            "phase": "starting",
            "ready": False,
            "live": False,
            "reasons": [HOSTILE],
            "started": None,
            "deaths": 3,
            "age": None,
        }
    ]
    return cast("Report", made)


def cells(page: Page, table: str, row: int = 0) -> list[str]:
    return list(
        page.evaluate(
            f"[...document.querySelectorAll('#{table} tbody tr')[{row}].cells]"
            ".map(cell => cell.textContent)"
        )
    )


def count_rows(page: Page, table: str) -> int:
    return int(page.evaluate(f"document.querySelectorAll('#{table} tbody tr').length"))


def caption(page: Page, table: str) -> str:
    return str(page.evaluate(f"document.querySelector('#{table} caption').textContent"))


LOOKS = "Number(document.documentElement.dataset.looks ?? 0)"


@pytest.mark.checkout
@pytest.mark.timeout(90)
def test_a_browser_shows_a_service_that_comes_and_goes(served, tmp_path: Path):
    where = f"http://127.0.0.1:{served.port}"
    with opened(f"{where}/", tmp_path, program=installed("chromium")) as page:
        page.until(f"{LOOKS} >= 2")
        assert page.text("trouble") == ""

        # Names of strangers are text, whatever they are made of.
        assert page.text("name") == SHOWN and SHOWN in page.text("about")
        assert page.text("addresses") == SHOWN
        assert cells(page, "connections")[0] == SHOWN
        assert cells(page, "handlers", 1)[0] == SHOWN
        assert cells(page, "handlers", 1)[-1] == f"cancelled 2, {SHOWN} 1"
        assert cells(page, "calls")[:5] == ["17", SHOWN, SHOWN, "waits for its turn", "61 s"]
        assert cells(page, "executors")[:2] == [f"{SHOWN} · 1", SHOWN]
        assert cells(page, "tasks")[:3] == [SHOWN, "\u2013", "4"]
        assert cells(page, "tasks")[5] == "waits for the client"
        assert cells(page, "workers")[3] == f"no: {SHOWN}"
        assert page.evaluate("globalThis.ran") is None
        assert page.evaluate("document.querySelectorAll('main b, main script').length") == 0
        assert page.evaluate("document.title") == f"{SHOWN} · Aqueduct"

        # Much is counted, and a part of it is shown.
        assert page.text("phase") == "serving, not ready"
        assert page.text("open-connections") == "1,000"
        assert caption(page, "connections") == "20 of 1,000, the newest first."
        assert count_rows(page, "connections") == 20
        page.evaluate("document.querySelector('#connections button').click()")
        assert count_rows(page, "connections") == 200
        assert caption(page, "connections") == "200 of 1,000, the newest first."
        assert "20 of 300 tasks" in caption(page, "tasks")
        assert "12,345 older ones are forgotten" in caption(page, "tasks")
        assert cells(page, "handlers")[6:9] == ["1,234,567", "0", "3.0 MiB"]
        assert page.text("errors") == "4"

        # Rates are differences of what is counted.
        served.document["handlers"]["same"]["rows_in"] += 10_000_000
        page.until(
            "document.querySelector('#handlers td:nth-child(7)').textContent[0] === '1' &&"
            " document.querySelectorAll('figure')[1].textContent.includes('million/s')"
        )

        # All tables can be read out, and a phone needs no scrolling to the side.
        assert page.evaluate(
            "[...document.querySelectorAll('table')].every(table => table.caption.textContent &&"
            " [...table.tHead.rows[0].cells].every(cell => cell.scope === 'col') &&"
            " [...table.tBodies[0].rows].every(row => row.cells[0].scope === 'row'))"
        )
        page.appear(width=390, height=800)
        assert page.evaluate("document.documentElement.scrollWidth") == 390

        # The browser asks this server alone, and may not ask others.
        assert set(
            page.evaluate(
                "performance.getEntriesByType('resource').map(e => new URL(e.name).origin)"
            )
        ) == {where}
        other = Served(served.document)
        other.start()
        try:
            refused = f"fetch('http://127.0.0.1:{other.port}/state.json', {{mode: 'no-cors'}})"
            assert page.evaluate(f"{refused}.then(() => 'sent', () => 'refused')") == "refused"
            assert other.looks == 0
        finally:
            other.close()

        # A service that fails, goes, and comes again.
        served.broken = True
        page.until("document.getElementById('trouble').textContent.includes('status 500')")
        served.broken = False
        page.until("document.getElementById('trouble').hidden")
        served.stop()
        page.until("document.getElementById('trouble').textContent.includes('no connection')")
        assert "The service has not answered since" in page.text("trouble")
        assert page.text("phase") == "no answer"
        assert page.text("open-connections") == "1,000"  # the last one known
        served.document["service"]["started"] += 100
        served.document["connections"]["open"] = 3
        served.start()
        page.until("document.getElementById('open-connections').textContent === '3'")
        assert "was started again" in page.text("trouble")
        assert page.text("phase") == "serving, not ready"
