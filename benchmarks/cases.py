"""What loopback.py measures: cases, and who takes part in each. Ours is first."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from benchmarks.peers.common import BULK, Setup

KiB: Final = 1 << 10
MiB: Final = 1 << 20
QUICK: Final = 8
"""What --quick divides sizes by."""
CARRIERS: Final = ("tcp", "unix", "tls")
"""The byte streams."""
OFTEN: Final = 3
"""Turns of 1 MiB over TCP: single measurements there differ by half, of plain sockets too, so that
a median of five would be off by a sixth every other time."""


@dataclass(frozen=True)
class Contestant:
    """A peer module with its options; ``nbytes`` is what a bulk measurement moves."""

    peer: str
    variant: str
    nbytes: int = 0
    carrier: str = "quic"
    gather: bool = False
    datagram: int = 1200
    wide: bool = False
    aes128: bool = False

    @property
    def name(self) -> str:
        return f"{self.peer}/{self.variant}"


@dataclass(frozen=True)
class Case:
    """One row of the plan."""

    name: str
    mode: str
    contestants: tuple[Contestant, ...]
    batch: int = 0
    turns: int = 1
    """In each repeat every contestant is measured so many times."""

    def setup(self, contestant: Contestant, quick: bool) -> Setup:
        """What the two processes of a measurement are told, without certificate and folder."""
        nbytes = contestant.nbytes // (2 if self.mode == "echo" else 1)
        requests = 2000
        if quick:
            nbytes, requests = nbytes // QUICK, requests // QUICK
        return Setup(
            mode=self.mode,
            batch=self.batch,
            nbytes=nbytes,
            requests=requests,
            carrier=contestant.carrier,
            gather=contestant.gather,
            datagram=contestant.datagram,
            wide=contestant.wide,
            aes128=contestant.aes128,
        )


OURS_16K = Contestant("aqueduct", "16k", 256 * MiB, datagram=16000)
OURS_1200 = Contestant("aqueduct", "1200", 32 * MiB, datagram=1200)
FLIGHT = Contestant("flight", "tcp", 768 * MiB, "tcp")
AIOQUIC_16K = Contestant(
    "aioquic", "16k-wide-aes128", 256 * MiB, datagram=16000, wide=True, aes128=True
)
AIOQUIC_DEFAULT = Contestant("aioquic", "default", 32 * MiB)

OURS_AUTO = Contestant("aqueduct", "auto", 256 * MiB, datagram=0)
FLIGHT_TLS = Contestant("flight", "tls", 768 * MiB, "tls")
PATHS: Final = (1452, 8900)
"""What common networks leave of a datagram: an MTU of 1,500, and one of 9,000."""

WIDE = (OURS_16K, OURS_AUTO, FLIGHT, FLIGHT_TLS, AIOQUIC_16K)
NARROW = (OURS_1200, FLIGHT_TLS, AIOQUIC_DEFAULT)
SIZES: Final = (("1m", MiB), ("64k", 64 * KiB))
STREAM_BULK: Final = (
    ("sink", "1m", MiB),
    ("source", "1m", MiB),
    ("echo", "1m", MiB),
    ("sink", "64k", 64 * KiB),
    ("echo", "64k", 64 * KiB),
)


def _path_peers(size: int) -> tuple[Contestant, ...]:
    """Ours and aioquic with datagrams of that size, and Flight over TLS."""
    nbytes = 64 * MiB
    return (
        Contestant("aqueduct", str(size), nbytes, datagram=size),
        FLIGHT_TLS,
        Contestant("aioquic", str(size), nbytes, datagram=size, wide=True, aes128=True),
    )


def _stream_peers(carrier: str) -> tuple[Contestant, ...]:
    """Ours, Flight and plain sockets over a byte stream."""
    nbytes = 1024 * MiB
    pair = tuple(Contestant(peer, carrier, nbytes, carrier) for peer in ("aqueduct", "flight"))
    if carrier == "tls":
        sockets = tuple(
            Contestant("sockets", f"tls-{name}", nbytes, carrier, gather=True, aes128=aes128)
            for name, aes128 in (("aes128", True), ("aes256", False))
        )
    else:
        sockets = tuple(
            Contestant("sockets", f"{carrier}-{name}", nbytes, carrier, gather=gather, wide=True)
            for name, gather in (("gather", True), ("copy", False))
        )
    if carrier == "unix":  # with the buffer that the system gives a Unix socket, not one of 4 MiB
        sockets += (Contestant("sockets", "unix-gather-208k", nbytes, carrier, gather=True),)
    return pair + sockets


def _stream_cases(carrier: str) -> tuple[Case, ...]:
    peers = _stream_peers(carrier)
    return (
        *(
            Case(
                f"{carrier}-{mode}-{size}",
                mode,
                peers,
                n,
                turns=OFTEN if carrier == "tcp" and n >= MiB else 1,
            )
            for mode, size, n in STREAM_BULK
        ),
        Case(f"{carrier}-request", "request", peers[:2]),  # sockets have no calls
        Case(f"{carrier}-sync-request", "sync-request", peers[:2]),
        Case(f"{carrier}-exchange-request", "exchange-request", peers[:1]),
        Case(f"{carrier}-open-request", "open-request", peers[:3]),
    )


PLAN: Final = (
    Case("codec", "codec", (Contestant("aqueduct", "codec"),)),
    *(Case(f"{mode}-{label}", mode, WIDE, size) for label, size in SIZES for mode in BULK),
    *(
        Case(f"{mode}-{label}-1200", mode, NARROW, size)
        for label, size in SIZES
        for mode in ("sink", "echo")
    ),
    *(Case(f"sink-1m-{size}", "sink", _path_peers(size), MiB) for size in PATHS),
    Case("request", "request", WIDE),
    Case("open-request", "open-request", WIDE),
    *(case for carrier in CARRIERS for case in _stream_cases(carrier)),
)


def select(only: str) -> list[Case]:
    """The cases whose name, or whose contestants' names, hold one of the words of ``only``.

    ``=NAME`` is a whole name: "sink-1m" is also in "tcp-sink-1m", "=sink-1m" is not.
    """
    words = [word for word in only.split(",") if word]
    if not words:
        return list(PLAN)

    def meant(name: str) -> bool:
        return any(word[1:] == name if word[0] == "=" else word in name for word in words)

    plan = []
    for case in PLAN:
        if meant(case.name):
            plan.append(case)
            continue
        some = tuple(c for c in case.contestants if meant(c.name))
        if some:
            plan.append(replace(case, contestants=some))
    return plan
