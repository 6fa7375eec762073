"""How many Python functions a batch passes on its way, in the client and in the service.

    python -m benchmarks.trace_batch [--rows N] [--repeat N] [--json]

A service in a process of its own sends back what it gets. A ``SyncClient`` calls it over TCP with
batches of one column of 1,000 rows, on a connection that has carried such calls before. One call is
traced with one batch, and one with twelve. Both are repeated; the medians are printed.

- **calls**: the library's Python functions that began to run, or went on: a coroutine or generator
  counts each time it is resumed. Comprehensions do not count, since newer Pythons call nothing for
  them. Compiled functions do not count, and nor do those of other packages.
- **modules**: the modules of the library that these functions are in. **with others** adds the
  modules of other packages whose functions were called, asyncio for example.
- **moves**: the pairs of one call and the next where the module is another one. The order is that
  of time, over all threads.
- **threads**: the same pairs where the thread is another one.

"first batch" is the call with one batch, from its begin to its end. "each further" is the
difference between the two calls, divided by eleven; it has no modules of its own. The client is
traced until it has read all answers and the end; the service until it has been quiet for 20 ms.
Batches that travel together save calls. So what twelve batches take differs between runs, and
between machines: measure two revisions in turns.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import IO, Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import pyarrow as pa

import aqueduct
from benchmarks.peers import common

__all__ = ["Numbers", "Trace", "measure", "table"]

LIBRARY: Final = "aqueduct"
BATCHES: Final = 12
WARM: Final = 30
QUIET: Final = 0.02  # seconds
PATIENCE: Final = 5.0  # seconds, for the service to become quiet
COMPREHENSIONS: Final = frozenset({"<listcomp>", "<setcomp>", "<dictcomp>"})
COLUMNS: Final = {
    "calls": "calls",
    "modules": "modules",
    "all_modules": "with others",
    "moves": "moves",
    "thread_changes": "threads",
}


@dataclass(frozen=True, slots=True)
class Numbers:
    """What one process did for one call."""

    calls: float
    modules: float
    all_modules: float
    moves: float
    thread_changes: float


class Trace:
    """Records calls of Python functions in this thread, and in threads that are started later."""

    def __init__(self) -> None:
        self._calls: list[tuple[str, int]] = []
        self._recording = False
        self.last = 0.0
        """When the last call was recorded, by ``time.monotonic``."""

    def install(self) -> None:
        """Has every call of a Python function looked at from now on."""
        threading.setprofile(self._see)
        sys.setprofile(self._see)

    def _see(self, frame: FrameType, event: str, argument: object) -> None:
        if not self._recording or event != "call" or frame.f_code.co_name in COMPREHENSIONS:
            return
        module = frame.f_globals.get("__name__", "")
        if module != __name__:
            self._calls.append((module, threading.get_ident()))
            self.last = time.monotonic()

    def start(self) -> None:
        """Forgets what was recorded, and records."""
        self._calls = []
        self.last = time.monotonic()
        self._recording = True

    def stop(self) -> Numbers:
        """Records no more, and counts."""
        self._recording = False
        library = [
            (module, thread)
            for module, thread in self._calls
            if module.partition(".")[0] == LIBRARY
        ]
        return Numbers(
            calls=len(library),
            modules=len({module for module, _ in library}),
            all_modules=len({module for module, _ in self._calls}),
            moves=sum(one[0] != other[0] for one, other in pairwise(library)),
            thread_changes=sum(one[1] != other[1] for one, other in pairwise(library)),
        )


# ----------------------------------------------------------------- the two processes


def serve() -> None:
    """Echoes batches; each line on standard input starts the trace, or ends it with a report."""
    trace = Trace()
    trace.install()
    service = aqueduct.Service("trace")

    @service.handler("echo")
    async def echo(batches: Any) -> Any:
        async for batch in batches:
            yield batch

    def obey() -> None:
        sys.setprofile(None)
        for line in sys.stdin:
            if line == "start\n":
                trace.start()
                print("{}", flush=True)
                continue
            end = time.monotonic() + PATIENCE
            while (now := time.monotonic()) < min(end, trace.last + QUIET):
                time.sleep(max(0.0, trace.last + QUIET - now))
            print(json.dumps(asdict(trace.stop())), flush=True)

    async def run() -> None:
        async with service.serving("aqueduct+tcp://127.0.0.1:0") as live:
            print(json.dumps({"address": live.addresses[0]}), flush=True)
            threading.Thread(target=obey, daemon=True).start()
            await asyncio.Event().wait()

    asyncio.run(run())


@contextmanager
def _service() -> Iterator[tuple[str, Callable[[str], dict[str, Any]]]]:
    """The address of a service, and what sends it a line and gives its answer."""
    process = subprocess.Popen(
        [sys.executable, __file__, "--service"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )

    def answer() -> dict[str, Any]:
        out: IO[str] | None = process.stdout
        line = out.readline() if out else ""
        if not line:
            raise RuntimeError("the traced service ended early; it says why on standard error")
        return dict(json.loads(line))

    def tell(line: str) -> dict[str, Any]:
        assert process.stdin is not None
        process.stdin.write(f"{line}\n")
        process.stdin.flush()
        return answer()

    try:
        yield answer()["address"], tell
    finally:
        process.kill()
        process.communicate()


def _median(runs: list[Numbers]) -> Numbers:
    columns = {name: [getattr(run, name) for run in runs] for name in COLUMNS}
    return Numbers(**{name: statistics.median(values) for name, values in columns.items()})


def _further(first: Numbers, all_batches: Numbers) -> Numbers:
    """What each batch after the first adds. Modules are not added, so it has none."""
    parts = {
        name: round((getattr(all_batches, name) - getattr(first, name)) / (BATCHES - 1), 1)
        for name in ("calls", "moves", "thread_changes")
    }
    return Numbers(modules=0, all_modules=0, **parts)


def measure(rows: int, repeats: int) -> dict[str, dict[str, Numbers]]:
    """The medians by process (client, service) and row of the table. Traces this process."""
    batch = pa.record_batch({"x": pa.array(range(rows), pa.int64())})
    trace = Trace()
    trace.install()
    found: dict[tuple[str, int], list[Numbers]] = {}
    try:
        with _service() as (address, tell), aqueduct.SyncClient(address) as client:

            def call(count: int) -> None:
                got = 0
                for answer in client.exchange("echo", [batch] * count):
                    got += answer.num_rows
                if got != count * rows:
                    raise RuntimeError(f"sent {count * rows} rows, and {got} came back")

            for _ in range(WARM):
                call(1)
                call(BATCHES)
            for _ in range(repeats):
                for count in (1, BATCHES):
                    tell("start")
                    trace.start()
                    call(count)
                    found.setdefault(("client", count), []).append(trace.stop())
                    found.setdefault(("service", count), []).append(Numbers(**tell("stop")))
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    result = {}
    for side in ("client", "service"):
        first, twelve = (_median(found[side, count]) for count in (1, BATCHES))
        result[side] = {
            "first batch": first,
            "each further": _further(first, twelve),
            "twelve batches": twelve,
        }
    return result


def table(found: dict[str, dict[str, Numbers]]) -> str:
    """The numbers as a table of Markdown."""
    lines = [
        f"| process | what | {' | '.join(COLUMNS.values())} |",
        "|---|---|" + "--:|" * len(COLUMNS),
    ]
    for side, rows in found.items():
        for what, numbers in rows.items():
            values = asdict(numbers)
            if what == "each further":
                values |= {"modules": None, "all_modules": None}
            cells = ["" if values[name] is None else f"{values[name]:g}" for name in COLUMNS]
            lines.append(f"| {side} | {what} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """The status of the process."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=1000, help="rows of a batch (1000)")
    parser.add_argument("--repeat", type=int, default=31, help="traces of each call (31)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    parser.add_argument("--service", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.service:
        common.end_with_parent()
        serve()
    found = measure(given.rows, given.repeat)
    if given.json:
        document = {
            side: {what: asdict(numbers) for what, numbers in rows.items()}
            for side, rows in found.items()
        }
        print(json.dumps(document, indent=2))
    else:
        print(table(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
