"""``aqueduct top``: against the admin port of a service, and against what is none."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import socket
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from aqueduct.cli import main
from aqueduct.cli.common import FAILED, WRONG_USAGE, CommandFailed
from aqueduct.cli.top import Snapshot, blocks, fetch

HOST = "127.0.0.1"


STATE: dict[str, Any] = {
    "service": {
        "name": "busy",
        "version": "0.1.0",
        "started": 1_790_000_000.0,
        "uptime": 93_784.0,
        "addresses": ["aqueduct+tcp://127.0.0.1:4433"],
        "phase": "serving",
        "ready": True,
        "reasons": [],
        "live": True,
        "loop_lag": 0.0,
    },
    "connections": {
        "total": 2,
        "resumes": 0,
        "open": 1,
        "limit": 16_384,
        "listed": [
            {
                "peer": "127.0.0.1:50000",
                "carrier": "tcp",
                "since": 1_790_000_001.0,
                "rtt": None,
                "queued_bytes": 2048,
                "calls": 1,
                "resumes": 0,
                "worker": None,
            }
        ],
    },
    "calls": {
        "open": 1,
        "waiting": 0,
        "limit": 1024,
        "refused": 3,
        "listed": [
            {
                "handler": "echo",
                "kind": "exchange",
                "peer": "127.0.0.1:50000",
                "number": 4,
                "since": 1_790_000_002.0,
                "seconds": 12.5,
                "state": "running",
                "rows_in": 1000,
                "rows_out": 900,
                "bytes_in": 4096,
                "bytes_out": 2048,
                "worker": None,
            }
        ],
    },
    "handlers": {
        name: {
            "kind": "exchange",
            "open": 1,
            "waiting": 0,
            "calls": 7,
            "batches_in": 9,
            "rows_in": 1000,
            "bytes_in": 4096,
            "batches_out": 9,
            "rows_out": 900,
            "bytes_out": 2048,
            "resumes": 0,
            "errors": {"handler": 2},
            "seconds": 3.0,
            "buckets": [6, *[0] * 17],
        }
        for name in ("echo", "aqueduct.describe")
    },
    "memory": {
        "received": {"bytes": 1 << 20, "limit": 1 << 30},
        "kept": {"bytes": 0, "limit": None},
    },
    "workers": [],
}


@pytest.fixture
def state() -> dict[str, Any]:
    """A state of a service with a call in it."""
    return copy.deepcopy(STATE)


def status_of(*arguments: str) -> int:
    try:
        return main(["top", *arguments])
    except SystemExit as ended:
        return int(ended.code or 0)


@contextlib.contextmanager
def answering(body: bytes, status: int = 200) -> Iterator[tuple[str, int]]:
    """A server of something else."""

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with HTTPServer((HOST, 0), Answer) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield HOST, server.server_port
        finally:
            server.shutdown()
            thread.join()


def test_it_shows_the_service_its_handlers_and_its_calls(state, capsys):
    with answering(json.dumps(state).encode()) as (host, port):
        assert status_of(f"http://{host}:{port}", "--count", "2", "--interval", "0.01") == 0
    shown = capsys.readouterr().out
    assert shown.count("busy  aqueduct-arrow 0.1.0, serving, ready, up 1 d 2 h\n") == 2
    assert "connections 1 of 16,384, calls 1 of 1,024, waiting 0, refused 3\n" in shown
    assert "memory: received 1.0 MiB of 1.0 GiB, kept 0 B\n" in shown
    lines = [line.split() for line in shown.splitlines()]
    assert ["echo", "1", "0", "0", "0", "0", "0", "B", "-", "2"] in lines
    assert ["echo", "127.0.0.1:50000", "running", "12.5", "1,000", "900", "6.0", "KiB"] in lines
    assert ["127.0.0.1:50000", "tcp", "-", "2.0", "KiB", "1", "0"] in lines


def test_rates_are_of_the_time_between_two_looks(state):
    later = copy.deepcopy(state)
    echo = later["handlers"]["echo"]
    echo["rows_in"] += 4000
    echo["bytes_out"] += 2 << 20
    echo["calls"] += 20
    echo["seconds"] += 1.0
    echo["buckets"][0] += 10
    found = blocks(Snapshot(later, 12.0), Snapshot(state, 10.0), 10)
    titles, rows, _ = next(block for block in found if isinstance(block, tuple))
    row = dict(zip(titles, rows[0], strict=True))
    assert row["handler"] == "echo" and row["rows in/s"] == "2,000"
    assert (row["calls/s"], row["bytes/s"], row["mean"]) == ("10", "1.0 MiB", "100.0 ms")


def test_counters_that_began_again_give_no_rates(state):
    later = copy.deepcopy(state)
    later["service"]["started"] += 100
    later["handlers"]["echo"]["rows_in"] = 10_000
    found = blocks(Snapshot(later, 12.0), Snapshot(state, 10.0), 10)
    titles, rows, _ = next(block for block in found if isinstance(block, tuple))
    assert {row[titles.index("rows in/s")] for row in rows} == {"0"}


def test_workers_are_shown_and_long_lists_are_cut(state):
    later = copy.deepcopy(state)
    later["workers"] = [
        {"number": 0, "pid": None, "phase": "starting", "ready": False, "deaths": 2}
    ]
    found = blocks(Snapshot(later, 12.0), None, 1)
    tables = [block for block in found if isinstance(block, tuple)]
    assert len(tables[0][1]) == 1 < len(later["handlers"])
    assert tables[-1][1] == [("0", "starting", "no", "-", "2")]


def test_text_of_a_stranger_is_escaped(state, capsys, monkeypatch):
    later = copy.deepcopy(state)
    later["service"]["name"] = "a\x1b[2Jb\nc [red]"
    later["connections"]["listed"][0]["peer"] = "\x1b]0;title\x07"
    body = json.dumps(later).encode()
    with answering(body) as (host, port):
        assert status_of(f"http://{host}:{port}", "--count", "1") == 0
        shown = capsys.readouterr().out
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.delenv("NO_COLOR", raising=False)
        screen = Terminal()
        monkeypatch.setattr(sys, "stdout", screen)
        assert status_of(f"http://{host}:{port}/", "--count", "1") == 0
    for text in (shown, screen.getvalue()):
        assert r"a\x1b[2Jb\nc [red]" in text
        assert "\x1b]0;" not in text and "\x07" not in text


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        (b"", 200, "is not the state"),
        (b"[]", 200, "is not the state"),
        (b"{}", 200, "is not the state"),
        (b'{"service": 1, "calls": 2, "connections": 3}', 200, "is not the state"),
        (b"[" * 100_000, 200, "is not the state"),
        (json.dumps(STATE).replace("93784.0", "1e999").encode(), 200, "is not the state"),
        (b"no", 404, "answers 404"),
        (b" " * ((16 << 20) + 1), 200, "has more than 16777216 bytes"),
    ],
)
def test_what_is_no_admin_port_is_said(capsys, body, status, said):
    with answering(body, status) as (host, port):
        assert status_of(f"http://{host}:{port}", "--count", "1") == FAILED
    told = capsys.readouterr()
    assert said in told.err and told.err.count("\n") == 1 and told.out == ""


@pytest.mark.parametrize("beginning", [b"", b"HTTP/1.1 200 OK\r\nX: ", b"HTTP/1.0 200 OK\r\n\r\n"])
def test_a_look_has_an_end_whatever_comes_bit_by_bit(beginning):
    """It lets go of the connection, too: the server could not end otherwise."""
    cut = threading.Event()

    def drip(listener: socket.socket) -> None:
        peer, _ = listener.accept()
        with peer, contextlib.suppress(OSError):
            peer.sendall(beginning)
            while not cut.wait(0.02):
                peer.sendall(b"x")

    with socket.create_server((HOST, 0)) as listener:
        thread = threading.Thread(target=drip, args=(listener,))
        thread.start()
        try:
            with pytest.raises(CommandFailed, match=r"has not answered within 0\.3 s"):
                fetch(HOST, listener.getsockname()[1], timeout=0.3)
            thread.join(30)
            assert not thread.is_alive()
        finally:
            cut.set()
            thread.join()


def test_a_service_that_goes_away_is_shown_as_that(state, capsys, monkeypatch):
    with answering(json.dumps(state).encode()) as (host, port):
        address = f"http://{host}:{port}"
        found = fetch(host, port)
    monkeypatch.setattr("aqueduct.cli.top.fetch", fetch_once(found))
    assert status_of(address, "--count", "3", "--interval", "0.01") == 0
    assert capsys.readouterr().out.count("cannot be reached") == 2


def fetch_once(found: Snapshot) -> Any:
    left = [found]
    return lambda host, port: left.pop() if left else fetch(host, port)


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("aqueduct://127.0.0.1:4433", "--admin"),
        ("aqueduct+unix:///x.sock", "--admin"),
        ("https://127.0.0.1", "is none"),
        ("http://127.0.0.1:9464/metrics", "is none"),
        ("http://me:secret@127.0.0.1", "password"),
        ("http://127.0.0.1:99999", "http://127.0.0.1:9464"),
        ("http://[::1", "http://127.0.0.1:9464"),
        ("localhost:9464", "is none"),
        ("http://a..b:1", "'a..b' is no name of a host"),
        ("http://a b:1", "'a b' is no name of a host"),
        ("http://\udcff:1", r"'\udcff' is no name of a host"),
    ],
)
def test_another_address_is_refused_and_the_right_one_named(capsys, address, said):
    assert status_of(address, "--count", "1") == FAILED
    told = capsys.readouterr().err
    assert said in told and "secret" not in told and told.count("\n") == 1


def test_times_and_counts_are_above_zero(capsys):
    assert status_of(f"http://{HOST}", "--interval", "-1") == WRONG_USAGE
    assert status_of(f"http://{HOST}", "--count", "0") == WRONG_USAGE
