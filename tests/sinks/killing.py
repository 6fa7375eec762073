"""Sinks in a process that is killed at a named step, or kills its client then.

``python -m tests.sinks.killing ADDRESS PLANS parquet FOLDER`` (or ``postgres URI``) loads
everything once and forks the service; when that dies by SIGKILL it forks another one, at the same
address. In the folder PLANS, ``next`` names the step at which the service is to kill itself, or the
process whose call it works on, once; ``killed`` has a line for each time that it did.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa

import aqueduct
from aqueduct.config import Config, Timing
from aqueduct.errors import AqueductError
from aqueduct.rpc.sink_commit import WRITE, Attempt, Claim, ClaimedKey, PreparedAttempt, WriteKey
from aqueduct.service.context import Call

ROOT = Path(__file__).parent.parent.parent
IDS = pa.schema([("id", pa.int64())])

ATTEMPT_STEPS = (
    "open begins",
    "open ends",
    "write 0",
    "write 1",
    "prepare begins",
    "prepare middle",
    "prepare ends",
    "receipt leaves",
)
COMMIT_STEPS = ("commit begins", "commit middle", "commit done", "commit ends", "answer leaves")
ABORT_STEPS = ("abort begins", "abort ends")
STEPS = (*ATTEMPT_STEPS, *COMMIT_STEPS, *ABORT_STEPS)
CLAIM_STEPS = ("claim begins", "claim looks", "claim ends")


class Plans:
    """The steps at which the service kills itself. For the service and for tests."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.next = folder / "next"
        self.log = folder / "killed"
        self._lock = threading.Lock()

    def set(self, step: str, victim: str = "service", *, later: int = 0) -> None:
        """For a test: the service, or its "client", dies when this step comes next.

        ``later``: so many times it comes before without a death.
        """
        assert step in (*STEPS, *CLAIM_STEPS)
        self._plan(step, victim, later)

    def _plan(self, step: str, victim: str, later: int) -> None:
        draft = self.folder / "draft"
        draft.write_text(f"{step}\n{victim}\n{later}")
        draft.replace(self.next)

    def clear(self) -> None:
        self.next.unlink(missing_ok=True)

    def killed(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []

    def at(self, step: str, client: int) -> None:
        """For the service: it has come to this step, in a call of this process."""
        with self._lock:  # of two threads one finds it
            try:
                wanted, victim, later = self.next.read_text().split("\n")
            except FileNotFoundError:
                return
            if wanted != step:
                return
            if int(later):
                self._plan(step, victim, int(later) - 1)
                return
            self.next.unlink()
        with self.log.open("a") as file:
            file.write(f"{step}\n")
        if victim == "client":
            os.kill(client, signal.SIGKILL)
            return
        os.kill(os.getpid(), signal.SIGKILL)
        threading.Event().wait()  # the signal is on its way


def pid_of(call: Call) -> int:
    """The client's process, by the Unix socket."""
    assert call.peer_credentials is not None
    return call.peer_credentials.pid


def deadly(made: type[Any], plans: Plans) -> type[Any]:
    """A sink class whose every step may be the last one."""

    class Deadly(made):
        settler = 0
        """Who asked for the commit or abort that is at work; tests have one at a time."""

        def open(self, attempt: Attempt, call: Call) -> Any:
            plans.at("open begins", pid_of(call))
            writer = super().open(attempt, call)
            plans.at("open ends", pid_of(call))
            return DeadlyAttempt(writer, plans, pid_of(call))

        def commit(
            self, write_key: WriteKey, prepared: Sequence[PreparedAttempt], note: Any = None
        ) -> Any:
            self.at("commit begins")
            result = super().commit(write_key, prepared, note)
            self.at("commit ends")
            return result

        def committed(self, write_key: WriteKey) -> Any:
            self.at("claim looks")
            return super().committed(write_key)

        def at(self, step: str) -> None:
            plans.at(step, self.settler)

        def publish(self, note: Path, content: str) -> None:
            """Of Parquet: the middle is after some of the files have been looked at."""
            self.at("commit middle")
            super().publish(note, content)
            self.at("commit done")

        def move(self, cursor: Any, each: PreparedAttempt) -> int:
            """Of PostgreSQL: the middle is after some rows have been moved."""
            rows: int = super().move(cursor, each)
            self.at("commit middle")
            return rows

        def abort(self, write_key: WriteKey, prepared: Sequence[PreparedAttempt]) -> None:
            self.at("abort begins")
            super().abort(write_key, prepared)
            self.at("abort ends")

    return Deadly


class DeadlyAttempt:
    def __init__(self, writer: Any, plans: Plans, client: int) -> None:
        self.writer = writer
        self.plans = plans
        self.client = client
        self.written = 0

    def at(self, step: str) -> None:
        self.plans.at(step, self.client)

    def write(self, batch: pa.RecordBatch) -> None:
        self.at(f"write {self.written}")
        self.written += 1
        self.writer.write(batch)
        self.writer.flush()

    def prepare(self) -> Any:
        self.at("prepare begins")
        if hasattr(self.writer, "writer"):  # of Parquet: complete, and not yet by its name
            self.writer.writer.close()
        self.at("prepare middle")
        receipt = self.writer.prepare()
        self.at("prepare ends")
        return receipt

    def abort(self) -> None:
        self.writer.abort()


def serve(address: str, plans: Plans, sink: Callable[[], Any]) -> None:
    """Until SIGTERM, or a step that kills."""
    timing = Timing(drain_timeout=1.0, close_linger=0.2)
    service = aqueduct.Service("deadly", config=Config(timing=timing))
    made = sink()
    served = service.sink("sink", made, schema=IDS)
    write, settle_claim = served._write, served._settle_claim
    settle = {"commit": served._settle_commit, "abort": served._settle_abort}

    def wrote(batches: Any, call: Call) -> Any:
        for batch in write(batches, call):
            plans.at("receipt leaves", pid_of(call))  # prepared and remembered, and not told
            yield batch

    def settling(what: str) -> Any:
        async def work(settlement: Any, call: Call) -> Any:
            made.settler = pid_of(call)
            result = await settle[what](settlement, call)
            plans.at("answer leaves", pid_of(call))
            return result

        return work

    async def claiming(claim: Claim, call: Call) -> ClaimedKey:
        made.settler = pid_of(call)
        made.at("claim begins")
        result = await settle_claim(claim, call)
        made.at("claim ends")
        return result

    served._settle_claim = claiming  # type: ignore[method-assign]
    service._handlers[WRITE + "sink"] = replace(service._handlers[WRITE + "sink"], function=wrote)
    served._settle_commit = settling("commit")  # type: ignore[method-assign]
    served._settle_abort = settling("abort")  # type: ignore[method-assign]
    service.run(address)


async def load(address: str) -> None:
    """Everything that serving imports when it is first used: a fork has it then."""
    async with (
        aqueduct.Service("load").serving(address) as serving,
        await aqueduct.Client.connect(serving.addresses[0]) as client,
    ):
        await client.describe()


def main(address: str, folder: str, kind: str, place: str) -> None:
    plans = Plans(Path(folder))
    if kind == "postgres":
        from examples.sinks.postgres import PostgresSink

        made = deadly(PostgresSink, plans)
    else:
        from examples.sinks.parquet import ParquetSink

        made = deadly(ParquetSink, plans)
    asyncio.run(load(f"{address}-load"))
    ending = False
    child = 0

    def end(number: int, frame: object) -> None:
        nonlocal ending
        ending = True
        if child:
            os.kill(child, signal.SIGTERM)

    signal.signal(signal.SIGTERM, end)
    while not ending:
        child = os.fork()
        if not child:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            serve(address, plans, lambda: made(*place.split(" ")))
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if not ending and os.WTERMSIG(status) != signal.SIGKILL:
            sys.exit(f"the service ended with status {status}")


class Deathbed:
    """A service of this kind in a process of its own, for tests."""

    def __init__(self, folder: Path, kind: str, place: str) -> None:
        (folder / "plans").mkdir()
        self.kind = kind
        self.plans = Plans(folder / "plans")
        self.address = f"aqueduct+unix://{folder}/s"
        arguments = [self.address, str(self.plans.folder), kind, place]
        self.process = subprocess.Popen(
            [sys.executable, "-u", "-m", "tests.sinks.killing", *arguments],
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        assert self.process.stdout is not None
        assert self.address in self.process.stdout.readline()

    def connect(self) -> aqueduct.SyncClient:
        """A client; the service may be about to be there again. The test's timeout bounds it."""
        while True:
            try:
                return aqueduct.SyncClient(self.address)
            except AqueductError:
                assert self.process.poll() is None, "the service did not come back"
                time.sleep(0.01)

    def end(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(20)
        finally:
            self.process.kill()
            self.process.wait()
            assert self.process.stdout is not None
            self.process.stdout.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
