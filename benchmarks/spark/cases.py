"""What the Spark benchmark measures: cases, and who takes part in each, in their order."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

__all__ = ["PLAN", "QUICK", "Case", "Contestant", "select"]

QUICK: Final = 8
"""What --quick divides sizes by."""
MiB: Final = 1 << 20


@dataclass(frozen=True)
class Contestant:
    """``peer/variant``; those of aqueduct and of flight have a service of their own."""

    name: str
    listen: str = ""
    """Where the service listens; ``FOLDER`` stands for a directory of the run."""

    @property
    def peer(self) -> str:
        return self.name.partition("/")[0]

    @property
    def variant(self) -> str:
        return self.name.partition("/")[2]


@dataclass(frozen=True)
class Case:
    """One row of the plan. ``size`` is rows, batches, tasks or bytes, as the kind wants it."""

    name: str
    kind: str
    """The method of ``jobs.Jobs`` that measures it."""
    master: str
    repeat: int
    """Measurements of each contestant at most."""
    size: int
    contestants: tuple[Contestant, ...]
    sockets: str = "tcp"
    """Between Spark and its Python workers: ``tcp``, which is its default, or ``unix``.

    Over TCP a small task waits 40 ms for a delayed acknowledgement, whatever it does.
    """


TCP: Final = Contestant("aqueduct/tcp", "aqueduct+tcp://127.0.0.1:0")
UNIX: Final = Contestant("aqueduct/unix", "aqueduct+unix://FOLDER/aqueduct.sock")
QUIC: Final = Contestant("aqueduct/quic-16k", "aqueduct://127.0.0.1:0")
IN_FLIGHT: Final = replace(TCP, name="aqueduct/in-flight-8")
ONE_BY_ONE: Final = replace(TCP, name="aqueduct/in-flight-1")
FLIGHT_TCP: Final = "grpc+tcp://127.0.0.1:0"
FLIGHT_UNIX: Final = "grpc+unix://FOLDER/flight.sock"
WAITING: Final = Contestant("flight/waiting", FLIGHT_TCP)
PIPELINED: Final = Contestant("flight/pipelined", FLIGHT_TCP)
PIPELINED_UNIX: Final = Contestant("flight/pipelined", FLIGHT_UNIX)
PER_TASK: Final = Contestant("flight/client-per-task", FLIGHT_TCP)
IDENTITY: Final = Contestant("spark/identity")
NOTHING: Final = Contestant("spark/no-udf")
READING: Final = Contestant("spark/reading")

ROWS: Final = 4_000_000
TASKS: Final = 2_000
DECODED: Final = 2048 * MiB

PLAN: Final = (
    # One task at a time: the service has the other processor, as it has its own machine elsewhere.
    Case(
        "spark-plain-tcp",
        "plain",
        "local[1]",
        7,
        ROWS,
        (IDENTITY, TCP, PIPELINED, WAITING, NOTHING),
    ),
    Case("spark-plain-unix", "plain", "local[1]", 7, ROWS, (IDENTITY, UNIX, PIPELINED_UNIX)),
    Case("spark-plain-quic", "plain", "local[1]", 5, ROWS, (IDENTITY, QUIC)),
    Case("spark-slow", "slow", "local[1]", 3, 600, (IN_FLIGHT, WAITING, ONE_BY_ONE)),
    Case("spark-tasks", "tasks", "local[2]", 2, TASKS, (IDENTITY, TCP, PER_TASK), "unix"),
    Case("spark-workers", "workers", "local[2]", 1, TASKS, (TCP,), "unix"),
    Case("spark-files-tcp", "files", "local[1]", 5, DECODED, (TCP, PIPELINED, READING)),
    Case("spark-files-unix", "files", "local[1]", 5, DECODED, (UNIX, PIPELINED_UNIX)),
    Case("spark-memory", "memory", "local[4]", 1, 20 * 1024 * MiB, (TCP,)),
)


def select(only: str) -> list[Case]:
    """The cases whose name holds one of the words of ``only``."""
    words = [word for word in only.split(",") if word]
    return [case for case in PLAN if not words or any(word in case.name for word in words)]
