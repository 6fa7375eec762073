"""A real Chromium without a window, told what to do over its DevTools protocol."""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from websockets.sync.client import ClientConnection, connect

ROOT = Path(__file__).parent.parent.parent
WAIT = 50.0
"""Seconds for all that a browser is asked to do, its start included."""


class Page:
    """A page in a browser."""

    def __init__(self, devtools: ClientConnection, session: str, deadline: float) -> None:
        self._devtools = devtools
        self._session = session
        self._deadline = deadline
        self._numbers = itertools.count(100)

    def evaluate(self, expression: str) -> Any:
        """The value of an expression of JavaScript in the page, which may be a promise."""
        answer = _ask(
            self._devtools,
            next(self._numbers),
            "Runtime.evaluate",
            self._deadline,
            session=self._session,
            expression=expression,
            awaitPromise=True,
            returnByValue=True,
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def until(self, condition: str) -> None:
        """Waits in the page until a condition holds there."""
        self.evaluate(
            f"new Promise(done => {{ const look = () => ({condition}) ? done() :"
            " setTimeout(look, 10); look(); })"
        )

    def click(self, button: str) -> None:
        """Presses what has this id."""
        self.evaluate(f"document.getElementById({json.dumps(button)}).click()")

    def command(self, method: str, **given: Any) -> dict[str, Any]:
        """What the browser answers to a command of the DevTools protocol, for this page."""
        return _ask(
            self._devtools,
            next(self._numbers),
            method,
            self._deadline,
            session=self._session,
            **given,
        )

    def appear(self, *, width: int, height: int, dark: bool = False, scale: float = 1) -> None:
        """Gives the window this size, and a user who likes it light or dark."""
        self.command(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=width < 600,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.command("Emulation.setEmulatedMedia", features=[scheme])

    def screenshot(self) -> bytes:
        """The window, as PNG."""
        return base64.b64decode(self.command("Page.captureScreenshot", format="png")["data"])

    def text(self, element: str) -> str:
        """What is written in the element with this id."""
        return str(self.evaluate(f"document.getElementById({json.dumps(element)}).textContent"))


@contextlib.contextmanager
def opened(url: str, folder: Path, *, program: str) -> Iterator[Page]:
    """Opens a page in a browser of its own, whose files are in ``folder``."""
    deadline = time.monotonic() + WAIT
    command = [
        program,
        "--headless",
        "--no-sandbox",  # it does not start as root otherwise
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--no-first-run",
        "--disable-background-networking",
        "--remote-debugging-port=0",
        f"--user-data-dir={folder / 'profile'}",
        "about:blank",
    ]
    with (folder / "chromium.log").open("wb") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True
        )
    try:
        where = _devtools_of(folder / "profile", process, deadline)
        # Messages have a page's text at most; what the browser sends is not limited otherwise.
        with connect(where, max_size=1 << 24, open_timeout=WAIT, compression=None) as devtools:
            made = _ask(devtools, 1, "Target.createTarget", deadline, url="about:blank")
            target = made["targetId"]
            found = _ask(
                devtools, 2, "Target.attachToTarget", deadline, targetId=target, flatten=True
            )
            session = found["sessionId"]
            # Answered once the page has begun: what is evaluated next is evaluated there.
            went = _ask(devtools, 3, "Page.navigate", deadline, session=session, url=url)
            assert "errorText" not in went, went
            page = Page(devtools, session, deadline)
            page.until("document.readyState === 'complete'")
            yield page
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _devtools_of(profile: Path, process: subprocess.Popen[bytes], deadline: float) -> str:
    """Where the browser listens; it writes that to a file once it does."""
    said = profile / "DevToolsActivePort"
    while time.monotonic() < deadline:
        assert process.poll() is None, f"Chromium ended with {process.returncode}"
        if said.exists() and len(lines := said.read_text().splitlines()) == 2:
            return f"ws://127.0.0.1:{lines[0]}{lines[1]}"
        time.sleep(0.02)
    raise AssertionError("Chromium does not listen for DevTools")


def _ask(
    devtools: ClientConnection,
    number: int,
    method: str,
    deadline: float,
    *,
    session: str | None = None,
    **given: Any,
) -> dict[str, Any]:
    request: dict[str, Any] = {"id": number, "method": method, "params": given}
    if session is not None:
        request["sessionId"] = session
    devtools.send(json.dumps(request))
    while True:
        answer = json.loads(devtools.recv(timeout=max(deadline - time.monotonic(), 0.1)))
        if answer.get("id") == number:
            assert "error" not in answer, answer["error"]
            return dict(answer["result"])
