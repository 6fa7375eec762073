"""``aqueduct top``: what a service is doing, again and again.

It reads the admin port of the service (``/state.json``). Calls of clients lead to one worker, and
each may show a token; the admin port adds all workers up, and is for operators alone.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, Final, TypeAlias
from urllib.parse import urlsplit

from aqueduct.cli.common import CommandFailed, Commands, ended_by_signals, reader
from aqueduct.cli.output import console, number, of_bytes, plain_table, rich_table
from aqueduct.escaping import escape, one_line, shown
from aqueduct.service.signals import say

__all__ = ["Snapshot", "add", "blocks", "fetch", "run"]

_TIMEOUT: Final = 5.0
"""Seconds of a look."""
_MOST: Final = 16 << 20  # bytes of a state
_LINES: Final = 10
_PORT: Final = 9464
_ROOT: Final = "/state.json"
_WRONG: Final = (
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)
"""What the reading of a document of another shape leads to."""

Block: TypeAlias = "str | tuple[Sequence[str], Sequence[Sequence[str]], int]"
"""A line; or titles, rows, and how many of the last columns are numbers."""


def add(commands: Commands) -> None:
    """Adds the command to the parser."""
    command = commands.add_parser(
        "top",
        help="what a service is doing, again and again",
        epilog="It needs the admin port of the service: aqueduct serve --admin 127.0.0.1:9464.",
    )
    command.add_argument("address", metavar="http://HOST:PORT", help="the admin port")
    command.add_argument(
        "--interval",
        metavar="DURATION",
        type=reader("duration"),
        default=2.0,
        help="between two looks (2)",
    )
    command.add_argument(
        "--count", metavar="N", type=reader("count"), help="looks, before it ends (no end)"
    )
    command.add_argument(
        "--lines",
        metavar="N",
        type=reader("count"),
        default=_LINES,
        help=f"of handlers, calls and connections each, at most ({_LINES})",
    )
    command.set_defaults(run=run, usage=command)


def run(args: argparse.Namespace) -> int:
    """Shows the state until Ctrl-C, or ``--count`` times; the exit status."""
    host, port = _place(args.address)
    before: Snapshot | None = None
    looked = 0
    with ended_by_signals():
        now: Snapshot | None = fetch(host, port)
        with _screen() as show:
            while True:
                if now is not None:
                    show(blocks(now, before, args.lines))
                    before = now
                looked += 1
                if looked == args.count:
                    return 0
                time.sleep(args.interval)
                now = None
                try:
                    now = fetch(host, port)
                except (CommandFailed, OSError) as error:
                    # The service may be starting again.
                    show([f"{args.address}: {one_line(error)}"])


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state of a service at one time."""

    state: dict[str, Any]
    at: float
    """When it came (monotonic)."""


def fetch(host: str, port: int, *, timeout: float = _TIMEOUT) -> Snapshot:
    """Reads the state within ``timeout`` seconds in all. Raises CommandFailed."""
    where = f"http://{_bracketed(host)}:{port}{_ROOT}"
    look = _Look(host, port, timeout)
    try:
        status, reason, body = look.answer()
    except Empty:
        raise CommandFailed(
            f"{where} has not answered within {timeout:g} s; is it the admin port of a service?"
        ) from None
    except http.client.HTTPException as error:
        raise CommandFailed(f"{where} does not speak HTTP: {one_line(error)}") from error
    except OSError as error:
        raise CommandFailed(
            f"{where} cannot be reached: {one_line(error)}; is the service run with --admin?"
        ) from error
    finally:
        look.end()
    if status != http.client.OK:
        raise CommandFailed(f"{where} answers {status} {reason}")
    if len(body) > _MOST:
        raise CommandFailed(f"{where} has more than {_MOST} bytes")
    try:
        state = json.loads(body)
        if not isinstance(state, dict):
            raise TypeError("it is no object")
        snapshot = Snapshot(state, time.monotonic())
        blocks(snapshot, None, 1)  # so that what is none is found here
    except _WRONG as error:
        raise CommandFailed(
            f"{where} is not the state of a service of this version: {one_line(error)}"
        ) from error
    return snapshot


class _Look:
    """One request, in a thread: a timeout of a socket is for each of its reads alone.

    The look-up of a name has none at all.
    """

    def __init__(self, host: str, port: int, timeout: float) -> None:
        self._timeout = timeout
        self._connection = http.client.HTTPConnection(host, port, timeout=timeout)
        self._socket: socket.socket | None = None
        self._over = False
        self._answers: SimpleQueue[tuple[int, str, bytes] | Exception] = SimpleQueue()
        threading.Thread(target=self._run, name="aqueduct-top", daemon=True).start()

    def answer(self) -> tuple[int, str, bytes]:
        """Status, its reason, and the body. Raises Empty if there is none in time."""
        found = self._answers.get(timeout=self._timeout)
        if isinstance(found, Exception):
            raise found
        return found

    def end(self) -> None:
        """The thread ends, once a name that it looks up has been found."""
        self._over = True
        if self._socket is not None:
            with contextlib.suppress(OSError):  # it has lost its peer, or is closed
                self._socket.shutdown(socket.SHUT_RDWR)

    def _run(self) -> None:
        try:
            with contextlib.closing(self._connection):
                self._connection.connect()
                self._socket = self._connection.sock
                if not self._over:
                    self._answers.put(self._read())
        except Exception as error:  # noqa: BLE001  who waits for the answer raises it
            self._answers.put(error)

    def _read(self) -> tuple[int, str, bytes]:
        self._connection.request("GET", _ROOT, headers={"Accept": "application/json"})
        with self._connection.getresponse() as found:
            return found.status, found.reason, found.read(_MOST + 1)


def blocks(now: Snapshot, before: Snapshot | None, lines: int) -> list[Block]:
    """What is shown; rates are what changed since ``before``."""
    if before is not None and before.state["service"]["started"] != now.state["service"]["started"]:
        before = None  # counters began again
    found = [*_head(now), _handlers(now, before, lines)]
    for more in (_calls(now, lines), _connections(now, lines), _workers(now)):
        if more[1]:
            found += ["", more]
    return found


# ------------------------------------------------------------------ what is shown


def _head(now: Snapshot) -> Iterator[str]:
    service, calls, connections = (now.state[name] for name in ("service", "calls", "connections"))
    reasons = f" ({'; '.join(service['reasons'])})" if service["reasons"] else ""
    yield (
        f"{service['name']}  aqueduct-arrow {service['version']}, {service['phase']}, "
        f"{'ready' if service['ready'] else 'not ready'}{reasons}, up {_span(service['uptime'])}"
        f"{'' if service['live'] else ', event loop blocked'}"
    )
    yield (
        f"connections {number(connections['open'])} of {number(connections['limit'])}, "
        f"calls {number(calls['open'])} of {number(calls['limit'])}, "
        f"waiting {number(calls['waiting'])}, refused {number(calls['refused'])}"
    )
    yield "memory: " + ", ".join(
        f"{name} {of_bytes(account['bytes'])}"
        + (f" of {of_bytes(account['limit'])}" if account["limit"] else "")
        for name, account in now.state["memory"].items()
    )
    yield ""


def _handlers(now: Snapshot, before: Snapshot | None, lines: int) -> Any:
    rates = ("calls/s", "rows in/s", "rows out/s", "bytes/s")
    titles = ("handler", "open", "wait", *rates, "mean", "errors")
    seconds = 0.0 if before is None else now.at - before.at
    found = []
    for name, handler in now.state["handlers"].items():
        old = None if before is None else before.state["handlers"].get(name)
        rate = _rates(handler, old, seconds)
        moved = rate("bytes_in") + rate("bytes_out")
        ended = sum(handler["buckets"]) - (sum(old["buckets"]) if old else 0)
        took = handler["seconds"] - (old["seconds"] if old else 0.0)
        row = (
            name,
            number(handler["open"]),
            number(handler["waiting"]),
            *(number(rate(each)) for each in ("calls", "rows_in", "rows_out")),
            of_bytes(moved),
            f"{1000 * took / ended:.1f} ms" if ended > 0 else "-",
            number(sum(handler["errors"].values())),
        )
        found.append(((moved, handler["open"], handler["calls"]), row))
    found.sort(key=lambda each: each[0], reverse=True)
    return titles, [row for _, row in found[:lines]], len(titles) - 1


def _rates(
    now: dict[str, Any], before: dict[str, Any] | None, seconds: float
) -> Callable[[str], float]:
    def rate(name: str) -> float:
        change = now[name] - (before[name] if before is not None else now[name])
        return max(change, 0) / seconds if seconds > 0 else 0.0

    return rate


def _calls(now: Snapshot, lines: int) -> Any:
    titles = ("call of", "peer", "state", "seconds", "rows in", "rows out", "bytes")
    rows = [
        (
            call["handler"] or "(no such handler)",
            call["peer"],
            call["state"],
            f"{call['seconds']:.1f}",
            number(call["rows_in"]),
            number(call["rows_out"]),
            of_bytes(call["bytes_in"] + call["bytes_out"]),
        )
        for call in now.state["calls"]["listed"][:lines]
    ]
    return titles, rows, 4


def _connections(now: Snapshot, lines: int) -> Any:
    titles = ("connection", "carrier", "round trip", "queued", "calls", "resumes")
    listed = sorted(
        now.state["connections"]["listed"],
        key=lambda each: (each["calls"], each["queued_bytes"]),
        reverse=True,
    )
    rows = [
        (
            each["peer"],
            each["carrier"],
            "-" if each["rtt"] is None else f"{1000 * each['rtt']:.1f} ms",
            of_bytes(each["queued_bytes"]),
            number(each["calls"]),
            number(each["resumes"]),
        )
        for each in listed[:lines]
    ]
    return titles, rows, 4


def _workers(now: Snapshot) -> Any:
    titles = ("worker", "phase", "ready", "process", "deaths")
    rows = [
        (
            str(each["number"]),
            each["phase"],
            "yes" if each["ready"] else "no",
            "-" if each["pid"] is None else str(each["pid"]),
            number(each["deaths"]),
        )
        for each in now.state["workers"]
    ]
    return titles, rows, 2


def _span(seconds: float) -> str:
    minutes, left = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 24:
        return f"{hours // 24} d {hours % 24} h"
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {left} s"


# ------------------------------------------------------------------ where it is shown


@contextlib.contextmanager
def _screen() -> Iterator[Callable[[Sequence[Block]], None]]:
    """What shows blocks: on the whole terminal by ``rich``, or one below the other."""
    screen = console(sys.stdout)
    if screen is None:
        yield _say
        return
    from rich.console import Group
    from rich.live import Live
    from rich.text import Text

    with Live(console=screen, screen=True, auto_refresh=False) as live:

        def show(found: Sequence[Block]) -> None:
            parts: list[Any] = []
            for place, block in enumerate(found):
                if isinstance(block, str):
                    parts.append(Text(escape(block), style="bold" if not place else ""))
                else:
                    titles, rows, right = block
                    lines = [tuple(map(escape, row)) for row in rows]
                    parts.append(rich_table(titles, lines, right=right))
            live.update(Group(*parts), refresh=True)

        yield show


def _say(found: Sequence[Block]) -> None:
    for block in found:
        if isinstance(block, str):
            say(block)
            continue
        titles, rows, right = block
        for line in plain_table(titles, [tuple(map(escape, row)) for row in rows], right=right):
            say(line)
    say("")


def _place(text: str) -> tuple[str, int]:
    """Host and port of the admin port. Raises CommandFailed."""
    wanted = f"top reads the admin port of a service, such as http://127.0.0.1:{_PORT}"
    if text.startswith(("aqueduct:", "aqueduct+", "reactivesocket")):
        raise CommandFailed(
            f"{wanted}, and not the address for its clients: run it with --admin 127.0.0.1:{_PORT}"
        )
    try:
        parts = urlsplit(text)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise CommandFailed(f"{wanted}: {one_line(error)}") from None
    if parts.scheme != "http" or not host or parts.path not in ("", "/") or parts.query:
        raise CommandFailed(f"{wanted}; {text} is none")
    if parts.username is not None:
        raise CommandFailed(f"{wanted}; it takes no user or password")
    try:
        # As the look does, whose errors say less.
        host.encode("idna")
        http.client.HTTPConnection(host, _PORT)
    except (UnicodeError, http.client.InvalidURL):
        raise CommandFailed(f"{wanted}; {shown(host)} is no name of a host") from None
    return host, _PORT if port is None else port


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
