"""The web page of the examples, in a real browser, draws what the service of the examples makes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.examples.conftest import Running
from tests.support.chromium import Page, opened
from tests.support.installed_programs import installed

pytestmark = pytest.mark.checkout

MADE = "connection.request('made_so_far', [{of: 'ticks'}]).then(rows => rows[0].made)"


@pytest.fixture(scope="module")
def chromium() -> str:
    """The browser. What CI needs `.ci/run` has installed, so that no test waits for that."""
    return installed("chromium")


def made(page: Page) -> set[int]:
    """What the service says in many answers, one after the other, of how far its source is."""
    return {page.evaluate(MADE) for _ in range(30)}


def drawn_ticks(page: Page) -> list[int]:
    cells = "[...document.querySelectorAll('tbody tr')].map(row => Number(row.cells[0].innerText))"
    return list(page.evaluate(cells))


@pytest.mark.timeout(60)
def test_a_page_draws_rows_and_holds_up_the_service_when_it_stops_asking(
    chromium: str, running: Running, tmp_path: Path
) -> None:
    with opened(running.page, tmp_path, program=chromium) as page:
        page.until("drawn >= 50")
        page.click("pause")
        page.until("drawn === asked")
        asked = page.evaluate("asked")
        # The generator has no end and does not wait: it is not stepped, or there were more.
        assert made(page) == {asked}
        assert page.evaluate("drawn") == asked
        assert drawn_ticks(page) == list(range(asked - 19, asked + 1))

        page.click("pause")
        page.until(f"drawn >= {asked + 50}")
        page.click("cancel")
        drawn = page.evaluate("drawn")
        made(page)  # A step that had begun before the cancel arrived may end in between.
        held_up = made(page)
        assert len(held_up) == 1
        assert drawn <= held_up.pop() <= page.evaluate("asked")
        assert page.evaluate("drawn") == drawn
        assert drawn_ticks(page) == list(range(drawn - 19, drawn + 1))

        assert page.text("trouble") == ""
        error = "connection.request('made', [{}]).catch(error => error.message)"
        assert "unknown-handler" in page.evaluate(error)
        # A page of another origin is refused: 'null' is that of a page without one.
        page.evaluate(
            "new Promise(done => { const other = document.createElement('iframe');"
            " other.sandbox = 'allow-scripts'; addEventListener('message', said => {"
            " globalThis.said = said.data; done(); });"
            " const where = new URLSearchParams(location.search).get('service');"
            " other.srcdoc = `<script>const it = new WebSocket('${where}');"
            " it.onopen = () => parent.postMessage('open', '*');"
            " it.onerror = () => parent.postMessage('refused', '*');</` + 'script>';"
            " document.body.append(other); })"
        )
        assert page.evaluate("said") == "refused"
