"""What every peer of the loopback benchmark shares: the batches, the checks, the two processes.

A peer module defines ``serve(setup, ready)`` and ``connect(setup, address)`` and ends with
``common.main(serve, connect)``. One measurement is one fresh server process and one fresh client
process of that module; they speak to ``benchmarks/loopback.py`` in JSON lines.

Nothing here is keyed by a batch's identity and nothing is cached between batches: the sending
side sums a column of every batch as it leaves, the receiving side as it arrives, and afterwards
each side compares its totals with the other's.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import json
import os
import resource
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, NoReturn, Protocol

import numpy as np
import pyarrow as pa

SCHEMA = pa.schema(
    [("id", pa.int64())] + [(name, pa.float64()) for name in "abcd"] + [("s", pa.string())]
)
ROW_BYTES = 8 + 4 * 8 + 4 + 16  # id, a to d, and a 16-byte string with its offset
DISTINCT = 4
REQUEST = b"p" * 200
BULK = ("sink", "source", "echo")


@dataclass(frozen=True)
class Setup:
    """One measurement: what to move, how, and what the peer's variant asks for."""

    mode: str
    """``sink``, ``source``, ``echo``, ``request`` (a new call each) or ``open-request``.

    ``sync-request`` is ``request`` without an event loop in the client, where a peer has both. Ours
    has ``exchange-request`` too: a new call each that is opened as one of many batches.
    """
    batch: int = 0
    """Bytes of one batch."""
    nbytes: int = 0
    """Bytes to move; of an echo, each way."""
    requests: int = 0
    carrier: str = "quic"
    """``quic``, ``tcp``, ``unix`` or ``tls``, where the peer has more than one."""
    folder: str = ""
    """Where a peer may put the file of a Unix socket."""
    certificate: str = ""
    key: str = ""
    gather: bool = False
    """Buffers of a batch leave one by one, uncopied, where the peer has the choice."""
    datagram: int = 1200
    """Bytes of a QUIC datagram's UDP payload."""
    wide: bool = False
    """64 MiB windows and 4 MiB socket buffers, where the peer needs to be told."""
    aes128: bool = False
    """Only TLS_AES_128_GCM_SHA256 is offered, where the peer needs to be told."""


def make_batches(nbytes: int) -> list[pa.RecordBatch]:
    """``DISTINCT`` record batches of about ``nbytes``, the same in every process."""
    rows, random = nbytes // ROW_BYTES, np.random.default_rng(7)
    out = []
    for k in range(DISTINCT):
        offsets = np.arange(0, 16 * (rows + 1), 16, dtype=np.int32)
        text = random.integers(97, 123, 16 * rows, dtype=np.uint8)
        columns = [pa.array(np.arange(k * rows, (k + 1) * rows, dtype=np.int64))]
        columns += [pa.array(random.random(rows)) for _ in range(4)]
        columns.append(pa.StringArray.from_buffers(rows, pa.py_buffer(offsets), pa.py_buffer(text)))
        out.append(pa.RecordBatch.from_arrays(columns, schema=SCHEMA))
    return out


@dataclass
class Totals:
    """What went by: counts, and a digest of the sums of column ``id`` that knows their order."""

    batches: int = 0
    rows: int = 0
    digest: int = 0

    def add(self, batch: pa.RecordBatch) -> None:
        self.batches += 1
        self.rows += batch.num_rows
        self.digest = (self.digest * 31 + int(batch.column(0).to_numpy().sum())) % (1 << 61)


class Work:
    """The batches of one bulk measurement and the totals of this side.

    Iterating sends: each batch is summed as it leaves. ``arrived`` takes what comes in; the server
    of an echo sums once, what came in and goes out again.
    """

    def __init__(self, setup: Setup) -> None:
        self.batches = make_batches(setup.batch or ROW_BYTES)
        self.total = max(1, setup.nbytes // self.batches[0].nbytes)
        self.nbytes = self.total * self.batches[0].nbytes
        self.sent, self.received = Totals(), Totals()
        self.last: pa.RecordBatch | None = None

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        for batch in itertools.islice(itertools.cycle(self.batches), self.total):
            self.sent.add(batch)
            yield batch

    def arrived(self, batch: pa.RecordBatch) -> None:
        self.received.add(batch)
        if self.received.batches == self.total:
            self.last = batch

    def mine(self, mode: str, client: bool) -> Totals:
        """The totals of this side, checked for completeness; AssertionError if they are wrong."""
        sends, receives = _directions(mode, client)
        if receives:
            _require(self.received.batches == self.total, f"{self.received} of {self.total}")
            expected = self.batches[(self.total - 1) % DISTINCT]
            _require(self.last is not None and self.last.equals(expected), "last batch differs")
        if sends and receives:
            _require(self.sent == self.received, f"sent {self.sent}, received {self.received}")
        return self.sent if sends else self.received

    def compare(self, mode: str, client: bool, theirs: dict[str, int]) -> dict[str, int]:
        """Compares with the other side's totals; returns ours. AssertionError if they differ."""
        ours = asdict(self.mine(mode, client))
        _require(ours == theirs, f"this side counted {ours}, the other {theirs}")
        return ours


def _directions(mode: str, client: bool) -> tuple[bool, bool]:
    """Whether this side counts what it sends, and what it receives, in ``mode``."""
    ways = {"sink": (client, not client), "source": (not client, client), "echo": (client, True)}
    return ways[mode]


def _require(condition: bool, text: str) -> None:
    if not condition:  # not `assert`: these checks must survive python -O
        raise AssertionError(text)


class Laps:
    """Round trips of REQUEST: ``for _ in laps`` makes one, ``laps.answered(body)`` ends it.

    A tenth more than asked for are made first and not counted.
    """

    def __init__(self, requests: int) -> None:
        self.warmup = requests // 10
        self.count = requests + self.warmup
        self.taken: list[float] = []
        self.began = 0.0

    def __iter__(self) -> Iterator[bytes]:
        for _ in range(self.count):
            self.began = time.perf_counter()
            yield REQUEST

    def answered(self, body: Any) -> None:
        self.taken.append((time.perf_counter() - self.began) * 1e6)
        _require(bytes(body) == REQUEST, "the answer differs from the request")

    def result(self) -> dict[str, float]:
        """The median and the 99th percentile in microseconds."""
        _require(len(self.taken) == self.count, f"{len(self.taken)} answers of {self.count}")
        laps = sorted(self.taken[self.warmup :])
        return {"p50_us": laps[len(laps) // 2], "p99_us": laps[len(laps) * 99 // 100]}


class Client(Protocol):
    """The client side of a peer; all methods block until the server has confirmed the end."""

    def sink(self, work: Work) -> None: ...
    def source(self, work: Work) -> None: ...
    def echo(self, work: Work) -> None: ...
    def requests(self, laps: Laps) -> None: ...
    def open_requests(self, laps: Laps) -> None: ...
    def compare(self, totals: dict[str, int]) -> dict[str, int]: ...


Ready = Callable[[Any], None]
Serve = Callable[[Setup, Ready], None]
Connect = Callable[[Setup, Any], Client]


def cpu_seconds() -> float:
    """User and system time of this process so far."""
    use = resource.getrusage(resource.RUSAGE_SELF)
    return use.ru_utime + use.ru_stime


class Usage:
    """What this process used since it was made: CPU seconds, and the peak of its memory.

    On Linux the kernel forgets the peak of before; elsewhere ``growth`` is only what is above it.
    """

    def __init__(self) -> None:
        try:
            with open("/proc/self/clear_refs", "w", encoding="ascii") as reset:
                reset.write("5")  # VmHWM is VmRSS again
        except OSError:
            pass
        self.memory = peak_memory()
        self.cpu = cpu_seconds()

    def spent(self) -> float:
        """CPU seconds."""
        return cpu_seconds() - self.cpu

    def report(self) -> dict[str, float]:
        """``cpu`` in seconds, ``memory`` (the peak) and ``growth`` (its rise) in bytes."""
        cpu, peak = self.spent(), peak_memory()
        return {"cpu": cpu, "memory": peak, "growth": peak - self.memory}


def peak_memory() -> int:
    """The peak of this process's resident memory in bytes (VmHWM on Linux)."""
    try:
        with open("/proc/self/status", encoding="ascii") as status:
            for line in status:
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) << 10
    except OSError:
        pass
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def end_with_parent() -> None:
    """Has the kernel end this process with the one that started it (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, 9, 0, 0, 0)  # PR_SET_PDEATHSIG, SIGKILL


def _say(answer: Any) -> None:
    print(json.dumps(answer), flush=True)


def _serve_process(setup: Setup, serve: Serve) -> NoReturn:
    def report(usage: Usage) -> NoReturn:
        sys.stdin.buffer.read()  # loopback.py closes it once the client is done
        _say(usage.report())
        os._exit(0)

    def ready(address: Any) -> None:
        threading.Thread(target=report, args=(Usage(),), daemon=True).start()
        _say({"address": address})

    serve(setup, ready)
    threading.Event().wait()
    raise SystemExit(1)


def _client_process(setup: Setup, address: Any, connect: Connect) -> NoReturn:
    work = Work(setup)
    bulk = setup.mode in BULK
    client = connect(setup, address)
    usage = Usage()
    if not bulk:
        result = _measure_requests(setup, client)
    else:
        began = time.perf_counter()
        getattr(client, setup.mode)(work)
        result = {"seconds": time.perf_counter() - began, "bytes": work.nbytes}
    result.update({f"client_{name}": value for name, value in usage.report().items()})
    if bulk:
        theirs = client.compare(asdict(work.mine(setup.mode, True)))
        work.compare(setup.mode, True, theirs)
    _say(result)
    os._exit(0)


def _measure_requests(setup: Setup, client: Client) -> dict[str, float]:
    laps = Laps(setup.requests)
    getattr(client, f"{setup.mode.replace('-', '_')}s")(laps)
    return laps.result()


def main(serve: Serve, connect: Connect) -> NoReturn:
    """The entry of a peer module: one of the two processes of a measurement."""
    parser = argparse.ArgumentParser(description="a process of benchmarks/loopback.py")
    parser.add_argument("role", choices=("server", "client"))
    parser.add_argument("setup", help="JSON of a Setup")
    parser.add_argument("address", nargs="?", help="JSON of what the server said")
    args = parser.parse_args()
    end_with_parent()
    setup = Setup(**json.loads(args.setup))
    if args.role == "server":
        _serve_process(setup, serve)
    _client_process(setup, json.loads(args.address), connect)
