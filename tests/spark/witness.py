"""A service in a process of its own that says what happens to its calls, and when.

``python -m tests.spark.witness [--free] [--idle=SECONDS] ADDRESS...`` prints one JSON object a
line: ``ready`` with the addresses, then ``begun``, ``holding``, ``cancelled`` and ``ended`` of each
call with ``time.monotonic()``, which is one clock for all processes of a machine. It reads
commands: ``release`` and ``counters``; it ends with its standard input. With ``--spans=FILE`` it
writes the spans of its calls there.

The handler ``hold`` answers each batch with itself. With the header ``hold`` it stops: ``all`` for
every call, a partition's number for the first attempt at it that the service sees; from the batch
on that the header ``answers`` names, until the call is cancelled or ``release`` comes. ``careful``
is a function of one batch, idempotent, and stops at batches whose first number is that of the
header ``at``, modulo 500. Started with ``--free`` neither ever stops.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import aqueduct
from aqueduct.config import Config, Timing
from aqueduct.service.telemetry import Observer, OpenTelemetry

ROOT = Path(__file__).parent.parent.parent
IDLE = 3.0
"""Seconds after which the service takes a silent client for gone, unless ``idle`` says more."""


class Witness:
    """The process, as tests see it."""

    def __init__(
        self, *addresses: str, free: bool = False, spans: Path | None = None, idle: float = IDLE
    ) -> None:
        options = [f"--idle={idle}", *(["--free"] if free else [])]
        if spans is not None:
            options.append(f"--spans={spans}")
        self.process = subprocess.Popen(
            [sys.executable, "-u", "-m", "tests.spark.witness", *options, *addresses],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        self.events: list[dict[str, Any]] = []
        self._news = threading.Condition()
        self._over = False
        self._reader = threading.Thread(target=self._read, name="witness-reader", daemon=True)
        self._reader.start()
        self.addresses: list[str] = self.wait("ready")[0]["addresses"]

    def wait(self, event: str, *, count: int = 1, **where: Any) -> list[dict[str, Any]]:
        """The first ``count`` events of a name and with these values, once they are there."""

        def found() -> list[dict[str, Any]]:
            return self.seen(event, **where)

        with self._news:
            self._news.wait_for(lambda: len(found()) >= count or self._over, timeout=60)
            assert len(found()) >= count, (event, where, self.events)
            return found()[:count]

    def seen(self, event: str, **where: Any) -> list[dict[str, Any]]:
        """Those that there are now."""
        wanted = {"event": event, **where}
        return [seen for seen in list(self.events) if wanted.items() <= seen.items()]

    def forget(self) -> None:
        """Begins a new test: earlier events are gone."""
        with self._news:
            self.events.clear()

    def counters(self) -> dict[str, int]:
        """The service's."""
        before = len(self.seen("counters"))
        self._tell("counters")
        counters: dict[str, int] = self.wait("counters", count=before + 1)[-1]["counters"]
        return counters

    def settled(self) -> dict[str, int]:
        """Its counters, as soon as no call is open; fails when one stays."""
        deadline = time.monotonic() + 30
        while (counters := self.counters())["open_calls"]:
            assert time.monotonic() < deadline, f"calls stay open: {counters}"
        return counters

    def release(self) -> None:
        """Calls go on."""
        self._tell("release")

    def kill(self) -> None:
        """As the kernel does it."""
        self.process.kill()
        self.close()

    def close(self) -> None:
        """Ends it."""
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            self.process.stdin.close()
        except BrokenPipeError:
            pass
        self.process.wait(60)
        self._reader.join(60)
        self.process.stdout.close()

    def _tell(self, command: str) -> None:
        assert self.process.stdin is not None
        print(command, file=self.process.stdin, flush=True)

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._news:
                self.events.append(json.loads(line))
                self._news.notify_all()
        with self._news:
            self._over = True
            self._news.notify_all()


# The program


class Stage:
    """What the handler and the commands share."""

    def __init__(self, free: bool) -> None:
        self.free = threading.Event()
        if free:
            self.free.set()
        self._seen: set[str] = set()
        self._lock = threading.Lock()

    def holds(self, call: aqueduct.Call) -> bool:
        """Whether a call is to stop."""
        wish = call.headers.get("hold")
        with self._lock:
            first = call.write_key not in self._seen
            self._seen.add(call.write_key)
        if wish is None or self.free.is_set():
            return False
        here = call.partition is not None and wish == str(call.partition.index)
        return wish == "all" or (here and first)

    def wait(self, call: aqueduct.Call) -> bool:
        """Until the call is cancelled, or all may go on. Returns whether it may."""
        woken = threading.Event()
        call.on_cancel(woken.set)
        while not (call.cancelled or self.free.is_set()):
            woken.wait(0.05)
        return not call.cancelled


def say(event: str, **values: Any) -> None:
    os.write(1, (json.dumps({"event": event, "at": time.monotonic(), **values}) + "\n").encode())


def describe(call: aqueduct.Call) -> dict[str, Any]:
    return {
        "write_key": call.write_key,
        "attempt": call.attempt,
        "partition": None if call.partition is None else call.partition.index,
        "pid": call.headers.get("pid"),
        "owner": None if call.peer_credentials is None else call.peer_credentials.pid,
    }


def make(stage: Stage, telemetry: Observer | None = None, idle: float = IDLE) -> aqueduct.Service:
    timing = Timing(close_linger=0.2, drain_timeout=1, idle_timeout=idle, ping_interval=0.5)
    service = aqueduct.Service("witness", config=Config(timing=timing), telemetry=telemetry)

    @service.handler("hold")
    def hold(batches, call):
        who = describe(call)
        holds = stage.holds(call)
        say("begun", **who)
        call.on_cancel(lambda: say("cancelled", **who))
        for number, batch in enumerate(batches):
            if holds and number == int(call.headers.get("answers", "0")):
                say("holding", **who)
                if not stage.wait(call):
                    return
            yield batch
        say("ended", **who)

    @service.handler("careful", idempotent=True)
    def careful(batch, call):
        place = batch["id"][0].as_py() % 500
        if f"{place}" == call.headers["at"] and not stage.free.is_set():
            say("holding", **describe(call))
            if not stage.wait(call):
                call.check()
        return batch

    @service.handler("echo", idempotent=True)
    def echo(batch):
        return batch

    return service


async def main(arguments: list[str]) -> None:
    addresses = [argument for argument in arguments if not argument.startswith("--")]
    stage = Stage("--free" in arguments)
    telemetry, idle = None, IDLE
    for argument in arguments:
        if argument.startswith("--idle="):
            idle = float(argument.partition("=")[2])
        if argument.startswith("--spans="):
            from tests.spark.spans import tracers

            provider = tracers(argument.partition("=")[2])
            telemetry = OpenTelemetry(tracer_provider=provider)
    service = make(stage, telemetry, idle)
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()

    def commands() -> None:
        for line in sys.stdin:
            if line.strip() == "release":
                stage.free.set()
            else:
                say("counters", counters=service.counters())
        loop.call_soon_threadsafe(ended.set)

    threading.Thread(target=commands, daemon=True).start()
    async with service.serving(*addresses, dev_certificate=True, drain=0) as serving:
        say("ready", addresses=serving.addresses)
        await ended.wait()
    os._exit(0)  # some handler may still hold a thread


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:]))
