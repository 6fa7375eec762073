"""Drivers, many connections, and what a run of byte streams is published as."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import (
    asyncio_overhead,
    asyncio_transports,
    cases,
    check,
    many_connections,
    processes,
    publish,
    results,
)
from tests.support.selection import mostly_long

pytestmark = pytest.mark.checkout

BENCHMARKS = Path(results.__file__).parent
FLOORS = check.load(check.FLOORS)


# ------------------------------------------------------------------ drivers


@pytest.mark.parametrize("name", asyncio_transports.DRIVERS)
@pytest.mark.parametrize("size", [1, 7, 8, 200, 4096, 65_528, 65_536, 300_000, 3 << 20])
async def test_a_driver_brings_messages_whole_and_in_order(name: str, size: int):
    near, far = socket.socketpair()
    count = max(5, min(200, (8 << 20) // size))
    sent = [bytes([number % 251]) * (size + number % 3) for number in range(count)]
    received: list[bytes] = []
    everything = asyncio.Event()

    def arrived(_: asyncio_transports.Connection, body: memoryview) -> None:
        received.append(bytes(body))
        if len(received) == count:
            everything.set()

    make = asyncio_transports.DRIVERS[name]
    with near, far:
        sender, receiver = make(near, arrived), make(far, arrived)
        async with asyncio.timeout(60):
            for body in sent:
                sender.send(body[:1], body[1:])
                await sender.room()
                assert sender.queued <= asyncio_transports.HIGH_WATER
            await everything.wait()
        assert received == sent
        assert receiver.queued == 0
        loop = asyncio.get_running_loop()
        for sock in (near, far):
            loop.remove_reader(sock.fileno())
            sock.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("name", asyncio_transports.DRIVERS)
async def test_a_driver_holds_its_sender_back(name: str):
    near, far = socket.socketpair()
    make = asyncio_transports.DRIVERS[name]
    received: list[int] = []
    everything = asyncio.Event()

    def arrived(_: asyncio_transports.Connection, body: memoryview) -> None:
        received.append(len(body))
        if len(received) == 4:
            everything.set()

    with near, far:
        sender = make(near, lambda _, body: None)
        for _ in range(4):
            sender.send(bytes(1 << 20))
        with pytest.raises(TimeoutError):  # nobody reads
            await asyncio.wait_for(sender.room(), 0.2)
        make(far, arrived)
        await asyncio.wait_for(sender.room(), 60)
        await asyncio.wait_for(everything.wait(), 60)
        loop = asyncio.get_running_loop()
        assert received == [1 << 20] * 4
        for sock in (near, far):
            loop.remove_reader(sock.fileno())
            sock.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize(
    "case",
    mostly_long(asyncio_overhead.PLAN, asyncio_overhead.PLAN[0], asyncio_overhead.PLAN[-1]),
    ids=lambda case: case.name,
)
def test_every_case_of_the_drivers_is_measured(case: asyncio_overhead.Case, tmp_path: Path):
    for contestant in case.contestants:
        told = case.told(contestant, True, str(tmp_path / contestant.name.replace("/", "-")))
        Path(told["folder"]).mkdir()
        told["count"] = min(told["count"], 40)
        told["connections"] = min(told["connections"], 20)
        row = asyncio_overhead.measure(told)
        wanted = told["count"] or told["laps"] * told["connections"]
        assert row["bytes"] == wanted * case.size
        assert row["p50_us" if case.name.endswith("-200") else "mib_s"] > 0


def test_a_message_of_the_drivers_that_is_not_the_next_fails():
    body = memoryview((7).to_bytes(8, "little") + bytes(92))
    asyncio_overhead.expect(body, 100, 7)
    for size, number in ((100, 8), (101, 7)):
        with pytest.raises(RuntimeError, match="message"):
            asyncio_overhead.expect(body, size, number)


# ------------------------------------------------------------------ many connections


@pytest.mark.parametrize(
    "carrier",
    mostly_long((c.carrier for case in many_connections.PLAN for c in case.contestants), "tls"),
)
def test_many_connections_exchange_every_byte(carrier: str):
    row = many_connections.measure(many_connections.Told(carrier, 8, 10))
    assert row["exchanges"] == 80
    assert row["mib_s"] == pytest.approx(80 * 2 * 64 / 1024 / row["exchange_s"])
    assert row["server_growth_mib"] >= 0
    assert row["server_cpu_s"] > 0


def test_many_says_which_payload_was_wrong():
    payloads = many_connections.Payloads(10)
    every = {bytes(make(n)) for n in range(10) for make in (payloads.question, payloads.answer)}
    assert len(every) == 20
    assert {len(payload) for payload in every} == {many_connections.SIZE}
    spoilt = bytearray(payloads.question(3))
    many_connections.check(memoryview(spoilt), payloads.question(3), "question 3")
    spoilt[-1] ^= 1
    with pytest.raises(RuntimeError, match="question 3"):
        many_connections.check(memoryview(spoilt), payloads.question(3), "question 3")


def test_many_does_not_pass_a_server_that_answered_too_little(monkeypatch: pytest.MonkeyPatch):
    """What the processes report is compared with what was told."""
    client = {"opened_s": 1.0, "exchange_s": 1.0, "client_cpu": 1.0, "client_growth": 0}
    server: dict[str, Any] = {"answered": 19, "wrong": [], "cpu": 1, "growth": 0, "rest": 0}
    monkeypatch.setattr(processes, "run_pair", lambda *_: (server | {"opening": 0}, client))
    with pytest.raises(processes.Failed, match="19 of 20"):
        many_connections.measure(many_connections.Told("tcp", 2, 10))
    server.update(answered=20, wrong=["question 3"])
    with pytest.raises(processes.Failed, match="question 3"):
        many_connections.measure(many_connections.Told("tcp", 2, 10))
    server.update(wrong=[])
    assert many_connections.measure(many_connections.Told("tcp", 2, 10))["exchanges"] == 20


@pytest.mark.parametrize("module", [asyncio_overhead, many_connections])
def test_their_tables_have_every_metric_in_words(module: Any):
    shown = (
        many_connections.TABLE
        if module is many_connections
        else asyncio_overhead.BULK + asyncio_overhead.TRIPS
    )
    assert set(shown) <= results.UNITS.keys()
    rows = [
        {"case": case.name, "contestant": c.name, "repeat": 0, **dict.fromkeys(shown, 12.5)}
        for case in module.PLAN
        for c in case.contestants
    ]
    text = module.report(results.Run({"format": results.FORMAT, "rows": rows}))
    for row in rows:
        assert row["contestant"] in text
    assert "12.5 (12.5-12.5)" in text
    rows[0] = {**{k: rows[0][k] for k in ("case", "contestant", "repeat")}, "error": "lost"}
    assert "(1 failed)" in module.report(results.Run({"format": results.FORMAT, "rows": rows}))


# ------------------------------------------------------------------ publishing


def stream_run() -> dict[str, Any]:
    """A made-up run: ours makes 200, Flight 100, plain sockets 240 and less."""
    speeds = {"aqueduct": (200.0,), "flight": (100.0,), "sockets": (240.0, 180.0, 150.0)}
    rows = []
    for case in cases.PLAN:
        if not case.name.startswith(cases.CARRIERS):
            continue
        met: dict[str, int] = {}
        for contestant in case.contestants:
            nth = met[contestant.peer] = met.get(contestant.peer, -1) + 1
            speed = speeds[contestant.peer][nth]
            for repeat in range(3):
                row = {"case": case.name, "contestant": contestant.name, "repeat": repeat}
                value = speed * (1 + repeat / 100)
                if "request" in case.name:
                    row |= {"p50_us": 10_000 / value, "p99_us": 20_000 / value}
                else:
                    row |= {"mib_s": value, "cpu_gib": 100 / value, "growth_mib": 3.5}
                rows.append(row)
    environment = {
        "date": "2026-01-02T03:04:05Z",
        "python": "3.11.7",
        "packages": {"pyarrow": "26.0.1", "aqueduct-arrow": "0.1.0"},
        "revision": "abc1234",
        "built": "profiled",
        "kernel": "Linux 6",
        "congestion": "bbr",
        "cores": 2,
        "processor": "a processor",
        "load": 0.5,
    }
    settings = {"repeat": 3, "quick": False, "only": ""}
    return {
        "format": results.FORMAT, "environment": environment, "settings": settings, "rows": rows,
    }  # fmt: skip


def test_the_table_has_date_versions_ratios_and_what_is_demanded():
    text = publish.section(results.Run(stream_run()), FLOORS)
    head = " ".join(text.partition("\n\n")[0].split())
    for part in ("2026-01-02", "abc1234 (profiled)", "CPython 3.11.7", "pyarrow 26.0.1", "2 cores"):
        assert part in head
    assert "TCP by bbr" in head
    lines = {line.split("|")[1].strip(): line for line in text.splitlines() if "|" in line}
    for carrier in cases.CARRIERS:
        for case in publish.BULK:
            cells = [cell.strip() for cell in lines[f"{carrier}-{case}"].split("|")[1:-1]]
            assert cells[1] == "202 (200-204)"
            (demanded,) = (
                floor.min
                for floor in FLOORS
                if (floor.case, floor.against) == (f"{carrier}-{case}", f"flight/{carrier}")
                and floor.metric == "mib_s"
            )
            assert cells[2:] == ["2.00", f"≥ {demanded:g}", "0.83", "0.50"]
        request = [cell.strip() for cell in lines[f"{carrier}-request"].split("|")[1:-1]]
        assert request[2:] == ["0.50", "≤ 0.6"]
        opened = [cell.strip() for cell in lines[f"{carrier}-open-request"].split("|")[1:-1]]
        assert opened[2:] == ["0.50", ""]


def test_a_run_of_some_cases_shows_what_it_has():
    document = stream_run()
    document["rows"] = [row for row in document["rows"] if row["case"] == "tls-echo-64k"]
    document["settings"]["quick"] = True
    text = publish.section(results.Run(document), FLOORS)
    assert "tls-echo-64k" in text
    assert "tcp-" not in text
    assert "A quick run" in " ".join(text.split())
    document["rows"] = [row for row in document["rows"] if row["contestant"] != "flight/tls"]
    assert "| -" in publish.section(results.Run(document), FLOORS)
    document["rows"] = []
    with pytest.raises(publish.BadRun, match="no case over a byte stream"):
        publish.section(results.Run(document), FLOORS)


def test_the_readme_is_kept_but_for_what_is_between_the_marks():
    readme = f"before\n{publish.BEGIN}\nold\n{publish.END}\nafter\n"
    once = publish.put(readme, "new")
    assert once == f"before\n{publish.BEGIN}\n\nnew\n\n{publish.END}\nafter\n"
    assert publish.put(once, "new") == once
    for broken in ("", publish.BEGIN, publish.END + publish.BEGIN, once + once):
        with pytest.raises(publish.BadRun):
            publish.put(broken, "new")


def test_the_readme_has_a_place_for_the_table_and_shows_the_plot():
    readme = (BENCHMARKS / "README.md").read_text()
    assert publish.put(readme, "new") != readme
    assert "(plots/loopback.png)" in readme
    assert (BENCHMARKS / "plots" / "loopback.png").read_bytes()[:8] == PNG


PNG = b"\x89PNG\r\n\x1a\n"


def published(folder: Path, document: Any) -> subprocess.CompletedProcess[str]:
    run, readme = folder / "run.json", folder / "README.md"
    run.write_text(json.dumps(document))
    readme.write_text(f"{publish.BEGIN}\n{publish.END}\n")
    command = [sys.executable, str(BENCHMARKS / "publish.py"), str(run), "--readme", str(readme)]
    command += ["--plot", str(folder / "plots" / "run.png")]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_command_writes_the_table_and_the_plot(tmp_path: Path):
    done = published(tmp_path, stream_run())
    assert done.returncode == 0, done.stderr
    assert "| tcp-sink-1m " in (tmp_path / "README.md").read_text()
    picture = (tmp_path / "plots" / "run.png").read_bytes()
    assert picture[:8] == PNG
    width, height = (int.from_bytes(picture[at : at + 4], "big") for at in (16, 20))
    assert width > 800
    assert height > 500
    assert len(picture) > 10_000, "bars and words, not an empty page"


@pytest.mark.parametrize("document", [{}, {"format": results.FORMAT, "rows": []}])
def test_a_file_with_nothing_to_publish_changes_nothing(tmp_path: Path, document: Any):
    done = published(tmp_path, document)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert (tmp_path / "README.md").read_text() == f"{publish.BEGIN}\n{publish.END}\n"
    assert not (tmp_path / "plots").exists()


def test_nothing_imports_matplotlib_unless_a_plot_is_asked_for():
    program = "import sys, benchmarks.publish, benchmarks.loopback, benchmarks.check\n"
    program += "raise SystemExit('matplotlib' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], cwd=BENCHMARKS.parent, check=False)
    assert done.returncode == 0
