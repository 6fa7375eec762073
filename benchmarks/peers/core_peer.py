"""The connection core alone: two cores, mostly over the memory carrier, on one processor.

One measurement is one process: ``core_peer.py '{"case": "ordered", "size": 200000}'``. It prints
its numbers as JSON. What is counted is checked: every message is taken, in its place and with its
bytes; every channel ends; a measurement that does not come to this end is an error.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import sys
import time
import tracemalloc
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from aqueduct._speedups import channels as codec
from aqueduct._speedups.base.buffers import bytes_copied
from aqueduct.config import DEFAULT, Config
from aqueduct.errors import Finished, LostInTransit
from aqueduct.protocol.common.receiver import ReceiverHalf
from aqueduct.protocol.common.registry import Attach
from aqueduct.protocol.common.sender import Mode, SenderHalf
from benchmarks.core_pair import Ends, Pair

PAYLOADS: Final = [bytes([k]) * 100 for k in range(256)]
BURST: Final = 200
"""Messages that an application sends in one turn: what then leaves at once is about 21 KiB."""
WAVE: Final = 20
"""Channels opened in one turn of the churn."""


class Timer(AbstractContextManager["Timer"]):
    """Real and processor time of a block, after what was garbage is gone.

    ``collector`` is what Python's collector of garbage took of the processor time.
    """

    def __enter__(self) -> Timer:
        gc.collect()
        self.collector = 0.0
        gc.callbacks.append(self._watch)
        self._began = time.perf_counter(), time.process_time()
        return self

    def __exit__(self, *_: object) -> None:
        began, cpu = self._began
        self.elapsed, self.cpu = time.perf_counter() - began, time.process_time() - cpu
        gc.callbacks.remove(self._watch)

    def _watch(self, phase: str, _: dict[str, int]) -> None:
        now = time.process_time()
        self.collector += now if phase == "stop" else -now


# ------------------------------------------------------------------- messages


def send_messages(mode: Mode, count: int) -> dict[str, float]:
    """``count`` messages of 100 bytes on one channel, until all are taken and acknowledged."""
    pair = Pair()
    core, half, now = pair.client.core, pair.sender, pair.clock.now
    taken = misplaced = 0

    def take(receiver: ReceiverHalf) -> None:
        nonlocal taken, misplaced
        receive = pair.server.core.receive
        while (message := receive(receiver, now())) is not None:
            if message.number != taken or message.payload != PAYLOADS[taken & 255]:
                misplaced += 1
            taken += 1

    pair.server.on_readable = take
    sent = 0
    with Timer() as timer:
        while sent < count:
            if not half.has_room(mode):
                pair.settle(lambda: half.has_room(mode))
            for _ in range(min(BURST, count - sent)):
                core.send(half, PAYLOADS[sent & 255], now(), mode=mode)
                sent += 1
            pair.step()
        pair.settle(lambda: not half.unsettled)
    expect(taken, count, "messages were taken")
    expect(misplaced, 0, "messages were out of their place")
    return {"messages_s": count / timer.elapsed, "messages_cpu_s": count / timer.cpu}


def send_large(size: int, count: int) -> dict[str, float]:
    """``count`` messages of ``size`` bytes on one channel: what each costs either side's core.

    As a batch goes: a header, a small buffer that joins the head, and a large one. What leaves in
    one turn is 2 MiB. What the two sides do is counted apart, and no carrier is there to count.
    """
    ends = Ends()
    client, server, half = ends.client, ends.server, ends.client.entrypoint
    receiver = server.entrypoint
    assert isinstance(half, SenderHalf)
    assert isinstance(receiver, ReceiverHalf)
    prefix, sent, taken, misplaced = bytes(256), 0, 0, 0
    bodies = [memoryview(number.to_bytes(8, "little") + bytes(size - 264)) for number in range(64)]
    burst, clock = max((2 << 20) // size, 1), time.process_time
    costs, before = [0.0, 0.0], bytes_copied()
    gc.collect()
    while sent < count:
        began = clock()
        for _ in range(burst):
            now, headers = time.perf_counter(), ((b"number", b"%d" % sent),)
            client.send(half, [prefix, bodies[sent & 63]], now, headers=headers)
            sent += 1
        wanted = ends.wanted(client)
        left = clock()
        sizes = ends.give(wanted, server)
        answers = ends.wanted(server)
        while (message := server.receive(receiver, time.perf_counter())) is not None:
            mine = memoryview(message.payload)[256:264]
            misplaced += message.number != taken or mine != bodies[taken & 63][:8]
            taken += 1
        answers += ends.wanted(server)
        came = clock()
        for number, written in sizes.items():
            client.written(number, written)
        ends.give(answers, client)
        costs = [costs[0] + left - began + clock() - came, costs[1] + came - left]
    expect(taken, sent, "messages were taken")
    expect(misplaced, 0, "messages were out of their place")
    copied = 100 * (bytes_copied() - before) / (size * sent)
    return {"send_us": 1e6 * costs[0] / sent, "take_us": 1e6 * costs[1] / sent, "copied": copied}


def code_messages(count: int) -> dict[str, float]:
    """The same messages through the compiled codec alone: what no core can exceed."""
    decoder = codec.FrameDecoder(from_server=False)
    decoder.feed(codec.encode_route_to(0))
    decoder.next()
    taken = 0
    with Timer() as timer:
        for first in range(0, count, BURST):
            frames: list[Any] = []
            for number in range(first, min(first + BURST, count)):
                frames += codec.encode_message(number, PAYLOADS[number & 255])
            decoder.feed(b"".join(frames))
            while decoder.next() is not None:
                taken += 1
    expect(taken, count, "messages came out")
    return {"messages_s": count / timer.elapsed, "messages_cpu_s": count / timer.cpu}


# ---------------------------------------------------------------------- churn


class Uses:
    """An application that opens channels, uses each once and finishes it.

    Three kinds in turn: ORDERED to the server, ORDERED to the client, oneshot to the server.
    """

    def __init__(self) -> None:
        self.pair = Pair()
        self.finished = 0
        """Receivers that had their one message and then their end."""
        self._opened = 0
        self.pair.server.on_readable = self._on_server
        self.pair.client.on_readable = self._on_client

    def open(self, count: int) -> None:
        """Opens, uses and finishes so many channels."""
        core, now = self.pair.client.core, self.pair.clock.now
        for _ in range(count):
            kind = self._opened % 3
            self._opened += 1
            attach = Attach(keep_sender=kind != 1, is_oneshot=kind == 2)
            core.send(self.pair.sender, b"open", now(), attachments=(attach,))
            if isinstance(attach.half, SenderHalf):
                core.send(attach.half, PAYLOADS[0], now())
                if kind == 0:
                    core.finish(attach.half, now())
        self.pair.step()

    @property
    def channels(self) -> int:
        """Channels that have state on either side, beside the entrypoint."""
        return self.pair.client.core.channels + self.pair.server.core.channels - 2

    def _on_server(self, half: ReceiverHalf) -> None:
        core, now = self.pair.server.core, self.pair.clock.now
        while (message := core.receive(half, now())) is not None:
            for attached, _ in message.attachments:
                if isinstance(attached, SenderHalf):
                    core.send(attached, PAYLOADS[0], now())
                    core.finish(attached, now())
                else:
                    self._on_server(attached)  # what came before its handle
            if not message.attachments:
                half.handle = message.payload
        self._count_end(half)

    def _on_client(self, half: ReceiverHalf) -> None:
        core, now = self.pair.client.core, self.pair.clock.now
        while (message := core.receive(half, now())) is not None:
            half.handle = message.payload
        self._count_end(half)

    def _count_end(self, half: ReceiverHalf) -> None:
        if isinstance(half.error, Finished) and half.handle == PAYLOADS[0]:
            half.handle = None
            self.finished += 1


def churn(count: int) -> dict[str, float]:
    """``count`` channels on one connection one after another; what they cost, tenth by tenth."""
    warm = Uses()  # so that the first tenth does not pay for what happens once in a process
    for _ in range(max(count // 20 // WAVE, 1)):
        warm.open(WAVE)
    del warm
    uses = Uses()
    turns = max(count // 10 // WAVE, 1)
    tenths: list[Timer] = []
    sizes: list[int] = []
    for _ in range(10):
        with Timer() as timer:
            for _ in range(turns):
                uses.open(WAVE)
        tenths.append(timer)
        sizes.append(resident())
    uses.pair.settle(lambda: not uses.channels)
    total, tenth = 10 * turns * WAVE, turns * WAVE
    expect(uses.finished, total, "channels had their message and their end")
    return {
        "channels_s": total / sum(timer.elapsed for timer in tenths),
        "first_us": 1e6 * tenths[0].cpu / tenth,
        "last_us": 1e6 * tenths[-1].cpu / tenth,
        "last_over_first": tenths[-1].cpu / tenths[0].cpu,
        "left_bytes": (sizes[-1] - sizes[0]) / (total - tenth),
    }


# ---------------------------------------------------------------------- state


class Idle:
    """``count`` live channels that say nothing; with ``used`` each carried a message before."""

    def __init__(self, count: int, *, used: bool) -> None:
        self.pair = Pair(wide(count))
        self.handles: list[list[Any]] = [[], []]
        """What the applications hold: the halves at the client, those at the server."""
        self.pair.server.on_readable = self._on_server
        core, now = self.pair.client.core, self.pair.clock.now
        for k in range(count):
            attach = Attach(keep_sender=True, is_oneshot=False)
            core.send(self.pair.sender, b"open", now(), attachments=(attach,))
            self.handles[0].append(attach.half)
            if used:
                assert isinstance(attach.half, SenderHalf)
                core.send(attach.half, PAYLOADS[0], now())
            if k % 50 == 49:
                self.pair.step()
        self.pair.settle(lambda: all(not half.unsettled for half in self.handles[0]))
        self.pair.clock.skip_to(now() + 60)
        self.pair.step()
        for held in self.handles:
            expect(len(held), count, "handles are held")
        for core in (self.pair.client.core, self.pair.server.core):
            expect(core.channels, count + 1, "channels are live")

    def _on_server(self, half: ReceiverHalf) -> None:
        while (message := self.pair.server.core.receive(half, self.pair.clock.now())) is not None:
            for attached, _ in message.attachments:
                assert isinstance(attached, ReceiverHalf)
                self.handles[1].append(attached)
                self._on_server(attached)

    def forget_server(self) -> None:
        """Lets everything go that only the server's side holds."""
        self.handles[1].clear()
        self.pair.server.core = self.pair.client.core
        self.pair.server.on_readable = lambda half: None

    def forget_client(self) -> None:
        """The same of the client's side, afterwards."""
        self.handles[0].clear()
        del self.pair.client.core, self.pair.server.core


def idle(count: int, *, used: bool) -> dict[str, float]:
    """Bytes of one idle channel: of both sides as the system sees it, and of the costlier side.

    With the interpreter on the C library's allocator (PYTHONMALLOC=malloc) the latter counts all
    that is allocated, by Python or in C, with what the allocator adds; else what Python allocates.
    """
    allocated: Callable[[], int] = in_use
    name = "side_bytes"
    Idle(100, used=used)
    gc.collect()
    before = resident()
    if os.environ.get("PYTHONMALLOC") != "malloc":
        channels = Idle(count, used=used)
        gc.collect()
        both = (resident() - before) / count
        del channels
        tracemalloc.start()
        allocated, name = lambda: tracemalloc.get_traced_memory()[0], "traced_bytes"
    sides = []
    channels = Idle(count, used=used)
    for forget in (channels.forget_server, channels.forget_client):
        gc.collect()
        whole = allocated()
        forget()
        gc.collect()
        sides.append((whole - allocated()) / count)
    result = {name: max(sides)}
    if name == "traced_bytes":
        result["resident_bytes"] = both
    return result


def resident() -> int:
    """Bytes of this process that are in memory now; 0 where the system does not tell."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


class Mallinfo(ctypes.Structure):
    """``struct mallinfo2`` of glibc."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd",
            "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
        )
    )  # fmt: skip


def in_use() -> int:
    """Bytes in use of the C library's allocator, its own headers and rounding included."""
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = Mallinfo
    told = mallinfo()
    return int(told.uordblks + told.hblkhd)


# -------------------------------------------------------------------- cascade


FANS: Final = MappingProxyType({"chain": 1, "binary": 2, "wide": 1000})


def cascade(count: int, shape: str) -> dict[str, float]:
    """A tree of ``count`` channels that is lost with the datagram that carried its root.

    Time begins when the root is nacked and ends when neither side has state of any of them and
    nothing is under way: both cores' work, with a FORGET_CHANNEL for each channel.
    """
    pair = Pair(wide(count))
    core, now = pair.client.core, pair.clock.now
    pair.server.on_readable = lambda half: None
    pair.client.lose_datagrams = True
    root = Attach(keep_sender=True, is_oneshot=False)
    core.send(pair.sender, b"root", now(), attachments=(root,), mode=Mode.UNRELIABLE)
    made, turns = 1, 0
    parents = deque([root.half])
    while made < count:
        half = parents[0] if shape == "wide" else parents.popleft()
        assert isinstance(half, SenderHalf)
        children = [
            Attach(keep_sender=True, is_oneshot=False)
            for _ in range(min(FANS[shape], count - made))
        ]
        core.send(half, b"children", now(), attachments=children, mode=Mode.UNORDERED)
        made += len(children)
        parents.extend(child.half for child in children)
        turns += 1
        if turns % 50 == 0:
            pair.step()
    pair.step()
    del parents, children, half
    for side in (pair.client.core, pair.server.core):
        expect(side.channels, count + 1, "channels have state")
    with Timer() as timer:
        pair.settle(lambda: core.channels + pair.server.core.channels == 2)
        pair.link.run()
    if root.half is None or not isinstance(root.half.error, LostInTransit):
        raise AssertionError("the root was not lost in transit")
    return {
        "channel_us": 1e6 * timer.elapsed / count,
        "channel_cpu_us": 1e6 * timer.cpu / count,
        "channel_core_us": 1e6 * (timer.cpu - timer.collector) / count,
    }


def wide(count: int) -> Config:
    """Room for ``count`` channels at once, in streams too, and no loss before it is wanted."""
    return replace(
        DEFAULT,
        limits=replace(DEFAULT.limits, channels=2 * count + 1000),
        flow=replace(
            DEFAULT.flow, streams=4 * count + 1024, receive_budget=1 << 40,
            channel_receive_bytes=1 << 40, connection_high_water=1 << 40,
        ),
        timing=replace(DEFAULT.timing, receipt_deadline=3600.0),
    )  # fmt: skip


# ----------------------------------------------------------------------- main


def expect(found: int, wanted: int, what: str) -> None:
    """Raises AssertionError: the numbers of a measurement that went wrong mean nothing."""
    if found != wanted:
        raise AssertionError(f"{found} {what}, not {wanted}")


CASES: Final[Mapping[str, Callable[[int], dict[str, float]]]] = MappingProxyType(
    {
        "codec-100": code_messages,
        "ordered": lambda size: send_messages(Mode.ORDERED, size),
        "large-64k": lambda size: send_large(64 << 10, size),
        "large-1m": lambda size: send_large(1 << 20, size),
        "unordered": lambda size: send_messages(Mode.UNORDERED, size),
        "unreliable": lambda size: send_messages(Mode.UNRELIABLE, size),
        "churn": churn,
        "idle": lambda size: idle(size, used=False),
        "idle-used": lambda size: idle(size, used=True),
        "cascade-chain": lambda size: cascade(size, "chain"),
        "cascade-binary": lambda size: cascade(size, "binary"),
        "cascade-wide": lambda size: cascade(size, "wide"),
    }
)


def main() -> None:
    told = json.loads(sys.argv[1])
    measure, size = CASES[told["case"]], told["size"]
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    print(json.dumps(measure(size)))


if __name__ == "__main__":
    main()
